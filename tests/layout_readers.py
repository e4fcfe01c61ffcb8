"""Oracle readers of the INT4 layouts: tensors of one linear to codes and scales, each written from its cited
specification and without a line of kizami's code. W = (code - zero) * scale."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def nibble(words: Array, place: Array) -> Array:
    return (words.astype(np.int64) >> (4 * place)) & 15


def read_pack_quantized(tensors: dict[str, Array], group: int) -> Array:
    """compressed-tensors: weight_packed[n, k // 8], nibble k % 8, less 8; BF16 weight_scale[n, k // g]."""
    n, k = np.indices(tensors["weight_shape"])
    scale = (tensors["weight_scale"].astype(np.uint32) << 16).view(np.float32)
    return (nibble(tensors["weight_packed"][n, k // 8], k % 8) - 8) * scale[n, k // group].astype(np.float64)


def read_gptq(tensors: dict[str, Array], group: int, *, zero_offset: int) -> Array:
    """AutoGPTQ: qweight[k // 8, n], nibble k % 8; qzeros[group, n // 8], nibble n % 8, one less than the zero point in
    v1; scales[group, n]; g_idx[k] is the group (GPTQModel nn_modules/qlinear/__init__.py, `dequantize_weight`)."""
    groups = tensors["g_idx"]
    assert np.bincount(groups).tolist() == [group] * len(tensors["scales"])
    n, k = np.indices((tensors["qweight"].shape[1], len(groups)))
    zero = nibble(tensors["qzeros"][groups[k], n // 8], n % 8) + zero_offset
    return (nibble(tensors["qweight"][k // 8, n], k % 8) - zero) * tensors["scales"][groups[k], n].astype(np.float64)


def read_gptq_v1(tensors: dict[str, Array], group: int) -> Array:
    return read_gptq(tensors, group, zero_offset=1)


def read_gptq_v2(tensors: dict[str, Array], group: int) -> Array:
    return read_gptq(tensors, group, zero_offset=0)


def read_awq(tensors: dict[str, Array], group: int) -> Array:
    """AutoAWQ "gemm": row n of qweight[k, n // 8] and of qzeros[group, n // 8] is nibble AWQ_REVERSE_ORDER[n % 8];
    scales[group, n] (awq/utils/packing_utils.py, `dequantize_gemm`)."""
    n, k = np.indices((tensors["qweight"].shape[1] * 8, len(tensors["qweight"])))
    place = np.array([0, 4, 1, 5, 2, 6, 3, 7])[n % 8]
    zero = nibble(tensors["qzeros"][k // group, n // 8], place)
    return (nibble(tensors["qweight"][k, n // 8], place) - zero) * tensors["scales"][k // group, n].astype(np.float64)


def read_w4afp8(tensors: dict[str, Array], group: int) -> Array:
    """SGLang: weight[n, k // 2], even k in the low half of the byte, two's complement; weight_scale_inv[n, k // 128] in
    F32 (compressed_tensors_w4a8_fp8_moe.py:40-56, w4afp8.py:146-196)."""
    assert group == 128
    n, k = np.indices((len(tensors["weight"]), tensors["weight"].shape[1] * 2))
    half = nibble(tensors["weight"][n, k // 2], k % 2)
    return np.where(half < 8, half, half - 16) * tensors["weight_scale_inv"][n, k // 128].astype(np.float64)


READERS = {
    "pack-quantized": read_pack_quantized, "gptq": read_gptq_v1, "gptq_v2": read_gptq_v2, "awq": read_awq,
    "w4afp8": read_w4afp8,
}  # fmt: skip


def random_linear(rows: int, cols: int, group: int, seed: int) -> tuple[Array, Array, Array]:
    """packed int32 [N, K/8] and scale uint16 [N, K/g] in the form of kizami.quantize.arrange, and the weights that they
    stand for in float64. Scales of both signs, each of which F16 holds, the smallest and largest of them included."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-8, 8, (rows, cols))
    codes[0, :16] = np.arange(-8, 8)[: len(codes[0, :16])]
    words = np.zeros((rows, cols // 8), np.int64)
    for i in range(8):
        words += (codes[:, i::8] + 8) << (4 * i)
    shape = rows, cols // group
    scale = ((rng.random(shape) * 2e-2 + 1e-5) * rng.choice([-1, 1], shape)).astype(np.float32)
    scale.flat[:4] = np.float32([2.0**-17, -(2.0**-17) * 1.9921875, 65280, -(2.0**-7)])[: scale.size]
    bits = (scale.view(np.uint32) >> 16).astype(np.uint16)
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    return words.astype(np.uint32).view(np.int32), bits, codes * np.repeat(exact, group, axis=1).astype(np.float64)

"""The bytes of an INT4 linear in each output layout, from the form the kernels make it in and back, bit for bit.

Canonical form of a linear [N, K]: packed int32 [N, K/8], nibble i of word j is column 8j+i, stored as q + 8; scale
uint16 [N, K/g], the bits of a BF16 of either sign. formats/int4_layout.py has names and shapes. What the bits mean:

gptq     a word of qweight holds 8 columns of one row, the lowest nibble first: ours, transposed (vLLM 0.33
         quant_utils.py:819-840 `pack_rows`). W = (nibble - zero) * scale with zero = stored + 1 in checkpoint_format
         "gptq" and zero = stored in "gptq_v2" (GPTQModel 7.7 utils/model.py:756-828); zero is 8 here.
awq      a word of qweight holds 8 rows of one column; nibble p is row 8m + (0, 2, 4, 6, 1, 3, 5, 7)[p] (vLLM
         quant_utils.py:909-928 `awq_pack`; AutoAWQ 0.2.9 awq/utils/packing_utils.py:4-5). qzeros likewise, zero as
         stored; eight equal nibbles look the same in any order.
w4afp8   two's complement, even column in the low nibble: ours with bit 3 of each nibble flipped, read as bytes. SGLang
         0.5.23 makes the same of pack-quantized (compressed_tensors_w4a8_fp8_moe.py:37-73) and undoes it by
         xor 0x88 (humming.py:300).

Scales are multiplied as signed floats by every reader: Marlin as F16 or BF16, GPTQModel and AutoAWQ in torch, AWQ's
Triton kernel (vLLM awq_triton.py:101), and the w4afp8 kernel by fma on F32 sums (sgl-kernel
csrc/cutlass_extensions/gemm/collective/sm90_mma_array_tma_gmma_rs_warpspecialized_mixed_input_.hpp, "Apply the
group-wise scaling").
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.formats.errors import KizamiError
from kizami.formats.int4_layout import VALUES_PER_WORD, Format, layout_names, layout_specs

Array = NDArray[Any]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_ZEROS = {"gptq": 0x77777777, "gptq_v2": 0x88888888 - 2**32, "awq": 0x88888888 - 2**32}  # as int32
_DTYPES = {"I32": np.dtype(np.int32), "I8": np.dtype(np.int8), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
           "BF16": np.dtype(np.uint16)}  # fmt: skip
_BLOCK = 64  # rows at a time: what is read and written of a transposed tensor stays in the cache


def arrange(
    format: Format,
    packed: NDArray[np.int32],
    scale: NDArray[np.uint16],
    group_size: int,
    shape: tuple[int, int],
    module: str,
) -> tuple[Array, ...]:
    """The tensors of `layout_specs`, in its order. KizamiError `inexact_scale` for a scale the layout cannot hold."""
    rows, cols = shape
    assert packed.shape == (rows, cols // VALUES_PER_WORD), packed.shape
    assert scale.shape == (rows, cols // group_size), scale.shape
    assert [packed.dtype, scale.dtype] == [np.int32, np.uint16], (packed.dtype, scale.dtype)
    if format == "pack-quantized":
        return packed, np.array(shape, np.int32), scale
    if format == "w4afp8":
        return _from_bf16(scale), (_bytes(packed) ^ np.uint8(0x88)).view(np.int8)
    scales = _to_f16(_transposed(scale), layout_names(format, module)[-1])
    zeros = np.full((cols // group_size, rows // VALUES_PER_WORD), _ZEROS[format], np.int32)
    if format == "awq":
        return _awq_words(packed), zeros, scales
    return _transposed(packed), zeros, _group_index(cols, group_size), scales


def canonical(
    format: Format, arrays: tuple[Array, ...], group_size: int, shape: tuple[int, int], module: str
) -> tuple[NDArray[np.int32], NDArray[np.uint16]]:
    """packed and scale of the tensors of `layout_specs`: `arrange` undone. The tensors are anyone's: KizamiError
    `bad_layout` for other shapes, zero points or group indices than ours, `inexact_scale` for scales BF16 cannot hold.
    """
    specs = layout_specs(format, module, *shape, group_size)
    for spec, array in zip(specs, arrays, strict=True):
        if array.shape != spec.shape or array.dtype != _DTYPES[spec.dtype]:
            found, expected = f"{array.dtype} {list(array.shape)}", f"{spec.dtype} {list(spec.shape)}"
            raise _bad_layout(spec.name, f"is {found}, expected {expected}")
    names = [spec.name for spec in specs]
    if format == "pack-quantized":
        packed, stored, scale = arrays
        if stored.tolist() != list(shape):
            raise _bad_layout(names[1], f"is {stored.tolist()}, expected {list(shape)}")
        return packed, scale
    if format == "w4afp8":
        return (_bytes(arrays[1]) ^ np.uint8(0x88)).view(np.int32), _to_bf16(arrays[0], names[0])
    zero = _ZEROS[format]
    if (arrays[1] != zero).any():
        other = int(arrays[1][arrays[1] != zero][0]) % 2**32
        raise _bad_layout(names[1], f"has 0x{other:08X}; zero points of symmetric {format} are 0x{zero % 2**32:08X}")
    if format != "awq" and not np.array_equal(arrays[2], _group_index(shape[1], group_size)):
        raise _bad_layout(names[2], f"is not column // {group_size}: columns in another order (desc_act)")
    packed = _awq_rows(arrays[0]) if format == "awq" else _transposed(arrays[0])
    return packed, _transposed(_to_bf16(arrays[-1].astype(np.float32), names[-1]))


def _bad_layout(name: str, message: str) -> KizamiError:
    return KizamiError(message, code="bad_layout", tensor=name)


def _group_index(cols: int, group_size: int) -> NDArray[np.int32]:
    return np.arange(cols, dtype=np.int32) // np.int32(group_size)


def _bytes(words: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(words).view(np.uint8)


def _transposed(array: Array) -> Array:
    out = np.empty(array.shape[::-1], array.dtype)
    for i in range(0, array.shape[0], _BLOCK):
        out[:, i : i + _BLOCK] = array[i : i + _BLOCK].T
    return out


# ---------------------------------------------------------------------------------------------------- scales


def _from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_f16(bits: NDArray[np.uint16], name: str) -> NDArray[np.float16]:
    values = _from_bf16(bits)
    with np.errstate(over="ignore", invalid="ignore"):
        halves = values.astype(np.float16)
    lost = (halves.astype(np.float32).view(np.uint32) != values.view(np.uint32)) | ~np.isfinite(halves)
    if lost.any():
        raise _inexact(name, values[lost], "F16", "use --format pack-quantized, which stores BF16")
    return halves


def _to_bf16(values: NDArray[np.float32], name: str) -> NDArray[np.uint16]:
    lost = ((values.view(np.uint32) & np.uint32(0xFFFF)) != 0) | ~np.isfinite(values)
    if lost.any():
        raise _inexact(name, values[lost], "BF16", None)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _inexact(name: str, lost: NDArray[np.float32], dtype: str, hint: str | None) -> KizamiError:
    message = f"{len(lost)} of its scales cannot be held exactly by {dtype}, the first is {lost[0]:.9g}"
    return KizamiError(message, code="inexact_scale", tensor=name, hint=hint)


# ---------------------------------------------------------------------------------------------------- AWQ


def _awq_words(packed: NDArray[np.int32]) -> NDArray[np.int32]:
    """int32 [N, K/8] to AWQ's [K, N/8]: the nibbles of 8 rows by 8 columns, transposed."""
    words, blocks = packed.shape[1], packed.shape[0] // 8
    rows = packed.view(np.uint32).reshape(blocks, 8, words)
    out = np.empty((words, 8, blocks), np.uint32)
    for i in range(0, blocks, _BLOCK // 8):
        tile = np.ascontiguousarray(rows[i : i + _BLOCK // 8, _AWQ_ORDER].transpose(1, 0, 2))
        _transpose_nibbles(tile)
        out[:, :, i : i + _BLOCK // 8] = tile.transpose(2, 0, 1)
    return out.reshape(words * 8, blocks).view(np.int32)


def _awq_rows(qweight: NDArray[np.int32]) -> NDArray[np.int32]:
    words, blocks = qweight.shape[0] // 8, qweight.shape[1]
    columns = qweight.view(np.uint32).reshape(words, 8, blocks)
    out = np.empty((blocks, 8, words), np.uint32)
    for i in range(0, blocks, _BLOCK // 8):
        tile = np.ascontiguousarray(columns[:, :, i : i + _BLOCK // 8].transpose(1, 2, 0))
        _transpose_nibbles(tile)
        out[i : i + _BLOCK // 8, _AWQ_ORDER] = tile.transpose(1, 0, 2)
    return out.reshape(blocks * 8, words).view(np.int32)


def _transpose_nibbles(words: NDArray[np.uint32]) -> None:
    """In place, for each place of [8, ...]: nibble i of word p becomes nibble p of word i. Halves are swapped, then
    quarters, then nibbles."""
    for half, shift, mask in ((4, 16, 0x0000FFFF), (2, 8, 0x00FF00FF), (1, 4, 0x0F0F0F0F)):
        pairs = words.reshape(4 // half, 2, half, *words.shape[1:])
        low, high = pairs[:, 0], pairs[:, 1]
        swap = ((low >> np.uint32(shift)) ^ high) & np.uint32(mask)
        high ^= swap
        swap <<= np.uint32(shift)
        low ^= swap

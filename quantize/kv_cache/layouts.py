"""One token's KV in one layer as bytes: BF16, FP8 with static scales, FP8 with a scale per 128 values, index keys.

A codec turns values [..., width] (BF16, F16 or F32) into rows, uint8 [..., row_bytes], and back. Codecs are frozen, and
work on whatever device their tensors are. Names and sizes are those of `Layout` in kizami.formats.serving.kv_layout,
which counts bytes for capacity; tests hold the two equal.

What every codec does with the values that engines leave open (e4m3.py says why):
- a value beyond +-448 times its scale, infinity included, becomes the largest value; NaN stays NaN, in its place alone;
- a tile of zeros gets the scale 2^-126 and codes 0, so it reads back as zeros; see `TiledRows`.

    latent = torch.randn(5, 576, dtype=torch.bfloat16)
    codec = mla_rows(Layout.DS_MLA)
    rows = codec.encode(latent)         # uint8 [5, 656]
    back = codec.decode(rows)           # float32 [5, 576]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch

from kizami.formats.serving.kv_layout import Layout
from kizami.quantize.kv_cache import e4m3

LATENT, ROPE = 512, 64  # kv_lora_rank and qk_rope_head_dim of DeepSeek-V3, Kimi-K2 and GLM-5 alike
TILE = 128  # values with one scale, in 656-byte rows and in index keys
SMALLEST_SCALE = 2.0**-126  # FLT_MIN: the smallest number whose inverse is finite, and vLLM's floor
INDEX_FLOOR = 1e-4  # of max|x|, not of the scale: SGLang kernels/ops/quantization/act_quant_triton.py

# Byte places in a row of `fp8_ds_mla`: SGLang 0.5.23 kernels/ops/quantization/dsa_quant_k_cache.py; vLLM csrc/
# cache_kernels.cu `concat_and_cache_ds_mla_kernel`; readers: v1/attention/backends/mla/flashmla_sparse.py, FlashMLA.
DS_SCALES = LATENT  # 512: four little-endian F32
DS_ROPE = DS_SCALES + LATENT // TILE * 4  # 528: 64 BF16
DS_BYTES = DS_ROPE + 2 * ROPE  # 656
INDEX_BYTES = TILE + 4  # 132

Writer = Literal["sglang", "vllm", "power_of_two"]


class Codec(Protocol):
    """What a cache needs to know of a row. `segments` are the bytes of its parts: a page of T tokens is T first parts,
    then T second parts, and so on. All rows but index keys are one part."""

    @property
    def width(self) -> int: ...
    @property
    def segments(self) -> tuple[int, ...]: ...
    @property
    def row_bytes(self) -> int: ...
    def encode(self, values: torch.Tensor) -> torch.Tensor: ...
    def decode(self, rows: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Bf16Rows:
    """2 bytes a value, little-endian. F32 values are rounded to nearest, ties to even."""

    width: int = LATENT + ROPE

    @property
    def row_bytes(self) -> int:
        return 2 * self.width

    @property
    def segments(self) -> tuple[int, ...]:
        return (self.row_bytes,)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """uint8 [..., 2 * width] of values [..., width]."""
        return _checked(values, self.width).to(torch.bfloat16).contiguous().view(torch.uint8)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [..., width] of uint8 [..., 2 * width], exact."""
        return self.as_bf16(rows).float()

    def as_bf16(self, rows: torch.Tensor) -> torch.Tensor:
        """The same as bfloat16, bit for bit: by way of float32 a signalling NaN would become a quiet one."""
        return _checked_rows(rows, self.row_bytes).view(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class StaticRows:
    """Every value one E4M3 code; code = e4m3(value / scale), value = code * scale.

    scales: positive finite numbers, each for width / len(scales) neighbouring values. One for a latent (engines use 1.0
    there: serving-engines 3.3), per tensor or per head for K and V: `mla_rows`, `gqa_rows`. Static: what is beyond 448
    times the scale is clipped.

    The division is in float32. SGLang divides K and V in BF16 before it casts (mem_cache/memory_pool.py): the same
    bytes where the scale is a power of two, which kizami's own always are, and a second rounding elsewhere.
    """

    width: int = LATENT + ROPE
    scales: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not self.scales or self.width % len(self.scales):
            raise ValueError(f"{len(self.scales)} scales for {self.width} values, expected a divisor")
        wrong = [s for s in self.scales if not SMALLEST_SCALE <= s <= 2.0**118]  # times 448 is finite
        if wrong:
            raise ValueError(f"scale {wrong[0]}, expected a number from 2^-126 to 2^118")

    @property
    def row_bytes(self) -> int:
        return self.width

    @property
    def segments(self) -> tuple[int, ...]:
        return (self.width,)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """uint8 [..., width] of values [..., width]."""
        x = _checked(values, self.width).float()
        if self.scales != (1.0,):
            x = (torch.unflatten(x, -1, (len(self.scales), -1)) / self._scale(x.device)).flatten(-2)
        return e4m3.encode(x)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [..., width] of uint8 [..., width]."""
        x = e4m3.decode(_checked_rows(rows, self.row_bytes))
        if self.scales == (1.0,):
            return x
        return (torch.unflatten(x, -1, (len(self.scales), -1)) * self._scale(x.device)).flatten(-2)

    def _scale(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.scales, dtype=torch.float32, device=device)[:, None]


@dataclass(frozen=True, slots=True)
class TiledRows:
    """`fp8_ds_mla`, 656 bytes: 512 E4M3 codes, 4 F32 scales at byte 512, 64 BF16 rope values at byte 528.

    All readers compute value = code * scale, in F32. The writers differ, so there is a choice:

    - "sglang": scale = max|x| / 448, code = e4m3(x * (1 / scale)), each operation rounded to F32
      (kernels/ops/quantization/dsa_quant_k_cache.py).
    - "vllm": the same scale, code = e4m3(x / scale) (csrc/cache_kernels.cu `concat_and_cache_ds_mla_kernel`).
    - "power_of_two": scale = 2^ceil(log2(max(max|x| / 448, 1e-4))), as FlashMLA's tests/quant.py writes it, because its
      Blackwell kernel is reported to keep only the exponent of a scale; then * and / are the same.

    A tile of zeros has scale 0 by SGLang's formula, and 0 * inf = NaN codes. vLLM's floor of 2^-126 (FLT_MIN) for the
    scale is taken for both: codes 0, value 0. Where max|x| < 448 * 2^-126 it also keeps 1 / scale finite.

    Infinity and NaN take no part in max|x|: in an engine one of them makes its whole tile NaN or 0.
    """

    writer: Writer = "sglang"

    def __post_init__(self) -> None:
        if self.writer not in get_args(Writer):
            raise ValueError(f"writer {self.writer!r}, expected one of {get_args(Writer)}")

    @property
    def width(self) -> int:
        return LATENT + ROPE

    @property
    def row_bytes(self) -> int:
        return DS_BYTES

    @property
    def segments(self) -> tuple[int, ...]:
        return (DS_BYTES,)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """uint8 [..., 656] of values [..., 576]: latent, then rope."""
        values = _checked(values, self.width)
        latent = torch.unflatten(values[..., :LATENT].float(), -1, (-1, TILE))
        scale = e4m3.divide(_largest(latent), e4m3.LARGEST)
        if self.writer == "power_of_two":
            scale = e4m3.power_of_two_above(scale.clamp_min(1e-4))
        scale = scale.clamp_min(SMALLEST_SCALE)
        scaled = latent * scale.reciprocal() if self.writer == "sglang" else latent / scale
        rope = values[..., LATENT:].to(torch.bfloat16).contiguous()
        parts = (e4m3.encode(scaled).flatten(-2), scale.squeeze(-1).view(torch.uint8), rope.view(torch.uint8))
        return torch.cat(parts, -1)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [..., 576] of uint8 [..., 656]."""
        rows = _checked_rows(rows, self.row_bytes)
        scale = rows[..., DS_SCALES:DS_ROPE].contiguous().view(torch.float32)
        latent = torch.unflatten(e4m3.decode(rows[..., :LATENT].contiguous()), -1, (-1, TILE)) * scale[..., None]
        rope = rows[..., DS_ROPE:].contiguous().view(torch.bfloat16).float()
        return torch.cat((latent.flatten(-2), rope), -1)


@dataclass(frozen=True, slots=True)
class IndexRows:
    """The key of a sparse-attention indexer: 128 E4M3 codes and an F32 scale, 132 bytes.

    scale = max(max|x|, 1e-4) / 448, code = e4m3(x / scale): zeros need no case of their own. `power_of_two` rounds the
    scale up to one, which is DeepSeek-V3.2's `scale_fmt` "ue8m0" (SGLang kernels/ops/quantization/act_quant_triton.py).

    In a page of T tokens all T * 128 codes come first, then T scales: at byte 8192 of the 8448 of a 64-token page
    (SGLang kernels/ops/kvcache/dsa_index_k_cache.py; sparse attention on CUDA has no other page size).
    """

    power_of_two: bool = False

    @property
    def width(self) -> int:
        return TILE

    @property
    def row_bytes(self) -> int:
        return INDEX_BYTES

    @property
    def segments(self) -> tuple[int, ...]:
        return (TILE, 4)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """uint8 [..., 132] of values [..., 128]."""
        x = _checked(values, self.width).float()
        scale = e4m3.divide(_largest(x).clamp_min(INDEX_FLOOR), e4m3.LARGEST)
        if self.power_of_two:
            scale = e4m3.power_of_two_above(scale)
        return torch.cat((e4m3.encode(x / scale), scale.view(torch.uint8)), -1)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [..., 128] of uint8 [..., 132]."""
        rows = _checked_rows(rows, self.row_bytes)
        return e4m3.decode(rows[..., :TILE].contiguous()) * rows[..., TILE:].contiguous().view(torch.float32)


def mla_rows(layout: Layout, *, scale: float = 1.0, writer: Writer = "sglang") -> Codec:
    """Rows of an MLA latent: values [..., 576], `kv_a_layernorm`'s output (512), then `k_pe` after RoPE (64).

    1152 bytes as `bf16`, 576 as `fp8`, 656 as `fp8_ds_mla`. `scale` is for `fp8` only, and engines agree on 1.0 only;
    `writer` is for `fp8_ds_mla` only.
    """
    layout = Layout(layout)  # also by its name
    if layout is not Layout.RAW and scale != 1.0:
        raise ValueError(f"scale {scale} for {layout.value}, expected none: only fp8 rows have a static one")
    if layout is Layout.BF16:
        return Bf16Rows()
    return StaticRows(scales=(scale,)) if layout is Layout.RAW else TiledRows(writer)


def gqa_rows(
    layout: Layout,
    kv_heads: int,
    head_dim: int,
    *,
    k_scale: float | Sequence[float] = 1.0,
    v_scale: float | Sequence[float] = 1.0,
) -> Codec:
    """Rows of K after RoPE and V: values [..., 2 * kv_heads * head_dim], all heads of K, then all heads of V.

    A scale is one number, or one per KV head. An engine keeps K and V in two buffers; the bytes of each are those here.
    """
    layout = Layout(layout)
    scales = _per_head(k_scale, kv_heads, "k_scale") + _per_head(v_scale, kv_heads, "v_scale")
    if layout is Layout.RAW:
        return StaticRows(2 * kv_heads * head_dim, scales if set(scales) != {1.0} else (1.0,))
    if layout is not Layout.BF16:
        raise ValueError(f"{layout.value} for K and V, expected bf16 or fp8: it is a layout of MLA latents")
    if set(scales) != {1.0}:
        raise ValueError("scales for bf16, expected none: only fp8 rows have static ones")
    return Bf16Rows(2 * kv_heads * head_dim)


def _per_head(scale: float | Sequence[float], heads: int, name: str) -> tuple[float, ...]:
    values = torch.as_tensor(scale, dtype=torch.float64)  # numbers of NumPy and torch, too
    if values.ndim == 0:
        return (float(values),) * heads
    if values.shape != (heads,):
        raise ValueError(f"{name}: {len(values)} scales, expected one, or {heads}, one per KV head")
    return tuple(values.tolist())


def _largest(values: torch.Tensor) -> torch.Tensor:
    """float32 [..., 1]: max|x| of the finite ones along the last axis, 0 if there are none."""
    size = values.abs()
    return size.masked_fill_(~size.isfinite(), 0).amax(-1, keepdim=True)


def _checked(values: torch.Tensor, width: int) -> torch.Tensor:
    if values.ndim == 0 or values.shape[-1] != width:
        raise ValueError(f"values of shape {list(values.shape)}, expected [..., {width}]")
    if values.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"values of {values.dtype}, expected bfloat16, float16 or float32")
    return values if values.stride(-1) == 1 else packed(values)


def _checked_rows(rows: torch.Tensor, row_bytes: int) -> torch.Tensor:
    if rows.dtype != torch.uint8 or rows.ndim == 0 or rows.shape[-1] != row_bytes:
        raise ValueError(f"rows {rows.dtype} {list(rows.shape)}, expected uint8 [..., {row_bytes}]")
    aligned = rows.storage_offset() % 4 == 0 and rows.stride(-1) == 1 and not any(n % 4 for n in rows.stride()[:-1])
    return rows.contiguous() if aligned else packed(rows)  # views as F32 need it


def packed(values: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of its shape. One row of a wider tensor, and none, count as contiguous whatever their
    strides are: `contiguous` leaves those, and a view as another dtype fails."""
    return values.clone(memory_format=torch.contiguous_format)

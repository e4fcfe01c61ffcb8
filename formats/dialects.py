"""Source dialects: which tensors are FP8 or INT4 weights, where their scales are and what each scale value covers.

The tensors decide: a weight is FP8 if its dtype is F8_E4M3 and a scale lies beside it under a known name. Lists such as
`modules_to_not_convert` are not consulted (GLM-5's names a module that does not exist and omits one that is BF16).
The block size comes from the config and is checked against the grid; it is never inferred as rows // scale_rows, which
is wrong wherever the last block is partial (576-row kv_a_proj_with_mqa: 5 scale rows).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kizami.formats.errors import KizamiError, printable
from kizami.formats.foreign import (
    SCALE_SUFFIXES,
    bad_config,
    group_weights,
    quantization_configs,
    refuse_other_formats,
    refuse_transforms,
    shape_text,
    tensor_error,
)
from kizami.formats.packed_source import PackedWeight, find_packed_weights
from kizami.formats.tensors import TensorInfo

ScaleFormat = Literal["f32", "bf16", "f16", "e8m0"]

_SCALE_FORMATS: dict[str, ScaleFormat] = {"F32": "f32", "BF16": "bf16", "F16": "f16", "F8_E8M0": "e8m0"}


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """An FP8 weight [N, K] and its scale: W[r, c] = e4m3(byte) * scale[r // block[0], c // block[1]].

    Per tensor: block = (N, K). Per output channel: block = (1, K). `scale` keeps the shape it has on disk; `grid` is
    the two-dimensional form.
    """

    weight: TensorInfo
    scale: TensorInfo
    block: tuple[int, int]
    scale_format: ScaleFormat

    @property
    def grid(self) -> tuple[int, int]:
        """Scale rows and columns, rounded up: trailing blocks may be partial."""
        return _grid(self.weight.shape, self.block)


@dataclass(frozen=True, slots=True)
class Dialect:
    """All FP8 and INT4 weights of a checkpoint.

    `weights` (FP8) and `packed` (INT4) by module name (`X` of `X.weight`, of `X.weight_packed`), `scales` maps each
    tensor that only serves another (scale, shape) to its module, `stale` maps tensors that lose their meaning in a
    conversion to the reason, `label` describes the dialect in a few words.
    """

    weights: Mapping[str, ScaledWeight]
    packed: Mapping[str, PackedWeight]
    scales: Mapping[str, str]
    stale: Mapping[str, str]
    label: str

    def encoding_of(self, info: TensorInfo) -> tuple[str, ScaledWeight | PackedWeight | None]:
        """(module, how it is encoded) of a tensor that is none of `scales`; its own name for what is no weight."""
        if info.name.endswith(".weight"):
            module = info.name.removesuffix(".weight")
            return module, self.weights.get(module)
        module = info.name.removesuffix(".weight_packed")
        packed = self.packed.get(module) if module != info.name else None
        return info.name if packed is None else module, packed


@dataclass(frozen=True, slots=True)
class _Declared:
    """What the config says about FP8 scales; without a block, the scale's own shape tells."""

    block: tuple[int, int] | None
    channel: bool
    scale_fmt: str | None


def find_encoded_weights(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Dialect:
    """Pair every FP8 and INT4 weight with its scale, from config and headers alone.

    A checkpoint of plain weights gives an empty Dialect. Raises KizamiError: `missing_scale`, `ambiguous_scale`,
    `orphan_scale`, `scale_grid`, `missing_block_size`, `unsupported_dtype`, `unsupported_format`, `unsupported_shape`,
    `empty_tensor`, `bad_config`, and for INT4 `missing_packed`, `ambiguous_weight`.
    """
    declared = _declared(config)
    for info in tensors.values():
        refuse_other_formats(info, tensors)
    weights: dict[str, ScaledWeight] = {}
    packed = find_packed_weights(config, tensors)
    scales = {info.name: module for module, found in packed.items() for info in found.tensors[1:]}
    for info in tensors.values():
        if info.dtype == "F8_E4M3" and not _is_scale_of_fp8(info.name, tensors):
            module = _module_of_fp8(info)
            weights[module] = scaled = _pair(module, info, tensors, declared)
            scales[scaled.scale.name] = module
    _refuse_orphans(tensors, scales)
    stale = {
        name: "static activation scale of an FP8 linear; the output has no activation scales"
        for module in weights
        if (name := f"{module}.input_scale") in tensors
    }
    return Dialect(weights, packed, scales, stale, _label(weights, packed, tensors))


def decode_scales(raw: npt.NDArray[np.uint8], scaled: ScaledWeight) -> npt.NDArray[np.float32]:
    """The scale tensor's bytes (1-D) as float32 of shape `scaled.grid`. Widening only: every value is exact.

    An E8M0 byte b is 2^(b - 127); 255 is NaN (OCP Microscaling 1.0, section 5.4.1). Values are not checked here.
    """
    rows, cols = scaled.grid
    assert raw.shape == (scaled.scale.nbytes,), (scaled.scale, raw.shape)
    match scaled.scale_format:
        case "f32":
            values = raw.view("<f4").astype(np.float32)
        case "bf16":
            values = (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        case "f16":
            values = raw.view("<f2").astype(np.float32)
        case "e8m0":
            bits = raw.astype(np.uint32) << np.uint32(23)
            bits[raw == 0] = 0x0040_0000  # 2^-127 is subnormal in float32
            bits[raw == 255] = 0x7FC0_0000
            values = bits.view(np.float32)
    return values.reshape(rows, cols)


# ---------------------------------------------------------------------------------------------------- config


# Safetensors' F8_E4M3 is read as e4m3fn; a config may say that other codes were put into it.
_OTHER_FP8 = ("fnuz", "e5m2")


def declared_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block size of FP8 scales that the config gives."""
    return _declared(config).block


def _declared(config: Mapping[str, Any]) -> _Declared:
    blocks: dict[tuple[int, int], str] = {}
    channel = False
    scale_fmt: str | None = None
    for path, quant in quantization_configs(config):
        refuse_transforms(path, quant)
        if (value := quant.get("weight_block_size")) is not None:
            blocks.setdefault(_block(f"{path}.weight_block_size", value), f"{path}.weight_block_size")
        if scale_fmt is None and (scale := quant.get("scale_fmt")) is not None:
            scale_fmt = scale if isinstance(scale, str) else None
        if isinstance(fmt := quant.get("fmt"), str) and any(other in fmt.lower() for other in _OTHER_FP8):
            raise KizamiError(
                f"{path}.fmt is {printable(fmt, 40)}, expected e4m3: the codes would be read as other numbers",
                code="unsupported_dtype",
                file="config.json",
            )
        for where, weights in group_weights(path, quant):
            match weights.get("strategy"):
                case "block":
                    blocks.setdefault(_block(f"{where}.block_structure", weights.get("block_structure")), where)
                case "channel":
                    channel = True
    if len(blocks) > 1:
        listed = " and ".join(f"{list(block)} in {where}" for block, where in blocks.items())
        raise KizamiError(f"two block sizes: {listed}, expected one", code="bad_config", file="config.json")
    return _Declared(next(iter(blocks), None), channel, scale_fmt)


def _block(where: str, value: object) -> tuple[int, int]:
    if isinstance(value, str):  # compressed-tensors before 0.10 wrote "128x128"
        sides: Sequence[object] = [int(s) if s.isascii() and s.isdigit() else s for s in value[:40].split("x")]
    else:
        sides = value if isinstance(value, list) else []
    match sides:
        case [int(b0), int(b1)] if type(b0) is int and type(b1) is int and b0 > 0 and b1 > 0:
            return b0, b1
    raise bad_config(where, value, "two positive whole numbers")


# ---------------------------------------------------------------------------------------------------- pairs


def _module_of_fp8(info: TensorInfo) -> str:
    """`X` of an F8_E4M3 tensor `X.weight` [N, K]; everything else in FP8 is refused."""
    if 0 in info.shape:
        raise tensor_error(
            info, f"F8_E4M3 tensor has shape {list(info.shape)}, expected no empty dimension", "empty_tensor"
        )
    module, _, leaf = info.name.rpartition(".")
    if len(info.shape) == 3:
        raise tensor_error(
            info,
            f"F8_E4M3 tensor has shape {list(info.shape)}: experts fused into one tensor, expected one 2-D weight per "
            "expert",
            "unsupported_shape",
            hint="save the checkpoint with one tensor per expert and projection, the published layout",
        )
    if leaf != "weight" or not module:
        raise tensor_error(
            info, "F8_E4M3 tensor is not named `<module>.weight`: what scales it is unknown", "missing_scale"
        )
    if len(info.shape) != 2:
        raise tensor_error(
            info, f"F8_E4M3 weight has shape {list(info.shape)}, expected two dimensions", "unsupported_shape"
        )
    return module


def _is_scale_of_fp8(name: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """True for a scale that is itself F8_E4M3: its weight's turn names the wrong scale dtype, which says more."""
    module, _, leaf = name.rpartition(".")
    owner = tensors.get(f"{module}.weight")
    return leaf in SCALE_SUFFIXES and owner is not None and owner.dtype == "F8_E4M3"


def _pair(module: str, weight: TensorInfo, tensors: Mapping[str, TensorInfo], declared: _Declared) -> ScaledWeight:
    names = [f"{module}.{suffix}" for suffix in SCALE_SUFFIXES]
    found = [tensors[name] for name in names if name in tensors]
    if not found:
        raise tensor_error(
            weight,
            f"F8_E4M3 weight has no scale tensor; looked for {', '.join(names)}",
            "missing_scale",
            hint="a shard or an index entry may be missing",
        )
    if len(found) > 1:
        listed = " and ".join(f"{f.name} (in {f.file})" for f in found)
        raise tensor_error(weight, f"ambiguous scale: both {listed} exist, expected one", "ambiguous_scale")
    scale = found[0]
    scale_format = _scale_format(scale, declared)
    return ScaledWeight(weight, scale, _block_of(weight, scale, declared), scale_format)


def _scale_format(scale: TensorInfo, declared: _Declared) -> ScaleFormat:
    if scale.dtype == "U8" and declared.scale_fmt == "ue8m0":
        return "e8m0"
    if scale.dtype in _SCALE_FORMATS:
        return _SCALE_FORMATS[scale.dtype]
    raise tensor_error(
        scale,
        f"scale dtype {scale.dtype} is not supported, expected one of {', '.join(_SCALE_FORMATS)}"
        + (' (U8 only with "scale_fmt": "ue8m0" in the config)' if scale.dtype == "U8" else ""),
        "unsupported_dtype",
    )


def _block_of(weight: TensorInfo, scale: TensorInfo, declared: _Declared) -> tuple[int, int]:
    rows, cols = weight.shape
    shape = scale.shape
    single = shape in {(), (1,), (1, 1)}
    if declared.block is not None:
        expected = _grid(weight.shape, declared.block)
        if shape == expected or (single and expected == (1, 1)):
            return declared.block
        if declared.channel and shape == (rows, 1):
            return 1, cols
        raise tensor_error(
            scale,
            f"scale grid {shape_text(shape)}, expected {shape_text(expected)} "
            f"({weight.name} {shape_text(weight.shape)} in blocks of {shape_text(declared.block)})",
            "scale_grid",
        )
    if single:
        return rows, cols
    if shape in {(rows,), (rows, 1)}:
        return 1, cols
    if len(shape) == 2 and 1 < shape[0] <= rows and shape[1] <= cols and not declared.channel:
        raise tensor_error(
            scale,
            f"scale grid {shape_text(shape)} for {weight.name} {shape_text(weight.shape)}, "
            "but the config gives no block size",
            "missing_block_size",
            hint="quantization_config.weight_block_size says it, for example [128, 128]",
        )
    raise tensor_error(
        scale,
        f"scale grid {shape_text(shape)}, expected {shape_text((rows, 1))} (one per output channel) or one value "
        f"({weight.name} {shape_text(weight.shape)})",
        "scale_grid",
    )


def _refuse_orphans(tensors: Mapping[str, TensorInfo], scales: Mapping[str, str]) -> None:
    """A scale that scales nothing means a lost weight or a half-converted checkpoint.

    `.scale` alone is also an ordinary parameter name (layer scale), so it counts only where this checkpoint's FP8
    weights use it.
    """
    used = {name.rpartition(".")[2] for name in scales}
    for name, info in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf not in SCALE_SUFFIXES or name in scales or (leaf == "scale" and leaf not in used):
            continue
        owner = tensors.get(f"{module}.weight")
        found = f"there is no {module}.weight" if owner is None else f"{owner.name} is {owner.dtype}, not F8_E4M3"
        raise tensor_error(
            info,
            f"scale without an FP8 weight: {found}",
            "orphan_scale",
            hint="the checkpoint is incomplete or half converted; take it from its publisher again",
        )


def _label(
    weights: Mapping[str, ScaledWeight], packed: Mapping[str, PackedWeight], tensors: Mapping[str, TensorInfo]
) -> str:
    int4 = [f"int4 pack-quantized, group {size}" for size in sorted({found.group_size for found in packed.values()})]
    if int4 and not weights:
        return " + ".join(int4)
    if not weights:
        dtypes = Counter(t.dtype for t in tensors.values() if t.name.endswith(".weight") and len(t.shape) == 2)
        return f"no FP8 weights ({', '.join(d for d, _ in dtypes.most_common(3)) or 'no 2-D weights'})"
    kinds = Counter(_kind(s) for s in weights.values())
    return " + ".join(["fp8 " + " + ".join(kind for kind, _ in kinds.most_common(4)), *int4])


def _kind(scaled: ScaledWeight) -> str:
    rows, cols = scaled.weight.shape
    match scaled.block:
        case (b0, b1) if (b0, b1) == (rows, cols) and scaled.scale.shape in {(), (1,)}:
            covers = "per tensor"
        case (1, b1) if b1 == cols:
            covers = "per channel"
        case (b0, b1):
            covers = f"block {b0}x{b1}"
    return f"{covers}, {scaled.scale.dtype} {scaled.scale.name.rpartition('.')[2]}"


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])

"""INT4 weights of a source: compressed-tensors `pack-quantized`, 4 bit, symmetric, per group, as Kimi publishes it.

    X.weight_packed I32 [N, K/8]    nibble i of word j is column 8j+i, stored as q + 8
    X.weight_scale  [N, K/g]        BF16 (F16 and F32 occur in others' checkpoints); W = q * scale
    X.weight_shape  [2] = (N, K)    I32 in Kimi's, I64 in compressed-tensors' own; older ones have none

From config and headers alone. Sources: compressed-tensors 0.20, compressors/pack_quantized/{base,helpers}.py; the
published configs of Kimi-K2-Thinking (config at the top) and K2.5 (in `text_config`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kizami.formats.errors import KizamiError, printable
from kizami.formats.foreign import bad_config, quantization_configs, shape_text, tensor_error
from kizami.formats.int4_layout import VALUES_PER_WORD, WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE
from kizami.formats.tensors import TensorInfo

SCALE_DTYPES = ("BF16", "F16", "F32")
_SHAPE_DTYPES = ("I32", "I64")
_HINT = "start from the FP8 or BF16 release of the model, or from a symmetric INT4 one with groups"
# Tensors beside weight_packed that say what this module does not read.
_REFUSED_LEAVES = {
    "weight_zero_point": "asymmetric INT4 (it has a zero point)",
    "weight_g_idx": "INT4 whose columns are ordered by activation (actorder)",
}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """An INT4 weight [rows, cols]: W[r, c] = q[r, c] * scale[r, c // group_size], q in [-8, 7]."""

    packed: TensorInfo
    scale: TensorInfo
    shape_tensor: TensorInfo | None
    group_size: int

    @property
    def rows(self) -> int:
        return self.packed.shape[0]

    @property
    def cols(self) -> int:
        return self.packed.shape[1] * VALUES_PER_WORD

    @property
    def grid(self) -> tuple[int, int]:
        """Scale rows and columns."""
        return self.rows, self.cols // self.group_size

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """All that belongs to it."""
        shape = () if self.shape_tensor is None else (self.shape_tensor,)
        return (self.packed, *shape, self.scale)


def find_packed_weights(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, PackedWeight]:
    """Module name -> its INT4 weight; empty where no tensor is an I32 `weight_packed`.

    What else is called weight_packed (NVFP4, MXFP4 in bytes) is left to `foreign.refuse_other_formats`.
    Raises KizamiError: `bad_config`, `missing_scale`, `missing_packed`, `ambiguous_weight`, `scale_grid`,
    `empty_tensor`, `unsupported_dtype`, `unsupported_shape`, `unsupported_format`.
    """
    modules = [
        name.removesuffix(f".{WEIGHT_PACKED}")
        for name, info in tensors.items()
        if name.endswith(f".{WEIGHT_PACKED}") and info.dtype == "I32"
    ]
    if not modules:
        return {}
    sizes = _group_sizes(config, tensors[f"{modules[0]}.{WEIGHT_PACKED}"])
    found = {module: _packed_weight(module, tensors, sizes) for module in modules}
    _refuse_leftovers(tensors, found)
    return found


def check_weight_shape(values: Sequence[int], weight: PackedWeight) -> None:
    """`values`: what `weight_shape` holds. KizamiError "packed_shape" if that is not (rows, cols): a checkpoint whose K
    was padded to whole words or groups, or a damaged one."""
    assert weight.shape_tensor is not None
    if [int(v) for v in values] != [weight.rows, weight.cols]:
        raise tensor_error(
            weight.shape_tensor,
            f"holds {[int(v) for v in values]}, expected [{weight.rows}, {weight.cols}] "
            f"({weight.packed.name} {shape_text(weight.packed.shape)}, {VALUES_PER_WORD} values in a word)",
            "packed_shape",
            hint="weights whose columns were padded are not supported; a damaged file must be downloaded again",
        )


# ---------------------------------------------------------------------------------------------------- config


def _group_sizes(config: Mapping[str, Any], example: TensorInfo) -> frozenset[int]:
    """The group sizes of all INT4 groups of the config; every such group must be of the form that is read here."""
    sizes: set[int] = set()
    for path, quant in quantization_configs(config):
        method = quant.get("quant_method")
        if method not in (None, "compressed-tensors"):
            continue  # its tensors are judged by what they are
        for where, group in _groups(path, quant):
            weights = group.get("weights")
            if isinstance(weights, dict) and weights.get("type", "int") == "int":
                _refuse_format(where, group.get("format") or quant.get("format"))
                sizes.add(_group_size(f"{where}.weights", weights))
    if not sizes:
        raise tensor_error(
            example,
            "weight_packed (I32), but config.json has no compressed-tensors config group with int weights: what the "
            "words hold is unknown",
            "bad_config",
            hint="take config.json from the publisher of the weights",
        )
    return frozenset(sizes)


def _groups(path: str, quant: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    groups = quant.get("config_groups") or {}
    if not isinstance(groups, dict):
        raise bad_config(f"{path}.config_groups", groups, "an object")
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise bad_config(f"{path}.config_groups.{name}", group, "an object")
    return [(f"{path}.config_groups.{name}", group) for name, group in groups.items()]


def _group_size(where: str, weights: Mapping[str, Any]) -> int:
    expected = {"num_bits": (4, (4,)), "symmetric": (True, (True,)), "strategy": ("group", ("group",))}
    for key, (said, allowed) in expected.items():
        value = weights.get(key, True if key == "symmetric" else None)
        if type(value) is not type(said) or value not in allowed:
            raise _unsupported(f"{where}.{key}", value, said)
    if (order := weights.get("actorder")) not in (None, False, "weight", "static"):  # these two keep column order
        raise _unsupported(f"{where}.actorder", order, None)
    if weights.get("dynamic") not in (None, False):
        raise _unsupported(f"{where}.dynamic", weights["dynamic"], False)
    size = weights.get("group_size")
    if type(size) is not int or size < VALUES_PER_WORD or size % VALUES_PER_WORD:
        raise bad_config(f"{where}.group_size", size, f"a multiple of {VALUES_PER_WORD}")
    return size


def _refuse_format(where: str, name: object) -> None:
    if name not in (None, "pack-quantized", "mixed-precision"):
        raise _unsupported(f"{where}.format", name, "pack-quantized")


def _unsupported(where: str, found: object, expected: object) -> KizamiError:
    return KizamiError(
        f"{where} is {printable(repr(found), 80)}, expected {expected!r}: INT4 sources are read in one form only",
        code="unsupported_format",
        file="config.json",
        hint=_HINT,
    )


# ---------------------------------------------------------------------------------------------------- tensors


def _packed_weight(module: str, tensors: Mapping[str, TensorInfo], sizes: frozenset[int]) -> PackedWeight:
    packed = tensors[f"{module}.{WEIGHT_PACKED}"]
    for leaf, what in _REFUSED_LEAVES.items():
        if other := tensors.get(f"{module}.{leaf}"):
            raise tensor_error(other, f"this is {what}, expected symmetric INT4", "unsupported_format", hint=_HINT)
    if other := tensors.get(f"{module}.weight"):
        raise tensor_error(
            packed,
            f"{other.name} exists as well ({other.dtype} in {other.file}), expected one form of the weight",
            "ambiguous_weight",
        )
    scale = tensors.get(f"{module}.{WEIGHT_SCALE}")
    if scale is None:
        raise tensor_error(
            packed,
            f"INT4 weight has no scale tensor; looked for {module}.{WEIGHT_SCALE}",
            "missing_scale",
            hint="a shard or an index entry may be missing",
        )
    if scale.dtype not in SCALE_DTYPES:
        raise tensor_error(
            scale,
            f"scale dtype {scale.dtype} is not supported, expected one of {', '.join(SCALE_DTYPES)}",
            "unsupported_dtype",
        )
    shape = tensors.get(f"{module}.{WEIGHT_SHAPE}")
    if shape is not None and (shape.dtype not in _SHAPE_DTYPES or shape.shape != (2,)):
        raise tensor_error(
            shape,
            f"is {shape.dtype} {shape_text(shape.shape)}, expected I32 or I64 [2]",
            "unsupported_dtype" if shape.dtype not in _SHAPE_DTYPES else "unsupported_shape",
        )
    return PackedWeight(packed, scale, shape, _size_by_shape(packed, scale, sizes))


def _size_by_shape(packed: TensorInfo, scale: TensorInfo, sizes: frozenset[int]) -> int:
    """The tensors' group size, which the config must name."""
    if len(packed.shape) != 2 or len(scale.shape) != 2:
        wrong = packed if len(packed.shape) != 2 else scale
        raise tensor_error(wrong, f"has shape {shape_text(wrong.shape)}, expected two dimensions", "unsupported_shape")
    if 0 in packed.shape:
        raise tensor_error(packed, f"has shape {shape_text(packed.shape)}, expected no empty dimension", "empty_tensor")
    rows, cols = packed.shape[0], packed.shape[1] * VALUES_PER_WORD
    fits = [size for size in sizes if scale.shape == (rows, cols // size) and cols % size == 0]
    if not fits:
        wanted = " or ".join(
            f"{shape_text((rows, cols // size))} with group size {size}"
            if cols % size == 0
            else f"groups of {size}, which does not divide {cols}"
            for size in sorted(sizes)[:4]
        )
        raise tensor_error(
            scale,
            f"scale grid {shape_text(scale.shape)}, expected {wanted} ({packed.name} holds {rows} x {cols} weights; "
            "the group size is that of config.json)",
            "scale_grid",
        )
    return fits[0]


def _refuse_leftovers(tensors: Mapping[str, TensorInfo], found: Mapping[str, PackedWeight]) -> None:
    """Scales and shapes whose weight is lost, and order or zero points of a module without a weight."""
    for name, info in tensors.items():
        module, _, leaf = name.rpartition(".")
        if module in found:
            continue
        orphan = leaf == WEIGHT_SHAPE or (leaf == WEIGHT_SCALE and f"{module}.weight" not in tensors)
        if orphan and f"{module}.{WEIGHT_PACKED}" not in tensors:
            raise tensor_error(
                info,
                f"there is no {module}.{WEIGHT_PACKED} that it belongs to",
                "missing_packed",
                hint="a shard or an index entry may be missing",
            )

"""How a checkpoint's weights are stored, as far as a launch depends on it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kizami.formats.errors import KizamiError
from kizami.formats.families import Family, Role
from kizami.formats.foreign import bad_config, quantization_configs
from kizami.formats.tensors import TensorInfo

_PACKED = (".weight_packed", ".qweight")  # compressed-tensors; AutoGPTQ and AWQ


@dataclass(frozen=True, slots=True)
class StoredForm:
    """group_sizes: of the routed experts in INT4 (empty: none). fp8_block: of routed experts in block FP8.

    int4_on_linear: compressed-tensors INT4 under the target `Linear`, from which SGLang concludes that shared experts
    must not be fused. shared_like_routed: shared experts are INT4 as well. kv_scheme: `kv_cache_scheme` is set.
    """

    method: str
    group_sizes: tuple[int, ...]
    fp8_block: tuple[int, int] | None
    int4_on_linear: bool
    shared_like_routed: bool
    kv_scheme: bool

    @property
    def label(self) -> str:
        """`INT4 g32` or `FP8`, for tables."""
        if self.group_sizes:
            return "INT4 g" + "/".join(map(str, self.group_sizes))
        return "FP8" if self.method or self.fp8_block else "BF16"


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The copy that engines read first. Empty without one."""
    found = quantization_configs(config)
    return found[0][1] if found else {}


def read_stored(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], family: Family) -> StoredForm:
    quant = quantization_config(config)
    groups: set[int] = set()
    shared: set[bool] = set()
    block: tuple[int, int] | None = None
    for name, info in tensors.items():
        if ".weight" not in name and not name.endswith(".qweight"):
            continue
        place = family.place(name)
        packed = name.endswith(_PACKED) or (name.endswith(".weight") and info.dtype == "I8")
        if place.role is Role.SHARED_EXPERT and name.endswith((*_PACKED, ".weight")):
            shared.add(packed)
        elif place.role is Role.ROUTED_EXPERT and packed:
            groups.add(_group_size(name, info, tensors, quant))
        elif place.role is Role.ROUTED_EXPERT and info.dtype == "F8_E4M3":
            block = block or _block(quant)
    return StoredForm(
        method=_word(quant.get("quant_method")),
        group_sizes=tuple(sorted(groups)),
        fp8_block=block,
        int4_on_linear=_int4_on_linear(quant),
        shared_like_routed=bool(groups) and shared == {True},
        kv_scheme=quant.get("kv_cache_scheme") is not None,
    )


def _group_size(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo], quant: Mapping[str, Any]) -> int:
    """From the scale beside a `weight_packed`; other layouts say it in the config."""
    if name.endswith(".weight_packed"):
        scale = tensors.get(name.removesuffix("packed") + "scale")
        if scale is None or len(scale.shape) != 2 or len(info.shape) != 2 or not scale.shape[1]:
            raise KizamiError("has no 2-D weight_scale beside it", code="missing_scale", file=info.file, tensor=name)
        columns = info.shape[1] * 8
        if not columns or columns % scale.shape[1]:
            raise KizamiError(
                f"has {columns} columns and {scale.shape[1]} scales per row, expected a whole number of columns each",
                code="bad_scale",
                file=info.file,
                tensor=name,
            )
        return columns // scale.shape[1]
    group = quant.get("group_size", 128)  # w4afp8: 128 in practice, and not always written
    if type(group) is not int or not 0 < group <= 1 << 20:
        raise bad_config("quantization_config.group_size", group, "a whole number above 0")
    return group


def _block(quant: Mapping[str, Any]) -> tuple[int, int] | None:
    size = quant.get("weight_block_size")
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and 0 < n <= 1 << 20 for n in size):
        raise bad_config("quantization_config.weight_block_size", size, "two whole numbers above 0")
    return size[0], size[1]


def _int4_on_linear(quant: Mapping[str, Any]) -> bool:
    """SGLang 0.5.23 models/deepseek_common/utils.py `is_wint4afp8_or_wint4a16_config`."""
    if quant.get("quant_method") == "w4afp8":
        return True
    groups = quant.get("config_groups")
    return any(_is_int4_on_linear(group) for group in _objects(groups))


def _is_int4_on_linear(group: Mapping[str, Any]) -> bool:
    targets, weights = group.get("targets"), group.get("weights")
    return (
        isinstance(targets, list)
        and "Linear" in targets
        and isinstance(weights, dict)
        and (weights.get("type"), weights.get("num_bits")) == ("int", 4)
    )


def _objects(value: object) -> Iterable[Mapping[str, Any]]:
    if value is None:
        return
    if not isinstance(value, dict):
        raise bad_config("quantization_config.config_groups", value, "an object")
    for group in value.values():
        if not isinstance(group, dict):
            raise bad_config("quantization_config.config_groups", group, "objects")
        yield group


def _word(value: object) -> str:
    return value if isinstance(value, str) else ""

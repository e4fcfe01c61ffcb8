"""A `quantization_config` as the engines take it: where they look, and what its values mean to them.

Every value may be of any type: KizamiError "bad_config" for what no reader could use.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kizami.formats.errors import KizamiError, printable
from kizami.formats.foreign import bad_config, quantization_configs

COMPRESSED_TENSORS = ("compressed-tensors", "compressed_tensors")
MAX_GROUPS = 1_000
MAX_ENTRIES = 1_000_000


@dataclass(frozen=True, slots=True)
class Args:
    """compressed-tensors' QuantizationArgs with their defaults (quantization/quant_args.py). kind: int or float."""

    bits: int
    kind: str
    strategy: str
    group_size: int | None
    symmetric: bool
    dynamic: bool
    actorder: str | None
    block: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Group:
    """One scheme. `format` is None where the group leaves it to the top level."""

    name: str
    targets: tuple[str, ...]
    weights: Args
    inputs: Args | None
    format: str | None

    @property
    def is_packed_int(self) -> bool:
        """Integer weights in `weight_packed`, whatever the activations are."""
        return (self.weights.kind == "int" and self.weights.bits < 8) or self.is_weight_only_int

    @property
    def is_weight_only_int(self) -> bool:
        """`_is_wNa16_group_channel` of both engines."""
        return self.weights.kind == "int" and self.inputs is None and self.weights.strategy in ("group", "channel")

    @property
    def is_fp8(self) -> bool:
        return (self.weights.kind, self.weights.bits) == ("float", 8)

    def __str__(self) -> str:
        args = self.weights
        size = {"group": f" {args.group_size}", "block": f" {list(args.block or ())}"}.get(args.strategy, "")
        return f"{self.name} ({args.kind}{args.bits} {args.strategy}{size})"


@dataclass(frozen=True, slots=True)
class Quantization:
    """The first config that the engines find. `path` is its key path; `raw` the object itself."""

    path: str
    method: str
    raw: Mapping[str, Any]
    format: str | None
    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    kv_scheme: Mapping[str, Any] | None

    @property
    def is_compressed_tensors(self) -> bool:
        return self.method in COMPRESSED_TENSORS

    def whole(self, *keys: str) -> int | None:
        """The first of `keys` that is a whole number."""
        return next((value for key in keys if type(value := self.raw.get(key)) is int), None)

    @property
    def block(self) -> tuple[int, int] | None:
        """weight_block_size of quant_method fp8."""
        return _block(self.raw.get("weight_block_size"), f"{self.path}.weight_block_size")

    def names(self, *keys: str) -> tuple[str, ...]:
        """The first of `keys` that is a list that is not empty."""
        for key in keys:
            if found := _strings(self.raw.get(key), f"{self.path}.{key}"):
                return found
        return ()


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """What SGLang and vLLM read: top level, then text_config, then compression_config."""
    found = quantization_configs(config)
    if not found:
        return None
    path, raw = found[0]
    method = raw.get("quant_method", "compressed-tensors" if "config_groups" in raw else "")
    kv_scheme = raw.get("kv_cache_scheme")
    if not isinstance(method, str):
        raise bad_config(f"{path}.quant_method", method, "a string")
    if kv_scheme is not None and not isinstance(kv_scheme, dict):
        raise bad_config(f"{path}.kv_cache_scheme", kv_scheme, "an object or null")
    return Quantization(
        path,
        method.lower(),
        raw,
        _word(raw.get("format"), f"{path}.format"),
        _groups(raw.get("config_groups"), path),
        _strings(raw.get("ignore"), f"{path}.ignore"),
        kv_scheme,
    )


def _groups(value: object, path: str) -> tuple[Group, ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise bad_config(f"{path}.config_groups", value, "an object")
    if len(value) > MAX_GROUPS:
        raise bad_config(f"{path}.config_groups", f"{len(value)} groups", f"at most {MAX_GROUPS}")
    groups = []
    for name, group in value.items():
        where = f"{path}.config_groups.{printable(name, 40)}"
        if not isinstance(group, dict):
            raise bad_config(where, group, "an object")
        targets = _strings(group.get("targets"), f"{where}.targets")
        weights = group.get("weights")
        if weights is None:
            continue  # a group for attention only
        inputs = group.get("input_activations")
        groups.append(
            Group(
                printable(name, 40),
                targets,
                _args(weights, f"{where}.weights"),
                None if inputs is None else _args(inputs, f"{where}.input_activations"),
                _word(group.get("format"), f"{where}.format"),
            )
        )
    return tuple(groups)


def _args(value: object, where: str) -> Args:
    if not isinstance(value, dict):
        raise bad_config(where, value, "an object")
    size = value.get("group_size")
    if size is not None and (type(size) is not int or not -1 <= size <= 1 << 20 or size == 0):
        raise bad_config(f"{where}.group_size", size, "a positive number, -1 or null")
    bits = value.get("num_bits", 8)
    if type(bits) is not int or not 1 <= bits <= 32:
        raise bad_config(f"{where}.num_bits", bits, "a number of bits")
    strategy = _word(value.get("strategy"), f"{where}.strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "group" if size > 0 else "channel"
    actorder = value.get("actorder")
    if isinstance(actorder, bool):
        actorder = "group" if actorder else None
    return Args(
        bits,
        _word(value.get("type"), f"{where}.type") or "int",
        strategy,
        size,
        _flag(value.get("symmetric", True), f"{where}.symmetric"),
        value.get("dynamic") == "local" or _flag(value.get("dynamic", False), f"{where}.dynamic"),
        _word(actorder, f"{where}.actorder"),
        _block(value.get("block_structure"), f"{where}.block_structure"),
    )


def _word(value: object, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise bad_config(where, value, "a string or null")
    return value.lower() if value is not None else None


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise bad_config(where, value, "true or false")
    return value


def _block(value: object, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size <= 1 << 20 for size in sizes):
        raise bad_config(where, value, "two positive numbers")
    return sizes[0], sizes[1]


def _strings(value: object, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise bad_config(where, value, "a list of strings")
    if len(value) > MAX_ENTRIES:
        raise KizamiError(
            f"{where} has {len(value)} entries, expected at most {MAX_ENTRIES}", code="bad_config", file="config.json"
        )
    return tuple(value)

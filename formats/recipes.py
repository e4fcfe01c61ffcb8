"""Recipes of llm-compressor: which linears become INT4, in groups of what size.

Read into a Recipe, and written from one. What a recipe asks for beyond that and kizami does not do is refused by its
key, or, where the layout of the result is the same, told as a note; nothing is passed over in silence.

Sources: llm-compressor 0.14, recipe/recipe.py (`Recipe.from_dict`: `*_stage` -> `*_modifiers` -> modifier) and
modifiers/quantization/quantization/mixin.py (`resolve_quantization_config`); compressed-tensors 0.19,
quantization/{quant_args,quant_scheme}.py for the keys, defaults and presets.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from kizami.formats.errors import KizamiError, printable
from kizami.formats.strict_yaml import read_yaml

LINEAR = "Linear"
"""As a target: every linear, whatever its name."""

_GPTQ = "GPTQModifier"
_QUANTIZERS = ("QuantizationModifier", _GPTQ)
_CALIBRATED = "changes weights by what it sees of activations, and kizami runs no model here"
_PRUNES = "removes weights"
_OTHER_MODIFIERS = {
    "AWQModifier": _CALIBRATED,
    "SmoothQuantModifier": _CALIBRATED,
    "LogarithmicEqualizationModifier": _CALIBRATED,
    "AutoRoundModifier": _CALIBRATED,
    "SpinQuantModifier": "rotates weights",
    "QuIPModifier": "rotates weights",
    "SparseGPTModifier": _PRUNES,
    "WandaPruningModifier": _PRUNES,
    "MagnitudePruningModifier": _PRUNES,
    "ConstantPruningModifier": _PRUNES,
    "REAPPruningModifier": _PRUNES,
}
_PRESET, _PRESET_GROUP_SIZE = "W4A16", 128
# How a run is cut and scheduled, and GPTQ's own numbers: they change no name, shape or type of the result.
_HARMLESS = frozenset({
    "sequential_targets", "sequential_update", "block_size", "dampening_frac", "offload_hessians",
    "batched_quantization", "index", "group", "start", "end", "update", "initialized_", "finalized_", "started_",
    "ended_", "requires_calibration_data",
})  # fmt: skip
_OBSERVERS = ("weight_observer", "input_observer", "output_observer", "observer")
_MINMAX = ("minmax", "memoryless_minmax", "static_minmax")
_STATIC_ORDERS = (None, False, "static", "weight")  # the columns stay where they are

Value = object
Object = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Symmetric INT4 with one scale per group_size weights of a row, for `targets` without `ignore`.

    Entries are exact module names, `re:` and a regular expression, or, as a target, LINEAR. notes: what the recipe says
    that makes no difference to the layout, but is done in another way, or not.
    """

    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    group_size: int
    notes: tuple[str, ...] = ()


def read_recipe(path: Path) -> Recipe:
    """The recipe in a YAML (or JSON) file. KizamiError "bad_yaml", "bad_recipe" (no recipe, or a damaged one),
    "unsupported_recipe" (one that kizami cannot follow), with the path of the key."""
    return _Reader(path.name).recipe(read_yaml(path, path.name))


def write_recipe(targets: tuple[str, ...], ignore: tuple[str, ...], group_size: int) -> str:
    """The YAML that llm-compressor, and read_recipe, take for the same."""
    weights = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size,
        "dynamic": False,
    }  # fmt: skip
    modifier = {"config_groups": {"group_0": {"targets": list(targets), "weights": weights}}, "ignore": list(ignore)}
    recipe = {"default_stage": {"default_modifiers": {"QuantizationModifier": modifier}}}
    return yaml.safe_dump(recipe, sort_keys=False, width=100, allow_unicode=False)


@dataclass(frozen=True, slots=True)
class _Group:
    where: str
    targets: tuple[str, ...]
    size: int


class _Reader:
    """Reads one file; gathers notes on the way."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._notes: list[str] = []

    # ------------------------------------------------------------------ errors

    def _bad(self, where: str, found: Value, expected: str) -> KizamiError:
        return KizamiError(f"{where} is {_shown(found)}, expected {expected}", code="bad_recipe", file=self._file)

    def _unsupported(self, where: str, why: str) -> KizamiError:
        return KizamiError(
            f"{where} {why}",
            code="unsupported_recipe",
            file=self._file,
            hint="kizami packs to symmetric INT4 with groups, weights only; take the rest out of the recipe, or use "
            "llm-compressor",
        )

    def _object(self, where: str, value: Value) -> Object:
        if not isinstance(value, dict):
            raise self._bad(where, value, "a mapping")
        return value

    def _names(self, where: str, value: Value) -> tuple[str, ...]:
        """A list of entries as compressed-tensors' `targets` and `ignore`, or one."""
        entries = [value] if isinstance(value, str) else value
        if not isinstance(entries, list) or not all(isinstance(e, str) and e for e in entries):
            raise self._bad(where, value, "a list of module names or `re:` patterns")
        for entry in entries:
            if entry[0].isupper() and "." not in entry and entry != LINEAR:
                raise self._unsupported(where, f"has {printable(entry, 80)}, a class: kizami knows {LINEAR} only")
        return tuple(entries)

    # ------------------------------------------------------------------ from the file to its one modifier

    def recipe(self, document: Value) -> Recipe:
        modifiers = list(self._modifiers("", document, 4))
        for where, name, _ in modifiers:
            if name not in _QUANTIZERS:
                why = _OTHER_MODIFIERS.get(name, "is a modifier that kizami does not know")
                raise self._unsupported(where, why)
        if len(modifiers) != 1:
            found = ", ".join(where for where, _, _ in modifiers[:5]) or "none"
            raise KizamiError(
                f"{len(modifiers)} quantization modifiers ({found}), expected one of {' or '.join(_QUANTIZERS)}",
                code="bad_recipe" if not modifiers else "unsupported_recipe",
                file=self._file,
            )
        where, name, body = modifiers[0]
        if name == _GPTQ:
            self._notes.append(
                f"{where}: no calibration is run here; weights are rounded by --method, not by GPTQ (the layout is the "
                "same)"
            )
        return self._quantizer(where, self._object(where, body))

    def _modifiers(self, where: str, value: Value, levels: int) -> Iterator[tuple[str, str, Value]]:
        """(path, name, body) of each: in stages, under `*_modifiers` or `modifiers`, in a list, or at the top.

        levels: that may follow. With aliases a small file has ways without number through many of them.
        """
        if not levels:
            raise self._bad(where, value, "a modifier: stages and lists lie in one another here")
        if isinstance(value, list):
            for i, item in enumerate(value):
                yield from self._modifiers(f"{where}[{i}]", self._object(f"{where}[{i}]", item), levels - 1)
            return
        for key, item in self._object(where or "the document", value).items():
            path = f"{where}.{printable(key, 80)}" if where else printable(key, 80)
            if key.endswith("Modifier"):
                yield path, key, item
            elif key.endswith(("_stage", "_modifiers")) or key == "modifiers":
                yield from self._modifiers(path, item, levels - 1)
            elif not (key in ("args", "run_type", "version") and (not item or key != "args")):
                raise self._unsupported(path, "is a key that kizami does not know")

    # ------------------------------------------------------------------ the modifier

    def _quantizer(self, where: str, body: Object) -> Recipe:
        known = {"targets", "ignore", "scheme", "config_groups", "kv_cache_scheme", "actorder"}
        for key, value in body.items():
            path = f"{where}.{printable(key, 80)}"
            if key in _OBSERVERS:
                self._observer(path, value)
            elif key == "bypass_divisibility_checks":
                if value not in (None, False):
                    self._notes.append(f"{path}: kizami pads no group; a width that the group size does not divide is "
                                       "refused")  # fmt: skip
            elif key not in known | _HARMLESS:
                raise self._unsupported(path, "is a key that kizami does not know")
        if body.get("kv_cache_scheme") is not None:
            raise self._unsupported(f"{where}.kv_cache_scheme", "asks for a quantized KV cache, which is calibrated")
        self._order(f"{where}.actorder", body.get("actorder"))
        groups = self._groups(where, body)
        sizes = sorted({group.size for group in groups})
        if len(sizes) > 1:
            listed = " and ".join(f"{group.where} {group.size}" for group in groups[:4])
            raise self._unsupported(where, f"has groups of several sizes ({listed}); kizami packs with one")
        targets = tuple(dict.fromkeys(target for group in groups for target in group.targets))
        if not targets:
            raise self._bad(f"{where}.targets", body.get("targets"), "at least one module, pattern or Linear")
        ignore = self._names(f"{where}.ignore", body.get("ignore") or [])
        if LINEAR in ignore:
            raise self._unsupported(f"{where}.ignore", f"has {LINEAR}: nothing would be left to pack")
        return Recipe(targets, ignore, sizes[0], tuple(self._notes))

    def _groups(self, where: str, body: Object) -> list[_Group]:
        scheme, groups = body.get("scheme"), body.get("config_groups")
        targets = self._names(f"{where}.targets", LINEAR if body.get("targets") is None else body["targets"])
        if scheme is not None and groups is not None:
            raise self._bad(where, body, "either scheme or config_groups, as llm-compressor does")
        if isinstance(scheme, str):
            return [self._preset(f"{where}.scheme", scheme, targets)]
        if scheme is None and not groups:
            raise self._unsupported(where, "has neither scheme nor config_groups: llm-compressor's default is 8 bit")
        key = "scheme" if scheme is not None else "config_groups"
        found = []
        for name, group in self._object(f"{where}.{key}", scheme if scheme is not None else groups).items():
            path = f"{where}.{key}.{printable(name, 80)}"
            if scheme is not None or isinstance(group, list):  # {preset: targets}
                found.append(self._preset(path, name, self._names(path, group)))
            else:
                found.append(self._group(path, self._object(path, group)))
        if not found:
            raise self._bad(f"{where}.{key}", scheme, "at least one scheme")
        if body.get("targets") is not None and set(targets) != {t for group in found for t in group.targets}:
            self._notes.append(f"{where}.targets has no effect beside {key}, in llm-compressor neither")
        return found

    def _preset(self, where: str, name: str, targets: tuple[str, ...]) -> _Group:
        if name.upper() != _PRESET:
            raise self._unsupported(where, f"is the scheme {printable(name, 80)}; kizami knows {_PRESET} by name")
        return _Group(where, targets, _PRESET_GROUP_SIZE)

    def _group(self, where: str, group: Object) -> _Group:
        for key, value in group.items():
            path = f"{where}.{printable(key, 80)}"
            if key in ("input_activations", "output_activations") and value is not None:
                raise self._unsupported(path, "asks for quantized activations")
            if key == "format" and value not in (None, "pack-quantized"):
                raise self._unsupported(path, f"is {_shown(value)}, expected pack-quantized")
            if key not in ("targets", "weights", "input_activations", "output_activations", "format"):
                raise self._unsupported(path, "is a key that kizami does not know")
        if not group.get("targets"):
            raise self._bad(f"{where}.targets", group.get("targets"), "a list of module names or `re:` patterns")
        targets = self._names(f"{where}.targets", group["targets"])
        return _Group(where, targets, self._weights(f"{where}.weights", self._object(where, group.get("weights"))))

    def _weights(self, where: str, weights: Object) -> int:
        """The group size, if this is INT4, symmetric, with groups."""
        defaults = {"type": "int", "symmetric": True, "num_bits": 8, "dynamic": False}
        for key, expected in (("type", "int"), ("num_bits", 4), ("symmetric", True), ("dynamic", False)):
            value = weights.get(key)
            value = defaults[key] if value is None else value
            if type(value) is not type(expected) or value != expected:
                default = " (llm-compressor's default)" if weights.get(key) is None else ""
                raise self._unsupported(f"{where}.{key}", f"is {_shown(value)}{default}, expected {_shown(expected)}")
        if weights.get("strategy") not in (None, "group"):
            raise self._unsupported(f"{where}.strategy", f"is {_shown(weights['strategy'])}, expected group")
        self._order(f"{where}.actorder", weights.get("actorder"))
        if weights.get("observer") is not None:
            self._observer(f"{where}.observer", weights["observer"])
        for key, value in weights.items():
            if key in ("block_structure", "scale_dtype", "zp_dtype") and value is not None:
                raise self._unsupported(f"{where}.{key}", f"is {_shown(value)}, expected null")
            if key not in (
                "type", "num_bits", "symmetric", "dynamic", "strategy", "group_size", "actorder", "observer",
                "observer_kwargs", "block_structure", "scale_dtype", "zp_dtype",
            ):  # fmt: skip
                raise self._unsupported(f"{where}.{printable(key, 80)}", "is a key that kizami does not know")
        size = weights.get("group_size")
        if type(size) is not int or size < 1:
            raise self._bad(f"{where}.group_size", size, "a positive whole number")
        return size

    def _order(self, where: str, value: Value) -> None:
        if not any(value is order or (isinstance(order, str) and value == order) for order in _STATIC_ORDERS):
            raise self._unsupported(where, f"is {_shown(value)}: kizami writes no weight_g_idx")

    def _observer(self, where: str, value: Value) -> None:
        names = list(value.values()) if isinstance(value, dict) else [value]
        if any(name is not None and name not in _MINMAX for name in names):
            self._notes.append(f"{where} is {_shown(names[0])}: observers are not run; --method chooses the scales")


def _shown(value: Value) -> str:
    """Never the contents of a list or mapping: with aliases these may be without end."""
    match value:
        case dict() | list():
            return "a mapping" if isinstance(value, dict) else "a list"
        case None | bool():
            return "null" if value is None else str(value).lower()
        case str():
            return f'"{printable(value, 80)}"'
    return printable(str(value), 80)

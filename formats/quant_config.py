"""`quantization_config` of the output: built from the modules written, and read the way the engines read it.

The forms are the ones SGLang and vLLM both load: one INT4 group on `Linear` with everything else in `ignore` (as
Moonshot publishes Kimi-K2-Thinking), or, for FP8 leftovers, an INT4 group on the experts' names before an FP8 group
on `Linear`. Both carry top-level format "pack-quantized": SGLang's INT4 MoE reads that field (SGLang 0.5.23
layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16_moe.py). Formats given per group are honoured
by vLLM and compressed-tensors. `ignore` is derived in kizami.formats.ignore_rules.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from kizami.formats.errors import KizamiError, printable
from kizami.formats.families import EMBEDDINGS
from kizami.formats.ignore_rules import derive_ignore, derive_targets
from kizami.formats.patterns import Matcher

Form = Literal["int4", "fp8", "none"]

_KEYS = ("quantization_config", "compression_config")


def build_quantization_config(
    *,
    group_size: int,
    packed: Sequence[str],
    fp8: Sequence[str],
    plain: Sequence[str],
    fp8_block: tuple[int, int] | None,
    num_hidden_layers: int | None,
    mtp_packed: bool | None,
    kv_cache_scheme: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The config that describes exactly the modules given, which are those with a 2-D weight.

    packed: written as INT4. fp8: written as FP8, in blocks of `fp8_block` or, when that is None, with one scale per
    output channel. One of the two has modules. plain: everything else, embeddings and heads included. mtp_packed:
    whether the next-token layers' experts are INT4, None without such layers. Raises AssertionError if the result, read
    back by `resolver`, does not say of every module what was given here.
    """
    assert packed or fp8, "an output without INT4 and FP8 has no quantization config"
    given = [*packed, *fp8, *plain]
    assert len(set(given)) == len(given), "a module has one form"
    ignore = derive_ignore(
        plain, [*packed, *fp8], num_hidden_layers=num_hidden_layers, mtp_dense=mtp_packed is False,
        has_mtp=mtp_packed is not None,
    )  # fmt: skip
    result: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if packed else "float-quantized",
        "quantization_status": "compressed",
    }
    if not packed:
        result["config_groups"] = {"group_0": _fp8_group(fp8_block)}
    elif fp8:
        result["config_groups"] = _mixed_groups(group_size, derive_targets(packed, fp8), fp8_block)
    else:
        result["config_groups"] = {"group_0": _int4_group(group_size)}
    result |= {"ignore": ignore, "kv_cache_scheme": kv_cache_scheme}
    if not fp8:
        result["global_compression_ratio"] = None  # Kimi-K2-Thinking's has it
    _self_check(result, {"int4": packed, "fp8": fp8, "none": plain})
    return result


def _int4_group(group_size: int) -> dict[str, Any]:
    """Kimi-K2-Thinking's group, key by key."""
    weights = {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size, "symmetric": True,
        "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    return {"targets": ["Linear"], "input_activations": None, "output_activations": None, "weights": weights}


def _mixed_groups(group_size: int, targets: list[str], block: tuple[int, int] | None) -> dict[str, Any]:
    """Experts first: transformers takes the first group without "experts" in its targets as the dense scheme.

    FP8 sits on `Linear`: SGLang finds the block size for kv_b_proj only under that target.
    """
    int4 = {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size, "symmetric": True,
        "dynamic": False, "actorder": None,
    }  # fmt: skip
    return {
        "group_0": {
            "format": "pack-quantized", "targets": targets, "weights": int4, "input_activations": None,
            "output_activations": None,
        },
        "group_1": _fp8_group(block),
    }  # fmt: skip


def _fp8_group(block: tuple[int, int] | None) -> dict[str, Any]:
    fp8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    activations: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
    if block is None:
        fp8 = _with_strategy(fp8, strategy="channel")
        activations = _with_strategy(activations, strategy="token")
    else:
        fp8 = _with_strategy(fp8, strategy="block", block_structure=list(block))
        activations = _with_strategy(activations, strategy="group", group_size=block[1])
    return {
        "format": "float-quantized", "targets": ["Linear"], "weights": fp8, "input_activations": activations,
        "output_activations": None,
    }  # fmt: skip


def _with_strategy(scheme: dict[str, Any], **strategy: Any) -> dict[str, Any]:
    """Strategy keys after `type`, the order in which the engines' documentation shows them."""
    head = {key: scheme[key] for key in ("num_bits", "type")}
    return head | strategy | {key: value for key, value in scheme.items() if key not in head}


def _self_check(config: Mapping[str, Any], written: Mapping[Form, Sequence[str]]) -> None:
    form_of = resolver(config)
    for form, modules in written.items():
        for module in modules:
            if form_of(module) != form:  # not `assert`: a wrong config must not pass under python -O either
                raise AssertionError(f"{module} is written as {form}, the config says {form_of(module)}")


# ---------------------------------------------------------------------------------------------------- reading


def resolve(quantization_config: Mapping[str, Any], module: str) -> Form:
    """What the config says about one module; for many modules use `resolver`."""
    return resolver(quantization_config)(module)


def resolver(quantization_config: Mapping[str, Any]) -> Callable[[str], Form]:
    """A function from module name to form, by compressed-tensors' rules (0.20 utils/match.py).

    `ignore` goes first, then the groups' targets: an exact name or a `re:` pattern (`re.match`, anchored at the start
    only) beats the class name. The class is taken as `Linear`, or `Embedding` for token embeddings. Neither ignored
    nor matched is "none". Raises KizamiError `bad_config` for a config that no reader could apply, `bad_pattern` for
    patterns that kizami does not write, from here or from the function.
    """
    ignore = Matcher(_strings(quantization_config.get("ignore"), "ignore"), "ignore")
    groups: list[tuple[Matcher, Form]] = []
    for name, group in _object(quantization_config.get("config_groups"), "config_groups").items():
        where = f"config_groups.{name}"
        group = _object(group, where)
        weights = _object(group.get("weights"), f"{where}.weights")
        targets = _strings(group.get("targets"), f"{where}.targets")
        groups.append((Matcher(targets, f"{where}.targets"), _form(weights, where)))

    def form_of(module: str) -> Form:
        kind = "Embedding" if module.rpartition(".")[2] in EMBEDDINGS else "Linear"
        if ignore.by_name(module) or kind in ignore.plain:
            return "none"
        for names, form in groups:
            if names.by_name(module):
                return form
        return next((form for names, form in groups if kind in names.plain), "none")

    return form_of


def _form(weights: Mapping[str, Any], where: str) -> Form:
    match weights.get("type"), weights.get("num_bits"):
        case "int", 4:
            return "int4"
        case "float", 8:
            return "fp8"
        case found:
            raise _bad_config(f"{where}.weights (type, num_bits)", found, "('int', 4) or ('float', 8)")


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _bad_config(where, value, "an object")
    return value


def _strings(value: object, where: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise _bad_config(where, value, "a list of strings")
    return value


def _bad_config(where: str, found: object, expected: str) -> KizamiError:
    message = f"quantization_config.{where} is {printable(repr(found), 80)}, expected {expected}"
    return KizamiError(message, code="bad_config", file="config.json")


# ---------------------------------------------------------------------------------------------------- config.json


def output_config(source_config: Mapping[str, Any], quantization_config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the output: the source's, with `quantization_config` in exactly one place (in none if it is
    empty).

    That is the top level if the source has a copy there or none at all, else `text_config` if the source has it there;
    it takes the key position of the copy it replaces. Every other copy goes, at any depth: readers look in several
    places, and a stale one would win in some of them.
    """
    if not quantization_config:
        plain: dict[str, Any] = _stripped(source_config)
        return plain
    text = source_config.get("text_config")
    in_text = not _holds(source_config) and isinstance(text, dict) and _holds(text)
    new = copy.deepcopy(dict(quantization_config))
    if not in_text:
        return _replaced(source_config, new)
    result: dict[str, Any] = _stripped(source_config)
    result["text_config"] = _replaced(source_config["text_config"], new)
    return result


def _holds(config: Mapping[str, Any]) -> bool:
    return any(config.get(key) is not None for key in _KEYS)


def _replaced(config: Mapping[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`config` without any copy below, and `new` where the first copy on this level stood, else at the end."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        if key not in _KEYS:
            result[key] = _stripped(value)
        elif "quantization_config" not in result:
            result["quantization_config"] = new
    result.setdefault("quantization_config", new)
    return result


def _stripped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _stripped(item) for key, item in value.items() if key not in _KEYS}
    if isinstance(value, list):
        return [_stripped(item) for item in value]
    return copy.deepcopy(value)

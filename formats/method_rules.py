"""What a `quantization_config` of any layout says of a module, as its engines read it; method_configs.py has the
rules and where they stand."""

import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

from kizami.formats.errors import KizamiError, printable
from kizami.formats.families import EMBEDDINGS
from kizami.formats.int4_layout import W4AFP8_GROUP, Format
from kizami.formats.patterns import MAX_STEPS, Matcher
from kizami.formats.quant_config import Form, resolver

ROUTED_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.\d+\.(?P<part>.+)")
W4AFP8_BLOCK = (128, 128)


def is_embedding(module: str) -> bool:
    return module.rpartition(".")[2] in EMBEDDINGS


def is_head(module: str) -> bool:
    return module.rpartition(".")[2] == "lm_head"


def has_part(part: str, module: str) -> bool:
    """SGLang's `_module_path_match` (srt/layers/quantization/utils.py:48-59): whole components."""
    return f".{part}." in f".{module}."


def format_of_config(config: Mapping[str, Any]) -> Format:
    """The layout of the INT4 linears of a `quantization_config`. KizamiError `bad_config` for one that is none."""
    match config.get("quant_method"), config.get("checkpoint_format", "gptq"):
        case "compressed-tensors", _:
            return "pack-quantized"
        case "gptq", ("gptq" | "gptq_v2") as found:
            return "gptq_v2" if found == "gptq_v2" else "gptq"
        case "awq", _:
            return "awq"
        case "w4afp8", _:
            return "w4afp8"
        case method, found:
            known = f"compressed-tensors, gptq, awq or w4afp8; checkpoint_format {' or '.join(get_args(Format)[1:3])}"
            raise _bad_config("quant_method and checkpoint_format", (method, found), known)


def form_by_method_config(config: Mapping[str, Any], module: str) -> Form:
    """What the config says about one module; for many modules use `method_resolver`."""
    return method_resolver(config)(module)


def method_resolver(config: Mapping[str, Any]) -> Callable[[str], Form]:
    """A function from module name to form, for a config of any layout. Raises KizamiError `bad_config` for what no
    kizami writes, `bad_pattern` for foreign patterns, from here or from the function."""
    format = format_of_config(config)
    if format == "pack-quantized":
        return resolver(config)
    _check_numbers(format, config)
    left_out = {"gptq": _dynamic, "gptq_v2": _dynamic, "awq": _substrings, "w4afp8": _dotted}[format](config)
    other: Form = "fp8" if format == "w4afp8" else "int4"

    def form_of(module: str) -> Form:
        if format == "w4afp8" and ROUTED_EXPERT.fullmatch(module):
            return "int4"
        if is_embedding(module) or (is_head(module) and not config.get("lm_head")) or left_out(module):
            return "none"
        return other

    return form_of


def _check_numbers(format: Format, config: Mapping[str, Any]) -> None:
    expected: dict[str, Any] = {"bits": 4, "sym": True, "desc_act": False}
    if format == "awq":
        expected = {"bits": 4, "zero_point": True, "version": "gemm"}
    if format == "w4afp8":
        expected = {"group_size": W4AFP8_GROUP, "weight_block_size": list(W4AFP8_BLOCK)}
    for key, value in expected.items():
        if config.get(key) != value or type(config.get(key)) is not type(value):
            raise _bad_config(key, config.get(key), repr(value))


def _dynamic(config: Mapping[str, Any]) -> Callable[[str], bool]:
    rules = config.get("dynamic")
    if not isinstance(rules, dict) or not all(key.startswith("-:") for key in rules):
        raise _bad_config("dynamic", rules, 'an object with keys "-:<regex>"')
    return Matcher([f"re:{key[2:]}" for key in rules], "dynamic").by_name


def _substrings(config: Mapping[str, Any]) -> Callable[[str], bool]:
    return _searcher(config, "modules_to_not_convert", lambda entry, module: entry in module)


def _dotted(config: Mapping[str, Any]) -> Callable[[str], bool]:
    return _searcher(config, "ignored_layers", has_part)


def _searcher(config: Mapping[str, Any], key: str, hits: Callable[[str, str], bool]) -> Callable[[str], bool]:
    entries = config.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, str) and entry for entry in entries):
        raise _bad_config(key, entries, "a list of names")
    left = 2 * MAX_STEPS  # a config comes from anyone: as in patterns.Matcher

    def is_listed(module: str) -> bool:
        nonlocal left
        left -= len(entries) * (len(module) + 16)
        if left < 0:
            raise _bad_config(key, f"{len(entries)} entries", "fewer for so many modules")
        return any(hits(entry, module) for entry in entries)

    return is_listed


def _bad_config(where: str, found: object, expected: str) -> KizamiError:
    message = f"quantization_config.{where} is {printable(repr(found), 80)}, expected {expected}"
    return KizamiError(message, code="bad_config", file="config.json")

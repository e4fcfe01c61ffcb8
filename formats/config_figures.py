"""The numbers in a `quantization_config`, beside the names of modules: what loaders size their parameters by.

compressed-tensors' loaders take group and block sizes from here, not from the tensors: transformers and vLLM end with a
message about shapes, SGLang cuts the scales of experts without one (SGLang 0.5.23
layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16_moe.py), and quantized activations of another
block run everywhere, with other results.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kizami.formats.quant_config import Form

_INT4 = {
    "num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "dynamic": False, "actorder": None,
    "block_structure": None,
}  # fmt: skip
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "actorder": None}
_BLOCK, _CHANNEL = {"strategy": "block", "group_size": None}, {"strategy": "channel", "group_size": None}
_ACTIVATIONS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "block_structure": None}


class WrongFigure(NamedTuple):
    """form: of the modules that it is wrong for."""

    where: str
    found: object
    expected: object
    form: Form


def wrong_figures(config: Mapping[str, Any], group_size: int, has_int4: bool) -> Iterator[WrongFigure]:
    """Where a compressed-tensors config is wrong about INT4 in groups of `group_size` and FP8 in the blocks it names. A
    key that is left out is null."""
    whole: Form = "int4" if has_int4 else "fp8"
    top = {
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "format": "pack-quantized" if has_int4 else "float-quantized",
    }  # fmt: skip
    yield from _differences("", config, top, whole)
    for name, group in config["config_groups"].items():
        where, weights = f"config_groups.{name}", group["weights"]
        if weights.get("type") == "int":
            yield from _differences(f"{where}.weights", weights, _INT4 | {"group_size": group_size}, "int4")
            yield from _differences(where, group, {"input_activations": None, "output_activations": None}, "int4")
            yield from _format(where, group, "pack-quantized", "int4")
        else:
            yield from _fp8(where, group)


def _fp8(where: str, group: Mapping[str, Any]) -> Iterator[WrongFigure]:
    weights, inputs = group["weights"], group.get("input_activations")
    block = weights.get("block_structure")
    if _is_block(block):
        kind, activations = _BLOCK, _ACTIVATIONS | {"strategy": "group", "group_size": block[1]}
    else:
        kind, activations = _CHANNEL | {"block_structure": None}, _ACTIVATIONS | {"strategy": "token"}
    yield from _differences(f"{where}.weights", weights, _FP8 | kind, "fp8")
    yield from _differences(where, group, {"output_activations": None}, "fp8")
    yield from _format(where, group, "float-quantized", "fp8")
    if isinstance(inputs, dict):
        yield from _differences(f"{where}.input_activations", inputs, activations, "fp8")
    else:
        yield WrongFigure(f"{where}.input_activations", inputs, "an object", "fp8")


def _format(where: str, group: Mapping[str, Any], expected: str, form: Form) -> Iterator[WrongFigure]:
    if group.get("format", expected) != expected:  # none is that of the whole config
        yield WrongFigure(f"{where}.format", group["format"], expected, form)


def _differences(
    where: str, found: Mapping[str, Any], expected: Mapping[str, object], form: Form
) -> Iterator[WrongFigure]:
    for key, value in expected.items():
        other = found.get(key)
        if type(other) is not type(value) or other != value:
            yield WrongFigure(f"{where}.{key}".lstrip("."), other, value, form)


def _is_block(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)

"""The scheme that the engine resolves for a module, against the tensors that are really there under it."""

import re
from collections.abc import Iterator, Mapping

from kizami.formats.engines.context import Context, Experts, Linear, as_group
from kizami.formats.engines.finding import EngineName, Hit, Rule
from kizami.formats.engines.parts import FORM_WORDS, Form, Part
from kizami.formats.engines.quantization import Group
from kizami.formats.engines.resolve import Trouble
from kizami.formats.errors import printable

_SOURCES: Mapping[EngineName, str] = {
    "sglang": "SGLang srt/layers/quantization/compressed_tensors/utils.py, "
    "srt/models/deepseek_common/deepseek_weight_loader.py",
    "vllm": "vLLM model_executor/layers/quantization/utils/config_utils.py, model_executor/models/deepseek_v2.py",
    "transformers": "compressed-tensors src/compressed_tensors/utils/match.py",
}
_ONES: Mapping[EngineName, str] = {
    "sglang": "the engine leaves the parameter uninitialized or stops with a KeyError",
    "vllm": "the engine stops with a KeyError, or leaves expert parameters as they were allocated",
    "transformers": "the weight stays random or loading stops",
}


def expected_form(group: Group | None) -> Form | None:
    """How the tensors of a module must be stored; None for schemes that were not modelled."""
    if group is None:
        return "plain"
    if group.format in ("gptq", "awq"):
        return "qweight"
    if group.format == "w4afp8":
        return "int8"
    if group.is_packed_int:
        return "packed"
    if (group.weights.kind, group.weights.bits) == ("int", 8):
        return "int8"  # with activations; without, it is packed
    return "fp8" if group.is_fp8 else None


def _conflict(context: Context) -> Iterator[Hit]:
    for built in context.modules:
        if isinstance(built.scheme, Trouble):
            yield Hit(
                f"{_leaf(built)} {built.scheme.message}",
                "let ignore and targets name all members, by a pattern that also fits the merged name",
                built.name,
            )


def _leaf(built: Linear | Experts) -> str:
    name = built.name.rpartition(".")[2]
    return name + (" (next-token layer)" if built.place.in_mtp else "")


def _mismatch(context: Context) -> Iterator[Hit]:
    yield from _other_method(context)
    for built in context.modules:
        if isinstance(built.scheme, Trouble) or not context.is_modelled:
            continue
        group = as_group(built.scheme)
        wanted = expected_form(group)
        if wanted is None or (context.engine == "vllm" and wanted == "qweight"):
            continue  # AutoGPTQConfig there asks the tensors
        parts = built.parts if isinstance(built, Linear) else [built.first]
        found = next((part for part in parts if part.form not in (wanted, "none")), None)
        if found is None:
            continue
        says = f"the config gives {group}" if group else "the config leaves it unquantized"
        where = "ignore" if group else "targets, or take it out of ignore"
        called = "" if context.engine == "transformers" else f": the engine calls it {_any_layer(built.name)}"
        yield Hit(
            f"{_leaf(built)} is {FORM_WORDS[found.form]}, but {says}; {_ONES[context.engine]}",
            f"name it in {where}{called}",
            found.name,
        )


def _other_method(context: Context) -> Iterator[Hit]:
    """Where the way from config to module was not modelled: compressed-tensors' names are read by no other method."""
    quant = context.quant
    if quant is None or context.is_modelled:
        return
    packed = next((part for part in context.model.parts.values() if part.form == "packed"), None)
    if packed is not None:
        yield Hit(
            f"is {FORM_WORDS['packed']}, but quant_method is {quant.method}, which reads no such tensor",
            "take config.json from the publisher of these files",
            packed.name,
        )


def _status(context: Context) -> Iterator[Hit]:
    """transformers unpacks only what is `compressed`; otherwise, and without the key, it waits for float weights."""
    quant = context.quant
    if quant is None or not quant.is_compressed_tensors:
        return
    status = quant.raw.get("quantization_status")
    forms = {part.form: part.name for part in context.model.parts.values() if part.form in ("packed", "fp8")}
    if forms and status != "compressed":
        yield Hit(
            f"quantization_status is {printable(repr(status), 40)}, expected 'compressed': the weights would not be "
            "unpacked",
            'write "quantization_status": "compressed"',
            next(iter(forms.values())),
        )


def _any_layer(name: str) -> str:
    """The same words for every layer."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "N", name)


def _fused_members(context: Context) -> Iterator[Hit]:
    """Members of a merged module in two forms, where the config alone would not show it."""
    for linear in context.linears:
        forms = {part.form for part in linear.parts}
        if len(forms) > 1:
            listed = ", ".join(f"{part.name.rpartition('.')[2]} {part.form}" for part in linear.parts)
            yield Hit(
                f"{linear.leaf} is made of {listed}: one matrix has one form",
                "quantize all of them or none",
                linear.parts[0].name,
            )


def _fp8_scale_name(context: Context) -> Iterator[Hit]:
    quant = context.quant
    if quant is None:
        return
    for part, group in _parts_with(context, "fp8"):
        block = group.weights.strategy == "block"
        wanted = "weight_scale_inv" if not quant.is_compressed_tensors and block else "weight_scale"
        if quant.raw.get("linear_fp8_config") is not None and group.name == "fp8":
            wanted = "weight_scale_inv"
        if wanted in part.leaves:
            continue
        found = next(
            (leaf for leaf in ("weight_scale_inv", "weight_scale", "scale") if leaf in part.leaves), "no scale"
        )
        yield Hit(
            f"FP8 weights lie beside {found}; quant_method {quant.method} reads {wanted}",
            f"rename the tensors to {wanted} (the values are the same)"
            if found != "no scale"
            else "restore the scales",
            part.name,
        )


def _parts_with(context: Context, form: Form) -> Iterator[tuple[Part, Group]]:
    """Modules stored in this form whose scheme agrees. Of the experts of a layer the first: others must be equal."""
    for linear in context.linears:
        group = as_group(linear.scheme)
        if group is not None and expected_form(group) == form:
            yield from ((part, group) for part in linear.parts if part.form == form)
    for experts in context.experts:
        group = as_group(experts.scheme)
        if group is not None and expected_form(group) == form:
            for projection in experts.by_expert[min(experts.by_expert)].values():
                if projection.form == form:
                    yield projection, group


def _scale_shape(context: Context) -> Iterator[Hit]:
    for part, group in _parts_with(context, "packed"):
        yield from _packed_shapes(part, group)
    for part, group in _parts_with(context, "fp8"):
        scale = part.leaves.get("weight_scale_inv") or part.leaves.get("weight_scale")
        shape = part.shape()
        if scale is None or shape is None:
            continue
        rows, cols = shape
        if group.weights.strategy == "block" and group.weights.block is not None:
            high, wide = group.weights.block
            expected: set[tuple[int, ...]] = {(-(-rows // high), -(-cols // wide))}
        elif group.weights.strategy == "channel":
            expected = {(rows, 1), (rows,)}
        else:
            expected = {(), (1,), (1, 1)}
        if scale.shape not in expected:
            shapes = " or ".join(str(list(shape)) for shape in sorted(expected))
            yield Hit(
                f"{part.name.rpartition('.')[2]} [{rows}, {cols}] has a scale of shape {list(scale.shape)}, the "
                f"strategy {group.weights.strategy} of the config needs {shapes}",
                "correct the strategy, or the block size, in the config",
                part.name,
            )


def _packed_shapes(part: Part, group: Group) -> Iterator[Hit]:
    packed, scale = part.leaves["weight_packed"], part.leaves.get("weight_scale")
    shape = part.shape(group.weights.bits)
    leaf = part.name.rpartition(".")[2]
    if shape is None or scale is None:
        missing = "weight_scale" if scale is None else "a weight_packed with two dimensions"
        yield Hit(f"{leaf} has no {missing}", "restore it: a scale that is missing loads without a word", part.name)
        return
    rows, cols = shape
    args = group.weights
    groups = 1 if args.strategy == "channel" else cols // (args.group_size or max(cols, 1))
    if scale.shape != (rows, groups):
        size = cols // scale.shape[1] if len(scale.shape) == 2 and scale.shape[1] else 0
        yield Hit(
            f"{leaf} has {list(packed.shape)} words and scales of shape {list(scale.shape)}, as for groups of {size}; "
            f"the config says {args.bits} bits, group {args.group_size}: expected {[rows, groups]}",
            "correct num_bits and group_size in the config",
            part.name,
        )
    if args.symmetric and "weight_zero_point" in part.leaves:
        yield Hit(
            f"{leaf} has weight_zero_point, the config says symmetric",
            "write symmetric: false",
            part.name,
        )
    if not args.symmetric and "weight_zero_point" not in part.leaves:
        yield Hit(f"{leaf} has no weight_zero_point, the config says asymmetric", "write symmetric: true", part.name)
    if "weight_shape" not in part.leaves:
        yield Hit(f"{leaf} has no weight_shape", "write it: I32 [2] with rows and columns", part.name)


def _scale_dtype(context: Context) -> Iterator[Hit]:
    """Scales are allocated in the model's dtype and rounded when they are loaded."""
    model = context.model.dtype
    for part, _ in _parts_with(context, "packed"):
        scale = part.leaves.get("weight_scale")
        if scale is not None and scale.dtype != model:
            yield Hit(
                f"INT4 scales are {scale.dtype}, the model is {model}: they are rounded when they are loaded",
                f"store them as {model}, and choose the codes for the rounded scales",
                part.name,
            )


RULES = (
    Rule("scheme_conflict", "error", _SOURCES, _conflict),
    Rule("scheme_mismatch", "error", _SOURCES, _mismatch),
    Rule(
        "not_compressed",
        "error",
        {"transformers": "transformers quantizers/quantizer_compressed_tensors.py (is_quantization_compressed)"},
        _status,
    ),
    Rule("fused_members", "error", {name: _SOURCES[name] for name in ("sglang", "vllm")}, _fused_members),
    Rule(
        "fp8_scale_name",
        "error",
        {
            "sglang": "SGLang srt/layers/quantization/fp8.py, .../schemes/compressed_tensors_w8a8_fp8.py",
            "vllm": "vllm #30823; vLLM .../schemes/compressed_tensors_w8a8_fp8.py",
            "transformers": "compressed-tensors src/compressed_tensors/compressors",
        },
        _fp8_scale_name,
    ),
    Rule(
        "scale_shape",
        "error",
        {
            "sglang": "SGLang .../schemes/compressed_tensors_wNa16_moe.py, compressed_tensors_w8a8_fp8.py",
            "vllm": "vLLM .../compressed_tensors_moe_wna16.py, schemes/compressed_tensors_w8a8_fp8.py",
            "transformers": "compressed-tensors src/compressed_tensors/compressors",
        },
        _scale_shape,
    ),
    Rule(
        "scale_dtype",
        "warning",
        {
            "sglang": "SGLang .../schemes/compressed_tensors_wNa16_moe.py (params_dtype); sglang #9248",
            "vllm": "vLLM .../compressed_tensors_moe_wna16.py (params_dtype)",
        },
        _scale_dtype,
    ),
)

"""Tensors with rules of their own: router and its bias, heads, MLA projections."""

from collections.abc import Iterator

from kizami.formats.engines.context import Context, as_group
from kizami.formats.engines.finding import Hit, Rule
from kizami.formats.engines.naming import leaf_of
from kizami.formats.engines.parts import FORM_WORDS, Part
from kizami.formats.families import Role

_LOADER = "SGLang srt/models/deepseek_common/deepseek_weight_loader.py"
_VLLM_MODEL = "vLLM model_executor/models/deepseek_v2.py"
_QUANTIZED = frozenset({"packed", "fp8", "qweight", "int8", "other"})


# ---------------------------------------------------------------------------------------------------- plain tensors


def _router_bias(context: Context) -> Iterator[Hit]:
    for part in context.model.parts.values():
        bias = part.leaves.get("e_score_correction_bias")
        if bias is not None and bias.dtype != "F32":
            yield Hit(
                f"e_score_correction_bias is {bias.dtype}, expected F32: BF16 leaves 8 of 238 values and sends most "
                "tokens to other experts",
                "copy the tensor from the source as it is",
                part.name,
            )


def _plain(context: Context) -> Iterator[Hit]:
    """Parameters and classes that no engine quantizes."""
    for part in context.model.outside_experts:
        role = part.place.role
        if part.form not in _QUANTIZED or role not in (Role.ROUTER, Role.EMBEDDING, Role.MTP, Role.HEAD, Role.VISION):
            continue
        if role is Role.HEAD and _head_is_named(context, part):
            continue
        if role is Role.HEAD and context.engine == "sglang" and part.place.in_mtp:
            continue  # the draft takes the main model's head
        yield Hit(
            f"{leaf_of(part)} ({role.value.replace('_', ' ')}) is {FORM_WORDS[part.form]}: it is read plain",
            "store it as BF16, without a scale",
            part.name,
        )


def _head_is_named(context: Context, part: Part) -> bool:
    """A head is quantized where a target names it; in blocks of FP8 never (SGLang `get_lm_head_scheme`)."""
    if part.form == "packed" and context.quant is not None:
        return any(leaf_of(part) in target for group in context.quant.groups for target in group.targets)
    return False


# ---------------------------------------------------------------------------------------------------- MLA


def _mla(context: Context) -> Iterator[Hit]:
    """Packed forms of projections that the engine takes apart or puts together itself."""
    sglang = context.engine == "sglang"
    for part in context.model.outside_experts:
        if part.form not in ("packed", "qweight") or part.place.role not in (Role.ATTENTION, Role.INDEXER):
            continue
        leaf = leaf_of(part)
        is_awq = context.quant is not None and context.quant.method in ("awq", "awq_marlin")
        if leaf == "kv_b_proj" and sglang and not is_awq:
            yield _spare(part, "its .weight is read after loading, and a packed one has none (AttributeError)")
        elif leaf == "kv_b_proj" and not sglang:
            yield Hit(
                f"kv_b_proj is {FORM_WORDS[part.form]}: it is decoded when it is loaded (vLLM 0.8 and later), and "
                "GLM-4.7-Flash-AWQ was reported to fail there (vllm #34561)",
                "leave kv_b_proj out of INT4",
                part.name,
                "warning",
            )
        elif leaf in ("q_a_proj", "kv_a_proj_with_mqa") and sglang and part.form == "packed":
            yield _spare(part, "it is concatenated tensor by tensor, and weight_shape [2] twice does not fit")
        elif leaf in ("wk", "weights_proj") and part.place.role is Role.INDEXER:
            yield _spare(part, "wk and weights_proj are fused into one BF16 matrix")


def _spare(part: Part, why: str) -> Hit:
    return Hit(
        f"{leaf_of(part)} is {FORM_WORDS[part.form]}: {why}",
        "leave the MLA projections and the indexer out of INT4",
        part.name,
    )


def _old_kv_b(context: Context) -> Iterator[Hit]:
    for part in context.model.parts.values():
        if part.form == "packed" and leaf_of(part) == "kv_b_proj":
            yield _spare(part, "it is looked for as weight or qweight only")


def _fp8_indexer(context: Context) -> Iterator[Hit]:
    """vLLM decodes FP8 for wk alone."""
    for part in context.model.outside_experts:
        if part.form == "fp8" and part.place.role is Role.INDEXER and leaf_of(part) == "weights_proj":
            yield Hit(
                "indexer.weights_proj is FP8: only wk is decoded, and this one is read as BF16",
                "store it as BF16",
                part.name,
            )


def _kv_b_block(context: Context) -> Iterator[Hit]:
    quant = context.quant
    if quant is None or not quant.is_compressed_tensors or quant.raw.get("linear_fp8_config") is not None:
        return
    for linear in context.linears:
        group = as_group(linear.scheme)
        if linear.leaf != "kv_b_proj" or group is None or group.weights.strategy != "block":
            continue
        if "Linear" not in group.targets:
            yield Hit(
                f"kv_b_proj is FP8 in blocks, and {group.name} does not target Linear: the block size is looked for "
                "under that target, and without it the scales may be taken for one scale",
                "let the FP8 group target Linear and the INT4 group the experts' names",
                linear.name,
            )


def _fused_rows(context: Context) -> Iterator[Hit]:
    """q_a comes first in the fused matrix: its rows must be whole blocks for the scales to line up."""
    for linear in context.linears:
        group = as_group(linear.scheme)
        if not linear.leaf.startswith("fused_qkv_a_proj") or group is None or group.weights.block is None:
            continue
        for part in linear.parts:
            shape = part.shape()
            if leaf_of(part) == "q_a_proj" and shape and shape[0] % group.weights.block[0]:
                yield Hit(
                    f"q_a_proj has {shape[0]} rows, no multiple of the block {group.weights.block[0]}: the scales of "
                    "the fused q_a and kv_a do not line up",
                    "store q_a_proj and kv_a_proj_with_mqa as BF16",
                    part.name,
                )


def _mixed_unproven(context: Context) -> Iterator[Hit]:
    """SGLang, compressed-tensors block FP8 on MLA: read in the sources, run by nobody here."""
    if context.model.attention != "mla" or context.quant is None or not context.quant.is_compressed_tensors:
        return
    groups = [as_group(linear.scheme) for linear in context.linears if linear.place.role is Role.ATTENTION]
    if any(group is not None and group.weights.strategy == "block" for group in groups):
        yield Hit(
            "block FP8 under compressed-tensors on MLA was read in the sources and not run on a GPU",
            "compare its answers with the source's before you serve it",
        )


RULES = (
    Rule(
        "router_bias_dtype",
        "error",
        {
            "sglang": "sglang #31213, #37133",
            "vllm": "vllm #50761",
            "transformers": "sglang #31213 (the values are lost in the file)",
        },
        _router_bias,
    ),
    Rule("not_plain", "error", {"sglang": _LOADER, "vllm": f"{_VLLM_MODEL}; vllm #31757"}, _plain),
    Rule(
        "mla_int4",
        "error",
        {"sglang": f"{_LOADER} (post_load_weights, cached_a_proj); sglang #19106", "vllm": "vllm #13725, #34561"},
        _mla,
    ),
    Rule("mla_int4_version", "error", {"vllm": "vllm #13725, merged after 0.7.3"}, _old_kv_b, ranges={"vllm": "<0.8"}),
    Rule("fp8_weights_proj", "error", {"vllm": f"{_VLLM_MODEL} _try_load_fp8_indexer_wk"}, _fp8_indexer),
    Rule("kv_b_not_on_linear", "warning", {"sglang": f"{_LOADER} _resolve_layer_weight_block_size"}, _kv_b_block),
    Rule("fused_rows", "error", {"sglang": f"{_LOADER} (cached_a_proj)", "vllm": _VLLM_MODEL}, _fused_rows),
    Rule(
        "not_proven",
        "note",
        {"sglang": _LOADER, "vllm": "vLLM .../schemes/compressed_tensors_w8a8_fp8.py"},
        _mixed_unproven,
    ),
)

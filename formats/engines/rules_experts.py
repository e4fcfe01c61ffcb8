"""Routed and shared experts: equal within a layer, all there, and fused only when they have one form."""

from collections.abc import Iterator

from kizami.formats.engines.context import Context, Experts, Signature, as_group
from kizami.formats.engines.finding import Hit, Rule
from kizami.formats.engines.parts import FORM_WORDS, Form, Part
from kizami.formats.engines.resolve import EXPERT_PROJECTIONS
from kizami.formats.families import Role

_SILENT = "engines ask expert 0 for the form of all, and an expert that differs loads without a word"
_FUSED_COUNT = 256  # the only count that DeepSeek's class fuses for formats other than Quark
_DEEPSEEK_CLASSES = frozenset({"deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2", "kimi_k25"})
_MAX_EXPERTS = 100_000


def _uniform(context: Context) -> Iterator[Hit]:
    signatures = context.model.signatures
    for experts in context.experts:
        by_leaf: dict[str, dict[Signature, list[Part]]] = {}
        for part in experts.parts():
            by_leaf.setdefault(part.name.rpartition(".")[2], {}).setdefault(signatures[part.name], []).append(part)
        for leaf, kinds in by_leaf.items():
            usual = max(kinds, key=lambda kind: len(kinds[kind]))
            for kind, parts in kinds.items():
                if kind is not usual:
                    yield from _deviations(leaf, kinds[usual][0], parts)


def _deviations(leaf: str, usual: Part, parts: list[Part]) -> Iterator[Hit]:
    what = _difference(usual, parts[0])
    for part in parts:
        yield Hit(f"{leaf} of an expert {what}; {_SILENT}", "write all experts of a layer in one form", part.name)


def _difference(usual: Part, part: Part) -> str:
    if missing := sorted(usual.leaves.keys() - part.leaves.keys()):
        return f"has no {', '.join(missing)}, unlike the others of its layer"
    if extra := sorted(part.leaves.keys() - usual.leaves.keys()):
        return f"also has {', '.join(extra)[:100]}, unlike the others of its layer"
    leaf = next(leaf for leaf in usual.leaves if _spec(usual, leaf) != _spec(part, leaf))
    return f"has {leaf} {_spec(part, leaf)}, the others {_spec(usual, leaf)}"


def _spec(part: Part, leaf: str) -> str:
    info = part.leaves[leaf]
    return f"{info.dtype} {list(info.shape)}"


def _count(context: Context) -> int | None:
    return context.model.number("n_routed_experts", "num_local_experts", "num_experts")


def _complete(context: Context) -> Iterator[Hit]:
    stated = _count(context)
    for experts in context.experts:
        present = experts.by_expert
        total = stated if stated is not None and 0 < stated <= _MAX_EXPERTS else max(present) + 1
        wanted = range(min(total, _MAX_EXPERTS))
        missing = [number for number in wanted if number not in present]
        if missing:
            yield Hit(
                f"{len(missing)} of {total} experts are not there, expert {missing[0]} is the first",
                "restore them: engines leave such experts as they were allocated",
                f"{experts.name}.{missing[0]}",
            )
        for number, projections in present.items():
            absent = [name for name in EXPERT_PROJECTIONS if name not in projections]
            if absent:
                strange = sorted(set(projections) - set(EXPERT_PROJECTIONS))
                named = f"; it has {', '.join(strange)[:60]}" if strange else ""
                yield Hit(
                    f"an expert has no {', '.join(absent)}{named}",
                    "engines load experts by the names gate_proj, up_proj and down_proj",
                    f"{experts.name}.{number}",
                )
        if total <= max(present):
            yield Hit(
                f"expert {max(present)} is there, but the config counts {total}",
                "correct n_routed_experts, or remove the surplus",
                f"{experts.name}.{max(present)}",
            )


def _three_d(context: Context) -> Iterator[Hit]:
    """transformers 5's layout in memory, saved as it is."""
    for part in context.model.parts.values():
        if part.name.endswith(".experts") and any("proj" in leaf for leaf in part.leaves):
            yield Hit(
                "all experts of a layer lie in one 3-D tensor",
                "split them by expert: vLLM and compressed-tensors know experts one by one only",
                part.name,
            )


def _shared_fusion(context: Context) -> Iterator[Hit]:
    """`shared_experts_fusion_disable_reason` of the model class, as far as a checkpoint decides it."""
    if not _fuses(context):
        return
    routed = {experts.place.layer: experts for experts in context.experts}
    for part in context.model.parts.values():
        place = part.place
        if place.role is not Role.SHARED_EXPERT or part.form == "none" or place.part != "gate_proj":
            continue
        experts = routed.get(place.layer)
        form: Form = experts.first.form if experts else part.form
        if experts and form != part.form:
            yield Hit(
                f"shared experts are {FORM_WORDS[part.form]}, routed ones {FORM_WORDS[form]}: this model class fuses "
                "both into one kernel, and the shared ones are then not loaded, with a warning at most",
                "serve with --disable-shared-experts-fusion",
                part.name,
            )


def _fuses(context: Context) -> bool:
    model = context.model
    if context.ep > 1 or model.number("n_shared_experts") != 1:
        return False
    if model.family.name == "glm4_moe":  # no condition on the count or the format but w4afp8
        return context.quant is None or context.quant.method != "w4afp8"
    if model.family.name not in _DEEPSEEK_CLASSES or _count(context) != _FUSED_COUNT:
        return False
    return not _is_int4_under_linear(context)


def _is_int4_under_linear(context: Context) -> bool:
    """`is_wint4afp8_or_wint4a16_config`: the one thing that makes SGLang switch the fusion off by itself."""
    quant = context.quant
    if quant is None or quant.method == "w4afp8":
        return quant is not None
    linear = [group for group in quant.groups if "Linear" in group.targets]
    args = linear[-1].weights if linear else None
    return (
        args is not None
        and quant.format == "pack-quantized"
        and (args.bits, args.kind, args.symmetric, args.dynamic) == (4, "int", True, False)
    )


def _mixed_layers(context: Context) -> Iterator[Hit]:
    """A layer whose gate, up and down are stored in different forms."""
    for experts in context.experts:
        first = {part.form for part in _first_expert(experts)}
        if len(first) > 1:
            yield Hit(
                f"gate, up and down of expert 0 are stored as {', '.join(sorted(first))}",
                "store the three in one form",
                experts.first.name,
            )


def _fp8_in_blocks(context: Context) -> Iterator[Hit]:
    """It multiplies each expert's weight [N, K] with its scale as they are, which works for [N, 1] and [1] only."""
    for experts in context.experts:
        group = as_group(experts.scheme)
        if group is not None and group.is_fp8 and group.weights.strategy == "block":
            yield Hit(
                "experts are FP8 in blocks: their weights are multiplied with the grid of scales as it is, and loading "
                "stops with a RuntimeError",
                "serve it with SGLang or vLLM; for transformers write --scheme bf16",
                experts.first.name,
            )


def _first_expert(experts: Experts) -> list[Part]:
    return list(experts.by_expert[min(experts.by_expert)].values())


RULES = (
    Rule(
        "expert_differs",
        "error",
        {
            "sglang": "SGLang .../compressed_tensors.py get_moe_scheme (experts.0 alone)",
            "vllm": "vLLM .../compressed_tensors_moe/compressed_tensors_moe.py get_moe_method (experts.0 alone)",
            "transformers": "run with transformers 5.24: a missing expert weight_scale loads with wrong logits",
        },
        _uniform,
    ),
    Rule(
        "expert_forms",
        "error",
        {
            "sglang": "SGLang .../compressed_tensors.py get_moe_scheme",
            "vllm": "vLLM .../compressed_tensors_moe/compressed_tensors_moe.py get_moe_method",
        },
        _mixed_layers,
    ),
    Rule(
        "experts_missing",
        "error",
        {
            "sglang": "SGLang srt/models/deepseek_common/deepseek_weight_loader.py (only warns)",
            "vllm": "vLLM model_executor/models/deepseek_v2.py (missing experts load without a word)",
            "transformers": "transformers core_model_loading.py",
        },
        _complete,
    ),
    Rule(
        "fp8_experts_in_blocks",
        "error",
        {"transformers": "run with transformers 5.24: integrations/compressed_tensors.py CompressedTensorsDequantize"},
        _fp8_in_blocks,
    ),
    Rule(
        "experts_in_3d",
        "note",
        {
            "sglang": "SGLang .../deepseek_weight_loader.py _load_fused_expert_tensor",
            "vllm": "vLLM model_executor/models/deepseek_v2.py",
            "transformers": "transformers core_model_loading.py",
        },
        _three_d,
    ),
    Rule(
        "shared_experts_fusion",
        "warning",
        {
            "sglang": "SGLang srt/models/deepseek_v2.py, glm4_moe.py shared_experts_fusion_disable_reason; "
            "sglang #25261, #37268"
        },
        _shared_fusion,
        per_rank=True,
    ),
)

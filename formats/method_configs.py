"""`quantization_config` of the layouts other than pack-quantized; method_rules.py reads it as their engines do.

Nothing in these configs speaks of single experts, and SGLang gives them no way out: its FusedMoE is INT4 whatever
`dynamic` says (SGLang 0.5.23 srt/layers/quantization/gptq/gptq.py:440-449, w4afp8.py:93-106). So every routed expert is
INT4, or the layout is refused.

gptq     `dynamic`: {"-:<regex>": {}}; the first one that `re.match`es the runtime name leaves it unquantized (vLLM
         0.33 utils/gptq_utils.py:85-103, SGLang utils.py:254-272, GPTQModel 7.7 quantization/config.py
         `_resolve_dynamic_override`). Fused names are not expanded to their members. vLLM also takes each linear
         without an integer tensor as unquantized (auto_gptq.py:273-298). "lm_head" says whether the head is quantized.
awq      `modules_to_not_convert`: substrings of the runtime name (vLLM auto_awq.py:288-343 with
         utils/quant_utils.py:619-693, SGLang awq.py:61-62). `zero_point` is true: AWQ has no symmetric form, its zero
         points are all 8.
w4afp8   SGLang only. `from_config` (w4afp8.py:78-90) reads nothing but `quant_method`: routed experts are INT4, every
         LinearBase is block FP8 [128, 128] with `weight_scale_inv`. `ignored_layers` is ours, for other readers: it
         lists the modules that SGLang builds without a quantization config. Any other BF16 linear would be cast to
         FP8 without a scale and without a word (fp8.py:654-671), so it is refused.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from kizami.formats.errors import KizamiError
from kizami.formats.ignore_rules import derive_ignore
from kizami.formats.int4_layout import W4AFP8_GROUP, Format
from kizami.formats.method_rules import (
    ROUTED_EXPERT,
    W4AFP8_BLOCK,
    has_part,
    is_embedding,
    is_head,
    method_resolver,
)
from kizami.formats.quant_config import Form

_LAYER = re.compile(r".*\blayers\.\d+\.")
_W4AFP8_PARTS = frozenset({"gate_proj", "up_proj", "down_proj"})

# Modules that SGLang 0.5.23 builds without the config: an nn.Parameter (router), nn.Linear (eh_proj), heads and
# embeddings, the indexer's BF16 matrix (dsa_indexer.py:353-359), vision parts of Kimi-K2.5 (kimi_k25.py).
_UNQUANTIZED_PARTS = (
    "lm_head", "mlp.gate", "eh_proj", "shared_head", "indexer.wk", "indexer.weights_proj", "vision_tower",
    "mm_projector", "multi_modal_projector", "visual",
)  # fmt: skip
# For AWQ, as substrings: "mlp.gate" is in mlp.gate_proj and mlp.gate_up_proj too, and in no expert's name.
_SUBSTRINGS = (
    "lm_head", "self_attn", "shared_experts", "mlp.gate", "mlp.up_proj", "mlp.down_proj", "eh_proj", "shared_head",
    "vision_tower", "mm_projector", "multi_modal_projector", "visual.",
)  # fmt: skip

# On GPUs the zero points of symmetric checkpoints are not read (vLLM auto_gptq.py:720-735). On CPUs 0.33's
# fused_moe/experts/cpu_moe.py:823-835 adds 1 to what is stored, whatever the config says (read), and 0.32's emulation
# takes it as it is (run): one of them is a step off with either form.
_ON_CPU = "vLLM's CPU backends do not agree about GPTQ zero points: on a CPU compare answers before you rely on them"
READER_NOTES: dict[Format, tuple[str, ...]] = {
    "pack-quantized": (),
    "gptq": (_ON_CPU,),
    "gptq_v2": (_ON_CPU,),
    "awq": (),
    # w4afp8.py:199-212 and :272-284: the parameters are made as 1.0 and stay so.
    "w4afp8": (
        "SGLang only, SM90 or later",
        "Experts' activations are cast to FP8 at scale 1.0: nothing is calibrated",
    ),
}
"""What a user of the layout should be told and no rule of `kizami check` says."""

# Runtime names of several linears in one (SGLang's and vLLM's models/deepseek_v2.py, glm4_moe.py).
_FUSED = {
    ("gate_proj", "up_proj"): ("gate_up_proj",),
    ("q_a_proj", "kv_a_proj_with_mqa"): ("fused_qkv_a_proj_with_mqa", "fused_qkv_a_proj"),
    ("q_proj", "k_proj", "v_proj"): ("qkv_proj",),
}
_FUSED_OF = {member: (members, names) for members, names in _FUSED.items() for member in members}


def build_method_config(
    format: Format,
    group_size: int,
    *,
    packed: Sequence[str],
    plain: Sequence[str],
    fp8: Sequence[str] = (),
    fp8_block: tuple[int, int] | None = W4AFP8_BLOCK,
) -> dict[str, Any]:
    """The config that says of each module (those with a 2-D weight) the form it is given in; pack-quantized has its own
    builder in quant_config.py. Raises KizamiError `unsupported_layout` for a set of modules that the layout's engines
    cannot be told of."""
    assert packed, "an INT4 layout has at least one packed module"
    assert format != "pack-quantized"
    _check_experts(format, [*plain, *fp8])
    match format:
        case "gptq" | "gptq_v2":
            config = _gptq(format, group_size, packed, plain, fp8)
        case "awq":
            config = _awq(group_size, packed, plain, fp8)
        case "w4afp8":
            config = _w4afp8(group_size, packed, plain, fp8, fp8_block)
    _self_check(config, {"int4": packed, "fp8": fp8, "none": plain})
    return config


def _check_experts(format: Format, others: Sequence[str]) -> None:
    odd = [module for module in others if ROUTED_EXPERT.fullmatch(module)]
    if odd:
        raise _unsupported(
            odd[0],
            f"is a routed expert that stays as it is ({len(odd)} of them); {format} has every routed expert in INT4",
            "quantize all experts (--mtp quantize or drop, no --ignore for experts), or use --format pack-quantized",
        )


def _refuse_fp8(format: Format, fp8: Sequence[str]) -> None:
    if fp8:
        raise _unsupported(
            fp8[0],
            f"stays FP8 ({len(fp8)} modules do); {format} has INT4 and unquantized modules only",
            "use --rest bf16, or --format pack-quantized",
        )


def _gptq(
    format: Format, group_size: int, packed: Sequence[str], plain: Sequence[str], fp8: Sequence[str]
) -> dict[str, Any]:
    _refuse_fp8(format, fp8)
    ignore = derive_ignore(plain, packed, num_hidden_layers=None, mtp_dense=False, has_mtp=False)
    patterns = [entry[3:] if entry.startswith("re:") else re.escape(entry) + "$" for entry in ignore]
    return {
        "quant_method": "gptq", "bits": 4, "group_size": group_size, "sym": True, "desc_act": False,
        "static_groups": False, "true_sequential": False, "lm_head": any(map(is_head, packed)), "format": format,
        "checkpoint_format": format, "pack_dtype": "int32", "dynamic": {f"-:{pattern}": {} for pattern in patterns},
    }  # fmt: skip


def _awq(group_size: int, packed: Sequence[str], plain: Sequence[str], fp8: Sequence[str]) -> dict[str, Any]:
    _refuse_fp8("awq", fp8)
    return {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
        "lm_head": any(map(is_head, packed)), "modules_to_not_convert": _parts(_SUBSTRINGS, plain, packed),
    }  # fmt: skip


def _w4afp8(
    group_size: int, packed: Sequence[str], plain: Sequence[str], fp8: Sequence[str], fp8_block: tuple[int, int] | None
) -> dict[str, Any]:
    if group_size != W4AFP8_GROUP:
        raise KizamiError(
            f"w4afp8 has groups of {W4AFP8_GROUP} only, not {group_size}",
            code="unsupported_group_size",
            hint=f"use --group-size {W4AFP8_GROUP}",
        )
    if fp8 and fp8_block != W4AFP8_BLOCK:
        raise _unsupported(
            fp8[0],
            f"has {'one FP8 scale per row' if fp8_block is None else f'FP8 blocks of {list(fp8_block)}'}; w4afp8 has "
            f"blocks of {list(W4AFP8_BLOCK)} only",
            "use --format pack-quantized",
        )
    for module in packed:
        routed = ROUTED_EXPERT.fullmatch(module)
        if routed is None or routed["part"] not in _W4AFP8_PARTS:
            raise _unsupported(
                module,
                "is to be INT4; w4afp8 has INT4 in routed experts' gate_proj, up_proj and down_proj only",
                "use --format pack-quantized",
            )
    linears = [module for module in plain if not is_embedding(module)]
    for module in linears:
        if not any(has_part(part, module) for part in _UNQUANTIZED_PARTS):
            raise _unsupported(
                module,
                "is no FP8 weight; SGLang's w4afp8 reads every linear but the routed experts as FP8 in blocks of "
                f"{list(W4AFP8_BLOCK)}",
                "use --rest fp8, or --format pack-quantized",
            )
    listed = [part for part in _UNQUANTIZED_PARTS if any(has_part(part, module) for module in linears)]
    if any(has_part(part, module) for part in listed for module in fp8):  # e.g. one layer's wk in FP8, another's not
        listed = [module.removeprefix("language_model.") for module in linears]
    return {
        "quant_method": "w4afp8", "group_size": group_size, "weight_block_size": list(W4AFP8_BLOCK),
        "linear_activation_scheme": "dynamic", "moe_activation_scheme": "static", "ignored_layers": listed,
    }  # fmt: skip


def _parts(known: Sequence[str], plain: Sequence[str], packed: Sequence[str]) -> list[str]:
    """Substrings that are in the name of each module of `plain` and of no module of `packed`, the known ones first."""
    text = "\n".join(packed)
    left = [module for module in plain if not is_embedding(module)]
    entries = [part for part in known if any(part in module for module in left) and part not in text]
    left = [module for module in left if not any(part in module for part in entries)]
    for module in left:
        if any(part in module for part in entries):
            continue
        name = module.removeprefix("language_model.")  # SGLang's runtime names of Kimi-K2.5 lack it
        in_any_layer = _LAYER.sub("", name)
        entry = next((part for part in (in_any_layer, name) if part not in text), None)
        if entry is None:
            raise _unsupported(
                module,
                "stays as it is, and its name is part of the name of an INT4 module: AWQ cannot tell them apart",
                "use --format pack-quantized",
            )
        entries.append(entry)
    return entries


def _unsupported(module: str, message: str, hint: str) -> KizamiError:
    return KizamiError(message, code="unsupported_layout", tensor=f"{module}.weight", hint=hint)


def _self_check(config: Mapping[str, Any], written: Mapping[Form, Sequence[str]]) -> None:
    """Also under the names that engines have at run time: fused linears, and a layer's experts as one module."""
    form_of = method_resolver(config)
    forms: dict[str, Form] = {module: form for form, modules in written.items() for module in modules}
    for module, form in forms.items():
        if form_of(module) != form:  # not `assert`: a wrong config must not pass under python -O either
            raise AssertionError(f"{module} is written as {form}, the config says {form_of(module)}")
    names = chain.from_iterable(_runtime_names(module, forms) for module in forms)
    for name, form in dict.fromkeys(names):
        if config["quant_method"] != "w4afp8" and form_of(name) != form:
            raise _unsupported(
                name,
                f"is the engines' name for modules that are {form}, and an entry of the config says {form_of(name)}",
                "use --format pack-quantized",
            )


def _runtime_names(module: str, forms: Mapping[str, Form]) -> list[tuple[str, Form]]:
    if routed := ROUTED_EXPERT.fullmatch(module):
        return [(routed["layer"], forms[module])]
    parent, _, leaf = module.rpartition(".")
    members, fused = _FUSED_OF.get(leaf, ((), ()))
    same = all(forms.get(f"{parent}.{member}", forms[module]) == forms[module] for member in members)
    return [(f"{parent}.{name}", forms[module]) for name in fused] if same and parent else []

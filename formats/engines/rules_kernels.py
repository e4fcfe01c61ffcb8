"""Kernels whose behaviour on these files was not proven, and rules of transformers."""

from collections.abc import Iterator

from kizami.formats.engines.context import Context, as_group
from kizami.formats.engines.finding import Hit, Rule
from kizami.formats.families import Role

# transformers 5.24 models/auto/configuration_auto.py does not have it: remote code is needed.
_NOT_REGISTERED = frozenset({"kimi_k2"})


def _negative_scales(context: Context) -> Iterator[Hit]:
    """Marlin and the Triton kernel multiply by the scale as it is, and so do the decoders of both engines."""
    groups = [group for built in context.modules if (group := as_group(built.scheme)) and group.is_packed_int]
    if not context.model.served.has_negative_scales or not groups:
        return
    if any(group.inputs is not None for group in groups):
        yield Hit(
            "some INT4 scales are negative: the CUTLASS W4A8 kernel is binary, and nobody here has run it",
            "convert with --scale-sign positive",
        )
    elif context.engine == "sglang":
        yield Hit(
            "some INT4 scales are negative: Marlin and Triton multiply by them; the MxInt4 kernel of "
            "flashinfer_trtllm is binary, and nobody here has run it",
            "do not choose --moe-runner-backend flashinfer_trtllm, or convert with --scale-sign positive",
        )
    else:
        yield Hit(
            "some INT4 scales are negative: Marlin and Triton multiply by them; with int8 activations Marlin "
            "divides by the largest scale, not by the largest magnitude; the MxInt4 kernel is binary and was not run",
            "leave VLLM_MARLIN_INPUT_DTYPE unset, or convert with --scale-sign positive",
        )


def _trtllm_bias(context: Context) -> Iterator[Hit]:
    if any("e_score_correction_bias" in part.leaves for part in context.model.parts.values()):
        yield Hit(
            "the router's bias is F32, as it must be; the trtllm MoE kernel was reported to give NaN with it",
            "if answers are NaN, choose another --moe-runner-backend",
        )


def _registered(context: Context) -> Iterator[Hit]:
    model = context.model
    if model.family.name in _NOT_REGISTERED:
        has_code = isinstance(model.served.config.get("auto_map"), dict)
        yield Hit(
            f"model_type {model.family.name} is not registered: AutoConfig needs the checkpoint's own code",
            "load with trust_remote_code=True, after reading the code"
            if has_code
            else "config.json has no auto_map: take it and the *.py files from the source",
            severity=None if has_code else "error",
        )


def _partial_blocks(context: Context) -> Iterator[Hit]:
    """The FP8 dequantizer takes the block size as rows // scale rows."""
    quant = context.quant
    if quant is None or quant.method != "fp8":
        return
    for part in context.model.parts.values():
        scale = part.leaves.get("weight_scale_inv")
        shape = part.shape()
        if part.form != "fp8" or scale is None or len(scale.shape) != 2 or shape is None or part.place.in_mtp:
            continue
        rows, grid = shape[0], scale.shape[0]
        block = quant.block[0] if quant.block else 128
        if not grid or rows % block == 0 or grid == 1:
            continue
        leaf = part.name.rpartition(".")[2]
        if rows % grid:
            yield Hit(
                f"{leaf}: {rows} rows over {grid} scale rows is no whole block; loading raises where FP8 is decoded "
                "(CPU, dequantize=True)",
                "load the BF16 form",
                part.name,
                "warning",
            )
        else:
            yield Hit(
                f"{leaf}: {rows} rows over {grid} scale rows is read as blocks of {rows // grid}, they have {block}: "
                "wrong weights without a word where FP8 is decoded (CPU, dequantize=True)",
                "load the BF16 form",
                part.name,
            )


def _run_compressed(context: Context) -> Iterator[Hit]:
    packed = any(part.form == "packed" for part in context.model.parts.values())
    if packed and context.model.family.name == "kimi_k25":
        yield Hit(
            "Kimi-K2.5's own code reads .weight of linears that compressed-tensors keeps packed",
            "load with CompressedTensorsConfig(dequantize=True), or run_compressed=False in older versions",
        )


def _mixed_groups(context: Context) -> Iterator[Hit]:
    """The dense scheme is the first group whose targets do not contain "experts"."""
    groups = context.quant.groups if context.quant else ()
    for group in groups:
        if group.is_fp8 and any("experts" in target for target in group.targets) and len(groups) > 1:
            yield Hit(
                f"{group.name} is FP8 and has a target with experts in its name: dequantize=True takes the wrong group",
                "put the routed experts' group first and let FP8 target Linear",
            )


def _mtp(context: Context) -> Iterator[Hit]:
    if any(part.place.in_mtp for part in context.model.parts.values()):
        yield Hit("the next-token layer is never loaded", "serve with SGLang or vLLM for speculative decoding")


def _vision(context: Context) -> Iterator[Hit]:
    """A vision tower is made of linears there, and `Linear` means them too."""
    packed = [group for group in (context.quant.groups if context.quant else ()) if "Linear" in group.targets]
    if not packed:
        return
    for part in context.model.parts.values():
        if part.place.role is Role.VISION and part.form == "plain" and part.shape() is not None:
            resolved = context.vision_scheme(part.name)
            if as_group(resolved) is not None:
                yield Hit(
                    "the vision tower is plain, and the config gives its linears a scheme",
                    "add re:.*vision_tower.* and re:.*mm_projector.* to ignore",
                    part.name,
                )


_TF = "transformers 5.24"

RULES = (
    Rule(
        "negative_scales",
        "note",
        {
            "sglang": "SGLang .../schemes/compressed_tensors_wNa16_moe.py, compressed_tensors_w4a4_mxint4_moe.py",
            "vllm": "vLLM .../utils/marlin_utils.py marlin_act_int8_process_scales",
        },
        _negative_scales,
    ),
    Rule("trtllm_router_bias", "note", {"sglang": "sglang #31001, #30989"}, _trtllm_bias),
    Rule(
        "not_registered",
        "warning",
        {"transformers": "transformers models/auto/configuration_auto.py"},
        _registered,
    ),
    Rule(
        "fp8_partial_blocks", "error", {"transformers": "transformers integrations/finegrained_fp8.py"}, _partial_blocks
    ),
    Rule("run_compressed", "note", {"transformers": "compressed-tensors #652"}, _run_compressed),
    Rule(
        "group_order",
        "warning",
        {"transformers": "transformers quantizers/quantizer_compressed_tensors.py"},
        _mixed_groups,
    ),
    Rule(
        "mtp_not_loaded",
        "note",
        {"transformers": "transformers modeling_glm_moe_dsa.py, modeling_deepseek_v3.py"},
        _mtp,
    ),
    Rule(
        "vision_scheme", "note", {"transformers": "compressed-tensors src/compressed_tensors/utils/match.py"}, _vision
    ),
)

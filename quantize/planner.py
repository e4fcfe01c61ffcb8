"""From an open checkpoint to a plan. Everything that can fail fails here, from headers and config alone."""

from typing import Any

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.dialects import find_scaled_weights
from kizami.formats.errors import KizamiError
from kizami.formats.families import Family, find_family
from kizami.formats.quant_config import build_quantization_config, output_config
from kizami.quantize.decide import decide, warn
from kizami.quantize.layout import cut_into_shards
from kizami.quantize.plan import Plan, Step, source_identity
from kizami.quantize.settings import GROUP_SIZES, Method, Policy

FP8_KERNEL_BLOCK = (128, 128)  # the only block of SGLang's and vLLM's block-FP8 GEMMs (w8a8_block_fp8_matmul in both)


def build_plan(checkpoint: Checkpoint, policy: Policy, method: Method) -> Plan:
    """The plan for converting `checkpoint`. Raises KizamiError for what cannot be done or must not be done silently."""
    check_settings(policy, method)
    family, warnings = find_family(checkpoint.config, checkpoint.tensors)
    dialect = find_scaled_weights(checkpoint.config, checkpoint.tensors)
    steps = decide(checkpoint, family, dialect, policy)
    if policy.rest == "fp8":
        _check_kept_blocks(steps)
    quantization_config = _quantization_config(checkpoint, family, policy, steps)
    return Plan(
        policy=policy,
        method=method,
        family=family.name,
        dialect=dialect.label,
        steps=tuple(steps),
        shards=cut_into_shards(steps, policy.max_shard_bytes),
        quantization_config=quantization_config,
        config=_config(checkpoint.config, quantization_config, policy),
        source=source_identity(checkpoint),
        warnings=(*warnings, *warn(steps, policy), *checkpoint.notes),
    )


def check_settings(policy: Policy, method: Method) -> None:
    if policy.group_size not in GROUP_SIZES:
        raise KizamiError(
            f"group size {policy.group_size}; expected one of {', '.join(map(str, GROUP_SIZES))}",
            code="bad_option",
            hint="engines have INT4 kernels for these group sizes only",
        )
    if policy.max_shard_bytes < 1:
        raise KizamiError(f"shard size {policy.max_shard_bytes}; expected at least 1 byte", code="bad_option")
    if method.name == "signed" and method.scale_sign == "positive":
        raise KizamiError(
            "--method signed puts the extreme of a group on -8, so its scales have both signs",
            code="bad_option",
            hint="use --method search --scale-sign positive",
        )
    kappa = method.clip_allowance
    if kappa is not None and (method.name != "search" or not kappa >= 0.5):
        raise KizamiError(
            f"clip allowance {kappa} with --method {method.name}; expected at least 0.5 steps, with --method search",
            code="bad_option",
        )


def _check_kept_blocks(steps: list[Step]) -> None:
    for step in steps:
        if step.action == "keep_fp8" and step.scaled is not None and step.scaled.block != FP8_KERNEL_BLOCK:
            raise KizamiError(
                f"its scale covers blocks of {list(step.scaled.block)}; --rest fp8 can keep blocks of [128, 128] only",
                code="unsupported_block",
                file=step.weight.file,
                tensor=step.weight.name,
                hint="use --rest bf16, or --ignore and --targets to change what is kept",
            )


def _quantization_config(checkpoint: Checkpoint, family: Family, policy: Policy, steps: list[Step]) -> dict[str, Any]:
    linears = [s for s in steps if s.weight.name.endswith(".weight") and len(s.weight.shape) == 2]
    by_action = {
        action: [s.module for s in linears if s.action == action]
        for action in ("quantize", "keep_fp8", "dequantize", "copy")
    }
    return build_quantization_config(
        group_size=policy.group_size,
        packed=by_action["quantize"],
        fp8=by_action["keep_fp8"],
        plain=by_action["dequantize"] + by_action["copy"],
        fp8_block=FP8_KERNEL_BLOCK if by_action["keep_fp8"] else None,
        num_hidden_layers=family.num_layers,
        mtp_packed=policy.mtp == "quantize",
        kv_cache_scheme=_carried_kv_scheme(checkpoint),
    )


def _carried_kv_scheme(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The source's own scheme, and only where its scale tensors really exist: they are copied like any tensor."""
    if not any(name.endswith((".k_scale", ".v_scale")) for name in checkpoint.tensors):
        return None
    for holder in (checkpoint.config, checkpoint.config.get("text_config")):
        source = holder.get("quantization_config") if isinstance(holder, dict) else None
        scheme = source.get("kv_cache_scheme") if isinstance(source, dict) else None
        if isinstance(scheme, dict):
            return scheme
    return None


def _config(source: dict[str, Any], quantization_config: dict[str, Any], policy: Policy) -> dict[str, Any]:
    """The source's keys untouched, except one that would now be false: no MTP tensors, no MTP layers."""
    config = output_config(source, quantization_config)
    if policy.mtp == "drop":
        for holder in (config, config.get("text_config")):
            if isinstance(holder, dict) and "num_nextn_predict_layers" in holder:
                holder["num_nextn_predict_layers"] = 0
    return config

"""From an open checkpoint to a plan. Everything that can fail fails here, from headers and config alone."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.dialects import find_encoded_weights
from kizami.formats.errors import KizamiError
from kizami.formats.families import Family, find_family
from kizami.formats.fused_experts import split_fused_experts
from kizami.formats.method_configs import READER_NOTES, build_method_config
from kizami.formats.quant_config import build_quantization_config, output_config
from kizami.quantize.advice import warn
from kizami.quantize.constraints import check_steps, fp8_block
from kizami.quantize.decide import decide
from kizami.quantize.kv_scales.merge import KvAsked, merge_scales
from kizami.quantize.kv_scales.statement import NO_SCHEME, carries_kv_scales
from kizami.quantize.layout import cut_into_shards
from kizami.quantize.plan import Plan, Step, source_identity
from kizami.quantize.settings import (
    CALIBRATED,
    GIVEN,
    GROUP_SIZES,
    METHOD_NOTES,
    SEARCHED,
    WHOLE_MTP,
    Method,
    MethodName,
    Policy,
)


def build_plan(
    checkpoint: Checkpoint,
    policy: Policy,
    method: Method,
    calibration: Mapping[str, Any] | None = None,
    kv: KvAsked | None = None,
) -> Plan:
    """The plan for converting `checkpoint`. Raises KizamiError for what cannot be done or must not be done silently.
    calibration: `calibrated.facts_of` the statistics whose hash is method.stats. kv: scales of the KV cache to write.
    """
    check_settings(policy, method)
    tensors, notes = split_fused_experts(checkpoint.config, checkpoint.tensors)
    checkpoint = replace(checkpoint, tensors=tensors, notes=(*checkpoint.notes, *notes))
    family, warnings = find_family(checkpoint.config, checkpoint.tensors)
    dialect = find_encoded_weights(checkpoint.config, checkpoint.tensors)
    steps = decide(checkpoint, family, dialect, policy)
    merged = None if kv is None else merge_scales(checkpoint, family, policy, steps, kv)
    steps = steps if merged is None else list(merged.steps)
    check_steps(steps, policy)
    scheme = _carried_kv_scheme(checkpoint, steps) if merged is None else merged.scheme
    quantization_config = _quantization_config(family, policy, steps, scheme)
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
        warnings=(
            *warnings,
            *warn(steps, policy),
            *_layout_notes(policy, steps, scheme),
            *(() if merged is None else merged.warnings),
            *_kv_notes(quantization_config, steps),
            *([METHOD_NOTES[method.name]] if method.name in METHOD_NOTES else []),
            *_unused_method(method, steps),
            *checkpoint.notes,
        ),
        calibration=None if calibration is None else dict(calibration),
        kv_scales=None if merged is None else merged.merge,
    )


def _unused_method(method: Method, steps: list[Step]) -> Iterator[str]:
    """Whoever names a method expects it to do something."""
    if method.name != Method().name and not any(step.action == "quantize" for step in steps):
        given = " and --stats have" if method.name in CALIBRATED else " has"
        yield f"no weight is rounded to INT4 here: --method {method.name}{given} no effect"


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
    if kappa is not None and (method.name not in SEARCHED or not kappa >= 0.5):
        raise KizamiError(
            f"clip allowance {kappa} with --method {method.name}; expected none, or at least 0.5 steps with --method "
            + ", ".join(SEARCHED),
            code="bad_option",
        )
    if method.name not in GIVEN:
        check_statistics_option(method.name, method.stats is not None)


def check_statistics_option(name: MethodName, given: bool) -> None:
    """KizamiError unless statistics are given to the methods that need them, and to no other."""
    if name in CALIBRATED and not given:
        keep = "--keep all " if name == "gptq" else ""
        raise KizamiError(
            f"--method {name} needs --stats",
            code="bad_option",
            hint=f"kizami calibrate SRC --data FILE {keep}-o STATS makes them; --method search needs none",
        )
    if given and name not in CALIBRATED:
        raise KizamiError(
            f"--stats with --method {name}, which looks at weights only",
            code="bad_option",
            hint=f"--stats is for --method {' and '.join(CALIBRATED)}",
        )


def _quantization_config(
    family: Family, policy: Policy, steps: list[Step], kv_cache_scheme: dict[str, Any] | None
) -> dict[str, Any]:
    linears = [step for step in steps if step.is_linear and step.action != "drop"]
    modules = {form: [step.module for step in linears if step.form == form] for form in ("int4", "fp8", "none")}
    if not modules["int4"] and not modules["fp8"]:
        return {}
    if policy.format != "pack-quantized" and modules["int4"]:
        return build_method_config(
            policy.format, policy.group_size, packed=modules["int4"], plain=modules["none"], fp8=modules["fp8"]
        )
    return build_quantization_config(
        group_size=policy.group_size,
        packed=modules["int4"],
        fp8=modules["fp8"],
        plain=modules["none"],
        fp8_block=fp8_block(steps),
        num_hidden_layers=family.num_layers,
        mtp_packed=policy.mtp == "quantize" and not any(role == WHOLE_MTP for role, _ in policy.roles),
        kv_cache_scheme=kv_cache_scheme,
    )


def _layout_notes(policy: Policy, steps: list[Step], kv_cache_scheme: dict[str, Any] | None) -> Iterator[str]:
    """What whoever serves this layout has to know."""
    if any(step.form == "int4" for step in steps):
        yield from READER_NOTES[policy.format]
        if policy.format != "pack-quantized" and kv_cache_scheme is not None:
            yield f"the source's kv_cache_scheme is not carried over: a {policy.format} config has no place for it"


def _carried_kv_scheme(checkpoint: Checkpoint, steps: list[Step]) -> dict[str, Any] | None:
    """The source's own scheme, and only where its scale tensors really are in the output: copied like any tensor."""
    if not carries_kv_scales(steps):
        return None
    for holder in (checkpoint.config, checkpoint.config.get("text_config")):
        source = holder.get("quantization_config") if isinstance(holder, dict) else None
        scheme = source.get("kv_cache_scheme") if isinstance(source, dict) else None
        if isinstance(scheme, dict):
            return scheme
    return None


def _kv_notes(quantization_config: dict[str, Any], steps: list[Step]) -> Iterator[str]:
    if carries_kv_scales(steps) and quantization_config.get("kv_cache_scheme") is None:
        yield f"KV scales: {NO_SCHEME}"


def _config(source: dict[str, Any], quantization_config: dict[str, Any], policy: Policy) -> dict[str, Any]:
    """The source's keys untouched, except one that would now be false: no MTP tensors, no MTP layers."""
    config = output_config(source, quantization_config)
    if policy.mtp == "drop":
        for holder in (config, config.get("text_config")):
            if isinstance(holder, dict) and "num_nextn_predict_layers" in holder:
                holder["num_nextn_predict_layers"] = 0
    return config

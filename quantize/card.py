"""The facts of a run that the model card tells."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from kizami.formats.model_card import CardFacts, ErrorRow
from kizami.quantize.capacity import tensor_parallel_sizes
from kizami.quantize.loading import find_loading
from kizami.quantize.plan import Plan
from kizami.quantize.report import Row, measured, role_summaries
from kizami.quantize.settings import Method, Policy

ENGINE_WORDS = {"sglang": "SGLang", "vllm": "vLLM", "transformers": "transformers"}
METHOD_WORDS = {
    "minmax": "round to nearest, scale absmax / 7.5 (compressed-tensors' rule)",
    "signed": "round to nearest, the extreme of each group on code -8",
    "search": "scale searched per group for the least squared error, round to nearest",
}


def card_facts(plan: Plan, root: Path, rows: list[Row], has_negative_scales: bool) -> CardFacts:
    """What render_card needs. `root`: the source's folder, in which a Hub id may be written."""
    base, revision = hub_origin(root) or (None, None)
    return CardFacts(
        title=title(base or root.resolve().name, plan.policy.scheme),
        kizami_version=version("kizami"),
        command=command_line(plan.policy, plan.method, base and f"{base}@{revision}"),
        base_model=base,
        scheme=plan.policy.scheme,
        method=_method(plan),
        forms=_forms(plan),
        tags=_tags(plan),
        source_bytes=plan.source_bytes,
        output_bytes=plan.output.bytes,
        bits_per_weight=plan.bits_per_weight,
        errors=tuple(_error_rows(rows)),
        has_negative_scales=has_negative_scales,
        tp_sizes=tuple(tensor_parallel_sizes(plan)),
        notes=tuple(_engine_notes(plan)),
        kv_scales="carried over from the source" if plan.quantization_config.get("kv_cache_scheme") else "none",
        source_hashes=tuple((name, file["header_sha256"]) for name, file in plan.source["files"].items()),
        hashed="SHA-256 of the header",
        revision=revision,
    )


def title(source: str, scheme: str) -> str:
    """`GLM-5.2 INT4 (w4a16-g32)` for org/GLM-5.2-FP8: the result is not FP8."""
    name = re.sub(r"[-_.]?(fp8|int4)$", "", source.rpartition("/")[2], flags=re.IGNORECASE) or "model"
    return f"{name} {scheme.upper()}" if scheme == "bf16" else f"{name} {_FORM_WORDS[scheme[:3]]} ({scheme})"


_FORM_WORDS = {"w4a": "INT4", "fp8": "FP8"}


def _method(plan: Plan) -> str:
    """How weights were rounded, where they were."""
    ways = []
    if any(step.action == "quantize" for step in plan.steps):
        ways.append(f"{plan.method.name}: {METHOD_WORDS[plan.method.name]}")
    if any(step.action == "repack" for step in plan.steps):
        ways.append("INT4 codes and scales of the source, unchanged")
    if any(step.action == "to_fp8" for step in plan.steps):
        ways.append("FP8: round to nearest, scale absmax / 448 of each 128x128 block")
    return "; ".join(ways) or "decoding only, nothing was rounded but to BF16"


def _forms(plan: Plan) -> tuple[tuple[str, str], ...]:
    """What the linears are, the most numerous first, then the rest."""
    count = Counter(step.form for step in plan.steps if step.is_linear and step.action != "drop")
    layout = "" if plan.policy.format == "pack-quantized" else f", {plan.policy.format} layout"
    words = {
        "int4": ("INT4 modules", f"linears, symmetric, group size {plan.policy.group_size}, BF16 scales{layout}"),
        "fp8": ("FP8 modules", "linears, one scale per block or output channel"),
    }
    rows = [(words[form][0], f"{count[form]:,} {words[form][1]}") for form in ("int4", "fp8") if count[form]]
    return (*rows, ("everything else", "as in the source; FP8 and INT4 decoded to BF16"))


def _tags(plan: Plan) -> tuple[str, ...]:
    forms = [tag for tag, form in (("int4", "int4"), ("fp8", "fp8")) if any(step.form == form for step in plan.steps)]
    method = plan.quantization_config.get("quant_method")
    return (*forms, *([method] if method else []), "kizami")


def _engine_notes(plan: Plan) -> Iterator[str]:
    """What an operator has to know of the engines; nothing of those that load it as it is."""
    for found in find_loading(plan):
        if found.error is not None:
            yield f"{ENGINE_WORDS[found.engine]} does not load it: {found.error}."
        else:
            yield from (f"{ENGINE_WORDS[found.engine]}: {need}." for need in found.needs)


def _error_rows(rows: list[Row]) -> list[ErrorRow]:
    lines = []
    for role in role_summaries(measured(rows)):
        assert role.rel_error is not None
        assert role.max_rel_error is not None
        lines.append(ErrorRow(role.role, role.tensors, role.rel_error, role.max_rel_error, role.sqnr_db))
    return lines


def hub_origin(root: Path) -> tuple[str, str] | None:
    """(`org/name`, revision) of a folder in the Hub cache, models--org--name/snapshots/<revision>; else None. However
    it is spelled: by a link, or with dots."""
    root = root.resolve()
    if root.parent.name == "snapshots":
        kind, *parts = root.parent.parent.name.split("--")
        if kind == "models" and len(parts) == 2:
            return "/".join(parts), root.name
    return None


def command_line(policy: Policy, method: Method, source: str | None) -> str:
    """The command that makes the same bytes, defaults left out. No paths: they are of one machine."""
    default, usual = Policy(), Method()
    words = ["kizami", "convert", source or "SRC", "OUT"]
    words += _unless(default.group_size, "--group-size", policy.group_size)
    words += _unless(default.scheme, "--scheme", policy.scheme) if policy.to != "int4" else []
    words += _unless(default.format, "--format", policy.format)
    words += _unless(usual.name, "--method", method.name)
    words += _unless(default.rest, "--rest", policy.rest)
    words += _unless(default.mtp, "--mtp", policy.mtp)
    for pattern in policy.targets:
        words += ["--targets", pattern]
    for pattern in policy.ignore:
        words += ["--ignore", pattern]
    for role, form in policy.roles:
        words += ["--set", f"{role}={form}"]
    words += ["--allow-requantize"] if policy.allow_requantize else []
    if method.clip_allowance is not None:
        words += ["--clip-allowance", format(method.clip_allowance, "g")]
    words += _unless(usual.scale_sign, "--scale-sign", method.scale_sign)
    words += _unless(default.max_shard_bytes, "--max-shard-size", policy.max_shard_bytes)
    return shlex.join(words)


def _unless(default: object, option: str, value: object) -> list[str]:
    return [] if value == default else [option, str(value)]

"""The facts of a run that the model card tells."""

import re
import shlex
from importlib.metadata import version
from pathlib import Path

from kizami.formats.model_card import CardFacts, ErrorRow
from kizami.quantize.capacity import tensor_parallel_sizes
from kizami.quantize.plan import Plan
from kizami.quantize.report import Row, measured, role_summaries
from kizami.quantize.settings import Method, Policy

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
        method=f"{plan.method.name}: {METHOD_WORDS[plan.method.name]}",
        group_size=plan.policy.group_size,
        rest=plan.policy.rest,
        source_bytes=plan.source_bytes,
        output_bytes=plan.output.bytes,
        bits_per_weight=plan.bits_per_weight,
        packed_modules=len(plan.packed),
        errors=tuple(_error_rows(rows)),
        has_negative_scales=has_negative_scales,
        tp_sizes=tuple(tensor_parallel_sizes(plan)),
        kv_scales="carried over from the source" if plan.quantization_config.get("kv_cache_scheme") else "none",
        source_hashes=tuple((name, file["header_sha256"]) for name, file in plan.source["files"].items()),
        hashed="SHA-256 of the header",
        revision=revision,
    )


def title(source: str, scheme: str) -> str:
    """`GLM-5.2 INT4 (w4a16-g32)` for org/GLM-5.2-FP8: the result is not FP8."""
    name = re.sub(r"[-_.]?fp8$", "", source.rpartition("/")[2], flags=re.IGNORECASE) or "model"
    return f"{name} INT4 ({scheme})"


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
    words += _unless(usual.name, "--method", method.name)
    words += _unless(default.rest, "--rest", policy.rest)
    words += _unless(default.mtp, "--mtp", policy.mtp)
    for pattern in policy.targets:
        words += ["--targets", pattern]
    for pattern in policy.ignore:
        words += ["--ignore", pattern]
    if method.clip_allowance is not None:
        words += ["--clip-allowance", format(method.clip_allowance, "g")]
    words += _unless(usual.scale_sign, "--scale-sign", method.scale_sign)
    words += _unless(default.max_shard_bytes, "--max-shard-size", policy.max_shard_bytes)
    return shlex.join(words)


def _unless(default: object, option: str, value: object) -> list[str]:
    return [] if value == default else [option, str(value)]

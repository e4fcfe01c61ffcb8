"""The facts of a run that the model card tells."""

from importlib.metadata import version
from pathlib import Path

from kizami.formats.model_card import CardFacts, ErrorRow
from kizami.quantize.capacity import tensor_parallel_sizes
from kizami.quantize.plan import Plan
from kizami.quantize.report import Row, measured, role_summaries
from kizami.quantize.settings import Method, Policy

METHOD_WORDS = {
    "minmax": "round to nearest, scale absmax / 7.5 (compressed-tensors' rule); no calibration data",
    "signed": "round to nearest, the extreme of each group on code -8; no calibration data",
    "search": "scale searched per group for the least squared error, round to nearest; no calibration data",
}


def card_facts(plan: Plan, root: Path, rows: list[Row], has_negative_scales: bool) -> CardFacts:
    """What render_card needs. `root`: the source's folder, in which a Hub id may be written."""
    base = hub_id(root)
    return CardFacts(
        title=f"{base.split('/')[-1] if base else plan.config.get('model_type', 'model')} {plan.policy.scheme}",
        kizami_version=version("kizami"),
        command=command_line(plan.policy, plan.method, base),
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
    )


def _error_rows(rows: list[Row]) -> list[ErrorRow]:
    lines = []
    for role in role_summaries(measured(rows)):
        assert role.rel_error is not None
        assert role.max_rel_error is not None
        lines.append(ErrorRow(role.role, role.tensors, role.rel_error, role.max_rel_error, role.sqnr_db))
    return lines


def hub_id(root: Path) -> str | None:
    """`org/name` of a folder in the Hub cache (models--org--name/snapshots/<revision>), else None."""
    if root.parent.name == "snapshots":
        kind, *parts = root.parent.parent.name.split("--")
        if kind == "models" and len(parts) == 2:
            return "/".join(parts)
    return None


def command_line(policy: Policy, method: Method, base: str | None) -> str:
    """The command that makes the same bytes. No paths: the card must not depend on where it was run."""
    words = ["kizami convert", base or "SRC", "OUT", f"--group-size {policy.group_size}", f"--method {method.name}"]
    default = Policy(group_size=policy.group_size)
    words += [f"--rest {policy.rest}"] if policy.rest != default.rest else []
    words += [f"--mtp {policy.mtp}"] if policy.mtp != default.mtp else []
    words += [f"--targets '{pattern}'" for pattern in policy.targets]
    words += [f"--ignore '{pattern}'" for pattern in policy.ignore]
    if method.name == "search":
        words.append(
            f"--clip-allowance {'none' if method.clip_allowance is None else format(method.clip_allowance, 'g')}"
        )
        words += ["--scale-sign positive"] if method.scale_sign == "positive" else []
    if policy.max_shard_bytes != default.max_shard_bytes:
        words.append(f"--max-shard-size {policy.max_shard_bytes}")
    return " ".join(words)

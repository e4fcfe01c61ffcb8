"""The facts of a run that the model card tells."""

import re
import shlex
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from kizami.formats.engines.finding import READ
from kizami.formats.method_configs import READER_NOTES
from kizami.formats.model_card import CardFacts, EngineFacts, ErrorRow
from kizami.formats.packed_source import PackedWeight
from kizami.formats.serving.model import needs_code
from kizami.quantize.constraints import fp8_block
from kizami.quantize.kv_scales.statement import NO_SCHEME, carries_kv_scales
from kizami.quantize.loading import SERVING, loading_by_size
from kizami.quantize.plan import KvMerge, Plan
from kizami.quantize.report import Row, measured, role_summaries
from kizami.quantize.settings import GIVEN, METHOD_NOTES, Method, Policy, default_allowance

TRUST = "--trust-remote-code"
ENGINE_WORDS = {"sglang": "SGLang", "vllm": "vLLM", "transformers": "transformers"}
DATA_SHOWN = 5  # files
METHOD_WORDS = {
    "minmax": "round to nearest, scale absmax / 7.5 (compressed-tensors' rule)",
    "signed": "round to nearest, the extreme of each group on code -8",
    "search": "scale searched per group for the least squared error, round to nearest",
    "weighted": "scale searched per group for the least squared error of the output, with the mean squares of the "
    "calibration inputs, round to nearest",
    "gptq": "the scales of weighted; codes by GPTQ with shrunk Hessians where held-out tokens say they are better",
    "llmcompressor-gptq": "GPTQ of llm-compressor: scale absmax / 7.5, codes by its error feedback",
    "llmcompressor-awq": "AWQ of llm-compressor from up_proj to down_proj of each expert, scale absmax / 7.5, round to "
    "nearest",
}


def card_facts(plan: Plan, root: Path, rows: list[Row], has_negative_scales: bool) -> CardFacts:
    """What render_card needs. `root`: the source's folder, in which a Hub id may be written."""
    base, revision = hub_origin(root) or (None, None)
    return CardFacts(
        title=title(base or root.resolve().name, _label(plan)),
        kizami_version=version("kizami"),
        command=command_line(plan.policy, plan.method, base and f"{base}@{revision}", plan.kv_scales),
        base_model=base,
        scheme=plan.policy.scheme,
        method=_method(plan),
        forms=tuple(_forms(plan)),
        tags=_tags(plan),
        source_bytes=plan.source_bytes,
        output_bytes=plan.output.bytes,
        bits_per_weight=plan.bits_per_weight,
        errors=tuple(_error_rows(rows)),
        has_negative_scales=has_negative_scales,
        is_quantized=_count(plan, "int4") + _count(plan, "fp8") > 0,
        engines=tuple(_engines(plan)),
        notes=tuple(_notes(plan)),
        kv_scales=kv_statement(plan),
        source_hashes=tuple((name, file["header_sha256"]) for name, file in plan.source["files"].items()),
        hashed="SHA-256 of the header",
        revision=revision,
        calibrated=plan.calibration is not None,
    )


def kv_statement(plan: Plan) -> str:
    """What of a KV cache in FP8 the output has scales for."""
    if plan.kv_scales is not None:
        against = "--force-kv-scales wrote what kizami refuses (see the notes): "
        return (against if plan.kv_scales.forced else "") + plan.kv_scales.statement
    if plan.quantization_config.get("kv_cache_scheme"):
        return "carried over from the source"
    return NO_SCHEME if carries_kv_scales(plan.steps) else "none"


def title(source: str, label: str) -> str:
    """`GLM-5.2 INT4 (w4a16-g32)` for org/GLM-5.2-FP8: the result is not FP8."""
    name = re.sub(r"[-_.]?(fp8|int4)$", "", source.rpartition("/")[2], flags=re.IGNORECASE) or "model"
    return f"{name} {label}"


def _label(plan: Plan) -> str:
    policy = plan.policy
    main = {"int4": f"INT4 ({policy.scheme})", "fp8": f"FP8 ({policy.scheme})", "bf16": "BF16"}[policy.to]
    return " + ".join([main, *(form.upper() for form in ("int4", "fp8") if form != policy.to and _count(plan, form))])


def _count(plan: Plan, form: str) -> int:
    return sum(step.form == form and step.is_linear for step in plan.steps)


def _method(plan: Plan) -> str:
    """How weights were rounded, where they were."""
    words = {
        "quantize": f"{plan.method.name}: {METHOD_WORDS[plan.method.name]}{_calibrated_on(plan)}",
        "repack": "INT4 codes and scales of the source, unchanged",
        "to_fp8": "FP8: round to nearest, scale absmax / 448 of each 128x128 block",
        "keep_fp8": "FP8 codes and scales of the source, unchanged",
    }
    return "; ".join(text for action, text in words.items() if action in plan.counts) or "decoded; nothing was rounded"


def _calibrated_on(plan: Plan) -> str:
    """`, calibrated on 262,144 tokens of chat.jsonl, code.txt`."""
    if plan.calibration is None:
        return ""
    names = plan.calibration["data"]
    shown = ", ".join(names[:DATA_SHOWN]) + (f" and {len(names) - DATA_SHOWN} more" if len(names) > DATA_SHOWN else "")
    return f", calibrated on {plan.calibration['tokens']:,} tokens" + (f" of {shown}" if shown else "")


_SCALE_WORDS = {"pack-quantized": "BF16", "gptq": "F16", "gptq_v2": "F16", "awq": "F16", "w4afp8": "F32"}


def _forms(plan: Plan) -> Iterator[tuple[str, str]]:
    """What the linears are, then the rest."""
    policy = plan.policy
    if count := _count(plan, "int4"):
        form = f"symmetric, group size {policy.group_size}, {_SCALE_WORDS[policy.format]} scales"
        yield "INT4 modules", f"{count:,} linears, {form}, {policy.format} layout"
    if count := _count(plan, "fp8"):
        covers = "output channel" if fp8_block(list(plan.steps)) is None else "128x128 block"
        yield "FP8 modules", f"{count:,} linears, one scale per {covers}"
    decoded, copied = plan.counts.get("dequantize", 0), plan.counts.get("copy", 0)
    parts = [f"{decoded:,} linears decoded to BF16"] if decoded else []
    yield "everything else", ", ".join([*parts, f"{copied:,} tensors as in the source"])
    if any(step.place.in_mtp and step.action == "drop" for step in plan.steps):
        yield "MTP layer", "left out: no speculative decoding with it"


def _notes(plan: Plan) -> Iterator[str]:
    groups = sorted({s.encoding.group_size for s in plan.steps if isinstance(s.encoding, PackedWeight)})
    if groups:
        sizes = ", ".join(map(str, groups))
        yield f"The source is INT4 (groups of {sizes}): nothing here can be more exact than that."
    if plan.method.name in GIVEN and plan.calibration is not None:
        libraries = ", ".join(f"{name} {found}" for name, found in plan.calibration["libraries"].items())
        yield f"The INT4 codes were chosen by another program ({libraries}) and written by kizami."
    if plan.kv_scales is not None and plan.kv_scales.forced:
        yield f"The KV scales were written though kizami refuses them: {plan.kv_scales.forced}."
    if plan.method.name in METHOD_NOTES:
        yield f"{METHOD_NOTES[plan.method.name]}."
    if plan.packed:
        yield from (f"{note}." for note in READER_NOTES[plan.policy.format])


def _tags(plan: Plan) -> tuple[str, ...]:
    forms = [tag for tag, form in (("int4", "int4"), ("fp8", "fp8")) if any(step.form == form for step in plan.steps)]
    method = plan.quantization_config.get("quant_method")
    return (*forms, *([method] if method else []), "kizami")


def _engines(plan: Plan) -> Iterator[EngineFacts]:
    for found, sizes in loading_by_size(plan):
        serves = found.engine in SERVING
        needs = (*found.needs, *([f"serve with {TRUST}"] if serves and needs_code(plan.config) else []))
        yield EngineFacts(ENGINE_WORDS[found.engine], READ[found.engine], sizes if serves else None, found.error, needs)


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


def command_line(policy: Policy, method: Method, source: str | None, kv: KvMerge | None = None) -> str:
    """The command that makes the same bytes, defaults left out. No paths: they are of one machine."""
    default, usual = Policy(), Method()
    words = ["kizami", "convert", source or "SRC", "OUT"]
    words += _unless(default.group_size, "--group-size", policy.group_size)
    words += _unless(default.scheme, "--scheme", policy.scheme) if policy.to != "int4" else []
    words += _unless(default.format, "--format", policy.format)
    engine, dash, name = method.name.rpartition("-")
    words += ["--engine", engine] if dash else []
    words += _unless(usual.name, "--method", name)
    words += [*(["--data", "FILE"] if dash else ["--stats", "STATS"])] if method.stats is not None else []
    words += _unless(default.rest, "--rest", policy.rest)
    words += _unless(default.mtp, "--mtp", policy.mtp)
    for pattern in policy.targets:
        words += ["--targets", pattern]
    for pattern in policy.ignore:
        words += ["--ignore", pattern]
    for role, form in policy.roles:
        words += ["--set", f"{role}={form}"]
    words += ["--allow-requantize"] if policy.allow_requantize else []
    if method.clip_allowance != default_allowance(method.name, policy.group_size):
        words += ["--clip-allowance", "none" if method.clip_allowance is None else format(method.clip_allowance, "g")]
    words += _unless(usual.scale_sign, "--scale-sign", method.scale_sign)
    words += ["--kv-scales", "FILE"] if kv is not None else []
    words += ["--force-kv-scales"] if kv is not None and kv.forced else []
    words += _unless(default.max_shard_bytes, "--max-shard-size", policy.max_shard_bytes)
    return shlex.join(words)


def _unless(default: object, option: str, value: object) -> list[str]:
    return [] if value == default else [option, str(value)]

"""`kizami plan`: what a conversion would do and write, to the byte, from headers alone."""

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from kizami.cli import method_options as m
from kizami.cli import options as o
from kizami.cli.command import Command
from kizami.cli.executor_options import MaxMemory, Where
from kizami.cli.kv_options import ForceKvScales, KvScalesFile, check_force, kv_asked, kv_body
from kizami.cli.output import Ui, counted, exact, gib, relative_size
from kizami.cli.plan_options import Engines, Finished, check_engines, refuse_other_output, refused_by
from kizami.cli.rates import (
    UNMEASURED,
    Measure,
    Measured,
    To,
    estimate_body,
    estimate_line,
    limit_line,
    measure,
    memory_line,
)
from kizami.cli.target import Target
from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.statistics import Statistics
    from kizami.quantize.capacity import SplitGroup
    from kizami.quantize.max_memory import Crew
    from kizami.quantize.plan import Plan, Step

TP_SHOWN = (1, 2, 4, 8, 16)


def plan(
    context: typer.Context,
    src: o.Source,
    group_size: o.GroupSize = None,
    scheme: o.Scheme = None,
    int4_format: o.Layout = "pack-quantized",
    rest: o.RestOption = "bf16",
    mtp: o.MtpOption = "quantize",
    set_role: o.SetRole = None,
    ignore: o.Ignore = None,
    targets: o.Targets = None,
    recipe: o.RecipeFile = None,
    allow_requantize: o.AllowRequantize = False,
    max_shard_size: o.MaxShardSize = "5GB",
    tp: o.TensorParallel = None,
    engine: Engines = None,
    method: m.MethodOption = "search",
    scale_sign: m.ScaleSignOption = "signed",
    clip_allowance: m.ClipAllowance = "auto",
    stats: m.StatsOption = None,
    kv_scales: KvScalesFile = None,
    force_kv_scales: ForceKvScales = False,
    finished: Finished = None,
    measuring: Measure = "auto",
    to: To = None,
    max_memory: MaxMemory = None,
    output: o.ToFile = None,
    write_recipe: o.WriteRecipe = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Show what a conversion would do, without doing it.

    One action and one reason per tensor, exact bytes, bytes per GPU. Takes the options of convert that shape the
    output. Reads headers, and a few MB to time the disk: of a long job the time is measured here, in about a second.
    -o writes the whole plan as JSON. Exit code 1 if a packed weight cannot be split at --tp, or no serving engine that
    loads the output on one GPU loads it at that size, or an engine that --engine names does not.
    """
    from kizami.cli.hub_source import open_headers
    from kizami.quantize.capacity import split_groups
    from kizami.quantize.card import hub_origin
    from kizami.quantize.loading import too_many_ranks
    from kizami.quantize.planner import build_plan
    from kizami.quantize.threads import available_cores

    ui = Ui(quiet=quiet, verbose=verbose, json=json)
    told = o.PolicyOptions(
        group_size, scheme, int4_format, rest, mtp, set_role, ignore, targets, allow_requantize, recipe, max_shard_size
    )
    policy = o.policy_from(context, told, ui)
    check_force(context, kv_scales, force_kv_scales)
    check_engines(context, engine)
    how, statistics = m.method_from(method, scale_sign, clip_allowance, stats, policy.group_size)
    checkpoint = open_headers(ui, src)
    inputs = (recipe, kv_scales)
    target = None if output is None else Target.checked(output, checkpoint.root, *inputs)
    recipe_file = None if write_recipe is None else Target.checked(str(write_recipe), checkpoint.root, *inputs)
    kv = kv_asked(kv_scales, force_kv_scales, checkpoint)
    made = build_plan(checkpoint, policy, how, m.statistics_facts(statistics), kv)
    if finished is not None:
        refuse_other_output(finished, src, made, checkpoint)
    crew = Where(None, "local", None, None, o.size_given(context, "max_memory", max_memory)).crew(made)
    measured = measure(made, checkpoint, measuring, to, available_cores() if crew is None else crew.workers)
    body = plan_body(made, tp, fallbacks_of(made, checkpoint, statistics), measured, crew)
    body["source"] |= dict(zip(("repo", "commit"), hub_origin(checkpoint.root) or (None, None), strict=True))
    if target is not None:
        target.write(plan_document(made, body))
        ui.note(f"written to {output}")
    if recipe_file is not None:
        recipe_file.write(recipe_of(made))
        ui.note(f"written to {write_recipe}")
        if (kept := sum(step.form == "fp8" for step in made.steps)) or policy.mtp == "drop":
            what = [f"{counted(kept, 'FP8 module')}"] if kept else []
            what += ["--mtp drop"] if policy.mtp == "drop" else []
            ui.warn([f"a recipe says what is INT4 only; not in {write_recipe}: {', '.join(what)}"])
    if json:
        ui.emit("plan", body)
    else:
        show_plan(ui, made, tp, body)
        ui.warn(made.warnings)
    findings = refused_by(body, engine, tp)
    if tp is not None:
        findings += map(str, split_groups(made, tp))
    if tp is not None and (why := too_many_ranks(made, tp)) is not None:
        findings.append(why)
    if findings:
        Ui().fail(findings, len(findings))  # under --json, too: the object is long, and a log wants the reason
        raise typer.Exit(1)


def recipe_of(plan: "Plan") -> bytes:
    """What the plan packs, as a recipe of llm-compressor: the entries of its quantization_config."""
    from kizami.formats.recipes import write_recipe

    config = plan.quantization_config
    groups = [group for group in config.get("config_groups", {}).values() if group["weights"]["type"] == "int"]
    if len(groups) != 1:
        raise KizamiError("a recipe describes one INT4 group in pack-quantized form; this plan has none", code="usage")
    return write_recipe(tuple(groups[0]["targets"]), tuple(config["ignore"]), plan.policy.group_size).encode()


def plan_document(plan: "Plan", body: dict[str, Any]) -> bytes:
    """The file of -o: the summary and one entry per tensor."""
    from kizami.formats.strict_json import dump_json

    entries = [_entry(step) for step in plan.steps]
    return dump_json(
        {"schema": "kizami.plan/1", **body, "quantization_config": plan.quantization_config, "tensors": entries}
    )


def _entry(step: "Step") -> dict[str, Any]:
    return {
        "name": step.weight.name,
        "action": step.action,
        "reason": step.reason,
        "role": step.place.role.value,
        "layer": step.place.layer,
        "expert": step.place.expert,
        "mtp": step.place.in_mtp,
        "source": {
            "dtype": step.weight.dtype,
            "shape": list(step.shape),
            "file": step.weight.file,
            "bytes": step.source_nbytes,
            "scale": step.encoding.scale.name if step.encoding else None,
        }
        if step.sources
        else None,
        "outputs": [
            {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "bytes": spec.nbytes}
            for spec in step.outputs
        ],
    }


def fallbacks_of(plan: "Plan", checkpoint: "Checkpoint", statistics: "Statistics | None") -> list[dict[str, str]]:
    """Modules that STATS tells nothing of. KizamiError where it is not of this checkpoint. Reads all of its layers."""
    if statistics is None:
        return []
    from kizami.formats.fingerprint import sample_contents
    from kizami.quantize.calibrated.statistics import check_source, check_statistics

    check_source(statistics, checkpoint, sample_contents(checkpoint))
    found = check_statistics(plan, statistics)
    return [{"name": fallback.module, "reason": fallback.reason, "method": "search"} for fallback in found]


def plan_body(
    plan: "Plan",
    tp: int | None,
    fallbacks: list[dict[str, str]] | None = None,
    measured: Measured = UNMEASURED,
    crew: "Crew | None" = None,
) -> dict[str, Any]:
    """The summary under --json: bytes as integers, every figure of the text."""
    from kizami.quantize.capacity import plan_weights, tensor_parallel_sizes
    from kizami.quantize.loading import find_loading
    from kizami.quantize.threads import available_cores

    kv = None if plan.kv_scales is None else kv_body({"kv_scales": asdict(plan.kv_scales)})
    weights = plan_weights(plan)
    return {
        "family": plan.family,
        "dialect": plan.dialect,
        "scheme": plan.policy.scheme,
        "plan_hash": plan.hash,
        "actions": plan.counts,
        "calibration": plan.calibration,
        "kv_scales": kv,
        "fallbacks": fallbacks or [],
        "reasons": [
            {"action": action, "role": role, "reason": reason, "tensors": count, "bytes": nbytes}
            for action, role, reason, count, nbytes in reasons(plan)
        ],
        "source": {"bytes": plan.source_bytes, "tensors": plan.source["tensors"], "files": len(plan.source["files"])},
        "output": {
            "bytes": plan.output.bytes,
            "file_bytes": plan.output.file_bytes,
            "tensors": plan.output.tensors,
            "shards": plan.output.shards,
        },
        "bits_per_weight": plan.bits_per_weight,
        "tensor_parallel": {
            "requested": tp,
            "works": tensor_parallel_sizes(plan),
            "bytes_per_gpu": {str(n): weights.per_gpu(n, mtp=True) for n in _sizes(tp)},
            "findings": [_finding(finding) for n in _sizes(tp) for finding in _findings(plan, n)],
        },
        "engines": [
            {
                "engine": found.engine,
                "loads": found.error is None,
                "error": found.error,
                "advice": found.advice,
                "needs": list(found.needs),
            }
            for found in find_loading(plan, tp or 1)
        ],
        "estimate": estimate_body(plan, available_cores(), measured, crew),
        "warnings": list(plan.warnings),
    }


def _sizes(tp: int | None) -> tuple[int, ...]:
    return TP_SHOWN if tp is None else (tp,)


def _findings(plan: "Plan", tp: int) -> list["SplitGroup"]:
    from kizami.quantize.capacity import split_groups

    return split_groups(plan, tp)


def _finding(finding: "SplitGroup") -> dict[str, Any]:
    keys = ("module", "axis", "size", "tp", "group_size")
    return {key: getattr(finding, key) for key in keys} | {"message": str(finding)}


def reasons(plan: "Plan") -> list[tuple[str, str, str, int, int]]:
    """(action, role, reason, source tensors, output bytes), the largest first."""
    count: Counter[tuple[str, str, str]] = Counter()
    nbytes: Counter[tuple[str, str, str]] = Counter()
    for step in plan.steps:
        key = (step.action, step.place.role.value, step.reason)
        count[key] += 1
        nbytes[key] += step.nbytes
    return sorted(((*key, count[key], nbytes[key]) for key in count), key=lambda row: (-row[4], row[:3]))


def show_plan(ui: Ui, plan: "Plan", tp: int | None, body: dict[str, Any], *, last: bool = True) -> None:
    """The plan for a reader; `last`: with the last line, the size."""
    source, output = body["source"], body["output"]
    ui.pairs([
        ("model", plan.family or "(no model_type)"),
        ("source", f"{plan.dialect}, {counted(source['tensors'], 'tensor')} in {counted(source['files'], 'file')}"),
        ("scheme", f"{plan.policy.scheme}, the rest {plan.policy.rest}, MTP {plan.policy.mtp}"),
        ("actions", _actions(plan)),
    ])  # fmt: skip
    ui.say()
    ui.table(
        ("action", "role", "reason", ">tensors", ">bytes"),
        [(r["action"], r["role"], r["reason"], f"{r['tensors']:,}", gib(r["bytes"])) for r in body["reasons"]],
    )
    if ui.verbose:
        ui.heading("every tensor")
        ui.table(
            ("action", ">bytes", "reason", "tensor"),
            [(s.action, f"{s.nbytes:,}", s.reason, s.weight.name) for s in plan.steps],
        )
    ui.heading("tensor parallelism (weights only)")
    _show_tp(ui, plan, tp, body["tensor_parallel"])
    ui.heading(f"engines, at tp {tp or 1} (kizami check has more)")
    for found in body["engines"]:
        ui.prose(f"{found['engine']}: " + (f"no: {found['error']}" if found["error"] else "loads"))
        for need in found["needs"] if found["loads"] else ():
            ui.prose(f"  needs: {need}")
    guess = body["estimate"]
    ui.say()
    if body["fallbacks"]:
        from kizami.cli.method_words import show_fallbacks

        show_fallbacks(ui, body["fallbacks"], plan.method.name)
    if body["kv_scales"]:
        ui.prose(f"KV scales: {body['kv_scales']['statement']}")
    for note in guess["notes"]:
        ui.prose(note)
    ui.pairs([
        ("estimate", estimate_line(guess)),
        ("limit", limit_line(guess)),
        *([("memory", memory_line(guess))] if guess["max_memory_bytes"] else []),
        ("source", exact(source["bytes"])),
        ("output", f"{exact(output['bytes'])} in {counted(output['shards'], 'file')}"),
    ])  # fmt: skip
    if last:
        ui.result(size_line(plan))


def size_line(plan: "Plan") -> str:
    """The number people compare."""
    sizes = f"{gib(plan.source_bytes)} -> {gib(plan.output.bytes)}"
    change = relative_size(plan.output.bytes, plan.source_bytes)
    return f"{sizes}, {change}, {plan.bits_per_weight:.2f} bits per weight"


def _actions(plan: "Plan") -> str:
    """`quantize 240, copy 59 (359 tensors; 300 scales go with theirs)`."""
    scales = plan.source["tensors"] - sum(bool(step.sources) for step in plan.steps)
    legend = f"; {counted(scales, 'scale')} go with their weights" if scales else ""
    counts = ", ".join(f"{action} {count:,}" for action, count in sorted(plan.counts.items(), key=lambda x: -x[1]))
    return f"{counts} ({counted(len(plan.steps), 'tensor')}{legend})"


def _short(finding: "SplitGroup") -> str:
    """`128 / 8 = 16 columns, group is 32 (down_proj)`."""
    what = "columns" if finding.axis == "K" else "rows"
    group = f", group is {finding.group_size}" if finding.axis == "K" else ""
    share = f"{finding.size} / {finding.tp} = {finding.size / finding.tp:g} {what}"
    return f"{share}{group} ({finding.module.rpartition('.')[2]})"


def _show_tp(ui: Ui, plan: "Plan", tp: int | None, body: dict[str, Any]) -> None:
    findings = {n: _findings(plan, n) for n in _sizes(tp)}
    ui.table(
        (">GPUs", ">bytes per GPU", "INT4 groups stay whole"),
        [
            (str(n), gib(body["bytes_per_gpu"][str(n)]), "yes" if not found else f"no: {_short(found[0])}")
            for n, found in findings.items()
        ],
    )
    sizes = ", ".join(map(str, body["works"])) or "none"
    ui.say(f"sizes that split no INT4 group: {sizes}; engines may take fewer")


COMMAND = Command(
    "plan",
    plan,
    (
        "kizami plan GLM-5.2-FP8/",
        "kizami plan zai-org/GLM-5.2-FP8 --group-size 128 --tp 8 --engine sglang",
        "kizami plan GLM-5.2-FP8/ --to /mnt/fast/",
        "kizami plan GLM-5.2-FP8/ --max-memory 2GB",
        "kizami plan GLM-5.2-FP8/ --method weighted --stats stats/",
        "kizami plan GLM-5.2-FP8/ --finished GLM-5.2-INT4/",
        r"kizami plan GLM-5.2-FP8/ --ignore 're:.*\.layers\.3\..*' -o plan.json",
    ),
    plans=True,
)

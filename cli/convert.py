"""`kizami convert`: the main job."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kizami.cli import engine as e
from kizami.cli import executor_options as x
from kizami.cli import hub_options as h
from kizami.cli import method_options as m
from kizami.cli import options as o
from kizami.cli.command import Command
from kizami.cli.convert_plan import Codes, prepare
from kizami.cli.convert_run import fail_over_threshold, run_convert, run_shards, show_shards
from kizami.cli.hub_run import HubAsked, clean_up, look_ahead, made_in, remote_of
from kizami.cli.hub_source import refusals_leave_nothing, shown
from kizami.cli.kv_options import ForceKvScales, KvScalesFile, check_force
from kizami.cli.method_words import method_lines, show_fallbacks, some
from kizami.cli.output import Ui, counted, duration, exact, figure, gib, relative_size, show_error
from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.statistics import Statistics
    from kizami.quantize.max_memory import Crew
    from kizami.quantize.plan import Plan

NewFolder = Annotated[
    Path, typer.Argument(metavar="OUT", show_default=False, help="The folder to write; it must not exist yet.")
]


def convert(
    context: typer.Context,
    src: o.Source,
    out: NewFolder,
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
    allow_unloadable: o.AllowUnloadable = False,
    max_shard_size: o.MaxShardSize = "5GB",
    tp: o.TensorParallel = None,
    method: m.MethodOption = "search",
    scale_sign: m.ScaleSignOption = "signed",
    clip_allowance: m.ClipAllowance = "auto",
    stats: m.StatsOption = None,
    kv_scales: KvScalesFile = None,
    force_kv_scales: ForceKvScales = False,
    engine: e.Engine = "kizami",
    data: e.Data = None,
    samples: e.Samples = None,
    seq_len: e.SeqLen = None,
    seed: e.Seed = None,
    tokenizer: e.TokenizerFolder = None,
    device: o.DeviceOption = "cpu",
    workers: x.Workers = None,
    max_memory: x.MaxMemory = None,
    shards: x.Shards = None,
    executor: x.ExecutorOption = "local",
    ray_address: x.RayAddress = None,
    dry_run: o.DryRun = False,
    restart: o.Restart = False,
    events: h.EventsFile = None,
    scratch_limit: h.ScratchLimit = "50GB",
    push_to: h.PushTo = None,
    private: h.Private = False,
    delete_pushed: h.DeletePushed = False,
    max_rel_error: o.MaxRelError = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Convert a checkpoint: routed experts to INT4, everything else to BF16.

    --scheme, --rest and --set choose other forms, --format another INT4 layout. An INT4 source can become BF16, FP8 or
    another layout. The work goes to OUT.partial; OUT appears when it is complete. The same command again resumes an
    interrupted run. The source is never written to.
    """
    from kizami.cli.events import Events
    from kizami.quantize.on_device.choice import check_device

    ui = Ui(quiet=quiet, verbose=verbose, json=json)
    told = o.PolicyOptions(
        group_size, scheme, int4_format, rest, mtp, set_role, ignore, targets, allow_requantize, recipe, max_shard_size
    )
    asked = e.EngineOptions(engine, data, samples, seq_len, seed, tokenizer)
    codes, kv = Codes(asked, method, scale_sign, clip_allowance, stats), (kv_scales, force_kv_scales)
    try:
        with Events(events, ui, src, out) as follow:
            policy = o.policy_from(context, told, ui)
            check_force(context, kv_scales, force_kv_scales)
            limit = o.parse_size(scratch_limit, o.spelled(context, "scratch_limit"))
            hub = HubAsked(limit, push_to, private, delete_pushed)
            hub.check(context)
            memory = o.size_given(context, "max_memory", max_memory)
            where = x.Where(shards, executor, ray_address, workers, memory)
            where.check(context, engine=engine, push_to=push_to, delete_pushed=delete_pushed, device=device)
            part = where.part(context)
            prepared = prepare(
                context, ui, src, out, policy, codes, kv, dry_run=dry_run, restart=restart, on_disk=where.on_disk
            )
            plan, checkpoint = prepared.plan, prepared.checkpoint
            with refusals_leave_nothing(prepared.mirror, out):
                unserved = _unloadable(ui, plan, checkpoint, tp, allow_unloadable)
                check_device(plan, device)
                crew = where.crew(plan)
                if part is not None:
                    part.shards(plan)  # refuses those of another plan
                follow.planned(plan, shown(checkpoint), part)
                if dry_run:
                    ahead = look_ahead(ui, plan, checkpoint, prepared.mirror, out, hub)
                    _show_dry_run(ui, plan, checkpoint, prepared.statistics, out, tp, ahead, crew)
                    follow.write("finished", dry_run=True)
                    return
                if part is not None:
                    done = run_shards(ui, prepared, out, part, device=device, where=where, restart=restart, file=follow)
                    ui.emit("convert", done) if json else show_shards(ui, done)
                    return
                remote = remote_of(ui, plan, checkpoint, prepared.mirror, out, hub, max_rel_error)
                if remote is not None and crew is not None:
                    ui.warn(["--max-memory does not count what huggingface_hub takes to fetch and to push"])
                body = run_convert(
                    ui, plan, checkpoint, out, statistics=prepared.statistics, job=prepared.job, device=device,
                    executor=where.made(), restart=restart, remote=remote, file=follow, max_rel_error=max_rel_error,
                )  # fmt: skip
    except KizamiError as refusal:
        if refusal.code != "over_threshold":  # the run is done, and its limit is missed
            raise
        show_error(refusal, as_json=json)
        raise typer.Exit(1) from None
    made = made_in(remote, out)
    over = body["exceeding"]
    if json:
        from kizami.quantize.report import threshold_hint

        last: dict[str, Any] = {"warnings": [*body["warnings"], *unserved]}
        last["hint"] = threshold_hint(body["method"]) if over else None
        ui.emit("convert", body | last)
    else:
        show_convert(ui, body, made)
        for said in unserved:
            ui.note(said)
    clean_up(remote, out)
    fail_over_threshold(ui, over, max_rel_error, body["method"])


def _unloadable(ui: Ui, plan: "Plan", checkpoint: "Checkpoint", tp: int | None, allowed: bool) -> list[str]:
    """What is said in the end of engines that will not load it. At once: what loaded before, and whatever a size was
    asked for. KizamiError "tp_does_not_load", "tp_does_not_divide", "no_engine_loads"."""
    from kizami.quantize.loading import not_served, too_many_ranks, unloadable

    if tp is not None:
        refuse_uneven_split(plan, tp)
    why = None if tp is None else too_many_ranks(plan, tp)
    if why is not None and not allowed:
        raise KizamiError(why, code="tp_does_not_load", hint="kizami plan SRC --tp N tells of other sizes")
    problem = unloadable(plan, checkpoint)
    # Who names modules one by one has said what is wanted, down to a layer that no engine takes.
    if problem is not None and not (allowed or plan.policy.ignore or plan.policy.targets):
        raise problem
    if problem is not None:
        ui.warn([problem.message])
        return []
    found = not_served(plan, tp) if why is None else [why]
    if tp is None:
        return found
    ui.warn(found)
    return []


def refuse_uneven_split(plan: "Plan", tp: int) -> None:
    from kizami.quantize.capacity import split_groups, tensor_parallel_sizes
    from kizami.quantize.settings import GROUP_SIZES

    findings = split_groups(plan, tp)
    if findings:
        works = ", ".join(map(str, tensor_parallel_sizes(plan))) or "none"
        raise KizamiError(
            "; ".join(map(str, findings)),
            code="tp_does_not_divide",
            hint=f"sizes that split no group: {works}"
            + ("; a smaller --group-size allows more" if plan.policy.group_size > GROUP_SIZES[0] else ""),
        )


def _show_dry_run(
    ui: Ui,
    plan: "Plan",
    checkpoint: "Checkpoint",
    statistics: "Statistics | None",
    out: Path,
    tp: int | None,
    ahead: dict[str, Any],
    crew: "Crew | None",
) -> None:
    """ahead: of the Hub, as `look_ahead` gives it."""
    from kizami.cli.plan import fallbacks_of, plan_body, show_plan, size_line
    from kizami.formats.side_files import find_side_files, side_file_bytes
    from kizami.quantize.finish import find_published
    from kizami.quantize.place import check_place, needed_bytes

    if find_published(plan, checkpoint, out) is None:
        check_place(checkpoint, out)
    body = plan_body(plan, tp, fallbacks_of(plan, checkpoint, statistics), crew=crew)
    free, scratch = free_bytes(out), ahead["scratch_bytes"]
    side = side_file_bytes(checkpoint, find_side_files(checkpoint).copied)
    fits = free >= needed_bytes(plan, () if ahead["sheds"] else plan.shards, side) + (scratch or 0)
    if ui.json:
        ui.emit(
            "convert",
            body | {"dry_run": True, "out": str(out), "free_bytes": free, "fits": fits, **ahead},
        )
        return
    show_plan(ui, plan, tp, body, last=False)
    ui.say(f"free      {exact(free)} where {out} will be: {'enough' if fits else 'NOT enough'}")
    if scratch is not None:
        limit = exact(ahead["scratch_limit"])
        ui.say(f"scratch   {exact(scratch)} at least, for one shard and its source files; {limit} at most, the limit")
    if ahead["push_to"] is not None:
        ui.say(f"target    {ahead['push_to']}: {ahead['target']}")
    ui.result(f"{size_line(plan)} (dry run: nothing was written)")
    ui.warn([*plan.warnings, *([] if fits else [f"{exact(free)} are free where {out} will be: not enough"])])


def free_bytes(out: Path) -> int:
    """Free space where `out` will be: its nearest folder that exists."""
    folder = out.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def show_convert(ui: Ui, body: dict[str, Any], made: Path) -> None:
    """made: the folder that has the report now."""
    source, output = body["source"], body["output"]
    how = f", --method {body['method']}" if "quantize" in body["actions"] else ""
    place = body["out"] or body["pushed"]["repo"]
    ui.heading(f"{place}: {body['packed_modules']:,} modules packed, {body['scheme']}{how}")
    show_roles(ui, body["roles"])
    if ui.verbose:
        _show_every_tensor(ui, made)
    side = body["side_files"]
    ui.say()
    ui.prose(f"copied beside the weights: {some(side['copied'])}")
    ui.prose(f"not copied: {_left(side['left'])}")
    if body["worst"]:
        ui.prose(f"worst tensor: {body['worst']['name']}, relative error {body['worst']['rel_error']:.4f}")
    for line in method_lines(body):
        ui.prose(line)
    show_fallbacks(ui, body["fallbacks"], body["method"])
    if body["kv_scales"]:
        ui.prose(f"KV scales: {body['kv_scales']['statement']}")
    if body["has_negative_scales"]:
        ui.prose("some scales are negative (--scale-sign positive avoids them, at a cost in accuracy)")
    ui.say(f"source {exact(source['bytes'])}")
    ui.say(f"output {exact(output['bytes'])} in {counted(output['shards'], 'file')}, {duration(body['seconds'])}")
    ui.warn(body["warnings"])
    if body["pushed"]:
        ui.say(f"pushed to {body['pushed']['repo']}, commit {body['pushed']['commit']}")
    error = "" if body["rel_error"] is None else f", relative error {body['rel_error']:.4f}"
    ratio = relative_size(output["bytes"], source["bytes"])
    ui.result(f"{gib(output['bytes'])}, {ratio}, {output['bits_per_weight']:.2f} bits per weight{error}")


def _show_every_tensor(ui: Ui, out: Path) -> None:
    from kizami.quantize.report import read_report

    ui.heading("every tensor")
    ui.table(
        ("action", ">rel error", ">bytes", "tensor"),
        [(r["action"], figure(r.get("rel_error")), f"{r['bytes']:,}", r["name"]) for r in read_report(out)],
    )


def show_roles(ui: Ui, roles: list[dict[str, Any]]) -> None:
    ui.table(
        ("role", "action", ">tensors", ">bytes", ">rel error", ">max", ">SQNR dB"),
        [
            (
                line["role"],
                line["action"],
                f"{line['tensors']:,}",
                gib(line["bytes"]),
                figure(line["rel_error"]),
                figure(line["max_rel_error"]),
                figure(line["sqnr_db"], 2),
            )
            for line in roles
        ],
    )


def _left(left: list[dict[str, str]]) -> str:
    """`3 weight files (converted), index and config.json (rewritten), .gitattributes (hidden)`."""
    reasons: dict[str, list[str]] = {}
    for entry in left:
        reasons.setdefault(entry["reason"], []).append(entry["name"])
    weights = reasons.pop("weights, converted", [])
    rewritten = ["index"] if reasons.pop("an index of the source's weights", []) else []
    rewritten += reasons.pop("rewritten", [])
    parts = [f"{counted(len(weights), 'weight file')} (converted)"] if weights else []
    parts += [f"{' and '.join(rewritten)} (rewritten)"] if rewritten else []
    return ", ".join([*parts, *(f"{some(names)} ({reason})" for reason, names in reasons.items())]) or "nothing"


COMMAND = Command(
    "convert",
    convert,
    (
        "kizami convert GLM-5.2-FP8/ GLM-5.2-INT4/",
        "kizami convert zai-org/GLM-5.2-FP8 out/ --group-size 128 --rest fp8 --tp 8",
        "kizami convert src/ out/ --method weighted --stats stats/",
        "kizami convert GLM-4.6-FP8/ out/ --kv-scales kv.json",
        "kizami convert src/ out/ --max-rel-error 0.12 --json > convert.json",
        "kizami convert zai-org/GLM-5.2-FP8 out/ --push-to me/GLM-5.2-INT4 --delete-pushed --events events.jsonl",
        "kizami convert GLM-5.2-FP8/ GLM-5.2-INT4/ --shards 1-45/91",
        "kizami convert GLM-5.2-FP8/ GLM-5.2-INT4/ --executor ray --ray-address auto",
        "kizami convert small/ out/ --engine llmcompressor --method gptq --data chats.jsonl",
    ),
)

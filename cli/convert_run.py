"""Running a conversion with progress on stderr, and the object that comes of it."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer

from kizami.cli.hub_run import OVER_SHOWN, made_in, pushed_body
from kizami.cli.kv_options import kv_body
from kizami.cli.method_words import method_body
from kizami.cli.output import Ui, duration, gib
from kizami.cli.stop import STOP

if TYPE_CHECKING:
    from kizami.cli import engine as e
    from kizami.cli import executor_options as x
    from kizami.cli.convert_plan import Prepared
    from kizami.cli.events import Events
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.statistics import Statistics
    from kizami.quantize.plan import Plan, Shard
    from kizami.quantize.run.events import RunEvent
    from kizami.quantize.run.job import Executor, Remote
    from kizami.quantize.run.parts import Part

AGAIN = "run the same command again to resume"
FINISHED = (
    "out",
    "pushed",
    "output",
    "rel_error",
    "max_rel_error",
    "seconds",
)  # of the object, in the line of --events


class Followed:
    """Who follows a run: the bar or the lines on stderr, and the file of --events. `again`: how an interrupted run goes
    on, in words."""

    def __init__(self, ui: Ui, shards: "Sequence[Shard]", out: Path, file: "Events | None", again: str) -> None:
        from kizami.cli.watch import Watch
        from kizami.quantize.manifest import MANIFEST

        self.watch, self.file = Watch(ui, shards), file
        self.started = time.monotonic()
        before = (out / MANIFEST).exists()

        def interrupted() -> str:
            if not before and (out / MANIFEST).exists():  # OUT appears with one rename, and whole
                return f"interrupted; {out} is complete"
            return f"interrupted: {again}; {self.watch.done} of {self.watch.of} shards are done"

        STOP.say = interrupted

    def __enter__(self) -> "Followed":
        self.watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.watch.__exit__(kind, error, trace)

    def __call__(self, event: "RunEvent") -> None:
        self.watch(event)
        if self.file is not None:
            self.file(event)

    def finished(self, body: dict[str, Any]) -> None:
        if self.file is not None:
            over = body.get("exceeding")
            met = None if over is None or body["max_rel_error"] is None else not over
            self.file.write("finished", **{key: body.get(key) for key in FINISHED}, limit_met=met)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def run_convert(
    ui: Ui,
    plan: "Plan",
    checkpoint: "Checkpoint",
    out: Path,
    *,
    statistics: "Statistics | None" = None,
    job: "e.EngineJob | None" = None,
    device: str = "cpu",
    workers: int | None = None,
    executor: "Executor | None" = None,
    restart: bool = False,
    remote: "Remote | None" = None,
    file: "Events | None" = None,
    max_rel_error: float | None = None,
    again: str = AGAIN,
) -> dict[str, Any]:
    """Runs the plan with progress on stderr and gives the object of --json. `again`: how an interrupted run goes on.
    file: of --events."""
    from kizami.formats.side_files import find_side_files

    with STOP.held():
        from kizami.quantize.pipeline import run
        from kizami.quantize.warm_up import warm_up

    side_files = find_side_files(checkpoint)
    with Followed(ui, plan.shards, out, file, again) as follow:
        with STOP.held():
            warm_up(plan)
        run(
            plan,
            checkpoint,
            out,
            statistics=statistics,
            engine=None if job is None else job.maker(ui, plan, follow.watch.phase),
            device=device,
            workers=workers,
            executor=executor,
            restart=restart,
            remote=remote,
            on_event=follow,
        )
        made = made_in(remote, out)
        STOP.complete = str(out)
        body = convert_body(plan, made, follow.seconds) | {
            "out": str(out) if made is out else None,
            "pushed": pushed_body(remote),
            "max_rel_error": max_rel_error,
            "exceeding": exceeding(made, max_rel_error),
            "side_files": {
                "copied": list(side_files.copied),
                "left": [{"name": name, "reason": reason} for name, reason in side_files.left],
            },
        }
        follow.finished(body)
        return body


def run_shards(
    ui: Ui,
    prepared: "Prepared",
    out: Path,
    part: "Part",
    *,
    device: str,
    where: "x.Where",
    restart: bool,
    file: "Events | None",
) -> dict[str, Any]:
    """The same for --shards."""
    from kizami.formats.places import partial_of

    with STOP.held():
        from kizami.quantize.pipeline import run_part
        from kizami.quantize.warm_up import warm_up

    plan, checkpoint = prepared.plan, prepared.checkpoint
    with Followed(ui, part.shards(plan), out, file, AGAIN) as follow:
        with STOP.held():
            warm_up(plan)
        shards = run_part(
            plan, checkpoint, out, part, statistics=prepared.statistics, device=device,
            workers=where.workers, max_memory=where.max_memory, restart=restart, on_event=follow,
        )  # fmt: skip
        body = {
            "out": None,
            "partial": str(partial_of(out)),
            "part": {"first": part.first, "last": part.last, "of": part.of},
            "plan_hash": plan.hash,
            "shards": shards,
            "output": {"bytes": sum(shard["bytes"] for shard in shards), "shards": len(shards)},
            "seconds": follow.seconds,
            "warnings": list(plan.warnings),
        }
        follow.finished(body)
        return body


def show_shards(ui: Ui, body: dict[str, Any]) -> None:
    part, output = body["part"], body["output"]
    shown = f"shard {part['first']}" if part["first"] == part["last"] else f"shards {part['first']} to {part['last']}"
    done = f"of {part['of']} {'is' if part['first'] == part['last'] else 'are'} done"
    ui.warn(body["warnings"])
    ui.say(f"when all shards are done, the same command without --shards makes {body['partial']} the output")
    ui.result(f"{gib(output['bytes'])}: {shown} {done}, {duration(body['seconds'])}")


def convert_body(plan: "Plan", out: Path, seconds: float) -> dict[str, Any]:
    from kizami.quantize.manifest import read_manifest
    from kizami.quantize.report import (
        SUMMED,
        fallback_reason,
        fallbacks,
        measured,
        pooled_error,
        read_report,
        role_summaries,
        worst_tensors,
    )

    manifest, rows = read_manifest(out), read_report(out, SUMMED)
    worst = worst_tensors(rows, 1)
    return {
        "out": str(out),
        "scheme": manifest["scheme"],
        "method": manifest["method"],
        "plan_hash": manifest["plan_hash"],
        "source": {"bytes": plan.source_bytes, "tensors": plan.source["tensors"]},
        "output": {**manifest["output"], "shards": len(manifest["shards"])},
        "packed_modules": len(plan.packed),
        "actions": plan.counts,
        "calibration": manifest.get("calibration"),
        "kv_scales": kv_body(manifest),
        "fallbacks": [
            {"name": row["name"], "reason": fallback_reason(row), "method": row["method"]} for row in fallbacks(rows)
        ],
        "has_negative_scales": manifest["has_negative_scales"],
        "rel_error": pooled_error(measured(rows)),
        **method_body(rows),
        "worst": {"name": worst[0]["name"], "rel_error": worst[0]["rel_error"]} if worst else None,
        "roles": [asdict(line) for line in role_summaries(rows)],
        "seconds": seconds,
        "warnings": list(plan.warnings),
    }


def exceeding(out: Path, max_rel_error: float | None) -> list[dict[str, Any]]:
    """Packed tensors above the threshold, the worst first."""
    from kizami.quantize.report import SUMMED, over_threshold, read_report

    if max_rel_error is None:
        return []
    rows = over_threshold(read_report(out, SUMMED), max_rel_error)
    return [{"name": row["name"], "rel_error": row["rel_error"]} for row in rows]


def fail_over_threshold(ui: Ui, over: list[dict[str, Any]], max_rel_error: float | None, method: str) -> None:
    """Exit code 1, naming the tensors."""
    from kizami.quantize.report import threshold_hint

    if not over:
        return
    lines = [f"{row['name']}: relative error {row['rel_error']:.4f} is above {max_rel_error:g}" for row in over]
    ui.fail(lines, OVER_SHOWN)
    if (hint := threshold_hint(method)) is not None:
        ui.fail([hint])
    raise typer.Exit(1)

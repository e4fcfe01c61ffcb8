"""Running a conversion with progress on stderr, and the object that comes of it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kizami.cli.hub_run import OVER_SHOWN, made_in, pushed_body
from kizami.cli.kv_options import kv_body
from kizami.cli.method_words import method_body
from kizami.cli.output import Ui
from kizami.cli.stop import STOP

if TYPE_CHECKING:
    from kizami.cli import engine as e
    from kizami.cli.events import Events
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.statistics import Statistics
    from kizami.quantize.pipeline import Remote, RunEvent
    from kizami.quantize.plan import Plan


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
    restart: bool = False,
    remote: "Remote | None" = None,
    follow: "Events | None" = None,
    again: str = "run the same command again to resume",
) -> dict[str, Any]:
    """Runs the plan with progress on stderr and gives the object of --json. `again`: how an interrupted run goes on.
    follow: is told of each step."""
    import time

    from kizami.cli.watch import Watch
    from kizami.formats.side_files import find_side_files
    from kizami.quantize.manifest import MANIFEST

    with STOP.held():
        from kizami.quantize.pipeline import run
        from kizami.quantize.warm_up import warm_up

    started = time.monotonic()
    side_files = find_side_files(checkpoint)
    watch = Watch(ui, plan)
    before = (out / MANIFEST).exists()

    def interrupted() -> str:
        if not before and (out / MANIFEST).exists():  # OUT appears with one rename, and whole
            return f"interrupted; {out} is complete"
        return f"interrupted: {again}; {watch.done} of {watch.of} shards are done"

    STOP.say = interrupted
    with watch:

        def listen(event: "RunEvent") -> None:
            watch(event)
            if follow is not None:
                follow(event)

        with STOP.held():
            warm_up(plan)
        maker = None if job is None else job.maker(ui, plan, watch.phase)
        run(
            plan,
            checkpoint,
            out,
            statistics=statistics,
            engine=maker,
            device=device,
            workers=workers,
            restart=restart,
            remote=remote,
            on_event=listen,
        )
        made = made_in(remote, out)
        STOP.complete = str(out)
        body = convert_body(plan, made, time.monotonic() - started) | {
            "out": str(out) if made is out else None,
            "pushed": pushed_body(remote),
            "side_files": {
                "copied": list(side_files.copied),
                "left": [{"name": name, "reason": reason} for name, reason in side_files.left],
            },
        }
        if follow is not None:
            told = ("out", "pushed", "output", "rel_error", "seconds")
            follow.write("finished", **{key: body[key] for key in told})
        return body


def convert_body(plan: "Plan", out: Path, seconds: float) -> dict[str, Any]:
    from kizami.quantize.manifest import read_manifest
    from kizami.quantize.report import (
        fallback_reason,
        fallbacks,
        measured,
        pooled_error,
        read_report,
        role_summaries,
        worst_tensors,
    )

    manifest, rows = read_manifest(out), read_report(out)
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
    from kizami.quantize.report import over_threshold, read_report

    if max_rel_error is None:
        return []
    rows = over_threshold(read_report(out), max_rel_error)
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

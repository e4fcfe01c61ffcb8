"""What a conversion will do, from the options: the checkpoint that is opened, and the plan."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kizami.cli import engine as e
from kizami.cli import method_options as m
from kizami.cli import options as o
from kizami.cli.command import collector_paused
from kizami.cli.hub_source import open_for_convert, refusals_leave_nothing
from kizami.cli.kv_options import kv_asked
from kizami.cli.output import Ui
from kizami.cli.source import open_source
from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.hub.mirror import Mirror
    from kizami.formats.statistics import Statistics
    from kizami.quantize.plan import Plan
    from kizami.quantize.settings import Policy


@dataclass(frozen=True, slots=True)
class Codes:
    """Who chooses them, and how; as it was written."""

    engine: e.EngineOptions
    method: m.MethodChoice
    scale_sign: m.SignName
    clip_allowance: str
    stats: Path | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """statistics: of a calibrated method. mirror: of a source on the Hub. job: of an engine."""

    plan: "Plan"
    checkpoint: "Checkpoint"
    statistics: "Statistics | None" = None
    mirror: "Mirror | None" = None
    job: e.EngineJob | None = None


@collector_paused()
def prepare(
    context: typer.Context,
    ui: Ui,
    src: str,
    out: Path,
    policy: "Policy",
    codes: Codes,
    kv: tuple[Path | None, bool],
    *,
    dry_run: bool,
    restart: bool,
    on_disk: bool,
) -> Prepared:
    """kv: FILE of --kv-scales, and --force-kv-scales. on_disk: SRC must be there. KizamiError for what is wrong with
    SRC, or with options that do not go together; as `build_plan`."""
    from kizami.quantize.planner import build_plan

    how = codes.method, codes.scale_sign, codes.clip_allowance, codes.stats
    job = e.engine_job(context, ui, src, codes.engine, how)
    if job is not None:
        plan = build_plan(job.checkpoint, policy, job.method, job.facts, kv_asked(*kv, job.checkpoint))
        job.check_memory(plan)
        return Prepared(plan, job.checkpoint, job=job)
    method, statistics = m.method_from(*how, policy.group_size)
    if on_disk:
        checkpoint, mirror = open_source(src), None
    else:
        checkpoint, mirror = open_for_convert(ui, src, out, dry_run=dry_run, restart=restart)
    if mirror is not None and statistics is not None:
        given = o.spelled(context, "stats")
        said = f"{given} needs the source on the disk, where it was made"
        raise KizamiError(said, code="usage", hint="hf download, and name the folder")
    facts = m.statistics_facts(statistics)
    with refusals_leave_nothing(mirror, out):
        plan = build_plan(checkpoint, policy, method, facts, kv_asked(*kv, checkpoint))
    return Prepared(plan, checkpoint, statistics, mirror)

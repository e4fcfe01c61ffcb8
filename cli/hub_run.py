"""A conversion from the Hub or to it: what `Remote` is made of, and what is left to do when it has ended."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kizami.cli import hub_source
from kizami.cli import options as o
from kizami.cli.output import Ui, counted
from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.hub.mirror import Mirror
    from kizami.quantize.job import Remote
    from kizami.quantize.plan import Plan
    from kizami.quantize.report import Row

OVER_SHOWN = 5


@dataclass(frozen=True, slots=True)
class HubAsked:
    """scratch_limit: bytes."""

    scratch_limit: int
    push_to: str | None
    private: bool
    delete_pushed: bool

    def check(self, context: typer.Context) -> None:
        """KizamiError "usage" for an option that does nothing, or what is no name of a repository."""
        if self.push_to is not None:
            hub_source.refuse_nameless_target(self.push_to)
        for name in ("private", "delete_pushed"):
            if getattr(self, name) and self.push_to is None:
                given = o.spelled(context, name)
                raise KizamiError(f"{given} without --push-to does nothing", code="usage", hint="add --push-to REPO")


def remote_of(
    ui: Ui,
    plan: "Plan",
    checkpoint: "Checkpoint",
    mirror: "Mirror | None",
    out: Path,
    asked: HubAsked,
    max_rel_error: float | None,
) -> "Remote | None":
    """None where neither end is on the Hub. KizamiError "scratch_limit", "push_target", and as
    `as_refusal`: before anything is converted."""
    from kizami.formats.places import partial_of
    from kizami.formats.side_files import find_side_files
    from kizami.quantize.delivery import Delivery
    from kizami.quantize.job import Remote
    from kizami.quantize.supply import check_limit

    if mirror is None and asked.push_to is None:
        return None
    hub_source.refuse_finished(out)
    limit = asked.scratch_limit
    if mirror is not None or asked.delete_pushed:
        check_limit(limit, plan.shards, checkpoint, mirror, outputs=asked.delete_pushed)
    if mirror is not None:
        ui.progress("fetching what lies beside the weights")
        hub_source.fetch_side_files(checkpoint, mirror)
    delivery = None
    if asked.push_to is not None:
        repo, delete, place = asked.push_to, asked.delete_pushed, partial_of(out)
        names = {*(shard.file for shard in plan.shards), *find_side_files(checkpoint).copied}
        target, finished = hub_source.open_target(ui, repo, plan.hash, names, private=asked.private)
        if finished is not None and delete and not place.exists():
            _end_of_a_killed_run(ui, repo, finished, checkpoint, mirror, out)
        delivery = Delivery(target, place, delete, plan.hash, on_card=ui.progress, gate=_gate(max_rel_error))
    return Remote(mirror, delivery, limit)


def _end_of_a_killed_run(
    ui: Ui, repo: str, manifest: dict[str, Any], checkpoint: "Checkpoint", mirror: "Mirror | None", out: Path
) -> None:
    """All is on the Hub already, by this plan: if the source is the one that it was made from, nothing is left to do
    but to remove what a killed run has left. KizamiError "push_target" otherwise: the plan of a fine-tune is that of
    its model."""
    from kizami.formats.fingerprint import sample_contents

    contents = sample_contents(checkpoint) if mirror is None else mirror.all_contents(checkpoint)
    if contents != manifest.get("source_contents"):
        raise KizamiError(
            "holds a conversion of another source by this plan",
            code="push_target",
            file=repo,
            hint="push to a new repository",
        )
    shutil.rmtree(_going(out), ignore_errors=True)
    if mirror is not None:
        mirror.remove()
    ui.result(f"{repo} holds this conversion, whole")
    raise typer.Exit(0)


def _gate(max_rel_error: float | None) -> "Callable[[list[Row]], None]":
    """A model that misses its limit is not published: its index stays away."""
    from kizami.quantize.report import over_threshold

    def check(rows: "list[Row]") -> None:
        over = [] if max_rel_error is None else over_threshold(rows, max_rel_error)
        if over:
            named = ", ".join(f"{row['name']} ({row['rel_error']:.4f})" for row in over[:OVER_SHOWN])
            said = f"{counted(len(over), 'tensor')} above --max-rel-error {max_rel_error:g}: {named}"
            raise KizamiError(
                f"{said}; index and config are not pushed",
                code="over_threshold",
                hint="raise the limit and run again, or use other settings with a new OUT and a new repository",
            )

    return check


def pushed_body(remote: "Remote | None") -> dict[str, Any] | None:
    """What --json tells of the push."""
    if remote is None or remote.delivery is None:
        return None
    target = remote.delivery.target
    return {"repo": target.name, "commit": remote.delivery.commit}


def made_in(remote: "Remote | None", out: Path) -> Path:
    """Where the files of a run that has ended are: OUT, or OUT.partial where no OUT appears."""
    from kizami.formats.places import partial_of

    return partial_of(out) if remote is not None and remote.sheds else out


def clean_up(remote: "Remote | None", out: Path) -> None:
    """The run has ended well, and nothing of it is needed any more but OUT, or what is on the Hub."""
    if remote is None:
        return
    if remote.sheds:  # at once or not at all: half of it would be a run to resume
        os.rename(made_in(remote, out), _going(out))
    if remote.mirror is not None:
        remote.mirror.remove()
    shutil.rmtree(_going(out), ignore_errors=True)


def _going(out: Path) -> Path:
    """OUT.partial on its way out."""
    return out.with_name(f"{out.name}.done")

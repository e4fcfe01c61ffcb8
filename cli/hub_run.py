"""A conversion from the Hub or to it: what `Remote` is made of, and what is left to do when it has ended."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kizami.cli import hub_finished, hub_source
from kizami.cli import options as o
from kizami.cli.output import Ui, counted
from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.hub.mirror import Mirror
    from kizami.formats.hub.target import Target
    from kizami.quantize.plan import Plan
    from kizami.quantize.report import Row
    from kizami.quantize.run.delivery import Delivery
    from kizami.quantize.run.job import Remote

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
    from kizami.quantize.run.job import Remote
    from kizami.quantize.run.supply import check_limit

    if mirror is None and asked.push_to is None:
        return None
    hub_source.refuse_finished(out)
    limit = asked.scratch_limit
    if mirror is not None or asked.delete_pushed:
        check_limit(limit, plan.shards, checkpoint, mirror, outputs=asked.delete_pushed)
    if mirror is not None:
        ui.progress("fetching what lies beside the weights")
        hub_source.fetch_side_files(checkpoint, mirror)
    delivery = None if asked.push_to is None else _delivery(ui, plan, checkpoint, mirror, out, asked, max_rel_error)
    return Remote(mirror, delivery, limit)


def look_ahead(
    ui: Ui, plan: "Plan", checkpoint: "Checkpoint", mirror: "Mirror | None", out: Path, asked: HubAsked
) -> dict[str, Any]:
    """What `remote_of` would refuse, for a dry run: nothing is made on the Hub. scratch_bytes: the least that the limit
    may be, None where there is none. KizamiError as `remote_of`."""
    from kizami.quantize.run.supply import check_limit

    scratch = None
    if mirror is not None or asked.delete_pushed:
        scratch = check_limit(asked.scratch_limit, plan.shards, checkpoint, mirror, outputs=asked.delete_pushed)
    found: dict[str, Any] = {"scratch_bytes": scratch, "scratch_limit": asked.scratch_limit}
    found |= {"sheds": asked.delete_pushed, "push_to": asked.push_to, "target": None}
    if asked.push_to is None:
        return found
    try:
        seen = _target(ui, plan, checkpoint, mirror, out, asked, make=False)
    except KizamiError as e:
        if e.code != "hub_not_found":
            raise
        hub_source.refuse_without_token(asked.push_to)
        said = "not there, or not shown to this token: the run makes it, and finds out then whether it may"
        return found | {"target": said}
    if seen.finished is None:
        return found | {"target": "takes these files"}
    lacks = f", but for {counted(len(seen.missing), 'file')}" if seen.missing else ""
    return found | {"target": f"holds this conversion already{lacks}"}


@dataclass(frozen=True, slots=True)
class _Seen:
    """finished: the manifest there, of a run of this plan, and missing: files that it names and that are gone."""

    target: "Target"
    finished: dict[str, Any] | None
    missing: list[str]


def _target(
    ui: Ui,
    plan: "Plan",
    checkpoint: "Checkpoint",
    mirror: "Mirror | None",
    out: Path,
    asked: HubAsked,
    *,
    make: bool,
) -> _Seen:
    """A repository that is seen to take all files. make: as `open_target`."""
    from kizami.formats.side_files import find_side_files
    from kizami.quantize.manifest import CARD
    from kizami.quantize.place import written_files
    from kizami.quantize.run.delivery import missing_files

    assert asked.push_to is not None
    if asked.delete_pushed:
        hub_finished.refuse_going(out)
    names = written_files(plan, find_side_files(checkpoint).copied)
    shards = {shard.file for shard in plan.shards}
    target, finished = hub_source.open_target(
        ui, asked.push_to, plan.hash, names - {CARD}, shards, private=asked.private, make=make
    )
    missing = []
    if finished is not None:
        missing = missing_files(target, finished)
        hub_finished.refuse_another_source(asked.push_to, finished, checkpoint, mirror)
    left = names - target.head.files.keys()
    if left or finished is None:
        target.check_takes(left)
    return _Seen(target, finished, missing)


def _delivery(
    ui: Ui,
    plan: "Plan",
    checkpoint: "Checkpoint",
    mirror: "Mirror | None",
    out: Path,
    asked: HubAsked,
    max_rel_error: float | None,
) -> "Delivery":
    """Where the repository holds all files already, the program ends here."""
    from kizami.formats.places import partial_of
    from kizami.quantize.run.delivery import Delivery

    assert asked.push_to is not None
    delete, place = asked.delete_pushed, partial_of(out)
    seen = _target(ui, plan, checkpoint, mirror, out, asked, make=True)
    if seen.finished is not None:
        if delete and not seen.missing and not place.exists():
            hub_finished.end_of_a_killed_run(
                ui, seen.target, seen.finished, plan, checkpoint, mirror, out, max_rel_error
            )
        hub_finished.tell_of_missing(ui, asked.push_to, seen.missing)
    gate = _gate(max_rel_error, published=seen.finished is not None)
    return Delivery(
        seen.target, place, delete, plan.hash, on_card=ui.progress, gate=gate, finished=seen.finished is not None
    )


def _gate(max_rel_error: float | None, *, published: bool) -> "Callable[[list[Row]], None]":
    """A model that misses its limit is not published: its index stays away. published: it is there already."""
    from kizami.quantize.report import over_threshold

    def check(rows: "list[Row]") -> None:
        over = [] if max_rel_error is None else over_threshold(rows, max_rel_error)
        if over:
            named = ", ".join(f"{row['name']} ({row['rel_error']:.4f})" for row in over[:OVER_SHOWN])
            said = f"{counted(len(over), 'tensor')} above --max-rel-error {max_rel_error:g}: {named}"
            raise KizamiError(
                f"{said}; {'it is on the Hub already' if published else 'index and config are not pushed'}",
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
    going = hub_finished.going_of(out)
    if remote.sheds:
        hub_finished.clear_going(out)
        hub_finished.refuse_going(out)
        os.rename(made_in(remote, out), going)
    if remote.mirror is not None:
        remote.mirror.remove()
    if remote.sheds:
        hub_finished.remove_going(going)

"""Runs a plan: OUT.partial, journal, executor, finish. The same bytes whatever the worker count or interruptions."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.fingerprint import Contents
from kizami.formats.side_files import find_side_files, side_file_bytes
from kizami.formats.statistics import Statistics
from kizami.formats.writer import make_folders_durably
from kizami.quantize.calibrated.solver import libraries
from kizami.quantize.calibrated.statistics import check_source, check_statistics
from kizami.quantize.finish import complete_published, finish
from kizami.quantize.given import Make, kept_bytes, prepare
from kizami.quantize.on_device.choice import check_device
from kizami.quantize.place import check_no_strangers, check_place, check_still_absent, needed_bytes, written_files
from kizami.quantize.plan import Plan, Shard
from kizami.quantize.run.delivery import Delivery
from kizami.quantize.run.events import Progress, Pushed, RunEvent, ShardDone, ShardLost, Started
from kizami.quantize.run.job import Executor, Job, Record, Remote, source_bytes
from kizami.quantize.run.job_folder import ShardRecord
from kizami.quantize.run.journal import Journal, identity_of, source_mtimes
from kizami.quantize.run.local_pool import LocalPool
from kizami.quantize.run.parts import Part, open_part
from kizami.quantize.settings import GIVEN
from kizami.quantize.threads import in_thread

__all__ = ["Progress", "Pushed", "Remote", "RunEvent", "ShardDone", "ShardLost", "Started", "run", "run_part"]


def run(
    plan: Plan,
    checkpoint: Checkpoint,
    out: Path,
    *,
    statistics: Statistics | None = None,
    engine: Make | None = None,
    device: str = "cpu",
    workers: int | None = None,
    max_memory: int | None = None,
    executor: Executor | None = None,
    restart: bool = False,
    remote: Remote | None = None,
    on_event: Callable[[RunEvent], None] = lambda event: None,
) -> dict[str, Any]:
    """Converts `checkpoint` to `out` and returns the manifest. `on_event` is called by one thread at a time, but for
    Pushed, which comes from a thread of its own.
    statistics: those of plan.method.stats; they are held against checkpoint and plan before anything is written.
    engine: of GIVEN; it writes the file that quantize/given.py reads. device: where linears are packed, and where gptq
    solves; it shows in no byte but those of gptq. executor: where shards are converted, None for `workers` threads
    here, and `max_memory` bytes of this process at most, which show in no byte. remote: of a run from or to the Hub;
    where shards leave the disk, OUT does not appear, and OUT.partial keeps all but them.

    Raises KizamiError; on that and on KeyboardInterrupt the finished shards stay in OUT.partial for the next run.
    """
    assert (engine is not None) == (plan.method.name in GIVEN), plan.method
    remote = remote or Remote(None, None, 0)
    known = remote.contents()
    if (published := complete_published(plan, checkpoint, out, known)) is not None:
        on_event(Started(len(plan.shards), len(plan.shards), ()))
        return published
    executor = executor or LocalPool(workers, max_memory=max_memory)
    partial, job = _begin(plan, checkpoint, out, statistics, device, remote, executor, known)
    side_files = find_side_files(checkpoint).copied
    identity = identity_of(plan, job.contents)
    journal = Journal.open(
        partial, identity, restart=restart, look=lambda gone: _look(plan, out, partial, side_files, gone)
    )
    try:
        rewritten, outdated = _recheck(journal, job)
        todo = [shard for shard in plan.shards if shard.number not in journal.done]
        if remote.delivery is not None:
            remote.delivery.on_commit = lambda files, commit: on_event(Pushed(files, commit))
        _check_room(job, todo, partial, side_files)
        if engine is not None and todo and prepare(journal, engine):
            todo = list(plan.shards)
        on_event(_started(plan.shards, journal, rewritten, outdated))
        with remote.delivery or nullcontext():
            _convert(job, todo, Record(journal, job, len(plan.shards), on_event), executor)
            sampled = job.contents if remote.mirror is None else remote.mirror.all_contents(checkpoint)
            made = _with_libraries(plan, device)
            return finish(made, checkpoint, journal, out, side_files, sampled, remote.delivery)
    finally:
        journal.close()


def run_part(
    plan: Plan,
    checkpoint: Checkpoint,
    out: Path,
    part: Part,
    *,
    statistics: Statistics | None = None,
    device: str = "cpu",
    workers: int | None = None,
    max_memory: int | None = None,
    restart: bool = False,
    on_event: Callable[[RunEvent], None] = lambda event: None,
) -> list[dict[str, Any]]:
    """Converts the shards of `part` into OUT.partial, beside other processes that convert others, and gives their
    files, bytes and SHA-256. OUT does not appear: `run` takes what the parts have recorded, and finishes. As `run`."""
    assert plan.method.name not in GIVEN, plan.method
    shards = part.shards(plan)
    executor = LocalPool(workers, max_memory=max_memory, finishes=False)
    partial, job = _begin(plan, checkpoint, out, statistics, device, Remote(None, None, 0), executor, None)
    side_files = find_side_files(checkpoint).copied
    identity = identity_of(plan, job.contents)
    journal = open_part(partial, identity, part, restart=restart, look=lambda: _look(plan, out, partial, side_files))
    try:
        rewritten, outdated = _recheck(journal, job)
        todo = [shard for shard in shards if shard.number not in journal.done]
        _check_room(job, todo, partial, ())
        on_event(_started(shards, journal, rewritten, outdated))
        _convert(job, todo, Record(journal, job, len(shards), on_event), executor)
        records = [journal.done[shard.number] for shard in shards]
        return [{"file": record.file, "bytes": record.nbytes, "sha256": record.sha256} for record in records]
    finally:
        journal.close()


def _begin(
    plan: Plan,
    checkpoint: Checkpoint,
    out: Path,
    statistics: Statistics | None,
    device: str,
    remote: Remote,
    executor: Executor,
    known: Contents | None,
) -> tuple[Path, Job]:
    """Everything is looked at before OUT.partial, which it gives, is made."""
    if plan.method.name not in GIVEN:
        assert plan.method.stats == (None if statistics is None else statistics.sha256), plan.method
    partial = check_place(checkpoint, out)
    known = known or Contents.of(checkpoint)
    if statistics is not None:
        check_source(statistics, checkpoint, known.sampled)
        check_statistics(plan, statistics)
    check_device(plan, device)
    executor.check(plan)
    make_folders_durably(partial)
    return partial, Job(plan, checkpoint, statistics, device, remote, known.stated)


def _look(plan: Plan, out: Path, partial: Path, side_files: Sequence[str], gone: set[str] | None = None) -> None:
    check_still_absent(out, partial)
    check_no_strangers(partial, written_files(plan, side_files) | (gone or set()), finished=False)


def _started(
    shards: Sequence[Shard], journal: Journal, rewritten: tuple[str, ...], outdated: tuple[str, ...]
) -> Started:
    resumed = sum(source_bytes(shard) for shard in shards if shard.number in journal.done)
    return Started(len(shards), len(journal.done), rewritten, resumed, outdated)


def _convert(job: Job, todo: list[Shard], record: Record, executor: Executor) -> None:
    in_thread(lambda stop: executor.convert(job, todo, record, stop))
    job.checkpoint.check_unchanged()


def _with_libraries(plan: Plan, device: str) -> Plan:
    """Equal settings give equal bytes, but for `gptq`: there they depend on BLAS, too."""
    if plan.method.name != "gptq":
        return plan
    return replace(plan, calibration={**(plan.calibration or {}), "libraries": libraries(device)})


def _recheck(journal: Journal, job: Job) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Finished shards are hashed again: a resume builds on bytes, not on names. A shard made before one of its source
    files was modified would mix two models: it is made anew, like a target of `make`. Returns changed ones, older ones.
    """
    delivery = job.remote.delivery
    mtimes = {shard.number: source_mtimes(shard, job.checkpoint) for shard in job.plan.shards}
    outdated = [record for record in journal.done.values() if record.source_mtimes != mtimes.get(record.number)]
    sent = {number for number, record in journal.done.items() if _is_sent(delivery, record)}
    left = [record for record in journal.done.values() if record not in outdated]
    changed = [record for record in left if not journal.is_whole(record, sent=record.number in sent)]
    for record in (*outdated, *changed):
        journal.forget(record.number)
    return tuple(record.file for record in changed), tuple(record.file for record in outdated)


def _is_sent(delivery: Delivery | None, record: ShardRecord) -> bool:
    return delivery is not None and delivery.delete and delivery.is_there(record)


def _check_room(job: Job, todo: list[Shard], partial: Path, side_files: Sequence[str]) -> None:
    remote, side = job.remote, side_file_bytes(job.checkpoint, side_files)
    need = needed_bytes(job.plan, [] if remote.sheds else todo, side) - kept_bytes(partial)
    need += min(remote.limit, job.plan.source_bytes) if remote.mirror or remote.sheds else 0
    free = shutil.disk_usage(partial).free
    if free < need:
        raise KizamiError(
            f"{need:,} bytes are still to be written, and {free:,} are free",
            code="disk_full",
            file=str(partial),
            hint="make room, or choose an OUT on a larger disk; finished shards are kept",
        )

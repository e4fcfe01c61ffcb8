"""Runs a plan: OUT.partial, journal, executor, finish. The same bytes whatever the worker count or interruptions."""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Lock, Semaphore
from typing import Any

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.fingerprint import Contents
from kizami.formats.hub.mirror import Mirror
from kizami.formats.reader import TensorReader
from kizami.formats.run_log import FOLDER
from kizami.formats.side_files import find_side_files, side_file_bytes
from kizami.formats.statistics import Statistics
from kizami.formats.writer import make_folders_durably
from kizami.quantize.buffers import Buffers
from kizami.quantize.calibrated.solver import SOLVER_WORKERS, Solver, check_device, libraries
from kizami.quantize.calibrated.statistics import Calibration, check_source, check_statistics
from kizami.quantize.delivery import Delivery
from kizami.quantize.executor import available_cores, in_thread
from kizami.quantize.finish import complete_published, finish
from kizami.quantize.given import Given, Make, kept_bytes, prepare
from kizami.quantize.journal import Journal, ShardRecord, identity_of, source_mtimes
from kizami.quantize.place import check_no_strangers, check_place, check_still_absent, needed_bytes, written_files
from kizami.quantize.plan import Plan, Shard
from kizami.quantize.settings import GIVEN
from kizami.quantize.shard import FinishedShard, Shop, convert_shard
from kizami.quantize.supply import Supply
from kizami.quantize.tensor import Piece
from kizami.quantize.warm_up import warm_up


@dataclass(frozen=True, slots=True)
class Started:
    shards: int
    resumed: int  # shards that an earlier run finished and whose bytes are still right
    rewritten: tuple[str, ...]  # shards that the journal calls done but whose bytes have changed since
    source_bytes: int = 0  # of the resumed shards, counted as Progress counts
    outdated: tuple[str, ...] = ()  # like rewritten, but because their source files have been modified since


@dataclass(frozen=True, slots=True)
class Progress:
    """A piece is written. Over a whole shard these add up to the bytes of its source weights (scales not counted)."""

    source_bytes: int


@dataclass(frozen=True, slots=True)
class ShardDone:
    shard: Shard
    rows: list[dict[str, Any]]
    seconds: float
    done: int  # shards finished so far, resumed ones included
    of: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """A commit has arrived on the Hub."""

    files: int
    commit: str


RunEvent = Started | Progress | ShardDone | Pushed


@dataclass(frozen=True, slots=True)
class Remote:
    """What of a run is on the Hub: the source, which `mirror` fetches; the output, which `delivery` pushes. limit:
    bytes of disk for both, at most."""

    mirror: Mirror | None
    delivery: Delivery | None
    limit: int

    @property
    def sheds(self) -> bool:
        """Whether shards leave the disk."""
        return self.delivery is not None and self.delivery.delete

    def contents(self) -> Contents | None:
        """None of a source in a folder."""
        if self.mirror is None:
            return None
        files = self.mirror.repository.files
        stated = {name: files[name].sha256 or files[name].git for name in files if name.endswith(".safetensors")}
        return Contents(stated, self.mirror.contents())


def run(
    plan: Plan,
    checkpoint: Checkpoint,
    out: Path,
    *,
    statistics: Statistics | None = None,
    engine: Make | None = None,
    device: str = "cpu",
    workers: int | None = None,
    restart: bool = False,
    remote: Remote | None = None,
    on_event: Callable[[RunEvent], None] = lambda event: None,
) -> dict[str, Any]:
    """Converts `checkpoint` to `out` and returns the manifest. `on_event` is called by one thread at a time, but for
    Pushed, which comes from a thread of its own.
    statistics: those of plan.method.stats; they are held against checkpoint and plan before anything is written.
    engine: of GIVEN; it writes the file that quantize/given.py reads. device: where gptq solves. remote: of a run from
    or to the Hub; where shards leave the disk, OUT does not appear, and OUT.partial keeps all but them.

    Raises KizamiError; on that and on KeyboardInterrupt the finished shards stay in OUT.partial for the next run.
    """
    if plan.method.name in GIVEN:
        assert engine is not None, plan.method
        assert statistics is None, plan.method
    else:
        assert plan.method.stats == (None if statistics is None else statistics.sha256), plan.method
    remote = remote or Remote(None, None, 0)
    known = remote.contents()
    if (published := complete_published(plan, checkpoint, out, known)) is not None:
        on_event(Started(len(plan.shards), len(plan.shards), ()))
        return published
    partial = check_place(checkpoint, out)
    known = known or Contents.of(checkpoint)
    if statistics is not None:
        check_source(statistics, checkpoint, known.sampled)
        check_statistics(plan, statistics)
    check_device(plan, device)
    make_folders_durably(partial)
    side_files = find_side_files(checkpoint).copied
    ours = written_files(plan, side_files)

    def look(earlier: set[str]) -> None:
        check_still_absent(out, partial)
        check_no_strangers(partial, ours | earlier, finished=False)

    journal = Journal.open(partial, identity_of(plan, known.stated), restart=restart, look=look)
    try:
        rewritten, outdated = _recheck(journal, plan, checkpoint, remote.delivery)
        todo = [shard for shard in plan.shards if shard.number not in journal.done]
        if remote.delivery is not None:
            remote.delivery.on_commit = lambda files, commit: on_event(Pushed(files, commit))
        side = side_file_bytes(checkpoint, side_files)
        need = needed_bytes(plan, [] if remote.sheds else todo, side) - kept_bytes(partial)
        need += min(remote.limit, plan.source_bytes) if remote.mirror or remote.sheds else 0
        _check_free_space(need, partial)
        if engine is not None and todo and prepare(journal, engine):
            todo = list(plan.shards)
        resumed = sum(_source_bytes(shard) for shard in plan.shards if shard.number in journal.done)
        on_event(Started(len(plan.shards), len(journal.done), rewritten, resumed, outdated))
        if todo:
            warm_up(plan)
        with remote.delivery or nullcontext():
            in_thread(
                lambda stop: _convert_all(
                    plan, checkpoint, statistics, device, todo, journal, remote, workers or available_cores(), on_event,
                    stop,
                )
            )  # fmt: skip
            checkpoint.check_unchanged()
            contents = known.sampled if remote.mirror is None else remote.mirror.all_contents(checkpoint)
            made = _with_libraries(plan, device)
            return finish(made, checkpoint, journal, out, side_files, contents, remote.delivery)
    finally:
        journal.close()


def _with_libraries(plan: Plan, device: str) -> Plan:
    """Equal settings give equal bytes, but for `gptq`: there they depend on BLAS, too."""
    if plan.method.name != "gptq":
        return plan
    return replace(plan, calibration={**(plan.calibration or {}), "libraries": libraries(device)})


def _source_bytes(shard: Shard) -> int:
    return sum(step.weight.nbytes for step in shard.steps)


def _recheck(
    journal: Journal, plan: Plan, checkpoint: Checkpoint, delivery: Delivery | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Finished shards are hashed again: a resume builds on bytes, not on names. A shard made before one of its source
    files was modified would mix two models: it is made anew, like a target of `make`. Returns changed ones, older ones.
    """
    mtimes = {shard.number: source_mtimes(shard, checkpoint) for shard in plan.shards}
    outdated = [record for record in journal.done.values() if record.source_mtimes != mtimes.get(record.number)]
    sheds = delivery is not None and delivery.delete
    sent = {number for number, record in journal.done.items() if sheds and delivery and delivery.is_there(record)}
    left = [record for record in journal.done.values() if record not in outdated]
    changed = [record for record in left if not journal.is_whole(record, sent=record.number in sent)]
    for record in (*outdated, *changed):
        journal.forget(record.number)
    return tuple(record.file for record in changed), tuple(record.file for record in outdated)


def _check_free_space(need: int, partial: Path) -> None:
    free = shutil.disk_usage(partial).free
    if free < need:
        raise KizamiError(
            f"{need:,} bytes are still to be written, and {free:,} are free",
            code="disk_full",
            file=str(partial),
            hint="make room, or choose an OUT on a larger disk; finished shards are kept",
        )


def _convert_all(
    plan: Plan,
    checkpoint: Checkpoint,
    statistics: Statistics | None,
    device: str,
    todo: list[Shard],
    journal: Journal,
    remote: Remote,
    workers: int,
    on_event: Callable[[RunEvent], None],
    stop: Event,
) -> None:
    """Shards are driven by a few threads (they write and hash); all of them share one pool that computes.

    numba, hashlib and the file calls release the GIL, so threads scale like processes and need no copies. Two drivers
    at least: while one waits for fsync, the other keeps the pool busy.
    """
    if plan.method.name == "gptq":
        workers = min(workers, SOLVER_WORKERS)
    drivers = max(1, min(len(todo), max(2, workers // 2))) if workers > 1 else 1
    with TensorReader(checkpoint) as reader, ExitStack() as stack:
        supply = _supply(remote, checkpoint, todo, journal, reader, stop)
        if supply is not None:
            stack.enter_context(supply)
        pool = ThreadPoolExecutor(workers, "kizami-compute") if workers > 1 else None
        lead = ThreadPoolExecutor(drivers, "kizami-shard")
        record = _Record(journal, checkpoint, len(plan.shards), on_event)
        slots = Semaphore(workers + max(1, drivers // 2))  # the pool has work while every second driver writes
        solver = None
        if statistics is not None and plan.method.name == "gptq":
            solver = Solver(statistics, plan.steps, reader, device, stop)
        calibration = None if statistics is None else Calibration(statistics, drivers + 1, solver)
        given = Given(journal.partial / FOLDER, plan) if plan.method.name in GIVEN and todo else None
        shop = Shop(
            plan, reader, Buffers(2 * workers), journal.partial, pool, slots, stop, record.piece, calibration, given
        )

        def convert(shard: Shard) -> None:
            with nullcontext() if supply is None else supply.lend(shard):
                started = time.monotonic()
                finished = convert_shard(shop, shard)
            done = record.shard(shard, finished, time.monotonic() - started)
            if remote.delivery is not None:
                remote.delivery.hand(done)

        try:
            _wait_for_first_failure([lead.submit(convert, shard) for shard in todo])
        finally:
            stop.set()
            for executor in (lead, pool):
                if executor is not None:
                    executor.shutdown(wait=True, cancel_futures=True)
            if solver is not None:
                solver.close()
            if given is not None:
                given.close()


def _supply(
    remote: Remote, checkpoint: Checkpoint, todo: list[Shard], journal: Journal, reader: TensorReader, stop: Event
) -> Supply | None:
    """None where nothing comes and nothing goes. What an earlier run has finished and not sent is sent now."""
    delivery = remote.delivery
    waiting = [] if delivery is None else [done for done in journal.done.values() if not delivery.is_there(done)]
    supply = None
    if remote.mirror is not None or remote.sheds:
        kept = {record.number: record.nbytes for record in waiting} if remote.sheds else {}
        supply = Supply(remote.mirror, checkpoint, todo, reader, stop, remote.limit, outputs=remote.sheds, kept=kept)
    if delivery is not None:
        if supply is not None and delivery.delete:
            delivery.on_gone, delivery.on_error = supply.gone, supply.fail
            delivery.short, supply.on_short = lambda: supply.short, delivery.nudge
            delivery.forget([done for done in journal.done.values() if done not in waiting])
        for record in waiting:
            delivery.hand(record)
    return supply


def _wait_for_first_failure(futures: list[Future[None]]) -> None:
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in futures:  # of failures that came together, that of the first shard
        if future in done:
            future.result()


class _Record:
    """Journal and events, one thread at a time."""

    def __init__(self, journal: Journal, checkpoint: Checkpoint, of: int, on_event: Callable[[RunEvent], None]) -> None:
        self._journal, self._checkpoint, self._of, self._on_event = journal, checkpoint, of, on_event
        self._lock = Lock()

    def piece(self, piece: Piece) -> None:
        with self._lock:
            self._on_event(Progress(piece.source_nbytes))

    def shard(self, shard: Shard, finished: FinishedShard, seconds: float) -> ShardRecord:
        assert finished.nbytes == shard.file_nbytes, (finished.nbytes, shard.file_nbytes)
        with self._lock:
            rows_sha256 = self._journal.write_rows(shard.number, finished.rows)
            mtimes = source_mtimes(shard, self._checkpoint)
            record = ShardRecord(shard.number, finished.file, finished.nbytes, finished.sha256, rows_sha256, mtimes)
            self._journal.append(record)
            self._on_event(ShardDone(shard, finished.rows, seconds, len(self._journal.done), self._of))
            return record

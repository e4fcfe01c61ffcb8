"""One output shard, start to end: read, decode, search, pack, measure, write. What an executor runs."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Event, Semaphore
from typing import Any, Generic, TypeVar

from kizami.formats.packed_source import PackedWeight
from kizami.formats.reader import TensorReader
from kizami.formats.writer import ShardWriter
from kizami.quantize.admission import UNLIMITED, Limit, Share, enter
from kizami.quantize.buffers import Buffers
from kizami.quantize.calibrated.statistics import Calibration, Chosen
from kizami.quantize.given import Given
from kizami.quantize.linear import quantize_linear
from kizami.quantize.metrics import ErrorSums
from kizami.quantize.plan import Plan, Shard, Step
from kizami.quantize.run.job_folder import attempt_name
from kizami.quantize.tensor import Piece, Produced, Quantize, pieces, produce
from kizami.quantize.threads import Stopped

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """attempt: the name that it has until whoever holds the journal gives it its own; None where it has that."""

    file: str
    nbytes: int
    sha256: str
    rows: list[dict[str, Any]]
    attempt: str | None = None


@dataclass(frozen=True, slots=True)
class Shop:
    """What all shards of a run share. pool: None computes in the shard's own thread. slots: pieces of all shards that
    may be computed or wait to be written; they bound the memory. attempt: as `Journal.attempt`. quantize: who packs.
    limit: of --max-memory, which bounds it by bytes."""

    plan: Plan
    reader: TensorReader
    buffers: Buffers
    folder: Path
    pool: Executor | None
    slots: Semaphore
    stop: Event
    on_piece: Callable[[Piece], None]
    calibration: Calibration | None = None
    given: Given | None = None
    attempt: str = ""
    quantize: Quantize = quantize_linear
    limit: Limit[Piece] = UNLIMITED


def convert_shard(shop: Shop, shard: Shard) -> FinishedShard:
    """Writes `shop.folder/shard.file`, or the attempt at it, durably. Pieces are written in order, so the bytes do not
    depend on who was faster. Raises KizamiError, or Stopped."""
    steps: list[tuple[Step, ErrorSums | None, Chosen | None]] = []
    sums: ErrorSums | None = None  # of the pieces of a step

    def compute(piece: Piece) -> Produced:
        if shop.stop.is_set():
            raise Stopped
        policy, method = shop.plan.policy, shop.plan.method
        return produce(piece, shop.reader, policy, method, shop.buffers, shop.calibration, shop.given, shop.quantize)

    work = chain.from_iterable(pieces(step) for step in shard.steps)
    attempt = attempt_name(shard.file, shop.attempt) if shop.attempt else None
    with ShardWriter(shop.folder / (attempt or shard.file), shard.tensors) as writer:
        for piece, produced in in_order(shop.pool, compute, work, shop.slots, shop.limit):
            for name, data in produced.chunks:
                writer.append(name, data)
                shop.buffers.give(data)
            shop.on_piece(piece)
            if produced.sums is not None:
                sums = produced.sums if sums is None else sums + produced.sums
            if piece.last:
                steps.append((piece.step, sums, produced.chosen))
                sums = None
            del produced, data  # they would stay in memory while the next piece is awaited
        written = writer.finish()
    rows = [report_row(shop.plan, shard, step, sums, written.crc32, chosen) for step, sums, chosen in steps]
    return FinishedShard(shard.file, written.nbytes, written.sha256, rows, attempt)


def in_order(
    pool: Executor | None,
    compute: Callable[[T], R],
    items: Iterable[T],
    slots: Semaphore,
    limit: Limit[T] = UNLIMITED,
) -> Iterator[tuple[T, R]]:
    """(item, compute(item)) in the order of `items`. An item holds one of the `slots` and its share of `limit` from its
    start until the next one is asked for; whoever has something to hand out does that rather than wait for either. At
    any end all are free."""
    if pool is None:
        yield from _one_by_one(compute, items, limit)
        return
    waiting: deque[_Waiting[T, R]] = deque()
    try:
        for item in items:
            while (share := enter(item, slots, limit, wait=not waiting)) is None:
                with _leaving(waiting[0].share, slots):
                    yield _first(waiting)
            try:
                waiting.append(_Waiting(item, share, pool.submit(_computed, compute, item, share)))
            except BaseException:  # the pool is being shut down
                share.close()
                slots.release()
                raise
        while waiting:
            with _leaving(waiting[0].share, slots):
                yield _first(waiting)
    finally:
        for left in waiting:
            left.drop()
            slots.release()


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[T, R]):
    item: T
    share: Share
    future: Future[R]

    def drop(self) -> None:
        """Nobody asks for it any more. What is computed all the same takes memory to its end."""
        if self.future.cancel():
            self.share.close()
        else:
            self.future.add_done_callback(lambda _: self.share.close())


@contextmanager
def _leaving(share: Share, slots: Semaphore) -> Iterator[None]:
    try:
        yield
    finally:
        share.close()
        slots.release()


def _one_by_one(compute: Callable[[T], R], items: Iterable[T], limit: Limit[T]) -> Iterator[tuple[T, R]]:
    for item in items:
        share = limit.take(item, wait=True)
        assert share is not None
        try:
            yield item, _computed(compute, item, share)
        finally:
            share.close()


def _computed(compute: Callable[[T], R], item: T, share: Share) -> R:
    try:
        return compute(item)
    finally:
        share.computed()


def _first(waiting: deque[_Waiting[T, R]]) -> tuple[T, R]:
    """A function, so that no name is left that keeps the future and its result."""
    first = waiting.popleft()
    return first.item, first.future.result()


def report_row(
    plan: Plan,
    shard: Shard,
    step: Step,
    sums: ErrorSums | None,
    crc32: Mapping[str, int],
    chosen: Chosen | None = None,
) -> dict[str, Any]:
    """A line of kizami-report.jsonl. No times in it: the file is the same for every run. crc32: of the shard's tensors,
    by name. chosen: of a linear that was rounded with a calibrated method."""
    row: dict[str, Any] = {
        "name": step.module,
        "action": step.action,
        "reason": step.reason,
        "role": step.place.role.value,
        "part": step.place.part,
        "layer": step.place.layer,
        "expert": step.place.expert,
        "mtp": step.place.in_mtp,
        "shape": list(step.shape),
        "source_dtype": "INT4" if isinstance(step.encoding, PackedWeight) else step.weight.dtype,
        "dtype": "INT4" if step.form == "int4" else step.outputs[0].dtype,
        "bytes": step.nbytes,
        "source_bytes": step.source_nbytes,
        "shard": shard.file,
        "crc32": {spec.name: f"{crc32[spec.name]:08x}" for spec in step.outputs},
    }
    if sums is not None:
        how = (
            {"scheme": plan.policy.scheme, "method": plan.method.name}
            if step.form == "int4"
            else {"scheme": "fp8-block"}
        )
        row |= how | sums.figures()
        row |= {"weight_energy": sums.sum_w2, "error_energy": sums.sum_e2}  # so that rows can be pooled exactly
    if chosen is not None and sums is not None:
        row |= {"method": chosen.method, "tokens": chosen.tokens, "fallback": chosen.fallback, **chosen.figures}
        if chosen.fallback is None:
            row["weighted_rel_error"] = sums.weighted_rel_error
    return row

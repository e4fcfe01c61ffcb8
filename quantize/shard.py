"""One output shard, start to end: read, decode, search, pack, measure, write. What an executor runs."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Event, Semaphore
from typing import Any, TypeVar

from kizami.formats.packed_source import PackedWeight
from kizami.formats.reader import TensorReader
from kizami.formats.writer import ShardWriter
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
    may be computed or wait to be written; they bound the memory. attempt: as `Journal.attempt`. quantize: who packs."""

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
        for piece, produced in in_order(shop.pool, compute, work, shop.slots):
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
    pool: Executor | None, compute: Callable[[T], R], items: Iterable[T], slots: Semaphore
) -> Iterator[tuple[T, R]]:
    """(item, compute(item)) in the order of `items`. An item holds one of the `slots` from its start until the next one
    is asked for; whoever has something to hand out does that rather than wait for a slot. At any end all are free."""
    if pool is None:
        for item in items:
            yield item, compute(item)
        return
    waiting: deque[tuple[T, Future[R]]] = deque()
    held = 0
    try:
        for item in items:
            while not slots.acquire(blocking=held == 0):
                yield _first(waiting)
                slots.release()
                held -= 1
            held += 1
            waiting.append((item, pool.submit(compute, item)))
        while waiting:
            yield _first(waiting)
            slots.release()
            held -= 1
    finally:
        for _, future in waiting:
            future.cancel()
        if held:
            slots.release(held)


def _first(waiting: deque[tuple[T, Future[R]]]) -> tuple[T, R]:
    """A function, so that no name is left that keeps the future and its result."""
    item, future = waiting.popleft()
    return item, future.result()


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

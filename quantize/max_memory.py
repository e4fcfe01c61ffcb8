"""--max-memory: how many threads and how many bytes of pieces in flight fit into the user's limit. Never part of the
plan's hash nor of a journal: the bytes of the output are the same for every limit.

    base        interpreter, libraries, kernels, plan: a model, and at the start of a run what the process really has
    beside      statistics and the solver of a calibrated method
    drivers     each its write buffers, the report's rows of its shard, and tensors that wait for their turn
    workers     each a band of rows and its stack
    pieces      what is left: quantize/admission.py lets pieces in by their bytes

The end of a run holds what is summed up of the report's rows and no piece: it has to fit, too.
"""

import ctypes
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import NoReturn

from kizami.formats.block_stream import BLOCK_BYTES, BLOCKS
from kizami.formats.errors import KizamiError
from kizami.quantize.admission import UNLIMITED, ByteLimit, Limit, Need
from kizami.quantize.buffers import Buffers
from kizami.quantize.calibrated.solver import SOLVER_WORKERS
from kizami.quantize.calibrated.solver_cost import TORCH_BYTES, solve_peak
from kizami.quantize.estimate import FINISH_BYTES, PLAN_BYTES, PROCESS_BYTES, ROW_BYTES, statistics_bytes
from kizami.quantize.piece_bytes import held_bytes, need_of
from kizami.quantize.plan import Plan, Step
from kizami.quantize.settings import CALIBRATED
from kizami.quantize.tensor import Piece, pieces
from kizami.quantize.threads import drivers_for

MIB = 1 << 20
WORKER_BYTES = 4 * MIB  # beside its piece: stack, the allocator's own reserve
DRIVER_BYTES = (BLOCKS + 1) * BLOCK_BYTES + MIB  # of a shard's file, and of its report
MMAP_THRESHOLD = -3  # of mallopt(3), in <malloc.h>
ALONE = 1.1  # time of a run with one driver for many workers: nobody computes while a shard is flushed


@dataclass(frozen=True, slots=True)
class Crew:
    """workers: threads that compute; drivers: that write shards. in_flight: pieces at most, and piece_bytes: of all of
    them together. peak: bytes of the process, at most limit."""

    limit: int
    workers: int
    drivers: int
    piece_bytes: int
    peak: int

    @property
    def in_flight(self) -> int:
        return pieces_in_flight(self.workers, self.drivers)


def pieces_in_flight(workers: int, drivers: int) -> int:
    """The pool has work while every second driver writes."""
    return workers + max(1, drivers // 2)


def crew_within(limit: int, plan: Plan, workers: int, *, base: int = 0, finishes: bool = True) -> Crew:
    """The threads that are done first, `workers` at most, with the bytes that are left for pieces.

    limit: bytes of this process. base: bytes that it has when the run begins, if they are more than the model says.
    finishes: whether the run also makes OUT of its shards. KizamiError "max_memory" where one worker cannot do it.
    """
    job = _Job.of(plan, max(base, base_bytes(plan)))
    end = base_bytes(plan) + FINISH_BYTES * len(plan.steps) * finishes
    if plan.method.name == "gptq":
        workers = min(workers, SOLVER_WORKERS)
    best: tuple[float, int, int] | None = None
    for count in range(1, workers + 1):
        for drivers in {1, drivers_for(count, len(plan.shards))}:
            left = limit - job.fixed(count, drivers)
            if left >= job.largest:
                slower = ALONE if count > 1 and drivers == 1 and len(plan.shards) > 1 else 1.0
                key = slower * job.duration(count, left), count, drivers
                best = key if best is None or key < best else best
    least = max(job.fixed(1, 1) + job.largest, end)
    if best is None or limit < end:
        _refuse(limit, least, job, end)
    _, count, drivers = best
    fixed = job.fixed(count, drivers)
    most = min(limit - fixed, job.in_flight(pieces_in_flight(count, drivers)))
    return Crew(limit, count, drivers, limit - fixed, max(fixed + most, end))


def base_bytes(plan: Plan) -> int:
    """Before the first piece."""
    return PROCESS_BYTES + PLAN_BYTES * len(plan.steps) + (TORCH_BYTES if plan.method.name == "gptq" else 0)


@dataclass(frozen=True, slots=True)
class _Job:
    """needs: of all pieces, and how many have each; step: of the largest."""

    plan: Plan
    base: int
    needs: Counter[Need]
    step: Step | None
    driver: int

    @classmethod
    def of(cls, plan: Plan, base: int) -> "_Job":
        needs: Counter[Need] = Counter()
        largest, step = 0, None
        for need, of in _needs(plan):
            needs[need] += 1
            if need.total > largest:
                largest, step = need.total, of
        driver = max((held_bytes(shard) + ROW_BYTES * len(shard.steps) for shard in plan.shards), default=0)
        return cls(plan, base, needs, step, DRIVER_BYTES + driver)

    @property
    def largest(self) -> int:
        return max((need.total for need in self.needs), default=0)

    def fixed(self, workers: int, drivers: int) -> int:
        """All but the pieces."""
        beside = 0
        if self.plan.method.name in CALIBRATED:  # a layer is read beside those that are held
            beside = statistics_bytes(self.plan, drivers + 1) + statistics_bytes(self.plan, 1)
        if self.plan.method.name == "gptq":
            beside += solve_peak(self.plan)
        return self.base + beside + workers * WORKER_BYTES + drivers * self.driver

    def duration(self, workers: int, left: int) -> float:
        """In units of no meaning: work grows with the bytes, and as many are worked on as fit."""
        return sum(count * need.total / max(1, min(workers, left // need.total)) for need, count in self.needs.items())

    def in_flight(self, count: int) -> int:
        """The bytes of the largest pieces, as many as may be in flight."""
        total = 0
        for need in sorted(self.needs, key=lambda need: -need.total):
            some = min(count, self.needs[need])
            total, count = total + some * need.total, count - some
        return total


def _needs(plan: Plan) -> Iterator[tuple[Need, Step]]:
    for shard in plan.shards:
        for step in shard.steps:
            for piece in pieces(step):
                yield need_of(piece, plan.policy), step


def _refuse(limit: int, least: int, job: _Job, end: int) -> NoReturn:
    hint = f"give --max-memory {-(-least // 10**6)}MB or more"
    if least == end:
        raise KizamiError(
            f"--max-memory is {limit:,} bytes; expected at least {least:,}: the report of "
            f"{len(job.plan.steps):,} tensors is made in memory at the end",
            code="max_memory",
            hint=f"{hint}; --shards leaves that to the last command",
        )
    parts = [f"{job.base:,} for the program and its plan", f"{job.largest:,} for one tensor"]
    parts.append(f"{job.fixed(1, 1) - job.base:,} for its threads and buffers")
    raise KizamiError(
        f"--max-memory is {limit:,} bytes; expected at least {least:,}: {', '.join(parts)}",
        code="max_memory",
        file=job.step.weight.file if job.step else None,
        tensor=job.step.weight.name if job.step else None,
        hint=hint,
    )


# ------------------------------------------------------------------------------------------------------- this process


def memory_of(plan: Plan, workers: int, crew: Crew | None) -> tuple[Buffers, Limit[Piece]]:
    """Within --max-memory, memory that is kept for later pieces takes no more than those in flight leave."""
    if crew is None:
        return Buffers(2 * workers), UNLIMITED
    buffers = Buffers(2 * workers, slack=1.0)
    return buffers, ByteLimit(crew.piece_bytes, lambda piece: need_of(piece, plan.policy), buffers.allow)


def crew_here(limit: int, plan: Plan, workers: int, *, finishes: bool = True) -> Crew:
    """`crew_within` what this process already has, which begins to give memory back at once. KizamiError "max_memory"
    also where it has had more."""
    return_freed_memory()
    now, peak = resident_bytes()
    if peak > limit:
        raise KizamiError(
            f"--max-memory is {limit:,} bytes, and this process has already had {peak:,}: the plan of "
            f"{len(plan.steps):,} tensors is made, and kernels are loaded or, the first time, compiled",
            code="max_memory",
            hint="run the same command again if it has just compiled its kernels; else give more",
        )
    try:
        return crew_within(limit, plan, workers, base=now, finishes=finishes)
    except KizamiError as refusal:
        again = ", or run the same command again if it has just compiled its kernels" * (now > base_bytes(plan))
        hint = f"{refusal.hint}{again}"
        raise KizamiError(
            refusal.message, code="max_memory", file=refusal.file, tensor=refusal.tensor, hint=hint
        ) from None


def resident_bytes() -> tuple[int, int]:
    """Of this process, now and at most so far."""
    try:
        with open("/proc/self/status") as status:
            found = dict(line.split(":", 1) for line in status)
        return tuple(int(found[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
    except (OSError, KeyError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return peak, peak


@cache
def return_freed_memory() -> None:
    """Arrays of 1 MiB and more go back to the system when they are freed. Otherwise glibc raises that threshold to the
    largest that was freed, up to 32 MiB, and keeps as much twice for each thread."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, MIB)

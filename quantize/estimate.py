"""Rough time and memory of a run, before it starts. Never part of a decision, nor of the plan's hash."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kizami.quantize.calibrated.solver import SOLVER_WORKERS
from kizami.quantize.calibrated.solver_cost import SOLVE_RATE, solve_bytes, solve_operations
from kizami.quantize.plan import Plan
from kizami.quantize.settings import CALIBRATED, MethodName
from kizami.quantize.threads import drivers_for

Limit = Literal["cpu", "read", "write"]

# Bytes of source weights per second on one core of an AMD EPYC, reading and writing in memory included.
PACK_RATES: Mapping[MethodName, float] = {
    "search": 300e6, "minmax": 450e6, "signed": 450e6, "weighted": 220e6, "gptq": 160e6,
    "llmcompressor-gptq": 5e6, "llmcompressor-awq": 5e6,
}  # fmt: skip
MOVE_RATE = 400e6  # decoded to BF16, copied or kept: bound by memory and disk
PROCESS_BYTES = 190 << 20  # interpreter, numpy, numba, all kernels (measured: 181 to 186)
BASE_BYTES = 236 << 20  # the same, and write buffers
PLAN_BYTES = 2100  # of a step in plan, index and headers (measured, GLM-5.2: 1,760)
ROW_BYTES = 5500  # of a step in the report's rows of a shard that is written (measured: 4,800)
FINISH_BYTES = 2000  # of a step at the end: index, what is summed up of the report's rows, card (measured: 1,500)
WORKER_BYTES = 4 << 20  # a band of rows, and what is kept of it
OUTPUTS = 1.3  # packed tensors in memory per worker: one in work, and those that wait to be written (measured: 1.2)
SURVEY = 1 / 16  # of a packed tensor's weights: two bytes per 32 of them


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second. pack, move: of source weights that are packed, and of all others, by all workers together, in
    memory. read, write: of the file systems of source and output, None where nobody has measured. shared: both are one
    file system, on which reading and writing take turns. measured: pack and move are of this machine."""

    pack: float
    move: float
    read: float | None = None
    write: float | None = None
    shared: bool = False
    measured: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes of a job. packed, moved: as Rates has them; read: of the source's files; written: of the output's.
    solve_operations: of gptq's solver, whose rate is not measured."""

    packed: int
    moved: int
    read: int
    written: int
    solve_operations: float = 0.0


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds of wall time, if each of the three were alone; None where its rate is not known."""

    cpu: float
    read: float | None
    write: float | None
    shared: bool

    @property
    def disk(self) -> float:
        """Of reading and writing at the same time: on one file system one after the other."""
        known = [seconds for seconds in (self.read, self.write) if seconds is not None]
        return (sum(known) if self.shared else max(known)) if known else 0.0

    @property
    def seconds(self) -> float:
        """Shards overlap: while one is read or written, others are computed."""
        return max(self.cpu, self.disk)

    @property
    def limit(self) -> Limit:
        """What a faster one of would make the job faster: of two disks or halves of one, the slower."""
        if self.cpu >= self.disk:
            return "cpu"
        return "read" if (self.read or 0.0) >= (self.write or 0.0) else "write"


@dataclass(frozen=True, slots=True)
class Estimate:
    """seconds: wall time; memory_bytes: the peak of the process; duration, rates, work: what seconds come from."""

    seconds: float
    memory_bytes: int
    duration: Duration
    rates: Rates
    work: Work


def static_rates(method: MethodName, workers: int) -> Rates:
    """Those of a machine that was measured once, not of this one."""
    return Rates(PACK_RATES[method] * workers, MOVE_RATE * workers)


def work_of(plan: Plan) -> Work:
    packed = moved = read = 0
    for step in plan.steps:
        if step.action == "drop":
            continue
        read += step.source_nbytes
        if step.action == "quantize":
            packed += max(step.weight.nbytes, step.weights)  # of an INT4 source, what it decodes to
        else:
            moved += step.weight.nbytes
    operations = solve_operations(plan) if plan.method.name == "gptq" else 0.0
    return Work(packed, moved, read, plan.output.file_bytes, operations)


def duration_of(work: Work, rates: Rates, workers: int) -> Duration:
    """workers: cores that the solver has, too."""
    cpu = work.packed / rates.pack + work.moved / rates.move + work.solve_operations / SOLVE_RATE / workers
    read = None if rates.read is None else work.read / rates.read
    write = None if rates.write is None else work.written / rates.write
    return Duration(cpu, read, write, rates.shared)


def estimate(
    plan: Plan, method: MethodName, workers: int, rates: Rates | None = None, work: Work | None = None
) -> Estimate:
    """rates: what was measured, with as many workers; by default static. work: the plan's, if it is known already."""
    rates = rates or static_rates(method, workers)
    work = work or work_of(plan)
    duration = duration_of(work, rates, workers)
    largest = max((OUTPUTS * step.nbytes + SURVEY * step.weights for step in plan.packed), default=0.0)
    beside = statistics_bytes(plan, max(2, workers // 2) + 1) if method in CALIBRATED else 0
    if method == "gptq":  # two threads and all cores in turn
        beside, workers = beside + solve_bytes(plan), min(workers, SOLVER_WORKERS)
    steps = len(plan.steps)
    rows = max((len(shard.steps) for shard in plan.shards), default=0) * drivers_for(workers, len(plan.shards))
    memory = BASE_BYTES + PLAN_BYTES * steps + ROW_BYTES * rows + beside + int(workers * (WORKER_BYTES + largest))
    end = PROCESS_BYTES + (PLAN_BYTES + FINISH_BYTES) * steps
    return Estimate(duration.seconds, max(memory, end), duration, rates, work)


def statistics_bytes(plan: Plan, layers: int) -> int:
    """Of as many layers of STATS, the largest: mean squares in float32 of every input; gate and up share theirs."""
    found: Counter[int] = Counter()
    for step in plan.steps:
        if step.is_linear and step.place.layer is not None and step.place.part != "up_proj":
            found[step.place.layer] += 4 * step.shape[1]
    return sum(sorted(found.values())[-layers:])

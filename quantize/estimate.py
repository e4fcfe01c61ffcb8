"""Rough time and memory of a run, before it starts. Never part of a decision."""

from collections import Counter
from dataclasses import dataclass

from kizami.quantize.calibrated.solver import SOLVER_WORKERS
from kizami.quantize.calibrated.solver_cost import SOLVE_RATE, solve_bytes, solve_operations
from kizami.quantize.plan import Plan
from kizami.quantize.settings import CALIBRATED, MethodName

# Bytes of source weights per second on one core of an AMD EPYC, reading and writing included.
PACK_RATES: dict[MethodName, float] = {
    "search": 300e6, "minmax": 450e6, "signed": 450e6, "weighted": 220e6, "gptq": 160e6,
    "llmcompressor-gptq": 5e6, "llmcompressor-awq": 5e6,
}  # fmt: skip
MOVE_RATE = 400e6  # decoded to BF16, copied or kept: bound by memory and disk
BASE_BYTES = 236 << 20  # interpreter, numpy, numba, compiled kernels, write buffers
WORKER_BYTES = 4 << 20  # a band of rows, and what is kept of it
OUTPUTS = 1.3  # packed tensors in memory per worker: one in work, and those that wait to be written (measured: 1.2)
SURVEY = 1 / 16  # of a packed tensor's weights: two bytes per 32 of them


@dataclass(frozen=True, slots=True)
class Estimate:
    """seconds: wall time; memory_bytes: the peak of the process."""

    seconds: float
    memory_bytes: int


def estimate(plan: Plan, method: MethodName, workers: int) -> Estimate:
    rounded = [step for step in plan.steps if step.action == "quantize"]
    packed = sum(max(step.weight.nbytes, step.weights) for step in rounded)  # of an INT4 source, what it decodes to
    moved = sum(step.weight.nbytes for step in plan.steps if step.action not in ("quantize", "drop"))
    largest = max((OUTPUTS * step.nbytes + SURVEY * step.weights for step in plan.packed), default=0.0)
    seconds = (packed / PACK_RATES[method] + moved / MOVE_RATE) / workers
    beside = statistics_bytes(plan, max(2, workers // 2) + 1) if method in CALIBRATED else 0
    if method == "gptq":  # two threads and all cores in turn
        seconds += solve_operations(plan) / SOLVE_RATE / workers
        beside, workers = beside + solve_bytes(plan), min(workers, SOLVER_WORKERS)
    return Estimate(seconds, BASE_BYTES + beside + int(workers * (WORKER_BYTES + largest)))


def statistics_bytes(plan: Plan, layers: int) -> int:
    """Of as many layers of STATS, the largest: mean squares in float32 of every input; gate and up share theirs."""
    found: Counter[int] = Counter()
    for step in plan.steps:
        if step.is_linear and step.place.layer is not None and step.place.part != "up_proj":
            found[step.place.layer] += 4 * step.shape[1]
    return sum(sorted(found.values())[-layers:])

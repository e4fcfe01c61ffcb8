"""Rough time and memory of a run, before it starts. Never part of a decision."""

from dataclasses import dataclass

from kizami.quantize.plan import Plan
from kizami.quantize.settings import MethodName

# Bytes of source weights per second on one core of an AMD EPYC, reading and writing included.
PACK_RATES: dict[MethodName, float] = {"search": 300e6, "minmax": 450e6, "signed": 450e6}
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
    return Estimate(seconds, BASE_BYTES + int(workers * (WORKER_BYTES + largest)))

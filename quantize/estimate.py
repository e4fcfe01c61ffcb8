"""Rough time and memory of a run, before it starts. Never part of a decision."""

from dataclasses import dataclass

from kizami.quantize.plan import Plan
from kizami.quantize.settings import MethodName

# Bytes of source weights per second on one core of an AMD EPYC, reading and writing included.
PACK_RATES: dict[MethodName, float] = {"search": 150e6, "minmax": 200e6, "signed": 200e6}
MOVE_RATE = 400e6  # decoded to BF16, copied or kept: bound by memory and disk
BASE_BYTES = 200 << 20  # interpreter, numpy, numba, compiled kernels, write buffers
COPIES = 1.2  # of a packed tensor and its output, per worker (1.05 measured at 1, 2 and 4 workers)


@dataclass(frozen=True, slots=True)
class Estimate:
    """seconds: wall time; memory_bytes: the peak of the process."""

    seconds: float
    memory_bytes: int


def estimate(plan: Plan, method: MethodName, workers: int) -> Estimate:
    packed = sum(step.weight.nbytes for step in plan.packed)
    moved = sum(step.weight.nbytes for step in plan.steps if step.action not in ("quantize", "drop"))
    largest = max((step.weight.nbytes + step.nbytes for step in plan.packed), default=0)
    seconds = (packed / PACK_RATES[method] + moved / MOVE_RATE) / workers
    return Estimate(seconds, BASE_BYTES + int(COPIES * workers * largest))

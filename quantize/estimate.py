"""Rough time and memory of a run, before it starts. Never part of a decision."""

from dataclasses import dataclass

from kizami.quantize.plan import Plan
from kizami.quantize.settings import MethodName

# Source bytes per second on one core of a 2020s server CPU, reading and writing included, measured with this code.
PACK_RATES: dict[MethodName, float] = {"search": 25e6, "minmax": 80e6, "signed": 80e6}
MOVE_RATE = 400e6  # decoded to BF16, copied or kept: bound by memory and disk
BASE_BYTES = 300 << 20  # interpreter, numpy, numba and the compiled kernels
WRITE_BYTES = 64 << 20  # write buffers and pieces that wait for their turn


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
    return Estimate(seconds, BASE_BYTES + WRITE_BYTES + 2 * workers * largest)

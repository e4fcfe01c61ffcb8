"""Scale rules `minmax`, `signed`, and the steps of `search` (int4-algorithms sections 3, 4, 6), one group at a time."""

from typing import Any

import numpy as np

from kizami.quantize.kernels.jit import kernel
from kizami.quantize.kernels.lanes import CHUNK
from kizami.quantize.kernels.rows import Array, round_bf16
from kizami.quantize.kernels.search_tables import COUNT
from kizami.quantize.kernels.search_vectors import add_value_errors, smallest
from kizami.quantize.kernels.vectors import ROUND

SMALLEST_SCALE = np.float32(2.0**-126)  # smallest normal float32: below it scales lose bits, codes are no longer exact
SIGN = np.uint32(0x80000000)
ZERO_GROUP_SCALE = np.float32(2.0**-7)  # BF16 eps, compressed-tensors' value
VALUE_UNITS = np.float32(2.0**20)  # float sources: integers rint(w/m * 2^20), so that sums over a group are exact
MAGIC = np.float32(ROUND)


@kernel
def minmax_scale(positive: Any, negative: Any) -> Any:
    """compressed-tensors: bf16(absmax / 7.5) of the BF16 weight, BF16 eps where that is 0."""
    s = round_bf16(round_bf16(max(positive, negative)) / np.float32(7.5))
    return s if s != 0 else ZERO_GROUP_SCALE


@kernel
def signed_scale(positive: Any, negative: Any) -> Any:
    """-m/8 for the weight m of largest magnitude, the positive one where both signs have it."""
    m = max(positive, negative)
    if m == 0:
        return ZERO_GROUP_SCALE
    s = max(round_bf16(m * np.float32(0.125)), SMALLEST_SCALE)
    return s if negative > positive else -s


@kernel
def guard(s: float, positive: Any, negative: Any, reach_plus: float, reach_minus: float) -> Any:
    """float64 scale to BF16; up to the smallest one that keeps every weight within the allowance, if there is one."""
    single = np.float32(s)
    sign = np.uint32(single.view(np.uint32) & SIGN)
    magnitude = max(round_bf16(abs(single)), SMALLEST_SCALE)
    if reach_plus < np.inf:
        over, under = np.float64(positive), np.float64(negative)  # largest on the side of the codes +7, -8
        if s < 0:
            over, under = under, over
        bound = np.float32(max(over / reach_plus, under / reach_minus))
        bits = np.uint32(np.float32(bound).view(np.uint32) & np.uint32(0xFFFF0000))
        low = np.uint32(bits).view(np.float32)
        while over > reach_plus * np.float64(low) or under > reach_minus * np.float64(low):
            bits = np.uint32(bits + np.uint32(0x10000))
            low = np.uint32(bits).view(np.float32)
        magnitude = max(magnitude, low)
    bits = np.uint32(np.float32(magnitude).view(np.uint32) | sign)  # no branch: the sign is a coin toss
    return bits.view(np.float32)


@kernel
def relative_values(values: Array, begin: int, m: Any, relative: Array) -> None:
    """The group's weights from `begin` on, relative to its signed extreme m."""
    for i in range(relative.size):
        relative[i] = values[begin + i] / m


@kernel
def value_units(values: Array, begin: int, m: Any, units: Array) -> None:
    """W/m of a chunk, as integers."""
    for i in range(CHUNK):
        units[i] = np.float32((values[begin + i] / m) * VALUE_UNITS + MAGIC) - MAGIC


@kernel
def sum_values(relative: Array, divisors: Array, sums: Array, at: int) -> None:
    """sums[at : at + COUNT], zeros before: error of each candidate, as integers relative to the square of
    m / VALUE_QUANTUM."""
    for o in range(0, relative.size, CHUNK):
        add_value_errors(relative, o, divisors, sums, at)
    for j in range(COUNT):
        sums[at + j] = np.int32(np.rint(sums[at + j] / (divisors[j] * divisors[j])))


@kernel
def allowed(divisors: Array, minus: int, count: int, p: Any, n: Any, reach_plus: float, positive_scale: bool) -> Any:
    """Where the allowed candidates of each sign end: [:first of the two] and [minus:second]."""
    # 6.2's scalar test of the allowance: a weight of the sign opposite to m, on the side of the code +7
    limit, opposite = reach_plus * np.float64(max(p, n)) * (1 + 1e-9), np.float64(min(p, n))
    last = minus
    while -divisors[last - 1] * opposite > limit:
        last -= 1
    if positive_scale:
        return (last, minus) if n > p else (0, count)
    return last, count


@kernel
def choose(
    sums: Array, at: int, divisors: Array, minus: int, p: Any, n: Any, m: Any, reach_plus: float,
    reach_minus: float, positive_scale: bool,
) -> Any:  # fmt: skip
    """The scale from the best allowed candidate: the first `minus` divisors are negative, of rising magnitude. p, n:
    the group's largest weight of each sign; m: the signed extreme."""
    if max(p, n) == 0:
        return ZERO_GROUP_SCALE
    last, end = allowed(divisors, minus, COUNT, p, n, reach_plus, positive_scale)
    d = divisors[smallest(sums, at, last, minus, end)]
    return guard(np.float64(m) / d, p, n, reach_plus, reach_minus)


@kernel
def refit(a: int, b: int, unit: float, step: Any, p: Any, n: Any, reach_plus: float, reach_minus: float) -> Any:
    """a/b units, the least-squares scale of the codes under `step`, where they give any; else `step`.
    a, b: the exact sums of code * units and of code^2.

    6.3 compares the errors of both; there is no need: a/b is the vertex of the error's parabola for these codes and
    `guard` takes the nearest BF16 value that is allowed, so the new scale is at least as good.
    """
    return step if a == 0 or b == 0 else guard(unit * a / b, p, n, reach_plus, reach_minus)

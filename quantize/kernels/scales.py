"""Scale rules `minmax`, `signed`, and the steps of `search` (int4-algorithms sections 3, 4, 6), a row at a time."""

from typing import Any

import numpy as np

from kizami.quantize.kernels.jit import kernel
from kizami.quantize.kernels.rows import CHUNK, HIGHEST, LOWEST, ROUND, ROUND_BITS, Array, e4m3, round_bf16
from kizami.quantize.kernels.vectors import COUNT, add_table_rows

SMALLEST_SCALE = np.float32(2.0**-126)  # smallest normal float32: below it scales lose bits, codes are no longer exact
ZERO_GROUP_SCALE = np.float32(2.0**-7)  # BF16 eps, compressed-tensors' value
CODE_UNITS = np.float32(512)  # 512 * V[b] is an integer for every e4m3 byte b
VALUE_UNITS = np.float32(2.0**20)  # float sources: integers rint(w/m * 2^20), so that sums over a group are exact
VALUE_QUANTUM = np.float32(2.0**18)  # squared error in steps; 128 * (11 - 7)^2 of them stay below 2^31
INDEX_BITS = 6  # of a candidate: COUNT = 48


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
    magnitude = max(round_bf16(abs(np.float32(s))), SMALLEST_SCALE)
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
    return -magnitude if s < 0 else magnitude


@kernel
def sum_codes(codes: Array, positive: Array, negative: Array, table: Array, sums: Array) -> None:
    """sums [groups, COUNT]: error of each candidate; positive, negative: largest code of each sign per group."""
    g = codes.size // positive.size
    flat = sums.reshape(-1)
    for k in range(positive.size):
        top = np.int64(max(positive[k], negative[k]))
        flip = np.int64(128 if negative[k] > positive[k] else 0)  # codes relative to the sign of the extreme
        flat[k * COUNT : (k + 1) * COUNT] = 0
        for begin in range(k * g, (k + 1) * g, CHUNK):
            add_table_rows(table, top, flip, codes, begin, flat, k * COUNT)


@kernel
def relative_values(w: Array, positive: Array, negative: Array, relative: Array) -> None:
    """w/m, m the signed extreme of the group; unread where m = 0."""
    g = w.size // positive.size
    for k in range(positive.size):
        m = -negative[k] if negative[k] > positive[k] else positive[k]
        m = m if m != 0 else np.float32(1)
        for i in range(k * g, (k + 1) * g):
            relative[i] = w[i] / m


@kernel
def sum_values(relative: Array, divisors: Array, sums: Array) -> None:
    """The same from true values, as integers relative to the square of the largest table cell's step, 1/5.6^2."""
    g = relative.size // sums.shape[0]
    for k in range(sums.shape[0]):
        for j in range(COUNT):
            d = np.float32(divisors[j])
            total: Any = 0
            for o in range(k * g, (k + 1) * g, CHUNK):
                part = np.int32(0)
                for i in range(CHUNK):
                    x = relative[o + i] * d
                    q = (min(max(x, LOWEST), HIGHEST) + ROUND) - ROUND
                    e = x - q
                    part = np.int32(part + np.int32(e * e * VALUE_QUANTUM))
                total += part
            sums[k, j] = np.int32(np.rint(total / (divisors[j] * divisors[j])))


@kernel
def smallest(sums: Array, hole: int, resume: int, last: int) -> Any:
    """Index of the first smallest of sums[:hole] and sums[resume:last], by one minimum of value and index."""
    best = np.int32(0x7FFFFFFF)
    for j in range(COUNT):
        allowed = (j < hole) | ((j >= resume) & (j < last))
        best = min(best, np.int32((sums[j] << INDEX_BITS) | j) if allowed else np.int32(0x7FFFFFFF))
    return np.int64(best & ((1 << INDEX_BITS) - 1))


@kernel
def choose(
    sums: Array, divisors: Array, minus: int, positive: Array, negative: Array, reach_plus: float,
    reach_minus: float, positive_scale: bool, scale: Array,
) -> None:  # fmt: skip
    """scale [groups] from the best allowed candidate: the first `minus` divisors are negative, of rising magnitude."""
    for k in range(scale.size):
        p, n = positive[k], negative[k]
        m = np.float64(max(p, n))
        if m == 0:
            scale[k] = ZERO_GROUP_SCALE
            continue
        # 6.2's scalar test of the allowance: a weight of the sign opposite to m, on the side of the code +7
        limit, opposite = reach_plus * m * (1 + 1e-9), np.float64(min(p, n))
        last = minus
        while -divisors[last - 1] * opposite > limit:
            last -= 1
        end = COUNT
        if positive_scale:
            last, end = (last, minus) if n > p else (0, COUNT)
        d = divisors[smallest(sums[k], last, minus, end)]
        scale[k] = guard((-m if n > p else m) / d, p, n, reach_plus, reach_minus)


@kernel
def code_units(codes: Array, units: Array) -> None:
    for i in range(codes.size):
        units[i] = np.int32(e4m3(codes[i]) * CODE_UNITS)


@kernel
def value_units(relative: Array, units: Array) -> None:
    for i in range(relative.size):
        units[i] = np.int32(np.float32(relative[i] * VALUE_UNITS + ROUND).view(np.int32) - ROUND_BITS)


@kernel
def fit_sums(w: Array, units: Array, step: Array, a: Array, b: Array) -> None:
    """Per chunk the exact sums a of code * units and b of code^2 of the nearest codes under `step`."""
    for c in range(step.size):
        s = step[c]
        o = c * CHUNK
        part_a = np.int32(0)
        part_b = np.int32(0)
        for i in range(CHUNK):
            x = min(max(w[o + i] / s, LOWEST), HIGHEST)
            q = np.int32(np.float32(x + ROUND).view(np.int32) - ROUND_BITS)
            part_a = np.int32(part_a + np.int32(q * units[o + i]))
            part_b = np.int32(part_b + np.int32(q * q))
        a[c] = part_a
        b[c] = part_b


@kernel
def refit(
    a: Array, b: Array, unit: Array, positive: Array, negative: Array, reach_plus: float, reach_minus: float,
    scale: Array,
) -> None:  # fmt: skip
    """scale = a/b units, the least-squares scale of the codes under the old one, where the old one gave any.

    6.3 compares the errors of both; there is no need: a/b is the vertex of the error's parabola for these codes and
    `guard` takes the nearest BF16 value that is allowed, so the new scale is at least as good.
    """
    per_group = a.size // scale.size
    for k in range(scale.size):
        sum_a = 0
        sum_b = 0
        for c in range(k * per_group, (k + 1) * per_group):
            sum_a += a[c]
            sum_b += b[c]
        if sum_a != 0 and sum_b != 0:
            s = np.float64(unit[k]) * sum_a / sum_b
            scale[k] = guard(s, positive[k], negative[k], reach_plus, reach_minus)

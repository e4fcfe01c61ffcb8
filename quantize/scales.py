"""Scale rules for one group: `minmax`, `signed`, and the parts of `search` (int4-algorithms sections 3, 4, 6)."""

from typing import Any

import numpy as np

from kizami.quantize.jit import kernel
from kizami.quantize.rows import (
    CHUNK,
    HIGHEST,
    LOWEST,
    ROUND,
    SMALLEST_SCALE,
    ZERO_GROUP_SCALE,
    Array,
    e4m3,
    round_bf16,
)

UNITS = np.float32(512)  # 512 * V[b] is an integer for every e4m3 byte
SURROGATE = np.float32(2.0**20)  # float sources: integer weights rint(w/m * 2^20), so that sums over a group are exact
ROUND_BITS = np.int32(0x4B400008)  # of ROUND
FLOAT_QUANTUM = np.float32(2.0**18)  # of a squared error in steps; 128 * (11 - 8)^2 of them stay below 2^31


@kernel
def minmax_scale(m: Any) -> Any:
    """compressed-tensors: bf16(absmax / 7.5) of the BF16 weight, BF16 eps where that is 0."""
    s = round_bf16(round_bf16(m) / np.float32(7.5))
    return s if s != 0 else ZERO_GROUP_SCALE


@kernel
def signed_scale(positive: Any, negative: Any) -> Any:
    """-m/8 for the weight m of largest magnitude; the positive one where both signs occur."""
    s = max(round_bf16(max(positive, negative) * np.float32(0.125)), SMALLEST_SCALE)
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
def table_offsets(codes: Array, begin: int, end: int, top: int, flip: int, count: int, offsets: Array) -> None:
    base = np.int32(top * 256)
    for i in range(begin, end):
        offsets[i] = np.int32((base + (np.int32(codes[i]) ^ np.int32(flip))) * np.int32(count))


@kernel
def sum_table(table: Array, offsets: Array, begin: int, end: int, first: int, errors: Array) -> None:
    """errors[first : first + 16] = sums of table rows. Sixteen named sums stay in registers, an array would not."""
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = np.int32(0)
    b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = np.int32(0)
    for i in range(begin, end):
        o = offsets[i] + first
        a0 = np.int32(a0 + table[o])
        a1 = np.int32(a1 + table[o + 1])
        a2 = np.int32(a2 + table[o + 2])
        a3 = np.int32(a3 + table[o + 3])
        a4 = np.int32(a4 + table[o + 4])
        a5 = np.int32(a5 + table[o + 5])
        a6 = np.int32(a6 + table[o + 6])
        a7 = np.int32(a7 + table[o + 7])
        b0 = np.int32(b0 + table[o + 8])
        b1 = np.int32(b1 + table[o + 9])
        b2 = np.int32(b2 + table[o + 10])
        b3 = np.int32(b3 + table[o + 11])
        b4 = np.int32(b4 + table[o + 12])
        b5 = np.int32(b5 + table[o + 13])
        b6 = np.int32(b6 + table[o + 14])
        b7 = np.int32(b7 + table[o + 15])
    errors[first] = a0
    errors[first + 1] = a1
    errors[first + 2] = a2
    errors[first + 3] = a3
    errors[first + 4] = a4
    errors[first + 5] = a5
    errors[first + 6] = a6
    errors[first + 7] = a7
    errors[first + 8] = b0
    errors[first + 9] = b1
    errors[first + 10] = b2
    errors[first + 11] = b3
    errors[first + 12] = b4
    errors[first + 13] = b5
    errors[first + 14] = b6
    errors[first + 15] = b7


@kernel
def relative_weights(w: Array, begin: int, end: int, m: Any, relative: Array) -> None:
    for i in range(begin, end):
        relative[i] = w[i] / m


@kernel
def sum_float(relative: Array, begin: int, end: int, divisors: Array, errors: Array) -> None:
    """The sums of `sum_table` from true values w/m instead of byte codes."""
    for j in range(divisors.size):
        d = np.float32(divisors[j])
        total = 0
        for o in range(begin, end, CHUNK):
            part = np.int32(0)
            for i in range(CHUNK):
                x = relative[o + i] * d
                q = (min(max(x, LOWEST), HIGHEST) + ROUND) - ROUND
                e = x - q
                part = np.int32(part + np.int32(e * e * FLOAT_QUANTUM))
            total += part
        errors[j] = total / (divisors[j] * divisors[j])


@kernel
def choose(
    errors: Array, divisors: Array, positive: Any, negative: Any, reach_plus: float, positive_scale: bool
) -> float:
    """The divisor of the first smallest error among the allowed candidates; 6.2's scalar test of the clip allowance."""
    below = negative > positive
    opposite, extreme = np.float64(min(positive, negative)), np.float64(max(positive, negative))
    limit = reach_plus * extreme * (1 + 1e-9)
    best = np.inf
    chosen = 0.0
    for j in range(divisors.size):
        d = divisors[j]
        if positive_scale and (d < 0) != below:
            continue
        if d < 0 and -d * opposite > limit:
            continue
        if errors[j] < best:
            best = errors[j]
            chosen = d
    return chosen


@kernel
def byte_units(codes: Array, begin: int, end: int, units: Array) -> None:
    for i in range(begin, end):
        units[i] = np.int32(e4m3(codes[i]) * UNITS)


@kernel
def float_units(relative: Array, begin: int, end: int, units: Array) -> None:
    for i in range(begin, end):
        units[i] = np.int32(np.rint(relative[i] * SURROGATE))


@kernel
def refit(w: Array, units: Array, begin: int, end: int, s: Any) -> float:
    """A/B: least-squares scale, in units, of the codes under scale s; 0 where that is undefined. Exact sums.

    The refitted scale needs no comparison with s (as 6.3 has it): A/B is the vertex of the error's parabola for these
    codes and the guard takes the allowed BF16 value nearest to it, so it is at least as good as s.
    """
    a = 0
    b = 0
    for o in range(begin, end, CHUNK):
        part_a = np.int32(0)
        part_b = np.int32(0)
        for i in range(CHUNK):
            x = min(max(w[o + i] / s, LOWEST), HIGHEST)
            q = np.int32(np.float32(x + ROUND).view(np.int32) - ROUND_BITS)
            part_a = np.int32(part_a + np.int32(q * units[o + i]))
            part_b = np.int32(part_b + np.int32(q * q))
        a += part_a
        b += part_b
    return a / b if b > 0 else 0.0

"""Candidates and error tables of `search` and `weighted` (int4-algorithms sections 6 and 7): built once per clip
allowance and group size."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# Candidates that put the extreme on the -8 side, on the +7 side: a row of the table is one cache line, one AVX-512
# register. 48 of them (28 + 20, from 5.6 on) gain 0.001 dB, at most 0.003, and take a third more time.
MINUS, PLUS = 18, 14
SMALLEST_DIVISOR = 6.0
COUNT = MINUS + PLUS
# Of `weighted`: where the largest weight of a group meets a quiet input, the best scale leaves it far behind. Evenly
# spread up to a middle, by ratios beyond: (how many of them, middle, end).
WEIGHTED_MINUS, WEIGHTED_PLUS = 38, 26
WEIGHTED_COUNT = WEIGHTED_MINUS + WEIGHTED_PLUS
WEIGHTED_SPREADS = {WEIGHTED_MINUS: (18, 10.0, 48.0), WEIGHTED_PLUS: (14, 9.8, 32.0)}
SMALLEST_WEIGHTED_DIVISOR = 5.6
FREE_PLUS = 9.0
# Sums of 32 cells are kept in 16 bits and stop at 65535, an error of 1. That decides nothing: with |d| = 7.5 no weight
# is off by more than half a step, so a group of 128 has a candidate below 128 * (0.5 / 7.5)^2 = 0.57, and a sum that
# has stopped is never the smallest. A quantum is 1.2 % of the mean square of rounding, (1/8)^2 / 12.
QUANTUM = 2.0**16
LARGEST_CELL = (1 << 15) - 1  # of a weighted table, whose cells are multiplied as signed 16 bits
CODES = 127  # finite magnitudes of e4m3


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """divisors: float64 [COUNT], s = m/d for the signed extreme m; the first MINUS are negative, ascending magnitude.
    Of `weighted`: WEIGHTED_COUNT and WEIGHTED_MINUS.
    reach: how far a weight may lie beyond 0 on the side of the codes +7 and -8, in steps (inf: no constraint).
    """

    divisors: NDArray[np.float64]
    reach_plus: float
    reach_minus: float


@lru_cache(maxsize=32)
def candidates(group_size: int, clip_allowance: float | None, is_weighted: bool = False) -> Candidates:
    """6.1 and 6.5: up to the clip bound, or as far as the free optimum was ever seen; of `weighted` for all group
    sizes the same."""
    kappa = np.inf if clip_allowance is None else float(clip_allowance)
    if is_weighted:
        return _weighted_candidates(kappa)
    free_minus = 11.0 if group_size >= 128 else 10.4
    minus = np.linspace(SMALLEST_DIVISOR, min(8 + kappa, free_minus), MINUS)
    plus = np.linspace(SMALLEST_DIVISOR, min(7 + kappa, FREE_PLUS), PLUS)
    return Candidates(np.concatenate([-minus, plus]), 7 + kappa, 8 + kappa)


def _weighted_candidates(kappa: float) -> Candidates:
    minus, plus = _spread(WEIGHTED_MINUS, 8 + kappa), _spread(WEIGHTED_PLUS, 7 + kappa)
    return Candidates(np.concatenate([-minus, plus]), 7 + kappa, 8 + kappa)


def _spread(count: int, bound: float) -> NDArray[np.float64]:
    dense, middle, end = WEIGHTED_SPREADS[count]
    if bound <= middle:
        return np.linspace(SMALLEST_WEIGHTED_DIVISOR, bound, count)
    far = np.geomspace(middle, min(bound, end), count - dense + 1)
    return np.concatenate([np.linspace(SMALLEST_WEIGHTED_DIVISOR, middle, dense), far[1:]])


def e4m3_magnitudes() -> NDArray[np.float64]:
    """Values of the bytes 0..126."""
    code = np.arange(CODES)
    exponent, mantissa = code >> 3, code & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, np.ldexp(8.0 + mantissa, exponent - 10))


@lru_cache(maxsize=8)
def error_table(group_size: int, clip_allowance: float | None, is_weighted: bool = False) -> NDArray[np.uint16]:
    """uint16 [127, 256, COUNT]: squared error of byte b in a group whose largest code is M, relative to V[M]^2, in
    quanta of 2^-16, for each candidate. Integers: any order of summation gives the same choice (1.5). Of `weighted`:
    [127, 256, WEIGHTED_COUNT], in coarser quanta where cells would exceed LARGEST_CELL.

    Rows with |b| > M and NaN bytes are never read (zero). 6.2 has 4.0 in cells that clip beyond the allowance; here
    the kernel leaves those candidates out by the scalar test of the same section.
    """
    divisors = candidates(group_size, clip_allowance, is_weighted).divisors
    magnitude = e4m3_magnitudes()
    quantum, furthest = QUANTUM, np.abs(divisors).max()
    while is_weighted and quantum * (1 - 7 / furthest) ** 2 > LARGEST_CELL:  # a weight of the extreme's size, clipped
        quantum /= 2
    signed = np.concatenate([magnitude, [0.0], -magnitude, [0.0]])
    count = divisors.size
    memory = np.zeros(CODES * 256 * count + 32, np.uint16)
    begin = -memory.ctypes.data // 2 % 32  # rows of 64 or 128 bytes from the beginning of a cache line on
    table = memory[begin : begin + CODES * 256 * count].reshape(CODES, 256, count)
    for top in range(1, CODES):
        v = (signed / magnitude[top])[:, None]
        ratio = v * divisors
        step = 1 / divisors
        error = v - np.clip(np.rint(ratio), -8, 7) * step
        cells = np.rint(error * error * quantum)
        table[top] = np.where(np.abs(v) <= 1, cells, 0)
    return table

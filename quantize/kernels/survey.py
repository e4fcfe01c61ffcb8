"""The first pass over a tensor: is every weight finite, and where do the largest 0.1 % begin. And plain decoding."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.quantize.kernels.jit import kernel
from kizami.quantize.kernels.rows import CHUNK, Array, e4m3, largest_bits, largest_codes, round_bf16
from kizami.quantize.kernels.search_tables import e4m3_magnitudes

MAGNITUDES = e4m3_magnitudes().astype(np.float32)
SIGNED = np.concatenate([MAGNITUDES, [np.nan], -MAGNITUDES, [np.nan]]).astype(np.float32)  # by byte
TOO_LARGE = 2.0**127  # below it q*s stays finite in BF16 and float32 for every method
BF16_OVERFLOW = (2 - 2.0**-8) * 2.0**127  # the smallest magnitude that rounds to infinity
NAN_CODE = 127
EXPONENT = np.uint32(0x7F800000)


@kernel
def code_maxima(signed: Array, positive: Array, negative: Array) -> None:
    """int8 [N, K] to int8 [N, K/32]: largest magnitude code of each sign in each chunk; 127 where there is a NaN."""
    for r in range(signed.shape[0]):
        largest_codes(signed[r], positive[r], negative[r])


@kernel
def code_peaks(positive: Array, negative: Array, grid: Array, b0: int, b1: int, peaks: Array) -> None:
    """max |W| of each chunk; rounding of the product is monotonic."""
    for r in range(peaks.shape[0]):
        scales = grid[r // b0]
        for c in range(peaks.shape[1]):
            peaks[r, c] = e4m3(max(positive[r, c], negative[r, c])) * scales[(c * CHUNK) // b1]


@kernel
def value_peaks(values: Array, peaks: Array) -> None:
    """The same for float32 rows; not a number where there is one."""
    bits, peak_bits = values.view(np.int32), peaks.view(np.int32)
    negative = np.empty(peaks.shape[1], np.int32)
    for r in range(peaks.shape[0]):
        largest_bits(bits[r], peak_bits[r], negative)
        for c in range(negative.size):
            peak_bits[r, c] = max(peak_bits[r, c], negative[c])


@kernel
def codes_above(codes: Array, grid: Array, b0: int, b1: int, peaks: Array, floor: Any, found: Array) -> int:
    """|W| > floor of the chunks whose peak says that there are any, to `found`; how many."""
    n = 0
    for r in range(peaks.shape[0]):
        for c in range(peaks.shape[1]):
            if peaks[r, c] > floor:
                s = grid[r // b0, (c * CHUNK) // b1]
                for j in range(c * CHUNK, (c + 1) * CHUNK):
                    x = abs(e4m3(codes[r, j]) * s)
                    if x > floor:
                        found[n] = x
                        n += 1
    return n


@kernel
def values_above(values: Array, peaks: Array, floor: Any, found: Array) -> int:
    n = 0
    for r in range(peaks.shape[0]):
        for c in range(peaks.shape[1]):
            if peaks[r, c] > floor:
                for j in range(c * CHUNK, (c + 1) * CHUNK):
                    if abs(values[r, j]) > floor:
                        found[n] = abs(values[r, j])
                        n += 1
    return n


@kernel
def decode_span(codes: Array, s: Any, out: Array) -> None:
    for i in range(codes.size):
        out[i] = e4m3(codes[i]) * s


@kernel
def decode_rows(weight: Array, grid: Array, b0: int, b1: int, first_row: int, out: Array) -> None:
    """float32 rows of a tensor with blocks of any size; `grid` is the whole tensor's, row 0 is its row first_row."""
    for r in range(weight.shape[0]):
        scales = grid[(first_row + r) // b0]
        for j in range(scales.size):
            span = slice(j * b1, (j + 1) * b1)
            decode_span(weight[r][span], scales[j], out[r][span])


@kernel
def dequantize_span(codes: Array, s: Any, out: Array) -> Any:
    """Not 0 if a result is not finite or a byte is NaN."""
    bad = np.uint32(0)
    for i in range(codes.size):
        bits = np.uint32(np.float32(round_bf16(e4m3(codes[i]) * s)).view(np.uint32))
        out[i] = np.uint16(bits >> np.uint32(16))
        nan = np.uint32(codes[i] & np.uint8(0x7F)) == np.uint32(0x7F)
        bad = np.uint32(bad | np.uint32(((bits & EXPONENT) == EXPONENT) | nan))
    return bad


@kernel
def dequantize(weight: Array, grid: Array, b0: int, b1: int, first_row: int, out: Array) -> Any:
    """The same as BF16 bits; True if every result is finite and no byte is NaN."""
    bad = np.uint32(0)
    for r in range(weight.shape[0]):
        scales = grid[(first_row + r) // b0]
        for j in range(scales.size):
            span = slice(j * b1, (j + 1) * b1)
            bad = np.uint32(bad | dequantize_span(weight[r][span], scales[j], out[r][span]))
    return bad == 0


def top_count(n: int) -> int:
    """How many of n weights are not below the int(0.999 n)-th smallest (counted from 0), if none are equal."""
    return n - int(0.999 * n)


def floor_of(peaks: NDArray[np.float32], n: int) -> np.float32:
    """A bound below the top_count(n)-th largest |W|: as many chunks have their peak, hence a weight, not below it."""
    flat = peaks.reshape(-1)
    rank = flat.size - top_count(n)
    return np.float32(np.partition(flat, rank)[rank])


def threshold_of(above: NDArray[np.float32], floor: np.float32, n: int) -> np.float32:
    """The int(0.999 n)-th smallest |W|, exact, from all |W| > floor."""
    count = top_count(n)
    if above.size < count:
        return floor
    return np.float32(np.partition(above, above.size - count)[above.size - count])

"""The first pass over a tensor: is every weight finite, and where do the largest 0.1 % begin. And plain decoding."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.quantize.kernels.jit import kernel
from kizami.quantize.kernels.lanes import CHUNK
from kizami.quantize.kernels.rows import Array, chunk_scales, e4m3, round_bf16
from kizami.quantize.kernels.search_tables import e4m3_magnitudes
from kizami.quantize.kernels.vectors import extremes

MAGNITUDES = e4m3_magnitudes().astype(np.float32)
SIGNED = np.concatenate([MAGNITUDES, [np.nan], -MAGNITUDES, [np.nan]]).astype(np.float32)  # by byte
TOO_LARGE = 2.0**127  # below it q*s stays finite in BF16 and float32 for every method
TOO_LARGE_BITS = 0x7F000000
BF16_OVERFLOW = (2 - 2.0**-8) * 2.0**127  # the smallest magnitude that rounds to infinity
NAN_CODE = 127
EXPONENT = np.uint32(0x7F800000)
HIGH_HALF = -1


@kernel
def maxima(bits: Array, positive: Array, negative: Array) -> None:
    """Of each chunk of int8 or int32 bits, all flat: the largest magnitude of each sign; NaN is the largest of all."""
    for c in range(positive.size):
        extremes(bits, c * CHUNK, positive, negative, c)


@kernel
def count(bits: Any, half: int, counts: Array) -> None:
    """half: HIGH_HALF counts the upper 16 bits; otherwise the lower ones of those whose upper ones are `half`."""
    if half < 0:
        counts[bits >> 16] += 1
    elif bits >> 16 == half:
        counts[bits & 0xFFFF] += 1


@kernel
def count_codes(
    positive: Array, negative: Array, grid: Array, b0: int, b1: int, first_row: int, half: int, counts: Array
) -> Any:
    """Counts max |W| of each chunk of rows first_row.. (rounding of the product is monotonic). Returns the bits of the
    largest, or TOO_LARGE_BITS where there is a NaN."""
    scales = np.empty(positive.shape[1], np.float32)
    peaks = np.empty(positive.shape[1], np.int32)
    floats = peaks.view(np.float32)
    largest: Any = np.int64(0)
    for r in range(positive.shape[0]):
        if r == 0 or (first_row + r) % b0 == 0:
            chunk_scales(grid[(first_row + r) // b0], b1, scales)
        top: Any = 0
        for c in range(scales.size):
            code = max(positive[r, c], negative[r, c])
            top = max(top, np.int64(code))
            floats[c] = e4m3(code) * scales[c]
        for c in range(scales.size):
            bits = np.int64(peaks[c])
            largest = max(largest, bits)
            count(bits, half, counts)
        if top == NAN_CODE:
            return TOO_LARGE_BITS
    return largest


@kernel
def count_values(peaks: Array, half: int, counts: Array) -> Any:
    """The same from the bits of max |W|, int32."""
    largest: Any = np.int64(0)
    for i in range(peaks.size):
        bits = np.int64(peaks[i])
        largest = max(largest, bits)
        count(bits, half, counts)
    return largest


@kernel
def bin_of(counts: Array, rank: int) -> Any:
    """(the bin that holds the rank-th largest, counted from 1; how many lie in bins above it)."""
    above = 0
    i = counts.size - 1
    while above + counts[i] < rank:
        above += counts[i]
        i -= 1
    return i, above


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


def threshold_of(above: NDArray[np.float32], floor: np.float32, n: int) -> np.float32:
    """The int(0.999 n)-th smallest |W|, exact, from all |W| > floor."""
    count = top_count(n)
    if above.size < count:
        return floor
    return np.float32(np.partition(above, above.size - count)[above.size - count])

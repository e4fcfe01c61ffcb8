"""The first pass over a tensor: is every weight finite, and where do the largest 0.1 % begin."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.quantize.jit import kernel
from kizami.quantize.rows import Array, round_bf16
from kizami.quantize.rows import e4m3 as e4m3_value
from kizami.quantize.search_tables import e4m3_magnitudes

LOW_BITS = 15  # float32 magnitudes have 31 bits: ranked by the upper 16, then by the lower 15
MAGNITUDES = e4m3_magnitudes().astype(np.float32)
SIGNED = np.concatenate([MAGNITUDES, [np.nan], -MAGNITUDES, [np.nan]]).astype(np.float32)  # by byte
TOO_LARGE = 2.0**127  # below it q*s stays finite in BF16 and float32 for every method


@kernel
def count_codes(weight: Array, b0: int, b1: int, counts: Array) -> None:
    """counts [gr, gc, 256] += how often each byte occurs in each block."""
    rows, columns = weight.shape
    for r in range(rows):
        row = weight[r]
        for j in range(counts.shape[1]):
            here = counts[r // b0, j]
            for c in range(j * b1, min(columns, (j + 1) * b1)):
                here[row[c]] += 1


@kernel
def count_values(bits: Array, weights: Array, prefix: int, counts: Array) -> None:
    """counts += weights by the upper bits (prefix < 0) or, of values that begin with prefix, by the lower ones."""
    for i in range(bits.size):
        x = np.int64(bits[i] & np.int32(0x7FFFFFFF))
        n = np.int64(weights[i]) if weights.size else 1
        if prefix < 0:
            counts[x >> LOW_BITS] += n
        elif (x >> LOW_BITS) == prefix:
            counts[x & ((1 << LOW_BITS) - 1)] += n


@kernel
def decode_rows(weight: Array, grid: Array, b0: int, b1: int, first_row: int, out: Array) -> None:
    """float32 rows of a tensor with blocks of any size; `grid` is the whole tensor's, row 0 is its row first_row."""
    rows, columns = weight.shape
    for r in range(rows):
        row, target = weight[r], out[r]
        for j in range(grid.shape[1]):
            s = grid[(first_row + r) // b0, j]
            for c in range(j * b1, min(columns, (j + 1) * b1)):
                target[c] = e4m3_value(row[c]) * s


@kernel
def dequantize(weight: Array, grid: Array, b0: int, b1: int, first_row: int, out: Array) -> bool:
    """The same as BF16 bits; True if every result is finite and no byte is NaN."""
    rows, columns = weight.shape
    bad = 0
    for r in range(rows):
        row, target = weight[r], out[r]
        for j in range(grid.shape[1]):
            s = grid[(first_row + r) // b0, j]
            for c in range(j * b1, min(columns, (j + 1) * b1)):
                x = round_bf16(e4m3_value(row[c]) * s)
                bits = np.uint32(np.float32(x).view(np.uint32))
                target[c] = np.uint16(bits >> np.uint32(16))
                bad += (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
                bad += (row[c] & np.uint8(0x7F)) == np.uint8(0x7F)
    return bad == 0


def rank_from_counts(counts: NDArray[np.int64], rank: int) -> tuple[int, int]:
    """(index of the bin that holds the element of this rank, rank within that bin)."""
    below = np.cumsum(counts)
    index = int(np.searchsorted(below, rank, side="right"))
    return index, rank - (int(below[index - 1]) if index else 0)


def top_rank(n: int) -> int:
    return int(0.999 * n)


def threshold_of(chunks: Any, n: int) -> np.float32:
    """The top_rank(n)-th smallest |W|, exact; `chunks()` gives (float32 bits as int32, counts or empty) anew each time."""
    rank = top_rank(n)
    high = np.zeros(1 << 16, np.int64)
    for bits, weights in chunks():
        count_values(bits, weights, -1, high)
    prefix, rest = rank_from_counts(high, rank)
    low = np.zeros(1 << LOW_BITS, np.int64)
    for bits, weights in chunks():
        count_values(bits, weights, prefix, low)
    suffix, _ = rank_from_counts(low, rest)
    return np.uint32(prefix << LOW_BITS | suffix).view(np.float32)

"""Passes over one row of weights, shared by every method.

A pass is either a long loop over the row or works in chunks of `CHUNK` columns: every group size is a multiple of
it, and a constant trip count is what makes the compiler vectorise (one loop per group is three times slower). A pass
is elementwise, or sums integers, or adds floats in a written order, so results do not depend on vector width.
`step` is the scale of each chunk.
"""

from typing import Any

import numpy as np

from kizami.quantize.kernels.jit import kernel

Array = Any  # numba types the kernels

CHUNK = 32
E4M3_BIAS = np.float32(2.0**120)  # e4m3 bits moved to float32's exponent field are 2^-120 of the value
ROUND = np.float32(12582920.0)  # 1.5 * 2^23 + 8: adding it rounds to integer, ties to even; the low byte is q + 8
ROUND_BITS = np.int32(0x4B400008)
HIGHEST = np.float32(7)
LOWEST = np.float32(-8)
ABS = np.int32(0x7FFFFFFF)


@kernel
def round_bf16(x: Any) -> Any:
    """float32 rounded to the nearest BF16 value, ties to even (finite input)."""
    bits = np.float32(x).view(np.uint32)
    low = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint32((bits + np.uint32(0x7FFF) + low) & np.uint32(0xFFFF0000)).view(np.float32)


@kernel
def bf16_bits(x: Any) -> Any:
    return np.uint16(np.float32(x).view(np.uint32) >> np.uint32(16))


@kernel
def e4m3(byte: Any) -> Any:
    """float32 value of an e4m3 byte; the NaN codes give +-480, callers look for them first."""
    b = np.uint32(byte)
    bits = np.uint32(((b & np.uint32(0x7F)) << np.uint32(20)) | ((b & np.uint32(0x80)) << np.uint32(24)))
    return np.uint32(bits).view(np.float32) * E4M3_BIAS


@kernel
def chunk_scales(grid_row: Array, b1: int, out: Array) -> None:
    """The block scale of each chunk; block edges lie between chunks."""
    for c in range(out.size):
        out[c] = grid_row[(c * CHUNK) // b1]


@kernel
def decode_row(codes: Array, scale: Array, w: Array) -> None:
    for c in range(scale.size):
        s = scale[c]
        o = c * CHUNK
        for i in range(CHUNK):
            w[o + i] = e4m3(codes[o + i]) * s


@kernel
def largest_codes(signed_bytes: Array, positive: Array, negative: Array) -> None:
    """Per chunk the largest magnitude code of each sign, all int8; 127 where there is a NaN. -0.0 counts as 0."""
    for c in range(positive.size):
        o = c * CHUNK
        p = np.int8(0)
        n = np.int8(0)
        for i in range(CHUNK):
            x = signed_bytes[o + i]
            p = max(p, x)
            n = max(n, np.int8(x ^ np.int8(-128)))
        positive[c] = p
        negative[c] = n


@kernel
def largest_bits(w_bits: Array, positive: Array, negative: Array) -> None:
    """The same for float32 weights, seen as int32: bits of non-negative floats are in the order of their values."""
    for c in range(positive.size):
        o = c * CHUNK
        p = np.int32(0)
        n = np.int32(0)
        for i in range(CHUNK):
            x = w_bits[o + i]
            p = max(p, x)
            n = max(n, np.int32(x ^ np.int32(-0x80000000)))
        positive[c] = p
        negative[c] = n


@kernel
def group_maxima(chunks: Array, groups: Array) -> None:
    per_group = chunks.size // groups.size
    for k in range(groups.size):
        m = chunks[k * per_group]
        for c in range(k * per_group + 1, (k + 1) * per_group):
            m = max(m, chunks[c])
        groups[k] = m


@kernel
def spread(groups: Array, chunks: Array) -> None:
    """The value of each group to all its chunks."""
    per_group = chunks.size // groups.size
    for k in range(groups.size):
        for c in range(k * per_group, (k + 1) * per_group):
            chunks[c] = groups[k]


@kernel
def nearest_codes(w: Array, step: Array, codes: Array) -> None:
    """codes = clamp(rint(w / step)) + 8, exact by int4-algorithms 1.4: division, not multiplication by 1/step."""
    for c in range(step.size):
        s = step[c]
        o = c * CHUNK
        for i in range(CHUNK):
            x = min(max(w[o + i] / s, LOWEST), HIGHEST)
            codes[o + i] = np.uint8(np.float32(x + ROUND).view(np.int32))


@kernel
def minmax_codes(w: Array, step: Array, codes: Array) -> None:
    """compressed-tensors' chain: BF16 weight, BF16 quotient, clamp, ties to even."""
    for c in range(step.size):
        s = step[c]
        o = c * CHUNK
        for i in range(CHUNK):
            x = min(max(round_bf16(round_bf16(w[o + i]) / s), LOWEST), HIGHEST)
            codes[o + i] = np.uint8(np.float32(x + ROUND).view(np.int32))


@kernel
def pack_row(codes: Array, words: Array) -> None:
    """Eight codes, seen as one little-endian uint64, to one int32: the first column in the lowest nibble."""
    eight = codes.view(np.uint64)
    for j in range(words.size):
        x = eight[j]
        x = (x | (x >> np.uint64(4))) & np.uint64(0x00FF00FF00FF00FF)
        x = (x | (x >> np.uint64(8))) & np.uint64(0x0000FFFF0000FFFF)
        words[j] = np.int32(np.uint32(x | (x >> np.uint64(16))))


@kernel
def errors_row(w: Array, step: Array, codes: Array, restored: Array, error: Array) -> None:
    """q*s is exact in float32, and so is W - q*s where the code is the nearest one (Sterbenz)."""
    for c in range(step.size):
        s = step[c]
        o = c * CHUNK
        for i in range(CHUNK):
            y = np.float32(np.int32(codes[o + i]) - np.int32(8)) * s
            restored[o + i] = y
            error[o + i] = w[o + i] - y


@kernel
def add_squares(x: Array, sums: Array) -> None:
    """Column i of each quarter of the row goes to sums[i], float64."""
    n = sums.size
    for i in range(n):
        a, b = np.float64(x[i]), np.float64(x[i + n])
        c, d = np.float64(x[i + 2 * n]), np.float64(x[i + 3 * n])
        sums[i] += (a * a + b * b) + (c * c + d * d)


@kernel
def largest_magnitude(bits: Array) -> Any:
    """Bits of the largest |x| of float32 x seen as int32."""
    m = np.int32(0)
    for i in range(bits.size):
        m = max(m, np.int32(bits[i] & ABS))
    return m


@kernel
def count_clipped(w: Array, step: Array, positive: Array, negative: Array) -> Any:
    """Weights outside [-8.5 s, 7.5 s]; both bounds are exact in float32. Few chunks have to be looked through."""
    lanes = np.zeros(CHUNK, np.int32)
    for c in range(step.size):
        a, b = np.float32(7.5) * step[c], np.float32(-8.5) * step[c]
        high, low = max(a, b), min(a, b)
        if positive[c] > high or -negative[c] < low:
            o = c * CHUNK
            for i in range(CHUNK):
                lanes[i] = np.int32(lanes[i] + np.int32(w[o + i] > high) + np.int32(w[o + i] < low))
    return lanes.sum()


@kernel
def add_top(w: Array, error: Array, positive: Array, negative: Array, threshold: Any, top: Array) -> None:
    """Add count, squares of W and of the error over |W| >= threshold to top [3]."""
    for c in range(positive.size):
        if max(positive[c], negative[c]) >= threshold:
            for j in range(c * CHUNK, (c + 1) * CHUNK):
                if abs(w[j]) >= threshold:
                    top[0] += 1.0
                    top[1] += np.float64(w[j]) * np.float64(w[j])
                    top[2] += np.float64(error[j]) * np.float64(error[j])

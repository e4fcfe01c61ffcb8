"""FP8 codes from float32 rows, one block scale per 128x128 weights. Plain loops but for the errors: LLVM makes vectors
of each by itself. Nothing here wraps around: without the compiler, NumPy scalars warn of it.
"""

from typing import Any

import numpy as np

from kizami.quantize.kernels.jit import kernel
from kizami.quantize.kernels.lanes import CHUNK
from kizami.quantize.kernels.rows import Array
from kizami.quantize.kernels.vectors import fp8_errors

SIDE = 128
_LARGEST = np.float32(448)
_SMALLEST_SCALE = np.float32(2.0**-126)
_ZERO_BLOCK_SCALE = np.float32(1)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_SIGN = np.uint32(0x80)
_HALF = np.uint32(0x7FFFF)  # of the last of the three mantissa bits, less the tie
_BIAS = np.uint32((127 - 7) << 3)
_NORMAL = np.uint32(0x3C800000)  # 2^-6
_MAGIC = np.float32(2.0**14)  # adding it to less than 2^-6 rounds to multiples of 2^-9, ties to even
_MAGIC_BITS = np.uint32(0x46800000)


@kernel
def peaks(bits: Array, out: Array) -> None:
    """out[j] = the largest of itself and the magnitudes of the j-th 128 of `bits`, float32 as uint32; NaN tops all."""
    for j in range(out.size):
        span = bits[j * SIDE : (j + 1) * SIDE]
        top = np.uint32(out[j])
        for i in range(span.size):
            magnitude = np.uint32(span[i] & _MAGNITUDE)
            top = magnitude if magnitude > top else top
        out[j] = top


@kernel
def encode(values: Array, scale: Any, codes: Array) -> None:
    """codes = e4m3fn(fl32(w / scale)), ties to even. |w / scale| < 464, so nothing rounds to the NaN codes."""
    for i in range(values.size):
        bits = np.uint32(np.float32(values[i] / scale).view(np.uint32))
        magnitude = np.uint32(bits & _MAGNITUDE)
        odd = np.uint32(np.uint32(magnitude >> np.uint32(20)) & np.uint32(1))
        near = np.uint32(np.uint32(magnitude + np.uint32(_HALF + odd)) >> np.uint32(20))
        small = np.float32(np.uint32(magnitude).view(np.float32) + _MAGIC)
        if magnitude >= _NORMAL:
            code = np.uint32(near - _BIAS)
        else:
            code = np.uint32(np.float32(small).view(np.uint32) - _MAGIC_BITS)
        codes[i] = np.uint8(code | np.uint32(np.uint32(bits >> np.uint32(24)) & _SIGN))


@kernel
def add_errors(values: Array, scale: Any, codes: Array, rest: Array, sums: Array, largest: Array) -> None:
    """rest: float32 [CHUNK], for the last weights of a row that are less than a chunk, among zeros."""
    whole = values.size // CHUNK * CHUNK
    for begin in range(0, whole, CHUNK):
        fp8_errors(values, begin, codes, scale, sums, largest)
    if whole < values.size:
        rest[:] = 0
        rest[: values.size - whole] = values[whole:]
        rest_codes = np.zeros(CHUNK, np.uint8)
        rest_codes[: values.size - whole] = codes[whole:]
        fp8_errors(rest, 0, rest_codes, scale, sums, largest)


@kernel
def quantize_blocks(
    values: Array, bits: Array, too_large: int, codes: Array, scale: Array, sums: Array, largest: Array
) -> Any:
    """values float32 [n, K], `bits` the same as uint32. Returns the number of blocks of zeros; -1, and nothing of use,
    where the bits of a magnitude are not below too_large."""
    top, rest, zeros = np.empty(scale.shape[1], np.uint32), np.empty(CHUNK, np.float32), 0
    for b in range(scale.shape[0]):
        first, last = b * SIDE, min((b + 1) * SIDE, values.shape[0])
        top[:] = 0
        for r in range(first, last):
            peaks(bits[r], top)
        for j in range(top.size):
            if top[j] >= too_large:
                return -1
            if top[j] == 0:
                zeros += 1
            divided = np.float32(np.uint32(top[j]).view(np.float32) / _LARGEST)
            scale[b, j] = max(divided, _SMALLEST_SCALE) if top[j] else _ZERO_BLOCK_SCALE
        for r in range(first, last):
            for j in range(top.size):
                span = slice(j * SIDE, (j + 1) * SIDE)
                encode(values[r][span], scale[b, j], codes[r][span])
                add_errors(values[r][span], scale[b, j], codes[r][span], rest, sums, largest)
    return zeros

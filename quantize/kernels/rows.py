"""Single values and block scales, shared by the kernels that go through a tensor row by row."""

from typing import Any

import numpy as np

from kizami.quantize.kernels.jit import kernel
from kizami.quantize.kernels.lanes import CHUNK
from kizami.quantize.kernels.vectors import E4M3_BIAS

Array = Any  # numba types the kernels

BIAS = np.float32(E4M3_BIAS)


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
    return np.uint32(bits).view(np.float32) * BIAS


@kernel
def chunk_scales(grid_row: Array, b1: int, out: Array) -> None:
    """The block scale of each chunk; block edges lie between chunks."""
    j, left = 0, b1
    for c in range(out.size):
        if left <= 0:
            j, left = j + 1, left + b1
        out[c] = grid_row[j]
        left -= CHUNK

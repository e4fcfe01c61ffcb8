"""Packed INT4 back to float32, and float32 to BF16."""

from typing import Any

import numpy as np

from kizami.quantize.kernels.jit import kernel
from kizami.quantize.kernels.rows import Array


@kernel
def unpack_group(words: Array, scale: Any, out: Array) -> None:
    for j in range(words.size):
        word = np.uint32(words[j])
        for i in range(8):
            stored = np.uint32(np.uint32(word >> np.uint32(4 * i)) & np.uint32(15))
            out[8 * j + i] = (np.float32(stored) - np.float32(8)) * scale


@kernel
def unpack_rows(words: Array, scale: Array, out: Array) -> None:
    """out float32 [n, K] = q * scale; words uint32 [n, K/8], scale float32 [n, K/g]."""
    size = words.shape[1] // scale.shape[1]
    for r in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            unpack_group(words[r][j * size : (j + 1) * size], scale[r, j], out[r][j * 8 * size : (j + 1) * 8 * size])


@kernel
def round_rows(bits: Array, too_large: int, out: Array) -> Any:
    """BF16 bits of finite float32 `bits`, both flat, ties to even. False where a magnitude is too_large."""
    top = np.uint32(0)
    for i in range(bits.size):
        x = np.uint32(bits[i])
        magnitude = np.uint32(x & np.uint32(0x7FFFFFFF))
        top = magnitude if magnitude > top else top
        low = np.uint32(np.uint32(x >> np.uint32(16)) & np.uint32(1))
        upper = np.uint32(x >> np.uint32(16))
        rest = np.uint32(np.uint32(x & np.uint32(0xFFFF)) + np.uint32(np.uint32(0x7FFF) + low))
        out[i] = np.uint16(np.uint32(upper + np.uint32(rest >> np.uint32(16))) & np.uint32(0xFFFF))
    return top < too_large

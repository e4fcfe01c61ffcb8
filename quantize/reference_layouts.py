"""The oracle's reading of INT4 layouts other than pack-quantized: codes and scales, and whether all else is as it must
be. Plain NumPy from the formats' own definitions, sharing no code with arrange.py.

GPTQ: AutoGPTQ's `pack` and GPTQModel's `dequantize_weight` (nn_modules/qlinear): eight rows of W^T to a word of
qweight, eight output columns to a word of qzeros; stored - zero = q, where v1 files hold zero - 1. AWQ: AutoAWQ's
`unpack_awq` with its order 0, 2, 4, 6, 1, 3, 5, 7. w4afp8: SGLang 0.5.23, layers/quantization/w4afp8.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int8]
F32 = NDArray[np.float32]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds column AWQ_ORDER[i] of its eight


def read_layout(format: str, arrays: Sequence[NDArray[Any]], group_size: int) -> tuple[Codes, F32, str | None]:
    """(codes [N, K], scales [N, K/g], what is wrong with zero points or group indices). `arrays` in the order in which
    the layout lists them: qweight, qzeros, g_idx, scales; qweight, qzeros, scales; scales, weight."""
    if format == "w4afp8":
        scales, weight = arrays
        return _signed_nibbles(weight), scales, None
    qweight, *beside, scales = arrays
    stored = _awq(qweight) if format == "awq" else _nibbles(qweight.T).T  # [K, N]
    fault = fault_beside(format, beside, group_size)
    return (stored.astype(np.int8) - np.int8(8)).T, scales.astype(np.float32).T, fault


def fault_beside(format: str, arrays: Sequence[NDArray[Any]], group_size: int) -> str | None:
    """What is wrong with what lies between codes and scales: qzeros, and g_idx [K] in GPTQ."""
    qzeros, *order = arrays
    zeros = _nibbles(qzeros) + (1 if format == "gptq" else 0)
    if any(not np.array_equal(g_idx, np.arange(len(g_idx)) // group_size) for g_idx in order):
        return "g_idx is not the column divided by the group size"
    return None if (zeros == 8).all() else "qzeros are not 8"


def _nibbles(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """[n, m] to [n, 8m], lowest nibble first."""
    words = np.ascontiguousarray(words).view(np.uint32)
    found = (words[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & np.uint32(15)
    return found.astype(np.uint8).reshape(words.shape[0], -1)


def _awq(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    by_nibble = _nibbles(words).reshape(words.shape[0], words.shape[1], 8)
    by_column = np.empty_like(by_nibble)
    by_column[:, :, list(AWQ_ORDER)] = by_nibble
    return by_column.reshape(words.shape[0], -1)


def _signed_nibbles(weight: NDArray[np.int8]) -> Codes:
    """Two's complement, the even column in the low nibble."""
    low = (weight << 4).astype(np.int8) >> 4
    return np.stack([low, weight >> 4], axis=2).reshape(weight.shape[0], -1)

"""float32 rows to FP8 with one scale per 128x128 weights: the layout of DeepSeek's and GLM-5's own checkpoints.

scale = max|w| / 448 and code = e4m3fn(w / scale), each float32 division rounded once, codes to nearest even: PyTorch's
`(w / scale).to(torch.float8_e4m3fn)` bit for bit. The scale is at least 2^-126, so that it is a normal number whose
quotient with max|w| stays below 448.0001: no code saturates, none is NaN.

A block of zeros gets the scale 1.0, as in transformers 5.24 (`Fp8Quantize` in integrations/finegrained_fp8.py).
compressed-tensors 0.20 gives it float32's epsilon (`calculate_qparams` in quantization/utils/helpers.py). Every reader
decodes either to zeros; a scale of 0 would not survive a reader that divides by it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kizami.quantize.kernels import fp8
from kizami.quantize.kernels.survey import TOO_LARGE, TOO_LARGE_BITS
from kizami.quantize.kernels.vectors import LARGEST, SUMS
from kizami.quantize.linear import Empty, NonFiniteError
from kizami.quantize.metrics import ErrorSums

BLOCK = (fp8.SIDE, fp8.SIDE)


class Fp8Blocks(NamedTuple):
    """codes uint8 [n, K], e4m3fn bytes; scale float32 [ceil(n/128), ceil(K/128)]: W = e4m3(code) * scale.

    sums: of all weights but no top_*, which needs the whole tensor; its groups are blocks.
    """

    codes: NDArray[np.uint8]
    scale: NDArray[np.float32]
    sums: ErrorSums


def to_fp8_blocks(values: NDArray[np.float32], first_row: int = 0, empty: Empty = np.empty) -> Fp8Blocks:
    """Rows first_row.. of a tensor. They begin a block row, and end one or the tensor. `empty` (shape, dtype) provides
    the memory of the codes. Raises NonFiniteError, also for magnitudes of 2^127 and more, as quantize_linear does; its
    row counts from the tensor's first.
    """
    assert values.dtype == np.float32, values.dtype
    assert first_row % BLOCK[0] == 0, first_row
    values = np.require(values, requirements=["C", "W"])
    rows, columns = values.shape
    codes = empty((rows, columns), np.uint8)
    scale = np.empty((-(-rows // BLOCK[0]), -(-columns // BLOCK[1])), np.float32)
    sums, largest = np.zeros(3 * SUMS), np.zeros(LARGEST, np.int32)
    zeros = fp8.quantize_blocks(values, values.view(np.uint32), TOO_LARGE_BITS, codes, scale, sums, largest)
    if zeros < 0:
        raise first_bad(values, first_row, TOO_LARGE)
    w2, e2, q2 = (float(sum(float(lane) for lane in lanes)) for lanes in sums.reshape(3, SUMS))
    worst = float(largest.max().view(np.float32))
    return Fp8Blocks(
        codes,
        scale,
        ErrorSums(values.size, w2, e2, q2, max_abs_error=worst, groups=scale.size, zero_groups=int(zeros)),
    )


def first_bad(values: NDArray[np.float32], first_row: int, limit: float) -> NonFiniteError:
    """The first weight in row-major order that is not finite, or not below limit."""
    row, column = (int(i) for i in np.argwhere(~(np.abs(values) < limit))[0])
    value = values[row, column]
    found = f"{value:g}, too large for BF16" if np.isfinite(value) else f"{value:g}"
    return NonFiniteError(first_row + row, column, found)

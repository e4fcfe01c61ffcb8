"""FP8 codes and block scales held against their float32 source, with the oracle's arithmetic."""

import numpy as np
from numpy.typing import NDArray

from kizami.quantize import reference


def fp8_fault(
    w: NDArray[np.float32], codes: NDArray[np.uint8], scale: NDArray[np.float32], first_row: int = 0
) -> str | None:
    """What is wrong with rows first_row.. of an FP8 tensor; None if every bit is as it must be. first_row is a multiple
    of 128, `codes` [n, K] and `scale` [ceil(n/128), ceil(K/128)] are those of the rows."""
    expected_codes, expected_scale = reference.fp8_blocks(w)
    if not np.array_equal(scale.view(np.uint32), expected_scale.view(np.uint32)):
        i, j = (int(x) for x in np.argwhere(scale.view(np.uint32) != expected_scale.view(np.uint32))[0])
        return (
            f"the scale of the block at row {first_row + 128 * i}, column {128 * j} is {scale[i, j]:.9g}, "
            f"expected max|W| / 448 = {expected_scale[i, j]:.9g}"
        )
    if not np.array_equal(codes, expected_codes):
        i, j = (int(x) for x in np.argwhere(codes != expected_codes)[0])
        return (
            f"row {first_row + i}, column {j} is code 0x{codes[i, j]:02X}, "
            f"expected 0x{expected_codes[i, j]:02X} for {w[i, j]:.9g}"
        )
    return None

"""The report's figures of given codes and scales: of codes that quantize_linear has not chosen."""

import numpy as np
from numpy.typing import NDArray

from kizami.quantize.decode import bands, float32_weight, int4_weight
from kizami.quantize.kernels import survey
from kizami.quantize.linear import Block, Rows
from kizami.quantize.metrics import ErrorSums

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def measure(
    weight: Rows,
    grid: F32 | None,
    block: Block | None,
    packed: NDArray[np.int32],
    scale: NDArray[np.uint16],
    h: F64 | None = None,
) -> ErrorSums:
    """weight [N, K], grid and block as quantize_linear takes them; packed int32 [N, K/8] and scale, BF16 bits [N, K/g],
    of any origin; h: mean squares of the input's columns [K]. Takes 4 bytes of memory per weight."""
    return measure_values(float32_weight(weight, grid, block), packed, scale, h)


def measure_values(w: F32, packed: NDArray[np.int32], scale: NDArray[np.uint16], h: F64 | None = None) -> ErrorSums:
    """The same of a decoded weight float32 [N, K]. Everything is compared and added up in float64, band by band."""
    assert packed.shape == (w.shape[0], w.shape[1] // 8), (packed.shape, w.shape)
    assert scale.shape[0] == w.shape[0], (scale.shape, w.shape)
    assert w.shape[1] % scale.shape[1] == 0, (scale.shape, w.shape)
    threshold = _top_threshold(w)
    total = ErrorSums()
    for first, last in bands(*w.shape):
        total += _band(w[first:last], packed[first:last], scale[first:last], threshold, h)
    return total


def _band(
    w: F32, packed: NDArray[np.int32], scale: NDArray[np.uint16], threshold: np.float32, h: F64 | None
) -> ErrorSums:
    groups = w.reshape(*scale.shape, -1)
    step = (scale.astype(np.uint32) << np.uint32(16)).view(np.float32)[:, :, None]
    restored = int4_weight(packed, scale).astype(np.float64)
    values = w.astype(np.float64)
    error = values - restored
    top = np.abs(w) >= threshold
    ends = np.float32(7.5) * step, np.float32(-8.5) * step  # exact: a scale has 8 bits
    outside = (groups > np.maximum(*ends)) | (groups < np.minimum(*ends))
    return ErrorSums(
        n=w.size,
        sum_w2=float(np.square(values).sum()),
        sum_e2=float(np.square(error).sum()),
        sum_q2=float(np.square(restored).sum()),
        top_n=int(top.sum()),
        top_w2=float(np.square(values[top]).sum()),
        top_e2=float(np.square(error[top]).sum()),
        max_abs_error=float(np.abs(error).max(initial=0)),
        clipped=int(outside.sum()),
        groups=scale.size,
        zero_groups=int((~groups.any(axis=2)).sum()),
        negative_scales=int((scale >> 15).sum()),
        sum_hw2=0.0 if h is None else float((np.square(values) @ h).sum()),
        sum_he2=0.0 if h is None else float((np.square(error) @ h).sum()),
    )


def _top_threshold(w: F32) -> np.float32:
    """The int(0.999 n)-th smallest |W|, counted from 0."""
    if not w.size:
        return np.float32(np.inf)
    rank = w.size - survey.top_count(w.size)
    return np.float32(np.partition(np.abs(w).reshape(-1), rank)[rank])

"""Weights of columns from calibration statistics (int4-algorithms section 7): what an error in a column costs."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

POOLED_TOKENS = 4.0  # gate, up: the layer's mean square counts as this many tokens of the expert (measured, 7.2)
# down: its inputs are the expert's own neurons, so no other expert tells of them. 7.2 has 2, from synthetic inputs; on
# two trained models 2 made `weighted` worse than `search` below 32 tokens, and 16 never (docs/methods.md)
UNIFORM_TOKENS = 16.0
UNIT = 1024  # weight of a column of the group's mean
LARGEST = 1 << 17  # what a column that has a group of 128 to itself weighs

F64 = NDArray[np.float64]


def pooled_input(h_x: NDArray[Any], sum_g2: NDArray[Any]) -> F64:
    """float64 [hidden], mean square over all tokens of all experts of a layer; zeros without any. h_x [E, hidden],
    sum_g2 [E]. Added in the order of the experts, so that the result does not depend on the CPU."""
    total, weights = np.zeros(h_x.shape[1]), 0.0
    for row, weight in zip(h_x, sum_g2.tolist(), strict=True):
        total += row.astype(np.float64) * weight
        weights += weight
    return total / weights if weights else total


def shrunk_input(h: NDArray[Any], n: float, pooled: F64) -> F64:
    """Of gate and up: an expert's mean squares [hidden] after n effective tokens, drawn to those of its layer."""
    return (n * h.astype(np.float64) + POOLED_TOKENS * pooled) / (n + POOLED_TOKENS)


def shrunk_neurons(h: NDArray[Any], n: float) -> F64:
    """Of down: drawn to its own mean."""
    own = h.astype(np.float64)
    return (n * own + UNIFORM_TOKENS * math.fsum(own.tolist()) / max(1, own.size)) / (n + UNIFORM_TOKENS)


def integer_weights(h: NDArray[Any], group_size: int) -> NDArray[np.int64]:
    """int64 [K] of mean squares [K], which are not negative: h_i / mean over its group * 1024, in 1 .. 2^17; 1 in a
    group of zeros. Integers make every sum exact, so no choice depends on an order (1.5); the floor keeps dead columns
    from making the least squares singular. K is a multiple of group_size."""
    groups = h.astype(np.float64).reshape(-1, group_size)
    total = np.zeros(len(groups))
    for column in groups.T:  # in this order; NumPy's own depends on the CPU
        total += column
    live = total > 0
    mean = np.where(live, total / group_size, 1.0)[:, None]
    weights = np.clip(np.rint(UNIT * groups / mean), 1, LARGEST)
    weights[~live] = 1
    return weights.astype(np.int64).reshape(-1)

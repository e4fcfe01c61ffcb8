"""GPTQ (arXiv 2210.17323) with the scales given: codes one column at a time, each column's error made good in those
that come after it. torch, on any device; pure functions on tensors.

Against the published form: the Hessian of few tokens is shrunk toward its own diagonal (unshrunk, GPTQ from 0.1 to 1.8
tokens per column is worse than rounding to nearest, which no damping mends); inputs that are always zero keep their
weights, which llm-compressor sets to zero; U comes from a Cholesky factor in reversed column order and its inverse,
2/3 d^3 operations in place of 4/3 d^3 for inverting first. Column order and groups are llm-compressor's actorder
"static": the largest diagonal first, scales by group of the original columns, so that nothing on disk tells of it.
"""

from dataclasses import dataclass

import torch

DAMPING = 0.01  # of the mean of the diagonal
BLOCK = 128  # columns whose effect on later ones is applied in one product
LEAF = 256  # below it a triangle is inverted at once


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """What the loop needs to know of a Hessian: upper float32 [d, d], U^T U = inverse(H[order, order]), order int64
    [d]. One serves all linears of the same input."""

    upper: torch.Tensor
    order: torch.Tensor


def shrink(h: torch.Tensor, share: float) -> torch.Tensor:
    """share h + (1 - share) diag(h), in place; share = n / (n + d) of n tokens of equal weight. Inputs that were always
    zero get a diagonal of 1: they are coupled to nothing."""
    diagonal = h.diagonal()
    kept = diagonal.clone()
    h *= share
    diagonal.copy_(torch.where(kept == 0, torch.ones_like(kept), kept))
    return h


def factorize(h: torch.Tensor) -> Factor | None:
    """Of a float64 Hessian [d, d], which is changed; None where it is not positive definite or not finite."""
    diagonal = h.diagonal()
    diagonal += DAMPING * diagonal.mean()
    order = torch.argsort(diagonal, descending=True, stable=True)
    # H^-1 = U^T U with U upper is H = R R^T with R = U^-1 upper: the factor of the columns in reversed order, reversed.
    reverse = order.flip(0)
    torch.index_select(h.index_select(0, reverse), 1, reverse, out=h)
    lower, failed = torch.linalg.cholesky_ex(h)
    if int(failed):
        return None
    _invert_lower(lower)
    upper = lower.float().flip(0, 1)
    return Factor(upper, order) if bool(torch.isfinite(upper).all()) else None


def _invert_lower(triangle: torch.Tensor) -> None:
    """In place."""
    n = triangle.shape[0]
    if n <= LEAF:
        one = torch.eye(n, dtype=triangle.dtype, device=triangle.device)
        triangle.copy_(torch.linalg.solve_triangular(triangle, one, upper=False))
        return
    top, bottom = triangle[: n // 2], triangle[n // 2 :]
    corner = bottom[:, : n // 2]
    _invert_lower(top[:, : n // 2])
    _invert_lower(bottom[:, n // 2 :])
    corner.copy_(-(bottom[:, n // 2 :] @ (corner @ top[:, : n // 2])))


def solve(w: torch.Tensor, scale: torch.Tensor, factor: Factor) -> torch.Tensor:
    """int8 codes [N, d] of w float32 [N, d] under scales float32 [N, d/g], in the columns' own order.

    Columns are rows here: each step then works on memory that lies together.
    """
    width, group_size = w.shape[1], w.shape[1] // scale.shape[1]
    order, upper = factor.order, factor.upper
    left = w.T[order]  # [d, N], what is still to be represented
    steps = scale.T.contiguous()
    group = (order // group_size).tolist()
    codes = torch.empty(w.shape[::-1], dtype=torch.int8, device=w.device)
    for first in range(0, width, BLOCK):
        last = min(first + BLOCK, width)
        block, errors = left[first:last], torch.empty_like(left[first:last])
        within, pivots = upper[first:last, first:last], upper.diagonal()[first:last].tolist()
        for j in range(last - first):
            column, step = block[j], steps[group[first + j]]
            q = torch.round(column / step).clamp_(-8, 7)
            codes[first + j] = q
            torch.div(column - q * step, pivots[j], out=errors[j])
            block[j + 1 :].addr_(within[j, j + 1 :], errors[j], alpha=-1)
        if last < width:
            left[last:].addmm_(upper[first:last, last:].T, errors, alpha=-1)
    result = torch.empty_like(codes)
    result[order] = codes
    return result.T.contiguous()

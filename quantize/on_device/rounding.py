"""Codes, packed, and the sums that are reported of them: kernels/vectors.py and methods.store_codes on whole rows."""

from typing import NamedTuple

import torch

from kizami.quantize.kernels.lanes import CHUNK
from kizami.quantize.kernels.vectors import HIGHEST, LOWEST, SUMS
from kizami.quantize.on_device.arithmetic import added_up, folded, round_bf16
from kizami.quantize.on_device.scales import Groups, nearest


class Rounded(NamedTuple):
    """q, error: float32 [rows, K], error = W - q * s; packed int32 [rows, K/8]."""

    q: torch.Tensor
    error: torch.Tensor
    packed: torch.Tensor


class Counts(NamedTuple):
    """Of a band, each []: max |error|, float32; weights beyond half a step from the outermost codes, zero groups,
    negative scales, int64."""

    largest: torch.Tensor
    clipped: torch.Tensor
    zero: torch.Tensor
    negative: torch.Tensor


def minmax_codes(w: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """float32 [G, g] of integers: compressed-tensors' chain, BF16 weight, BF16 quotient."""
    return round_bf16(round_bf16(w) / step[:, None]).clamp(LOWEST, HIGHEST).round()


def packed_words(q: torch.Tensor) -> torch.Tensor:
    """float32 [rows, K] of codes to int32 [rows, K/8], on a little-endian machine: nibble i of word j is column 8j+i,
    holding q + 8."""
    stored = (q - LOWEST).to(torch.uint8)
    return (stored[:, ::2] | (stored[:, 1::2] << 4)).view(torch.int32)


def rounded(groups: Groups, step: torch.Tensor, rows: int, is_minmax: bool) -> Rounded:
    """step float32 [G], as it is stored. q * s is exact; W - q * s is, too, where q is the nearest code."""
    q = minmax_codes(groups.w, step) if is_minmax else nearest(groups.w, step)
    error = groups.w - q * step[:, None]
    q = q.view(rows, -1)
    return Rounded(q, error.view(rows, -1), packed_words(q))


def counts(groups: Groups, step: torch.Tensor, error: torch.Tensor) -> Counts:
    a, b = 7.5 * step, -8.5 * step  # exact: a scale has 8 bits
    outside = (groups.w > torch.maximum(a, b)[:, None]) | (groups.w < torch.minimum(a, b)[:, None])
    return Counts(error.abs().amax(), outside.sum(), groups.is_zero.sum(), (step < 0).sum())


def row_lanes(w: torch.Tensor, made: Rounded, step: torch.Tensor) -> torch.Tensor:
    """float64 [rows, 3 * SUMS]: of each row the lanes of the squares of W, of the error and of q * s, added as
    methods.store_codes does."""
    rows, columns = w.shape
    lanes = torch.empty(rows, columns // CHUNK, 3 * SUMS, dtype=torch.float64, device=w.device)
    for k, x in enumerate((w, made.error)):
        wide = x.double()
        lanes[:, :, k * SUMS : (k + 1) * SUMS] = folded(wide * wide)
    scale = step.double().view(rows, -1)
    scale = (scale * scale).repeat_interleave(columns // CHUNK // scale.shape[1], 1)
    squares = folded((made.q * made.q).double())  # sums of small integers
    lanes[:, :, 2 * SUMS :] = squares * scale[:, :, None]
    return added_up(lanes)

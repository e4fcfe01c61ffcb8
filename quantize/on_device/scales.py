"""Scale rules of kernels/scales.py on all groups at a time: same formulas, same order of operations."""

from typing import NamedTuple

import numpy as np
import torch

from kizami.quantize.kernels.scales import SMALLEST_SCALE, VALUE_UNITS, ZERO_GROUP_SCALE
from kizami.quantize.kernels.search_vectors import CODE_UNITS
from kizami.quantize.kernels.vectors import HIGHEST, LOWEST
from kizami.quantize.on_device.arithmetic import SIGN, UPPER_HALF, divided, round_bf16

ZERO, SMALLEST = float(ZERO_GROUP_SCALE), float(SMALLEST_SCALE)
BF16_STEP = 1 << 16  # of float32 bits


class Groups(NamedTuple):
    """A band of rows, group by group.

    w: float32 [G, g]; codes: uint8 [G, g], or None of values. p, n: float32 [G], the largest weight of each sign;
    extreme: the weight of largest magnitude, the positive one of two, 1 where all are 0; p_code, n_code: int32 [G], the
    largest code of each sign; unit: float64 [G], what an integer of `units` is worth.
    """

    w: torch.Tensor
    codes: torch.Tensor | None
    p: torch.Tensor
    n: torch.Tensor
    extreme: torch.Tensor
    p_code: torch.Tensor
    n_code: torch.Tensor

    @property
    def is_zero(self) -> torch.Tensor:
        return torch.maximum(self.p, self.n) == 0


def groups_of(w: torch.Tensor, codes: torch.Tensor | None, group_size: int) -> Groups:
    """w float32 [rows, K]; codes uint8 [rows, K] where the search is by code."""
    w = w.view(-1, group_size)
    p, n = (x.amax(1).clamp(min=0) + 0.0 for x in (w, -w))  # -0.0 + 0.0 is 0.0
    extreme = torch.where(n > p, -n, p)
    extreme = torch.where(extreme == 0, torch.ones_like(extreme), extreme)
    p_code = n_code = torch.zeros(0, dtype=torch.int32, device=w.device)
    if codes is not None:
        codes = codes.view(-1, group_size)
        signed = codes.view(torch.int8)
        p_code = signed.amax(1).int().clamp(min=0)
        n_code = (signed ^ -128).amax(1).int().clamp(min=0)
    return Groups(w, codes, p, n, extreme, p_code, n_code)


def minmax_scales(groups: Groups) -> torch.Tensor:
    """float32 [G], as scales.minmax_scale."""
    s = round_bf16(divided(round_bf16(torch.maximum(groups.p, groups.n)), 7.5))
    return torch.where(s == 0, torch.full_like(s, ZERO), s)


def signed_scales(groups: Groups) -> torch.Tensor:
    """float32 [G], as scales.signed_scale."""
    s = round_bf16(torch.maximum(groups.p, groups.n) * 0.125).clamp(min=SMALLEST)
    s = torch.where(groups.n > groups.p, s, -s)
    return torch.where(groups.is_zero, torch.full_like(s, ZERO), s)


def guard(s: torch.Tensor, groups: Groups, reach_plus: float, reach_minus: float) -> torch.Tensor:
    """float64 [G] to float32 that BF16 holds, as scales.guard. The loop there ends after one step: `low` is the bound
    cut to BF16, and the bound is off by half a step of float32 at most, so the next BF16 value is beyond it."""
    single = s.float()
    magnitude = round_bf16(single.abs()).clamp(min=SMALLEST)
    if reach_plus < np.inf:
        negative = s < 0
        over = torch.where(negative, groups.n, groups.p).double()
        under = torch.where(negative, groups.p, groups.n).double()
        bound = torch.maximum(divided(over, reach_plus), divided(under, reach_minus)).float()
        bits = bound.view(torch.int32) & UPPER_HALF
        low = bits.view(torch.float32).double()
        is_short = (over > reach_plus * low) | (under > reach_minus * low)
        magnitude = torch.maximum(magnitude, (bits + BF16_STEP * is_short.int()).view(torch.float32))
    return (magnitude.view(torch.int32) | (single.view(torch.int32) & SIGN)).view(torch.float32)


def nearest(w: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """float32 [G, g] of integers: clamp(rint(W / s)), ties to even. step float32 [G]."""
    return (w / step[:, None]).clamp(LOWEST, HIGHEST).round()


def relative(groups: Groups) -> torch.Tensor:
    """float32 [G, g]: W / m."""
    return groups.w / groups.extreme[:, None]


def units_of(groups: Groups) -> torch.Tensor:
    """float32 [G, g] of integers: the weights in units, of codes exact, of values to 2^-20 of the extreme."""
    if groups.codes is not None:
        return groups.codes.view(torch.float8_e4m3fn).float() * CODE_UNITS
    return (relative(groups) * float(VALUE_UNITS)).round()


def unit_worth(groups: Groups, block_scale: torch.Tensor | None) -> torch.Tensor:
    """float64 [G]: what a unit is worth. block_scale float32 [G], of codes. Both divisors are powers of two."""
    if block_scale is not None:
        return block_scale.double() * (1 / CODE_UNITS)
    return groups.extreme.double() * (1 / float(VALUE_UNITS))


def refit(
    a: torch.Tensor, b: torch.Tensor, worth: torch.Tensor, step: torch.Tensor, groups: Groups, reach_plus: float,
    reach_minus: float,
) -> torch.Tensor:  # fmt: skip
    """float32 [G], as scales.refit. a, b: float64 [G] that hold exact integers."""
    is_fit = (a != 0) & (b != 0)
    s = worth * a / torch.where(is_fit, b, torch.ones_like(b))
    return torch.where(is_fit, guard(s, groups, reach_plus, reach_minus), step)

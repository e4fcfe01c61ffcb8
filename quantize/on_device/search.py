"""`search` of kernels/methods.py: sums for all candidates, the best one, one refit, on all groups at a time."""

from typing import NamedTuple

import torch
from torch.nn.functional import embedding_bag

from kizami.quantize.kernels.lanes import CHUNK
from kizami.quantize.kernels.search_tables import MINUS, candidates, error_table
from kizami.quantize.kernels.search_vectors import INDEX_BITS, NEVER, SATURATED, VALUE_QUANTUM
from kizami.quantize.kernels.vectors import HIGHEST, LOWEST
from kizami.quantize.on_device.scales import ZERO, Groups, guard, nearest, refit, relative, unit_worth, units_of
from kizami.quantize.settings import Method


class Candidates(NamedTuple):
    """divisors: float64 [C], of search_tables, and `squares` of them; table: [127 * 256, C], its cells as float32, of
    `weighted` as float64; minus: how many of the divisors are negative."""

    divisors: torch.Tensor
    squares: torch.Tensor
    table: torch.Tensor
    minus: int
    reach_plus: float
    reach_minus: float
    is_positive: bool


def candidates_on(device: torch.device, method: Method, group_size: int) -> Candidates:
    chosen = candidates(group_size, method.clip_allowance)
    divisors = torch.from_numpy(chosen.divisors).to(device)
    cells = error_table(group_size, method.clip_allowance).astype("float32")
    table = torch.from_numpy(cells.reshape(-1, chosen.divisors.size)).to(device)
    is_positive = method.scale_sign == "positive"
    return Candidates(
        divisors, divisors * divisors, table, MINUS, chosen.reach_plus, chosen.reach_minus, is_positive
    )  # fmt: skip


def table_index(groups: Groups) -> torch.Tensor:
    """int32 [G, g]: rows of the table, [largest code, code relative to the sign of the extreme]."""
    assert groups.codes is not None
    flip = (groups.n_code > groups.p_code).int() << 7
    top = torch.maximum(groups.p_code, groups.n_code) << 8
    return (groups.codes.int() ^ flip[:, None]) + top[:, None]


def code_sums(groups: Groups, search: Candidates) -> torch.Tensor:
    """int32 [G, C]. Cells are integers below 2^16: the 32 of a chunk add up exactly in float32, in any order."""
    index = table_index(groups)
    sums = embedding_bag(index.view(-1, CHUNK), search.table, mode="sum").clamp_(max=SATURATED)
    return sums.int().view(len(index), -1, sums.shape[1]).sum(1, dtype=torch.int32)


def value_steps(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """int32 [G, g]: search_vectors.squared_steps of each weight, x relative to the extreme."""
    x = x * divisor
    e = x - x.clamp(LOWEST, HIGHEST).round()
    return ((e * e) * VALUE_QUANTUM).int()


def value_sums(groups: Groups, search: Candidates) -> torch.Tensor:
    """int32 [G, C], as scales.sum_values."""
    x = relative(groups)
    totals = [value_steps(x, divisor).sum(1) for divisor in search.divisors.float()]
    return (torch.stack(totals, 1).double() / search.squares).round().int()


def is_allowed(groups: Groups, search: Candidates) -> torch.Tensor:
    """bool [G, C], as scales.allowed: the negative divisors rise in magnitude, so that those within the limit come
    first."""
    p, n, minus = groups.p, groups.n, search.minus
    limit = search.reach_plus * torch.maximum(p, n).double() * (1 + 1e-9)
    reach = -search.divisors[:minus] * torch.minimum(p, n).double()[:, None]
    allowed = torch.ones(len(p), search.divisors.numel(), dtype=torch.bool, device=p.device)
    allowed[:, :minus] = ~(reach > limit[:, None])
    if search.is_positive:
        is_minus = (n > p)[:, None]
        allowed[:, :minus] &= is_minus
        allowed[:, minus:] &= ~is_minus
    return allowed


def chosen_divisors(sums: torch.Tensor, groups: Groups, search: Candidates) -> torch.Tensor:
    """float64 [G]: of the first smallest of the allowed sums. sums int32 [G, C]; their order as in `smallest_of`."""
    keys = (sums << INDEX_BITS) | torch.arange(sums.shape[1], dtype=torch.int32, device=sums.device)
    best = torch.where(is_allowed(groups, search), keys, torch.full_like(keys, NEVER)).amin(1)
    return search.divisors[(best & ((1 << INDEX_BITS) - 1)).long()]


def first_scales(sums: torch.Tensor, groups: Groups, search: Candidates) -> torch.Tensor:
    """float32 [G]: those of the best candidates."""
    divisors = chosen_divisors(sums, groups, search)
    step = guard(groups.extreme.double() / divisors, groups, search.reach_plus, search.reach_minus)
    return torch.where(groups.is_zero, torch.full_like(step, ZERO), step)


def search_scales(groups: Groups, block_scale: torch.Tensor | None, search: Candidates) -> torch.Tensor:
    """float32 [G]. block_scale: float32 [G], of codes."""
    sums = code_sums(groups, search) if groups.codes is not None else value_sums(groups, search)
    step = first_scales(sums, groups, search)
    q, units = nearest(groups.w, step), units_of(groups)
    a = (q * units).sum(1, dtype=torch.float64)  # products are integers below 2^24
    b = (q * q).sum(1, dtype=torch.float64)
    return refit(a, b, unit_worth(groups, block_scale), step, groups, search.reach_plus, search.reach_minus)

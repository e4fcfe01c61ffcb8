"""`weighted` of kernels/weighted.py on all groups at a time: `search` with errors that count by column."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import embedding_bag

from kizami.quantize.kernels.search_tables import WEIGHTED_MINUS, candidates, error_table
from kizami.quantize.kernels.weighted import DROPPED_BITS, SHARES, column_shares
from kizami.quantize.on_device.arithmetic import added_up, folded
from kizami.quantize.on_device.rounding import Rounded
from kizami.quantize.on_device.scales import Groups, nearest, refit, relative, unit_worth, units_of
from kizami.quantize.on_device.search import Candidates, first_scales, table_index, value_steps
from kizami.quantize.settings import Method


class Columns(NamedTuple):
    """As kernels.weighted.Columns: shares int64, exact float64, each [K / g, g]; h float64 [K]."""

    shares: torch.Tensor
    exact: torch.Tensor
    h: torch.Tensor


def weighted_candidates_on(device: torch.device, method: Method, group_size: int) -> Candidates:
    chosen = candidates(group_size, method.clip_allowance, True)
    divisors = torch.from_numpy(chosen.divisors).to(device)
    cells = error_table(group_size, method.clip_allowance, True).astype("float64")
    table = torch.from_numpy(cells.reshape(-1, chosen.divisors.size)).to(device)
    is_positive = method.scale_sign == "positive"
    return Candidates(
        divisors, divisors * divisors, table, WEIGHTED_MINUS, chosen.reach_plus, chosen.reach_minus, is_positive
    )  # fmt: skip


def columns_on(
    device: torch.device, weights: NDArray[np.int64], h: NDArray[np.float64] | None, group_size: int
) -> Columns:
    """weights int64 [K], h mean squares [K], as quantize_linear takes them."""
    shares = column_shares(weights, group_size).astype(np.int64)
    exact = weights.astype(np.float64)
    parts = (shares.reshape(-1, group_size), exact.reshape(-1, group_size), exact if h is None else h)
    return Columns(*(torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in parts))


def _by_row(per_column: torch.Tensor, groups: int) -> torch.Tensor:
    """[K / g, g] to [G, g]: the same for every row."""
    return per_column.repeat(groups // per_column.shape[0], 1)


def weighted_code_sums(groups: Groups, columns: Columns, search: Candidates) -> torch.Tensor:
    """int32 [G, C]. Cells and shares are integers below 2^15: exact in float64, in any order."""
    index = table_index(groups)
    shares = _by_row(columns.shares, len(index)).double()
    sums = embedding_bag(index, search.table, mode="sum", per_sample_weights=shares)
    return sums.int() >> DROPPED_BITS


def weighted_value_sums(groups: Groups, columns: Columns, search: Candidates) -> torch.Tensor:
    """int32 [G, C], as weighted.sum_weighted_values."""
    x = relative(groups)
    shares = _by_row(columns.shares, len(x))
    totals = [(value_steps(x, divisor) * shares).sum(1) for divisor in search.divisors.float()]
    worth = search.squares * (SHARES / x.shape[1])
    return (torch.stack(totals, 1).double() / worth).round().int()


def weighted_scales(
    groups: Groups, block_scale: torch.Tensor | None, columns: Columns, search: Candidates
) -> torch.Tensor:
    """float32 [G]. block_scale: float32 [G], of codes."""
    sums = (weighted_code_sums if groups.codes is not None else weighted_value_sums)(groups, columns, search)
    step, units, worth = first_scales(sums, groups, search), units_of(groups), unit_worth(groups, block_scale)
    exact = _by_row(columns.exact, len(step))
    for _ in range(2 if search.reach_plus == np.inf else 1):
        q = nearest(groups.w, step)
        a = ((q * units).double() * exact).sum(1)  # integers below 2^42
        b = ((q * q).double() * exact).sum(1)
        step = refit(a, b, worth, step, groups, search.reach_plus, search.reach_minus)
    return step


def weighted_row_lanes(w: torch.Tensor, made: Rounded, columns: Columns) -> torch.Tensor:
    """float64 [rows, 2 * SUMS]: of each row the lanes of h W^2 and h E^2."""
    lanes = []
    for x in (w, made.error):
        wide = x.double()
        lanes.append(folded(wide * wide * columns.h))
    return added_up(torch.cat(lanes, 2))

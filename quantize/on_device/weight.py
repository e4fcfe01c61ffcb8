"""A source weight on a device: its bytes, and float32 values of any of its rows."""

from typing import NamedTuple

import torch

from kizami.quantize.kernels.lanes import CHUNK
from kizami.quantize.kernels.survey import TOO_LARGE, top_count
from kizami.quantize.linear import Block


class Weight(NamedTuple):
    """raw [N, K]: uint8 e4m3 bytes with float32 `grid` [ceil(N/b0), ceil(K/b1)], or bfloat16, float16, float32.
    is_code: each group has one block scale."""

    raw: torch.Tensor
    grid: torch.Tensor | None
    block: Block | None
    is_code: bool


def values(weight: Weight, first: int, last: int) -> torch.Tensor:
    """float32 [last - first, K]: e4m3 * scale rounded once, anything else exact."""
    raw = weight.raw[first:last]
    if weight.grid is None or weight.block is None:
        return raw.float()
    (b0, b1), device = weight.block, raw.device
    of_rows = torch.arange(first, last, device=device) // b0
    of_columns = torch.arange(raw.shape[1], device=device) // b1
    scales = weight.grid.index_select(0, of_rows).index_select(1, of_columns)
    return raw.view(torch.float8_e4m3fn).float() * scales


def chunk_peaks(w: torch.Tensor) -> torch.Tensor:
    """float32 [rows, K/32]: max |W| of each chunk."""
    return w.abs().view(w.shape[0], -1, CHUNK).amax(2)


def is_usable(peaks: torch.Tensor) -> torch.Tensor:
    """bool []: every peak is a number, and below what the methods can take."""
    return (peaks < TOO_LARGE).all()


def floor_of(peaks: torch.Tensor) -> torch.Tensor:
    """float32 []: the bound of the largest 0.1 % that `linear._floor` finds: as many chunks as those are weights have
    their peak not below it."""
    rank = top_count(peaks.numel() * CHUNK)
    return torch.kthvalue(peaks.reshape(-1), peaks.numel() - rank + 1).values

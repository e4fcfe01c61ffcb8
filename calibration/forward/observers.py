"""What is measured on the way: mean squares of the linears' inputs, and the ranges of what goes into the KV cache.

All sums are float64 and taken in the order in which the rows come, so that equal work gives equal bytes. A row with a
number that is not finite is left out of every sum.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kizami.formats.statistics import KvRange

Arrays = dict[str, NDArray[Any]]

ROWS = 256  # squared at once: float64 rows of 18432 inputs take 38 MB
_SHIFT = 19  # keeps 4 bits of a float32's mantissa: 16 bins per octave
_BINS = (0x7F80_0000 >> _SHIFT) + 1
_P9999 = 0.9999


def square_sums(x: torch.Tensor, weight: torch.Tensor | None = None) -> tuple[torch.Tensor, int]:
    """(sum over rows of weight * x^2, rows that were finite): float64 [K] of x [n, K] and weight float64 [n]."""
    total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    count = 0
    weight = x.new_ones(len(x)) if weight is None else weight
    for at in range(0, len(x), ROWS):
        part, w = x[at : at + ROWS], weight[at : at + ROWS]
        squares = part.double().square_()
        sums = w.double() @ squares
        if sums.isfinite().all():
            count += len(part)
        else:
            finite = part.isfinite().all(dim=1) & w.isfinite()
            sums = w[finite].double() @ squares[finite]
            count += int(finite.sum())
        total += sums
    return total, count


class SquareSums:
    """Mean squares of the inputs of linears, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, x: torch.Tensor) -> None:
        """x: [..., K]. Rows of zeros are not counted: an RMSNorm makes them of numbers whose squares are too large."""
        rows = x.reshape(-1, x.shape[-1])
        sums, count = square_sums(rows)
        count -= int((~rows.any(dim=1)).sum())
        found = sums.cpu().numpy()
        self._sums[name] = self._sums[name] + found if name in self._sums else found
        self._counts[name] = self._counts.get(name, 0) + count

    @property
    def counts(self) -> Mapping[str, int]:
        """Rows that were finite and not of zeros."""
        return self._counts

    def same(self, name: str, other: str) -> None:
        """`name` has the inputs of `other`."""
        if other in self._sums:
            self._sums[name], self._counts[name] = self._sums[other], self._counts[other]

    def means(self) -> dict[str, NDArray[np.float32]]:
        return {name: (s / max(self._counts[name], 1)).astype(np.float32) for name, s in self._sums.items()}

    def state(self) -> Arrays:
        counts = {f"count.{name}": np.array([count]) for name, count in self._counts.items()}
        return {f"sum.{name}": value for name, value in self._sums.items()} | counts

    def load(self, state: Arrays) -> None:
        for key, value in state.items():
            kind, _, name = key.partition(".")
            if kind == "sum":
                self._sums[name] = value
            elif kind == "count":
                self._counts[name] = int(value[0])


class RangeMeter:
    """Gathers a KvRange of rows [n, C]."""

    def __init__(self, channels: int) -> None:
        self._amax = np.zeros(channels, np.float32)
        self._sum = np.zeros(channels)
        self._squares = np.zeros(channels)
        self._first_amax = np.zeros(1, np.float32)
        self._count = np.zeros(1, np.int64)
        self._bins = np.zeros(_BINS, np.int64)

    def add(self, x: torch.Tensor, *, first: bool) -> None:
        """first: row 0 is the first token of its sequence."""
        x = x.float()
        finite = x.isfinite().all(dim=1)
        if first and bool(finite[0]):
            self._first_amax = np.maximum(self._first_amax, np.float32(x[0].abs().max().item()))
        x = x if bool(finite.all()) else x[finite]
        for at in range(0, len(x), ROWS):
            part = x[at : at + ROWS]
            magnitude = part.abs()
            bins = torch.bincount((magnitude.view(torch.int32) >> _SHIFT).reshape(-1), minlength=_BINS)
            wide = part.double()
            self._amax = np.maximum(self._amax, magnitude.amax(dim=0).cpu().numpy())
            self._sum = self._sum + wide.sum(dim=0).cpu().numpy()
            self._squares = self._squares + wide.square_().sum(dim=0).cpu().numpy()
            self._bins = self._bins + bins.cpu().numpy()
            self._count = self._count + len(part)

    @property
    def count(self) -> int:
        """Rows that were finite."""
        return int(self._count[0])

    def result(self) -> KvRange:
        count = max(int(self._count[0]), 1)
        mean = self._sum / count
        std = np.sqrt(np.maximum(self._squares / count - mean**2, 0))
        return KvRange(
            channel_amax=self._amax,
            channel_mean=mean.astype(np.float32),
            channel_std=std.astype(np.float32),
            amax=float(self._amax.max(initial=0)),
            rms=float(np.sqrt(self._squares.sum() / (count * len(mean)))),
            p9999=self._quantile(),
            first_token_amax=float(self._first_amax[0]),
        )

    def _quantile(self) -> float:
        """The upper edge of the bin that 99.99 % lie in or below, and no more than the largest."""
        total = int(self._bins.sum())
        if not total:
            return 0.0
        at = int(np.searchsorted(np.cumsum(self._bins), np.ceil(_P9999 * total)))
        edge = np.array([min(at + 1, _BINS - 1) << _SHIFT], np.uint32).view(np.float32)[0]
        return float(min(edge, self._amax.max()))

    def state(self) -> Arrays:
        return {name: getattr(self, f"_{name}") for name in _METER}

    def load(self, state: Arrays) -> None:
        for name in _METER:
            setattr(self, f"_{name}", state[name])


_METER = ("amax", "sum", "squares", "first_amax", "count", "bins")

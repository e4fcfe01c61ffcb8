"""Sums of what differs, and what they come to. Everything is float64; rows that are not finite are counted apart."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

BOUNDS = (128, 512, 2048, 8192, 32768, 131072, 524288)
BIAS_STDS, BIAS_LEAST = 8.0, 50.0  # |mean| of a channel that is mostly a constant
STANDS_OUT = 1.5  # times the median of all layers
MOST_SKIPPED = 4  # one of so many layers


def buckets_of(seq_len: int) -> tuple[tuple[int, int], ...]:
    """First position and the one behind the last: 0-128, 128-512, 512-2048, and so on to seq_len."""
    bounds = [0, *(bound for bound in BOUNDS if bound < seq_len), seq_len]
    return tuple(pairwise(bounds))


class OutputError:
    """Squared differences between attention outputs, by position."""

    def __init__(self, seq_len: int) -> None:
        self._error, self._reference = np.zeros(seq_len), np.zeros(seq_len)
        self.bad = 0

    def add(self, found: torch.Tensor, reference: torch.Tensor) -> None:
        """Of one sequence, [S, hidden]."""
        error = (found.double() - reference.double()).square().sum(dim=1)
        power = reference.double().square().sum(dim=1)
        finite = error.isfinite() & power.isfinite()
        self.bad += int((~finite).sum())
        self._error += torch.where(finite, error, 0.0).cpu().numpy()
        self._reference += torch.where(finite, power, 0.0).cpu().numpy()

    def relative(self, first: int = 0, last: int | None = None) -> float:
        """||found - reference|| / ||reference||; 0 where there is no reference."""
        error, power = self._error[first:last].sum(), self._reference[first:last].sum()
        return float(np.sqrt(error / power)) if power > 0 else 0.0


@dataclass(slots=True)
class RowError:
    """Of the numbers of one part of the cache."""

    error: float = 0.0
    power: float = 0.0
    count: int = 0
    clipped: int = 0

    def add(self, rows: torch.Tensor, rounded: torch.Tensor, clipped: int) -> None:
        wide = rows.double()
        error = (rounded.double() - wide).square()
        finite = error.isfinite()
        self.error += float(torch.where(finite, error, 0.0).sum())
        self.power += float(torch.where(finite, wide.square(), 0.0).sum())
        self.count += int(finite.sum())
        self.clipped += clipped

    @property
    def rmse(self) -> float:
        return float(np.sqrt(self.error / max(self.count, 1)))

    @property
    def sqnr_db(self) -> float | None:
        """None where nothing differs, or nothing is there."""
        return float(10 * np.log10(self.power / self.error)) if self.error > 0 and self.power > 0 else None


@dataclass(slots=True)
class LayerErrors:
    """Of one variant in one layer. local: only this layer's cache is rounded; propagated: all layers' are. rows: by
    part of the cache."""

    local: OutputError
    propagated: OutputError
    rows: dict[str, RowError] = field(default_factory=dict)

    def see(self, name: str, rows: torch.Tensor, rounded: torch.Tensor, clipped: int) -> None:
        self.rows.setdefault(name, RowError()).add(rows, rounded, clipped)


@dataclass(frozen=True, slots=True)
class Channels:
    """What stands out in one part of the cache of a layer, BF16 rows. biased: (channel, mean, std), the largest mean
    first; for K of GQA the channels are those of all heads in a row. Of the pairs that RoPE turns, a channel is a pair
    and a number its length."""

    amax: float
    amax_channel: int
    biased: tuple[tuple[int, float, float], ...]


def find_channels(amax: NDArray[np.float32], mean: NDArray[np.float32], std: NDArray[np.float32]) -> Channels:
    """A channel that is mostly a constant keeps an error of some 3 % of it at any scale."""
    size = np.abs(mean)
    which = np.flatnonzero((size > BIAS_STDS * std) & (size > BIAS_LEAST))
    order = which[np.argsort(-size[which], kind="stable")]
    biased = tuple((int(c), float(mean[c]), float(std[c])) for c in order)
    return Channels(float(amax.max(initial=0)), int(amax.argmax()) if len(amax) else 0, biased)


def rank_layers(errors: Sequence[float], biased: Sequence[bool]) -> tuple[int, ...]:
    """All layers, the largest local error first."""
    assert len(errors) == len(biased)
    return tuple(sorted(range(len(errors)), key=lambda layer: (-errors[layer], layer)))


def skip_list(errors: Sequence[float], biased: Sequence[bool]) -> tuple[int, ...]:
    """Layers to keep in BF16, the largest local error first: those that stand out against the median layer, or have a
    channel that is mostly a constant; a quarter of the layers at most."""
    least = STANDS_OUT * float(np.median(errors))
    ranked = [at for at in rank_layers(errors, biased) if errors[at] > 0 and (biased[at] or errors[at] > least)]
    return tuple(ranked[: -(-len(errors) // MOST_SKIPPED)])


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tokens at positions first to last - 1. kl: of the reference's next-token distribution against the variant's,
    nats. top1: share of positions with the same most likely token. nll, nll_delta: of the data's next token under the
    reference, and how much more under the variant; bad: positions whose logits are not finite, in no other number."""

    first: int
    last: int
    tokens: int
    bad: int
    kl_mean: float
    kl_median: float
    kl_p999: float
    kl_max: float
    top1: float
    nll: float
    nll_delta: float


@dataclass(frozen=True, slots=True)
class TokenMeasures:
    """By position, [sequences, seq_len]: kl, nll and nll_delta float64 (the last position of a sequence has no next
    token: its nll are NaN), same bool, finite bool. right, right_other: whether the most likely token is the data's
    next, of the reference and of the other."""

    kl: NDArray[np.float64]
    same: NDArray[np.bool_]
    nll: NDArray[np.float64]
    nll_delta: NDArray[np.float64]
    finite: NDArray[np.bool_]
    right: NDArray[np.bool_]
    right_other: NDArray[np.bool_]

    def rows(self, which: slice) -> "TokenMeasures":
        """Of some of the sequences."""
        return TokenMeasures(**{field.name: getattr(self, field.name)[which] for field in fields(self)})

    def bucket(self, first: int, last: int) -> Bucket:
        at = (slice(None), slice(first, last))
        finite = self.finite[at]
        kl, same = self.kl[at][finite], self.same[at][finite]
        follows = finite & ~np.isnan(self.nll[at])
        empty = kl.size == 0
        return Bucket(
            first=first,
            last=last,
            tokens=int(kl.size),
            bad=int((~finite).sum()),
            kl_mean=0.0 if empty else float(kl.mean()),
            kl_median=0.0 if empty else float(np.median(kl)),
            kl_p999=0.0 if empty else float(np.quantile(kl, 0.999)),
            kl_max=0.0 if empty else float(kl.max()),
            top1=0.0 if empty else float(same.mean()),
            nll=float(self.nll[at][follows].mean()) if follows.any() else 0.0,
            nll_delta=float(self.nll_delta[at][follows].mean()) if follows.any() else 0.0,
        )

    def standard_error(self) -> float | None:
        """Of nll_delta's mean, from the differences between sequences; None of fewer than two."""
        means = [
            delta[finite & ~np.isnan(delta)].mean()
            for delta, finite in zip(self.nll_delta, self.finite, strict=True)
            if (finite & ~np.isnan(delta)).any()
        ]
        return float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None

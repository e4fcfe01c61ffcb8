"""Next-token distributions of several runs against a reference's, a band of the vocabulary at a time.

No row of logits is ever whole: logsumexp, KL and the most likely token are kept up to the band at work, and every row
of the head is read once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from kizami.calibration.forward.model import Model
from kizami.calibration.forward.weights import Weights
from kizami.calibration.kv_accuracy.measures import TokenMeasures

TOKENS = 256  # rows at once
Load = Callable[[int, int], torch.Tensor]  # first, last token -> hidden states behind the last layer


@dataclass(frozen=True, slots=True)
class Head:
    """band: rows of the head at once. Logits are float32 whatever the pass has: BF16's steps are wider than what an FP8
    cache changes."""

    model: Model
    weights: Weights
    device: torch.device
    band: int


def band_rows(model: Model, memory: int) -> int:
    """Rows of the head that `memory` bytes allow, with the float64 logits of TOKENS rows and what is made of them."""
    vocabulary: int = model.config.vocab_size
    return max(16, min(vocabulary, memory // (4 * model.hidden + TOKENS * 80)))


class _Side:
    """What is kept of one run's logits; all tensors by token, float64 but `top`."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        def full(value: float) -> torch.Tensor:
            return torch.full((tokens,), value, dtype=torch.float64, device=device)

        self.largest, self.total, self.target = full(-torch.inf), full(0.0), full(0.0)
        self.top = torch.zeros(tokens, dtype=torch.int64, device=device)

    def see(self, at: slice, logits: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The factor by which older sums shrink, and exp(logits - largest)."""
        value, index = logits.max(dim=1)
        old = self.largest[at]
        new = torch.maximum(old, value)
        self.top[at] = torch.where(value > old, index + first, self.top[at])
        shrink = torch.where(old == new, 1.0, (old - new).exp())
        weights = (logits - new[:, None]).exp_()
        self.total[at] = self.total[at] * shrink + weights.sum(dim=1)
        self.largest[at] = new
        return shrink, weights

    def see_targets(self, at: slice, logits: torch.Tensor, first: int, targets: torch.Tensor) -> None:
        inside = (targets >= first) & (targets < first + logits.shape[1])
        picked = logits.gather(1, (targets - first).clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        self.target[at] = torch.where(inside, picked, self.target[at])

    @property
    def logsumexp(self) -> torch.Tensor:
        return self.largest + self.total.log()


def compare_logits(
    head: Head,
    ids: NDArray[np.int32],
    reference: Load,
    others: Sequence[Load],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[TokenMeasures, ...]:
    """One of each of `others`. ids: [sequences, seq_len]. on_progress: bands that are done, and of how many."""
    tokens = ids.size
    norm = head.model.final_norm(torch.float32, head.device)
    targets = torch.from_numpy(np.roll(ids.reshape(-1), -1).astype(np.int64)).to(head.device)
    ours = _Side(tokens, head.device)
    theirs = [_Side(tokens, head.device) for _ in others]
    # sum over the vocabulary of exp(l - largest) * (l - l'), l the reference's
    gaps = [torch.zeros_like(ours.total) for _ in others]
    for first in range(0, head.model.config.vocab_size, head.band):
        last = min(first + head.band, head.model.config.vocab_size)
        weight = head.weights.read(head.model.head, rows=slice(first, last), dtype=torch.float32, device=head.device)
        for begin in range(0, tokens, TOKENS):
            at = slice(begin, min(begin + TOKENS, tokens))
            wanted = targets[at]
            logits = F.linear(norm(reference(at.start, at.stop).float()), weight).double()
            shrink, weights = ours.see(at, logits, first)
            ours.see_targets(at, logits, first, wanted)
            for load, side, gap in zip(others, theirs, gaps, strict=True):
                found = F.linear(norm(load(at.start, at.stop).float()), weight).double()
                side.see_targets(at, found, first, wanted)
                gap[at] = gap[at] * shrink + (weights * (logits - found)).sum(dim=1)
                side.see(at, found, first)
        on_progress(-(-last // head.band), -(-head.model.config.vocab_size // head.band))
    return tuple(_measures(ids, ours, side, gap) for side, gap in zip(theirs, gaps, strict=True))


def _measures(ids: NDArray[np.int32], ours: _Side, side: _Side, gap: torch.Tensor) -> TokenMeasures:
    lse, lse_other = ours.logsumexp, side.logsumexp
    kl = gap / ours.total - lse + lse_other
    nll = lse - ours.target
    delta = (lse_other - side.target) - nll
    finite = kl.isfinite() & nll.isfinite() & delta.isfinite()

    def shaped(values: torch.Tensor) -> NDArray[np.float64]:
        return values.cpu().numpy().reshape(ids.shape).copy()

    nlls, deltas = shaped(nll), shaped(delta)
    nlls[:, -1], deltas[:, -1] = np.nan, np.nan
    same = (ours.top == side.top).cpu().numpy().reshape(ids.shape)
    return TokenMeasures(shaped(kl.clamp(min=0)), same, nlls, deltas, finite.cpu().numpy().reshape(ids.shape))

"""Next-token distributions of several runs against a reference's, a band of the vocabulary at a time.

No row of logits is ever whole: logsumexp, KL and the most likely token are kept up to the band at work, and every row
of a head is read once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a run left behind the last layer, and the head that makes logits of it."""

    head: Head
    load: Load


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


class _Logits:
    """Float64 logits of a run, for the band of the vocabulary that its head's weight is of."""

    def __init__(self, outputs: Outputs) -> None:
        self._head, self._load = outputs.head, outputs.load
        self._norm = self._head.model.final_norm(torch.float32, self._head.device)

    def __call__(self, at: slice, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(self._norm(self._load(at.start, at.stop).float()), weight).double()


def compare_logits(
    ids: NDArray[np.int32],
    reference: Outputs,
    others: Sequence[Outputs],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[TokenMeasures, ...]:
    """One of each of `others`, whose vocabularies have the reference's size. ids: [sequences, seq_len]. on_progress:
    bands that are done, and of how many."""
    tokens, head = ids.size, reference.head
    vocabulary, band = head.model.config.vocab_size, min(run.head.band for run in (reference, *others))
    targets = torch.from_numpy(np.roll(ids.reshape(-1), -1).astype(np.int64)).to(head.device)
    ours = _Side(tokens, head.device)
    theirs = [_Side(tokens, head.device) for _ in others]
    logits_of = [_Logits(run) for run in (reference, *others)]
    # sum over the vocabulary of exp(l - largest) * (l - l'), l the reference's
    gaps = [torch.zeros_like(ours.total) for _ in others]
    for first in range(0, vocabulary, band):
        last = min(first + band, vocabulary)
        weights = _weights([run.head for run in (reference, *others)], slice(first, last))
        for begin in range(0, tokens, TOKENS):
            at = slice(begin, min(begin + TOKENS, tokens))
            wanted = targets[at]
            logits = logits_of[0](at, weights[0])
            shrink, shares = ours.see(at, logits, first)
            ours.see_targets(at, logits, first, wanted)
            for make, weight, side, gap in zip(logits_of[1:], weights[1:], theirs, gaps, strict=True):
                found = make(at, weight)
                side.see_targets(at, found, first, wanted)
                gap[at] = gap[at] * shrink + (shares * (logits - found)).sum(dim=1)
                side.see(at, found, first)
        on_progress(-(-last // band), -(-vocabulary // band))
    return tuple(_measures(ids, targets, ours, side, gap) for side, gap in zip(theirs, gaps, strict=True))


def _weights(heads: Sequence[Head], rows: slice) -> list[torch.Tensor]:
    """Of one band, for each head; one that several runs share is read once."""
    read = {
        id(head): head.weights.read(head.model.head, rows=rows, dtype=torch.float32, device=head.device)
        for head in {id(head): head for head in heads}.values()
    }
    return [read[id(head)] for head in heads]


def _measures(
    ids: NDArray[np.int32], targets: torch.Tensor, ours: _Side, side: _Side, gap: torch.Tensor
) -> TokenMeasures:
    lse, lse_other = ours.logsumexp, side.logsumexp
    kl = gap / ours.total - lse + lse_other
    nll = lse - ours.target
    delta = (lse_other - side.target) - nll
    finite = kl.isfinite() & nll.isfinite() & delta.isfinite()

    def shaped(values: torch.Tensor) -> NDArray[Any]:
        return values.cpu().numpy().reshape(ids.shape).copy()

    nlls, deltas = shaped(nll), shaped(delta)
    right, right_other = shaped(ours.top == targets), shaped(side.top == targets)
    nlls[:, -1], deltas[:, -1], right[:, -1], right_other[:, -1] = np.nan, np.nan, False, False
    same = shaped(ours.top == side.top)
    return TokenMeasures(shaped(kl.clamp(min=0)), same, nlls, deltas, shaped(finite), right, right_other)

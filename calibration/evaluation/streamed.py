"""`evaluate_streamed`: checkpoints held to a reference on the same tokens, one layer of one of them at a time.

No server and no GPU: each model's hidden states behind its last layer lie on the disk until the logits of all are made,
a band of the vocabulary at a time. Caches hold BF16 rows on both sides, or FP8 ones where a variant says so.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kizami.calibration.data.tokens import TokenSet, tokens_sha256
from kizami.calibration.evaluation.paired import mean_interval
from kizami.calibration.forward.run import Progress
from kizami.calibration.forward.settings import Settings
from kizami.calibration.kv_accuracy.logits import Outputs, compare_logits
from kizami.calibration.kv_accuracy.measures import TokenMeasures
from kizami.calibration.kv_accuracy.passes import Event, Passes, hidden_states, open_passes
from kizami.calibration.kv_accuracy.variants import REFERENCE, Variant, check_variant
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError, printable
from kizami.formats.families import find_family

LOGITS = "logits"
Listener = Callable[[str, Event], None]  # the model's name, and what happens


@dataclass(frozen=True, slots=True)
class Domain:
    """Sequences of one kind: rows `first` to `last` - 1."""

    name: str
    first: int
    last: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.last)


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """ids: int32 [sequences, seq_len], domain below domain; sha256 as `tokens_sha256` has it."""

    ids: NDArray[np.int32]
    domains: tuple[Domain, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint to be held to the reference, with BF16 rows in its cache and with those of each of `variants`."""

    name: str
    checkpoint: Checkpoint
    variants: tuple[Variant, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *(f"{self.name}, KV {variant.name}" for variant in self.variants))


@dataclass(frozen=True, slots=True)
class Options:
    """scratch: where hidden states lie, None for the system's temporary folder."""

    scratch: Path | None = None
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True, slots=True)
class Compared:
    """One candidate with one cache, held to the reference with BF16 rows in its own."""

    name: str
    tokens: TokenMeasures


def join_texts(sets: Sequence[tuple[str, TokenSet]]) -> Texts:
    """By name of their domain; all of one seq_len."""
    ids = np.concatenate([tokens.ids for _, tokens in sets])
    ends = np.cumsum([tokens.sequences for _, tokens in sets]).tolist()
    domains = tuple(Domain(name, end - tokens.sequences, end) for (name, tokens), end in zip(sets, ends, strict=True))
    return Texts(ids, domains, tokens_sha256(ids))


def evaluate_streamed(
    reference: Candidate,
    candidates: Sequence[Candidate],
    texts: Texts,
    options: Options,
    on_event: Listener = lambda name, event: None,
) -> tuple[Compared, ...]:
    """Each candidate with each of its caches, in order. Nothing is left on the disk, however it ends.

    KizamiError "vocabulary_mismatch", and those of `measure_kv_accuracy`.
    """
    for other in candidates:
        _check_vocabulary(reference, other)
    with ExitStack() as stack:
        first, *others = (_Run(candidate, texts, options, on_event, stack) for candidate in (reference, *candidates))
        outputs = [list(run.outputs()) for run in (first, *others)]
        names = [name for run in others for name in run.candidate.names]

        def told(done: int, total: int) -> None:
            on_event("", Progress(0, LOGITS, done, total))

        found = compare_logits(texts.ids, outputs[0][0], [one for run in outputs[1:] for one in run], told)
    return tuple(Compared(name, tokens) for name, tokens in zip(names, found, strict=True))


class _Run:
    """One model, open until the logits are made."""

    def __init__(
        self, candidate: Candidate, texts: Texts, options: Options, on_event: Listener, stack: ExitStack
    ) -> None:
        self.candidate, self._stack = candidate, stack
        self.passes: Passes = stack.enter_context(
            open_passes(
                candidate.checkpoint, texts.ids, options.settings, options.scratch,
                lambda event: on_event(candidate.name, event),
            )
        )  # fmt: skip
        for variant in candidate.variants:
            check_variant(variant, self.passes.model)

    def outputs(self) -> Iterator[Outputs]:
        """Of BF16 rows in the cache, then of each variant."""
        variants = (REFERENCE, *self.candidate.variants)
        work, chunks = self._stack.enter_context(self.passes.work(len(variants)))
        job = self.passes.start(work, chunks, variants, measured=False)
        for _ in self.passes.layers(job):
            pass
        head = self.passes.head(share=4)
        for at in range(len(variants)):
            yield Outputs(head, hidden_states(job, at))


def _check_vocabulary(reference: Candidate, other: Candidate) -> None:
    ours, theirs = (
        find_family(one.checkpoint.config, one.checkpoint.tensors)[0].text_config.get("vocab_size")
        for one in (reference, other)
    )
    if ours != theirs:
        raise KizamiError(
            f"{printable(other.name, 80)} has a vocabulary of {printable(str(theirs), 20)}, and the reference one of "
            f"{printable(str(ours), 20)}",
            code="vocabulary_mismatch",
            hint="only models with the same tokens can be compared token by token",
        )


@dataclass(frozen=True, slots=True)
class OverSequences:
    """lost, won: next tokens of the data that only the reference, or only the other, has as its most likely. accuracy:
    of the reference. Intervals of 95 % over sequences; None of fewer than two."""

    lost: int
    won: int
    accuracy: float
    accuracy_drop: float
    accuracy_drop_interval: tuple[float, float] | None
    nll_delta_interval: tuple[float, float] | None


def over_sequences(tokens: TokenMeasures, first: int, last: int) -> OverSequences:
    """Of positions first to last - 1 that are finite and have a next token."""
    at = (slice(None), slice(first, last))
    follows = tokens.finite[at] & ~np.isnan(tokens.nll[at])
    right, other = tokens.right[at] & follows, tokens.right_other[at] & follows
    lost, won = right & ~other, other & ~right
    count = follows.sum(axis=1)
    kept = count > 0
    drops = ((lost.sum(axis=1) - won.sum(axis=1))[kept] / count[kept]).tolist()
    deltas = (np.where(follows, tokens.nll_delta[at], 0.0).sum(axis=1)[kept] / count[kept]).tolist()
    total = max(int(count.sum()), 1)
    return OverSequences(
        lost=int(lost.sum()),
        won=int(won.sum()),
        accuracy=int(right.sum()) / total,
        accuracy_drop=(int(lost.sum()) - int(won.sum())) / total,
        accuracy_drop_interval=_interval(drops),
        nll_delta_interval=_interval(deltas),
    )


def _interval(values: list[float]) -> tuple[float, float] | None:
    return mean_interval(values) if len(values) > 1 else None

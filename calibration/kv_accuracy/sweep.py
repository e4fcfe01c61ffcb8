"""One pass over the layers for several KV caches at once: each variant's hidden states are further sequences of the
same run, so a weight is read once for all of them.

Expert inputs and runs of tokens are cut between variants, so that equal hidden states meet products of equal shapes: a
variant that changes nothing gives the reference's very bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from kizami.calibration.forward.attention import Rounding, attend
from kizami.calibration.forward.layers import LayerRun, Pass, Piece
from kizami.calibration.forward.observers import RangeMeter
from kizami.calibration.kv_accuracy.measures import LayerErrors, OutputError
from kizami.calibration.kv_accuracy.variants import Rounder, Variant, parts_of

ROTATED = frozenset({"k", "k_pe"})


@dataclass(frozen=True, slots=True)
class VariantPass(Pass):
    """ids: the data's sequences once for each of `variants`. measured: whether the first variant is a reference, to
    which the others' attention is held."""

    variants: tuple[Variant, ...]
    measured: bool

    @property
    def sequences(self) -> int:
        """Of the data."""
        return len(self.ids) // len(self.variants)

    @property
    def own_tokens(self) -> int:
        """Of one variant."""
        return self.tokens // len(self.variants)

    def runs(self) -> int:
        return len(self.variants) * self._runs_each()

    def run(self, number: int) -> tuple[int, int]:
        variant, at = divmod(number, self._runs_each())
        begin, first = variant * self.own_tokens, at * self.chunks.tokens
        return begin + first, begin + min(first + self.chunks.tokens, self.own_tokens)

    def _runs_each(self) -> int:
        return runs_of(self.own_tokens, self.chunks.tokens)


def runs_of(tokens: int, chunk: int) -> int:
    return -(-tokens // chunk)


@dataclass(frozen=True, slots=True)
class Attended:
    """x + attention, the keys that an indexer chose, and the attention's output alone."""

    out: torch.Tensor
    chosen: torch.Tensor | None
    own: torch.Tensor


class VariantRun(LayerRun):
    """The phases of a layer for all variants. errors: of each variant but the reference; meters: of the
    reference's rows, by part of the cache."""

    def __init__(self, job: VariantPass, index: int) -> None:
        super().__init__(job, index)
        self._all = job
        self._parts = parts_of(job.model)
        self.meters: dict[str, RangeMeter] = {}
        others = job.variants[1:] if job.measured else ()
        self.errors = tuple(LayerErrors(OutputError(job.seq_len), OutputError(job.seq_len)) for _ in others)

    def attention(self) -> Piece:
        super().attention()
        return self._all.sequences, self._sequence

    def _sequence(self, number: int) -> None:
        """Of all variants: what the reference's attention gave is compared at once, and not kept."""
        job = self._all
        reference: Attended | None = None
        if job.measured:
            x, chosen = self._inputs_of(0, number)
            reference = self._attend(x, chosen, Rounder(job.variants[0], self.index, self._parts, self._range))
            self._keep(0, number, reference)
            for variant, errors in zip(job.variants[1:], self.errors, strict=True):
                alone = self._attend(x, chosen, Rounder(variant, self.index, self._parts, errors.see))
                errors.local.add(alone.own, reference.own)
                del alone
        for at in range(int(job.measured), len(job.variants)):
            found = self._attend(*self._inputs_of(at, number), Rounder(job.variants[at], self.index, self._parts))
            self._keep(at, number, found)
            if reference is not None:
                self.errors[at - 1].propagated.add(found.own, reference.own)

    def _range(self, name: str, rows: torch.Tensor, _: torch.Tensor, __: int) -> None:
        """rows: [1, heads, s, d] of the reference."""
        self._meter(name, rows[0])
        if name in ROTATED:
            self._meter(f"{name} pairs", pair_sizes(rows[0], cast(Any, self.job.model.rotary).inv_freq.numel()))

    def _meter(self, name: str, rows: torch.Tensor) -> None:
        wide = rows.transpose(0, 1).flatten(1)
        self.meters.setdefault(name, RangeMeter(wide.shape[1])).add(wide, first=False)

    def _attend(self, x: torch.Tensor, chosen: torch.Tensor | None, rounding: Rounding) -> Attended:
        job = self.job
        with _outputs(self.layer.self_attn) as blocks:
            out, picked = attend(
                self.layer, x, job.model.rotary, job.chunks.queries, lambda name, rows: None, job.model.index_topk,
                chosen, rounding,
            )  # fmt: skip
        return Attended(out, picked, torch.cat(blocks))

    def _place(self, variant: int, sequence: int) -> tuple[int, int]:
        first = variant * self._all.own_tokens + sequence * self.job.seq_len
        return first, first + self.job.seq_len

    def _inputs_of(self, variant: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        work, place = self.job.work, self._place(variant, sequence)
        taken = work.chosen is not None and self._takes
        chosen = torch.from_numpy(cast(Any, work.chosen).read(*place)).to(self.job.device) if taken else None
        return work.x.load(*place), chosen

    @property
    def _takes(self) -> bool:
        """Whether another layer's indexer chooses for this one."""
        return bool(getattr(self.layer.self_attn, "skip_topk", False))

    def _keep(self, variant: int, sequence: int, found: Attended) -> None:
        work, (first, _) = self.job.work, self._place(variant, sequence)
        work.attended.store(first, found.out)
        if found.chosen is not None and work.chosen is not None and not self._takes:
            work.chosen.write(first, found.chosen.cpu().numpy())

    def _inputs(
        self, tokens: NDArray[np.int64], gates: NDArray[np.float32]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        own = self._all.own_tokens
        cuts = np.searchsorted(tokens, np.arange(own, self.job.tokens, own))
        for part, weights in zip(np.split(tokens, cuts), np.split(gates, cuts), strict=True):
            yield from super()._inputs(part, weights)


def pair_sizes(rows: torch.Tensor, half: int) -> torch.Tensor:
    """The lengths [heads, s, half] of the pairs that RoPE turned in rows [heads, s, d]: channels i and half + i, as all
    of transformers' functions leave them. A constant that was added before shows here; its mean over many angles is 0.
    """
    return torch.hypot(rows[..., :half], rows[..., half : 2 * half])


@contextmanager
def _outputs(attention: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Gathers what the module returns while it lasts, [s, hidden] of each block."""
    blocks: list[torch.Tensor] = []
    handle = attention.register_forward_hook(lambda _module, _args, out: blocks.append(out[0][0]))
    try:
        yield blocks
    finally:
        handle.remove()


def tiled(ids: NDArray[np.int32], variants: Sequence[Variant]) -> NDArray[np.int32]:
    return np.tile(ids, (len(variants), 1))

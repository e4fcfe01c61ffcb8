"""Passes of a model's layers over tokens, for one or several KV caches at once; their state lies in files without a
name."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kizami.calibration.forward.layers import embed
from kizami.calibration.forward.memory import BASE, Chunks, Sizes, choose_chunks, sizes_of
from kizami.calibration.forward.model import Model
from kizami.calibration.forward.run import PHASES, Progress, check_tokens, open_device
from kizami.calibration.forward.settings import Settings
from kizami.calibration.forward.weights import Weights
from kizami.calibration.forward.work import Work
from kizami.calibration.kv_accuracy.logits import Head, Load, band_rows
from kizami.calibration.kv_accuracy.sweep import VariantPass, VariantRun, runs_of, tiled
from kizami.calibration.kv_accuracy.variants import Variant
from kizami.calibration.machine import give_back_memory
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.files import io_error


@dataclass(frozen=True, slots=True)
class Started:
    """A pass over the layers begins: variants are its names; disk: bytes of scratch."""

    layers: int
    variants: tuple[str, ...]
    chunks: Chunks
    disk: int


@dataclass(frozen=True, slots=True)
class LayerDone:
    """local: error of each variant's attention output in this layer."""

    layer: int
    local: tuple[float, ...]


Event = Started | Progress | LayerDone
Listener = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Passes:
    """One model on ids int32 [sequences, seq_len]. scratch: where hidden states lie, None for the system's temporary
    folder. settings: `keep` has no meaning here."""

    model: Model
    weights: Weights
    ids: NDArray[np.int32]
    settings: Settings
    scratch: Path | None
    dtype: torch.dtype
    device: torch.device
    on_event: Listener

    def head(self, share: int = 2) -> Head:
        """With a `share` of the memory that is free."""
        spare = max(0, self.settings.max_memory - (BASE if self.device.type == "cpu" else 0)) // share
        return Head(self.model, self.weights, self.device, band_rows(self.model, spare))

    def layers(self, job: VariantPass) -> Iterator[VariantRun]:
        """Runs one after the other; each is whole when it is yielded."""
        total, piece = embed(job)
        for number in range(total):
            piece(number)
        for index in range(self.model.layers):
            run = VariantRun(job, index)
            for phase, step in zip(PHASES[1:], (run.attention, run.route, run.mlps, run.combine), strict=True):
                count, work = step()
                for number in range(count):
                    work(number)
                    give_back_memory()
                    self.on_event(Progress(index, phase, number + 1, count))
            run.check()
            run.check_behind()
            self.weights.check_unchanged()
            self.on_event(LayerDone(index, tuple(errors.local.relative() for errors in run.errors)))
            yield run

    def start(self, work: Work, chunks: Chunks, variants: tuple[Variant, ...], *, measured: bool) -> VariantPass:
        ids = tiled(self.ids, variants)
        names = tuple(variant.name for variant in variants)
        disk = self._sizes(len(variants), chunks).disk(self.dtype.itemsize)
        self.on_event(Started(self.model.layers, names, chunks, disk))
        return VariantPass(
            self.model, self.weights, work, ids, np.zeros(len(ids), bool), chunks, self.dtype, self.device,
            variants, measured,
        )  # fmt: skip

    def _sizes(self, copies: int, chunks: Chunks) -> Sizes:
        sizes = sizes_of(self.model, copies * len(self.ids), self.ids.shape[1], chunks.tokens)
        return replace(sizes, chunks=copies * runs_of(self.ids.size, chunks.tokens))

    @contextmanager
    def work(self, copies: int) -> Iterator[tuple[Work, Chunks]]:
        """The files of a pass's state, already without a name: the system frees them when they are closed or the
        process is gone, however it went."""
        seq_len, settings = self.ids.shape[1], self.settings
        # attention's outputs of the reference and of a variant, x of both, in float64 while they are compared
        extra = seq_len * self.model.hidden * (4 * self.dtype.itemsize + 24)
        less = replace(settings, max_memory=max(settings.max_memory - extra, 0))
        chunks = choose_chunks(self.model, copies * len(self.ids), seq_len, less, self.dtype.itemsize)
        chunks = replace(chunks, needed=chunks.needed + extra)
        sizes = self._sizes(copies, chunks)
        scratch = self.scratch
        try:
            with tempfile.TemporaryDirectory(prefix="kizami-kv-", dir=scratch, ignore_cleanup_errors=True) as folder:
                work = Work(Path(folder), sizes, self.dtype, self.device, resumed=False)
        except OSError as e:
            raise io_error("cannot make a folder for scratch", e, str(scratch or tempfile.gettempdir())) from e
        except KizamiError as e:
            hint = "choose a place with more room with --scratch DIR, or take fewer or shorter --samples"
            raise KizamiError(e.message, code=e.code, file=e.file, hint=hint) from e
        with work:
            yield work, chunks


@contextmanager
def open_passes(
    checkpoint: Checkpoint, ids: NDArray[np.int32], settings: Settings, scratch: Path | None, on_event: Listener
) -> Iterator[Passes]:
    """The model, opened and checked. ids: [sequences, seq_len]. KizamiError as Model, check_tokens and open_device."""
    device = open_device(settings.device)
    dtype = getattr(torch, settings.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    with torch.inference_mode(), Weights(checkpoint) as weights:
        model = Model(checkpoint, weights)
        model.check_head()
        check_tokens(ids, model)
        yield Passes(model, weights, ids, settings, scratch, dtype, device, on_event)


def hidden_states(job: VariantPass, variant: int) -> Load:
    begin = variant * job.own_tokens
    return lambda first, last: job.work.x.load(begin + first, begin + last)

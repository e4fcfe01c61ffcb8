"""`measure_kv_accuracy`: what FP8 in the KV cache changes, against BF16 in it."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from kizami.calibration.data.tokens import TokenSet
from kizami.calibration.forward.layers import embed
from kizami.calibration.forward.memory import BASE, Chunks, Sizes, choose_chunks, sizes_of
from kizami.calibration.forward.model import Model
from kizami.calibration.forward.run import PHASES, Progress, check_tokens, open_device
from kizami.calibration.forward.settings import Settings
from kizami.calibration.forward.weights import Weights
from kizami.calibration.forward.work import Work
from kizami.calibration.kv_accuracy.logits import Head, Load, band_rows, compare_logits
from kizami.calibration.kv_accuracy.measures import (
    Channels,
    LayerErrors,
    TokenMeasures,
    find_channels,
    rank_layers,
    skip_list,
)
from kizami.calibration.kv_accuracy.sweep import VariantPass, VariantRun, runs_of, tiled
from kizami.calibration.kv_accuracy.variants import REFERENCE, Variant, check_variant
from kizami.calibration.machine import give_back_memory
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.files import io_error

LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class Options:
    """skip: layers to measure in BF16, or None for those that stand out. scratch: where hidden states lie, None for
    the system's temporary folder. settings: of the forward pass; `keep` has no meaning here."""

    variants: tuple[Variant, ...]
    skip: tuple[int, ...] | None = None
    scratch: Path | None = None
    settings: Settings = field(default_factory=Settings)


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
class Measured:
    """One variant. layers: none for a variant with skipped layers. ranking: all layers, the most sensitive first; skip:
    those to keep in BF16; without: what that gives."""

    variant: Variant
    tokens: TokenMeasures
    layers: tuple[LayerErrors, ...]
    ranking: tuple[int, ...]
    skip: tuple[int, ...]
    without: "TokenMeasures | None"


@dataclass(frozen=True, slots=True)
class KvAccuracy:
    """channels: by layer and part of the cache, of the reference. dtype: of the pass."""

    measured: tuple[Measured, ...]
    channels: tuple[dict[str, Channels], ...]
    dtype: str
    chunks: Chunks


def measure_kv_accuracy(
    checkpoint: Checkpoint, tokens: TokenSet, options: Options, on_event: Listener = lambda event: None
) -> KvAccuracy:
    """The pass over all layers with BF16 rows in the cache and with each variant's, then the logits of all. A second
    pass measures the variants again with their sensitive layers in BF16. Nothing is left on the disk, however it ends.

    KizamiError "bad_option", "bad_kv_scales", "memory", "unsupported_model", "bad_config", "missing_tensor",
    "shape_mismatch", "unused_tensor", "bad_token", "non_finite", "bad_device", "io_error", "source_changed".
    """
    settings = options.settings
    device = open_device(settings.device)
    dtype = getattr(torch, settings.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    with torch.inference_mode(), Weights(checkpoint) as weights:
        model = Model(checkpoint, weights)
        model.check_head()
        check_tokens(tokens, model)
        for variant in options.variants:
            check_variant(replace(variant, skip=frozenset(options.skip or ())), model)
        sweep = _Sweep(model, weights, tokens, options, dtype, device, on_event)
        return sweep.measure()


class _Sweep:
    def __init__(
        self,
        model: Model,
        weights: Weights,
        tokens: TokenSet,
        options: Options,
        dtype: torch.dtype,
        device: torch.device,
        on_event: Listener,
    ) -> None:
        self._model, self._weights, self._ids, self._options = model, weights, tokens.ids, options
        self._dtype, self._device, self._on_event = dtype, device, on_event
        base = BASE if device.type == "cpu" else 0
        spare = max(0, options.settings.max_memory - base) // 2
        self._head = Head(model, weights, device, band_rows(model, spare))

    def measure(self) -> KvAccuracy:
        variants = self._options.variants
        with self._work(len(variants) + 1) as (work, chunks):
            job = self._job(work, chunks, (REFERENCE, *variants), measured=True)
            errors: list[list[LayerErrors]] = [[] for _ in variants]
            channels = []
            for run in self._layers(job):
                for of_variant, of_layer in zip(errors, run.errors, strict=True):
                    of_variant.append(of_layer)
                channels.append(_channels(run))
            reference, *loads = (_hidden(job, at) for at in range(len(job.variants)))
            found = self._compare(reference, loads)
            biased = [any(part.biased for part in layer.values()) for layer in channels]
            locals_ = [[layer.local.relative() for layer in of_variant] for of_variant in errors]
            skips = [self._skip(of_variant, biased) for of_variant in locals_]
            without = self._without(skips, reference)
        measured = tuple(
            Measured(variant, token, tuple(layers), rank_layers(local, biased), skip, other)
            for variant, token, layers, local, skip, other in zip(
                variants, found, errors, locals_, skips, without, strict=True
            )
        )
        return KvAccuracy(measured, tuple(channels), str(self._dtype).removeprefix("torch."), chunks)

    def _skip(self, errors: list[float], biased: list[bool]) -> tuple[int, ...]:
        given = self._options.skip
        return skip_list(errors, biased) if given is None else given

    def _without(self, skips: list[tuple[int, ...]], reference: Load) -> list[TokenMeasures | None]:
        """The variants again, those with layers to skip; the reference's hidden states are still there."""
        again = [at for at, skip in enumerate(skips) if skip]
        found: list[TokenMeasures | None] = [None] * len(skips)
        if not again:
            return found
        variants = tuple(self._options.variants[at].without(frozenset(skips[at])) for at in again)
        with self._work(len(variants)) as (work, chunks):
            job = self._job(work, chunks, variants, measured=False)
            for _ in self._layers(job):
                pass
            loads = [_hidden(job, at) for at in range(len(variants))]
            for at, measures in zip(again, self._compare(reference, loads), strict=True):
                found[at] = measures
        return found

    def _compare(self, reference: Load, others: list[Load]) -> tuple[TokenMeasures, ...]:
        def told(done: int, total: int) -> None:
            self._on_event(Progress(self._model.layers, LOGITS, done, total))

        return compare_logits(self._head, self._ids, reference, others, told)

    def _layers(self, job: VariantPass) -> Iterator[VariantRun]:
        """Runs one after the other; each is whole when it is yielded."""
        total, piece = embed(job)
        for number in range(total):
            piece(number)
        for index in range(self._model.layers):
            run = VariantRun(job, index)
            for phase, step in zip(PHASES[1:], (run.attention, run.route, run.mlps, run.combine), strict=True):
                count, work = step()
                for number in range(count):
                    work(number)
                    give_back_memory()
                    self._on_event(Progress(index, phase, number + 1, count))
            run.check()
            run.check_behind()
            self._weights.check_unchanged()
            self._on_event(LayerDone(index, tuple(errors.local.relative() for errors in run.errors)))
            yield run

    def _job(self, work: Work, chunks: Chunks, variants: tuple[Variant, ...], *, measured: bool) -> VariantPass:
        ids = tiled(self._ids, variants)
        names = tuple(variant.name for variant in variants)
        disk = self._sizes(len(variants), chunks).disk(self._dtype.itemsize)
        self._on_event(Started(self._model.layers, names, chunks, disk))
        return VariantPass(
            self._model, self._weights, work, ids, np.zeros(len(ids), bool), chunks, self._dtype, self._device,
            variants, measured,
        )  # fmt: skip

    def _sizes(self, copies: int, chunks: Chunks) -> Sizes:
        sizes = sizes_of(self._model, copies * len(self._ids), self._ids.shape[1], chunks.tokens)
        return replace(sizes, chunks=copies * runs_of(self._ids.size, chunks.tokens))

    @contextmanager
    def _work(self, copies: int) -> Iterator[tuple[Work, Chunks]]:
        """The files of a pass's state, already without a name: the system frees them when they are closed or the
        process is gone, however it went."""
        seq_len, settings = self._ids.shape[1], self._options.settings
        # attention's outputs of the reference and of a variant, x of both, in float64 while they are compared
        extra = seq_len * self._model.hidden * (4 * self._dtype.itemsize + 24)
        less = replace(settings, max_memory=max(settings.max_memory - extra, 0))
        chunks = choose_chunks(self._model, copies * len(self._ids), seq_len, less, self._dtype.itemsize)
        chunks = replace(chunks, needed=chunks.needed + extra)
        sizes = self._sizes(copies, chunks)
        scratch = self._options.scratch
        try:
            with tempfile.TemporaryDirectory(prefix="kizami-kv-", dir=scratch, ignore_cleanup_errors=True) as folder:
                work = Work(Path(folder), sizes, self._dtype, self._device, resumed=False)
        except OSError as e:
            raise io_error("cannot make a folder for scratch", e, str(scratch or tempfile.gettempdir())) from e
        except KizamiError as e:
            hint = "choose a place with more room with --scratch DIR, or take fewer or shorter --samples"
            raise KizamiError(e.message, code=e.code, file=e.file, hint=hint) from e
        with work:
            yield work, chunks


def _hidden(job: VariantPass, variant: int) -> Load:
    begin = variant * job.own_tokens
    return lambda first, last: job.work.x.load(begin + first, begin + last)


def _channels(run: VariantRun) -> dict[str, Channels]:
    found = {}
    for name, meter in run.meters.items():
        with np.errstate(all="ignore"):  # float32 of a sum of what is almost too large
            kv = meter.result()
            found[name] = find_channels(kv.channel_amax, kv.channel_mean, kv.channel_std)
    return found

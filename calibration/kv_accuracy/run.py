"""`measure_kv_accuracy`: what FP8 in the KV cache changes, against BF16 in it."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from kizami.calibration.data.tokens import TokenSet
from kizami.calibration.forward.memory import Chunks
from kizami.calibration.forward.run import Progress
from kizami.calibration.forward.settings import Settings
from kizami.calibration.kv_accuracy.logits import Outputs, compare_logits
from kizami.calibration.kv_accuracy.measures import (
    Channels,
    LayerErrors,
    TokenMeasures,
    find_channels,
    rank_layers,
    skip_list,
)
from kizami.calibration.kv_accuracy.passes import Listener, Passes, hidden_states, open_passes
from kizami.calibration.kv_accuracy.sweep import VariantPass, VariantRun
from kizami.calibration.kv_accuracy.variants import REFERENCE, Variant, check_variant
from kizami.formats.checkpoint import Checkpoint

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
    with open_passes(checkpoint, tokens.ids, options.settings, options.scratch, on_event) as passes:
        for variant in options.variants:
            check_variant(replace(variant, skip=frozenset(options.skip or ())), passes.model)
        return _Sweep(passes, options).measure()


class _Sweep:
    def __init__(self, passes: Passes, options: Options) -> None:
        self._passes, self._options = passes, options
        self._head = passes.head()

    def measure(self) -> KvAccuracy:
        variants = self._options.variants
        with self._passes.work(len(variants) + 1) as (work, chunks):
            job = self._passes.start(work, chunks, (REFERENCE, *variants), measured=True)
            errors: list[list[LayerErrors]] = [[] for _ in variants]
            channels = []
            for run in self._passes.layers(job):
                for of_variant, of_layer in zip(errors, run.errors, strict=True):
                    of_variant.append(of_layer)
                channels.append(_channels(run))
            reference, *loads = (self._outputs(job, at) for at in range(len(job.variants)))
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
        return KvAccuracy(measured, tuple(channels), str(self._passes.dtype).removeprefix("torch."), chunks)

    def _skip(self, errors: list[float], biased: list[bool]) -> tuple[int, ...]:
        given = self._options.skip
        return skip_list(errors, biased) if given is None else given

    def _without(self, skips: list[tuple[int, ...]], reference: Outputs) -> list[TokenMeasures | None]:
        """The variants again, those with layers to skip; the reference's hidden states are still there."""
        again = [at for at, skip in enumerate(skips) if skip]
        found: list[TokenMeasures | None] = [None] * len(skips)
        if not again:
            return found
        variants = tuple(self._options.variants[at].without(frozenset(skips[at])) for at in again)
        with self._passes.work(len(variants)) as (work, chunks):
            job = self._passes.start(work, chunks, variants, measured=False)
            for _ in self._passes.layers(job):
                pass
            loads = [self._outputs(job, at) for at in range(len(variants))]
            for at, measures in zip(again, self._compare(reference, loads), strict=True):
                found[at] = measures
        return found

    def _compare(self, reference: Outputs, others: list[Outputs]) -> tuple[TokenMeasures, ...]:
        def told(done: int, total: int) -> None:
            self._passes.on_event(Progress(self._passes.model.layers, LOGITS, done, total))

        return compare_logits(self._passes.ids, reference, others, told)

    def _outputs(self, job: VariantPass, variant: int) -> Outputs:
        return Outputs(self._head, hidden_states(job, variant))


def _channels(run: VariantRun) -> dict[str, Channels]:
    found = {}
    for name, meter in run.meters.items():
        with np.errstate(all="ignore"):  # float32 of a sum of what is almost too large
            kv = meter.result()
            found[name] = find_channels(kv.channel_amax, kv.channel_mean, kv.channel_std)
    return found

"""`--kv-scales` merged into a plan: whether the scales are those of this source, and what is written of them.

Everything fails here, before a byte is written. A cache that engines store without a scale (MLA, DSA) gets neither
tensors nor a scheme: its scales of 1.0 are recorded as a statement on its range.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError, printable
from kizami.formats.families import Family
from kizami.formats.fingerprint import config_sha256
from kizami.formats.kv_scales.effects import refusal
from kizami.formats.kv_scales.neutral import KvScales, LayerScales
from kizami.formats.kv_scales.tensors import find_prefix, kv_cache_scheme, scale_tensors
from kizami.formats.serving.model import read_model
from kizami.formats.tensors import TensorInfo, TensorSpec
from kizami.quantize.kv_scales.carried import is_kv_scale, is_scale_of_layers
from kizami.quantize.kv_scales.statement import is_uncalibrated, statement
from kizami.quantize.manifest import kv_scales_of
from kizami.quantize.plan import KvMerge, Step
from kizami.quantize.settings import Policy

SHA_SHOWN = 16


@dataclass(frozen=True, slots=True)
class KvAsked:
    """What --kv-scales and --force-kv-scales say."""

    scales: KvScales
    force: bool = False


def asked_of(manifest: Mapping[str, Any]) -> KvAsked | None:
    """What the run of `manifest` was asked for."""
    scales = kv_scales_of(manifest)
    return None if scales is None else KvAsked(scales, force=manifest["kv_scales"]["forced"] is not None)


@dataclass(frozen=True, slots=True)
class KvOutput:
    """scheme: `kv_cache_scheme` of the config, None without tensors."""

    steps: tuple[Step, ...]
    scheme: dict[str, Any] | None
    merge: KvMerge
    warnings: tuple[str, ...]


def merge_scales(
    checkpoint: Checkpoint, family: Family, policy: Policy, steps: Sequence[Step], asked: KvAsked
) -> KvOutput:
    """The plan's steps with those of the scales. Raises KizamiError `kv_scales_mismatch` for scales of something else,
    `kv_scales_refused` for what would spoil attention, `kv_scales_unplaced` where the config cannot say so."""
    scales = KvScales.parse(asked.scales.document(), "KV scales")  # as a file holds them: float32 numbers
    check_scales(checkpoint, family, scales)
    why = refusal(scales)
    if why is not None and not asked.force:
        raise KizamiError(
            why, code="kv_scales_refused", hint="leave --kv-scales out, or write them all the same: --force-kv-scales"
        )
    written: dict[str, NDArray[np.float32]] = {}
    if scales.attention == "gqa" or why is not None:
        written = tensors_of((step.module for step in steps), scales)
    if written:
        _check_place(policy, steps)
    kept, replaced = _without_scales(steps, len(scales.layers) if written else None)
    reasons = {layer.layer: scale_reason(layer) for layer in scales.layers}
    made = [_step(name, values, family, reasons) for name, values in sorted(written.items())]
    merge = KvMerge(scales.document(), statement(scales, bool(made)), why, len(made))
    scheme = kv_cache_scheme(scales) if made else None
    return KvOutput(tuple(_placed(kept, made)), scheme, merge, tuple(_warnings(scales, why, replaced, len(made))))


def check_scales(checkpoint: Checkpoint, family: Family, scales: KvScales) -> None:
    """KizamiError unless they were made from this config, as far as they say it, for all its layers and KV heads."""
    ours, model = config_sha256(checkpoint), read_model(checkpoint.config, family)
    if scales.config_sha256 not in (ours, None):
        raise _mismatch(
            f"the KV scales were made from another checkpoint: config.json {scales.config_sha256[:SHA_SHOWN]}... then, "
            f"{ours[:SHA_SHOWN]}... now"
        )
    layers = tuple(layer.layer for layer in scales.layers)
    if scales.model_type not in _model_types(checkpoint, family):
        raise _mismatch(f"the KV scales are of a {printable(scales.model_type, 40)}; the source is a {family.name}")
    if scales.architecture != model.architecture:
        theirs, expected = printable(scales.architecture, 60), printable(model.architecture, 60)
        raise _mismatch(f"the KV scales are of {theirs}; the source is {expected}")
    if scales.attention != model.attention.value:
        raise _mismatch(f"the KV scales are of {scales.attention} attention; the source has {model.attention.value}")
    if layers != tuple(range(model.layers)):
        raise _mismatch(f"the KV scales are of {len(layers)} layers; the source has {model.layers}, from 0")
    if scales.attention == "gqa" and scales.kv_heads != model.kv_heads:
        raise _mismatch(f"the KV scales are of {scales.kv_heads} KV heads; the source has {model.kv_heads}")


def _model_types(checkpoint: Checkpoint, family: Family) -> set[Any]:
    return {family.name, checkpoint.config.get("model_type"), family.text_config.get("model_type")}


def _mismatch(message: str) -> KizamiError:
    return KizamiError(message, code="kv_scales_mismatch", hint="make them with kizami kv-scales SRC, of this source")


def _check_place(policy: Policy, steps: Sequence[Step]) -> None:
    """Engines read `kv_cache_scheme` in a config of compressed-tensors only, and that describes quantized linears."""
    forms = {step.form for step in steps if step.is_linear}
    if "int4" in forms and policy.format != "pack-quantized":
        raise KizamiError(
            f"a {policy.format} config has no place for a kv_cache_scheme, and engines leave scales without one unread",
            code="kv_scales_unplaced",
            hint="use --format pack-quantized, or leave --kv-scales out",
        )
    if forms <= {"none"}:
        raise KizamiError(
            "the output has no quantized weight, so no quantization_config that a kv_cache_scheme could be in",
            code="kv_scales_unplaced",
            hint="quantize something, as --set dense_mlp=int4 does without experts, or leave --kv-scales out",
        )


def _without_scales(steps: Sequence[Step], layers: int | None) -> tuple[list[Step], int]:
    """Those of the source's first `layers` layers go: two scales for one cache would be two truths. None: all go, the
    output has no scheme that they would need."""
    names = {step.weight.name for step in steps if step.outputs}
    if layers is None:
        gone = set(filter(is_kv_scale, names))
    else:
        prefix = find_prefix(step.weight.name for step in steps)
        gone = {name for name in names if is_scale_of_layers(name, prefix, layers)}
    kept = [
        replace(step, action="drop", reason="KV scale of the source, replaced by --kv-scales", outputs=())
        if step.weight.name in gone
        else step
        for step in steps
    ]
    return kept, len(gone)


def tensors_of(names: Iterable[str], scales: KvScales) -> dict[str, NDArray[np.float32]]:
    """The tensors that these scales become in a model whose tensors or modules have these names."""
    return scale_tensors(scales, find_prefix(names))


def scale_reason(layer: LayerScales) -> str:
    """What the report says of the layer's tensors."""
    return f"FP8 KV scale, {layer.source}"


def _step(name: str, values: NDArray[np.float32], family: Family, reasons: dict[int, str]) -> Step:
    spec, place = TensorSpec(name, "F32", values.shape), family.place(name)
    reason = reasons.get(-1 if place.layer is None else place.layer, "FP8 KV scale")
    nothing = TensorInfo(name, spec.dtype, spec.shape, "", 0, 0)
    return Step(name, "kv_scale", reason, place, nothing, None, (spec,), tuple(map(float, values.ravel())))


def _placed(steps: Sequence[Step], made: Sequence[Step]) -> Iterator[Step]:
    """Each scale behind the last tensor of its attention, so that whoever reads layer by layer finds it there."""
    last = {_attention(step.module): i for i, step in enumerate(steps) if step.outputs}
    waiting: dict[int, list[Step]] = {}
    for step in made:
        waiting.setdefault(last.get(_attention(step.module), len(steps)), []).append(step)
    for i, step in enumerate(steps):
        yield step
        yield from waiting.get(i, ())
    yield from waiting.get(len(steps), ())


def _attention(name: str) -> str:
    """`model.layers.3.self_attn.`"""
    head, word, _ = name.partition(".self_attn.")
    return head + word


def _warnings(scales: KvScales, why: str | None, replaced: int, made: int) -> Iterator[str]:
    if why is not None:
        yield f"--force-kv-scales: {why}"
    if replaced:
        instead = "replaced by" if made else "left out because of"
        yield f"{replaced} KV scales of the source are {instead} --kv-scales"
    if is_uncalibrated(scales):
        yield "every KV scale is 1.0, and nothing says that it is right: not calibrated (uncalibrated)"
    flagged = [layer for layer in scales.layers if layer.findings]
    if flagged:
        first = flagged[0]
        more = f"; {len(flagged)} layers have findings" if len(flagged) > 1 else ""
        yield f"KV scales, layer {first.layer}: {printable(first.findings[0], 200)}{more}"

"""What report and model card say of an output's KV scales, in a line."""

from collections import Counter
from collections.abc import Iterable

from kizami.formats.kv_scales.neutral import KvScales, LayerScales
from kizami.quantize.kv_scales.carried import is_kv_scale
from kizami.quantize.plan import Step

NO_SCHEME = "the source's tensors, without a kv_cache_scheme: engines use 1.0"


def carries_kv_scales(steps: Iterable[Step]) -> bool:
    """Whether the output has scale tensors, copied from the source or new."""
    return any(is_kv_scale(spec.name) for step in steps for spec in step.outputs)


def statement(scales: KvScales, written: bool) -> str:
    """`61 layers, one scale per tensor: 40 certificate, 21 calibrated; K 0.25 to 1, V 0.125 to 1`. written: whether
    the output has them as tensors."""
    kind = "one scale per KV head" if scales.granularity == "attn_head" else "one scale per tensor"
    text = f"{len(scales.layers)} layers, {kind}: {_sources(scales.layers)}; {_ranges(scales)}"
    flagged = sum(bool(layer.findings) for layer in scales.layers)
    text += f"; {flagged} with findings" if flagged else ""
    if written:
        return text
    return (
        f"no tensors and no kv_cache_scheme: engines store the latent of {scales.attention.upper()} at scale 1.0. "
        f"Range statement: {text}"
    )


def _sources(layers: tuple[LayerScales, ...]) -> str:
    counts = Counter(layer.source for layer in layers)
    return ", ".join(f"{count} {source}" for source, count in counts.most_common())


def _ranges(scales: KvScales) -> str:
    k = [value for layer in scales.layers for value in layer.k]
    v = [value for layer in scales.layers for value in layer.v]
    if {*k, *v} == {1.0}:
        return "every scale is 1.0" + (", not calibrated" if is_uncalibrated(scales) else "")
    return f"K {min(k):.6g} to {max(k):.6g}, V {min(v):.6g} to {max(v):.6g}"


def is_uncalibrated(scales: KvScales) -> bool:
    """1.0 everywhere, which engines use without any, and neither a certificate nor a measurement says that it is
    right."""
    ones = all({*layer.k, *layer.v} == {1.0} for layer in scales.layers)
    return ones and all(layer.source in ("not calibrated", "carried over") for layer in scales.layers)

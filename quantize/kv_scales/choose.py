"""Which of the sources vouches for a layer's scales, in the order in which they are to be trusted.

1. certificate: weights prove that 1.0 cannot clip, whatever the input; 2. calibrated: measured by `kizami calibrate`;
3. carried over: scales that the source brings. Otherwise the layer is not calibrated, and has an engine's 1.0.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from kizami.formats.errors import KizamiError, printable
from kizami.formats.kv_scales.neutral import MAX_FINDINGS, Granularity, LayerScales
from kizami.formats.serving.model import ServedModel
from kizami.formats.statistics import KvRange, layer_file
from kizami.quantize.kv_scales.carried import Carried, spread
from kizami.quantize.kv_scales.certificate import Bound
from kizami.quantize.kv_scales.read_source import LayerSource
from kizami.quantize.kv_scales.rule import (
    E4M3_MAX,
    HEADROOM,
    PLATEAU,
    Window,
    biased_channels,
    choose_window,
    per_head,
)

Severity = Literal["clips", "flag", "note"]


@dataclass(frozen=True, slots=True)
class KvFinding:
    """clips: values were seen that the cache cannot hold at the scale that engines will use. flag: a reason to keep
    the layer's cache in BF16, or to look closer."""

    severity: Severity
    text: str


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """windows: what was measured, by `latent`, `k_pe` or `k`, `v`; per head `k[0]`, `k[1]`... amax: the largest."""

    scales: LayerScales
    bounds: tuple[Bound, ...]
    windows: Mapping[str, Window]
    findings: tuple[KvFinding, ...]

    @property
    def bound(self) -> float | None:
        values = [bound.value for bound in self.bounds]
        known = [value for value in values if value is not None]
        return max(known) if len(known) == len(values) else None

    @property
    def amax(self) -> float | None:
        return max((window.amax for window in self.windows.values()), default=None)

    @property
    def headroom(self) -> float | None:
        """How many times larger than what was measured, or than the bound where nothing was, values may become."""
        room = [E4M3_MAX * scale_of(self.scales, name) / window.amax for name, window in self.windows.items()]
        if not room and self.bound is not None:
            room = [E4M3_MAX * scale_of(self.scales, bound.what) / bound.value for bound in self.bounds if bound.value]
        return min(room, default=None)

    @property
    def clips(self) -> bool:
        return any(finding.severity == "clips" for finding in self.findings)


def scale_of(scales: LayerScales, name: str) -> float:
    """Of `v`, `k[1]`, `latent`..."""
    part, _, head = name.partition("[")
    values = scales.v if part == "v" else scales.k
    return values[int(head.rstrip("]"))] if head else min(values)


def choose_layer(
    source: LayerSource,
    kv: Mapping[str, KvRange] | None,
    model: ServedModel,
    granularity: Granularity,
    given: LayerScales | None = None,
) -> LayerChoice:
    """kv: of STATS; None without one. given: scales that are already chosen; they stay, and what is known of the layer
    is held to them. KizamiError "stats_mismatch" for ranges of another attention."""
    heads = model.kv_heads if granularity == "attn_head" else 1
    windows, findings = _windows(source.layer, kv or {}, model, heads)
    measured = _measured(windows, model, heads)
    proved = _is_proved(source.bounds, windows, findings)
    carried = source.carried
    ones = (1.0,) * heads
    if given is not None and given.source == "certificate" and not (proved and set(given.values) == {1.0}):
        scales = replace(given, source="not calibrated")
        findings.append(KvFinding("flag", "scales said to be certified: these weights give no certificate"))
    elif given is not None:
        scales = given
    elif proved and (model.is_mla or measured is None or _are_ones(measured)):
        scales = LayerScales(source.layer, ones, ones, "certificate")
    elif measured is not None:
        scales = LayerScales(source.layer, *measured, "calibrated")
    elif carried is not None and not carried.is_unity:
        scales = LayerScales(source.layer, spread(carried.k, heads), spread(carried.v, heads), "carried over")
    else:
        scales = LayerScales(source.layer, ones, ones, "not calibrated")
    findings += _of_choice(scales, windows, proved, model)
    if given is None:
        findings += _of_carried(carried, scales, windows, heads, latent=model.is_mla)
    else:
        findings += [KvFinding("flag", text) for text in given.findings]
        findings += [] if model.is_mla else _of_given(given, windows, source.bounds)
    texts = tuple(finding.text for finding in findings if finding.severity != "note")
    final = replace(scales, findings=texts[:MAX_FINDINGS])
    return LayerChoice(final, source.bounds, windows, tuple(findings))


def _windows(
    layer: int, kv: Mapping[str, KvRange], model: ServedModel, heads: int
) -> tuple[dict[str, Window], list[KvFinding]]:
    expected = (
        {"latent": model.latent, "k_pe": model.rope}
        if model.is_mla
        else {"k": model.kv_heads * model.head_dim, "v": model.kv_heads * model.head_dim}
    )
    windows: dict[str, Window] = {}
    findings: list[KvFinding] = []
    for what, channels in expected.items():
        if (found := kv.get(what)) is None:
            continue
        if len(found.channel_amax) != channels:
            raise KizamiError(
                f"STATS has {len(found.channel_amax)} channels of {what}; expected {channels}",
                code="stats_mismatch",
                file=layer_file(layer),
                hint="run kizami calibrate on this checkpoint",
            )
        figures = per_head(found, heads) if heads > 1 else [(found.amax, found.rms)]
        for head, (amax, rms) in enumerate(figures):
            window = choose_window(amax, rms)
            name = f"{what}[{head}]" if heads > 1 else what
            if window is not None:
                windows[name] = window
            else:
                why = "no value but 0 was seen" if amax == 0 else f"amax {amax:.4g} and rms {rms:.4g} contradict"
                findings.append(KvFinding("flag", f"{name}: {why}: not calibrated"))
        biased = biased_channels(found)
        if len(biased):
            findings.append(_bias(what, found, biased.tolist()))
    if unknown := kv.keys() - expected.keys():
        raise KizamiError(
            f"STATS has ranges of {printable(', '.join(sorted(unknown)), 80)}; expected {', '.join(expected)}",
            code="stats_mismatch",
            file=layer_file(layer),
            hint="run kizami calibrate on this checkpoint",
        )
    return windows, findings


def _bias(what: str, kv: KvRange, channels: list[int]) -> KvFinding:
    largest = max(channels, key=lambda channel: abs(float(kv.channel_mean[channel])))
    return KvFinding(
        "flag",
        f"{what}: {len(channels)} channels of the bias type (channel {largest}: mean {kv.channel_mean[largest]:.4g}, "
        f"std {kv.channel_std[largest]:.3g}); no scale helps: keep this layer's KV in BF16 (vLLM "
        "--kv-cache-dtype-skip-layers)",
    )


def _measured(
    windows: Mapping[str, Window], model: ServedModel, heads: int
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """K and V of the rule; None unless all parts were seen."""
    if model.is_mla:
        if len(windows) != 2:
            return None
        one = _latent_window(windows)
        return None if one is None else ((one.scale,), (one.scale,))
    if len(windows) != 2 * heads:
        return None
    k, v = (tuple(w.scale for name, w in windows.items() if name.startswith(part)) for part in ("k", "v"))
    return k, v


def _latent_window(windows: Mapping[str, Window]) -> Window | None:
    """Of one row and one scale: the larger amax, and the smaller rms of the two."""
    return choose_window(max(w.amax for w in windows.values()), min(w.rms for w in windows.values()))


def _is_proved(bounds: tuple[Bound, ...], windows: Mapping[str, Window], findings: list[KvFinding]) -> bool:
    """Whether all parts are; not where something larger than its bound was measured, and not where the bound itself
    proves that 1.0 loses precision: of what is below the plateau e4m3 keeps a few bits, or nothing."""
    proved = bool(bounds) and all(bound.proves for bound in bounds)
    for bound in bounds:
        seen = max((w.amax for name, w in windows.items() if name.split("[")[0] == bound.what), default=0.0)
        if bound.value is not None and seen > bound.value:
            other = "one of the two is not of this model"
            text = f"{bound.what}: {seen:.4g} was measured, and the weights allow {bound.value:.4g}: {other}"
            findings.append(KvFinding("flag", text))
            return False
        if bound.value is not None and bound.value < PLATEAU:
            lost = f"scale 1.0 loses precision below {PLATEAU:g}"
            findings.append(KvFinding("flag", f"{bound.what}: weights allow at most {bound.value:.3g}, and {lost}"))
            proved = False
    return proved


def _of_choice(
    scales: LayerScales, windows: Mapping[str, Window], proved: bool, model: ServedModel
) -> Iterator[KvFinding]:
    for name, window in windows.items():
        if window.is_empty:
            yield KvFinding(
                "flag",
                f"{name}: no scale has both {HEADROOM:g}x headroom (at least {window.lo:.3g}) and e4m3's full "
                f"precision (at most {window.hi:.3g}): a few values are very large; keep this layer's KV in BF16",
            )
        if not model.is_mla:
            continue
        if window.clips_unscaled:
            yield KvFinding("clips", f"{name}: {window.amax:.4g} was measured; engines store at most 448 (scale 1.0)")
        elif window.lo > 1.0 and not proved:
            yield KvFinding(
                "flag",
                f"{name}: {window.amax:.4g} was measured, {E4M3_MAX / window.amax:.2g}x below 448; engines store it at "
                f"scale 1.0, with less than {HEADROOM:g}x headroom",
            )
        if window.hi < 1.0:
            yield KvFinding("flag", f"{name}: rms {window.rms:.3g} is below {PLATEAU:g}: scale 1.0 loses precision")
    if proved and scales.source == "calibrated":
        yield KvFinding("note", "weights prove that 1.0 cannot clip, but what was measured is off e4m3's plateau there")


def _of_carried(
    carried: Carried | None, scales: LayerScales, windows: Mapping[str, Window], heads: int, *, latent: bool
) -> Iterator[KvFinding]:
    if carried is None:
        return
    if carried.is_unity:
        yield KvFinding("note", "the source's scales are 1.0, which says nothing")
        return
    for part, own in (("k", carried.k), ("v", carried.v)):
        seen = max((w.amax for name, w in windows.items() if name.split("[")[0] in (part, "latent", "k_pe")), default=0)
        if seen > E4M3_MAX * max(own):
            yield KvFinding("flag", f"{part}: {seen:.4g} was measured; the source's scale {max(own):.4g} clips it")
    if scales.source in ("certificate", "calibrated") and spread(carried.k, heads) != scales.k:
        said = f"the source's k_scale {max(carried.k):.4g}"
        if latent:  # it stays where it is, in the source
            yield KvFinding("note", f"{said} is none that engines should use: the latent is stored at 1.0")
        else:
            yield KvFinding("note", f"{said} gives way to {max(scales.k):.4g}")


def _of_given(given: LayerScales, windows: Mapping[str, Window], bounds: tuple[Bound, ...]) -> Iterator[KvFinding]:
    for name, window in windows.items():
        scale = scale_of(given, name)
        if window.amax > E4M3_MAX * scale:
            yield KvFinding("clips", f"{name}: {window.amax:.4g} was measured; at scale {scale:.4g} it is clipped")
    for bound in bounds if not windows else ():
        held = E4M3_MAX * scale_of(given, bound.what)
        if bound.value is not None and bound.value > held and set(given.values) != {1.0}:
            allowed = f"{bound.what}: the weights allow up to {bound.value:.4g}"
            yield KvFinding("flag", f"{allowed}, scales hold {held:.4g}: may clip; not measured")


def _are_ones(scales: tuple[tuple[float, ...], tuple[float, ...]]) -> bool:
    return set(scales[0] + scales[1]) == {1.0}

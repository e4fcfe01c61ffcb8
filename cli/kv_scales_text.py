"""What `kizami kv-scales` says to a reader: layers that are alike in one line, what the weights prove, the engines."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kizami.cli.output import Ui, counted

if TYPE_CHECKING:
    from kizami.quantize.kv_scales.assess import Assessment
    from kizami.quantize.kv_scales.certificate import Bound
    from kizami.quantize.kv_scales.choose import LayerChoice

MTP_SHOWN = 4
HEADS = ("layers", "source", ">scale K", ">scale V", ">bound", ">measured amax", ">headroom", "findings")


def show_kv_scales(ui: Ui, made: "Assessment", body: dict[str, Any], *, wanted: bool) -> None:
    """wanted: whether a file was asked for."""
    scales = made.scales
    ui.pairs([
        ("model", f"{scales.architecture} ({scales.model_type}), {scales.attention.upper()}"),
        ("cache", _cache(made)),
        ("calibrated", "no --stats" if made.stats_sha256 is None else f"STATS {made.stats_sha256[:16]}"),
    ])  # fmt: skip
    ui.heading("scales")
    groups = [[layer] for layer in made.layers] if ui.verbose else _alike(made.layers)
    ui.table(HEADS, [_row(group) for group in groups])
    _bounds(ui, made)
    ui.heading("what engines do with scales")
    ui.table(
        ("engine", "where", "verdict", "what happens"),
        [(e["engine"], e["form"], e["verdict"], e["text"] + _cited(ui, e["source"])) for e in body["effects"]],
    )
    if body["kv_cache_scheme"] is not None:
        ui.heading("kv_cache_scheme, for the quantization_config beside the tensors")
        ui.say(json.dumps(body["kv_cache_scheme"]))
    ui.warn([*_warnings(made), *_one_number(made, body)])
    refused = [body["refused"]] if body["refused"] is not None else []
    if not wanted:
        ui.warn(refused)
    ui.fail([*_clipped(made), *(refused if wanted else [])], shown=3)
    ui.result(_last(made, body))


def _cache(made: "Assessment") -> str:
    model = made.model
    if model.is_mla:
        return f"{model.latent} latents and {model.rope} rotated values per token, K and V in one"
    return f"K and V of {counted(model.kv_heads, 'head')} of {model.head_dim}"


def _cited(ui: Ui, source: str) -> str:
    return f" [{source}]" if ui.verbose else ""


def _alike(layers: "Sequence[LayerChoice]") -> "list[list[LayerChoice]]":
    """Those of one source and one scale together; those with findings apart by what is found."""
    groups: dict[object, list[LayerChoice]] = {}
    for layer in layers:
        kinds = tuple(_kind(finding.text) for finding in layer.findings)
        key = (layer.scales.source, layer.scales.k, layer.scales.v, kinds)
        groups.setdefault(key, []).append(layer)
    return list(groups.values())


def _kind(text: str) -> str:
    """A finding without its numbers."""
    return "".join(c for c in text if not c.isdigit() and c not in ".,-+e")


def _row(group: "list[LayerChoice]") -> tuple[str, ...]:
    scales = group[0].scales
    bounds = [layer.bound for layer in group if layer.bound is not None]
    seen = [layer.amax for layer in group if layer.amax is not None]
    room = [layer.headroom for layer in group if layer.headroom is not None]
    findings = "; ".join(finding.text for finding in group[0].findings)
    return (
        _ranges(layer.scales.layer for layer in group),
        scales.source,
        _values(scales.k),
        _values(scales.v),
        f"{max(bounds):.4g}" if bounds else "",
        f"{max(seen):.4g}" if seen else "",
        f"{min(room):.3g}x" if room else "",
        findings,
    )


def _values(values: tuple[float, ...]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g}..{high:g}"


def _ranges(layers: Iterable[int]) -> str:
    """`0-2, 5`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _bounds(ui: Ui, made: "Assessment") -> None:
    """What the weights prove, by part; the worst layer of each."""
    ui.heading("what the weights prove, for any input")
    by_part: dict[str, list[tuple[int, Bound]]] = {}
    for layer in made.layers:
        for bound in layer.bounds:
            by_part.setdefault(bound.what, []).append((layer.scales.layer, bound))
    for part, found in by_part.items():
        proved = [bound for _, bound in found if bound.proves]
        number, worst = max(found, key=lambda pair: float("inf") if pair[1].value is None else pair[1].value)
        ui.prose(f"{part}: {len(proved)} of {counted(len(found), 'layer')}; layer {number}, the worst: {worst.says}")
        low = [bound.plateau for bound in proved if bound.plateau is not None and not bound.on_plateau]
        if low:
            ui.prose(
                f"{part}: no precision is proved in {counted(len(low), 'layer')}: min |gamma| {min(low):.3g} < 0.05"
            )
        if ui.verbose:
            for number, bound in found:
                ui.prose(f"{part}, layer {number}: {bound.says}")
    for source in made.mtp if ui.verbose else made.mtp[:MTP_SHOWN]:  # real models have one; names may have thousands
        for bound in source.bounds:
            ui.prose(f"MTP layer {source.layer}, in no file of scales, {bound.what}: {bound.says}")


def _warnings(made: "Assessment") -> list[str]:
    found = []
    if made.scales.trivial:
        more = "; give --stats" if made.stats_sha256 is None else ""
        found.append(f"not calibrated: every scale is 1.0, and nothing says that it is right{more}")
    elif made.scales.uncalibrated:
        found.append(f"layers {_ranges(made.scales.uncalibrated)} are not calibrated: their 1.0 rests on nothing")
    flagged = [
        f"layer {layer.scales.layer}: {finding.text}"
        for layer in made.layers
        for finding in layer.findings
        if finding.severity == "flag"
    ]
    return found + flagged


def _one_number(made: "Assessment", body: dict[str, Any]) -> list[str]:
    """SGLang's file has one number per layer (model_loader/weight_utils.py `QuantParamSchema`)."""
    if body["format"] != "sglang" or body["refused"] is not None:
        return []
    layers = [layer.scales.layer for layer in made.layers if len(set(layer.scales.values)) > 1]
    if not layers:
        return []
    return [f"SGLang's file has one number per layer: the larger of K's and V's is written of layers {_ranges(layers)}"]


def _clipped(made: "Assessment") -> list[str]:
    return [
        f"layer {layer.scales.layer}: {finding.text}"
        for layer in made.layers
        for finding in layer.findings
        if finding.severity == "clips"
    ]


def _last(made: "Assessment", body: dict[str, Any]) -> str:
    sources = Counter(layer.scales.source for layer in made.layers)
    words = ", ".join(f"{count} {source}" for source, count in sources.most_common())
    if made.clips:
        words += "; measured values will be clipped"
    written = body["written"]
    where = f"; {written['file']} written" if written else "; nothing written" if body["refused"] else ""
    return f"{counted(len(made.layers), 'layer')}: {words}{where}"

"""What an FP8 KV cache changed: the object of `kizami kv-accuracy --json`, and the same for people."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kizami.cli.output import Ui, counted, duration, gib

if TYPE_CHECKING:
    from kizami.calibration.data.tokens import TokenSet
    from kizami.calibration.kv_accuracy.measures import LayerErrors, TokenMeasures
    from kizami.calibration.kv_accuracy.passes import Event
    from kizami.calibration.kv_accuracy.run import KvAccuracy, Measured
    from kizami.formats.checkpoint import Checkpoint

WORST_LAYERS = 8
CHANNELS_SHOWN = 8  # of one part of one layer
NOTES = (
    "the reference has BF16 rows in its cache; every query reads rounded rows, its own token's among them, as decode "
    "on an FP8 cache does; a prefill on BF16 reads none, so a prompt's own logits differ less",
    "every token is the data's (teacher forcing): how errors add up over a long answer is not seen",
    "positions are those of packed sequences: short documents follow each other in one, and attention sees them all",
    "only the cache is rounded: queries, softmax and products are not, though some FP8 kernels round them, too; "
    "nor are an indexer's keys, which servers keep in FP8 either way",
)
INT4_NOTE = "SRC's weights are INT4 in part: both sides of the comparison have them"
PLAIN_NOTE = "the weights are SRC's: what INT4 weights do is in neither side; give the INT4 checkpoint as SRC for that"
Body = dict[str, Any]


class Watch:
    """Listens to `measure_kv_accuracy`: one line per layer on stderr. needs: of the first pass."""

    def __init__(self, ui: Ui) -> None:
        self._ui, self._layers, self._passes = ui, 0, 0
        self._began = time.monotonic()
        self._bands = False
        self.needs: dict[str, int] | None = None

    def __call__(self, event: "Event") -> None:
        from kizami.calibration.forward.run import Progress
        from kizami.calibration.kv_accuracy.passes import LayerDone, Started

        match event:
            case Started():
                self._start(event)
            case LayerDone():
                now = time.monotonic()
                errors = ", ".join(f"{error:.4f}" for error in event.local)
                found = f"  local error {errors}" if errors else ""
                where = f"layer {event.layer} ({event.layer + 1} of {self._layers})"
                took, left = now - self._began, self._layers - event.layer - 1
                to_go = f", about {duration(left * took)} for the rest" if left else ""
                self._ui.progress(f"{where}{found}  {duration(took)}{to_go}")
                self._began = now
            case Progress():
                if event.layer == self._layers and not self._bands:
                    self._bands = True
                    self._ui.progress(f"logits, {counted(event.total, 'band')} of the vocabulary")

    def _start(self, event: Any) -> None:
        self._layers, self._passes, self._bands = event.layers, self._passes + 1, False
        self._began = time.monotonic()
        if self.needs is None:
            self.needs = {"scratch_bytes": event.disk, "memory_bytes": event.chunks.needed}
        what = "pass" if self._passes == 1 else "second pass, sensitive layers in BF16"
        room = f"{gib(event.disk)} of scratch, {gib(event.chunks.needed)} of memory"
        self._ui.progress(f"{what}: {', '.join(event.variants)}; {room}")


# ------------------------------------------------------------------------------------------------------------- --json


def kv_accuracy_body(checkpoint: "Checkpoint", tokens: "TokenSet", found: "KvAccuracy") -> Body:
    """KL and NLL in nats, shares from 0 to 1, errors relative."""
    from kizami.calibration.kv_accuracy.measures import buckets_of

    ranges = buckets_of(tokens.seq_len)
    return {
        "source": str(checkpoint.root),
        "tokens": {
            "sha256": tokens.sha256,
            "sequences": tokens.sequences,
            "seq_len": tokens.seq_len,
            "built_in": tokens.built_in,
            "sources": [asdict(source) for source in tokens.sources],
        },
        "dtype": found.dtype,
        "reference": "bf16",
        "variants": [_variant(measured, ranges) for measured in found.measured],
        "channels": [
            {"layer": layer, "part": part, "amax": one.amax, "amax_channel": one.amax_channel,
             "biased": [{"channel": c, "mean": mean, "std": std} for c, mean, std in one.biased]}
            for layer, parts in enumerate(found.channels) for part, one in parts.items()
        ],
        "notes": [*NOTES, INT4_NOTE if _has_int4(checkpoint) else PLAIN_NOTE],
        "warnings": list(tokens.warnings),
    }  # fmt: skip


def _has_int4(checkpoint: "Checkpoint") -> bool:
    return any(name.endswith((".weight_packed", ".qweight")) for name in checkpoint.tensors)


def _variant(measured: "Measured", ranges: Sequence[tuple[int, int]]) -> Body:
    variant = measured.variant
    scales = variant.scales
    shown = None if scales is None else {"granularity": scales.granularity, "config_sha256": scales.config_sha256}
    return {
        "name": variant.name,
        "layout": str(variant.layout),
        "scales": shown,
        **_positions(measured.tokens, ranges),
        "layers": [_layer(number, layer, ranges) for number, layer in enumerate(measured.layers)],
        "ranking": list(measured.ranking),
        "skip_layers": list(measured.skip),
        "with_skip": None if measured.without is None else _positions(measured.without, ranges),
    }


def _positions(tokens: "TokenMeasures", ranges: Sequence[tuple[int, int]]) -> Body:
    return {
        "all": asdict(tokens.bucket(0, ranges[-1][1])) | {"nll_delta_standard_error": tokens.standard_error()},
        "positions": [asdict(tokens.bucket(*at)) for at in ranges],
    }


def _layer(number: int, layer: "LayerErrors", ranges: Sequence[tuple[int, int]]) -> Body:
    return {
        "layer": number,
        "local": layer.local.relative(),
        "local_by_position": [layer.local.relative(*at) for at in ranges],
        "propagated": layer.propagated.relative(),
        "propagated_by_position": [layer.propagated.relative(*at) for at in ranges],
        "bad": layer.propagated.bad,
        "rows": {
            name: {"rmse": row.rmse, "sqnr_db": row.sqnr_db, "clipped": row.clipped, "numbers": row.count}
            for name, row in layer.rows.items()
        },
    }


def problems_of(body: Body, max_kl: float | None, min_top1: float | None, *, skip: bool) -> list[str]:
    """What does not meet the thresholds, in words. skip: hold them to the variants with skipped layers."""
    problems = []
    for variant in body["variants"]:
        if not variant["judged"]:
            continue
        judged = _judged(variant, skip=skip)
        everything = {**judged["all"], "what": "all positions"}
        for one in (everything, *({**at, "what": _range(at)} for at in judged["positions"])):
            problems += shortfalls(f"{variant['name']}, {one['what']}", one, max_kl, min_top1)
    return problems


def shortfalls(where: str, at: Body, max_kl: float | None, min_top1: float | None) -> list[str]:
    """Of the figures of a bucket; logits that are not finite meet no threshold."""
    problems = []
    if at["bad"]:
        problems.append(f"{where}: the logits of {at['bad']:,} positions are not finite")
    if max_kl is not None and at["kl_mean"] > max_kl:
        problems.append(f"{where}: mean KL {at['kl_mean']:.3g}, expected at most {max_kl:g}")
    if min_top1 is not None and at["tokens"] and at["top1"] < min_top1:
        problems.append(f"{where}: top-1 agreement {at['top1']:.4f}, expected at least {min_top1:g}")
    return problems


def _judged(variant: Body, *, skip: bool) -> Body:
    """skip: whether layers to skip were named, and with them what counts."""
    judged: Body = variant["with_skip"] if skip and variant["with_skip"] is not None else variant
    return judged


# ------------------------------------------------------------------------------------------------------------- people


def show_kv_accuracy(ui: Ui, body: Body) -> None:
    tokens = body["tokens"]
    ui.heading(f"{body['source']}: {counted(tokens['sequences'], 'sequence')} of {tokens['seq_len']:,} tokens")
    rows = []
    for variant in body["variants"]:
        rows += [_line(variant["name"], at) for at in variant["positions"]]
        if len(variant["positions"]) > 1:
            rows.append(_line(variant["name"], variant["all"], "all"))
        if variant["with_skip"] is not None:
            rows.append(_line(f"{variant['name']}, {_skipped(variant)} in BF16", variant["with_skip"]["all"], "all"))
    ui.table(("cache", ">positions", ">KL mean", ">KL p99.9", ">top-1", ">NLL delta"), rows)
    for variant in body["variants"]:
        _show_layers(ui, variant, everything=ui.verbose)
    _show_channels(ui, body["channels"])
    ui.say()
    for variant in body["variants"]:
        ui.prose(_advice(variant, body["skip"]))
    ui.say()
    for note in body["notes"]:
        ui.prose(f"note: {note}")
    ui.fail(body["problems"], 5)
    ui.result(f"{_last(body)}, {duration(body['seconds'])}")


def _last(body: Body) -> str:
    skip = isinstance(body["skip"], list)
    served = [variant for variant in body["variants"] if variant["judged"]]
    worst = max(served, key=lambda variant: _judged(variant, skip=skip)["all"]["kl_mean"])
    name, found = worst["name"], _judged(worst, skip=skip)["all"]
    name += f", {_skipped(worst)} in BF16" if skip and worst["with_skip"] is not None else ""
    return f"largest mean KL {found['kl_mean']:.3g} nats, top-1 agreement {found['top1']:.2%} ({name})"


def _line(name: str, at: Body, where: str = "") -> tuple[str, ...]:
    error = at.get("nll_delta_standard_error")
    delta = f"{at['nll_delta']:+.5f}" + (f" ± {error:.5f}" if error is not None else "")
    return name, where or _range(at), f"{at['kl_mean']:.2e}", f"{at['kl_p999']:.2e}", f"{at['top1']:.2%}", delta


def _range(at: Body) -> str:
    return f"{at['first']}-{at['last'] - 1}"


def _skipped(variant: Body) -> str:
    return f"{'layer' if len(variant['skip_layers']) == 1 else 'layers'} {', '.join(map(str, variant['skip_layers']))}"


def _show_layers(ui: Ui, variant: Body, *, everything: bool) -> None:
    order = range(len(variant["layers"])) if everything else variant["ranking"][:WORST_LAYERS]
    ui.heading(f"{variant['name']}: error of the attention's output" + ("" if everything else ", worst layers first"))
    layers = [variant["layers"][at] for at in order]
    parts = list(layers[0]["rows"])
    heads = (">layer", ">local", ">propagated", *(head for p in parts for head in (f">{p} SQNR dB", f">{p} clipped")))
    ui.table(heads, [_layer_line(layer, parts) for layer in layers])


def _layer_line(layer: Body, parts: Sequence[str]) -> tuple[str, ...]:
    cells = [str(layer["layer"]), f"{layer['local']:.4f}", f"{layer['propagated']:.4f}"]
    for part in parts:
        row = layer["rows"][part]
        cells += ["exact" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f}", f"{row['clipped']:,}"]
    return tuple(cells)


def _show_channels(ui: Ui, channels: Sequence[Body]) -> None:
    found = [one for one in channels if one["biased"]]
    if not found:
        return
    ui.heading("channels that are mostly a constant (|mean| above 8 std and above 50; pairs: as RoPE turns them)")
    rows = []
    for one in found:
        shown = ", ".join(f"{c['channel']} ({c['mean']:.4g} ± {c['std']:.3g})" for c in one["biased"][:CHANNELS_SHOWN])
        if (more := len(one["biased"]) - CHANNELS_SHOWN) > 0:
            shown += f", {more} more"
        rows.append((str(one["layer"]), one["part"], f"{one['amax']:.4g}", shown))
    ui.table((">layer", "part", ">amax", "channel (mean ± std)"), rows)


def _advice(variant: Body, asked: object) -> str:
    layers, name = variant["layers"], variant["name"]
    worst = layers[variant["ranking"][0]]
    largest = f"the largest local error is layer {worst['layer']}'s, {worst['local']:.4f}"
    if not variant["skip_layers"]:
        return f"{name}: {largest}" if asked == "none" else f"{name}: no layer stands out; {largest}"
    flag = f"--kv-cache-dtype-skip-layers {' '.join(map(str, variant['skip_layers']))}"
    before, after = variant["all"]["kl_mean"], variant["with_skip"]["all"]["kl_mean"]
    share = f"{len(variant['skip_layers'])} of {len(layers)} layers in BF16 (vLLM: {flag})"
    return f"{name}: {share}: mean KL {before:.2e} -> {after:.2e}"

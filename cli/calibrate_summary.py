"""What a calibration saw: the object of `kizami calibrate --json`, and the same for people."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kizami.cli.output import Ui, counted, duration, exact, gib
from kizami.formats.statistics import STARVED

if TYPE_CHECKING:
    from kizami.calibration.data.tokens import TokenSet
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.statistics import LayerStatistics, Statistics

SERVED = {"none": ("weighted",), "held-out": ("weighted", "report"), "all": ("weighted", "gptq", "report")}
NAMES_SHOWN = 5


def calibrate_body(checkpoint: "Checkpoint", tokens: "TokenSet", out: Path, seconds: float) -> dict[str, Any]:
    """Shares are from 0 to 1, counts of tokens are of fit tokens, sizes whole numbers of bytes."""
    from kizami.formats.families import find_family
    from kizami.formats.statistics import Statistics
    from kizami.quantize.calibrated.solver import FEWEST_HELD_OUT

    statistics = Statistics.open(out)
    family, _ = find_family(checkpoint.config, checkpoint.tensors)
    layers = [statistics.layer(layer) for layer in statistics.layers]
    places = {name: family.place(name) for name in checkpoint.tensors}
    stems = {
        place.layer: name.partition(".experts.")[0] + ".experts"
        for name, place in places.items()
        if place.layer is not None and place.role == "routed_expert"
    }
    hungry = list(_hungry(layers, stems, STARVED, "n"))
    undecided = list(_hungry(layers, stems, FEWEST_HELD_OUT, "n_held_out")) if statistics.keep == "all" else []
    mix = asdict(tokens.mix) | {"scripts": dict(tokens.mix.scripts)}
    return {
        "out": str(out),
        "source": str(checkpoint.root),
        "tokens": {
            "sha256": tokens.sha256,
            "sequences": tokens.sequences,
            "seq_len": tokens.seq_len,
            "held_out": list(tokens.held_out),
            "built_in": tokens.built_in,
            "sources": [asdict(source) for source in tokens.sources],
            "mix": mix,
        },
        "settings": dict(statistics.manifest["settings"]),
        "layers": [_layer(layer) for layer in layers],
        "experts": {
            "count": sum(len(layer.experts.n) for layer in layers if layer.experts is not None),
            "starved_below": STARVED,
            "starved": [name for name, n in hungry if n],
            "unused": [name for name, n in hungry if not n],
            "few_held_out_below": FEWEST_HELD_OUT,
            "few_held_out": [name for name, _ in undecided],
        },
        "serves": list(SERVED[statistics.keep if tokens.held_out else "none"]),
        "notes": list(statistics.manifest["notes"]),
        "kv": list(_ranges(layers)),
        "seconds": seconds,
        "bytes_read": sum(
            checkpoint.tensors[name].nbytes
            for name, place in places.items()
            if place.layer is not None and not place.in_mtp and place.role != "vision"
        ),
        "stats_bytes": _size(statistics),
        "warnings": list(tokens.warnings),
    }


def _layer(layer: "LayerStatistics") -> dict[str, Any]:
    if layer.experts is None:
        return {"layer": layer.layer, "experts": 0}
    counts = sorted(layer.experts.n.tolist())
    return {
        "layer": layer.layer,
        "experts": len(counts),
        "min": counts[0],
        "median": float(median(counts)),
        "max": counts[-1],
        "starved": sum(0 < n < STARVED for n in counts),
        "unused": counts.count(0),
    }


def _hungry(
    layers: list["LayerStatistics"], stems: Mapping[int, str], below: int, key: str
) -> Iterator[tuple[str, int]]:
    """Experts with fewer than `below` tokens, and how many. key: which ones count, n or n_held_out."""
    for layer in layers:
        if layer.experts is not None:
            for expert, n in enumerate(getattr(layer.experts, key).tolist()):
                if n < below:
                    yield f"{stems.get(layer.layer, f'layers.{layer.layer}.mlp.experts')}.{expert}", n


def _ranges(layers: list["LayerStatistics"]) -> Iterator[dict[str, Any]]:
    """Of each thing that goes into the KV cache, over all layers."""
    for what in dict.fromkeys(name for layer in layers for name in layer.kv):
        found = [(layer.layer, layer.kv[what]) for layer in layers if what in layer.kv]
        widest, most = max(found, key=lambda pair: pair[1].amax)
        yield {
            "what": what,
            "layers": len(found),
            "amax": most.amax,
            "amax_layer": widest,
            "p9999": max(kv.p9999 for _, kv in found),
            "rms": max(kv.rms for _, kv in found),
            "first_token_amax": max(kv.first_token_amax for _, kv in found),
        }


def _size(statistics: "Statistics") -> int:
    from kizami.formats.statistics import MANIFEST

    files = statistics.manifest["files"]
    return sum((statistics.root / name).stat().st_size for name in (MANIFEST, *files))


def show_calibrate(ui: Ui, body: dict[str, Any]) -> None:
    tokens, experts = body["tokens"], body["experts"]
    held_out = len(tokens["held_out"])
    ui.heading(
        f"{body['out']}: {counted(tokens['sequences'], 'sequence')} of {tokens['seq_len']:,} tokens, {held_out:,} of "
        "them held out"
    )
    ui.table(
        ("data", ">pieces", ">tokens"),
        [(source["name"], f"{source['pieces']:,}", f"{source['tokens']:,}") for source in tokens["sources"]],
    )
    ui.say()
    ui.prose(_mix_line(tokens["mix"]))
    if experts["count"]:
        ui.heading("fit tokens of each expert")
        ui.table(
            ("layer", ">experts", ">min", ">median", ">max", f">under {STARVED}", ">none"),
            [
                (str(line["layer"]), *(f"{line[key]:,.0f}" for key in _COUNTS))
                for line in body["layers"]
                if line["experts"]
            ],
        )
        ui.say()
        ui.prose(_names("experts without a token", experts["unused"]))
        ui.prose(_names(f"experts with fewer than {STARVED} tokens", experts["starved"]))
        if experts["few_held_out"]:
            what = f"experts with fewer than {experts['few_held_out_below']} held-out tokens"
            ui.prose(_names(what, experts["few_held_out"]))
            ui.prose("gptq falls back to weighted there: more --samples (and data for them) help")
    if ui.verbose:
        _show_kv(ui, body)
    ui.say()
    for note in body["notes"]:
        ui.prose(note)
    ui.say(f"weights read {exact(body['bytes_read'])}, {duration(body['seconds'])}")
    ui.say(serves_words(body["serves"], held_out))
    hungry = len(experts["unused"]) + len(experts["starved"])
    few = f"{hungry:,} of {counted(experts['count'], 'expert')} with fewer than {STARVED} tokens"
    ui.result(f"{gib(body['stats_bytes'])} of statistics, {few}")


def _show_kv(ui: Ui, body: dict[str, Any]) -> None:
    ui.heading("what goes into the KV cache, largest of all layers")
    ui.table(
        ("", ">amax", "in layer", ">99.99 % below", ">rms", ">first token"),
        [
            (kv["what"], f"{kv['amax']:.4g}", str(kv["amax_layer"]), *(f"{kv[key]:.4g}" for key in _FIGURES))
            for kv in body["kv"]
        ],
    )


def serves_words(methods: list[str], held_out: int) -> str:
    """`serves weighted and report; not gptq, which needs --keep all`. held_out: sequences."""
    if not held_out:
        return "serves weighted; no sequence was held out, which report and gptq need: give more --samples, and data"
    if "gptq" in methods:
        return "serves weighted, gptq and report"
    if "report" in methods:
        return "serves weighted and report; not gptq, which needs --keep all"
    return "serves weighted; not report, which needs --keep held-out, and not gptq, which needs --keep all"


_COUNTS = ("experts", "min", "median", "max", "starved", "unused")
_FIGURES = ("p9999", "rms", "first_token_amax")


def _mix_line(mix: dict[str, Any]) -> str:
    """`code 24 %, chats 18 %, with tool calls 12 %; letters outside code: Latin 61 %, Han 20 %`."""
    parts = f"code {mix['code']:.0%}, chats {mix['chat']:.0%}, chats with tool calls {mix['tool_calls']:.0%}"
    scripts = ", ".join(f"{script} {share:.0%}" for script, share in list(mix["scripts"].items())[:8] if share >= 0.005)
    return f"{parts}; letters outside code: {scripts or 'none'}"


def _names(what: str, names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
    return f"{what}: {len(names):,}" + (f" ({', '.join(names[:NAMES_SHOWN])}{more})" if names else "")

"""`kizami kv-accuracy`: what FP8 in the KV cache does to the model's answers, against BF16 in it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kizami.cli import calibrate_options as c
from kizami.cli import kv_accuracy_options as k
from kizami.cli import options as o
from kizami.cli.calibrate import read_data, refuse_missing_packages, refusing_out_of_memory
from kizami.cli.command import Command
from kizami.cli.output import Ui
from kizami.cli.stop import STOP
from kizami.formats.errors import KizamiError, printable

if TYPE_CHECKING:
    from kizami.calibration.kv_accuracy.variants import Variant
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.kv_scales.neutral import KvScales
    from kizami.formats.serving.model import ServedModel

LONG = 4096


def kv_accuracy(
    context: typer.Context,
    src: o.Source,
    data: c.Data = None,
    layout: k.Layouts = None,
    kv_scales: k.KvScales = None,
    skip_layers: k.SkipLayers = "auto",
    samples: k.Samples = 16,
    seq_len: k.SeqLen = None,
    seed: c.Seed = 0,
    tokenizer: c.TokenizerFolder = None,
    max_kl: k.MaxKl = None,
    min_top1: k.MinTop1 = None,
    scratch: k.Scratch = None,
    max_memory: c.MaxMemory = "2GB",
    device: c.Device = "cpu",
    dtype: c.Dtype = "auto",
    threads: c.Threads = None,
    output: o.ToFile = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Measure what an FP8 KV cache does to the next-token distribution on your data, by position and by layer.

    One pass over SRC, a layer at a time, with BF16 rows in the cache and with FP8 ones: every query reads rounded rows,
    its own among them, as in decode on an FP8 cache. FILE gets the object of --json. Scratch has no name on the disk:
    nothing stays, however the run ends, and an interrupted one starts over. Exit code 1 if a threshold is not met.
    Needs kizami's extra "calibrate".
    """
    from kizami.cli.kv_accuracy_text import problems_of, show_kv_accuracy
    from kizami.cli.source import open_source
    from kizami.cli.target import Target
    from kizami.formats.families import find_family
    from kizami.formats.fingerprint import config_sha256
    from kizami.formats.serving.model import read_model
    from kizami.quantize.threads import available_cores

    ui = Ui(quiet=quiet, verbose=verbose, json=json)
    memory = o.parse_size(max_memory, o.spelled(context, "max_memory"))
    skip = _parse_skip(skip_layers)
    refuse_missing_packages()
    checkpoint = open_source(src)
    target = None if output is None else Target.checked(output, checkpoint.root, *(data or []), *(kv_scales or []))
    served = read_model(checkpoint.config, find_family(checkpoint.config, checkpoint.tensors)[0])
    started = time.monotonic()
    with STOP.held():
        from kizami.calibration.forward.settings import Settings
        from kizami.calibration.kv_accuracy.run import Options
        from kizami.calibration.machine import use_threads

        use_threads(threads or available_cores())
    own = _own_scales(checkpoint)
    variants = read_variants(checkpoint, served, layout, kv_scales)
    if own is not None and own.attention == "gqa" and layout is None and kv_scales is None:
        variants += (scaled_variant("its own scales", own),)
    unserved = [*_unserved(variants), *_of_other_configs(variants, own, config_sha256(checkpoint))]
    ui.warn(unserved)
    with refusing_out_of_memory(max_memory, resumes=False):
        length = seq_len or min(LONG, served.context or LONG)
        tokens = read_data(ui, checkpoint, data, tokenizer, samples, length, seed)
        ui.warn(tokens.warnings)
        settings = Settings("none", device, None if dtype == "auto" else dtype, memory)
        body = _measure(ui, checkpoint, tokens, Options(variants, skip, scratch, settings))
    thresholds = {"max_kl": max_kl, "min_top1": min_top1}
    # Whoever names scales will serve those, and 1.0 is there to compare with; whoever names layouts means all.
    compared_only = layout is None and any(one.scales is not None for one in variants)
    for variant in body["variants"]:
        variant["judged"] = not (compared_only and variant["scales"] is None)
    problems = problems_of(body, max_kl, min_top1, skip=bool(skip))
    body |= {"skip": skip_layers if skip is None or not skip else list(skip)}
    body["warnings"] = [*unserved, *body["warnings"]]
    body |= {"thresholds": thresholds, "problems": problems, "ok": not problems}
    body["seconds"] = time.monotonic() - started
    _write(target, body)
    if json:
        ui.emit("kv-accuracy", body)
    else:
        show_kv_accuracy(ui, body)
    if problems:
        raise typer.Exit(1)


def _write(target: Any, body: dict[str, Any]) -> None:
    from kizami.formats.strict_json import dump_json

    if target is not None:
        target.write(dump_json({"schema": "kizami.kv-accuracy/1", **body}))


def _measure(ui: Ui, checkpoint: "Checkpoint", tokens: Any, options: Any) -> dict[str, Any]:
    from kizami.cli.kv_accuracy_text import Watch, kv_accuracy_body

    with STOP.held():
        from kizami.calibration.kv_accuracy.run import measure_kv_accuracy

    watch = Watch(ui)
    STOP.say = lambda: "interrupted; nothing is left on the disk, and the same command starts over"
    found = measure_kv_accuracy(checkpoint, tokens, options, watch)
    return kv_accuracy_body(checkpoint, tokens, found) | {"needs": watch.needs}


def read_variants(
    checkpoint: "Checkpoint", served: "ServedModel", layouts: list[str] | None, files: list[Path] | None
) -> tuple["Variant", ...]:
    """The layouts in the order in which they were named, None for all that the cache can have, then one for each
    file."""
    from kizami.calibration.kv_accuracy.variants import Variant
    from kizami.formats.serving.kv_layout import Layout, layouts_of
    from kizami.quantize.kv_scales.scale_file import read_kv_scales

    for word in layouts or ():
        if word not in (Layout.RAW, Layout.DS_MLA):
            expected = f"{Layout.RAW} or {Layout.DS_MLA}"
            raise KizamiError(f"--layout {printable(word, 60)}; expected {expected}", code="bad_option")
    chosen = layouts_of(served)[1:] if layouts is None else list(dict.fromkeys(map(Layout, layouts)))
    found = [Variant("fp8 at 1.0" if one is Layout.RAW else str(one), one) for one in chosen]
    names = [file.name for file in dict.fromkeys(files or ())]
    for file in dict.fromkeys(files or ()):
        name = file.name if names.count(file.name) == 1 else str(file)
        found.append(scaled_variant(printable(name, 80), read_kv_scales(file, checkpoint)))
    return tuple(found)


def scaled_variant(name: str, scales: "KvScales") -> "Variant":
    from kizami.calibration.kv_accuracy.variants import Variant
    from kizami.formats.serving.kv_layout import Layout

    per = "head" if scales.granularity == "attn_head" else "layer"
    return Variant(f"fp8, {name} (per {per})", Layout.RAW, scales)


def _unserved(variants: tuple["Variant", ...]) -> list[str]:
    """Scales that are measured as if engines applied them, and engines do not."""
    from kizami.formats.kv_scales.effects import refusal

    refusals = {one.name: refusal(one.scales) for one in variants if one.scales is not None}
    return [f"{name} is measured, and no engine serves it: {why}" for name, why in refusals.items() if why is not None]


def _own_scales(checkpoint: "Checkpoint") -> "KvScales | None":
    """Those that an output of kizami was written with."""
    from kizami.quantize.manifest import kv_scales_of, read_manifest

    try:
        return kv_scales_of(read_manifest(checkpoint.root))
    except KizamiError:  # of another tool, or damaged, which verify tells
        return None


def _of_other_configs(variants: tuple["Variant", ...], own: "KvScales | None", ours: str) -> list[str]:
    """No error: an INT4 output has another config.json than the source that its scales were made from."""
    others = [(one.name, one.scales.config_sha256) for one in variants if one.scales is not None and one.scales != own]
    return [
        f"{name} was made from another config.json: {theirs[:16]}... then, {ours[:16]}... now"
        for name, theirs in others
        if theirs is not None and theirs != ours
    ]


def _parse_skip(text: str) -> tuple[int, ...] | None:
    """None for auto."""
    if text in ("auto", "none"):
        return None if text == "auto" else ()
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        raise KizamiError(
            f"--skip-layers {printable(text, 60)}; expected auto, none, or layers such as 0,3,17", code="bad_option"
        )
    return tuple(dict.fromkeys(map(int, words)))


COMMAND = Command(
    "kv-accuracy",
    kv_accuracy,
    (
        "kizami kv-accuracy GLM-5.2-FP8/ --data chats.jsonl --data code.txt -o accuracy.json",
        "kizami kv-accuracy GLM-4.6-FP8/ --data mix.parquet --kv-scales scales.json",
        "kizami kv-accuracy GLM-5.2-INT4/ --data chats.jsonl --layout fp8 --max-kl 0.01 --min-top1 0.97",
    ),
)

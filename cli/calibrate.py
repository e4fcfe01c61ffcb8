"""`kizami calibrate`: a forward pass over data, straight from the checkpoint's files, and what it saw."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kizami.cli import calibrate_options as c
from kizami.cli import options as o
from kizami.cli.command import Command
from kizami.cli.output import Ui
from kizami.cli.stop import STOP
from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from kizami.calibration.data.tokens import TokenSet
    from kizami.formats.checkpoint import Checkpoint

NEEDED = {"torch": (2, 10), "transformers": (5, 24), "accelerate": (1, 10)}
FLOAT32 = {("float32", "cpu"), ("float32", "cuda"), ("auto", "cpu")}
INSTALL = "pip install 'kizami[calibrate]'"


def calibrate(
    context: typer.Context,
    src: o.Source,
    out: c.Stats,
    data: c.Data = None,
    samples: c.Samples = 128,
    seq_len: c.SeqLen = 2048,
    seed: c.Seed = 0,
    tokenizer: c.TokenizerFolder = None,
    keep: c.Keep = "held-out",
    max_memory: c.MaxMemory = "2GB",
    device: c.Device = "cpu",
    dtype: c.Dtype = "auto",
    threads: c.Threads = None,
    restart: c.Restart = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Measure what the linears of a checkpoint see on your data: what calibrated methods need.

    One layer and one expert at a time, straight from the files of SRC: no BF16 copy is written and no layer is held in
    memory. The work goes to STATS.partial; STATS appears when it is complete. The same command again resumes an
    interrupted run. Needs PyTorch, transformers and accelerate, which kizami's extra "calibrate" installs.
    """
    from kizami.cli.calibrate_summary import calibrate_body, show_calibrate
    from kizami.cli.source import open_source
    from kizami.quantize.threads import available_cores

    ui = Ui(quiet=quiet, verbose=verbose, json=json)
    memory = o.parse_size(max_memory, o.spelled(context, "max_memory"))
    refuse_missing_packages()
    checkpoint = open_source(src)
    started = time.monotonic()
    with STOP.held():
        from kizami.calibration.forward.settings import Settings
        from kizami.calibration.machine import use_threads

        use_threads(threads or available_cores())
    with refusing_out_of_memory(max_memory):
        tokens = read_data(ui, checkpoint, data, tokenizer, samples, seq_len, seed)
        settings = Settings(keep, device, None if dtype == "auto" else dtype, memory)
        tokens = _with_room(checkpoint, tokens, out, keep, 4 if (dtype, device) in FLOAT32 else 2)
        ui.warn(tokens.warnings)  # before the hours of work
        needs = _run(ui, checkpoint, tokens, out, settings, restart=restart)
    body = calibrate_body(checkpoint, tokens, out, time.monotonic() - started) | {"needs": needs}
    if json:
        ui.emit("calibrate", body)
    else:
        show_calibrate(ui, body)


def refuse_missing_packages() -> None:
    """KizamiError "missing_package" before anything is read."""
    from importlib.metadata import PackageNotFoundError, version

    problems: list[str] = []
    absent: list[str] = []
    for name, least in NEEDED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            absent.append(name)
            continue
        if _release(found) < least:
            problems.append(f"{name} {found} is older than {'.'.join(map(str, least))}")
    if absent:
        *others, last = absent
        names = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        problems.append(f"{names} not installed")
    if problems:
        raise KizamiError(", ".join(problems), code="missing_package", hint=INSTALL)


def _release(text: str) -> tuple[int, ...]:
    """(2, 13) of `2.13.0+cpu`."""
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


@contextmanager
def refusing_out_of_memory(max_memory: str, *, resumes: bool = True) -> Iterator[None]:
    from kizami.calibration.machine import is_out_of_memory

    try:
        yield
    except (MemoryError, RuntimeError) as e:
        if not is_out_of_memory(e):
            raise
        message = f"out of memory: {str(e).splitlines()[0] if str(e) else 'the system gave no more'}"
        hint = f"--max-memory is {max_memory}: give less, or run where more is free"
        hint += "; the same command resumes" if resumes else ""
        raise KizamiError(message, code="out_of_memory", hint=hint) from e


def read_data(
    ui: Ui,
    checkpoint: "Checkpoint",
    data: list[Path] | None,
    tokenizer: str | None,
    samples: int,
    seq_len: int,
    seed: int,
) -> "TokenSet":
    """Of the tokenizer's folder or id, by default SRC; without data, the built-in sample."""
    from kizami.formats.hub.cache import locate

    ui.progress("reading the data")
    with STOP.held():
        from kizami.calibration.data.tokenizer import Tokenizer
        from kizami.calibration.data.tokens import TokenSettings, read_sample, read_tokens

    opened = Tokenizer.open(checkpoint.root if tokenizer is None else locate(tokenizer))
    settings, vocabulary = TokenSettings(samples, seq_len, seed), vocabulary_of(checkpoint)
    tokens = read_tokens(data, opened, settings, vocabulary) if data else read_sample(opened, settings, vocabulary)
    return _with_lacks(checkpoint, tokens, opened.template)


def _with_lacks(checkpoint: "Checkpoint", tokens: "TokenSet", template: str) -> "TokenSet":
    """With a warning for all that the model is used for and the data lacks."""
    from dataclasses import replace

    from kizami.calibration.data.mix import lacks, read_claims

    found = lacks(tokens.mix, read_claims(checkpoint.root, template))
    return replace(tokens, warnings=(*tokens.warnings, *found))


def _with_room(checkpoint: "Checkpoint", tokens: "TokenSet", out: Path, keep: str, itemsize: int) -> "TokenSet":
    """With a warning if the disk has less room than the run will take."""
    from dataclasses import replace

    from kizami.cli.convert import free_bytes
    from kizami.cli.output import gib
    from kizami.formats.places import partial_of

    if partial_of(out, "STATS").exists():
        return tokens  # some of it is there already
    held_out = len(tokens.held_out) * tokens.seq_len
    needed = disk_bytes(_text_config(checkpoint), tokens.ids.size, held_out, keep, itemsize)
    free = free_bytes(out)
    if free >= needed:
        return tokens
    warning = f"the run will take about {gib(needed)} where {out} will be, and {gib(free)} are free"
    return replace(tokens, warnings=(*tokens.warnings, warning))


def disk_bytes(config: Mapping[str, Any], tokens: int, held_out: int, keep: str, itemsize: int) -> int:
    """What a run writes, state and result, by the numbers of config.json; those that it lacks count as 0."""

    # two hidden states, and a product of each expert and the shared one
    state = tokens * _number(config, "hidden_size") * itemsize * (_number(config, "num_experts_per_tok") + 3)
    return state + stats_bytes(config, tokens, held_out, keep)


def stats_bytes(config: Mapping[str, Any], tokens: int, held_out: int, keep: str) -> int:
    """Of the result alone."""
    hidden, layers, inner = (
        _number(config, key) for key in ("hidden_size", "num_hidden_layers", "moe_intermediate_size")
    )
    top_k, experts = _number(config, "num_experts_per_tok"), _number(config, "n_routed_experts", "num_experts")
    kept = {"none": 0, "held-out": held_out, "all": tokens}[keep]
    return layers * (kept * (2 * hidden + 8 * top_k + 1) + 4 * experts * (hidden + inner))


def _number(config: Mapping[str, Any], *names: str) -> int:
    return next((value for name in names if type(value := config.get(name)) is int and value > 0), 0)


def _text_config(checkpoint: "Checkpoint") -> Mapping[str, Any]:
    from kizami.formats.families import find_family

    return find_family(checkpoint.config, checkpoint.tensors)[0].text_config


def vocabulary_of(checkpoint: "Checkpoint") -> int:
    size = _text_config(checkpoint).get("vocab_size")
    if type(size) is not int or size < 1:
        raise KizamiError("has no vocab_size", code="bad_config", file="config.json")
    return size


def _run(
    ui: Ui, checkpoint: "Checkpoint", tokens: "TokenSet", out: Path, settings: Any, *, restart: bool
) -> dict[str, int] | None:
    """What it said that it takes; None where all was done before."""
    from kizami.cli.calibrate_watch import CalibrationWatch
    from kizami.formats.statistics import MANIFEST

    with STOP.held():
        from kizami.calibration.forward.run import run_calibration

    held_out = len(tokens.held_out) * tokens.seq_len
    foretold = stats_bytes(_text_config(checkpoint), tokens.ids.size, held_out, settings.keep)
    watch = CalibrationWatch(ui, tokens.sequences, foretold)
    before = (out / MANIFEST).exists()

    def interrupted() -> str:
        if not before and (out / MANIFEST).exists():  # STATS appears with one rename, and whole
            return f"interrupted; {out} is complete"
        return f"interrupted: run the same command again to resume; {watch.done} of {watch.of or '?'} layers are done"

    STOP.say = interrupted
    with watch:
        run_calibration(checkpoint, tokens, out, settings, watch, restart=restart)
    STOP.complete = str(out)
    return watch.needs


COMMAND = Command(
    "calibrate",
    calibrate,
    (
        "kizami calibrate GLM-5.2-FP8/ -o stats/ --data chats.jsonl --data code.txt",
        "kizami calibrate zai-org/GLM-5.2-FP8 -o stats/ --data mix.parquet --keep all",
        "kizami calibrate GLM-5.2-FP8/ -o stats/ --samples 8 --seq-len 512 --json > calibrate.json",
    ),
)

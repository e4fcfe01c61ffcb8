"""`kizami demo`: the two-minute tour, on a tiny trained model that is shipped with the program."""

import lzma
import shlex
import tarfile
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from kizami.cli import options as o
from kizami.cli.command import Command
from kizami.cli.output import Ui
from kizami.formats.errors import KizamiError

ARCHIVE = "tiny-glm-fp8.tar.xz"
# Python 3.11.2 (Debian 12) has no filters yet. The archive is ours: plain files of one folder, a test says.
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
SOURCE, RESULT = "tiny-glm-fp8", "tiny-glm-int4"
ABOUT = f"""# kizami demo

`{SOURCE}/` is a tiny GLM-5-style mixture of experts (model_type glm_moe_dsa, hidden size 256, 5 layers and an MTP
layer, 16 routed experts) with the tensor names, dtypes and FP8 layout of the published GLM-5 checkpoints: e4m3 weights
in 128x128 blocks with F32 scales.

The weights are real, not random: trained on a CPU for 1650 steps of 2048 tokens on the documentation and the standard
library of Python (Copyright Python Software Foundation; PSF licence), with a byte-level BPE of 2048 tokens. The
indexer is untrained, and the MTP layer is a copy of layer 4 with an untrained `eh_proj`. It is far too small to be
useful; it is here because error figures of trained weights mean something, and those of random weights do not.

`{RESULT}/` is what `kizami convert` made of it.
"""

Folder = Annotated[
    Path, typer.Argument(metavar="[DIR]", show_default=False, help="A folder to work in. Default: ./kizami-demo")
]


def demo(
    folder: Folder = Path("kizami-demo"),
    workers: o.Workers = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Write a tiny trained FP8 GLM, then plan, convert, verify and report on it.

    Needs no network and about 30 MB of disk. The first run compiles the kernels (a few seconds) and keeps them.
    """
    from kizami.quantize.verify import SOURCE as COMPARED

    ui = Ui(quiet=quiet, verbose=verbose, json=json)
    refuse_used(folder)
    ui.heading(f"unpacking a tiny trained GLM (FP8) into {folder / SOURCE}")
    source = unpack(folder)
    (folder / "README.md").write_text(ABOUT, encoding="utf-8")
    body = tour(ui, source, folder / RESULT, workers)
    if json:
        ui.emit("demo", {"folder": str(folder), **body})
        return
    ui.heading("next")
    ui.say(f"  {_shell('kizami report', folder / RESULT, '--format markdown')}")
    ui.say("  kizami plan SRC                     your checkpoint: exact sizes, in seconds")
    ui.say("  kizami convert SRC OUT              the real thing; run it again to resume")
    ui.say("  kizami verify OUT --against SRC     the proof")
    compared = body["verify"]["checked"][COMPARED]
    ui.result(f"demo done: {folder}, {compared:,} tensors held to the source, 0 problems")


def refuse_used(folder: Path) -> None:
    from kizami.formats.files import what_is_there

    if (there := what_is_there(folder)) is not None:
        raise KizamiError(
            f"{there}; the demo needs a new folder",
            code="out_exists",
            file=str(folder),
            hint="name another one: kizami demo DIR",
        )


def unpack(folder: Path) -> Path:
    """Writes the shipped FP8 checkpoint below `folder` and gives its path."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        files("kizami.cli").joinpath(ARCHIVE).open("rb") as packed,
        lzma.open(packed) as stream,
        tarfile.open(fileobj=stream) as archive,
    ):
        archive.extractall(folder, **SAFELY)
    return folder / SOURCE


def tour(ui: Ui, source: Path, out: Path, workers: int | None) -> dict[str, Any]:
    """plan, convert, verify, report, each under the command that does the same."""
    from kizami.cli.convert import show_convert
    from kizami.cli.convert_run import run_convert
    from kizami.cli.plan import plan_body, show_plan
    from kizami.cli.rates import COMPILE_SECONDS
    from kizami.cli.report import report_body, show_report
    from kizami.cli.verify import run_verify, show_verify, verify_body
    from kizami.cli.watch import kernels_are_cold
    from kizami.formats.checkpoint import Checkpoint
    from kizami.quantize.planner import build_plan
    from kizami.quantize.settings import Method, Policy

    checkpoint = Checkpoint.open(source)
    plan = build_plan(checkpoint, Policy(max_shard_bytes=8_000_000), Method())

    ui.heading(_shell("$ kizami plan", source, "--max-shard-size 8MB"))
    planned = plan_body(plan, None)
    show_plan(ui, plan, None, planned)

    ui.heading(_shell("$ kizami convert", source, out, "--max-shard-size 8MB"))
    if kernels_are_cold():
        ui.note(f"(the first run compiles the kernels, which takes about {COMPILE_SECONDS} s; they are kept)")
    converted = run_convert(
        ui, plan, checkpoint, out, workers=workers, again="run the `kizami convert` line above to resume"
    )
    show_convert(ui, converted, out)

    ui.heading(_shell("$ kizami verify", out, "--against", source))
    found = run_verify(ui, out, checkpoint, workers=workers)
    show_verify(ui, out, found)
    if not found.ok:
        raise typer.Exit(1)

    ui.heading(_shell("$ kizami report", out))
    reported = report_body(out, 5, None)
    show_report(ui, reported)
    return {"plan": planned, "convert": converted, "verify": verify_body(out, found), "report": reported}


def _shell(command: str, *words: str | Path) -> str:
    return " ".join([command, *(shlex.quote(str(w)) if isinstance(w, Path) else w for w in words)])


COMMAND = Command("demo", demo, ("kizami demo", "kizami demo somewhere/ --json"))

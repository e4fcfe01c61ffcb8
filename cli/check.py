"""`kizami check`: would an engine load it, and as what was meant?"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kizami.cli import options as o
from kizami.cli.command import Command
from kizami.cli.output import Ui, counted
from kizami.formats.errors import KizamiError, printable

if TYPE_CHECKING:
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.engines.check import Cell, Checker
    from kizami.formats.engines.finding import EngineName, Finding
    from kizami.formats.engines.served import Served

EngineWord = Literal["sglang", "vllm", "transformers"]
SERVER = "Where it is served"
FILES_LOOKED_AT = 2_000
ERRORS_SHOWN = 20

Folder = Annotated[
    str,
    typer.Argument(
        metavar="OUT|SRC",
        show_default=False,
        help="A checkpoint: a folder, or a Hub id (org/name or org/name@revision).",
    ),
]
Engine = Annotated[
    EngineWord | None, o.option("--engine", panel=SERVER, help="sglang, vllm or transformers. Default: all three.")
]
EngineVersion = Annotated[
    str | None,
    o.option("--engine-version", panel=SERVER, metavar="V", help="Default: the one whose sources the rules rest on."),
]
Tp = Annotated[int, o.option("--tp", panel=SERVER, metavar="N", min=1, max=1024, help="Tensor parallelism. Default 1.")]
Ep = Annotated[
    int, o.option("--ep", panel=SERVER, metavar="N", min=1, max=1024, help="Groups of experts among them. Default 1.")
]
Pp = Annotated[int, o.option("--pp", panel=SERVER, metavar="N", min=1, max=1024, help="Pipeline stages. Default 1.")]
Matrix = Annotated[
    bool, o.option("--matrix", panel=SERVER, flag=True, help="A table of TP, EP and engine: yes or why not.")
]


def check(
    context: typer.Context,
    checkpoint: Folder,
    engine: Engine = None,
    engine_version: EngineVersion = None,
    tp: Tp = 1,
    ep: Ep = 1,
    pp: Pp = 1,
    matrix: Matrix = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Say whether an engine would load a checkpoint, and as what was meant.

    Follows the engine's own reading of config and names, and its shape rules per GPU. Reads headers only, and no GPU is
    needed. An error means: does not load, or loads as something else. Exit code 1 if there is one. -v shows the public
    file that each rule rests on.
    """
    from kizami.cli.hub_source import open_headers, shown
    from kizami.formats.engines.check import Checker
    from kizami.formats.engines.finding import ENGINES

    ui = Ui(quiet=quiet, verbose=verbose, json=json)
    if engine_version is not None and engine is None:
        given = o.spelled(context, "engine_version")
        raise KizamiError(f"{given} without --engine: a version of what?", code="usage", hint="add --engine")
    opened = open_headers(ui, checkpoint)
    checker = Checker(served_from(opened, ui))
    engines: tuple[EngineName, ...] = ENGINES if engine is None else (engine,)
    results = {name: _findings(checker, name, engine_version, tp, ep, pp, asked=engine is not None) for name in engines}
    cells = checker.matrix(engines, engine_version) if matrix else None
    if json:
        ui.emit("check", check_body(shown(opened), results, engine_version, (tp, ep, pp), cells))
    else:
        _show(ui, results, engine_version, (tp, ep, pp), cells)
    if any(finding.severity == "error" for findings in results.values() for finding in findings):
        raise typer.Exit(1)


def served_from(checkpoint: "Checkpoint", ui: Ui) -> "Served":
    """The checkpoint with what its own kizami.json says about it, if it has one."""
    import os

    from kizami.formats.engines.served import Served
    from kizami.quantize.manifest import MANIFEST, read_manifest

    negative: bool | None = None
    dropped: bool | None = None
    if os.path.lexists(checkpoint.root / MANIFEST):
        try:
            manifest = read_manifest(checkpoint.root)
            negative, dropped = manifest["has_negative_scales"], manifest["policy"].get("mtp") == "drop"
        except KizamiError as e:
            ui.note(f"note: what {MANIFEST} says is left out: {e.message}")
    files = sorted(os.listdir(checkpoint.root))[:FILES_LOOKED_AT]
    return Served.of(checkpoint, files=files, has_negative_scales=negative, mtp_dropped=dropped)


def _findings(
    checker: "Checker", engine: "EngineName", version: str | None, tp: int, ep: int, pp: int, *, asked: bool
) -> list["Finding"]:
    found = checker.find(engine, version, tp=tp, ep=ep, pp=pp)
    if engine == "transformers" and asked:
        found = [*checker.ask_library(), *found]
    return found


def check_body(
    root: str,
    results: dict["EngineName", list["Finding"]],
    version: str | None,
    parallel: tuple[int, int, int],
    cells: list["Cell"] | None,
) -> dict[str, Any]:
    from kizami.formats.engines.check import rules_for
    from kizami.formats.engines.finding import READ

    return {
        "checkpoint": root,
        "parallel": dict(zip(("tp", "ep", "pp"), parallel, strict=True)),
        "ok": not any(finding.severity == "error" for found in results.values() for finding in found),
        "engines": [
            {
                "engine": engine,
                "version": version or READ[engine],
                "rules_written_for": READ[engine],
                "rules": [rule.code for rule in rules_for(engine, version or READ[engine])],
                "loads": not any(finding.severity == "error" for finding in found),
                "findings": [asdict(finding) for finding in found],
            }
            for engine, found in results.items()
        ],
        "matrix": None if cells is None else [asdict(cell) for cell in cells],
    }


def _show(
    ui: Ui,
    results: dict["EngineName", list["Finding"]],
    version: str | None,
    parallel: tuple[int, int, int],
    cells: list["Cell"] | None,
) -> None:
    from kizami.formats.engines.finding import READ

    tp, ep, pp = parallel
    for engine, found in results.items():
        ui.heading(f"{engine} {printable(version or READ[engine], 40)}, tp {tp}, ep {ep}, pp {pp}")
        for finding in found:
            _show_finding(ui, finding)
    if cells is not None:
        ui.heading("which sizes load")
        ui.table(
            ("engine", ">tp", ">ep", "loads", "why not"),
            [(cell.engine, str(cell.tp), str(cell.ep), "yes" if cell.ok else "no", cell.why or "") for cell in cells],
        )
    if ui.quiet:  # what -q leaves: errors and warnings, on stderr
        ui.warn(_lines(results, "warning"))
        ui.fail(_lines(results, "error"), ERRORS_SHOWN)
    ui.say()
    lines = [_verdict(engine, found) for engine, found in results.items()]
    if len(lines) == 1:
        ui.result(lines[0])
        return
    for line in lines:
        ui.say(line)
    ui.result("; ".join(f"{engine}: {'no' if _has_error(found) else 'yes'}" for engine, found in results.items()))


def _lines(results: dict["EngineName", list["Finding"]], severity: str) -> list[str]:
    found = (finding for findings in results.values() for finding in findings if finding.severity == severity)
    return [": ".join(filter(None, (finding.engine, finding.module, finding.message))) for finding in found]


_STYLES = {"error": "bold red", "warning": "bold yellow", "note": ""}


def _show_finding(ui: Ui, finding: "Finding") -> None:
    ui.say(f"{finding.severity}: {finding.code}", _STYLES[finding.severity])
    ui.prose(f"  {finding.message}")
    if finding.module is not None:
        more = f" and {finding.count - 1:,} more" if finding.count > 1 else ""
        ui.prose(f"  at {finding.module}{more}")
    ui.prose(f"  do: {finding.advice}")
    if ui.verbose:
        ui.prose(f"  rests on: {finding.source}")


def _has_error(found: list["Finding"]) -> bool:
    return any(finding.severity == "error" for finding in found)


def _verdict(engine: str, found: list["Finding"]) -> str:
    counts = {kind: sum(finding.severity == kind for finding in found) for kind in ("error", "warning", "note")}
    words = ", ".join(counted(count, kind) for kind, count in counts.items())
    if counts["error"]:
        return f"{engine}: does not load as meant: {words}"
    if any((finding.code, finding.severity) == ("version_not_read", "warning") for finding in found):
        return f"{engine}: not known, most rules are not of this version: {words}"
    return f"{engine}: loads, as far as config and headers tell: {words}"


COMMAND = Command(
    "check",
    check,
    (
        "kizami check GLM-5.2-INT4/ --engine sglang --tp 8",
        "kizami check moonshotai/Kimi-K2-Thinking --engine vllm --tp 16 --ep 16",
        "kizami check GLM-5.2-INT4/ --matrix",
    ),
    plans=True,
)

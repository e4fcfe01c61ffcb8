"""`kizami verify`: proof from the finished bytes."""

from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer

from kizami.cli import options as o
from kizami.cli.command import Command
from kizami.cli.output import Ui, stderr_console

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from kizami.formats.checkpoint import Checkpoint
    from kizami.quantize.verify import Problem, Verification

PROBLEMS_SHOWN = 50
LINES = 10  # progress lines where there is no terminal


def verify(
    out: o.Out,
    against: o.Against = None,
    sample: o.Sample = None,
    max_rel_error: o.MaxRelError = None,
    workers: o.Workers = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Check a finished output from its bytes. Nothing the run said is trusted.

    Hashes, structure, config rules and scales; with --against, every tensor is decoded by a second, independent
    implementation and compared with the source. Exit code 1 if anything is wrong.
    """
    from kizami.cli.source import open_source

    ui = Ui(quiet=quiet, verbose=verbose, json=json)
    source = None if against is None else open_source(against)
    found = run_verify(ui, out, source, sample=sample, max_rel_error=max_rel_error, workers=workers)
    if json:
        ui.emit("verify", verify_body(out, found))
    else:
        show_verify(ui, out, found)
    if not found.ok:
        raise typer.Exit(1)


def run_verify(
    ui: Ui,
    out: Path,
    source: "Checkpoint | None",
    *,
    sample: int | None = None,
    max_rel_error: float | None = None,
    workers: int | None = None,
) -> "Verification":
    import kizami.quantize.verify as checks

    with _Meter(ui) as meter:
        return checks.verify(
            out, against=source, sample=sample, max_rel_error=max_rel_error, workers=workers, on_progress=meter
        )


class _Meter:
    """A bar on a terminal, about ten plain lines elsewhere."""

    def __init__(self, ui: Ui) -> None:
        self.ui = ui
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> "_Meter":
        if self.ui.shows_bar:
            from rich.progress import Progress

            self._bar = Progress(console=stderr_console(), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("hashing and checking", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, of: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=of, description="comparing with the source")
        elif done == of or done % max(1, of // LINES) == 0:
            self.ui.note(f"compared {done}/{of}")


def verify_body(out: Path, found: "Verification") -> dict[str, Any]:
    return {
        "out": str(out),
        "ok": found.ok,
        "problems": [asdict(problem) for problem in found.problems],
        "checked": found.checked,
        "files": found.files,
        "tensors": found.tensors,
        "max_rel_error": found.max_rel_error,
        "worst": found.worst,
    }


def show_verify(ui: Ui, out: Path, found: "Verification") -> None:
    ui.say(f"{out}: {found.files:,} files hashed, {found.tensors:,} tensors")
    for what, count in found.checked.items():
        ui.say(f"checked {what}: {count:,}")
    shown = found.problems if ui.verbose else found.problems[:PROBLEMS_SHOWN]
    for problem in shown:
        ui.fail(_line(problem))
    if len(found.problems) > len(shown):
        ui.fail(f"and {len(found.problems) - len(shown)} more problems (-v names them all)")
    if found.worst is not None and found.max_rel_error is not None:
        ui.say(f"worst tensor: {found.worst}, relative error {found.max_rel_error:.4f}")
    count = len(found.problems)
    ui.result("verified: 0 problems" if found.ok else f"NOT verified: {count:,} problem{'s'[: count > 1]}")


def _line(problem: "Problem") -> str:
    return ": ".join(part for part in (problem.file, problem.tensor, problem.message) if part)


COMMAND = Command(
    "verify",
    verify,
    (
        "kizami verify GLM-5.2-INT4/",
        "kizami verify GLM-5.2-INT4/ --against GLM-5.2-FP8/ --max-rel-error 0.12",
        "kizami verify out/ --against src/ --sample 500 --json",
    ),
)

"""`kizami verify`: proof from the finished bytes."""

import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer

from kizami.cli import options as o
from kizami.cli.command import Command
from kizami.cli.kv_options import HeldKvScales
from kizami.cli.output import Ui, counted, stderr_console
from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.kv_scales.neutral import KvScales
    from kizami.formats.statistics import Statistics
    from kizami.quantize.verification.files import Problem
    from kizami.quantize.verify import Verification

PROBLEMS_SHOWN = 50
THRESHOLD_SHOWN = 5  # a threshold that is not met is one thing, not one per tensor
UNITS = {  # after the counts of Verification.checked
    "structure": " tensors of the output",
    "scales": " packed modules",
    "tensors against the source": " (a scale goes with its weight)",
}
LINE_EVERY = 10.0  # seconds between progress lines where there is no terminal


def verify(
    context: typer.Context,
    out: o.Out,
    against: o.Against = None,
    sample: o.Sample = None,
    stats: o.RunStats = None,
    kv_scales: HeldKvScales = None,
    max_rel_error: o.MaxRelError = None,
    workers: o.Workers = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Check a finished output from its bytes; with --against, hold everything in it to the source.

    Hashes, structure, config rules and scales. Weights are compared only with --against: every tensor is decoded by a
    second, independent implementation and held against the source. Exit code 1 if anything is wrong.
    """
    from kizami.cli.source import finished_output, open_source
    from kizami.formats.statistics import Statistics
    from kizami.quantize.verification.kv_scales import read_held

    ui = Ui(quiet=quiet, verbose=verbose, json=json)
    for name, value in (("sample", sample), ("stats", stats)):
        if value is not None and against is None:
            given = o.spelled(context, name)
            raise KizamiError(f"{given} without --against: nothing is compared", code="usage", hint="add --against SRC")
    folder = finished_output(out)
    source = None if against is None else open_source(against)
    scales = None if kv_scales is None else read_held(kv_scales, folder)
    statistics = None if stats is None else Statistics.open(stats)
    found = run_verify(
        ui,
        folder,
        source,
        statistics=statistics,
        kv_scales=scales,
        sample=sample,
        max_rel_error=max_rel_error,
        workers=workers,
    )
    of = sample and compared_tensors(folder)
    if json:
        ui.emit("verify", verify_body(folder, found, of))
    else:
        show_verify(ui, folder, found, of)
    if not found.ok:
        raise typer.Exit(1)


def run_verify(
    ui: Ui,
    out: Path,
    source: "Checkpoint | None",
    *,
    statistics: "Statistics | None" = None,
    kv_scales: "KvScales | None" = None,
    sample: int | None = None,
    max_rel_error: float | None = None,
    workers: int | None = None,
) -> "Verification":
    import kizami.quantize.verify as checks

    with _Meter(ui) as meter:
        return checks.verify(
            out,
            against=source,
            statistics=statistics,
            kv_scales=kv_scales,
            sample=sample,
            max_rel_error=max_rel_error,
            workers=workers,
            on_progress=meter,
        )


class _Meter:
    """A bar on a terminal, a plain line now and then elsewhere."""

    def __init__(self, ui: Ui) -> None:
        self.ui = ui
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._last = time.monotonic()

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
        elif time.monotonic() - self._last >= LINE_EVERY:
            self._last = time.monotonic()
            self.ui.progress(f"compared {done:,} of {of:,} tensors")


def compared_tensors(out: Path) -> int:
    """How many tensors a whole comparison has: all of the source's but scales (they go with their weights) and
    dropped ones."""
    from kizami.quantize.manifest import read_manifest

    try:
        counts: dict[str, int] = read_manifest(out)["counts"]
    except KizamiError:  # verification has said so
        return 0
    return sum(count for action, count in counts.items() if action not in ("drop", "kv_scale"))


def threshold_hint_of(out: Path, found: "Verification") -> str | None:
    """What is to be known of a threshold that is not met."""
    from kizami.quantize.manifest import read_manifest
    from kizami.quantize.report import threshold_hint

    if all(problem.code != "max_rel_error" for problem in found.problems):
        return None
    return threshold_hint(read_manifest(out)["method"])  # read without a fault: else there would be no such problem


def verify_body(out: Path, found: "Verification", sampled_from: int | None = None) -> dict[str, Any]:
    return {
        "out": str(out),
        "ok": found.ok,
        "problems": [asdict(problem) for problem in found.problems],
        "checked": found.checked,
        "sampled_from": sampled_from,
        "skipped": list(found.skipped),
        "notes": list(found.notes),
        "files": found.files,
        "tensors": found.tensors,
        "max_rel_error": found.max_rel_error,
        "worst": found.worst,
        "hint": threshold_hint_of(out, found),
    }


def show_verify(ui: Ui, out: Path, found: "Verification", sampled_from: int | None = None) -> None:
    from kizami.quantize.verify import SOURCE, STATISTICS

    compared = found.checked.get(SOURCE)
    if found.files:
        ui.say(f"{out}: {counted(found.files, 'file')} hashed")
    for what, count in found.checked.items():
        if what == STATISTICS:
            ui.say(f"statistics: {counted(count, 'module')} held to them")
            continue
        ui.say(f"checked {what}: {count:,}{UNITS.get(what, '')}")
    for what in found.skipped:
        ui.note(f"not checked after these problems: {what}")
    for note in found.notes:
        ui.note(f"note: {note}")
    over = [f"{problem.tensor}: {problem.message}" for problem in found.problems if problem.code == "max_rel_error"]
    ui.fail([_line(problem) for problem in found.problems if problem.code != "max_rel_error"], PROBLEMS_SHOWN)
    ui.fail(over, THRESHOLD_SHOWN)
    if (hint := threshold_hint_of(out, found)) is not None:
        ui.fail([hint])
    if found.worst is not None and found.max_rel_error is not None:
        by = " (as the run recorded it)" if compared is None or sampled_from else ""
        ui.prose(f"worst tensor: {found.worst}, relative error {found.max_rel_error:.4f}{by}")
    if len(over) == len(found.problems):  # a limit is no proof, and none of it
        above = f"; {counted(len(over), 'tensor')} above --max-rel-error" if over else ""
        ui.result(f"verified: {what_was_verified(compared, sampled_from, is_ours=found.files > 0)}{above}")
    else:
        ui.result(f"NOT verified: {counted(len(found.problems), 'problem')}")


def what_was_verified(compared: int | None, sampled_from: int | None, *, is_ours: bool = True) -> str:
    """No more than was really done."""
    if not is_ours:
        return "structure, scales and config rules are right, 0 problems; there is nothing to compare weights with"
    if compared is None:
        return "files and structure are intact, 0 problems; weights were not compared (--against SRC does)"
    if sampled_from and compared < sampled_from:
        return f"a sample of {compared:,} of {sampled_from:,} tensors, 0 problems"
    return f"{counted(compared, 'tensor')} held to the source, 0 problems"


def _line(problem: "Problem") -> str:
    return ": ".join(part for part in (problem.file, problem.tensor, problem.message) if part)


COMMAND = Command(
    "verify",
    verify,
    (
        "kizami verify GLM-5.2-INT4/",
        "kizami verify GLM-5.2-INT4/ --against GLM-5.2-FP8/ --max-rel-error 0.12",
        "kizami verify out/ --against src/ --stats stats/",
        "kizami verify out/ --against src/ --sample 500 --json",
    ),
)

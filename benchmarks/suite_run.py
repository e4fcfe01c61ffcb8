"""The processes of `suite.py`: makes sources, runs programs on them in turns, reads what they left.

Nothing large is imported here, and sources are made in processes of their own: the peak that Linux keeps of a child
is at least that of its parent.
"""

import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar

from suite_figures import Found, Row, Run, Yardsticks, median_yardsticks
from suite_outputs import equal_tensors, weight_bytes
from suite_plan import Case, Section, Source, total_rounds

HERE = Path(__file__).parent
T = TypeVar("T")
LINE, TAIL = 300, 3000  # most characters of a failed program's last line, and of its log
PATH = re.compile(r"""(?<![\w.])/[^\s'":]*""")


class Failed(Exception):
    """A program ended with another exit code than 0. The message has its last line, without paths of the machine; log:
    more of what it said, as it was."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True, slots=True)
class Made:
    """What a run left: its cost, bytes of weight files on both sides, mean SQNR in dB where there is a report."""

    run: Run
    source_bytes: int
    output_bytes: int
    sqnr_db: float | None


class Runner(Protocol):
    """What a section needs; tests have one that starts nothing."""

    def prepare(self, case: Case) -> None: ...
    def yardsticks(self) -> Yardsticks: ...
    def run(self, case: Case, keep: bool) -> Made: ...
    def equal(self, one: Case, other: Case) -> tuple[int, int]: ...


def measure(command: list[str], threads: int, log: Path) -> Run:
    """Run `command` to its end; rusage comes from wait4, so it is this child's alone. Failed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KIZAMI_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, as in many containers, each start compiles modules
    os.sync()  # what the program before wrote is not on this one's bill
    begin = perf_counter()
    with log.open("wb") as output:
        environment["OMP_NUM_THREADS"] = str(threads)
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:  # Ctrl-C and SIGTERM: nothing of ours goes on behind our back
            process.kill()
            process.wait()
            raise
    wall = perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise failure(process.returncode, log.read_text(errors="replace").strip())
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def failure(code: int, said: str) -> Failed:
    last = said.rpartition("\n")[2]
    return Failed(f"exit {code}: {PATH.sub('PATH', last)[:LINE]}", said[-TAIL:])


@dataclass
class Processes:
    """The Runner of a real run, in folder `work`. peer: interpreter of llm-compressor's environment."""

    work: Path
    peer: str | None
    tiny: dict[str, Source]
    yardstick_bytes: int
    made: dict[Source, Path] = field(default_factory=dict)
    warm: set[tuple[str, ...]] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of sources: no folder is used twice

    def prepare(self, case: Case) -> None:
        """Its source is there and in the page cache, its kernels are compiled: the program converts a tiny checkpoint
        first. Failed."""
        kind = (case.program, case.method, str(case.group_size), case.source.dtype)
        if kind not in self.warm:
            self._convert(case, self.source(self.tiny[case.source.dtype]))
            self.warm.add(kind)
        if not case.source.sparse:
            read_through(self.source(case.source))

    def source(self, source: Source) -> Path:
        """The folder of its checkpoint, made where it is not there yet."""
        if source not in self.made:
            folder = self.work / f"source-{next(self.numbers)}"
            command = [sys.executable, str(HERE / "synthetic_checkpoint.py"), str(folder), *source.options]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            self.made[source] = folder
        return self.made[source]

    def forget(self, needed: Iterable[Source]) -> None:
        """Remove all other sources."""
        for source in self.made.keys() - {*needed, *self.tiny.values()}:
            shutil.rmtree(self.made[source], ignore_errors=True)
            del self.made[source]

    def yardsticks(self) -> Yardsticks:
        command = [sys.executable, str(HERE / "suite_yardsticks.py"), str(self.work), str(self.yardstick_bytes)]
        return Yardsticks(**json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))

    def run(self, case: Case, keep: bool) -> Made:
        source, out = self.source(case.source), self._out(case)
        run = self._convert(case, source)
        made = Made(run, weight_bytes(source), weight_bytes(out), mean_sqnr(out))
        assert abs(made.source_bytes / case.source.nbytes - 1) < 0.05, "this is another source"
        if not keep:
            shutil.rmtree(out)
        return made

    def equal(self, one: Case, other: Case) -> tuple[int, int]:
        return equal_tensors(self._out(one), self._out(other))

    def clear(self) -> None:
        for folder in self.work.glob("out-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _out(self, case: Case) -> Path:
        return self.work / f"out-{case.program}-{case.method}"

    def _convert(self, case: Case, source: Path) -> Run:
        out = self._out(case)
        for folder in (out, out.with_name(f"{out.name}.partial")):
            shutil.rmtree(folder, ignore_errors=True)
        return measure(command(case, source, out, self.peer), case.workers, self.work / "log")


def command(case: Case, source: Path, out: Path, peer: str | None) -> list[str]:
    if case.program == "llm-compressor":
        assert peer is not None
        # -I: beside the script lies a kernels.py, which transformers would take for the package of that name.
        return [peer, "-I", str(HERE / "suite_peer.py"), str(source), str(out), str(case.group_size), case.method]
    options = {"method": case.method, "group-size": case.group_size, "workers": case.workers}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-P", "-m", "kizami.cli", "convert", str(source), str(out), *words]


def read_through(folder: Path) -> None:
    buffer = bytearray(8 << 20)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def mean_sqnr(out: Path) -> float | None:
    report = out / "kizami-report.jsonl"
    if not report.exists():
        return None
    rows: list[dict[str, Any]] = [json.loads(line) for line in report.read_text().splitlines()]
    found = [row["sqnr_db"] for row in rows if row.get("sqnr_db") is not None]
    return statistics.mean(found) if found else None  # of zeros there is no noise to speak of


def run_section(section: Section, rounds: int, runner: Runner, say: Callable[[str], None]) -> Found:
    """Cases take turns, so that a slow minute of the machine hits all of them. One that fails is not run again."""
    sticks: list[Yardsticks] = []
    made: dict[Case, list[Made]] = {case: [] for case in section.cases}
    errors: dict[Case, str] = {}
    kept = {section.cases[i] for i in section.same_bytes or ()}
    for case in section.cases:
        _attempt(errors, case, say, partial(runner.prepare, case))
    for turn in range(rounds):
        sticks.append(runner.yardsticks())
        for case in section.cases:
            if case in errors or turn >= total_rounds(case, rounds):
                continue
            if one := _attempt(errors, case, say, partial(runner.run, case, case in kept)):
                made[case].append(one)
                wall, cpu, peak = one.run.wall, one.run.cpu, one.run.peak / 1e6
                say(f"{section.name}, {case.label}: {wall:.1f} s, {cpu:.1f} CPU s, {peak:.0f} MB")
    equal = None
    if section.same_bytes and not kept & errors.keys():
        equal = runner.equal(*(section.cases[i] for i in section.same_bytes))
    rows = tuple(_row(case, made[case], errors.get(case)) for case in section.cases)
    return Found(section, median_yardsticks(sticks), rows, equal)


def _attempt(errors: dict[Case, str], case: Case, say: Callable[[str], None], work: Callable[[], T]) -> T | None:
    try:
        return work()
    except Failed as error:
        errors[case] = str(error)
        say(f"{case.label}: {error}\n{error.log}")
        return None


def _row(case: Case, made: list[Made], error: str | None) -> Row:
    if not made:
        return Row(case, case.source.nbytes, 0, (), error=error)
    last = made[-1]
    return Row(case, last.source_bytes, last.output_bytes, tuple(one.run for one in made), last.sqnr_db, error)

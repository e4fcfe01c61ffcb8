"""Faults on purpose, at every point of a conversion.

A `Bench` converts once and records the calls that concern the source, OUT and OUT.partial. `strike` runs the same
command again and lets one of them meet a fault; `cut` lays out what a disk may hold when the power fails before a
point; both then run the command once more and say what became of it. Benches live in a `workshop`: a process that has
loaded everything and has no threads, so that it can fork.
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import make_cases
import typer
from fault_calls import CHANGES, FAULTS, IN_A_CHILD, JOURNAL, NEW, OUT, PARTIAL, SOURCE, Call, Fault, Point, Tap
from fault_disk import CUTS, Disk, Tree, below, read_tree, write_tree

OPTIONS = ["--max-shard-size", "132KB", "--method", "minmax"]
SHARDS = 3  # of small() with OPTIONS


def small() -> make_cases.Checkpoint:
    made = make_cases.mini(8, 64)
    card = b"---\nlicense: mit\n---\nA card.\n"
    made.side = {"tokenizer.json": b"{}\n", "chat/template.jinja": b"{{ x }}" * 20, "README.md": card}
    return made


@dataclass(frozen=True)
class Said:
    code: int  # of a process that a signal ended: minus its number
    talk: str
    another: "Said | None" = None  # what a second process said meanwhile


@dataclass(frozen=True)
class Ended:
    """What a fault led to. `after` is the first run's end (None for a power cut), `again` what the same command did."""

    point: str
    after: Said | None
    again: Said
    out: str  # of OUT after the fault: "absent", "whole", or what is wrong with it
    temporaries: list[str]
    recorded: int  # shards that the journal has
    lost: list[str]  # those of them that were written again
    problem: str | None  # None: OUT is, in the end, what an undisturbed run gives, and the source as it was


def call_main(words: list[str]) -> Said:
    from kizami.cli.app import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as talk:
        try:
            main(words)
        except SystemExit as e:
            return Said(int(e.code or 0), talk.getvalue())
    raise AssertionError("main returned")


def in_child(work: Callable[[], Said]) -> Said:
    """`work` in a fork of this process."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = Said(255, "the child broke")
        gc.disable()
        try:
            os.close(ours)
            with contextlib.suppress(ValueError):  # forked from a thread
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            said = work()
        except _NotAllowed as e:
            said = Said(NOT_ALLOWED, str(e))
        finally:
            with os.fdopen(theirs, "wb") as pipe:
                pickle.dump(said, pipe)
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        data = pipe.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return pickle.loads(data) if data else Said(ended, "")


NOT_ALLOWED = 254


class _NotAllowed(Exception):
    pass


def _mount(place: Path, *how: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) != 0:  # CLONE_NEWNS, sched.h
        raise _NotAllowed(f"unshare: {os.strerror(ctypes.get_errno())}")
    for words in (["--make-rprivate", "/"], [*how, place]):
        done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise _NotAllowed(done.stderr.strip())


def _another(call: Callable[[], Any], args: tuple[Any, ...], real: Call) -> Any:
    """The same command, started and ended by another process before this call."""

    def work() -> "Said":
        _TAPS[0].__exit__()
        return call_main(_ANOTHER)

    _SAID.append(in_child(work))
    return call()


_ANOTHER: list[str] = []  # the command of `another convert`
_SAID: list["Said"] = []
_TAPS: list["Tap"] = []

FAULTS["another convert"] = Fault("another convert", _another)


class Bench:
    """A folder with SRC, in which OUT is made again and again. Lives in the workshop."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        self.folder = folder
        self.command = ["convert", str(folder / SOURCE), str(folder / OUT), "--workers", "1", "--quiet", *options]
        os.fsync = lambda fd: None  # a real disk is slow and proves nothing; the model knows what was asked for
        typer.main.get_command = functools.cache(typer.main.get_command)  # a third of a run of this size
        self.source = read_tree(folder, SOURCE)
        assert call_main(self.command).code == 0  # loads everything, and what a refusal needs
        assert call_main(self.command).code == 2
        self.clear()
        self.points: list[Point] = []
        self._calls: list[tuple[Any, ...]] = []
        assert self._tapped(self._record).code == 0
        self.clean = below(read_tree(folder, OUT), OUT)
        assert self.source == read_tree(folder, SOURCE)
        self.fine: dict[object, tuple[Said, list[str]]] = {}  # trees from which the command was seen to do right
        self.clear()
        first = next(p.index for p in self.points if p.call == "write" and p.target.endswith("journal.jsonl")) + 1
        self.one_shard = self.disk(first).now()
        write_tree(folder, self.one_shard)
        self.points_of_resume: list[Point] = []
        assert self._tapped(lambda point, call: self.points_of_resume.append(point)).code == 0
        self.clear()
        gc.collect()
        gc.freeze()  # children do not copy what they never touch

    def _tapped(self, after: Callable[[Point, tuple[Any, ...]], None]) -> Said:
        with Tap(self.folder, lambda point: None, after):
            return call_main(self.command)

    def _record(self, point: Point, call: tuple[Any, ...]) -> None:
        self.points.append(point)
        kept = bytes(call[1]) if point.call == "write" else call[1] if len(call) > 2 else None
        self._calls.append((call[0], kept, call[-1]))

    def clear(self) -> None:
        shutil.rmtree(self.folder / NEW, ignore_errors=True)

    def disk(self, index: int) -> Disk:
        """As it is before the call of point `index`."""
        disk = Disk()
        for point, call in zip(self.points[:index], self._calls[:index], strict=True):
            disk.apply(point, call)
        return disk

    def strike(self, fault: str, index: int, resume: bool = False) -> Ended:
        """The command meets `fault` at point `index`, in a child if it may end there; then the same command again.
        resume: it finds one shard done, and its points are those of `points_of_resume`."""
        self.clear()
        if resume:
            write_tree(self.folder, self.one_shard)
        run = self._child if fault in IN_A_CHILD else self._here
        met = run(lambda point: FAULTS[fault] if point.index == index else None)
        if fault == "SIGKILL" and index < len(self.points):
            assert read_tree(self.folder, NEW) == self.disk(index).now(), "the model of the disk is wrong"
        points = self.points_of_resume if resume else self.points
        return self._made_good(str(points[index]) if index < len(points) else "the end", met)

    def strike_all(self, fault: str, calls: Sequence[str], folders: bool = False) -> tuple[int, Ended]:
        """As `strike`, at all of these calls (`folders`: those about a folder). How many met it comes first."""
        self.clear()
        files = {point.target for point in self.points if point.call in ("create", "write")}

        def hit(point: Point) -> bool:
            return point.call in calls and point.nbytes != 1 and not (folders and point.target in files)

        met = self._here(lambda point: FAULTS[fault] if hit(point) else None)
        return sum(map(hit, self.points)), self._made_good("all", met)

    def killed_then_cut(self, index: int) -> Ended:
        """A kill at point `index`; the same command, until all shards are done; then a power cut, and the command."""
        self.clear()
        disk = self.disk(index)
        write_tree(self.folder, disk.now())

        def at(point: Point) -> Fault | None:
            return FAULTS["EIO"] if point.call == "open" and point.target.startswith(f"{SOURCE}/chat/") else None

        with Tap(self.folder, at, disk.apply):
            assert call_main(self.command).code == 2
        self.clear()
        write_tree(self.folder, disk.after_power_cut(next(iter(CUTS))))
        return self._made_good(str(self.points[index]), None)

    def mounted(self, place: str, *how: str) -> Ended | str:
        """The command in a mount namespace of its own, where `mount *how` has been done at `place`; then outside. Or
        why this machine does not allow it."""
        self.clear()
        (self.folder / NEW).mkdir()

        def work() -> Said:
            _mount(self.folder / place, *how)
            return call_main(self.command)

        met = in_child(work)
        return met.talk if met.code == NOT_ALLOWED else self._made_good(place, met)

    def on_a_small_disk(self, size: str) -> Said | str:
        """The command where OUT's disk has `size`, and said to have more; then again when room has been made. The end
        of the second run is in `another`."""
        self.clear()
        (self.folder / NEW).mkdir()

        def work() -> Said:
            _mount(self.folder / NEW, "-t", "tmpfs", "-o", f"size={size}", "none")
            shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)  # type: ignore[attr-defined]
            full = call_main(self.command)
            tree = read_tree(self.folder, NEW)
            assert OUT not in tree
            assert not [name for name in tree if name.endswith(".tmp")]
            subprocess.run(["mount", "-o", "remount,size=100m", self.folder / NEW], check=True)
            again = call_main(self.command)
            assert below(read_tree(self.folder, OUT), OUT) == self.clean
            return Said(full.code, full.talk, Said(len(_recorded(tree)), again.talk))

        met = in_child(work)
        return met.talk if met.code == NOT_ALLOWED else met

    def cut(self, kind: str, index: int) -> Ended:
        """The power fails before point `index` (or after the last one)."""
        self.clear()
        write_tree(self.folder, self.disk(index).after_power_cut(kind))
        return self._made_good(str(self.points[index]) if index < len(self.points) else "the end", None)

    def changing(self) -> list[int]:
        """Every point that follows a call which changed a name or a file."""
        return [
            point.index + 1
            for point, call in zip(self.points, self._calls, strict=True)
            if point.call in CHANGES and not isinstance(call[-1], OSError)
        ]

    def acknowledged(self, index: int) -> int:
        """Shards that the journal had taken down, with an fsync, before point `index`."""
        journal = f"{PARTIAL}/{JOURNAL}/journal.jsonl"
        return sum(point.call == "fsync" and point.target == journal for point in self.points[:index])

    def _here(self, at: Callable[[Point], Fault | None]) -> Said:
        with Tap(self.folder, at, lambda point, call: None):
            return call_main(self.command)

    def _child(self, at: Callable[[Point], Fault | None]) -> Said:
        def work() -> Said:
            with Tap(self.folder, at, lambda point, call: None) as tap:
                _ANOTHER[:], _TAPS[:] = self.command, [tap]
                said = call_main(self.command)
            return Said(said.code, said.talk, _SAID[0] if _SAID else None)

        return in_child(work)

    def _made_good(self, point: str, met: Said | None) -> Ended:
        tree = read_tree(self.folder, NEW)
        out = self._state(tree)
        temporaries = [name for name in tree if re.search(r"(^|/)\.[^/]*\.tmp$", name)]
        key = tuple(sorted((name, data and hashlib.sha1(data).digest()) for name, data in tree.items()))
        problem = None
        done = _recorded(tree)
        if key not in self.fine:
            before = {file: (self.folder / PARTIAL / file).stat().st_ino for file in done}
            again = call_main(self.command)
            lost = [file for file in done if (self.folder / OUT / file).stat().st_ino != before[file]]
            problem = self._problem(again, out)
            if problem is None:
                self.fine[key] = again, lost
        else:
            again, lost = self.fine[key]
        return Ended(point, met, again, out, temporaries, len(done), lost, problem)

    def _state(self, tree: Tree) -> str:
        """OUT appears whole, with nothing but the journal beside what belongs to it."""
        if OUT not in tree:
            return "absent"
        out = {name: data for name, data in below(tree, OUT).items() if name.split("/")[0] != JOURNAL}
        if out == self.clean:
            return "whole"
        return f"differs in {sorted(name for name in out.keys() | self.clean if out.get(name) != self.clean.get(name))}"

    def _problem(self, again: Said, out: str) -> str | None:
        now = read_tree(self.folder, NEW)
        if below(now, OUT) != self.clean:
            return f"OUT is not that of a clean run; exit {again.code}: {again.talk}"
        if PARTIAL in now:
            return f"{PARTIAL} is still there"
        if read_tree(self.folder, SOURCE) != self.source:
            return "the source has changed"
        if again.code != 0 and not (again.code == 2 and out == "whole" and "is not empty" in again.talk):
            return f"exit {again.code}: {again.talk}"
        return None


def _recorded(tree: Tree) -> list[str]:
    """Shards that the journal calls done."""
    lines = (tree.get(f"{PARTIAL}/{JOURNAL}/journal.jsonl") or b"").split(b"\n")[1:-1]
    return [json.loads(line)["file"] for line in lines if not line.startswith(b"\0")]


_BENCHES: dict[Path, Bench] = {}


def open_bench(folder: Path, options: list[str]) -> tuple[list[Point], list[Point]]:
    """The points of a run, and of one that resumes."""
    _BENCHES[folder] = Bench(folder, options)
    return _BENCHES[folder].points, _BENCHES[folder].points_of_resume


def on_bench(folder: Path, work: str, *arguments: Any) -> Any:
    """A method of the bench."""
    return getattr(_BENCHES[folder], work)(*arguments)


@contextlib.contextmanager
def workshop() -> Iterator[ProcessPoolExecutor]:
    """A process of its own, without threads, that can fork."""
    assert sys.platform == "linux"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool

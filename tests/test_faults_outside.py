"""Faults around a conversion: other processes, sources that change, clocks, permissions. And the table of faults."""

import contextlib
import errno
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import faults_table
import pytest
from case_runner import assert_refused, kizami
from fault_calls import SOURCE
from faults import OPTIONS, SHARDS, small
from output_oracle import contents

Row = Callable[[str, int | str, str], None]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real disk is slow to sync, and proves nothing here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


HELD = """
import sys, time
from kizami.quantize.run.journal import Journal
append = Journal.append
def slow(self, record):
    append(self, record)
    print("recorded", flush=True)
    time.sleep(float(sys.argv[1]))
Journal.append = slow
from kizami.cli.app import main
main(sys.argv[2:])
"""


@contextlib.contextmanager
def held(seconds: float, *words: str | Path, under: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """A real process that waits after every shard; it has recorded one."""
    command = [*under, sys.executable, "-c", HELD, str(seconds), *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "recorded\n", process.communicate()[1]
            yield process
        finally:
            process.kill()


@pytest.fixture
def clean(tmp_path: Path) -> dict[str, str]:
    """What OUT has after an undisturbed run of `command`."""
    assert kizami(*command(tmp_path, "clean")).code == 0
    return contents(tmp_path / "clean")


def command_source(folder: Path) -> Path:
    source = folder / SOURCE
    return source if source.exists() else small().save(source)


def command(folder: Path, out: str = "out") -> list[str | Path]:
    return ["convert", command_source(folder), folder / out, *OPTIONS, "--quiet"]


@pytest.mark.slow
def test_a_dead_holder_leaves_no_lock(tmp_path: Path, clean: dict[str, str], fault_row: Row) -> None:
    with held(60, *command(tmp_path)) as holder:
        assert_refused(kizami(*command(tmp_path)), ["another kizami is writing there"])
        holder.kill()
        holder.wait()
    assert kizami(*command(tmp_path)).code == 0
    assert contents(tmp_path / "out") == clean
    fault_row("a convert while another holds the lock, and after that one's SIGKILL", 2, "refused; then resumed")


@pytest.mark.long
@pytest.mark.slow
def test_of_two_processes_that_start_together_one_makes_out(
    tmp_path: Path, clean: dict[str, str], fault_row: Row
) -> None:
    start = [sys.executable, "-m", "kizami.cli", *map(str, command(tmp_path))]
    both = [subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert 0 in {process.returncode for process in both} <= {0, 2}, said
    assert contents(tmp_path / "out") == clean
    assert not (tmp_path / "out.partial").exists()
    fault_row("two processes with one `OUT`, started together", 1, "one of them makes `OUT`")


@pytest.mark.long
@pytest.mark.slow
def test_the_first_process_of_a_container_obeys_sigterm(tmp_path: Path, clean: dict[str, str], fault_row: Row) -> None:
    """The kernel drops signals to process 1 for which it has no handler."""
    under = ["unshare", "--pid", "--fork", "--mount-proc"]
    allowed = subprocess.run([*under, "true"], capture_output=True, text=True, check=False)
    if allowed.returncode != 0:
        pytest.skip(f"no PID namespace: {allowed.stderr.strip()}")
    with held(0.3, *command(tmp_path), under=under) as process:
        (pid,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(pid), signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "interrupted" in said
    assert len(said.splitlines()) == 1
    assert kizami(*command(tmp_path)).code == 0
    assert contents(tmp_path / "out") == clean
    fault_row("SIGTERM to process 1 of a PID namespace (a container)", 1, "exit code 143; then resumed")


def test_a_source_without_write_permission_is_enough(tmp_path: Path, clean: dict[str, str], fault_row: Row) -> None:
    """Permissions bind everyone but root."""
    source = tmp_path / SOURCE
    folders = [path for path in source.rglob("*") if path.is_dir()]
    for path in source.rglob("*"):
        path.chmod(0o555 if path in folders else 0o444)
    source.chmod(0o555)
    try:
        assert kizami(*command(tmp_path)).code == 0
    finally:
        for path in (source, *folders):
            path.chmod(0o755)
    assert contents(tmp_path / "out") == clean
    fault_row("source files 0444 in folders 0555", 1, "no effect")


# ---------------------------------------------------------------- a source that changes


def at_call(monkeypatch: pytest.MonkeyPatch, name: str, number: int, act: Callable[[], object]) -> None:
    """Does `act` before the `number`-th call of os.`name`."""
    real, calls = getattr(os, name), count(1)

    def wrapped(*args: Any) -> Any:
        if next(calls) == number:
            act()
        return real(*args)

    monkeypatch.setattr(os, name, wrapped)


def fail() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


WEIGHTS = "model.safetensors"


def grow(file: Path) -> None:
    with open(file, "ab") as f:
        f.write(b"x")


def touch(file: Path) -> None:
    os.utime(file, ns=(1, 1))


def change(file: Path) -> None:
    """Another last weight, with the same time."""
    status = file.stat()
    with open(file, "r+b") as f:
        f.seek(-1, os.SEEK_END)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_END)
        f.write(bytes([byte ^ 1]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def edit(file: Path) -> None:
    """One weight of the first tensors, between two of the pages that are sampled; the time tells."""
    with open(file, "r+b") as f:
        (header,) = struct.unpack("<Q", f.read(8))
        f.seek(8 + header + 6000)
        byte = f.read(1)[0]
        f.seek(8 + header + 6000)
        f.write(bytes([byte ^ 1]))
    os.utime(file, ns=(1, 1))


def replace(file: Path) -> None:
    """By a rename, with the same size and time."""
    shutil.copy2(file, file.with_name("other"))
    file.with_name("other").replace(file)


CHANGED: list[tuple[str, Callable[[Path], None], str]] = [
    ("grows", grow, "size"),
    ("is cut", lambda file: os.truncate(file, file.stat().st_size - 1), "expected"),
    ("is touched", touch, "mtime_ns"),
    ("is replaced by a rename that keeps size and time", replace, "inode"),
    ("is removed", Path.unlink, "No such file or directory"),
]


@pytest.mark.parametrize(("what", "act", "found"), CHANGED, ids=[what for what, *_ in CHANGED])
def test_weights_that_change_while_they_are_read_are_refused(
    tmp_path: Path, clean: dict[str, str], what: str, act: Callable[[Path], None], found: str, fault_row: Row
) -> None:
    weights, saved = tmp_path / SOURCE / WEIGHTS, tmp_path / "saved"
    shutil.copy2(weights, saved)
    reads = range(1, 1 + sum(point == "preadv" for point in calls_of(command(tmp_path, "counted"))))
    for number in reads:
        shutil.rmtree(tmp_path / "out.partial", ignore_errors=True)
        with pytest.MonkeyPatch.context() as patch:
            at_call(patch, "preadv", number, lambda: act(weights))
            assert_refused(kizami(*command(tmp_path)), [WEIGHTS, found])
        assert not (tmp_path / "out").exists()
        shutil.copy2(saved, weights)
    assert kizami(*command(tmp_path)).code == 0
    assert contents(tmp_path / "out") == clean
    fault_row(f"a weight file {what} before a read of a tensor", len(reads), "refused; restored: resumed")


def calls_of(words: list[str | Path]) -> list[str]:
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        real = os.preadv
        patch.setattr(os, "preadv", lambda *args: calls.append("preadv") or real(*args))
        assert kizami(*words).code == 0
    return calls


def test_weights_that_change_in_secret_are_found_by_the_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault_row: Row
) -> None:
    """The same size, time and inode, as on a file system with coarse times: only `verify --against` reads all again."""
    last_shard = 2 * SHARDS  # the journal, then each shard and its rows take their names
    at_call(monkeypatch, "replace", last_shard, lambda: change(command_source(tmp_path) / WEIGHTS))
    assert kizami(*command(tmp_path)).code == 0
    assert kizami("verify", tmp_path / "out").code == 0
    assert kizami("verify", tmp_path / "out", "--against", tmp_path / SOURCE).code == 1
    fault_row("a weight changes after it was read; size, time and inode stay", 1, "found by `verify --against` only")


def test_a_source_that_changed_is_never_mixed_with_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault_row: Row
) -> None:
    """Too small a change for the sampled pages to differ is still a newer file: its shards are made anew."""
    weights = command_source(tmp_path) / WEIGHTS
    assert kizami(*command(tmp_path, "before")).code == 0
    at_call(monkeypatch, "replace", 4, lambda: edit(weights))  # the second shard; the first is in the journal
    assert_refused(kizami(*command(tmp_path)), [WEIGHTS, "mtime_ns"])
    assert kizami(*command(tmp_path)).code == 0
    assert kizami(*command(tmp_path, "clean")).code == 0
    first = f"model-00001-of-{SHARDS:05d}.safetensors"
    assert contents(tmp_path / "before")[first] != contents(tmp_path / "clean")[first]
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")
    fault_row("a weight changes during a run, with a new time", 1, "refused; then all of it is made anew")


@pytest.mark.parametrize(
    ("what", "act", "says"),
    [
        ("vanishes", Path.unlink, "not found"),
        ("grows while it is copied", grow, "bytes, expected"),
        ("is cut while it is copied", lambda file: os.truncate(file, 1), "bytes, expected"),
    ],
)
def test_a_side_file_that_changes_is_refused(
    tmp_path: Path,
    clean: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    act: Callable[[Path], None],
    says: str,
    fault_row: Row,
) -> None:
    file = tmp_path / SOURCE / "chat" / "template.jinja"
    data = file.read_bytes()
    name, number = ("preadv", 1) if what == "vanishes" else ("read", 1)
    at_call(monkeypatch, name, number, lambda: act(file))
    assert_refused(kizami(*command(tmp_path)), ["chat/template.jinja", says])
    file.write_bytes(data)
    assert kizami(*command(tmp_path)).code == 0
    assert contents(tmp_path / "out") == clean
    fault_row(f"a side file {what}", 1, "refused; restored: resumed")


# ---------------------------------------------------------------- clocks


@pytest.mark.parametrize("jump", [1e9, -1e9, 3600.0, -3600.0])
def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, clean: dict[str, str], monkeypatch: pytest.MonkeyPatch, jump: float, fault_row: Row
) -> None:
    for name in ("time", "monotonic"):
        real, ticks = getattr(time, name), count()
        monkeypatch.setattr(time, name, lambda real=real, ticks=ticks: real() + jump * (next(ticks) % 2))
    at_call(monkeypatch, "replace", 4, fail)
    assert_refused(kizami(*command(tmp_path)), ["Input/output error"])
    assert kizami(*[word for word in command(tmp_path) if word != "--quiet"], "-v").code == 0
    assert contents(tmp_path / "out") == clean
    fault_row(f"both clocks jump by {jump:+.0f} s and back at every reading", 1, "no effect")


@pytest.mark.parametrize("year", [1, 1960, 2200])
def test_times_of_files_may_be_anything(tmp_path: Path, clean: dict[str, str], year: int, fault_row: Row) -> None:
    then = (year - 1970) * 31_556_952
    for path in (tmp_path / SOURCE).rglob("*"):
        os.utime(path, (then, then))
    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, "replace", 4, fail)
        assert_refused(kizami(*command(tmp_path)), ["Input/output error"])
    for path in (tmp_path / "out.partial").rglob("*"):
        os.utime(path, (then, then))
    assert kizami(*command(tmp_path)).code == 0
    assert contents(tmp_path / "out") == clean
    fault_row(f"all files are of the year {year}", 1, "no effect")


# ---------------------------------------------------------------- the script and the table


@pytest.mark.slow
@pytest.mark.long
def test_the_script_that_kills_at_random_finds_no_difference(
    tiny_checkpoint: Path, tmp_path: Path, fault_row: Row
) -> None:
    script = faults_table.ROOT / "benchmarks" / "kill_rounds.py"
    words = [tmp_path, "--source", tiny_checkpoint, "--max-shard-size", "300KB", "--rounds", "5"]
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 rounds" in done.stdout
    fault_row("`benchmarks/kill_rounds.py`: real processes killed at random moments", 5, "resumed")


def test_the_table_of_faults_is_that_of_this_run(request: pytest.FixtureRequest) -> None:
    """Runs last, see conftest.py. `--rewrite-faults-table` writes docs/faults.md."""
    faults_table.hold(request.config.option, request.config.args)

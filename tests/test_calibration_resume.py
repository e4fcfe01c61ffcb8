"""Runs that end in the middle: killed, cut off, refused by the disk. What comes out at last has the same bytes."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

import numpy as np
import torch
from calibration_runs import Cuts, PowerCut, calibrate, count_events, hashes, lines_every, random_tokens, with_cuts
from client_models import fp8_model

from kizami.calibration.data.tokens import TokenSet
from kizami.calibration.forward import run as run_module
from kizami.calibration.forward.journal import Journal
from kizami.calibration.forward.run import Progress, Started, run_calibration
from kizami.calibration.forward.settings import Settings
from kizami.calibration.forward.state import RowFile
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError

SETTINGS = Settings(keep="all", token_chunk=32, query_block=16)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fp8_model("glm4_moe", tmp_path_factory.mktemp("resume") / "src")


@pytest.fixture(scope="module")
def tokens(source: Path) -> TokenSet:
    return random_tokens(source, 3, 32)


@pytest.fixture(scope="module")
def whole(source: Path, tokens: TokenSet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole") / "stats"
    calibrate(source, tokens, out, SETTINGS)
    return hashes(out)


def end_after(source: Path, tokens: TokenSet, out: Path, events: int, settings: Settings = SETTINGS) -> None:
    def count(_: object) -> None:
        seen.append(None)
        if len(seen) == events:
            raise PowerCut

    seen: list[None] = []
    with pytest.raises(PowerCut):
        run_calibration(Checkpoint.open(source), tokens, out, settings, count)


@pytest.mark.parametrize(
    "seconds", [pytest.param(0.0, marks=pytest.mark.long), 0.01, pytest.param(1e9, marks=pytest.mark.long)]
)
def test_a_run_cut_off_anywhere_gives_the_same_bytes(
    seconds: float, source: Path, tokens: TokenSet, whole: dict[str, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rows that no journal line vouches for may be lost or garbage."""
    lines_every(monkeypatch, seconds)
    rng = np.random.default_rng(int(seconds * 100) % 97)
    events = count_events(source, tokens, tmp_path / "stats", SETTINGS)
    ended = with_cuts(source, tokens, tmp_path / "again", SETTINGS, Cuts(monkeypatch, rng), rng, events)
    assert ended > 0
    assert hashes(tmp_path / "again") == hashes(tmp_path / "stats") == whole


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.0, 0.01, 1e9])
@pytest.mark.parametrize(("name", "seq_len"), [("trained", 48), ("glm_moe_dsa", 150), ("deepseek_v32", 150)])
def test_runs_of_every_kind_cut_off_anywhere_give_the_same_bytes(
    name: str, seq_len: int, seconds: float, demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines_every(monkeypatch, seconds)
    source = demo_checkpoint if name == "trained" else fp8_model(name, tmp_path / "src")
    tokens, rng = random_tokens(source, 4, seq_len), np.random.default_rng(seq_len)
    events = count_events(source, tokens, tmp_path / "whole", SETTINGS)
    cuts = Cuts(monkeypatch, rng)
    ended = 0
    for round_ in range(6):
        out = tmp_path / f"stats{round_}"
        ended += with_cuts(source, tokens, out, SETTINGS, cuts, rng, events)
        assert hashes(out) == hashes(tmp_path / "whole"), round_
    assert ended >= 6


KILLED = """
import sys, numpy as np, torch
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from calibration_runs import random_tokens
from kizami.calibration.forward import journal
from kizami.calibration.forward.run import run_calibration
from kizami.calibration.forward.settings import Settings
from kizami.formats.checkpoint import Checkpoint
torch.set_num_threads(1)
journal.EVERY = 0.1
source, out = Path(sys.argv[1]), Path(sys.argv[2])
settings = Settings(keep="all", token_chunk=32, query_block=16)
tokens = random_tokens(source, 6, 96)
print("ready", flush=True)
run_calibration(Checkpoint.open(source), tokens, out, settings)
"""


@pytest.mark.long
def test_a_process_killed_at_any_time_goes_on_where_it_was(demo_checkpoint: Path, tmp_path: Path) -> None:
    tokens = random_tokens(demo_checkpoint, 6, 96)
    begin = time.monotonic()
    calibrate(demo_checkpoint, tokens, tmp_path / "whole", SETTINGS)
    takes, rng, killed = time.monotonic() - begin, np.random.default_rng(5), 0
    for round_ in range(2):
        out, ended = tmp_path / f"stats{round_}", False
        while not ended:  # a kill behind the rename leaves a journal in STATS, which the next run removes
            command = [sys.executable, "-c", KILLED, str(demo_checkpoint), str(out), "", str(Path(__file__).parent)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            try:
                process.wait(timeout=float(rng.uniform(0.3, 1.5)) * takes)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                killed += 1
            process.wait()
            process.stdout.close()
            assert process.returncode in (0, -signal.SIGKILL)
            ended = out.exists() and not (out / ".kizami").exists()
            assert ended or process.returncode
        assert hashes(out) == hashes(tmp_path / "whole")
    assert killed >= 2


@pytest.mark.long
@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_cut_while_a_layers_input_is_overwritten_costs_nothing(
    done: int, source: Path, tokens: TokenSet, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long ago the last journal line was."""
    lines_every(monkeypatch, 1e9)
    events: list[Any] = []
    calibrate_with(source, tokens, tmp_path / "all", events.append)
    end_after(source, tokens, tmp_path / "stats", events.index(Progress(1, "combining", done, 3)) + 1)
    calibrate_with(source, tokens, tmp_path / "stats", lambda event: None)
    assert hashes(tmp_path / "stats") == whole


@pytest.mark.long
def test_a_resumed_run_does_only_what_is_left(
    source: Path, tokens: TokenSet, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines_every(monkeypatch, 0.0)
    out = tmp_path / "stats"
    events: list[Any] = []
    calibrate_with(source, tokens, tmp_path / "all", events.append)
    at = next(
        i for i, e in enumerate(events) if isinstance(e, Progress) and (e.layer, e.phase, e.done) == (1, "experts", 5)
    )
    end_after(source, tokens, out, at + 2)  # an event later: the line is written behind the event
    rest: list[Any] = []
    calibrate_with(source, tokens, out, rest.append)
    assert isinstance(rest[0], Started)
    assert rest[0].first == 1
    assert rest[1] == replace(events[at], done=6)
    assert rest[1:] == events[at + 1 :]
    assert hashes(out) == whole


def calibrate_with(source: Path, tokens: TokenSet, out: Path, look: Any) -> None:
    run_calibration(Checkpoint.open(source), tokens, out, SETTINGS, look)


@pytest.mark.long
@pytest.mark.parametrize("change", ["settings", "tokens", "source", "threads"])
def test_another_job_does_not_go_on_with_this_ones_work(
    change: str, source: Path, tokens: TokenSet, tmp_path: Path
) -> None:
    out = tmp_path / "stats"
    end_after(source, tokens, out, 9)
    other, ids, settings = source, tokens, SETTINGS
    match change:
        case "settings":
            settings = replace(SETTINGS, keep="none")
        case "tokens":
            ids = random_tokens(source, 4, 32)
        case "source":
            other = fp8_model("deepseek_v3", tmp_path / "other")
        case "threads":
            torch.set_num_threads(2)
    with pytest.raises(KizamiError) as refused:
        run_calibration(Checkpoint.open(other), ids, out, settings)
    assert refused.value.code == "resume_mismatch"
    said = {"settings": "settings.keep: all then, none now", "tokens": "tokens.", "source": "source.",
            "threads": "settings.threads: 1 then, 2 now"}  # fmt: skip
    assert said[change] in refused.value.message
    assert not out.exists()


@pytest.mark.long
def test_restart_throws_the_earlier_work_away(
    source: Path, tokens: TokenSet, whole: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "stats"
    end_after(source, random_tokens(source, 5, 64), out, 30, replace(SETTINGS, keep="held-out"))
    run_calibration(Checkpoint.open(source), tokens, out, SETTINGS, restart=True)
    assert hashes(out) == whole


def test_two_runs_do_not_share_a_folder(source: Path, tokens: TokenSet, tmp_path: Path) -> None:
    seen: list[str] = []

    def second(event: object) -> None:
        if isinstance(event, Started):
            with pytest.raises(KizamiError) as refused:
                run_calibration(Checkpoint.open(source), tokens, tmp_path / "stats", SETTINGS)
            seen.append(refused.value.code)
            raise PowerCut

    with pytest.raises(PowerCut):
        run_calibration(Checkpoint.open(source), tokens, tmp_path / "stats", SETTINGS, second)
    assert seen == ["locked"]


def test_what_another_has_put_there_is_neither_published_nor_removed(
    source: Path, tokens: TokenSet, tmp_path: Path
) -> None:
    partial = tmp_path / "stats.partial"
    partial.mkdir()
    (partial / "thesis.txt").write_text("mine")
    for restart in (False, True):
        with pytest.raises(KizamiError) as refused:
            run_calibration(Checkpoint.open(source), tokens, tmp_path / "stats", SETTINGS, restart=restart)
        assert refused.value.code == "out_exists"
        assert "thesis.txt" in refused.value.message
    assert os.listdir(partial) == ["thesis.txt"]
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.txt").write_text("mine")
    with pytest.raises(KizamiError) as refused:
        run_calibration(Checkpoint.open(source), tokens, tmp_path / "there", SETTINGS, restart=True)
    assert refused.value.code == "out_exists"


@pytest.mark.long
def test_temporaries_of_a_killed_run_are_no_strangers(
    source: Path, tokens: TokenSet, whole: dict[str, str], tmp_path: Path
) -> None:
    out, partial = tmp_path / "stats", tmp_path / "stats.partial"
    end_after(source, tokens, out, 30)
    for name in (".kizami-stats.json.tmp", ".layer-00001.safetensors.tmp", ".inputs-00001.safetensors.tmp"):
        (partial / name).write_bytes(b"half")
    run_calibration(Checkpoint.open(source), tokens, out, SETTINGS)
    assert hashes(out) == whole


@pytest.mark.long
def test_the_source_is_never_written_into(source: Path, tokens: TokenSet) -> None:
    before = hashes(source)
    for out in (source / "stats", source):
        with pytest.raises(KizamiError) as refused:
            run_calibration(Checkpoint.open(source), tokens, out, SETTINGS)
        assert refused.value.code == "out_in_source"
    assert hashes(source) == before


@pytest.mark.long
def test_a_kill_after_the_rename_leaves_only_the_journal_to_remove(
    source: Path, tokens: TokenSet, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "stats"

    def killed(_: Path) -> None:
        raise PowerCut

    with monkeypatch.context() as patched:
        patched.setattr(run_module, "_settle", killed)
        with pytest.raises(PowerCut):
            run_calibration(Checkpoint.open(source), tokens, out, SETTINGS)
    assert (out / ".kizami").is_dir()
    with pytest.raises(KizamiError) as refused:  # another job's
        run_calibration(Checkpoint.open(source), tokens, out, replace(SETTINGS, keep="none"))
    assert refused.value.code == "out_exists"
    (out / ".kizami" / "journal.jsonl").unlink()
    assert run_calibration(Checkpoint.open(source), tokens, out, SETTINGS) == out
    assert hashes(out) == whole
    with pytest.raises(KizamiError) as refused:  # now it is like any other folder
        run_calibration(Checkpoint.open(source), tokens, out, SETTINGS)
    assert refused.value.code == "out_exists"


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Element 0: so many more bytes are written to files of state, and none after that."""
    room = [10**12]
    pwrite = os.pwrite

    def limited(fd: int, data: Any, at: int) -> int:
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", limited)
    return room


@pytest.mark.long
def test_a_disk_that_is_full_is_an_error_and_the_run_goes_on_when_it_is_not(
    source: Path, tokens: TokenSet, whole: dict[str, str], tmp_path: Path, full_disk: list[int]
) -> None:
    out = tmp_path / "stats"
    for room in (100, 150_000, 700_000):
        full_disk[0] = room
        with pytest.raises(KizamiError) as refused:
            run_calibration(Checkpoint.open(source), tokens, out, SETTINGS)
        assert refused.value.code == "io_error"
        assert refused.value.hint is not None
        assert "make room" in refused.value.hint
    full_disk[0] = 10**12
    run_calibration(Checkpoint.open(source), tokens, out, SETTINGS)
    assert hashes(out) == whole


def test_the_room_is_reserved_before_the_first_number(
    source: Path, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, first: int, size: int) -> None:
        if size > 4095:
            os.ftruncate(fd, 4096)  # some file systems keep what they had before they ran out
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    seen: list[object] = []
    with pytest.raises(KizamiError) as refused:
        run_calibration(Checkpoint.open(source), tokens, tmp_path / "stats", SETTINGS, seen.append)
    assert refused.value.code == "io_error"
    assert "of the run's state" in refused.value.message
    assert refused.value.file == "stats.partial/.kizami/x"
    total = sum(event.disk for event in seen if isinstance(event, Started))
    assert f"keeps {total:,} bytes in stats.partial" in str(refused.value.hint)
    assert [type(event) for event in seen] == [Started]
    state = tmp_path / "stats.partial" / ".kizami"
    assert {path.name for path in state.iterdir() if path.stat().st_size > 4095} == set()


@pytest.mark.long
def test_state_that_is_gone_is_not_taken_for_zeros(source: Path, tokens: TokenSet, tmp_path: Path) -> None:
    out = tmp_path / "stats"
    end_after(source, tokens, out, 30)
    (tmp_path / "stats.partial" / ".kizami" / "x").unlink()
    with pytest.raises(KizamiError) as refused:
        run_calibration(Checkpoint.open(source), tokens, out, SETTINGS)
    assert refused.value.code == "damaged_journal"


def test_a_finished_layer_that_is_gone_is_not_passed_over(source: Path, tokens: TokenSet, tmp_path: Path) -> None:
    out = tmp_path / "stats"
    end_after(source, tokens, out, 30)
    (tmp_path / "stats.partial" / "layer-00000.safetensors").write_bytes(b"")
    with pytest.raises(KizamiError) as refused:
        run_calibration(Checkpoint.open(source), tokens, out, SETTINGS)
    assert refused.value.code == "damaged_journal"
    assert refused.value.file == "stats.partial/layer-00000.safetensors"


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows", 10, 3, np.float64, resumed=False)
    values = np.arange(30.0).reshape(10, 3)
    file.write(2, values[2:9])
    assert np.array_equal(file.read(3, 8), values[3:8])
    assert np.array_equal(file.gather(np.array([4, 5, 2, 8, 3])), values[[4, 5, 2, 8, 3]])
    assert file.gather(np.array([], np.int64)).shape == (0, 3)
    assert not file.read(0, 2).any()
    file.close()
    assert (tmp_path / "rows").stat().st_size == 240


def test_a_journal_line_that_was_cut_never_happened(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "stats.partial", {"a": 1}, {})
    journal.progress(0, 3, 7, None)
    journal.commit(0, [], 0)
    journal.progress(1, 1, 2, "sums-4.safetensors")
    journal.close()
    path = tmp_path / "stats.partial" / ".kizami" / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    again = Journal(tmp_path / "stats.partial", {"a": 1}, {})
    again.close()
    assert again.cursor is None
    assert again.committed == {0: []}
    assert path.read_bytes().endswith(b"\n")


def change_a_weight(folder: Path) -> str:
    """In the middle of the largest file, where no sample is taken; its size is the same."""
    path = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path.name


def test_a_source_that_changed_since_is_refused_until_restart(
    source: Path, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "sample_contents", lambda checkpoint: {})  # no sample sees the change
    lines_every(monkeypatch, 0.0)
    folder = Path(shutil.copytree(source, tmp_path / "src"))
    end_after(folder, tokens, tmp_path / "stats", 20)
    name = change_a_weight(folder)
    with pytest.raises(KizamiError) as refused:
        run_calibration(Checkpoint.open(folder), tokens, tmp_path / "stats", SETTINGS)
    assert (refused.value.code, refused.value.file) == ("source_changed", name)
    assert "--restart" in str(refused.value.hint)
    run_calibration(Checkpoint.open(folder), tokens, tmp_path / "stats", SETTINGS, restart=True)
    calibrate(folder, tokens, tmp_path / "fresh", SETTINGS)
    assert hashes(tmp_path / "stats") == hashes(tmp_path / "fresh")


def test_a_source_that_changes_during_a_run_ends_it(
    source: Path, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "sample_contents", lambda checkpoint: {})
    folder, seen = Path(shutil.copytree(source, tmp_path / "src")), []

    def change(event: object) -> None:
        if isinstance(event, Progress) and not seen:
            seen.append(change_a_weight(folder))

    with pytest.raises(KizamiError) as refused:
        run_calibration(Checkpoint.open(folder), tokens, tmp_path / "stats", SETTINGS, change)
    assert (refused.value.code, refused.value.file) == ("source_changed", seen[0])
    with pytest.raises(KizamiError) as again:
        run_calibration(Checkpoint.open(folder), tokens, tmp_path / "stats", SETTINGS)
    assert (again.value.code, again.value.file) == ("source_changed", seen[0])

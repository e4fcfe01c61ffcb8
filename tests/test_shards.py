"""`--shards`: processes that convert parts of one job into one OUT.partial, and the plain command that finishes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import pytest
from cli_fixtures import Run, files_of

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.quantize.pipeline import RunEvent, ShardDone, Started, run, run_part
from kizami.quantize.plan import Plan
from kizami.quantize.planner import build_plan
from kizami.quantize.run.parts import Part
from kizami.quantize.settings import Method, Policy

POLICY = Policy(max_shard_bytes=132_000)  # three shards of faults.small()
OPTIONS = ("--max-shard-size", "132KB", "--method", "minmax", "--workers", "1")
N = 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.small().save(tmp_path_factory.mktemp("shards") / "src")


@pytest.fixture(scope="module")
def clean(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a local run gives."""
    out = tmp_path_factory.mktemp("clean") / "out"
    convert(source, out)
    return files_of(out)


def plan_of(source: Path, method: str = "minmax") -> tuple[Plan, Checkpoint]:
    checkpoint = Checkpoint.open(source)
    return build_plan(checkpoint, POLICY, Method(method)), checkpoint  # type: ignore[arg-type]


def convert(source: Path, out: Path, **options: Any) -> list[RunEvent]:
    events: list[RunEvent] = []
    run(*plan_of(source), out, workers=1, **{"on_event": events.append, **options})
    return events


def convert_part(source: Path, out: Path, first: int, last: int, method: str = "minmax", **options: Any) -> Started:
    events: list[RunEvent] = []

    def listen(event: RunEvent) -> None:
        events.append(event)
        then(event)

    then: Callable[[RunEvent], None] = options.pop("on_event", lambda event: None)
    run_part(*plan_of(source, method), out, Part(first, last, N), workers=1, on_event=listen, **options)
    (started,) = (event for event in events if isinstance(event, Started))
    return started


def done_by(events: list[RunEvent]) -> list[int]:
    return [event.shard.number for event in events if isinstance(event, ShardDone)]


def in_folder(partial: Path) -> list[str]:
    return sorted(path.name for path in (partial / ".kizami").iterdir())


# ---------------------------------------------------------------------------------------------------- the normal way


def test_parts_and_the_plain_command_give_the_bytes_of_a_local_run(
    source: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for first, last in ((3, 3), (1, 2)):
        convert_part(source, out, first, last)
        assert not out.exists()
    assert done_by(convert(source, out)) == []
    assert files_of(out) == clean
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.long
def test_processes_that_start_together_share_a_folder(
    source: Path, clean: dict[str, str], tmp_path: Path, kizami: Run
) -> None:
    command = [sys.executable, "-m", "kizami.cli", "convert", source, tmp_path / "out", *OPTIONS]
    jobs = [subprocess.Popen([*command, "--shards", f"{i}/{N}", "-q"]) for i in range(1, N + 1)]
    assert [job.wait() for job in jobs] == [0] * N
    done = kizami("convert", source, tmp_path / "out", *OPTIONS)
    assert (done.code, f"resumed: {N} of {N} shards were done" in done.err) == (0, True), done.err
    assert files_of(tmp_path / "out") == clean


def test_the_plain_command_converts_what_failed_jobs_have_left(
    source: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    convert_part(source, tmp_path / "out", 2, 2)
    assert done_by(convert(source, tmp_path / "out")) == [1, 3]
    assert files_of(tmp_path / "out") == clean


def test_what_a_part_recorded_is_hashed_again(source: Path, clean: dict[str, str], tmp_path: Path) -> None:
    convert_part(source, tmp_path / "out", 1, 3)
    path = tmp_path / "out.partial" / "model-00002-of-00003.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    events = convert(source, tmp_path / "out")
    (started,) = (event for event in events if isinstance(event, Started))
    assert (started.rewritten, done_by(events)) == ((path.name,), [2])
    assert files_of(tmp_path / "out") == clean


def test_other_ranges_go_on_from_what_is_recorded(source: Path, clean: dict[str, str], tmp_path: Path) -> None:
    convert_part(source, tmp_path / "out", 1, 2)
    assert convert_part(source, tmp_path / "out", 2, 3).resumed == 1
    assert done_by(convert(source, tmp_path / "out")) == []
    assert files_of(tmp_path / "out") == clean


def test_a_part_goes_on_from_a_plain_run_that_was_interrupted(
    source: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    def interrupt(event: RunEvent) -> None:
        if isinstance(event, ShardDone):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", on_event=interrupt)
    assert convert_part(source, tmp_path / "out", 1, 2).resumed >= 1
    assert done_by(convert(source, tmp_path / "out")) in ([], [3])
    assert files_of(tmp_path / "out") == clean


def test_a_part_says_what_it_made_as_one_object(source: Path, tmp_path: Path, kizami: Run) -> None:
    events = tmp_path / "events.jsonl"
    words = ("convert", source, tmp_path / "out", *OPTIONS, "--shards", "2-3/3", "--events", events)
    done = kizami(*words, "--json")
    assert done.code == 0, done.err
    assert done.json["part"] == {"first": 2, "last": 3, "of": 3}
    assert (done.json["out"], done.json["partial"]) == (None, str(tmp_path / "out.partial"))
    assert [shard["file"] for shard in done.json["shards"]] == [f"model-0000{i}-of-00003.safetensors" for i in (2, 3)]
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["planned", "started", "shard", "shard", "finished"]
    assert [line["shards"] for line in lines[:2]] == [2, 2]
    again = kizami(*words)
    assert "resumed: 2 of 2 shards were done" in again.err
    assert "shards 2 to 3 of 3 are done" in again.out


# ------------------------------------------------------------------------------------------------ who must not meet


def test_parts_that_overlap_are_refused_and_others_are_not(source: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def others(event: RunEvent) -> None:
        if isinstance(event, ShardDone) and not seen:
            for first, last in ((2, 2), (1, 3), (2, 3)):
                with pytest.raises(KizamiError, match="another kizami converts shards 1-2 there") as e:
                    convert_part(source, tmp_path / "out", first, last)
                seen.append(e.value.code)
            convert_part(source, tmp_path / "out", 3, 3)

    convert_part(source, tmp_path / "out", 1, 2, on_event=others)
    assert seen == ["locked"] * 3
    assert done_by(convert(source, tmp_path / "out")) == []


@pytest.mark.parametrize("restart", [False, True])
def test_the_plain_command_waits_for_no_part_and_takes_nothing_from_it(
    source: Path, clean: dict[str, str], tmp_path: Path, restart: bool
) -> None:
    said: list[str] = []

    def finish(event: RunEvent) -> None:
        if isinstance(event, ShardDone):
            before = files_of(tmp_path / "out.partial")
            with pytest.raises(KizamiError, match="jobs with --shards are still writing there: part-00002-00003") as e:
                convert(source, tmp_path / "out", restart=restart)
            said.append(e.value.code)
            assert files_of(tmp_path / "out.partial") == before

    convert_part(source, tmp_path / "out", 2, 3, on_event=finish)
    assert said == ["locked", "locked"]
    convert(source, tmp_path / "out")
    assert files_of(tmp_path / "out") == clean


def test_a_part_is_refused_while_the_whole_job_is_at_work(source: Path, tmp_path: Path) -> None:
    said: list[str] = []

    def part(event: RunEvent) -> None:
        if isinstance(event, ShardDone):
            with pytest.raises(KizamiError, match="another kizami is writing there") as e:
                convert_part(source, tmp_path / "out", 3, 3)
            said.append(e.value.code)

    convert(source, tmp_path / "out", on_event=part)
    assert said == ["locked"] * N


def test_two_settings_never_mix(source: Path, clean: dict[str, str], tmp_path: Path) -> None:
    convert_part(source, tmp_path / "out", 1, 1)
    before = files_of(tmp_path / "out.partial")
    for options in ({}, {"restart": True}):
        with pytest.raises(KizamiError, match="minmax then, signed now") as e:
            convert_part(source, tmp_path / "out", 2, 2, "signed", **options)
        assert e.value.code == "resume_mismatch"
    with pytest.raises(KizamiError, match="minmax then, signed now"):
        run(*plan_of(source, "signed"), tmp_path / "out", workers=1)
    now = {name: text for name, text in files_of(tmp_path / "out.partial").items() if not name.endswith(".lock")}
    assert now.items() <= before.items()
    convert(source, tmp_path / "out")
    assert files_of(tmp_path / "out") == clean


def test_a_journal_of_other_settings_among_the_parts_is_seen(source: Path, tmp_path: Path) -> None:
    convert_part(source, tmp_path / "other", 3, 3, "signed")
    convert_part(source, tmp_path / "out", 1, 1)
    (theirs,) = (tmp_path / "other.partial" / ".kizami").glob("part-*.jsonl")
    shutil.copy(theirs, tmp_path / "out.partial" / ".kizami")
    for work in (lambda: convert(source, tmp_path / "out"), lambda: convert_part(source, tmp_path / "out", 2, 2)):
        with pytest.raises(KizamiError) as e:
            work()
        assert e.value.code == "resume_mismatch"


def test_a_part_of_a_finished_output_is_refused_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    with pytest.raises(KizamiError) as e:
        convert_part(source, tmp_path / "out", 1, 1)
    assert e.value.code == "out_exists"
    assert not (tmp_path / "out.partial").exists()


def test_strangers_files_are_seen_by_parts_too(source: Path, tmp_path: Path) -> None:
    convert_part(source, tmp_path / "out", 1, 1)
    (tmp_path / "out.partial" / "notes.txt").write_text("mine")
    with pytest.raises(KizamiError, match=r"notes\.txt") as e:
        convert_part(source, tmp_path / "out", 2, 2)
    assert e.value.code == "strange_file"


# ------------------------------------------------------------------------------------------------------- starting over


def test_restart_with_shards_starts_these_over_and_no_others(
    source: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    convert_part(source, tmp_path / "out", 1, 2)
    convert_part(source, tmp_path / "out", 3, 3)
    assert convert_part(source, tmp_path / "out", 1, 2, restart=True).resumed == 0
    assert done_by(convert(source, tmp_path / "out")) == []
    assert files_of(tmp_path / "out") == clean


def test_restart_throws_away_what_parts_have_done(source: Path, tmp_path: Path) -> None:
    convert_part(source, tmp_path / "out", 1, 3)
    (tmp_path / "out.partial" / ".model-00001-of-00003.safetensors.0123abcd").write_bytes(b"left")
    run(*plan_of(source, "signed"), tmp_path / "out", workers=1, restart=True)
    run(*plan_of(source, "signed"), tmp_path / "clean", workers=1)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "clean")


# ------------------------------------------------------------------------------------------------------- kills, zombies

# Runs a part; the n-th call that changes a file is the last one. Every n, each in a fork of a process without threads.
KILLED = """
import os, shutil, signal, sys
from itertools import count
import kizami.cli.convert_run, kizami.quantize.pipeline
from kizami.cli.app import main
from kizami.quantize.linear import warm_up
from kizami.quantize.settings import Method

warm_up(Method("minmax"), 32)
os.fsync = lambda fd: None

def run(*words):
    pid = os.fork()
    if pid == 0:
        try:
            main([*words, "-q"])
        except SystemExit as e:
            os._exit(int(e.code or 0))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def dying(n, *words):
    calls = count(1)
    def deadly(real):
        def call(*args, **options):
            if next(calls) == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)
        return call
    pid = os.fork()
    if pid == 0:
        for name in ("open", "write", "replace", "unlink", "mkdir", "fsync"):
            setattr(os, name, deadly(getattr(os, name)))
        try:
            main([*words, "-q"])
        except SystemExit as e:
            os._exit(int(e.code or 0))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

source, out, template, *options = sys.argv[1:]
words = ["convert", source, out, *options]
for n in count(1, 5):
    shutil.rmtree(out + ".partial", ignore_errors=True)
    shutil.copytree(template, out + ".partial")
    code = dying(n, *words, "--shards", "1-2/3")
    again = run(*words, "--shards", "1-2/3")
    assert again == 0, (n, again)
    assert run(*words) == 0, n
    print(n, code, flush=True)
    if code != -signal.SIGKILL:
        break
    os.rename(out, f"{out}-{n}")
"""


@pytest.mark.long
def test_a_part_that_is_killed_anywhere_goes_on(source: Path, clean: dict[str, str], tmp_path: Path) -> None:
    convert_part(source, tmp_path / "first", 3, 3)  # what another machine has done meanwhile
    words = [source, tmp_path / "out", tmp_path / "first.partial", *OPTIONS]
    done = subprocess.run([sys.executable, "-c", KILLED, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outs = list(tmp_path.glob("out*"))
    assert len(outs) > 10
    for out in outs:
        assert files_of(out) == clean, out


def test_a_part_works_under_names_that_no_other_process_has(source: Path, tmp_path: Path) -> None:
    seen: list[set[str]] = []
    for _ in range(2):

        def look(event: RunEvent) -> None:
            if not isinstance(event, (Started, ShardDone)):
                seen[-1].update(name for name in os.listdir(tmp_path / "out.partial") if name.endswith(".tmp"))

        seen.append(set())
        convert_part(source, tmp_path / "out", 1, 1, restart=True, on_event=look)
    assert all(seen)
    assert seen[0].isdisjoint(seen[1])


def test_a_process_that_was_given_up_for_lost_changes_nothing_more(
    source: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    """A machine that is cut off loses its locks, and wakes up when others have taken its place."""
    partial = tmp_path / "out.partial"
    taken: list[dict[str, str]] = []

    def take_over(event: RunEvent) -> None:
        if not taken and not isinstance(event, (Started, ShardDone)):
            for lock in (partial / ".kizami").glob("*lock"):
                lock.unlink()  # flock is by inode: the locks that are held mean nothing now
            convert_part(source, tmp_path / "out", 1, 2)
            taken.append(files_of(partial))

    with pytest.raises(KizamiError) as e:
        convert_part(source, tmp_path / "out", 1, 2, on_event=take_over)
    assert e.value.code == "io_error"
    left = files_of(partial)
    assert taken
    assert {name: text for name, text in left.items() if name in taken[0]} == taken[0]
    convert(source, tmp_path / "out")
    assert files_of(tmp_path / "out") == clean


def test_what_lost_processes_left_does_not_reach_the_output(
    source: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    convert_part(source, tmp_path / "out", 1, 3)
    for name in (
        ".model-00001-of-00003.safetensors.0123abcd",
        "..model-00002-of-00003.safetensors.0123abcd.tmp",
        ".kizami/.rows-00002.jsonl.0123abcd",
        ".kizami/..rows-00002.jsonl.0123abcd.tmp",
    ):
        (tmp_path / "out.partial" / name).write_bytes(b"half")
    convert(source, tmp_path / "out")
    assert files_of(tmp_path / "out") == clean


SLOW = """
import sys, time
import kizami.quantize.run.local_pool as local_pool
from kizami.cli.app import main
real = local_pool.convert_shard
local_pool.convert_shard = lambda *a: (time.sleep(0.3), real(*a))[1]
main(sys.argv[1:])
"""


def test_the_half_of_a_shard_that_a_killed_plain_run_left_does_not_stop_the_finish(
    source: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    convert_part(source, out, 1, 1)
    for name in (".model-00002-of-00003.safetensors.tmp", ".kizami/.rows-00002.jsonl.tmp"):
        (tmp_path / "out.partial" / name).write_bytes(b"half")
    convert_part(source, out, 2, 3)
    convert(source, out)
    assert files_of(out) == clean


def test_a_pipe_in_the_place_of_a_lock_holds_nobody(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial" / ".kizami").mkdir(parents=True)
    os.mkfifo(tmp_path / "out.partial" / ".kizami" / "part-00001-00002.lock")
    with pytest.raises(KizamiError) as caught:
        convert_part(source, tmp_path / "out", 1, 1)
    assert caught.value.code in ("strange_file", "out_exists")


@pytest.mark.long
def test_an_interrupted_part_says_how_to_go_on(tiny_checkpoint: Path, tmp_path: Path, kizami: Run) -> None:
    words = ["convert", str(tiny_checkpoint), str(tmp_path / "out"), "--max-shard-size", "200KB", "--workers", "1"]
    of = len(build_plan(Checkpoint.open(tiny_checkpoint), Policy(max_shard_bytes=200_000), Method()).shards)
    command = [sys.executable, "-c", SLOW, *words, "--shards", f"2-{of}/{of}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        next(line for line in child.stderr if line.startswith("shard 1/"))
        child.send_signal(signal.SIGTERM)
        rest = child.stderr.read().splitlines()
    assert child.returncode == 143
    assert rest[-1].startswith("kizami: interrupted: run the same command again to resume; ")
    assert rest[-1].endswith(f" of {of - 1} shards are done")
    assert kizami(*words).code == 0


# ------------------------------------------------------------------------------------------------------ command lines


@pytest.mark.parametrize("value", ["", "1", "1-2", "0/3", "0-2/3", "2-1/3", "4/3", "1-4/3", "a/3", "1-2/3/4", "-1/3"])
def test_a_range_that_is_none_is_refused(source: Path, tmp_path: Path, kizami: Run, value: str) -> None:
    done = kizami("convert", source, tmp_path / "out", f"--shards={value}")
    assert done.code == 2
    assert "expected A-B/N or A/N with 1 <= A <= B <= N" in done.err


def test_the_number_of_shards_must_be_that_of_the_plan(source: Path, tmp_path: Path, kizami: Run) -> None:
    done = kizami("convert", source, tmp_path / "out", *OPTIONS, "--shards", "1-2/4", "--json")
    assert done.code == 2
    error = done.json["error"]
    assert error["code"] == "bad_shards"
    assert error["message"] == "--shards 1-2/4 is of 4 shards, and the plan has 3"
    assert error["hint"].startswith("N is 3 with these options")
    assert not (tmp_path / "out.partial").exists()


def test_the_range_may_come_from_the_environment(
    source: Path, tmp_path: Path, kizami: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIZAMI_SHARDS", "3/3")
    assert kizami("convert", source, tmp_path / "out", *OPTIONS).code == 0
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("KIZAMI_SHARDS", "5/3")
    assert "KIZAMI_SHARDS 5/3" in kizami("convert", source, tmp_path / "out", *OPTIONS).err


@pytest.mark.parametrize("words", [("--push-to", "me/x"), ("--engine", "llmcompressor", "--method", "gptq")])
def test_what_one_process_does_alone_is_refused(
    source: Path, tmp_path: Path, kizami: Run, words: tuple[str, ...]
) -> None:
    done = kizami("convert", source, tmp_path / "out", "--shards", "1/3", *words)
    assert done.code == 2
    assert f"--shards with {words[0]}, which one process does alone" in done.err


def test_a_dry_run_of_a_part_shows_the_plan_and_checks_the_range(source: Path, tmp_path: Path, kizami: Run) -> None:
    assert kizami("convert", source, tmp_path / "out", *OPTIONS, "--shards", "1/3", "--dry-run").code == 0
    assert kizami("convert", source, tmp_path / "out", *OPTIONS, "--shards", "1/4", "--dry-run").code == 2
    assert not (tmp_path / "out.partial").exists()


def test_the_journal_of_a_finished_part_is_taken_over_once(source: Path, tmp_path: Path) -> None:
    convert_part(source, tmp_path / "out", 1, 2)
    assert any(name.startswith("part-00001-00002-") for name in in_folder(tmp_path / "out.partial"))

    def stop(event: RunEvent) -> None:
        if isinstance(event, Started):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", on_event=stop)
    names = in_folder(tmp_path / "out.partial")
    assert names == ["journal.jsonl", "lock", "parts.lock", "rows-00001.jsonl", "rows-00002.jsonl"]

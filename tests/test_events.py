"""`--events FILE`: each step of a conversion as a line of JSON."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import Run


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_step_is_a_line_and_the_last_says_how_it_ended(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    events, out = tmp_path / "events.jsonl", tmp_path / "out"
    words = ("convert", tiny_checkpoint, out, "--max-shard-size", "1MB", "--events", events)
    assert kizami(*words, "-q").code == 0
    lines = lines_of(events)
    shards = [line for line in lines if line["event"] == "shard"]
    kinds = [line["event"] for line in lines if line["event"] != "progress"]  # every 5 seconds, of a slow machine
    assert kinds == ["planned", "started", *["shard"] * len(shards), "finished"]
    planned, started = lines[:2]
    assert (planned["source"], planned["shards"]) == (str(tiny_checkpoint), len(shards))
    assert len(planned["plan_hash"]) == 64
    assert (started["done_bytes"], started["total_bytes"]) == (0, planned["total_bytes"])
    assert planned["total_bytes"] > 100_000
    assert {line["schema"] for line in lines} == {"kizami.event/1"}
    assert [line["done"] for line in shards] == list(range(1, len(shards) + 1))
    assert {line["file"] for line in shards} == {path.name for path in out.glob("*.safetensors")}
    assert (lines[-1]["out"], lines[-1]["pushed"]) == (str(out), None)
    assert lines[-1]["rel_error"] > 0


def test_a_run_that_fails_says_so_in_its_last_line(kizami: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    done = kizami("convert", tiny_checkpoint, tmp_path / "out", "--events", events)
    assert done.code == 2
    line = lines_of(events)[-1]
    assert (line["event"], line["code"], line["file"]) == ("failed", "out_exists", str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), "missing_file"),
        (("--tp", "8"), "missing_file"),
        (("--set", "no=such"), "bad_option"),
        (("--group-size", "7"), None),
        (("--delete-pushed",), "usage"),
        (("--shards", "3"), "bad_option"),
    ],
)
def test_a_refusal_before_the_run_is_a_line_too(
    kizami: Run, tmp_path: Path, words: tuple[str, ...], code: str | None
) -> None:
    """But for words that are no command at all: they are the caller's, and nothing has begun."""
    events = tmp_path / "events.jsonl"
    (tmp_path / "src").mkdir()
    assert kizami("convert", tmp_path / "src", tmp_path / "out", "--events", events, *words).code == 2
    told = [(line["event"], line["code"]) for line in lines_of(events)] if events.exists() else []
    assert told == ([("failed", code)] if code else [])


@pytest.mark.parametrize(
    ("limit", "met", "code"),
    [(("--max-rel-error", "0.01"), False, 1), (("--max-rel-error", "0.9"), True, 0), ((), None, 0)],
)
def test_the_last_line_says_whether_the_limit_is_met(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path, limit: tuple[str, ...], met: bool | None, code: int
) -> None:
    events = tmp_path / "events.jsonl"
    assert kizami("convert", tiny_checkpoint, tmp_path / "out", "--events", events, "-q", *limit).code == code
    last = lines_of(events)[-1]
    assert (last["event"], last["limit_met"]) == ("finished", met)
    assert last["max_rel_error"] == (float(limit[1]) if limit else None)


def test_a_signal_is_told_in_the_words_of_the_terminal(tiny_checkpoint: Path, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    words = ["convert", tiny_checkpoint, tmp_path / "out", "--max-shard-size", "100kB", "--events", events, "--json"]
    command = [sys.executable, "-m", "kizami.cli", *map(str, words)]
    begun = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (events.exists() and '"shard"' in events.read_text()):
        assert begun.poll() is None, "done before the signal"
        time.sleep(0.005)
    begun.send_signal(signal.SIGTERM)
    said = json.loads(begun.communicate(timeout=60)[0])["error"]["message"]
    assert begun.returncode == 143
    last = lines_of(events)[-1]
    assert (last["event"], last["code"], last["message"]) == ("failed", "interrupted", said)


def test_a_reader_that_leaves_and_a_full_disk_end_the_lines_and_not_the_run(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    pipe = tmp_path / "events"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: pipe.open().close())
    reader.start()
    done = kizami("convert", tiny_checkpoint, tmp_path / "a", "--max-shard-size", "100kB", "--events", pipe)
    reader.join()
    assert (done.code, (tmp_path / "a" / "kizami.json").exists()) == (0, True), done.err
    assert f"{pipe}: no more events are written: Broken pipe" in done.err
    full = kizami("convert", tiny_checkpoint, tmp_path / "b", "--events", "/dev/full")
    assert (full.code, (tmp_path / "b" / "kizami.json").exists()) == (0, True), full.err
    assert "/dev/full: no more events are written: No space left on device" in full.err


def test_half_a_line_of_an_earlier_run_does_not_spoil_the_next(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text('{"event": "planned", "sourc')
    assert kizami("convert", tiny_checkpoint, tmp_path / "out", "--events", events, "--dry-run", "-q").code == 0
    half, planned, finished = events.read_text().splitlines()
    assert half == '{"event": "planned", "sourc'
    assert [json.loads(line)["event"] for line in (planned, finished)] == ["planned", "finished"]


def test_lines_are_not_written_where_the_run_works(kizami: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    for place in ("out", "out.partial", "out.source"):
        (tmp_path / place).mkdir()
        done = kizami("convert", tiny_checkpoint, tmp_path / "out", "--events", tmp_path / place / "e", "--json")
        assert (done.code, done.json["error"]["code"]) == (2, "bad_file"), place
    for name in ("", "-"):
        done = kizami("convert", tiny_checkpoint, tmp_path / "new", "--events", name, "--json")
        assert (done.code, done.json["error"]["code"]) == (2, "usage"), name


def test_lines_are_added_to_those_of_an_earlier_run_and_the_source_is_not_written_to(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text('{"event": "of another run"}\n')
    assert kizami("convert", tiny_checkpoint, tmp_path / "out", "--events", events, "-q").code == 0
    assert lines_of(events)[0] == {"event": "of another run"}
    refused = kizami("convert", tiny_checkpoint, tmp_path / "b", "--events", tiny_checkpoint / "e.jsonl", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "bad_file")

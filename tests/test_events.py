"""`--events FILE`: each step of a conversion as a line of JSON."""

import json
from pathlib import Path
from typing import Any

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
    assert [line["event"] for line in lines] == ["started", *["shard"] * len(shards), "finished"]
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
    (line,) = lines_of(events)
    assert (line["event"], line["code"], line["file"]) == ("failed", "out_exists", str(tmp_path / "out"))


def test_lines_are_added_to_those_of_an_earlier_run_and_the_source_is_not_written_to(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text('{"event": "of another run"}\n')
    assert kizami("convert", tiny_checkpoint, tmp_path / "out", "--events", events, "-q").code == 0
    assert lines_of(events)[0] == {"event": "of another run"}
    refused = kizami("convert", tiny_checkpoint, tmp_path / "b", "--events", tiny_checkpoint / "e.jsonl", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "bad_file")

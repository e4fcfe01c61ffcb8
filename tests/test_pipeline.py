"""Running a plan: whole or absent, resumable, and the same bytes whoever ran it."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import make_cases
import pytest

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.quantize.pipeline import ShardDone, Started, run
from kizami.quantize.plan import Plan
from kizami.quantize.planner import build_plan
from kizami.quantize.run.job_folder import ShardRecord
from kizami.quantize.run.journal import Journal
from kizami.quantize.settings import Method, Policy

SEARCH = Method()

SMALL_SHARDS = Policy(max_shard_bytes=300_000)  # about ten shards of TINY


def files(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def plan_of(source: Path, policy: Policy = SMALL_SHARDS, method: Method = SEARCH) -> tuple[Checkpoint, Plan]:
    checkpoint = Checkpoint.open(source)
    return checkpoint, build_plan(checkpoint, policy, method)


def convert(source: Path, out: Path, policy: Policy = SMALL_SHARDS, method: Method = SEARCH, **options) -> dict:
    checkpoint, plan = plan_of(source, policy, method)
    return run(plan, checkpoint, out, **options)


@pytest.fixture(scope="module")
def clean(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run with one worker."""
    out = tmp_path_factory.mktemp("clean") / "out"
    convert(tiny_checkpoint, out, workers=1)
    return out


@pytest.mark.parametrize("workers", [2, 5])
def test_worker_count_does_not_change_a_byte(tiny_checkpoint, clean, tmp_path, workers):
    convert(tiny_checkpoint, tmp_path / "out", workers=workers)
    assert files(tmp_path / "out") == files(clean)


@pytest.mark.parametrize("method", [Method("minmax"), Method("signed"), Method("search", clip_allowance=0.5)])
@pytest.mark.parametrize(
    "policy", [Policy(), Policy(group_size=128, rest="fp8", max_shard_bytes=1), Policy(mtp="drop")]
)
def test_written_bytes_are_the_planned_bytes(tiny_checkpoint, tmp_path, policy, method):
    checkpoint, plan = plan_of(tiny_checkpoint, policy, method)
    run(plan, checkpoint, tmp_path / "out", workers=2)
    out = Checkpoint.open(tmp_path / "out")
    assert sum(info.nbytes for info in out.tensors.values()) == plan.output.bytes
    assert sum(head.file_size for head in out.headers.values()) == plan.output.file_bytes
    assert {i.name: i.spec for i in out.tensors.values()} == {s.name: s for f in plan.shards for s in f.tensors}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == plan.output.bytes


# Runs `kizami`'s pipeline and dies by SIGKILL when N shards are recorded.
KILLED = """
import os, signal, sys
from pathlib import Path
from kizami.formats.checkpoint import Checkpoint
from kizami.quantize.pipeline import ShardDone, run
from kizami.quantize.planner import build_plan
from kizami.quantize.settings import Method, Policy

source, out, shards = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

def die(event):
    if isinstance(event, ShardDone) and event.done == shards:
        os.kill(os.getpid(), signal.SIGKILL)

checkpoint = Checkpoint.open(source)
run(build_plan(checkpoint, Policy(max_shard_bytes=300_000), Method()), checkpoint, out, workers=2, on_event=die)
"""


def kill_after(shards: int, source: Path, out: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(source), str(out), str(shards)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()


@pytest.mark.parametrize("shards", [1, 4])
def test_a_killed_run_resumes_to_the_same_bytes(tiny_checkpoint, clean, tmp_path, shards):
    out = tmp_path / "out"
    kill_after(shards, tiny_checkpoint, out)
    events = []
    convert(tiny_checkpoint, out, workers=1, on_event=events.append)
    assert next(e for e in events if isinstance(e, Started)).resumed >= shards
    assert sum(isinstance(e, ShardDone) for e in events) < events[0].shards
    assert files(out) == files(clean)
    assert not out.with_name("out.partial").exists()


def test_a_shard_that_changed_after_the_kill_is_written_anew(tiny_checkpoint, clean, tmp_path):
    out = tmp_path / "out"
    kill_after(2, tiny_checkpoint, out)
    first = json.loads((out.with_name("out.partial") / ".kizami/journal.jsonl").read_text().splitlines()[1])["file"]
    path = out.with_name("out.partial") / first
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    events = []
    convert(tiny_checkpoint, out, on_event=events.append)
    assert events[0].rewritten == (first,)
    assert files(out) == files(clean)


def test_shards_made_before_their_source_was_modified_are_written_anew(tmp_path):
    """One byte, which the sampled pages need not see: kept shards beside new ones would be two models in one."""
    made = make_cases.tiny()
    source, out = made.save(tmp_path / "src"), tmp_path / "out"
    kill_after(4, source, out)
    file = "model-00001-of-00003.safetensors"
    convert(source, tmp_path / "before")
    path = source / file
    data = bytearray(path.read_bytes())
    data[len(data) // 62] ^= 1  # half-way from the first sampled page to the second
    path.write_bytes(data)
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1_000_000))
    events = []
    convert(source, out, on_event=events.append)
    assert events[0].outdated
    assert events[0].rewritten == ()
    convert(source, tmp_path / "clean")
    assert files(out) == files(tmp_path / "clean")
    assert files(out) != files(tmp_path / "before")


def test_half_a_journal_line_never_happened(tiny_checkpoint, clean, tmp_path):
    out = tmp_path / "out"
    kill_after(2, tiny_checkpoint, out)
    journal = out.with_name("out.partial") / ".kizami/journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-9])
    events = []
    convert(tiny_checkpoint, out, on_event=events.append)
    assert events[0].resumed >= 1
    assert files(out) == files(clean)


def test_a_garbled_journal_is_refused(tiny_checkpoint, tmp_path):
    out = tmp_path / "out"
    kill_after(2, tiny_checkpoint, out)
    journal = out.with_name("out.partial") / ".kizami/journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text(lines[0] + "garbage\n" + lines[1])
    with pytest.raises(KizamiError, match=r"journal\.jsonl.*--restart"):
        convert(tiny_checkpoint, out)


@pytest.mark.parametrize(
    ("policy", "method", "says"),
    [
        (replace(SMALL_SHARDS, group_size=64), Method(), r"policy\.group_size: 32 then, 64 now"),
        (SMALL_SHARDS, Method("minmax"), r"method\.name: search then, minmax now"),
        (Policy(), Method(), r"policy\.max_shard_bytes: \d+ then, 5000000000 now"),  # other files, too
        (replace(SMALL_SHARDS, to="bf16"), Method(), r"policy\.to: int4 then, bf16 now"),
    ],
)
def test_a_resume_with_other_settings_shows_both_and_stops(tiny_checkpoint, tmp_path, policy, method, says):
    out = tmp_path / "out"
    kill_after(1, tiny_checkpoint, out)
    before = files(out.with_name("out.partial"))
    with pytest.raises(KizamiError, match=says) as e:
        convert(tiny_checkpoint, out, policy, method)
    assert e.value.code == "resume_mismatch"
    assert files(out.with_name("out.partial")) == before


def test_a_resume_from_another_source_is_refused(tiny_checkpoint, tmp_path):
    out = tmp_path / "out"
    kill_after(1, tiny_checkpoint, out)
    other = make_cases.tiny()
    other.config["rope_theta"] = 1.0
    with pytest.raises(KizamiError, match=r"source\.config_sha256"):
        convert(other.save(tmp_path / "other"), out)


def test_a_resume_from_a_retrained_source_of_the_same_shape_is_refused(tmp_path):
    source = make_cases.tiny().save(tmp_path / "src")
    kill_after(1, source, tmp_path / "out")
    retrained = make_cases.tiny()
    for name, tensor in retrained.tensors().items():
        if name.endswith("_proj.weight"):
            retrained.set(name, make_cases.Tensor(tensor.dtype, tensor.shape, bytes(b ^ 0x80 for b in tensor.data)))
    retrained.save(source)  # same names, sizes and headers
    with pytest.raises(KizamiError, match=r"source_contents\.model-0000\d-of-00003") as e:
        convert(source, tmp_path / "out")
    assert e.value.code == "resume_mismatch"


@pytest.mark.parametrize("damage", [b"", b"garbage\n", b'{"name": "x"}\n', None])
def test_report_rows_that_changed_after_the_kill_are_made_anew(tiny_checkpoint, clean, tmp_path, damage):
    out = tmp_path / "out"
    kill_after(2, tiny_checkpoint, out)
    (rows, *_) = sorted((out.with_name("out.partial") / ".kizami").glob("rows-*.jsonl"))
    if damage is None:
        rows.unlink()
    else:
        rows.write_bytes(damage)
    events = []
    convert(tiny_checkpoint, out, on_event=events.append)
    assert len(events[0].rewritten) == 1
    assert files(out) == files(clean)


@pytest.mark.parametrize(
    "line", ['{"number":1e999}', "[" * 100_000, '{"number":1,"file":"x","nbytes":true,"sha256":"","rows_sha256":""}']
)
def test_journal_lines_that_kizami_never_writes_are_refused(tiny_checkpoint, tmp_path, line):
    out = tmp_path / "out"
    kill_after(1, tiny_checkpoint, out)
    with open(out.with_name("out.partial") / ".kizami/journal.jsonl", "a") as f:
        f.write(line + "\n")
    with pytest.raises(KizamiError, match="not what kizami writes"):
        convert(tiny_checkpoint, out)


@pytest.mark.parametrize("place", ["notes.txt", ".kizami/notes", "sub/model-00001-of-00002.safetensors"])
def test_a_strangers_file_in_the_work_folder_is_neither_published_nor_removed(tiny_checkpoint, tmp_path, place):
    out = tmp_path / "out"
    kill_after(1, tiny_checkpoint, out)
    stranger = out.with_name("out.partial") / place
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("mine")
    for restart in (False, True):
        with pytest.raises(KizamiError, match="did not write there") as e:
            convert(tiny_checkpoint, out, restart=restart)
        assert e.value.code == "strange_file"
        assert stranger.read_text() == "mine"
    stranger.unlink()
    if place.startswith("sub/"):
        stranger.parent.rmdir()
    convert(tiny_checkpoint, out)
    assert out.exists()


def test_a_link_in_place_of_the_journals_folder_is_refused(tiny_checkpoint, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / ".kizami").symlink_to(elsewhere)
    with pytest.raises(KizamiError):
        convert(tiny_checkpoint, tmp_path / "out")
    assert not list(elsewhere.iterdir())


def test_a_finished_shard_that_vanishes_during_the_run_is_noticed(tiny_checkpoint, clean, tmp_path):
    out = tmp_path / "out"

    def remove_the_first(event):
        if isinstance(event, ShardDone) and event.done == event.of:
            min(out.with_name("out.partial").glob("*.safetensors")).unlink()

    with pytest.raises(KizamiError, match="is gone") as e:
        convert(tiny_checkpoint, out, workers=1, on_event=remove_the_first)
    assert e.value.code == "shard_lost"
    convert(tiny_checkpoint, out)
    assert files(out) == files(clean)


def test_a_side_file_that_vanishes_during_the_run_is_an_error(tmp_path):
    source = make_cases.tiny().save(tmp_path / "src")

    def remove(event):
        if isinstance(event, Started):
            (source / "tokenizer.json").unlink()

    with pytest.raises(KizamiError) as e:
        convert(source, tmp_path / "out", on_event=remove)
    assert e.value.file == "tokenizer.json"
    assert not (tmp_path / "out").exists()


def test_the_sources_card_is_not_read_through_a_link_out_of_its_folder(tmp_path):
    (tmp_path / "secret.md").write_text("---\nlicense: leaked\n---\n")
    source = make_cases.tiny().save(tmp_path / "src")
    (source / "README.md").unlink()
    (source / "README.md").symlink_to("../secret.md")
    convert(source, tmp_path / "out")
    assert "leaked" not in (tmp_path / "out" / "README.md").read_text()


def test_restart_throws_the_unfinished_work_away(tiny_checkpoint, tmp_path):
    out = tmp_path / "out"
    kill_after(1, tiny_checkpoint, out)
    events = []
    convert(tiny_checkpoint, out, replace(SMALL_SHARDS, group_size=64), restart=True, on_event=events.append)
    assert events[0].resumed == 0
    assert (
        json.loads((out / "config.json").read_bytes())["quantization_config"]["config_groups"]["group_0"]["weights"][
            "group_size"
        ]
        == 64
    )


def test_restart_removes_nothing_that_kizami_did_not_make(tiny_checkpoint, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "thesis.tex").write_text("years of work")
    with pytest.raises(KizamiError, match="no journal of kizami"):
        convert(tiny_checkpoint, tmp_path / "out", restart=True)
    assert (partial / "thesis.tex").read_text() == "years of work"


def test_two_runs_cannot_share_a_folder(tiny_checkpoint, tmp_path):
    checkpoint, plan = plan_of(tiny_checkpoint)
    seen = []

    def second_run(event):
        if isinstance(event, ShardDone) and not seen:
            with pytest.raises(KizamiError, match="another kizami is writing there") as e:
                run(plan, checkpoint, tmp_path / "out", restart=True)
            seen.append(e.value.code)

    run(plan, checkpoint, tmp_path / "out", workers=1, on_event=second_run)
    assert seen == ["locked"]
    assert (tmp_path / "out" / "kizami.json").exists()


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path):
    source = make_cases.tiny().save(tmp_path / "src")
    checkpoint, plan = plan_of(source)

    def touch(event):
        if isinstance(event, Started):
            path = source / "model-00002-of-00003.safetensors"
            os.utime(path, ns=(1, 1))

    with pytest.raises(KizamiError) as e:
        run(plan, checkpoint, tmp_path / "out", on_event=touch)
    assert e.value.code == "source_changed"
    assert e.value.file == "model-00002-of-00003.safetensors"
    assert not (tmp_path / "out").exists()


def test_too_little_room_is_said_before_the_first_byte(tiny_checkpoint, tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(KizamiError, match=r"bytes are still to be written, and 1,000,000 are free") as e:
        convert(tiny_checkpoint, tmp_path / "out")
    assert e.value.code == "disk_full"
    assert not list((tmp_path / "out.partial").glob("*.safetensors"))


@pytest.mark.parametrize("place", ["", "sub"])
def test_out_may_not_be_the_source_nor_inside_it(tmp_path, place):
    source = make_cases.tiny().save(tmp_path / "src")
    before = files(source)
    with pytest.raises(KizamiError):
        convert(source, source / place)
    assert files(source) == before
    assert not (tmp_path / "src.partial").exists()


def test_an_output_that_is_there_is_never_touched(tiny_checkpoint, clean):
    before = files(clean)
    for restart in (False, True):
        with pytest.raises(KizamiError, match="not empty"):
            convert(tiny_checkpoint, clean, restart=restart)
    assert files(clean) == before


def test_a_damaged_weight_names_file_tensor_row_and_column(tmp_path):
    source = make_cases.tiny()
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    data = bytearray(source.tensors()[name].data)
    data[5 * 256 + 7] = 0x7F
    source.set(name, make_cases.Tensor("F8_E4M3", (128, 256), bytes(data)))
    with pytest.raises(KizamiError) as e:
        convert(source.save(tmp_path / "src"), tmp_path / "out")
    assert e.value.tensor == name
    assert e.value.file == "model-00002-of-00003.safetensors"
    assert "row 5, column 7" in e.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rest", ["bf16", "fp8"])
def test_a_damaged_weight_that_is_not_packed_is_found_too(tmp_path, rest):
    source = make_cases.tiny()
    name = "model.layers.0.self_attn.o_proj.weight"
    data = bytearray(source.tensors()[name].data)
    data[-1] = 0xFF
    source.set(name, make_cases.Tensor("F8_E4M3", (256, 128), bytes(data)))
    with pytest.raises(KizamiError, match="row 255, column 127"):
        convert(source.save(tmp_path / "src"), tmp_path / "out", Policy(rest=rest))


def test_no_file_of_the_output_is_private_to_the_user(clean):
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in clean.rglob("*") if path.is_file()} == {0o666 & ~umask}


def test_the_manifest_holds_no_time_and_no_path(clean, tiny_checkpoint):
    text = (clean / "kizami.json").read_text()
    assert str(tiny_checkpoint) not in text
    assert not {"time", "date", "seconds", "host"} & set(json.loads(text))


def test_nothing_is_appended_behind_half_a_line(tmp_path, monkeypatch):
    """A full disk stops one driver in the middle of its line, and leaves room for another's a moment later."""
    (tmp_path / "out.partial").mkdir()
    journal = Journal.open(tmp_path / "out.partial", {})
    records = [ShardRecord(n, f"model-{n:05d}-of-00003.safetensors", 1, "0", "0", {}) for n in (1, 2, 3)]
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))  # many calls for a line
    journal.append(records[0])

    def full(fd: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", write_then_fail)
        return write(fd, data[:7])

    def write_then_fail(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(KizamiError, match="No space left"):
        journal.append(records[1])
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(KizamiError, match="No space left"):
        journal.append(records[2])
    journal.close()
    again = Journal.open(tmp_path / "out.partial", {})
    again.append(records[1])
    again.close()
    assert Journal.open(tmp_path / "out.partial", {}).done == {1: records[0], 2: records[1]}


def test_a_lock_that_leads_elsewhere_is_refused(tiny_checkpoint, tmp_path):
    folder = tmp_path / "out.partial" / ".kizami"
    folder.mkdir(parents=True)
    (folder / "lock").symlink_to(tmp_path / "nowhere" / "lock")
    with pytest.raises(OSError, match="Too many levels"):
        convert(tiny_checkpoint, tmp_path / "out")
    assert not (tmp_path / "nowhere").exists()

"""What stands at OUT and OUT.partial before a run: strangers' files stay, and nothing of theirs is taken for ours."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import faults
import pytest
from cli_fixtures import Run, files_of

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.quantize import finish, place
from kizami.quantize.pipeline import Started, run
from kizami.quantize.plan import Plan
from kizami.quantize.planner import build_plan
from kizami.quantize.run.journal import Journal
from kizami.quantize.settings import Method, Policy

POLICY = Policy(max_shard_bytes=132_000)  # three shards of faults.small()
JOURNAL = ".kizami/journal.jsonl"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return faults.small().save(tmp_path / "src")


def plan_of(source: Path) -> tuple[Checkpoint, Plan]:
    checkpoint = Checkpoint.open(source)
    return checkpoint, build_plan(checkpoint, POLICY, Method("minmax"))


def convert(source: Path, out: Path, **options) -> dict:
    checkpoint, plan = plan_of(source)
    return run(plan, checkpoint, out, workers=1, **options)


class Cut(BaseException):
    """The run ends here as if it were killed."""


@pytest.fixture
def partial(source: Path, tmp_path: Path) -> Path:
    """OUT.partial with every shard finished."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "build_manifest", lambda *_: (_ for _ in ()).throw(Cut))
        with pytest.raises(Cut):
            convert(source, tmp_path / "out")
    return tmp_path / "out.partial"


@pytest.fixture
def published(source: Path, tmp_path: Path) -> Path:
    """OUT right after the rename: the journal is still there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "_settle", lambda out: (_ for _ in ()).throw(KizamiError("cut", code="cut")))
        with pytest.raises(KizamiError, match="cut"):
            convert(source, tmp_path / "out")
    assert (tmp_path / "out" / JOURNAL).exists()
    return tmp_path / "out"


def refused(code: str, source: Path, out: Path, **options) -> KizamiError:
    with pytest.raises(KizamiError) as e:
        convert(source, out, **options)
    assert e.value.code == code, e.value
    return e.value


# ---------------------------------------------------------------- SRC in the way


def as_partial(source: Path, partial: Path) -> Path:
    return source.rename(partial)


def as_link_to_it(source: Path, partial: Path) -> Path:
    source.rename(partial)
    source.symlink_to(partial)
    return source


def as_a_link_from_it(source: Path, partial: Path) -> Path:
    partial.symlink_to(source)
    return source


def inside_it(source: Path, partial: Path) -> Path:
    partial.mkdir()
    return source.rename(partial / "src")


@pytest.mark.parametrize(
    "put", [as_partial, as_link_to_it, as_a_link_from_it, inside_it], ids=lambda value: value.__name__
)
@pytest.mark.parametrize("restart", [False, True])
def test_a_source_at_out_partial_or_in_it_is_never_written_to(
    source: Path, tmp_path: Path, put: Callable[[Path, Path], Path], restart: bool
) -> None:
    (source / ".kizami").mkdir()
    (source / JOURNAL).write_bytes(b'{"identity":{}}\n')  # as kizami's own
    moved = put(source, tmp_path / "out.partial")
    before = files_of(tmp_path)
    refused("out_in_source", moved, tmp_path / "out", restart=restart)
    assert files_of(tmp_path) == before


def test_a_source_whose_files_are_links_into_out_partial_is_never_written_to(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "models--c--d"
    partial = tmp_path / "models--c--d.partial"
    partial.mkdir()
    snapshot = partial / "models--a--b" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    blobs = source.rename(partial / "models--a--b" / "blobs")
    for path in [path for path in blobs.iterdir() if path.suffix in (".json", ".safetensors")]:
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    checkpoint, _ = plan_of(snapshot)
    before = files_of(tmp_path)
    with pytest.raises(KizamiError) as e:
        place.check_place(checkpoint, out)
    assert e.value.code == "out_in_source"
    with pytest.raises(KizamiError) as e:  # where the weights lie, and not where their names are
        place.check_place(checkpoint, blobs / "x")
    assert e.value.code == "out_in_source"
    assert files_of(tmp_path) == before


# ---------------------------------------------------------------- a run that was killed after the rename


def test_what_is_left_after_the_rename_is_finished(source: Path, published: Path, tmp_path: Path) -> None:
    convert(source, published)
    assert not (published / ".kizami").exists()
    convert(source, tmp_path / "clean")
    assert files_of(published) == files_of(tmp_path / "clean")


def test_the_journals_own_file_goes_last(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []
    unlink = os.unlink

    def noting(path: Path, *args, **options) -> None:
        gone.append(Path(path).name)
        unlink(path, *args, **options)

    monkeypatch.setattr(os, "unlink", noting)
    convert(source, tmp_path / "out")
    assert gone[-2:] == ["lock", "journal.jsonl"]


def test_an_empty_folder_of_the_journal_is_removed_too(source: Path, published: Path) -> None:
    for path in (published / ".kizami").iterdir():
        path.unlink()
    convert(source, published)
    assert not (published / ".kizami").exists()


def retrain(source: Path, out: Path) -> None:
    """Another source of the same headers and times."""
    path = min(source.glob("*.safetensors"))
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-300:] = bytes(b ^ 1 for b in data[-300:])
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def touch(source: Path, out: Path) -> None:
    os.utime(min(source.glob("*.safetensors")), ns=(1, 1))


def change_tokenizer(source: Path, out: Path) -> None:
    (source / "tokenizer.json").write_bytes(b"[]\n")


def damage(source: Path, out: Path) -> None:
    path = min(out.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def lose_the_card(source: Path, out: Path) -> None:
    (out / "README.md").unlink()


def link_a_shard(source: Path, out: Path) -> None:
    path = min(out.glob("*.safetensors"))
    path.rename(out.parent / "elsewhere")
    path.symlink_to(out.parent / "elsewhere")


def leave_notes(source: Path, out: Path) -> None:
    (out / ".kizami" / "notes.txt").write_text("mine")


def leave_a_folder(source: Path, out: Path) -> None:
    (out / ".kizami" / ".rows-00009.jsonl.tmp").mkdir()


def link_the_journal(source: Path, out: Path) -> None:
    path = out / JOURNAL
    path.rename(out.parent / "mine.jsonl")
    path.symlink_to(out.parent / "mine.jsonl")


def forge_the_journal(source: Path, out: Path) -> None:
    (out / JOURNAL).write_text("".join(['{"identity":{}}\n', *(out / JOURNAL).read_text().splitlines(True)[1:]]))


def retrain_when_the_journal_is_gone(source: Path, out: Path) -> None:
    for path in (out / ".kizami").iterdir():
        path.unlink()
    retrain(source, out)


AFTERWARDS = [
    retrain, touch, change_tokenizer, damage, lose_the_card, link_a_shard, leave_notes, leave_a_folder,
    link_the_journal, forge_the_journal, retrain_when_the_journal_is_gone,
]  # fmt: skip


@pytest.mark.parametrize("change", AFTERWARDS, ids=lambda value: value.__name__)
def test_an_out_that_is_not_all_this_jobs_is_left_alone(
    source: Path, published: Path, change: Callable[[Path, Path], None]
) -> None:
    change(source, published)
    before = sorted(published.rglob("*")), files_of(published)
    assert "not empty" in refused("out_exists", source, published).message
    assert (sorted(published.rglob("*")), files_of(published)) == before


def test_a_signal_during_the_journals_removal_leaves_none(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmdir = os.rmdir

    def once(path: Path, *args, **options) -> None:
        monkeypatch.setattr(os, "rmdir", rmdir)
        raise Cut

    monkeypatch.setattr(os, "rmdir", once)
    with pytest.raises(Cut):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out" / ".kizami").exists()
    assert (tmp_path / "out" / "kizami.json").exists()


# ---------------------------------------------------------------- what is a journal


def only(place: Path) -> Path:
    """OUT.partial with nothing but a folder for the journal."""
    shutil.rmtree(place)
    (place / ".kizami").mkdir(parents=True)
    return place / JOURNAL


@pytest.mark.parametrize("restart", [False, True])
def test_a_link_in_place_of_the_journal_is_not_followed(
    source: Path, partial: Path, tmp_path: Path, restart: bool
) -> None:
    mine = tmp_path / "mine.txt"
    for make in (lambda: partial / JOURNAL, lambda: only(partial)):
        path = make()
        path.unlink(missing_ok=True)
        mine.write_bytes(b'{"identity":{}}\nno end of line')
        path.symlink_to(mine)
        refused("out_exists", source, tmp_path / "out", restart=restart)
        assert mine.read_bytes() == b'{"identity":{}}\nno end of line'
        assert path.is_symlink()


def test_a_pipe_in_place_of_the_journal_is_not_waited_for(source: Path, partial: Path, tmp_path: Path) -> None:
    path = only(partial)
    os.mkfifo(path)
    refused("out_exists", source, tmp_path / "out")
    with pytest.raises(KizamiError, match="is a named pipe"):
        Journal.open(partial, {})


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("text", [b"", b"dear diary", b"{}\ndear diary"])
def test_a_strangers_journal_is_neither_cut_nor_replaced(
    source: Path, partial: Path, tmp_path: Path, text: bytes, restart: bool
) -> None:
    (partial / JOURNAL).write_bytes(text)
    before = files_of(partial)
    refused("out_exists", source, tmp_path / "out", restart=restart)
    assert files_of(partial) == before


def test_the_journal_of_another_job_is_not_cut(source: Path, partial: Path, tmp_path: Path) -> None:
    text = b'{"identity":{}}\nhalf a li'
    (partial / JOURNAL).write_bytes(text)
    refused("resume_mismatch", source, tmp_path / "out")
    assert (partial / JOURNAL).read_bytes() == text


@pytest.mark.parametrize("pattern", ["model-*", ".kizami/rows-*"])
def test_a_finished_file_that_became_a_link_is_written_anew(
    source: Path, partial: Path, tmp_path: Path, pattern: str
) -> None:
    path = min(partial.glob(pattern))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    events: list[object] = []
    convert(source, tmp_path / "out", on_event=events.append)
    started = events[0]
    assert isinstance(started, Started)
    assert len(started.rewritten) == 1
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_symlink()]
    assert (tmp_path / "elsewhere").read_bytes() == before


@pytest.mark.parametrize("pattern", ["model-*", ".kizami/rows-*"])
def test_a_finished_file_that_becomes_a_link_during_the_run_is_not_published(
    source: Path, partial: Path, tmp_path: Path, pattern: str
) -> None:
    def link(event: object) -> None:
        path = min(partial.glob(pattern))
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")

    refused("shard_lost", source, tmp_path / "out", on_event=link)
    assert not (tmp_path / "out").exists()


def test_a_mismatch_shows_values_in_short(source: Path, partial: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(source)
    policy = Policy(max_shard_bytes=132_000, ignore=("x" * 500,))
    with pytest.raises(KizamiError, match=r"policy\.ignore: .*xxx\.\.\. now") as e:
        run(build_plan(checkpoint, policy, Method("minmax")), checkpoint, tmp_path / "out")
    assert len(e.value.message) < 300


# ---------------------------------------------------------------- strangers


@pytest.mark.parametrize(
    "place", ["empty/", "chat/empty/", ".kizami/empty/", ".kizami/.rows-00001.jsonl.tmp/", "tokenizer.json/", "a.txt",
              ".kizami/.notes.tmp", "model-1.safetensors", "chat/a.txt"]
)  # fmt: skip
def test_a_strangers_entry_is_refused_before_the_work(source: Path, partial: Path, tmp_path: Path, place: str) -> None:
    path = partial / place
    if place.endswith("/"):
        path.unlink(missing_ok=True)
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    events: list[object] = []
    for restart in (False, True):
        said = refused("strange_file", source, tmp_path / "out", restart=restart, on_event=events.append)
        assert f"1 files or folders that kizami did not write there: {place}" in said.message
        assert events == []
        assert path.exists()
    (path.rmdir if place.endswith("/") else path.unlink)()
    convert(source, tmp_path / "out")


@pytest.mark.parametrize("place", ["empty", ".kizami/empty", "chat/empty"])
def test_a_strangers_folder_that_comes_during_the_run_is_not_published(
    source: Path, partial: Path, tmp_path: Path, place: str
) -> None:
    def leave(event: object) -> None:
        (partial / place).mkdir(parents=True)

    refused("strange_file", source, tmp_path / "out", on_event=leave)
    assert (partial / place).is_dir()
    assert not (tmp_path / "out").exists()


def test_what_a_killed_run_leaves_is_no_stranger(source: Path, partial: Path, tmp_path: Path) -> None:
    for name in ("model-00001-of-00003.safetensors", "chat/template.jinja", "kizami.json", "README.md"):
        path = partial / name
        path.unlink(missing_ok=True)
        path.with_name(f".{path.name}.tmp").write_bytes(b"half")
    (partial / ".kizami" / ".rows-00001.jsonl.tmp").write_bytes(b"half")
    convert(source, tmp_path / "out")
    convert(source, tmp_path / "clean")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "clean")


# ---------------------------------------------------------------- limits of the machine


def test_a_system_without_threads_is_a_refusal(
    kizami: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("kizami-compute"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    done = kizami("convert", source, tmp_path / "out", "--workers", "4", "--method", "minmax", "--json")
    assert done.code == 2
    assert done.json["error"]["code"] == "no_threads"
    assert "fewer --workers" in done.json["error"]["hint"]


def test_side_files_and_rows_beside_their_report_need_room(source: Path, tmp_path: Path) -> None:
    _, plan = plan_of(source)
    (source / "tokenizer.json").write_bytes(b" " * 3_000_000)
    need = place.needed_bytes(plan, plan.shards, 3_000_000)
    assert need == plan.output.file_bytes + 3_000_000 + 2 * place.ROW_BYTES * sum(len(s.steps) for s in plan.shards)
    assert place.needed_bytes(plan, [], 0) == place.ROW_BYTES * sum(len(shard.steps) for shard in plan.shards)
    usage = shutil.disk_usage(tmp_path)
    template = (source / "chat/template.jinja").stat().st_size
    for free in (need + template - 1, need + template):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
            if free < need + template:
                refused("disk_full", source, tmp_path / "out")
            else:
                convert(source, tmp_path / "out")


@pytest.mark.parametrize("name", ["out", "out.partial"])
def test_a_mount_point_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / name)
    assert f"{name}/model" in (refused("bad_out", source, tmp_path / "out").hint or "")
    assert list((tmp_path / name).iterdir()) == []


# ---------------------------------------------------------------- --dry-run


def stranger(out: Path) -> Path:
    partial = out.with_name("out.partial")
    partial.mkdir()
    (partial / "thesis.tex").write_text("mine")
    return out


def full(out: Path) -> Path:
    out.mkdir()
    (out / "a").touch()
    return out


@pytest.mark.parametrize(
    ("make", "code"),
    [(stranger, "out_exists"), (full, "out_exists"), (lambda out: out.parent / "src" / "new", "out_in_source")],
)
def test_a_dry_run_refuses_what_convert_refuses(
    kizami: Run, source: Path, tmp_path: Path, make: Callable[[Path], Path], code: str
) -> None:
    out = make(tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    ends = [kizami("convert", source, out, "--json", *dry) for dry in ([], ["--dry-run"])]
    assert [(done.code, done.json["error"]["code"]) for done in ends] == [(2, code)] * 2
    assert ends[0].json == ends[1].json
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_of_what_convert_would_only_finish_is_none(kizami: Run, source: Path, published: Path) -> None:
    words = ["convert", source, published, "--max-shard-size", "132KB", "--method", "minmax", "--json"]
    before = files_of(published)
    assert kizami(*words, "--dry-run").json["fits"] is True
    assert files_of(published) == before
    assert kizami(*words).code == 0
    assert not (published / ".kizami").exists()


def test_no_output_is_put_into_another(source: Path, tmp_path: Path) -> None:
    checkpoint, plan = plan_of(source)
    run(plan, checkpoint, tmp_path / "out", workers=1)
    before = files_of(tmp_path / "out")
    for inner in ("sub", "deep/er/sub"):
        with pytest.raises(KizamiError, match="would not verify any more") as e:
            run(plan, checkpoint, tmp_path / "out" / inner, workers=1)
        assert e.value.code == "bad_out"
    assert files_of(tmp_path / "out") == before


def test_a_restart_takes_away_only_what_the_job_has_made(source: Path, partial: Path, tmp_path: Path) -> None:
    (partial / "model-00007-of-00163.safetensors").write_text("somebody's")
    before = files_of(partial)
    with pytest.raises(KizamiError, match="model-00007-of-00163") as e:
        convert(source, tmp_path / "out", restart=True)
    assert e.value.code == "strange_file"
    assert files_of(partial) == before  # the finished shards, too
    (partial / "model-00007-of-00163.safetensors").unlink()
    checkpoint = Checkpoint.open(source)
    one_file = build_plan(checkpoint, Policy(), Method("minmax"))  # fewer files than the job that goes
    run(one_file, checkpoint, tmp_path / "out", workers=1, restart=True)
    run(one_file, checkpoint, tmp_path / "clean", workers=1)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "clean")


def test_a_stranger_in_a_published_folder_is_seen(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    (tmp_path / "out" / ".kizami").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    refused("out_exists", source, tmp_path / "out")

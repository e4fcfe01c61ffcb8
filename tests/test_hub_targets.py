"""A repository that others write to as well, and folders that lie where ours would: nothing is published over a hole,
nothing of anybody else's goes, and what cannot be pushed is refused before the work."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from cli_fixtures import Done, files_of, process
from local_hub import LocalHub
from local_hub_faults import Fault

from kizami.cli.hub_finished import clear_going, going_of, is_going, refuse_going, remove_going
from kizami.formats.errors import KizamiError
from kizami.formats.hub import outgoing
from kizami.formats.hub.target import STAKE
from kizami.quantize.run.delivery import stake_of

DST = "me/tiny-int4"
SMALL = ("--max-shard-size", "300KB")  # 14 shards: two commits, and the last
INDEX = "model.safetensors.index.json"
THIRD = "model-00003-of-00014.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LocalHub]:
    with LocalHub(tmp_path / "hub") as made:
        yield made


@pytest.fixture(scope="session")
def out(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished output in 14 shards. Read only."""
    folder = tmp_path_factory.mktemp("targets") / "out"
    done = process("convert", tiny_checkpoint, folder, *SMALL, "-q")
    assert done.code == 0, done.err
    assert len(list(folder.glob("*.safetensors"))) == 14
    return folder


def run(hub: LocalHub, *words: object, **env: str) -> Done:
    home = Path(hub.store.path(hub.store.regular(b""))).parents[2] / "home"
    return process(*words, "--json", env=hub.environment(home) | env)


def refusal(done: Done) -> dict[str, Any]:
    """Of a run that was refused, and said so in one object."""
    assert done.code == 2, done.err
    error: dict[str, Any] = done.json["error"]
    return error


def there(hub: LocalHub) -> dict[str, str]:
    return {name: sha256 for name, sha256 in hub.files(DST).items() if name not in (".gitattributes", ".gitignore")}


def fine_tuned(source: Path, folder: Path) -> Path:
    """The same headers and the same config, and other weights."""
    shutil.copytree(source, folder)
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        for name, info in header.items():
            if name != "__metadata__" and info["dtype"] == "F8_E4M3":
                first = begin + info["data_offsets"][0]
                data[first : first + 64] = bytes(byte ^ 0x80 for byte in data[first : first + 64])
        path.write_bytes(data)
    return folder


# ------------------------------------------------------------------------------------------------------ before the work


@pytest.mark.long
def test_a_dry_run_is_refused_as_the_run_would_be_and_makes_nothing(
    hub: LocalHub, out: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    words = ("convert", tiny_checkpoint, tmp_path / "out", *SMALL, "--dry-run", "--push-to", DST)
    small = run(hub, *words, "--delete-pushed", "--scratch-limit", "100KB")
    assert refusal(small)["code"] == "scratch_limit"
    done = run(hub, *words, "--delete-pushed", "--scratch-limit", "10MB")
    assert done.code == 0, done.err
    assert 200_000 < done.json["scratch_bytes"] < 10_000_000
    assert done.json["scratch_limit"] == 10_000_000
    assert "the run makes it" in done.json["target"]
    nobody = refusal(run(hub, *words, HF_TOKEN=""))
    assert (nobody["code"], nobody["message"]) == ("hub_error", "is to be made, and there is no token")
    assert "hf auth login" in nobody["hint"]
    with pytest.raises(KeyError):
        hub.files(DST)
    assert run(hub, "push", out, DST).code == 0
    assert run(hub, *words).json["target"] == "holds this conversion already"
    other = run(hub, *words, "--group-size", "64")
    assert refusal(other)["code"] == "push_target"
    assert not list(tmp_path.glob("out*"))


@pytest.mark.long
@pytest.mark.parametrize("what", ["another shard", "another source", "forged manifest", "OUT.done"])
def test_a_dry_run_sees_what_is_wrong_with_a_target_that_looks_finished(
    hub: LocalHub, out: Path, tiny_checkpoint: Path, tmp_path: Path, what: str
) -> None:
    source, more = tiny_checkpoint, ()
    assert run(hub, "push", out, DST).code == 0
    if what == "another shard":
        hub.commit(DST, {THIRD: b"other bytes"})
    elif what == "another source":
        source = fine_tuned(tiny_checkpoint, tmp_path / "tuned")
    elif what == "forged manifest":
        manifest = json.loads((out / "kizami.json").read_text())
        hub.commit(DST, {"kizami.json": json.dumps(manifest | {"files": 5}).encode()})
    else:
        more = ("--delete-pushed",)
        (tmp_path / "out.done").mkdir()
        (tmp_path / "out.done" / "mine").write_text("x")
    words = ("convert", source, tmp_path / "out", *SMALL, "--push-to", DST, *more)
    dry, real = (refusal(run(hub, *words, *last)) for last in (("--dry-run",), ()))
    assert dry == real


@pytest.mark.long
def test_a_card_that_kizami_pushed_is_replaced_and_one_that_was_edited_there_stays(
    hub: LocalHub, out: Path, tmp_path: Path
) -> None:
    mine = shutil.copytree(out, tmp_path / "mine")
    assert run(hub, "push", mine, DST).code == 0
    (mine / "README.md").write_text((mine / "README.md").read_text() + "\nMeasured by me.\n")
    assert run(hub, "push", mine, DST).code == 0
    assert there(hub) == files_of(mine)
    (mine / "README.md").write_text((mine / "README.md").read_text() + "\nMeasured again.\n")
    again = run(hub, "push", mine, DST)
    assert again.code == 0
    assert f"`hf upload {DST} OUT/README.md README.md`" in again.err
    assert there(hub)["README.md"] != files_of(mine)["README.md"]


@pytest.mark.long
@pytest.mark.parametrize("file", ["config.json", "kizami.json", "tokenizer.json"])
def test_what_changes_while_it_is_pushed_is_not_published(hub: LocalHub, out: Path, tmp_path: Path, file: str) -> None:
    mine = shutil.copytree(out, tmp_path / "mine")

    def edit() -> None:
        """When the repository is there, OUT has been verified, and nothing has been sent."""
        while True:
            with suppress(KeyError):
                hub.commits(DST)
                break
            time.sleep(0.005)
        (mine / file).write_text("{}")

    editor = Thread(target=edit)
    editor.start()
    error = refusal(run(hub, "push", mine, DST))
    editor.join()
    assert (error["code"], error["file"]) == ("changed", file)
    assert not {INDEX, "config.json", "kizami.json"} & there(hub).keys()
    shutil.copy(out / file, mine / file)
    again = run(hub, "push", mine, DST)
    assert (again.code, there(hub)) == (0, files_of(out)), again.err


@pytest.mark.long
def test_a_strangers_card_that_comes_meanwhile_stays(hub: LocalHub, out: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(out, tmp_path / "mine")
    assert run(hub, "push", mine, DST).code == 0
    (mine / "README.md").write_text((mine / "README.md").read_text() + "\nMeasured by me.\n")
    hub.faults.add(Fault("move", "POST", "/commit/", repo=DST, files={"README.md": b"of somebody else"}))
    assert run(hub, "push", mine, DST).code == 0
    assert hub.read(DST, "README.md") == b"of somebody else"


@pytest.mark.long
@pytest.mark.parametrize("command", ["push", "convert"])
def test_one_that_comes_during_the_first_push_stays_too(
    hub: LocalHub, out: Path, tiny_checkpoint: Path, tmp_path: Path, command: str
) -> None:
    hub.faults.add(Fault("move", "POST", "/commit/", skip=2, repo=DST, files={"README.md": b"of somebody else"}))
    words = ("push", out, DST) if command == "push" else ("convert", tiny_checkpoint, tmp_path / "out", *SMALL)
    done = run(hub, *words, *(("--push-to", DST) if command == "convert" else ()))
    assert done.code == 0, done.err
    assert f"{DST} has a README.md of its own, which stays" in done.err
    assert hub.read(DST, "README.md") == b"of somebody else"
    ours = {name: sha256 for name, sha256 in files_of(out).items() if name != "README.md"}
    assert ours.items() <= there(hub).items()


@pytest.mark.long
def test_a_model_that_another_finishes_meanwhile_gets_none_of_our_shards(hub: LocalHub, out: Path) -> None:
    theirs = {"config.json": b"{}", "pytorch_model.bin": b"weights"}
    hub.faults.add(Fault("move", "POST", "/commit/", repo=DST, files=theirs))
    error = refusal(run(hub, "push", out, DST))
    assert error["code"] == "push_target"
    assert "holds config.json, of somebody else" in error["message"]
    assert set(there(hub)) == set(theirs)


@pytest.mark.long
@pytest.mark.parametrize("what", ["their file", "their stake on our model"])
def test_a_dry_run_sees_what_others_put_beside_our_shards(
    hub: LocalHub, out: Path, tiny_checkpoint: Path, tmp_path: Path, what: str
) -> None:
    plan_hash = json.loads((out / "kizami.json").read_text())["plan_hash"]
    if what == "their file":
        hub.add_repo(DST, {})
        hub.commit(DST, {STAKE: stake_of(plan_hash), "tokenizer.json": b"of somebody else"})
    else:
        assert run(hub, "push", out, DST).code == 0
        hub.commit(DST, {STAKE: stake_of("0" * 64)})
    words = ("convert", tiny_checkpoint, tmp_path / "out", *SMALL, "--push-to", DST)
    before = len(hub.commits(DST))
    dry, real = (refusal(run(hub, *words, *last)) for last in (("--dry-run",), ()))
    assert dry == real
    assert dry["code"] == "push_target"
    assert len(hub.commits(DST)) == before
    assert not list(tmp_path.glob("out*/*.safetensors"))


def test_a_file_that_changes_while_it_is_sent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large one the Hub only says that its bytes are not those that it was told of."""
    monkeypatch.setattr(outgoing, "IN_MEMORY", 4)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    one = outgoing.Outgoing.of("model.safetensors", path, None)
    one.refuse_change("model.safetensors")
    path.write_bytes(b"more weights")
    with pytest.raises(KizamiError) as refused:
        one.refuse_change("model.safetensors")
    assert refused.value.code == "changed"
    path.unlink()
    with pytest.raises(KizamiError, match="has changed since"):
        one.refuse_change("model.safetensors")


def test_a_link_in_the_place_of_a_card_is_not_followed(hub: LocalHub, out: Path, tmp_path: Path) -> None:
    """`verify` refuses it; this is one that comes after that."""
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "README.md").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(KizamiError) as refused:
        outgoing.Outgoing.of("README.md", tmp_path / "README.md", None)
    assert refused.value.code == "changed"


def test_a_card_that_is_not_utf8_is_refused_before_anything_is_sent(hub: LocalHub, out: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(out, tmp_path / "mine")
    (mine / "README.md").write_bytes((mine / "README.md").read_bytes() + "\nVermessen: größer.\n".encode("latin-1"))
    error = refusal(run(hub, "push", mine, DST))
    assert (error["code"], error["file"]) == ("bad_file", "README.md")
    assert "is not UTF-8" in error["message"]
    with pytest.raises(KeyError):
        hub.files(DST)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(KizamiError) as refused:
        outgoing.Outgoing.of("tokenizer.json", tmp_path / "tokenizer.json", None)
    assert refused.value.code == "not_a_file"


def test_a_file_of_the_source_with_the_name_of_our_stake_is_not_taken_for_it(
    hub: LocalHub, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_checkpoint, tmp_path / "src")
    (source / "kizami-push.json").write_text('{"mine": 1}')
    done = run(hub, "convert", source, tmp_path / "out", "--push-to", DST)
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == there(hub)
    assert "kizami-push.json" not in there(hub)


# ------------------------------------------------------------------------------------- what others do in the repository


@pytest.mark.parametrize(
    ("skip", "file"),
    [
        pytest.param(2, None, id="gone before the last commit"),
        pytest.param(2, b"other bytes", id="another before the last commit", marks=pytest.mark.long),
        pytest.param(1, None, id="gone between two of ours", marks=pytest.mark.long),
    ],
)
def test_no_index_is_pushed_over_a_shard_that_is_lost(hub: LocalHub, out: Path, skip: int, file: bytes | None) -> None:
    hub.faults.add(Fault("move", "POST", "/commit/", skip=skip, repo=DST, files={THIRD: file}))
    error = refusal(run(hub, "push", out, DST))
    assert (error["code"], error["file"]) == ("hub_error", f"{DST}/{THIRD}")
    assert "is gone or another file now" in error["message"]
    assert not {INDEX, "config.json", "kizami.json"} & there(hub).keys()
    if file is None:
        again = run(hub, "push", out, DST)
        assert (again.code, there(hub)) == (0, files_of(out)), again.err


@pytest.mark.long
def test_nor_by_a_conversion(hub: LocalHub, out: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    words = ("convert", tiny_checkpoint, tmp_path / "out", *SMALL, "--push-to", DST)
    hub.faults.add(Fault("move", "POST", "/commit/", skip=2, repo=DST, files={THIRD: None}))
    assert refusal(run(hub, *words))["code"] == "hub_error"
    assert INDEX not in there(hub)
    assert not (tmp_path / "out").exists()
    again = run(hub, *words)
    assert again.code == 0, again.err
    assert files_of(tmp_path / "out") == there(hub) == files_of(out)


@pytest.mark.long
@pytest.mark.parametrize("delete", [(), ("--delete-pushed",)])
def test_a_fine_tune_is_refused_where_its_model_is_before_anything_is_made(
    hub: LocalHub, out: Path, tiny_checkpoint: Path, tmp_path: Path, delete: tuple[str, ...]
) -> None:
    assert run(hub, "push", out, DST).code == 0
    before, other = there(hub), fine_tuned(tiny_checkpoint, tmp_path / "tuned")
    error = refusal(run(hub, "convert", other, tmp_path / "out", *SMALL, "--push-to", DST, *delete))
    assert (error["code"], "of another source by this plan" in error["message"]) == ("push_target", True)
    assert there(hub) == before
    assert not (tmp_path / "out.partial").exists()


# ------------------------------------------------------------------------------- what the repository, or the token, is


@pytest.mark.long
def test_a_token_that_may_not_write_is_refused_before_anything_is_made(
    hub: LocalHub, out: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    hub.add_repo(DST, {"notes.txt": b"mine"}, read_only=True)
    error = refusal(run(hub, "convert", tiny_checkpoint, tmp_path / "out", "--push-to", DST))
    assert (error["code"], "may the token write there?" in error["hint"]) == ("hub_error", True)
    assert not (tmp_path / "out.partial").exists()
    assert "answers 403" in refusal(run(hub, "push", out, DST))["message"]
    nobody = refusal(run(hub, "push", out, DST, HF_TOKEN=""))
    assert ("answers 401" in nobody["message"], "HF_TOKEN" in nobody["hint"]) == (True, True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("config.json", "config.json"),
        pytest.param("*.safetensors", "model-00001-of-00001.safetensors", marks=pytest.mark.long),
        pytest.param("*.md", "README.md", marks=pytest.mark.long),
    ],
)
def test_a_file_that_the_hub_ignores_is_named_before_anything_is_made(
    hub: LocalHub, converted: Path, tiny_checkpoint: Path, tmp_path: Path, rule: str, name: str
) -> None:
    hub.add_repo(DST, {".gitignore": f"{rule}\n".encode()})
    for words in (("convert", tiny_checkpoint, tmp_path / "out", "--push-to", DST), ("push", converted, DST)):
        error = refusal(run(hub, *words))
        assert (error["code"], name in error["message"]) == ("push_target", True)
    assert not (tmp_path / "out.partial").exists()
    assert len(hub.commits(DST)) == 1


@pytest.mark.long
def test_one_that_is_ignored_since_then_is_left_out_of_no_commit(hub: LocalHub, out: Path) -> None:
    rules = {".gitignore": b"config.json\n"}
    hub.faults.add(Fault("move", "POST", "/preupload/", skip=3, repo=DST, files=rules))
    error = refusal(run(hub, "push", out, DST))
    assert (error["code"], "config.json" in error["message"]) == ("push_target", True)
    assert INDEX not in there(hub)


@pytest.mark.long
@pytest.mark.parametrize(
    "delete", [pytest.param((), marks=pytest.mark.long), pytest.param(("--delete-pushed",), id="deleted here")]
)
def test_shards_outside_large_storage_are_known_by_their_bytes(
    hub: LocalHub, out: Path, tiny_checkpoint: Path, tmp_path: Path, delete: tuple[str, ...]
) -> None:
    hub.add_repo(DST, {".gitattributes": b"*.bin filter=lfs\n"}, lfs_from=10_000_000, lfs_weights=False)
    words = ("convert", tiny_checkpoint, tmp_path / "out", *SMALL, "--push-to", DST, *delete)
    done = run(hub, *words)
    assert done.code == 0, done.err
    assert there(hub) == files_of(out)
    assert not any(request.method == "PUT" for request in hub.requests), "all of them are small files"
    again = run(hub, "push", out, DST)
    assert (again.code, again.json["sent"]) == (0, 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("status", "hint"), [(401, "HF_TOKEN"), (402, "billing"), (403, "may the token"), (413, "too large")]
)
def test_a_refusal_is_met_with_a_hint_that_helps(hub: LocalHub, out: Path, status: int, hint: str) -> None:
    hub.faults.add(Fault("status", "POST", "/commit/", status=status, times=99))
    error = refusal(run(hub, "push", out, DST))
    assert error["code"] == "hub_error"
    assert f"answers {status}" in error["message"]
    assert hint in error["hint"]
    assert "later" not in error["hint"]


# ------------------------------------------------------------------------------------------ the end of a run, and after


@pytest.mark.long
def test_what_is_whole_on_the_hub_is_told_as_its_run_would_have_told(
    hub: LocalHub, out: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    words = ("convert", tiny_checkpoint, tmp_path / "out", *SMALL, "--push-to", DST, "--delete-pushed")
    first, again = run(hub, *words), run(hub, *words)
    assert (first.code, again.code) == (0, 0), again.err
    assert again.json | {"seconds": 0} == first.json | {"seconds": 0}
    assert again.json["pushed"] == {"repo": DST, "commit": hub.commits(DST)[-1].oid}
    missed = run(hub, *words, "--max-rel-error", "0.0001")
    assert (missed.code, len(missed.json["exceeding"]) > 0) == (1, True)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.long
def test_what_is_no_longer_whole_on_the_hub_is_made_whole(
    hub: LocalHub, out: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    words = ("convert", tiny_checkpoint, tmp_path / "out", *SMALL, "--push-to", DST, "--delete-pushed")
    assert run(hub, *words).code == 0
    hub.commit(DST, {THIRD: None, "tokenizer.json": None})
    again = run(hub, *words)
    assert again.code == 0, again.err
    assert f"but for 2 files, {THIRD} among them" in again.err
    assert there(hub) == files_of(out)
    hub.commit(DST, {THIRD: b"other bytes"})
    error = refusal(run(hub, *words))
    assert (error["code"], THIRD in error["message"]) == ("push_target", True)
    assert refusal(run(hub, "push", out, DST))["code"] == "push_target"


@pytest.mark.long
def test_a_limit_that_is_missed_by_what_is_published_is_said_so(
    hub: LocalHub, out: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    assert run(hub, "push", out, DST).code == 0
    words = ("convert", tiny_checkpoint, tmp_path / "out", *SMALL, "--push-to", DST, "--max-rel-error", "0.0001")
    done = run(hub, *words)
    assert (done.code, done.json["error"]["code"]) == (1, "over_threshold")
    assert "it is on the Hub already" in done.json["error"]["message"]


@pytest.mark.long
def test_a_manifest_that_was_edited_there_is_not_gone_by(
    hub: LocalHub, out: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    plan_hash = json.loads((out / "kizami.json").read_bytes())["plan_hash"]
    hub.add_repo(DST, {"kizami.json": json.dumps({"plan_hash": plan_hash, "shards": 3}).encode()})
    for words in (("push", out, DST), ("convert", tiny_checkpoint, tmp_path / "out", *SMALL, "--push-to", DST)):
        error = refusal(run(hub, *words))
        assert (error["code"], "is not as kizami wrote it" in error["message"]) == ("push_target", True)


@pytest.mark.long
def test_a_strangers_folder_is_refused_where_it_would_be_in_the_way(
    hub: LocalHub, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "out.done"
    theirs.mkdir()
    (theirs / "precious.txt").write_text("mine")
    words = ("convert", tiny_checkpoint, tmp_path / "out", "--push-to", DST)
    error = refusal(run(hub, *words, "--delete-pushed"))
    assert (error["code"], error["file"]) == ("out_exists", str(theirs))
    assert hub.requests == []
    assert not (tmp_path / "out.partial").exists()
    done = run(hub, *words)
    assert done.code == 0, done.err
    assert (theirs / "precious.txt").read_text() == "mine"


@pytest.mark.long
def test_one_that_appears_while_it_runs_stays_too(hub: LocalHub, tiny_checkpoint: Path, tmp_path: Path) -> None:
    words = ("convert", tiny_checkpoint, tmp_path / "out", "--push-to", DST, "--delete-pushed")
    hub.faults.add(Fault("status", "POST", "/commit/", status=403, skip=1))
    assert refusal(run(hub, *words))["code"] == "hub_error"
    theirs = tmp_path / "out.done"
    theirs.mkdir()
    (theirs / "precious.txt").write_text("mine")
    assert refusal(run(hub, *words))["code"] == "out_exists"
    theirs.rename(tmp_path / "elsewhere")
    done = run(hub, *words)
    assert done.code == 0, done.err
    assert not list(tmp_path.glob("out*"))


def ended(folder: Path) -> Path:
    """What a run leaves whose shards are on the Hub."""
    (folder / ".kizami").mkdir(parents=True)
    (folder / ".kizami" / "journal.jsonl").write_text('{"identity":{}}\n')
    (folder / ".kizami" / "rows-00001.jsonl").touch()
    (folder / "sub").mkdir()
    for name in ("kizami.json", "config.json", "sub/file"):
        (folder / name).touch()
    return folder


def test_what_is_left_of_a_run_is_known_however_much_of_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any point of its end, it is still ours, and goes the next time."""
    going = going_of(tmp_path / "out")
    for left in range(20):
        ended(going)
        count = left

        def dies(real: Any) -> Any:
            def call(*given: Any, **more: Any) -> Any:
                nonlocal count
                count -= 1
                if count < 0:
                    raise KeyboardInterrupt
                return real(*given, **more)

            return call

        with monkeypatch.context() as patch:
            for owner, name in ((Path, "unlink"), (Path, "rmdir"), (shutil, "rmtree")):
                patch.setattr(owner, name, dies(getattr(owner, name)))
            try:
                remove_going(going)
            except KeyboardInterrupt:
                pass
            else:
                break
        refuse_going(tmp_path / "out")
        clear_going(tmp_path / "out")
        assert not going.exists()
    assert left > 5
    assert not going.exists()


@pytest.mark.parametrize("file", ["model-00001-of-00002.safetensors", "no kizami.json", "no journal", "a link"])
def test_what_looks_like_the_end_of_a_run_is_not_taken_for_one(tmp_path: Path, file: str) -> None:
    going = ended(going_of(tmp_path / "out"))
    assert is_going(going)
    if file == "no kizami.json":
        (going / "kizami.json").unlink()
    elif file == "no journal":
        (going / ".kizami" / "journal.jsonl").write_text("notes\n")
    elif file == "a link":
        going.rename(tmp_path / "real")
        going.symlink_to(tmp_path / "real")
    else:
        (going / file).touch()
    assert not is_going(going)
    with pytest.raises(KizamiError, match="is not kizami's"):
        refuse_going(tmp_path / "out")
    clear_going(tmp_path / "out")
    assert going.exists()

import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kizami.formats.checkpoint import MAX_STRAY_NOTES, Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.header import encode_header
from kizami.formats.index import INDEX_NAME, SINGLE_NAME
from kizami.formats.tensors import TensorSpec

SHARDS = {
    "model-1-of-10.safetensors": ["z", "a"],
    "model-2-of-10.safetensors": ["c"],
    "model-10-of-10.safetensors": ["b", "d"],
}


def write_shard(path: Path, names: list[str], nbytes: int = 4) -> None:
    specs = [TensorSpec(name, "U8", (nbytes,)) for name in names]
    path.write_bytes(encode_header(specs, None) + bytes(nbytes * len(names)))


def write_index(folder: Path, shards: dict[str, list[str]], total_size: Any = 20) -> None:
    weight_map = {name: file for file, names in shards.items() for name in names}
    content = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "src"
    root.mkdir()
    (root / "config.json").write_text('{"model_type": "glm_moe_dsa"}')
    for file, names in SHARDS.items():
        write_shard(root / file, names)
    write_index(root, SHARDS)
    return root


@pytest.fixture
def single(tmp_path: Path) -> Path:
    root = tmp_path / "single"
    root.mkdir()
    (root / "config.json").write_text("{}")
    write_shard(root / SINGLE_NAME, ["w"])
    return root


def refusal(root: Path) -> KizamiError:
    with pytest.raises(KizamiError) as caught:
        Checkpoint.open(root)
    return caught.value


@contextmanager
def opens_recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    opened: list[str] = []
    original = os.open

    def spy(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(os.path.basename(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", spy)
    yield opened


def test_files_come_in_natural_order_and_tensors_by_file_and_offset(folder: Path) -> None:
    ckpt = Checkpoint.open(str(folder))
    assert list(ckpt.headers) == list(SHARDS)
    assert list(ckpt.tensors) == ["z", "a", "c", "b", "d"]
    assert ckpt.tensors["d"].file == "model-10-of-10.safetensors"
    assert ckpt.config["model_type"] == "glm_moe_dsa"
    assert (ckpt.root, ckpt.indexed, ckpt.notes) == (folder, True, ())
    assert ckpt.path("model-2-of-10.safetensors") == folder / "model-2-of-10.safetensors"


def test_a_checkpoint_survives_pickling_for_worker_processes(folder: Path) -> None:
    ckpt = Checkpoint.open(folder)
    assert pickle.loads(pickle.dumps(ckpt)) == ckpt


def test_a_folder_with_one_file_needs_no_index(single: Path) -> None:
    ckpt = Checkpoint.open(single)
    assert (list(ckpt.headers), list(ckpt.tensors), ckpt.indexed) == ([SINGLE_NAME], ["w"], False)


def test_one_file_of_a_folder_can_be_opened_alone(folder: Path) -> None:
    ckpt = Checkpoint.open(folder / "model-2-of-10.safetensors")
    assert (ckpt.root, list(ckpt.tensors), ckpt.indexed) == (folder, ["c"], False)
    assert ckpt.notes == (
        "model-1-of-10.safetensors: not the file asked for, not read",
        "model-10-of-10.safetensors: not the file asked for, not read",
    )


def test_a_relative_root_stays_right_when_the_working_folder_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    ckpt = Checkpoint.open("src")
    monkeypatch.chdir("/")
    ckpt.check_unchanged()
    assert ckpt.root == folder


def test_files_that_the_index_does_not_name_are_noted_and_never_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard(folder / "consolidated.safetensors", ["z"], nbytes=9)
    (folder / "broken.safetensors").write_bytes(b"x")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with opens_recorded(monkeypatch) as opened:
        ckpt = Checkpoint.open(folder)
    assert opened == ["config.json", INDEX_NAME, *SHARDS]
    assert ckpt.tensors["z"].nbytes == 4
    assert ckpt.notes == (
        "broken.safetensors: not named in the index, not read",
        "consolidated.safetensors: not named in the index, not read",
        "pytorch_model.bin: not safetensors, never opened",
    )


def test_many_stray_files_are_counted(single: Path) -> None:
    for i in range(MAX_STRAY_NOTES + 5):
        (single / f"{i}.pt").touch()
    notes = Checkpoint.open(single).notes
    assert len(notes) == MAX_STRAY_NOTES + 1
    assert notes[-1] == "5 more weight files that are not read"


def test_shards_may_have_any_name(folder: Path) -> None:
    renamed = {f"weights-{'abc'[i]}.safetensors": names for i, names in enumerate(SHARDS.values())}
    for old, new in zip(SHARDS, renamed, strict=True):
        (folder / old).rename(folder / new)
    write_index(folder, renamed)
    assert list(Checkpoint.open(folder).headers) == list(renamed)


def test_a_wrong_total_size_is_noted_and_ignored(folder: Path) -> None:
    write_index(folder, SHARDS, total_size=1)
    assert Checkpoint.open(folder).notes == (f"{INDEX_NAME}: total_size 1 is wrong (20 bytes), ignored",)


def test_a_tensor_missing_from_its_file_is_refused(folder: Path) -> None:
    write_shard(folder / "model-2-of-10.safetensors", ["other"])
    error = refusal(folder)
    assert (error.code, error.file, error.tensor) == ("index_mismatch", "model-2-of-10.safetensors", "c")
    assert "is in no file" in error.message


def test_a_tensor_in_another_file_than_the_index_says_is_refused(folder: Path) -> None:
    write_index(folder, {**SHARDS, "model-1-of-10.safetensors": ["z"], "model-2-of-10.safetensors": ["c", "a"]})
    error = refusal(folder)
    assert (error.code, error.tensor) == ("index_mismatch", "a")
    assert "is in model-1-of-10.safetensors" in error.message


def test_a_tensor_that_the_index_does_not_list_is_refused(folder: Path) -> None:
    write_shard(folder / "model-2-of-10.safetensors", ["c", "extra"])
    error = refusal(folder)
    assert (error.code, error.file, error.tensor) == ("index_mismatch", "model-2-of-10.safetensors", "extra")


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    write_shard(folder / "model-2-of-10.safetensors", ["c", "z"])
    error = refusal(folder)
    assert (error.code, error.tensor) == ("duplicate_tensor", "z")
    assert error.message == "is in model-1-of-10.safetensors and again in model-2-of-10.safetensors, expected once"


def test_a_cut_shard_is_refused_with_both_sizes(folder: Path) -> None:
    path = folder / "model-2-of-10.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 2)
    error = refusal(folder)
    assert (error.code, error.file) == ("wrong_size", path.name)
    assert error.message == f"file of {size - 2} bytes, expected {size} by its header"


def test_a_missing_shard_is_refused_with_a_tensor_that_should_be_in_it(folder: Path) -> None:
    (folder / "model-10-of-10.safetensors").unlink()
    error = refusal(folder)
    assert (error.code, error.file, error.tensor) == ("missing_file", "model-10-of-10.safetensors", "b")
    assert error.hint == "finish the download"


def test_a_path_that_does_not_exist_names_the_download_command(tmp_path: Path) -> None:
    for name in ("none", "none.safetensors", "x" * 300, "a\0b"):
        error = refusal(tmp_path / name)
        assert error.code == ("io_error" if len(name) == 300 else "missing_file")
        assert error.code == "io_error" or "hf download" in str(error.hint)


def test_a_file_that_is_no_safetensors_file_is_refused_as_root(folder: Path) -> None:
    assert refusal(folder / "config.json").code == "not_a_file"


def test_a_missing_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    error = refusal(folder)
    assert (error.code, error.file) == ("missing_file", "config.json")
    assert "config.json" in str(error.hint)


def test_without_index_and_weights_the_error_says_what_is_there(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    error = refusal(folder)
    assert "found 3 other .safetensors files (model-1-of-10.safetensors...)" in error.message
    assert "download model.safetensors.index.json too" in str(error.hint)
    for file in SHARDS:
        (folder / file).unlink()
    assert "found no weights" in refusal(folder).message
    (folder / "pytorch_model.bin").touch()
    error = refusal(folder)
    assert "pickled weights only" in error.message
    assert "never unpickles" in str(error.hint)


@pytest.mark.parametrize(
    "target", ["../evil.safetensors", "{outside}/evil.safetensors", "sub/../../evil.safetensors", "x.safetensors\0x"]
)
def test_an_index_entry_that_leaves_the_folder_is_refused_and_its_target_never_opened(
    folder: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard(folder.parent / "evil.safetensors", ["c"])
    (folder / "sub").mkdir()
    target = target.format(outside=folder.parent)
    write_index(folder, {**SHARDS, "model-2-of-10.safetensors": [], target: ["c"]})
    with opens_recorded(monkeypatch) as opened:
        error = refusal(folder)
    assert (error.code, error.tensor) == ("bad_index", "c")
    assert opened == ["config.json", INDEX_NAME]


@pytest.mark.parametrize("file", ["model-2-of-10.safetensors", "config.json", INDEX_NAME])
def test_a_link_out_of_the_folder_is_refused_and_its_target_never_opened(
    folder: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / file).rename(outside)
    (folder / file).symlink_to("../outside.safetensors")
    with opens_recorded(monkeypatch) as opened:
        error = refusal(folder)
    assert (error.code, error.file) == ("outside_folder", file)
    assert str(outside) in error.message
    assert "outside.safetensors" not in opened


def test_a_link_inside_the_folder_and_a_link_to_the_folder_are_followed(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "model-2-of-10.safetensors").rename(folder / "data" / "w")
    (folder / "model-2-of-10.safetensors").symlink_to("data/w")
    link = folder.parent / "link"
    link.symlink_to(folder)
    for root in (folder, link):
        assert list(Checkpoint.open(root).tensors) == ["z", "a", "c", "b", "d"]


def to_cache(folder: Path, repo: Path) -> Path:
    """Lays `folder` out as the Hub's cache does: links in a snapshot, files in blobs."""
    snapshot, blobs = repo / "snapshots" / "0123abcd", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"hash{i}")
        (snapshot / path.name).symlink_to(f"../../blobs/hash{i}")
    return snapshot


def test_a_hub_cache_snapshot_of_links_is_read(folder: Path) -> None:
    snapshot = to_cache(folder, folder.parent / "models--org--tiny")
    ckpt = Checkpoint.open(snapshot)
    assert list(ckpt.tensors) == ["z", "a", "c", "b", "d"]
    ckpt.check_unchanged()
    assert list(Checkpoint.open(snapshot / "model-2-of-10.safetensors").tensors) == ["c"]


def test_errors_in_a_hub_cache_name_the_file_not_its_blob(folder: Path) -> None:
    (folder / "model-2-of-10.safetensors").write_bytes(bytes(8))
    snapshot = to_cache(folder, folder.parent / "models--org--tiny")
    assert refusal(snapshot).file == "model-2-of-10.safetensors"
    (snapshot / INDEX_NAME).write_bytes(b"[]")
    assert refusal(snapshot).file == INDEX_NAME


def test_only_the_same_cache_entrys_blobs_are_open_to_links(folder: Path) -> None:
    snapshot = to_cache(folder, folder.parent / "models--org--tiny")
    other = folder.parent / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (snapshot / "config.json").unlink()
    (other / "hash").write_text("{}")
    (snapshot / "config.json").symlink_to("../../../models--org--other/blobs/hash")
    assert refusal(snapshot).code == "outside_folder"


def test_blobs_outside_a_hub_cache_are_not_open_to_links(folder: Path) -> None:
    assert refusal(to_cache(folder, folder.parent / "data")).code == "outside_folder"


@pytest.mark.parametrize("file", ["model-10-of-10.safetensors", "config.json", INDEX_NAME])
def test_a_dangling_link_is_refused_with_link_and_target(folder: Path, file: str) -> None:
    snapshot = to_cache(folder, folder.parent / "models--org--tiny")
    target = os.readlink(snapshot / file)
    (snapshot / target).unlink()
    error = refusal(snapshot)
    assert (error.code, error.file) == ("dangling_link", file)
    assert error.message == f"is a link to {target}, which does not exist"


def test_a_link_to_itself_is_refused(single: Path) -> None:
    (single / "config.json").unlink()
    (single / "config.json").symlink_to("config.json")
    assert refusal(single).code == "dangling_link"


@pytest.mark.parametrize("file", ["model-2-of-10.safetensors", "config.json", INDEX_NAME])
def test_a_pipe_or_folder_in_place_of_a_file_is_refused_at_once(folder: Path, file: str) -> None:
    (folder / file).unlink()
    os.mkfifo(folder / file)
    error = refusal(folder)
    assert (error.code, error.file) == ("not_a_file", file)
    (folder / file).unlink()
    (folder / file).mkdir()
    assert refusal(folder).message == "is a folder, expected a regular file"


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    status = path.stat()
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.replace(path)


def grow(path: Path) -> None:
    status = path.stat()
    os.truncate(path, status.st_size + 1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "word"), [(touch, "mtime_ns"), (replace, "inode"), (grow, "size"), (Path.unlink, "was there")]
)
def test_a_source_file_changed_since_it_was_opened_is_refused(folder: Path, change: Any, word: str) -> None:
    ckpt = Checkpoint.open(folder)
    ckpt.check_unchanged()
    change(folder / "model-2-of-10.safetensors")
    ckpt.check_unchanged(["model-1-of-10.safetensors"])
    for files in (None, ["model-2-of-10.safetensors"]):
        with pytest.raises(KizamiError, match=word) as caught:
            ckpt.check_unchanged(files)
        assert (caught.value.code, caught.value.file) == ("source_changed", "model-2-of-10.safetensors")

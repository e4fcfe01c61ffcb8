import hashlib
import os
import stat
from pathlib import Path

import pytest

from kizami.formats import side_files
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.header import encode_header
from kizami.formats.side_files import copy_side_file, find_side_files
from kizami.formats.tensors import TensorSpec

COPIED = {
    "tokenizer.json": b'{"a": 1}',
    "tokenizer_config.json": b"{}",
    "tiktoken.model": b"\x00\xff\r\n",
    "tokenization_kimi.py": b"raise SystemExit\n",
    "modeling_deepseek.py": b"import os\r\n",
    "chat_template.jinja": b"{{ x }}",
    "generation_config.json": b"{}",
    "preprocessor_config.json": b"{}",
    "LICENSE": b"MIT",
    "figures/x.png": b"\x89PNG",
    "sub/notes.txt": b"",
    "sub/README.md": b"not the model card",
    "a/b/c/deep.txt": b"deep",
}
LEFT = {
    "config.json": "rewritten",
    "model.safetensors": "weights, converted",
    "README.md": "becomes the model card",
    "consolidated.safetensors": "weights that the checkpoint does not name",
    "sub/pytorch_model.BIN": "weights that the checkpoint does not name",
    "x.gguf": "weights that the checkpoint does not name",
    "optimizer.pt": "weights that the checkpoint does not name",
    "model.safetensors.index.json": "an index of the source's weights",
    "pytorch_model.bin.index.json": "an index of the source's weights",
    "quantize_config.json": "describes the source's quantization",
    "hf_quant_config.json": "describes the source's quantization",
    "recipe.yaml": "describes the source's quantization",
    "kizami.json": "describes an earlier conversion",
    "kizami-report.jsonl": "describes an earlier conversion",
    ".gitattributes": "hidden",
    ".cache/": "hidden",
    ".git/": "hidden",
    "__pycache__/": "compiled Python",
}


def put(path: Path, data: bytes = b"x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "src"
    put(root / "config.json", b"{}")
    put(root / "model.safetensors", encode_header([TensorSpec("w", "U8", (1,))], None) + b"1")
    return root


@pytest.fixture
def full(root: Path) -> Path:
    for name, data in COPIED.items():
        put(root / name, data)
    for name in LEFT.keys() - {"config.json", "model.safetensors", "model.safetensors.index.json"}:
        put(root / name / "inner" if name.endswith("/") else root / name)
    return root


def open_folder(root: Path) -> Checkpoint:
    ckpt = Checkpoint.open(root)
    if not (root / "model.safetensors.index.json").exists():
        put(root / "model.safetensors.index.json", b"{}")
    return ckpt


def test_what_a_model_needs_is_copied_and_the_rest_is_left_with_reasons(full: Path) -> None:
    found = find_side_files(open_folder(full))
    assert found.copied == tuple(sorted(COPIED))
    assert found.left == tuple(sorted(LEFT.items()))


def test_copies_are_byte_identical_regular_files(full: Path, tmp_path: Path) -> None:
    ckpt = open_folder(full)
    out = tmp_path / "out"
    out.mkdir()
    for name, data in COPIED.items():
        assert copy_side_file(ckpt, name, out) == hashlib.sha256(data).hexdigest()
        assert (out / name).read_bytes() == data
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert written == set(COPIED)


def test_a_large_file_is_copied_in_pieces(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_files, "_CHUNK", 1000)
    data = os.urandom(123_456)
    put(root / "tokenizer.json", data)
    copy_side_file(Checkpoint.open(root), "tokenizer.json", tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == data


def test_the_mode_follows_the_umask_not_the_source(root: Path, tmp_path: Path) -> None:
    put(root / "run.py")
    (root / "run.py").chmod(0o4755)
    old = os.umask(0o027)
    try:
        copy_side_file(Checkpoint.open(root), "run.py", tmp_path)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "run.py").stat().st_mode) == 0o640


def test_links_are_copied_inside_the_folder_and_left_outside_it(root: Path, tmp_path: Path) -> None:
    put(root / "sub" / "real.txt", b"real")
    put(tmp_path / "secret", b"secret")
    (root / "inside.txt").symlink_to("sub/real.txt")
    (root / "outside.txt").symlink_to("../secret")
    (root / "absolute.txt").symlink_to(tmp_path / "secret")
    (root / "dangling.txt").symlink_to("nowhere")
    (root / "loop").symlink_to(".")
    (root / "sub" / "up").symlink_to("../..")
    ckpt = Checkpoint.open(root)
    found = find_side_files(ckpt)
    assert found.copied == ("inside.txt", "sub/real.txt")
    reasons = dict(found.left)
    assert "leads out of the folder" in reasons["outside.txt"]
    assert "leads out of the folder" in reasons["absolute.txt"]
    assert reasons["dangling.txt"] == "is a link to nowhere, which does not exist"
    assert reasons["loop"] == "is a folder, expected a regular file"
    assert "leads out of the folder" in reasons["sub/up"]
    out = tmp_path / "out"
    out.mkdir()
    copy_side_file(ckpt, "inside.txt", out)
    assert not (out / "inside.txt").is_symlink()
    assert (out / "inside.txt").read_bytes() == b"real"


def test_a_hub_cache_is_copied_as_regular_files(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--tiny"
    snapshot = repo / "snapshots" / "abc"
    header = encode_header([TensorSpec("w", "U8", (1,))], None) + b"1"
    for i, (name, data) in enumerate(
        [("config.json", b"{}"), ("model.safetensors", header), ("vocab.txt", b"v"), ("figures/x.png", b"p")]
    ):
        put(repo / "blobs" / str(i), data)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(repo / "blobs" / str(i), link.parent))
    ckpt = Checkpoint.open(snapshot)
    assert find_side_files(ckpt).copied == ("figures/x.png", "vocab.txt")
    out = tmp_path / "out"
    out.mkdir()
    copy_side_file(ckpt, "figures/x.png", out)
    assert (out / "figures/x.png").read_bytes() == b"p"
    assert not (out / "figures/x.png").is_symlink()


def test_a_link_turned_outward_after_the_search_is_not_followed(root: Path, tmp_path: Path) -> None:
    put(tmp_path / "secret", b"secret")
    put(root / "notes.txt")
    ckpt = Checkpoint.open(root)
    (root / "notes.txt").unlink()
    (root / "notes.txt").symlink_to("../secret")
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(KizamiError) as caught:
        copy_side_file(ckpt, "notes.txt", out)
    assert caught.value.code == "outside_folder"
    assert os.listdir(out) == []


def test_pipes_are_left_without_waiting(root: Path) -> None:
    os.mkfifo(root / "pipe.txt")
    assert ("pipe.txt", "is a named pipe, expected a regular file") in find_side_files(Checkpoint.open(root)).left


def test_names_that_could_harm_a_terminal_or_a_disk_are_left_and_escaped(root: Path) -> None:
    put(root / "evil\x1b[2J.txt")
    put(root / ("n" * 245))
    (root / "new\nline").mkdir()
    os.mkdir(os.fsencode(root) + b"/\xff")
    left = dict(find_side_files(Checkpoint.open(root)).left)
    assert left["evil\\x1b[2J.txt"] == "control characters in its name"
    assert left["new\\nline/"] == "control characters in its name"
    assert left["\\udcff/"] == "control characters in its name"
    assert "240 bytes" in left["n" * 245]


def test_a_file_too_large_to_be_a_side_file_is_left(root: Path) -> None:
    put(root / "dump.txt")
    os.truncate(root / "dump.txt", side_files.MAX_SIDE_FILE_BYTES + 1)  # sparse
    left = dict(find_side_files(Checkpoint.open(root)).left)
    assert left["dump.txt"] == f"{(1 << 30) + 1} bytes, more than {1 << 30}"


def test_a_file_that_has_grown_too_large_since_the_search_is_not_copied(root: Path, tmp_path: Path) -> None:
    put(root / "notes.txt")
    ckpt = Checkpoint.open(root)
    os.truncate(root / "notes.txt", side_files.MAX_SIDE_FILE_BYTES + 1)  # sparse
    with pytest.raises(KizamiError, match=f"expected at most {1 << 30}"):
        copy_side_file(ckpt, "notes.txt", tmp_path)


def test_depth_is_bounded(root: Path) -> None:
    deepest = "/".join("d" * side_files.MAX_DEPTH)
    put(root / deepest / "kept.txt")
    put(root / deepest / "e" / "lost.txt")
    found = find_side_files(Checkpoint.open(root))
    assert found.copied == (f"{deepest}/kept.txt",)
    assert (f"{deepest}/e/", f"more than {side_files.MAX_DEPTH} folders deep") in found.left


def test_the_number_of_files_is_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_files, "MAX_FILES", 10)
    for i in range(8):
        put(root / f"{i}.txt")
    ckpt = Checkpoint.open(root)
    assert len(find_side_files(ckpt).copied) == 8
    put(root / "9.txt")
    with pytest.raises(KizamiError, match="more than 10 files") as caught:
        find_side_files(ckpt)
    assert caught.value.code == "too_many_files"


@pytest.mark.parametrize("change", [1, -1])
def test_a_file_that_changes_while_it_is_copied_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    put(root / "notes.txt", b"12345")
    out = tmp_path / "out"
    out.mkdir()
    original = os.read

    def read(fd: int, nbytes: int) -> bytes:
        os.truncate(root / "notes.txt", 5 + change)
        return original(fd, nbytes)

    monkeypatch.setattr(os, "read", read)
    with pytest.raises(KizamiError, match=f"{5 + change} bytes, expected 5") as caught:
        copy_side_file(Checkpoint.open(root), "notes.txt", out)
    assert caught.value.code == "source_changed"
    assert os.listdir(out) == []


def test_a_name_that_leaves_the_output_is_a_bug_of_the_caller(root: Path, tmp_path: Path) -> None:
    for name in ("../x", "/x", "a/../x", "a//x"):
        with pytest.raises(AssertionError):
            copy_side_file(Checkpoint.open(root), name, tmp_path)


def test_a_file_in_the_way_of_a_folder_is_refused(root: Path, tmp_path: Path) -> None:
    put(root / "sub" / "a.txt")
    out = tmp_path / "out"
    out.mkdir()
    (out / "sub").symlink_to("..")
    with pytest.raises(KizamiError, match="in the way of a folder"):
        copy_side_file(Checkpoint.open(root), "sub/a.txt", out)

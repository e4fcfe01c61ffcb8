"""The files beside the weights: which belong into the output as they are, and which do not."""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kizami.formats.checkpoint import CONFIG_NAME, Checkpoint
from kizami.formats.errors import KizamiError, printable
from kizami.formats.files import has_control, io_error, listed, open_regular, resolve_inside
from kizami.formats.writer import AtomicFile, fsync_folder

# Published repositories have at most some 60 files beside the weights, at most 3 folders deep.
MAX_FILES = 10_000
MAX_DEPTH = 8
# The largest real side files are tokenizers and figures of up to 50 MB; more is weights under another name.
MAX_SIDE_FILE_BYTES = 1 << 30
# A temporary name adds 5 bytes, and file systems stop at 255.
MAX_NAME_BYTES = 240

_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".pkl", ".pickle", ".npz",
)  # fmt: skip
_OLD_QUANTIZATION = {
    "quantize_config.json", "quant_config.json", "hf_quant_config.json", "recipe.yaml",
}  # fmt: skip
_OLD_KIZAMI = {"kizami.json", "kizami-report.jsonl", "kizami-push.json"}
# What an output has at its top. A folder of such a name would be in the way, and one in other letters would be the same
# file wherever case does not count.
_OURS = re.compile(
    r"(config|kizami|kizami-push|model\.safetensors\.index)\.json|kizami-report\.jsonl|readme\.md|model-\d+-of-\d+\.safetensors",
    re.IGNORECASE,
)
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class SideFiles:
    """`copied`: names to copy, `/` between folders. `left`: (name, reason), a folder with a final `/`. Sorted."""

    copied: tuple[str, ...]
    left: tuple[tuple[str, str], ...]


def find_side_files(ckpt: Checkpoint) -> SideFiles:
    """Sorts everything below `ckpt.root` into what is copied and what is left, with reasons. Opens no file.

    A link to a file is copied as the regular file that it leads to, under the rule of `Checkpoint.open`; every other
    link is left. Names in `left` have their control characters escaped. KizamiError: "too_many_files", "io_error".
    """
    copied: list[str] = []
    left: list[tuple[str, str]] = []
    for name, reason in _walk(ckpt, "", 0):
        if len(copied) + len(left) >= MAX_FILES:
            raise KizamiError(
                f"more than {MAX_FILES} files beside the weights",
                code="too_many_files",
                file=str(ckpt.root),
                hint="give a folder that holds only the checkpoint",
            )
        if reason is None:
            copied.append(name)
        else:
            left.append((printable(name), reason))
    return SideFiles(tuple(sorted(copied)), tuple(sorted(left)))


def _walk(ckpt: Checkpoint, folder: str, depth: int) -> Iterator[tuple[str, str | None]]:
    """(name, reason to leave it or None) of all files below `folder`, which is "" or ends in "/"."""
    for entry in listed(ckpt.root, folder):
        base, is_folder = entry.name, entry.is_dir(follow_symlinks=False)
        name, reason = folder + base, _name_reason(base)
        if is_folder and not folder and _OURS.fullmatch(base):
            reason = "a folder with the name of a file that kizami writes"
        if not is_folder:
            yield name, reason or _file_reason(ckpt, name, base)
        elif reason is not None:
            yield f"{name}/", reason
        elif depth == MAX_DEPTH:
            yield f"{name}/", f"more than {MAX_DEPTH} folders deep"
        else:
            yield from _walk(ckpt, f"{name}/", depth + 1)


def _name_reason(base: str) -> str | None:
    if has_control(base):
        return "control characters in its name"
    if base.startswith("."):
        return "hidden"
    if base == "__pycache__":
        return "compiled Python"
    if len(base.encode("utf-8")) > MAX_NAME_BYTES:
        return f"a name of more than {MAX_NAME_BYTES} bytes"
    return None


def _file_reason(ckpt: Checkpoint, name: str, base: str) -> str | None:
    if name in ckpt.headers:
        return "weights, converted"
    if name == CONFIG_NAME:
        return "rewritten"
    if name == "README.md":
        return "becomes the model card"
    if base in _OLD_QUANTIZATION:
        return "describes the source's quantization"
    if base in _OLD_KIZAMI:
        return "describes an earlier conversion"
    lower = base.lower()
    if lower.endswith(_WEIGHTS):
        return "weights that the checkpoint does not name"
    if lower.endswith(".index.json"):
        return "an index of the source's weights"
    if "/" not in name and _OURS.fullmatch(base):
        return "the name of a file that kizami writes, in other letters"
    try:
        size = resolve_inside(ckpt.root, name).stat().st_size
    except KizamiError as e:
        if e.code == "io_error":  # a file that belongs to the output must not stay out by chance
            raise
        return e.message
    except OSError as e:
        raise io_error("cannot look up", e, name) from e
    return None if size <= MAX_SIDE_FILE_BYTES else f"{size} bytes, more than {MAX_SIDE_FILE_BYTES}"


def side_file_bytes(ckpt: Checkpoint, names: Iterable[str]) -> int:
    """Of `SideFiles.copied`, together. KizamiError as `copy_side_file`."""
    try:
        return sum(resolve_inside(ckpt.root, name).stat().st_size for name in names)
    except OSError as e:
        raise io_error("cannot look up", e, str(ckpt.root)) from e


def copy_side_file(ckpt: Checkpoint, name: str, out: Path) -> str:
    """Copies `name`, one of `SideFiles.copied`, into the folder `out`: the same bytes in a regular file, durable.

    Returns the SHA-256. Folders in `name` are made. KizamiError: those of a link that no longer may be followed,
    "source_changed" if the size changes meanwhile, "io_error".
    """
    parts = name.split("/")
    assert all(part not in ("", ".", "..") for part in parts), name
    fd = open_regular(resolve_inside(ckpt.root, name), name)
    try:
        size = os.fstat(fd).st_size
        if size > MAX_SIDE_FILE_BYTES:
            raise KizamiError(f"{size} bytes, expected at most {MAX_SIDE_FILE_BYTES}", code="source_changed", file=name)
        _make_folders(out, parts[:-1])
        with AtomicFile(out / name) as file:
            while data := _read(fd, min(_CHUNK, size + 1 - file.written), name):
                file.write(data)
                if file.written > size:
                    break
            if file.written != size:
                raise KizamiError(f"{file.written} bytes, expected {size}", code="source_changed", file=name)
            return file.commit()
    finally:
        os.close(fd)


def _read(fd: int, nbytes: int, name: str) -> bytes:
    try:
        return os.read(fd, nbytes)
    except OSError as e:
        raise io_error("cannot read", e, name) from e


def _make_folders(out: Path, parts: list[str]) -> None:
    folder = out
    for part in parts:
        parent, folder = folder, folder / part
        try:
            if not stat.S_ISDIR(folder.lstat().st_mode):
                raise KizamiError("is in the way of a folder", code="io_error", file=str(folder))
        except FileNotFoundError:
            try:
                folder.mkdir(exist_ok=True)
                fsync_folder(parent)
            except OSError as e:
                raise io_error("cannot create", e, str(folder)) from e

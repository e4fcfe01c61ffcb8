"""A checkpoint folder: config, index and headers. No weight byte is read here."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kizami.formats.errors import KizamiError
from kizami.formats.files import check_encoding, io_error, resolve_inside
from kizami.formats.header import Header, read_header
from kizami.formats.index import INDEX_NAME, SINGLE_NAME, load_index, natural_key
from kizami.formats.strict_json import read_json_object
from kizami.formats.tensors import TensorInfo

CONFIG_NAME = "config.json"
# Real configs take 1-30 KB; one that lists every linear of GLM-5.2 twice (ignore, modules_to_not_convert) takes 10 MB.
MAX_CONFIG_BYTES = 32 << 20
MAX_CONFIG_MARKS = 1_000_000  # brackets, colons and commas; that one has 260,000
# Over all files. Kimi-K2 in INT4 has 210,000 tensors and 30 MB of headers; a plan takes 2 kB of memory per tensor.
MAX_TENSORS = 400_000
MAX_ALL_HEADER_BYTES = 128 << 20
# More stray files than this are counted, not listed.
MAX_STRAY_NOTES = 20

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: every header read and checked against the index and the file's size.

    `headers` is in natural file order; `tensors` (name -> TensorInfo) in natural file order, then by offset. `indexed`
    says whether an index exists. `notes` are facts worth telling that stop nothing. remote: the weights are on the Hub,
    and `root` is a mirror (hub/mirror.py) in which they are fetched one by one.
    """

    root: Path
    config: dict[str, Any]
    headers: dict[str, Header]
    tensors: dict[str, TensorInfo]
    indexed: bool
    notes: tuple[str, ...]
    remote: bool = False

    @staticmethod
    def open(root: str | Path) -> "Checkpoint":
        """Opens the folder `root`: `config.json`, and the files its index names, or `model.safetensors` alone.

        `root` may also be one .safetensors file with `config.json` beside it. Only files that the index names are read.

        Links: a file may be a link to a place inside the folder, or, in a Hub cache (`models--*/snapshots/<revision>`),
        to a file in `blobs` of the same `models--*` folder. Any other link out of the folder is refused
        ("outside_folder") without opening its target, whatever it points to: an untrusted folder must not be able to
        pull the reader's other files into the output.

        KizamiError: "missing_file", "dangling_link", "outside_folder", "not_a_file", "bad_json", "bad_index",
        "bad_header", "wrong_size", "unknown_dtype", "index_mismatch", "duplicate_tensor", "too_large", "io_error".
        """
        folder, single = _locate(Path(root).absolute())
        check_encoding(folder.resolve().name, str(folder))  # it becomes the model card's title
        names = _listing(folder)
        config_path = resolve_inside(folder, CONFIG_NAME, "every checkpoint has a config.json beside its weights")
        config = read_json_object(config_path, CONFIG_NAME, limit=MAX_CONFIG_BYTES, marks=MAX_CONFIG_MARKS)
        notes: list[str] = []
        weight_map = None
        if single is None and INDEX_NAME in names:
            index = load_index(resolve_inside(folder, INDEX_NAME))
            weight_map = index.weight_map
        files = (
            [single or _only_file(folder, names)]
            if weight_map is None
            else sorted(set(weight_map.values()), key=natural_key)
        )
        headers = _headers(folder, files, weight_map)
        tensors = _merge(headers)
        if weight_map is not None:
            _check_index(weight_map, tensors)
            total = sum(info.nbytes for info in tensors.values())
            if index.total_size != total:
                notes.append(f"{INDEX_NAME}: total_size {str(index.total_size)[:24]} is wrong ({total} bytes), ignored")
        notes += _stray_notes(names, headers, single is not None)
        return Checkpoint(folder, config, headers, tensors, weight_map is not None, tuple(notes))

    def path(self, file: str) -> Path:
        """Where `file`, one of `headers`, lies."""
        assert file in self.headers, file
        return self.root / file

    def check_unchanged(self, files: Iterable[str] | None = None) -> None:
        """Raises KizamiError "source_changed" if one of `files` (all by default) is not the file that was opened.

        Size, modification time and inode are compared. Nothing is of a remote one: each file was held against the Hub's
        hash when it came, and is gone by now.
        """
        if self.remote:
            return
        for file in self.headers if files is None else files:
            try:
                status = self.path(file).stat()
            except OSError as e:
                raise KizamiError(
                    f"was there when the checkpoint was opened: {e.strerror}", code="source_changed", file=file
                ) from None
            check_same(self.headers[file], status)


def check_same(header: Header, status: os.stat_result) -> None:
    """Raises KizamiError "source_changed" if `status` is not that of the file whose header was read, "not_fetched" for
    a file on the Hub that is not there."""
    if header.inode is None:
        if status.st_mtime_ns != header.mtime_ns:
            raise KizamiError(
                "is on the Hub, and its weights were not fetched",
                code="not_fetched",
                file=header.file,
                hint="download the checkpoint (hf download), and name its folder",
            )
        return
    for what, now, then in (
        ("size", status.st_size, header.file_size),
        ("mtime_ns", status.st_mtime_ns, header.mtime_ns),
        ("inode", status.st_ino, header.inode),
    ):
        if now != then:
            raise KizamiError(
                f"has changed since it was opened: {what} {now}, expected {then}",
                code="source_changed",
                file=header.file,
                hint="let nothing write to the source during a run, and start again",
            )


def _locate(root: Path) -> tuple[Path, str | None]:
    """The folder, and the file's name if `root` is a single file."""
    try:
        if root.is_dir():
            return root, None
    except OSError as e:
        raise io_error("cannot look up", e, str(root)) from e
    if root.suffix == ".safetensors" and os.path.lexists(root):
        return root.parent, root.name
    if os.path.lexists(root) and root.exists():
        raise KizamiError(
            "is not a folder",
            code="not_a_file",
            file=str(root),
            hint="give the checkpoint's folder or a .safetensors file",
        )
    raise KizamiError(
        "does not exist",
        code="missing_file",
        file=str(root),
        hint="give a local folder; fetch one with `hf download <org>/<name> --local-dir <folder>`",
    )


def _listing(folder: Path) -> set[str]:
    try:
        names = os.listdir(folder)
    except OSError as e:
        raise io_error("cannot list", e, str(folder)) from e
    for name in sorted(names):
        check_encoding(name)
    return set(names)


def _only_file(folder: Path, names: set[str]) -> str:
    """model.safetensors, or an error that says what is there instead."""
    if SINGLE_NAME in names:
        return SINGLE_NAME
    shards = sorted((name for name in names if name.endswith(".safetensors")), key=natural_key)
    if shards:
        found = f"{len(shards)} other .safetensors files ({shards[0]}...)"
        hint = f"download {INDEX_NAME} too, or give one file's path"
    elif any(name.endswith(_PICKLES) for name in names):
        found, hint = "pickled weights only", "kizami reads safetensors only and never unpickles: convert them first"
    else:
        found, hint = "no weights", "finish the download; kizami reads safetensors checkpoints"
    raise KizamiError(
        f"expected {INDEX_NAME} or {SINGLE_NAME}, found {found}", code="missing_file", file=str(folder), hint=hint
    )


def _headers(folder: Path, files: Iterable[str], weight_map: dict[str, str] | None) -> dict[str, Header]:
    headers: dict[str, Header] = {}
    tensors = nbytes = 0
    for file in files:
        headers[file] = header = _header(folder, file, weight_map)
        tensors += len(header.tensors)
        nbytes += header.data_begin
        if tensors > MAX_TENSORS or nbytes > MAX_ALL_HEADER_BYTES:
            raise KizamiError(
                f"with this file the checkpoint has {tensors} tensors and {nbytes} bytes of headers, expected at most "
                f"{MAX_TENSORS} and {MAX_ALL_HEADER_BYTES}",
                code="too_large",
                file=file,
            )
    return headers


def _header(folder: Path, file: str, weight_map: dict[str, str] | None) -> Header:
    try:
        return read_header(resolve_inside(folder, file), file)
    except KizamiError as e:
        if e.code != "missing_file" or weight_map is None:
            raise
        tensor = next(tensor for tensor, shard in weight_map.items() if shard == file)
        raise KizamiError(
            f"not found in {folder}, but {INDEX_NAME} places tensors in it",
            code="missing_file",
            file=file,
            tensor=tensor,
            hint="finish the download",
        ) from None


def _merge(headers: dict[str, Header]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file, header in headers.items():
        for info in header.tensors:
            other = tensors.setdefault(info.name, info)
            if other is not info:
                raise KizamiError(
                    f"is in {other.file} and again in {file}, expected once",
                    code="duplicate_tensor",
                    file=file,
                    tensor=info.name,
                )
    return tensors


def _check_index(weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    for name, file in weight_map.items():
        info = tensors.get(name)
        if info is None or info.file != file:
            found = "is in no file" if info is None else f"is in {info.file}"
            raise KizamiError(
                f"{found}, but {INDEX_NAME} places it in {file}", code="index_mismatch", file=file, tensor=name
            )
    for name, info in tensors.items():
        if name not in weight_map:
            raise KizamiError(f"is not in {INDEX_NAME}", code="index_mismatch", file=info.file, tensor=name)


def _stray_notes(names: set[str], headers: dict[str, Header], single: bool) -> list[str]:
    why = "not the file asked for" if single else "not named in the index"
    notes = []
    for name in sorted(names - headers.keys(), key=natural_key):
        if name.endswith(".safetensors"):
            notes.append(f"{name}: {why}, not read")
        elif name.endswith(_PICKLES):
            notes.append(f"{name}: not safetensors, never opened")
    if len(notes) > MAX_STRAY_NOTES:
        notes[MAX_STRAY_NOTES:] = [f"{len(notes) - MAX_STRAY_NOTES} more weight files that are not read"]
    return notes

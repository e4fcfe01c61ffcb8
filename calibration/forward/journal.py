"""The memory of an unfinished calibration: STATS.partial/.kizami/.

A line says how far a run has come, and that all before it is on the disk. What a kill undoes is done again: every step
writes the same bytes to the same places, and reads nothing that it or a later step overwrites.
"""

import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kizami.calibration.forward.observers import Arrays
from kizami.formats.errors import KizamiError, printable
from kizami.formats.files import io_error, open_regular, read_exactly
from kizami.formats.header import read_header
from kizami.formats.run_log import (
    FOLDER,
    JOURNAL,
    append_line,
    canonical,
    check_identity,
    complete_lines,
    damaged,
    is_identity,
    lock_folder,
    read_own,
)
from kizami.formats.statistics import MANIFEST, NUMPY_OF
from kizami.formats.statistics_writer import DTYPE_WORDS
from kizami.formats.tensors import TensorSpec
from kizami.formats.writer import ShardWriter, WrittenShard, fsync_folder, write_file_durably

EVERY = 2.0  # seconds between lines: small models would spend their time in fsync
_OURS = re.compile(r"(layer|inputs)-\d{5}\.safetensors")
_SUMS = re.compile(r"sums-\d+\.safetensors")


@dataclass(frozen=True, slots=True)
class Cursor:
    """`done` pieces of `phase` of `layer` are on the disk. sums: the file that has what was measured in attention."""

    layer: int
    phase: int
    done: int
    sums: str | None


class Journal:
    """Holds a lock, so that two runs cannot write into one folder. committed, bad: the files of each
    finished layer, and its tokens that were not finite."""

    def __init__(
        self, partial: Path, identity: dict[str, Any], files: dict[str, list[int]], *, restart: bool = False
    ) -> None:
        """Starts a journal or resumes the one that is there. files: of the source, see checks.source_files; every layer
        depends on all of them. restart: throws away what an earlier run left.

        KizamiError "resume_mismatch", "source_changed", "damaged_journal", "locked", "out_exists", "io_error".
        """
        self.partial, self.folder = partial, partial / FOLDER
        self.cursor: Cursor | None = None
        self.committed: dict[int, list[WrittenShard]] = {}
        self.bad: dict[int, int] = {}
        self._next = 0
        self._written = time.monotonic()
        try:
            _check_folder(partial)
            self._lock = lock_folder(self.folder, partial)
            try:
                self._open(identity, files, restart)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as e:
            raise io_error("cannot open the journal", e, str(e.filename or partial)) from e

    def close(self) -> None:
        os.close(self._lock)

    def due(self) -> bool:
        return time.monotonic() - self._written >= EVERY

    def progress(self, layer: int, phase: int, done: int, sums: str | None) -> None:
        """After everything that it claims is on the disk."""
        self.cursor = Cursor(layer, phase, done, sums)
        self._append(asdict(self.cursor))

    def commit(self, layer: int, files: list[WrittenShard], bad: int) -> None:
        shown = [{"file": f.file, "nbytes": f.nbytes, "sha256": f.sha256} for f in files]
        self._append({"committed": layer, "files": shown, "bad": bad})
        self.committed[layer], self.bad[layer] = files, bad
        self.cursor = None

    def write_sums(self, arrays: Arrays) -> str:
        """Durably, under a new name."""
        self._next += 1
        name = f"sums-{self._next}.safetensors"
        order = sorted(arrays, key=lambda key: (-arrays[key].itemsize, key))
        specs = [TensorSpec(key, DTYPE_WORDS[arrays[key].dtype], arrays[key].shape) for key in order]
        with ShardWriter(self.folder / name, specs) as writer:
            for key in order:
                writer.append(key, np.ascontiguousarray(arrays[key]))
            writer.finish()
        return name

    def read_sums(self, name: str) -> Arrays:
        path = self.folder / name
        fd = open_regular(path, name)
        try:
            return {
                info.name: np.frombuffer(read_exactly(fd, info.begin, info.nbytes, name), NUMPY_OF[info.dtype])
                .reshape(info.shape)
                .copy()
                for info in read_header(path, name).tensors
            }
        finally:
            os.close(fd)

    def drop_sums(self, keep: str | None) -> None:
        """What no line speaks of any more."""
        try:
            for path in self.folder.iterdir():
                if _SUMS.fullmatch(path.name) and path.name != keep:
                    path.unlink(missing_ok=True)
        except OSError as e:
            raise io_error("cannot remove", e, f"{self.partial.name}/{FOLDER}/{keep or ''}") from e

    def _append(self, line: dict[str, Any]) -> None:
        try:
            append_line(self.folder / JOURNAL, (canonical(line) + "\n").encode())
        except OSError as e:
            raise io_error("cannot write", e, f"{self.partial.name}/{FOLDER}/{JOURNAL}") from e
        self._written = time.monotonic()

    def _open(self, identity: dict[str, Any], files: dict[str, list[int]], restart: bool) -> None:
        path = self.folder / JOURNAL
        data = read_own(path)
        if data is not None and not restart:
            lines = complete_lines(data, path)
            check_same(lines[0].get("identity") if lines else None, identity, self.partial)
            _check_files(lines[0].get("files"), files, path)
            self._load(lines[1:], path)
            whole = data.rfind(b"\n") + 1
            if whole != len(data):  # a kill in the middle of an append: that line never happened
                os.truncate(path, whole)
            self._check_committed()
            return
        _clear(self.partial)
        write_file_durably(path, (canonical({"identity": identity, "files": files}) + "\n").encode())
        for folder in (self.partial, self.partial.absolute().parent):
            fsync_folder(folder)

    def _load(self, lines: list[dict[str, Any]], path: Path) -> None:
        for line in lines:
            try:
                if "committed" in line:
                    files = [WrittenShard(f["file"], f["nbytes"], f["sha256"], {}) for f in line["files"]]
                    self.committed[line["committed"]], self.bad[line["committed"]] = files, line["bad"]
                    self.cursor = None
                else:
                    self.cursor = Cursor(**line)
            except (TypeError, KeyError):
                raise damaged(path) from None
        numbers = [int(p.name[5:-12]) for p in self.folder.iterdir() if _SUMS.fullmatch(p.name)]
        self._next = max(numbers, default=0)

    def _check_committed(self) -> None:
        for files in self.committed.values():
            for file in files:
                path = self.partial / file.file
                if not path.is_file() or path.is_symlink() or path.stat().st_size != file.nbytes:
                    raise KizamiError(
                        f"was finished with {file.nbytes} bytes, and is gone or another file now",
                        code="damaged_journal",
                        file=f"{self.partial.name}/{file.file}",
                        hint="start over with --restart",
                    )


def check_same(found: Any, wanted: dict[str, Any], partial: Path) -> None:
    """KizamiError "resume_mismatch" that names files and hashes, not all that follows from them."""
    if is_identity(found, wanted):
        return
    try:
        then, now = _by_file(found), _by_file(wanted)
        for name in then["files"].keys() | now["files"].keys():
            then["files"].setdefault(name, "not among the data")
            now["files"].setdefault(name, "not among the data")
    except (KeyError, TypeError, AttributeError):  # an identity that no version has written
        then, now = found, wanted
    if then == now:
        then, now = found, wanted
    check_identity(then, now, partial)


def has_used(folder: Path, files: dict[str, list[int]]) -> bool:
    """Whether the run whose journal is left in `folder`, if there is one, had these files of a source."""
    path = folder / FOLDER / JOURNAL
    data = read_own(path)
    lines = complete_lines(data, path) if data is not None else []
    return not lines or bool(lines[0].get("files") == files)


def _check_files(then: Any, now: dict[str, list[int]], path: Path) -> None:
    """The identity has samples of the files' contents only; a change between them shows in the times."""
    if not isinstance(then, dict):
        raise damaged(path)
    for file in sorted(then.keys() | now.keys()):
        if then.get(file) != now.get(file):
            raise KizamiError(
                "was changed or written again since the unfinished run began, which used it",
                code="source_changed",
                file=printable(file, 200),
                hint="start over with --restart: all layers depend on those before them",
            )


def _by_file(identity: dict[str, Any]) -> dict[str, Any]:
    tokens = identity["tokens"]
    files: dict[str, str] = {}
    for source in tokens["sources"]:
        files[source["name"]] = " ".join(filter(None, (files.get(source["name"]), source["sha256"][:12])))
    kept = {key: value for key, value in tokens.items() if key in ("sha256", "sequences", "seq_len")}
    return identity | {"tokens": kept, "files": files}


def _check_folder(partial: Path) -> None:
    """Nothing of a stranger's is written to, published or removed."""
    folder = partial / FOLDER
    if partial.is_symlink() or folder.is_symlink() or (partial.exists() and not partial.is_dir()):
        raise KizamiError("is a link or a file, not a folder of kizami's", code="out_exists", file=str(partial))
    found = set(os.listdir(partial)) if partial.is_dir() else set()
    strange = sorted(name for name in found - {FOLDER} if not _is_ours(name))
    if strange or (found - {FOLDER} and not (folder / JOURNAL).is_file()):
        raise KizamiError(
            f"holds files that no calibration has written there: {', '.join(strange or sorted(found))[:200]}",
            code="out_exists",
            file=str(partial),
            hint="move it away, or choose another STATS",
        )


def _is_ours(name: str) -> bool:
    """Whether a run writes a file of this name, or its temporary."""
    whole = name.removeprefix(".").removesuffix(".tmp") if name.endswith(".tmp") else name
    return whole == MANIFEST or _OURS.fullmatch(whole) is not None


def _clear(partial: Path) -> None:
    """The journal goes last: it marks the folder as ours."""
    for path in sorted((partial / FOLDER).iterdir()):
        if path.name not in ("lock", JOURNAL):
            path.unlink()
    for path in sorted(partial.iterdir()):
        if _is_ours(path.name):
            path.unlink()

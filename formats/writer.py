"""Writing files that are whole or absent: one safetensors shard in a stream, or a few bytes at once."""

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from zlib_ng import zlib_ng

from kizami.formats.block_stream import BlockStream
from kizami.formats.errors import KizamiError
from kizami.formats.files import io_error
from kizami.formats.header import encode_header
from kizami.formats.tensors import DTYPE_BITS, TensorSpec

PT_METADATA: Mapping[str, str] = {"format": "pt"}  # transformers refuses a file without it


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """`file` is the name in its folder, `nbytes` the file's size, `sha256` that of the whole file; `crc32` has the
    CRC-32 (zlib's) of each tensor's bytes, by name: enough to tell which tensor a damaged file damaged."""

    file: str
    nbytes: int
    sha256: str
    crc32: dict[str, int]


def aligned_order(units: Sequence[Sequence[TensorSpec]]) -> tuple[TensorSpec, ...]:
    """The order in a file in which every tensor begins at a multiple of its element's size, without holes.

    safetensors forbids holes, and torch refuses a view that is not aligned. Units (tensors that are made together) come
    first, in the order given, if each of their tensors fills whole 8-byte words; then all other tensors, widest dtype
    first, in the order given within a width.
    """
    whole = [unit for unit in units if all(spec.nbytes % 8 == 0 for spec in unit)]
    rest = [spec for unit in units if any(spec.nbytes % 8 for spec in unit) for spec in unit]
    rest.sort(key=lambda spec: -DTYPE_BITS[spec.dtype])
    return (*(spec for unit in whole for spec in unit), *rest)


class AtomicFile:
    """A file that appears under its name only when complete.

    The temporary is `.<name>.tmp` in the same folder; one that a killed run has left is replaced. OSError in any method
    removes the temporary and becomes KizamiError "io_error" with the system's text. A context manager that aborts
    unless committed. The mode is 0o666 less the umask.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temp = path.with_name(f".{path.name}.tmp")
        self._ended = False  # nothing is left to remove
        self._fd: int | None = None
        try:
            self._temp.unlink(missing_ok=True)
            # EXCL also refuses to write through a link that took the name
            self._fd = os.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as e:
            raise io_error("cannot create", e, path.name) from e
        self._stream = BlockStream(self._fd)

    def __enter__(self) -> "AtomicFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def written(self) -> int:
        return self._stream.appended

    def write(self, data: bytes | memoryview) -> None:
        """Appends `data` (bytes, or a memoryview of format "B"). What becomes of it on the disk may be raised later, at
        the latest by `commit`."""
        assert self._fd is not None, "written after the end"
        try:
            self._stream.append(data)
        except OSError as e:
            raise self._failed("cannot write", e) from e

    def commit(self) -> str:
        """Makes the file durable, then visible under its name (an older one is replaced). Returns the SHA-256."""
        assert self._fd is not None, "committed after the end"
        try:
            sha256 = self._stream.end()
        except OSError as e:
            raise self._failed("cannot write", e) from e
        try:
            os.fsync(self._fd)
            fd, self._fd = self._fd, None
            os.close(fd)
            os.replace(self._temp, self.path)
            self._ended = True
            fsync_folder(self.path.parent)
        except OSError as e:
            raise self._failed("cannot finish", e) from e
        return sha256

    def abort(self) -> None:
        """Removes the temporary. Does nothing after a commit or an abort."""
        if not self._ended:
            self._discard()

    def _failed(self, doing: str, error: OSError) -> KizamiError:
        self._discard()
        return io_error(f"{doing} after {self._stream.stored} bytes", error, self.path.name)

    def _discard(self) -> None:
        fd, self._fd, self._ended = self._fd, None, True
        self._stream.stop()
        with suppress(OSError):  # the error that led here is the one to tell
            if fd is not None:
                os.close(fd)
        with suppress(OSError):
            self._temp.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable. OSError, except where the file system has no such operation."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # some FUSE and network file systems
            raise
    finally:
        os.close(fd)


def make_folders_durably(folder: Path) -> None:
    """Makes `folder` and those above it that are missing, each durable before the next: where one is, even after a
    kill, those above it are durable. OSError from the system."""
    missing = [path for path in (folder.absolute(), *folder.absolute().parents) if not path.is_dir()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        fsync_folder(path.parent)


def write_file_durably(path: Path, data: bytes) -> str:
    """Writes `data` to `path`: whole and durable when this returns, absent or as before if it raises. Returns the
    SHA-256.

    KizamiError "io_error".
    """
    with AtomicFile(path) as file:
        file.write(data)
        return file.commit()


def _as_bytes(data: Any) -> memoryview:
    """The bytes of a C-contiguous buffer, without a copy. memoryview alone cannot cast every dtype of NumPy."""
    if isinstance(data, np.ndarray):
        assert data.flags.c_contiguous, f"array of strides {data.strides} is not in C order"
        assert data.dtype.isnative, f"array of dtype {data.dtype.str} is not in this machine's byte order"
        return data.reshape(-1).view(np.uint8).data
    view = memoryview(data)
    assert view.c_contiguous, "buffer is not in C order"
    return view.cast("B") if view.nbytes else memoryview(b"")


class ShardWriter:
    """Streams one safetensors file whose tensors are known beforehand.

    `append` may be called many times for a tensor, its bytes in order. Bytes of the tensor that is due go to the disk
    at once; those of a later one are copied and held until its turn, so append in the order of `specs` wherever the
    data is big. Wrong names and sizes are bugs of the caller: AssertionError. Errors of the system: KizamiError
    "io_error", the temporary file removed. A context manager that removes the temporary unless finished.
    """

    def __init__(
        self, path: Path, specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = PT_METADATA
    ) -> None:
        header = encode_header(specs, metadata)
        self._specs = tuple(specs)
        self._left = {spec.name: spec.nbytes for spec in specs}  # bytes not yet appended
        self._crc32 = {spec.name: 0 for spec in specs}
        self._held: dict[str, list[bytes]] = {}
        self._due = -1  # index of the tensor that goes to the disk now
        self._due_left = 0  # bytes of the due tensor not yet written
        self._nbytes = len(header) + sum(self._left.values())
        self._file = AtomicFile(path)
        try:
            self._file.write(header)
        except BaseException:
            self._file.abort()
            raise
        self._start_due()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def append(self, name: str, data: Any) -> None:
        """The next bytes of tensor `name`: any C-contiguous buffer, numpy arrays of any native dtype included."""
        view = _as_bytes(data)
        assert name in self._left, f"{name} is not in {self._file.path.name}"
        assert view.nbytes <= self._left[name], f"{name}: {view.nbytes} bytes, {self._left[name]} left"
        if not view.nbytes:
            return
        self._left[name] -= view.nbytes
        self._crc32[name] = zlib_ng.crc32(view, self._crc32[name])
        if self._specs[self._due].name != name:
            self._held.setdefault(name, []).append(bytes(view))
            return
        self._write(view)
        self._start_due()

    def finish(self) -> WrittenShard:
        """Makes the file durable and gives it its name."""
        missing = {name: left for name, left in self._left.items() if left}
        assert not missing, f"{self._file.path.name}: bytes never appended: {missing}"
        assert self._file.written == self._nbytes, (self._file.written, self._nbytes)
        return WrittenShard(self._file.path.name, self._nbytes, self._file.commit(), self._crc32)

    def abort(self) -> None:
        """Removes the temporary file. Does nothing after `finish`."""
        self._held.clear()
        self._file.abort()

    def _write(self, view: bytes | memoryview) -> None:
        self._file.write(view)
        self._due_left -= len(view)

    def _start_due(self) -> None:
        """While the due tensor is complete, goes on to the next, and writes what is held of it."""
        while self._due_left == 0:
            self._due += 1
            if self._due == len(self._specs):
                return
            spec = self._specs[self._due]
            self._due_left = spec.nbytes
            for part in self._held.pop(spec.name, ()):
                self._write(part)

"""Reading tensors' bytes: positioned reads into memory that the caller owns, from many threads."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np

from kizami.formats.checkpoint import Checkpoint, check_same
from kizami.formats.errors import KizamiError
from kizami.formats.files import io_error, open_regular
from kizami.formats.tensors import TensorInfo

# More than the files of any known checkpoint (Kimi: 64, GLM: 142, DeepSeek: 163), less than macOS's limit of 256.
MAX_OPEN_FILES = 200

Empty = Callable[[tuple[int, ...], Any], np.ndarray]


class _Open:
    __slots__ = ("fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0


class TensorReader:
    """Reads the tensors of `ckpt`. Thread-safe; a context manager that closes its files.

    No memory maps: a map's pages count as the process's memory, and a file cut short under a map kills the process with
    SIGBUS, where a read gives an error.
    """

    def __init__(self, ckpt: Checkpoint) -> None:
        self._ckpt = ckpt
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()  # least recently used first

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files; none may be in use. A later read opens its file again."""
        with self._lock:
            assert not any(entry.users for entry in self._open.values()), "closed during a read"
            for entry in self._open.values():
                os.close(entry.fd)
            self._open.clear()

    def forget(self, file: str) -> None:
        """Closes `file`, which nobody reads now; whatever is there later is opened anew."""
        with self._lock:
            entry = self._open.pop(file, None)
            if entry is not None:
                assert not entry.users, "forgotten during a read"
                os.close(entry.fd)

    def read(
        self, info: TensorInfo, *, first: int = 0, nbytes: int | None = None, empty: Empty = np.empty
    ) -> np.ndarray:
        """Bytes `first` to `first + nbytes` (default: to the end) of the tensor: uint8 [nbytes], writable, in memory
        that `empty` (shape, dtype) provides.

        KizamiError: "source_changed" if the file is not the one whose header was read; "truncated"; "io_error".
        """
        count = info.nbytes - first if nbytes is None else nbytes
        assert 0 <= first <= first + count <= info.nbytes, (info, first, nbytes)
        result = empty((count,), np.uint8)
        if count == 0:
            return result
        view = result.data
        with self._file(info.file) as fd:
            done = 0
            while done < count:
                at = info.begin + first + done
                try:
                    got = os.preadv(fd, [view[done:]], at)
                except OSError as e:
                    raise _read_error(e, at, info) from e
                if got == 0:
                    raise KizamiError(
                        f"file ends at byte {at}, expected {info.begin + first + count}",
                        code="truncated",
                        file=info.file,
                        tensor=info.name,
                    )
                done += got
        return result

    @contextmanager
    def _file(self, file: str) -> Iterator[int]:
        with self._lock:
            entry = self._open.get(file)
            if entry is None:
                entry = self._open[file] = self._open_file(file)
            self._open.move_to_end(file)
            entry.users += 1
            self._close_unused()
        try:
            yield entry.fd
        finally:
            with self._lock:
                entry.users -= 1

    def _close_unused(self) -> None:
        for file in list(self._open):
            if len(self._open) <= MAX_OPEN_FILES:
                return
            if not self._open[file].users:
                os.close(self._open.pop(file).fd)

    def _open_file(self, file: str) -> _Open:
        fd = open_regular(self._ckpt.path(file), file)
        try:
            # The path may lead elsewhere since its links were checked; the inode tells.
            check_same(self._ckpt.headers[file], os.fstat(fd))
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except BaseException:
            os.close(fd)
            raise
        return _Open(fd)


def _read_error(error: OSError, at: int, info: TensorInfo) -> KizamiError:
    shown = io_error(f"cannot read at byte {at}", error, info.file)
    return KizamiError(shown.message, code=shown.code, file=info.file, tensor=info.name)

"""Files of rows that a run keeps between its steps: read and written by position, full size from the start.

Not mapped into memory: pages of a map count as the process's, and a full disk would kill it with SIGBUS.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kizami.formats.errors import KizamiError
from kizami.formats.files import io_error

Index = NDArray[np.int64]


class RowFile:
    """`rows` rows of `width` numbers of `dtype`. resumed: the file must be there, and keeps its bytes; else it is made,
    and its room on the disk reserved. total: bytes of all files of the run's state.
    KizamiError "io_error", "damaged_journal"."""

    def __init__(
        self, path: Path, rows: int, width: int, dtype: np.dtype[Any] | type, resumed: bool, total: int = 0
    ) -> None:
        self._path, self.rows, self.width, self.dtype = path, rows, width, np.dtype(dtype)
        self._row = width * self.dtype.itemsize
        self._dirty = False
        self._total = total
        self._shown = "/".join(path.parts[-3:])  # STATS.partial/.kizami/x
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as e:
            raise io_error("cannot open", e, self._shown) from e
        try:
            self._prepare(rows * self._row, resumed)
        except BaseException:
            os.close(self._fd)
            raise

    def _prepare(self, size: int, resumed: bool) -> None:
        found = os.fstat(self._fd).st_size
        if resumed and found != size:
            raise KizamiError(
                f"has {found} bytes, expected {size}: the unfinished run cannot be trusted",
                code="damaged_journal",
                file=self._shown,
                hint="start over with --restart",
            )
        if not resumed:
            try:
                os.ftruncate(self._fd, 0)
                _allocate(self._fd, size)
            except OSError as e:
                with suppress(OSError):
                    os.ftruncate(self._fd, 0)  # what was had goes back to a disk that is full
                total = max(self._total, size)
                raise io_error(
                    f"cannot reserve {size:,} bytes of the run's state",
                    e,
                    self._shown,
                    f"until it ends the run keeps {total:,} bytes in {self._path.parts[-3]}, and its results: "
                    "choose a STATS where there is room, or take fewer or shorter --samples",
                ) from e

    def close(self) -> None:
        os.close(self._fd)

    def sync(self) -> None:
        """Makes what was written durable."""
        if self._dirty:
            try:
                os.fsync(self._fd)
            except OSError as e:
                raise io_error("cannot write", e, self._shown) from e
            self._dirty = False

    def read(self, first: int, last: int) -> NDArray[Any]:
        out = np.empty((last - first, self.width), self.dtype)
        self._read(out, first)
        return out

    def gather(self, rows: Index) -> NDArray[Any]:
        """[len(rows), width], in this order."""
        out = np.empty((len(rows), self.width), self.dtype)
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
        for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(rows)], strict=True):
            if end > begin:
                self._read(out[begin:end], int(rows[begin]))
        return out

    def write(self, first: int, values: NDArray[Any]) -> None:
        values = np.ascontiguousarray(values, self.dtype).reshape(-1, self.width)
        assert 0 <= first <= first + len(values) <= self.rows, (self._path, first, values.shape)
        view = memoryview(values.reshape(-1).view(np.uint8).data)
        at = first * self._row
        self._dirty = True
        try:
            while view:
                done = os.pwrite(self._fd, view, at)
                view, at = view[done:], at + done
        except OSError as e:
            raise io_error("cannot write", e, self._shown) from e

    def _read(self, out: NDArray[Any], first: int) -> None:
        assert 0 <= first <= first + len(out) <= self.rows, (self._path, first, out.shape)
        view = memoryview(out.reshape(-1).view(np.uint8).data)
        at = first * self._row
        try:
            while view:
                done = os.preadv(self._fd, [view], at)
                if not done:
                    raise KizamiError("was cut short during the run", code="damaged_journal", file=self._shown)
                view, at = view[done:], at + done
        except OSError as e:
            raise io_error("cannot read", e, self._shown) from e


def _allocate(fd: int, size: int) -> None:
    """So that a full disk is an error now."""
    if not size:
        return
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
        return
    zeros = bytes(1 << 20)  # macOS has no such call
    for at in range(0, size, len(zeros)):
        os.pwrite(fd, zeros[: size - at], at)


_AS_STORED = {torch.float32: np.float32, torch.bfloat16: np.uint16}


class TensorFile(RowFile):
    """The same for torch's rows, which NumPy has no BF16 for."""

    def __init__(
        self, path: Path, rows: int, width: int, dtype: torch.dtype, resumed: bool, device: torch.device, total: int = 0
    ) -> None:
        super().__init__(path, rows, width, _AS_STORED[dtype], resumed, total)
        self._torch, self._device = dtype, device

    def load(self, first: int, last: int) -> torch.Tensor:
        return self._tensor(self.read(first, last))

    def pick(self, rows: Index) -> torch.Tensor:
        return self._tensor(self.gather(rows))

    def store(self, first: int, values: torch.Tensor) -> None:
        assert values.dtype == self._torch, values.dtype
        values = values.contiguous().cpu()
        self.write(first, (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy())

    def _tensor(self, values: NDArray[Any]) -> torch.Tensor:
        found = torch.from_numpy(values)
        return (found.view(torch.bfloat16) if self._torch == torch.bfloat16 else found).to(self._device)

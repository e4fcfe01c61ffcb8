"""Large arrays that are used again. Fresh memory costs the system a pass of zeros over every page: on one core that is
a quarter of the time that `minmax` takes."""

from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

SMALLEST = 1 << 20  # below it the allocator reuses memory by itself
PAGE = 1 << 16  # sizes are rounded up to it, so that tensors of nearly one size share a buffer
SLACK = 1.25  # a buffer may be this many times larger than what is asked for


class Buffers:
    """A free list. An array that is given back must not be used any more; one that never is, is freed as usual."""

    def __init__(self, keep: int, slack: float = SLACK) -> None:
        """keep: how many buffers lie unused at most. slack: as SLACK."""
        self._keep, self._slack = keep, slack
        self._most: int | None = None  # bytes that lie unused at most
        self._free: list[NDArray[np.uint8]] = []  # by rising size
        self._lock = Lock()

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """As numpy.empty: C order, contents undefined."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if nbytes < SMALLEST:
            return np.empty(shape, dtype)
        return self._take(nbytes)[:nbytes].view(dtype).reshape(shape)

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        with self._lock:
            for i, buffer in enumerate(self._free):
                if nbytes <= buffer.nbytes <= self._slack * nbytes + PAGE:
                    return self._free.pop(i)
        return np.empty(-(-nbytes // PAGE) * PAGE, np.uint8)

    def give(self, array: NDArray[Any]) -> None:
        """Takes back what `empty` gave. Other arrays are left alone."""
        owner = array if array.base is None else array.base
        ours = isinstance(owner, np.ndarray) and owner.dtype == np.uint8 and owner.nbytes % PAGE == 0
        if not ours or owner.nbytes < SMALLEST:
            return
        with self._lock:
            self._free.append(owner)
            self._free.sort(key=lambda buffer: buffer.nbytes)
            self._drop()

    def allow(self, nbytes: int) -> None:
        """As many lie unused at most, from now on."""
        with self._lock:
            self._most = nbytes
            self._drop()

    def _drop(self) -> None:
        while len(self._free) > self._keep:
            self._free.pop(0)
        while self._most is not None and sum(buffer.nbytes for buffer in self._free) > self._most:
            self._free.pop(0)

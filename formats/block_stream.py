"""Bytes on their way into a file: hashed and written by a thread of their own, past the page cache where there is one
to pass.

Through the cache the system copies every byte into pages that it first has to find, and throws out others for them: a
third to one CPU second per GB, and a wait for fsync at the end. Nobody reads an output soon. `O_DIRECT` (open(2)) takes
whole pages from memory that begins with one, hence the copy into blocks; it costs a tenth of what it saves.
"""

import errno
import fcntl
import hashlib
import mmap
import os
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 2 << 20
BLOCKS = 2  # one is filled while the other is written
FLUSH_BYTES = 16 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none


class BlockStream:
    """Appends to the file `fd`, which is empty and stays the caller's. `appended` bytes were taken, of which `stored`
    are in the file. What fits into one block is written at the end, without a thread. Not for two threads at a time.
    """

    def __init__(self, fd: int) -> None:
        self.appended = self.stored = 0
        self._fd = fd
        self._hash = hashlib.sha256()
        self._block: NDArray[np.uint8] | None = None  # the one that is being filled
        self._filled = 0  # bytes of it
        self._blocks = 0  # made so far
        self._full: SimpleQueue[NDArray[np.uint8] | None] = SimpleQueue()
        self._free: SimpleQueue[NDArray[np.uint8]] = SimpleQueue()
        self._thread: Thread | None = None
        self._direct = False
        self._flushed = 0  # bytes in the cache whose way to the disk has been started
        self._stopped = False
        self._error: BaseException | None = None

    def append(self, data: bytes | memoryview) -> None:
        """Copies `data` (bytes, or a memoryview of format "B"). Raises what has become of blocks before: OSError."""
        source = np.frombuffer(data, np.uint8)
        while source.size:
            if self._block is None:
                self._block = self._next_block()
            some = source[: BLOCK_BYTES - self._filled]
            np.copyto(self._block[self._filled : self._filled + some.size], some)
            self._filled += some.size
            self.appended += some.size
            source = source[some.size :]
            if self._filled == BLOCK_BYTES:
                self._hand_over(self._block)

    def end(self) -> str:
        """Writes what is left, not yet durably, and returns the SHA-256 of it all. OSError."""
        self._join()
        if self._error is not None:
            raise self._error
        if self._block is not None:
            self._through_cache()
            self._store(self._block[: self._filled])
            self._block = None
        return self._hash.hexdigest()

    def stop(self) -> None:
        """Nothing more is written when this returns."""
        self._stopped = True
        self._join()

    def _join(self) -> None:
        """A signal may come at any point of it; then it is done once more."""
        if self._thread is not None:
            self._full.put(None)
            self._thread.join()
            self._thread = None

    def _next_block(self) -> NDArray[np.uint8]:
        if self._blocks < BLOCKS:
            self._blocks += 1
            return np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)  # whose pages are found as they are filled
        block = self._free.get()
        if self._error is not None:
            raise self._error
        return block

    def _hand_over(self, block: NDArray[np.uint8]) -> None:
        if self._thread is None:
            self._past_cache()
            thread = Thread(target=self._run, name="kizami-write", daemon=True)
            thread.start()
            self._thread = thread  # not before: one that has not begun cannot be joined
        self._block, self._filled = None, 0
        self._full.put(block)

    def _run(self) -> None:
        while (block := self._full.get()) is not None:
            if self._error is None and not self._stopped:
                try:
                    self._store(block)
                except BaseException as error:  # raised in the thread that appends
                    self._error = error
            self._free.put(block)

    def _store(self, data: NDArray[np.uint8]) -> None:
        self._hash.update(data.data)
        view = data.data
        while view:
            try:
                done = os.write(self._fd, view)
            except OSError as e:
                if e.errno != errno.EINVAL or not self._direct:
                    raise
                self._through_cache()  # the rest of a block that was taken in part, or a file system that wants more
                continue
            self.stored += done
            view = view[done:]
        if not self._direct and self.stored - self._flushed >= FLUSH_BYTES:
            self._start_flush()

    def _start_flush(self) -> None:
        """Lets the disk begin now, so that fsync has little left to wait for. On Linux this advice starts writing
        (mm/fadvise.c) and drops the pages that are clean."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # it is advice
                os.posix_fadvise(self._fd, self._flushed, self.stored - self._flushed, os.POSIX_FADV_DONTNEED)
        self._flushed = self.stored

    def _past_cache(self) -> None:
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | _DIRECT)
        except OSError as e:
            if e.errno != errno.EINVAL:  # a file system without it
                raise
            return
        self._direct = bool(_DIRECT)

    def _through_cache(self) -> None:
        if self._direct:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~_DIRECT)
            self._direct, self._flushed = False, self.stored

"""How fast a file system reads and writes, from a few MB of it: past the page cache where the system lets us, and said
so where it does not. Of a source only bytes are read; in a folder a file without a name is written, and gone at once.
"""

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kizami.formats.files import open_regular

How = Literal["direct", "uncached", "cached", "fsync"]
"""direct: O_DIRECT, past the page cache; uncached: the cache was asked to drop the pages before; cached: neither was
possible, so that memory may have answered; fsync: written, and waited for."""

PART_BYTES = 4 << 20  # read or written at a time
PARTS = 4  # of each stream, at most
SECONDS = 0.15  # after which no further part is begun: a slow file system has told enough by then
ALIGNMENT = 1 << 16  # of offsets under O_DIRECT: file systems ask for 512 bytes to 64 KiB
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)  # where O_DIRECT does not exist, at open or at read


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """bytes_per_second: of all streams together; nbytes: that it was measured on."""

    bytes_per_second: float
    nbytes: int
    how: How


def read_speed(files: Sequence[Path]) -> DiskSpeed | None:
    """Of one stream per file, all at the same time, as the shards of a conversion are read. None where there is not
    enough to read: tiny files, and holes, which no disk is asked for. KizamiError as open_regular; OSError."""
    spans = [span for file in files if (span := _data_span(file)) is not None]
    if not spans:
        return None
    started = time.perf_counter()
    with ThreadPoolExecutor(len(spans)) as pool:
        done = list(pool.map(lambda span: _read(span[0], span[1], started + SECONDS), spans))
    nbytes = sum(count for count, _ in done)
    hows = {how for _, how in done}
    how: How = "cached" if "cached" in hows else "uncached" if "uncached" in hows else "direct"
    return DiskSpeed(nbytes / max(1e-9, time.perf_counter() - started), nbytes, how)


def write_speed(folder: Path) -> DiskSpeed:
    """Of a temporary file in `folder`, flushed to the disk. It has no name where the file system can do without, and
    loses it at once elsewhere, so that nothing stays, whatever ends the program. OSError."""
    part = os.urandom(1 << 16) * (PART_BYTES >> 16)  # what a disk that compresses cannot shorten much
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        started = time.perf_counter()
        nbytes = 0
        while nbytes < PARTS * PART_BYTES and time.perf_counter() - started < SECONDS:
            nbytes += file.write(part)
        os.fsync(file.fileno())
        return DiskSpeed(nbytes / max(1e-9, time.perf_counter() - started), nbytes, "fsync")


def _data_span(path: Path) -> tuple[Path, int] | None:
    """Where in the file a few parts of real data begin; None where there are none."""
    fd = open_regular(path, path.name)
    try:
        size = os.fstat(fd).st_size
        begin = size // 2 // ALIGNMENT * ALIGNMENT  # not the start, which was read a moment ago for its header
        return (path, begin) if _data_end(fd, begin, size) - begin >= PART_BYTES else None
    finally:
        os.close(fd)


def _data_end(fd: int, begin: int, size: int) -> int:
    """Where the data that begins there ends; `begin` in a hole. Where a file system does not tell, there is none."""
    try:
        return os.lseek(fd, begin, os.SEEK_HOLE) if hasattr(os, "SEEK_HOLE") else size
    except OSError:  # EINVAL: no such question here; ENXIO: behind the end
        return size


def _read(path: Path, begin: int, deadline: float) -> tuple[int, How]:
    """Bytes read, and how."""
    fd = open_regular(path, path.name)
    try:
        with (
            mmap.mmap(-1, PART_BYTES) as memory,
            memoryview(memory) as view,
        ):  # a map begins at a page, as O_DIRECT asks
            if hasattr(os, "O_DIRECT"):
                try:
                    return _parts(path, begin, view, deadline), "direct"
                except OSError as e:
                    if e.errno not in _REFUSED:
                        raise
            how: How = "cached"
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, begin, PARTS * PART_BYTES, os.POSIX_FADV_DONTNEED)
                how = "uncached"
            return _count(fd, begin, view, deadline), how
    finally:
        os.close(fd)


def _parts(path: Path, begin: int, view: memoryview, deadline: float) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECT)
    try:
        return _count(fd, begin, view, deadline)
    finally:
        os.close(fd)


def _count(fd: int, begin: int, view: memoryview, deadline: float) -> int:
    done = 0
    while done < PARTS * PART_BYTES:
        got = os.preadv(fd, [view], begin + done)
        done += got
        if got < len(view) or time.perf_counter() >= deadline:
            break
    return done

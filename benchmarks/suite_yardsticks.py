"""What memory and disk do by themselves, as JSON in bytes per second: python benchmarks/suite_yardsticks.py DIR NBYTES

memcpy is NumPy's, of one thread's CPU time. The disk's figures are of a temporary file in DIR, wall time: written in
pieces of 8 MB and fsynced, then read with its pages dropped from this system's cache (what a hypervisor or a storage
server keeps is not ours to drop).
"""

import json
import os
import statistics
import sys
import tempfile
import time

import numpy as np

PIECE = 8 << 20


def memcpy(nbytes: int) -> float:
    """Bytes per CPU second, the median of seven."""
    source = np.ones(nbytes, np.uint8)
    target = np.zeros_like(source)
    found = []
    for _ in range(7):
        begin = time.thread_time()
        np.copyto(target, source)
        found.append(nbytes / max(1e-9, time.thread_time() - begin))
    return statistics.median(found)


def disk(folder: str, nbytes: int) -> tuple[float, float]:
    """Bytes read and written per second."""
    piece = os.urandom(min(PIECE, nbytes))  # a disk that compresses would shorten zeros
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        begin, written = time.perf_counter(), 0
        while written < nbytes:
            written += file.write(piece)
        os.fsync(file.fileno())
        write = written / (time.perf_counter() - begin)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        buffer, begin = bytearray(PIECE), time.perf_counter()
        while file.readinto(buffer):
            pass
        return written / (time.perf_counter() - begin), write


def main() -> None:
    folder, nbytes = sys.argv[1], int(sys.argv[2])
    read, write = disk(folder, nbytes)
    print(json.dumps({"memcpy": memcpy(nbytes), "disk_read": read, "disk_write": write}))


if __name__ == "__main__":
    main()

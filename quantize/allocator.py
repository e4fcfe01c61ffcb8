"""Freed arrays go back to the system at once, so that the memory held is the memory in use."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3) of glibc
LARGE = 2 << 20  # weights and their INT4 forms are larger; the tiles that kernels work on are smaller


def return_large_blocks() -> None:
    """For the whole process: blocks from 2 MiB on are mapped, and unmapped when freed. Does nothing without glibc.

    By default glibc raises its limit to the size of the largest mapped block freed so far, up to 32 MiB. From then on
    each thread's arena keeps what it frees: a worker that packs [4096, 8192] held 25 MiB more than the 50 it used.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, LARGE)
    mallopt(M_TRIM_THRESHOLD, LARGE)

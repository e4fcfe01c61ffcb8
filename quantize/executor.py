"""Threads: numba kernels, hashlib, NumPy and file calls release the GIL, so threads scale without copies."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def available_cores() -> int:
    """Cores this process may use: a container's or a batch system's share, not the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_map(workers: int, work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """work(item) for every item, results in the order of `items`. The first exception ends it."""
    with ThreadPoolExecutor(workers) as pool:
        try:
            yield from pool.map(work, items)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise

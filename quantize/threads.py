"""Threads: numba kernels, hashlib, NumPy and file calls release the GIL, so threads scale without copies.

The thread that gets the signals starts one other thread and waits for it; it never touches what threads share. A signal
handler that raises (Ctrl-C does) can end a call between the moment in which it takes a lock and the `with` that would
release it: Condition.__enter__, Event.wait and concurrent.futures' submit and wait are Python code. Whoever needs that
lock next then waits for ever, and so does the end of the program.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")


class Stopped(Exception):
    """The run is being interrupted."""


class _End(Exception):
    """Nothing more comes."""


def available_cores() -> int:
    """Cores this process may use: a container's or a batch system's share, not the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def drivers_for(workers: int, shards: int) -> int:
    """Threads that write shards. Two at least: while one waits for fsync, the other keeps the workers busy."""
    return max(1, min(shards, max(2, workers // 2))) if workers > 1 else 1


def from_thread(work: Callable[[Event], Iterator[T]]) -> Iterator[T]:
    """What work(stop) yields, from a thread of its own. It must soon end when `stop` is set; that is awaited."""
    results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
    stop, begun, ended = Event(), Lock(), Lock()  # locks and the queue are in C: a signal leaves them whole
    ended.acquire()

    def run() -> None:
        if not begun.acquire(blocking=False):
            return
        try:
            for result in work(stop):
                results.put((result, None))
            results.put((None, _End()))
        except BaseException as error:
            results.put((None, error))
        finally:
            ended.release()

    try:
        Thread(target=run, name="kizami-run", daemon=True).start()
        while True:
            result, error = results.get()
            if error is not None:
                break
            yield cast(T, result)
        if not isinstance(error, _End):
            raise error
    finally:
        if not begun.acquire(blocking=False):  # who has not begun by now never will
            stop.set()
            ended.acquire()


def in_thread(work: Callable[[Event], R]) -> R:
    """work(stop), as in `from_thread`."""

    def once(stop: Event) -> Iterator[R]:
        yield work(stop)

    (result,) = from_thread(once)
    return result


def thread_map(workers: int, work: Callable[[T, Event], R], items: Sequence[T]) -> Iterator[R]:
    """work(item, stop) for every item, results in the order of `items`. The first exception ends it. Work that takes
    long ends soon, with whatever result, when `stop` is set."""

    def mapped(stop: Event) -> Iterator[R]:
        def unless_stopped(item: T) -> R:
            if stop.is_set():
                raise Stopped
            return work(item, stop)

        with ThreadPoolExecutor(workers) as pool:
            try:
                yield from pool.map(unless_stopped, items)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    return from_thread(mapped)

"""Conditions that a conversion must not notice, each a change to this process."""

import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kizami.formats.reader import TensorReader
from kizami.formats.writer import ShardWriter
from kizami.quantize import buffers, shard, tensor
from kizami.quantize.run import local_pool


def one_driver(patch: pytest.MonkeyPatch) -> None:
    """All shards through one thread, their pieces through many."""
    real = local_pool.ThreadPoolExecutor
    patch.setattr(
        local_pool,
        "ThreadPoolExecutor",
        lambda n, name: real(1 if name == "kizami-shard" else n, thread_name_prefix=name),
    )


def other_order(seed: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Small pieces, threads that change places at any time, and reads, work and writes of any duration."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        dice = random.Random(seed)

        def late(call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **options: Any) -> Any:
                time.sleep(dice.choice((0, 0, 0, 0.001, 0.005)))
                result = call(*args, **options)
                time.sleep(dice.choice((0, 0, 0.001)))
                return result

            return called

        sys.setswitchinterval(1e-6)
        patch.setattr(shard, "produce", late(shard.produce))
        patch.setattr(TensorReader, "read", late(TensorReader.read))
        patch.setattr(ShardWriter, "append", late(ShardWriter.append))
        patch.setattr(tensor, "PIECE_BYTES", 1 << 14)

    return apply


def dirty_memory(patch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written to yet, and memory that was given back, is full of 0xFF."""

    def dirty(array: np.ndarray) -> np.ndarray:
        if array.size and array.dtype != object and array.flags.c_contiguous and array.flags.writeable:
            array.reshape(-1).view(np.uint8)[:] = 0xFF
        return array

    empty, like, of_buffers, give = np.empty, np.empty_like, buffers.Buffers.empty, buffers.Buffers.give
    patch.setattr(np, "empty", lambda *args, **options: dirty(empty(*args, **options)))
    patch.setattr(np, "empty_like", lambda *args, **options: dirty(like(*args, **options)))
    patch.setattr(buffers, "SMALLEST", 1)  # even the smallest array is used again
    patch.setattr(buffers.Buffers, "empty", lambda self, *args: dirty(of_buffers(self, *args)))
    patch.setattr(buffers.Buffers, "give", lambda self, array: give(self, dirty(array)))


class _Entries(list[Any]):
    """What os.scandir gives: a context manager and an iterator."""

    def __enter__(self) -> Iterator[Any]:
        return iter(self)

    def __exit__(self, *error: object) -> None: ...

    def __next__(self) -> Any:
        if not self:
            raise StopIteration
        return self.pop(0)

    def close(self) -> None: ...


def other_listings(arrange: Callable[[list[Any]], list[Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    def apply(patch: pytest.MonkeyPatch) -> None:
        listdir, scandir = os.listdir, os.scandir

        def scanned(*args: Any) -> _Entries:
            with scandir(*args) as entries:
                return _Entries(arrange(sorted(entries, key=lambda entry: entry.name)))

        patch.setattr(os, "listdir", lambda *args: arrange(sorted(listdir(*args))))
        patch.setattr(os, "scandir", scanned)

    return apply


def another_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(time, "time", lambda: 3e9)
    patch.setattr(time, "time_ns", lambda: 3 * 10**18)
    patch.setenv("TZ", "Pacific/Kiritimati")
    patch.setenv("SOURCE_DATE_EPOCH", "1")
    time.tzset()


def no_garbage_collection(patch: pytest.MonkeyPatch) -> None:
    gc.disable()


def much_garbage_collection(patch: pytest.MonkeyPatch) -> None:
    gc.set_threshold(50)


CONDITIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "one driver": one_driver,
    "another order of threads": other_order(1),
    "a third order of threads": other_order(2),
    "dirty memory": dirty_memory,
    "folders listed backwards": other_listings(lambda names: names[::-1]),
    "folders listed at random": other_listings(lambda names: random.Random(7).sample(names, len(names))),
    "another time": another_time,
    "no garbage collection": no_garbage_collection,
    "much garbage collection": much_garbage_collection,
}

"""What this machine computes in a second: a conversion in miniature, in memory, on all cores at once."""

import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import numpy as np
from zlib_ng import zlib_ng

from kizami.formats.dialects import ScaledWeight
from kizami.quantize import linear
from kizami.quantize.buffers import Buffers
from kizami.quantize.kernels.jit import is_compiled
from kizami.quantize.kernels.methods import rule_rows, search_rows
from kizami.quantize.kernels.survey import SIGNED, dequantize
from kizami.quantize.kernels.weighted import weighted_rows
from kizami.quantize.plan import Plan
from kizami.quantize.settings import CALIBRATED, SEARCHED, Method

ROWS, COLUMNS, BLOCK = 1024, 4096, (128, 128)  # 4 MB of FP8: large enough that what is done once does not count
PACK_SECONDS, MOVE_SECONDS = 0.15, 0.05
MOST_THREADS = 64  # beyond, Python itself would be in the way of so small pieces

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Computing:
    """Bytes of source weights per second, of all `workers` together: packed with the plan's method; decoded to BF16.
    SHA-256, CRC-32 and the copies into and out of the page cache are in it; disks are not."""

    pack: float
    move: float
    workers: int


def is_ready(method: Method) -> bool:
    """Whether the kernels are compiled: compiling takes ten times as long as all of this may."""
    rows = weighted_rows if method.name in CALIBRATED else search_rows if method.name in SEARCHED else rule_rows
    return is_compiled(rows) and is_compiled(dequantize)


def measure_computing(plan: Plan, workers: int) -> Computing:
    """In about half a second, of which loading the kernels is a part. The numbers of two calls differ: use them in no
    decision. plan.method may be none of GIVEN, whose codes come from elsewhere."""
    is_fp8 = any(isinstance(step.encoding, ScaledWeight) for step in plan.packed) or not plan.packed
    codes, scale, values = _sample()
    weight, grid = (codes, scale) if is_fp8 else (values, None)
    weights = np.ones(COLUMNS, np.int64) if plan.method.name in CALIBRATED else None
    group_size = plan.policy.group_size

    def pack(source: Array) -> tuple[Array, ...]:
        made = linear.quantize_linear(source, grid, BLOCK, group_size, plan.method, buffers.empty, weights=weights)
        return made.packed, made.scale

    def move(source: Array) -> tuple[Array, ...]:
        return (linear.dequantize_rows(source, scale, BLOCK, 0, buffers.empty),)

    threads = min(workers, MOST_THREADS)
    buffers = Buffers(2 * threads)
    each = workers / threads
    pack_rate = _rate(pack, weight, buffers, threads, PACK_SECONDS) * each
    return Computing(pack_rate, _rate(move, codes, buffers, threads, MOVE_SECONDS) * each, workers)


def _sample() -> tuple[Array, Array, Array]:
    """Gaussian weights: their e4m3 codes, the block scales of these, their BF16 bits."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(1 << 16, np.float32)
    magnitudes = SIGNED[:0x7F]
    codes = np.searchsorted((magnitudes[1:] + magnitudes[:-1]) / 2, np.abs(values) * 100).astype(np.uint8)
    codes |= (values < 0).astype(np.uint8) << 7
    drawn = rng.integers(0, 1 << 16, (ROWS, COLUMNS), np.uint16)
    scale = np.full((ROWS // BLOCK[0], COLUMNS // BLOCK[1]), 2.0**-12, np.float32)
    return codes[drawn], scale, (values.view(np.uint32) >> 16).astype(np.uint16)[drawn]


def _rate(
    work: Callable[[Array], tuple[Array, ...]], source: Array, buffers: Buffers, threads: int, seconds: float
) -> float:
    """Bytes of `source` per second, all threads together."""
    work(source)  # loads the kernels
    begin = Barrier(threads)

    def run(_: int) -> float:
        with _Memory(source) as memory:
            begin.wait()
            started = time.perf_counter()
            done = 0
            while (taken := time.perf_counter() - started) < seconds or not done:
                for made in work(memory.read()):
                    memory.write(made)
                    buffers.give(made)
                done += source.nbytes
            return done / taken

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(run, range(threads)))


class _Memory:
    """The file calls of a conversion, on a file that is nothing but page cache; without them where there is none."""

    def __init__(self, source: Array) -> None:
        self._buffer, self._fd = np.empty_like(source), -1
        if hasattr(os, "memfd_create"):
            with suppress(OSError):  # a sandbox may not let us
                self._fd = os.memfd_create("kizami")
        if self._fd < 0:
            np.copyto(self._buffer, source)
        else:
            os.pwrite(self._fd, source.data.cast("B"), 0)
        self._at = source.nbytes

    def __enter__(self) -> "_Memory":
        return self

    def __exit__(self, *error: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self) -> Array:
        if self._fd >= 0:
            os.preadv(self._fd, [self._buffer.data.cast("B")], 0)
        return self._buffer

    def write(self, array: Array) -> None:
        view = array.reshape(-1).view(np.uint8).data
        hashlib.sha256(view)
        zlib_ng.crc32(view)
        if self._fd >= 0:
            os.pwrite(self._fd, view, self._at)

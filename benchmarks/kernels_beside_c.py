"""How far the numba kernel of `minmax` is from C with AVX2 intrinsics: benchmarks/kernels_beside_c.py [--rounds N]

Compiles minmax_avx2.c with `cc` into a temporary folder. Both do the whole tensor on one thread, in turns, and give the
same codes, scales and figures, which is checked; only kizami also finds the largest 0.1 %, in a pass of its own. GB/s
are bytes of FP8 per second of CPU time.
"""

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from kernels import BLOCK, COLUMNS, ROWS, fp8

from kizami.quantize.linear import quantize_linear
from kizami.quantize.settings import Method

GROUP = 32
SPAN = 64  # rows that C goes through at a time: they stay in the second cache


def compiled(folder: Path) -> ctypes.CDLL:
    source, library = Path(__file__).with_name("minmax_avx2.c"), folder / "minmax.so"
    flags = ["-O3", "-mavx2", "-mpopcnt", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


class InC:
    """The outputs of the last `work`."""

    def __init__(self, library: ctypes.CDLL, codes: np.ndarray, scale: np.ndarray) -> None:
        rows, columns = codes.shape
        chunks = columns // GROUP
        self._library, self._codes = library, codes
        self._block = np.repeat(np.repeat(scale, BLOCK[0], 0), BLOCK[1] // GROUP, 1)
        self._largest, self._step = np.empty((rows, chunks), np.uint8), np.empty((rows, chunks), np.float32)
        self.scale, self.packed = np.empty((rows, chunks), np.uint16), np.empty((rows, columns // 8), np.int32)
        self.figures = np.zeros(5)

    def work(self, with_figures: bool) -> None:
        self.figures[:] = 0
        for first in range(0, len(self._codes), SPAN):
            rows = slice(first, first + SPAN)
            arrays = self._codes, self._largest, self._block, self._step, self.scale, self.packed
            codes, largest, block, step, scale, packed = (ctypes.c_void_p(a[rows].ctypes.data) for a in arrays)
            count = ctypes.c_size_t(self._step[rows].size)
            if self._library.maxima(codes, count, largest):
                raise ValueError("NaN")
            self._library.scales(largest, block, count, step, scale)
            if with_figures:
                figures = ctypes.c_void_p(self.figures.ctypes.data)
                self._library.pack_with_figures(codes, block, step, count, packed, figures)
            else:
                self._library.pack(codes, block, step, count, packed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    codes, scale = fp8("gauss", (ROWS, COLUMNS))
    target = np.zeros_like(codes)

    def kizami() -> None:
        quantize_linear(codes, scale, BLOCK, GROUP, Method("minmax"))

    with tempfile.TemporaryDirectory() as folder:
        c = InC(compiled(Path(folder)), codes, scale)
        works: dict[str, Callable[[], object]] = {
            "kizami": kizami,
            "C with AVX2": lambda: c.work(True),
            "C with AVX2, no figures": lambda: c.work(False),
            "memcpy": lambda: np.copyto(target, codes),
        }
        ours = quantize_linear(codes, scale, BLOCK, GROUP, Method("minmax"))
        for with_figures in (False, True):
            c.work(with_figures)
            np.testing.assert_array_equal(c.packed, ours.packed)
            np.testing.assert_array_equal(c.scale, ours.scale)
        sums = ours.sums
        wanted = (sums.sum_w2, sums.sum_e2, sums.sum_q2, sums.max_abs_error, sums.clipped)
        np.testing.assert_allclose(c.figures, wanted, rtol=1e-12)
        taken: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(rounds):
            for name, work in works.items():
                begin = time.thread_time()
                work()
                taken[name].append(time.thread_time() - begin)
    print(f"{'GB/s of FP8, one thread':<28}{'best':>8}{'median':>8}")
    for name, times in taken.items():
        print(f"{name:<28}{codes.size / min(times) / 1e9:8.2f}{codes.size / statistics.median(times) / 1e9:8.2f}")


if __name__ == "__main__":
    main()

"""Speed of the kernels on one thread, and what `search` gains: python benchmarks/kernels.py [--repeat N]

GB/s are bytes of FP8 per second of CPU time, of everything a tensor costs: checks, scales, codes, packing, error sums.
Best and median of N runs; compare with memcpy on the same machine, not with figures from another one.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from kizami.quantize.calibrated.column_weights import integer_weights
from kizami.quantize.linear import PackedLinear, dequantize_rows, quantize_linear, warm_up
from kizami.quantize.settings import CALIBRATED, GROUP_SIZES, Method

ROWS, COLUMNS, BLOCK = 2048, 7168, (128, 128)  # a Kimi-K2 expert's gate or up projection
METHODS = {
    "minmax": Method("minmax"),
    "signed": Method("signed"),
    "search": Method("search"),
    "search, allowance 0.5": Method("search", clip_allowance=0.5),
    "search, positive": Method("search", "positive"),
    "weighted": Method("weighted", stats=""),
    "weighted, allowance 0.5": Method("weighted", clip_allowance=0.5, stats=""),
}
KINDS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "gauss": lambda rng, shape: rng.standard_normal(shape),
    "t5": lambda rng, shape: rng.standard_t(5.0, shape),
    "t3": lambda rng, shape: rng.standard_t(3.0, shape),
}


def e4m3_values() -> np.ndarray:
    code = np.arange(127)
    return np.where(code < 8, code * 2.0**-9, np.ldexp(8.0 + (code & 7), (code >> 3) - 10))


def fp8(kind: str, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, block scales) of random weights; ties of rounding do not matter here."""
    rows, columns = shape
    blocks = 0.02 * KINDS[kind](np.random.default_rng(0), shape).reshape(rows // 128, 128, columns // 128, 128)
    scale = (np.abs(blocks).max(axis=(1, 3)) / 448).astype(np.float32)
    scaled = (blocks / scale[:, None, :, None]).reshape(shape)
    values = e4m3_values()
    codes = np.searchsorted((values[1:] + values[:-1]) / 2, np.abs(scaled))
    return (codes | np.where(scaled < 0, 0x80, 0)).astype(np.uint8), scale


def seconds(work: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Best and median CPU time of this thread."""
    times = []
    for _ in range(repeat):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return min(times), statistics.median(times)


def line(name: str, nbytes: int, work: Callable[[], object], repeat: int) -> None:
    best, median = seconds(work, repeat)
    print(f"{name:<28}{nbytes / best / 1e9:8.3f}{nbytes / median / 1e9:8.3f}", flush=True)


def made(
    weight: np.ndarray, scale: np.ndarray | None, block: tuple[int, int] | None, group_size: int, method: Method
) -> PackedLinear:
    """With mean squares of the inputs as spread as e^N(0, 1) where the method takes any."""
    h = np.exp(np.random.default_rng(1).standard_normal(weight.shape[1])) if method.name in CALIBRATED else None
    weights = None if h is None else integer_weights(h, group_size)
    return quantize_linear(weight, scale, block, group_size, method, weights=weights, h=h)


def speeds(repeat: int) -> None:
    codes, scale = fp8("gauss", (ROWS, COLUMNS))
    print(f"{'GB/s of FP8, one thread':<28}{'best':>8}{'median':>8}")
    target = np.zeros_like(codes)
    line("memcpy", codes.size, lambda: np.copyto(target, codes), repeat)
    line("dequantize to BF16", codes.size, lambda: dequantize_rows(codes, scale, BLOCK, 0), repeat)
    for name, method in METHODS.items():
        for g in GROUP_SIZES:
            line(f"{name} g{g}", codes.size, lambda m=method, k=g: made(codes, scale, BLOCK, k, m), repeat)  # type: ignore[misc]
    bf16 = (np.random.default_rng(0).standard_normal((256, COLUMNS)).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    for name in ("minmax", "search", "weighted"):
        line(
            f"{name} g32 from BF16 (weights)",
            bf16.size,
            lambda m=METHODS[name]: made(bf16, None, None, 32, m),
            repeat,
        )  # type: ignore[misc]


def gains() -> None:
    print(f"\n{'SQNR in dB':<12}{'minmax':>9}{'search':>9}{'gain':>7}{'top .1 %':>10}{'':>9}")
    for kind in KINDS:
        codes, scale = fp8(kind, (1024, 2048))
        for g in GROUP_SIZES:
            a, b = (quantize_linear(codes, scale, BLOCK, g, METHODS[m]).sums.figures() for m in ("minmax", "search"))
            old, new = float(a["sqnr_db"] or 0), float(b["sqnr_db"] or 0)
            top = f"{a['sqnr_top_db']:10.1f}{b['sqnr_top_db']:9.1f}"
            print(f"{kind + ' g' + str(g):<12}{old:9.3f}{new:9.3f}{new - old:7.3f}{top}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    for name in ("minmax", "search", "weighted"):
        begin = time.process_time()
        warm_up(METHODS[name], 32)
        print(f"warm-up {name}: {time.process_time() - begin:.2f} s")
    speeds(parser.parse_args().repeat)
    gains()


if __name__ == "__main__":
    main()

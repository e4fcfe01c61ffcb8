"""Speed of `convert --device cuda` beside one core, and whether the bits are the same: python benchmarks/device.py

GB/s are bytes of FP8 per second of wall time, from NumPy memory to packed codes in NumPy memory, of everything a tensor
costs: transfers, checks, scales, codes, packing, error sums. Files are not read or written. On the device as many
threads as it has lanes work at a time, as in a run. Compare ratios.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from kernels import BLOCK, COLUMNS, METHODS, ROWS, fp8

from kizami.quantize.calibrated.column_weights import integer_weights
from kizami.quantize.linear import PackedLinear, quantize_linear
from kizami.quantize.on_device.compute import Compute, compute_on
from kizami.quantize.settings import CALIBRATED, GROUP_SIZES


def is_same(a: PackedLinear, b: PackedLinear) -> bool:
    return np.array_equal(a.packed, b.packed) and np.array_equal(a.scale, b.scale) and a.sums == b.sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:0,1, or cpu to try this script")
    parser.add_argument("--tensors", type=int, default=32, help="per method, on the device")
    parser.add_argument("--rows", type=int, default=ROWS)
    given = parser.parse_args()
    compute = Compute([torch.device("cpu")]) if given.device == "cpu" else compute_on(given.device)
    codes, scale = fp8("t5", (given.rows, COLUMNS))
    h = np.random.default_rng(1).standard_normal(COLUMNS) ** 2
    print(f"{'group':>5} {'method':26} {'one core':>9} {given.device:>9}  same")
    all_same = True
    for group_size in GROUP_SIZES:
        for name, method in METHODS.items():
            more = {}
            if method.name in CALIBRATED:
                more = {"weights": integer_weights(h, group_size), "h": h}
            wanted = quantize_linear(codes, scale, BLOCK, group_size, method, **more)  # compiled by now
            begin = time.perf_counter()
            quantize_linear(codes, scale, BLOCK, group_size, method, **more)
            alone = time.perf_counter() - begin

            def pack(_: int, g: int = group_size, method=method, more=more) -> PackedLinear:
                return compute.quantize(codes, scale, BLOCK, g, method, **more)

            with ThreadPoolExecutor(compute.lanes) as pool:
                same = all(is_same(made, wanted) for made in pool.map(pack, range(2 * compute.lanes)))  # warm
                begin = time.perf_counter()
                for _ in pool.map(pack, range(given.tensors)):
                    pass
                together = (time.perf_counter() - begin) / given.tensors
            all_same &= same
            rates = f"{codes.nbytes / alone / 1e9:9.2f} {codes.nbytes / together / 1e9:9.2f}"
            print(f"{group_size:5} {name:26} {rates}  {'yes' if same else 'NO'}", flush=True)
    sys.exit(0 if all_same else 1)


if __name__ == "__main__":
    main()

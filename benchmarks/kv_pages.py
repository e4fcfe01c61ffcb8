"""What the paged KV reference costs on this machine beside memcpy, measured in the same run.

    python benchmarks/kv_pages.py [--threads N] [--json]

Per layout of an MLA latent: append of a prefill chunk and of one decode step, gather of all requests, and conversion of
BF16 pages with its checksum. GB are 1e9 bytes: of rows written (append), of rows read (gather), of BF16 rows read
(convert). memcpy copies as many BF16 bytes as one layer has. Medians of `--rounds`; rows are random, all pages of 64.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from kizami.formats.serving.kv_layout import Layout
from kizami.quantize.kv_cache.layouts import mla_rows
from kizami.quantize.kv_cache.pages import PagedCache
from kizami.quantize.kv_cache.transfer import convert_run

REQUESTS, TOKENS, LAYERS, PAGE = 64, 512, 4, 64


def seconds(action: Callable[[], object], rounds: int) -> float:
    action()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def filled(layout: Layout, values: torch.Tensor) -> PagedCache:
    """All requests with TOKENS tokens each, page by page in turns, so that no request lies in one piece."""
    cache = PagedCache([mla_rows(layout)] * LAYERS, pages=1 + REQUESTS * (TOKENS // PAGE + 1), page_size=PAGE)
    for request in range(REQUESTS):
        cache.add(request)
    for start in range(0, len(values), REQUESTS * PAGE):
        cache.append(range(REQUESTS), [PAGE] * REQUESTS, [values[start : start + REQUESTS * PAGE]] * LAYERS)
    return cache


def measure(layout: Layout, values: torch.Tensor, rounds: int) -> dict[str, float]:
    cache = filled(layout, values)
    store, requests = cache.store, list(range(REQUESTS))
    row_bytes, slots = store.codecs[0].row_bytes, cache.slots(requests)
    step = cache.allocate(requests, [1] * REQUESTS)
    written = seconds(lambda: store.write(0, slots, values), rounds)
    decode = seconds(lambda: store.write(0, step, values[:REQUESTS]), rounds)
    rows = seconds(lambda: store.read_rows(0, slots), rounds)
    gathered = seconds(lambda: store.read(0, slots), rounds)
    tables = seconds(lambda: cache.tables(requests), rounds)
    moved = len(values) * row_bytes / 1e9
    return {
        "row_bytes": row_bytes,
        "append_gb_s": moved / written,
        "decode_step_us_per_layer": decode * 1e6,
        "gather_rows_gb_s": moved / rows,
        "gather_gb_s": moved / gathered,
        "block_tables_us": tables * 1e6,
    }


def conversion(layout: Layout, values: torch.Tensor, rounds: int) -> float:
    """GB of BF16 rows per second, reading, rounding, writing and checksum."""
    source, destination = filled(Layout.BF16, values), filled(layout, values)
    a, b = source.slots(range(REQUESTS)), destination.slots(range(REQUESTS))
    taken = seconds(lambda: convert_run(source.store, a, destination.store, b), rounds)
    return LAYERS * len(values) * 1152 / 1e9 / taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    values = torch.randn(REQUESTS * TOKENS, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    target = torch.empty_like(values)
    memcpy = values.nbytes / 1e9 / seconds(lambda: target.copy_(values), args.rounds)
    layouts = {layout.value: measure(layout, values, args.rounds) for layout in Layout}
    for layout in Layout:
        layouts[layout.value]["convert_gb_s"] = conversion(layout, values, args.rounds)
    settings = {"requests": REQUESTS, "tokens": TOKENS, "page_size": PAGE, "threads": args.threads}
    result = {"settings": settings, "torch": torch.__version__, "memcpy_gb_s": memcpy, "layouts": layouts}
    if args.json:
        print(json.dumps(result))
        return
    names = list(next(iter(layouts.values())))
    print(f"memcpy {memcpy:.2f} GB/s; {settings}")
    print(" | ".join(["layout", *names]))
    for layout, figures in layouts.items():
        print(" | ".join([layout, *(f"{figures[name]:.2f}" for name in names)]))


if __name__ == "__main__":
    main()

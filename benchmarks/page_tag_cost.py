"""What the check of page tags costs beside a decode step's own attention, on this CPU and, by arithmetic, on an H200.

    python benchmarks/page_tag_cost.py [--requests 64] [--tokens 16384] [--heads 8] [--samples 20] [--json FILE]

The step is what Kimi-K2's attention has to do for one token of each request: 61 layers of absorbed MLA over BF16 rows
of 512 + 64, `--heads` 64 on one rank, 8 with TP8 (the latent is not sharded, so the tables are the same). One layer
over all requests is measured and taken 61 times: 1.2 GB of rows, more than any cache, and 61 of them would be 74 GB.
Everything else in a step (projections, experts, sampling) is left out, and rows lie in order instead of in pages, which
a kernel would have to gather: both make the step shorter, hence the share of the check larger.

Before each layer one check of each page size runs, on tables whose pages are in random order. `with` is 61 layers and
one check; `of reading alone` is the check's share of 61 times one pass over the rows (a sum of their words), for a
machine that does the arithmetic in no time. Stamps and hashes lie in the pages, so they are per layer; they are
measured for one layer and taken 61 times: `stamps` compares one stamp a page, `hash writes` hashes the rows that a step
wrote (one a request), `hash written pages` the pages which these rows are in, `hash all` all pages, measured on one
request. Their columns are shares of the same step.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kizami.quantize.page_tags.check import BlockTables
from kizami.quantize.page_tags.hashes import page_hashes, row_hashes
from kizami.quantize.page_tags.stamps import Stamps
from kizami.quantize.page_tags.tags import PageTags

LAYERS, LATENT, ROPE = 61, 512, 64
ROW = 2 * (LATENT + ROPE)  # bytes
PAGE_SIZES = (1, 16, 64)
HBM = 4.8e12  # bytes/s, H200 SXM data sheet
LAUNCH = (5e-6, 10e-6)  # s, a kernel launched on its own; less in a CUDA graph
SECTOR = 32  # bytes that a gather of one tag moves
KERNELS = 10  # of the check in PyTorch: "a gather and some ten elementwise kernels" (page_tags/check.py)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of all samples, sorted."""

    seconds: tuple[float, ...]

    @classmethod
    def of(cls, seconds: list[float]) -> "Times":
        return cls(tuple(sorted(seconds)))

    @property
    def p50(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p95(self) -> float:
        """The sample that 95 % of all are not above."""
        return self.seconds[min(len(self.seconds) - 1, -(-95 * len(self.seconds) // 100) - 1)]


@dataclass(frozen=True, slots=True)
class Row:
    """One page size; seconds, and the check's share of the step without it."""

    page: int
    check: float
    without_p50: float
    without_p95: float
    with_p50: float
    with_p95: float
    share: float
    share_of_reading: float
    stamps: float
    hash_writes: float
    hash_written_pages: float
    hash_all: float


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def attend(rows: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Absorbed MLA, one token: rows BF16 [requests, tokens, 576], queries BF16 [requests, heads, 576]; BF16
    [requests, heads, 512]."""
    out = queries.new_empty(*queries.shape[:2], LATENT)
    for row, query, to in zip(rows, queries, out, strict=True):
        scores = (query @ row.T).float().mul_((128 + ROPE) ** -0.5).softmax(-1)
        torch.mm(scores.bfloat16(), row[:, :LATENT], out=to)
    return out


class Pages:
    """Tables of one page size, all in order, and what is measured on them."""

    def __init__(self, rows: torch.Tensor, page: int) -> None:
        requests, tokens = rows.shape[:2]
        self.page, each = page, tokens // page
        self.tags = PageTags(requests * each + 1)
        ids = (torch.randperm(requests * each) + 1).view(requests, each)
        self.tables = BlockTables(requests, each)
        self.tables.pages[:] = ids
        self.tables.tags[:] = self.tags.acquire(ids.reshape(-1)).view_as(ids)
        self.tables.lengths[:] = each
        self.tokens = torch.full((requests,), tokens)
        self.stamps = Stamps(requests * each + 1)
        self.stamps.write(ids.reshape(-1), self.tables.tags.reshape(-1), torch.zeros(ids.numel(), dtype=torch.int32))
        self.pool = rows.view(-1, page, rows.shape[2]).view(torch.uint8)  # page size 1: a row is a page
        self.last = torch.arange(1, requests + 1) * each - 1  # the page each request writes to
        self.full = torch.full((requests,), page)

    def check(self) -> torch.Tensor:
        return self.tables.check(self.tags)

    def check_stamps(self) -> torch.Tensor:
        return self.stamps.check(self.tables.pages, self.tables.tags, self.tokens, self.page)

    def hash_writes(self) -> torch.Tensor:
        return row_hashes(self.pool[self.last, -1], self.full - 1)

    def hash_written_pages(self) -> torch.Tensor:
        return page_hashes(self.pool, self.last, self.full)

    def hash_request(self) -> torch.Tensor:
        each = self.tables.pages.shape[1]
        return page_hashes(self.pool, torch.arange(each), torch.full((each,), self.page))


def measure(requests: int, tokens: int, heads: int, samples: int, page_sizes: tuple[int, ...]) -> list[Row]:
    """A row per page size, all from the same samples of the layer."""
    rows = torch.empty(requests, tokens, LATENT + ROPE, dtype=torch.bfloat16)
    for row in rows:
        row.copy_(torch.randn(tokens, LATENT + ROPE))
    queries = torch.randn(requests, heads, LATENT + ROPE).bfloat16()
    every = [Pages(rows, page) for page in page_sizes]
    layer: list[float] = []
    checks: list[list[float]] = [[] for _ in every]
    for sample in range(samples + 1):
        for pages, seconds in zip(every, checks, strict=True):
            seconds.append(timed(pages.check))
            assert sample or not pages.check().any(), "all pages are in order"
        layer.append(timed(lambda: attend(rows, queries)))
    without = Times.of([LAYERS * seconds for seconds in layer[1:]])  # the first of each warms up
    words = rows.view(torch.int64)
    reading = LAYERS * Times.of([timed(words.sum) for _ in range(5)]).p50
    result = []
    for pages, seconds in zip(every, checks, strict=True):
        both = Times.of([check + LAYERS * one for check, one in zip(seconds[1:], layer[1:], strict=True)])
        check = Times.of(seconds[1:]).p50
        stamps, writes, written = (
            LAYERS * Times.of([timed(what) for _ in range(7)]).p50
            for what in (pages.check_stamps, pages.hash_writes, pages.hash_written_pages)
        )
        everything = LAYERS * requests * Times.of([timed(pages.hash_request) for _ in range(3)]).p50
        result.append(
            Row(
                pages.page, check, without.p50, without.p95, both.p50, both.p95, check / without.p50, check / reading,
                stamps, writes, written, everything,
            )
        )  # fmt: skip
    return result


def on_paper(requests: int, tokens: int, page_sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """An H200: seconds to read the KV of one step at the HBM's rate, no less than which a step takes, and those of the
    check: its bytes at that rate, and the launches of one fused kernel, or of PyTorch's kernels one by one."""
    kv = requests * tokens * ROW * LAYERS
    result: list[dict[str, Any]] = []
    for page in page_sizes:
        entries = requests * -(-tokens // page)
        moved = entries * (4 + 4 + SECTOR)  # page, captured tag, the sector of the tag now
        fused = (moved / HBM + LAUNCH[0], moved / HBM + LAUNCH[1])
        # every elementwise kernel reads and writes 4 bytes an entry, or less
        eager = entries * (4 + 4 + SECTOR + KERNELS * 8) / HBM + (KERNELS + 1) * LAUNCH[1]
        for name, step in (("BF16", kv / HBM), ("FP8", kv / 2 / HBM)):
            result.append(
                {
                    "page": page, "kv": name, "kv_bytes": step * HBM, "check_bytes": moved, "kv_s": step,
                    "fused_s": fused[1], "eager_s": eager, "fused_share": fused[1] / step, "eager_share": eager / step,
                }
            )  # fmt: skip
    return result


def report(rows: list[Row], paper: list[dict[str, Any]]) -> str:
    lines = [
        "| page | check ms | step s without p50, p95 | with p50, p95 | share of the check | of reading alone | stamps |"
        " hash writes | hash written pages | hash all |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        costs = (row.stamps, row.hash_writes, row.hash_written_pages, row.hash_all)
        shares = " | ".join(f"{cost / row.without_p50:.3%}" for cost in costs)
        lines.append(
            f"| {row.page} | {row.check * 1e3:.2f} | {row.without_p50:.3f}, {row.without_p95:.3f} |"
            f" {row.with_p50:.3f}, {row.with_p95:.3f} | {row.share:.4%} | {row.share_of_reading:.4%} | {shares} |"
        )
    lines += [
        "",
        f"H200 on paper: HBM {HBM / 1e12} TB/s, {LAUNCH[1] * 1e6:.0f} us a launch; the step is its reads of KV alone.",
        "| page | KV | KV GB a step | ms | check MB | one kernel us | share | in PyTorch us | share |",
        "|---" * 9 + "|",
    ]
    for p in paper:
        lines.append(
            f"| {p['page']} | {p['kv']} | {p['kv_bytes'] / 1e9:.1f} | {p['kv_s'] * 1e3:.1f} |"
            f" {p['check_bytes'] / 1e6:.2f} | {p['fused_s'] * 1e6:.1f} | {p['fused_share']:.3%} |"
            f" {p['eager_s'] * 1e6:.0f} | {p['eager_share']:.2%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16384, help="of each request; a multiple of 64")
    parser.add_argument("--heads", type=int, default=8, help="64, or 8 of them on a rank of TP8")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows = measure(args.requests, args.tokens, args.heads, args.samples, PAGE_SIZES)
    paper = on_paper(args.requests, args.tokens, PAGE_SIZES)
    print(report(rows, paper))
    if args.json:
        settings = {name: getattr(args, name) for name in ("requests", "tokens", "heads", "samples", "threads")}
        result = {"schema": "kizami.bench.page-tag-cost/1", "settings": settings, "cpu": [asdict(r) for r in rows]}
        args.json.write_text(json.dumps(result | {"h200 on paper": paper}, indent=2) + "\n")


if __name__ == "__main__":
    main()

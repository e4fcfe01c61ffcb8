"""BF16 pages become the FP8 pages that the receiver would have written itself."""

import re
import zlib

import kv_cache_oracle as oracle
import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from kizami.formats.errors import KizamiError
from kizami.formats.serving.kv_layout import Layout
from kizami.quantize.kv_cache.layouts import Bf16Rows, IndexRows, StaticRows, TiledRows, mla_rows
from kizami.quantize.kv_cache.pages import PagedCache
from kizami.quantize.kv_cache.store import PageStore
from kizami.quantize.kv_cache.transfer import (
    adler32_vectorised,
    convert_run,
    damaged,
    signature,
    slots_of,
    transfer,
)

DECODE = [
    mla_rows(Layout.RAW),
    mla_rows(Layout.RAW, scale=0.3),
    TiledRows(),
    TiledRows("vllm"),
    Bf16Rows(),
    IndexRows(),
]
PREFILL = [Bf16Rows()] * 5 + [IndexRows()]


def all_values(n: int) -> list[torch.Tensor]:
    """Per layer [n, width]: any BF16 bits at all, NaN and infinity among them."""
    rng = np.random.default_rng(0)
    bits = [rng.integers(0, 65536, (n, c.width), np.uint16).view(np.int16) for c in PREFILL]
    return [torch.from_numpy(b).view(torch.bfloat16) for b in bits]


def prefill(n: int, page_size: int = 64) -> PagedCache:
    cache = PagedCache(PREFILL, pages=40, page_size=page_size)
    cache.add("before")
    cache.append(["before"], [page_size + 1], all_values(page_size + 1))
    cache.add("a")
    cache.append(["a"], [n], all_values(n))
    return cache


@pytest.mark.parametrize(("sizes", "chunk"), [((64, 64), 4096), ((64, 16), 50), ((16, 64), 7), ((1, 64), 64)])
def test_converted_pages_are_those_written_directly(sizes: tuple[int, int], chunk: int) -> None:
    n = 131 if sizes[0] > 1 else 30
    source = prefill(n, sizes[0])
    decode, direct = (PagedCache(DECODE, pages=40, page_size=sizes[1]) for _ in range(2))
    receipt = transfer(source, "a", decode, "b", chunk=chunk)
    direct.add("b")
    direct.append(["b"], [n], all_values(n))
    for layer in range(len(DECODE)):
        assert torch.equal(decode.store.bytes_of(layer), direct.store.bytes_of(layer))
    assert receipt.tokens == n
    assert receipt.bytes == n * sum(codec.row_bytes for codec in DECODE)
    assert not damaged(decode.store, decode.slots(["b"]), receipt)


def test_a_converted_row_is_the_oracle_of_the_bf16_values() -> None:
    source = PagedCache([Bf16Rows()] * 2, pages=4, page_size=64)
    x = torch.randn(70, 576, generator=torch.Generator().manual_seed(3)).bfloat16()
    source.add(0)
    source.append([0], [70], [x, x])
    decode = PagedCache([mla_rows(Layout.RAW), TiledRows()], pages=4, page_size=64)
    transfer(source, 0, decode, 0)
    raw, tiled = (decode.store.read_rows(layer, decode.slots([0])).numpy() for layer in (0, 1))
    for row, found, found_tiled in zip(x.float().numpy(), raw, tiled, strict=True):
        assert found.tobytes() == oracle.static_row(row, [1.0]).tobytes()
        assert found_tiled.tobytes() == oracle.ds_row(row, "sglang")


def test_the_checksum_is_adler32_of_the_receivers_rows_and_finds_a_changed_bit() -> None:
    decode = PagedCache(DECODE, pages=40, page_size=64)
    receipt = transfer(prefill(131), "a", decode, "a")
    slots = decode.slots(["a"])
    for layer in range(len(DECODE)):
        rows = decode.store.read_rows(layer, slots)
        assert receipt.checksums[layer] == zlib.adler32(rows.numpy().tobytes())
    page = int(decode.tables(["a"]).pages[0, -1])  # 3 of its 64 tokens are used
    for layer in (5, 2):
        decode.store.bytes_of(layer)[page, 200] ^= 16
    assert damaged(decode.store, slots, receipt) == [2, 5]
    decode.store.bytes_of(2)[page, 200] ^= 16
    decode.store.bytes_of(2)[page, 3 * 656] ^= 16  # behind the last token
    assert damaged(decode.store, slots, receipt) == [5]
    assert damaged(decode.store, slots[:-1], receipt) == list(range(6))
    assert damaged(decode.store, slots[[1, 0, *range(2, 131)]], receipt) == list(range(6))  # two tokens in wrong places


@pytest.mark.parametrize(("n", "width"), [(0, 576), (1, 1), (100, 656), (4096, 132)])
def test_adler32_without_a_loop_over_bytes_is_zlibs(n: int, width: int) -> None:
    random = torch.randint(0, 256, (n, width), generator=torch.Generator().manual_seed(n), dtype=torch.uint8)
    for rows in (random, torch.full_like(random, 255)):
        for value in (1, 0xFFF0FFF0):
            assert adler32_vectorised(rows, value) == zlib.adler32(rows.numpy().tobytes(), value)


def test_page_lists_of_an_engine_are_converted_without_a_cache() -> None:
    source = PageStore([Bf16Rows()], pages=8, page_size=4)
    x = torch.randn(10, 576, generator=torch.Generator().manual_seed(3)).bfloat16()
    here = slots_of([5, 2, 7], 10, 4)
    assert here.tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 28, 29]
    source.write(0, here, x)
    staging = PageStore([TiledRows()], pages=3, page_size=6)
    receipt = convert_run(source, here, staging, slots_of([1, 0], 10, 6))
    assert torch.equal(staging.bytes_of(0)[1].view(6, 656), TiledRows().encode(x[:6]))
    assert torch.equal(staging.bytes_of(0)[0].view(6, 656)[:4], TiledRows().encode(x[6:]))
    assert not damaged(staging, slots_of([1, 0], 10, 6), receipt)
    with pytest.raises(ValueError, match="19 tokens in 3 pages of 6, expected 0 to 18"):
        slots_of([0, 1, 2], 19, 6)


def test_a_full_receiver_keeps_nothing() -> None:
    decode = PagedCache(DECODE, pages=3, page_size=64)
    with pytest.raises(KizamiError, match="3 pages needed, 2 of 2 are free"):
        transfer(prefill(131), "a", decode, "a")
    assert decode.free_pages == 2
    decode.add("a")


@pytest.mark.parametrize(
    ("codecs", "words"),
    [
        ([TiledRows()], "would round twice"),
        ([StaticRows(scales=(2.0,))], "would round twice"),
        ([IndexRows()], "layer 0: 576 values a token into 128"),
        ([TiledRows()] * 2, "1 layers into 2"),
    ],
)
def test_what_would_not_be_exact_is_refused(codecs: list[object], words: str) -> None:
    source = PagedCache([StaticRows()], pages=4, page_size=64)
    source.add(0)
    decode = PagedCache(codecs, pages=4, page_size=64)
    with pytest.raises(ValueError, match=re.escape(words)):
        transfer(source, 0, decode, 0)
    decode.add(0)  # it is not there


def test_signatures_tell_576_from_656_bytes_and_scales_apart() -> None:
    stores = [PageStore([c], pages=1, page_size=s) for c, s in zip(DECODE[:4], (64, 64, 64, 64), strict=True)]
    stores += [PageStore([DECODE[0]], pages=1, page_size=1), PageStore([DECODE[0]] * 2, pages=1)]
    assert len({signature(store) for store in stores}) == 6
    assert signature(PageStore([mla_rows(Layout.RAW)], pages=9)) == signature(stores[0])

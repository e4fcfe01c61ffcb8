"""A page has the owners that its holders say, and a request reads what was written for it."""

import re
import textwrap
from collections import Counter

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from kizami.formats.errors import KizamiError
from kizami.formats.serving.kv_layout import Layout
from kizami.quantize.kv_cache import layouts, pages, transfer
from kizami.quantize.kv_cache.layouts import Bf16Rows, Codec, IndexRows, StaticRows, TiledRows, gqa_rows, mla_rows
from kizami.quantize.kv_cache.pages import PagedCache
from kizami.quantize.kv_cache.store import PageStore
from kizami.quantize.page_tags.check import check
from kizami.quantize.page_tags.tags import PageTags


def values(n: int, width: int = 576, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def as_read(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(x)).bfloat16()


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("codec", [*map(mla_rows, Layout), IndexRows(), StaticRows(3), gqa_rows(Layout.RAW, 2, 16)])
def test_many_requests_appended_at_once_read_as_written(codec: Codec, page_size: int) -> None:
    cache = PagedCache([codec, codec], pages=300, page_size=page_size)
    counts = [5, 0, 64, 65]
    written: dict[int, list[torch.Tensor]] = {r: [] for r in range(4)}
    for step in range(2):
        x = values(sum(counts), codec.width, step)
        if step == 0:
            for request in range(4):
                cache.add(request)
        cache.append(range(4), counts, [x, -x])
        for request, part in enumerate(x.split(counts)):
            written[request].append(part)
    for request, parts in written.items():
        assert torch.equal(cache.gather(0, [request]), as_read(codec, torch.cat(parts)))
    everything = torch.cat([torch.cat(written[r]) for r in (3, 0, 2)])
    assert torch.equal(cache.gather(1, [3, 0, 2]), as_read(codec, -everything))


def test_pages_are_where_the_block_tables_say() -> None:
    """By the arithmetic that an attention kernel does: row at page * page_size + place."""
    codec = mla_rows(Layout.DS_MLA)
    cache = PagedCache([codec], pages=20, page_size=4)
    cache.add("a")
    cache.add("b")
    x = values(13)
    cache.append(["a", "b"], [6, 7], [x])
    tables = cache.tables(["b", "a"])
    assert tables.held.tolist() == [2, 2]
    assert tables.tokens.tolist() == [7, 6]
    assert tables.tags is None
    assert sorted(tables.pages.ravel().tolist()) == [1, 2, 3, 4]
    memory = cache.store.bytes_of(0)
    assert memory.shape == (20, 4 * 656)
    for token in range(7):
        page = int(tables.pages[0, token // 4])
        row = memory[page, token % 4 * 656 : (token % 4 + 1) * 656]
        assert torch.equal(row, codec.encode(x[6 + token]))
    assert memory[0].count_nonzero() == 0


def test_layers_may_have_other_layouts_and_scales() -> None:
    codecs = [Bf16Rows(), *map(mla_rows, (Layout.DS_MLA, Layout.RAW)), mla_rows(Layout.RAW, scale=0.5), IndexRows()]
    cache = PagedCache(codecs, pages=4, page_size=64)
    cache.add(0)
    x = [values(100, codec.width, i) for i, codec in enumerate(codecs)]
    cache.append([0], [100], x)
    for layer, codec in enumerate(codecs):
        assert torch.equal(cache.gather(layer, [0]), as_read(codec, x[layer]))


def test_a_shared_prefix_is_not_copied_until_somebody_writes_into_its_last_page() -> None:
    cache = PagedCache([Bf16Rows(8)] * 2, pages=10, page_size=4)
    cache.add("a")
    x = values(10, 8)
    cache.append(["a"], [10], [x, -x])
    cache.add("b", share=("a", 6))
    cache.add("c", share=("a", 10))
    assert cache.free_pages == 6
    pages = cache.tables(["a", "b", "c"]).pages.tolist()
    assert pages == [[1, 2, 3], [1, 2, 0], [1, 2, 3]]
    assert [cache.holders(page) for page in (1, 2, 3)] == [3, 3, 2]
    new = values(3, 8, 9)
    cache.append(["a", "b", "c"], [1, 1, 1], [new, -new])
    assert cache.tables(["a", "b", "c"]).pages.tolist() == [[1, 2, 4], [1, 5, 0], [1, 2, 3]]
    assert torch.equal(cache.gather(0, ["a"]), torch.cat([x, new[:1]]))
    assert torch.equal(cache.gather(0, ["b"]), torch.cat([x[:6], new[1:2]]))
    assert torch.equal(cache.gather(0, ["c"]), torch.cat([x, new[2:]]))
    assert torch.equal(cache.gather(1, ["a", "b", "c"]), -cache.gather(0, ["a", "b", "c"]))
    cache.free(["a"])
    assert cache.free_pages == 5
    cache.free(["c", "b"])
    assert cache.free_pages == 9


def test_a_full_cache_refuses_and_nothing_changes() -> None:
    cache = PagedCache([Bf16Rows(8)], pages=5, page_size=4)
    cache.add("a")
    cache.append(["a"], [10], [values(10, 8)])
    cache.add("b", share=("a", 9))
    before = cache.tables(["a", "b"]).pages.tolist()
    with pytest.raises(KizamiError, match=re.escape("2 pages needed, 1 of 4 are free")) as error:
        cache.append(["a", "b"], [2, 4], [values(6, 8)])  # a copy of the shared page for one of them, a page for b
    assert error.value.code == "kv_cache_full"
    assert cache.tables(["a", "b"]).pages.tolist() == before
    assert (cache.length("a"), cache.length("b"), cache.free_pages) == (10, 9, 1)
    assert torch.equal(cache.gather(0, ["b"]), values(10, 8)[:9])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.free(["x"]), "request 'x' is not in the cache, which has 1 requests"),
        (lambda c: c.free(["a", "a"]), "request 'a' is there twice"),
        (lambda c: c.append(["a", "a"], [1, 1], [values(2, 8)]), "request 'a' is there twice"),
        (lambda c: c.add("a"), "request 'a' is there already"),
        (lambda c: c.add("b", share=("a", 4)), "4 tokens of request 'a' to share, expected 0 to 3"),
        (lambda c: c.add("b", share=("x", 0)), "request 'x' is not in the cache"),
        (lambda c: c.gather(-1, ["a"]), "layer -1, expected 0 to 0"),
        (lambda c: c.add("b", share=("a", 1.5)), "1.5 tokens of request 'a' to share"),
        (lambda c: c.gather(0, ["x"]), "request 'x' is not in the cache"),
        (lambda c: c.append(["a"], [1], [values(2, 8)]), "values [[2, 8]] (1 layers), expected [(1, 8)] (1 layers)"),
        (lambda c: c.append(["a"], [1], []), "values [] (0 layers)"),
        (lambda c: c.append(["a"], [1], [values(1, 8).double()]), "values of torch.float64"),
        (lambda c: c.store.write(0, torch.tensor([4]), values(2, 8)), "2 values for 1 slots"),
        (lambda c: c.allocate(["a"], [-1]), "expected one number >= 0 for each"),
        (lambda c: c.allocate(["a"], [1, 1]), "tokens [1, 1] of 1 requests"),
        (lambda c: c.store.write_rows(0, torch.tensor([4]), torch.zeros(2, 16, dtype=torch.uint8)), "uint8 [1, 16]"),
        (lambda c: PageStore([], pages=1), "0 layers, 1 pages"),
    ],
)
def test_a_wrong_call_is_refused_and_nothing_changes(call: object, words: str) -> None:
    cache = PagedCache([Bf16Rows(8)], pages=5, page_size=4)
    cache.add("a")
    cache.append(["a"], [3], [values(3, 8)])
    assert callable(call)
    with pytest.raises((KizamiError, ValueError), match=re.escape(words)):
        call(cache)
    assert (cache.length("a"), cache.free_pages) == (3, 3)
    assert torch.equal(cache.gather(0, ["a"]), values(3, 8))


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("tokens", [1, 2, 1024, 1025])
@pytest.mark.parametrize("codec", [mla_rows(Layout.RAW), mla_rows(Layout.DS_MLA), Bf16Rows(8), IndexRows()])
def test_any_number_of_tokens_goes_into_pages_of_any_size(codec: Codec, tokens: int, page_size: int) -> None:
    """One row of a wider tensor counts as contiguous, whatever its stride: a decode step of one request is such."""
    cache = PagedCache([codec], pages=1027, page_size=page_size)
    cache.add("a")
    x = values(tokens, codec.width)
    cache.append(["a"], [tokens], [x])
    expected = codec.decode(codec.encode(x))
    assert torch.equal(cache.gather(0, ["a"], torch.float32), expected)


@pytest.mark.parametrize("codec", [mla_rows(Layout.RAW), mla_rows(Layout.DS_MLA), Bf16Rows(8), IndexRows()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_values_and_rows_may_lie_in_memory_in_any_order(codec: Codec, dtype: torch.dtype, tokens: int) -> None:
    x = values(tokens, codec.width).to(dtype)
    turned, wide = x.t().contiguous().t(), torch.cat([x, x], 1)[:, codec.width :]
    rows = codec.encode(x)
    for other in (turned, wide, x.t().contiguous().t()[:0]):
        assert torch.equal(codec.encode(other), rows[: len(other)])
    odd = torch.cat([rows, rows[:, :3]], 1)[:, : codec.row_bytes]  # rows 3 bytes apart from each other
    for one in (odd, rows.t().contiguous().t()):
        assert torch.equal(codec.decode(one), codec.decode(rows))
    cache = PagedCache([codec], pages=3, page_size=2)
    cache.add("a")
    cache.append(["a"], [tokens], [turned])
    assert torch.equal(cache.store.read_rows(0, cache.slots(["a"])), rows)


def test_a_second_free_is_refused() -> None:
    cache = PagedCache([Bf16Rows(8)], pages=5, page_size=4)
    cache.add("a")
    cache.append(["a"], [3], [values(3, 8)])
    cache.free(["a"])
    with pytest.raises(KizamiError, match="request 'a' is not in the cache"):
        cache.free(["a"])
    assert cache.free_pages == 4


def test_page_tags_plug_in_and_see_a_reader_whose_request_was_freed() -> None:
    tags = PageTags(12, strict=True)
    cache = PagedCache([Bf16Rows(8)], pages=12, page_size=4, hooks=tags)
    for request, n in (("a", 9), ("b", 5)):
        cache.add(request)
        cache.append([request], [n], [values(n, 8)])
    cache.add("c", share=("a", 6))
    stale = cache.tables(["a", "b", "c"])
    cache.append(["b", "c"], [1, 1], [values(2, 8)])
    now = cache.tables(["a", "b", "c"])
    assert now.tags is not None
    assert stale.tags is not None
    assert check(tags, now.pages, now.tags, now.held).tolist() == [False, False, False]
    cache.free(["b"])
    assert check(tags, stale.pages, stale.tags, stale.held).tolist() == [False, True, False]
    cache.add("d")
    cache.append(["d"], [8], [values(8, 8)])  # on b's pages
    assert check(tags, stale.pages, stale.tags, stale.held).tolist() == [False, True, False]
    assert check(tags, now.pages, now.tags, now.held).tolist() == [False, True, False]
    cache.free(["a", "c", "d"])
    assert cache.free_pages == 11
    assert (tags.current[1:] & 1 == 0).all()


class Pages(RuleBasedStateMachine):
    """Any order of calls: a request reads what a list of its tokens says, pages have the holders that tables say, and
    every page is free or held. Page tags run along in strict mode, so that acquire and release pair up."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.tags = PageTags(9, strict=True)
        self.cache = PagedCache([StaticRows(8), IndexRows()], pages=9, page_size=3, hooks=self.tags)
        self.written: dict[int, torch.Tensor] = {}
        self.steps = 0

    def fresh(self, n: int) -> torch.Tensor:
        """Rows that no other token has: the step's number in binary, which E4M3 holds exactly."""
        first = self.steps
        self.steps += n
        return torch.tensor([[float(i >> bit & 1) for bit in range(8)] for i in range(first, first + n)]).reshape(n, 8)

    @rule(target=requests)
    def add(self) -> int:
        self.steps += 1
        self.cache.add(self.steps)
        self.written[self.steps] = torch.zeros(0, 8)
        return self.steps

    @rule(target=requests, other=requests, share=st.floats(0, 1))
    def share(self, other: int, share: float) -> int:
        self.steps += 1
        n = round(share * len(self.written[other]))
        self.cache.add(self.steps, share=(other, n))
        self.written[self.steps] = self.written[other][:n]
        return self.steps

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.written)), min_size=1, unique=True))
        counts = data.draw(st.lists(st.integers(0, 5), min_size=len(chosen), max_size=len(chosen)))
        rows = self.fresh(sum(counts))
        free = self.cache.free_pages
        try:
            self.cache.append(chosen, counts, [rows, torch.cat([rows] * 16, 1)])
        except KizamiError as error:
            refused = error.code
        else:
            refused = ""
        if refused:
            assert refused == "kv_cache_full"
            assert self.cache.free_pages == free
            return
        for request, part in zip(chosen, rows.split(counts), strict=True):
            self.written[request] = torch.cat([self.written[request], part])

    @rule(request=consumes(requests))
    def free(self, request: int) -> None:
        self.cache.free([request])
        del self.written[request]

    @invariant()
    def requests_read_what_was_written(self) -> None:
        order = sorted(self.written, reverse=True)
        expected = torch.cat([torch.zeros(0, 8), *(self.written[r] for r in order)])
        assert torch.equal(self.cache.gather(0, order, torch.float32), expected)
        # 1 / (1 / 448) is not 448 in float32, hence the tolerance
        torch.testing.assert_close(self.cache.gather(1, order, torch.float32)[:, :8], expected)

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        tables = self.cache.tables(list(self.written))
        held = Counter(page for page in tables.pages.ravel().tolist() if page)
        assert all(self.cache.holders(page) == held[page] for page in range(9))
        assert len(held) + self.cache.free_pages == 8
        assert ((self.tags.current & 1).bool() == torch.tensor([p in held for p in range(9)])).all()
        assert tables.tags is not None
        assert not check(self.tags, tables.pages, tables.tags, tables.held).any()

    @invariant()
    def a_page_of_two_holders_has_the_same_place_in_both(self) -> None:
        places: dict[int, int] = {}
        for row in self.cache.tables(list(self.written)).pages.tolist():
            for place, page in enumerate(row):
                assert page == 0 or places.setdefault(page, place) == place


SHORT = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=5, stateful_step_count=20, **SHORT)


@pytest.mark.long
class TestPagesLong(Pages.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=200, stateful_step_count=40, **SHORT)


def attention(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """MLA as absorbed: keys are all 576, values the first 512. q [heads, 576], kv [tokens, 576], float64."""
    weights = (q.double() @ kv.double().T / 192**0.5).softmax(-1)
    return weights @ kv[:, :512].double()


@pytest.mark.parametrize("layout", [Layout.RAW, Layout.DS_MLA])
def test_attention_over_fp8_pages_keeps_the_precision_of_e4m3(layout: Layout) -> None:
    cache = PagedCache([Bf16Rows(), mla_rows(layout)], pages=20, page_size=64)
    cache.add(0)
    kv = values(1000, seed=4)
    cache.append([0], [1000], [kv, kv])
    q = torch.randn(16, 576, generator=torch.Generator().manual_seed(5)) / 4
    exact, found = (attention(q, cache.gather(layer, [0], torch.float32)) for layer in (0, 1))
    snr = 10 * torch.log10(exact.square().sum() / (exact - found).square().sum())
    assert 29 < snr < 36
    assert torch.equal(exact, attention(q, kv))


def test_the_examples_in_the_docstrings_run() -> None:
    names: dict[str, object] = {**vars(layouts), **vars(pages)}
    for module in (layouts, pages):
        code = [line for line in str(module.__doc__).splitlines() if line.startswith("    ")]
        exec(textwrap.dedent("\n".join(code)), names)
    assert isinstance(names["rows"], torch.Tensor)
    assert names["rows"].shape == (5, 656)
    assert isinstance(names["latent"], torch.Tensor)
    assert names["latent"].shape == (83, 576)
    prefill, decode = (PagedCache([mla_rows(layout)], pages=4) for layout in (Layout.BF16, Layout.RAW))
    prefill.add("a")
    prefill.append(["a"], [100], [values(100)])
    names = {**vars(transfer), "prefill": prefill, "decode": decode}
    code = [line for line in str(transfer.__doc__).splitlines() if line.startswith("    ")]
    exec(textwrap.dedent("\n".join(code)), names)
    assert decode.length("a") == 100


def test_more_rows_than_are_coded_at_once_read_as_written() -> None:
    cache = PagedCache([TiledRows(), IndexRows()], pages=50, page_size=64)
    cache.add(0)
    x = values(2500)
    cache.append([0], [2500], [x, x[:, :128]])
    assert torch.equal(cache.gather(0, [0]), as_read(TiledRows(), x))
    assert torch.equal(cache.gather(1, [0], torch.float32), IndexRows().decode(IndexRows().encode(x[:, :128])))


def test_hooks_for_another_number_of_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="hooks for 2 pages, expected 4"):
        PagedCache([mla_rows(Layout.RAW)], pages=4, hooks=PageTags(2))


@pytest.mark.parametrize("slots", [[-1], [0, 256]])
def test_a_slot_that_is_not_there_is_refused_and_nothing_is_written(slots: list[int]) -> None:
    """-1 is padding in engines' slot mappings; as an index it is the last slot of the last page."""
    store = PageStore([mla_rows(Layout.RAW)], pages=4)
    with pytest.raises(ValueError, match="expected 0 to 255"):
        store.write(0, torch.tensor(slots), torch.ones(len(slots), 576))
    assert not store.bytes_of(0).any()


def test_hooks_that_leave_out_other_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="hooks leave out pages"):
        PagedCache([mla_rows(Layout.RAW)], pages=4, hooks=PageTags(4, reserved=(0, 3)))

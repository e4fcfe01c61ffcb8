"""Page tags and the check, against a model that knows each page's content by a number that is never used again."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kizami.formats.errors import KizamiError
from kizami.quantize.page_tags.check import BlockTables, Mismatch, check, check_pages, mismatches
from kizami.quantize.page_tags.tags import Finding, PageFinding, PageTags, as_u32

BELOW_THE_WRAP = 0xFFFFFFFC
PAGES = 6
Held = list[tuple[int, int]]  # (page, its content when captured)


class AllocatorModel(RuleBasedStateMachine):
    """An allocator with requests, of which some keep pages that they let go of, or that were handed out twice."""

    @initialize(first=st.sampled_from([None, 0, BELOW_THE_WRAP, 0x7FFFFFFC]))
    def start(self, first: int | None) -> None:
        self.tags = PageTags(PAGES, first_generation=first)
        self.tables = BlockTables(4, 64)
        self.content = [0] * PAGES  # 0: free
        self.parked: set[int] = set()
        self.held: list[Held] = [[], [], [], []]
        self.made = 0

    def hand_out(self, row: int, page: int) -> None:
        self.made += 1
        self.content[page] = self.made
        self.parked.discard(page)
        self.tables.extend(row, [page], self.tags.acquire([page]))
        self.held[row].append((page, self.made))

    @rule(row=st.integers(0, 3), page=st.integers(1, PAGES - 1))
    def acquire_or_double_acquire(self, row: int, page: int) -> None:
        owned = self.content[page] != 0 and page not in self.parked
        self.hand_out(row, page)
        assert self.tags.last.tolist() == [Finding.DOUBLE_ACQUIRE if owned else Finding.NONE]

    @rule(row=st.integers(0, 3), page=st.integers(1, PAGES - 1))
    def share(self, row: int, page: int) -> None:
        tag = self.tags.share([page])
        assert self.tags.last.tolist() == [Finding.NONE if self.content[page] else Finding.USE_OF_FREE]
        self.tables.extend(row, [page], tag)
        self.held[row].append((page, self.content[page] or -1))  # of a free page: a content that never comes
        self.parked.discard(page)

    @rule(page=st.integers(1, PAGES - 1))
    def release(self, page: int) -> None:
        found = self.tags.release([page]).tolist()
        assert found == [Finding.NONE if self.content[page] else Finding.DOUBLE_RELEASE]
        self.content[page] = 0
        self.parked.discard(page)

    @rule(row=st.integers(0, 3), keep_table=st.booleans(), park=st.booleans())
    def finish(self, row: int, keep_table: bool, park: bool) -> None:
        """With the tags that it holds: what is somebody else's by now stays."""
        pages, tags = self.tables.held(row)
        (self.tags.park if park else self.tags.release)(pages, tags)
        for page, content in self.held[row]:
            if self.content[page] == content and content > 0:
                if park:
                    self.parked.add(page)
                else:
                    self.content[page] = 0
        self.parked = {page for page in self.parked if self.content[page]}
        if not keep_table:
            self.tables.clear(row)
            self.held[row] = []

    @rule()
    def clear(self) -> None:
        self.tags.clear()
        self.content = [0] * PAGES
        self.parked = set()

    @invariant()
    def the_check_is_right_for_every_request_and_page(self) -> None:
        wrong = [
            (row, place)
            for row, held in enumerate(self.held)
            for place, (page, content) in enumerate(held)
            if self.content[page] != content
        ]
        stale = {row for row, _ in wrong}
        assert self.tables.check(self.tags).tolist() == [row in stale for row in range(4)]
        assert [(m.request, m.position) for m in self.tables.mismatches(self.tags)] == wrong
        assert self.tags.parked.nonzero().flatten().tolist() == sorted(self.parked)


AllocatorModel.TestCase.settings = settings(derandomize=True, deadline=None, max_examples=25, stateful_step_count=30)


class TestNoFalseAbortAndEveryStaleReader(AllocatorModel.TestCase):  # type: ignore[misc, valid-type]
    """The state machine above."""


@pytest.mark.long
def test_no_false_abort_and_every_stale_reader_in_many_runs() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    many = settings(derandomize=True, deadline=None, max_examples=1500, stateful_step_count=50)
    run_state_machine_as_test(AllocatorModel, settings=many)


def test_a_page_is_odd_while_owned_and_even_while_free() -> None:
    tags = PageTags(4, first_generation=8)
    assert tags.acquire([1, 2]).tolist() == [9, 9]
    assert tags.release([2]).tolist() == [Finding.NONE]
    assert tags.current.tolist() == [8, 9, 10, 8]
    assert tags.acquire([2]).tolist() == [11]


def test_the_counter_wraps_from_the_last_odd_tag_to_zero() -> None:
    tags = PageTags(3, first_generation=0xFFFFFFFE)
    held = tags.acquire([1])
    assert as_u32(held).tolist() == [0xFFFFFFFF]
    tags.release([1])
    assert as_u32(tags.current)[1] == 0
    assert tags.acquire([1]).tolist() == [1]
    assert check(tags, torch.tensor([[1]]), held[None]).tolist() == [True]


def test_a_holder_is_found_2_to_the_20_generations_later() -> None:
    """A u8 would have come round 8192 times."""
    tags = PageTags(2, first_generation=0xFFFFFFFE - (1 << 20))
    held = tags.acquire([1])
    for _ in range(300):
        tags.acquire([1])
        assert check(tags, torch.tensor([[1]]), held[None]).tolist() == [True]
    tags.current[1] += 1 << 20
    assert check(tags, torch.tensor([[1]]), held[None]).tolist() == [True]


def test_pages_start_with_tags_of_their_own() -> None:
    tags = PageTags(200_000)
    assert len(tags.current.unique()) == 200_000
    assert not (tags.current & 1).any()
    tags.resize(300_000)
    assert len(tags.current.unique()) == 300_000


@pytest.mark.parametrize("off_by", [1, -1, 2, 64])
def test_a_table_that_names_a_wrong_page_is_found(off_by: int) -> None:
    """An index off by one: the page is owned, and by nobody who was wronged."""
    tags = PageTags(1000)
    held = tags.acquire(torch.arange(1, 1000))
    pages = torch.arange(100, 200)
    assert not check(tags, pages[:, None], held[pages - 1][:, None]).any()
    assert check(tags, pages[:, None] + off_by, held[pages - 1][:, None]).all()


def test_every_finding_is_told_apart() -> None:
    tags = PageTags(5, first_generation=0)
    own = tags.acquire([1, 2, 3, 3, 0, 9, -1])
    assert tags.last[:2].tolist() + tags.last[4:].tolist() == [0, 0, 5, 6, 6]
    assert sorted(tags.last[2:4].tolist()) == [Finding.NONE, Finding.DOUBLE_ACQUIRE]
    assert own[:4].tolist() == [1, 1, 1, 1]
    assert not (own[4:] & 1).any()
    tags.release([1])
    tags.acquire([1])  # somebody else's
    assert tags.release([1], own[:1]).tolist() == [Finding.STALE_RELEASE]
    assert tags.release([4]).tolist() == [Finding.DOUBLE_RELEASE]
    assert sorted(tags.release([2, 2]).tolist()) == [Finding.NONE, Finding.DOUBLE_RELEASE]
    assert tags.share([2, 3]).tolist() == [2, 1]
    assert tags.last.tolist() == [Finding.USE_OF_FREE, Finding.NONE]
    assert tags.findings([2, 3]) == [PageFinding(Finding.USE_OF_FREE, 2, 2)]
    assert tags.stats == {
        "none": 7, "double_acquire": 1, "double_release": 2, "stale_release": 1, "use_of_free": 1, "reserved": 1,
        "out_of_range": 2,
    }  # fmt: skip


def test_a_wrong_call_leaves_all_other_pages_alone() -> None:
    tags = PageTags(5)
    before = tags.current.clone()
    tags.release([1, 2, 0, 5, 6, -1, -2])
    tags.park([3, 0, 77])
    tags.acquire([0, 5, -1, 99])
    assert torch.equal(tags.current, before)
    assert not tags.parked.any()


def test_a_call_of_many_pages_that_repeat_and_differ_in_their_tags_releases_each_once() -> None:
    tags = PageTags(3, first_generation=0)
    tags.acquire([1, 2])
    found = tags.release([1, 1, 2, 1], torch.tensor([1, 5, 1, 1]))
    assert sorted(found.tolist()) == [Finding.NONE, Finding.NONE, Finding.DOUBLE_RELEASE, Finding.STALE_RELEASE]
    assert tags.current.tolist() == [0, 2, 2]


def test_an_empty_call_is_one() -> None:
    tags = PageTags(3)
    assert tags.acquire([]).tolist() == tags.release([]).tolist() == tags.share([]).tolist() == []
    assert check(tags, torch.zeros(0, 0, dtype=torch.int32), torch.zeros(0, 0, dtype=torch.int32)).tolist() == []


def test_the_strict_mode_raises_and_changes_nothing() -> None:
    tags = PageTags(3, strict=True, first_generation=0)
    tags.acquire([1])
    with pytest.raises(KizamiError, match=r"page 1: double_acquire, expected none"):
        tags.acquire([2, 1])
    with pytest.raises(KizamiError, match=r"page 7: out_of_range"):
        tags.release([1, 7])
    assert tags.current.tolist() == [0, 1, 0]


def test_parked_content_is_valid_until_it_is_given_up() -> None:
    """vLLM's prefix cache: nobody holds the block, a later request may."""
    tags = PageTags(3)
    held = tags.acquire([1])
    tags.park([1])
    assert not check(tags, torch.tensor([[1]]), held[None]).any()
    assert torch.equal(tags.share([1]), held)
    assert tags.last.tolist() == [Finding.NONE]
    tags.park([1])
    tags.acquire([1])  # evicted for somebody else
    assert tags.last.tolist() == [Finding.NONE]
    assert check(tags, torch.tensor([[1]]), held[None]).all()
    assert tags.park([2]).tolist() == [Finding.DOUBLE_RELEASE]
    assert tags.park([1]).tolist() == [Finding.NONE]
    assert tags.park([1]).tolist() == [Finding.DOUBLE_RELEASE]


def test_pages_cut_off_and_back_again_do_not_come_back_with_the_tags_of_their_holders() -> None:
    tags = PageTags(8)
    held = tags.acquire([6])
    tags.resize(4)
    assert check(tags, torch.tensor([[6]]), held[None]).all()
    assert tags.acquire([6]).tolist()
    assert tags.last.tolist() == [Finding.OUT_OF_RANGE]
    tags.resize(8)
    again = tags.acquire([6])
    assert tags.last.tolist() == [Finding.NONE]
    assert check(tags, torch.tensor([[6]]), held[None]).all()
    assert not check(tags, torch.tensor([[6]]), again[None]).any()


def loop(tags: PageTags, pages: np.ndarray, held: np.ndarray, start: np.ndarray, end: np.ndarray) -> list[Mismatch]:
    """The check as anybody would write it."""
    now = as_u32(tags.current).tolist()
    found = []
    for row in range(pages.shape[0]):
        for place in range(int(start[row]), int(end[row])):
            page, tag = int(pages[row, place]), int(held[row, place]) & 0xFFFFFFFF
            if page in tags.reserved:
                continue
            if not 0 <= page < len(now):
                found.append(Mismatch(row, place, page, tag, None))
            elif now[page] != tag or now[page] % 2 == 0:
                found.append(Mismatch(row, place, page, tag, now[page]))
    return found


@pytest.mark.parametrize("reserved", [(0,), (0, 7), ()])
def test_the_check_is_that_of_a_loop(reserved: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    tags = PageTags(50, reserved=reserved, first_generation=0xFFFFFFF0)
    for _ in range(8):
        tags.acquire(torch.from_numpy(rng.choice(50, 20)))
        tags.release(torch.from_numpy(rng.choice(50, 10)))
    for dtype in (torch.int32, torch.int64):
        pages = torch.from_numpy(rng.integers(-2, 53, (40, 9))).to(dtype)
        held = tags.find(pages)
        held[torch.from_numpy(rng.random((40, 9)) < 0.1)] += 2
        end = torch.from_numpy(rng.integers(0, 10, 40))
        start = (end * torch.from_numpy(rng.random(40))).long()
        expected = loop(tags, pages.numpy(), held.numpy(), start.numpy(), end.numpy())
        assert mismatches(tags, pages, held, end, start) == expected
        rows = {m.request for m in expected}
        abort = check(tags, pages, held, end, start)
        assert abort.tolist() == [row in rows for row in range(40)]
        assert 5 < len(rows) < 35
        place = torch.arange(9)
        read = (place < end[:, None]) & (place >= start[:, None])
        flat = check_pages(tags, pages[read], held[read], read.nonzero()[:, 0], 40)
        assert torch.equal(flat, abort)


def test_an_id_out_of_range_is_found_beside_pages_that_are_owned() -> None:
    tags = PageTags(4, reserved=(), first_generation=0)
    own = tags.acquire([0, 1, 2, 3])
    beyond = torch.tensor([[-1], [4], [2**40], [-(2**40)], [3]])
    assert check(tags, beyond, own[:1].expand(5, 1)).tolist() == [True] * 4 + [False]
    tags.resize(2)
    assert check(tags, torch.tensor([[1], [2]]), own[:1].expand(2, 1)).tolist() == [False, True]


def test_what_a_step_does_not_read_is_not_checked() -> None:
    tags = PageTags(9)
    tables = BlockTables(2, 4)
    tables.extend(0, [1, 2, 3], tags.acquire([1, 2, 3]))
    tables.append(torch.tensor([1]), torch.tensor([4]), tags.acquire([4]))
    tags.release([1])
    assert tables.check(tags).tolist() == [True, False]
    assert tables.check(tags, first=torch.tensor([1, 0])).tolist() == [False, False]
    with pytest.raises(KizamiError, match="request 0 holds 5 pages, expected at most 4"):
        tables.extend(0, [5, 6], tags.acquire([5, 6]))


def test_calls_that_would_stretch_one_tag_over_many_pages_are_refused() -> None:
    tags, tables = PageTags(8), BlockTables(2, 4)
    held = tags.acquire([1, 2])
    with pytest.raises(KizamiError, match="1 tags for 2 pages"):
        tags.release([1, 2], held[:1])
    for row, given in ((0, held[:1]), (-1, held)):
        with pytest.raises(KizamiError, match="expected as many"):
            tables.extend(row, [1, 2], given)
    assert torch.equal(tags.find(torch.tensor([1, 2])), held)


@pytest.mark.parametrize("reserved", [(9,), (-1,)])
def test_reserved_pages_must_exist(reserved: tuple[int, ...]) -> None:
    with pytest.raises(KizamiError, match="reserved pages"):
        PageTags(4, reserved=reserved)


def test_a_row_longer_than_the_table_is_an_abort() -> None:
    tags = PageTags(8)
    held = tags.acquire([1, 2, 3, 4]).view(2, 2)
    pages, lengths = torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 3])
    assert check(tags, pages, held, lengths).tolist() == [False, True]
    assert mismatches(tags, pages, held, lengths) == [Mismatch(1, 2, -1, 0, None)]


@pytest.mark.parametrize(
    ("pages", "captured", "each"),
    [((2, 3), (1, 3), None), ((2, 3), (2, 2), None), ((3,), (3,), None), ((2, 3), (2, 3), 1), ((2, 3), (2, 3), 3)],
)
def test_shapes_that_torch_would_broadcast_are_refused(
    pages: tuple[int, ...], captured: tuple[int, ...], each: int | None
) -> None:
    lengths = None if each is None else torch.ones(each, dtype=torch.int32)
    with pytest.raises(KizamiError, match="expected"):
        check(PageTags(8), torch.zeros(pages, dtype=torch.int32), torch.zeros(captured, dtype=torch.int32), lengths)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32])
def test_tags_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    """As u32 they would all be other numbers."""
    with pytest.raises(KizamiError, match=r"expected int32"):
        check(PageTags(8), torch.ones(1, 1, dtype=torch.int32), torch.ones(1, 1, dtype=dtype))


def test_a_row_that_is_full_is_aborted_by_every_check_from_then_on() -> None:
    tags, tables = PageTags(8), BlockTables(2, 2)
    for page in (1, 2, 3):
        got = tags.acquire([page])
        tables.append(torch.tensor([0]), torch.tensor([page]), got)
    assert tables.check(tags).tolist() == [True, False]
    assert tables.pages.tolist()[1] == [0, 0]
    assert tables.held(0)[0].tolist() == [1, 2]
    assert torch.equal(tables.held(0)[1], tags.find(torch.tensor([1, 2])))
    with pytest.raises(KizamiError, match="tables of 0 pages"):
        BlockTables(2, 0)


def test_flat_lists_of_other_shapes_or_types_are_refused() -> None:
    tags, pages = PageTags(8), torch.tensor([1, 2])
    captured, request = tags.acquire(pages), torch.tensor([0, 1])
    assert check_pages(tags, pages, captured, request, 2).tolist() == [False, False]
    for wrong in (captured[:1], captured.long()):
        with pytest.raises(KizamiError, match="expected int32 of the same shape"):
            check_pages(tags, pages, wrong, request, 2)
    with pytest.raises(KizamiError, match=r"expected \[N\]"):
        check_pages(tags, pages[:, None], captured[:, None], request, 2)
    with pytest.raises(KizamiError, match="expected int32 or int64"):
        check(tags, pages[None].to(torch.int16), captured[None])
    for lengths in (torch.tensor([1.0]), torch.tensor([True])):
        with pytest.raises(KizamiError, match="lengths torch"):
            check(tags, pages[None], captured[None], lengths)

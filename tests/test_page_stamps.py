"""Stamps and content hashes: the faults that a tag beside the cache cannot see."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kizami.formats.errors import KizamiError
from kizami.quantize.page_tags.hashes import PageHashes, page_hashes, row_hashes
from kizami.quantize.page_tags.stamps import ForeignStamp, Stamps
from kizami.quantize.page_tags.tags import PageTags

SLOTS = 4
A, B = 71, 72  # owners


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def handed_over(per_page: int) -> tuple[PageTags, Stamps, torch.Tensor, torch.Tensor]:
    """Page 5 was A's and is B's: (tags, stamps, A's tag, B's tag)."""
    tags = PageTags(8)
    a = tags.acquire([5])
    tags.release([5])
    return tags, Stamps(8, per_page), a, tags.acquire([5])


@pytest.mark.parametrize("per_page", [1, SLOTS])
def test_a_late_write_of_the_former_owner_is_found_by_the_reader(per_page: int) -> None:
    tags, stamps, a, b = handed_over(per_page)
    stamps.write(ints(5), b, ints(B))
    table = (ints(5)[None], b[None], ints(4))
    assert not stamps.check(*table, SLOTS).any()
    stamps.write(ints(5), a, ints(A))  # RDMA that was under way
    assert stamps.check(*table, SLOTS).tolist() == [True]
    u32 = 0xFFFFFFFF
    assert stamps.mismatches(*table, SLOTS) == [ForeignStamp(0, 0, 5, int(b) & u32, 5, int(a) & u32, A)]
    assert torch.equal(tags.find(ints(5)), b)  # the tag alone says that all is well


def test_a_late_write_between_two_of_the_new_owner_is_found_by_the_second_of_them() -> None:
    _, stamps, a, b = handed_over(1)
    assert not stamps.write(ints(5), b, ints(B), first=ints(0), end=ints(2)).any()
    stamps.write(ints(5), a, ints(A))
    assert stamps.write(ints(5), b, ints(B), first=ints(2), end=ints(3)).tolist() == [True]
    assert not stamps.check(ints(5)[None], b[None], ints(3), SLOTS).any(), "the reader cannot: B's record hides it"
    assert not stamps.write(ints(5), b, ints(B), first=ints(3), end=ints(4)).any()


def test_a_late_write_between_two_of_the_new_owner_is_found_by_the_reader_where_each_slot_is_stamped() -> None:
    _, stamps, a, b = handed_over(SLOTS)
    stamps.write(ints(5), b, ints(B), first=ints(0), end=ints(2))
    stamps.write(ints(5), a, ints(A), first=ints(0), end=ints(1))
    assert not stamps.write(ints(5), b, ints(B), first=ints(2), end=ints(3)).any(), "slot 1 is B's still"
    assert stamps.check(ints(5)[None], b[None], ints(3), SLOTS).tolist() == [True]


def test_slots_that_a_request_does_not_read_may_hold_anything() -> None:
    _, stamps, _, b = handed_over(SLOTS)
    stamps.write(ints(5), b, ints(B), first=ints(0), end=ints(2))
    assert stamps.check(ints(5)[None], b[None], ints(2), SLOTS).tolist() == [False]
    assert stamps.check(ints(5)[None], b[None], ints(3), SLOTS).tolist() == [True]


def test_tokens_beyond_the_table_are_an_abort() -> None:
    _, stamps, _, b = handed_over(1)
    stamps.write(ints(5), b, ints(B))
    assert stamps.check(ints(5)[None], b[None], ints(SLOTS), SLOTS).tolist() == [False]
    assert stamps.check(ints(5)[None], b[None], ints(SLOTS + 1), SLOTS).tolist() == [True]
    with pytest.raises(KizamiError, match="captured"):
        stamps.check(ints(5)[None], b[None].long(), ints(1), SLOTS)


def test_a_page_that_nobody_has_filled_is_found() -> None:
    """sglang #30233: decode reads what prefill never wrote."""
    _, stamps, _, b = handed_over(1)
    assert stamps.check(ints(5)[None], b[None], ints(1), SLOTS).tolist() == [True]
    assert stamps.mismatches(ints(5)[None], b[None], ints(1), SLOTS)[0].stamped_page is None


def test_bytes_for_another_page_are_found_even_where_both_pages_have_the_same_tag() -> None:
    tags, stamps = PageTags(8, first_generation=0), Stamps(8)
    own = tags.acquire([5, 6])
    stamps.write(ints(5, 6), own, ints(B, B))
    stamps.records[5] = stamps.records[6]  # page 6's bytes arrived at page 5, their record with them
    assert stamps.check(ints(5, 6)[:, None], own[:, None], ints(1, 1), SLOTS).tolist() == [True, False]


def test_a_torn_write_is_not_found_by_stamps_but_by_the_hash() -> None:
    """Bytes without their record: the limit that stamps.py names."""
    _, stamps, _, b = handed_over(SLOTS)
    pool = torch.zeros(8, SLOTS, 16, dtype=torch.uint8)
    hashes = PageHashes(8, SLOTS)
    stamps.write(ints(5), b, ints(B))
    hashes.take(pool, torch.tensor([5]), ints(SLOTS))
    pool[5, 0, 3] = 9
    assert not stamps.check(ints(5)[None], b[None], ints(4), SLOTS).any()
    assert hashes.check(pool, torch.tensor([5])).tolist() == [True]


def test_the_owner_is_compared_where_it_is_given() -> None:
    _, stamps, _, b = handed_over(1)
    stamps.write(ints(5), b, ints(A))
    table = (ints(5)[None], b[None], ints(1), SLOTS)
    assert stamps.check(*table).tolist() == [False]
    assert stamps.check(*table, owners=ints(B)[None]).tolist() == [True]


@pytest.mark.parametrize("per_page", [1, SLOTS])
def test_many_requests_are_checked_at_once(per_page: int) -> None:
    rng = np.random.default_rng(1)
    tags, stamps = PageTags(64), Stamps(64, per_page)
    own = tags.acquire(torch.arange(1, 61))
    pages = torch.from_numpy(rng.permutation(60) + 1).int().view(10, 6)
    held = own[pages - 1]
    stamps.write(pages.flatten(), held.flatten(), ints(B).expand(60))
    tokens = torch.from_numpy(rng.integers(1, 6 * SLOTS + 1, 10))
    tokens[4], tokens[7] = 2 * SLOTS, 2 * SLOTS + 1  # reads not yet, and just, the page that is hit
    assert not stamps.check(pages, held, tokens, SLOTS).any()
    hit = torch.tensor([1, 4, 7])
    stamps.write(pages[hit, 2], held[hit, 2] - 2, ints(A, A, A))
    expected = [row in hit.tolist() and int(tokens[row]) > 2 * SLOTS for row in range(10)]
    assert stamps.check(pages, held, tokens, SLOTS).tolist() == expected
    assert any(expected)
    assert {m.request for m in stamps.mismatches(pages, held, tokens, SLOTS)} == {i for i in range(10) if expected[i]}
    pages[0, 0] = 64  # no such page
    assert stamps.check(pages, held, tokens, SLOTS)[0]


# ---------------------------------------------------------------- hashes


def finalise(x: np.ndarray) -> np.ndarray:
    """The oracle: splitmix64's finaliser, on numpy's u64."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def oracle(row: np.ndarray, slot: int) -> int:
    golden = 0x9E3779B97F4A7C15
    mask = (1 << 64) - 1
    words = row.view("<u8")
    total = 0
    for place, word in enumerate(words.tolist()):
        total += int(finalise(np.array([(word + (place + 1) * golden) & mask], np.uint64))[0])
    return int(finalise(np.array([(total + (slot + 1) * golden) & mask], np.uint64))[0])


def test_splitmix64_is_the_published_one() -> None:
    """The first outputs of the reference generator from seed 1234567 (Vigna, splitmix64.c)."""
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    states = np.array([(1234567 + k * golden) & mask for k in (1, 2, 3)], np.uint64)
    assert finalise(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("size", [8, 576, 656, 1152, 8448])
def test_the_hash_is_that_of_the_oracle_to_the_bit(size: int) -> None:
    rng = np.random.default_rng(size)
    rows = rng.integers(0, 256, (3, size), dtype=np.uint8)
    found = row_hashes(torch.from_numpy(rows), torch.tensor([0, 5, 63])).numpy().view(np.uint64).tolist()
    assert found == [oracle(row, slot) for row, slot in zip(rows, (0, 5, 63), strict=True)]


def test_a_page_is_the_sum_of_its_filled_rows() -> None:
    rng = np.random.default_rng(2)
    pool = rng.integers(0, 256, (3, 5, 24), dtype=np.uint8)
    found = page_hashes(torch.from_numpy(pool), torch.tensor([2, 0]), torch.tensor([5, 2])).numpy().view(np.uint64)
    expected = [sum(oracle(pool[p, s], s) for s in range(n)) % (1 << 64) for p, n in ((2, 5), (0, 2))]
    assert found.tolist() == expected


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("at", [0, 4, 5])
def test_rows_are_hashed_wherever_they_lie(rows: int, at: int) -> None:
    wide = torch.arange(rows * 100, dtype=torch.uint8).view(rows, 100)
    slots = torch.arange(rows)
    assert torch.equal(row_hashes(wide[:, at : at + 64], slots), row_hashes(wide[:, at : at + 64].clone(), slots))


def test_a_page_that_does_not_exist_is_filled_by_nobody() -> None:
    none = torch.tensor([[-1]], dtype=torch.int32)
    assert Stamps(4).check(none, none, torch.tensor([1]), 4).tolist() == [True]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 3), st.integers(0, 47), st.integers(0, 7), st.integers(0, 3))
def test_any_bit_of_a_filled_row_changes_the_hash_and_no_other_does(row: int, at: int, bit: int, filled: int) -> None:
    pool = torch.from_numpy(np.random.default_rng(4).integers(0, 256, (1, 4, 48), dtype=np.uint8))
    page, n = torch.tensor([0]), torch.tensor([filled])
    before = page_hashes(pool, page, n)
    pool[0, row, at] ^= 1 << bit
    assert torch.equal(page_hashes(pool, page, n), before) == (row >= filled)


def test_words_and_rows_that_change_places_change_the_hash() -> None:
    pool = torch.arange(64, dtype=torch.uint8).view(1, 4, 16)
    rows, words = pool[:, [1, 0, 2, 3]], pool[:, :, [*range(8, 16), *range(8)]]
    hashes = {int(page_hashes(p, torch.tensor([0]), torch.tensor([4]))) for p in (pool, rows, words)}
    assert len(hashes) == 3


def test_appended_pages_are_hashed_without_being_read_again() -> None:
    rng = np.random.default_rng(5)
    pool = torch.zeros(4, SLOTS, 16, dtype=torch.uint8)
    hashes = PageHashes(4, SLOTS)
    pages = torch.tensor([1, 3])
    hashes.reset(pages)
    for slot in range(SLOTS):
        rows = torch.from_numpy(rng.integers(0, 256, (2, 16), dtype=np.uint8))
        pool[pages, slot] = rows
        hashes.append(pages, rows)
        assert not hashes.check(pool, pages).any()
        assert torch.equal(hashes.sums[pages], page_hashes(pool, pages, torch.tensor([slot + 1] * 2)))


def test_only_full_pages_can_be_asked_for() -> None:
    pool = torch.zeros(4, SLOTS, 16, dtype=torch.uint8)
    hashes = PageHashes(4, SLOTS)
    pages = torch.tensor([1, 2, 3])
    hashes.take(pool, pages, ints(SLOTS, 2, 0))
    pool[1:] = 7
    assert hashes.check(pool, pages).tolist() == [True, True, False]
    assert hashes.check(pool, pages, full_only=True).tolist() == [True, False, False]
    wanted = hashes.filled[pages] + torch.tensor([0, 0, 1])  # of the third page a row that was never written
    assert hashes.check(pool, pages, wanted, full_only=True).tolist() == [True, False, True]


def test_rows_that_are_not_whole_words_are_refused() -> None:
    with pytest.raises(KizamiError, match="rows of 132 bytes, expected a multiple of 8"):
        row_hashes(torch.zeros(1, 132, dtype=torch.uint8), torch.tensor([0]))


# ----------------------------------------------------------------------------------------------------- padding and ends


def test_padding_of_a_slot_mapping_stamps_no_page() -> None:
    stamps = Stamps(16, 4)
    pages, tags, tokens = torch.tensor([[15]]).int(), torch.tensor([[7]]).int(), torch.tensor([4])
    stamps.write(torch.tensor([15]), torch.tensor([7]), torch.tensor([0]))
    continued = stamps.write(
        torch.tensor([3, -1, 99]), torch.tensor([5, 5, 5]), torch.tensor([1, 1, 1]), first=torch.tensor([0, 2, 2])
    )
    assert continued.tolist() == [False, False, False]
    assert stamps.check(pages, tags, tokens, 4).tolist() == [False]
    assert stamps.check(torch.tensor([[3]]).int(), torch.tensor([[5]]).int(), tokens, 4).tolist() == [False]
    ahead = stamps.write(torch.tensor([3, -1]), *[torch.tensor([5, 5])] * 2, first=torch.tensor([1, 77]))
    assert ahead.tolist() == [True, False]  # of another owner


def test_what_torch_would_spread_over_all_pages_is_refused() -> None:
    stamps, two, one = Stamps(16, 4), torch.tensor([1, 2]), torch.tensor([0])
    for words in ((one, two), (two, one), (two, two, one), (two, two, None, one)):
        with pytest.raises(KizamiError, match=r"\[1\], expected \[2\]"):
            stamps.write(two, *words)


def test_hashes_of_a_pool_of_other_pages_or_of_a_mask_are_refused() -> None:
    hashes, pool = PageHashes(4, 4), torch.zeros(4, 4, 16, dtype=torch.uint8)
    for other in (pool[:3], pool[:, :2]):
        with pytest.raises(KizamiError, match="expected 4 pages of 4 slots"):
            hashes.check(other, torch.tensor([1]))
        with pytest.raises(KizamiError, match="expected 4 pages of 4 slots"):
            hashes.take(other, torch.tensor([1]), torch.tensor([1]))
    with pytest.raises(KizamiError, match=r"pages are torch\.bool"):
        hashes.reset(torch.tensor([True, False]))
    for sizes in ((0, 4), (4, 0)):
        with pytest.raises(KizamiError, match="expected one at least"):
            PageHashes(*sizes)


def test_a_row_longer_than_its_table_is_in_the_log() -> None:
    stamps = Stamps(16)
    stamps.write(torch.tensor([1]), torch.tensor([5]), torch.tensor([0]))
    asked = torch.tensor([[1]]).int(), torch.tensor([[5]]).int(), torch.tensor([65]), 64
    assert stamps.check(*asked).tolist() == [True]
    assert [(one.request, one.position, one.page) for one in stamps.mismatches(*asked)] == [(0, 1, -1)]


def test_pages_of_other_slots_than_the_stamps_have_are_refused() -> None:
    stamps = Stamps(16, 64)
    one = torch.ones(1, 1, dtype=torch.int32)
    with pytest.raises(KizamiError, match="pages of 32 tokens, and 64 stamps a page"):
        stamps.check(one, one, torch.tensor([10]), 32)
    with pytest.raises(KizamiError, match=r"owners \[1\], expected \[1, 1\]"):
        stamps.check(one, one, torch.tensor([10]), 64, one[0])


def test_a_page_that_grew_beyond_its_slots_is_bad() -> None:
    pool = torch.arange(4 * 4 * 16, dtype=torch.uint8).view(4, 4, 16)
    hashes, one = PageHashes(4, 4), torch.tensor([1])
    hashes.take(pool, one, torch.tensor([4]))
    assert hashes.check(pool, one, full_only=True).tolist() == [False]
    hashes.append(one, pool[1, :1])
    assert hashes.check(pool, one, full_only=True).tolist() == [True]
    hashes.take(pool, one, torch.tensor([9]))
    assert hashes.check(pool, one, torch.tensor([4])).tolist() == [True]


def test_a_page_that_does_not_exist_is_bad_and_takes_no_hash() -> None:
    pool = torch.arange(4 * 4 * 16, dtype=torch.uint8).view(4, 4, 16)
    hashes, last = PageHashes(4, 4), torch.tensor([3])
    hashes.take(pool, last, torch.tensor([4]))
    hashes.append(torch.tensor([-1, 4]), pool[0, :2])
    hashes.reset(torch.tensor([-1]))
    assert hashes.check(pool, torch.tensor([3, -1, 4])).tolist() == [False, True, True]

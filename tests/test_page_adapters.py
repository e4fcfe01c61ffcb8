"""Page tags on SGLang's allocators and on vLLM's BlockPool.

SGLang's real classes where SGLang is on the path (`pip download sglang --no-deps`, unpacked: nothing else is needed),
stand-ins always. vLLM's real classes where vLLM is installed, marked `vllm`.
"""

import importlib.util
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_allocator import PagedAllocator, TokenAllocator, real_classes

from kizami.formats.errors import KizamiError
from kizami.quantize.page_tags import sglang, vllm
from kizami.quantize.page_tags.check import check
from kizami.quantize.page_tags.tags import Finding, PageTags

REAL = real_classes()
PAGED = [PagedAllocator] + ([REAL[0]] if REAL else [])
TOKEN = [TokenAllocator] + ([REAL[1]] if REAL else [])
SIZE = 4


def owned(tags: PageTags) -> list[int]:
    return (tags.current & 1).nonzero().flatten().tolist()


def not_free(allocator: Any) -> list[int]:
    return sorted(set(range(1, allocator.num_pages + 1)) - set(allocator.get_all_free_pages().tolist()))


@pytest.mark.parametrize("cls", PAGED)
@pytest.mark.parametrize("need_sort", [False, True])
def test_sglang_pages_are_owned_exactly_while_they_are_not_free(cls: Any, need_sort: bool) -> None:
    """A random mix of its calls, with free groups, merges and calls that find too few pages."""
    rng = random.Random(1)
    allocator = cls(24 * SIZE, SIZE, torch.float16, "cpu", None, need_sort)
    tags = sglang.new_tags(allocator)
    attached = sglang.attach(allocator, tags)
    requests: dict[int, list[int]] = {}
    held: dict[int, tuple[list[int], list[int]]] = {}  # pages and tags, captured as they came
    failed = merged = 0
    for step in range(400):
        staged = bool(need_sort and allocator.staged_pages)
        if rng.random() < 0.3 or not requests:
            length = rng.randint(1, 20)
            one = torch.tensor([length])
            slots = allocator.alloc_extend(one * 0, one * 0, one, one, torch.tensor([-1]), length)
            if slots is not None:
                requests[step] = slots.tolist()
        elif rng.random() < 0.7:
            rows = rng.sample(sorted(requests), min(3, len(requests)))
            lengths = torch.tensor([len(requests[row]) + 1 for row in rows])
            last = torch.tensor([requests[row][-1] for row in rows])
            slots = allocator.alloc_decode(lengths, lengths, last)
            for row, slot in zip(rows, [] if slots is None else slots.tolist(), strict=False):
                requests[row].append(slot)
        else:
            slots = torch.tensor(requests.pop(rng.choice(sorted(requests))))
            if rng.random() < 0.5:
                allocator.free_group_begin()
                allocator.free(slots)
                assert not set((slots // SIZE).tolist()) - set(owned(tags)), "deferred frees are not free yet"
                allocator.free_group_end()
            else:
                allocator.free(slots)
        failed += slots is None
        merged += staged and not allocator.staged_pages
        assert owned(tags) == not_free(allocator)
        held = {row: held.get(row, ([], [])) for row in requests}
        for row, (pages, captured) in held.items():
            new = [slot // SIZE for slot in requests[row][::SIZE]][len(pages) :]
            pages += new
            captured += tags.find(torch.tensor(new, dtype=torch.int64)).tolist()
            assert not check(tags, torch.tensor([pages]), torch.tensor([captured], dtype=torch.int32)).any()
    assert failed
    assert bool(merged) == need_sort
    assert {name for name, n in tags.stats.items() if n} == {"none"}
    attached.detach()
    before = tags.current.clone()
    allocator.clear()
    assert torch.equal(tags.current, before)


@pytest.mark.parametrize("cls", PAGED)
def test_sglang_a_table_kept_after_its_pages_went_is_found_and_nobody_else_aborted(cls: Any) -> None:
    allocator = cls(16 * SIZE, SIZE, torch.float16, "cpu", None, False)
    tags = sglang.new_tags(allocator)
    sglang.attach(allocator, tags)
    req_to_token = torch.zeros(3, 8, dtype=torch.int32)
    for row in range(3):
        req_to_token[row] = allocator.alloc(8)
    rows, tokens = torch.tensor([0, 1, 2]), torch.tensor([8, 5, 0])
    pages, lengths = sglang.pages_of(req_to_token, rows, tokens, SIZE)
    assert lengths.tolist() == [2, 2, 0]
    captured = tags.find(pages)
    allocator.free(req_to_token[1, 4:].long())
    assert check(tags, pages, captured, lengths).tolist() == [False, True, False]
    allocator.alloc(4)  # somebody else's now
    assert check(tags, pages, captured, lengths).tolist() == [False, True, False]
    allocator._release_page_ids(torch.tensor([9]))
    assert tags.last.tolist() == [Finding.DOUBLE_RELEASE]
    allocator.clear()
    assert check(tags, pages, captured, lengths).tolist() == [True, True, False]
    allocator.resize(SimpleNamespace(max_total_num_tokens=8 * SIZE))
    assert tags.pages == 9
    assert allocator.alloc(8 * SIZE) is not None
    assert owned(tags) == list(range(1, 9))


@pytest.mark.parametrize("cls", TOKEN)
@pytest.mark.parametrize("need_sort", [False, True])
def test_sglang_pages_of_one_token_are_followed_too(cls: Any, need_sort: bool) -> None:
    allocator = cls(10, torch.float16, "cpu", None, need_sort)
    tags = sglang.new_tags(allocator)
    sglang.attach(allocator, tags)
    first = allocator.alloc(8)
    allocator.free_group_begin()
    allocator.free(first[:4])
    assert owned(tags) == list(range(1, 9))
    allocator.free_group_end()
    assert owned(tags) == [5, 6, 7, 8]
    second = allocator.alloc(5)
    assert sorted(second.tolist() + first[4:].tolist()) == owned(tags)
    allocator.clear()
    assert owned(tags) == []
    assert {name for name, n in tags.stats.items() if n} == {"none"}


def test_sglang_tags_that_are_attached_late_take_over_what_is_in_use() -> None:
    allocator = PagedAllocator(8 * SIZE, SIZE, torch.float16, "cpu", None, True)
    allocator.alloc(3 * SIZE)
    allocator.free(torch.arange(SIZE, 2 * SIZE))
    tags = sglang.new_tags(allocator)
    sglang.attach(allocator, tags)
    assert owned(tags) == [2, 3]


def test_tags_are_attached_once() -> None:
    allocator = PagedAllocator(8 * SIZE, SIZE, torch.float16, "cpu", None, True)
    attached = sglang.attach(allocator, sglang.new_tags(allocator))
    with pytest.raises(KizamiError, match="attached to this allocator already"):
        sglang.attach(allocator, sglang.new_tags(allocator))
    attached.detach()
    sglang.attach(allocator, sglang.new_tags(allocator))


def test_what_does_not_fit_is_refused() -> None:
    allocator = PagedAllocator(8 * SIZE, SIZE, torch.float16, "cpu", None, True)
    with pytest.raises(KizamiError, match=r"tags for 8 pages with \[0\] reserved, expected 9 with page 0 reserved"):
        sglang.attach(allocator, PageTags(8))
    with pytest.raises(KizamiError, match="SimpleNamespace has no alloc, free, clear"):
        sglang.attach(SimpleNamespace(num_pages=3), PageTags(4))
    with pytest.raises(KizamiError, match=r"SimpleNamespace has no .*expected vLLM's BlockPool"):
        vllm.attach(SimpleNamespace(), PageTags(4))


# ---------------------------------------------------------------- vLLM's real classes

if_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: its pins need an "
                       "environment of their own"),
]  # fmt: skip


class Pool:
    """vLLM's BlockPool of 9 blocks of 4 tokens, with tags, and requests that only count their tokens."""

    def __init__(self, caching: bool = True) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.pool = BlockPool(num_gpu_blocks=9, enable_caching=caching, hash_block_size=4)
        self.tags = vllm.new_tags(self.pool)
        self.attached = vllm.attach(self.pool, self.tags)

    def cache(self, blocks: list[Any], prompt: int) -> list[bytes]:
        hashes = [bytes([prompt, i]) * 16 for i in range(len(blocks))]
        request = SimpleNamespace(block_hashes=hashes, request_id="r", all_token_ids=[], lora_request=None)
        self.pool.cache_full_blocks(request, blocks, 0, len(blocks), 4, 0)
        return hashes

    def hits(self, hashes: list[bytes]) -> list[Any]:
        found = [self.pool.get_cached_block(h, [0]) for h in hashes]
        return [blocks[0] for blocks in found if blocks]

    def stale(self, blocks: list[Any], captured: torch.Tensor) -> bool:
        return bool(check(self.tags, torch.tensor([[b.block_id for b in blocks]]), captured[None]))

    def states(self) -> tuple[list[int], list[int]]:
        """Blocks in use, and blocks that only the prefix cache knows."""
        parked = self.tags.parked.nonzero().flatten().tolist()
        return [i for i in owned(self.tags) if i not in parked], parked


class TestVllm:
    pytestmark = if_vllm

    def test_a_block_that_nobody_holds_but_the_prefix_cache_knows_keeps_its_tag(self) -> None:
        it = Pool()
        blocks = it.pool.get_new_blocks(3)
        captured = it.attached.tags_of(blocks)
        hashes = it.cache(blocks[:2], 1)
        it.pool.free_blocks(reversed(blocks))
        assert it.states() == ([], [1, 2])
        assert it.stale(blocks[2:], captured[2:])
        again = it.hits(hashes)
        it.pool.touch(again)
        assert it.states() == ([1, 2], [])
        assert not it.stale(again, it.attached.tags_of(again))
        assert not it.stale(blocks[:2], captured[:2]), "the content is what was captured"
        assert it.tags.stats["none"] == sum(it.tags.stats.values())

    def test_a_block_that_is_handed_out_again_is_somebody_elses(self) -> None:
        it = Pool()
        blocks = it.pool.get_new_blocks(2)
        captured = it.attached.tags_of(blocks)
        it.cache(blocks, 1)
        it.pool.free_blocks(blocks)
        assert not it.stale(blocks, captured)
        taken = it.pool.get_new_blocks(8)  # all: what was cached is evicted
        assert it.states()[0] == sorted(b.block_id for b in taken)
        assert it.stale(blocks, captured)
        assert it.stale(blocks[1:], captured[1:])
        assert it.tags.stats["double_acquire"] == 0

    def test_a_block_that_one_call_frees_twice_is_a_double_release(self) -> None:
        it = Pool(caching=False)
        (block,) = it.pool.get_new_blocks(1)
        it.pool.free_blocks([block, block])
        assert it.tags.stats["double_release"] == 1
        assert it.states() == ([], [])

    def test_shared_blocks_stay_until_their_last_holder_goes(self) -> None:
        it = Pool(caching=False)
        blocks = it.pool.get_new_blocks(2)
        captured = it.attached.tags_of(blocks)
        it.pool.touch([*blocks, it.pool.null_block])
        it.pool.free_blocks(iter([*blocks, it.pool.null_block]))
        assert not it.stale(blocks, captured)
        it.pool.free_blocks(blocks)
        assert it.stale(blocks, captured)
        assert it.tags.stats["none"] == sum(it.tags.stats.values())

    def test_evicting_and_resetting_give_the_content_up(self) -> None:
        it = Pool()
        blocks = it.pool.get_new_blocks(3)
        captured = it.attached.tags_of(blocks)
        it.cache(blocks, 1)
        it.pool.free_blocks(blocks[:2])
        it.pool.evict_blocks({1, 3})  # 3 is in use
        assert it.states() == ([3], [2])
        assert it.stale(blocks[:1], captured[:1])
        assert not it.stale(blocks[1:], captured[1:])
        assert not it.pool.reset_prefix_cache(), "vLLM refuses while a block is in use"
        assert it.states() == ([3], [2])
        it.pool.free_blocks(blocks[2:])
        assert it.pool.reset_prefix_cache()
        assert it.states() == ([], [])

    def test_unpinned_blocks_stay_readable_until_they_are_handed_out(self) -> None:
        it = Pool()
        blocks = it.pool.get_new_blocks(2)
        captured = it.attached.tags_of(blocks)
        told: list[int] = []
        it.pool.unpin_blocks(blocks, lambda block: told.append(block.block_id))
        it.pool.evict_blocks({1, 2})
        assert not it.stale(blocks, captured)
        it.pool.get_new_blocks(8)
        assert sorted(told) == [1, 2]
        assert it.stale(blocks[:1], captured[:1])

    def test_a_hit_on_a_block_that_the_cache_should_have_forgotten_is_found(self) -> None:
        it = Pool()
        blocks = it.pool.get_new_blocks(1)
        self_made = it.pool.blocks[5]  # free, never cached: a phantom hit
        it.pool.touch([self_made])
        assert it.tags.last.tolist() == [Finding.USE_OF_FREE]
        assert it.stale([self_made], it.attached.tags_of([self_made]))
        assert not it.stale(blocks, it.attached.tags_of(blocks))

    def test_a_double_free_is_found_where_vllm_says_nothing(self) -> None:
        it = Pool()
        blocks = it.pool.get_new_blocks(2)
        it.cache(blocks[:1], 1)
        it.pool.free_blocks(blocks)
        it.pool.free_blocks(blocks)
        assert it.tags.stats["double_release"] == 2

    def test_a_random_mix_of_calls_makes_no_false_abort(self) -> None:
        it, rng, live, known = Pool(), random.Random(2), {}, {}
        for step in range(2000):
            if live and rng.random() < 0.45:
                blocks, _ = live.pop(rng.choice(sorted(live)))
                it.pool.free_blocks(reversed(blocks))
            elif known and rng.random() < 0.4:
                again = it.hits(known[rng.choice(sorted(known))])
                it.pool.touch(again)
                if again:
                    live[step] = (again, it.attached.tags_of(again))
            elif (n := rng.randint(1, 3)) <= it.pool.get_num_free_blocks():
                blocks = it.pool.get_new_blocks(n)
                live[step] = (blocks, it.attached.tags_of(blocks))
                known[step % 20] = it.cache(blocks[: rng.randint(0, n)], step % 250)
            assert not any(it.stale(blocks, captured) for blocks, captured in live.values())
            used = {b.block_id for b in it.pool.blocks if b.ref_cnt and not b.is_null}
            assert set(it.states()[0]) == used
        assert it.tags.stats["none"] == sum(it.tags.stats.values()) > 1000

    def test_it_is_put_back_as_it_was_and_attached_late_takes_over_what_is_in_use(self) -> None:
        it = Pool()
        it.attached.detach()
        it.pool.get_new_blocks(2)
        assert it.states() == ([], [])
        it.cache(it.pool.blocks[1:2], 1)
        it.pool.free_blocks([it.pool.blocks[1]])
        it.tags = vllm.new_tags(it.pool)
        vllm.attach(it.pool, it.tags)
        assert it.states() == ([2], [1])

"""Page tags for vLLM's BlockPool: attached to a live pool, no subclass, nothing of vLLM imported.

Written for vLLM 0.32 and 0.33, vllm/v1/core/block_pool.py. One scheduler decides for all ranks, on the host: its tags
live on the CPU, the check runs where SchedulerOutput is made, and ranks need no agreement.

Where it hooks in:
- acquire: `get_new_blocks`, which evicts what the prefix cache still had in these blocks.
- share: `touch`, a prefix hit, of blocks in use or of blocks that nobody holds.
- release: `free_blocks` where the last reference goes. A block whose hash the prefix cache knows is *parked*: vLLM puts
  it at the end of its free queue, yet a later request may touch it and read what is there. A new tag would not be
  wrong for that request, which captures on touch, but it would cut the tie between the hash and the content for which
  the hash was made. So the tag changes when the content goes: when the block is handed out again (`get_new_blocks`),
  evicted (`evict_blocks`), or the cache reset (`reset_prefix_cache`). The price: a request which reads a block that it
  let go of is found only after one of these. Until then it reads what it captured.
- `unpin_blocks` parks, too: its blocks stay readable until they are handed out again.
- exempt: the null block.
- capture: `tags_of(blocks)` in the same scheduler call that got or touched them; that is what the table keeps.

A prefix hit on a block that the cache should have forgotten is a Finding.USE_OF_FREE. A hit on wrong content under a
right hash has a valid tag.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from kizami.formats.errors import KizamiError
from kizami.quantize.page_tags.tags import PageTags

HOOKS = ("get_new_blocks", "touch", "free_blocks", "unpin_blocks", "evict_blocks", "reset_prefix_cache")


def new_tags(pool: Any, **settings: Any) -> PageTags:
    """Tags for its blocks, the null block reserved."""
    return PageTags(pool.num_gpu_blocks, reserved=(pool.null_block.block_id,), **settings)


class Attached:
    """What `attach` returns. `detach` puts the pool back as it was."""

    def __init__(self, pool: Any, tags: PageTags) -> None:
        self.tags = tags
        self._pool = pool
        self._names = [name for name in HOOKS if hasattr(pool, name) or name != "unpin_blocks"]  # older vLLM has none
        missing = [name for name in (*self._names, "blocks", "null_block") if not hasattr(pool, name)]
        if missing:
            what = f"{type(pool).__name__} has no {', '.join(missing)}"
            raise KizamiError(f"{what}, expected vLLM's BlockPool", code="page_tags")
        if tags.pages != len(pool.blocks) or pool.null_block.block_id not in tags.reserved:
            raise KizamiError(
                f"tags for {tags.pages} pages with {list(tags.reserved)} reserved, expected {len(pool.blocks)} with "
                f"the null block {pool.null_block.block_id} reserved",
                code="page_tags",
            )
        if any(name in vars(pool) for name in self._names):
            raise KizamiError("tags are attached to this pool already", code="page_tags", hint="detach them first")
        kept = [block for block in pool.blocks if not block.is_null and (block.ref_cnt or block.block_hash is not None)]
        self.tags.acquire(_ids(kept))
        self.tags.park(_ids([block for block in kept if not block.ref_cnt]))
        for name in self._names:
            setattr(pool, name, self._wrapped(name, getattr(pool, name)))

    def detach(self) -> None:
        """The tags stay as they are."""
        for name in self._names:
            delattr(self._pool, name)

    def tags_of(self, blocks: Sequence[Any]) -> torch.Tensor:
        """int32 [n]: the tags to keep beside the ids of blocks that were just got or touched."""
        return self.tags.find(torch.tensor(_ids(blocks), dtype=torch.int64))

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        wrappers: dict[str, Callable[..., Any]] = {
            "get_new_blocks": lambda num_blocks: self._get(original, num_blocks),
            "touch": lambda blocks: self._touch(original, blocks),
            "free_blocks": lambda ordered_blocks: self._let_go(original, ordered_blocks, self._cached),
            "unpin_blocks": lambda blocks, on_reuse: self._let_go(
                lambda them: original(them, on_reuse), blocks, lambda block: True
            ),
            "evict_blocks": lambda block_ids: self._evict(original, block_ids),
            "reset_prefix_cache": lambda: self._reset(original),
        }
        return wrappers[name]

    def _cached(self, block: Any) -> bool:
        return bool(self._pool.enable_caching) and block.block_hash is not None

    def _mine(self, blocks: Iterable[Any]) -> list[Any]:
        """A deferred free may hold blocks of several pools; null blocks come and go everywhere."""
        return [b for b in blocks if not b.is_null and getattr(b, "pool", None) in (None, self._pool)]

    def _get(self, original: Callable[..., Any], num_blocks: int) -> Any:
        blocks = original(num_blocks)
        self.tags.acquire(_ids(blocks))
        return blocks

    def _touch(self, original: Callable[..., Any], blocks: Sequence[Any]) -> None:
        original(blocks)
        self.tags.share(_ids(self._mine(blocks)))

    def _let_go(
        self, original: Callable[[list[Any]], Any], blocks: Iterable[Any], keeps: Callable[[Any], bool]
    ) -> None:
        them = list(blocks)  # may be an iterator, which only one of us could walk
        original(them)
        # Below 0: freed more often than held, which vLLM does not notice; the tags say DOUBLE_RELEASE, once for each.
        named = Counter(block.block_id for block in self._mine(them))
        freed = {block.block_id: block for block in self._mine(them) if block.ref_cnt <= 0}
        gone = [block for i, block in freed.items() for _ in range(min(named[i], 1 - block.ref_cnt))]
        kept = [block for block in gone if keeps(block)]
        self.tags.park(_ids(kept))
        self.tags.release(_ids([block for block in gone if not keeps(block)]))

    def _evict(self, original: Callable[..., Any], block_ids: set[int]) -> None:
        original(block_ids)
        self.tags.release([i for i in block_ids if self._given_up(i)])

    def _given_up(self, block_id: int) -> bool:
        """Parked for its hash alone: who unpinned a block still reads it, hash or not."""
        block = self._pool.blocks[block_id]
        watched = block_id in getattr(self._pool, "_reuse_watchers", {})
        return bool(self.tags.parked[block_id]) and not self._cached(block) and not watched

    def _reset(self, original: Callable[..., Any]) -> Any:
        done = original()
        if done:  # it refuses while a block is in use
            self.tags.clear()
        return done


def attach(pool: Any, tags: PageTags) -> Attached:
    """From now on `tags` follow the pool: what it hands out is acquired, what nobody holds is released or parked."""
    return Attached(pool, tags)


def _ids(blocks: Iterable[Any]) -> list[int]:
    return [block.block_id for block in blocks]

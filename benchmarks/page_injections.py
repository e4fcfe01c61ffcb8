"""Bookkeeping faults of engines in public, put into page_simulator.py one at a time.

Each function looks for a place where its fault can happen at this moment, makes it happen, and says whether it did.
`Kind.when`: before the check of a step, or between the check and the step's reads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from page_simulator import World
from page_traffic import Held, Writes

NOBODY = 10**9  # the number of a request that is in no row


@dataclass(frozen=True, slots=True)
class Kind:
    """`role`: who is at fault. A stale reader holds a page that is not its any more; a stale writer writes to one; a
    missing write leaves the former owner's bytes; a wrong map points to a page that is in order but not the one meant;
    damage changes bytes of a page in order; in a race all was in order when it was checked."""

    name: str
    public: str
    role: Literal["stale reader", "stale writer", "missing write", "wrong map", "damage", "race"]
    inject: Callable[[World], bool]
    when: Literal["before check", "after check"] = "before check"


def stale_table(world: World) -> bool:
    """An entry of the device's table is what some holder of that row had: page and tag of the past."""
    row, at = _entry(world)
    past = [held for held in world.gone if world.lease[held[0]] != held[2]]
    if row < 0 or not past:
        return False
    _point(world, row, at, past[int(world.rng.integers(len(past)))])
    return True


def wrapped(world: World) -> bool:
    """The same with a page that was acquired 128 times since, so that its tag moved by 256; it is another's."""
    row, at = _entry(world)
    other, there = _entry(world, private=True)
    if row < 0 or other in (-1, row):
        return False
    page, tag, _ = _held(world, other, there)
    _point(world, row, at, (page, int(np.int64(tag - 256).astype(np.int32)), -1))
    return True


def double_free(world: World) -> bool:
    """A second release by a former holder: of a page that is free, or of one that is somebody else's by now."""
    live = {page for page, _, _ in (held for request in world.request if request for held in request.held)}
    shared = {page for page, _, _ in world.cache.values()}
    free = set(world.free)
    again = [h for h in world.gone if h[0] in free or (h[0] in live - shared and world.refs[h[0]] == 1)]
    if not again:
        return False
    world.release([again[int(world.rng.integers(len(again)))]])
    return True


def use_after_free(world: World) -> bool:
    """A page is freed while its only holder goes on."""
    row, at = _entry(world, private=True)
    if row < 0:
        return False
    held = _held(world, row, at)
    _forget(world, row, held)
    world.release([held])
    return True


def race(world: World) -> bool:
    """The same after the check, and a new owner's prefill writes the page before the step's read is done."""
    if not use_after_free(world):
        return False
    page = world.free.pop()
    world.free.appendleft(page)
    (new,) = world.acquire(1) or [(0, 0, 0)]
    size = world.load.page
    ids, values = np.full(size, new[0]), world.rng.integers(1, 2**62, size)
    tag, lease, owner = np.full(size, new[1]), np.full(size, new[2]), np.full(size, NOBODY)
    world.land(Writes(ids, np.arange(size), values, tag, owner, lease, counted=False))
    world.let_go([new])
    return True


def late_writer(world: World) -> bool:
    """A decode step's write is under way when its request ends, and nothing waits for it."""
    row, _ = _entry(world, private=True, last=True)
    if row < 0:
        return False
    end = int(world.length[row])
    world.send(-1, world.writes(row, end - 1, end, counted=False), int(world.rng.integers(2, 20)))
    world.drop(row)
    return True


def abort_in_flight(world: World) -> bool:
    """A request is left by its client while its pages are on their way, and they are freed at once."""
    row = _loading(world)
    if row < 0:
        return False
    for later, writes in _transfers(world, row):
        writes.counted = False
        world.due[later].append((-1, writes))
    world.drop(row, fence=False)
    return True


def early_read(world: World) -> bool:
    """The other side gave up: some pages never land, and the request starts as if they had."""
    row = _loading(world)
    if row < 0:
        return False
    _transfers(world, row)
    world.running[row] = True
    world.length[row] = world.prompt[row]
    return True


def wrong_prefix(world: World) -> bool:
    """Two prefixes with one hash: the cache answers one with the other's page."""
    keys = _popular(world)
    if len(keys) < 2:
        return False
    mine, other = (keys[int(i)] for i in world.rng.choice(len(keys), 2, replace=False))
    held = world.cache[other]
    world.refs[held[0]] += 1
    world.let_go([world.cache[mine]])
    world.cache[mine] = held
    return True


def phantom_hit(world: World) -> bool:
    """A page is evicted and freed, and its entry in the prefix cache stays."""
    keys = [key for key in _popular(world) if world.refs[world.cache[key][0]] == 1]
    if not keys:
        return False
    world.let_go([world.cache[keys[int(world.rng.integers(len(keys)))]]])
    return True


def next_page(world: World) -> bool:
    """Page p + 1 where p was meant, with the tag of p."""
    row, at = _entry(world)
    if row < 0 or world.table[row, at] + 1 >= world.load.pages:
        return False
    world.table[row, at] += 1
    return True


def next_entry(world: World) -> bool:
    """The neighbour's entry of the same table, page and tag."""
    row, at = _entry(world)
    if row < 0 or world.length[row] <= world.load.page:
        return False
    at = max(at, 1)
    _point(world, row, at, _held(world, row, at - 1))
    return True


def moved_tokens(world: World) -> bool:
    """Tokens of a page end up in each other's places, behind the back of all bookkeeping."""
    row, at = _entry(world)
    if row < 0 or world.length[row] < (at + 1) * world.load.page:
        return False
    page = world.table[row, at]
    world.cells[page] = np.roll(world.cells[page], 1)
    return True


KINDS = (
    Kind("stale block table", "vllm-tt-plugin #103, vllm #39146", "stale reader", stale_table),
    Kind("use after free", "vllm #37076", "stale reader", use_after_free),
    Kind("double free", "vllm #42571, sglang #38840", "stale reader", double_free),
    Kind("phantom prefix hit", "local-inference-lab/vllm #480", "stale reader", phantom_hit),
    Kind("tag 256 changes old", "none; 5.4 of the notes", "stale reader", wrapped),
    Kind("late writer", "vllm #45357", "stale writer", late_writer),
    Kind("abort in flight", "sglang #24527", "stale writer", abort_in_flight),
    Kind("read before landing", "sglang #30233", "missing write", early_read),
    Kind("off by one: page id", "sglang #31215", "wrong map", next_page),
    Kind("off by one: entry", "sglang #22819", "wrong map", next_entry),
    Kind("wrong prefix hit", "openvino.genai #3722", "wrong map", wrong_prefix),
    Kind("damage in a page", "sglang #31218", "damage", moved_tokens),
    Kind("freed after the check", "vllm-ascend #13501, #14055", "race", race, "after check"),
)


def _entry(world: World, *, private: bool = False, last: bool = False) -> tuple[int, int]:
    """A random (row, place) that the next step reads; (-1, 0) if there is none. private: nobody else holds the page."""
    cached = {page for page, _, _ in world.cache.values()}
    found = []
    for row in np.flatnonzero(world.running & (world.length > 0)).tolist():
        pages = -(-int(world.length[row]) // world.load.page)
        for at in range(pages - 1 if last else 0, pages):
            page = int(world.table[row, at])
            if not private or (page not in cached and world.refs[page] == 1):
                found.append((row, at))
    return found[int(world.rng.integers(len(found)))] if found else (-1, 0)


def _held(world: World, row: int, at: int) -> Held:
    return int(world.table[row, at]), int(world.tags[row, at]), int(world.leases[row, at])


def _point(world: World, row: int, at: int, held: Held) -> None:
    world.table[row, at], world.tags[row, at], world.leases[row, at] = held


def _forget(world: World, row: int, held: Held) -> None:
    """The scheduler frees the page now, so it will not do so when the request ends."""
    request = world.request[row]
    assert request is not None, row
    request.held.remove(held)


def _loading(world: World) -> int:
    """A row that waits for a transfer, or -1."""
    rows = [row for row in np.flatnonzero(world.arriving > 0).tolist() if not world.running[row]]
    return int(rows[int(world.rng.integers(len(rows)))]) if rows else -1


def _transfers(world: World, row: int) -> list[tuple[int, Writes]]:
    """Take away what is on its way to this row, with the step that each would land in; nothing counts it any more."""
    found: list[tuple[int, Writes]] = []
    owner = world.owner[row]  # a former request of this row may have left writes behind
    for later, batch in world.due.items():
        ours = [writes for to, writes in batch if to == row and writes.owner[0] == owner]
        found += [(later, writes) for writes in ours]
        batch[:] = [(to, writes) for to, writes in batch if to != row or writes.owner[0] != owner]
    for _, writes in found:
        for page in writes.page.tolist():
            world.under_way[page] -= 1
    return found


def _popular(world: World) -> list[int]:
    """Keys of the prefix cache that a new request may ask for: beginnings of system prompts."""
    size = world.load.page
    return [key for family in world.families.tolist() for key in family[size - 1 :: size] if key in world.cache]

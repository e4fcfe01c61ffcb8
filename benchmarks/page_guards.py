"""The modes of page_simulator.py: kizami.quantize.page_tags on the simulator's pages.

Generations are counted in every mode, since stamps carry them. A mode is a set of these:

    tags     the check before each step; releases and prefix hits carry the tag that their holder has
    tags u8  the same with the low 8 bits of each tag
    stamps   one stamp a page, compared by the reader before each step, and by a writer that continues a page
    hashes   one hash a page, appended to by each write that somebody still counts on; before each step all pages that
             it reads are hashed again, and a page with fewer rows than the reader expects is wrong
"""

from collections.abc import Set

import numpy as np
import numpy.typing as npt
import torch
from page_simulator import World
from page_traffic import Ints, Load, Writes

from kizami.quantize.page_tags.check import check
from kizami.quantize.page_tags.hashes import PageHashes, row_hashes
from kizami.quantize.page_tags.stamps import Stamps
from kizami.quantize.page_tags.tags import Finding, PageTags

MODES = ("none", "tags", "tags u8", "stamps", "hashes", "tags+stamps", "tags+hashes", "tags+stamps+hashes")
Flags = npt.NDArray[np.bool_]


class Checks:
    """A Guard that does what its mode says."""

    def __init__(self, load: Load, mode: str, first_generation: int | None = None) -> None:
        """first_generation: the tag of pages never owned; just below 2^32, it wraps early in the run."""
        assert mode in MODES, mode
        parts: Set[str] = {"tags" if part == "tags u8" else part for part in mode.split("+")}
        self.act = "tags" in parts
        self.mask = 0xFF if mode == "tags u8" else -1
        self.tags = PageTags(load.pages, first_generation=first_generation)
        self.stamps = Stamps(load.pages) if "stamps" in parts else None
        self.hashes = PageHashes(load.pages, load.page) if "hashes" in parts else None
        self.page = load.page
        self.foreign: set[int] = set()  # owners that found another's stamp where theirs should be

    def acquire(self, pages: list[int]) -> list[int]:
        ids = torch.tensor(pages)
        if self.hashes:
            self.hashes.reset(ids)
        tags: list[int] = self.tags.acquire(ids).tolist()
        return tags

    def release(self, pages: list[int], tags: list[int]) -> list[bool]:
        if not self.act:
            self.tags.release(pages)
            return [True] * len(pages)
        held = torch.tensor(tags, dtype=torch.int32)
        if self.mask != -1:  # what 8 bits cannot tell apart is the same tag
            now = self.tags.find(torch.tensor(pages))
            held = torch.where((now ^ held) & self.mask == 0, now, held)
        return [finding == Finding.NONE for finding in self.tags.release(pages, held).tolist()]

    def hit(self, page: int, tag: int) -> bool:
        return not self.act or (int(self.tags.current[page]) ^ tag) & self.mask == 0

    def landed(self, writes: Writes, cells: Ints, known: bool) -> None:
        if not (self.stamps or self.hashes):
            return
        pages, at, slots = np.unique(writes.page, return_index=True, return_counts=True)
        ids, first = torch.from_numpy(pages), torch.from_numpy(writes.slot[at])
        if self.stamps:
            tags, owners = torch.from_numpy(writes.tag[at]), torch.from_numpy(writes.owner[at])
            bad = self.stamps.write(ids, tags, owners, first, first + torch.from_numpy(slots))
            self.foreign |= set(owners[bad].tolist())
        if self.hashes and known:
            to = torch.from_numpy(writes.page)
            rows = torch.from_numpy(writes.value).view(torch.uint8).view(-1, 8)
            self.hashes.sums.index_add_(0, to, row_hashes(rows, torch.from_numpy(writes.slot)))
            self.hashes.filled.index_add_(0, to, torch.ones(len(to), dtype=torch.int32))

    def flags(self, world: World, batch: Flags) -> Flags:
        bad = np.zeros(len(batch), np.bool_)
        if self.foreign:
            bad |= np.isin(world.owner, list(self.foreign)) & batch
            self.foreign.clear()
        pages, tags = torch.from_numpy(world.table), torch.from_numpy(world.tags)
        tokens = np.where(batch, world.length, 0)
        if self.act:
            bad |= self._stale(pages, tags, torch.from_numpy(np.where(batch, world.count, 0)))
        if self.stamps:
            bad |= self.stamps.check(pages, tags, torch.from_numpy(tokens), self.page).numpy()
        if self.hashes:
            bad |= self._changed(self.hashes, world, tokens)
        return bad

    def _stale(self, pages: torch.Tensor, tags: torch.Tensor, lengths: torch.Tensor) -> Flags:
        if self.mask == -1:
            answer: Flags = check(self.tags, pages, tags, lengths).numpy()
            return answer
        now = self.tags.find(pages)
        bad = ((now ^ tags) & self.mask != 0) | (now & 1 == 0)
        answer = (bad & (torch.arange(pages.shape[1]) < lengths[:, None])).any(1).numpy()
        return answer

    def _changed(self, hashes: PageHashes, world: World, tokens: Ints) -> Flags:
        read = np.clip(tokens[:, None] - np.arange(world.load.width) * self.page, 0, self.page)  # slots of each page
        rows, places = np.nonzero(read)
        pages = torch.from_numpy(world.table[rows, places].astype(np.int64))
        pool = torch.from_numpy(world.cells).view(torch.uint8).view(*world.cells.shape, 8)
        bad = hashes.check(pool, pages, torch.from_numpy(read[rows, places]))
        answer = np.zeros(len(tokens), np.bool_)
        answer[rows[bad.numpy()]] = True
        return answer

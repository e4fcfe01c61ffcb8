"""A generation tag on every physical page of a KV cache. torch, vectorised, on any device.

A page's tag is a u32 counter. It is odd while somebody owns the page and even while the page is free, and it changes
each time the page changes hands: `acquire` moves it to the next odd value, `release` to the next even one. A holder
keeps (page, tag) from `acquire` or `share`; before a step reads pages, check.py compares what is kept with what is so.

What the tag means. It names the page's *content*, not its reference count. A page that nobody holds any more but
whose content a prefix cache may still hand out (vLLM: reference count 0, hash still known) keeps its tag: `park` it,
and `share` it on a hit; `release` it when the content is given up. Engines whose prefix cache owns its pages (SGLang's
radix cache) never park.

What it finds: **stale readers**, that is a table with a page which was freed or handed to somebody else since; and of
the allocator's own faults double acquire, double release, release by somebody who is not the owner, sharing of a free
page, reserved pages in circulation, ids out of range.

What it does not find:
- **Stale writers.** If A's late write lands in a page that is B's by now, B's tag is right and the bytes are A's
  (sglang #24527, vllm #45357): stamps.py and hashes.py are for that.
- Errors inside a page (sglang #31218: index keys moved by token, not by page), and a prefix hit on a page with wrong
  content but a valid tag (openvino.genai #3722: a collision of prefix hashes): hashes.py sees the first only.
- The read of a parked page by a holder that let go of it. The bytes are still what it captured; from the moment of
  eviction on it is found.
- What happens between check and use: the two are not atomic. Without a pin, or a fence which lets no page change hands
  until the step has ended, a page may go right after it was found good.

The counter wraps without harm: 2^32 is even, so odd stays odd, and a stale tag looks valid again only if its page was
acquired exactly 2^31 times in between (one page, once a millisecond: 24 days while one request is held). A u8 would
need 128. Reserved pages (SGLang's padding page 0, vLLM's null block) are exempt: they change hands all the time.

Nothing here is safe to call from several threads at once, and one allocator owns one PageTags.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from kizami.formats.errors import KizamiError

Pages = torch.Tensor | Sequence[int]
U32 = 0xFFFFFFFF
# Odd, so that no two of 2^31 pages start alike; 2^32 over the golden ratio, so that near pages start far apart: of two
# that are d apart, one must be acquired some 2^31 / (2.3 d) times more than the other to get to its tag.
SPREAD = 0x9E3779B1


class Finding(IntEnum):
    """What can be wrong with one page in one call; the numbers are the codes in `PageTags.last`."""

    NONE = 0
    DOUBLE_ACQUIRE = 1  # handed out while owned, or twice in one call: its former holder is stale from now on
    DOUBLE_RELEASE = 2  # released while free, or twice in one call; nothing changes
    STALE_RELEASE = 3  # released with a tag that is not the page's: by somebody who is not its owner; nothing changes
    USE_OF_FREE = 4  # shared while free: the tag given never passes a check
    RESERVED = 5  # a reserved page; nothing changes
    OUT_OF_RANGE = 6  # no such page; the tag given never passes a check


@dataclass(frozen=True, slots=True)
class PageFinding:
    """One finding for the log: what, the page, and its tag after the call (u32)."""

    finding: Finding
    page: int
    tag: int


class PageTags:
    """The tags of `pages` physical pages; `reserved` ones are exempt from all.

    Calls take page ids (int32 or int64 [n], or a sequence of ints). They raise nothing: `last` (uint8 [n]) has a
    Finding for each page of the last call, `stats` how many there were of each since the start. On a GPU neither
    waits for the device; reading them does. With `strict` a call with a finding raises KizamiError and changes nothing.
    """

    def __init__(
        self,
        pages: int,
        *,
        reserved: Sequence[int] = (0,),
        device: torch.device | str = "cpu",
        first_generation: int | None = None,
        strict: bool = False,
    ) -> None:
        """`first_generation`: the tag, made even, that all pages begin with, for tests that start below the wrap; None:
        each page begins with its own."""
        if any(not 0 <= page < pages for page in reserved):
            raise KizamiError(f"reserved pages {list(reserved)} of {pages}", code="page_tags")
        self.device = torch.device(device)
        self.pages = pages
        self.reserved = tuple(sorted(set(reserved)))
        self.reserved_ids = torch.tensor(self.reserved, dtype=torch.int32, device=self.device)
        self.strict = strict
        self.last = torch.zeros(0, dtype=torch.uint8, device=self.device)
        self._first = first_generation
        # Row p + 1 is page p's. Rows 0 and pages + 1 answer for ids out of range: always even, so no tag equals them.
        # Row 0 also takes the writes for pages that a call must leave alone.
        self._tags = self._fresh(0, pages + 2)
        self._parked = torch.zeros(pages + 2, dtype=torch.bool, device=self.device)
        self._known = torch.zeros(pages + 2, dtype=torch.uint8, device=self.device)
        self._order = torch.zeros(pages + 2, dtype=torch.int32, device=self.device)
        self._counts = torch.zeros(len(Finding), dtype=torch.int64, device=self.device)
        self._mark_known()

    @property
    def current(self) -> torch.Tensor:
        """int32 [pages], the bits of u32: a view, to be read only. Odd: owned, or parked; even: free."""
        return self._tags[1 : self.pages + 1]

    @property
    def parked(self) -> torch.Tensor:
        """bool [pages]: held by nobody, content kept."""
        return self._parked[1 : self.pages + 1]

    @property
    def table(self) -> torch.Tensor:
        """int32 [at least pages + 2]: row `page.clamp(-1, pages) + 1` is the tag of any id whatever, an even one for
        ids out of range."""
        return self._tags

    def find(self, pages: torch.Tensor) -> torch.Tensor:
        """int32, the shape of `pages` (int32 or int64): the tags now, even ones for ids out of range."""
        rows = pages.clamp(-1, self.pages).add_(1)
        return self._tags.index_select(0, rows.reshape(-1)).view(pages.shape)

    def acquire(self, pages: Pages) -> torch.Tensor:
        """int32 [n]: the tags of pages that were just handed to a new owner. A parked page is evicted by that."""
        rows, old, findings = self._look(pages)
        valid = findings == Finding.NONE
        owned = (old & 1).bool() & ~self._parked[rows]
        findings.masked_fill_(valid & (owned | self._repeated(rows)), Finding.DOUBLE_ACQUIRE)
        self._report(findings, pages)
        self._write(rows, valid, (old + 1) | 1)
        return self._tags[rows]

    def release(self, pages: Pages, tags: torch.Tensor | None = None) -> torch.Tensor:
        """uint8 [n] Findings of pages whose last holder is gone, or whose parked content is given up.

        With the holder's `tags` (int32 [n]) a page that is somebody else's by now is left alone (STALE_RELEASE).
        """
        rows, old, findings = self._look(pages)
        valid = self._held_by_caller(rows, old, findings, tags)
        self._report(findings, pages)
        self._write(rows, valid, old + 1)
        return self.last

    def park(self, pages: Pages, tags: torch.Tensor | None = None) -> torch.Tensor:
        """uint8 [n] Findings of pages whose last holder is gone but whose content stays for prefix hits: no new tag."""
        rows, old, findings = self._look(pages)
        findings.masked_fill_(self._parked[rows] & (findings == Finding.NONE), Finding.DOUBLE_RELEASE)
        valid = self._held_by_caller(rows, old, findings, tags)
        self._report(findings, pages)
        self._parked[torch.where(valid, rows, 0)] = valid
        return self.last

    def share(self, pages: Pages) -> torch.Tensor:
        """int32 [n]: the tags of pages that one more holder uses from now on: a prefix hit, parked or not."""
        rows, old, findings = self._look(pages)
        findings.masked_fill_((findings == Finding.NONE) & ((old & 1) == 0), Finding.USE_OF_FREE)
        self._report(findings, pages)
        self._parked[rows] = False
        return old

    def clear(self) -> None:
        """Release all pages that are owned or parked: the pool was emptied."""
        rows = torch.arange(1, self.pages + 1, device=self.device)
        self._write(rows, (self.current & 1).bool() & (self._known[rows] == Finding.NONE), self.current + 1)

    def resize(self, pages: int) -> None:
        """To another number of pages. Those cut off are released, and go on from there if they come back."""
        if pages < self.pages:
            gone = torch.arange(pages + 1, self.pages + 1, device=self.device)
            self._write(gone, (self._tags[gone] & 1).bool(), self._tags[gone] + 1)
        more = pages + 2 - len(self._tags)
        if more > 0:
            self._tags = torch.cat([self._tags, self._fresh(len(self._tags), pages + 2)])
            self._parked = torch.cat([self._parked, self._parked.new_zeros(more)])
            self._known = torch.cat([self._known, self._known.new_zeros(more)])
            self._order = torch.cat([self._order, self._order.new_zeros(more)])
        self.pages = pages
        self._mark_known()

    @property
    def stats(self) -> dict[str, int]:
        """How often each finding was made since the start, by its name in lower case; `none` counts good pages."""
        return {kind.name.lower(): int(n) for kind, n in zip(Finding, self._counts.tolist(), strict=True)}

    def findings(self, pages: Pages) -> list[PageFinding]:
        """What the last call, which was given `pages`, found: for the log. Waits for the device."""
        ids = self._ids(pages)
        bad = self.last.nonzero().reshape(-1)
        where, tags = ids[bad], self.find(ids[bad])
        columns = zip(self.last[bad].tolist(), where.tolist(), tags.tolist(), strict=True)
        return [PageFinding(Finding(kind), page, tag & U32) for kind, page, tag in columns]

    def _fresh(self, start: int, end: int) -> torch.Tensor:
        """int32: the tags that rows start to end begin with."""
        rows = torch.arange(start, end, dtype=torch.int64, device=self.device)
        first = rows * SPREAD if self._first is None else torch.full_like(rows, self._first >> 1)
        return ((first & 0x7FFFFFFF) << 1).to(torch.int32)  # keeps the low 32 bits

    def _mark_known(self) -> None:
        self._known.zero_()
        self._known[0] = Finding.OUT_OF_RANGE
        self._known[self.pages + 1 :] = Finding.OUT_OF_RANGE
        for page in self.reserved:
            if 0 <= page < self.pages:
                self._known[page + 1] = Finding.RESERVED

    def _ids(self, pages: Pages) -> torch.Tensor:
        return torch.as_tensor(pages, dtype=torch.int64, device=self.device).reshape(-1)

    def _look(self, pages: Pages) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, tags and, so far, findings of `pages`."""
        rows = self._ids(pages).clamp(-1, self.pages).add_(1)
        return rows, self._tags[rows], self._known[rows]

    def _repeated(self, rows: torch.Tensor) -> torch.Tensor:
        """bool [n]: all but one of the places of each row that is there twice. No sort, which a GPU would wait for."""
        order = torch.arange(len(rows), dtype=torch.int32, device=self.device)
        self._order[rows] = order
        return self._order[rows] != order

    def _held_by_caller(
        self, rows: torch.Tensor, old: torch.Tensor, findings: torch.Tensor, tags: torch.Tensor | None
    ) -> torch.Tensor:
        """bool [n]: what may be let go; `findings` gets the reason where not, or where it is there twice."""
        findings.masked_fill_((findings == Finding.NONE) & ((old & 1) == 0), Finding.DOUBLE_RELEASE)
        if tags is not None:
            if tags.numel() != len(rows):
                raise KizamiError(f"{tags.numel()} tags for {len(rows)} pages, expected as many", code="page_tags")
            stale = tags.to(self.device).reshape(-1) != old
            findings.masked_fill_((findings == Finding.NONE) & stale, Finding.STALE_RELEASE)
        valid = findings == Finding.NONE
        findings.masked_fill_(valid & self._repeated(torch.where(valid, rows, 0)), Finding.DOUBLE_RELEASE)
        return valid

    def _report(self, findings: torch.Tensor, pages: Pages) -> None:
        self.last = findings
        self._counts.index_add_(0, findings.int(), torch.ones_like(findings, dtype=torch.int64))
        if self.strict and bool(findings.any()):
            at = int(findings.nonzero()[0])
            name = Finding(int(findings[at])).name.lower()
            raise KizamiError(f"page {int(self._ids(pages)[at])}: {name}, expected none", code="page_tags")

    def _write(self, rows: torch.Tensor, valid: torch.Tensor, new: torch.Tensor) -> None:
        """New tags for the rows that are valid; they are parked no longer."""
        rows = torch.where(valid, rows, 0)
        self._tags[rows] = torch.where(valid, new, 0)
        self._parked[rows] = False


def as_u32(tags: torch.Tensor) -> torch.Tensor:
    """int64: tags as the numbers that they stand for, for printing and comparing."""
    return tags.to(torch.int64) & U32

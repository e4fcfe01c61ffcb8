"""In-band stamps: with each write into a page go its page id, the tag that the writer has of it, and the owner.

A tag beside the cache (tags.py) says who owns a page now, not whose bytes are in it. A stamp travels with the bytes: a
late RDMA write for a former owner brings the former owner's stamp, and the reader, who compares the stamps in the page
with its own block table, sees it. So a stamp finds **stale writers** (sglang #24527, vllm #45357), pages which nobody
has filled yet (sglang #30233), and bytes for another page.

Stamps are one record per page, or one per slot (token). Per page, a late write that lands *between* two writes of the
new owner is seen by the second of them, not by the reader: `write` looks at the record that it is about to replace and
returns True where that is not its own. Per slot the reader sees it, too, since the second write replaces its own
slots' records only; it costs 12 bytes a token and layer (1.0 % of a 1152-byte row, 1.8 % of a 656-byte one).

What stamps cannot see:
- a writer that does not stamp;
- a torn write: bytes overwritten without the record beside them (RDMA promises no order within a write; per slot, a
  write that covers part of a slot's row), or a record that arrived before its bytes;
- bytes damaged in place. hashes.py is for these.
"""

from dataclasses import dataclass

import torch

from kizami.formats.errors import KizamiError
from kizami.quantize.page_tags.check import check_shapes
from kizami.quantize.page_tags.tags import U32

UNWRITTEN = -1


@dataclass(frozen=True, slots=True)
class ForeignStamp:
    """The first wrong record of a page in a request's table: what the table has, and what the page says about who
    filled it (page None: nobody). Tags are u32."""

    request: int
    position: int
    page: int
    tag: int
    stamped_page: int | None
    stamped_tag: int
    stamped_owner: int


class Stamps:
    """The records of a pool: int32 [pages, per_page, 3] of page, tag, owner, to lie beside the payload in whatever
    moves it. per_page: 1, or the slots of a page."""

    def __init__(self, pages: int, per_page: int = 1, *, device: torch.device | str = "cpu") -> None:
        self.per_page = per_page
        self._all = torch.full((pages + 1, per_page, 3), UNWRITTEN, dtype=torch.int32, device=device)
        self.records = self._all[:pages]  # behind them one that takes the writes for pages which do not exist

    def write(
        self,
        pages: torch.Tensor,
        tags: torch.Tensor,
        owners: torch.Tensor,
        first: torch.Tensor | None = None,
        end: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stamp slots [first, end) of each page, with the write of their payload; without them, the whole page.

        All int [n]; no page twice, but for ids out of range: these, the padding of a slot mapping, are left out.
        Returns bool [n]: True where a page that is continued (first > 0) held, in the slot before, or in its one
        record, a stamp that is not the writer's: somebody else wrote in between. KizamiError "page_tags" for other
        shapes.
        """
        for name, each in (("tags", tags), ("owners", owners), ("first", first), ("end", end)):
            if each is not None and each.shape != pages.shape:
                raise KizamiError(f"{name} {list(each.shape)}, expected {list(pages.shape)}", code="page_tags")
        stamp = torch.stack([pages.int(), tags.int(), owners.int()], dim=-1)[:, None]
        exists = (pages >= 0) & (pages < len(self.records))
        rows = torch.where(exists, pages.long(), len(self.records))
        old = self._all[rows]
        bad = torch.zeros(len(pages), dtype=torch.bool, device=old.device)
        inside = torch.ones(old.shape[:2], dtype=torch.bool, device=old.device)
        if first is not None:
            first = torch.where(exists, first, 0)
            before = (first.long() - 1).clamp(min=0) if self.per_page > 1 else torch.zeros_like(first, dtype=torch.long)
            bad = (
                (old[torch.arange(len(pages), device=old.device), before] != stamp[:, 0]).any(-1) & (first > 0) & exists
            )
        if self.per_page > 1:
            slot = torch.arange(self.per_page, device=old.device)
            if first is not None:
                inside &= slot >= first[:, None]
            if end is not None:
                inside &= slot < end[:, None]
        self._all[rows] = torch.where(inside[..., None], stamp, old)
        return bad

    def check(
        self,
        pages: torch.Tensor,
        tags: torch.Tensor,
        tokens: torch.Tensor,
        page_size: int,
        owners: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """bool [R], True for a request to abort: a slot that it will read is not stamped with its page and tag.

        pages, tags: int32 [R, P], its block table. tokens: int [R], how many it reads; more than P pages hold are not
        there. page_size: tokens of a page. KizamiError "page_tags" for other shapes, or a page of other slots than the
        records have. owners: int32 [R, P], who must have filled each page (of a shared page, not the reader); None: not
        compared, the tag names the owner's time.
        """
        bad = self._bad(pages, tags, tokens, page_size, owners).flatten(1).any(1)
        return bad | (tokens > pages.shape[1] * page_size)

    def mismatches(
        self,
        pages: torch.Tensor,
        tags: torch.Tensor,
        tokens: torch.Tensor,
        page_size: int,
        owners: torch.Tensor | None = None,
    ) -> list[ForeignStamp]:
        """What `check` goes by, one for each wrong page; a row that is longer than the table has the page -1 behind its
        end. Waits for the device."""
        bad = self._bad(pages, tags, tokens, page_size, owners)
        rows, places = bad.any(-1).nonzero(as_tuple=True)
        slots = bad[rows, places].int().argmax(-1)
        ids = pages[rows, places]
        found = self._records_of(ids)[torch.arange(len(rows), device=bad.device), slots]
        columns = zip(
            rows.tolist(), places.tolist(), ids.tolist(), tags[rows, places].tolist(), found.tolist(), strict=True
        )
        foreign = [
            ForeignStamp(row, place, page, tag & U32, None if was < 0 else was, was_tag & U32, owner)
            for row, place, page, tag, (was, was_tag, owner) in columns
        ]
        width = pages.shape[1]
        beyond = (tokens > width * page_size).nonzero().reshape(-1).tolist()
        return foreign + [ForeignStamp(row, width, -1, 0, None, UNWRITTEN & U32, UNWRITTEN) for row in beyond]

    def _records_of(self, pages: torch.Tensor) -> torch.Tensor:
        """int32 [..., per_page, 3]; ids out of range get a record that is not theirs."""
        return self.records[pages.long().clamp(0, len(self.records) - 1)]

    def _bad(
        self,
        pages: torch.Tensor,
        tags: torch.Tensor,
        tokens: torch.Tensor,
        page_size: int,
        owners: torch.Tensor | None,
    ) -> torch.Tensor:
        """bool [R, P, per_page]."""
        check_shapes(pages, tags, tokens, None)
        if owners is not None and owners.shape != pages.shape:
            raise KizamiError(f"owners {list(owners.shape)}, expected {list(pages.shape)}", code="page_tags")
        if page_size < 1 or self.per_page not in (1, page_size):
            found = f"pages of {page_size} tokens, and {self.per_page} stamps a page"
            raise KizamiError(f"{found}, expected one, or one for each token", code="page_tags")
        records = self._records_of(pages)
        bad = records[..., 0] != pages[..., None]
        bad |= ((pages < 0) | (pages >= len(self.records)))[..., None]
        bad |= records[..., 1] != tags[..., None]
        if owners is not None:
            bad |= records[..., 2] != owners[..., None]
        step = page_size // self.per_page  # tokens that one record stands for
        start = torch.arange(pages.shape[1] * self.per_page, device=bad.device).view(-1, self.per_page) * step
        return bad & (start < tokens[:, None, None])

"""The check before a step: does every page that the step will read still carry the tag that its holder has of it?

One batched operation for all requests: a gather and some ten elementwise kernels, whatever the number of requests, and
no wait for the device; the caller waits once, when it reads the answer. It stands beside the attention kernel, not in
it. Tags, what they see and what not: tags.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kizami.formats.errors import KizamiError
from kizami.quantize.page_tags.tags import U32, PageTags


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A page that must not be read: the request's row, the place in its table, the page there, the tag it was captured
    with and the page's tag now (u32; even: free). A page that does not exist has the tag None."""

    request: int
    position: int
    page: int
    expected: int
    found: int | None


def check(
    tags: PageTags,
    pages: torch.Tensor,
    captured: torch.Tensor,
    lengths: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> torch.Tensor:
    """bool [R], True for a request to abort: one of its pages has not the tag that was captured, is free, or is none.

    pages: int32 or int64 [R, P], rows padded with anything. captured: int32 [R, P]. lengths: int [R], pages of each row
    that the step reads, more than P of which are not there; None for all P. first: int [R], the first of them, for a
    window; None for 0. Reserved pages pass. KizamiError "page_tags" for other shapes, or tags that are not int32.
    """
    abort = _bad(tags, pages, captured, lengths, first).any(dim=1)
    return abort if lengths is None else abort | (lengths > pages.shape[1])


def check_pages(
    tags: PageTags, pages: torch.Tensor, captured: torch.Tensor, request: torch.Tensor, requests: int
) -> torch.Tensor:
    """bool [requests], the same for a flat list of just the pages that a step will read (the top-k of sparse attention,
    or ragged tables): pages, captured, request (int64, the row of each, below `requests`) are [N]. KizamiError as
    `check`."""
    if pages.ndim != 1 or request.shape != pages.shape:
        found = f"pages {list(pages.shape)} and request {list(request.shape)}"
        raise KizamiError(f"{found}, expected [N] and [N]", code="page_tags")
    check_captured(pages, captured)
    bad = _bad_tags(tags, pages, captured)
    return torch.zeros(requests, dtype=torch.int32, device=bad.device).index_add_(0, request, bad.int()) > 0


def mismatches(
    tags: PageTags,
    pages: torch.Tensor,
    captured: torch.Tensor,
    lengths: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> list[Mismatch]:
    """What `check` with the same arguments goes by, for the log; a row that is longer than the table has the page -1
    behind its end. Waits for the device: to be called if it failed."""
    rows, places = _bad(tags, pages, captured, lengths, first).nonzero(as_tuple=True)
    ids = pages[rows, places]
    columns = zip(
        rows.tolist(), places.tolist(), ids.tolist(), captured[rows, places].tolist(), tags.find(ids).tolist(),
        strict=True,
    )  # fmt: skip
    found = [
        Mismatch(row, place, page, expected & U32, (found & U32) if 0 <= page < tags.pages else None)
        for row, place, page, expected, found in columns
    ]
    width = pages.shape[1]
    beyond = [] if lengths is None else (lengths > width).nonzero().reshape(-1).tolist()
    return found + [Mismatch(row, width, -1, 0, None) for row in beyond]


def check_shapes(
    pages: torch.Tensor, captured: torch.Tensor, lengths: torch.Tensor | None, first: torch.Tensor | None
) -> None:
    """What torch would broadcast in silence, or compare as other numbers. Reads no values. KizamiError "page_tags"."""
    if pages.ndim != 2:
        raise KizamiError(f"pages {list(pages.shape)}, expected [R, P]", code="page_tags")
    check_captured(pages, captured)
    for name, each in (("lengths", lengths), ("first", first)):
        if each is not None and (each.shape != pages.shape[:1] or each.dtype not in (torch.int32, torch.int64)):
            said = f"{name} {each.dtype} {list(each.shape)}, expected int32 or int64 {list(pages.shape[:1])}"
            raise KizamiError(said, code="page_tags")


def check_captured(pages: torch.Tensor, captured: torch.Tensor) -> None:
    if pages.dtype not in (torch.int32, torch.int64):
        raise KizamiError(f"pages are {pages.dtype}, expected int32 or int64", code="page_tags")
    if captured.shape != pages.shape or captured.dtype != torch.int32:
        found = f"captured tags {captured.dtype} {list(captured.shape)} of pages {list(pages.shape)}"
        raise KizamiError(f"{found}, expected int32 of the same shape", code="page_tags")


def _bad_tags(tags: PageTags, pages: torch.Tensor, captured: torch.Tensor) -> torch.Tensor:
    found = tags.find(pages)
    bad = found != captured
    bad |= found.bitwise_and_(1) == 0  # a holder that captured the tag of a free page has no page, either
    for page in tags.reserved:  # one in both engines
        bad &= pages != page
    return bad


def _bad(
    tags: PageTags,
    pages: torch.Tensor,
    captured: torch.Tensor,
    lengths: torch.Tensor | None,
    first: torch.Tensor | None,
) -> torch.Tensor:
    check_shapes(pages, captured, lengths, first)
    bad = _bad_tags(tags, pages, captured)
    if lengths is not None or first is not None:
        place = torch.arange(pages.shape[1], dtype=torch.int32, device=pages.device)
        if lengths is not None:
            bad &= place < lengths[:, None]
        if first is not None:
            bad &= place >= first[:, None]
    return bad


class BlockTables:
    """What up to R requests hold: `pages` and `tags` int32 [R, P], `lengths` int32 [R], the pages of each row."""

    def __init__(self, requests: int, pages: int, *, device: torch.device | str = "cpu") -> None:
        if pages < 1:
            raise KizamiError(f"tables of {pages} pages, expected one at least", code="page_tags")
        self.pages = torch.zeros(requests, pages, dtype=torch.int32, device=device)
        self.tags = torch.zeros(requests, pages, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(requests, dtype=torch.int32, device=device)

    def extend(self, row: int, pages: torch.Tensor | Sequence[int], tags: torch.Tensor) -> None:
        """Append pages [n] with the tags [n] that `acquire` or `share` gave for them."""
        if row < 0 or len(tags) != len(pages):
            raise KizamiError(f"row {row}: {len(tags)} tags for {len(pages)} pages, expected as many", code="page_tags")
        start = int(self.lengths[row])
        end = start + len(pages)
        if end > self.pages.shape[1]:
            raise KizamiError(f"request {row} holds {end} pages, expected at most {self.pages.shape[1]}", code="pages")
        self.pages[row, start:end] = torch.as_tensor(pages, dtype=torch.int32, device=self.pages.device)
        self.tags[row, start:end] = tags
        self.lengths[row] = end

    def append(self, rows: torch.Tensor, pages: torch.Tensor, tags: torch.Tensor) -> None:
        """One page more for each of some rows, none of them twice: what a decode step adds. No wait for the device: a
        row that is full already grows beyond the table, and every check aborts it. It keeps its pages; the one that did
        not fit is the caller's to release."""
        places = self.lengths[rows].long()
        full = places >= self.pages.shape[1]
        places = places.clamp(max=self.pages.shape[1] - 1)
        self.pages[rows, places] = torch.where(full, self.pages[rows, places], pages.to(torch.int32))
        self.tags[rows, places] = torch.where(full, self.tags[rows, places], tags)
        self.lengths[rows] += 1

    def clear(self, rows: torch.Tensor | int) -> None:
        """The requests of `rows` are gone: zero pages."""
        self.lengths[rows] = 0

    def held(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages and tags of one row, int32 [n]: what its release is called with."""
        n = int(self.lengths[row])
        return self.pages[row, :n], self.tags[row, :n]

    def check(self, tags: PageTags, first: torch.Tensor | None = None) -> torch.Tensor:
        """bool [R]: `check` of all rows."""
        return check(tags, self.pages, self.tags, self.lengths, first)

    def mismatches(self, tags: PageTags, first: torch.Tensor | None = None) -> list[Mismatch]:
        """What a check that failed went by."""
        return mismatches(tags, self.pages, self.tags, self.lengths, first)

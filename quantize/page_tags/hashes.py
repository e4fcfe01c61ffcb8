"""A 64-bit hash of what is in a page: finds bytes that were overwritten or damaged, whoever did it. torch, vectorised.

The hash of a row (one token's bytes) is a splitmix64 finaliser of the sum, over its 64-bit words, of the finaliser of
word + (place + 1) * GOLDEN; the row's slot goes into the last step. A page's hash is the sum of its rows' hashes. So it
depends on every bit and on where it stands (two words or two rows exchanged give another hash), not on which page the
bytes are in: it survives a transfer. Being a sum, it is carried on when a token is appended, without reading the page.

Odds that a change goes unseen: 2^-64 a page for changes that do not know of the hash. It is no defence against those
that do. It sees no wrong content that was wrong when it was hashed (a wrong prefix hit, a kernel that wrote nonsense).
Cost: one read of all that is checked, as much traffic as attention itself; so check where pages arrive (a transfer), or
full pages only and some at a time. Only tags are cheap enough for every step.

Layouts must be token-major (a row's bytes together) and rows a multiple of 8 bytes: 1152, 576, 656 are. An index-K page
(64 rows of codes, then 64 scales) is hashed as one row of 8448 bytes when it is full.
"""

import torch

from kizami.formats.errors import KizamiError

GOLDEN = 0x9E3779B97F4A7C15


def row_hashes(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """int64 [...]: the hashes of rows uint8 [..., bytes], bytes a multiple of 8, at slots int [...] of their page."""
    if rows.shape[-1] % 8:
        raise KizamiError(f"rows of {rows.shape[-1]} bytes, expected a multiple of 8", code="page_tags")
    dense = rows.contiguous()  # which one row of a wider tensor is, whatever its stride
    if dense.storage_offset() % 8 or any(stride % 8 for stride in dense.stride()[:-1]):
        dense = rows.clone(memory_format=torch.contiguous_format)
    words = dense.view(torch.int64)
    places = torch.arange(1, words.shape[-1] + 1, dtype=torch.int64, device=rows.device).mul_(_as_int64(GOLDEN))
    total = _finalise(words + places).sum(-1)
    return _finalise(total.add_((slots.to(torch.int64) + 1).mul_(_as_int64(GOLDEN))))


def page_hashes(pool: torch.Tensor, pages: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    """int64 [N]: the hashes of the first `filled` (int [N]) rows of pages (int [N]) of a pool uint8 [pages, slots,
    bytes]."""
    slots = torch.arange(pool.shape[1], device=pool.device)
    hashes = row_hashes(pool[pages.long()], slots.expand(len(pages), -1))
    return hashes.masked_fill_(slots >= filled[:, None], 0).sum(-1)


class PageHashes:
    """The hash that each page ought to have: `sums` int64 [pages], over its first `filled` int32 [pages] rows.

    Ids out of range (the padding of a slot mapping) are left out of what is written, and are bad in a check.
    """

    def __init__(self, pages: int, slots: int, *, device: torch.device | str = "cpu") -> None:
        if pages < 1 or slots < 1:
            raise KizamiError(f"{pages} pages of {slots} slots, expected one at least", code="page_tags")
        self.slots = slots
        self.pages = pages
        self._sums = torch.zeros(pages + 1, dtype=torch.int64, device=device)  # the last one takes what is left out
        self._filled = torch.zeros(pages + 1, dtype=torch.int32, device=device)

    @property
    def sums(self) -> torch.Tensor:
        return self._sums[: self.pages]

    @property
    def filled(self) -> torch.Tensor:
        return self._filled[: self.pages]

    def _rows(self, pages: torch.Tensor, pool: torch.Tensor | None = None) -> torch.Tensor:
        """Where their sums are. KizamiError "page_tags" for a mask in place of ids, or a pool of other pages."""
        if pages.dtype not in (torch.int32, torch.int64):
            raise KizamiError(f"pages are {pages.dtype}, expected int32 or int64", code="page_tags")
        if pool is not None and tuple(pool.shape[:2]) != (self.pages, self.slots):
            said = f"a pool {list(pool.shape)}, expected {self.pages} pages of {self.slots} slots"
            raise KizamiError(said, code="page_tags")
        return torch.where((pages >= 0) & (pages < self.pages), pages.long(), self.pages)

    def reset(self, pages: torch.Tensor) -> None:
        """For pages that were just acquired: empty."""
        self._sums[self._rows(pages)] = 0
        self._filled[self._rows(pages)] = 0

    def append(self, pages: torch.Tensor, rows: torch.Tensor) -> None:
        """Rows uint8 [n, bytes] were written into the next slot of pages int64 [n], none of them twice. A page that was
        full before is bad from then on."""
        ids = self._rows(pages)
        self._sums[ids] += row_hashes(rows, self._filled[ids])
        self._filled[ids] += 1

    def take(self, pool: torch.Tensor, pages: torch.Tensor, filled: torch.Tensor) -> None:
        """Hash the first `filled` rows as they are now: of pages that were written in one go, such as a prefill's."""
        ids = self._rows(pages, pool)
        self._sums[ids] = page_hashes(pool, pages.clamp(0, self.pages - 1), filled)
        self._filled[ids] = filled.to(torch.int32)

    def check(
        self, pool: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor | None = None, *, full_only: bool = False
    ) -> torch.Tensor:
        """bool [N], True for pages (int64 [N]) whose content is not what was hashed. rows: int [N], how many of each
        the reader will read: a page of which fewer were written is bad, whatever is in it. full_only: pages that still
        grow pass, since a step may be writing into them; leave them out of `pages` to save their reading."""
        ids = self._rows(pages, pool)
        filled = self._filled[ids]
        bad = page_hashes(pool, pages.clamp(0, self.pages - 1), filled) != self._sums[ids]
        bad = bad & (filled == self.slots) if full_only else bad
        bad = bad | (filled > self.slots) | (ids == self.pages)
        return bad if rows is None else bad | (filled < rows)


def _finalise(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's last three steps (Steele, Lea, Flood 2014), on int64 that wraps; changes `x`."""
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_as_int64(0xBF58476D1CE4E5B9))
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_as_int64(0x94D049BB133111EB))
    return x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: torch.Tensor, n: int) -> torch.Tensor:
    """Of the bits as a u64: torch's >> brings in the sign."""
    return (x >> n).bitwise_and_((1 << (64 - n)) - 1)


def _as_int64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value

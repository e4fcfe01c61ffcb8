"""Who owns which page: requests, their block tables, prefix sharing with copy on write. The bytes are in store.py.

    cache = PagedCache([mla_rows(Layout.RAW)] * 61, pages=16, page_size=64)
    cache.add("a")
    cache.append(["a"], [100], [torch.randn(100, 576)] * 61)     # 100 tokens, one tensor per layer
    cache.add("b", share=("a", 80))                              # b begins with a's first 80 tokens, nothing is copied
    cache.append(["a", "b"], [1, 3], [torch.randn(4, 576)] * 61)  # one scatter per layer; a first page is copied for b
    latent = cache.gather(0, ["b"])                              # bfloat16 [83, 576] of layer 0
    cache.free(["a", "b"])

Page 0 is padding, as in SGLang and vLLM: it belongs to nobody, and rows of a block table end in it.

Errors: KizamiError where the state of the cache forbids a call (`kv_cache_full`, `kv_cache_request`), ValueError where
no state would allow it (shapes, dtypes, negative numbers). Either way nothing has changed.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kizami.formats.errors import KizamiError
from kizami.quantize.kv_cache.layouts import Codec
from kizami.quantize.kv_cache.store import PageStore

PADDING = 0


class PageHooks(Protocol):
    """Told of every page that changes hands; kizami.quantize.page_tags.tags.PageTags is one.

    `pages` is int64 [n]. `acquire` is called when pages leave the free list, `share` when a request becomes one more
    holder, both before a byte of them is written or read; what they return, int32 [n], is kept in the holder's table.
    `release` is called with the last holder's tags when nobody holds the pages any more, before they are free. A hook
    that raises leaves the call half done: use that for tests.
    """

    def acquire(self, pages: torch.Tensor) -> torch.Tensor: ...
    def share(self, pages: torch.Tensor) -> torch.Tensor: ...
    def release(self, pages: torch.Tensor, tags: torch.Tensor) -> object: ...


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Of R requests: pages int32 [R, P], rows end in page 0; held int32 [R], the pages of each; tokens int32 [R], its
    tokens; tags int32 [R, P] as the hooks gave them, 0 at the padding, or None without hooks."""

    pages: torch.Tensor
    held: torch.Tensor
    tokens: torch.Tensor
    tags: torch.Tensor | None


@dataclass(slots=True)
class _Held:
    length: int = 0
    pages: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)


class PagedCache(torch.nn.Module):
    """A paged KV cache of `pages` physical pages (page 0 is padding) of `page_size` tokens, one codec per layer.

    Bookkeeping is on the host, bytes are on `device`; a step is one scatter per layer, whatever the requests.
    Nothing is evicted: a full cache refuses, and its user decides whom to preempt. Not for several threads at once.
    """

    def __init__(
        self,
        codecs: Sequence[Codec],
        *,
        pages: int,
        page_size: int = 64,
        device: torch.device | str = "cpu",
        hooks: PageHooks | None = None,
    ) -> None:
        super().__init__()
        self.store = PageStore(codecs, pages=pages, page_size=page_size, device=device)
        if getattr(hooks, "pages", pages) != pages:
            raise ValueError(f"hooks for {getattr(hooks, 'pages', None)} pages, expected {pages}")
        if tuple(getattr(hooks, "reserved", (PADDING,))) != (PADDING,):
            raise ValueError(f"hooks leave out pages {getattr(hooks, 'reserved', None)}, expected ({PADDING},)")
        self.hooks = hooks
        self._free = list(range(pages - 1, PADDING, -1))  # the page freed last is handed out first
        self._holders = [0] * pages
        self._requests: dict[Hashable, _Held] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def length(self, request: Hashable) -> int:
        """Tokens of a request."""
        return self._held(request).length

    def holders(self, page: int) -> int:
        """How many requests have this page in their tables."""
        return self._holders[page]

    def add(self, request: Hashable, *, share: tuple[Hashable, int] | None = None) -> None:
        """A new request, empty or, with share = (other, n), beginning with the first n tokens of another.

        Pages are shared, the last one too if n ends inside it: whoever appends to a page with several holders gets a
        copy first. Raises KizamiError if the request is there already, or the other has fewer tokens.
        """
        if request in self._requests:
            raise KizamiError(f"request {request!r} is there already, expected a new one", code="kv_cache_request")
        held = _Held()
        if share is not None:
            other, held.length = self._held(share[0]), share[1]
            if type(held.length) is not int or not 0 <= held.length <= other.length:
                message = f"{share[1]} tokens of request {share[0]!r} to share, expected 0 to {other.length}"
                raise KizamiError(message, code="kv_cache_request")
            held.pages = other.pages[: self._pages_for(held.length)]
            held.tags = self._tags("share", held.pages)
            for page in held.pages:
                self._holders[page] += 1
        self._requests[request] = held

    def allocate(self, requests: Sequence[Hashable], tokens: Sequence[int]) -> torch.Tensor:
        """int64 [sum(tokens)]: the slots of `tokens[i]` new tokens of `requests[i]`, in this order, now theirs.

        They hold old bytes until `store.write` is called for every layer; `append` does both. A shared last page is
        replaced by a copy. Raises KizamiError if there are too few pages for all of them.
        """
        held = self._distinct(requests)
        if len(tokens) != len(held) or any(n < 0 for n in tokens):
            raise ValueError(f"tokens {list(tokens)[:9]} of {len(held)} requests, expected one number >= 0 for each")
        grow = [(h, n) for h, n in zip(held, tokens, strict=True) if n]
        # Two requests with the same partial page: the first to append leaves it, and the last need not copy.
        sharing = Counter(h.pages[-1] for h, _ in grow if h.length % self.store.page_size)
        copies = sum(min(n, self._holders[page] - 1) for page, n in sharing.items())
        new = [self._pages_for(h.length + n) - len(h.pages) for h, n in grow]
        self._refuse_if_full(copies + sum(new))
        copied = []
        for (h, _), more in zip(grow, new, strict=True):
            copied += self._leave_shared_page(h)
            h.pages += self._take(more)
        self._capture([h for h, _ in grow])
        for shared, own in copied:
            self.store.copy_page(shared, own)
        slots = [self._slots(h, h.length, h.length + n) for h, n in grow]
        for h, n in grow:
            h.length += n
        return torch.cat(slots).to(self.store.device) if slots else torch.zeros(0, dtype=torch.int64)

    def append(self, requests: Sequence[Hashable], tokens: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        """Allocate, and write values[layer] [sum(tokens), width] in every layer."""
        shapes = [(sum(tokens), codec.width) for codec in self.store.codecs]
        if [tuple(v.shape) for v in values] != shapes:
            found = [list(v.shape) for v in values]
            raise ValueError(f"values {found[:3]} ({len(found)} layers), expected {shapes[:3]} ({len(shapes)} layers)")
        for codec, part in zip(self.store.codecs, values, strict=True):
            codec.encode(part[:0])  # refuses a wrong dtype before anything has changed
        slots = self.allocate(requests, tokens)
        for layer, part in enumerate(values):
            self.store.write(layer, slots, part)

    def slots(self, requests: Sequence[Hashable]) -> torch.Tensor:
        """int64 [all their tokens]: where the tokens of the requests are, one request after the other."""
        parts = [self._slots(held, 0, held.length) for held in map(self._held, requests)]
        return torch.cat(parts).to(self.store.device) if parts else torch.zeros(0, dtype=torch.int64)

    def gather(self, layer: int, requests: Sequence[Hashable], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Values [all their tokens, width] of one layer, one request after the other; `length` says where each ends."""
        return self.store.read(layer, self.slots(requests), dtype)

    def tables(self, requests: Sequence[Hashable]) -> Tables:
        """What an attention kernel and a check of page tags read."""
        rows = [self._held(request) for request in requests]
        counts = [[len(row.pages), row.length] for row in rows]
        held, tokens = torch.tensor(counts, dtype=torch.int32, device=self.store.device).reshape(-1, 2).unbind(1)
        tags = None if self.hooks is None else self._padded([row.tags for row in rows])
        return Tables(self._padded([row.pages for row in rows]), held, tokens, tags)

    def free(self, requests: Sequence[Hashable]) -> None:
        """The requests are gone; pages nobody else holds are free. Raises KizamiError for one that is not there, hence
        for a second free, or a request named twice."""
        for held in self._distinct(requests):
            self._let_go(held.pages, held.tags)
        for request in requests:
            del self._requests[request]

    def _held(self, request: Hashable) -> _Held:
        try:
            return self._requests[request]
        except KeyError:
            message = f"request {request!r} is not in the cache, which has {len(self._requests)} requests"
            hint = "add it first; a request that was freed is gone"
            raise KizamiError(message, code="kv_cache_request", hint=hint) from None

    def _distinct(self, requests: Sequence[Hashable]) -> list[_Held]:
        if len(set(requests)) != len(requests):
            twice = Counter(requests).most_common(1)[0][0]
            raise KizamiError(f"request {twice!r} is there twice, expected once", code="kv_cache_request")
        return [self._held(request) for request in requests]

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.store.page_size)

    def _slots(self, held: _Held, start: int, end: int) -> torch.Tensor:
        """int64 [end - start] on the host."""
        size = self.store.page_size
        first = start // size
        pages = torch.tensor(held.pages[first : self._pages_for(end)], dtype=torch.int64)
        return (pages[:, None] * size + torch.arange(size)).flatten()[start - first * size : end - first * size]

    def _refuse_if_full(self, pages: int) -> None:
        if pages > len(self._free):
            message = f"{pages} pages needed, {len(self._free)} of {self.store.pages - 1} are free"
            raise KizamiError(message, code="kv_cache_full", hint="free a request, or build the cache with more pages")

    def _take(self, count: int) -> list[int]:
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def _leave_shared_page(self, held: _Held) -> list[tuple[int, int]]:
        """A partial last page with several holders is given up for one of its own: [(shared, own)], to be copied."""
        if held.length % self.store.page_size == 0 or self._holders[held.pages[-1]] == 1:
            return []
        shared = held.pages.pop()
        del held.tags[-1:]
        self._holders[shared] -= 1
        held.pages += self._take(1)
        return [(shared, held.pages[-1])]

    def _let_go(self, pages: list[int], tags: list[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
        last = [i for i, page in enumerate(pages) if self._holders[page] == 0]
        if self.hooks is not None and last:
            kept = torch.tensor([tags[i] for i in last], dtype=torch.int32)
            self.hooks.release(self._ids([pages[i] for i in last]), kept.to(self.store.device))
        self._free += [pages[i] for i in reversed(last)]

    def _capture(self, grown: list[_Held]) -> None:
        """Tags of the pages that are new in these tables, in one call."""
        if self.hooks is None:
            return
        tags = self._tags("acquire", [page for held in grown for page in held.pages[len(held.tags) :]])
        for held in grown:
            more = len(held.pages) - len(held.tags)
            held.tags += tags[:more]
            tags = tags[more:]

    def _tags(self, event: str, pages: list[int]) -> list[int]:
        if self.hooks is None or not pages:
            return []
        call = self.hooks.acquire if event == "acquire" else self.hooks.share
        return [int(tag) for tag in call(self._ids(pages)).tolist()]

    def _ids(self, pages: list[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.store.device)

    def _padded(self, rows: list[list[int]]) -> torch.Tensor:
        longest = max((len(row) for row in rows), default=0)
        padded = [row + [0] * (longest - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.int32).reshape(len(rows), longest).to(self.store.device)

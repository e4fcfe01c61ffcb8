"""Page tags for SGLang's page allocator: attached to a live allocator, no subclass, nothing of SGLang imported.

Written for SGLang 0.5.23, python/sglang/srt/mem_cache/allocator/ (paged.py, and token.py for pages of one token). Every
tensor-parallel rank has an allocator of its own, so every rank has tags of its own: agree on the answer (agreement.py).

Where it hooks in:
- acquire: `alloc`, `alloc_extend`, `alloc_decode` take the head of `free_pages`; where they must, they first merge
  staged pages into it (`merge_and_sort_free`). How many they took is the difference in its length, known on the host:
  no wait for the device.
- release: `_release_page_ids`, which frees reach only after `free_group_end`; pages staged for a later merge are free.
  TokenToKVPoolAllocator has none: there `free`, outside a free group. Then `clear` and `resize`.
- share: radix-cache nodes own their pages, which stay acquired while a node holds them: on a prefix hit only capture.
- capture and check: `pages_of(req_to_token, ...)` when a request's row was written, and again before the forward pass,
  at the end of batch building; under PD where the prebuilt batch is taken over.

Not for the hybrid allocators (swa.py, unified_*.py, hisparse.py): they map one id to another behind this interface.
"""

from collections.abc import Callable
from typing import Any

import torch

from kizami.formats.errors import KizamiError
from kizami.quantize.page_tags.tags import PageTags

PAGED = ("alloc", "alloc_extend", "alloc_decode", "_release_page_ids", "clear", "merge_and_sort_free", "resize")
TOKEN = ("alloc", "free", "clear", "merge_and_sort_free", "resize")


def new_tags(allocator: Any, **settings: Any) -> PageTags:
    """Tags for its pages 1 to num_pages, and page 0, which padded tokens write to; on its device."""
    return PageTags(_pages(allocator) + 1, reserved=(0,), device=allocator.device, **settings)


def pages_of(
    req_to_token: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages int32 [R, P] and their number int32 [R] of the requests `rows`, which hold `tokens` (int [R]) tokens each.

    req_to_token: int32 [max requests, max tokens], slots. Read afresh for each check: it is the table which the step
    will go by, and it is what may have gone wrong.
    """
    return req_to_token[rows, ::page_size] // page_size, ((tokens + page_size - 1) // page_size).to(torch.int32)


class Attached:
    """What `attach` returns. `detach` puts the allocator back as it was."""

    def __init__(self, allocator: Any, tags: PageTags) -> None:
        self.tags = tags
        self._allocator = allocator
        self._head: torch.Tensor | None = None  # the list that the running call takes its pages from
        self._names = PAGED if hasattr(allocator, "_release_page_ids") else TOKEN
        missing = [name for name in (*self._names, "free_pages", "free_group") if not hasattr(allocator, name)]
        if missing:
            what = f"{type(allocator).__name__} has no {', '.join(missing)}"
            raise KizamiError(f"{what}, expected SGLang's paged or token allocator", code="page_tags")
        if tags.pages != _pages(allocator) + 1 or 0 not in tags.reserved:
            raise KizamiError(
                f"tags for {tags.pages} pages with {list(tags.reserved)} reserved, expected {_pages(allocator) + 1} "
                "with page 0 reserved",
                code="page_tags",
            )
        if any(name in vars(allocator) for name in self._names):
            raise KizamiError("tags are attached to this allocator already", code="page_tags", hint="detach them first")
        self._adopt()
        for name in self._names:
            setattr(allocator, name, self._wrapped(name, getattr(allocator, name)))

    def detach(self) -> None:
        """The tags stay as they are."""
        for name in self._names:
            delattr(self._allocator, name)

    def _adopt(self) -> None:
        """What is not free now is owned."""
        owned = torch.ones(self.tags.pages, dtype=torch.bool, device=self.tags.device)
        owned[list(self.tags.reserved)] = False
        owned[self._allocator.get_all_free_pages()] = False
        self.tags.acquire(owned.nonzero().reshape(-1))

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        if name.startswith("alloc"):
            return lambda *args, **kwargs: self._take(original, *args, **kwargs)
        wrappers: dict[str, Callable[..., Any]] = {
            "_release_page_ids": lambda *pages: self._release(original, pages),
            "free": lambda slots: self._free(original, slots),
            "clear": lambda: self._clear(original),
            "merge_and_sort_free": lambda: self._merge(original),
            "resize": lambda *args, **kwargs: self._resize(original, *args, **kwargs),
        }
        return wrappers[name]

    def _take(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._head = self._allocator.free_pages
        slots = original(*args, **kwargs)
        taken = len(self._head) - len(self._allocator.free_pages)
        if slots is not None and taken:
            self.tags.acquire(self._head[:taken])
        self._head = None
        return slots

    def _merge(self, original: Callable[..., Any]) -> None:
        original()
        self._head = self._allocator.free_pages

    def _release(self, original: Callable[..., Any], pages: tuple[torch.Tensor, ...]) -> None:
        self.tags.release(torch.cat(pages))
        original(*pages)

    def _free(self, original: Callable[..., Any], slots: torch.Tensor) -> None:
        if self._allocator.free_group is None and slots.numel():
            self.tags.release(slots)
        original(slots)

    def _clear(self, original: Callable[..., Any]) -> None:
        original()
        self.tags.clear()

    def _resize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)  # clears
        self.tags.resize(_pages(self._allocator) + 1)


def attach(allocator: Any, tags: PageTags) -> Attached:
    """From now on `tags` follow the allocator: what it hands out is acquired, what it takes back is released."""
    return Attached(allocator, tags)


def _pages(allocator: Any) -> int:
    return int(allocator.num_pages if hasattr(allocator, "num_pages") else allocator.size)

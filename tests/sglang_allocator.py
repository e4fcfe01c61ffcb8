"""SGLang's page allocators: the real classes where SGLang lies on the path, and stand-ins that behave like them.

The stand-ins follow SGLang 0.5.23, python/sglang/srt/mem_cache/allocator/{base,paged,token}.py, in the order in which
pages leave and come back, in the deferral of frees and in what merges when; they are written as loops over requests.
The real modules need a dozen names of SGLang's own, which are put in place here: no GPU, no Triton, no server.
"""

import ast
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch


class PagedAllocator:
    """Ids 1 to num_pages; slots of a page are consecutive; page 0 takes the writes of padding."""

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: object, need_sort: bool
    ) -> None:
        self.size, self.page_size, self.device, self.need_sort = size, page_size, device, need_sort
        self.num_pages = size // page_size
        self.clear()

    def clear(self) -> None:
        self.free_pages = torch.arange(1, self.num_pages + 1)
        self.staged_pages: list[torch.Tensor] = []
        self.free_group: list[torch.Tensor] | None = None

    def resize(self, config: Any) -> None:
        self.size = config.max_total_num_tokens
        self.num_pages = self.size // self.page_size
        self.clear()

    def get_all_free_pages(self) -> torch.Tensor:
        return torch.cat((self.free_pages, *self.staged_pages))

    def merge_and_sort_free(self) -> None:
        if self.staged_pages:
            self.free_pages = self.get_all_free_pages().sort().values
            self.staged_pages = []

    def _head(self, pages: int, at_most: int) -> torch.Tensor | None:
        if at_most > len(self.free_pages):
            self.merge_and_sort_free()
        if pages > len(self.free_pages):
            return None
        head, self.free_pages = self.free_pages[:pages], self.free_pages[pages:]
        return head

    def alloc(self, need_size: int) -> torch.Tensor | None:
        head = self._head(need_size // self.page_size, need_size // self.page_size)
        return None if head is None else (head[:, None] * self.page_size + torch.arange(self.page_size)).reshape(-1)

    def _grow(self, before: list[int], after: list[int], last: list[int], at_most: int) -> torch.Tensor | None:
        size = self.page_size
        needed = sum(-(-b // size) - -(-a // size) for a, b in zip(before, after, strict=True))
        head = self._head(needed, at_most)
        if head is None:
            return None
        new, slots = iter(head.tolist()), []
        for start, end, slot in zip(before, after, last, strict=True):
            for place in range(start, end):
                slot = next(new) * size if place % size == 0 else slot + 1
                slots.append(slot)
        return torch.tensor(slots, dtype=torch.int64)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        at_most = extend_num_tokens // self.page_size + len(prefix_lens) + 1
        return self._grow(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), at_most)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        return self._grow((seq_lens - 1).tolist(), seq_lens.tolist(), last_loc.tolist(), len(seq_lens))

    def free(self, free_index: torch.Tensor) -> None:
        if self.free_group is not None:
            self.free_group.append(free_index.clone())
        elif len(free_index):
            self._release_page_ids((free_index // self.page_size).unique())

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        if self.need_sort:
            self.staged_pages.extend(page_ids)
        else:
            self.free_pages = torch.cat((*page_ids, self.free_pages))

    def free_group_begin(self) -> None:
        self.free_group = []

    def free_group_end(self) -> None:
        pending, self.free_group = self.free_group, None
        if pending:
            self.free(torch.cat(pending))


class TokenAllocator:
    """Pages of one token; what is freed waits in `release_pages` where `need_sort`."""

    def __init__(self, size: int, dtype: torch.dtype, device: str, kvcache: object, need_sort: bool) -> None:
        self.size, self.page_size, self.device, self.need_sort = size, 1, device, need_sort
        self.clear()

    def clear(self) -> None:
        self.free_pages = torch.arange(1, self.size + 1)
        self.release_pages = self.free_pages[:0]
        self.free_group: list[torch.Tensor] | None = None

    def resize(self, config: Any) -> None:
        self.size = config.max_total_num_tokens
        self.clear()

    def get_all_free_pages(self) -> torch.Tensor:
        return torch.cat((self.free_pages, self.release_pages))

    def merge_and_sort_free(self) -> None:
        if len(self.release_pages):
            self.free_pages = self.get_all_free_pages().sort().values
            self.release_pages = self.release_pages[:0]

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if self.need_sort and need_size > len(self.free_pages):
            self.merge_and_sort_free()
        if need_size > len(self.free_pages):
            return None
        head, self.free_pages = self.free_pages[:need_size], self.free_pages[need_size:]
        return head

    def free(self, free_index: torch.Tensor) -> None:
        if self.free_group is not None:
            self.free_group.append(free_index.clone())
        elif self.need_sort:
            self.release_pages = torch.cat((self.release_pages, free_index))
        else:
            self.free_pages = torch.cat((self.free_pages, free_index))

    def free_group_begin(self) -> None:
        self.free_group = []

    def free_group_end(self) -> None:
        pending, self.free_group = self.free_group, None
        if pending:
            self.free(torch.cat(pending))


def _module(name: str, **names: object) -> None:
    module = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update(names)
    sys.modules[name] = module


def real_classes() -> tuple[Any, Any] | None:
    """(paged, token) of the SGLang on the path, or None. Of SGLang only these modules and one function are run."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        return None
    srt = Path(spec.origin).parent / "srt"
    tree = ast.parse((srt / "utils" / "common.py").read_text(encoding="utf-8"))
    counts = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "get_num_new_pages"]
    names: dict[str, Any] = {"torch": torch, "Optional": Any}
    for node in counts:
        for argument in node.args.args:
            argument.annotation = None
    exec(compile(ast.Module(list[ast.stmt](counts), []), "get_num_new_pages", "exec"), names)
    platform = types.SimpleNamespace(capabilities=types.SimpleNamespace(supports_triton=False))
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.allocator", "sglang.kernels",
                 "sglang.kernels.ops", "sglang.kernels.ops.memory"):  # fmt: skip
        _module(name)
    _module("sglang.kernels.ops.memory.allocator", alloc_decode_kernel=None, alloc_extend_kernel=None)
    _module("sglang.srt.platforms", current_platform=platform)
    _module(
        "sglang.srt.utils",
        get_bool_env_var=lambda name: True,  # its own debugging asserts are on
        is_hip=lambda: False,
        get_num_new_pages=names["get_num_new_pages"],
        next_power_of_2=None,
    )
    loaded = {}
    for name in ("base", "paged", "token"):
        full = f"sglang.srt.mem_cache.allocator.{name}"
        found = importlib.util.spec_from_file_location(full, srt / "mem_cache" / "allocator" / f"{name}.py")
        assert found is not None
        assert found.loader is not None
        sys.modules[full] = loaded[name] = importlib.util.module_from_spec(found)
        found.loader.exec_module(loaded[name])
    return loaded["paged"].PagedTokenToKVPoolAllocator, loaded["token"].TokenToKVPoolAllocator

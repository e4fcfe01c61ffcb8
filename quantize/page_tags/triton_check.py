"""The check of check.py as one Triton kernel: one pass over the tables where torch makes about ten. Needs Triton.

With TRITON_INTERPRET=1 in the environment before it is imported, Triton runs it on the CPU: that is how it is tested.
"""

import torch
import triton
import triton.language as tl

from kizami.quantize.page_tags.check import check_shapes
from kizami.quantize.page_tags.tags import PageTags

BLOCK = 1024  # places of a table that one program looks at


@triton.jit  # type: ignore[untyped-decorator]
def _check_kernel(  # type: ignore[no-untyped-def]
    table, pages, captured, lengths, first, reserved, abort, known, width, pages_stride, captured_stride,
    RESERVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read = (place < width) & (place < tl.load(lengths + row)) & (place >= tl.load(first + row))
    page = tl.load(pages + row.to(tl.int64) * pages_stride + place, mask=read, other=0)
    held = tl.load(captured + row.to(tl.int64) * captured_stride + place, mask=read, other=0)
    inside = tl.minimum(tl.maximum(page, -1), known) + 1  # rows 0 and known + 1 answer for ids out of range
    tag = tl.load(table + inside, mask=read, other=0)
    bad = read & ((tag != held) | ((tag & 1) == 0))
    for i in range(RESERVED):
        bad = bad & (page != tl.load(reserved + i))
    beyond = tl.load(lengths + row) > width
    if (tl.max(bad.to(tl.int32), axis=0) > 0) | beyond:
        tl.store(abort + row, 1)


def check(
    tags: PageTags,
    pages: torch.Tensor,
    captured: torch.Tensor,
    lengths: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> torch.Tensor:
    """As check.check, to the bit. Rows of `pages` and `captured` must be contiguous, all on the tags' device."""
    check_shapes(pages, captured, lengths, first)
    requests, width = pages.shape
    abort = torch.zeros(requests, dtype=torch.int32, device=pages.device)
    if not requests or not width:
        return abort > 0 if lengths is None else lengths > width
    lengths = torch.full_like(abort, width) if lengths is None else lengths
    first = torch.zeros_like(abort) if first is None else first
    grid = (requests, triton.cdiv(width, BLOCK))
    _check_kernel[grid](
        tags.table, pages, captured, lengths, first, tags.reserved_ids, abort, tags.pages, width,
        pages.stride(0), captured.stride(0), RESERVED=len(tags.reserved), BLOCK=BLOCK,
    )  # fmt: skip
    return abort > 0

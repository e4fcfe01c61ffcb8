"""The Triton kernel of the page check, run by Triton's interpreter on the CPU: to the bit the check of torch.

Triton is no dependency of kizami (its wheel is 286 MB): skipped without it. Where there is a GPU, the same tests run it
compiled.
"""

import importlib.util
import os
import sys

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: `pip install triton`, 286 MB", allow_module_level=True)

if not torch.cuda.is_available():
    if "triton" in sys.modules:  # its own functions were made for compiling by then
        pytest.skip(
            "Triton was imported before it could be told to interpret: run this file alone", allow_module_level=True
        )
    os.environ["TRITON_INTERPRET"] = "1"

from kizami.formats.errors import KizamiError
from kizami.quantize.page_tags import check as plain
from kizami.quantize.page_tags import triton_check
from kizami.quantize.page_tags.tags import PageTags

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("width", [1, 9, 1024, 1025, 2500])
@pytest.mark.parametrize("reserved", [(), (0,), (0, 7)])
def test_the_kernel_is_the_check_of_torch(width: int, reserved: tuple[int, ...]) -> None:
    rng = np.random.default_rng(width)
    tags = PageTags(400, reserved=reserved, first_generation=0xFFFFFFFA, device=DEVICE)
    tags.acquire(torch.arange(400))
    for _ in range(8):  # over the wrap
        tags.release(torch.arange(0, 400, 5))
        tags.acquire(torch.arange(0, 400, 5))
    for dtype in (torch.int32, torch.int64):
        pages = torch.from_numpy(rng.integers(0, 400, (24, width))).to(DEVICE, dtype)
        held = tags.find(pages)
        end = torch.from_numpy(rng.integers(0, width + 1, 24)).to(DEVICE)
        start = torch.from_numpy((end.cpu().numpy() * rng.random(24)).astype(np.int32)).to(DEVICE)
        assert not triton_check.check(tags, pages, held, end, start).any()
        hit = torch.from_numpy(rng.random((24, width)) < 1 / width).to(DEVICE)
        kind = torch.from_numpy(rng.integers(0, 3, (24, width))).to(DEVICE)
        held[hit & (kind == 0)] += 2  # another generation
        held[hit & (kind == 1)] -= 1  # a free page's
        pages[hit & (kind == 2)] = torch.tensor([-1, 400, 2**30], dtype=dtype, device=DEVICE)[width % 3]
        expected = plain.check(tags, pages, held, end, start)
        assert torch.equal(triton_check.check(tags, pages, held, end, start), expected)
        everything = plain.check(tags, pages, held)
        assert torch.equal(triton_check.check(tags, pages, held), everything)
        assert everything.any()


def test_rows_of_a_wider_table_are_read_where_they_are() -> None:
    tags = PageTags(64, device=DEVICE)
    own = tags.acquire(torch.arange(1, 64))
    pages = torch.arange(1, 61, dtype=torch.int32, device=DEVICE).view(6, 10)
    held = own[:60].view(6, 10)
    tags.release([13])
    assert triton_check.check(tags, pages[:, :4], held[:, :4]).tolist() == [False, True, *[False] * 4]
    assert triton_check.check(tags, pages[:, :2], held[:, :2]).tolist() == [False] * 6


def test_a_row_longer_than_the_table_is_an_abort() -> None:
    tags = PageTags(8, device=DEVICE)
    held = tags.acquire([1, 2, 3, 4]).view(2, 2)
    pages = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([2, 3], device=DEVICE)
    assert triton_check.check(tags, pages, held, lengths).tolist() == [False, True]
    assert triton_check.check(tags, pages[:, :0], held[:, :0], lengths).tolist() == [True, True]
    with pytest.raises(KizamiError, match="lengths"):
        triton_check.check(tags, pages, held, lengths[:1])


def test_no_request_and_no_page_is_no_abort() -> None:
    tags = PageTags(4, device=DEVICE)
    none = torch.zeros(3, 0, dtype=torch.int32, device=DEVICE)
    assert triton_check.check(tags, none, none).tolist() == [False] * 3
    assert triton_check.check(tags, none[:0], none[:0]).tolist() == []

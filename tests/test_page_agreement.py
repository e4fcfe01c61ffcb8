"""Two ranks, of which one sees a mismatch: both abort that request, and both go on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kizami.formats.errors import KizamiError
from kizami.quantize.page_tags.agreement import agree

RANK = """
import json, os, sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from kizami.quantize.page_tags.agreement import agree
from kizami.quantize.page_tags.check import BlockTables
from kizami.quantize.page_tags.tags import PageTags

torch.set_num_threads(1)
rank, folder, dies = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "dies"
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2,
                        timeout=timedelta(seconds=20))
tags, tables, alive, seen = PageTags(33), BlockTables(4, 8), [0, 1, 2, 3], []
for row in alive:
    pages = [8 * row + i for i in range(1, 9)]
    tables.extend(row, pages, tags.acquire(pages))
for step in range(6):
    if rank == 1 and step == 2:
        tags.acquire([8 * 2 + 5])  # on this rank alone, request 2 lost a page to somebody else
    if rank == 1 and step == 3 and dies:
        os._exit(3)  # as a crash does; with gloo's threads alive an orderly end may abort
    own = tables.check(tags)
    try:
        abort = agree(own)
    except RuntimeError as error:
        (folder / f"{rank}.json").write_text(json.dumps({"error": type(error).__name__, "step": step}))
        os._exit(4)
    seen.append([own.nonzero().flatten().tolist(), abort.nonzero().flatten().tolist()])
    for row in abort.nonzero().flatten().tolist():
        tags.release(*tables.held(row))  # with its tags: the page that was lost stays with its owner
        tables.clear(row)
        alive.remove(row)
(folder / f"{rank}.json").write_text(json.dumps({"seen": seen, "alive": alive, "stats": tags.stats}))
dist.destroy_process_group()
"""


def ranks(folder: Path, how: str) -> tuple[list[int], list[dict[str, object] | None]]:
    """Exit codes, and what each rank wrote."""
    script = folder / "rank.py"
    script.write_text(RANK, encoding="utf-8")
    command = [sys.executable, str(script)]
    both = [subprocess.Popen([*command, str(rank), str(folder), how], stderr=subprocess.DEVNULL) for rank in (0, 1)]
    try:
        codes = [process.wait(timeout=60) for process in both]
    finally:
        for process in both:
            process.kill()
    files = [folder / f"{rank}.json" for rank in (0, 1)]
    return codes, [json.loads(f.read_text()) if f.exists() else None for f in files]


def test_without_torch_distributed_a_rank_agrees_with_itself() -> None:
    abort = torch.tensor([True, False])
    assert agree(abort) is abort


def test_flags_that_are_no_flags_are_refused() -> None:
    with pytest.raises(KizamiError, match=r"abort flags are torch.float32, expected torch.bool"):
        agree(torch.tensor([0.4]))


@pytest.mark.long
def test_what_one_rank_sees_both_abort_and_both_go_on(tmp_path: Path) -> None:
    codes, (one, other) = ranks(tmp_path, "lives")
    assert codes == [0, 0]
    assert one is not None
    assert other is not None
    assert one["seen"] == [[[], []], [[], []], [[], [2]], [[], []], [[], []], [[], []]]
    assert other["seen"] == [[[], []], [[], []], [[2], [2]], [[], []], [[], []], [[], []]]
    assert one["alive"] == other["alive"] == [0, 1, 3]
    stale = [report["stats"]["stale_release"] for report in (one, other)]  # type: ignore[index]
    assert stale == [0, 1]


@pytest.mark.long
def test_a_rank_that_died_is_an_error_on_the_other_not_a_hang(tmp_path: Path) -> None:
    codes, (one, other) = ranks(tmp_path, "dies")
    assert codes == [4, 3]
    assert one == {"error": "RuntimeError", "step": 3} or one == {"error": "DistBackendError", "step": 3}
    assert other is None

"""benchmarks/page_*.py: which mode sees which fault, no abort without one, and what the check costs."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import page_faults
import page_tag_cost
from page_guards import MODES, Checks
from page_injections import KINDS
from page_simulator import World
from page_traffic import Load

READERS = tuple(kind for kind in KINDS if kind.role == "stale reader")
WRITERS = tuple(kind for kind in KINDS if kind.role in ("stale writer", "missing write"))
OF = {kind.name: kind for kind in KINDS}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_faults, "WARM", 30)
    monkeypatch.setattr(page_faults, "LENGTH", 90)


def all_before(counts: dict[str, dict[str, page_faults.Count]], mode: str) -> bool:
    cells = [row[mode] for row in counts.values()]
    assert sum(cell.harmful for cell in cells) > 0
    return all(cell.before == cell.harmful and cell.late == cell.missed == 0 for cell in cells)


def no_false_abort(steps: int, seed: int) -> dict[str, object]:
    result = page_faults.without_faults(steps, seed)
    assert result["aborts"] == result["refused"] == result["findings"] == result["wrong_reads"] == 0
    assert result["pages_wrapped"] > 0.5 * result["pages"]
    for event in ("preempted", "pages shared", "evicted", "finished", "left"):
        assert result["events"][event] > 0, event
    return result


def test_no_request_is_aborted_without_a_fault_while_generations_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_faults, "STRETCH", 90)
    no_false_abort(360, 0)


def test_a_fence_keeps_the_transfers_of_requests_that_left_out_of_other_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_faults, "LOADS", (Load(left=0.05, remote=0.8),))
    result = page_faults.without_faults(150, 0)
    assert result["aborts"] == result["wrong_reads"] == 0
    assert result["events"]["left"] > 20


@pytest.mark.usefixtures("short")
def test_tags_stop_every_stale_reader_before_it_reads_and_no_stale_writer() -> None:
    counts = page_faults.table(READERS, ("tags",), 1, 3)
    assert all_before(counts, "tags")
    counts |= page_faults.table(WRITERS, ("tags",), 1, 3)
    for kind in WRITERS:
        assert counts[kind.name]["tags"].missed == counts[kind.name]["tags"].harmful
    assert sum(row["tags"].false for row in counts.values()) == 0


@pytest.mark.parametrize("mode", ["stamps", "hashes"])
@pytest.mark.usefixtures("short")
def test_stamps_and_hashes_stop_stale_writers_before_the_read(mode: str) -> None:
    assert all_before(page_faults.table(WRITERS, (mode,), 1, 3), mode)


@pytest.mark.usefixtures("short")
def test_eight_bits_do_not_tell_a_page_that_was_acquired_128_times_in_between() -> None:
    counts = page_faults.table((OF["tag 256 changes old"],), ("tags", "tags u8"), 1, 0)["tag 256 changes old"]
    assert (counts["tags"].before, counts["tags u8"].before) == (1, 0)


def test_the_ledger_sees_one_wrong_cell_of_one_reader() -> None:
    load = Load(left=0.0)
    world = World(load, Checks(load, "none"), 0)
    for _ in range(30):
        world.step()
    world.begin()
    row = int(np.flatnonzero(world.running & (world.length > load.page))[-1])
    page = world.table[row, (world.length[row] - 1) // load.page]
    at = (int(world.length[row]) - 1) % load.page
    assert not world.touched(row)
    readers = set(np.flatnonzero(((world.table == page) & world.running[:, None]).any(1)).tolist())
    world.cells[page, at] ^= 1
    wrong = {r for r in range(load.rows) if world.running[r] and world.wrong_reads(np.array([r]))[0]}
    assert row in wrong <= readers
    world.finish()
    assert set(world.tally.victims.values()) == {world.now}


def test_the_paper_has_kimis_bytes_and_a_fused_check_under_one_percent() -> None:
    paper = page_tag_cost.on_paper(64, 16384, (1, 16, 64))
    assert paper[0]["kv_bytes"] == pytest.approx(64 * 16384 * 70272)
    assert {p["page"] for p in paper} == {1, 16, 64}
    assert all(p["fused_share"] < 0.01 for p in paper)
    assert paper[-1]["eager_share"] > 0.01  # PyTorch's kernels one by one, beside FP8 rows: not what to deploy


def test_a_small_cost_run_has_all_columns() -> None:
    rows = page_tag_cost.measure(2, 256, 8, 3, (1, 64))
    assert [row.page for row in rows] == [1, 64]
    for row in rows:
        assert row.share == pytest.approx(row.check / row.without_p50)
        assert row.with_p50 > row.without_p50
        assert row.hash_all > row.hash_writes > 0
    text = page_tag_cost.report(rows, page_tag_cost.on_paper(2, 256, (1, 64)))
    assert len({line.count("|") for line in text.splitlines()[:4]}) == 1


def test_p95_is_the_sample_that_95_of_100_are_not_above() -> None:
    assert page_tag_cost.Times.of([float(i) for i in range(100, 0, -1)]).p95 == 95


@pytest.mark.long
def test_no_request_is_aborted_in_30_000_steps_without_a_fault() -> None:
    no_false_abort(30_000, 7)


@pytest.mark.long
def test_the_table_of_faults_and_modes() -> None:
    counts = page_faults.table(KINDS, MODES, 8, 100)
    assert all(cell.false == 0 for row in counts.values() for cell in row.values())
    readers, writers = ({kind.name: counts[kind.name] for kind in kinds} for kinds in (READERS, WRITERS))
    for mode in MODES:
        assert mode in ("tags u8", "none", "stamps", "hashes") or all_before(readers, mode)
        assert not ("stamps" in mode or "hashes" in mode) or all_before(writers, mode)
        assert ("hashes" in mode) == (counts["damage in a page"][mode].before > 0)
        for unseen in ("wrong prefix hit", "freed after the check"):
            assert counts[unseen][mode].before == 0

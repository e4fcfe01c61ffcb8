"""The time that `kizami plan` expects: arithmetic on rates, and where the rates come from."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import Run, in_this_process

from kizami.cli import rates as cli_rates
from kizami.cli.rates import Measured, estimate_body, limit_line
from kizami.formats import disk_speed
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.disk_speed import DiskSpeed, read_speed, write_speed
from kizami.formats.errors import KizamiError
from kizami.quantize import machine
from kizami.quantize.estimate import Duration, Rates, Work, duration_of, estimate, static_rates, work_of
from kizami.quantize.machine import Computing
from kizami.quantize.plan import Plan
from kizami.quantize.planner import build_plan
from kizami.quantize.settings import Method, MethodName, Policy

kizami = pytest.fixture(in_this_process)
GB = 1_000_000_000
JOB = Work(packed=600 * GB, moved=100 * GB, read=700 * GB, written=420 * GB)


@pytest.fixture
def plan(tiny_checkpoint: Path) -> Plan:
    return build_plan(Checkpoint.open(tiny_checkpoint), Policy(), Method())


# ---------------------------------------------------------------------------------------------------------- arithmetic


def test_cpu_time_is_packed_and_moved_bytes_by_their_rates() -> None:
    found = duration_of(JOB, Rates(pack=3 * GB, move=5 * GB), 16)
    assert (found.cpu, found.read, found.write) == (220.0, None, None)
    assert (found.seconds, found.limit) == (220.0, "cpu")


@pytest.mark.parametrize(
    ("read", "write", "shared", "seconds", "limit"),
    [
        (10 * GB, 10 * GB, False, 220, "cpu"),
        (2 * GB, 10 * GB, False, 350, "read"),
        (10 * GB, 1 * GB, False, 420, "write"),
        (5 * GB, 4 * GB, False, 220, "cpu"),  # 140 and 105 s, at the same time
        (5 * GB, 4 * GB, True, 245, "read"),  # one after the other
        (10 * GB, 2 * GB, True, 280, "write"),
        (None, 1 * GB, False, 420, "write"),
        (2 * GB, None, True, 350, "read"),
    ],
)
def test_the_slowest_of_three_is_the_limit(
    read: float | None, write: float | None, shared: bool, seconds: float, limit: str
) -> None:
    found = duration_of(JOB, Rates(3 * GB, 5 * GB, read, write, shared), 16)
    assert (found.seconds, found.limit) == (seconds, limit)


def test_equal_times_are_the_cpus() -> None:
    assert Duration(10.0, 10.0, 10.0, shared=False).limit == "cpu"


def test_the_solver_of_gptq_adds_to_the_cpu_alone() -> None:
    rates = Rates(3 * GB, 5 * GB, 7 * GB)
    plain, solved = (duration_of(replace(JOB, solve_operations=n), rates, 4) for n in (0.0, 65e9 * 40))
    assert (solved.cpu - plain.cpu, solved.read) == (10.0, plain.read)


def test_static_rates_grow_with_the_workers() -> None:
    one, many = static_rates("search", 1), static_rates("search", 16)
    assert (many.pack, many.move) == (16 * one.pack, 16 * one.move)
    assert (many.read, many.write, many.measured) == (None, None, False)


def test_the_work_of_a_plan_is_its_source_and_its_files(plan: Plan) -> None:
    work = work_of(plan)
    assert work.written == plan.output.file_bytes
    assert work.read == plan.source_bytes
    scales = sum(step.source_nbytes - step.weight.nbytes for step in plan.steps)
    assert work.packed + work.moved + scales == work.read


def test_measured_rates_change_the_time_and_neither_memory_nor_hash(plan: Plan) -> None:
    before = plan.hash
    slow, fast = (estimate(plan, "search", 2, Rates(rate, rate)) for rate in (1e6, 1e9))
    assert slow.seconds == 1000 * fast.seconds
    assert slow.memory_bytes == fast.memory_bytes == estimate(plan, "search", 2).memory_bytes
    assert plan.hash == before


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def machine_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces every measurement; `calls` says which were made."""
    given: dict[str, Any] = {
        "ready": True, "pack": 1e6, "move": 2e6, "read": DiskSpeed(5e6, 1 << 24, "direct"),
        "write": DiskSpeed(4e6, 1 << 24, "fsync"), "calls": [],
    }  # fmt: skip

    def take(name: str, value: Any) -> Any:
        given["calls"].append(name)
        return value

    monkeypatch.setattr(machine, "is_ready", lambda method: given["ready"])
    monkeypatch.setattr(
        machine, "measure_computing", lambda plan, n: take("cpu", Computing(given["pack"], given["move"], n))
    )
    monkeypatch.setattr(disk_speed, "read_speed", lambda files: take("read", given["read"]))
    monkeypatch.setattr(disk_speed, "write_speed", lambda folder: take("write", given["write"]))
    return given


def test_plan_says_what_limits_the_job(kizami: Run, tiny_checkpoint: Path, machine_of: dict[str, Any]) -> None:
    machine_of |= {"read": DiskSpeed(1e3, 1 << 24, "direct")}
    done = kizami("plan", tiny_checkpoint, "--measure", "always", "--json").json["estimate"]
    assert done["limited_by"] == "read"
    assert done["seconds"] == done["read_seconds"] == pytest.approx(work_of_folder(tiny_checkpoint).read / 1e3)
    assert done["cpu_seconds"] < done["seconds"]
    assert done["write_seconds"] is None
    assert done["rates"] == {
        "measured": True, "pack_bytes_per_second": 1e6, "move_bytes_per_second": 2e6, "read_bytes_per_second": 1e3,
        "read_how": "direct", "write_bytes_per_second": None, "write_how": None, "same_file_system": False,
    }  # fmt: skip
    assert machine_of["calls"] == ["cpu", "read"]


def work_of_folder(folder: Path) -> Work:
    return work_of(build_plan(Checkpoint.open(folder), Policy(), Method()))


def test_a_folder_to_write_to_is_measured_too(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path, machine_of: dict[str, Any]
) -> None:
    machine_of |= {"write": DiskSpeed(1e3, 1 << 24, "fsync")}
    place = tmp_path / "not" / "there"
    done = kizami("plan", tiny_checkpoint, "--to", place, "--json").json["estimate"]
    assert (done["limited_by"], machine_of["calls"]) == ("write", ["cpu", "read", "write"])
    assert not place.parent.exists()
    text = kizami("plan", tiny_checkpoint, "--to", place).out
    assert "limit     writing: computing" in text


def test_the_plan_is_the_same_measured_or_not(kizami: Run, tiny_checkpoint: Path, machine_of: dict[str, Any]) -> None:
    plans = [kizami("plan", tiny_checkpoint, "--measure", how, "--json").json for how in ("always", "never")]
    measured, static = (plan.pop("estimate") for plan in plans)
    assert plans[0] == plans[1]
    assert measured.keys() == static.keys()
    assert (measured["rates"]["measured"], static["rates"]["measured"]) == (True, False)


def test_a_job_of_seconds_is_not_worth_a_measurement(
    kizami: Run, tiny_checkpoint: Path, machine_of: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nothing was measured here" in kizami("plan", tiny_checkpoint).out
    assert machine_of["calls"] == []
    monkeypatch.setattr(cli_rates, "LONG_SECONDS", 0)
    assert "limit     the CPU: computing" in kizami("plan", tiny_checkpoint).out
    assert machine_of["calls"] == ["cpu", "read"]


def test_kernels_that_are_not_compiled_leave_the_static_rate(
    kizami: Run, tiny_checkpoint: Path, machine_of: dict[str, Any]
) -> None:
    machine_of |= {"ready": False}
    done = kizami("plan", tiny_checkpoint, "--measure", "always", "--json").json["estimate"]
    assert (done["rates"]["measured"], machine_of["calls"]) == (False, ["read"])
    assert done["rates"]["pack_bytes_per_second"] == static_rates("search", done["workers"]).pack
    assert any("not compiled" in note for note in done["notes"])


@pytest.mark.parametrize(
    ("speed", "said"),
    [(None, "holes for data"), (DiskSpeed(9e9, 1 << 24, "cached"), "cannot read past its page cache")],
)
def test_reading_that_no_disk_answered_is_no_limit(
    kizami: Run, tiny_checkpoint: Path, machine_of: dict[str, Any], speed: DiskSpeed | None, said: str
) -> None:
    machine_of |= {"read": speed}
    done = kizami("plan", tiny_checkpoint, "--measure", "always", "--json").json["estimate"]
    assert done["read_seconds"] is None
    assert any(said in note for note in done["notes"])


def test_the_source_is_no_place_to_write_to(kizami: Run, tiny_checkpoint: Path) -> None:
    before = sorted(os.listdir(tiny_checkpoint))
    done = kizami("plan", tiny_checkpoint, "--to", tiny_checkpoint / "out")
    assert done.code == 2
    assert "which is only read" in done.err
    assert sorted(os.listdir(tiny_checkpoint)) == before


def test_a_place_that_cannot_be_written_to_is_refused(
    tiny_checkpoint: Path, plan: Plan, machine_of: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(folder: Path) -> DiskSpeed:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk_speed, "write_speed", refuse)
    with pytest.raises(KizamiError, match="cannot write there: Permission denied") as refused:
        cli_rates.measure(plan, Checkpoint.open(tiny_checkpoint), "always", tmp_path, 2)
    assert refused.value.code == "io_error"


def test_of_a_source_on_the_hub_nothing_is_measured(
    tiny_checkpoint: Path, plan: Plan, machine_of: dict[str, Any]
) -> None:
    remote = replace(Checkpoint.open(tiny_checkpoint), remote=True)
    found = cli_rates.measure(plan, remote, "always", None, 2)
    assert (found.rates, machine_of["calls"]) == (None, [])
    assert "from the Hub is not in the estimate" in found.notes[0]


def test_the_line_names_limit_and_rates(plan: Plan) -> None:
    rates = Rates(1e3, 1e3, 2e9, 1e9, shared=True, measured=True)
    measured = Measured(rates, DiskSpeed(2e9, 1, "uncached"), DiskSpeed(1e9, 1, "fsync"))
    line = limit_line(estimate_body(plan, 2, measured))
    assert line.startswith("the CPU: computing ")
    assert "reading 1 s at 2.00 GB/s (pages dropped from the cache before)" in line
    assert line.endswith("writing 1 s at 1.00 GB/s (and flushed), which take turns on one file system")


# ------------------------------------------------------------------------------------------------------- the machine


@pytest.mark.parametrize("name", ["search", "minmax"])
def test_a_miniature_conversion_gives_positive_rates(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: MethodName
) -> None:
    monkeypatch.setattr(machine, "PACK_SECONDS", 0.0)  # once each
    monkeypatch.setattr(machine, "MOVE_SECONDS", 0.0)
    found = machine.measure_computing(build_plan(Checkpoint.open(tiny_checkpoint), Policy(), Method(name)), 2)
    assert found.workers == 2
    assert min(found.pack, found.move) > 0
    assert machine.is_ready(Method(name))


def test_more_workers_than_threads_count_in_proportion(
    tiny_checkpoint: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_rate", lambda work, source, buffers, threads, seconds: 10.0 * threads)
    monkeypatch.setattr(machine, "MOST_THREADS", 4)
    assert machine.measure_computing(plan, 2).pack == 20
    assert machine.measure_computing(plan, 12).pack == 120


def test_a_file_is_read_for_its_speed_and_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(os.urandom(10 << 20))
    before = file.stat()
    found = read_speed([file, file])
    assert found is not None
    assert found.nbytes >= 2 * disk_speed.PART_BYTES
    assert found.bytes_per_second > 0
    after = file.stat()
    assert (after.st_mtime_ns, after.st_size, after.st_ino) == (before.st_mtime_ns, before.st_size, before.st_ino)


def test_without_o_direct_the_cache_is_asked_to_drop_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(os.urandom(10 << 20))
    monkeypatch.delattr(os, "O_DIRECT")
    found = read_speed([file])
    assert found is not None
    assert found.how == "uncached"
    monkeypatch.delattr(os, "posix_fadvise")
    found = read_speed([file])
    assert found is not None
    assert found.how == "cached"


def test_holes_and_small_files_tell_nothing_of_a_disk(tmp_path: Path) -> None:
    small, sparse = tmp_path / "small", tmp_path / "sparse"
    small.write_bytes(b"x" * 1000)
    with sparse.open("wb") as file:
        file.write(b"x" * 4096)
        file.truncate(1 << 30)
    assert read_speed([small]) is None
    assert read_speed([sparse]) is None


def test_the_file_that_is_written_is_gone(tmp_path: Path) -> None:
    found = write_speed(tmp_path)
    assert (found.how, list(tmp_path.iterdir())) == ("fsync", [])
    assert found.bytes_per_second > 0

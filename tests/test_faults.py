"""Every call of a conversion fails, is killed, or is the last one before the power goes: nothing is lost."""

import errno
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any

import faults
import faults_table
import pytest
from fault_calls import CHANGES, LOOKS, NEW, PARTIAL, READS, SOURCE, Point
from fault_disk import CUTS
from faults import SHARDS, Ended, Said

Row = Callable[[str, int | str, str], None]


class Bench:
    """A `faults.Bench` in the workshop: its methods are called there."""

    def __init__(self, workshop: ProcessPoolExecutor, folder: Path) -> None:
        self._workshop, self.folder = workshop, folder
        faults.small().save(folder / SOURCE)
        self.points: list[Point]
        self.points, self.points_of_resume = workshop.submit(faults.open_bench, folder, faults.OPTIONS).result()

    def __call__(self, work: str, *arguments: Any) -> Any:
        return self._workshop.submit(faults.on_bench, self.folder, work, *arguments).result()

    def strike(self, fault: str, points: Iterable[Point], resume: bool = False) -> list[Ended]:
        return [self("strike", fault, point.index, resume) for point in points]

    def of(self, *calls: str) -> list[Point]:
        return [point for point in self.points if point.call in calls]

    def kinds(self, points: Iterable[Point]) -> list[Point]:
        """The last point of each kind: what is done for every shard is met once."""
        return list({point.kind: point for point in points}.values())


@pytest.fixture(scope="module")
def workshop() -> Iterator[ProcessPoolExecutor]:
    with faults.workshop() as pool:
        yield pool


@pytest.fixture(scope="module")
def bench(workshop: ProcessPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    made = Bench(workshop, tmp_path_factory.mktemp("bench"))
    assert len({p.target for p in made.of("create") if "safetensors" in p.target and "index" not in p.target}) == SHARDS
    return made


def assert_made_good(ends: list[Ended]) -> None:
    """Nothing is lost, OUT was never half there, and the same command gave what it gives undisturbed."""
    assert ends
    assert not [end for end in ends if end.problem or end.lost or end.out not in ("absent", "whole")]


def assert_said(ends: list[Ended], code: int, text: str) -> None:
    """One line with the system's text, and nothing half-written is left behind."""
    for end in ends:
        assert end.after is not None
        assert end.after.code == code, end
        assert len(end.after.talk.splitlines()) == 1, end
        assert text in end.after.talk, end
        assert end.temporaries == [], end


# ---------------------------------------------------------------- kills and power cuts


@pytest.mark.slow
def test_a_kill_after_any_change_is_made_good_by_the_same_command(bench: Bench, fault_row: Row) -> None:
    moments = [0, *bench("changing")]
    ends = [bench("strike", "SIGKILL", moment) for moment in moments]
    assert_made_good(ends)
    killed = [end for end in ends if end.after is not None and end.after.code == -signal.SIGKILL]
    assert len(killed) == len(moments)
    for moment, end in zip(moments, ends, strict=True):
        assert end.recorded >= bench("acknowledged", moment) or end.out == "whole"
    fault_row("SIGKILL after each call that changes a file or a name", len(moments), "resumed")


@pytest.mark.slow
def test_a_kill_in_the_middle_of_any_write_is_made_good(bench: Bench, fault_row: Row) -> None:
    points = [point for point in bench.of("write") if point.nbytes > 1]
    ends = bench.strike("half a write, then SIGKILL", points)
    assert_made_good(ends)
    assert {end.after.code for end in ends if end.after} == {-signal.SIGKILL}
    fault_row("half a write, then SIGKILL", len(points), "resumed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", CUTS)
def test_a_power_cut_at_any_moment_is_made_good(bench: Bench, kind: str, fault_row: Row) -> None:
    """The disk is a model: it keeps what POSIX says that fsync keeps. What the journal took down is on it."""
    moments = sorted({0, *bench("changing"), *(point.index + 1 for point in bench.of("fsync"))})
    ends = [bench("cut", kind, moment) for moment in moments]
    assert_made_good(ends)
    for moment, end in zip(moments, ends, strict=True):
        assert end.recorded >= bench("acknowledged", moment) or end.out == "whole", end
    assert (ends[-1].out, ends[-1].again.code) == ("whole", 2), "what exit code 0 has promised: nothing is left to do"
    assert sum(end.recorded == SHARDS for end in ends) > 10
    fault_row(f"power cut; {kind}", len(moments), "resumed")


def test_a_power_cut_after_a_kill_keeps_what_the_journal_took_down(bench: Bench, fault_row: Row) -> None:
    """The kill leaves names that nobody has synced; the run that resumes must not build on them."""
    first, last = (
        max(point.index for point in bench.points if (point.call, point.target) == wanted)
        for wanted in (("mkdir", PARTIAL), ("lock", f"{PARTIAL}/.kizami/lock"))
    )
    moments = [moment for moment in bench("changing") if first < moment <= last]
    assert len(moments) > 2
    ends = [bench("killed_then_cut", moment) for moment in moments]
    assert_made_good(ends)
    assert {end.recorded for end in ends} == {SHARDS}
    fault_row(
        "SIGKILL while the folders are made, a resume, and a power cut before its finish", len(moments), "resumed"
    )


# ---------------------------------------------------------------- calls that fail


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_call_is_a_refusal(bench: Bench, fault_row: Row) -> None:
    points = [*bench.of("create", "write", "fsync", "mkdir", "replace", "rename")]
    ends = bench.strike("ENOSPC", points)
    assert_made_good(ends)
    assert_said(ends, 2, "No space left on device")
    assert all("make room" in end.after.talk for end in ends if end.after and ".tmp" in end.point)
    fault_row("ENOSPC from a call that makes, writes, syncs or renames", len(points), "refused; then resumed")


@pytest.mark.long
@pytest.mark.slow
def test_a_quota_that_is_used_up_is_a_refusal(bench: Bench, fault_row: Row) -> None:
    points = bench.kinds(bench.of("create", "write", "fsync", "close", "mkdir"))
    points = [point for point in points if not point.target.startswith(SOURCE)]
    ends = bench.strike("EDQUOT", points)
    assert_made_good(ends)
    assert_said(ends, 2, "Disk quota exceeded")
    fault_row(
        "EDQUOT from a call that makes, writes, syncs or closes, one of each kind", len(points), "refused; then resumed"
    )


@pytest.mark.slow
def test_an_error_of_the_disk_at_any_call_is_a_refusal(bench: Bench, fault_row: Row) -> None:
    points = bench.of(*CHANGES, *READS, "open", "fsync", "close", "lock")
    ends = bench.strike("EIO", points)
    assert_made_good(ends)
    assert_said(ends, 2, "Input/output error")
    fault_row(
        "EIO from any call that opens, reads, writes, syncs, renames, removes or closes",
        len(points),
        "refused; then resumed",
    )


@pytest.mark.long
@pytest.mark.slow
def test_what_cannot_be_looked_up_is_never_left_out(bench: Bench, fault_row: Row) -> None:
    """A path of which nothing is known may be followed as it stands; a file must not be missing from OUT for it."""
    ends = bench.strike("EIO", bench.of(*LOOKS))
    assert_made_good(ends)
    for end in ends:
        assert end.after is not None
        assert end.out == "whole" if end.after.code == 0 else "Input/output error" in end.after.talk, end
    fault_row("EIO from any call that lists or looks up", "all", "refused, or `OUT` is right; then resumed")


@pytest.mark.long
@pytest.mark.parametrize(("fault", "calls"), [("short write", ("write",)), ("short read", READS)])
def test_short_writes_and_reads_are_continued(bench: Bench, fault: str, calls: tuple[str, ...], fault_row: Row) -> None:
    points = [point for point in bench.of(*calls) if point.call != "write" or point.nbytes > 1]
    ends = bench.strike(fault, bench.kinds(points))
    assert_made_good(ends)
    count, at_once = bench("strike_all", fault, calls)
    assert count >= len(points)
    assert_made_good([at_once])
    assert {end.after.code for end in [*ends, at_once] if end.after} == {0}
    assert {end.out for end in [*ends, at_once]} == {"whole"}
    fault_row(f"{fault} (of one byte), at each kind of point and at all together", len(ends) + 1, "no effect")


# ---------------------------------------------------------------- file systems that are not ext4


@pytest.mark.parametrize("error", ["EIO", "ENOENT"])
def test_a_rename_whose_answer_was_lost_is_made_good(bench: Bench, error: str, fault_row: Row) -> None:
    """NFS sends a call again when no answer comes; the second time the name is gone."""
    points = bench.of("replace", "rename")
    ends = bench.strike(f"done, but answered with {error}", points)
    assert_made_good(ends)
    assert_said(ends, 2, os.strerror(getattr(errno, error)))
    fault_row(f"a rename that was done and answered with {error} (NFS)", len(points), "refused; then resumed")


def test_a_rename_that_is_refused_is_made_good(bench: Bench, fault_row: Row) -> None:
    points = bench.kinds(bench.of("replace", "rename"))
    ends = bench.strike("EXDEV", points)
    assert_made_good(ends)
    assert_said(ends, 2, "Invalid cross-device link")
    fault_row("EXDEV from a rename, one of each kind", len(points), "refused; then resumed")


@pytest.mark.parametrize("error", ["EINVAL", "ENOTSUP"])
def test_folders_that_cannot_be_synced_are_no_error(bench: Bench, error: str, fault_row: Row) -> None:
    count, end = bench("strike_all", error, ["fsync"], True)
    assert_made_good([end])
    assert (end.after.code, end.out) == (0, "whole")
    fault_row(f"{error} from every fsync of a folder", count, "no effect")


@pytest.mark.parametrize("error", ["ENOLCK", "ENOTSUP", "ENOSYS"])
def test_a_file_system_without_locks_is_called_that(bench: Bench, error: str, fault_row: Row) -> None:
    ends = bench.strike(error, bench.of("lock"))
    assert_made_good(ends)
    assert_said(ends, 2, f"cannot lock: {os.strerror(getattr(errno, error))}")
    assert "needs flock" in ends[0].after.talk if ends[0].after else False
    fault_row(f"{error} from flock", len(ends), "refused: kizami needs flock")


# ---------------------------------------------------------------- signals and other processes


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", -signal.SIGHUP)])
def test_a_signal_in_any_phase_is_made_good(bench: Bench, name: str, code: int, fault_row: Row) -> None:
    points = bench.kinds(bench.of(*CHANGES, *READS, "fsync", "lock"))[:: 1 if name == "SIGTERM" else 4]
    ends = bench.strike(name, points)
    assert_made_good(ends)
    if code > 0:
        assert_said(ends, code, "interrupted")
        assert all(("is complete" in end.after.talk) == (end.out == "whole") for end in ends if end.after)
    assert {end.after.code for end in ends if end.after} == {code}
    outcome = f"exit code {code}, no temporary left; then resumed" if code > 0 else "ends at once; then resumed"
    fault_row(
        f"{name} before a call, one of {'each kind' if code == 143 else 'every fourth kind'}", len(points), outcome
    )


@pytest.mark.slow
@pytest.mark.long
def test_two_runs_into_one_folder_never_meet(bench: Bench, fault_row: Row) -> None:
    """A second process runs the whole command before a call of the first: until the first holds the lock, the second
    finishes the job; from then on it is turned away, until OUT is there."""
    points = bench.kinds(bench.of(*CHANGES, *READS, "lock"))
    early = takewhile(lambda point: point.call != "lock", bench.points_of_resume)
    looks = bench.kinds(point for point in early if point.target.startswith(NEW))
    ends = bench.strike("another convert", points) + bench.strike("another convert", looks, resume=True)
    assert_made_good(ends)
    words = {2: ("another kizami is writing there", "another kizami has just finished it", "is not empty"), 0: ("",)}
    codes = set()
    for end in ends:
        assert end.after is not None
        assert end.after.another is not None
        assert end.out == "whole", end
        codes.add((end.after.code, end.after.another.code))
        for said in (end.after, end.after.another):
            assert said.code in words, end
            assert any(text in said.talk for text in words[said.code]), end
            assert len(said.talk.splitlines()) == (1 if said.code else 0), end
    assert codes >= {(0, 2), (2, 0)}
    assert (2, 2) not in codes
    fault_row("a second convert before a call of the first, one of each kind", len(points), "one of them makes `OUT`")


# ---------------------------------------------------------------- disks and places


def mounted(bench: Bench, *how: str) -> Ended:
    end = bench("mounted", *how)
    if isinstance(end, str):
        pytest.skip(f"no mount namespace: {end}")
    assert_made_good([end])
    assert isinstance(end, Ended)
    return end


def test_a_source_on_a_read_only_disk_is_enough(bench: Bench, fault_row: Row) -> None:
    end = mounted(bench, SOURCE, "--bind", "-o", "ro", str(bench.folder / SOURCE))
    assert (end.after, end.out) == (Said(0, ""), "whole")
    fault_row("the source on a read-only mount", 1, "no effect")


def test_a_place_where_nothing_can_be_written_is_refused(bench: Bench, fault_row: Row) -> None:
    end = mounted(bench, NEW, "--bind", "-o", "ro", str(bench.folder / NEW))
    assert_said([end], 2, "Read-only file system")
    fault_row("`OUT` on a read-only mount", 1, "refused, nothing is made")


def test_a_disk_that_is_really_full_keeps_what_is_finished(bench: Bench, fault_row: Row) -> None:
    """A tmpfs with room for one shard of three, and then for all."""
    met = bench("on_a_small_disk", "240k")
    if isinstance(met, str):
        pytest.skip(f"no mount namespace: {met}")
    assert met.code == 2
    assert "No space left on device" in met.talk
    assert "make room" in met.talk
    assert met.another.code in (1, 2)
    assert met.another.talk == ""
    fault_row("a tmpfs that is full after the first shards", 1, "refused; with more room resumed")


def test_the_table_of_faults_is_that_of_this_run(request: pytest.FixtureRequest) -> None:
    """As in test_faults_outside.py: `pytest -n N --dist loadfile` has this file in a process of its own."""
    faults_table.hold(request.config.option, request.config.args)

"""The arithmetic of `suite.py`: medians, ratios, targets, and the table. Pure functions."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from suite_plan import Case, Section

GB, MB = 1e9, 1e6


@dataclass(frozen=True, slots=True)
class Run:
    """What one process cost: wall seconds, CPU seconds of all its threads (user and system), peak resident bytes."""

    wall: float
    cpu: float
    peak: int


@dataclass(frozen=True, slots=True)
class Yardsticks:
    """Bytes per second: NumPy's copy in memory by one thread (of its CPU time), and of the folder's file system."""

    memcpy: float
    disk_read: float
    disk_write: float


@dataclass(frozen=True, slots=True)
class Row:
    """A case and its runs. Bytes of weight files. sqnr_db: mean over packed tensors; None of a program without a
    report. error: why there are no more runs."""

    case: Case
    source_bytes: int
    output_bytes: int
    runs: tuple[Run, ...]
    sqnr_db: float | None = None
    error: str | None = None

    @property
    def median(self) -> Run:
        return median_run(self.runs)


@dataclass(frozen=True, slots=True)
class Found:
    """A section measured. equal: (tensors with the same bytes, tensors compared) of its same_bytes."""

    section: Section
    yardsticks: Yardsticks
    rows: tuple[Row, ...]
    equal: tuple[int, int] | None = None

    @property
    def measured(self) -> list[Row]:
        return [row for row in self.rows if row.runs]


@dataclass(frozen=True, slots=True)
class Target:
    """measured: None where its section was not run. at_least: whether more is better."""

    name: str
    limit: float
    measured: float | None
    at_least: bool

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


def median_run(runs: Sequence[Run]) -> Run:
    """Each figure by itself. StatisticsError of no runs."""
    return Run(
        statistics.median(run.wall for run in runs),
        statistics.median(run.cpu for run in runs),
        int(statistics.median(run.peak for run in runs)),
    )


def median_yardsticks(some: Sequence[Yardsticks]) -> Yardsticks:
    return Yardsticks(
        statistics.median(one.memcpy for one in some),
        statistics.median(one.disk_read for one in some),
        statistics.median(one.disk_write for one in some),
    )


def ratios(row: Row, first: Row, yardsticks: Yardsticks) -> dict[str, float]:
    """Speeds in bytes of source per second, as parts of what memory and disk do, and costs in those of `first`."""
    run, base = row.median, first.median
    per_second, per_cpu_second = row.source_bytes / run.wall, row.source_bytes / run.cpu
    return {
        "bytes_per_second": per_second,
        "bytes_per_cpu_second": per_cpu_second,
        "of_memcpy": per_cpu_second / yardsticks.memcpy,
        "of_disk_read": per_second / yardsticks.disk_read,
        "of_disk_write": row.output_bytes / run.wall / yardsticks.disk_write,
        "wall_of_first": run.wall / base.wall,
        "cpu_of_first": run.cpu / base.cpu,
        "peak_of_first": run.peak / base.peak,
    }


def marginal_bytes_per_cpu_second(small: Row, large: Row) -> float | None:
    """What the bytes cost that one source has more than the other, without the start of the process. None where noise
    made the larger one cheaper."""
    seconds = large.median.cpu - small.median.cpu
    return (large.source_bytes - small.source_bytes) / seconds if seconds > 0 else None


def flatness(rows: Sequence[Row]) -> float:
    """Largest peak by smallest peak."""
    peaks = [row.median.peak for row in rows]
    return max(peaks) / min(peaks)


def targets(found: Sequence[Found]) -> list[Target]:
    rows = {one.section.name: one.measured for one in found}
    size, method, shards = (rows.get(name, []) for name in ("size", "method", "shards"))
    minmax = size[-1].source_bytes / size[-1].median.cpu / GB if size else None
    search = next((row.source_bytes / row.median.cpu / GB for row in method if row.case.method == "search"), None)
    ours = [row for some in rows.values() for row in some if row.case.program == "kizami"]
    peak = max((row.median.peak / MB for row in ours), default=None)
    peer, mse = rows.get("peer", []), rows.get("peer-mse", [])
    return [
        Target("`minmax`, GB/s per core, the largest source", 1.0, minmax, at_least=True),
        Target("`search`, GB/s per core", 0.4, search, at_least=True),
        Target("`minmax`, times as fast as llm-compressor, CPU", 30.0, _times(peer, "minmax"), at_least=True),
        Target("`search`, times as fast as that", 15.0, _times(peer, "search"), at_least=True),
        Target("`search`, times as fast as its MSE observer, CPU", 100.0, _times(mse, "search"), at_least=True),
        Target("highest peak of all cases, MB", 300.0, peak, at_least=False),
        Target("peak by size: highest / lowest", 1.1, flatness(size) if size else None, at_least=False),
        Target("peak by shard size: highest / lowest", 1.1, flatness(shards) if shards else None, at_least=False),
    ]


def _times(rows: Sequence[Row], method: str) -> float | None:
    """CPU seconds of llm-compressor by those of kizami with `method`."""
    theirs = next((row.median.cpu for row in rows if row.case.program == "llm-compressor"), None)
    ours = (row.median.cpu for row in rows if (row.case.program, row.case.method) == ("kizami", method))
    return None if theirs is None else next((theirs / cpu for cpu in ours), None)


def as_json(found: Found) -> dict[str, Any]:
    return {
        "name": found.section.name,
        "title": found.section.title,
        "yardsticks_bytes_per_second": asdict(found.yardsticks),
        "rows": [_row_json(row, found) for row in found.rows],
        "equal_tensors": None if found.equal is None else {"equal": found.equal[0], "compared": found.equal[1]},
    }


def _row_json(row: Row, found: Found) -> dict[str, Any]:
    made: dict[str, Any] = asdict(row.case) | {"source_bytes": row.source_bytes, "error": row.error}
    if not row.runs:
        return made
    run = row.median
    return made | {
        "output_bytes": row.output_bytes,
        "sqnr_db": row.sqnr_db,
        "wall_seconds": run.wall,
        "cpu_seconds": run.cpu,
        "peak_bytes": run.peak,
        "runs": [asdict(run) for run in row.runs],
        "ratios": ratios(row, found.measured[0], found.yardsticks),
    }


def target_json(target: Target) -> dict[str, Any]:
    return asdict(target) | {"met": target.met}


COLUMNS = (
    "", "runs", "GB", "wall s", "CPU s", "peak MB", "GB/s", "GB/s per core", "of memcpy", "of disk read",
    "of disk write", "wall ×", "CPU ×", "peak ×", "SQNR dB",
)  # fmt: skip


def table(found: Found) -> str:
    """The section in Markdown; columns with × are multiples of the first row."""
    sticks = found.yardsticks
    lines = [
        f"### {found.section.title}",
        "",
        f"memcpy {sticks.memcpy / GB:.1f} GB/s, disk {sticks.disk_read / GB:.2f} GB/s read, "
        f"{sticks.disk_write / GB:.2f} GB/s written.",
        "",
    ]
    if found.measured:
        lines += [_line(COLUMNS), "|---|" + "---:|" * (len(COLUMNS) - 1)]
        lines += [_line(_cells(row, found)) for row in found.measured]
    lines += [f"\n{row.case.label}: {row.error}" for row in found.rows if row.error]
    if found.equal is not None and found.section.same_bytes is not None:
        names = " and ".join(found.section.cases[i].label for i in found.section.same_bytes)
        lines.append(f"\n{names}: {found.equal[0]} of {found.equal[1]} tensors bit-equal.")
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Row, found: Found) -> list[str]:
    run, by = row.median, ratios(row, found.measured[0], found.yardsticks)
    return [
        row.case.label, str(len(row.runs)), f"{row.source_bytes / GB:.2f}", f"{run.wall:.1f}", f"{run.cpu:.1f}",
        f"{run.peak / MB:.0f}", f"{by['bytes_per_second'] / GB:.2f}", f"{by['bytes_per_cpu_second'] / GB:.2f}",
        f"{by['of_memcpy']:.1%}", f"{by['of_disk_read']:.0%}", f"{by['of_disk_write']:.0%}",
        f"{by['wall_of_first']:.2f}", f"{by['cpu_of_first']:.2f}", f"{by['peak_of_first']:.2f}",
        "" if row.sqnr_db is None else f"{row.sqnr_db:.2f}",
    ]  # fmt: skip


def target_table(some: Sequence[Target]) -> str:
    words = {True: "yes", False: "**no**", None: "not measured"}
    lines = ["### Targets", "", "| target | wanted | measured | met |", "|---|---:|---:|---|"]
    for one in some:
        measured = "" if one.measured is None else f"{one.measured:.3g}"
        lines.append(f"| {one.name} | {'≥' if one.at_least else '≤'} {one.limit:g} | {measured} | {words[one.met]} |")
    return "\n".join(lines)

"""The rates behind an estimate: measured here in under a second, or static; and how an estimate reads."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from kizami.cli.options import RUN, option
from kizami.cli.output import counted, duration
from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.disk_speed import DiskSpeed
    from kizami.quantize.estimate import Rates, Work
    from kizami.quantize.max_memory import Crew
    from kizami.quantize.plan import Plan

MeasureName = Literal["auto", "always", "never"]
LONG_SECONDS = 60  # static estimates below it are not worth a measurement
COMPILE_SECONDS = 10  # of all kernels, once per version
_STREAMS = 4  # files of the source that are read at the same time

Measure = Annotated[
    MeasureName,
    option(
        "--measure",
        panel=RUN,
        help="Measure this machine for the time estimate: auto (default; jobs of a minute and more), always, never.",
    ),
]
To = Annotated[
    Path | None,
    option(
        "--to",
        panel=RUN,
        metavar="FOLDER",
        help="Where OUT will be: measures how fast it can be written there, with a temporary file of 16 MB.",
    ),
]


@dataclass(frozen=True, slots=True)
class Measured:
    """rates: None for static ones. read, write: of the disks, as far as they were measured. notes: what was not
    measured, and why. work: of the plan, if it was added up."""

    rates: "Rates | None" = None
    read: "DiskSpeed | None" = None
    write: "DiskSpeed | None" = None
    notes: tuple[str, ...] = ()
    work: "Work | None" = None


UNMEASURED = Measured()


def writable_place(to: Path | None, source: Path) -> Path | None:
    """The nearest folder of `to` that exists. KizamiError "bad_file" where it is the source's."""
    from kizami.cli.target import lies_in

    if to is None:
        return None
    folder = to.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    if lies_in(Path(os.path.realpath(folder)), source):
        raise KizamiError(f"lies in {source}, which is only read", code="bad_file", file=str(to), hint="name another")
    return folder


def measure(plan: "Plan", checkpoint: "Checkpoint", how: MeasureName, to: Path | None, workers: int) -> Measured:
    """What this machine does in a second. Nothing is kept, and SRC is only read. KizamiError as `writable_place`,
    "io_error" where nothing can be written to `to`."""
    from kizami.quantize.estimate import static_rates, work_of

    place = writable_place(to, checkpoint.root)
    if checkpoint.remote:
        return Measured(notes=("the time to fetch the source from the Hub is not in the estimate",))
    if how == "never":
        return Measured()
    static, work = static_rates(plan.method.name, workers), work_of(plan)
    if how == "auto" and to is None and _seconds(work, static, workers) < LONG_SECONDS:
        return Measured(work=work)
    return replace(_measure(plan, checkpoint, place, static, workers), work=work)


def _seconds(work: "Work", rates: "Rates", workers: int) -> float:
    from kizami.quantize.estimate import duration_of

    return duration_of(work, rates, workers).seconds


def _measure(plan: "Plan", checkpoint: "Checkpoint", place: Path | None, static: "Rates", workers: int) -> Measured:
    from kizami.quantize.estimate import Rates
    from kizami.quantize.machine import is_ready, measure_computing
    from kizami.quantize.settings import GIVEN

    notes = []
    pack, move, measured = static.pack, static.move, False
    if plan.method.name in GIVEN:
        notes.append("the engine's own time is not measured")
    elif not is_ready(plan.method):
        notes.append("the kernels are not compiled yet, so their speed is not measured: the first convert does that")
    else:
        computing = measure_computing(plan, workers)
        pack, move, measured = computing.pack, computing.move, True
    read = _read(checkpoint, notes)
    write = None if place is None else _write(place)
    shared = place is not None and place.stat().st_dev == checkpoint.root.stat().st_dev
    rates = Rates(pack, move, _of_disk(read), _of_disk(write), shared, measured)
    return Measured(rates, read, write, tuple(notes))


def _of_disk(speed: "DiskSpeed | None") -> float | None:
    """Bytes per second; None where memory may have answered."""
    return None if speed is None or speed.how == "cached" else speed.bytes_per_second


def _read(checkpoint: "Checkpoint", notes: list[str]) -> "DiskSpeed | None":
    from kizami.formats.disk_speed import read_speed

    largest = sorted(checkpoint.headers.values(), key=lambda header: -header.file_size)[:_STREAMS]
    try:
        speed = read_speed([checkpoint.path(header.file) for header in largest])
    except (OSError, KizamiError) as e:
        notes.append(f"reading could not be measured: {e}")
        return None
    if speed is None:
        notes.append("reading was not measured: the source's files are small, or have holes for data")
    elif speed.how == "cached":
        notes.append("reading was not measured: this system cannot read past its page cache")
    return speed


def _write(place: Path) -> "DiskSpeed":
    from kizami.formats.disk_speed import write_speed
    from kizami.formats.files import io_error

    try:
        return write_speed(place)
    except OSError as e:
        raise io_error("cannot write there", e, str(place), "name a folder that OUT can be made in") from e


def estimate_body(plan: "Plan", workers: int, measured: Measured, crew: "Crew | None" = None) -> dict[str, Any]:
    """`estimate` under --json. crew: within --max-memory; its workers count."""
    from kizami.cli.watch import kernels_are_cold
    from kizami.quantize.estimate import estimate

    workers = workers if crew is None else crew.workers
    guess = estimate(plan, plan.method.name, workers, measured.rates, measured.work)
    took, rates = guess.duration, guess.rates
    return {
        "workers": workers,
        "method": plan.method.name,
        "rounds": "quantize" in plan.counts,
        "seconds": guess.seconds,
        "compile_seconds": COMPILE_SECONDS if kernels_are_cold() else 0,
        "memory_bytes": guess.memory_bytes if crew is None else crew.peak,
        "max_memory_bytes": None if crew is None else crew.limit,
        "shards_at_a_time": None if crew is None else crew.drivers,
        "in_flight_bytes": None if crew is None else crew.piece_bytes,
        "limited_by": took.limit,
        "cpu_seconds": took.cpu,
        "read_seconds": took.read,
        "write_seconds": took.write,
        "rates": {
            "measured": rates.measured,
            "pack_bytes_per_second": rates.pack,
            "move_bytes_per_second": rates.move,
            "read_bytes_per_second": rates.read,
            "read_how": None if measured.read is None else measured.read.how,
            "write_bytes_per_second": rates.write,
            "write_how": None if measured.write is None else measured.write.how,
            "same_file_system": rates.shared,
        },
        "notes": list(measured.notes),
    }


def estimate_line(guess: dict[str, Any]) -> str:
    """`about 20m50s, 263 MiB on 2 cores, --method search`."""
    cores = counted(guess["workers"], "core")
    memory = f"{guess['memory_bytes'] / 2**20:,.0f} MiB"
    once = f", and {guess['compile_seconds']} s once to compile kernels" if guess["compile_seconds"] else ""
    how = f", --method {guess['method']}" if guess["rounds"] else ""
    return f"about {_time(guess['seconds'])}, {memory} on {cores}{how}{once}"


def memory_line(guess: dict[str, Any]) -> str:
    """`at most 1,812 MiB of 1,907: 2 workers, 2 shards at a time, 1,502 MiB for tensors in flight`."""
    peak, most, in_flight = (guess[key] / 2**20 for key in ("memory_bytes", "max_memory_bytes", "in_flight_bytes"))
    crew = f"{counted(guess['workers'], 'worker')}, {counted(guess['shards_at_a_time'], 'shard')} at a time"
    return f"at most {peak:,.0f} MiB of {most:,.0f}: {crew}, {in_flight:,.0f} MiB for tensors in flight"


_HOW = {"direct": "past the page cache", "uncached": "pages dropped from the cache before", "fsync": "and flushed"}
_LIMITS = {"cpu": "the CPU", "read": "reading", "write": "writing"}


def limit_line(guess: dict[str, Any]) -> str:
    """`the CPU: 20m50s; reading 9m30s at 1.24 GB/s (past the page cache); writing not measured`."""
    rates = guess["rates"]
    if not rates["measured"] and guess["read_seconds"] is None and guess["write_seconds"] is None:
        return "the CPU, by rates of another machine (an AMD EPYC core); nothing was measured here"
    cpu = f"computing {_time(guess['cpu_seconds'])}" + ("" if rates["measured"] else " (by another machine's rates)")
    parts = [cpu]
    for kind, word in (("read", "reading"), ("write", "writing")):
        seconds = guess[f"{kind}_seconds"]
        if seconds is None:
            parts.append(f"{word} not measured" + (" (--to FOLDER)" if kind == "write" else ""))
        else:
            rate = rates[f"{kind}_bytes_per_second"] / 1e9
            parts.append(f"{word} {_time(seconds)} at {rate:.2f} GB/s ({_HOW[rates[f'{kind}_how']]})")
    both = guess["read_seconds"] is not None and guess["write_seconds"] is not None
    disk = ", which take turns on one file system" if rates["same_file_system"] and both else ""
    return f"{_LIMITS[guess['limited_by']]}: {', '.join(parts)}{disk}"


def _time(seconds: float) -> str:
    return f"{max(1.0, seconds):.0f} s" if seconds < 60 else duration(seconds)

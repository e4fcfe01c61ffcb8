"""One shard in a Ray task, on whatever machine Ray has chosen. What the driver sends is held against what is seen there
before a byte is read.

The shard's bytes stay under the name of this attempt: only the driver gives them their own. A task that was given up
for lost and goes on all the same can publish nothing and destroy nothing.
"""

import hashlib
import pickle
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.fingerprint import sample_file
from kizami.formats.header import Header, read_header
from kizami.formats.reader import TensorReader
from kizami.formats.run_log import FOLDER, JOURNAL, read_own
from kizami.formats.statistics import Statistics
from kizami.quantize.calibrated.solver import SOLVER_WORKERS, libraries, require_torch
from kizami.quantize.calibrated.statistics import calibration_of
from kizami.quantize.max_memory import crew_here, memory_of, pieces_in_flight
from kizami.quantize.on_device.names import CPU
from kizami.quantize.plan import PLAN_FORMAT, Plan, Shard, Step
from kizami.quantize.run.job_folder import new_attempt
from kizami.quantize.shard import FinishedShard, Shop, convert_shard
from kizami.quantize.warm_up import warm_up

SHARED = "SRC and OUT must lie on a file system that every node mounts at the same path"


@dataclass(frozen=True, slots=True)
class Answer:
    """node: where it was made. seconds: that it took. finished is None where `refusal` says why."""

    node: str
    seconds: float
    finished: FinishedShard | None
    refusal: KizamiError | None


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one shard needs of plan and checkpoint: whole ones take a process seconds to unpack. contents: sampled pages
    of its source files, by name. makers: steps of other shards that gptq reads, too."""

    plan: Plan
    checkpoint: Checkpoint
    contents: dict[str, str]
    makers: tuple[Step, ...]

    @classmethod
    def of(
        cls,
        plan: Plan,
        checkpoint: Checkpoint,
        shard: Shard,
        contents: Mapping[str, str],
        others: tuple[Step, ...] = (),
    ) -> "Parcel":
        """others: its `makers`."""
        files = {info.file for step in (*shard.steps, *others) for info in step.sources}
        headers = {file: replace(checkpoint.headers[file], tensors=()) for file in files}
        return cls(
            replace(plan, steps=shard.steps, shards=(shard,), config={}, quantization_config={}, source={}),
            replace(checkpoint, headers=headers, tensors={}, config={}),
            {file: contents[file] for file in files},
            others,
        )


_SEEN: dict[tuple[str, str, str], Header] = {}  # journal, root and file: source files that were looked at here


def journal_begin(partial: Path) -> str:
    """SHA-256 of the journal's first line; "" if there is none."""
    data = read_own(partial / FOLDER / JOURNAL)
    return "" if not data else hashlib.sha256(data.partition(b"\n")[0]).hexdigest()


def convert_one(errand: dict[str, Any], packed: bytes) -> Answer:
    """errand: plain values, which any version understands. packed: a Parcel, which only the same version does."""
    started = time.monotonic()
    node = _here()
    try:
        finished = _convert(errand, packed)
    except KizamiError as e:
        said = KizamiError(f"{node}: {e.message}", code=e.code, file=e.file, tensor=e.tensor, hint=e.hint)
        return Answer(node, time.monotonic() - started, None, said)
    return Answer(node, time.monotonic() - started, finished, None)


def _here() -> str:
    from ray.util import get_node_ip_address

    return f"node {socket.gethostname()} ({get_node_ip_address()})"


def _convert(errand: dict[str, Any], packed: bytes) -> FinishedShard:
    _check_version(errand)
    partial = Path(errand["partial"])
    _check_folders(errand, partial)
    parcel: Parcel = pickle.loads(packed)
    plan, (shard,) = parcel.plan, parcel.plan.shards
    checkpoint = replace(parcel.checkpoint, headers=_seen_here(parcel, errand["journal"]))
    statistics = _statistics(plan, errand["stats"])
    if plan.method.name == "gptq":
        _check_libraries(errand["libraries"])
    warm_up(plan)
    workers, limit = int(errand["workers"]), errand["max_memory"]
    if plan.method.name == "gptq":
        workers = min(workers, SOLVER_WORKERS)
    crew = None if limit is None else crew_here(int(limit), plan, workers, finishes=False)
    workers = workers if crew is None else crew.workers
    with TensorReader(checkpoint) as reader, ExitStack() as stack:
        calibration = stack.enter_context(calibration_of(plan, statistics, reader, held=2, makers=parcel.makers))
        pool = stack.enter_context(ThreadPoolExecutor(workers, "kizami-compute")) if workers > 1 else None
        slots = Semaphore(pieces_in_flight(workers, 1))
        buffers, bytes_in_flight = memory_of(plan, workers, crew)
        shop = Shop(
            plan, reader, buffers, partial, pool, slots, Event(), lambda piece: None, calibration,
            attempt=new_attempt(), limit=bytes_in_flight,
        )  # fmt: skip
        return convert_shard(shop, shard)


def _check_version(errand: dict[str, Any]) -> None:
    here, theirs = (version("kizami"), PLAN_FORMAT), (errand["version"], errand["plan_format"])
    if here != theirs:
        raise KizamiError(
            f"has kizami {here[0]} (plans of format {here[1]}), and the driver {theirs[0]} ({theirs[1]})",
            code="other_version",
            hint="install the same version on every node",
        )


def _check_folders(errand: dict[str, Any], partial: Path) -> None:
    for name, folder in (("SRC", Path(errand["source"])), ("OUT.partial", partial)):
        if not folder.is_dir():
            raise KizamiError(f"does not see {name}", code="not_shared", file=str(folder), hint=SHARED)
    if journal_begin(partial) != errand["journal"]:
        raise KizamiError(
            "sees another folder there than the driver, without the journal of this job",
            code="not_shared",
            file=str(partial),
            hint=SHARED,
        )


def _statistics(plan: Plan, stats: str | None) -> Statistics | None:
    """None of a method without."""
    if stats is None:
        return None
    statistics = Statistics.open(Path(stats))
    if statistics.sha256 != plan.method.stats:
        raise KizamiError("is another file here than the driver's", code="not_shared", file=stats, hint=SHARED)
    return statistics


def _check_libraries(theirs: Mapping[str, str]) -> None:
    """The bytes of gptq depend on more than plan and source."""
    require_torch()
    here = libraries(CPU)
    if here != theirs:
        raise KizamiError(
            f"solves with {_facts(here)}, and the driver with {_facts(theirs)}: the codes would be others",
            code="other_version",
            hint="let all nodes be alike, and the machine that this runs on",
        )


def _facts(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.items())


def _seen_here(parcel: Parcel, journal: str) -> dict[str, Header]:
    """Times and inodes may be other ones than the driver's; size, header and sampled pages may not. What was seen once
    must stay as it is from then on, as everywhere. A file from the Hub comes and goes, and is looked at each time."""
    found, checkpoint = {}, parcel.checkpoint
    for file, theirs in checkpoint.headers.items():
        key = journal, str(checkpoint.root), file
        if checkpoint.remote:
            _look(checkpoint.path(file), theirs, parcel.contents[file])
            found[file] = theirs
            continue
        if key not in _SEEN:
            _SEEN[key] = _look(checkpoint.path(file), theirs, parcel.contents[file])
        found[file] = _SEEN[key]
    return found


def _look(path: Path, theirs: Header, contents: str) -> Header:
    ours = read_header(path, theirs.file)
    same = (ours.file_size, ours.sha256) == (theirs.file_size, theirs.sha256)
    if not same or sample_file(path, theirs.file) != contents:
        raise KizamiError("is another file here than the driver's", code="not_shared", file=theirs.file, hint=SHARED)
    return replace(ours, tensors=())

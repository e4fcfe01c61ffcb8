"""One shard in a Ray task, on whatever machine Ray has chosen. What the driver sends is held against what is seen there
before a byte is read.

The shard's bytes stay under the name of this attempt: only the driver gives them their own. A task that was given up
for lost and goes on all the same can publish nothing and destroy nothing.
"""

import hashlib
import os
import pickle
import socket
import time
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
from kizami.quantize.buffers import Buffers
from kizami.quantize.calibrated.statistics import Calibration
from kizami.quantize.job_folder import new_attempt
from kizami.quantize.plan import Plan, Shard
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
class Workshop:
    """What a process keeps from task to task."""

    plan: Plan
    checkpoint: Checkpoint  # with the headers of the files that were seen here
    seen: dict[str, Header]
    statistics: Statistics | None


_WORKSHOPS: dict[str, Workshop] = {}  # of one job at a time


def journal_begin(partial: Path) -> str:
    """SHA-256 of the journal's first line; "" if there is none."""
    data = read_own(partial / FOLDER / JOURNAL)
    return "" if not data else hashlib.sha256(data.partition(b"\n")[0]).hexdigest()


def convert_one(errand: dict[str, Any], packed: bytes, number: int) -> Answer:
    """errand: plain values, which any version understands. packed: plan and checkpoint, which only the same version
    does."""
    started = time.monotonic()
    node = _here()
    try:
        finished = _convert(errand, packed, number)
    except KizamiError as e:
        said = KizamiError(f"{node}: {e.message}", code=e.code, file=e.file, tensor=e.tensor, hint=e.hint)
        return Answer(node, time.monotonic() - started, None, said)
    return Answer(node, time.monotonic() - started, finished, None)


def _here() -> str:
    from ray.util import get_node_ip_address

    return f"node {socket.gethostname()} ({get_node_ip_address()})"


def _convert(errand: dict[str, Any], packed: bytes, number: int) -> FinishedShard:
    _check_version(errand)
    partial = Path(errand["partial"])
    _check_folders(errand, partial)
    shop = _workshop(errand, packed)
    shard = shop.plan.shards[number - 1]
    _check_sources(shop, errand["contents"], shard)
    checkpoint = replace(shop.checkpoint, headers=shop.checkpoint.headers | shop.seen)
    workers = int(errand["workers"])
    with TensorReader(checkpoint) as reader, ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(workers, "kizami-compute")) if workers > 1 else None
        calibration = None if shop.statistics is None else Calibration(shop.statistics, 2)
        return convert_shard(
            Shop(
                shop.plan, reader, Buffers(2 * workers), partial, pool, Semaphore(workers + 1), Event(),
                lambda piece: None, calibration, attempt=new_attempt(),
            ),
            shard,
        )  # fmt: skip


def _check_version(errand: dict[str, Any]) -> None:
    here = version("kizami")
    if here != errand["version"]:
        raise KizamiError(
            f"has kizami {here}, and the driver {errand['version']}",
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


def _workshop(errand: dict[str, Any], packed: bytes) -> Workshop:
    key = f"{errand['plan_hash']} {errand['source']} {errand['journal']}"
    if (shop := _WORKSHOPS.get(key)) is not None:
        return shop
    plan: Plan
    checkpoint: Checkpoint
    plan, checkpoint = pickle.loads(packed)
    plan = replace(plan)  # without what the driver has computed of it
    if plan.hash != errand["plan_hash"]:
        raise KizamiError(
            "would make other bytes of this plan than the driver",
            code="other_version",
            hint="install the same version on every node",
        )
    statistics = None
    if errand["stats"] is not None:
        statistics = Statistics.open(Path(errand["stats"]))
        if statistics.sha256 != plan.method.stats:
            raise KizamiError("is not what the driver sees", code="not_shared", file=errand["stats"], hint=SHARED)
    warm_up(plan)
    _WORKSHOPS.clear()
    _WORKSHOPS[key] = Workshop(plan, checkpoint, {}, statistics)
    return _WORKSHOPS[key]


def _check_sources(shop: Workshop, contents: dict[str, str], shard: Shard) -> None:
    """Times and inodes may be other ones here; size, header and sampled pages may not. What was seen once must stay as
    it is from then on, as everywhere."""
    for file in sorted({info.file for step in shard.steps for info in step.sources}):
        path, theirs = shop.checkpoint.path(file), shop.checkpoint.headers[file]
        if file in shop.seen and shop.seen[file].mtime_ns == os.stat(path).st_mtime_ns:
            continue
        ours = read_header(path, file)
        same = (ours.file_size, ours.sha256) == (theirs.file_size, theirs.sha256)
        if not same or sample_file(path, file) != contents[file]:
            raise KizamiError("is another file here than the driver's", code="not_shared", file=file, hint=SHARED)
        shop.seen[file] = ours

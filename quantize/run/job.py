"""What a run hands to whoever converts its shards, and what it gets back: the seam between the pipeline and executors.

An executor converts shards; journal, lock, report and finish stay with the process that runs the pipeline.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Lock
from typing import Protocol

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.fingerprint import Contents
from kizami.formats.hub.mirror import Mirror
from kizami.formats.statistics import Statistics
from kizami.quantize.plan import Plan, Shard
from kizami.quantize.run.delivery import Delivery
from kizami.quantize.run.events import Progress, RunEvent, ShardDone, ShardLost
from kizami.quantize.run.job_folder import ShardRecord
from kizami.quantize.run.journal import Journal, source_mtimes
from kizami.quantize.shard import FinishedShard
from kizami.quantize.tensor import Piece


@dataclass(frozen=True, slots=True)
class Remote:
    """What of a run is on the Hub: the source, which `mirror` fetches; the output, which `delivery` pushes. limit:
    bytes of disk for both, at most."""

    mirror: Mirror | None
    delivery: Delivery | None
    limit: int

    @property
    def sheds(self) -> bool:
        """Whether shards leave the disk."""
        return self.delivery is not None and self.delivery.delete

    def contents(self) -> Contents | None:
        """None of a source in a folder."""
        if self.mirror is None:
            return None
        files = self.mirror.repository.files
        stated = {name: files[name].sha256 or files[name].git for name in files if name.endswith(".safetensors")}
        return Contents(stated, self.mirror.contents())


@dataclass(frozen=True, slots=True)
class Job:
    """What is converted, the same for every executor. statistics: those of plan.method.stats. contents: of the source,
    as `Contents.stated`."""

    plan: Plan
    checkpoint: Checkpoint
    statistics: Statistics | None
    device: str
    remote: Remote
    contents: dict[str, str]


class Executor(Protocol):
    """Where shards are converted."""

    def check(self, plan: Plan) -> None:
        """KizamiError for what it cannot do; nothing has been written yet."""

    def convert(self, job: Job, todo: Sequence[Shard], record: "Record", stop: Event) -> None:
        """Converts every shard of `todo` and hands each to `record` when its bytes are durable. The first failure ends
        it. When `stop` is set it soon ends, too, with Stopped, and whatever is finished is recorded."""


def source_bytes(shard: Shard) -> int:
    """Of its weights, as Progress counts."""
    return sum(step.weight.nbytes for step in shard.steps)


class Record:
    """Journal and events, one thread at a time. of: shards that this process is to have finished in the end."""

    def __init__(self, journal: Journal, job: Job, of: int, on_event: Callable[[RunEvent], None]) -> None:
        self.journal, self._job, self._of, self._on_event = journal, job, of, on_event
        self._lock = Lock()

    def piece(self, piece: Piece) -> None:
        with self._lock:
            self._on_event(Progress(piece.source_nbytes))

    def lost(self, shard: Shard, reason: str) -> None:
        with self._lock:
            self._on_event(ShardLost(shard, reason))

    def shard(self, shard: Shard, finished: FinishedShard, seconds: float, *, told: bool = True) -> ShardRecord:
        """told: its pieces were."""
        assert finished.nbytes == shard.file_nbytes, (finished.nbytes, shard.file_nbytes)
        with self._lock:
            if finished.attempt is not None:
                self.journal.give_name(self.journal.partial, finished.attempt, shard.file)
            rows_sha256 = self.journal.write_rows(shard.number, finished.rows)
            mtimes = source_mtimes(shard, self._job.checkpoint)
            record = ShardRecord(shard.number, shard.file, finished.nbytes, finished.sha256, rows_sha256, mtimes)
            self.journal.append(record)
            if not told:
                self._on_event(Progress(source_bytes(shard)))
            self._on_event(ShardDone(shard, finished.rows, seconds, len(self.journal.done), self._of))
            return record

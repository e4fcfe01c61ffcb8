"""What a run tells of itself while it goes on."""

from dataclasses import dataclass
from typing import Any

from kizami.quantize.plan import Shard


@dataclass(frozen=True, slots=True)
class Started:
    shards: int
    resumed: int  # shards that an earlier run finished and whose bytes are still right
    rewritten: tuple[str, ...]  # shards that the journal calls done but whose bytes have changed since
    source_bytes: int = 0  # of the resumed shards, counted as Progress counts
    outdated: tuple[str, ...] = ()  # like rewritten, but because their source files have been modified since


@dataclass(frozen=True, slots=True)
class Progress:
    """A piece is written. Over a whole shard these add up to the bytes of its source weights (scales not counted)."""

    source_bytes: int


@dataclass(frozen=True, slots=True)
class ShardDone:
    shard: Shard
    rows: list[dict[str, Any]]
    seconds: float
    done: int  # shards finished so far, resumed ones included
    of: int


@dataclass(frozen=True, slots=True)
class ShardLost:
    """The process or the machine that converted it is gone; it is converted again."""

    shard: Shard
    reason: str


@dataclass(frozen=True, slots=True)
class Pushed:
    """A commit has arrived on the Hub."""

    files: int
    commit: str


RunEvent = Started | Progress | ShardDone | ShardLost | Pushed

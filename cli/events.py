"""`--events FILE`: a line of JSON for each step of a conversion, for dashboards and pipelines that follow it."""

import json
import time
from datetime import UTC, datetime
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from kizami.cli.target import Target
from kizami.formats.errors import KizamiError
from kizami.formats.files import io_error

if TYPE_CHECKING:
    from pathlib import Path

    from kizami.quantize.run_events import RunEvent

SCHEMA = "kizami.event/1"
EVERY = 5.0  # seconds between two lines of progress


class Events:
    """Appends to `name`, a line at once and whole; to nothing for None. A context manager: how the run ended is its
    last line. `started`, `progress`, `shard`, `lost`, `pushed`, and `finished` or `failed`."""

    def __init__(self, name: str | None, checkpoint: "Path") -> None:
        self._lock, self._file, self._last = Lock(), None, time.monotonic()
        self._seen = 0
        if name is not None:
            Target.checked(name, checkpoint)
            self._file = _opened(name)

    def __enter__(self) -> "Events":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KizamiError):
            self.write("failed", code=error.code, message=error.message, file=error.file, tensor=error.tensor)
        elif error is not None:
            self.write("failed", code="interrupted", message=type(error).__name__, file=None, tensor=None)
        if self._file is not None:
            self._file.close()

    def write(self, kind: str, **fields: Any) -> None:
        if self._file is None:
            return
        line = {"schema": SCHEMA, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": kind, **fields}
        with self._lock:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def __call__(self, event: "RunEvent") -> None:
        from kizami.quantize.run_events import Progress, Pushed, ShardDone, ShardLost, Started

        match event:
            case Started():
                self._seen = event.source_bytes
                self.write("started", shards=event.shards, resumed=event.resumed, source_bytes=event.source_bytes)
            case Progress():
                self._seen += event.source_bytes
                if time.monotonic() - self._last >= EVERY:
                    self._last = time.monotonic()
                    self.write("progress", source_bytes=self._seen)
            case ShardDone():
                errors = [row["rel_error"] for row in event.rows if row.get("rel_error") is not None]
                self.write(
                    "shard",
                    file=event.shard.file,
                    done=event.done,
                    of=event.of,
                    seconds=round(event.seconds, 3),
                    packed=len(errors),
                    max_rel_error=max(errors, default=None),
                )
            case ShardLost():
                self.write("lost", file=event.shard.file, reason=event.reason)
            case Pushed():
                self.write("pushed", files=event.files, commit=event.commit)


def _opened(name: str) -> TextIO:
    try:
        return open(name, "a", encoding="utf-8")
    except OSError as e:
        raise io_error("cannot open", e, name) from e

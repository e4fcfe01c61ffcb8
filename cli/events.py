"""`--events FILE`: a line of JSON for each step of a conversion, for dashboards and pipelines that follow it."""

import json
import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import typer

from kizami.cli.output import Ui
from kizami.cli.stop import STOP, Stopped
from kizami.cli.target import Target, lies_in
from kizami.formats.errors import KizamiError
from kizami.formats.files import io_error

if TYPE_CHECKING:
    from kizami.quantize.plan import Plan
    from kizami.quantize.run.events import RunEvent
    from kizami.quantize.run.parts import Part

SCHEMA = "kizami.event/1"
EVERY = 5.0  # seconds between two lines of progress


class Events:
    """Appends to `name`, a line at once and whole; to nothing for None. A context manager: how the run ended is its
    last line, a refusal before its begin included. `planned`, `started`, `progress`, `shard`, `lost`, `pushed`, and
    `finished` or `failed`. A reader that leaves, or a full disk, ends the lines and not the run."""

    def __init__(self, name: str | None, ui: Ui, source: str, out: Path) -> None:
        """KizamiError "bad_file", "io_error" where it may not or cannot be written."""
        self._lock, self._last = Lock(), time.monotonic()
        self._file: TextIO | None = None
        self._ui, self._name = ui, name
        self._seen = self._total = 0
        if name is not None:
            self._file = _opened(name, Path(source), out)

    def __enter__(self) -> "Events":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KizamiError):
            self.write("failed", code=error.code, message=error.message, file=error.file, tensor=error.tensor)
        elif isinstance(error, (Stopped, KeyboardInterrupt)):
            self.write("failed", code="interrupted", message=STOP.say(), file=None, tensor=None)
        elif isinstance(error, typer.Exit):  # the target had it all
            self.write("finished" if error.exit_code == 0 else "failed", code="was_finished", exit=error.exit_code)
        elif isinstance(error, Exception):
            self.write("failed", code="internal", message=f"{type(error).__name__}: {error}", file=None, tensor=None)
        if self._file is not None:
            with suppress(OSError):  # what is left of a line that failed before
                self._file.close()

    def write(self, kind: str, **fields: Any) -> None:
        line = {"schema": SCHEMA, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": kind, **fields}
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()
            except OSError as e:
                file, self._file = self._file, None
                with suppress(OSError):
                    file.close()
                self._ui.warn([f"{self._name}: no more events are written: {e.strerror or e}"])

    def planned(self, plan: "Plan", source: str, part: "Part | None" = None) -> None:
        """part: of --shards, whose shards alone count."""
        shards = plan.shards if part is None else part.shards(plan)
        self._total = sum(step.weight.nbytes for shard in shards for step in shard.steps if step.sources)
        self.write("planned", source=source, plan_hash=plan.hash, shards=len(shards), total_bytes=self._total)

    def __call__(self, event: "RunEvent") -> None:
        from kizami.quantize.run.events import Progress, Pushed, ShardDone, ShardLost, Started

        match event:
            case Started():
                self._seen = event.source_bytes
                self.write("started", shards=event.shards, resumed=event.resumed, **self._bytes())
            case Progress():
                self._seen += event.source_bytes
                if time.monotonic() - self._last >= EVERY:
                    self._last = time.monotonic()
                    self.write("progress", **self._bytes())
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

    def _bytes(self) -> dict[str, int]:
        """Of the source's weights, scales not counted."""
        return {"done_bytes": self._seen, "total_bytes": self._total}


def _opened(name: str, source: Path, out: Path) -> TextIO:
    if name in ("", "-"):
        raise KizamiError("--events needs the name of a file", code="usage", hint="/dev/stderr is one, too")
    Target.checked(name, source)
    for place in [out.with_name(out.name + end) for end in ("", ".partial", ".source") if out.name]:
        if lies_in(Path(name).absolute(), place):
            hint = "write it elsewhere"
            raise KizamiError(f"lies in {place}, where the run works", code="bad_file", file=name, hint=hint)
    try:
        half = os.path.isfile(name) and Path(name).read_bytes()[-1:] not in (b"", b"\n")
        if half:  # of a line that a full disk has cut
            with open(name, "a", encoding="utf-8") as file:
                file.write("\n")
        return open(name, "a", encoding="utf-8")
    except OSError as e:
        raise io_error("cannot open", e, name) from e

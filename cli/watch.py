"""Progress of a conversion: a bar on a terminal, one plain line per shard anywhere else, both on stderr."""

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kizami.cli.output import Ui, duration, stderr_console

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from kizami.quantize.pipeline import RunEvent, ShardDone
    from kizami.quantize.plan import Plan


class Watch:
    """Listens to `pipeline.run`; `done` and `of` are what an interrupted run has to say."""

    def __init__(self, ui: Ui, plan: "Plan") -> None:
        self.ui, self.done, self.of = ui, 0, len(plan.shards)
        self._todo = sum(_source_bytes(shard.steps) for shard in plan.shards)
        self._seen = 0
        self._started = time.monotonic()
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> "Watch":
        if self.ui.shows_bar:
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TimeRemainingColumn(),
                console=stderr_console(),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("compiling kernels (first run only)", total=self._todo)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: "RunEvent") -> None:
        from kizami.quantize.pipeline import Progress, ShardDone, Started

        match event:
            case Started():
                self._start(event.resumed, event.rewritten)
            case Progress():
                self._advance(event.source_bytes)
            case ShardDone():
                self._shard(event)

    def _start(self, resumed: int, rewritten: tuple[str, ...]) -> None:
        self.done = resumed
        self._started = time.monotonic()
        if resumed:
            self._tell(f"resumed: {resumed} of {self.of} shards were done")
        for file in rewritten:
            self._tell(f"{file}: its bytes have changed since it was written; it is written again")

    def _advance(self, nbytes: int) -> None:
        self._seen += nbytes
        if self._bar is not None and self._task is not None:
            description = f"shard {min(self.done + 1, self.of)}/{self.of}"
            self._bar.update(self._task, completed=self._seen, description=description)

    def _shard(self, event: "ShardDone") -> None:
        self.done = event.done
        self._tell(shard_line(event, self._eta(event)))

    def _eta(self, event: "ShardDone") -> float:
        """Seconds, from the bytes of this run so far: shards of an earlier run cost nothing now."""
        left = event.of - event.done
        rate = self._seen / max(1e-9, time.monotonic() - self._started)
        mean = self._todo / self.of
        return left * mean / rate if rate else 0.0

    def _tell(self, line: str) -> None:
        if self._bar is not None:
            from kizami.formats.errors import printable

            self._bar.console.print(printable(line, 1000))
        else:
            self.ui.note(line)


def _source_bytes(steps: tuple[Any, ...]) -> int:
    return sum(step.weight.nbytes for step in steps)


def shard_line(event: "ShardDone", eta: float) -> str:
    errors = [row["rel_error"] for row in event.rows if row.get("rel_error") is not None]
    parts = [f"shard {event.done}/{event.of}", event.shard.file]
    if errors:
        only = all(row["role"] == "routed_expert" for row in event.rows if row.get("rel_error") is not None)
        parts.append(f"{'experts' if only else 'packed'} {len(errors)}")
        parts.append(f"rel err max {max(errors):.3f} mean {sum(errors) / len(errors):.3f}")
    else:
        parts.append("experts 0")
    parts.append(duration(event.seconds))
    if event.done < event.of:
        parts.append(f"eta {duration(eta)}")
    return "  ".join(parts)

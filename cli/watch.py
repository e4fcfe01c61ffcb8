"""Progress of a conversion: a bar on a terminal, one plain line per shard anywhere else, both on stderr."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kizami.cli.output import Ui, counted, duration, stderr_console

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from kizami.quantize.plan import Shard
    from kizami.quantize.run.events import RunEvent, ShardDone, Started


class Watch:
    """Listens to a run that makes `shards`; `done` and `of` are what an interrupted run has to say."""

    def __init__(self, ui: Ui, shards: "Sequence[Shard]") -> None:
        self.ui, self.done, self.of = ui, 0, len(shards)
        self._todo = sum(_source_bytes(shard.steps) for shard in shards)
        self._seen = self._before = 0  # source bytes of this run, and of those it resumed
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
            first = "compiling kernels" if kernels_are_cold() else f"shard 1/{self.of}"
            self._task = self._bar.add_task(first, total=self._todo)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: "RunEvent") -> None:
        from kizami.quantize.run.events import Progress, Pushed, ShardDone, ShardLost, Started

        match event:
            case Started():
                self._start(event)
            case Progress():
                self._advance(event.source_bytes)
            case ShardDone():
                self._shard(event)
            case ShardLost():
                self._tell(f"{event.shard.file}: {event.reason}; it is converted again")
            case Pushed():
                self._tell(f"pushed {counted(event.files, 'file')} (commit {event.commit[:12]})")

    def _start(self, event: "Started") -> None:
        self.done, self._before = event.resumed, event.source_bytes
        self._started = time.monotonic()
        if event.resumed:
            self._tell(f"resumed: {event.resumed} of {self.of} shards were done")
        for file in event.rewritten:
            self._tell(f"{file}: its bytes have changed since it was written; it is written again")
        for file in event.outdated:
            self._tell(f"{file}: its source has been modified since it was written; it is written again")
        self._show()

    def _advance(self, nbytes: int) -> None:
        self._seen += nbytes
        self._show(f"shard {min(self.done + 1, self.of)}/{self.of}")

    def _show(self, description: str | None = None) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._before + self._seen, description=description)

    def _shard(self, event: "ShardDone") -> None:
        self.done = event.done
        if self._bar is None or self.ui.verbose:  # on a terminal the bar says it all
            self._tell(shard_line(event, self._eta(), named=self.ui.verbose))

    def _eta(self) -> float:
        """Seconds, from the bytes of this run so far: shards of an earlier run cost nothing now."""
        rate = self._seen / max(1e-9, time.monotonic() - self._started)
        return (self._todo - self._before - self._seen) / rate if rate else 0.0

    def phase(self, text: str) -> None:
        """What goes on before the first shard."""
        if self._bar is not None and self._task is not None and not self.ui.verbose:
            self._bar.update(self._task, description=text)
        else:
            self._tell(text)

    def _tell(self, line: str) -> None:
        if self._bar is not None:
            from kizami.formats.errors import printable

            self._bar.console.print(printable(line, 1000))
        else:
            self.ui.progress(line)


def _source_bytes(steps: tuple[Any, ...]) -> int:
    return sum(step.weight.nbytes for step in steps)


def kernels_are_cold() -> bool:
    """Whether nothing is compiled yet: the first run of this version, or no folder to keep kernels in."""
    from kizami.quantize.kernels.jit import cache_folder, is_filled

    folder = cache_folder()
    return folder is None or not is_filled(folder)


def shard_line(event: "ShardDone", eta: float, *, named: bool) -> str:
    """Less than 80 columns without the file's name."""
    errors = [row["rel_error"] for row in event.rows if row.get("rel_error") is not None]
    parts = [f"shard {event.done}/{event.of}", *([event.shard.file] if named else [])]
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

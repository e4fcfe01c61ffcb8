"""Progress of a calibration: a bar on a terminal, one plain line per layer anywhere else, both on stderr."""

import time
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING

from kizami.cli.output import Ui, duration, gib, stderr_console

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from kizami.calibration.forward.run import Event, LayerDone, Started

# Share of a layer's time by phase, as Kimi-K2's dimensions have it; an estimate needs no more.
_SHARES = {"embedding": 0.0, "attention": 0.2, "routing": 0.05, "experts": 0.7, "combining": 0.05}


class CalibrationWatch:
    """Listens to `run_calibration`; `done` and `of` are what an interrupted run has to say. sequences: of the data;
    stats_bytes: of the result, foretold. needs: what the run takes, once it has started."""

    def __init__(self, ui: Ui, sequences: int = 1, stats_bytes: int = 0) -> None:
        self._sequences, self._stats_bytes = sequences, stats_bytes
        self.needs: dict[str, int] | None = None
        self.ui, self.done, self.of = ui, 0, 0
        self._first = 0
        self._within = 0.0  # of the layer that is worked on
        self._started = self._layer_began = time.monotonic()
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> "CalibrationWatch":
        if self.ui.shows_bar:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TimeRemainingColumn(),
                console=stderr_console(),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("reading the model", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: "Event") -> None:
        from kizami.calibration.forward.run import LayerDone, Progress, Started

        match event:
            case Started():
                self._start(event)
            case Progress():
                shares = list(_SHARES)
                before = sum(_SHARES[phase] for phase in shares[: shares.index(event.phase)])
                self._within = before + _SHARES[event.phase] * event.done / event.total
                self._show(f"{_place(event.layer, self.of)}  {event.phase} {event.done:,}/{event.total:,}")
            case LayerDone():
                self._layer(event)

    def _start(self, event: "Started") -> None:
        self.of, self.done, self._first = event.layers, event.first, event.first
        self._started = self._layer_began = time.monotonic()
        if event.first:
            self._tell(f"resumed: {event.first} of {event.layers} layers were done")
        memory = event.chunks.needed
        self.needs = {"scratch_bytes": event.disk, "stats_bytes": self._stats_bytes, "memory_bytes": memory}
        self._tell(
            f"{self._sequences:,} x {event.tokens // self._sequences:,} tokens: {gib(event.disk)} of scratch, about "
            f"{gib(self._stats_bytes)} of STATS, {gib(memory)} of memory"
        )
        if self.ui.verbose:
            self._tell(f"{event.chunks.tokens:,} tokens and {event.chunks.queries:,} queries at once")
        self._show(_place(min(event.first, event.layers - 1), event.layers))

    def _layer(self, event: "LayerDone") -> None:
        self.done, self._within = event.layer + 1, 0.0
        now = time.monotonic()
        if self._bar is None or self.ui.verbose:  # on a terminal the bar says it all
            self._tell(layer_line(event, self.of, now - self._layer_began, self.eta()))
        self._layer_began = now
        self._show(_place(min(self.done, self.of - 1), self.of))

    def eta(self) -> float:
        """Seconds, as if all layers took the same: layers of an earlier run cost nothing now."""
        worked = self.done + self._within - self._first
        left = self.of - self.done - self._within
        return (time.monotonic() - self._started) / worked * left if worked else 0.0

    def _show(self, description: str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task, completed=self.done + self._within, total=max(1, self.of), description=description
            )

    def _tell(self, line: str) -> None:
        if self._bar is not None:
            from kizami.formats.errors import printable

            self._bar.console.print(printable(line, 1000))
        else:
            self.ui.progress(line)


def _place(layer: int, of: int) -> str:
    return f"layer {layer} ({layer + 1} of {of})"


def layer_line(event: "LayerDone", of: int, seconds: float, eta: float) -> str:
    """`layer 4 (5 of 61)  384 experts, tokens min 0 median 4,812 max 20,431  2m03s  eta 1h52m`."""
    counts = event.tokens_per_expert
    parts = [_place(event.layer, of)]
    if counts:
        parts.append(f"{len(counts)} experts, tokens min {counts[0]:,} median {median(counts):,.0f} max {counts[-1]:,}")
    else:
        parts.append("dense")
    if event.bad:
        parts.append(f"{event.bad:,} tokens not finite")
    parts.append(duration(seconds))
    if event.layer + 1 < of:
        parts.append(f"eta {duration(eta)}")
    return "  ".join(parts)

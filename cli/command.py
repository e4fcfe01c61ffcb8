"""What a file of this folder hands to `app`: a function, its name, and examples for the end of its help."""

import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from kizami.cli.stop import Stopped


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    run: Callable[..., None]
    examples: tuple[str, ...]
    plans: bool = False  # looks at every name and ends: see `collector_paused`

    @property
    def stoppable(self) -> Callable[..., None]:
        """`run`, whose KeyboardInterrupt Typer would turn into a silent exit."""

        @functools.wraps(self.run)
        def run(*args: Any, **options: Any) -> None:
            try:
                with collector_paused() if self.plans else nullcontext():
                    self.run(*args, **options)
            except KeyboardInterrupt as e:  # of a library: our own signals raise Stopped
                raise Stopped from e

        return run

    @property
    def help(self) -> str:
        """The docstring without its line breaks, which Typer would keep."""
        paragraphs = inspect.cleandoc(self.run.__doc__ or "").split("\n\n")
        return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)

    @property
    def epilog(self) -> str:
        return examples(*self.examples)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without Python's search for cycles, which looks through the million small objects of a plan again and again: a
    quarter of the time of `kizami plan`. They are no cycles, and stay until the program ends."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def examples(*lines: str) -> str:
    """The end of a help page; \\b keeps its lines apart."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])

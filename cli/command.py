"""What a file of this folder hands to `app`: a function, its name, and examples for the end of its help."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM: the same clean stop as Ctrl-C, another exit code."""


class Interrupted(Exception):
    """A stopped command with what it has to say. Typer would turn a KeyboardInterrupt into a silent exit."""

    def __init__(self, stop: KeyboardInterrupt) -> None:
        super().__init__(str(stop) or "interrupted")
        self.terminated = isinstance(stop, Terminated)


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    run: Callable[..., None]
    examples: tuple[str, ...]

    @property
    def stoppable(self) -> Callable[..., None]:
        """`run`, with a signal turned into Interrupted."""

        @functools.wraps(self.run)
        def run(*args: Any, **options: Any) -> None:
            try:
                self.run(*args, **options)
            except KeyboardInterrupt as stop:
                raise Interrupted(stop) from None

        return run

    @property
    def help(self) -> str:
        """The docstring without its line breaks, which Typer would keep."""
        paragraphs = inspect.cleandoc(self.run.__doc__ or "").split("\n\n")
        return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)

    @property
    def epilog(self) -> str:
        return examples(*self.examples)


def examples(*lines: str) -> str:
    """The end of a help page; \\b keeps its lines apart."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])

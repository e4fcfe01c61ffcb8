"""What a file of this folder hands to `app`: a function, its name, and examples for the end of its help."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kizami.cli.stop import Stopped


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    run: Callable[..., None]
    examples: tuple[str, ...]

    @property
    def stoppable(self) -> Callable[..., None]:
        """`run`, whose KeyboardInterrupt Typer would turn into a silent exit."""

        @functools.wraps(self.run)
        def run(*args: Any, **options: Any) -> None:
            try:
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


def examples(*lines: str) -> str:
    """The end of a help page; \\b keeps its lines apart."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])

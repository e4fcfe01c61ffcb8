"""What a file of this folder hands to `app`: a function, its name, and examples for the end of its help."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    run: Callable[..., None]
    examples: tuple[str, ...]

    @property
    def epilog(self) -> str:
        return examples(*self.examples)


def examples(*lines: str) -> str:
    """The end of a help page; \\b keeps its lines apart."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])

"""The page: what is on it, and its HTML. Everything but the pictures is escaped: names come from untrusted files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from kizami.formats.errors import printable

CELL = 2000  # characters; a tensor's name may have 1024


@dataclass(frozen=True, slots=True)
class Picture:
    """svg: of plots.py, put into the page as it is."""

    svg: str
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Head:
    text: str
    right: bool


@dataclass(frozen=True, slots=True)
class Table:
    """folded: behind its caption."""

    heads: tuple[Head, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    words: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """facts: (value, what it is)."""

    title: str
    subtitle: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    footer: str
    warnings: tuple[str, ...] = field(default=())


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", *, folded: bool = False) -> Table:
    """Columns headed `>name` are right-aligned, as in `Ui.table`."""
    columns = tuple(Head(name.removeprefix(">"), name.startswith(">")) for name in heads)
    return Table(columns, tuple(tuple(printable(cell, CELL) for cell in row) for row in rows), caption, folded)


def render(page: Page) -> str:
    """One file; nothing is loaded from anywhere, and no script runs (its policy forbids both)."""
    return str(_template().render(page=page))


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    source = files("kizami.cli.html").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source)

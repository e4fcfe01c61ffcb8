"""Where words go: data to stdout, talk to stderr, colours only on a terminal. The only module that prints."""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from kizami.formats.errors import KizamiError, printable

if TYPE_CHECKING:
    from rich.console import Console

NAME_CHARACTERS = 2000  # longer than any real tensor name; a report line stays a line
RICH_ROWS = 1000  # rich lays out a whole table before its first line: GLM-5.2's 60,000 tensors would take a minute


class Ui:
    """What a command says. `json`: one object on stdout, nothing else; `quiet`: only the last line of the summary."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False, json: bool = False) -> None:
        self.quiet, self.verbose, self.json = quiet, verbose, json

    @property
    def human(self) -> bool:
        return not self.json

    def emit(self, command: str, body: dict[str, Any]) -> None:
        """The one object of --json."""
        write_json(f"kizami.{command}/1", body)

    def say(self, text: str = "", style: str = "") -> None:
        """A line of the human summary; the last one goes through `result`."""
        if self.human and not self.quiet:
            _print(sys.stdout, text, style)

    def result(self, text: str) -> None:
        """The last line of a summary: the number that people compare."""
        if self.human:
            _print(sys.stdout, text, "bold")

    def heading(self, text: str) -> None:
        self.say()
        self.say(text, "bold cyan")

    def pairs(self, rows: Iterable[tuple[str, str]]) -> None:
        """`key  value` lines."""
        rows = list(rows)
        width = max((len(key) for key, _ in rows), default=0)
        for key, value in rows:
            self.say(f"{key:<{width}}  {value}")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Columns headed `>name` are right-aligned."""
        cells = [[_safe(cell) for cell in row] for row in rows]
        if self.json or self.quiet or not cells:
            return
        if _is_terminal(sys.stdout) and len(cells) <= RICH_ROWS:
            _rich_table(columns, cells)
        else:
            for line in plain_table(columns, cells):
                _print(sys.stdout, line)

    def note(self, text: str) -> None:
        """Talk: progress and explanations."""
        if self.human and not self.quiet:
            _print(sys.stderr, text)

    def warn(self, texts: Iterable[str]) -> None:
        """Loud, also under -q. Under --json they are in the object."""
        for text in texts if self.human else ():
            _print(sys.stderr, f"kizami: warning: {text}", "bold yellow")

    def fail(self, text: str) -> None:
        """Why the exit code is 1. Under --json the object says so."""
        if self.human:
            _print(sys.stderr, f"kizami: failed: {text}", "bold red")

    @property
    def shows_bar(self) -> bool:
        return self.human and not self.quiet and _is_terminal(sys.stderr)


def write_json(schema: str, body: dict[str, Any]) -> None:
    text = json.dumps({"schema": schema, **body}, indent=2, ensure_ascii=True, allow_nan=False)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def show_error(error: KizamiError, *, as_json: bool) -> None:
    """One line on stderr, or the object `kizami.error/1` on stdout."""
    if as_json:
        fields = {key: getattr(error, key) for key in ("code", "message", "file", "tensor", "hint")}
        write_json("kizami.error/1", {"error": fields})
    else:
        kind = "" if error.code == "interrupted" else "error: "
        _print(sys.stderr, f"kizami: {kind}{error}", "bold red")


def stderr_console() -> "Console":
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _safe(text: str) -> str:
    return printable(text, NAME_CHARACTERS)


def _print(stream: TextIO, text: str, style: str = "") -> None:
    """Names in `text` come from untrusted files: they are escaped, and rich must not read them as markup."""
    line = _safe(text)
    if style and _is_terminal(stream) and not os.environ.get("NO_COLOR"):
        from rich.console import Console

        Console(file=stream, highlight=False).print(line, style=style, markup=False, soft_wrap=True)
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"  # a C locale must not turn a name into a crash
    stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def _rich_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for name in columns:
        right = name.startswith(">")
        table.add_column(
            Text(name.removeprefix(">")), justify="right" if right else "left", no_wrap=right, overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(file=sys.stdout, highlight=False, markup=False).print(table)


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned with spaces, whatever the width: for files, pipes and logs."""
    heads = [name.removeprefix(">") for name in columns]
    lines = [heads, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    right = [name.startswith(">") for name in columns]
    return [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in lines
    ]


def gib(nbytes: int) -> str:
    """`419.93 GiB`, `11.32 MiB`: binary units, as the engines' logs have them."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"


def exact(nbytes: int) -> str:
    return f"{gib(nbytes)} ({nbytes:,} bytes)"


def duration(seconds: float) -> str:
    """`3.1 s`, `2m40s`, `5h02m`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return (
        f"{int(seconds) // 60}m{int(seconds) % 60:02d}s" if seconds < 3600 else f"{minutes // 60}h{minutes % 60:02d}m"
    )


def figure(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}f}"

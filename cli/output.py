"""Where words go: data to stdout, talk to stderr, colours only on a terminal. The only module that prints."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from kizami.formats.errors import KizamiError, printable

if TYPE_CHECKING:
    from rich.console import Console

NAME_CHARACTERS = 2000  # longer than any real tensor name; a report line stays a line
WARNINGS_SHOWN = 10
MIN_CELL = 24  # a folded table cell is not narrower
_unseen: list[str] = []  # warnings of a command under --json: they go into its object, whichever that is


class Ui:
    """What a command says. `json`: one object on stdout, nothing else; `quiet`: only the last line of the summary."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False, json: bool = False) -> None:
        self.quiet, self.verbose, self.json = quiet, verbose, json
        _unseen.clear()

    @property
    def human(self) -> bool:
        return not self.json

    def emit(self, command: str, body: dict[str, Any]) -> None:
        """The one object of --json. What was warned of before is in its `warnings`, too."""
        write_json(f"kizami.{command}/1", _with_unseen(body))

    def say(self, text: str = "", style: str = "") -> None:
        """A line of the human summary; the last one goes through `result`."""
        if self.human and not self.quiet:
            _print(sys.stdout, text, style)

    def data(self, text: str) -> None:
        """What was asked for itself, such as a model card: `quiet` does not leave it out."""
        if self.human:
            for line in text.splitlines():
                _print(sys.stdout, line, "")

    def result(self, text: str) -> None:
        """The last line of a summary: the number that people compare."""
        if self.human:
            _print(sys.stdout, text, "bold")

    def heading(self, text: str) -> None:
        self.say()
        self.say(text, "bold cyan")

    def pairs(self, rows: Iterable[tuple[str, str]]) -> None:
        """`key  value` lines, folded below the value on a terminal."""
        rows = list(rows)
        indent = max((len(key) for key, _ in rows), default=0) + 2
        for key, value in rows:
            first, *rest = fold(_safe(value), columns() - indent) if _is_terminal(sys.stdout) else [value]
            self.say(f"{key:<{indent}}{first}")
            for line in rest:
                self.say(" " * indent + line)

    def prose(self, text: str) -> None:
        """A line with names in it, folded on a terminal."""
        for line in fold(_safe(text), columns()) if _is_terminal(sys.stdout) else [text]:
            self.say(line)

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Columns headed `>name` are right-aligned."""
        if self.json or self.quiet:
            return
        cells = [[_safe(cell) for cell in row] for row in rows]
        if not cells:
            return
        first, *rest = plain_table(heads, cells, columns() if _is_terminal(sys.stdout) else None)
        self.say(first, "bold")
        for line in rest:
            self.say(line)

    def note(self, text: str) -> None:
        """Talk: explanations."""
        if self.human:
            self.progress(text)

    def progress(self, text: str) -> None:
        """Talk that a script's log wants, too: stderr, under --json as well."""
        if not self.quiet:
            _print(sys.stderr, text)

    def warn(self, texts: Iterable[str]) -> None:
        """Loud, also under -q. Under --json they are in the object, which comes later."""
        texts = list(texts)
        _unseen.extend(texts if self.json else ())
        self._some("warning", texts, WARNINGS_SHOWN, "bold yellow")

    def fail(self, texts: Iterable[str], shown: int = 1) -> None:
        """Why the exit code is 1. Under --json the object says so."""
        self._some("failed", list(texts), shown, "bold red")

    def _some(self, kind: str, texts: list[str], shown: int, style: str) -> None:
        if self.json:
            return
        for text in texts if self.verbose else texts[:shown]:
            line = f"kizami: {kind}: {_safe(text)}"
            for part in fold(line, columns(sys.stderr)) if _is_terminal(sys.stderr) else [line]:
                _print(sys.stderr, part, style)
        if len(texts) > shown and not self.verbose:
            _print(sys.stderr, f"kizami: {kind}: ... and {len(texts) - shown:,} more (-v shows all)", style)

    @property
    def shows_bar(self) -> bool:
        return not self.quiet and _is_terminal(sys.stderr)


def _with_unseen(body: dict[str, Any]) -> dict[str, Any]:
    stated = body.get("warnings", [])
    unseen = [text for text in _unseen if text not in stated]
    _unseen.clear()
    return body | {"warnings": [*stated, *unseen]} if unseen else body


def write_json(schema: str, body: dict[str, Any]) -> None:
    text = json.dumps({"schema": schema, **body}, indent=2, ensure_ascii=True, allow_nan=False)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def show_error(error: KizamiError, *, as_json: bool) -> None:
    """One line on stderr, or the object `kizami.error/1` on stdout."""
    if as_json:
        fields = {key: getattr(error, key) for key in ("code", "message", "file", "tensor", "hint")}
        write_json("kizami.error/1", _with_unseen({"error": fields}))
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


def columns(stream: TextIO | None = None) -> int:
    """Of the terminal behind `stream`, by default stdout."""
    try:
        found = 0 if os.environ.get("COLUMNS") else os.get_terminal_size((stream or sys.stdout).fileno()).columns
    except (OSError, ValueError):  # not a terminal
        found = 0
    return found or shutil.get_terminal_size().columns


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Aligned with spaces. In `width` characters, if given, by folding the last left-aligned column."""
    heads = [name.removeprefix(">") for name in columns]
    right = [name.startswith(">") for name in columns]
    widths = [max(len(line[i]) for line in (heads, *rows)) for i in range(len(columns))]
    if width is not None and not all(right):
        last = len(right) - 1 - right[::-1].index(False)
        others = sum(widths) - widths[last] + 2 * (len(widths) - 1)
        widths[last] = min(widths[last], max(MIN_CELL, width - others))
    lines = []
    for row in (heads, *rows):
        folded = [fold(cell, size) for cell, size in zip(row, widths, strict=True)]
        for i in range(max(map(len, folded))):
            cells = (part[i] if i < len(part) else "" for part in folded)
            aligned = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True))
            lines.append("  ".join(aligned).rstrip())
    return lines


def fold(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters, broken after spaces and before dots; elsewhere only where nothing fits."""
    width = max(width, 1)
    lines = [""]
    for piece in re.findall(r" +|[. ]?[^. ]+|[.]", text):
        if len(lines[-1]) + len(piece.rstrip(" ")) > width:
            lines.append("")
            piece = piece.lstrip(" ")
        while len(piece) > width:
            lines[-1], piece = piece[:width], piece[width:]
            lines.append("")
        lines[-1] += piece
    return [line.rstrip(" ") for line in lines if line.strip(" ")] or [""]


def counted(number: int, noun: str) -> str:
    """`1 file`, `1,200 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def relative_size(new: int, old: int) -> str:
    return f"{new / max(1, old):.2f}x the source's size"


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

"""Calibration data as files have it: plain text, JSONL and parquet, read to documents.

A long text is cut into pieces at line ends, which are then shuffled like documents: a file of a gigabyte gives text
from everywhere in it, and no source crowds out another because its documents are long.
"""

import hashlib
import io
import os
import stat
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from kizami.calibration.data.chat import check_messages, check_tools
from kizami.formats.errors import KizamiError, printable
from kizami.formats.files import io_error, kind_of, open_regular
from kizami.formats.strict_json import parse_json_object

MAX_LINE = 16 << 20  # bytes; a conversation of an agent with 100,000 tokens has 0.5 MB
MAX_PIPE = 1 << 30
_JSON_LINES = frozenset({".jsonl", ".ndjson"})
_PACKED = (
    (b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh", "bzip2"), (b"\xfd7zXZ", "xz"), (b"PK\x03\x04", "zip")
)  # fmt: skip
_PARQUET = b"PAR1"


@dataclass(frozen=True, slots=True)
class Document:
    """`text`, or `messages` with `tools` that the chat template turns into one. where: file and line, for errors.

    suffix: of the file, in small letters. The document is part `part` of `parts` of that text (`part_of`).
    """

    where: str
    suffix: str = ""
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    part: int = 0
    parts: int = 1


class Units:
    """The documents of a file by their place in it: where it begins, how long it is, its line or row, and its part."""

    def __init__(self) -> None:
        self._columns = [array("q") for _ in range(5)]

    def add(self, at: int, length: int, line: int, part: int = 0, parts: int = 1) -> None:
        for column, value in zip(self._columns, (at, length, line, part, parts), strict=True):
            column.append(value)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, unit: int) -> tuple[int, int, int, int, int]:
        at, length, line, part, parts = (column[unit] for column in self._columns)
        return at, length, line, part, parts


class DataFile(ABC):
    """An opened file that was read once, to its end. sha256: of its bytes. A context manager that closes it."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path, self.stream, self.units, self.sha256 = path, stream, Units(), ""
        self._status = _status(stream)

    @abstractmethod
    def index(self, piece: int) -> None:
        """Fills `units` and `sha256`; texts become pieces of about `piece` bytes."""

    @abstractmethod
    def read(self, units: Sequence[int]) -> list[Document]:
        """The documents of these units, in their order."""

    def check_unchanged(self) -> None:
        if _status(self.stream) != self._status:
            raise KizamiError("has changed while it was read", code="source_changed", file=str(self.path))

    def where(self, line: int) -> str:
        return f"{self.path} line {line}"

    def bad(self, message: str, line: int | None = None, hint: str | None = None) -> KizamiError:
        where = str(self.path) if line is None else self.where(line)
        return KizamiError(message, code="bad_data", file=where, hint=hint)

    def __enter__(self) -> "DataFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()


def open_data(path: Path, piece: int) -> DataFile:
    """Opens a file of the user's and reads it once. Links are followed. A pipe is read into memory, 1 GiB at most.

    .parquet files are parquet, .jsonl and .ndjson JSONL, and so is what ends in .json or has no suffix (a pipe) if its
    first line is an object with `text` or `messages`; all else is plain text in UTF-8. KizamiError as `read_tokens`.
    """
    stream = _open(path)
    try:
        file = _file_of(path, stream)
        file.index(piece)
        file.check_unchanged()
        if len(file.units) == 0:
            raise KizamiError("has no text", code="no_data", file=str(path))
    except OSError as e:
        stream.close()
        raise io_error("cannot read", e, str(path)) from e
    except BaseException:
        stream.close()
        raise
    return file


def part_of(text: str, part: int, parts: int) -> str:
    """One of `parts` parts of about the same length, cut after line ends where there are any."""

    def border(i: int) -> int:
        if i in (0, parts):
            return len(text) * (i == parts)
        at, end = i * len(text) // parts, (i + 1) * len(text) // parts
        return text.find("\n", at, end) + 1 or at

    return text[border(part) : border(part + 1)]


def document_of(file: DataFile, row: dict[str, Any], line: int) -> Document | None:
    """The document in an object or row; None for an empty one. `messages` count before `text`."""
    messages, text = row.get("messages"), row.get("text")
    document = Document(file.where(line), file.path.suffix.lower())
    if messages is not None:
        try:
            messages, tools = check_messages(messages), check_tools(row.get("tools"))
        except ValueError as e:
            raise file.bad(str(e), line) from None
        return replace(document, messages=messages, tools=tools) if messages else None
    if text is None:
        keys = ", ".join(printable(str(key), 40) for key in list(row)[:8]) or "none"
        raise file.bad(f"has the keys {keys}; expected text or messages", line)
    if not isinstance(text, str):
        raise file.bad(f"text is a {type(text).__name__}, expected a string", line)
    return replace(document, text=text) if text.strip() else None


class TextFile(DataFile):
    def index(self, piece: int) -> None:
        begin = end = 0
        first, blank = 1, True
        digest = hashlib.sha256()
        for number, at, line in _lines(self):
            digest.update(line)
            if b"\0" in line:
                raise self.bad("has a NUL byte, expected text", number)
            _decode(self, line, number)
            if end > begin and at + len(line) - begin > piece:
                if not blank:
                    self.units.add(begin, end - begin, first)
                begin, first, blank = at, number, True
            end, blank = at + len(line), blank and not line.strip()
            while end - begin > piece:  # only a line that is longer than a piece
                cut = _character(line, begin + piece - at)
                self.units.add(begin, at + cut - begin, number)
                begin, first = at + cut, number
        if end > begin and not blank:
            self.units.add(begin, end - begin, first)
        self.sha256 = digest.hexdigest()

    def read(self, units: Sequence[int]) -> list[Document]:
        self.check_unchanged()
        documents = []
        for at, length, line, _, _ in map(self.units.__getitem__, units):
            text = _slice(self, at, length).decode("utf-8").removeprefix("\ufeff")
            documents.append(Document(self.where(line), self.path.suffix.lower(), text))
        return documents


class JsonLines(DataFile):
    def index(self, piece: int) -> None:
        digest = hashlib.sha256()
        for number, at, line in _lines(self):
            digest.update(line)
            if not line.strip():
                continue
            if (document := self._document(line, number)) is not None:
                size = len(line) if document.text is None else len(document.text.encode())
                parts = -(-size // piece)
                for part in range(parts):
                    self.units.add(at, len(line), number, part, parts)
        self.sha256 = digest.hexdigest()

    def read(self, units: Sequence[int]) -> list[Document]:
        self.check_unchanged()
        documents = []
        for at, length, line, part, parts in map(self.units.__getitem__, units):
            document = self._document(_slice(self, at, length), line)
            assert document is not None
            documents.append(replace(document, part=part, parts=parts))
        return documents

    def _document(self, line: bytes, number: int) -> Document | None:
        data = line.removeprefix(b"\xef\xbb\xbf").strip()
        return document_of(self, parse_json_object(data, self.where(number), what="line"), number)


def _open(path: Path) -> BinaryIO:
    try:
        mode = path.stat().st_mode
        if stat.S_ISFIFO(mode):
            with open(path, "rb") as pipe:
                data = pipe.read(MAX_PIPE + 1)
            if len(data) > MAX_PIPE:
                raise KizamiError(f"gives more than {MAX_PIPE:,} bytes", code="too_large", file=str(path))
            return io.BytesIO(data)
    except FileNotFoundError:
        raise KizamiError("not found", code="missing_file", file=str(path)) from None
    except OSError as e:
        raise io_error("cannot open", e, str(path)) from e
    if stat.S_ISREG(mode):
        return os.fdopen(open_regular(path, str(path)), "rb", buffering=1 << 20)
    hint = "name the files in it, one --data for each" if stat.S_ISDIR(mode) else None
    raise KizamiError(f"is {kind_of(mode)}, expected a file or a pipe", code="not_a_file", file=str(path), hint=hint)


def _status(stream: BinaryIO) -> tuple[int, ...]:
    if isinstance(stream, io.BytesIO):
        return ()
    found = os.fstat(stream.fileno())
    return found.st_size, found.st_mtime_ns


def _file_of(path: Path, stream: BinaryIO) -> DataFile:
    """By the first bytes and the name."""
    head = stream.read(6)
    stream.seek(0)
    for magic, name in _PACKED:
        if head.startswith(magic):
            raise KizamiError(f"is packed with {name}", code="bad_data", file=str(path), hint="unpack it first")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise KizamiError("is UTF-16, expected UTF-8", code="bad_data", file=str(path), hint="iconv -f utf-16 -t utf-8")
    suffix = path.suffix.lower()
    if suffix == ".parquet" or head.startswith(_PARQUET):
        from kizami.calibration.data.parquet import Parquet

        kind: Any = Parquet  # mypy, given folders, takes its base for another class than the one above
        found: DataFile = kind(path, stream)
        return found
    return JsonLines(path, stream) if suffix in _JSON_LINES or _is_json_lines(path, stream) else TextFile(path, stream)


def _is_json_lines(path: Path, stream: BinaryIO) -> bool:
    """What may be either, by its first line."""
    if path.suffix.lower() not in ("", ".json"):
        return False
    line = next((line for line in iter(lambda: stream.readline(MAX_LINE + 1), b"") if line.strip()), b"").strip()
    stream.seek(0)
    if path.suffix.lower() == ".json" and line.startswith(b"["):
        raise KizamiError(
            "is one JSON list",
            code="bad_data",
            file=str(path),
            hint="write its objects one in a line, into a .jsonl file: jq -c '.[]'",
        )
    try:
        row = parse_json_object(line, str(path), what="line")
    except KizamiError:
        return False
    return "text" in row or "messages" in row


def _lines(file: DataFile) -> Iterator[tuple[int, int, bytes]]:
    """Number from 1, place, and bytes with the line's end."""
    file.stream.seek(0)
    number = at = 0
    while line := file.stream.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            message = f"has more than {MAX_LINE:,} bytes"
            raise KizamiError(message, code="too_large", file=file.where(number), hint="cut it into shorter lines")
        yield number, at, line
        at += len(line)


def _decode(file: DataFile, line: bytes, number: int) -> None:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as e:
        message = f"byte 0x{line[e.start]:02x} at {e.start} of the line is not UTF-8"
        raise file.bad(message, number, "text must be UTF-8: convert it with iconv") from None


def _character(line: bytes, at: int) -> int:
    """The begin of the character at `at`, so that none is cut in two."""
    while line[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _slice(file: DataFile, at: int, length: int) -> bytes:
    file.stream.seek(at)
    return file.stream.read(length)

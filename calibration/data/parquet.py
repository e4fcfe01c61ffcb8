"""Parquet files with a `text` or a `messages` column. pyarrow is asked for only here."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kizami.calibration.data.files import DataFile, Document, document_of
from kizami.formats.errors import KizamiError, printable

_COLUMNS = ("text", "messages", "tools")
_ROWS = 256  # decoded at a time
_HASH_CHUNK = 8 << 20


class Parquet(DataFile):
    """A unit's place is its row. Rows are decoded once to check them, and once more where they are used."""

    _file: Any

    def index(self, piece: int) -> None:
        digest = hashlib.sha256()
        while chunk := self.stream.read(_HASH_CHUNK):
            digest.update(chunk)
        self.sha256 = digest.hexdigest()
        self._file = self._opened()
        names = set(self._file.schema_arrow.names)
        self._columns = [name for name in _COLUMNS if name in names]
        if not {"text", "messages"} & names:
            found = ", ".join(printable(name, 40) for name in sorted(names)[:8])
            raise self.bad(f"has the columns {found}; expected text or messages")
        for group in range(self._file.num_row_groups):
            for number, row in self._rows(group):
                if (document := self._document(row, number)) is not None:
                    size = len(str(document.messages if document.text is None else document.text).encode())
                    parts = -(-size // piece)
                    for part in range(parts):
                        self.units.add(group, size, number, part, parts)

    def read(self, units: Sequence[int]) -> list[Document]:
        self.check_unchanged()
        wanted: dict[int, set[int]] = {}
        for group, _, number, _, _ in map(self.units.__getitem__, units):
            wanted.setdefault(group, set()).add(number)
        found: dict[int, Document] = {}
        for group, numbers in sorted(wanted.items()):
            for number, row in self._rows(group):
                if number in numbers and (document := self._document(row, number)) is not None:
                    found[number] = document
        places = map(self.units.__getitem__, units)
        return [replace(found[number], part=part, parts=parts) for _, _, number, part, parts in places]

    def where(self, line: int) -> str:
        return f"{self.path} row {line}"

    def _opened(self) -> Any:
        try:
            import pyarrow as arrow
            import pyarrow.parquet as parquet
        except ImportError:
            raise KizamiError(
                "reading parquet needs pyarrow", code="missing_package", file=str(self.path), hint="pip install pyarrow"
            ) from None
        self.stream.seek(0)
        try:
            return parquet.ParquetFile(arrow.PythonFile(self.stream, mode="r"))
        except (arrow.ArrowException, ValueError, OSError) as e:
            raise self.bad(f"cannot be read as parquet: {e}") from None

    def _rows(self, group: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Number from 1 in the whole file, and the row."""
        import pyarrow as arrow

        number = sum(self._file.metadata.row_group(before).num_rows for before in range(group))
        try:
            for batch in self._file.iter_batches(_ROWS, row_groups=[group], columns=self._columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except (arrow.ArrowException, ValueError, OSError) as e:
            raise self.bad(f"cannot be read as parquet: {e}", number + 1) from None

    def _document(self, row: dict[str, Any], number: int) -> Document | None:
        row = _without_nulls(row)
        return document_of(self, row, number) if row else None


def _without_nulls(value: Any) -> Any:
    """A column of structs gives every message the keys of all, null where it has none."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value

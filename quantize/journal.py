"""The memory of an unfinished job: OUT.partial/.kizami/. A line with the SHA-256 of a shard makes that shard done.

Order on disk: shard (fsynced, renamed), its report rows (the same), journal line (fsynced). A kill or a power cut
between any two of them leaves a shard without a line, which the next run writes anew.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.files import file_sha256, io_error
from kizami.formats.run_log import (
    FOLDER,
    JOURNAL,
    append_line,
    canonical,
    check_identity,
    complete_lines,
    damaged,
    lock_folder,
    read_own,
)
from kizami.formats.writer import fsync_folder, write_file_durably
from kizami.quantize.layout import MAX_FILES, shard_name
from kizami.quantize.plan import Plan, Shard
from kizami.quantize.report import Row, encode_row


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A finished shard."""

    number: int
    file: str
    nbytes: int
    sha256: str
    rows_sha256: str  # of the shard's report rows
    source_mtimes: dict[str, int]  # modification times, in ns, of the source files it was made from


def identity_of(plan: Plan, source_contents: dict[str, str]) -> dict[str, Any]:
    """The journal's first line: what a resumed run must share with the run it resumes."""
    return plan.identity | {
        "plan_hash": plan.hash,
        "shards": len(plan.shards),
        "source_contents": source_contents,
    }


def source_mtimes(shard: Shard, checkpoint: Checkpoint) -> dict[str, int]:
    sources = (info for step in shard.steps for info in step.sources)
    return {info.file: checkpoint.headers[info.file].mtime_ns for info in sources}


class Journal:
    """Appends records durably; holds a lock, so that two runs cannot write into one folder."""

    def __init__(self, partial: Path, done: dict[int, ShardRecord], lock: int) -> None:
        self.partial = partial
        self.done = done
        self._lock = lock
        self._failed: KizamiError | None = None

    @classmethod
    def open(
        cls,
        partial: Path,
        identity: dict[str, Any],
        *,
        restart: bool = False,
        look: Callable[[set[str]], None] = lambda earlier: None,
    ) -> "Journal":
        """Starts a journal, or resumes the one that is there. Raises KizamiError if it belongs to another job.

        restart: throws away what an earlier run left in `partial` (which kizami's journal marks as its own).
        look: called when `partial` is locked and before anything in it changes, with the shards that go on a restart.
        """
        folder = partial / FOLDER
        if folder.is_symlink():
            raise KizamiError(
                "is a link, not the folder of a journal", code="out_exists", file=f"{partial.name}/{FOLDER}"
            )
        lock = lock_folder(folder, partial)
        try:
            fsync_folder(partial)  # without the folders' names nothing in them would survive a power cut
            fsync_folder(partial.absolute().parent)
            path = folder / JOURNAL
            data = read_own(path)
            earlier = _shards_of(data) if restart else set()
            if data is not None and not restart:  # whose other settings may well have other files
                check_identity(_parse(data, path)[0], identity, partial)
            look(earlier)
            if restart:
                _clear(partial, earlier)
            if restart or data is None:
                data = (canonical({"identity": identity}) + "\n").encode()
                write_file_durably(path, data)
            _, done = _parse(data, path)
            whole = data.rfind(b"\n") + 1
            if whole != len(data):  # a kill in the middle of an append: that line never happened
                os.truncate(path, whole)
        except BaseException:
            os.close(lock)
            raise
        return cls(partial, done, lock)

    def append(self, record: ShardRecord) -> None:
        """KizamiError "io_error". After one nothing more is appended: half a line may be there, and one behind it would
        be no line at all."""
        if self._failed is not None:
            raise self._failed
        try:
            append_line(self.partial / FOLDER / JOURNAL, (canonical(asdict(record)) + "\n").encode())
        except OSError as e:
            self._failed = io_error("cannot write", e, f"{self.partial.name}/{FOLDER}/{JOURNAL}")
            raise self._failed from e
        self.done[record.number] = record

    def forget(self, number: int) -> None:
        """A journalled shard that is not, or was not made from, what the line says is written anew."""
        del self.done[number]

    def rows_path(self, number: int) -> Path:
        return self.partial / FOLDER / f"rows-{number:05d}.jsonl"

    def write_rows(self, number: int, rows: Iterable[Row]) -> str:
        """Returns their SHA-256."""
        data = b"".join(encode_row(row) for row in rows)
        write_file_durably(self.rows_path(number), data)
        return hashlib.sha256(data).hexdigest()

    def is_whole(self, record: ShardRecord, *, sent: bool = False) -> bool:
        """Whether shard and rows are still the bytes that were recorded. sent: the shard is on the Hub, and may be gone
        from here."""
        try:
            shard, rows = self.partial / record.file, self.rows_path(record.number)
            if not is_regular(rows) or file_sha256(rows, rows.name) != record.rows_sha256:
                return False
            return sent or (is_regular(shard, record.nbytes) and file_sha256(shard, record.file) == record.sha256)
        except (OSError, KizamiError):
            return False

    def close(self) -> None:
        os.close(self._lock)


KEPT = ("lock", JOURNAL)
_NAMES = r"journal\.jsonl|rows-\d{5}\.jsonl|given\.safetensors|given\.json"
JOURNAL_FILE = re.compile(rf"lock|{_NAMES}|\.({_NAMES})\.tmp")
_FIRST = b'{"identity":'  # what `canonical` makes of the first line


def _shards_of(data: bytes | None) -> set[str]:
    """The files that the job of this journal has made or would have, as its first line says; none if that is
    damaged."""
    try:
        count = json.loads((data or b"").partition(b"\n")[0])["identity"]["shards"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return set()
    return {shard_name(i, count) for i in range(1, count + 1)} if type(count) is int and count <= MAX_FILES else set()


def _clear(partial: Path, shards: set[str]) -> None:
    """Shards and rows go; the journal stays until a new one takes its place, because it marks the folder as ours."""
    for path in sorted((partial / FOLDER).iterdir()):
        if JOURNAL_FILE.fullmatch(path.name) and path.name not in KEPT:
            path.unlink()
    for name in sorted(shards):
        for path in (partial / name, partial / f".{name}.tmp"):
            path.unlink(missing_ok=True)
    for folder in (partial / FOLDER, partial):
        fsync_folder(folder)


def is_regular(path: Path, nbytes: int | None = None) -> bool:
    """Whether `path` is a regular file, of that size; a link is none: what it leads to is not in OUT. OSError."""
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and nbytes in (None, found.st_size)


def is_journal(path: Path) -> bool | None:
    """Whether `path` is a file that begins as every journal does; None if nothing is there."""
    try:
        begin = read_own(path, len(_FIRST)) if is_regular(path) else b""
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if begin is None else begin == _FIRST


def read_journal(path: Path) -> tuple[Any, dict[int, ShardRecord]] | None:
    """Identity and records; None if there is no journal. Changes nothing. KizamiError as `Journal.open`."""
    data = read_own(path)
    return None if data is None else _parse(data, path)


def _parse(data: bytes, path: Path) -> tuple[Any, dict[int, ShardRecord]]:
    """The identity, None if the first line has none, and the last record of each shard. Half a last line is none."""
    lines = complete_lines(data, path)
    found = lines[0].get("identity") if lines else None
    return found, {record.number: record for record in (_record(line, path) for line in lines[1:])}


def _record(line: dict[str, Any], path: Path) -> ShardRecord:
    try:
        record = ShardRecord(**line)
    except TypeError:
        raise damaged(path) from None
    words = (record.file, record.sha256, record.rows_sha256)
    mtimes = list(record.source_mtimes.values()) if type(record.source_mtimes) is dict else [None]
    if not all(type(n) is int for n in (record.number, record.nbytes, *mtimes)) or {*map(type, words)} != {str}:
        raise damaged(path)
    return record

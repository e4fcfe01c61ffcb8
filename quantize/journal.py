"""The memory of an unfinished job: OUT.partial/.kizami/. A line with the SHA-256 of a shard makes that shard done.

Order on disk: shard (fsynced, renamed), its report rows (the same), journal line (fsynced). A kill between any
two of them leaves a shard without a line, which the next run writes anew.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from kizami.formats.errors import KizamiError
from kizami.formats.files import file_sha256
from kizami.formats.writer import write_file_durably
from kizami.quantize.plan import canonical
from kizami.quantize.report import Row, encode_row

FOLDER = ".kizami"
JOURNAL = "journal.jsonl"


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A finished shard."""

    number: int
    file: str
    nbytes: int
    sha256: str
    rows_sha256: str  # of the shard's report rows


class Journal:
    """Appends records durably; holds a lock, so that two runs cannot write into one folder."""

    def __init__(self, partial: Path, done: dict[int, ShardRecord], lock: IO[str]) -> None:
        self.partial = partial
        self.done = done
        self._lock = lock

    @classmethod
    def open(cls, partial: Path, identity: dict[str, Any], *, restart: bool = False) -> "Journal":
        """Starts a journal, or resumes the one that is there. Raises KizamiError if it belongs to another job.

        restart: throws away what an earlier run left in `partial` (which kizami's journal marks as its own).
        """
        folder = partial / FOLDER
        if folder.is_symlink():
            raise KizamiError(
                "is a link, not the folder of a journal", code="out_exists", file=f"{partial.name}/{FOLDER}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder / "lock", partial)
        try:
            path = folder / JOURNAL
            if restart:
                _clear(partial)
            if not path.exists():
                write_file_durably(path, (canonical({"identity": identity}) + "\n").encode())
            lines = _complete_lines(path)
            _check_identity(lines[0].get("identity") if lines else None, identity, partial)
            done = {record.number: record for record in (_record(line, path) for line in lines[1:])}
        except BaseException:
            lock.close()
            raise
        return cls(partial, done, lock)

    def append(self, record: ShardRecord) -> None:
        with open(self.partial / FOLDER / JOURNAL, "a", encoding="utf-8") as f:
            f.write(canonical(asdict(record)) + "\n")
            f.flush()
            os.fsync(f.fileno())
        self.done[record.number] = record

    def forget(self, number: int) -> None:
        """A journalled shard whose bytes are not what the line says is written anew."""
        del self.done[number]

    def rows_path(self, number: int) -> Path:
        return self.partial / FOLDER / f"rows-{number:05d}.jsonl"

    def write_rows(self, number: int, rows: Iterable[Row]) -> str:
        """Returns their SHA-256."""
        data = b"".join(encode_row(row) for row in rows)
        write_file_durably(self.rows_path(number), data)
        return hashlib.sha256(data).hexdigest()

    def is_whole(self, record: ShardRecord) -> bool:
        """Whether shard and rows are still the bytes that were recorded."""
        try:
            shard, rows = self.partial / record.file, self.rows_path(record.number)
            return (
                shard.stat().st_size == record.nbytes
                and file_sha256(rows, rows.name) == record.rows_sha256
                and file_sha256(shard, record.file) == record.sha256
            )
        except (OSError, KizamiError):
            return False

    def close(self) -> None:
        self._lock.close()


def _lock(path: Path, partial: Path) -> IO[str]:
    lock = open(path, "a", encoding="utf-8")  # noqa: SIM115 — held as long as the journal
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise KizamiError(
            "another kizami is writing there",
            code="locked",
            file=partial.name,
            hint="wait for it, or choose another OUT",
        ) from None
    return lock


OUTPUT_FILE = re.compile(r"\.?model-\d{5}-of-\d{5}\.safetensors(\.tmp)?")
JOURNAL_FILE = re.compile(r"lock|journal\.jsonl|rows-\d{5}\.jsonl|\..*\.tmp")


def _clear(partial: Path) -> None:
    """Shards, rows and journal go; what a stranger may have put there stays, and `finish` will name it."""
    for folder, ours in ((partial, OUTPUT_FILE), (partial / FOLDER, JOURNAL_FILE)):
        for path in sorted(folder.iterdir()):
            if ours.fullmatch(path.name) and path.name != "lock" and (path.is_symlink() or path.is_file()):
                path.unlink()


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    """A kill in the middle of an append leaves a last line without its end: it never happened, and is cut off."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        os.truncate(path, len(whole))
    lines = []
    for raw in whole.splitlines():
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict):
            raise _damaged(path)
        lines.append(line)
    return lines


def _record(line: dict[str, Any], path: Path) -> ShardRecord:
    try:
        record = ShardRecord(**line)
    except TypeError:
        raise _damaged(path) from None
    words = (record.file, record.sha256, record.rows_sha256)
    if type(record.number) is not int or type(record.nbytes) is not int or not all(type(w) is str for w in words):
        raise _damaged(path)
    return record


def _damaged(path: Path) -> KizamiError:
    return KizamiError(
        "a line is not what kizami writes; the unfinished job cannot be trusted",
        code="damaged_journal",
        file=f"{path.parent.parent.name}/{FOLDER}/{path.name}",
        hint="start over with --restart",
    )


def _check_identity(found: Any, wanted: dict[str, Any], partial: Path) -> None:
    if found == json.loads(canonical(wanted)):
        return
    changes = "; ".join(_differences(found if isinstance(found, dict) else {}, wanted))
    raise KizamiError(
        f"an unfinished job with other settings or another source is there ({changes})",
        code="resume_mismatch",
        file=partial.name,
        hint="repeat the first command to resume it, or start over with --restart",
    )


def _differences(found: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> list[str]:
    """`policy.group_size: 32 then, 64 now`, at most a handful."""
    lines: list[str] = []
    for key in sorted(found.keys() | wanted.keys()):
        then, now = found.get(key), json.loads(canonical(wanted.get(key)))
        if isinstance(then, dict) and isinstance(now, dict):
            lines += _differences(then, now, f"{prefix}{key}.")
        elif then != now:
            lines.append(f"{prefix}{key}: {then} then, {now} now")
    causes = [line for line in lines if not line.startswith("plan_hash: ")]  # the hash only follows from them
    return (causes or lines)[:5]

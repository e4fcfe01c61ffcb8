"""The memory of an unfinished job: OUT.partial/.kizami/. A line with the SHA-256 of a shard makes that shard done.

Order on disk: shard (fsynced, renamed), its report rows (the same), journal line (fsynced). A kill between any
two of them leaves a shard without a line, which the next run writes anew.
"""

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from kizami.formats.errors import KizamiError
from kizami.formats.writer import write_file_durably
from kizami.quantize.plan import canonical

FOLDER = ".kizami"
JOURNAL = "journal.jsonl"


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A finished shard."""

    number: int
    file: str
    nbytes: int
    sha256: str


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
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder / "lock", partial)
        try:
            path = folder / JOURNAL
            if restart:
                _clear(partial, keep=folder / "lock")
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

    def write_rows(self, number: int, rows: Iterable[dict[str, Any]]) -> None:
        write_file_durably(self.rows_path(number), "".join(canonical(row) + "\n" for row in rows).encode())

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


def _clear(partial: Path, keep: Path) -> None:
    for path in sorted(partial.rglob("*"), reverse=True):  # contents before their folder
        if path == keep or path == keep.parent:
            continue
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
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
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise _damaged(path)
        lines.append(line)
    return lines


def _record(line: dict[str, Any], path: Path) -> ShardRecord:
    try:
        return ShardRecord(int(line["number"]), str(line["file"]), int(line["nbytes"]), str(line["sha256"]))
    except (KeyError, TypeError, ValueError):
        raise _damaged(path) from None


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
    return lines[:5]

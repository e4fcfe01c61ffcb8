"""What lies in OUT.partial/.kizami/: the names, the records of finished shards, and whose they are.

`journal.jsonl` is the job's, and its first line says which job that is. A process that converts a part of it
(`--shards`) never writes to another's file: it has a journal of its own, `part-<first>-<last>-<attempt>.jsonl`, with
the same first line, and holds `part-<first>-<last>.lock`. What it has not finished lies under names with its attempt in
them, so a process that was given up for lost and wakes up again cannot touch the bytes of the one that took its place.
"""

import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kizami.formats.run_log import (
    JOURNAL,
    canonical,
    check_identity,
    complete_lines,
    damaged,
    read_own,
)
from kizami.quantize.layout import MAX_FILES, shard_name

LOCK, PARTS_LOCK = "lock", "parts.lock"
KEPT = (LOCK, JOURNAL)
_NAMES = r"journal\.jsonl|rows-\d{5}\.jsonl|given\.safetensors|given\.json|part-\d{5}-\d{5}-[0-9a-f]{8}\.jsonl"
_ATTEMPT = r"[0-9a-f]{8}"
JOURNAL_FILE = re.compile(
    rf"lock|parts\.lock|part-\d{{5}}-\d{{5}}\.lock|{_NAMES}|\.({_NAMES})\.tmp"
    rf"|\.rows-\d{{5}}\.jsonl\.{_ATTEMPT}|\.\.rows-\d{{5}}\.jsonl\.{_ATTEMPT}\.tmp"
)
_PART = re.compile(rf"(part-(\d{{5}})-(\d{{5}}))(?:-{_ATTEMPT}\.jsonl|\.lock)")
_UNFINISHED = re.compile(rf"\.(?:(.+)\.{_ATTEMPT}|\.(.+)\.{_ATTEMPT}\.tmp)")  # as attempt_name, and its temporary
_FIRST = b'{"identity":'  # what `canonical` makes of the first line


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A finished shard."""

    number: int
    file: str
    nbytes: int
    sha256: str
    rows_sha256: str  # of the shard's report rows
    source_mtimes: dict[str, int]  # modification times, in ns, of the source files it was made from


def new_attempt() -> str:
    """A word that no other process has."""
    return secrets.token_hex(4)


def attempt_name(file: str, attempt: str) -> str:
    """Where the bytes of `file` lie until whoever holds the journal gives them their name."""
    return f".{file}.{attempt}"


def attempted(name: str) -> str | None:
    """The file that `name` would have become; None for a name that is no attempt's."""
    match = _UNFINISHED.fullmatch(name)
    return None if match is None else match[1] or match[2]


def remove_attempts(folder: Path, files: Iterable[str]) -> None:
    """What lost processes have left of `files`, those that worked alone included: nobody may be at work on these.
    OSError."""
    wanted = set(files)
    alone = {f".{file}.tmp" for file in wanted}
    for name in os.listdir(folder):
        if name in alone or attempted(name) in wanted:
            (folder / name).unlink(missing_ok=True)


def rows_name(number: int) -> str:
    return f"rows-{number:05d}.jsonl"


def part_range(name: str) -> tuple[int, int] | None:
    """First and last shard of a part's journal or lock; None for any other name."""
    match = _PART.fullmatch(name)
    return None if match is None else (int(match[2]), int(match[3]))


def part_journals(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if part_range(path.name) and path.suffix == ".jsonl")


def part_locks(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if part_range(path.name) and path.suffix == ".lock")


def is_lock(name: str) -> bool:
    return name in (LOCK, PARTS_LOCK) or (part_range(name) is not None and name.endswith(".lock"))


def is_held(lock: Path) -> bool:
    """Whether a process that lives holds it."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe has no lock of ours
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def encode_records(identity: dict[str, Any], records: Iterable[ShardRecord]) -> bytes:
    lines = [canonical({"identity": identity}), *(canonical(asdict(record)) for record in records)]
    return "".join(f"{line}\n" for line in lines).encode()


def all_records(folder: Path, identity: dict[str, Any], partial: Path) -> dict[int, ShardRecord]:
    """The last record of each shard in all journals of the folder. KizamiError "resume_mismatch" where one of them is
    of another job, "damaged_journal"."""
    paths = [folder / JOURNAL, *part_journals(folder)]
    found: list[tuple[int, dict[int, ShardRecord]]] = []
    for path in paths:
        with suppress(FileNotFoundError):
            mtime = path.lstat().st_mtime_ns
            if (read := read_journal(path)) is not None:
                check_identity(read[0], identity, partial)
                found.append((mtime, read[1]))
    merged: dict[int, ShardRecord] = {}
    for _, records in sorted(found, key=lambda pair: pair[0]):  # a wrong order costs a shard's time: bytes are hashed
        merged |= records
    return merged


def shards_of(data: bytes | None) -> set[str]:
    """The files that the job of this journal has made or would have, as its first line says; none if that is
    damaged."""
    try:
        count = json.loads((data or b"").partition(b"\n")[0])["identity"]["shards"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return set()
    return {shard_name(i, count) for i in range(1, count + 1)} if type(count) is int and count <= MAX_FILES else set()


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
    return None if data is None else parse_journal(data, path)


def parse_journal(data: bytes, path: Path) -> tuple[Any, dict[int, ShardRecord]]:
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

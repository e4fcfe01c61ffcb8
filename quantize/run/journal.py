"""The memory of an unfinished job: OUT.partial/.kizami/. A line with the SHA-256 of a shard makes that shard done.

Order on disk: shard (fsynced, renamed), its report rows (the same), journal line (fsynced). A kill or a power cut
between any two of them leaves a shard without a line, which the next run writes anew.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.files import file_sha256, io_error
from kizami.formats.run_log import FOLDER, JOURNAL, append_line, canonical, check_identity, lock_folder, read_own
from kizami.formats.writer import fsync_folder, write_file_durably
from kizami.quantize.plan import Plan, Shard
from kizami.quantize.report import Row, encode_row
from kizami.quantize.run.job_folder import (
    JOURNAL_FILE,
    KEPT,
    ShardRecord,
    all_records,
    attempt_name,
    encode_records,
    is_held,
    is_regular,
    parse_journal,
    part_journals,
    part_locks,
    remove_attempts,
    rows_name,
    shards_of,
)


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
    """Appends records durably; holds locks, so that no two processes write one shard. attempt: of a process that works
    beside others; its files get their names when they are whole."""

    def __init__(self, path: Path, done: dict[int, ShardRecord], locks: Iterable[int], attempt: str = "") -> None:
        self.path, self.partial = path, path.parent.parent
        self.done = done
        self.attempt = attempt
        self._locks = tuple(locks)
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
        """Starts a journal, or resumes the one that is there, with what the parts of the job have done. Raises
        KizamiError if it belongs to another job, or while a part is at work.

        restart: throws away what an earlier run left in `partial` (which kizami's journal marks as its own).
        look: called when `partial` is locked and before anything in it changes, with the shards that go on a restart.
        """
        folder = job_folder(partial)
        lock = _lock_alone(folder, partial)
        try:
            fsync_folder(partial)  # without the folders' names nothing in them would survive a power cut
            fsync_folder(partial.absolute().parent)
            path = folder / JOURNAL
            data = read_own(path)
            earlier = shards_of(data) if restart else set()
            if data is not None and not restart:  # whose other settings may well have other files
                check_identity(parse_journal(data, path)[0], identity, partial)
            look(earlier)
            if restart:
                _clear(partial, earlier)
            if restart or data is None:
                data = encode_records(identity, ())
                write_file_durably(path, data)
            whole = data.rfind(b"\n") + 1
            if whole != len(data):  # a kill in the middle of an append: that line never happened
                os.truncate(path, whole)
            _, done = parse_journal(data, path)
            if not restart:
                if part_locks(folder):  # which every part has
                    done = all_records(folder, identity, partial)
                    _adopt(path, identity, done)
                remove_attempts(partial, shards_of(data))
        except BaseException:
            os.close(lock)
            raise
        return cls(path, done, [lock])

    def append(self, record: ShardRecord) -> None:
        """KizamiError "io_error". After one nothing more is appended: half a line may be there, and one behind it would
        be no line at all."""
        if self._failed is not None:
            raise self._failed
        try:
            append_line(self.path, (canonical(asdict(record)) + "\n").encode())
        except OSError as e:
            self._failed = io_error("cannot write", e, f"{self.partial.name}/{FOLDER}/{self.path.name}")
            raise self._failed from e
        self.done[record.number] = record

    def forget(self, number: int) -> None:
        """A journalled shard that is not, or was not made from, what the line says is written anew."""
        del self.done[number]

    def rows_path(self, number: int) -> Path:
        return self.path.parent / rows_name(number)

    def write_rows(self, number: int, rows: Iterable[Row]) -> str:
        """Returns their SHA-256."""
        data = b"".join(encode_row(row) for row in rows)
        path = self.rows_path(number)
        if self.attempt:
            name = attempt_name(path.name, self.attempt)
            write_file_durably(path.with_name(name), data)
            self.give_name(path.parent, name, path.name)
        else:
            write_file_durably(path, data)
        return hashlib.sha256(data).hexdigest()

    def give_name(self, folder: Path, attempt: str, name: str) -> None:
        """The whole file `attempt` becomes `name`, durably. A process whose journal somebody has taken away has been
        given up for lost, and others do its work now: it changes nothing more. KizamiError "io_error"."""
        try:
            self.path.lstat()
            os.replace(folder / attempt, folder / name)
            fsync_folder(folder)
        except OSError as e:
            raise io_error("cannot finish", e, name) from e

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
        for lock in reversed(self._locks):
            os.close(lock)


def job_folder(partial: Path) -> Path:
    """OUT.partial/.kizami. KizamiError "out_exists" for a link there."""
    folder = partial / FOLDER
    if folder.is_symlink():
        raise KizamiError("is a link, not the folder of a journal", code="out_exists", file=f"{partial.name}/{FOLDER}")
    return folder


def _lock_alone(folder: Path, partial: Path) -> int:
    try:
        return lock_folder(folder, partial)
    except KizamiError as e:
        busy = [lock.stem for lock in part_locks(folder) if is_held(lock)] if e.code == "locked" else []
        if not busy:
            raise
        more = f" and {len(busy) - 3} more" if len(busy) > 3 else ""
        raise KizamiError(
            f"jobs with --shards are still writing there: {', '.join(busy[:3])}{more}",
            code="locked",
            file=partial.name,
            hint="wait for them, then run the same command again: it finishes",
        ) from None


def _adopt(path: Path, identity: dict[str, Any], done: dict[int, ShardRecord]) -> None:
    """What parts of the job have recorded goes into its journal, and their files go. One of them that lives on, cut off
    from its lock, finds its journal gone and ends."""
    journals, locks = part_journals(path.parent), part_locks(path.parent)
    if journals:
        write_file_durably(path, encode_records(identity, (done[number] for number in sorted(done))))
    for part in (*journals, *locks):
        part.unlink()
    remove_attempts(path.parent, {rows_name(number) for number in range(1, identity["shards"] + 1)})


def _clear(partial: Path, shards: set[str]) -> None:
    """Shards and rows go; the journal stays until a new one takes its place, because it marks the folder as ours."""
    for path in sorted((partial / FOLDER).iterdir()):
        if JOURNAL_FILE.fullmatch(path.name) and path.name not in KEPT:
            path.unlink()
    for name in sorted(shards):
        for path in (partial / name, partial / f".{name}.tmp"):
            path.unlink(missing_ok=True)
    remove_attempts(partial, shards)
    for folder in (partial / FOLDER, partial):
        fsync_folder(folder)

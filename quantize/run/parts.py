"""A part of a job (`--shards A-B/N`), converted by a process of its own beside others in one OUT.partial.

All parts share the folder's lock, which the whole job takes alone: it finishes when no part is at work. Each part holds
the lock of its range; who comes looks at the ranges of the others first, one at a time.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kizami.formats.errors import KizamiError
from kizami.formats.run_log import JOURNAL, check_identity, lock_file, lock_folder
from kizami.formats.writer import fsync_folder, write_file_durably
from kizami.quantize.layout import shard_name
from kizami.quantize.plan import Plan, Shard
from kizami.quantize.run.job_folder import (
    PARTS_LOCK,
    all_records,
    encode_records,
    is_held,
    new_attempt,
    part_journals,
    part_locks,
    part_range,
    read_journal,
    remove_attempts,
    rows_name,
)
from kizami.quantize.run.journal import Journal, job_folder

TRIES, PAUSE = 600, 0.1  # of a lock that others hold for moments only: a minute


@dataclass(frozen=True, slots=True)
class Part:
    """Shards `first` to `last`, counted from 1, of a plan that has `of`."""

    first: int
    last: int
    of: int

    def __str__(self) -> str:
        numbers = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"{numbers}/{self.of}"

    @property
    def name(self) -> str:
        return f"part-{self.first:05d}-{self.last:05d}"

    @property
    def files(self) -> list[str]:
        return [shard_name(number, self.of) for number in range(self.first, self.last + 1)]

    def shards(self, plan: Plan) -> tuple[Shard, ...]:
        """Those of the plan. KizamiError "bad_shards" where the plan has not as many as the part was cut for."""
        found = len(plan.shards)
        if self.of != found:
            raise KizamiError(
                f"--shards {self} is of {self.of} shards, and the plan has {found}",
                code="bad_shards",
                hint=f"N is {found} with these options: kizami plan SRC --json tells it as output.shards",
            )
        return plan.shards[self.first - 1 : self.last]


def open_part(
    partial: Path, identity: dict[str, Any], part: Part, *, restart: bool, look: Callable[[], None]
) -> Journal:
    """A journal for these shards alone, which knows what of them any earlier process of the job has finished. restart:
    forgets that. look: called before anything but locks is made. KizamiError "locked" while another process is at one
    of these shards, or the whole job; "resume_mismatch" where the folder is of another job."""
    folder = job_folder(partial)
    with ExitStack() as locks:

        def held(lock: int) -> int:
            locks.callback(os.close, lock)
            return lock

        shared = held(lock_folder(folder, partial, shared=True))
        with ExitStack() as registration:
            registration.callback(os.close, _for_a_moment(folder / PARTS_LOCK, partial))
            _refuse_overlap(folder, part, partial)
            own = held(_for_a_moment(folder / f"{part.name}.lock", partial))
            look()
            _agree(folder, identity, partial, restart=restart)
        attempt = new_attempt()
        records = {} if restart else all_records(folder, identity, partial)
        done = {number: records[number] for number in sorted(records) if part.first <= number <= part.last}
        path = folder / f"{part.name}-{attempt}.jsonl"
        write_file_durably(path, encode_records(identity, done.values()))
        _remove_earlier(partial, part, path, restart=restart)
        locks.pop_all()
    return Journal(path, done, (shared, own), attempt)


def _for_a_moment(path: Path, partial: Path) -> int:
    """A lock that nobody holds for long, once what holds it for long has been ruled out."""
    for more in reversed(range(TRIES)):
        try:
            return lock_file(path, partial)
        except KizamiError as e:
            if e.code != "locked" or not more:
                raise
            time.sleep(PAUSE)
    raise AssertionError("the last try ends it")


def _refuse_overlap(folder: Path, part: Part, partial: Path) -> None:
    for lock in part_locks(folder):
        first, last = part_range(lock.name) or (0, 0)
        if first <= part.last and part.first <= last and is_held(lock):
            raise KizamiError(
                f"another kizami converts shards {first}-{last} there, and --shards {part} has some of them",
                code="locked",
                file=partial.name,
                hint="wait for it, or cut the shards into ranges that do not overlap",
            )


def _agree(folder: Path, identity: dict[str, Any], partial: Path, *, restart: bool) -> None:
    """The folder is of this job: the first process says which that is, and all others are held against it."""
    path = folder / JOURNAL
    if (found := read_journal(path)) is None:
        write_file_durably(path, encode_records(identity, ()))
        fsync_folder(partial)  # without the folders' names nothing in them would survive a power cut
        fsync_folder(partial.absolute().parent)
        return
    try:
        check_identity(found[0], identity, partial)
    except KizamiError as e:
        if not restart:
            raise
        raise KizamiError(
            f"{e.message}; --restart with --shards starts these shards over, and not the work of others",
            code=e.code,
            file=e.file,
            hint=f"remove {partial.name} to start over with other settings",
        ) from None


def _remove_earlier(partial: Path, part: Part, own: Path, *, restart: bool) -> None:
    """What processes that had this range left unfinished, and their journals: `own` has what they recorded."""
    for path in part_journals(own.parent):
        if part_range(path.name) == (part.first, part.last) and path != own:
            path.unlink(missing_ok=True)
    remove_attempts(partial, part.files)
    remove_attempts(own.parent, [rows_name(number) for number in range(part.first, part.last + 1)])
    if restart:
        for name in part.files:
            with suppress(FileNotFoundError):
                (partial / name).unlink()

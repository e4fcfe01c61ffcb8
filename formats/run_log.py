"""What every unfinished job keeps beside its work: a folder with a lock and a journal of JSON lines, the first of which
says whose job it is."""

import errno
import fcntl
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from kizami.formats.errors import KizamiError, printable
from kizami.formats.files import io_error, kind_of
from kizami.formats.writer import make_folders_durably

FOLDER = ".kizami"
JOURNAL = "journal.jsonl"
VALUE_SHOWN = 60  # letters of a setting in an error


def canonical(value: object) -> str:
    """One spelling per value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def append_line(path: Path, line: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while line:
            line = line[os.write(fd, line) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def lock_folder(folder: Path, partial: Path, *, shared: bool = False) -> int:
    """A descriptor of `folder`/lock, which holds the lock as long as it is open. Another run that finishes meanwhile
    takes the folder away; it is made again, and `place.check_still_absent` tells. shared: others may hold it, too, if
    they share it."""
    path = folder / "lock"
    for more in reversed(range(10)):
        try:
            make_folders_durably(folder)
            lock = lock_file(path, partial, shared=shared)
        except FileNotFoundError:
            if more:
                continue
            raise
        if _is_at(path, lock):
            return lock
        os.close(lock)
    raise _not_locked(BlockingIOError(errno.EWOULDBLOCK, "taken away again and again"), partial)


def lock_file(path: Path, partial: Path, *, shared: bool = False) -> int:
    """A descriptor that holds the lock. KizamiError "locked" where somebody else does; FileNotFoundError."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as e:
        os.close(lock)
        raise _not_locked(e, partial) from None
    return lock


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _not_locked(error: OSError, partial: Path) -> KizamiError:
    if error.errno in (errno.EWOULDBLOCK, errno.EACCES):  # EACCES: NFS, where the lock becomes fcntl's
        return KizamiError(
            "another kizami is writing there",
            code="locked",
            file=partial.name,
            hint="wait for it, or write elsewhere",
        )
    hint = "kizami needs flock, so that no two runs write into one folder: write to another file system"
    return io_error("cannot lock", error, partial.name, hint)


def read_own(path: Path, limit: int = sys.maxsize) -> bytes | None:
    """The bytes of a file that kizami wrote, `limit` of them at most; None if there is none. Neither a link's target,
    which a stranger may own, nor a pipe, which may never end: KizamiError "out_exists"."""
    try:
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            raise KizamiError(
                f"is {kind_of(mode)}, not the file that kizami writes",
                code="out_exists",
                file=f"{path.parent.parent.name}/{FOLDER}/{path.name}",
                hint="move it away",
            )
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    data = bytearray()
    try:
        while len(data) < limit and (more := os.read(fd, min(1 << 20, limit - len(data)))):
            data += more
    finally:
        os.close(fd)
    return bytes(data)


def complete_lines(data: bytes, path: Path) -> list[dict[str, Any]]:
    lines = []
    for raw in data[: data.rfind(b"\n") + 1].splitlines():
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict):
            raise damaged(path)
        lines.append(line)
    return lines


def damaged(path: Path) -> KizamiError:
    return KizamiError(
        "a line is not what kizami writes; the unfinished job cannot be trusted",
        code="damaged_journal",
        file=f"{path.parent.parent.name}/{FOLDER}/{path.name}",
        hint="start over with --restart",
    )


def is_identity(found: Any, wanted: dict[str, Any]) -> bool:
    return bool(found == json.loads(canonical(wanted)))


def check_identity(found: Any, wanted: dict[str, Any], partial: Path) -> None:
    if is_identity(found, wanted):
        return
    if not isinstance(found, dict):
        raise damaged(partial / FOLDER / JOURNAL)
    changes = "; ".join(_differences(found, wanted))
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
            then, now = (printable(str(value), VALUE_SHOWN) for value in (then, now))
            lines.append(f"{prefix}{printable(str(key), VALUE_SHOWN)}: {then} then, {now} now")
    causes = [line for line in lines if not line.startswith("plan_hash: ")]  # the hash only follows from them
    return (causes or lines)[:5]

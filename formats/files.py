"""Files of an untrusted folder: which may be opened, and how."""

import errno
import hashlib
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from kizami.formats.errors import KizamiError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def io_error(doing: str, error: OSError, file: str, hint: str | None = None) -> KizamiError:
    """What the system said, as a refusal of code "io_error". hint: a full disk has its own."""
    if hint is None and error.errno in _FULL:
        hint = "make room, then run the same command again"
    return KizamiError(f"{doing}: {error.strerror or error}", code="io_error", file=file, hint=hint)


def has_control(text: str) -> bool:
    """True if `text` has a character of Unicode's C0/C1 controls (NUL, newline, escape...) or half a surrogate pair."""
    return not text.isprintable() and any(c < " " or "\x7f" <= c <= "\x9f" or "\ud800" <= c <= "\udfff" for c in text)


def check_encoding(name: str, file: str | None = None) -> None:
    """Refuses a name that would mean something else here than where the locale has UTF-8. KizamiError
    "bad_environment"."""
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8" and not name.isascii():
        raise KizamiError(
            f"has letters beyond ASCII in its name, and Python takes names as {encoding} here, not as UTF-8",
            code="bad_environment",
            file=file or name,
            hint="set PYTHONUTF8=1, or a locale that has UTF-8",
        )


_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


def kind_of(mode: int) -> str:
    """`a folder`, `a link`, `a named pipe`...: what a mode of lstat or stat says."""
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def what_is_there(path: Path) -> str | None:
    """What stands where a new folder shall be made, as `is a link` or `exists and is not empty`; None for nothing and
    for an empty folder. Links are not followed. OSError from the system."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISDIR(mode):
        return f"is {kind_of(mode)}"
    return "exists and is not empty" if any(path.iterdir()) else None


def _inside(real: Path, real_root: Path) -> bool:
    if real.is_relative_to(real_root):
        return True
    # huggingface_hub's cache (file_download.py): models--o--n/snapshots/<revision>/x -> models--o--n/blobs/<hash>
    repo = real_root.parent.parent
    return real_root.parent.name == "snapshots" and repo.name.startswith("models--") and real.parent == repo / "blobs"


def resolve_inside(root: Path, name: str, missing_hint: str | None = None) -> Path:
    """The real path, without links, of the regular file `name` in the folder `root`; the file is not opened.

    A link may lead anywhere inside `root`, and from a Hub cache folder `models--*/snapshots/<revision>` into `blobs` of
    the same `models--*`. KizamiError: "missing_file"; "dangling_link" names link and target; "outside_folder" a link
    that leads elsewhere; "not_a_file" a folder, pipe, socket or device; "io_error".
    """
    path = root / name
    try:
        real = Path(os.path.realpath(path, strict=True))
        mode = real.stat().st_mode
        real_root = Path(os.path.realpath(root, strict=True))
    except OSError as e:
        if path.is_symlink() and e.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
            raise KizamiError(
                f"is a link to {os.readlink(path)}, which does not exist",
                code="dangling_link",
                file=name,
                hint="download the file again",
            ) from None
        if e.errno in (errno.ENOENT, errno.ENOTDIR):
            raise KizamiError(f"not found in {root}", code="missing_file", file=name, hint=missing_hint) from None
        raise io_error("cannot look up", e, name) from e
    except ValueError as e:  # a NUL in the name
        raise KizamiError(f"not a file name: {e}", code="missing_file", file=name) from None
    if not _inside(real, real_root):
        raise KizamiError(
            f"leads out of the folder, to {real}",
            code="outside_folder",
            file=name,
            hint="only links inside the folder, or into the blobs of the same Hub cache entry, are followed: "
            "copy the file in place of the link",
        )
    if not stat.S_ISREG(mode):
        raise KizamiError(f"is {kind_of(mode)}, expected a regular file", code="not_a_file", file=name)
    return real


def open_regular(path: Path, file: str) -> int:
    """A read-only descriptor of the regular file at `path` (`file` in errors). Never waits for a pipe's writer.

    KizamiError: "not_a_file", "missing_file", "io_error".
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            # NONBLOCK: if a pipe has taken the file's place since, open() must still return
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            mode = os.fstat(fd).st_mode
            if stat.S_ISREG(mode):
                return fd
            os.close(fd)
    except FileNotFoundError:
        raise KizamiError(f"not found in {path.parent}", code="missing_file", file=file) from None
    except OSError as e:
        raise io_error("cannot open", e, file) from e
    raise KizamiError(f"is {kind_of(mode)}, expected a regular file", code="not_a_file", file=file)


def read_exactly(fd: int, begin: int, nbytes: int, file: str) -> bytes:
    """`nbytes` bytes at `begin`; KizamiError "io_error" from the system, "truncated" when the file ends before."""
    parts = []
    at = begin
    while at < begin + nbytes:
        try:
            part = os.pread(fd, begin + nbytes - at, at)
        except OSError as e:
            raise io_error(f"cannot read at byte {at}", e, file) from e
        if not part:
            raise KizamiError(f"ends at byte {at}, expected {begin + nbytes}", code="truncated", file=file)
        parts.append(part)
        at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


_HASH_CHUNK = 8 << 20


def file_sha256(path: Path, file: str, stopped: Callable[[], bool] = lambda: False) -> str:
    """SHA-256 of a regular file. KizamiError "io_error", "missing_file", "not_a_file"; "stopped" once `stopped()`."""
    digest = hashlib.sha256()
    fd = open_regular(path, file)
    try:
        while chunk := os.read(fd, _HASH_CHUNK):
            digest.update(chunk)
            if stopped():
                raise KizamiError("was not read to its end", code="stopped", file=file)
    except OSError as e:
        raise io_error("cannot read", e, file) from e
    finally:
        os.close(fd)
    return digest.hexdigest()


def all_files(folder: Path) -> list[str]:
    """Everything in `folder` that is not a folder, links included, as sorted relative names with slashes. KizamiError
    "io_error" for a folder that cannot be listed."""
    names: list[str] = []
    waiting = [""]
    while waiting:  # os.walk calls itself for each level in Python 3.11, and a stranger's folder may have thousands
        at = waiting.pop()
        for entry in listed(folder, at):
            if entry.is_dir(follow_symlinks=False):
                waiting.append(f"{at}{entry.name}/")
            else:
                names.append(at + entry.name)
    return sorted(names)


def listed(folder: Path, at: str = "") -> list[os.DirEntry[str]]:
    """What is in the folder `at`, "" or with a final slash, of `folder`. KizamiError "io_error", "bad_environment"."""
    try:
        with os.scandir(folder / at) as entries:
            found = list(entries)
    except OSError as e:
        raise io_error("cannot list", e, at.rstrip("/") or str(folder)) from e
    for entry in found:
        check_encoding(at + entry.name)
    return found

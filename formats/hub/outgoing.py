"""A file on its way to the Hub, as it was proven: what is committed, and what is looked for there afterwards."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from kizami.formats.errors import KizamiError
from kizami.formats.files import open_regular, read_exactly
from kizami.formats.hub.repository import RemoteFile

# Bytes. Up to 10 MB the Hub keeps a file outside large storage, and huggingface_hub reads it once more as it commits:
# what it may read by then is not what was hashed. In large storage the Hub itself holds the bytes to the hash.
IN_MEMORY = 16 << 20


@dataclass(frozen=True, slots=True)
class Outgoing:
    """sha256: that it was proven to have; None where nobody has said. data: of a small file. seen: size, time and inode
    of the file when it was looked at."""

    path: Path
    sha256: str | None
    data: bytes | None
    seen: tuple[int, int, int]

    @classmethod
    def of(cls, name: str, path: Path, sha256: str | None) -> "Outgoing":
        """KizamiError "changed" where it is not what `sha256` says, as far as it is read here; as `open_regular` and
        `read_exactly`."""
        fd = open_regular(path, name)
        try:
            status = os.fstat(fd)
            data = read_exactly(fd, 0, status.st_size, name) if status.st_size <= IN_MEMORY else None
        finally:
            os.close(fd)
        if _stamp(path.lstat()) != _stamp(status):  # a link: what it leads to is not of this folder
            raise _changed(name)
        if data is not None:
            refuse_change(name, hashlib.sha256(data).hexdigest(), sha256)
        return cls(path, sha256, data, _stamp(status))

    @property
    def content(self) -> bytes | str:
        """As huggingface_hub takes it."""
        return str(self.path) if self.data is None else self.data

    def refuse_change(self, name: str) -> None:
        """KizamiError "changed" where the file is another one by now, or gone. What is in memory cannot be."""
        if self.data is not None:
            return
        try:
            same = _stamp(self.path.lstat()) == self.seen
        except OSError:
            same = False
        if not same:
            raise _changed(name)

    def is_there(self, there: RemoteFile | None) -> bool:
        """Whether that is this file, whatever lies at the path by now. OSError."""
        if there is None:
            return False
        if self.data is not None:
            return there.is_of(self.data)
        return there.sha256 == self.sha256 if there.sha256 and self.sha256 else there.is_at(self.path)


def refuse_change(name: str, found: str, proven: str | None) -> None:
    """KizamiError "changed"."""
    if proven not in (None, found):
        raise _changed(name)


def _changed(name: str) -> KizamiError:
    return KizamiError(
        "is not the file that was proven: it has changed since, and is not pushed",
        code="changed",
        file=name,
        hint="leave OUT alone while it is pushed; `kizami verify OUT` names all files that changed",
    )


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino

"""A file on its way to the Hub, as it was proven: what is committed, and what is looked for there afterwards."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kizami.formats.errors import KizamiError
from kizami.formats.files import io_error
from kizami.formats.hub.repository import RemoteFile

# Bytes. Up to 10 MB the Hub keeps a file outside large storage, and huggingface_hub reads it once more as it commits:
# what it may read by then is not what was hashed. In large storage the Hub itself holds the bytes to the hash.
IN_MEMORY = 16 << 20


@dataclass(frozen=True, slots=True)
class Outgoing:
    """sha256: that it was proven to have; None where nobody has said. data: of a small file."""

    path: Path
    sha256: str | None
    data: bytes | None

    @classmethod
    def of(cls, name: str, path: Path, sha256: str | None) -> "Outgoing":
        """KizamiError "changed" where it is not what `sha256` says, as far as it is read here; "io_error"."""
        try:
            data = path.read_bytes() if path.stat().st_size <= IN_MEMORY else None
        except OSError as e:
            raise io_error("cannot read", e, name, "leave OUT alone while it is pushed") from e
        if data is not None:
            refuse_change(name, hashlib.sha256(data).hexdigest(), sha256)
        return cls(path, sha256, data)

    @property
    def content(self) -> bytes | str:
        """As huggingface_hub takes it."""
        return str(self.path) if self.data is None else self.data

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
        raise KizamiError(
            "is not the file that was proven: it has changed since, and is not pushed",
            code="changed",
            file=name,
            hint="leave OUT alone while it is pushed; `kizami verify OUT` names all files that changed",
        )

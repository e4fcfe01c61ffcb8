"""What a repository of models holds at one commit: names, sizes and hashes, as the Hub states them."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kizami.formats.errors import KizamiError, printable
from kizami.formats.files import has_control
from kizami.formats.hub.client import Patience, as_refusal, hub, patiently

_COMMIT, _SHA256 = re.compile("[0-9a-f]{40}"), re.compile("[0-9a-f]{64}")
MAX_FILES = 20_000  # kizami reads 10,000 shards and copies 10,000 other files at most
MAX_DEPTH = 32  # folders, one in the other
_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """size: bytes. sha256: of a file in large storage (LFS, Xet). git: SHA-1 of Git's blob, for the others."""

    name: str
    size: int
    sha256: str | None
    git: str

    def is_at(self, path: Path) -> bool:
        """Whether `path` holds these bytes; False where nothing is. OSError."""
        try:
            return path.stat().st_size == self.size and self.hash_of(path) == (self.sha256 or self.git)
        except FileNotFoundError:
            return False

    def is_of(self, data: bytes) -> bool:
        digest = self.hasher(len(data))
        digest.update(data)
        return digest.hexdigest() == (self.sha256 or self.git)

    def hash_of(self, path: Path) -> str:
        """As the Hub makes it: SHA-256, or SHA-1 of Git's blob with its heading."""
        with open(path, "rb", buffering=0) as file:
            digest = self.hasher(os.fstat(file.fileno()).st_size)
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()

    def hasher(self, nbytes: int) -> "hashlib._Hash":
        """Takes the bytes of a file of that size."""
        return hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class Repository:
    """`name` as org/name; `commit` is what `revision` meant when it was asked for. private: None where the Hub does not
    say."""

    name: str
    commit: str
    files: Mapping[str, RemoteFile]
    private: bool | None = None

    @staticmethod
    def look(name: str, revision: str | None = None, patience: Patience = Patience()) -> "Repository":  # noqa: B008
        """KizamiError as `as_refusal`; "hub_error" for an answer that makes no sense."""
        with as_refusal(f"{name}@{revision}" if revision else name):
            found = patiently(lambda: hub().model_info(name, revision=revision, files_metadata=True), patience)
            siblings, commit, private = list(found.siblings or ()), str(found.sha), found.private
            listed = [_listed(one) for one in siblings]
        if not _COMMIT.fullmatch(commit) or len(listed) > MAX_FILES:
            raise KizamiError(
                f"is commit {printable(commit, 60)} with {len(listed)} files, expected 40 hex digits and at most "
                f"{MAX_FILES}",
                code="hub_error",
                file=name,
            )
        for one in listed:
            if (problem := path_problem(one.name)) is not None:
                raise KizamiError(f"has a file with {problem}", code="hub_error", file=name, tensor=one.name)
            if not 0 <= one.size < 2**63 or not (_SHA256.fullmatch(one.sha256 or "") or _COMMIT.fullmatch(one.git)):
                raise KizamiError("the Hub states no size or hash of it", code="hub_error", file=one.name)
        return Repository(name, commit, {one.name: one for one in listed}, private)


def _listed(sibling: Any) -> RemoteFile:
    """ValueError, TypeError, AttributeError for what is no entry of a listing."""
    lfs = sibling.lfs
    size, sha256 = (lfs.size, str(lfs.sha256)) if lfs else (sibling.size, None)
    if type(size) is not int or not isinstance(sibling.rfilename, str):
        raise TypeError("a file without a size or a name")
    return RemoteFile(sibling.rfilename, size, sha256, str(sibling.blob_id or ""))


def path_problem(name: str) -> str | None:
    """Why `name` may not become a path below a folder of ours, or None if it may."""
    parts = name.split("/")
    if has_control(name):
        return "a control character in its name"
    if "\\" in name or any(part in ("", ".", "..") for part in parts):
        return "a name that leads out of its folder"
    if len(parts) > MAX_DEPTH:
        return f"a name of more than {MAX_DEPTH} folders"
    return "a name that is too long" if any(len(part.encode("utf-8")) > 240 for part in parts) else None

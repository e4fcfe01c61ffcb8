"""What a repository of models holds at one commit: names, sizes and hashes, as the Hub states them."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kizami.formats.errors import KizamiError
from kizami.formats.files import has_control
from kizami.formats.hub.client import Patience, as_refusal, hub, patiently

MAX_FILES = 20_000  # kizami reads 10,000 shards and copies 10,000 other files at most
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

    def hash_of(self, path: Path) -> str:
        """As the Hub makes it: SHA-256, or SHA-1 of Git's blob with its heading."""
        digest = hashlib.sha256() if self.sha256 else hashlib.sha1(usedforsecurity=False)
        with open(path, "rb", buffering=0) as file:
            if not self.sha256:
                digest.update(b"blob %d\0" % os.fstat(file.fileno()).st_size)
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Repository:
    """`name` as org/name; `commit` is what `revision` meant when it was asked for."""

    name: str
    commit: str
    files: Mapping[str, RemoteFile]

    @staticmethod
    def look(name: str, revision: str | None = None, patience: Patience = Patience()) -> "Repository":  # noqa: B008
        """KizamiError as `as_refusal`; "hub_error" for an answer that makes no sense."""
        with as_refusal(f"{name}@{revision}" if revision else name):
            found = patiently(lambda: hub().model_info(name, revision=revision, files_metadata=True), patience)
        siblings = found.siblings or []
        if not found.sha or len(siblings) > MAX_FILES:
            said = f"has {len(siblings)} files, expected at most {MAX_FILES}" if found.sha else "has no commit"
            raise KizamiError(said, code="hub_error", file=name)
        files = {}
        for one in siblings:
            if (problem := path_problem(one.rfilename)) is not None:
                raise KizamiError(f"has a file with {problem}", code="hub_error", file=name, tensor=one.rfilename)
            size = one.lfs.size if one.lfs else one.size
            if size is None or not (one.lfs or one.blob_id):
                raise KizamiError("the Hub states no size or hash of it", code="hub_error", file=one.rfilename)
            files[one.rfilename] = RemoteFile(
                one.rfilename, size, one.lfs.sha256 if one.lfs else None, one.blob_id or ""
            )
        return Repository(name, found.sha, files)


def path_problem(name: str) -> str | None:
    """Why `name` may not become a path below a folder of ours, or None if it may."""
    parts = name.split("/")
    if has_control(name):
        return "a control character in its name"
    if "\\" in name or any(part in ("", ".", "..") for part in parts):
        return "a name that leads out of its folder"
    return "a name that is too long" if any(len(part.encode("utf-8")) > 240 for part in parts) else None

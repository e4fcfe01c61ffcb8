"""The repositories of local_hub: commits of trees of blobs, contents as files named by their hash."""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

FULL_ID = re.compile(r"[0-9a-f]{40}")
PIECE = 1 << 20


@dataclass(frozen=True)
class Blob:
    """`oid` is git's, of the pointer where the file is LFS. `sha256` is None for a regular file, as the Hub has it."""

    size: int
    oid: str
    sha256: str | None

    @property
    def etag(self) -> str:
        return self.sha256 or self.oid


@dataclass(frozen=True)
class Commit:
    oid: str
    title: str
    parent: str | None
    tree: Mapping[str, Blob]
    description: str
    date: str


@dataclass
class Repo:
    name: str
    private: bool = False
    gated: bool = False
    lfs_from: int = 10_000
    lfs_weights: bool = True
    read_only: bool = False
    commits: list[Commit] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def head(self) -> Commit:
        return self.commits[-1]

    def large(self, path: str, size: int) -> bool:
        """Empty ones never are: the client sends those with the commit whatever the server says."""
        return size > 0 and ((self.lfs_weights and path.endswith(".safetensors")) or size >= self.lfs_from)

    def find(self, revision: str) -> Commit | None:
        if revision == "main":
            return self.head
        wanted = self.tags.get(revision, revision)
        return next((commit for commit in self.commits if commit.oid == wanted), None)

    def add(self, tree: Mapping[str, Blob], title: str, description: str = "") -> Commit:
        """A commit on main. One that changes nothing is not made: the Hub answers with its head."""
        parent = self.commits[-1] if self.commits else None
        if parent is not None and parent.tree == tree:
            return parent
        number = len(self.commits)
        entries = "\n".join(f"{path} {blob.oid}" for path, blob in sorted(tree.items()))
        told = f"{self.name}\n{parent.oid if parent else ''}\n{number}\n{title}\n{description}\n{entries}"
        date = f"2026-01-{1 + number // 1440:02}T{number // 60 % 24:02}:{number % 60:02}:00.000Z"
        made = Commit(
            hashlib.sha1(told.encode()).hexdigest(),
            title,
            parent.oid if parent else None,
            dict(tree),
            description,
            date,
        )
        self.commits.append(made)
        return made

    def changed(self, commit: Commit, path: str) -> Commit:
        """The last commit, up to this one, that changed the file or something in the folder."""
        history = self.commits[: self.commits.index(commit) + 1]
        for older, newer in zip(reversed(history[:-1]), reversed(history), strict=False):
            if tree_id(older.tree, path) != tree_id(newer.tree, path):
                return newer
        return history[0]


def tree_id(tree: Mapping[str, Blob], path: str) -> str:
    """Of a file its blob's, of a folder one made from its files'."""
    if path in tree:
        return tree[path].oid
    inside = "\n".join(f"{name} {blob.oid}" for name, blob in sorted(tree.items()) if name.startswith(f"{path}/"))
    return hashlib.sha1(inside.encode()).hexdigest()


def folders(tree: Mapping[str, Blob]) -> set[str]:
    return {"/".join(parts[:i]) for path in tree for parts in [path.split("/")] for i in range(1, len(parts))}


class Store:
    """Contents, shared by all repositories. LFS objects pass through in pieces."""

    def __init__(self, folder: Path) -> None:
        self._lfs, self._git = folder / "lfs", folder / "git"
        self._lfs.mkdir(parents=True, exist_ok=True)
        self._git.mkdir(exist_ok=True)

    def path(self, blob: Blob) -> Path:
        return self._git / blob.oid if blob.sha256 is None else self._lfs / blob.sha256

    def object(self, sha256: str) -> Blob | None:
        """The LFS file of that content, if it is there."""
        file = self._lfs / sha256
        if not re.fullmatch("[0-9a-f]{64}", sha256) or not file.is_file():
            return None
        size = file.stat().st_size
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
        return Blob(size, git_id(pointer.encode()), sha256)

    def regular(self, content: bytes) -> Blob:
        blob = Blob(len(content), git_id(content), None)
        self.path(blob).write_bytes(content)
        return blob

    def large(self, content: bytes | Path) -> Blob:
        blob = self.receive([content] if isinstance(content, bytes) else pieces(content))
        assert blob is not None
        return blob

    def receive(self, content: Iterable[bytes], sha256: str | None = None, size: int | None = None) -> Blob | None:
        """Keeps an LFS object, unless it is not the one that was named."""
        digest, received = hashlib.sha256(), 0
        handle, name = tempfile.mkstemp(dir=self._lfs, prefix="incoming-")
        try:
            with os.fdopen(handle, "wb") as file:
                for piece in content:
                    digest.update(piece)
                    received += file.write(piece)
            if sha256 not in (None, digest.hexdigest()) or size not in (None, received):
                return None
            os.replace(name, self._lfs / digest.hexdigest())
        finally:
            Path(name).unlink(missing_ok=True)
        return self.object(digest.hexdigest())


def pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

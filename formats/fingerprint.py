"""A few pages of every source file, hashed: tells a retrained checkpoint of the same shape without reading it all."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.files import open_regular, read_exactly
from kizami.formats.run_log import canonical

PAGES = 32  # per file, evenly spread, the last bytes among them: 20 MB for 160 shards
PAGE_BYTES = 4096


def sample_contents(checkpoint: Checkpoint) -> dict[str, str]:
    """File -> SHA-256 of its sampled data pages. Equal files give equal hashes; training changes every page.

    A single changed byte is seen only by luck: `verify --against` is for that. KizamiError as files.open_regular.
    """
    return {name: sample_file(checkpoint.path(name), name) for name in checkpoint.headers}


@dataclass(frozen=True, slots=True)
class Contents:
    """What a source's files are known by. stated: when a run begins; sampled: as `sample_contents`, in the manifest. Of
    a folder both are one; of a source on the Hub the first are the Hub's own hashes, and the others come with the
    files."""

    stated: dict[str, str]
    sampled: dict[str, str]

    @staticmethod
    def of(checkpoint: Checkpoint) -> "Contents":
        """Of a folder."""
        found = sample_contents(checkpoint)
        return Contents(found, found)


def config_sha256(checkpoint: Checkpoint) -> str:
    """Of the config's values; spelling and order of its keys do not matter."""
    return hashlib.sha256(canonical(checkpoint.config).encode()).hexdigest()


def sample_file(path: Path, name: str) -> str:
    """Of one safetensors file; `name` in errors."""
    fd = open_regular(path, name)
    try:
        begin = 8 + int.from_bytes(read_exactly(fd, 0, 8, name), "little")
        return sample_pages(begin, os.fstat(fd).st_size, lambda at, size: read_exactly(fd, at, size, name))
    finally:
        os.close(fd)


def sample_pages(begin: int, end: int, read: Callable[[int, int], bytes]) -> str:
    """Of the data from `begin` to `end` of a file, of which read(at, size) gives a part."""
    digest = hashlib.sha256()
    data = end - begin
    size = min(PAGE_BYTES, data)
    for i in range(PAGES if size > 0 else 0):
        digest.update(read(begin + (data - size) * i // (PAGES - 1), size))
    return digest.hexdigest()

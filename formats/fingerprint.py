"""A few pages of every source file, hashed: tells a retrained checkpoint of the same shape without reading it all."""

import hashlib
import os

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.files import open_regular, read_exactly
from kizami.formats.run_log import canonical

PAGES = 32  # per file, evenly spread, the last bytes among them: 20 MB for 160 shards
PAGE_BYTES = 4096


def sample_contents(checkpoint: Checkpoint) -> dict[str, str]:
    """File -> SHA-256 of its sampled data pages. Equal files give equal hashes; training changes every page.

    A single changed byte is seen only by luck: `verify --against` is for that. KizamiError as files.open_regular.
    """
    return {name: _sample(checkpoint, name) for name in checkpoint.headers}


def config_sha256(checkpoint: Checkpoint) -> str:
    """Of the config's values; spelling and order of its keys do not matter."""
    return hashlib.sha256(canonical(checkpoint.config).encode()).hexdigest()


def _sample(checkpoint: Checkpoint, name: str) -> str:
    head = checkpoint.headers[name]
    data = head.file_size - head.data_begin
    size = min(PAGE_BYTES, data)
    digest = hashlib.sha256()
    fd = open_regular(checkpoint.path(name), name)
    try:
        for i in range(PAGES if size else 0):
            at = head.data_begin + (data - size) * i // (PAGES - 1)
            digest.update(read_exactly(fd, at, size, name))
    finally:
        os.close(fd)
    return digest.hexdigest()

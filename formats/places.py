"""Where a command may write: never into what it reads."""

import errno
import os
from pathlib import Path

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError


def check_apart(checkpoint: Checkpoint, place: Path, out: str = "OUT") -> None:
    """By device and inode, which sees through links, bind mounts and letters whose case does not count. A source's
    files may be links: the folders that they lie in count as the source, too. out: the
    help's word for the place."""
    real = Path(os.path.realpath(place))  # resolve() raises on link loops
    sources = {Path(os.path.realpath(checkpoint.path(file))).parent for file in checkpoint.headers}
    sources.add(Path(os.path.realpath(checkpoint.root)))
    around = {_identity(path) for source in sources for path in (source, *source.parents)} - {None}
    above = {_identity(path) for path in real.parents} - {None}
    if _identity(real) in around or above & {_identity(source) for source in sources}:
        raise KizamiError(
            f"{out} (or {out}.partial, where the work is done) and SRC are one folder or lie in each other",
            code="out_in_source",
            file=str(place),
        )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    return found.st_dev, found.st_ino

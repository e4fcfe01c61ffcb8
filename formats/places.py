"""Where a command may write: never into what it reads."""

import errno
import os
from pathlib import Path

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.statistics import MANIFEST

OUTPUT_MANIFEST = "kizami.json"


def partial_of(out: Path, word: str = "OUT") -> Path:
    """OUT.partial beside OUT, where the work is done. word: the help's word for the place. KizamiError "bad_out"."""
    if out.name in ("", ".."):
        raise KizamiError(
            "is a place, not the name of a new folder", code="bad_out", file=str(out), hint=f"give {word} a name"
        )
    return out.with_name(out.name + ".partial")


def check_new_folder(checkpoint: Checkpoint, out: Path, word: str = "OUT") -> Path:
    """Checks that a new folder may appear at `out` by a rename, and gives OUT.partial.

    KizamiError "bad_out", "out_in_source".
    """
    partial = partial_of(out, word)
    for place in (out, partial):
        check_apart(checkpoint, place, word)
        if os.path.ismount(place):  # everything would go to another disk, and OUT.partial could not be renamed
            raise KizamiError(
                f"is where another disk is mounted, and {word} must appear there by a rename",
                code="bad_out",
                file=str(place),
                hint=f"name a new folder inside it, as {place / 'model'}",
            )
    parents = Path(os.path.realpath(out)).parents
    whole = {OUTPUT_MANIFEST: "an output of kizami, which would not verify any more", MANIFEST: "a STATS folder"}
    around = next(
        (f"{folder}, {kind}" for folder in parents for file, kind in whole.items() if (folder / file).is_file()), None
    )
    if around is not None:
        raise KizamiError(
            f"lies in {around}",
            code="bad_out",
            file=str(out),
            hint="write it elsewhere",
        )
    return partial


def check_apart(checkpoint: Checkpoint, place: Path, out: str = "OUT") -> None:
    """By device and inode, which sees through links, bind mounts and letters whose case does not count. A source's
    files may be links: the folders that they lie in count as the source, too. out: the help's word for the place."""
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

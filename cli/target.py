"""The FILE of -o: what may be written there, and how."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kizami.formats.checkpoint import CONFIG_NAME
from kizami.formats.errors import KizamiError
from kizami.formats.files import io_error, kind_of
from kizami.formats.index import INDEX_NAME


@dataclass(frozen=True, slots=True)
class Target:
    """`name` as the user wrote it; `checkpoint`: SRC or OUT, mostly a folder, which -o never touches; `inputs`: files
    and folders that the run reads, in which it replaces nothing.

    A regular file is replaced whole or not at all; through a link, the file that it leads to is. Pipes and character
    devices (/dev/stdout, /dev/null, a terminal) are opened and written to. Anything else is refused.
    """

    name: str
    checkpoint: Path
    inputs: tuple[Path, ...] = ()

    @classmethod
    def checked(cls, name: str, checkpoint: Path, *inputs: Path | None) -> "Target":
        """Refuses a bad FILE before the work. KizamiError "bad_file"."""
        target = cls(name, checkpoint, tuple(path for path in inputs if path is not None))
        target._find()
        return target

    def write(self, data: bytes) -> None:
        """KizamiError "bad_file" if the place has changed since, "io_error" from the system."""
        from kizami.formats.writer import write_file_durably

        real, mode = self._find()
        if mode is not None and not stat.S_ISREG(mode):
            self._stream(real, data)
        elif (number := _standard(real)) is not None:  # `-o /dev/stdout > file`: the shell has opened it
            _write_all(number, data, self.name)
        else:
            write_file_durably(real, data)

    def _find(self) -> tuple[Path, int | None]:
        """The real path and its mode; None for a file that does not exist yet."""
        if not self.name:
            raise self._refused("the name is empty", "-o FILE writes to FILE")
        if self.name == "-":  # to many tools stdout, to the others a file that is hard to remove
            raise self._refused("is no name of a file here", "leave -o out to write to stdout, or name ./-")
        path = Path(self.name)
        real = Path(os.path.realpath(path))
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            if path.is_symlink():
                raise self._refused(f"is a link to {os.readlink(path)}, which does not exist") from None
            mode = None
        except OSError as e:
            raise io_error("cannot look up", e, self.name) from e
        if mode is None and not real.parent.is_dir():
            raise KizamiError("its folder does not exist", code="io_error", file=self.name, hint="make it first")
        for place in (real, Path(os.path.abspath(path))):
            for folder in (self.checkpoint, *self.inputs):
                if lies_in(place, folder):
                    raise self._refused(f"lies in {folder}, which is only read", "write it elsewhere")
            if (mode is None or stat.S_ISREG(mode)) and (found := _weights_beside(place)) is not None:
                raise self._refused(f"would lie beside {found}, in a checkpoint", "write it elsewhere")
        if mode is not None and stat.S_ISREG(mode):
            if ".safetensors" in (real.suffix, path.suffix):
                raise self._refused("exists, and a file of tensors is never replaced", "remove it first")
            if any(_is_same(one, real) for one in (self.checkpoint, *self.inputs)):
                raise self._refused("is read by this run, and would be replaced", "write it elsewhere")
        if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
            raise self._refused(f"is {kind_of(mode)}, expected the name of a file")
        return real, mode

    def _refused(self, message: str, hint: str | None = None) -> KizamiError:
        return KizamiError(message, code="bad_file", file=self.name or "-o", hint=hint)

    def _stream(self, real: Path, data: bytes) -> None:
        """No O_CREAT and no O_TRUNC: nothing is made or replaced, whatever has taken the name since."""
        try:
            fd = os.open(self.name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError as e:
            raise io_error("cannot open", e, self.name) from e
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                raise self._refused("has become another file")
            _write_all(fd, data, self.name)
        finally:
            os.close(fd)


def _write_all(fd: int, data: bytes, file: str) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as e:
        raise io_error("cannot write", e, file) from e


def _standard(real: Path) -> int | None:
    """1 or 2 if stdout or stderr of this process is that file."""
    for number in (1, 2):
        try:
            if os.path.samestat(os.stat(real), os.fstat(number)):
                return number
        except OSError:
            continue
    return None


def _weights_beside(place: Path) -> str | None:
    """A sign that the folder is another checkpoint: the source of this OUT, the output of this SRC. Tensors alone are
    none: a file of KV scales may lie anywhere."""
    if place.parent.name == "blobs" and place.parent.parent.name.startswith("models--"):
        return "the blobs of the Hub cache"
    try:
        names = sorted(os.listdir(place.parent))
    except OSError:
        return None
    if "kizami.json" in names:
        return "kizami.json"
    if not {CONFIG_NAME, INDEX_NAME} & {*names}:
        return None
    return next((name for name in names if name.endswith(".safetensors")), None)


def _is_same(path: Path, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False  # what reads it will say so


def lies_in(path: Path, folder: Path) -> bool:
    """By device and inode, which sees through links, mounts and case. A Hub snapshot's files lie in `blobs`, so the
    whole cache entry counts. Nothing lies in what is no folder."""
    if folder.parent.name == "snapshots":
        folder = folder.parent.parent
    try:
        ours = folder.stat()
    except OSError:
        return False  # what reads the folder will say so
    if not stat.S_ISDIR(ours.st_mode):
        return False
    for place in (path, *path.parents):
        try:
            if os.path.samestat(place.stat(), ours):
                return True
        except OSError:
            continue
    return False

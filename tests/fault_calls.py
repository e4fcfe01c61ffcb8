"""Every call that a conversion makes to the system has a name, a `Point`, and can meet a `Fault`."""

import builtins
import errno
import fcntl
import io
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEW = "new"  # a folder that the conversion must make, too
OUT, PARTIAL, SOURCE = f"{NEW}/OUT", f"{NEW}/OUT.partial", "SRC"  # their names in a bench's folder
JOURNAL = ".kizami"
FD_CALLS = ("write", "read", "pread", "preadv", "fsync", "close")
LOOKS = ("stat", "lstat", "listdir", "scandir")
PATH_CALLS = ("open", "unlink", "mkdir", "rmdir", "replace", "rename", "truncate", *LOOKS)
CHANGES = ("create", "write", "unlink", "mkdir", "rmdir", "replace", "rename", "truncate")
READS = ("read", "pread", "preadv")
ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EXDEV, errno.EROFS, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS,
    errno.EINVAL, errno.EWOULDBLOCK,
)  # fmt: skip
Call = Callable[..., Any]


@dataclass(frozen=True)
class Point:
    """The `index`-th call: `fsync OUT.partial/.model-00001-of-00003.safetensors.tmp`."""

    index: int
    call: str
    target: str  # relative to the bench's folder, which is "."
    nbytes: int = 0  # of a write

    def __str__(self) -> str:
        return f"{self.index} {self.call} {self.target}"

    @property
    def kind(self) -> str:
        """The name without numbers: equal for all shards."""
        return f"{self.call} {re.sub('[0-9]{5}', 'N', self.target)}"


@dataclass(frozen=True)
class Fault:
    """What happens at a point in place of the call. `act` gets the call, ready to be made, and its arguments."""

    name: str
    act: Callable[[Callable[[], Any], tuple[Any, ...], Call], Any]


def _kill(call: Callable[[], Any], args: tuple[Any, ...], real: Call) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _half_a_write(call: Callable[[], Any], args: tuple[Any, ...], real: Call) -> Any:
    view = memoryview(args[1])
    real(args[0], view[: len(view) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def _short_write(call: Callable[[], Any], args: tuple[Any, ...], real: Call) -> Any:
    return real(args[0], memoryview(args[1])[:1])


def _short_read(call: Callable[[], Any], args: tuple[Any, ...], real: Call) -> Any:
    if real.__name__ == "preadv":
        return real(args[0], [args[1][0][:1]], *args[2:])
    return real(args[0], 1, *args[2:])


def failing(number: int) -> Fault:
    """The call fails and does nothing; but Linux closes a descriptor even then."""

    def act(call: Callable[[], Any], args: tuple[Any, ...], real: Call) -> Any:
        if real.__name__ == "close":
            call()
        raise OSError(number, os.strerror(number), *(args[:1] if isinstance(args[0], str | Path) else ()))

    return Fault(errno.errorcode[number], act)


def lost_answer(number: int) -> Fault:
    """The call does its work, and then says that it failed: NFS after a lost packet."""

    def act(call: Callable[[], Any], args: tuple[Any, ...], real: Call) -> Any:
        call()
        raise OSError(number, os.strerror(number), *map(str, args[:1]))

    return Fault(f"done, but answered with {errno.errorcode[number]}", act)


def sending(number: signal.Signals) -> Fault:
    def act(call: Callable[[], Any], args: tuple[Any, ...], real: Call) -> Any:
        os.kill(os.getpid(), number)
        return call()

    return Fault(number.name, act)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("SIGKILL", _kill),
        Fault("half a write, then SIGKILL", _half_a_write),
        Fault("short write", _short_write),
        Fault("short read", _short_read),
        *(failing(number) for number in ERRORS),
        *(lost_answer(number) for number in (errno.EIO, errno.ENOENT)),
        *(sending(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
    )
}

IN_A_CHILD = ("SIGKILL", "half a write, then SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "another convert")


class Tap:
    """Between kizami and the system while it is entered. `at` is called for each point before its call is made and may
    give a Fault to act in its place; `after` is told what has been done."""

    def __init__(
        self, folder: Path, at: Callable[[Point], Fault | None], after: Callable[[Point, tuple[Any, ...]], None]
    ) -> None:
        self._folder, self._at, self._after = folder, at, after
        self._next = 0
        self._names: dict[int, str] = {}  # descriptor -> target
        self._saved: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> "Tap":
        for name in FD_CALLS + PATH_CALLS:
            self._put(os, name, self._of_descriptor(name) if name in FD_CALLS else self._of_path(name))
        self._put(io, "open", self._python_open)
        self._put(builtins, "open", self._python_open)
        self._put(fcntl, "flock", self._of_descriptor("flock"))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, call in self._saved:
            setattr(module, name, call)

    def _put(self, module: Any, name: str, wrap: Callable[[Call], Call]) -> None:
        real = getattr(module, name)
        self._saved.append((module, name, real))
        setattr(module, name, wrap(real))

    def _target(self, path: Any) -> str | None:
        """Relative to the folder; None for what is no concern of the conversion's."""
        if isinstance(path, int):
            return self._names.get(path)
        full = os.path.abspath(os.fsdecode(path))
        if full == str(self._folder):
            return "."
        inside = full.removeprefix(f"{self._folder}/")
        return inside if inside != full and inside.split("/")[0] in (NEW, SOURCE) else None

    def _pass(self, name: str, target: str, real: Call, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        nbytes = len(memoryview(args[1])) if name == "write" else 0
        point = Point(self._next, name, target, nbytes)
        self._next += 1

        def call() -> Any:
            return None if name == "fsync" else real(*args, **options)  # the model of the disk remembers it

        fault = self._at(point)
        try:
            result = call() if fault is None else fault.act(call, args, real)
        except OSError as e:
            self._after(point, (*args, e))
            raise
        self._after(point, (*args, result))
        return result

    def _of_descriptor(self, name: str) -> Callable[[Call], Call]:
        def wrap(real: Call) -> Call:
            def tapped(fd: Any, *args: Any) -> Any:
                number = fd if isinstance(fd, int) else fd.fileno()
                target = self._names.get(number)
                if target is None:
                    return real(fd, *args)
                label = "lock" if name == "flock" else name
                result = self._pass(label, target, real, (fd, *args), {})
                if name == "close":
                    self._names.pop(number, None)
                return result

            return _named(tapped, real)

        return wrap

    def _of_path(self, name: str) -> Callable[[Call], Call]:
        def wrap(real: Call) -> Call:
            def tapped(path: Any = ".", *args: Any, **options: Any) -> Any:
                target = self._target(path)
                if target is None:
                    return real(path, *args, **options)
                label = name
                if name == "open":
                    label = "create" if args and args[0] & os.O_CREAT else "open"
                if name in ("replace", "rename"):
                    target = f"{target} to {self._target(args[0])}"
                result = self._pass(label, target, real, (path, *args), options)
                if name == "open":
                    self._names[result] = target
                return result

            return _named(tapped, real)

        return wrap

    def _python_open(self, real: Call) -> Call:
        """`Path.open` and `Path.read_bytes`: the file's own calls are made in C and have no points."""

        def tapped(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            target = None if isinstance(path, int) else self._target(path)
            if target is None:
                return real(path, mode, *args, **options)
            assert mode.startswith("r"), f"{target} is written where no point sees it"
            return self._pass("open", target, real, (path, mode, *args), options)

        return tapped


def _named(function: Call, real: Call) -> Call:
    function.__name__ = real.__name__
    return function

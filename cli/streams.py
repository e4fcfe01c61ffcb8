"""stdout and stderr that may be closed, full, or a pipe whose reader has left. Light: loaded before the commands."""

import errno
import os
import sys
from typing import Any, TextIO, cast


class Guarded:
    """A text stream whose `write` and `flush` never fail; what could not be written is dropped.

    `error` keeps the system's reason, except for a pipe whose reader has left (`| head`): it has what it wanted.
    `left` is true for such a pipe.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None
        self.left = False
        self.used = False  # whether anything was written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def whole(self) -> bool:
        """Whether all that was written has arrived, as far as can be known."""
        self.flush()
        return self.error is None and not self.left

    def write(self, text: str) -> int:
        self.used = self.used or bool(text)
        try:
            return self._stream.write(text)
        except OSError as e:
            self._lose(e)
            return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as e:
            self._lose(e)

    def _lose(self, error: OSError) -> None:
        if error.errno == errno.EPIPE:
            self.left = True
        elif self.error is None:
            self.error = error
        try:  # what is still in its buffer must not fail once more when the interpreter ends
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        except (OSError, ValueError):  # no descriptor behind it
            pass


def guard() -> tuple[Guarded, Guarded]:
    """Puts guards in the place of sys.stdout and sys.stderr and gives them."""
    _fill_standard_descriptors()
    guards = Guarded(sys.stdout), Guarded(sys.stderr)
    sys.stdout, sys.stderr = (cast(TextIO, guarded) for guarded in guards)
    return guards


def release(out: Guarded, err: Guarded) -> None:
    sys.stdout, sys.stderr = out._stream, err._stream


def _fill_standard_descriptors() -> None:
    """A descriptor that the caller has closed would go to the next file that is opened: a shard could get 1 or 2, and
    a library's message would go into it. The place of stdout is taken by something that cannot be written to."""
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, flags)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 — for the rest of the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115

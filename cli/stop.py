"""SIGINT and SIGTERM: one clean stop and one line, from the first import to the last byte.

Loaded before everything else, so it imports nothing that takes time. What comes before it is the interpreter's own
start (about 20 ms), whose answer to a signal nobody can change.
"""

import os
import signal
import sys

TYPE_CHECKING = False  # typing costs milliseconds in which a signal would still be Python's
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
IMPATIENT = 3  # the third Ctrl-C no longer waits for a clean end
AGAIN_AFTER = 0.05  # seconds
# A clean end takes a moment, unless a library waits for a server. Slurm and Kubernetes kill 30 s after their signal.
CLEAN_SECONDS = 20.0


class Stopped(BaseException):
    """The first signal, raised in the main thread. Not a KeyboardInterrupt: Typer makes those a silent exit."""


class Stop:
    """What was asked for by signal, and what a stopped command has to say.

    `armed`: the next signal raises Stopped. Only the first one does; later ones would interrupt the clean-up.
    `say` gives the words after "kizami: "; `complete` is the OUT that this process has finished, if any.
    """

    def __init__(self) -> None:
        self._ignoring = False
        self._patience: threading.Timer | None = None
        self.reset()

    def reset(self) -> None:
        self._wait_for_nothing()
        self.code: int | None = None  # 130 or 143, of the first signal
        self.armed = False
        self.complete: str | None = None
        self.say: Callable[[], str] = self._say
        self._count = 0

    def _say(self) -> str:
        return f"interrupted; {self.complete} is complete" if self.complete else "interrupted"

    def listen(self) -> None:
        """Takes over both signals. One that was ignored from the start (nohup, a shell's background job) stays so."""
        self.reset()
        try:
            for number in SIGNALS:
                if self._ignoring or signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self._receive)
        except ValueError:  # only the main thread may
            return
        self._ignoring, self.armed = False, True
        sys.unraisablehook = self._swallowed

    def ignore(self) -> None:
        """The exit code is known; the interpreter's end must not be changed by a late signal."""
        self.armed = False
        self._wait_for_nothing()
        try:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        except ValueError:
            return
        self._ignoring = True
        sys.unraisablehook = sys.__unraisablehook__

    def held(self) -> "_Held":
        """Inside, a signal is only noted; Stopped is raised at the end. For calls into native code that loads or
        compiles more of itself, which must not be left in the middle."""
        return _Held(self)

    def _receive(self, number: int, frame: "FrameType | None") -> None:
        self._count += 1
        if self.code is None:
            self.code = 128 + number
            self._leave_later()
        if self.armed:
            self.armed = False
            raise Stopped
        if number == signal.SIGINT and self._count >= IMPATIENT:
            self._leave()

    def _leave_later(self) -> None:
        import threading

        self._patience = threading.Timer(CLEAN_SECONDS, self._leave)
        self._patience.daemon = True
        self._patience.start()

    def _wait_for_nothing(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _leave(self) -> None:
        """At once. Nothing is lost: what is finished is on the disk, and the rest is under OUT.partial."""
        cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar hides it
        try:
            os.write(2, f"{cursor}kizami: {self.say()}\n".encode("utf-8", "backslashreplace"))
        finally:
            os._exit(self.code or 128 + signal.SIGINT)

    def _swallowed(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """A signal that arrived in a destructor or a callback of C code is raised again a little later."""
        if unraisable.exc_type is not Stopped:
            sys.__unraisablehook__(unraisable)
            return
        import threading

        main, number = threading.main_thread().ident, (self.code or 0) - 128
        assert main is not None
        self._count, self.armed = 0, True
        again = threading.Timer(AGAIN_AFTER, lambda: signal.pthread_kill(main, number) if self.armed else None)
        again.daemon = True
        again.start()


class _Held:
    def __init__(self, stop: Stop) -> None:
        self._stop = stop

    def __enter__(self) -> None:
        self._armed, self._stop.armed = self._stop.armed, False

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._armed and self._stop.code is not None and kind is None:
            raise Stopped
        self._stop.armed = self._armed and self._stop.code is None


STOP = Stop()

"""Where `kizami` begins and ends: signals and streams first, then the commands; every end has an exit code.

Nothing that takes time is imported here: a signal before `main` would be answered by Python, not by us.
"""

import os
import sys

from kizami.cli.stop import STOP, Stopped

TYPE_CHECKING = False  # typing costs milliseconds, too
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from kizami.cli.streams import Guarded

DONE, NOT_MET, REFUSED, BUG, INTERRUPTED, TERMINATED = 0, 1, 2, 101, 130, 143


def main(arguments: "Sequence[str] | None" = None) -> "NoReturn":
    """Runs a command line and exits: 0, 1, 2, 101, 130 or 143 as docs/command-line.md has them."""
    STOP.listen()
    code, failure, guards = DONE, None, None
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            from kizami.cli.streams import guard

            guards = guard()
            code = _run(words)
        except Stopped:
            raise
        except BaseException as error:
            failure = error
        STOP.armed = False
    except Stopped as stopped:  # raised at most once, wherever the program is by then
        failure = stopped
    try:
        code = _end(code, failure, words, guards)
    except BaseException as error:  # the words themselves could not be made
        os.write(2, f"kizami: error: {type(error).__name__} while ending after {failure!r}\n".encode())
        code = BUG
    STOP.ignore()
    if code != DONE and _threads_are_left():
        for folder in getattr(sys.modules.get("kizami.cli.hub_source"), "TEMPORARY", ()):
            folder.cleanup()  # as Python would at its end
        os._exit(code)
    sys.exit(code)


def _threads_are_left() -> bool:
    """Whether Python would wait, at its end, for threads that may never come to theirs: what one of them ended with has
    been said, and another may wait minutes for a server. Daemons or not, those of an upload are joined
    (concurrent.futures.thread._python_exit)."""
    import threading

    left = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    return any(not thread.daemon or thread.name == "kizami-push" for thread in left)


def _run(words: list[str]) -> int:
    import typer

    from kizami.cli.group import app
    from kizami.cli.output import Ui
    from kizami.cli.usage import unknown_variables

    command = typer.main.get_command(app)
    Ui(verbose=True).warn(unknown_variables(command))
    return command.main(args=words, prog_name="kizami", standalone_mode=False) or DONE


def _end(code: int, failure: BaseException | None, words: list[str], guards: "tuple[Guarded, Guarded] | None") -> int:
    """Says what is left to say and gives the exit code."""
    from kizami.cli.failures import explain, unwritten
    from kizami.cli.streams import guard, release

    out, err = guards or guard()
    try:
        if failure is not None:
            return explain(failure, words, out)
        out.flush()
        return unwritten(out.error) if out.error is not None else code
    finally:
        err.flush()
        release(out, err)

"""What a command that failed says, in one line or one object, and its exit code."""

import errno
import os
import traceback

from kizami.cli.app import BUG, INTERRUPTED, REFUSED
from kizami.cli.output import show_error
from kizami.cli.stop import STOP, Stopped
from kizami.cli.streams import Guarded
from kizami.formats.errors import KizamiError

REPORT_BUG = (
    "this is a bug in kizami: run it again with --debug and report the traceback with the output of `kizami env`"
)
WRITTEN = {"calibrate": "STATS", "convert": "OUT", "demo": "DIR", "plan": "FILE", "report": "FILE"}
TRUE = ("1", "true", "yes", "on", "t", "y")  # as Typer has them


def explain(failure: BaseException, words: list[str], out: Guarded) -> int:
    """The exit code, after one line on stderr or one object on stdout. A bare `kizami` has shown its help."""
    if STOP.code is not None or isinstance(failure, Stopped):  # whatever the signal broke, it is the cause
        code, refusal = STOP.code or INTERRUPTED, KizamiError(STOP.say(), code="interrupted")
        usage = False
    else:
        from kizami.cli.usage import is_usage, says_nothing

        if says_nothing(failure):
            return REFUSED
        if isinstance(failure, SystemExit):
            return failure.code if isinstance(failure.code, int) else REFUSED if failure.code else 0
        usage = is_usage(failure)
        code, refusal = _classify(failure, words)
    if asked("debug", words) and not usage:
        traceback.print_exception(failure)
    as_json = asked("json", words) and not out.used  # one object at most: what comes after it is talk
    show_error(refusal, as_json=as_json)
    if as_json and not out.whole:
        show_error(refusal, as_json=False)
    return code


def unwritten(error: OSError) -> int:
    """The command is done, but who called it has not got the data."""
    complete = f"; {STOP.complete} is complete" if STOP.complete else ""
    show_error(
        KizamiError(f"stdout could not be written: {_reason(error)}{complete}", code="stdout_lost"), as_json=False
    )
    return REFUSED


def _classify(error: BaseException, words: list[str]) -> tuple[int, KizamiError]:
    from kizami.cli.usage import is_usage, usage_error

    if isinstance(error, KizamiError):
        return REFUSED, error
    if is_usage(error):
        return REFUSED, usage_error(error)
    if isinstance(error, MemoryError):
        hint = "use fewer --workers: memory is the largest tensor times the workers"
        return REFUSED, KizamiError(f"out of memory {error}".rstrip(), code="out_of_memory", hint=hint)
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):  # _threadmodule.c: EAGAIN, ENOMEM
        return REFUSED, KizamiError(
            "the system allows no more threads, or has no memory for one",
            code="no_threads",
            hint="use fewer --workers, or raise the limit (ulimit -u, ulimit -v, the container's pids limit)",
        )
    if isinstance(error, OSError):
        return REFUSED, _io(error, words)
    if (refusal := _numba_settings(error)) is not None:
        return REFUSED, refusal
    return BUG, KizamiError(f"{type(error).__name__}: {error}".replace("\n", " "), code="internal", hint=REPORT_BUG)


def _numba_settings(error: BaseException) -> KizamiError | None:
    """numba reads its variables while it is imported, and raises ValueError or RuntimeError for some of them."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    importing = any(
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__", "").startswith("numba.")
        for frame in frames
    )
    settings = sorted(name for name in os.environ if name.startswith("NUMBA_"))
    if not (importing and settings):
        return None
    return KizamiError(
        f"numba cannot start: {str(error).rstrip('.')}",
        code="bad_environment",
        hint=f"correct or unset {' and '.join(settings)} in the environment",
    )


def _io(error: OSError, words: list[str]) -> KizamiError:
    """A checkpoint's errors come as KizamiError; what is left are files that we write."""
    file = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "make room and run the same command again: finished shards are kept"
        return KizamiError(f"the disk is full: {_reason(error)}", code="disk_full", file=file, hint=hint)
    out = next((WRITTEN[word] for word in words if word in WRITTEN), None)
    where = f"choose another {out}, or see who may write there" if out and file else None
    return KizamiError(_reason(error), code="io_error", file=file, hint=where)


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def asked(option: str, words: list[str]) -> bool:
    """A usage error comes before the options are parsed, so the words themselves are asked."""
    before = words[: words.index("--")] if "--" in words else words
    return f"--{option}" in before or os.environ.get(f"KIZAMI_{option.upper()}", "").strip().lower() in TRUE

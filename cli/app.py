"""`kizami`: the commands, and the one place where exceptions become exit codes."""

import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from types import FrameType
from typing import Annotated, NoReturn

import typer

from kizami.cli import convert, demo, env, inspect, plan, report, verify
from kizami.cli.command import Interrupted, Terminated, examples
from kizami.cli.help import PlainCommand, PlainGroup
from kizami.cli.output import Ui, show_error
from kizami.cli.usage import is_usage, says_nothing, unknown_variables, usage_error
from kizami.formats.errors import KizamiError

DONE, NOT_MET, REFUSED, BUG, INTERRUPTED, TERMINATED = 0, 1, 2, 101, 130, 143
REPORT_BUG = (
    "this is a bug in kizami: run it again with --debug and report the traceback with the output of `kizami env`"
)

app = typer.Typer(
    name="kizami",
    help="Convert Kimi, GLM and DeepSeek FP8 checkpoints to INT4, and prove that the result is right.\n\n"
    "Options go after the command: every command has -q, -v, --json and --debug. Every long option can be set in the "
    "environment: --group-size 64 is KIZAMI_GROUP_SIZE=64.",
    epilog=examples("kizami demo", "kizami plan zai-org/GLM-5.2-FP8", "kizami convert GLM-5.2-FP8/ GLM-5.2-INT4/"),
    cls=PlainGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kizami {version('kizami')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version.")
    ] = False,
) -> None:
    pass


for _command in (
    demo.COMMAND,
    inspect.COMMAND,
    plan.COMMAND,
    convert.COMMAND,
    verify.COMMAND,
    report.COMMAND,
    env.COMMAND,
):
    app.command(_command.name, cls=PlainCommand, help=_command.help, epilog=_command.epilog)(_command.stoppable)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command line and exits: 0, 1, 2, 101, 130 or 143 as the README's table has them."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        command = typer.main.get_command(app)
        Ui(verbose=True).warn(unknown_variables(command))
        code = command.main(args=words, prog_name="kizami", standalone_mode=False) or DONE
        sys.stdout.flush()
    except BaseException as error:
        code = _explain(error, words)
    sys.exit(code)


def _explain(error: BaseException, words: list[str]) -> int:
    """Says what happened in one line (or one object) and gives the exit code."""
    if says_nothing(error):  # a bare `kizami`: the help is shown
        return REFUSED
    as_json, debug = _asked("json", words), _asked("debug", words)
    if isinstance(error, SystemExit):
        return int(error.code or 0) if not isinstance(error.code, str) else BUG
    if isinstance(error, BrokenPipeError):  # `| head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_MET
    if debug and not is_usage(error):
        import traceback

        traceback.print_exception(error)
    code, refusal = _classify(error, words)
    show_error(refusal, as_json=as_json)
    return code


def _classify(error: BaseException, words: list[str]) -> tuple[int, KizamiError]:
    if isinstance(error, KizamiError):
        return REFUSED, error
    if isinstance(error, KeyboardInterrupt):  # before or after a command
        error = Interrupted(error)
    if isinstance(error, Interrupted):
        return TERMINATED if error.terminated else INTERRUPTED, KizamiError(str(error), code="interrupted")
    if is_usage(error):
        return REFUSED, usage_error(error)
    if isinstance(error, MemoryError):
        hint = "use fewer --workers: memory is the largest tensor times the workers"
        return REFUSED, KizamiError(f"out of memory {error}".rstrip(), code="out_of_memory", hint=hint)
    if isinstance(error, OSError):
        return REFUSED, _io(error, words)
    return BUG, KizamiError(f"{type(error).__name__}: {error}".replace("\n", " "), code="internal", hint=REPORT_BUG)


WRITTEN = {"convert": "OUT", "demo": "DIR", "plan": "FILE", "report": "FILE"}


def _io(error: OSError, words: list[str]) -> KizamiError:
    """A checkpoint's errors come as KizamiError; what is left are files that we write."""
    import errno

    what = error.strerror or str(error) or type(error).__name__
    file = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "make room and run the same command again: finished shards are kept"
        return KizamiError(f"the disk is full: {what}", code="disk_full", file=file, hint=hint)
    out = next((WRITTEN[word] for word in words if word in WRITTEN), None)
    where = f"choose another {out}, or see who may write there" if out and file else None
    return KizamiError(what, code="io_error", file=file, hint=where)


def _asked(option: str, words: list[str]) -> bool:
    """A usage error comes before the options are parsed, so the words themselves are asked."""
    before = words[: words.index("--")] if "--" in words else words
    return f"--{option}" in before or os.environ.get(f"KIZAMI_{option.upper()}", "").lower() in (
        "1",
        "true",
        "yes",
        "on",
        "t",
        "y",
    )

"""`kizami` and its commands, for Typer."""

from importlib.metadata import version
from typing import Annotated

import typer

from kizami.cli import (
    calibrate,
    card,
    check,
    convert,
    demo,
    env,
    evaluate,
    inspect,
    kv_accuracy,
    kv_scales,
    plan,
    push,
    report,
    serve,
    verify,
)
from kizami.cli.command import examples
from kizami.cli.help import PlainCommand, PlainGroup

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
    calibrate.COMMAND,
    check.COMMAND,
    verify.COMMAND,
    report.COMMAND,
    serve.COMMAND,
    kv_scales.COMMAND,
    kv_accuracy.COMMAND,
    evaluate.COMMAND,
    card.COMMAND,
    push.COMMAND,
    env.COMMAND,
):
    app.command(_command.name, cls=PlainCommand, help=_command.help, epilog=_command.epilog)(_command.stoppable)

"""Help pages without noise: no `<str>`, `<bool>` and `[required]`, which the texts say better."""

from typing import Any

from typer.core import TyperCommand, TyperGroup


def _quieten(command: Any, context: Any) -> None:
    from typer import rich_utils

    rich_utils.REQUIRED_LONG_STRING = ""  # the line of usage and the asterisk show what is required
    for parameter in command.get_params(context):
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = _no_type
        elif getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""


def _no_type(ctx: Any) -> str:
    return ""


class PlainCommand(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        _quieten(self, ctx)
        super().format_help(ctx, formatter)


class PlainGroup(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        _quieten(self, ctx)
        super().format_help(ctx, formatter)

"""Wrong command lines and wrong variables, in plain words."""

import os
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from kizami.cli.options import from_environment, variable
from kizami.formats.errors import KizamiError


def is_usage(error: BaseException) -> bool:
    """Typer's usage errors: a private class (Click is vendored since 0.26), known by its method."""
    return callable(getattr(error, "format_message", None))


def says_nothing(error: Any) -> bool:
    """What Typer raises after it has shown the help."""
    return is_usage(error) and not str(error.format_message()).strip()


def usage_error(error: Any) -> KizamiError:
    """One line, without the words of Typer's validator, and naming the variable if the value came from one."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    command = getattr(context, "command_path", None) or "kizami"
    message = str(error.format_message()).strip().replace("\n", " ").rstrip(".")
    if (plain := _plain(error)) is not None and parameter is not None:
        name = parameter.get_error_hint()
        if context is not None and from_environment(context, parameter.name):
            name = variable(parameter.name)
        message = f"invalid value for {name}: {plain}"
    return KizamiError(message, code="usage", hint=f"{command} --help")


def _plain(error: Any) -> str | None:
    """What is wrong with a value; None if the error is about something else."""
    found = getattr(error.__cause__, "errors", None)
    if not callable(found):  # Typer's own checks
        about_value = type(error).__name__ == "BadParameter"
        return str(error.message).rstrip(".") if about_value else None
    first = found()[0]
    given, limits = first.get("input"), first.get("ctx", {})
    match first["type"]:
        case "int_parsing" | "int_type" | "int_from_float":
            return f"{given!r} is not a whole number"
        case "float_parsing" | "float_type":
            return f"{given!r} is not a number"
        case "bool_parsing" | "bool_type":
            return f"{given!r} is neither true nor false"
        case "greater_than_equal":
            return f"{given} is less than {limits['ge']}"
        case "less_than_equal":
            return f"{given} is more than {limits['le']}"
        case _:
            return str(first["msg"]).removeprefix("Value error, ").rstrip(".")


def unknown_variables(group: Any) -> Iterator[str]:
    """KIZAMI_* that no option of any command has: most likely misspelled."""
    known = {parameter.envvar for command in group.commands.values() for parameter in command.params}
    for name in sorted(os.environ):
        if name.startswith("KIZAMI_") and name not in known:
            close = get_close_matches(name, [k for k in known if k], 1)
            yield f"{name} in the environment belongs to no option" + (f"; did you mean {close[0]}?" if close else "")

"""docs/reference.md: every command and option, from the commands themselves.

python -m kizami.cli.reference > docs/reference.md
"""

import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import typer

from kizami.cli.group import app

COMMON = ("quiet", "verbose", "json", "debug", "help")
HEAD = """# Reference

Every command and option, as `kizami COMMAND --help` has them. Made by `python -m kizami.cli.reference`; a test holds
this page to the program. Every command also takes `-q`, `-v`, `--json` and `--debug`; every long option can be set in
the environment under the name in the last column."""


def page() -> str:
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return "\n".join([HEAD, *(line for name, command in commands.items() for line in _command(name, command)), ""])


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and one.name not in COMMON]
    usage = " ".join(["kizami", name, *(_shown(one) for one in arguments)])
    yield from ("", f"## `{usage}`", "", command.help.strip(), "")
    for one in arguments:
        yield f"- `{_shown(one)}`: {one.help}"
    if arguments:
        yield ""
    if options:
        yield from ("| option | does | variable |", "|---|---|---|")
        yield from (_option(one) for one in options)
        yield ""
    lines = re.findall(r"^ *(kizami .+)$", command.epilog, re.M)
    yield from ("```text", *lines, "```")


def _shown(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _option(option: Any) -> str:
    flag = option.is_flag or option.count
    kind = "" if flag else f" {option.metavar or _kind(option)}"
    spelled = ", ".join(f"`{word}{kind}`" for word in option.opts)
    text = str(option.help).replace("|", "\\|").replace("\n", " ")
    return f"| {spelled} | {text} | `{option.envvar}` |"


def _kind(option: Any) -> str:
    """Of an option without a metavar: its words, or the type. typer has the annotation; click's own had `type`."""
    annotation = getattr(getattr(option, "type_descriptor", None), "annotation", None)
    words = [str(word) for part in (annotation, *get_args(annotation)) for word in _words(part)]
    words = words or [str(word) for word in getattr(getattr(option, "type", None), "choices", ())]
    return "\\|".join(words) or "VALUE"


def _words(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


if __name__ == "__main__":
    print(page(), end="")

"""docs/how-to.md, troubleshooting.md, how-it-works.md and comparison.md name only what is there."""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from kizami.cli.group import app

ROOT = Path(__file__).parent.parent
NAMES = ("how-to", "troubleshooting", "how-it-works", "comparison", "command-line", "forms", "security")
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in NAMES}
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
# Options of engines and of other programs.
OTHERS = {
    "--disable-shared-experts-fusion", "--dtype", "--ep-size", "--imatrix", "--limit", "--log_samples", "--model_free",
    "--quantization-param-path",
}  # fmt: skip
MAKES_ERRORS = {"Rule", "Problem", "tensor_error"}


@cache
def trees() -> tuple[ast.Module, ...]:
    folders = ("formats", "quantize", "calibration", "cli")
    return tuple(ast.parse(path.read_text("utf-8")) for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def codes() -> frozenset[str]:
    """Of errors, of findings of check, of problems of verify."""
    found = set()
    for call in (node for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Call)):
        named = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
        if isinstance(call.func, ast.Name) and call.func.id in MAKES_ERRORS:
            named += call.args
        found |= {node.value for node in named if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return frozenset(found)


@cache
def words() -> str:
    """Every string of the source, between the values that are put into it."""
    constants = (node.value for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return "\n".join(value for value in constants if isinstance(value, str))


def symptoms() -> list[str]:
    """First cells of the tables, but for their headings."""
    cells = re.findall(r"^\| (.+?) \| .+ \|$", PAGES["troubleshooting"], re.M)
    return [cell for cell in cells if cell != "you see"]


def named_codes(cell: str) -> list[str]:
    """Codes stand at the beginning of a cell, alone or before quoted words."""
    begin = re.match(r'((?:`[a-z0-9_]+`(?:, )?)+)(?= "|$)', cell)
    return re.findall(r"`(\w+)`", begin[0]) if begin else []


def options_of(name: str) -> set[str]:
    return {spelling for parameter in COMMANDS[name].params for spelling in parameter.opts} | {"--help"}


def commands(page: str) -> Iterator[list[str]]:
    """Lines of shell blocks and spans of code that begin with `kizami`."""
    text = PAGES[page]
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
    for line in [*lines, *re.findall(r"`(kizami [^`]+)`", text.replace("\n", " "))]:
        if line.startswith("kizami "):
            yield shlex.split(re.split(r" [|>] ", line)[0])[1:]


def test_troubleshooting_names_only_codes_of_the_program() -> None:
    named = [code for cell in symptoms() for code in named_codes(cell)]
    assert len(set(named)) >= 60
    assert set(named) <= codes()


def test_there_are_codes_enough_to_compare_with() -> None:
    assert {"missing_scale", "expert_shape", "changed_tensor"} <= codes()
    assert "no_such_code" not in codes()


@pytest.mark.parametrize("cell", symptoms())
def test_quoted_words_are_those_of_the_program(cell: str) -> None:
    for quoted in re.findall(r'"([^"]+)"', cell):
        for part in re.split(r" ?\.\.\. ?", quoted):
            assert part.strip() in words(), part


def test_troubleshooting_has_a_table_for_each_kind() -> None:
    assert len(symptoms()) >= 35
    assert len(re.findall(r"^\| you see \|", PAGES["troubleshooting"], re.M)) >= 7


@pytest.mark.parametrize("page", NAMES)
def test_paths_that_are_named_exist(page: str) -> None:
    paths = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|sh))`", PAGES[page])
    if page == "how-it-works":
        assert len(paths) >= 20
    for path in paths:
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("page", NAMES)
def test_options_that_are_named_exist(page: str) -> None:
    known = set().union(*(options_of(name) for name in COMMANDS)) | OTHERS
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", PAGES[page])) <= known


def test_no_option_of_others_is_listed_in_vain() -> None:
    for option in OTHERS:
        assert any(option in text for text in PAGES.values()), option


@pytest.mark.parametrize("page", NAMES)
def test_commands_that_are_shown_have_these_options(page: str) -> None:
    for name, *rest in commands(page):
        assert name in COMMANDS or name == "COMMAND", name
        for word in rest if name in COMMANDS else ():
            assert not word.startswith("-") or word.split("=")[0] in options_of(name), (name, word)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", NAMES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = ROOT / "docs" / (file or f"{page}.md")
        assert path.is_file(), target
        assert not anchor or anchor in anchors(path), target


@pytest.mark.parametrize("page", NAMES)
def test_lines_are_wrapped_and_name_no_machine(page: str) -> None:
    prose = [line for line in PAGES[page].splitlines() if not line.startswith("|")]
    assert [line for line in prose if len(line) > 120] == []
    assert not re.search(
        r"(?<![\w.])/(work|tmp|home|root|Users)\b|https?://(?!huggingface\.co|github\.com)", PAGES[page]
    )

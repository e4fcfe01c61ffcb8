"""README and --help say what is there, and what README shows runs."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_fixtures import Run
from typer.testing import CliRunner

from kizami.cli import reference
from kizami.cli.group import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND_LINE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


def shown_lines() -> Iterator[str]:
    """Every `kizami ...` command line: README's shell blocks and the examples of the help pages."""
    for block in blocks("sh"):
        for line in block.splitlines():
            yield from (part.strip() for part in line.split("&&") if re.match(r"\s*(\S*/)?kizami ", part))
    for command in COMMANDS.values():
        yield from re.findall(r"^ *(kizami .+)$", command.epilog, re.M)


def options_of(name: str) -> set[str]:
    return {spelling for parameter in COMMANDS[name].params for spelling in parameter.opts} | {"--help"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_examples_and_a_row_in_readme(name: str) -> None:
    page = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
    assert COMMANDS[name].help.strip()
    assert f"kizami {name}" in COMMANDS[name].epilog
    assert "Examples:" in page
    assert re.search(rf"^\| `kizami {name}\b", README, re.M)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained_and_has_its_environment_variable(name: str) -> None:
    for parameter in COMMANDS[name].params:
        assert parameter.help, (name, parameter.name)
        if parameter.opts[0].startswith("-"):
            long = next(spelling for spelling in parameter.opts if spelling.startswith("--"))
            plain = "KIZAMI_" + long[2:].replace("-", "_").upper()
            # who serves and who chooses the codes are two questions: README names this variable
            assert parameter.envvar == ("KIZAMI_METHOD_ENGINE" if (name, long) == ("convert", "--engine") else plain)


@pytest.mark.parametrize("line", sorted(set(shown_lines())))
def test_shown_command_lines_use_only_real_commands_and_options(line: str) -> None:
    _, name, *rest = shlex.split(re.split(r" [|>] ", line)[0])
    assert name in COMMANDS
    for word in rest:
        if word.startswith("-"):
            assert word.split("=")[0] in options_of(name), line


def test_options_named_in_readme_exist() -> None:
    known = set().union(*(options_of(name) for name in COMMANDS)) | {"--version", "--install-completion"}
    others = {"--config-settings", "--dist"}  # of pip, of pytest-xdist
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) <= known | others


def test_readme_has_exactly_two_set_up_commands() -> None:
    marked = re.findall(r"<!-- setup: (\w+) -->\n```sh\n(.+)\n```", README)
    assert [what for what, _ in marked] == ["run", "test"]
    installing = [line for block in blocks("sh") for line in block.splitlines() if "pip install" in line]
    assert installing == [command for _, command in marked]


def test_readme_is_short() -> None:
    """What, two commands, the main job, results; the rest has pages of its own."""
    assert len(README.splitlines()) <= 230


def test_every_page_of_docs_is_linked_from_readme() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages == set(re.findall(r"\]\(docs/([\w-]+\.md)", README))


def test_readme_says_where_set_up_leaves_the_program() -> None:
    assert re.search(r"`\.venv/bin/kizami`.*`\. \.venv/bin/activate`", README, re.S)


def test_help_has_no_noise_and_no_hard_line_breaks() -> None:
    pages = {name: CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output for name in COMMANDS}
    pages[""] = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    for page in pages.values():
        assert not re.search(r"<bool>|<str>|<path>|\[required\]", page)
    assert "Takes the options of convert that shape the output. Reads headers, and a few MB to time" in pages["plan"]
    assert "-q, -v, --json and --debug" in pages[""]


def test_plan_takes_every_option_of_convert_that_decides_the_bytes() -> None:
    run_only = {"workers", "device", "dry_run", "restart", "max_rel_error", "allow_unloadable"}
    run_only |= {"events", "scratch_limit", "push_to", "private", "delete_pushed", "shards", "executor", "ray_address"}
    engine = {"engine", "data", "samples", "seq_len", "seed", "tokenizer"}  # codes, no sizes: the plan is the same
    convert = {parameter.name for parameter in COMMANDS["convert"].params} - run_only - engine - {"out"}
    assert convert <= {parameter.name for parameter in COMMANDS["plan"].params}


def test_no_path_of_a_machine_and_no_registry_host_in_readme() -> None:
    assert not re.search(r"(?<![\w.])/(work|tmp|home|root|Users)\b|https?://(?!huggingface\.co|github\.com)", README)


def test_the_python_example_runs_where_the_demo_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demo = blocks("sh")[0].split("&&")[-1].strip().removeprefix(".venv/bin/kizami ")
    assert CliRunner().invoke(app, shlex.split(demo)).exit_code == 0
    before = set((tmp_path / "kizami-demo").iterdir())
    (code,) = blocks("python", COMMAND_LINE)
    scope: dict[str, Any] = {}
    exec(compile(code, "command-line.md", "exec"), scope)
    (new,) = set((tmp_path / "kizami-demo").iterdir()) - before
    assert (new / "kizami.json").is_file()
    assert scope["manifest"]["output"]["bytes"] == scope["plan"].output.bytes


def test_exit_codes_in_the_docs_are_those_of_the_program() -> None:
    from kizami.cli import app as program

    rows = re.findall(r"^\| ([\d, ]+) \|", COMMAND_LINE.split("## Exit codes")[1].split("\n## ")[0], re.M)
    codes = {int(code) for row in rows for code in row.split(",")}
    assert codes == {
        program.DONE,
        program.NOT_MET,
        program.REFUSED,
        program.BUG,
        program.INTERRUPTED,
        program.TERMINATED,
    }


@pytest.mark.parametrize("command", [["convert", "a", "b"], ["calibrate", "a", "-o", "b", "--data", "c"]])
def test_a_seed_has_the_same_bounds_wherever_it_is_taken(command: list[str], kizami: Run) -> None:
    assert "-1 is less than 0" in kizami(*command, "--seed", -1).err
    assert "4294967296 is more than 4294967295" in kizami(*command, "--seed", 1 << 32).err
    assert "is more than" not in kizami(*command, "--seed", (1 << 32) - 1).err


@pytest.mark.parametrize("name", ["convert", "plan"])
def test_help_says_whose_method_awq_is_and_shows_statistics(name: str) -> None:
    page = " ".join(CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "400"}).output.split())
    assert "awq: only with --engine llmcompressor." in page
    assert "--method weighted --stats stats/" in page


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("code", python_blocks(ROOT / "docs" / "kv-cache.md"), ids=["transfer", "tags"])
def test_the_kv_cache_examples_print_what_they_say(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "kv-cache.md", "exec"), {})
    said = re.findall(r"^print\(.*\)  # (.+)$", code, re.M)
    assert capsys.readouterr().out.splitlines() == said
    assert said


def test_the_reference_is_that_of_the_program() -> None:
    """python -m kizami.cli.reference > docs/reference.md"""
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") == reference.page()

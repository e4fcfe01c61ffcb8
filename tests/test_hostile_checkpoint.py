"""A checkpoint made to do harm by its names, texts and code: what is said of it, and what Python is asked to do."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from case_runner import assert_converted, in_a_process, kizami
from cli_fixtures import on_terminal
from hostile_checkpoint import MARKUP, harmful, save_hostile
from make_cases import PACKED, tiny
from output_oracle import contents, parse_json


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The hostile checkpoint, converted once, and all that was said about it in every form."""
    folder = tmp_path_factory.mktemp("hostile")
    source, out = save_hostile(folder), folder / "out"
    before = contents(source)
    said = {"convert": kizami("convert", source, out, "-v")}
    for name, words in {
        "inspect": ["inspect", source, "-v"],
        "inspect json": ["inspect", source, "--json", "-v"],
        "tensors": ["inspect", source, "--tensors", "*"],
        "plan": ["plan", source, "-v"],
        "plan json": ["plan", source, "--json"],
        "plan file": ["plan", source, "-o", folder / "plan.json", "-q"],
        "dry run": ["convert", source, folder / "dry", "--dry-run"],
        "again": ["convert", source, out],
        "refused": ["convert", source, folder / "r", "--targets", "re:.*embed.*"],
        "verify": ["verify", out, "--against", source, "-v"],
        "verify json": ["verify", out, "--against", source, "--json"],
        "report": ["report", out, "-v"],
        "report json": ["report", out, "--json"],
        "report markdown": ["report", out, "--format", "markdown"],
        "report file": ["report", out, "-o", folder / "report.txt"],
        "report file json": ["report", out, "--format", "json", "-o", folder / "report.json"],
        "convert json": ["convert", source, folder / "out2", "--json"],
    }.items():
        said[name] = kizami(*words)
    yield {"folder": folder, "source": source, "out": out, "said": said, "before": before}
    shutil.rmtree(folder)


def test_a_hostile_checkpoint_is_converted_like_any_other(done: dict[str, Any]) -> None:
    folder = assert_converted(done["said"]["convert"], done["source"], done["out"])
    assert set(PACKED) < set(folder.packed)
    assert contents(done["source"]) == done["before"]
    theirs = parse_json((done["source"] / "config.json").read_bytes())
    assert {k: v for k, v in folder.config.items() if k != "quantization_config"} == {
        k: v for k, v in theirs.items() if k != "quantization_config"
    }
    assert [name for name, said in done["said"].items() if said.code] == ["again", "refused"]


def test_no_control_character_reaches_a_stream_or_a_report(done: dict[str, Any]) -> None:
    for name, said in done["said"].items():
        assert not harmful(said.stdout), name
        assert not harmful(said.stderr), name
        if said.stdout.startswith("{"):
            assert parse_json(said.stdout)["schema"].startswith("kizami.")
    written = [done["folder"] / name for name in ("plan.json", "report.txt", "report.json")]
    for path in (*written, done["out"] / "README.md", done["out"] / "kizami-report.jsonl", done["out"] / "kizami.json"):
        assert not harmful(path.read_text()), path.name


def test_names_are_shown_whole_all_the_same(done: dict[str, Any]) -> None:
    shown = MARKUP + "\\u202egnp.exe\\u2066 \\u200b\\ufeff\\U000e0041"
    for name in ("inspect", "tensors", "plan", "convert", "report"):
        said = done["said"][name]
        assert shown in said.stdout + said.stderr, name


def test_markup_in_names_is_text_in_markdown(done: dict[str, Any]) -> None:
    card, report = (done["out"] / "README.md").read_text(), done["said"]["report markdown"].stdout
    for text in (card, report):
        bare = re.sub(r"\\.", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
        bare = re.sub(r"`[^`\n]*`", "", bare)  # our own
        assert not re.search(r"<(?!this|!--)|\]\(|\*\*b", bare), bare
    assert "script" not in card
    assert "PWNED" not in card.replace("\\$(touch PWNED)", "")


def test_no_front_matter_of_the_source_becomes_more_than_words(done: dict[str, Any]) -> None:
    yaml = pytest.importorskip("yaml")
    card = (done["out"] / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert set(front) == {"pipeline_tag", "tags"}  # no library loads a part of a model
    assert {"int4", "compressed-tensors", "kizami"} <= set(front["tags"])
    assert all(type(tag) is str and re.fullmatch(r"[\w -]+", tag) for tag in front["tags"])


def test_what_leads_outside_is_left_and_said_so(done: dict[str, Any]) -> None:
    out, stdout = done["out"], done["said"]["convert"].stdout
    left = [
        "up.txt", "absolute.txt", "folder", "loop", "environ.txt", "fd.txt", "self", "root", "zero.bin.txt", "tty.txt",
        "a", "b", "nothing.txt", "pipe.txt", "socket.txt", "pytorch_model.bin", "x.pkl", "x.pt", "new\nline.txt",
    ]  # fmt: skip
    for name in left:
        assert not os.path.lexists(out / name), name
        assert name.replace("\n", "\\n") in stdout
    assert "\\udcff\\udcfe" in stdout
    for path in out.rglob("*"):
        assert not path.is_symlink()
        assert path.is_dir() or (path.is_file() and b"SECRET" not in path.read_bytes())


def test_code_is_copied_as_it_is(done: dict[str, Any]) -> None:
    for name in ("evil.py", "__init__.py", "numpy.py", "json.py", "sub/__init__.py", "chat_template.jinja", "-rf"):
        assert (done["out"] / name).read_bytes() == (done["source"] / name).read_bytes()


@pytest.mark.slow
def test_a_terminal_shows_markup_as_text(done: dict[str, Any]) -> None:
    """rich colours our own words; a name in square brackets stays a name."""
    for words in (["inspect", done["source"], "--tensors", "*"], ["plan", done["source"]]):
        code, seen = on_terminal(*words, columns=4000)
        assert code == 0
        assert MARKUP.replace("|", "") in seen.replace("|", "")
        ours = re.sub(r"\x1b\[[0-9;]*m", "", seen)  # colours
        assert not harmful(ours.replace("\r\n", "\n"))


# ---------------------------------------------------------------- what the interpreter is asked to do

# argv: the folder whose files are data; then a JSON list of commands. Everything is loaded before the watch begins.
WATCH = """
import contextlib, io, json, os, sys
from kizami.cli.app import main
data, commands, loading = os.path.realpath(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
def call(words):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as talk:
        try:
            main(words)
        except SystemExit as e:
            return e.code, talk.getvalue()
for words in loading:
    assert call(words)[0] == 0, words
events, watching = [], True
def hook(event, args):
    if watching:
        events.append((event, [repr(a) if not isinstance(a, (str, bytes)) else os.fsdecode(a) for a in args]))
os.chdir(data)  # where `import numpy` or `import json` would find the folder's own, if it were on the path
sys.addaudithook(hook)
ends = [call(words) for words in commands]
watching = False
from kizami.quantize.kernels.jit import cache_folder
import kizami.cli.app
package = os.path.dirname(os.path.dirname(os.path.realpath(kizami.cli.app.__file__)))
python = [sys.prefix, sys.base_prefix, package, str(cache_folder())]
print(json.dumps({"ends": ends, "events": events, "python": python}))
"""


NEVER = (
    "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "pty.", "socket.", "urllib.",
    "ctypes.dlopen", "pickle.", "code.__new__", "os.symlink", "os.link",
)  # fmt: skip


@pytest.mark.slow
def test_nothing_of_a_checkpoint_is_run_and_nothing_else_is_opened(tmp_path: Path) -> None:
    """What Python's audit events say of inspect, plan, convert, verify and report on the hostile checkpoint."""
    source, out, good = save_hostile(tmp_path / "data"), tmp_path / "out", tiny().save(tmp_path / "good")
    commands = [
        ["inspect", source, "-v"], ["plan", source, "-o", tmp_path / "plan.json"], ["convert", source, out],
        ["verify", out, "--against", source], ["report", out, "--format", "markdown"],
    ]  # fmt: skip
    loading = [
        [str(word).replace(str(source), str(good)).replace(str(out), str(tmp_path / "loaded")) for word in words]
        for words in commands
    ]
    words = json.dumps([[str(word) for word in command] for command in commands])
    done = in_a_process(WATCH, source, words, json.dumps(loading))
    assert done.returncode == 0, done.stderr
    found = parse_json(done.stdout)
    assert [code for code, _ in found["ends"]] == [0] * len(commands), found["ends"]
    events: list[tuple[str, list[str]]] = [(event, args) for event, args in found["events"]]
    names = {event for event, _ in events}
    assert "open" in names, "the watch sees what happens"
    assert not [name for name in names if name.startswith(NEVER)]
    for event, args in events:
        if event in ("import", "exec", "compile"):
            assert str(tmp_path) not in " ".join(args), (event, args)
    opened = {os.path.abspath(os.path.join(source, args[0])) for event, args in events if event == "open"}
    ours = [f"{source}/", f"{out}/", f"{out}.partial/", *(f"{place}/" for place in found["python"])]
    files = [
        *found["python"],
        str(tmp_path),
        str(source),
        str(out),
        f"{out}.partial",
    ]  # folders, to be listed or made durable
    files += [str(tmp_path / name) for name in ("plan.json", ".plan.json.tmp")]
    assert not [path for path in opened if not path.startswith(tuple(ours)) and path not in files]
    assert not [path for path in opened if "secret" in path]
    data = {os.path.relpath(path, source) for path in opened if path.startswith(str(source))}
    assert not {
        name for name in data if name.endswith((".bin", ".pt", ".pkl", ".pickle", ".pth", "pipe.txt", "socket.txt"))
    }
    assert not {*tmp_path.rglob("PWNED"), *tmp_path.rglob("*.PWNED")}

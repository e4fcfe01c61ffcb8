"""lm-eval asked of two servers: its command line, its answers joined, and code that is not run unasked."""

import json
import os
import sys
from pathlib import Path

import pytest
from chat_server import say, serving
from cli_fixtures import Run

from kizami.calibration.evaluation.batteries import BATTERIES, Battery, command, run, tasks_of
from kizami.formats.errors import KizamiError

# What `python -m lm_eval run` leaves: as lm_eval/evaluator.py and loggers/evaluation_tracker.py of 0.4.13 write it
FAKE = """
import json, pathlib, sys
words = sys.argv[1:]
option = lambda name: words[words.index(name) + 1]
assert words[0] == "run" and "--log_samples" in words
given = dict(part.split("=", 1) for part in option("--model_args").split(","))
folder = pathlib.Path(option("--output_path")) / "model"
folder.mkdir(parents=True)
(folder / "words.json").write_text(json.dumps(words))
worse = folder.parent.name.startswith("b")
for task in option("--tasks").split(","):
    lines = []
    for i in range(50):
        right = float(not (worse and i < 8))
        hashes = dict.fromkeys(("doc_hash", "prompt_hash", "target_hash"), str(i))
        lines.append({"doc_id": i, "filter": "none", "metrics": ["exact_match"], "exact_match": right, **hashes})
    text = "".join(json.dumps(line) + "\\n" for line in lines)
    (folder / f"samples_{task}_2026-11-30T10-20-30.123456.jsonl").write_text(text)
"""


@pytest.fixture
def lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages" / "lm_eval").mkdir(parents=True)
    (tmp_path / "packages" / "lm_eval" / "__init__.py").write_text("")
    (tmp_path / "packages" / "lm_eval" / "__main__.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(tmp_path / "packages")


def test_tasks_are_those_of_batteries_and_those_that_are_named() -> None:
    assert tasks_of(["knowledge"], ["gsm8k", "mine"]) == (*BATTERIES["knowledge"], "mine")
    for bad in (["x"],):
        with pytest.raises(KizamiError, match="expected one of knowledge, coding"):
            tasks_of(bad, [])
    for task in ("--limit", "a,b", ""):
        with pytest.raises(KizamiError, match="no name of a task"):
            tasks_of([], [task])


def test_the_command_line_is_lm_evals() -> None:
    words = command("http://h/v1/", "glm", Battery(("gsm8k",), "tok", 7), Path("out"))
    assert words[:4] == [sys.executable, "-m", "lm_eval", "run"]
    arguments = words[words.index("--model_args") + 1]
    assert (
        arguments
        == "model=glm,base_url=http://h/v1/completions,num_concurrent=8,tokenized_requests=False,tokenizer=tok"
    )
    assert words[-2:] == ["--limit", "7"]
    assert "--confirm_run_unsafe_code" not in words
    assert "--confirm_run_unsafe_code" in command("http://h/v1", "m", Battery(("mbpp",), runs_code=True), Path("out"))


@pytest.mark.parametrize("model", ["a,base_url=http://other", "a b", "a=b"])
def test_a_servers_name_of_a_model_cannot_add_arguments(model: str) -> None:
    with pytest.raises(KizamiError, match="has a comma"):
        command("http://h/v1", model, Battery(("gsm8k",)), Path("out"))


def test_code_that_a_model_wrote_is_not_run_unasked(lm_eval: None, tmp_path: Path) -> None:
    with pytest.raises(KizamiError, match="humaneval executes code that the model wrote") as refused:
        run("http://h/v1", "m", Battery(("humaneval",)), tmp_path / "out")
    assert refused.value.code == "runs_code"
    assert not (tmp_path / "out").exists()


def test_two_servers_are_asked_and_their_answers_joined(lm_eval: None, kizami: Run, tmp_path: Path) -> None:
    pytest.importorskip("httpx")
    with serving(lambda body: say("4"), "first") as a, serving(lambda body: say("4"), "second") as b:
        words = [
            "evaluate",
            a,
            b,
            "--task",
            "mine",
            "--battery",
            "instructions",
            "--logs",
            tmp_path / "logs",
            "--control",
        ]
        body = kizami(*words, "--questions", 50, "--json").json
        again = kizami(*words, "--json")
    worse, control = body["compared"]
    assert [task["task"] for task in worse["tasks"]] == ["ifeval", "mine"]
    assert [(task["lost"], task["won"], task["n"]) for task in worse["tasks"]] == [(8, 0, 50)] * 2
    assert [task["discordance"] for task in control["tasks"]] == [0, 0]
    said = json.loads((tmp_path / "logs" / "b0" / "model" / "words.json").read_text())
    assert f"model=second,base_url={b}/completions" in " ".join(said)
    assert (again.code, again.json["error"]["code"]) == (2, "usage"), "older samples are not mixed in"


def test_an_lm_eval_that_fails_is_named(kizami: Run, lm_eval: None, tmp_path: Path) -> None:
    (tmp_path / "packages" / "lm_eval" / "__main__.py").write_text("raise SystemExit('no such task')")
    with pytest.raises(KizamiError, match="lm-eval ended with 1: no such task"):
        run("http://h/v1", "m", Battery(("gsm8k",)), tmp_path / "out")

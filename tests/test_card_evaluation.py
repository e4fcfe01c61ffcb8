"""`kizami card`: figures of evaluations on the card, of this checkpoint only, and what was not measured."""

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import Run
from evaluation_figures import FIGURES, TASK

from kizami.formats.card_evaluation import with_evaluation
from kizami.formats.errors import KizamiError
from kizami.quantize.manifest import output_identity, read_manifest


def text(output: Mapping[str, str]) -> dict[str, Any]:
    identity = {"config_sha256": "0" * 64, **output}
    domains = [{"name": "a|b.txt"} | FIGURES, {"name": "code.py"} | FIGURES]
    return {
        "schema": "kizami.evaluate/1", "kind": "text", "reference": "GLM-5.2-FP8/",
        "tokens": {"sequences": 8, "seq_len": 512, "domains": [{"name": "a|b.txt"}, {"name": "code.py"}]},
        "compared": [
            {"name": "out", "all": FIGURES, "domains": domains, "identity": identity},
            {"name": "out, KV fp8 at 1.0", "all": FIGURES, "domains": domains[:1], "identity": identity},
            {"name": "other", "all": FIGURES | {"kl_mean": 99.0}, "domains": [], "identity": {"plan_hash": "x"}},
        ],
    }  # fmt: skip


ANSWERS = {
    "schema": "kizami.evaluate/1", "kind": "answers", "reference": "logs/fp8",
    "compared": [{"name": "logs/int4", "tasks": [TASK]}, {"name": "A again", "tasks": [TASK | {"b": 0.9999}]}],
}  # fmt: skip


@pytest.fixture
def out(converted: Path, tmp_path: Path) -> Path:
    return shutil.copytree(converted, tmp_path / "out")


def files(folder: Path, *bodies: dict[str, Any]) -> list[str]:
    words = []
    for number, body in enumerate(bodies):
        (folder / f"e{number}.json").write_text(json.dumps(body))
        words += ["--evaluation", str(folder / f"e{number}.json")]
    return words


def named(*bodies: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"e{number}.json": body for number, body in enumerate(bodies)}


def test_the_card_begins_with_what_the_model_is(kizami: Run, out: Path) -> None:
    card = kizami("card", out).out
    assert card == (out / "README.md").read_text() == kizami("card", out, "-q").out
    assert "quantized derivative" in card.partition("\n# ")[2].partition("| |")[0]


def test_figures_of_this_checkpoint_stand_before_its_limits(kizami: Run, out: Path, tmp_path: Path) -> None:
    output = output_identity(read_manifest(out))
    card = kizami("card", out, *files(tmp_path, text(output), ANSWERS)).out
    assert card.count("## Evaluation") == 1
    assert card.index("## Evaluation") < card.index("## Limits")
    assert "on 8 sequences of 512 tokens (a\\|b.txt, code.py)" in card
    assert "| KV cache BF16 | 1.80e-03 | 8.00e-02 | 96.50% | 68.489 | 68.488 | -0.0009 [-0.0034, +0.0016] |" in card
    assert "| KV cache fp8 at 1.0 |" in card
    assert "9.90e+01" not in card, "another model's"
    assert "| gsm8k (exact_match) | 1,319 | 94.39 | 93.56 | +0.83 [-0.12, 1.78] | 0.117 | 1.36 points |" in card
    assert "Not measured: coding, tool calls, long context, instruction following." in card
    assert "What was evaluated stands above, and nothing else was." in card
    assert "not evaluated on benchmarks" not in card


def test_limits_that_were_not_kept_are_said(out: Path) -> None:
    output = output_identity(read_manifest(out))
    body = text(output)
    name = body["compared"][0]["name"]
    body["problems"] = [f"{name}, all: KL 0.0018, above 0.001", "another: KL 9", "control: 3 of A's tokens changed"]
    answers = ANSWERS | {"problems": ["logs/int4, gsm8k: a drop of 1 points is not excluded"]}
    card = with_evaluation((out / "README.md").read_text(), named(body, answers), output)
    assert card.count("Of the limits set for this run, not kept:") == 2
    assert "- control: 3 of A's tokens changed\n" in card
    assert "- int4, gsm8k: a drop of 1 points is not excluded\n" in card
    assert "another: KL 9" not in card
    kept = with_evaluation((out / "README.md").read_text(), named(text(output)), output)
    assert "not kept" not in kept


def test_filters_of_one_task_are_told_apart_and_small_p_are_not_zero(out: Path) -> None:
    body = copy.deepcopy(ANSWERS)
    (one, _) = body["compared"]
    one["tasks"] = [TASK | {"filter": "strict-match"}, TASK | {"filter": "flexible-extract", "p_value": 1e-9}]  # type: ignore[index]
    card = with_evaluation((out / "README.md").read_text(), named(body, body), {})
    assert card.count("| gsm8k (exact_match, strict-match) |") == 1
    assert card.count("| gsm8k (exact_match, flexible-extract) |") == 1
    assert "| <0.001 |" in card


def test_a_second_evaluation_takes_the_place_of_the_first(out: Path) -> None:
    output, card = output_identity(read_manifest(out)), (out / "README.md").read_text()
    once = with_evaluation(card, named(text(output)), output)
    assert with_evaluation(once, named(text(output)), output) == once
    other = with_evaluation(card, named(ANSWERS), output)
    assert "gsm8k" not in with_evaluation(other, named(text(output)), output)


def test_in_place_the_card_is_replaced_and_the_output_still_verifies(kizami: Run, out: Path, tmp_path: Path) -> None:
    done = kizami("card", out, *files(tmp_path, ANSWERS), "--in-place")
    assert (done.code, done.out.splitlines()[-1]) == (0, f"card written to {out / 'README.md'}")
    assert "## Evaluation" in (out / "README.md").read_text()
    verified = kizami("verify", out)
    assert verified.code == 0
    assert "README.md was edited" in verified.err


def test_figures_of_another_checkpoint_are_refused(kizami: Run, out: Path, tmp_path: Path) -> None:
    done = kizami("card", out, *files(tmp_path, ANSWERS, text({"plan_hash": "0" * 64})), "--in-place", "--json")
    assert (done.code, done.json["error"]["code"], done.json["error"]["file"]) == (
        2,
        "bad_evaluation",
        str(tmp_path / "e1.json"),
    )
    assert "## Evaluation" not in (out / "README.md").read_text()


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(schema="x"),
        lambda body: body.update(kind="x"),
        lambda body: body.pop("compared"),
        lambda body: body.update(compared=[7]),
        lambda body: body["compared"][0].update(all=None),
        lambda body: body["compared"][0]["all"].update(kl_mean="much"),
        lambda body: body["compared"][0]["all"].update(nll_delta_interval=[1]),
        lambda body: body["tokens"].update(sequences="many"),
        lambda body: body["compared"][0]["all"].update(kl_mean=float("nan")),
        lambda body: body["compared"][0]["all"].update(top1=17),
        lambda body: body["tokens"].update(sequences=10**400),
    ],
)
def test_what_is_no_evaluation_is_refused(out: Path, change: Change) -> None:
    output = output_identity(read_manifest(out))
    body = copy.deepcopy(text(output))
    change(body)
    with pytest.raises(KizamiError) as refused:
        with_evaluation((out / "README.md").read_text(), named(body), output)
    assert refused.value.code == "bad_evaluation"


def test_words_of_an_evaluation_cannot_leave_their_cell(out: Path) -> None:
    output = output_identity(read_manifest(out))
    body = text(output)
    body["reference"] = "x\n# Heading\n<script>"
    card = with_evaluation((out / "README.md").read_text(), named(body), output)
    assert "\n# Heading" not in card
    assert "<script>" not in card


@pytest.mark.parametrize("change", [{"n": -5}, {"a": 17.0}, {"b": 10**400}, {"p_value": 2}, {"interval": [-2, 0]}])
def test_answers_with_figures_that_cannot_be_are_refused(out: Path, change: dict[str, Any]) -> None:
    body = copy.deepcopy(ANSWERS)
    body["compared"][0]["tasks"][0].update(change)  # type: ignore[index]
    with pytest.raises(KizamiError, match="is not whole"):
        with_evaluation((out / "README.md").read_text(), named(body), {})


def test_answers_of_several_models_are_not_taken_for_one(out: Path) -> None:
    body = copy.deepcopy(ANSWERS)
    body["compared"].append({"name": "logs/other", "tasks": [TASK]})  # type: ignore[attr-defined]
    with pytest.raises(KizamiError, match="answers of 2 models beside the reference"):
        with_evaluation((out / "README.md").read_text(), named(body), {})


def test_a_control_is_not_taken_for_the_model(out: Path) -> None:
    card = with_evaluation((out / "README.md").read_text(), named(ANSWERS), {})
    assert card.count("| gsm8k") == 1
    assert "99.99" not in card
    assert "Answers of int4, question by question, against fp8" in card


def test_a_name_that_only_has_a_tasks_letters_in_it_measures_nothing(out: Path) -> None:
    body = copy.deepcopy(ANSWERS)
    body["compared"][0]["tasks"][0]["task"] = "research_answers"  # type: ignore[index]
    card = with_evaluation((out / "README.md").read_text(), named(body), {})
    assert "Not measured: knowledge and reasoning, coding, tool calls, long context" in card


def test_line_ends_of_another_system_are_read(out: Path) -> None:
    card = (out / "README.md").read_text()
    assert with_evaluation(card.replace("\n", "\r\n"), named(ANSWERS), {}) == with_evaluation(card, named(ANSWERS), {})


def test_a_card_without_limits_is_not_guessed_at(kizami: Run, out: Path, tmp_path: Path) -> None:
    (out / "README.md").write_text("mine\n")
    done = kizami("card", out, *files(tmp_path, ANSWERS), "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "bad_card")


def test_figures_of_a_fine_tune_with_the_same_plan_are_refused(out: Path) -> None:
    """Equal headers give an equal plan; the weights' bytes tell the two apart."""
    output = output_identity(read_manifest(out))
    other = text(output | {"shards_sha256": "0" * 64})
    with pytest.raises(KizamiError, match="has no figures of this checkpoint"):
        with_evaluation((out / "README.md").read_text(), named(other), output)


@pytest.mark.parametrize("known", [("config_sha256", "plan_hash"), ("config_sha256",), ()])
def test_an_evaluation_from_before_weights_were_noted_is_said_to_be_too_old(
    kizami: Run, out: Path, tmp_path: Path, known: tuple[str, ...]
) -> None:
    body = text(output_identity(read_manifest(out)))
    for one in body["compared"]:
        one["identity"] = {key: value for key, value in one["identity"].items() if key in known}
    error = kizami("card", out, *files(tmp_path, body), "--json").json["error"]
    assert (error["code"], error["file"]) == ("bad_evaluation", str(tmp_path / "e0.json"))
    assert error["message"] == "was written by an older kizami, which did not note whose weights its figures are of"
    assert error["hint"] == "run kizami evaluate SRC OUT -o FILE again, with this folder as OUT"


def test_an_old_evaluation_of_another_plan_is_of_another_checkpoint(out: Path) -> None:
    output = output_identity(read_manifest(out))
    with pytest.raises(KizamiError, match="has no figures of this checkpoint"):
        with_evaluation((out / "README.md").read_text(), named(text({"plan_hash": "0" * 64})), output)


def test_one_sequence_is_one(out: Path) -> None:
    output = output_identity(read_manifest(out))
    body = text(output)
    body["tokens"]["sequences"] = 1
    card = with_evaluation((out / "README.md").read_text(), named(body), output)
    assert "on 1 sequence of 512 tokens" in card


def test_what_an_evaluation_says_against_its_figures_stands_on_the_card(out: Path) -> None:
    output = output_identity(read_manifest(out))
    body = text(output) | {"warnings": ["the built-in sample", "/home/me/b has another tokenizer than /home/me/a"]}
    answers = copy.deepcopy(ANSWERS)
    note = "3 of 22 conversations that B did not answer; the first: the server gave HTTP 400: no /srv/models/acme"
    answers["compared"][0]["left_out"] = [note]
    answers["problems"] = [f"logs/int4, {note}"]
    card = with_evaluation((out / "README.md").read_text(), named(body, answers), output)
    assert "- the built-in sample\n- b has another tokenizer than a\n" in card
    assert card.count("- 3 of 22 conversations that B did not answer\n") == 1, "what a server said is its publisher's"
    assert "/home" not in card
    assert "acme" not in card


def test_without_a_single_call_tool_calls_were_not_measured(out: Path) -> None:
    answers = copy.deepcopy(ANSWERS)
    answers["compared"][0]["tasks"] = [TASK | {"task": "tool calls", "metric": "valid"}]
    for called in (True, False):
        card = with_evaluation((out / "README.md").read_text(), named(answers | {"called": called}), {})
        missing = next(line for line in card.splitlines() if line.startswith("Not measured:"))
        assert ("tool calls" in missing) != called


@pytest.mark.parametrize(
    ("task", "coding"), [("belebele_swe_Latn", False), ("swe_bench_lite", True), ("mbpp_plus", True)]
)
def test_a_language_is_no_test_of_code(out: Path, task: str, coding: bool) -> None:
    answers = copy.deepcopy(ANSWERS)
    answers["compared"][0]["tasks"] = [TASK | {"task": task}]
    card = with_evaluation((out / "README.md").read_text(), named(answers), {})
    missing = next(line for line in card.splitlines() if line.startswith("Not measured:"))
    assert ("coding" in missing) != coding

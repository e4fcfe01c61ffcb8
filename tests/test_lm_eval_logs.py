"""Answers from lm-eval's logs, joined by question."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import Run

from kizami.calibration.evaluation.lm_eval_logs import Joined, LeftOut, is_log, join_logs, read_logs
from kizami.calibration.evaluation.verdicts import judge
from kizami.formats.errors import KizamiError

DATE = "2026-11-30T10-20-30.123456"


def line(question: int, right: float, **more: Any) -> dict[str, Any]:
    """As lm_eval/evaluator.py of 0.4.13 writes it."""
    return {
        "doc_id": question, "doc": {"question": f"{question}?"}, "target": "4", "arguments": [["2+2=", {}]],
        "resps": [["4"]], "filtered_resps": ["4"], "filter": "none", "metrics": ["exact_match"],
        "doc_hash": f"d{question}", "prompt_hash": f"p{question}", "target_hash": f"t{question}", "exact_match": right,
    } | more  # fmt: skip


def write(folder: Path, lines: list[dict[str, Any]], task: str = "gsm8k", date: str = DATE) -> Path:
    file = folder / "model" / f"samples_{task}_{date}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines))
    return folder


def joined(a: list[float], b: list[float]) -> Joined:
    return Joined("gsm8k", "none", "exact_match", tuple((x,) for x in a), tuple((x,) for x in b))


def test_answers_are_joined_by_question_whatever_their_order(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [line(0, 1.0), line(1, 1.0), line(2, 0.0)])
    b = write(tmp_path / "b", [line(2, 1.0), line(0, 1.0), line(1, 0.0)])
    (one,), notes = join_logs(read_logs(a), read_logs(b))
    assert (one.task, one.filter, one.metric) == ("gsm8k", "none", "exact_match")
    assert (one.a, one.b) == (((1.0,), (1.0,), (0.0,)), ((1.0,), (0.0,), (1.0,)))
    assert (one.is_single, one.is_right_or_wrong, notes) == (True, True, [])
    found = judge(one, 0.01)
    assert (found.n, found.lost, found.won, found.drop, found.p_value) == (3, 1, 1, 0.0, 1.0)


def test_a_file_is_a_log_and_its_name_is_the_task(tmp_path: Path) -> None:
    write(tmp_path, [line(0, 1.0)], task="mmlu_high_school_physics")
    (file,) = (tmp_path / "model").iterdir()
    assert list(read_logs(file)) == ["mmlu_high_school_physics"]
    other = file.rename(file.with_name("mine.jsonl"))
    assert list(read_logs(other)) == ["mine"]
    assert is_log(other)
    assert not is_log(Path(__file__).parent)


def test_several_runs_are_several_answers_to_a_question(tmp_path: Path) -> None:
    for run, right in enumerate((1.0, 0.0, 1.0)):
        a = write(tmp_path / "a", [line(0, right), line(1, 1.0)], date=f"2026-11-30T10-20-3{run}")
    b = write(tmp_path / "b", [line(0, 0.0), line(1, 1.0)])
    (one,), _ = join_logs(read_logs(a), read_logs(b))
    assert (one.a, one.b) == (((1.0, 0.0, 1.0), (1.0, 1.0, 1.0)), ((0.0,), (1.0,)))
    found = judge(one, 0.01)
    assert (found.runs_a, found.runs_b, found.n, found.lost) == (3, 1, 2, None)
    assert found.drop == pytest.approx(1 / 3)


def test_filters_and_metrics_are_comparisons_of_their_own(tmp_path: Path) -> None:
    metrics = {"metrics": ["acc", "acc_norm", "words"], "acc": True, "acc_norm": 0.5, "words": "four"}
    lines = [line(0, 1.0), line(0, 0.0, filter="strict-match"), line(1, 1.0), line(1, 1.0, filter="strict-match")]
    a = write(write(tmp_path / "a", lines), [line(0, 1.0, **metrics)], task="arc")
    found, _ = join_logs(read_logs(a), read_logs(a))
    assert [(one.task, one.filter, one.metric) for one in found] == [
        ("arc", "none", "acc"), ("arc", "none", "acc_norm"), ("gsm8k", "none", "exact_match"),
        ("gsm8k", "strict-match", "exact_match"),
    ]  # fmt: skip
    assert [one.is_right_or_wrong for one in found] == [True, False, True, True]


def test_tasks_of_one_side_are_left_out_and_named(tmp_path: Path) -> None:
    a = write(write(tmp_path / "a", [line(0, 1.0)]), [line(0, 1.0)], task="arc")
    b = write(write(tmp_path / "b", [line(0, 1.0)]), [line(0, 1.0)], task="mmlu")
    found, notes = join_logs(read_logs(a), read_logs(b))
    assert [one.task for one in found] == ["gsm8k"]
    assert notes == [LeftOut("arc: only A has it"), LeftOut("mmlu: only B has it")]


Change = Callable[[list[dict[str, Any]]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[1].update(prompt_hash="x"), "question 1 is not the same in .*: prompt_hash differs"),
        (lambda lines: lines[0].update(doc_hash="x"), "question 0 is not the same in .*: doc_hash differs"),
        (lambda lines: lines[0].update(target_hash="x"), "target_hash differs"),
        (
            lambda lines: lines.pop(),
            "has 1 question that .* has not, and lacks 0 of its questions; the first of them is 2",
        ),
        (lambda lines: lines[0].update(filter="strict-match"), "has 1 question that .* has not, and lacks 1 of"),
    ],
)
def test_answers_to_other_questions_are_not_compared(tmp_path: Path, change: Change, message: str) -> None:
    lines = [line(i, 1.0) for i in range(3)]
    a = write(tmp_path / "a", lines)
    change(lines)
    with pytest.raises(KizamiError, match=message) as refused:
        join_logs(read_logs(a), read_logs(write(tmp_path / "b", lines)))
    assert refused.value.code == "other_questions"


def test_an_answer_that_was_not_scored_is_not_passed_over(tmp_path: Path) -> None:
    lines = [line(i, 1.0, metrics=["exact_match", "f1"], f1=0.5) for i in range(3)]
    del lines[1]["f1"]
    with pytest.raises(KizamiError, match="question 1 has no number for f1, and others have one"):
        read_logs(write(tmp_path, lines))


def test_samples_of_several_models_are_not_taken_for_runs_of_one(tmp_path: Path) -> None:
    write(tmp_path, [line(0, 1.0)])
    (tmp_path / "model").rename(tmp_path / "fp8")
    write(tmp_path, [line(0, 0.0)])
    with pytest.raises(KizamiError, match="samples of several models: fp8, model") as refused:
        read_logs(tmp_path)
    assert refused.value.code == "several_models"
    assert list(read_logs(tmp_path / "fp8")) == ["gsm8k"]


@pytest.mark.parametrize("said", [None, {"gsm8k": {"exact_match": True, "brier_score": False}}])
def test_where_lower_is_better_a_rise_is_a_drop(tmp_path: Path, said: object) -> None:
    def made(folder: Path, brier: float) -> Path:
        metrics = ["brier_score", "exact_match"]
        out = write(folder, [line(i, 1.0, metrics=metrics, brier_score=brier + i / 100) for i in range(20)])
        if said is not None:
            (out / "model" / f"results_{DATE}.json").write_text(json.dumps({"higher_is_better": said}))
        return out

    found, _ = join_logs(read_logs(made(tmp_path / "a", 0.15)), read_logs(made(tmp_path / "b", 0.55)))
    brier, exact = (judge(one, 0.01) for one in found)
    assert brier.drop == pytest.approx(0.4)
    assert brier.p_value < 0.05
    assert not brier.non_inferior
    assert exact.drop == 0


def test_no_task_in_common_is_an_error(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [line(0, 1.0)]), write(tmp_path / "b", [line(0, 1.0)], task="arc")
    with pytest.raises(KizamiError, match="nothing to compare: arc: only B has it"):
        join_logs(read_logs(a), read_logs(b))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines.append(lines[0]), ":4: has question 0 under the filter none again"),
        (lambda lines: lines[1].pop("doc_id"), ":2: has no doc_id"),
        (lambda lines: lines[1].update(doc_id=True), ":2: has no doc_id"),
        (lambda lines: lines[1].pop("doc_hash"), ":2: lacks doc_hash or prompt_hash or target_hash"),
        (lambda lines: lines[1].update(metrics="acc"), ":2: has no list of metrics"),
        (
            lambda lines: lines[1].update(exact_match=10**400),
            "question 1 has no number for exact_match, and others have one",
        ),
        (lambda lines: lines[1].update(exact_match=float("nan")), ":2: exact_match is nan, expected a finite number"),
        (lambda lines: lines[1].pop("exact_match"), "question 1 has no number for exact_match"),
        (lambda lines: lines.clear(), "has no line"),
    ],
)
def test_lines_that_are_none_of_lm_evals_are_named(tmp_path: Path, change: Change, message: str) -> None:
    lines = [line(i, 1.0) for i in range(3)]
    change(lines)
    with pytest.raises(KizamiError, match=message):
        read_logs(write(tmp_path, lines))


def test_a_folder_without_samples_says_how_they_come(tmp_path: Path) -> None:
    with pytest.raises(KizamiError, match=r"samples_TASK_DATE\.jsonl.*--log_samples"):
        read_logs(tmp_path)


# ------------------------------------------------------------------------------------------------------------ verdicts


def test_ten_equal_answers_prove_little() -> None:
    found = judge(joined([1.0] * 10, [1.0] * 10), 0.01)
    assert (found.p_value, found.drop, found.non_inferior, found.discordance) == (1.0, 0.0, False, 0.0)
    assert found.upper_bound > 0.2


def test_scores_that_are_no_right_or_wrong_are_compared_by_their_means() -> None:
    a, b = [0.5, 0.75, 1.0, 0.25] * 50, [0.5, 0.5, 1.0, 0.25] * 50
    found = judge(joined(a, b), 0.1)
    assert (found.lost, found.discordance, found.needed) == (None, None, None)
    assert found.drop == pytest.approx(0.0625)
    assert found.p_value < 1e-6
    assert found.interval[0] < 0.0625 < found.interval[1]
    assert found.non_inferior


# --------------------------------------------------------------------------------------------------------- the command


def gsm8k(folder: Path, lost: int, won: int, n: int = 1319) -> Path:
    """B's answers, A's being right but for `won` questions and 74 - won others."""
    wrong = 74
    right_a = [i >= wrong for i in range(n)]
    right_b = [(not r if i < won else r) if i < wrong else i >= wrong + lost for i, r in enumerate(right_a)]
    write(folder / "a", [line(i, float(r)) for i, r in enumerate(right_a)])
    write(folder / "b", [line(i, float(r)) for i, r in enumerate(right_b)])
    return folder


def test_the_worked_example_of_gsm8k(kizami: Run, tmp_path: Path) -> None:
    folder = gsm8k(tmp_path, 26, 15)
    body = kizami("evaluate", folder / "a", folder / "b", "--json").json
    assert (body["schema"], body["kind"], body["margin"], body["ok"]) == ("kizami.evaluate/1", "answers", 0.01, True)
    (task,) = body["compared"][0]["tasks"]
    assert (task["n"], task["lost"], task["won"]) == (1319, 26, 15)
    assert (round(100 * task["a"], 2), round(100 * task["b"], 2)) == (94.39, 93.56)
    assert round(task["p_value"], 3) == 0.117
    assert [round(100 * x, 2) for x in task["interval"]] == [-0.12, 1.78]
    assert not task["non_inferior"]
    done = kizami("evaluate", folder / "a", folder / "b")
    assert done.code == 0
    assert "no difference shown; a drop of 1 point is NOT excluded" in done.out
    assert done.out.splitlines()[-1] == "of 1 comparison: a drop is shown in 0, one of 1 point excluded in 0"


def test_a_margin_that_is_asked_for_and_not_shown_ends_with_1(kizami: Run, tmp_path: Path) -> None:
    folder = gsm8k(tmp_path, 26, 15)
    done = kizami("evaluate", folder / "a", folder / "b", "--margin", "0.01")
    assert done.code == 1
    assert "gsm8k (exact_match): a drop of 1 point is not excluded (at most 1.6" in done.err
    assert kizami("evaluate", folder / "a", folder / "b", "--margin", "0.02").code == 0


def test_a_task_that_could_not_be_compared_meets_no_margin(kizami: Run, tmp_path: Path) -> None:
    a = write(write(tmp_path / "a", [line(i, 1.0) for i in range(2000)]), [line(0, 1.0)], task="arc")
    b = write(tmp_path / "b", [line(i, 1.0) for i in range(2000)])
    done = kizami("evaluate", a, b, "--margin", "0.01")
    assert done.code == 1
    assert "arc: only A has it" in done.err


def test_another_run_of_a_shows_the_noise_and_is_under_no_margin(kizami: Run, tmp_path: Path) -> None:
    folder = gsm8k(tmp_path, 26, 15)
    noisy = gsm8k(tmp_path / "noise", 12, 10)
    words = ["evaluate", folder / "a", folder / "a", "--noise", noisy / "b", "--margin", "0.01", "--json"]
    body = kizami(*words).json
    assert [one["name"] for one in body["compared"]] == [str(folder / "a"), "A again"]
    assert body["compared"][1]["tasks"][0]["discordance"] == pytest.approx(22 / 1319)
    assert body["ok"]


@pytest.mark.parametrize("words", [["--data", "x.txt"], ["--control"], ["--max-kl", "1"], ["--layout", "fp8"]])
def test_options_for_text_are_refused_for_answers(kizami: Run, tmp_path: Path, words: list[str]) -> None:
    folder = gsm8k(tmp_path, 1, 1)
    done = kizami("evaluate", folder / "a", folder / "b", *words, "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "usage")


def test_options_for_answers_are_refused_for_checkpoints(kizami: Run, tiny_checkpoint: Path) -> None:
    done = kizami("evaluate", tiny_checkpoint, tiny_checkpoint, "--margin", "0.01", "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "usage")


def with_results(folder: Path, higher: object) -> Path:
    (folder / "model" / f"results_{DATE}.json").write_text(json.dumps({"higher_is_better": {"gsm8k": higher}}))
    return folder


def scored(folder: Path, metric: str, value: float) -> Path:
    lines = [line(i, 1.0, metrics=["exact_match", metric], **{metric: value + i / 100}) for i in range(20)]
    return write(folder, lines)


def test_one_run_that_says_how_a_metric_is_read_speaks_for_both(tmp_path: Path) -> None:
    a, b = scored(tmp_path / "a", "mine", 0.1), with_results(scored(tmp_path / "b", "mine", 0.7), {"mine": False})
    found, _ = join_logs(read_logs(a), read_logs(b))
    assert [one.higher_is_better for one in found] == [True, False]
    assert judge(found[1], 0.01).drop == pytest.approx(0.6)


def test_runs_that_disagree_on_how_a_metric_is_read_are_not_compared(tmp_path: Path) -> None:
    a = with_results(scored(tmp_path / "a", "mine", 0.1), {"mine": True})
    b = with_results(scored(tmp_path / "b", "mine", 0.7), {"mine": False})
    with pytest.raises(KizamiError, match=r"gsm8k, mine: higher is better in .*a/model.*, and lower in .*b/model"):
        join_logs(read_logs(a), read_logs(b))


def test_what_the_results_leave_open_its_name_says(tmp_path: Path) -> None:
    a, b = (with_results(scored(tmp_path / side, "wer", 0.2), {"wer": None}) for side in ("a", "b"))
    found, _ = join_logs(read_logs(a), read_logs(b))
    assert [(one.metric, one.higher_is_better) for one in found] == [("exact_match", True), ("wer", False)]

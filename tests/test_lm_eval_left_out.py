"""What of lm-eval's logs is not compared: what fails a gate, and what is a note."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import Run

from kizami.calibration.evaluation.lm_eval_logs import Joined, LeftOut, join_logs, read_logs
from kizami.formats.errors import KizamiError

pytestmark = pytest.mark.long

N = 2000
Scores = Callable[[int], dict[str, Any]]


def write(folder: Path, task: str, scores: Scores, n: int = N, name: str = "none", run: int = 0) -> Path:
    """As lm_eval/evaluator.py of 0.4.13 writes it; scores: by question, what its metrics are."""
    place = folder / "model" / f"samples_{task}_2026-11-30T10-20-3{run}.jsonl"
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place, "a") as file:
        for i in range(n):
            found = scores(i)
            hashes = {"doc_hash": f"d{i}", "prompt_hash": f"p{i}", "target_hash": f"t{i}"}
            file.write(json.dumps({"doc_id": i, "filter": name, "metrics": list(found), **hashes, **found}) + "\n")
    return folder


def compared(a: Path, b: Path) -> tuple[list[Joined], list[LeftOut]]:
    return join_logs(read_logs(a), read_logs(b))


def right(i: int) -> dict[str, Any]:
    return {"exact_match": 1.0}


def both(tmp_path: Path, a: Scores, b: Scores, task: str = "gsm8k", n: int = N) -> tuple[Path, Path]:
    return write(tmp_path / "a", task, a, n), write(tmp_path / "b", task, b, n)


# What a margin is not met with: it is odd on one side, where it may hide what B lost.
ASYMMETRIC: dict[str, tuple[Scores, Scores, str]] = {
    "one side's metric": (
        lambda i: right(i) | {"f1": 1.0},
        right,
        "gsm8k (none), f1: only A has it",
    ),
    "one side's metric without a number": (
        right,
        lambda i: right(i) | {"f1": None},
        "gsm8k (none), f1: only B has it",
    ),
    "a number on one side, none on the other": (
        lambda i: right(i) | {"f1": 1.0},
        lambda i: right(i) | {"f1": None},
        "gsm8k (none), f1: not every answer has a number for it",
    ),
    "of other questions": (
        lambda i: right(i) | {"4096": 1.0 if i % 2 else -1.0},
        lambda i: right(i) | {"4096": 1.0 if i % 3 else -1.0},
        "gsm8k (none), 4096: A and B, or their runs, have it at different questions",
    ),
    "absent where the other has it": (
        lambda i: right(i) | {"f1": 1.0},
        lambda i: right(i) | ({"f1": 1.0} if i else {}),
        "gsm8k (none), f1: A and B, or their runs, have it at different questions",
    ),
    "on one side of no question": (
        lambda i: right(i) | {"4096": 1.0},
        lambda i: right(i) | {"4096": -1.0},
        "gsm8k (none), 4096: A and B, or their runs, have it at different questions",
    ),
    "beyond 0 to 1 on one side": (
        lambda i: right(i) | {"rouge1": 43.0},
        lambda i: right(i) | {"rouge1": 0.0},
        "gsm8k (none), rouge1: its scores are not from 0 to 1, those of A alone",
    ),
}  # fmt: skip

# Notes, while something else of the task is compared: both sides are alike.
SYMMETRIC: dict[str, tuple[Scores, str]] = {
    "lists, as IFEval's": (
        lambda i: {"inst_level_strict_acc": [True, False]},
        "inst_level_strict_acc: no answer has a number for it",
    ),
    "tuples, as wikitext's": (
        lambda i: {"word_perplexity": [-12.5, 7]},
        "word_perplexity: no answer has a number for it",
    ),
    "null": (lambda i: {"f1": None}, "f1: no answer has a number for it"),
    "words": (lambda i: {"f1": "four"}, "f1: no answer has a number for it"),
    "more than a float holds": (lambda i: {"f1": 1 << 60}, "f1: no answer has a number for it"),
    "percent": (lambda i: {"rouge1": 43.0}, "rouge1: its scores are not from 0 to 1"),
    "a length that no question has": (lambda i: {"8192": -1.0}, "8192: no question has it"),
}


@pytest.mark.parametrize(("a", "b", "words"), ASYMMETRIC.values(), ids=ASYMMETRIC)
def test_what_one_side_lacks_meets_no_margin(kizami: Run, tmp_path: Path, a: Scores, b: Scores, words: str) -> None:
    places = both(tmp_path, a, b)
    found, left = compared(*places)
    assert [one.metric for one in found] == ["exact_match"]
    assert left == [LeftOut(words, counts=True)]
    done = kizami("evaluate", *places, "--margin", "0.01", "--json")
    (one,) = done.json["compared"]
    assert (one["left_out"], one["not_judged"]) == ([words], [words])
    assert (done.code, done.json["problems"]) == (1, [f"{places[1]}, {words}"])
    assert kizami("evaluate", *places).code == 0


@pytest.mark.parametrize(("more", "words"), SYMMETRIC.values(), ids=SYMMETRIC)
def test_what_neither_side_has_is_a_note(kizami: Run, tmp_path: Path, more: Scores, words: str) -> None:
    places = both(tmp_path, lambda i: right(i) | more(i), lambda i: right(i) | more(i))
    found, left = compared(*places)
    assert [one.metric for one in found] == ["exact_match"]
    assert left == [LeftOut(f"gsm8k (none), {words}", counts=False)]
    done = kizami("evaluate", *places, "--margin", "0.01", "--json")
    (one,) = done.json["compared"]
    assert (one["left_out"], one["not_judged"]) == ([f"gsm8k (none), {words}"], [])
    assert (done.code, done.json["problems"]) == (0, [])
    shown = kizami("evaluate", *places).out
    assert "note: gsm8k (none), " in shown
    assert "left out" not in shown


@pytest.mark.parametrize(("more", "words"), SYMMETRIC.values(), ids=SYMMETRIC)
def test_a_task_of_which_nothing_is_compared_was_not_judged(
    kizami: Run, tmp_path: Path, more: Scores, words: str
) -> None:
    a, b = both(tmp_path, right, right)
    for folder in (a, b):
        write(folder, "wikitext", more, 9)
    found, left = compared(a, b)
    assert [one.task for one in found] == ["gsm8k"]
    assert left == [LeftOut(f"wikitext (none), {words}", counts=True)]
    done = kizami("evaluate", a, b, "--margin", "0.01")
    assert done.code == 1
    assert f"left out: wikitext (none), {words}" in " ".join(done.out.split())


def test_a_filter_of_which_nothing_is_compared_was_not_judged(tmp_path: Path) -> None:
    a, b = both(tmp_path, right, right)
    for folder in (a, b):
        write(folder, "gsm8k", lambda i: {"exact_match": None}, name="strict-match")
    found, left = compared(a, b)
    assert [one.filter for one in found] == ["none"]
    assert left == [LeftOut("gsm8k (strict-match), exact_match: no answer has a number for it", counts=True)]


def test_a_task_without_any_metric_was_not_judged(tmp_path: Path) -> None:
    a, b = both(tmp_path, right, right)
    for folder in (a, b):
        write(folder, "mine", lambda i: {}, 9)
    assert compared(a, b)[1] == [LeftOut("mine (none): no answer has a metric", counts=True)]


def test_nothing_but_a_task_without_a_score_is_refused_with_its_reason(tmp_path: Path) -> None:
    places = both(tmp_path, lambda i: {"bits_per_byte": [1.0, 2]}, lambda i: {"bits_per_byte": [1.0, 2]}, "wikitext", 9)
    with pytest.raises(KizamiError, match=r"wikitext .none., bits_per_byte: no answer has a number") as refused:
        compared(*places)
    assert refused.value.code == "other_questions"
    assert refused.value.hint == "a task is needed that has a score from 0 to 1 for each question"


# --------------------------------------------------------------------------------------------------------------- RULER


def ruler(lost: int, lengths: tuple[int, ...], *, listed: bool) -> Scores:
    """A question has one length; of the others it has -1, or nothing at all, as lm-eval's versions have it."""

    def scores(i: int) -> dict[str, Any]:
        own = lengths[i % len(lengths)]
        others = {str(length): -1.0 for length in lengths if listed and length != own}
        return others | {str(own): float(own != lengths[-1] or i // len(lengths) >= lost)}

    return scores


@pytest.mark.parametrize("listed", [True, False])
def test_rulers_lengths_are_compared_on_their_own_questions(kizami: Run, tmp_path: Path, listed: bool) -> None:
    lengths = (4096, 8192)
    a, b = both(tmp_path, ruler(0, lengths, listed=listed), ruler(30, lengths, listed=listed), "niah_single_1")
    found, left = compared(a, b)
    assert [(one.metric, len(one.a), len(one.b)) for one in found] == [
        ("4096", N // 2, N // 2),
        ("8192", N // 2, N // 2),
    ]
    assert sum(score for (score,) in found[0].b) == N // 2
    assert sum(score for (score,) in found[1].b) == N // 2 - 30
    half = "1,000 of 2,000 questions have it"
    assert left == [LeftOut(f"niah_single_1 (none), {length}: {half}", counts=False) for length in lengths]
    done = kizami("evaluate", a, b, "--margin", "0.01", "--json")
    assert done.code == 1
    assert [problem.partition(": ")[0] for problem in done.json["problems"]] == [f"{b}, niah_single_1 (8192)"]
    again = kizami("evaluate", a, a, "--margin", "0.01", "--json")
    assert (again.code, again.json["compared"][0]["not_judged"]) == (0, [])


def test_runs_of_one_side_must_have_a_length_at_the_same_questions(tmp_path: Path) -> None:
    a, b = both(tmp_path, right, right)
    write(a, "niah", lambda i: {"4096": 1.0}, 9)
    write(a, "niah", lambda i: {"4096": 1.0 if i else -1.0}, 9, run=1)
    write(b, "niah", lambda i: {"4096": 1.0}, 9)
    assert compared(a, b)[1] == [
        LeftOut("niah (none), 4096: A and B, or their runs, have it at different questions", counts=True)
    ]


def test_a_metric_that_one_run_of_a_side_lacks_is_not_compared(tmp_path: Path) -> None:
    a, b = both(tmp_path, lambda i: right(i) | {"f1": 1.0}, lambda i: right(i) | {"f1": 1.0}, n=9)
    write(a, "gsm8k", right, 9, run=1)
    found, left = compared(a, b)
    assert [one.metric for one in found] == ["exact_match"]
    assert left == [LeftOut("gsm8k (none), f1: not every run has it", counts=True)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_no_finite_number_is_an_error_whatever_else_is_there(tmp_path: Path, value: float) -> None:
    with pytest.raises(KizamiError, match=r":3: f1 is .*, expected a finite number") as refused:
        read_logs(write(tmp_path, "gsm8k", lambda i: right(i) | {"f1": 0.5 if i < 2 else value}, 3))
    assert refused.value.code == "bad_samples"

"""Answers by question from what lm-eval leaves with --log_samples: `samples_TASK_DATE.jsonl`, one line a question and
filter (lm_eval/evaluator.py and result_schema.py of 0.4.13).

lm-eval compares two models by an unpaired test of the totals. Joined by question the same answers show far more, if
both models were asked the same: hashes of question, prompt and target must be equal, or nothing is compared.
"""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from kizami.formats.errors import KizamiError, printable
from kizami.formats.files import io_error, open_regular
from kizami.formats.strict_json import parse_json_object, read_json_object

_NAME = re.compile(r"samples_(?P<task>.+)_\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(\.\d+)?\.jsonl")
MAX_LINE_BYTES = 64 << 20  # a question with a prompt of a million tokens, written twice
MAX_FILES = 10_000
HASHES = ("doc_hash", "prompt_hash", "target_hash")
MOST_RESULTS_BYTES = 64 << 20
# RULER's tasks have a metric for each length of the prompt, and give a question this one for those that are not its own
# (lm_eval/tasks/ruler/common_utils.py): no score, and none that lm-eval averages
NOT_OF_THIS_QUESTION = -1.0
# Where no results_DATE.json stands beside the samples, which says it
LOWER_IS_BETTER = frozenset({
    "bits_per_byte", "brier_score", "byte_perplexity", "mae", "mse", "perplexity", "ter", "wer", "word_perplexity",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """One question under one filter. scores: of each metric that is a number. others: metrics that are listed, and are
    none. A metric that is in neither is not of this question."""

    hashes: tuple[str, ...]
    scores: Mapping[str, float]
    others: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Log:
    """One run of one task: answers by doc_id and filter. lower_is_better: of the metrics of which the run says it."""

    task: str
    file: str
    answers: Mapping[tuple[int, str], Answer]
    lower_is_better: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Joined:
    """One task, filter and metric. a, b: scores by question, from 0 to 1, each with one for every run of its side."""

    task: str
    filter: str
    metric: str
    a: tuple[tuple[float, ...], ...]
    b: tuple[tuple[float, ...], ...]
    higher_is_better: bool = True

    @property
    def is_right_or_wrong(self) -> bool:
        return all(score in (0.0, 1.0) for answers in (*self.a, *self.b) for score in answers)

    @property
    def is_single(self) -> bool:
        """Whether each question was answered once by each."""
        return all(len(answers) == 1 for answers in (*self.a, *self.b))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What is not compared, or not on all questions, in words. counts: whether it may hide a loss, so that no margin is
    met; if not, it is a note."""

    words: str
    counts: bool = True


def is_log(path: Path) -> bool:
    """Whether `path` is a file of samples, or a folder that has some."""
    return path.suffix == ".jsonl" or (path.is_dir() and next(_files(path), None) is not None)


def read_logs(path: Path) -> dict[str, tuple[Log, ...]]:
    """By task; several runs of a task are several answers to its questions.

    KizamiError "no_samples", "bad_samples" (with the line), "not_a_file", "missing_file", "io_error".
    """
    files = list(_files(path)) if path.is_dir() else [path]
    if not files:
        raise KizamiError(
            "has no samples_TASK_DATE.jsonl", code="no_samples", file=str(path), hint="run lm-eval with --log_samples"
        )
    found: dict[str, list[Log]] = {}
    for file in files:
        log = _read(file)
        found.setdefault(log.task, []).append(log)
    return {task: tuple(logs) for task, logs in sorted(found.items())}


def join_logs(a: Mapping[str, Sequence[Log]], b: Mapping[str, Sequence[Log]]) -> tuple[list[Joined], list[LeftOut]]:
    """Tasks that both have, by question, and what is left out.

    KizamiError "other_questions" where the two were not asked the same, or nothing of it can be compared.
    """
    joined: list[Joined] = []
    sides = (("A", a, b), ("B", b, a))
    left = [
        LeftOut(f"{task}: only {side} has it") for side, ours, theirs in sides for task in ours.keys() - theirs.keys()
    ]
    common = a.keys() & b.keys()
    for task in common:
        keys = _same_questions(a[task], b[task])
        for name in {name for _, name in keys}:
            found, odd = _join_filter(task, name, a[task], b[task], [key for key in keys if key[1] == name])
            joined, left = joined + found, left + odd
    left.sort(key=lambda one: one.words)
    if not joined:
        raise KizamiError(
            f"A and B have nothing to compare: {left[0].words}",
            code="other_questions",
            hint="a task is needed that has a score from 0 to 1 for each question"
            if common
            else "both need samples of the same tasks; the name says of which: samples_TASK_DATE.jsonl, TASK.jsonl",
        )
    return sorted(joined, key=lambda one: (one.task, one.filter, one.metric)), left


def _join_filter(
    task: str, name: str, a: Sequence[Log], b: Sequence[Log], keys: Sequence[tuple[int, str]]
) -> tuple[list[Joined], list[LeftOut]]:
    """Its metrics. Where none of them can be compared, whatever the reason, the task was not judged."""
    found, left = [], []
    answers = [log.answers[key] for log in (*a, *b) for key in keys]
    for metric in sorted({metric for answer in answers for metric in (*answer.scores, *answer.others)}):
        of, odd = _questions(metric, a, b, keys)
        if of:
            found.append(_join(task, name, metric, a, b, of))
        if odd is not None:
            left.append(LeftOut(f"{task} ({name}), {printable(metric, 60)}: {odd.words}", odd.counts))
    if not found:
        left = [replace(one, counts=True) for one in left] or [LeftOut(f"{task} ({name}): no answer has a metric")]
    return found, left


def _questions(
    metric: str, a: Sequence[Log], b: Sequence[Log], keys: Sequence[tuple[int, str]]
) -> tuple[list[tuple[int, str]], LeftOut | None]:
    """Those that the metric can be compared on, and why it is not on all of them. What is odd on both sides alike says
    nothing of B; what is odd on one may be what B lost."""
    logs = (*a, *b)
    has = [any(metric in answer.scores or metric in answer.others for answer in _of(log, keys)) for log in logs]
    sides = [any(has[: len(a)]), any(has[len(a) :])]
    if not all(sides):
        return [], LeftOut(f"only {'A' if sides[0] else 'B'} has it")
    if not all(has):
        return [], LeftOut("not every run has it")
    if not any(metric in answer.scores for log in logs for answer in _of(log, keys)):
        return [], LeftOut("no answer has a number for it", counts=False)
    if any(metric in answer.others for log in logs for answer in _of(log, keys)):
        return [], LeftOut("not every answer has a number for it")
    scores = [
        {
            key: answer.scores[metric]
            for key, answer in zip(keys, _of(log, keys), strict=True)
            if answer.scores.get(metric, NOT_OF_THIS_QUESTION) != NOT_OF_THIS_QUESTION
        }
        for log in logs
    ]
    beyond = [any(not 0 <= score <= 1 for score in found.values()) for found in scores]
    sides = [any(beyond[: len(a)]), any(beyond[len(a) :])]
    if all(sides):
        return [], LeftOut("its scores are not from 0 to 1", counts=False)
    if any(sides):
        return [], LeftOut(f"its scores are not from 0 to 1, those of {'A' if sides[0] else 'B'} alone")
    if any(found.keys() != scores[0].keys() for found in scores):
        return [], LeftOut("A and B, or their runs, have it at different questions")
    if not scores[0]:
        return [], LeftOut("no question has it", counts=False)
    if len(scores[0]) < len(keys):
        return list(scores[0]), LeftOut(f"{len(scores[0]):,} of {len(keys):,} questions have it", counts=False)
    return list(keys), None


def _of(log: Log, keys: Sequence[tuple[int, str]]) -> Iterator[Answer]:
    return (log.answers[key] for key in keys)


def _join(
    task: str, name: str, metric: str, a: Sequence[Log], b: Sequence[Log], keys: Sequence[tuple[int, str]]
) -> Joined:
    first, second = (tuple(tuple(log.answers[key].scores[metric] for log in logs) for key in keys) for logs in (a, b))
    return Joined(task, name, metric, first, second, not _is_lower_better(task, metric, (*a, *b)))


def _is_lower_better(task: str, metric: str, logs: Sequence[Log]) -> bool:
    """As the runs say; by its name where none does. KizamiError "other_questions" where they disagree."""
    said = {log.lower_is_better[metric]: log for log in logs if metric in log.lower_is_better}
    if len(said) > 1:
        raise KizamiError(
            f"{task}, {printable(metric, 60)}: higher is better in {said[False].file}, and lower in {said[True].file}",
            code="other_questions",
            hint="the same task version is needed on both sides",
        )
    return next(iter(said), metric in LOWER_IS_BETTER)


def _files(folder: Path) -> Iterator[Path]:
    """lm-eval puts them into a folder with the model's name, below --output_path. KizamiError "several_models"."""
    places = [folder, *sorted(child for child in folder.iterdir() if child.is_dir() and not child.is_symlink())]
    found = {
        place: files
        for place in places
        if (files := sorted(file for file in place.iterdir() if _NAME.fullmatch(file.name))[:MAX_FILES])
    }
    if len(found) > 1:
        names = ", ".join(printable(place.name, 60) for place in found)
        raise KizamiError(
            f"has samples of several models: {names}", code="several_models", file=str(folder), hint="name one of them"
        )
    for files in found.values():
        yield from files


def _read(file: Path) -> Log:
    named = _NAME.fullmatch(file.name)
    task = named["task"] if named else file.stem
    answers: dict[tuple[int, str], Answer] = {}
    try:
        with open(open_regular(file, file.name), "rb") as stream:
            number = 0
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise _bad(file, number, f"is longer than {MAX_LINE_BYTES:,} bytes")
                if line.strip():
                    key, answer = _answer(parse_json_object(line, f"{file.name}:{number}", what="line"), file, number)
                    if key in answers:
                        raise _bad(
                            file, number, f"has question {key[0]} under the filter {printable(key[1], 40)} again"
                        )
                    answers[key] = answer
    except OSError as e:
        raise io_error("cannot read", e, file.name) from e
    if not answers:
        raise KizamiError("has no line", code="no_samples", file=file.name)
    _check_metrics(answers, file)
    return Log(task, str(file), answers, _lower_is_better(file, task))


def _check_metrics(answers: Mapping[tuple[int, str], Answer], file: Path) -> None:
    """A score that one answer lacks would be one fewer to compare, without a word."""
    numbers: dict[str, set[str]] = {}
    for (_, name), answer in answers.items():
        numbers.setdefault(name, set()).update(answer.scores)
    for (question, name), answer in answers.items():
        if odd := sorted(numbers[name] & answer.others):
            raise KizamiError(
                f"question {question} has no number for {printable(odd[0], 60)}, and others have one",
                code="bad_samples",
                file=file.name,
                hint="an answer that was not scored is no answer: run it again",
            )


def _lower_is_better(file: Path, task: str) -> dict[str, bool]:
    """As results_DATE.json of the same run has it; empty without one."""
    beside = file.with_name(file.name.replace(f"samples_{task}_", "results_").removesuffix("l"))
    if not beside.is_file():
        return {}
    said = read_json_object(beside, beside.name, limit=MOST_RESULTS_BYTES).get("higher_is_better")
    metrics = said.get(task) if isinstance(said, dict) else None
    if not isinstance(metrics, dict):
        return {}
    return {name: not higher for name, higher in metrics.items() if isinstance(higher, bool)}


def _answer(line: Mapping[str, Any], file: Path, number: int) -> tuple[tuple[int, str], Answer]:
    question, name, metrics = line.get("doc_id"), line.get("filter", "none"), line.get("metrics")
    if type(question) is not int or not isinstance(name, str):
        raise _bad(file, number, "has no doc_id, or a filter that is no word")
    hashes = tuple(line.get(key) for key in HASHES)
    if not all(isinstance(value, str) for value in hashes):
        raise _bad(file, number, f"lacks {' or '.join(HASHES)}", "lm-eval 0.4.2 and later write them")
    if not isinstance(metrics, list) or not all(isinstance(metric, str) for metric in metrics):
        raise _bad(file, number, "has no list of metrics")
    scores = {metric: value for metric in metrics if (value := _score(line.get(metric))) is not None}
    for metric, score in scores.items():
        if not isfinite(score):
            raise _bad(file, number, f"{printable(metric, 60)} is {score}, expected a finite number")
    return (question, name), Answer(tuple(map(str, hashes)), scores, frozenset(metrics) - scores.keys())


def _score(value: object) -> float | None:
    if not isinstance(value, bool | int | float) or (isinstance(value, int) and abs(value) > 1 << 53):
        return None
    return float(value)


def _bad(file: Path, number: int, message: str, hint: str | None = None) -> KizamiError:
    return KizamiError(message, code="bad_samples", file=f"{file.name}:{number}", hint=hint)


def _more(log: Log, than: Log) -> Set[tuple[int, str]]:
    return log.answers.keys() - than.answers.keys()


def _same_questions(a: Sequence[Log], b: Sequence[Log]) -> list[tuple[int, str]]:
    """The keys that every log has, all of them with the same hashes."""
    first, *others = (*a, *b)
    for other in others:
        if other.answers.keys() != first.answers.keys():
            odd = sorted(other.answers.keys() ^ first.answers.keys())
            counts = [len({doc for doc, _ in keys}) for keys in (_more(first, other), _more(other, first))]
            raise KizamiError(
                f"{first.file} has {counts[0]:,} question{'s' * (counts[0] != 1)} that {other.file} has not, and lacks "
                f"{counts[1]:,} of its questions; the first of them is {odd[0][0]}",
                code="other_questions",
                hint="compare runs with the same --limit and the same tasks",
            )
        for key, answer in first.answers.items():
            theirs = other.answers[key]
            for name, ours_, theirs_ in zip(HASHES, answer.hashes, theirs.hashes, strict=True):
                if ours_ != theirs_:
                    raise KizamiError(
                        f"question {key[0]} is not the same in {first.file} and {other.file}: {name} differs",
                        code="other_questions",
                        hint="the same task version, few-shot examples and chat template are needed on both sides",
                    )
    return sorted(first.answers)

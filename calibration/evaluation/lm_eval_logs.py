"""Answers by question from what lm-eval leaves with --log_samples: `samples_TASK_DATE.jsonl`, one line a question and
filter (lm_eval/evaluator.py and result_schema.py of 0.4.13).

lm-eval compares two models by an unpaired test of the totals. Joined by question the same answers show far more, if
both models were asked the same: hashes of question, prompt and target must be equal, or nothing is compared.
"""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
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
# Where no results_DATE.json stands beside the samples, which says it
LOWER_IS_BETTER = frozenset({
    "bits_per_byte", "brier_score", "byte_perplexity", "mae", "mse", "perplexity", "ter", "wer", "word_perplexity",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """One question under one filter. scores: of each metric that is a number. others: metrics that are none."""

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


def join_logs(a: Mapping[str, Sequence[Log]], b: Mapping[str, Sequence[Log]]) -> tuple[list[Joined], list[str]]:
    """Tasks that both have, by question, and notes on what is left out.

    KizamiError "other_questions" where the two were not asked the same.
    """
    joined: list[Joined] = []
    sides = (("A", a, b), ("B", b, a))
    notes = [f"{task}: only {side} has it" for side, ours, theirs in sides for task in ours.keys() - theirs.keys()]
    for task in a.keys() & b.keys():
        keys = _same_questions(a[task], b[task])
        for name in sorted({name for _, name in keys}):
            mine = [key for key in keys if key[1] == name]
            found, odd = _metrics(a[task], b[task], mine)
            notes += [f"{task} ({name}), {metric}: {why}" for metric, why in odd]
            joined += [_join(task, name, metric, a[task], b[task], mine) for metric in found]
    if not joined:
        raise KizamiError(
            f"A and B have nothing to compare: {sorted(notes)[0]}",
            code="other_questions",
            hint="both need samples of the same tasks; the name says of which: samples_TASK_DATE.jsonl, TASK.jsonl",
        )
    return sorted(joined, key=lambda one: (one.task, one.filter, one.metric)), sorted(notes)


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
    """A metric that one answer lacks would be one fewer to compare, without a word."""
    first: dict[str, frozenset[str]] = {}
    for (question, name), answer in answers.items():
        metrics = frozenset(answer.scores)
        if (expected := first.setdefault(name, metrics)) != metrics:
            odd = sorted(expected ^ metrics)[0]
            raise KizamiError(
                f"question {question} has other metrics that are numbers than the first one: {printable(odd, 60)}",
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
    if not scores or not all(map(isfinite, scores.values())):
        raise _bad(file, number, "has no metric that is a finite number")
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
                f"{first.file} has {counts[0]:,} questions that {other.file} has not, and lacks {counts[1]:,} of its "
                f"questions; the first of them is {odd[0][0]}",
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


def _metrics(
    a: Sequence[Log], b: Sequence[Log], keys: Sequence[tuple[int, str]]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Those that both have, from 0 to 1, and why others are left out."""
    sides = [set(logs[0].answers[keys[0]].scores) for logs in (a, b)]
    no_numbers = {metric for log in (*a, *b) for key in keys for metric in log.answers[key].others}
    found, odd = [], []
    for metric in sorted(sides[0] | sides[1] | no_numbers):
        if metric in no_numbers:
            odd.append((metric, "not every answer has a number for it"))
        elif not all(metric in log.answers[keys[0]].scores for log in (*a, *b)):
            odd.append((metric, "not every run has it"))
        elif not all(0 <= log.answers[key].scores[metric] <= 1 for log in (*a, *b) for key in keys):
            odd.append((metric, "its scores are not from 0 to 1"))
        else:
            found.append(metric)
    return found, odd

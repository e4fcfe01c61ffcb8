"""What `kizami evaluate` says: the object of --json, and the same for people."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import exp
from typing import TYPE_CHECKING, Any

from kizami.cli.kv_accuracy_text import shortfalls
from kizami.cli.output import Ui, counted, duration, gib
from kizami.formats.card_evaluation import CONTROL, p_words, visible_words

if TYPE_CHECKING:
    from kizami.calibration.data.tokens import TokenSet
    from kizami.calibration.evaluation.lm_eval_logs import LeftOut
    from kizami.calibration.evaluation.streamed import Compared, Texts
    from kizami.calibration.evaluation.verdicts import Verdict
    from kizami.calibration.kv_accuracy.measures import TokenMeasures
    from kizami.calibration.kv_accuracy.passes import Event

Body = dict[str, Any]
TEXT_NOTES = (
    "every token is the data's (teacher forcing): how errors add up over a long answer, in code or through tool calls "
    "is not seen",
    "positions are those of packed sequences: short documents follow each other in one, and attention sees them all",
    "tokens of a sequence are alike: intervals are over sequences",
)
ANSWER_NOTES = (
    "intervals and p-values are of one task each; among many tasks some are beyond 5 % by chance",
    "no claim is made for what was not asked: other tasks, longer answers, other languages",
)


class Watch:
    """Listens to `evaluate_streamed`: one line per layer on stderr."""

    def __init__(self, ui: Ui) -> None:
        self._ui, self._layers, self._began = ui, 0, time.monotonic()
        self._told_of_logits = False

    def __call__(self, name: str, event: "Event") -> None:
        from kizami.calibration.kv_accuracy.passes import LayerDone, Started

        now = time.monotonic()
        match event:
            case Started():
                self._layers, self._began = event.layers, now
                room = f"{gib(event.disk)} of scratch, {gib(event.chunks.needed)} of memory"
                self._ui.progress(f"{name}: {counted(event.layers, 'layer')}; {room}")
            case LayerDone():
                took, left = now - self._began, self._layers - event.layer - 1
                to_go = f", about {duration(left * took)} for the rest" if left else ""
                self._ui.progress(f"{name}: layer {event.layer + 1} of {self._layers}  {duration(took)}{to_go}")
                self._began = now
            case _:
                if not name and not self._told_of_logits:
                    self._told_of_logits = True
                    self._ui.progress(f"logits, {counted(event.total, 'band')} of the vocabulary")


# ---------------------------------------------------------------------------------------------------------- on text


def text_body(
    reference: str,
    sets: "Sequence[tuple[str, TokenSet]]",
    texts: "Texts",
    found: "Sequence[Compared]",
    facts: Sequence[Body],
) -> Body:
    """KL and NLL in nats, shares from 0 to 1. facts: of each of `found`, which checkpoint and cache its name is."""
    warnings = list(dict.fromkeys(warning for _, tokens in sets for warning in tokens.warnings))
    return {
        "kind": "text",
        "reference": reference,
        "tokens": {
            "sha256": texts.sha256,
            "sequences": len(texts.ids),
            "seq_len": texts.ids.shape[1],
            "built_in": False,
            "domains": [
                {"name": name, "sequences": tokens.sequences, "sources": [asdict(s) for s in tokens.sources]}
                for name, tokens in sets
            ],
        },
        "compared": [_compared(one, texts) | more for one, more in zip(found, facts, strict=True)],
        "notes": list(TEXT_NOTES),
        "warnings": warnings,
    }


def _compared(one: "Compared", texts: "Texts") -> Body:
    from kizami.calibration.kv_accuracy.measures import buckets_of

    seq_len = texts.ids.shape[1]
    return {
        "name": one.name,
        "all": figures(one.tokens, 0, seq_len),
        "positions": [figures(one.tokens, *at) for at in buckets_of(seq_len)],
        "domains": [
            {"name": domain.name} | figures(one.tokens.rows(domain.rows), 0, seq_len) for domain in texts.domains
        ],
    }


def figures(tokens: "TokenMeasures", first: int, last: int) -> Body:
    """Of positions first to last - 1. nll_delta, accuracy_drop: with an interval of 95 % over sequences, None of one.
    lost: the data's next token was A's most likely and is not B's; won: the other way round."""
    from kizami.calibration.evaluation.streamed import over_sequences

    bucket = tokens.bucket(first, last)
    counts = over_sequences(tokens, first, last)
    return asdict(bucket) | {
        "perplexity": _exp(bucket.nll),
        "perplexity_other": _exp(bucket.nll + bucket.nll_delta),
        "nll_delta_interval": counts.nll_delta_interval,
        "lost": counts.lost,
        "won": counts.won,
        "accuracy": counts.accuracy,
        "accuracy_drop": counts.accuracy_drop,
        "accuracy_drop_interval": counts.accuracy_drop_interval,
        "flips": int(bucket.tokens - round(bucket.top1 * bucket.tokens)),
    }


def _exp(nll: float) -> float | None:
    return exp(nll) if nll < 700 else None


def text_problems(body: Body, max_kl: float | None, min_top1: float | None) -> list[str]:
    """What does not meet the thresholds, in words; logits that are not finite never do."""
    problems = []
    for one in body["compared"]:
        parts = [("all", one["all"]), *((_range(at), at) for at in one["positions"])]
        parts += [(domain["name"], domain) for domain in one["domains"]]
        for what, at in parts:
            problems += shortfalls(f"{one['name']}, {what}", at, max_kl, min_top1)
        if one["name"] == CONTROL and one["all"]["flips"]:
            problems.append(f"control: {one['all']['flips']:,} of A's most likely tokens changed with nothing changed")
    return problems


TEXT_HEADS = (
    "", ">KL mean", ">median", ">p99.9", ">same top", ">A's ppl", ">ppl", ">NLL delta", ">next token lost", ">won",
)  # fmt: skip


def show_text(ui: Ui, body: Body) -> None:
    tokens = body["tokens"]
    sequences = f"{counted(tokens['sequences'], 'sequence')} of {tokens['seq_len']:,} tokens"
    ui.heading(f"{body['reference']} (A) on {sequences}")
    for one in body["compared"]:
        ui.heading(one["name"])
        rows = [_text_row(domain["name"], domain) for domain in one["domains"] if len(one["domains"]) > 1]
        rows += [_text_row(f"positions {_range(at)}", at) for at in one["positions"] if len(one["positions"]) > 1]
        ui.table(TEXT_HEADS, [*rows, _text_row("all", one["all"])])
    ui.say()
    for note in body["notes"]:
        ui.prose(f"note: {note}")
    ui.warn(body["warnings"])
    ui.fail(body["problems"], 5)
    ui.result(f"{_last_text(body)}, {duration(body['seconds'])}")


def _text_row(name: str, at: Mapping[str, Any]) -> tuple[str, ...]:
    interval = at["nll_delta_interval"]
    spread = "" if interval is None else f" ± {(interval[1] - interval[0]) / 2:.4f}"
    perplexities = ["" if at[key] is None else f"{at[key]:.3f}" for key in ("perplexity", "perplexity_other")]
    return (
        name, f"{at['kl_mean']:.2e}", f"{at['kl_median']:.1e}", f"{at['kl_p999']:.2e}", f"{at['top1']:.2%}",
        *perplexities, f"{at['nll_delta']:+.4f}{spread}", f"{at['lost']:,}", f"{at['won']:,}",
    )  # fmt: skip


def _last_text(body: Body) -> str:
    worst = max(body["compared"], key=lambda one: one["all"]["kl_mean"])
    at = worst["all"]
    return f"largest mean KL {at['kl_mean']:.3g} nats, top-1 agreement {at['top1']:.2%} ({worst['name']})"


def _range(at: Mapping[str, Any]) -> str:
    return f"{at['first']}-{at['last'] - 1}"


# -------------------------------------------------------------------------------------------------------- on answers


def answers_body(
    reference: str, compared: "Sequence[tuple[str, Sequence[Verdict], Sequence[LeftOut]]]", margin: float
) -> Body:
    """compared: name, verdicts, and what is left out. not_judged: those of left_out that no margin is met with."""
    return {
        "kind": "answers",
        "reference": reference,
        "margin": margin,
        "compared": [
            {
                "name": name,
                "tasks": [asdict(verdict) for verdict in verdicts],
                "left_out": [one.words for one in left_out],
                "not_judged": [one.words for one in left_out if one.counts],
            }
            for name, verdicts, left_out in compared
        ],
        "notes": list(ANSWER_NOTES),
        "warnings": [],
    }


def answer_problems(body: Body) -> list[str]:
    """Tasks in which a drop of the margin is not excluded, or that could not be judged."""
    theirs = [one for one in body["compared"] if one["name"] != CONTROL]
    return [f"{one['name']}, {words}" for one in theirs for words in one["not_judged"]] + [
        f"{one['name']}, {_task(task)}: a drop of {_points(body['margin'])} is not excluded (at most "
        f"{100 * task['upper_bound']:.2f} with 95 % confidence)"
        for one in theirs
        for task in one["tasks"]
        if not task["non_inferior"]
    ]


ANSWER_HEADS = ("task", ">n", ">A %", ">B %", ">lost", ">won", ">drop, points (95 %)", ">p", "verdict", ">n can see")


def show_answers(ui: Ui, body: Body) -> None:
    ui.heading(f"{body['reference']} (A), question by question; margin {_points(body['margin'])}")
    if asked := body.get("reference_turns"):
        ui.table(TURN_HEADS, [_turn_row(turn) for turn in asked["turns"]])
        ui.prose(_ends(asked))
    for one in body["compared"]:
        ui.heading(one["name"])
        ui.table(ANSWER_HEADS, [_answer_row(task, body["margin"]) for task in one["tasks"]])
        for words in one["left_out"]:
            ui.prose(f"{'left out' if words in one['not_judged'] else 'note'}: {words}")
        if one.get("turns"):
            ui.table(TURN_HEADS, [_turn_row(turn) for turn in one["turns"]])
            ui.prose(_ends(one))
    ui.say()
    for note in body["notes"]:
        ui.prose(f"note: {note}")
    ui.warn(body["warnings"])
    ui.fail(body["problems"], 5)
    ui.result(_last_answers(body))


TURN_HEADS = (">turn", ">asked", ">calls", ">JSON", ">fits", ">valid", ">right", ">valid so far")


def _ends(side: Mapping[str, Any]) -> str:
    return f"answers ended by: {', '.join(f'{n:,} {word}' for word, n in side['finish_reasons'].items())}"


def _turn_row(turn: Mapping[str, Any]) -> tuple[str, ...]:
    keys = ("turn", "conversations", "called", "parsed", "fits", "valid", "right", "valid_so_far")
    return tuple(f"{turn[key]:,}" for key in keys)


def _answer_row(task: Mapping[str, Any], margin: float) -> tuple[str, ...]:
    low, high = task["interval"]
    return (
        _task(task), f"{task['n']:,}", f"{100 * task['a']:.2f}", f"{100 * task['b']:.2f}",
        _count(task["lost"]), _count(task["won"]),
        f"{100 * task['drop']:+.2f} [{100 * low:.2f}, {100 * high:.2f}]", p_words(task["p_value"]),
        "; ".join(verdict_words(task, margin)), visible_words(task["visible_drop"]),
    )  # fmt: skip


def verdict_words(task: Mapping[str, Any], margin: float) -> tuple[str, str]:
    """Two verdicts, of which neither follows from the other."""
    if task["p_value"] >= 0.05:
        found = "no difference shown"
    else:
        found = "a drop is shown" if task["drop"] > 0 else "a gain is shown"
    within = f"a drop of {_points(margin)} is {'excluded' if task['non_inferior'] else 'NOT excluded'}"
    return found, within


def _last_answers(body: Body) -> str:
    tasks = [task for one in body["compared"] if one["name"] != CONTROL for task in one["tasks"]]
    shown = sum(task["p_value"] < 0.05 and task["drop"] > 0 for task in tasks)
    safe = sum(task["non_inferior"] for task in tasks)
    return (
        f"of {counted(len(tasks), 'comparison')}: a drop is shown in {shown}, one of {_points(body['margin'])} "
        f"excluded in {safe}"
    )


def _points(margin: float) -> str:
    """`1 point` of 0.01."""
    number = f"{100 * margin:g}"
    return f"{number} point{'' if number == '1' else 's'}"


def _task(task: Mapping[str, Any]) -> str:
    words = [task["metric"]] if task["filter"] in ("none", "") else [task["metric"], task["filter"]]
    runs = f", {task['runs_a']} + {task['runs_b']} runs" if task["runs_a"] + task["runs_b"] > 2 else ""
    return f"{task['task']} ({', '.join(words)}{runs})"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"

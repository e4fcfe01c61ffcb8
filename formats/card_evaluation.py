"""What an evaluation says on a model card: its figures, with what they are of, and plainly what was not measured."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from kizami.formats.errors import KizamiError, printable
from kizami.formats.model_card import NOT_EVALUATED, escape_markdown

SCHEMA = "kizami.evaluate/1"
HEADING = "## Evaluation"
BEGIN, END = "<!-- kizami: evaluation -->", "<!-- kizami: end of evaluation -->"
_OWN = re.compile(rf"{re.escape(BEGIN)}\n.*?{re.escape(END)}\n\n?", re.DOTALL)
CONTROL = "A again"
# What people ask of a quantised model, and words of task names that answer it
KINDS: Mapping[str, tuple[str, ...]] = {
    "knowledge and reasoning": ("mmlu", "gsm8k", "arc", "gpqa", "math", "aime", "hellaswag"),
    "coding": ("humaneval", "mbpp", "livecodebench", "swebench"),
    "tool calls": ("bfcl", "tool", "tools", "tau"),
    "long context": ("niah", "ruler", "longbench", "infinitebench", "babilong"),
    "instruction following": ("ifeval", "ifbench"),
}
Body = Mapping[str, Any]


def with_evaluation(card: str, evaluations: Mapping[str, Body], identity: Mapping[str, str]) -> str:
    """The card with a section of what `kizami evaluate` measured, in place of kizami's older one, which its marks tell
    from anybody's own; it stands before Limits. evaluations: by the file that each is of.

    identity: of this checkpoint, as `quantize.manifest.output_identity` gives it.

    KizamiError "bad_evaluation" for objects that are none, or whose text figures are of another checkpoint; "bad_card"
    for a card without Limits, or with one of kizami's marks alone.
    """
    section = "\n".join([BEGIN, *_section(evaluations, identity), END, "", ""])
    plain = card.replace("\r\n", "\n")
    _check_marks(plain)
    plain = _OWN.sub("", plain)
    place = _limits(plain)
    if place is None:
        raise KizamiError(
            "has no section Limits, before which an evaluation would stand",
            code="bad_card",
            file="README.md",
            hint="kizami convert writes it; put it back",
        )
    found = plain[:place] + section + plain[place:]
    return found.replace(NOT_EVALUATED, "What was evaluated stands above, and nothing else was.")


def _check_marks(card: str) -> None:
    """With one of them gone, what stands between it and the next pair would be taken for kizami's own."""
    marks = [line for line in card.splitlines() if line in (BEGIN, END)]
    if marks != [BEGIN, END] * (len(marks) // 2):
        raise KizamiError(
            f"has {BEGIN} and {END} that do not belong together",
            code="bad_card",
            file="README.md",
            hint="remove the one that is left, with what kizami wrote there",
        )


def _limits(card: str) -> int | None:
    """Where the last heading Limits begins that is in no block of code."""
    found, at, fence = None, 0, ""
    for line in card.splitlines(keepends=True):
        marks = re.match(r" {0,3}(`{3,}|~{3,})", line)
        if marks is not None and (not fence or marks[1].startswith(fence)):
            fence = "" if fence else marks[1]
        elif not fence and line.rstrip() == "## Limits":
            found = at
        at += len(line)
    return found


def _section(evaluations: Mapping[str, Body], identity: Mapping[str, str]) -> list[str]:
    lines, tasks, seen = [HEADING, ""], list[str](), list[Body]()
    for file, body in evaluations.items():
        if body in seen:  # twice the same would look like two
            continue
        seen.append(body)
        try:
            more, asked = _one(body, identity)
        except KizamiError as e:
            raise KizamiError(e.message, code=e.code, file=file, hint=e.hint) from e
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as e:  # it only looks like one
            raise KizamiError(f"is not whole: {printable(repr(e), 80)}", code="bad_evaluation", file=file) from e
        lines, tasks = lines + more, tasks + asked
    return [*lines, *_missing(tasks)]


def _one(body: Body, identity: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Its lines, and the tasks that were asked."""
    if body.get("schema") != SCHEMA or body.get("kind") not in ("text", "answers"):
        raise KizamiError("is not what kizami evaluate -o writes", code="bad_evaluation")
    if body["kind"] == "text":
        return _text(body, identity) + _warned(body), []
    one = _only(body)
    left_out = [str(note) for note in one.get("left_out", ())]
    lines = _answers(body["reference"], one) + _list("Left out:", left_out)
    lines += _unmet(body, [one["name"]], left_out) + _warned(body)
    asked = [str(task["task"]) for task in one["tasks"]]
    return lines, asked if body.get("called", True) else []  # without a call, tool calls were not measured


def _warned(body: Body) -> list[str]:
    """What the evaluation itself says against its figures."""
    return _list("To these figures:", map(str, body.get("warnings", ())))


def _list(heading: str, words: Iterable[str]) -> list[str]:
    """Nothing where there are none."""
    found = [f"- {escape_markdown(public_words(one))}" for one in words]
    return [heading, "", *found, ""] if found else []


def _text(body: Body, identity: Mapping[str, str]) -> list[str]:
    ours = [one for one in body["compared"] if identity.items() <= (one.get("identity") or {}).items()]
    if not ours:
        raise KizamiError(
            "has no figures of this checkpoint",
            code="bad_evaluation",
            hint="kizami evaluate SRC OUT -o FILE, with this folder as OUT",
        )
    tokens = body["tokens"]
    domains = ", ".join(escape_markdown(_last_part(domain["name"])) for domain in tokens["domains"])
    sequences, length = (int(_number(tokens[key], 1)) for key in ("sequences", "seq_len"))
    amount = f"{sequences:,} sequences of {length:,} tokens"
    reference = escape_markdown(public_name(body["reference"]))
    lines = [
        f"Next-token distributions against {reference} on {amount} ({domains}), each token being the text's:",
        "",
        "| | KL, mean | KL, p99.9 | same top token | perplexity before | after | NLL (95 %) |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in ours:
        cache = one["name"].rpartition(", KV ")
        lines.append(_figures(f"KV cache {_public_cache(cache[2])}" if cache[1] else "KV cache BF16", one["all"]))
        lines += [_figures(_last_part(domain["name"]), domain) for domain in one["domains"] if len(one["domains"]) > 1]
    return [*lines, "", *_unmet(body, [one["name"] for one in ours])]


def _unmet(body: Body, names: Sequence[str], left_out: Sequence[str] = ()) -> list[str]:
    """Limits that this model's figures, or the control's, did not keep: a card that left them out would praise. What is
    left out is a problem of the run, too, and stands on the card already."""
    ours = (*(f"{name}," for name in (*names, CONTROL)), "control:")
    known = {f"{name}, {note}" for name in names for note in left_out}
    found = [one for one in body.get("problems", ()) if one.startswith(ours) and one not in known]
    for name in names:
        found = [one.replace(f"{name},", f"{public_name(name)},", 1) for one in found]
    return _list("Of the limits set for this run, not kept:", found)


def public_name(name: str) -> str:
    """Of a model or file as people outside may know it: of a path the last part, of a URL nothing. org/name becomes
    name: who can tell it from a folder of the publisher's?"""
    if re.match(r"https?://", name):
        return "a server"
    head, mark, cache = name.partition(", KV ")
    return (_last_part(head) or "a model") + mark + _public_cache(cache)


def _public_cache(cache: str) -> str:
    """`fp8, kv.json (per layer)` of `fp8, /x/kv.json (per layer)`."""
    kind = "fp8, " if cache.startswith("fp8, ") else ""
    return kind + _last_part(cache.removeprefix(kind))


def public_words(text: str) -> str:
    """The same for a sentence: each word with a slash in it is taken for a path."""
    text = re.sub(r"\w+://[^\s,;()]*", "a server", text)
    return re.sub(r"[^\s,;:()]*[/\\][^\s,;:()]*", lambda word: _last_part(word[0]) or "...", text)


def _last_part(path: str) -> str:
    """`INT4` of `/x/y/INT4/`, `FILE.json` of `scales of /x/FILE.json`."""
    return next((part for part in reversed(re.split(r"[/\\]", path)) if part not in ("", ".", "..")), "")


def _figures(name: str, at: Body) -> str:
    interval = at["nll_delta_interval"]
    spread = f" [{_number(interval[0]):+.4f}, {_number(interval[1]):+.4f}]" if interval else ""
    before, after = (f"{_number(at[key], 0):.3f}" if at[key] else "" for key in ("perplexity", "perplexity_other"))
    cells = (
        escape_markdown(name), f"{_number(at['kl_mean'], 0):.2e}", f"{_number(at['kl_p999'], 0):.2e}",
        f"{_number(at['top1'], 0, 1):.2%}", before, after, f"{_number(at['nll_delta']):+.4f}{spread}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _number(value: Any, low: float = -1e9, high: float = 1e9) -> float:
    """ValueError for what is none, or cannot be what it says."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{value!r:.40} is no number from {low:g} to {high:g}")
    return float(value)


def _only(body: Body) -> Body:
    """The one model whose answers these are: of several, or of a control, the card could not tell."""
    found = [one for one in body["compared"] if one["name"] != CONTROL]
    if len(found) != 1:
        raise KizamiError(
            f"has answers of {len(found)} models beside the reference, expected those of this one",
            code="bad_evaluation",
            hint="kizami evaluate A B -o FILE, with this model alone as B",
        )
    (one,) = found
    return dict(one)


def _answers(reference: Any, one: Body) -> list[str]:
    lines = [
        f"Answers of {escape_markdown(public_name(one['name']))}, question by question, against "
        f"{escape_markdown(public_name(reference))} (that they are this checkpoint's is its publisher's word):",
        "",
        "| task | n | before % | after % | drop, points (95 %) | p | so many questions can see |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for task in one["tasks"]:
        low, high = (100 * _number(end, -1, 1) for end in task["interval"])
        before, after = (100 * _number(task[key], 0, 1) for key in ("a", "b"))
        cells = (
            escape_markdown(f"{task['task']} ({_metric(task)})"), f"{int(_number(task['n'], 1)):,}", f"{before:.2f}",
            f"{after:.2f}", f"{100 * _number(task['drop'], -1, 1):+.2f} [{low:.2f}, {high:.2f}]",
            p_words(task["p_value"]), visible_words(task["visible_drop"]),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _metric(task: Body) -> str:
    """With lm-eval's filter, of which a task may have several."""
    taken = task.get("filter", "none")
    return str(task["metric"]) if taken in ("none", "") else f"{task['metric']}, {taken}"


def p_words(value: Any) -> str:
    return "<0.001" if (p := _number(value, 0, 1)) < 0.0005 else f"{p:.3f}"


def visible_words(drop: Any) -> str:
    """The smallest drop that so many questions can see; None where not even a loss of all."""
    return "nothing" if drop is None else f"{100 * _number(drop, 0, 1):.2f} points"


def _missing(tasks: Iterable[str]) -> list[str]:
    words = set[str]()
    for task in tasks:
        parts = re.split(r"[^a-z0-9]+", task.lower())
        words |= {*parts, *map("".join, pairwise(parts))}  # swe_bench
    asked = {
        kind for kind, names in KINDS.items() for name in names if any(re.fullmatch(rf"{name}\d*", w) for w in words)
    }
    absent = [kind for kind in KINDS if kind not in asked]
    if not absent:
        return []
    return [f"Not measured: {', '.join(absent)}. No claim is made about these.", ""]

"""What an evaluation says on a model card: its figures, with what they are of, and plainly what was not measured."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kizami.formats.card_sections import last_heading, without_marked
from kizami.formats.errors import KizamiError, printable
from kizami.formats.model_card import NOT_EVALUATED, escape_markdown
from kizami.formats.public_names import PublicNames

SCHEMA = "kizami.evaluate/1"
HEADING = "## Evaluation"
BEGIN, END = "<!-- kizami: evaluation -->", "<!-- kizami: end of evaluation -->"
MORE = "; the first: "  # behind it what a server said, which is not for everybody
_SCALES = re.compile(r"fp8, (?P<file>.*) (?P<per>\(per \w+\))", re.DOTALL)  # as kizami evaluate names such a cache
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
    plain = without_marked(card.replace("\r\n", "\n"), BEGIN, END)
    place = last_heading(plain, "## Limits")
    if place is None:
        raise KizamiError(
            "has no section Limits, before which an evaluation would stand",
            code="bad_card",
            file="README.md",
            hint="kizami convert writes it; put it back",
        )
    found = plain[:place] + section + plain[place:]
    return found.replace(NOT_EVALUATED, "What was evaluated stands above, and nothing else was.")


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
        return _text(body, identity), []
    one = _only(body)
    names = PublicNames((body["reference"], one["name"]))
    left_out = [str(words) for words in one.get("left_out", ())]
    lines = _answers(body["reference"], one, names)
    lines += _list("Left out, or compared in part:", (names.words(words.partition(MORE)[0]) for words in left_out))
    lines += _unmet(body, {one["name"]: names.of(one["name"])}, [one["name"]], names, left_out) + _warned(body, names)
    asked = [str(task["task"]) for task in one["tasks"]]
    return lines, asked if body.get("called", True) else []  # without a call, tool calls were not measured


def _warned(body: Body, names: PublicNames) -> list[str]:
    """What the evaluation itself says against its figures."""
    return _list("To these figures:", (names.words(str(one)) for one in body.get("warnings", ())))


def _list(heading: str, sentences: Iterable[str]) -> list[str]:
    """Nothing where there are none."""
    found = [f"- {escape_markdown(one)}" for one in sentences]
    return [heading, "", *found, ""] if found else []


def _text(body: Body, identity: Mapping[str, str]) -> list[str]:
    rows = _rows(body["compared"])
    ours = [row for row in rows if identity.items() <= row.identity.items()]
    if not ours:
        old = [row.identity for row in rows if "shards_sha256" not in row.identity]
        if any(one.get("plan_hash", identity["plan_hash"]) == identity["plan_hash"] for one in old):
            raise KizamiError(
                "was written by an older kizami, which did not note whose weights its figures are of",
                code="bad_evaluation",
                hint="run kizami evaluate SRC OUT -o FILE again, with this folder as OUT",
            )
        raise KizamiError(
            "has no figures of this checkpoint",
            code="bad_evaluation",
            hint="kizami evaluate SRC OUT -o FILE, with this folder as OUT",
        )
    tokens = body["tokens"]
    domains = [domain["name"] for domain in tokens["domains"]]
    files = [row.scales for row in rows if row.scales is not None]
    names = PublicNames(
        [body["reference"], *(row.model for row in rows), *domains, *tokens.get("repeated", ()), *files]
    )
    sequences, length = (int(_number(tokens[key], 1)) for key in ("sequences", "seq_len"))
    amount = f"{sequences:,} sequence{'' if sequences == 1 else 's'} of {length:,} tokens"
    texts = ", ".join(escape_markdown(names.of(domain)) for domain in domains)
    lines = [
        f"Next-token distributions against {escape_markdown(names.of(body['reference']))} on {amount} ({texts}), each "
        "token being the text's:",
        "",
        "| | KL, mean | KL, p99.9 | same top token | perplexity before | after | NLL (95 %) |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in ours:
        parts = row.figures["domains"]
        lines.append(_figures(f"KV cache {row.public_cache(names)}", row.figures["all"]))
        lines += [_figures(names.of(domain["name"]), domain) for domain in parts if len(parts) > 1]
    public = {row.name: row.public(names) for row in rows}
    lines += ["", *_unmet(body, public, [row.name for row in ours], names)]
    return lines + _warned(body, names)


@dataclass(frozen=True, slots=True)
class _Row:
    """A model with one cache. name: of both, as problems have it. cache: None for BF16 rows; scales: the file of its
    scales, if it has one."""

    name: str
    model: str
    cache: str | None
    scales: str | None
    identity: Body
    figures: Body

    def public_cache(self, names: PublicNames) -> str:
        found = _SCALES.fullmatch(self.cache or "")
        if found is None or self.scales is None:
            return self.cache or "BF16"
        return f"fp8, {names.of(self.scales)} {found['per']}"

    def public(self, names: PublicNames) -> str:
        model = names.of(self.model)
        return model if self.cache is None else f"{model}, KV {self.public_cache(names)}"


def _rows(compared: Iterable[Body]) -> list[_Row]:
    """Evaluations of an older kizami have `MODEL, KV CACHE` as one name: MODEL is that of an earlier row of the same
    checkpoint, since a folder may have those letters in its own."""
    rows = list[_Row]()
    for one in compared:
        name, identity = one["name"], one.get("identity") or {}
        if "model" in one:
            rows.append(_Row(name, one["model"], one["cache"], one["scales"], identity, one))
            continue
        plain = [row.name for row in rows if row.cache is None and row.identity == identity]
        model = max((other for other in plain if name.startswith(f"{other}, KV ")), key=len, default=name)
        cache = name.removeprefix(f"{model}, KV ") if model != name else None
        found = _SCALES.fullmatch(cache or "")
        scales = None if found is None else found["file"]
        if scales is not None and "/" in scales and scales.endswith("..."):  # cut, maybe within a folder's name
            scales = "a file"
        rows.append(_Row(name, model, cache, scales, identity, one))
    return rows


def _unmet(
    body: Body, public: Mapping[str, str], ours: Iterable[str], names: PublicNames, left_out: Iterable[str] = ()
) -> list[str]:
    """Limits that this model's figures, or the control's, did not keep: a card that left them out would praise. What is
    left out is a problem of the run, too, and stands on the card already. public: of every model that was compared,
    what it is called here; ours: those that this card is of."""
    ours, left_out, found = [*ours], [*left_out], []
    known = {f"{name}, {words}" for name in ours for words in left_out}
    for one in map(str, body.get("problems", ())):
        owners = [name for name in {*public, CONTROL} if one.startswith(f"{name},")]
        owner = max(owners, key=len, default="")  # `out` is no owner of what is `out, the second`'s
        if owner in ours and one not in known:
            found.append(public[owner] + names.words(one.removeprefix(owner)))
        elif owner == CONTROL or one.startswith("control:"):
            found.append(names.words(one))
    return _list("Of the limits set for this run, not kept:", found)


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


def _answers(reference: Any, one: Body, names: PublicNames) -> list[str]:
    lines = [
        f"Answers of {escape_markdown(names.of(one['name']))}, question by question, against "
        f"{escape_markdown(names.of(reference))} (that they are this checkpoint's is its publisher's word):",
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

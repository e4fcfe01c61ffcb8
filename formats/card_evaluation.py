"""What an evaluation says on a model card: its figures, with what they are of, and plainly what was not measured."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kizami.formats.errors import KizamiError, printable
from kizami.formats.model_card import NOT_EVALUATED, escape_markdown

SCHEMA = "kizami.evaluate/1"
HEADING = "## Evaluation"
# What people ask of a quantised model, and words of task names that answer it
KINDS: Mapping[str, tuple[str, ...]] = {
    "knowledge and reasoning": ("mmlu", "gsm8k", "arc", "gpqa", "math", "aime", "hellaswag"),
    "coding": ("humaneval", "mbpp", "livecodebench", "swe"),
    "tool calls": ("bfcl", "tool", "tau"),
    "long context": ("niah", "ruler", "longbench", "infinitebench", "babilong"),
    "instruction following": ("ifeval", "ifbench"),
}
Body = Mapping[str, Any]


def with_evaluation(card: str, bodies: Sequence[Body], plan_hash: str) -> str:
    """The card with a section of what `kizami evaluate` measured, in place of an older one; it stands before Limits.

    KizamiError "bad_evaluation" for objects that are none, or of another checkpoint than that of `plan_hash`.
    """
    try:
        section = "\n".join(_section(bodies, plan_hash))
    except (LookupError, TypeError, ValueError, AttributeError) as e:  # a file that only looks like one
        raise KizamiError(f"is not whole: {printable(repr(e), 80)}", code="bad_evaluation") from e
    plain = re.sub(rf"^{HEADING}\n.*?(?=^## )", "", card, flags=re.MULTILINE | re.DOTALL)
    place = plain.find("## Limits\n")
    if place < 0:
        raise KizamiError(
            "has no section Limits, before which an evaluation would stand",
            code="bad_card",
            file="README.md",
            hint="kizami convert writes it; put it back",
        )
    found = plain[:place] + section + "\n" + plain[place:]
    return found.replace(NOT_EVALUATED, "What was evaluated stands above, and nothing else was.")


def _section(bodies: Sequence[Body], plan_hash: str) -> list[str]:
    lines, tasks = [HEADING, ""], []
    for body in bodies:
        if body.get("schema") != SCHEMA or body.get("kind") not in ("text", "answers"):
            raise KizamiError("is not what kizami evaluate -o writes", code="bad_evaluation")
        if body["kind"] == "text":
            lines += _text(body, plan_hash)
        else:
            lines += _answers(body)
            tasks += [task["task"] for one in body["compared"] for task in one["tasks"]]
    return [*lines, *_missing(tasks)]


def _text(body: Body, plan_hash: str) -> list[str]:
    ours = [one for one in body["compared"] if (one.get("identity") or {}).get("plan_hash") == plan_hash]
    if not ours:
        raise KizamiError(
            "has no figures of this checkpoint",
            code="bad_evaluation",
            hint="kizami evaluate SRC OUT -o FILE, with this folder as OUT",
        )
    tokens = body["tokens"]
    domains = ", ".join(escape_markdown(domain["name"]) for domain in tokens["domains"])
    amount = f"{tokens['sequences']:,} sequences of {tokens['seq_len']:,} tokens"
    lines = [
        f"Next-token distributions against {escape_markdown(body['reference'])} on {amount} ({domains}), each token "
        "being the text's:",
        "",
        "| | KL, mean | KL, p99.9 | same top token | perplexity before | after | NLL (95 %) |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in ours:
        cache = one["name"].rpartition(", KV ")
        lines.append(_figures(f"KV cache {cache[2]}" if cache[1] else "KV cache BF16", one["all"]))
        lines += [_figures(domain["name"], domain) for domain in one["domains"] if len(one["domains"]) > 1]
    return [*lines, ""]


def _figures(name: str, at: Body) -> str:
    interval = at["nll_delta_interval"]
    spread = f" [{interval[0]:+.4f}, {interval[1]:+.4f}]" if interval else ""
    before, after = (f"{at[key]:.3f}" if at[key] else "" for key in ("perplexity", "perplexity_other"))
    cells = (
        escape_markdown(name), f"{at['kl_mean']:.2e}", f"{at['kl_p999']:.2e}", f"{at['top1']:.2%}", before, after,
        f"{at['nll_delta']:+.4f}{spread}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _answers(body: Body) -> list[str]:
    lines = [
        f"Answers, question by question, against {escape_markdown(body['reference'])}:",
        "",
        "| task | n | before % | after % | drop, points (95 %) | p | so many questions can see |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in body["compared"]:
        for task in one["tasks"]:
            low, high = task["interval"]
            cells = (
                escape_markdown(f"{task['task']} ({task['metric']})"), f"{task['n']:,}", f"{100 * task['a']:.2f}",
                f"{100 * task['b']:.2f}", f"{100 * task['drop']:+.2f} [{100 * low:.2f}, {100 * high:.2f}]",
                f"{task['p_value']:.3f}", _visible(task["visible_drop"]),
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _visible(drop: float | None) -> str:
    return "nothing" if drop is None else f"{100 * drop:.2f} points"


def _missing(tasks: Iterable[str]) -> list[str]:
    names = [task.lower() for task in tasks]
    absent = [kind for kind, words in KINDS.items() if not any(word in name for word in words for name in names)]
    if not absent:
        return []
    return [f"Not measured: {', '.join(absent)}. No claim is made about these.", ""]

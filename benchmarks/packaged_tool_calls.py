"""Conversations for `kizami evaluate --requests` from BFCL v4's questions with one turn, as `bfcl-eval` carries them.

    pip install --no-deps bfcl-eval
    pip install 'kizami[eval]'
    python benchmarks/packaged_tool_calls.py bfcl.jsonl [--questions 400]
    kizami evaluate http://A/v1 http://B/v1 --requests bfcl.jsonl --control

Left out, with their number: answers that hold objects (whose members BFCL lists one by one) or do not fit their own
tool's schema, conversations of several turns, whose results come from programs, those that put words into the model's
mouth, and those without tools. BFCL compares strings without case and punctuation, kizami does not: the shares are
lower than on its leaderboard, for both models alike.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from kizami.calibration.evaluation.tool_calls import parse_conversations
from kizami.formats.errors import KizamiError

CALLS = ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "live_multiple", "live_parallel")
NO_CALLS = ("irrelevance", "live_irrelevance")
# BFCL writes Python's and Java's names of types where a JSON schema has its own
TYPES = {"dict": "object", "float": "number", "tuple": "array", "double": "number", "long": "integer", "int": "integer"}
KNOWN = {"object", "array", "string", "integer", "number", "boolean", "null"}
NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_-]")  # of OpenAI's API


def conversations(data: Traversable) -> Iterator[dict[str, Any] | None]:
    """None for a question that cannot be asked so."""
    for name in (*CALLS, *NO_CALLS):
        answers = _lines(data / "possible_answer" / f"BFCL_v4_{name}.json") if name in CALLS else ()
        truth = {answer["id"]: answer["ground_truth"] for answer in answers}
        for question in _lines(data / f"BFCL_v4_{name}.json"):
            yield conversation(question, truth[question["id"]] if name in CALLS else [])


def conversation(question: Mapping[str, Any], truth: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    """A question with its functions, and what is expected: `{name: {parameter: [values]}}`, where an empty string says
    that the parameter may be left out."""
    turns = question["question"]
    if len(turns) != 1 or not question["function"] or any(message["role"] == "assistant" for message in turns[0]):
        return None
    calls = [_call(name, values) for one in truth for name, values in one.items()]
    if any(not values or _holds_object(values) for call in calls for values in call["accepted"].values()):
        return None
    return {
        "id": question["id"],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": NOT_IN_A_NAME.sub("_", function["name"]),
                    "description": function["description"],
                    "parameters": schema(function["parameters"]),
                },
            }
            for function in question["function"]
        ],
        "turns": [{"messages": turns[0], "calls": calls}],
    }


def _call(name: str, values: Mapping[str, list[Any]]) -> dict[str, Any]:
    return {
        "name": NOT_IN_A_NAME.sub("_", name),
        "arguments": {},
        "accepted": values,
        "optional": [key for key, accepted in values.items() if "" in accepted],
    }


def _holds_object(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_holds_object, value)))


def schema(value: Any, *, names: bool = False) -> Any:
    """The same, with JSON's names of types; "any" is none. names: the keys are those of parameters."""
    if isinstance(value, list):
        return [schema(one) for one in value]
    if not isinstance(value, dict):
        return value
    if names:
        return {key: schema(one) for key, one in value.items()}
    made = {key: schema(one, names=key == "properties") for key, one in value.items() if key not in ("type", "default")}
    kind = value.get("type")
    kind = TYPES.get(kind.lower(), kind.lower()) if isinstance(kind, str) else None
    return made | ({"type": kind} if kind in KNOWN else {})


def _lines(file: Traversable) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def answered(conversation: Mapping[str, Any]) -> bool:
    """Whether its own answer fits the schemas of its tools."""
    try:
        parse_conversations([json.dumps(conversation).encode()], "BFCL")
    except KizamiError as refused:
        if refused.code != "bad_requests":
            raise
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--questions", type=int, help="so many of them, drawn by chance")
    options = parser.parse_args()
    made = list(conversations(files("bfcl_eval") / "data"))
    kept = [one for one in made if one is not None and answered(one)]
    whole = len(kept)
    if options.questions is not None:
        kept = random.Random(0).sample(kept, min(options.questions, len(kept)))
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in kept)
    options.file.write_text(text, encoding="utf-8")
    print(f"{len(kept)} conversations; {len(made) - whole} of BFCL cannot be asked so")


if __name__ == "__main__":
    main()

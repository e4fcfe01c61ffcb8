"""Tool calls: a fixed set of conversations, and what a model's answers to them are worth.

A conversation is a line of JSON: `id`, `tools` (as OpenAI's API has them), and `turns`. Each turn adds `messages` (of
the user, or a tool's result), and says what is expected of the answer: `calls`, none for an answer in words. A later
turn is asked with the model's own earlier answers, so that an error has its consequences.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from kizami.formats.errors import KizamiError, printable
from kizami.formats.files import open_regular
from kizami.formats.strict_json import parse_json_object

MAX_LINE_BYTES = 4 << 20
MAX_CONVERSATIONS = 100_000
MOST_CALLS = 128  # of an answer; OpenAI takes as many tools
ROLES = ("system", "user", "tool")
FINISH = ("stop", "length", "tool_calls", "content_filter", "function_call")


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Expected:
    """A call that a turn asks for. accepted: for a parameter, the values of which any will do, the usual one first;
    optional: parameters that may be left out. "km" and "kilometers" are both right where the set says so."""

    name: str
    arguments: Mapping[str, Any]
    accepted: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()

    @property
    def usual(self) -> Call:
        """With what must be given, and the first of the accepted values."""
        given = {key: values[0] for key, values in self.accepted.items() if key not in self.optional}
        kept = {key: value for key, value in self.arguments.items() if key not in self.optional}
        return Call(self.name, kept | given)

    def met_by(self, call: Call) -> bool:
        values: dict[str, Sequence[Any]] = {key: (value,) for key, value in self.arguments.items()}
        values |= self.accepted
        missing = values.keys() - call.arguments.keys() - self.optional
        return (
            call.name == self.name
            and not missing
            and all(any(_equal(one, got) for one in values.get(key, ())) for key, got in call.arguments.items())
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """messages: what is said before the answer. calls: those expected, in any order; none: an answer in words."""

    messages: tuple[Mapping[str, Any], ...]
    calls: tuple[Expected, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    id: str
    tools: tuple[Mapping[str, Any], ...]
    turns: tuple[Turn, ...]

    def parameters(self, name: str) -> Mapping[str, Any] | None:
        """The schema of a tool's arguments; None for a tool that is not there."""
        found = next((tool["function"] for tool in self.tools if tool["function"]["name"] == name), None)
        return None if found is None else found.get("parameters", {"type": "object"})


@dataclass(frozen=True, slots=True)
class Worth:
    """Of one answer. finish: the server's finish_reason. answered: it has calls, or words that are not cut off. called:
    it has tool calls. parsed: all arguments are JSON objects. fits: every name is a tool's, and its arguments fit the
    schema. right: the expected calls and no others.

    valid: what the server gave could be run: words where words were given, or calls that fit."""

    finish: str
    answered: bool
    called: bool
    parsed: bool
    fits: bool
    right: bool

    @property
    def valid(self) -> bool:
        return self.answered and (not self.called or self.fits)


def read_conversations(path: Path | None) -> list[Conversation]:
    """Of a JSONL file; None: those that come with kizami. KizamiError "bad_requests" (with the line), "bad_json"."""
    if path is None:
        data = files("kizami.calibration.evaluation").joinpath("requests", "tools.jsonl").read_bytes()
        return parse_conversations(data.splitlines(), "tools.jsonl")
    with open(open_regular(path, path.name), "rb") as stream:
        lines = []
        while line := stream.readline(MAX_LINE_BYTES + 1):
            lines.append(line)
            if len(line) > MAX_LINE_BYTES or len(lines) > MAX_CONVERSATIONS:
                raise KizamiError("is too large for a set of requests", code="bad_requests", file=path.name)
    return parse_conversations(lines, path.name)


def parse_conversations(lines: Sequence[bytes], file: str) -> list[Conversation]:
    """file: its name, for errors."""
    found: dict[str, Conversation] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        one = _conversation(parse_json_object(line, where, what="line"), where)
        if one.id in found:
            raise _bad(where, f"the id {printable(one.id, 60)} is there twice")
        found[one.id] = one
    if not found:
        raise KizamiError("has no request", code="bad_requests", file=file)
    return list(found.values())


def _conversation(body: Mapping[str, Any], where: str) -> Conversation:
    name, tools, turns = body.get("id"), body.get("tools"), body.get("turns")
    if not isinstance(name, str) or not name:
        raise _bad(where, "has no id")
    if not isinstance(tools, list) or not tools or not all(map(_is_tool, tools)):
        raise _bad(where, "has no list of at least one tool, each {type: function, function: {name, parameters}}")
    if not isinstance(turns, list) or not turns:
        raise _bad(where, "has no list of turns")
    one = Conversation(name, tuple(tools), tuple(_turn(turn, where) for turn in turns))
    for call in (call for turn in one.turns for call in turn.calls):
        if one.parameters(call.name) is None:
            raise _bad(where, f"expects a call of {printable(call.name, 60)}, which is none of its tools")
        if not _fits(one, call.usual):  # no model could be right
            given = printable(json.dumps(call.usual.arguments), 200)
            raise _bad(where, f"expects {printable(call.name, 60)}({given}), which that tool's parameters do not allow")
    return one


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("parameters", {}), dict)


def _turn(turn: object, where: str) -> Turn:
    if not isinstance(turn, dict) or turn.keys() != {"messages", "calls"}:
        raise _bad(where, "has a turn that is not {messages, calls}")
    messages, calls = turn["messages"], turn["calls"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise _bad(where, f"has messages that are not a list of {{role, content}} with the roles {', '.join(ROLES)}")
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise _bad(
            where, "has calls that are not a list of {name, arguments} (or with accepted {x: [values]}, optional)"
        )
    return Turn(tuple(messages), tuple(map(_expected, calls)))


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)


def _is_call(call: object) -> bool:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return False
    accepted, optional = call.get("accepted", {}), call.get("optional", [])
    return (
        call.keys() <= {"name", "arguments", "accepted", "optional"}
        and isinstance(call.get("arguments"), dict)
        and isinstance(accepted, dict)
        and all(isinstance(values, list) and values for values in accepted.values())
        and not accepted.keys() & call["arguments"].keys()
        and isinstance(optional, list)
        and all(isinstance(name, str) for name in optional)
    )


def _expected(call: Mapping[str, Any]) -> Expected:
    accepted, optional = call.get("accepted", {}), call.get("optional", ())
    return Expected(call["name"], call["arguments"], accepted, frozenset(optional))


def _bad(where: str, message: str) -> KizamiError:
    return KizamiError(message, code="bad_requests", file=where)


# ------------------------------------------------------------------------------------------------------------- answers


def worth(conversation: Conversation, turn: Turn, finish: str, message: Mapping[str, Any]) -> Worth:
    """Of an answer's message, as the server gave it: untrusted, of any shape."""
    calls = message.get("tool_calls") or []
    calls = calls if isinstance(calls, list) and len(calls) <= MOST_CALLS else [None]
    made = [_made(call) for call in calls]
    parsed = all(call is not None for call in made)
    fits = parsed and all(call is not None and _fits(conversation, call) for call in made)
    words = message.get("content")
    answered = bool(calls) or (finish != "length" and isinstance(words, str) and bool(words.strip()))
    right = answered and fits and _same([call for call in made if call is not None], turn.calls)
    return Worth(_word(finish), answered=answered, called=bool(calls), parsed=parsed, fits=fits, right=right)


def _word(finish: str) -> str:
    """One of the API's words; a server may say anything, also what it was sent."""
    return finish if finish in FINISH else "another word"


def _made(call: object) -> Call | None:
    """None where the arguments are no JSON object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    given = function.get("arguments")
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        arguments = parse_json_object(text.encode(), "", what="arguments")
        json.dumps(arguments, allow_nan=False)  # NaN is Python's, and no JSON
    except (KizamiError, ValueError, RecursionError):
        return None
    return Call(function["name"], arguments)


def _fits(conversation: Conversation, call: Call) -> bool:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError, UndefinedTypeCheck
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    schema = conversation.parameters(call.name)
    if schema is None:
        return False
    try:
        Draft202012Validator.check_schema(schema)
        checker = Draft202012Validator(schema, registry=Registry())  # which fetches nothing
        return bool(checker.is_valid(dict(call.arguments)))
    except (ArithmeticError, ValueError):  # a number that float cannot hold: the model's
        return False
    except (SchemaError, UndefinedTypeCheck, Unresolvable, RecursionError) as e:
        raise KizamiError(
            f"the parameters of {printable(call.name, 60)} are no JSON schema: {printable(str(e), 100)}",
            code="bad_requests",
            file=conversation.id,
        ) from e


def _same(made: Sequence[Call], expected: Sequence[Expected]) -> bool:
    """The same calls, in any order. Strings are compared without the space around them, 1 is 1.0.

    A call may meet several that are expected: one that has taken another's place moves on (Kuhn's matching).
    """
    taken: dict[int, Call] = {}

    def place(call: Call, tried: set[int]) -> bool:
        for number, one in enumerate(expected):
            if number in tried or not one.met_by(call):
                continue
            tried.add(number)
            if number not in taken or place(taken[number], tried):
                taken[number] = call
                return True
        return False

    return len(made) == len(expected) and all(place(call, set()) for call in made)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b
    if isinstance(a, str) and isinstance(b, str):
        return a.strip() == b.strip()
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a is None and b is None

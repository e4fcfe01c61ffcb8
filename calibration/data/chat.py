"""Conversations as OpenAI's API has them, brought to the form that chat templates expect.

Servers do the same before they render (vLLM entrypoints/chat_utils.py, SGLang openai/serving_chat.py): no content is
an empty string, since templates would print `None`, and the arguments of a tool call are an object, since templates
of GLM go through its items.
"""

import json
from typing import Any

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "observation"})


def check_messages(value: object) -> tuple[dict[str, Any], ...]:
    """The messages in a list, or in a string of JSON, as parquet files have them. ValueError says what is wrong."""
    messages = []
    for number, message in enumerate(_listed(value, "messages"), 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is a {_kind(message)}, expected an object with role and content")
        messages.append(_message({key: item for key, item in message.items() if item is not None}, number))
    return tuple(messages)


def check_tools(value: object) -> tuple[dict[str, Any], ...] | None:
    """The tools, in a list or a string of JSON; None for none."""
    if value is None or value == "":
        return None
    tools = _listed(value, "tools")
    for number, tool in enumerate(tools, 1):
        if not isinstance(tool, dict):
            raise ValueError(f"tool {number} is a {_kind(tool)}, expected an object")
    return tuple(tools) or None


def with_text_arguments(messages: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """The same, with the arguments of tool calls as strings of JSON, which DeepSeek's templates expect."""

    def textual(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
            return call
        return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return tuple(
        m | {"tool_calls": [textual(c) for c in m["tool_calls"]]} if "tool_calls" in m else m for m in messages
    )


def calls_tools(messages: tuple[dict[str, Any], ...] | None) -> bool:
    """Whether a tool is called in it, or answers."""
    return any(m.get("tool_calls") or m["role"] in ("tool", "function", "observation") for m in messages or ())


def said_in(messages: tuple[dict[str, Any], ...]) -> tuple[list[str], list[str]]:
    """What the messages say (contents and reasoning), and the arguments of their tool calls as JSON."""
    said: list[str] = []
    arguments: list[str] = []
    for message in messages:
        content = message.get("content", "")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [*(message.get(key) for key in ("reasoning_content", "reasoning")), *(p.get("text") for p in parts)]
        said += [text for text in texts if isinstance(text, str) and text]
        for call in message.get("tool_calls", []):
            value = call["function"]["arguments"]
            arguments.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return said, arguments


def _message(message: dict[str, Any], number: int) -> dict[str, Any]:
    role, content = message.get("role"), message.setdefault("content", "")
    if not isinstance(role, str):
        keys = ", ".join(list(message)[:6])
        raise ValueError(f"message {number} has no role (its keys: {keys}); expected role and content")
    if role not in _ROLES:
        raise ValueError(f"message {number} has the role {role[:40]!r}, expected one of {', '.join(sorted(_ROLES))}")
    if isinstance(content, list):
        kinds = {part.get("type") if isinstance(part, dict) else "?" for part in content}
        if kinds - {"text"}:
            raise ValueError(f"message {number} has parts of type {_names(kinds - {'text'})}, expected text only")
    elif not isinstance(content, str):
        raise ValueError(f"content of message {number} is a {_kind(content)}, expected a string")
    if "tool_calls" in message:
        message["tool_calls"] = [_call(call, number) for call in _listed(message["tool_calls"], "tool_calls")]
    return message


def _call(call: object, number: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call of message {number} is not {{'function': {{'name': ..., 'arguments': ...}}}}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = arguments  # models do write broken JSON, and the template may print what it gets
        arguments = parsed if isinstance(parsed, dict) else arguments
    return call | {"function": function | {"arguments": arguments}}


def _listed(value: object, what: str) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"{what} is a string that is not JSON") from None
    if not isinstance(value, list):
        raise ValueError(f"{what} is a {_kind(value)}, expected a list")
    return value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _names(kinds: set[Any]) -> str:
    return ", ".join(sorted(str(kind)[:40] for kind in kinds))

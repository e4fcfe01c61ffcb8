"""Conversations with one tool, that several tests ask of servers."""

import json

from kizami.calibration.evaluation.tool_calls import Conversation, Expected, Turn

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
ASK, RESULT = {"role": "user", "content": "?"}, {"role": "tool", "content": "21"}
PARIS = Expected("weather", {"city": "Paris"})
ONE = Conversation("one", (WEATHER,), (Turn((ASK,), (PARIS,)),))
TWO = Conversation("two", (WEATHER,), (Turn((ASK,), (PARIS,)), Turn((RESULT, ASK), ())))


def line(conversation: Conversation) -> str:
    """Of a file of --requests."""
    turns = [
        {"messages": turn.messages, "calls": [{"name": c.name, "arguments": c.arguments} for c in turn.calls]}
        for turn in conversation.turns
    ]
    return json.dumps({"id": conversation.id, "tools": conversation.tools, "turns": turns})

"""benchmarks/packaged_*: questions in the forms that lm-eval and kizami ask, from the forms that packages carry."""

import json

import pytest
from scripts import script

pytest.importorskip("jsonschema")

from kizami.calibration.evaluation.tool_calls import Expected, parse_conversations

tool_calls = script("benchmarks", "packaged_tool_calls")

QUESTION = {
    "id": "simple_0",
    "question": [[{"role": "user", "content": "Area of a triangle, 10 by 5?"}]],
    "function": [
        {
            "name": "geometry.area",
            "description": "Area.",
            "parameters": {
                "type": "dict",
                "properties": {
                    "base": {"type": "float", "default": None},
                    "type": {"type": "string"},
                    "points": {"type": "tuple", "items": {"type": "any"}},
                },
                "required": ["base"],
            },
        }
    ],
}
TRUTH = [{"geometry.area": {"base": [10, 10.0], "type": ["triangle", ""]}}]


def test_types_of_other_languages_become_those_of_json() -> None:
    assert tool_calls.schema(QUESTION["function"][0]["parameters"]) == {  # type: ignore[index]
        "type": "object",
        "properties": {
            "base": {"type": "number"},
            "type": {"type": "string"},
            "points": {"type": "array", "items": {}},
        },
        "required": ["base"],
    }


def test_a_question_of_bfcl_is_a_conversation_of_kizamis() -> None:
    made = tool_calls.conversation(QUESTION, TRUTH)
    (one,) = parse_conversations([json.dumps(made).encode()], "x")
    assert one.turns[0].calls == (
        Expected("geometry_area", {}, {"base": [10, 10.0], "type": ["triangle", ""]}, frozenset({"type"})),
    )
    assert one.parameters("geometry_area") is not None
    assert tool_calls.answered(made)


def test_what_cannot_be_asked_is_left_out() -> None:
    user, model = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    for change, truth in (
        ({}, [{"geometry.area": {"base": [{"x": [1]}]}}]),
        ({}, [{"geometry.area": {"base": []}}]),
        ({"question": [[user], [user]]}, TRUTH),
        ({"question": [[user, model, user]]}, TRUTH),
        ({"function": []}, []),
    ):
        assert tool_calls.conversation(QUESTION | change, truth) is None
    wrong = tool_calls.conversation(QUESTION, [{"geometry.area": {"base": ["ten"]}}])
    assert not tool_calls.answered(wrong)

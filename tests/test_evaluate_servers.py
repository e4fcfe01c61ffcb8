"""Tool calls of two servers: what an answer is worth, how errors add up, and what comes of bad servers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("jsonschema")

from chat_server import call, say, serving
from cli_fixtures import Run
from conversation_fixtures import ASK, ONE, PARIS, RESULT, TWO, WEATHER, line

from kizami.calibration.evaluation.served import Asking, Server, by_turn, finish_reasons, joined, replay
from kizami.calibration.evaluation.tool_calls import Conversation, Expected, Turn, read_conversations, worth
from kizami.formats.errors import KizamiError

# ----------------------------------------------------------------------------------------------- what answers are worth


@pytest.mark.parametrize(
    ("answer", "flags"),
    [
        (call(("weather", {"city": "Paris"})), "called parsed fits valid right"),
        (call(("weather", {"city": " Paris "})), "called parsed fits valid right"),
        (call(("weather", {"city": "Rome"})), "called parsed fits valid"),
        (call(("weather", {"city": "Paris", "days": 2})), "called parsed fits valid"),
        (call(("weather", {"city": "Paris", "days": 0})), "called parsed"),
        (call(("weather", {"town": "Paris"})), "called parsed"),
        (call(("climate", {"city": "Paris"})), "called parsed"),
        (call(("weather", '{"city": "Paris"')), "called"),
        (call(("weather", "[1]")), "called"),
        (call(("weather", {"city": "Paris"}), ("weather", {"city": "Paris"})), "called parsed fits valid"),
        (say("21 degrees"), "parsed fits valid"),
        ({"finish_reason": "stop", "message": {"tool_calls": [7]}}, "called"),
        ({"finish_reason": "length", "message": {"content": "21 deg"}}, "parsed fits"),
        ({"finish_reason": "stop", "message": {"content": None}}, "parsed fits"),
        ({"finish_reason": "stop", "message": {"content": " "}}, "parsed fits"),
        ({"finish_reason": "stop", "message": {"tool_calls": "x"}}, "called"),
        ({"finish_reason": "stop", "message": {"tool_calls": {"a": 1}}}, "called"),
        ({"finish_reason": "stop", "message": {"tool_calls": [], "content": "21"}}, "parsed fits valid"),
        (call(*[("weather", {"city": "Paris"})] * 5000), "called"),
    ],
)
def test_an_answer_is_worth_what_can_be_run_of_it(answer: Mapping[str, Any], flags: str) -> None:
    found = worth(ONE, ONE.turns[0], answer["finish_reason"], answer["message"])
    assert [name for name in ("called", "parsed", "fits", "valid", "right") if getattr(found, name)] == flags.split()


def test_words_are_right_where_no_call_is_expected() -> None:
    turn = Turn((ASK,), ())
    assert worth(ONE, turn, "stop", say("hello")["message"]).right
    assert not worth(ONE, turn, "tool_calls", call(("weather", {"city": "Paris"}))["message"]).right


def test_calls_may_come_in_any_order_and_numbers_are_numbers() -> None:
    turn = Turn((ASK,), (PARIS, Expected("weather", {"city": "Rome", "days": 2})))
    made = call(("weather", {"city": "Rome", "days": 2.0}), ("weather", {"city": "Paris"}))
    assert worth(ONE, turn, "tool_calls", made["message"]).right
    assert not worth(ONE, turn, "tool_calls", call(("weather", {"city": "Rome", "days": True}))["message"]).right


def test_values_that_are_accepted_and_parameters_that_may_be_left_out_are_right() -> None:
    wanted = Expected("weather", {"city": "Paris"}, accepted={"days": [1, 2]}, optional=frozenset({"days"}))
    turn = Turn((ASK,), (wanted,))
    right = [
        worth(ONE, turn, "tool_calls", call(("weather", {"city": "Paris"} | more))["message"]).right
        for more in ({}, {"days": 1}, {"days": 2}, {"days": 3})
    ]
    assert right == [True, True, True, False]
    needed = Turn((ASK,), (Expected("weather", {"city": "Paris"}, accepted={"days": [1, 2]}),))
    assert not worth(ONE, needed, "tool_calls", call(("weather", {"city": "Paris"}))["message"]).right


def test_a_call_that_fits_two_places_leaves_one_to_the_other() -> None:
    wide, narrow = (Expected("weather", {}, accepted={"city": cities}) for cities in (["Paris", "Rome"], ["Paris"]))
    for expected in ((wide, narrow), (narrow, wide)):
        for cities in (("Paris", "Rome"), ("Rome", "Paris")):
            made = call(*(("weather", {"city": city}) for city in cities))
            assert worth(ONE, Turn((ASK,), expected), "tool_calls", made["message"]).right
    twice = call(("weather", {"city": "Rome"}), ("weather", {"city": "Rome"}))
    assert not worth(ONE, Turn((ASK,), (wide, narrow)), "tool_calls", twice["message"]).right


# --------------------------------------------------------------------------------------------------------- the requests


def test_accepted_values_are_read(tmp_path: Path) -> None:
    body = json.loads(line(ONE))
    body["turns"][0]["calls"] = [
        {"name": "weather", "arguments": {}, "accepted": {"city": ["Paris"]}, "optional": ["x"]}
    ]
    (tmp_path / "r.jsonl").write_text(json.dumps(body))
    (one,) = read_conversations(tmp_path / "r.jsonl")
    assert one.turns[0].calls == (Expected("weather", {}, {"city": ["Paris"]}, frozenset({"x"})),)


def test_the_requests_that_come_with_kizami_fit_their_own_schemas() -> None:
    found = read_conversations(None)
    assert len(found) >= 20
    assert any(len(one.turns) > 2 for one in found)
    assert any(not turn.calls for one in found for turn in one.turns)
    for one in found:
        for turn in one.turns:
            answer = call(*((c.name, dict(c.arguments)) for c in turn.calls)) if turn.calls else say("done")
            found_worth = worth(one, turn, "stop", answer["message"])
            assert found_worth.valid, one.id
            assert found_worth.right, one.id


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no request"),
        ("{}", ":1: has no id"),
        ('{"id": "a"}', "has no list of at least one tool"),
        ('{"id": "a", "tools": [{}], "turns": [1]}', "has no list of at least one tool"),
        (line(ONE).replace('"turns": [', '"turns": [], "x": ['), "has no list of turns"),
        (line(ONE).replace('"calls"', '"call"'), "has a turn that is not"),
        (line(ONE).replace('"role": "user"', '"role": "assistant"'), "has messages that are not"),
        (line(ONE).replace('"arguments"', '"args"'), "has calls that are not"),
        (
            line(ONE).replace('"calls": [{"name": "weather"', '"calls": [{"name": "wether"'),
            "expects a call of wether, which is none of its tools",
        ),
        (line(ONE).replace('"arguments"', '"optional": "x", "arguments"'), "has calls that are not"),
        (line(ONE).replace('"arguments"', '"optional": [1], "arguments"'), "has calls that are not"),
        (line(ONE).replace('"arguments"', '"accepted": {"days": 1}, "arguments"'), "has calls that are not"),
        (line(ONE).replace('"arguments"', '"accepted": {"city": ["Rome"]}, "arguments"'), "has calls that are not"),
        (line(ONE).replace('"arguments"', '"accepted": {"days": []}, "arguments"'), "has calls that are not"),
        (
            line(ONE).replace('"arguments": {"city"', '"arguments": {"town"'),
            r"expects weather\({\"town\".*}\), which that tool's parameters do not allow",
        ),
        (f"{line(ONE)}\n{line(ONE)}", ":2: the id one is there twice"),
        ("[1]", "expected an object"),
    ],
)
def test_requests_that_are_none_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r.jsonl").write_text(text)
    with pytest.raises(KizamiError, match=message):
        read_conversations(tmp_path / "r.jsonl")


def test_a_number_that_nobody_can_hold_does_not_fit() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "number", "multipleOf": 0.5}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    conversation = Conversation("one", (tool,), ONE.turns)
    for text in ('{"n": 1e999}', f'{{"n": {"9" * 4000}}}'):
        assert not worth(conversation, ONE.turns[0], "stop", call(("weather", text))["message"]).fits


def test_parameters_that_are_no_schema_are_named_and_nothing_is_fetched() -> None:
    for schema in ({"type": "strnig"}, {"$ref": "http://127.0.0.1:9/x.json"}, {"$ref": "#"}):
        tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
        with pytest.raises(KizamiError, match="are no JSON schema"):
            worth(Conversation("one", (tool,), ONE.turns), ONE.turns[0], "", call(("weather", {}))["message"])


# -------------------------------------------------------------------------------------------------------------- servers


def test_a_conversation_goes_on_with_the_models_own_answers() -> None:
    seen: list[Mapping[str, Any]] = []

    def answer(body: Mapping[str, Any]) -> Mapping[str, Any]:
        seen.append(body)
        return call(("weather", {"city": "Rome"})) if len(seen) == 1 else say("fine")

    with serving(answer) as url, Server(url, Asking(max_tokens=7, seed=3)) as server:
        found = replay(server, [TWO], Asking())
    first, second = seen
    assert (first["model"], first["temperature"], first["seed"], first["max_tokens"]) == ("tiny", 0, 3, 7)
    assert first["tools"] == [WEATHER]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool", "user"]
    assert second["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    assert second["messages"][2] == {"role": "tool", "tool_call_id": "c0", "content": "21"}
    assert [(one.valid, one.right) for one in found.worths[0]] == [(True, False), (True, True)]


def test_a_result_that_nobody_asked_for_and_a_call_without_a_result_are_told_all_the_same() -> None:
    seen: list[Mapping[str, Any]] = []

    def answer(body: Mapping[str, Any]) -> Mapping[str, Any]:
        seen.append(body)
        return say("no") if len(body["messages"]) == 1 and len(seen) == 1 else call(("a", {}), ("b", {}))

    three = Conversation("three", (WEATHER,), (Turn((ASK,), ()), Turn((RESULT,), ()), Turn((ASK,), ())))
    with serving(answer) as url, Server(url, Asking()) as server:
        replay(server, [three], Asking())
    assert seen[1]["messages"][2] == {"role": "user", "content": "21"}
    assert [message["role"] for message in seen[2]["messages"][-3:]] == ["tool", "tool", "user"]


def test_errors_add_up_over_turns() -> None:
    def answer(body: Mapping[str, Any]) -> Mapping[str, Any]:
        bad = "two" in body["messages"][0]["content"] and len(body["messages"]) == 1
        return call(("weather", "{")) if bad else call(("weather", {"city": "Paris"}))

    conversations = [
        Conversation(name, (WEATHER,), (Turn(({"role": "user", "content": name},), (PARIS,)), Turn((ASK,), (PARIS,))))
        for name in ("one", "two", "three")
    ]
    with serving(answer) as url, Server(url, Asking()) as server:
        found = replay(server, conversations, Asking(concurrency=2))
    first, second = by_turn(found)
    assert (first.conversations, first.valid, first.right, first.parsed) == (3, 2, 2, 2)
    assert (second.valid, second.right, second.valid_so_far) == (3, 3, 2)
    assert finish_reasons(found) == {"tool_calls": 6}
    (valid, right), left_out = joined(found, found)
    assert (valid.metric, right.metric, left_out) == ("valid", "right", [])
    assert valid.a == ((1.0,), (0.0,), (1.0,))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "gsm8k", "--logs", "l", "--requests", "r.jsonl"), "--requests does nothing where lm-eval's tasks"),
        (("--battery", "knowledge", "--logs", "l", "--max-tokens", "9"), "--max-tokens does nothing where lm-eval's"),
        (("--questions", "3"), "--questions does nothing where conversations with tools are asked"),
        (("--logs", "l"), "--logs does nothing"),
    ],
)
def test_options_of_what_is_not_asked_are_refused(kizami: Run, words: tuple[str, ...], message: str) -> None:
    done = kizami("evaluate", "http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1", *words, "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "usage")
    assert message in done.json["error"]["message"]


def test_what_is_no_model_is_named(kizami: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, message in ((tmp_path / "nothing", "does not exist"), (tmp_path / "empty", "has neither config.json")):
        done = kizami("evaluate", path, tmp_path, "--json")
        assert (done.code, done.json["error"]["file"]) == (2, str(path))
        assert message in done.json["error"]["message"]


def test_a_reference_that_calls_nothing_is_no_reference(kizami: Run) -> None:
    with serving(lambda body: say("no")) as url:
        done = kizami("evaluate", url, url, "--json")
    assert "A called no tool in any answer" in done.json["warnings"][-1]


def test_a_and_b_are_of_one_kind(kizami: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = kizami("evaluate", "http://127.0.0.1:9/v1", tmp_path, "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "usage")
    assert "A is of servers" in done.json["error"]["message"]


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.mark.long
def test_two_servers_are_compared_conversation_by_conversation(kizami: Run, tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(40)]
    turns = {name: (Turn(({"role": "user", "content": name},), (PARIS,)),) for name in names}
    (tmp_path / "r.jsonl").write_text("\n".join(line(Conversation(name, (WEATHER,), turns[name])) for name in names))
    good = call(("weather", {"city": "Paris"}))
    spoiled = {f"c{i}" for i in range(9)}

    def worse(body: Mapping[str, Any]) -> Mapping[str, Any]:
        return call(("weather", "{")) if body["messages"][0]["content"] in spoiled else good

    with serving(lambda body: good) as a, serving(worse) as b:
        words = ["evaluate", a, b, "--requests", tmp_path / "r.jsonl", "--control"]
        body = kizami(*words, "--json").json
        done = kizami(*words)
        gated = kizami(*words, "--margin", "0.05")
    worst, control = body["compared"]
    assert [task["metric"] for task in worst["tasks"]] == ["valid", "right"]
    valid = worst["tasks"][0]
    assert (valid["n"], valid["lost"], valid["won"], valid["a"], valid["b"]) == (40, 9, 0, 1.0, 31 / 40)
    assert valid["p_value"] == pytest.approx(2 * 0.5**9)
    assert control["tasks"][0]["discordance"] == 0
    assert worst["turns"][0]["valid"] == 31
    assert "a drop is shown" in done.out
    assert gated.code == 1


def test_without_requests_the_small_set_is_taken_and_said_to_be_small(kizami: Run) -> None:
    with serving(lambda body: say("I cannot.")) as url:
        body = kizami("evaluate", url, url, "--json").json
    assert "too few" in body["warnings"][0]
    assert body["compared"][0]["tasks"][0]["n"] == len(read_conversations(None))


def test_options_of_other_kinds_are_refused(kizami: Run) -> None:
    done = kizami("evaluate", "http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1", "--max-kl", "1", "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "usage")


# ------------------------------------------------------------------------------------------------------ hostile answers


@pytest.mark.parametrize(
    "arguments", ['{"city": NaN}', '{"city": "Paris", "city": "Rome"}', '{"city": Infinity}', '{"city": 1e999}', "[1]"]
)
def test_arguments_that_are_no_json_are_not_valid(arguments: str) -> None:
    body = {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]}
    found = worth(ONE, ONE.turns[0], "tool_calls", body)
    assert (found.called, found.parsed, found.valid, found.right) == (True, False, False, False)


def test_warnings_and_the_ends_of_as_answers_are_said_in_words(kizami: Run) -> None:
    with serving(lambda body: say("no calls today")) as url:
        done = kizami("evaluate", url, url, "--concurrency", "2")
    assert done.code == 0
    assert "A called no tool in any answer" in done.err + done.out
    assert "too few for more than a first look" in done.err + done.out
    assert done.out.count("answers ended by:") == 2


def test_a_file_of_the_run_is_not_written_over(kizami: Run, tmp_path: Path) -> None:
    """B's samples, what lies in the folder of --noise, and a file that is A or B itself."""
    for folder in ("a", "b", "noise"):
        (tmp_path / folder).mkdir()
        line = {"doc_id": 0, "metrics": ["acc"], "acc": 1.0, "doc_hash": "d", "prompt_hash": "p", "target_hash": "t"}
        (tmp_path / folder / "samples_t_2026-11-30T10-20-30.jsonl").write_text(json.dumps(line) + "\n")
    a, b, noise = (tmp_path / folder for folder in ("a", "b", "noise"))
    for place in (b, noise):
        file = place / "samples_t_2026-11-30T10-20-30.jsonl"
        before = file.read_bytes()
        done = kizami("evaluate", a, b, "--noise", noise, "-o", file, "--json")
        assert (done.code, done.json["error"]["code"]) == (2, "bad_file")
        assert file.read_bytes() == before
    files = [folder / "samples_t_2026-11-30T10-20-30.jsonl" for folder in (a, b)]
    for file in files:
        error = kizami("evaluate", *files, "-o", file, "--json").json["error"]
        assert (error["code"], error["message"]) == ("bad_file", "is read by this run, and would be replaced")
        assert json.loads(file.read_text())["acc"] == 1.0

"""A server that is busy, silent, odd or none: what comes of it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("jsonschema")

import httpx
from chat_server import call, raw, say, serving
from cli_fixtures import Run
from conversation_fixtures import ASK, PARIS, TWO, WEATHER, line

from kizami.calibration.evaluation import served as served_module
from kizami.calibration.evaluation.served import Asking, Server, by_turn, finish_reasons, joined, replay
from kizami.calibration.evaluation.tool_calls import Conversation, Turn
from kizami.formats.errors import KizamiError


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nothing is waited for; how long it would have been is kept."""
    found: list[float] = []
    monkeypatch.setattr(served_module.time, "sleep", found.append)
    return found


def named(*names: str) -> list[Conversation]:
    return [
        Conversation(name, (WEATHER,), (Turn(({"role": "user", "content": name},), (PARIS,)), Turn((ASK,), ())))
        for name in names
    ]


def test_a_server_that_is_busy_is_asked_again(waited: list[float]) -> None:
    answers = iter([(429, {"Retry-After": "3"}), (503, {}), say("hello")])
    with serving(lambda body: next(answers)) as url, Server(url, Asking()) as server:
        assert server.chat([ASK], [WEATHER])[1]["content"] == "hello"
    assert waited == [3.0, 2.0]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("0", 0), ("59.5", 59.5), ("60", 60), ("61", 60), ("3600", 60), ("inf", 60), ("1e300", 60), ("-3", 1),
        ("nan", 1), ("soon", 1), ("Wed, 21 Oct 2015 07:28:00 GMT", 1),
    ],
)  # fmt: skip
def test_a_wait_is_what_the_server_asks_for_and_a_minute_at_most(
    waited: list[float], header: str, seconds: float
) -> None:
    answers = iter([(429, {"Retry-After": header}), say("hello")])
    with serving(lambda body: next(answers)) as url, Server(url, Asking()) as server:
        server.chat([ASK], [WEATHER])
    assert waited == [seconds]


def test_a_conversation_without_an_answer_is_left_out_of_both_and_named(waited: list[float]) -> None:
    """What a server refuses, a prompt that is too long for it, says nothing of its model."""

    def answer(body: Mapping[str, Any]) -> Any:
        return (400, {}) if "long" in body["messages"][0]["content"] else say("fine")

    long = Conversation("long", (WEATHER,), (Turn(({"role": "user", "content": "long"},), ()), Turn((ASK,), ())))
    with serving(answer) as url, Server(url, Asking()) as server:
        found = replay(server, [TWO, long], Asking())
        assert [one.valid for one in found.worths[1]] == [False, False]
        assert [one.valid for one in found.worths[0]] == [True, True]
        (valid, _), left_out = joined(found, found)
        assert valid.a == ((1.0,),)
        assert [(one.words[:46], one.counts) for one in left_out] == [
            ("1 of 2 conversations that A did not answer; th", True),
            ("1 of 2 conversations that B did not answer; th", True),
        ]
        other = replace(found, unanswered={0: "gone"})
        with pytest.raises(KizamiError, match="no conversation was answered by both"):
            joined(found, other)
        with pytest.raises(KizamiError, match="no conversation was answered: the server gave HTTP 400"):
            replay(server, [long], Asking())


def test_odd_answers_do_not_stop_a_conversation(waited: list[float]) -> None:
    odd = [
        {"finish_reason": "stop", "message": {"content": float("nan")}},
        {"finish_reason": "stop", "message": {"content": "x", "tool_calls": [{"id": float("inf")}]}},
        {"finish_reason": {"a": 1}, "message": {"content": [1, 2]}},
        (429, {"Retry-After": "nan"}),
        say("fine"),
        say("fine"),
        say("fine"),
        say("fine"),
    ]
    answers = iter(odd)
    with serving(lambda body: next(answers)) as url, Server(url, Asking(concurrency=1)) as server:
        found = replay(server, [TWO, TWO, TWO], Asking(concurrency=1))
    assert [one.finish for worths in found.worths for one in worths][:3] == ["stop", "stop", "another word"]
    assert waited == [1.0]


def test_what_is_no_server_is_named(monkeypatch: pytest.MonkeyPatch, waited: list[float]) -> None:
    with pytest.raises(KizamiError, match="no answer after 5 tries: ConnectError"):
        Server("http://127.0.0.1:9/v1", Asking())
    for url in ("http://[::1", "http://", "ftp://127.0.0.1/v1"):
        with pytest.raises(KizamiError, match="is no URL"):
            Server(url, Asking())
    for model in ("\ud800", "x" * 10):
        with serving(lambda body: say("fine"), model) as url:
            if model == "x" * 10:
                assert Server(url, Asking()).model == model
            else:
                with pytest.raises(KizamiError) as refused:
                    Server(url, Asking())
                assert refused.value.code == "bad_answer"
    monkeypatch.setenv("OPENAI_API_KEY", "schlüssel")
    with pytest.raises(KizamiError, match="characters that no header can have"):
        Server("http://127.0.0.1:9/v1", Asking())


def test_a_model_is_asked_by_the_name_that_the_server_gave_it() -> None:
    seen = []

    def answer(body: Mapping[str, Any]) -> Mapping[str, Any]:
        seen.append(body["model"])
        return say("fine")

    name = "org/model \\u0041 <&>"
    with serving(answer, name) as url, Server(url, Asking()) as server:
        server.chat([ASK], [WEATHER])
        assert server.shown_model == name
    with serving(answer) as url, Server(url, Asking(model="mine")) as server:
        server.chat([ASK], [WEATHER])
    assert seen == [name, "mine"]


# ------------------------------------------------------------------------------------------------------ packed answers


MODELS = b'{"data": [{"id": "tiny"}]}'


@pytest.mark.parametrize(
    "packing", ["gzip", "x-gzip", "deflate", "br", "zstd", "compress", "GZIP", "identity, gzip", "br,zstd"]
)
def test_a_packed_answer_is_not_unpacked(packing: str) -> None:
    with raw(MODELS, {"Content-Encoding": packing}) as url, pytest.raises(KizamiError, match="a packed answer"):
        Server(url, Asking())


@pytest.mark.parametrize("word", ["", "identity", "Identity", "utf-8", "none", "identity, utf-8", "application/json"])
def test_an_encoding_that_packs_nothing_is_read(word: str) -> None:
    with raw(MODELS, {"Content-Encoding": word}) as url, Server(url, Asking()) as server:
        assert server.model == "tiny"


def test_an_answer_that_unpacks_to_gigabytes_is_not_unpacked() -> None:
    import gzip

    packed = gzip.compress(b" " * (80 << 20))
    with raw(packed, {"Content-Encoding": "gzip"}) as url, pytest.raises(KizamiError, match="a packed answer"):
        Server(url, Asking())
    with raw(b" " * ((64 << 20) + 1)) as url, pytest.raises(KizamiError, match="more than 67,108,864 bytes"):
        Server(url, Asking())


# ------------------------------------------------------------------------------------- a server that stops answering


class Dying:
    """Answers but for those that it is silent on, or all from one on; counts requests."""

    def __init__(self, *silent: str, after: int = 1 << 30) -> None:
        self.silent, self.after, self.requests = silent, after, 0

    def __call__(self, body: Mapping[str, Any]) -> Any:
        self.requests += 1
        if self.requests > self.after or body["messages"][0]["content"] in self.silent:
            return 503, {}
        return call(("weather", {"city": "Paris"})) if len(body["messages"]) == 1 else say("fine")


NAMES = [f"c{i:02}" for i in range(40)]
TRIES = served_module.RETRIES


def test_a_server_that_stops_answering_is_not_asked_for_the_rest(waited: list[float]) -> None:
    dying = Dying(after=4)  # two conversations of two turns
    with serving(dying) as url, Server(url, Asking()) as server:
        found = replay(server, named(*NAMES), Asking(concurrency=1))
    assert dying.requests == 4 + 3 * TRIES
    assert [len(worths) for worths in found.worths] == [2] * 5 + [0] * 35
    assert list(found.unanswered) == [2, 3, 4]
    assert found.not_asked == set(range(5, 40))
    assert [(at.turn, at.conversations, at.valid) for at in by_turn(found)] == [(1, 5, 2), (2, 5, 2)]
    assert finish_reasons(found) == {"no_answer": 6, "stop": 2, "tool_calls": 2}
    whole = replace(found, unanswered={}, not_asked=frozenset(), worths=(found.worths[0],) * 40)
    (valid, _), left_out = joined(whole, found)
    assert len(valid.b) == 2
    assert [(one.words.partition(";")[0], one.counts) for one in left_out] == [
        ("3 of 40 conversations that B did not answer", True),
        ("35 of 40 conversations that B was not asked, since it had stopped answering", True),
    ]


@pytest.mark.parametrize(("concurrency", "most"), [(1, 3), (2, 4), (4, 8)])
def test_as_many_in_a_row_are_waited_for_as_are_asked_twice_over(
    waited: list[float], concurrency: int, most: int
) -> None:
    dying = Dying(*NAMES)
    none = pytest.raises(KizamiError, match="no conversation was answered: no answer after 5 tries: HTTP 503")
    with serving(dying) as url, Server(url, Asking()) as server, none:
        replay(server, named(*NAMES), Asking(concurrency=concurrency))
    # some were under way when the last of them went unanswered
    assert most * TRIES <= dying.requests <= (most + concurrency - 1) * TRIES


def test_silences_that_are_not_in_a_row_stop_nothing(waited: list[float]) -> None:
    dying = Dying(*(name for i, name in enumerate(NAMES) if i % 3))
    with serving(dying) as url, Server(url, Asking()) as server:
        found = replay(server, named(*NAMES), Asking(concurrency=1))
    assert not found.not_asked
    assert len(found.unanswered) == 26


def test_a_server_that_refuses_is_not_silent() -> None:
    def answer(body: Mapping[str, Any]) -> Any:
        return say("fine") if body["messages"][0]["content"] == NAMES[-1] else (400, {})

    with serving(answer) as url, Server(url, Asking()) as server:
        found = replay(server, named(*NAMES), Asking(concurrency=1))
    assert (len(found.unanswered), len(found.not_asked)) == (39, 0)


def test_a_server_that_is_gone_is_not_asked_for_the_rest(waited: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Dying()) as url, Server(url, Asking()) as server:
        done, exchange = [], Server._exchange

        def gone(self: Server, *request: Any) -> Any:
            if len(done) >= 2:
                raise httpx.ConnectError("refused")
            return exchange(self, *request)

        monkeypatch.setattr(Server, "_exchange", gone)
        found = replay(server, named(*NAMES), Asking(concurrency=1), lambda at, of: done.append(at))
    assert len(found.unanswered) + len(found.not_asked) + 2 <= len(NAMES) + 1
    assert len(found.not_asked) >= len(NAMES) - 7


def test_what_a_dead_server_was_not_asked_meets_no_margin(kizami: Run, tmp_path: Path, waited: list[float]) -> None:
    (tmp_path / "r.jsonl").write_text("\n".join(map(line, named(*NAMES))))
    with serving(Dying()) as a, serving(Dying(after=60)) as b:
        words = ["evaluate", a, b, "--requests", tmp_path / "r.jsonl", "--concurrency", "1"]
        done = kizami(*words, "--margin", "0.9", "--json")
    assert done.code == 1
    assert (
        done.json["problems"][1] == f"{b}, 7 of 40 conversations that B was not asked, since it had stopped answering"
    )
    assert [turn["conversations"] for turn in done.json["compared"][0]["turns"]] == [33, 33]

"""The API key and passwords are sent where they belong, and printed nowhere."""

import html
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

pytest.importorskip("httpx")
pytest.importorskip("jsonschema")

from chat_server import raw, say, serving
from cli_fixtures import Run
from conversation_fixtures import ASK, ONE, WEATHER, line

from kizami.calibration.evaluation.batteries import Battery, command
from kizami.calibration.evaluation.served import Asking, Server
from kizami.formats.errors import KizamiError
from kizami.formats.hidden import without_login, without_secret

KEY = "sk-A/b+c=\"d<&>' e\\f%20~"
SPELLINGS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "quoted in a path": quote,
    "quoted": lambda key: quote(key, safe=""),
    "quoted, in small letters": lambda key: quote(key, safe="").replace("%2F", "%2f").replace("%3D", "%3d"),
    "of a form": quote_plus,
    "quoted twice": lambda key: quote(quote(key, safe=""), safe=""),
    "HTML": html.escape,
    "HTML of HTML": lambda key: html.escape(html.escape(key)),
    "HTML without quotes": lambda key: html.escape(key, quote=False),
    "HTML in numbers": lambda key: "".join(f"&#{ord(c)};" for c in key),
    "HTML in hexadecimal": lambda key: "".join(f"&#x{ord(c):04X};" for c in key),
    "HTML's names": lambda key: html.escape(key).replace("/", "&sol;").replace("=", "&equals;").replace("+", "&plus;"),
    "JSON": lambda key: json.dumps(key)[1:-1],
    "JSON of PHP": lambda key: json.dumps(key)[1:-1].replace("/", "\\/"),
    "JSON of Go": lambda key: (
        json.dumps(key)[1:-1].replace("<", "\\u003c").replace(">", "\\u003E").replace("&", "\\u0026")
    ),
    "JSON in JSON": lambda key: json.dumps(json.dumps(key)[1:-1].replace("/", "\\/"))[1:-1],
    "HTML in JSON": lambda key: json.dumps(html.escape(key))[1:-1],
    "Python's": lambda key: repr(key)[1:-1],
}


@pytest.mark.parametrize("spelled", SPELLINGS.values(), ids=SPELLINGS)
def test_a_key_is_hidden_in_every_spelling(spelled: Callable[[str], str]) -> None:
    assert without_secret(f"no {spelled(KEY)} here, {spelled(KEY)}", KEY) == "no ... here, ..."


def test_what_is_not_the_key_is_left_alone() -> None:
    for text in ("sk-A/b", KEY[:-1], KEY.upper(), quote(KEY[1:]), ""):
        assert without_secret(text, KEY) == text
    assert without_secret(KEY, None) == KEY


@pytest.mark.parametrize("spelled", SPELLINGS.values(), ids=SPELLINGS)
def test_a_server_that_spells_the_key_shows_it_in_no_error(
    monkeypatch: pytest.MonkeyPatch, spelled: Callable[[str], str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    echo = f"denied: {spelled(KEY)}"
    with raw(b'{"data": [{"id": "m"}]}') as url, Server(url, Asking()) as server:
        monkeypatch.setattr(server, "_exchange", lambda *request: (401, None, echo.encode()))
        with pytest.raises(KizamiError, match=r"HTTP 401: denied: \.\.\.$"):
            server.chat([ASK], [WEATHER])


def test_a_key_that_the_server_sends_back_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is most of it, where an error quotes the answer and cuts what it quotes."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-SECRET-123456")
    for before in ("", "x" * 286, "x" * 290):
        twice = json.dumps(f"{before}sk-SECRET-123456")
        with raw(f"{{{twice}: 1, {twice}: 2}}".encode()) as url, pytest.raises(KizamiError) as refused:
            Server(url, Asking())
        assert refused.value.message == "the answer cannot be read, and has the API key in it"
    with raw(b'{"a": 1, "a": 2}') as url, pytest.raises(KizamiError, match="has the key 'a' twice"):
        Server(url, Asking())


def test_the_key_is_sent_and_never_shown(kizami: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    seen = []

    def answer(body: Mapping[str, Any]) -> Mapping[str, Any]:
        seen.append(body["authorization"])
        return say("fine")

    (tmp_path / "r.jsonl").write_text(line(ONE))
    with serving(answer) as url:
        done = kizami("evaluate", url, url, "--requests", tmp_path / "r.jsonl", "--json")
    assert done.code == 0, done.err
    with serving(lambda body: say("x") | {"finish_reason": body["authorization"]}) as url:
        echoed = kizami("evaluate", url, url, "--requests", tmp_path / "r.jsonl")
    with serving(lambda body: (400, {}), "sk-secret") as url:
        refused = kizami("evaluate", url, url, "--requests", tmp_path / "r.jsonl")
    assert "sk-secret" not in echoed.out + echoed.err + refused.out + refused.err
    assert set(seen) == {"Bearer sk-secret"}
    assert "sk-secret" not in done.out + done.err


def test_a_model_that_is_called_like_the_key_is_asked_by_that_name(
    kizami: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "tiny")
    seen = []

    def answer(body: Mapping[str, Any]) -> Mapping[str, Any]:
        seen.append(body["model"])
        return say("fine")

    (tmp_path / "r.jsonl").write_text(line(ONE))
    with serving(answer, "my-tiny-model") as url:
        done = kizami("evaluate", url, url, "--requests", tmp_path / "r.jsonl")
    assert (done.code, set(seen)) == (0, {"my-tiny-model"})
    assert "my-...-model" in done.err
    assert "tiny" not in done.err + done.out


def test_lm_evals_command_line_is_shown_without_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with pytest.raises(KizamiError, match=r"^my \.\.\. has a comma, = or space in it"):
        command("http://127.0.0.1:9/v1", "my sk-secret", Battery(("gsm8k",)), tmp_path)


# ------------------------------------------------------------------------------------------------------------ passwords

LOGINS = (
    "http://me:PASSWORD@127.0.0.1:9/v1", "HTTP://me:PASSWORD@127.0.0.1:9/v1", "Https://me:PASSWORD@127.0.0.1:9/v1",
    "http://me:PASS/WORD@127.0.0.1:9/v1", "http://me:PASS@WORD@127.0.0.1:9/v1", "http://me:PASSWORD@[::1",
    "http:/me:PASSWORD@127.0.0.1:9", "ftp://me:PASSWORD@127.0.0.1:9", " http://me:PASSWORD@127.0.0.1:9",
    "//me:PASSWORD@127.0.0.1:9", "me:PASSWORD@127.0.0.1:9/v1", "http://PASSWORD@127.0.0.1:9/v1",
)  # fmt: skip


@pytest.mark.parametrize("url", LOGINS)
def test_a_password_in_a_url_is_refused_and_not_shown(kizami: Run, tmp_path: Path, url: str) -> None:
    logs = tmp_path / "samples_t_2026-11-30T10-20-30.jsonl"
    logs.write_text(
        json.dumps(
            {"doc_id": 0, "metrics": ["acc"], "acc": 1.0, "doc_hash": "d", "prompt_hash": "p", "target_hash": "t"}
        )
    )
    server = "http://127.0.0.1:9/v1"
    runs = [(url, url), (url, server), (logs, url), (logs, logs, "--noise", url), (server, server, "--requests", url)]
    for words in runs:
        for more in ((), ("--json",)):
            done = kizami("evaluate", *words, *more)
            assert done.code == 2
            assert "PASS" not in done.out + done.err
            assert "WORD" not in done.out + done.err


def test_a_scheme_in_capitals_is_a_servers(kizami: Run, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(line(ONE))
    with serving(lambda body: say("fine")) as url:
        done = kizami("evaluate", url.replace("http", "HTTP"), url, "--requests", tmp_path / "r.jsonl", "--json")
    assert done.code == 0, done.err


@pytest.mark.parametrize("name", ["org/name@main", "logs/fp8", "/data/me@work/fp8", "http://127.0.0.1:8000/v1", "C:/x"])
def test_a_name_without_a_login_is_shown_as_it_is(name: str) -> None:
    assert without_login(name) == name

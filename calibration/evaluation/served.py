"""Two OpenAI-compatible servers asked the same: the client, and the replay of conversations with tools."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock
from types import TracebackType
from typing import Any

from kizami.calibration.evaluation.api_key import KEY, api_key
from kizami.calibration.evaluation.lm_eval_logs import Joined, LeftOut
from kizami.calibration.evaluation.tool_calls import Conversation, Worth, worth
from kizami.formats.errors import KizamiError, printable
from kizami.formats.hidden import without_login, without_secret
from kizami.formats.strict_json import parse_json_object

RETRIES = 5
MOST_WAIT = 60.0  # seconds, whatever Retry-After says
MOST_BYTES = 64 << 20  # of an answer
MOST_SEARCHED = 1 << 20  # bytes of an error, of which 200 characters are shown
FEWEST_SILENT = 3  # conversations
# Of Content-Encoding: others say nothing of the bytes (identity, and what a server makes up, a charset for one)
PACKINGS = frozenset({"gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress"})
NO_ANSWER = "no_answer"  # the code of an error, which is spelled out where it is raised
NO_RESULT = "{}"
UNANSWERED = Worth("no answer", answered=False, called=False, parsed=False, fits=False, right=False)


@dataclass(frozen=True, slots=True)
class Asking:
    """How both are asked. seed, temperature 0: as alike as a server makes it. concurrency: requests at once."""

    max_tokens: int = 1024
    seed: int = 0
    concurrency: int = 8
    timeout: float = 600.0
    model: str | None = None


class Server:
    """An endpoint, by its base URL (`http://127.0.0.1:8000/v1`). A context manager. model: as the server gave it, which
    it is asked by; to be printed there is `shown_model`."""

    def __init__(self, url: str, asking: Asking) -> None:
        import httpx

        self.url, key = url.rstrip("/"), api_key()
        _check(url, key)
        headers = {"Accept-Encoding": "identity"}  # a few kB could unpack to gigabytes
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=asking.timeout, follow_redirects=False)
        self._asking, self._key = asking, key
        self.model = asking.model or self._first_model()

    @property
    def shown_model(self) -> str:
        """A server may call it by the key that it was sent."""
        return printable(self._hidden(self.model), 100)

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, dict[str, Any]]:
        """finish_reason and message of the first choice. KizamiError "bad_answer", "no_answer"."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "tools": list(tools),
            "temperature": 0,
            "seed": self._asking.seed,
            "max_tokens": self._asking.max_tokens,
        }
        answer = self._ask("POST", "/chat/completions", body)
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        message = choice.get("message")
        if not isinstance(message, dict):
            raise self._bad("an answer without choices[0].message")
        return str(choice.get("finish_reason")), message

    def _first_model(self) -> str:
        found = self._ask("GET", "/models", None).get("data")
        first = found[0] if isinstance(found, list) and found and isinstance(found[0], dict) else {}
        if not isinstance(first.get("id"), str):
            raise self._bad("no model in /models")
        return str(first["id"])

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Asks again after 429 and 5xx, as Retry-After says, and after a broken connection."""
        import httpx

        said = ""
        for attempt in range(RETRIES):
            try:
                status, header, content = self._exchange(method, path, body)
            except (httpx.UnsupportedProtocol, httpx.LocalProtocolError) as e:  # ours: no server would answer
                raise self._bad(f"nothing, and was not asked: {type(e).__name__}") from e
            except httpx.RequestError as e:  # no connection, none that lasts, or bytes that do not unpack
                said, wait = type(e).__name__, 2.0**attempt
            else:
                if status == 200:
                    return self._object(content)
                said, wait = f"HTTP {status}", _wait(header, attempt)
                if status != 429 and status < 500:
                    text = content[:MOST_SEARCHED].decode("utf-8", "replace")
                    raise self._bad(f"{said}: {printable(self._hidden(text), 200)}")
            if attempt + 1 < RETRIES:
                time.sleep(wait)
        raise KizamiError(f"no answer after {RETRIES} tries: {said}", code="no_answer", file=self.url + path)

    def _exchange(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, str | None, bytes]:
        """Status, Retry-After and content of one answer, as it came."""
        content = bytearray()
        with self._client.stream(method, self.url + path, json=body) as answer:
            packings = answer.headers.get("content-encoding", "").lower().split(",")
            if not PACKINGS.isdisjoint(map(str.strip, packings)):
                raise self._bad("a packed answer, and was asked for a plain one")
            for part in answer.iter_raw():
                content += part
                if len(content) > MOST_BYTES:
                    raise self._bad(f"an answer of more than {MOST_BYTES:,} bytes")
            return answer.status_code, answer.headers.get("retry-after"), bytes(content)

    def _object(self, content: bytes) -> dict[str, Any]:
        try:
            return parse_json_object(content, self.url, what="answer")
        except KizamiError as e:  # which quotes what it found, cut short, maybe in the middle of the key
            text = content.decode("utf-8", "replace")
            why = e.message if self._hidden(text) == text else "the answer cannot be read, and has the API key in it"
            raise KizamiError(why, code="bad_answer", file=self.url) from None

    def _hidden(self, text: str) -> str:
        """A server may say what it was sent."""
        return without_secret(text, self._key)

    def _bad(self, what: str) -> KizamiError:
        return KizamiError(f"the server gave {what}", code="bad_answer", file=self.url)


def _check(url: str, key: str | None) -> None:
    """KizamiError "bad_option" for what cannot be asked."""
    import httpx

    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError) as e:
        why = f": {e}" if "@" not in url else ""  # it quotes what it takes for a port, which may be a password
        raise KizamiError(f"{printable(without_login(url), 100)} is no URL{why}", code="bad_option") from None
    if parsed.userinfo:  # it would be in every report
        raise KizamiError("a URL with a name or a password in it", code="bad_option", hint=f"a key goes into {KEY}")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise KizamiError(
            f"{printable(without_login(url), 100)} is no URL of a server, such as http://HOST/v1", code="bad_option"
        )
    if key is not None and not (key.isascii() and key.isprintable()):
        raise KizamiError(f"{KEY} has characters that no header can have", code="bad_option")


def _wait(header: str | None, attempt: int) -> float:
    try:
        seconds = float(header or "")
    except ValueError:  # none, or a date
        seconds = -1.0
    return min(seconds, MOST_WAIT) if seconds >= 0 else 2.0**attempt


# -------------------------------------------------------------------------------------------------------------- replay


@dataclass(frozen=True, slots=True)
class Replay:
    """worths: of each conversation, one for each turn; none of those not asked. unanswered: why the server gave no
    answer, by conversation. not_asked: those left when it had stopped answering."""

    conversations: tuple[Conversation, ...]
    worths: tuple[tuple[Worth, ...], ...]
    unanswered: Mapping[int, str]
    not_asked: frozenset[int] = frozenset()


def replay(
    server: Server,
    conversations: Sequence[Conversation],
    asking: Asking,
    on_done: Callable[[int, int], None] = lambda done, of: None,
) -> Replay:
    """Every conversation to its end, whatever the answers are; several at once. A server that has not answered several
    in a row is not asked for the others: each would take RETRIES times its timeout. KizamiError "no_answer",
    "bad_answer" where none was answered."""
    worths: list[tuple[Worth, ...]] = []
    errors: dict[int, KizamiError] = {}
    not_asked: set[int] = set()
    silence = _Silence(max(FEWEST_SILENT, 2 * asking.concurrency))
    with ThreadPoolExecutor(asking.concurrency) as pool:
        for outcome in pool.map(lambda one: _asked(server, one, silence), conversations):
            found, error = outcome if outcome is not None else ((), None)
            if outcome is None:
                not_asked.add(len(worths))
            elif error is not None:
                errors[len(worths)] = error
            worths.append(found)
            on_done(len(worths), len(conversations))
    if len(errors) + len(not_asked) == len(conversations):
        first = next(iter(errors.values()))
        raise KizamiError(f"no conversation was answered: {first.message}", code=first.code, file=server.url)
    unanswered = {at: e.message for at, e in errors.items()}
    return Replay(tuple(conversations), tuple(worths), unanswered, frozenset(not_asked))


class _Silence:
    """Conversations in a row, in the order in which they end, that a server did not answer at all. An error of its own
    (a prompt too long for it) is an answer here."""

    def __init__(self, most: int) -> None:
        self._most, self._in_a_row, self._lock = most, 0, Lock()

    @property
    def is_over_most(self) -> bool:
        return self._in_a_row >= self._most

    def heard(self, error: KizamiError | None) -> None:
        with self._lock:
            if not self.is_over_most:  # who was asked before it went may still have its answer
                self._in_a_row = self._in_a_row + 1 if error is not None and error.code == NO_ANSWER else 0


def _asked(
    server: Server, conversation: Conversation, silence: _Silence
) -> tuple[tuple[Worth, ...], KizamiError | None] | None:
    """None if not asked."""
    if silence.is_over_most:
        return None
    found, error = _conversation(server, conversation)
    silence.heard(error)
    return found, error


def _conversation(server: Server, conversation: Conversation) -> tuple[tuple[Worth, ...], KizamiError | None]:
    said: list[Mapping[str, Any]] = []
    found: list[Worth] = []
    for turn in conversation.turns:
        said += _addressed(turn.messages, said)
        try:
            finish, message = server.chat(said, conversation.tools)
        except KizamiError as e:  # of this one: a context that is too long, a parser that gave up
            found += [replace(UNANSWERED, finish=e.code)] * (len(conversation.turns) - len(found))
            return tuple(found), e
        found.append(worth(conversation, turn, finish, message))
        said.append(_kept(message))
    return tuple(found), None


def _addressed(messages: Sequence[Mapping[str, Any]], said: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Results of tools go to the calls that the model made, in their order, and every call gets one: servers refuse a
    call without a result, and a result without a call. A result that nobody asked for is told by the user."""
    calls = said[-1].get("tool_calls") if said else None
    ids = [call.get("id") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    results = [message["content"] for message in messages if message["role"] == "tool"]
    made: list[Mapping[str, Any]] = []
    for at, call_id in enumerate(ids):
        content = results[at] if at < len(results) else NO_RESULT
        made.append({"role": "tool", "tool_call_id": call_id, "content": content})
    made += [{"role": "user", "content": content} for content in results[len(ids) :]]
    return [*made, *(message for message in messages if message["role"] != "tool")]


def _kept(message: Mapping[str, Any]) -> dict[str, Any]:
    """As it is sent again. What is no JSON, a server's own invention, is left out."""
    words, calls = message.get("content"), message.get("tool_calls")
    kept: dict[str, Any] = {"role": "assistant", "content": words if isinstance(words, str) else ""}
    try:
        json.dumps(calls, allow_nan=False)
    except (ValueError, RecursionError):
        return kept
    return kept | ({"tool_calls": calls} if calls else {})


# ------------------------------------------------------------------------------------------------------------ compared

MEASURES = ("valid", "right")


def joined(a: Replay, b: Replay) -> tuple[list[Joined], list[LeftOut]]:
    """Conversations as questions: valid and right in every turn; and what is left out of both: one that a server gave
    no answer to, with an error or none, says nothing of its model. KizamiError "no_answer" if none is left."""
    silent = {*a.unanswered, *b.unanswered, *a.not_asked, *b.not_asked}
    answered = [at for at in range(len(a.worths)) if at not in silent]
    left_out = _left_out("A", a) + _left_out("B", b)
    if not answered:
        raise KizamiError(f"no conversation was answered by both: {left_out[0].words}", code="no_answer")
    return [
        Joined("tool calls", "none", measure, _scores(a, measure, answered), _scores(b, measure, answered))
        for measure in MEASURES
    ], left_out


def _left_out(name: str, side: Replay) -> list[LeftOut]:
    of, found = f"of {len(side.worths):,} conversations that {name}", []
    if side.unanswered:
        first = printable(next(iter(side.unanswered.values())), 200)
        found.append(LeftOut(f"{len(side.unanswered):,} {of} did not answer; the first: {first}"))
    if side.not_asked:
        found.append(LeftOut(f"{len(side.not_asked):,} {of} was not asked, since it had stopped answering"))
    return found


def _scores(found: Replay, measure: str, answered: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    return tuple((float(all(getattr(one, measure) for one in found.worths[at])),) for at in answered)


@dataclass(frozen=True, slots=True)
class AtTurn:
    """Of the conversations that have this turn: how many answered it with calls, JSON, calls that fit, validly and
    rightly; so_far: validly up to here, which is how errors add up."""

    turn: int
    conversations: int
    called: int
    parsed: int
    fits: int
    valid: int
    right: int
    valid_so_far: int


def by_turn(found: Replay) -> list[AtTurn]:
    longest = max(len(worths) for worths in found.worths)
    table = []
    for turn in range(longest):
        those = [worths for worths in found.worths if len(worths) > turn]
        at = [worths[turn] for worths in those]
        table.append(
            AtTurn(
                turn + 1,
                len(at),
                sum(one.called for one in at),
                sum(one.parsed for one in at),
                sum(one.fits for one in at),
                sum(one.valid for one in at),
                sum(one.right for one in at),
                sum(all(one.valid for one in worths[: turn + 1]) for worths in those),
            )
        )
    return table


def finish_reasons(found: Replay) -> dict[str, int]:
    """How many answers ended in which way."""
    counts: dict[str, int] = {}
    for worths in found.worths:
        for one in worths:
            counts[one.finish] = counts.get(one.finish, 0) + 1
    return dict(sorted(counts.items()))

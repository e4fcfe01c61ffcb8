"""Calls of huggingface_hub, with its errors as ours and with patience for a server that is busy.

`HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`, proxies and Xet are huggingface_hub's: it reads them, nothing here does.
"""

import importlib
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kizami.formats.errors import KizamiError, printable
from kizami.formats.hidden import without_secret

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")
OnWait = Callable[[float, BaseException], None]  # is told of seconds, and of the error that is waited out

TRIES = 8  # of a call; with the waits between them some four minutes
MAX_WAIT = 60.0  # seconds, where the server says nothing
MAX_TOLD_WAIT = 600.0  # where it does: `Retry-After` of a rate limit is at most five minutes
SHORT_WAIT = 2.0  # seconds: as long as that huggingface_hub may wait by itself, five times, which nobody is told of
BUSY = (408, 425, 429, 500, 502, 503, 504)
# `RateLimit` of draft-ietf-httpapi-ratelimit-headers-09, as huggingface_hub reads it: none left, seconds to the reset
_RESET = re.compile(r";\s*r\s*=\s*0+\s*;\s*t\s*=\s*(\d+)", re.ASCII)
NETWORK = "is there a network? HF_ENDPOINT and proxies are read from the environment"
# Seconds without a byte. huggingface_hub itself waits for ever, where the Hub's gateway gives up after a minute
SILENCE = 120.0
# Ours, or of a server that will say the same again
NO_ADDRESS = "UnsupportedProtocol"  # of an endpoint without http://
NEVER = (NO_ADDRESS, "LocalProtocolError", "InvalidURL", "TooManyRedirects", "DecodingError")


def hub() -> "HfApi":
    """Talks to the endpoint, with the token, of the environment; without bars of its own."""
    from huggingface_hub import HfApi

    utils = hub_utils()
    with warnings.catch_warnings():  # of HF_HUB_DISABLE_PROGRESS_BARS=0, which bars of ours do not follow
        warnings.simplefilter("ignore")
        utils.disable_progress_bars()
    utils.logging.set_verbosity_error()  # it would warn of each try again; who waits is told by us
    return HfApi(library_name="kizami")


@cache
def _bound_silence() -> None:
    """Once in a process: the client that huggingface_hub makes, with an end to its patience. By request, since most of
    its calls say that they have none; and by answer: some of its calls sleep as long as the server says, a day or a
    year."""
    import huggingface_hub

    made_by: Any = importlib.import_module("huggingface_hub.utils._http").default_client_factory

    def bound(request: Any) -> None:
        asked = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            kind: SILENCE if asked.get(kind) is None else asked[kind] for kind in ("connect", "read", "write", "pool")
        }

    def hand_over(answer: Any) -> None:
        if answer.status_code in BUSY and told_wait(answer.headers) > SHORT_WAIT:
            answer.read()  # the server's words
            hub_utils().hf_raise_for_status(answer)  # and it is us who wait

    def client() -> Any:
        made = made_by()
        for event, hook in (("request", bound), ("response", hand_over)):
            made.event_hooks = {**made.event_hooks, event: [*made.event_hooks[event], hook]}
        return made

    huggingface_hub.set_client_factory(client)


def told_wait(headers: Any) -> float:
    """Seconds that a busy server asks for, of an answer's headers; 0 where it does not say, or gives a date."""
    after, resets = headers.get("Retry-After", "").strip(), _RESET.findall(headers.get("RateLimit", ""))
    if after.isdigit() and not after.isdecimal():  # as in 10², over which huggingface_hub would stumble
        return MAX_WAIT
    return max(float(seconds) for seconds in ("0", *resets, after if after.isdecimal() else "0"))


@cache
def check_endpoint() -> None:
    """huggingface_hub takes HF_ENDPOINT apart as it is imported. KizamiError "bad_environment", without the system's
    words: what it takes for a port may be a password."""
    try:
        importlib.import_module("huggingface_hub.utils._http")
    except ValueError:
        hint = "correct HF_ENDPOINT in the environment: https://huggingface.co, or a mirror's address"
        raise KizamiError("HF_ENDPOINT is no address", code="bad_environment", hint=hint) from None


def hub_utils() -> Any:
    """Its public helpers; their types are not stated, and they lie in other modules in each version."""
    _bound_silence()
    return importlib.import_module("huggingface_hub.utils")


def request_error() -> type[Exception]:
    """What the HTTP library raises when no answer comes that it understands."""
    found: type[Exception] = _http_library().RequestError
    return found


def invalid_url() -> type[Exception]:
    """What it raises, of endpoints and proxies, before it asks anybody."""
    found: type[Exception] = _http_library().InvalidURL
    return found


def _http_library() -> Any:
    """httpx in huggingface_hub 1, httpx2 in 2."""
    from huggingface_hub.errors import HfHubHTTPError

    base = next(one for one in HfHubHTTPError.__mro__ if one.__module__.startswith("httpx"))
    return importlib.import_module(base.__module__.partition(".")[0])


@contextmanager
def as_refusal(repo: str) -> Iterator[None]:
    """huggingface_hub's errors as KizamiError: "hub_gated", "hub_not_found", "hub_offline", "hub_unreachable",
    "hub_error", "bad_environment". No address and no header of a request is shown."""
    check_endpoint()
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        hint = "ask for access on its page, then `hf auth login`, or HF_TOKEN in the environment"
        raise KizamiError("is gated, and this token has no access", code="hub_gated", file=repo, hint=hint) from None
    except errors.RepositoryNotFoundError:
        hint = "is the name right? a private one needs `hf auth login`, or HF_TOKEN in the environment"
        raise KizamiError(
            "is not on the Hub, or nothing this token may see", code="hub_not_found", file=repo, hint=hint
        ) from None
    except errors.RevisionNotFoundError:
        hint = "of a commit all 40 digits are needed"
        raise KizamiError("has no such branch, tag or commit", code="hub_not_found", file=repo, hint=hint) from None
    except errors.LocalEntryNotFoundError as e:  # of a file's address: whatever the server said, it gave none
        if isinstance(e.__cause__, errors.HfHubHTTPError):
            raise _answered(e.__cause__, repo) from None
        said = f"the Hub gives no address of a file: {type(e.__cause__).__name__}"
        raise KizamiError(said, code="hub_unreachable", file=repo, hint=NETWORK) from None
    except errors.EntryNotFoundError as e:
        raise KizamiError(f"a file is gone: {_words(e)}", code="hub_not_found", file=repo) from None
    except errors.HFValidationError:
        raise KizamiError("is no name of a repository", code="usage", file=repo, hint="org/name") from None
    except errors.OfflineModeIsEnabled:
        hint = "unset HF_HUB_OFFLINE, or download it before"
        raise KizamiError("HF_HUB_OFFLINE is set", code="hub_offline", file=repo, hint=hint) from None
    except errors.HfHubHTTPError as e:
        raise _answered(e, repo) from None
    except invalid_url():  # its words have what it takes for a port, which may be a password
        raise _bad_address(repo) from None
    except request_error() as e:
        if "header value" in str(e):  # whose words are the token
            raise _bad_token() from None
        if type(e).__name__ == NO_ADDRESS:
            raise _bad_address(repo) from None
        said = f"the Hub cannot be reached: {type(e).__name__} {_words(e)}".rstrip()
        raise KizamiError(said, code="hub_unreachable", file=repo, hint=NETWORK) from None
    except ImportError as e:
        said = f"the proxy or endpoint of the environment needs a package: {_words(e)}"
        hint = "install it, or correct the proxy variables"
        raise KizamiError(said, code="bad_environment", file=repo, hint=hint) from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as e:
        if isinstance(e, UnicodeEncodeError) and e.encoding != "idna":  # into a header
            raise _bad_token() from None
        host = isinstance(e, UnicodeError) and not isinstance(e, UnicodeDecodeError)  # that no IDNA can have
        if host or "proxy URL" in str(e):
            raise _bad_address(repo) from None
        # no JSON, or of another shape
        said = f"the Hub's answer is none, or it refuses: {type(e).__name__} {_words(e)}"
        of_card = "license, language and tags of the card are those of the source's README.md"
        hint = of_card if "metadata" in str(e) else "is HF_ENDPOINT the Hub's? are the proxy variables right?"
        raise KizamiError(said, code="hub_error", file=repo, hint=hint) from None


def _answered(error: BaseException, repo: str) -> KizamiError:
    status = status_of(error)
    hints = {401: "is the token right? `hf auth whoami` tells", 403: "may the token read or write there?"}
    hint = hints.get(status or 0, "try again later")
    return KizamiError(f"the Hub answers {status}: {_words(error)}", code="hub_error", file=repo, hint=hint)


def _bad_address(repo: str) -> KizamiError:
    hint = "correct HF_ENDPOINT and the proxy variables in the environment: http://HOST:PORT"
    said = "the address of the Hub, or of a proxy, is none"
    return KizamiError(said, code="bad_environment", file=repo, hint=hint)


def _bad_token() -> KizamiError:
    said = "the token, or another variable of huggingface_hub, has characters that no header can have"
    return KizamiError(said, code="bad_environment", hint="correct HF_TOKEN and the other HF_ ones in the environment")


def status_of(error: BaseException | None) -> int | None:
    """Of the answer that the error tells of."""
    found = getattr(getattr(error, "response", None), "status_code", None)
    return found if isinstance(found, int) else None


def cause_of(error: Exception) -> Exception:
    """What failed in a thread of huggingface_hub's, which it wraps."""
    wrapped = isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception)
    return error.__cause__ if wrapped and isinstance(error.__cause__, Exception) else error


def beside(call: Callable[[], T]) -> T:
    """call(), in a thread of its own that nobody waits for after a signal: huggingface_hub joins the threads of an
    upload before it lets one through, and their server may be silent."""
    results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()  # in C: a signal leaves it whole

    def run() -> None:
        try:
            results.put((call(), None))
        except BaseException as e:
            results.put((None, e))

    Thread(target=run, name="kizami-push", daemon=True).start()
    result, error = results.get()
    if error is not None:
        raise error
    return cast("T", result)


def _words(error: BaseException) -> str:
    """The server's own words, or the first line, without the token and without addresses: a signed one is as good as a
    password."""
    from huggingface_hub import get_token

    text = without_secret(str(getattr(error, "server_message", None) or error), get_token())
    words = [word for word in text.split() if "://" not in word and "hf_" not in word]
    return printable(" ".join(words).rstrip("."), 200)


def wait_of(error: BaseException, tried: int) -> float | None:
    """Seconds to wait before a call that failed so is made again; None where that is of no use."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    usual = min(MAX_WAIT, 2.0**tried)
    if isinstance(error, OfflineModeIsEnabled) or type(error).__name__ in NEVER:
        return None
    of_address = isinstance(error, LocalEntryNotFoundError)
    if of_address or isinstance(error, HfHubHTTPError):
        answered: Any = error.__cause__ if of_address else error
        status = status_of(answered)
        if status in BUSY:
            return max(usual, min(MAX_TOLD_WAIT, told_wait(answered.response.headers)))
        return usual if of_address and status is None else None
    return usual if isinstance(error, (request_error(), ConnectionError, TimeoutError)) else None


@dataclass(frozen=True, slots=True)
class Patience:
    """How long is waited for the Hub: `stop` ends it, `on_wait` is told."""

    stop: Event = field(default_factory=Event)
    on_wait: OnWait = lambda seconds, error: None
    tries: int = TRIES


def patiently(call: Callable[[], T], patience: Patience) -> T:
    """call(), again and again while the server is busy or gone. `stop` ends the waiting: the error comes at once."""
    for tried in range(patience.tries):
        try:
            return call()
        except Exception as e:
            seconds = wait_of(e, tried)
            if seconds is None or tried == patience.tries - 1:
                raise
            patience.on_wait(seconds, e)
            if patience.stop.wait(seconds):
                raise
    raise AssertionError

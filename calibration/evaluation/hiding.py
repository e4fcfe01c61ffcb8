"""What must not be printed: the API key, in whatever spelling a server sends it back, and the password of a URL."""

import os
import re
from functools import cache
from html.entities import html5

KEY = "OPENAI_API_KEY"
# A spelling of a spelling (JSON in JSON, a quoted URL quoted again); bounded, so that a run of them takes no longer
_SLASHES, _PERCENT, _AMP = r"\\{0,8}", "%(?:25){0,3}", "&(?:amp;){0,3}"


def api_key() -> str | None:
    """None where it is not set, or empty."""
    return os.environ.get(KEY) or None


def without_key(text: str, key: str | None) -> str:
    """`text` with `...` for the key: as it is, and as URLs, HTML and JSON spell its characters, one by one, since each
    of them escapes what it has to."""
    return _spellings(key).sub("...", text) if key else text


@cache
def _spellings(key: str) -> re.Pattern[str]:
    return re.compile("".join(map(_spelled, key)))


def _spelled(character: str) -> str:
    code = ord(character)
    named = [re.escape(name.rstrip(";")) for name, meant in html5.items() if meant == character]
    entity = "|".join([f"#0{{0,8}}{code}", f"#[xX]0{{0,8}}(?i:{code:x})", *sorted({*named}, key=len, reverse=True)])
    spelled = [
        f"{_SLASHES}{re.escape(character)}",
        f"{_SLASHES}\\\\u(?i:{code:04x})",
        f"{_PERCENT}(?i:{code:02x})",
        f"{_AMP}(?:{entity});?",
        *([r"\+"] if character == " " else []),  # of a form
    ]
    return f"(?:{'|'.join(spelled)})"


def without_login(name: str) -> str:
    """A name that may be meant as a URL, without what stands before its host, a user's name and a password."""
    return re.sub(r"(?s)^(?:[^/]*:|[^@]*//).*@", "...@", name)

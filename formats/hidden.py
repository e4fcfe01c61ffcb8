"""What must not be printed: a key or token, in whatever spelling a server sends it back, and the password of a URL."""

import re
from functools import cache
from html.entities import html5

LONGEST = 1000  # characters of what can be a key; of more there is one spelling: the others take a second for each
# A spelling of a spelling (JSON in JSON, a quoted URL quoted again); bounded, so that a run of them takes no longer
_SLASHES, _PERCENT, _AMP = r"\\{0,8}", "%(?:25){0,3}", "&(?:amp;){0,3}"


def without_secret(text: str, secret: str | None) -> str:
    """`text` with `...` for the secret: as it is, and as URLs, HTML and JSON spell its characters, one by one, since
    each of them escapes what it has to."""
    if secret and len(secret) > LONGEST:
        return text.replace(secret, "...")
    return _spellings(secret).sub("...", text) if secret else text


@cache
def _spellings(secret: str) -> re.Pattern[str]:
    return re.compile("".join(map(_spelled, secret)))


def _spelled(character: str) -> str:
    code = ord(character)
    named = [re.escape(name.rstrip(";")) for name, meant in html5.items() if meant == character]
    entity = "|".join([f"#0{{0,8}}{code}", f"#[xX]0{{0,8}}(?i:{code:x})", *sorted({*named}, key=len, reverse=True)])
    spelled = [
        f"{_SLASHES}{re.escape(character)}",
        f"{_SLASHES}\\\\u(?i:{code:04x})",
        f"{_SLASHES}\\\\x(?i:{code:02x})",  # Python's
        f"{_PERCENT}(?i:{code:02x})",
        f"{_AMP}(?:{entity});?",
        *([r"\+"] if character == " " else []),  # of a form
    ]
    return f"(?:{'|'.join(spelled)})"


def without_login(name: str) -> str:
    """A name that may be meant as a URL, without what stands before its host, a user's name and a password."""
    return re.sub(r"(?s)^(?:[^/]*:|[^@]*//).*@", "...@", name)

"""What the data is made of, by simple rules on characters, and whether that is what the model is used for.

Code: a file whose suffix is a programming language's, else what stands between ``` fences, else a text of whose
lines three in ten look like code: they end in a bracket or `;`, assign, or begin with a keyword or a comment sign. Tool
calls: a conversation in which a tool is called. Scripts: letters outside code, by the first word of their Unicode name.

Of a chat, what its messages say is looked at, not what the template makes of it, whose lines of tags would look like
code; arguments of tool calls are JSON, and count as code.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kizami.calibration.data.chat import calls_tools, said_in
from kizami.calibration.data.files import Document, part_of
from kizami.formats.errors import KizamiError
from kizami.formats.files import open_regular, read_exactly, resolve_inside
from kizami.formats.model_card import MAX_README_CHARS, source_languages

LACKING = 0.005  # of the data; less is as good as nothing
_CODE_LINES = 0.3

_CODE_SUFFIXES = """
    c cc cpp cs css cu go h hpp html java js jsx kt lua m php pl py r rb rs scala sh sql swift ts tsx vue zig ipynb
    cmake toml yaml yml
"""
_CODE = frozenset(f".{suffix}" for suffix in _CODE_SUFFIXES.split())
_CODE_LINE = re.compile(
    r"\s*(?:(?:def|class|import|from|return|func|fn|let|const|var|pub|public|private|static|void|if|for|while|else|elif|"
    r"try|except|catch|package|use|using|namespace|struct|enum|impl|INSERT|CREATE|end|module|local|assert|raise|with)\b"
    r".*[(){}:;=.,]|#include|//|/\*|\*/|@\w|</?\w+[^>]*>"
    r"|(?:SELECT|FROM|WHERE|(?:LEFT |INNER )?JOIN|GROUP BY|ORDER BY|LIMIT|WITH|AND)\b"
    r"|[\w.]+(?:\[[^\]]*\])?(?:: ?[\w\[\], |]+)? ?[-+*/|&]?= ?\S).*"
    r"|.*(?:[{};]|->|=>|\)|do|then|fi|done|::.+)\s*|\s*[)\]}]+[,;:]?\s*"
)
_FENCED = re.compile(r"^```[^\n]*\n(.*?)(?:^```|\Z)", re.M | re.S)
_SCRIPTS = {"CJK": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana", "HALFWIDTH": "Kana", "FULLWIDTH": "Latin"}
_SIGNS = frozenset(
    {"", "SUPERSCRIPT", "SUBSCRIPT", "MODIFIER", "MATHEMATICAL", "FEMININE", "MASCULINE", "DOUBLE", "MICRO"}
)
_SCRIPT_OF = {
    "Han": "zh yue wuu lzh", "Kana": "ja", "Hangul": "ko", "Cyrillic": "ru uk be bg sr mk kk ky tg mn",
    "Arabic": "ar fa ur ps", "Devanagari": "hi mr ne sa", "Hebrew": "he yi", "Greek": "el", "Thai": "th",
    "Bengali": "bn as", "Tamil": "ta", "Telugu": "te", "Kannada": "kn", "Malayalam": "ml", "Gujarati": "gu",
    "Georgian": "ka", "Armenian": "hy", "Khmer": "km", "Myanmar": "my", "Lao": "lo", "Sinhala": "si",
}  # fmt: skip
_BY_LANGUAGE = {language: script for script, languages in _SCRIPT_OF.items() for language in languages.split()}


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares from 0 to 1. Of the characters: code, chats, and chats with tool calls (one may be in several). scripts:
    shares of the letters outside code, the largest first."""

    code: float
    chat: float
    tool_calls: float
    scripts: tuple[tuple[str, float], ...]

    def script(self, name: str) -> float:
        return dict(self.scripts).get(name, 0.0)


@dataclass(frozen=True, slots=True)
class Claims:
    """What the model is used for, by its own files. languages: of the model card."""

    tools: bool
    languages: tuple[str, ...]


class MixCounter:
    def __init__(self) -> None:
        self._all = self._chat = self._calls = 0
        self._code = 0.0
        self._letters: Counter[str] = Counter()

    def add(self, document: Document, text: str) -> None:
        """`text`: of the document, as it is tokenised."""
        share, prose = _of_chat(document) if document.messages is not None else _of_text(text, document.suffix)
        self._all += len(text)
        self._code += share * len(text)
        self._chat += len(text) * (document.messages is not None)
        self._calls += len(text) * calls_tools(document.messages)
        for character, count in Counter(prose).items():
            self._letters[_script(character)] += count

    def total(self) -> Mix:
        characters = max(1, self._all)
        letters = Counter({script: n for script, n in self._letters.items() if script})
        scripts = tuple((script, n / letters.total()) for script, n in letters.most_common())
        return Mix(self._code / characters, self._chat / characters, self._calls / characters, scripts)


def _of_text(text: str, suffix: str = "") -> tuple[float, str]:
    """The share of code, and what is none."""
    code = code_characters(text, suffix)
    return code / max(1, len(text)), _FENCED.sub("", text) if code < len(text) else ""


def _of_chat(document: Document) -> tuple[float, str]:
    """The same: the share of the whole chat, and of its prose this document's part."""
    said, arguments = said_in(document.messages or ())
    each = [(len(text), *_of_text(text)) for text in said] + [(len(text), 1.0, "") for text in arguments]
    share = sum(size * code for size, code, _ in each) / max(1, sum(size for size, _, _ in each))
    return share, part_of("\n".join(prose for _, _, prose in each), document.part, document.parts)


def code_characters(text: str, suffix: str = "") -> int:
    """How many characters of `text` are code."""
    if suffix in _CODE:
        return len(text)
    if fenced := sum(len(block) for block in _FENCED.findall(text)):
        return fenced
    lines = [line for line in text.splitlines() if line.strip()]
    like_code = sum(_CODE_LINE.fullmatch(line[:200]) is not None for line in lines)
    return len(text) if like_code > len(lines) * _CODE_LINES else 0


@cache
def _script(character: str) -> str:
    """`Latin`, `Han`, `Cyrillic`...; empty for what is no letter."""
    word = unicodedata.name(character, "").partition(" ")[0].partition("-")[0]
    if not character.isalpha() or word in _SIGNS:
        return ""
    return _SCRIPTS.get(word, word.capitalize())


def read_claims(root: Path, template: str) -> Claims:
    """`root`: of the checkpoint. template: the chat template, empty if there is none."""
    return Claims("tools" in template, source_languages(_card(root)))


def _card(root: Path) -> str | None:
    try:
        path = resolve_inside(root, "README.md")
        size = path.stat().st_size
        fd = open_regular(path, "README.md")
    except (KizamiError, OSError):
        return None  # whoever has no card claims nothing
    with open(fd, "rb") as stream:
        if size > MAX_README_CHARS:
            return None
        return read_exactly(stream.fileno(), 0, size, "README.md").decode("utf-8", "replace")


def lacks(mix: Mix, claims: Claims) -> tuple[str, ...]:
    """What the model is used for and the data has next to nothing of, a sentence each."""
    return tuple(_lacks(mix, claims))


def _lacks(mix: Mix, claims: Claims) -> Iterable[str]:
    if claims.tools:
        for what, share in (("code", mix.code), ("chats with tool calls", mix.tool_calls)):
            if share < LACKING:
                yield f"the model calls tools (its chat template says so), but {_percent(share)} of the data is {what}"
    for script, languages in _scripts_of(claims.languages).items():
        if (share := mix.script(script)) < LACKING:
            names = ", ".join(languages)
            yield f"the model card names {names}, but {_percent(share)} of the data's letters are {script}"
    if "multilingual" in claims.languages and mix.scripts and mix.scripts[0][1] > 1 - LACKING:
        yield f"the model card says multilingual, but nearly all letters of the data are {mix.scripts[0][0]}"


def _scripts_of(languages: Iterable[str]) -> dict[str, list[str]]:
    """Two- and three-letter codes by script; words that are no language's code are left out."""
    found: dict[str, list[str]] = {}
    for language in languages:
        code = re.split(r"[-_]", language.lower())[0]
        if re.fullmatch(r"[a-z]{2,3}", code):
            found.setdefault(_BY_LANGUAGE.get(code, "Latin"), []).append(language)
    return found


def _percent(share: float) -> str:
    return f"{share:.1%}"

"""Entries of `ignore` and `targets`: matching them, and a limit on what that may cost.

Python's regular expressions backtrack: a few dozen bytes can keep one busy for ever, and a config comes from anyone. So
only those are tried that kizami itself would write. In these nothing can match in two ways: one `.*` at each end, and
numbers and words with their dots between. A try then takes at most as many steps as the pattern has characters at each
dot of the name (at each character, if no dot follows the `.*`).
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from kizami.formats.errors import KizamiError, printable

# Seconds at most, whoever wrote the names. GLM-5.2 with all of its 75 layers of experts ignored one by one: 1.3e9.
MAX_STEPS = 2_000_000_000
# The longest useful one names every layer of a model: 300.
MAX_PATTERN_CHARS = 1024
# Compiled in a second or two. A config of ours has at most half of that under MAX_STEPS.
MAX_ALL_PATTERN_CHARS = 1 << 20

_CHARACTER = r"(?:[^\\.^$*+?{}\[\]|()]|\\[^A-Za-z0-9.])"  # one that stands for itself, in a component of a name
_WORDS = rf"\({_CHARACTER}*+(?:\|{_CHARACTER}*+)*+\)(?=\\\.|_proj|\$)"  # layers, or leaves
_OTHER_LAYERS = r"\(\?!(?:\d++|\(\d++(?:\|\d++)*+\))\\\.\)\\d\+\\\."
_PART = rf"(?:{_CHARACTER}|\\\.|\\d\+\\\.|{_OTHER_LAYERS})*+"
_WRITTEN = re.compile(rf"(?:\.\*|\(\.\*\\\.\)\?)?{_PART}(?:{_WORDS}{_PART}){{0,2}}(?:\.\*|\$)?")


_compiled = lru_cache(maxsize=4096)(re.compile)


class Pattern:
    """One entry of our own: `re:` and a regular expression matched at the start of the name, or a plain name."""

    def __init__(self, entry: str) -> None:
        self.match: Callable[[str], object] = _compiled(entry[3:]).match if entry.startswith("re:") else entry.__eq__


def is_written(expression: str) -> bool:
    """Whether kizami could have written this expression (without its `re:`)."""
    return len(expression) <= MAX_PATTERN_CHARS and _WRITTEN.fullmatch(expression) is not None


# Python's tokens of an expression, as far as they matter here: escapes and classes stand for one character each.
_TOKEN = re.compile(
    r"(?P<narrow>\\d)|(?P<wide>\\[sSDwW]|\[\^?\]?(?:\\.|[^\\\]])*+\]|\.)|(?P<back>\\[1-9])|\\."
    r"|(?P<open>\((?:\?(?:P<\w+>|i?:|<?[=!]|i(?=\)))|(?!\?)))|(?P<other>\(\?)|(?P<close>\))|(?P<or>\|)"
    r"|(?P<repeat>(?:\*|\+|\{\d*,?\d*\})[?+]?)|(?P<maybe>\?[?+]?)|.",
    re.DOTALL,
)
_MAX_WIDE = 3  # `.*` and the like: a name of 60 characters can be cut in 36,000 ways
_MAX_NARROW = 8  # of `\d+`: names have few digits in a row
_MAX_CHOICES = 2_000  # ways through all `(a|b)`; 90 layers and 3 projections: 270


def runs_away(expression: str) -> str | None:
    """What in it could take for ever on an ordinary name; None for an expression that is done in milliseconds.

    No group may be repeated, as in `(a+)+`, and little of what begins with `(?` is known here.
    """
    wide = narrow = 0
    choices, alternatives = 1, [1]
    ends = (len(expression.removesuffix("$")), len(expression))  # there `.*` matches whatever is left, at once
    before = ""
    for token in _TOKEN.finditer(expression):
        kind = token.lastgroup or ""
        if kind == "repeat" and before == "close":
            return "a repeated group"
        if kind in ("back", "other"):
            return f"{printable(token[0], 20)}, which nobody needs to choose modules"
        repeats = kind in ("repeat", "maybe")
        at_end = token.end() in ends or (len(alternatives) == 1 and expression.startswith("|", token.end()))
        wide += repeats and before == "wide" and not at_end
        narrow += repeats and before not in ("wide", "close")
        choices *= 2 if kind == "maybe" and before == "close" else 1
        if kind == "open":
            alternatives.append(1)
        elif kind == "or" and len(alternatives) > 1:
            alternatives[-1] += 1
        elif kind == "or":  # a whole expression ends here, and another one begins
            if problem := _too_much(wide, narrow, choices):
                return problem
            wide, narrow, choices = 0, 0, 1
        elif kind == "close" and len(alternatives) > 1:
            choices *= alternatives.pop()
        before = kind
    return _too_much(wide, narrow, choices)


def _too_much(wide: int, narrow: int, choices: int) -> str | None:
    if wide > _MAX_WIDE:
        return f"{wide} times `.*` or the like, and {_MAX_WIDE} are enough"
    if narrow > _MAX_NARROW or choices > _MAX_CHOICES:
        return "too many ways to match"
    return None


class Budget:
    """Steps that are left, when every pattern is tried on every one of `modules`."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._dots = sum(module.count(".") + 1 for module in modules)
        self._chars = sum(map(len, modules))
        self._left = MAX_STEPS

    def allows(self, entry: str) -> bool:
        """Takes what `entry` costs, if it is there to take."""
        price = len(entry) * (self._dots if _stops_at_dots(entry[3:]) else self._chars)
        if price > self._left or len(entry) > MAX_PATTERN_CHARS:
            return False
        self._left -= price
        return True


def _stops_at_dots(expression: str) -> bool:
    return not expression.startswith(".*") or expression.startswith(r".*\.")


class Matcher:
    """Many entries of an untrusted config at once. KizamiError "bad_pattern" for a pattern that kizami does not write
    (`where`: the list's name), "bad_config" when the work gets too much."""

    def __init__(self, entries: Iterable[str], where: str) -> None:
        entries = list(entries)
        self.plain = frozenset(entry for entry in entries if not entry.startswith("re:"))
        expressions = list(dict.fromkeys(entry[3:] for entry in entries if entry.startswith("re:")))
        for expression in expressions:
            if not is_written(expression):
                shown = printable(expression, 80)
                raise KizamiError(
                    f"quantization_config.{where} has the pattern re:{shown}, which is none that kizami writes",
                    code="bad_pattern",
                    file="config.json",
                )
        self._where = where
        self._per_dot = sum(len(e) for e in expressions if _stops_at_dots(e))
        self._per_char = sum(len(e) for e in expressions if not _stops_at_dots(e))
        self._left = 2 * MAX_STEPS  # the well-known patterns come on top of a writer's budget
        self._check(self._per_dot + self._per_char <= MAX_ALL_PATTERN_CHARS)
        # One expression: the common start `.*\.` is tried once for all.
        self._match = re.compile("|".join(expressions)).match if expressions else None

    def by_name(self, module: str) -> bool:
        if module in self.plain:
            return True
        if self._match is None:
            return False
        self._left -= self._per_dot * (module.count(".") + 1) + self._per_char * len(module)
        self._check(self._left >= 0)
        return self._match(module) is not None

    def _check(self, fine: bool) -> None:
        if not fine:
            raise KizamiError(
                f"quantization_config.{self._where} has too many patterns for so many modules",
                code="bad_config",
                file="config.json",
            )

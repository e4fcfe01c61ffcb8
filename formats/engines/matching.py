"""`ignore` and `targets` of compressed-tensors as SGLang and vLLM match them against runtime module names.

The engines' own functions were run on many configs and agree with these (tests/test_check_matching.py has the table of
their answers). Sources: SGLang 0.5.23 srt/layers/quantization/compressed_tensors/utils.py; vLLM 0.33
model_executor/layers/quantization/utils/config_utils.py and compressed_tensors/utils.py.
"""

import re
from collections.abc import Mapping, Sequence
from math import factorial

from kizami.formats.errors import KizamiError, printable
from kizami.formats.patterns import MAX_PATTERN_CHARS, MAX_STEPS, is_written, runs_away

Fused = Mapping[str, Sequence[str]]

# Llm-compressor's lists name every linear once: 1,500 entries for a model with experts under one pattern.
MAX_EXPRESSIONS = 2_000


class Disagreement(Exception):
    """Members of one fused module have different schemes: ValueError in both engines."""


class Patterns:
    """Compiled `re:` entries and the steps that all of them together may still take."""

    def __init__(self) -> None:
        self._compiled: dict[str, tuple[re.Pattern[str], int]] = {}
        self._left = 2 * MAX_STEPS

    def match(self, expression: str, name: str) -> bool:
        """`re.match`: anchored at the start only."""
        known = self._compiled.get(expression)
        if known is None:
            known = self._compiled[expression] = self._compile(expression)
        pattern, wide = known
        self._left -= len(expression) * (len(name) ** wide // factorial(wide))
        if self._left < 0:
            raise KizamiError(
                "ignore and targets have too many patterns for so many modules", code="bad_config", file="config.json"
            )
        return pattern.match(name) is not None

    def _compile(self, expression: str) -> tuple[re.Pattern[str], int]:
        problem: object = None
        ours = is_written(expression)
        if len(self._compiled) >= MAX_EXPRESSIONS:
            problem = f"it is one of more than {MAX_EXPRESSIONS} patterns"
        elif len(expression) > MAX_PATTERN_CHARS:
            problem = f"it has {len(expression)} characters, expected at most {MAX_PATTERN_CHARS}"
        elif not ours:
            problem = runs_away(expression)
        if problem is None:
            try:
                return re.compile(expression), 1 if ours else _wide_repeats(expression)
            except (re.error, OverflowError, RecursionError) as e:
                problem = e
        raise KizamiError(
            f"pattern re:{printable(expression, 80)} was not tried: {problem}",
            code="bad_pattern",
            file="config.json",
            hint="write patterns as kizami does: .* at the ends, names and numbers between",
        )


def _wide_repeats(expression: str) -> int:
    """How many repeats a try may have to move: `.*` at the end matches once, `\\d+` has few digits to share."""
    body = expression.removesuffix("$").removesuffix(".*")
    return max(1, min(4, len(re.findall(r"(?<!\\d)[*+]", body))))


class Entries:
    """One list of entries, in its order."""

    def __init__(self, entries: Sequence[str], patterns: Patterns) -> None:
        self.entries = tuple(entries)
        self._patterns = patterns
        self._plain: dict[str, int] = {}
        self._expressions: list[tuple[int, str]] = []
        for number, entry in enumerate(self.entries):
            if entry.startswith("re:"):
                self._expressions.append((number, entry[3:]))
            else:
                self._plain.setdefault(entry, number)
        self._classes: dict[str, str | None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._plain

    def first(self, name: str) -> str | None:
        """The first entry that is `name` or a pattern for it."""
        best = self._plain.get(name, len(self.entries))
        for number, expression in self._expressions:
            if number > best:
                break
            if self._patterns.match(expression, name):
                return self.entries[number]
        return self.entries[best] if best < len(self.entries) else None

    def first_ending(self, name: str) -> str | None:
        """Like `first`, and plain entries may also be the end of the name, after a dot."""
        parts = name.split(".")
        tails = (".".join(parts[i:]) for i in range(len(parts)))
        plain = next((tail for tail in tails if tail in self._plain), None)
        return plain if plain is not None else self.first(name)

    def of_class(self, kind: str) -> str | None:
        """The first entry that is part of the class name, in any case: `Linear` is part of RowParallelLinear."""
        if kind not in self._classes:
            self._classes[kind] = next((entry for entry in self.entries if self._is_part(entry, kind)), None)
        return self._classes[kind]

    def _is_part(self, entry: str, kind: str) -> bool:
        if entry.startswith("re:"):
            return self._patterns.match(entry[3:], kind)
        return entry.lower() in kind.lower()


def sglang_ignores(ignore: Entries, name: str, fused: Fused) -> bool:
    """An entry is equal, a pattern, or the end of the name after a dot; a fused name stands for its members."""
    leaf = name.rpartition(".")[2]
    if leaf not in fused or name in ignore:
        return ignore.first_ending(name) is not None
    return _agreed([ignore.first_ending(name.replace(leaf, member)) is not None for member in fused[leaf]], name)


def vllm_ignores(ignore: Entries, name: str, fused: Fused) -> bool:
    """An entry is equal or a pattern. The fused name itself comes first, then its members."""
    leaf = name.rpartition(".")[2]
    if leaf not in fused or ignore.first(name) is not None:
        return ignore.first(name) is not None
    return _agreed([ignore.first(name.replace(leaf, member)) is not None for member in fused[leaf]], name)


def _agreed(answers: Sequence[bool], name: str) -> bool:
    if any(answers) != all(answers):
        raise Disagreement(name)
    return all(answers)


def sglang_target(targets: Entries, name: str, kind: str, fused: Fused) -> str | None:
    """Name, class, fused members; None is a ValueError there."""
    return targets.first(name) or targets.of_class(kind) or _fused_target(targets, name, fused)


def vllm_target(targets: Entries, name: str, kind: str, fused: Fused) -> str | None:
    """Name, fused members, class; None leaves the module unquantized there."""
    return targets.first(name) or _fused_target(targets, name, fused) or targets.of_class(kind)


def _fused_target(targets: Entries, name: str, fused: Fused) -> str | None:
    """All members match some target: that of the first member."""
    leaf = next((key for key in fused if name.endswith(key)), None)
    if leaf is None:
        return None
    found = [targets.first(name.replace(leaf, member)) for member in fused[leaf]]
    return found[0] if all(found) else None

"""What a check says, and what a rule is: a function with the engine versions and the public file it rests on."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kizami.formats.engines.context import Context

EngineName = Literal["sglang", "vllm", "transformers"]
Severity = Literal["error", "warning", "note"]

ENGINES: tuple[EngineName, ...] = ("sglang", "vllm", "transformers")
READ: Mapping[EngineName, str] = {"sglang": "0.5.23", "vllm": "0.33.0", "transformers": "5.24.0"}
"""The versions whose sources the rules were written from."""

# A rule without a narrower range holds for the releases around the one that was read. Outside, nothing is claimed.
RANGES: Mapping[EngineName, str] = {"sglang": ">=0.5.0,<0.6", "vllm": ">=0.30,<0.40", "transformers": ">=5.20,<6"}


MAX_KINDS = 200  # findings of one rule; a hostile checkpoint could have one per tensor


@dataclass(frozen=True, slots=True)
class Finding:
    """error: does not load, or loads as something else; warning: needs a flag, or loses something; note: not proven.

    module: the first of `count` modules, None where the config as a whole is meant.
    """

    severity: Severity
    code: str
    engine: EngineName
    module: str | None
    count: int
    message: str
    source: str
    advice: str


@dataclass(frozen=True, slots=True)
class Hit:
    """One thing that a rule found; its rule adds the rest. Hits of one rule with equal messages become one Finding."""

    message: str
    advice: str
    module: str | None = None
    severity: Severity | None = None  # where it differs from the rule's


Check = Callable[["Context"], Iterable[Hit]]


@dataclass(frozen=True, slots=True)
class Rule:
    """sources: for each engine that the rule speaks of, the public file or issue that it rests on.

    ranges: versions by engine, where they are narrower than RANGES. per_rank: depends on tp, ep or pp.
    """

    code: str
    severity: Severity
    sources: Mapping[EngineName, str]
    check: Check
    per_rank: bool = False
    ranges: Mapping[EngineName, str] | None = None

    def applies(self, engine: EngineName, version: str) -> bool:
        return engine in self.sources and in_range(version, (self.ranges or {}).get(engine, RANGES[engine]))


def collect(rule: Rule, context: "Context") -> list[Finding]:
    """Hits with equal words are one finding: 60 layers with the same fault are one line."""
    found: dict[tuple[str, str, Severity], list[str | None]] = {}
    for hit in rule.check(context):
        words = (hit.message, hit.advice, hit.severity or rule.severity)
        if words not in found and len(found) >= MAX_KINDS:
            words = (f"{rule.code} in more ways than {MAX_KINDS}", "begin with the ones above", words[2])
        found.setdefault(words, []).append(hit.module)
    source = rule.sources[context.engine]
    return [
        Finding(severity, rule.code, context.engine, modules[0], len(modules), message, source, advice)
        for (message, advice, severity), modules in found.items()
    ]


_VERSION = re.compile(r"v?(\d{1,6}(?:\.\d{1,6}){0,5})(?:[^\d.].*|\.[^\d].*)?", re.ASCII)


def version_key(text: str) -> tuple[int, ...] | None:
    """`0.5.23`, `v0.33.0rc1`, `0.5.23.post2` as numbers without trailing zeros; None for what is no version."""
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        return None
    numbers = [int(part) for part in match[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def in_range(version: str, range_: str) -> bool:
    """`>=0.5.0,<0.6`: every bound holds. A version that cannot be read is in no range."""
    key = version_key(version)
    if key is None:
        return False
    for bound in range_.split(","):
        operator = bound[:2] if bound[:2] in (">=", "<=", "==") else bound[:1]
        limit = version_key(bound[len(operator) :])
        assert limit is not None, range_
        if not {">=": key >= limit, "<=": key <= limit, "==": key == limit, "<": key < limit}[operator]:
            return False
    return True

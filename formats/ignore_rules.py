"""Name patterns of `ignore` and `targets`, derived from the modules that were really written.

Patterns speak of runtime names, which differ between engines: SGLang drops the `language_model.` prefix of Kimi-K2.5
and calls the next-token layer `model.decoder`, vLLM puts `mtp_block` into its names, and both merge gate and up into
`gate_up_proj` (SGLang matches that fused name literally). So patterns start with `.*`, and a name ending in one member
of a fused set is written with all its spellings.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kizami.formats.errors import KizamiError
from kizami.formats.families import EMBEDDINGS

# The list Moonshot publishes with Kimi-K2-Thinking, then what GLM, DeepSeek and vision models need besides.
_LM_HEAD = "lm_head"
_MTP_PATTERNS = ("re:.*eh_proj.*", "re:.*shared_head.*")
_PATTERNS = (
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    *_MTP_PATTERNS,
    r"re:.*mlp\.gate$",
    r"re:.*indexer\.weights_proj.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
    r"re:.*multi_modal_projector.*",
    r"re:.*visual\..*",
)
EXPERTS_TARGET = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"

# Last components that a runtime may merge into one module, and the pattern that stands for all its spellings.
_FUSED = {
    "gate_proj": "(gate|up|gate_up)_proj", "up_proj": "(gate|up|gate_up)_proj",
    "q_proj": "(q|k|v|qkv)_proj", "k_proj": "(q|k|v|qkv)_proj", "v_proj": "(q|k|v|qkv)_proj",
}  # fmt: skip
_MEMBERS = {"(gate|up|gate_up)_proj": ("gate_proj", "up_proj"), "(q|k|v|qkv)_proj": ("q_proj", "k_proj", "v_proj")}


@lru_cache(maxsize=4096)
def _compiled(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise KizamiError(f"pattern re:{expression} is not a regular expression: {error}", code="bad_pattern") from None


class Pattern:
    """One entry: `re:` and a regular expression matched at the start of the name, or a plain name."""

    def __init__(self, entry: str) -> None:
        self.entry = entry
        self.match: Callable[[str], object] = _compiled(entry[3:]).match if entry.startswith("re:") else entry.__eq__


def derive_ignore(
    plain: Sequence[str],
    quantized: Sequence[str],
    *,
    num_hidden_layers: int | None,
    mtp_dense: bool,
    has_mtp: bool,
) -> list[str]:
    """Entries that cover every module of `plain` and none of `quantized`, the well-known patterns first.

    mtp_dense: no INT4 in the next-token layers, so both their runtime names are listed where nothing quantized is hit.
    """
    left = [module for module in plain if module.rpartition(".")[2] not in EMBEDDINGS]
    taken = _Taken(quantized)
    entries = [] if _LM_HEAD in taken.names else [_LM_HEAD]
    left = [module for module in left if module not in entries]
    for entry in _PATTERNS:
        match = Pattern(entry).match
        covers = any(match(module) for module in left)
        if (covers or (has_mtp and entry in _MTP_PATTERNS)) and not any(match(module) for module in quantized):
            entries.append(entry)
            left = [module for module in left if not match(module)]
    if mtp_dense:
        for entry in _dense_mtp_entries(plain, quantized, num_hidden_layers):
            match = Pattern(entry).match
            entries.append(entry)
            left = [module for module in left if not match(module)]
    return entries + _entries_for_rest(left, taken)


def _dense_mtp_entries(plain: Sequence[str], quantized: Sequence[str], num_hidden_layers: int | None) -> list[str]:
    """All of a next-token layer by both runtime names, unless some of it is quantized (FP8 experts, say)."""

    def mtp_heads(modules: Sequence[str]) -> set[tuple[str, ...]]:
        return {name.at for name in map(_Name.of, modules) if name.is_mtp(num_hidden_layers)}

    if mtp_heads(quantized) or num_hidden_layers is None:
        return []
    layers = sorted(int(number) for word, number in mtp_heads(plain) if word == "layers")
    # `decoder` is SGLang's name for the next-token layer (models/deepseek_nextn.py).
    return [*(rf"re:.*\.layers\.{layer}\..*" for layer in layers), r"re:.*\.decoder\..*"]


def _entries_for_rest(left: Sequence[str], taken: "_Taken") -> list[str]:
    """One entry per module at most, and a wider one wherever nothing quantized falls under it."""
    entries: dict[str, None] = {}
    for module in left:
        if not any(Pattern(entry).match(module) for entry in _candidates(module, taken) if entry in entries):
            entries[next(iter(_candidates(module, taken)))] = None
    return list(entries)


def _candidates(module: str, taken: "_Taken") -> Iterator[str]:
    """Entries that cover `module` and nothing quantized, the widest first; the module itself is the last."""
    yield from (entry for entry in _patterns_for(module, taken) if not taken.is_hit_outside_layers(entry))
    means_more = module.startswith("re:") or module == "Linear"  # a regex, a class: as an entry it would hit others
    yield f"re:{re.escape(module)}$" if means_more else module


def _patterns_for(module: str, taken: "_Taken") -> Iterator[str]:
    name = _Name.of(module)
    if name.tail:
        parent, leaf = name.tail[:-1], name.tail[-1]
        spellings = dict.fromkeys((_FUSED.get(leaf, re.escape(leaf)), re.escape(leaf)))
        for exact in (False, True):  # any expert, then this expert
            for last in spellings:
                if not taken.has_tail(parent, _MEMBERS.get(last, (leaf,)), exact):
                    yield rf"re:.*\.{_expression(parent, exact)}{last}$"
        if "experts" in parent:
            upto = name.tail[: parent.index("experts") + 1]
            if not taken.has_layer_part(name.at, upto):
                yield f"re:{name.layer_expression}{_expression(upto, True)}.*"
        for last in spellings:
            siblings = [".".join((*name.head, *parent, member)) for member in _MEMBERS.get(last, (leaf,))]
            if taken.names.isdisjoint(siblings):
                yield f"re:{name.layer_expression}{_expression(parent, True)}{last}$"
    suffix = module.removeprefix("language_model.")
    if suffix != module and not any(other.endswith(suffix) for other in taken.names):
        yield f"re:.*{re.escape(suffix)}$"


def _expression(parts: Iterable[str], exact: bool) -> str:
    """Regular expression for dotted components, each followed by a dot; numbers are left open unless `exact`."""
    return "".join((r"\d+" if part.isdigit() and not exact else re.escape(part)) + r"\." for part in parts)


@dataclass(frozen=True, slots=True)
class _Name:
    """A module name cut after `layers.<i>.` or `mtp.<i>.`; without one `tail` is empty."""

    head: tuple[str, ...]
    tail: tuple[str, ...]

    @staticmethod
    @lru_cache(maxsize=1 << 18)
    def of(module: str) -> "_Name":
        parts = tuple(module.split("."))
        for i in range(len(parts) - 2):
            if parts[i] in {"layers", "mtp"} and parts[i + 1].isascii() and parts[i + 1].isdigit():
                return _Name(parts[: i + 2], parts[i + 2 :])
        return _Name(parts, ())

    @property
    def at(self) -> tuple[str, ...]:
        """`("layers", "3")`: the layer, whatever stands before it."""
        return self.head[-2:]

    @property
    def layer(self) -> int | None:
        return int(self.head[-1]) if self.tail and self.head[-2] == "layers" else None

    def is_mtp(self, num_hidden_layers: int | None) -> bool:
        if self.layer is None:
            return bool(self.tail)
        return num_hidden_layers is not None and self.layer >= num_hidden_layers

    @property
    def layer_expression(self) -> str:
        return ("" if len(self.head) == 2 else r".*\.") + _expression(self.at, True)


class _Taken:
    """Quantized modules, indexed so that a candidate pattern is tested without running it over all of them."""

    def __init__(self, modules: Iterable[str]) -> None:
        self.names = frozenset(modules)
        self._outside: list[str] = []
        self._tails: set[tuple[tuple[str, ...], str, bool]] = set()
        self._parts: set[tuple[tuple[str, ...], tuple[str, ...]]] = set()
        for module in self.names:
            name = _Name.of(module)
            if not name.tail:
                self._outside.append(module)
                continue
            parent, leaf = name.tail[:-1], name.tail[-1]
            self._tails |= {(parent, leaf, True), (_open(parent), leaf, False)}
            self._parts |= {(name.at, name.tail[:i]) for i in range(1, len(name.tail))}

    def has_tail(self, parent: tuple[str, ...], leaves: Iterable[str], exact: bool) -> bool:
        key = parent if exact else _open(parent)
        return any((key, leaf, exact) in self._tails for leaf in leaves)

    def has_layer_part(self, at: tuple[str, ...], upto: tuple[str, ...]) -> bool:
        return (at, upto) in self._parts

    def is_hit_outside_layers(self, entry: str) -> bool:
        return any(map(Pattern(entry).match, self._outside))


def _open(parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("#" if part.isdigit() else part for part in parts)


def derive_targets(packed: Sequence[str], fp8: Sequence[str]) -> list[str]:
    """Entries that cover every module of `packed` and none of `fp8`: the usual experts' pattern if it is right."""
    match = Pattern(EXPERTS_TARGET).match
    entries: dict[str, None] = {}
    left = list(packed)
    if not any(match(module) for module in fp8) and any(match(module) for module in packed):
        entries[EXPERTS_TARGET] = None
        left = [module for module in packed if not match(module)]
    taken = _Taken(fp8)
    groups: dict[tuple[str, ...], list[_Name]] = {}
    for module in left:
        name = _Name.of(module)
        if name.tail:
            groups.setdefault(_open(name.tail[:-1]), []).append(name)
        else:
            entries[_named(module, taken)] = None
    for parent, names in groups.items():
        entries |= dict.fromkeys(_target_entries(parent, names, fp8, taken))
    return list(entries)


def _named(module: str, taken: _Taken) -> str:
    suffix = module.removeprefix("language_model.")
    if suffix != module and not any(other.endswith(suffix) for other in taken.names):
        return f"re:.*{re.escape(suffix)}$"
    return module


def _target_entries(parent: tuple[str, ...], names: Sequence[_Name], fp8: Sequence[str], taken: _Taken) -> list[str]:
    """Patterns for packed modules under one parent, e.g. `mlp.experts.#`: all layers, some layers, or one by one."""
    leaves = sorted({name.tail[-1] for name in names})
    tail = _expression(("0" if part == "#" else part for part in parent), exact=False) + _alternatives(leaves) + "$"
    wide = rf"re:.*\.{tail}"
    match = Pattern(wide).match
    rivals = [module for module in fp8 if match(module)]
    if not rivals:
        return [wide]
    mine = {name.layer for name in names}
    theirs = {_Name.of(module).layer for module in rivals}
    if not mine & theirs and None not in mine | theirs:
        if len(theirs) <= len(mine):
            return [rf"re:.*\.layers\.(?!{_alternatives(map(str, _ordered(theirs)))}\.)\d+\.{tail}"]
        return [rf"re:.*\.layers\.{_alternatives(map(str, _ordered(mine)))}\.{tail}"]
    modules = [".".join((*name.head, *name.tail)) for name in names]
    return list(dict.fromkeys(_exact_target(module, taken) for module in modules))


def _exact_target(module: str, taken: _Taken) -> str:
    name = _Name.of(module)
    entry = f"re:{name.layer_expression}{_expression(name.tail[:-1], True)}{re.escape(name.tail[-1])}$"
    return module if any(map(Pattern(entry).match, taken.names)) else entry


def _ordered(layers: Iterable[int | None]) -> list[int]:
    return sorted(layer for layer in layers if layer is not None)


def _alternatives(words: Iterable[str]) -> str:
    listed = [re.escape(word) for word in words]
    if sorted(listed) == ["down_proj", "gate_proj", "up_proj"]:
        return "(gate|up|down)_proj"
    return listed[0] if len(listed) == 1 else f"({'|'.join(listed)})"

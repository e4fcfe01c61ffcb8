"""Name patterns of `ignore` and `targets`, derived from the modules that were really written.

Patterns speak of runtime names, which differ between engines: SGLang drops the `language_model.` prefix of Kimi-K2.5
and calls the next-token layer `model.decoder`, vLLM puts `mtp_block` into its names, and both merge gate and up into
`gate_up_proj` (SGLang matches that fused name literally). So patterns start with `.*`, and a name ending in one member
of a fused set is written with all its spellings.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise

from kizami.formats.families import EMBEDDINGS
from kizami.formats.patterns import Budget, Pattern

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
WELL_KNOWN = frozenset({_LM_HEAD, *_PATTERNS})  # in lists of kizami's own, whether a model has such modules or not
EXPERTS_TARGET = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"

# Last components that a runtime may merge into one module, and the pattern that stands for all its spellings.
_FUSED = {
    "gate_proj": "(gate|up|gate_up)_proj", "up_proj": "(gate|up|gate_up)_proj",
    "q_proj": "(q|k|v|qkv)_proj", "k_proj": "(q|k|v|qkv)_proj", "v_proj": "(q|k|v|qkv)_proj",
}  # fmt: skip
_MERGED = {
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
}  # fmt: skip
# Real names have at most 8 components after their layer; a longer one gets no pattern, but is listed itself.
_MAX_COMPONENTS = 32
_LAYER_WORDS = frozenset({"layers", "mtp"})  # a number after one of them is that of a layer
_MEMBERS = {"(gate|up|gate_up)_proj": ("gate_proj", "up_proj"), "(q|k|v|qkv)_proj": ("q_proj", "k_proj", "v_proj")}


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
    budget = Budget([*plain, *quantized])
    taken = _Taken(quantized, budget)
    entries = [] if _LM_HEAD in taken.names else [_LM_HEAD]
    left = [module for module in left if module not in entries]
    for entry in _PATTERNS:
        match = Pattern(entry).match
        covers = any(match(module) for module in left)
        if (covers or (has_mtp and entry in _MTP_PATTERNS)) and not any(match(module) for module in quantized):
            entries.append(entry)
            left = [module for module in left if not match(module)]
    if mtp_dense:
        for entry in _dense_mtp_entries(plain, quantized, num_hidden_layers, budget):
            match = Pattern(entry).match
            entries.append(entry)
            left = [module for module in left if not match(module)]
    return entries + _entries_for_rest(left, taken)


def _dense_mtp_entries(
    plain: Sequence[str], quantized: Sequence[str], num_hidden_layers: int | None, budget: Budget
) -> list[str]:
    """All of a next-token layer by both runtime names, unless some of it is quantized (FP8 experts, say)."""

    def mtp_heads(modules: Sequence[str]) -> set[tuple[str, ...]]:
        return {name.at for name in map(_Name.of, modules) if name.is_mtp(num_hidden_layers)}

    if mtp_heads(quantized) or num_hidden_layers is None:
        return []
    layers = sorted(int(number) for word, number in mtp_heads(plain) if word == "layers")
    # `decoder` is SGLang's name for the next-token layer (models/deepseek_nextn.py).
    entries = [*(rf"re:.*\.layers\.{layer}\..*" for layer in layers), r"re:.*\.decoder\..*"]
    return [entry for entry in entries if budget.allows(entry) and not any(map(Pattern(entry).match, quantized))]


def _entries_for_rest(left: Sequence[str], taken: "_Taken") -> list[str]:
    """One entry per module at most, and a wider one wherever nothing quantized falls under it."""
    entries: dict[str, None] = {}
    for module in left:
        if not any(Pattern(entry).match(module) for entry in _candidates(module, taken) if entry in entries):
            entry = next(iter(_candidates(module, taken)))
            entries |= dict.fromkeys((entry, *_merged_names(module, taken)) if entry == module else (entry,))
    return list(entries)


def _merged_names(module: str, taken: "_Taken") -> Iterator[str]:
    """What SGLang calls a merged linear that `module` is a member of: beside exact names it needs that one, too."""
    parent, dot, leaf = module.rpartition(".")
    if "experts" not in parent.split(".") and leaf in _MERGED and f"{parent}{dot}{_MERGED[leaf]}" not in taken.names:
        yield f"{parent}{dot}{_MERGED[leaf]}"


def _candidates(module: str, taken: "_Taken") -> Iterator[str]:
    """Entries that cover `module` and nothing quantized, the widest first; the module itself is the last."""
    yield from (entry for entry, near in _patterns_for(module, taken) if not taken.is_hit(entry, near))
    yield _literal(module)


def _literal(module: str) -> str:
    """The entry for this module alone. As an entry, a name that is a regex or a class would hit others."""
    return f"re:{re.escape(module)}$" if module.startswith("re:") or module == "Linear" else module


def _patterns_for(module: str, taken: "_Taken") -> Iterator[tuple[str, Iterable[str]]]:
    """Patterns that may do, each with the quantized modules that it could hit at all."""
    name = _Name.of(module)
    if name.tail and len(name.tail) <= _MAX_COMPONENTS:
        parent, leaf = name.tail[:-1], name.tail[-1]
        spellings = dict.fromkeys((_FUSED.get(leaf, re.escape(leaf)), re.escape(leaf)))
        for exact in (False, True):  # any expert, then this expert
            for last in spellings:
                if not taken.has_tail(parent, _MEMBERS.get(last, (leaf,)), exact):
                    yield rf"re:.*\.{_expression(parent, exact)}{last}$", taken.ending_in(_MEMBERS.get(last, (leaf,)))
        if "experts" in parent:
            upto = name.tail[: parent.index("experts") + 1]
            if not taken.has_layer_part(name.at, upto):
                yield f"re:{name.layer_expression}{_expression(upto, True)}.*", taken.in_layer(name.at)
        for last in spellings:
            siblings = [".".join((*name.head, *parent, member)) for member in _MEMBERS.get(last, (leaf,))]
            if taken.names.isdisjoint(siblings):
                yield f"re:{name.layer_expression}{_expression(parent, True)}{last}$", taken.in_layer(name.at)
    suffix = module.removeprefix("language_model.")
    if suffix != module and not taken.has_ending(suffix):
        yield f"re:.*{re.escape(suffix)}$", ()


def _expression(parts: Iterable[str], exact: bool) -> str:
    """Regular expression for dotted components, each followed by a dot; numbers are left open unless `exact`."""
    return "".join((r"\d+" if _is_number(part) and not exact else re.escape(part)) + r"\." for part in parts)


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit()


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
            if parts[i] in _LAYER_WORDS and _is_number(parts[i + 1]):
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
    """Quantized modules, indexed so that a pattern is tried on a few of them only."""

    def __init__(self, modules: Iterable[str], budget: Budget) -> None:
        self.names = frozenset(modules)
        self.budget = budget
        self._hits: dict[str, bool] = {}

    # Each index is made when it is first asked for: of a published model the well-known patterns leave nothing over.

    @cached_property
    def _reversed(self) -> list[str]:
        return sorted(module[::-1] for module in self.names)

    @cached_property
    def _by_leaf(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for module in self.names:
            found.setdefault(module.rpartition(".")[2], []).append(module)
        return found

    @cached_property
    def _by_layer(self) -> dict[tuple[str, ...], list[str]]:
        """Of every layer in a name: there may be two."""
        found: dict[tuple[str, ...], list[str]] = {}
        for module in self.names:
            for at in {pair for pair in pairwise(module.split(".")) if pair[0] in _LAYER_WORDS}:
                found.setdefault(at, []).append(module)
        return found

    @cached_property
    def _tails(self) -> set[tuple[tuple[str, ...], str, bool]]:
        tails = [name.tail for name in map(_Name.of, self.names) if name.tail]
        exact = {(tail[:-1], tail[-1], True) for tail in tails}
        return exact | {(_open(tail[:-1]), tail[-1], False) for tail in tails}

    @cached_property
    def _parts(self) -> set[tuple[tuple[str, ...], tuple[str, ...]]]:
        names = [name for name in map(_Name.of, self.names) if name.tail]
        return {(name.at, name.tail[:i]) for name in names for i in range(1, min(len(name.tail), _MAX_COMPONENTS))}

    def has_tail(self, parent: tuple[str, ...], leaves: Iterable[str], exact: bool) -> bool:
        key = parent if exact else _open(parent)
        return any((key, leaf, exact) in self._tails for leaf in leaves)

    def has_layer_part(self, at: tuple[str, ...], upto: tuple[str, ...]) -> bool:
        return (at, upto) in self._parts

    def ending_in(self, leaves: Iterable[str]) -> Iterable[str]:
        return chain.from_iterable(self._by_leaf.get(leaf, ()) for leaf in leaves)

    def in_layer(self, at: tuple[str, ...]) -> Iterable[str]:
        return self._by_layer.get(at, ())

    def has_ending(self, suffix: str) -> bool:
        at = bisect_left(self._reversed, suffix[::-1])
        return at < len(self._reversed) and self._reversed[at].startswith(suffix[::-1])

    def is_hit(self, entry: str, near: Iterable[str]) -> bool:
        """Whether `entry` matches one of `near`, which are all that it could match. Also true when the budget is spent:
        the modules that are left are then listed by their names."""
        if entry not in self._hits:
            self._hits[entry] = not self.budget.allows(entry) or any(map(Pattern(entry).match, near))
        return self._hits[entry]


def _open(parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("#" if _is_number(part) else part for part in parts)


def derive_targets(packed: Sequence[str], fp8: Sequence[str]) -> list[str]:
    """Entries that cover every module of `packed` and none of `fp8`: the usual experts' pattern if it is right."""
    match = Pattern(EXPERTS_TARGET).match
    entries: dict[str, None] = {}
    left = list(packed)
    if not any(match(module) for module in fp8) and any(match(module) for module in packed):
        entries[EXPERTS_TARGET] = None
        left = [module for module in packed if not match(module)]
    taken = _Taken(fp8, Budget([*packed, *fp8]))
    groups: dict[tuple[str, ...], list[_Name]] = {}
    for module in left:
        name = _Name.of(module)
        if name.tail and len(name.tail) <= _MAX_COMPONENTS:
            groups.setdefault(_open(name.tail[:-1]), []).append(name)
        else:
            entries[_named(module, taken)] = None
    for parent, names in groups.items():
        entries |= dict.fromkeys(_target_entries(parent, names, fp8, taken))
    return list(entries)


def _named(module: str, taken: _Taken) -> str:
    suffix = module.removeprefix("language_model.")
    entry = f"re:.*{re.escape(suffix)}$"
    if suffix != module and not taken.has_ending(suffix) and not taken.is_hit(entry, ()):
        return entry
    return _literal(module)


def _target_entries(parent: tuple[str, ...], names: Sequence[_Name], fp8: Sequence[str], taken: _Taken) -> list[str]:
    """Patterns for packed modules under one parent, e.g. `mlp.experts.#`: all layers, some layers, or one by one."""
    leaves = sorted({name.tail[-1] for name in names})
    if "experts" not in parent:  # whose members are never merged by name
        leaves = sorted({*leaves, *(_MERGED[leaf] for leaf in leaves if leaf in _MERGED)})
    tail = _expression(("0" if part == "#" else part for part in parent), exact=False) + _alternatives(leaves) + "$"
    wide = rf"re:.*\.{tail}"
    modules = [".".join((*name.head, *name.tail)) for name in names]
    if not taken.budget.allows(wide):
        return [_literal(module) for module in modules]
    rivals = [module for module in fp8 if Pattern(wide).match(module)]
    if not rivals:
        return [wide]
    mine = {name.layer for name in names}
    theirs = {_Name.of(module).layer for module in rivals}
    if not mine & theirs and None not in mine | theirs:
        start = r"re:(.*\.)?layers" if any(len(name.head) == 2 for name in names) else r"re:.*\.layers"
        if len(theirs) <= len(mine):
            entry = rf"{start}\.(?!{_alternatives(map(str, _ordered(theirs)))}\.)\d+\.{tail}"
        else:
            entry = rf"{start}\.{_alternatives(map(str, _ordered(mine)))}\.{tail}"
        if taken.budget.allows(entry) and _tells_apart(entry, modules, rivals):
            return [entry]
    return list(dict.fromkeys(entry for module in modules for entry in _exact_targets(module, taken)))


def _tells_apart(entry: str, modules: Sequence[str], rivals: Sequence[str]) -> bool:
    """A name may have two layer numbers."""
    match = Pattern(entry).match
    return all(map(match, modules)) and not any(map(match, rivals))


def _exact_targets(module: str, taken: _Taken) -> Iterator[str]:
    name = _Name.of(module)
    for leaf in (name.tail[-1], *([_MERGED[name.tail[-1]]] if _is_merged(name) else [])):
        entry = f"re:{name.layer_expression}{_expression(name.tail[:-1], True)}{re.escape(leaf)}$"
        yield _literal(module) if taken.is_hit(entry, taken.in_layer(name.at)) else entry


def _is_merged(name: _Name) -> bool:
    return "experts" not in name.tail and name.tail[-1] in _MERGED


def _ordered(layers: Iterable[int | None]) -> list[int]:
    return sorted(layer for layer in layers if layer is not None)


def _alternatives(words: Iterable[str]) -> str:
    listed = [re.escape(word) for word in words]
    if sorted(listed) == ["down_proj", "gate_proj", "up_proj"]:
        return "(gate|up|down)_proj"
    if sorted(listed) == ["down_proj", "gate_proj", "gate_up_proj", "up_proj"]:
        return "(gate|up|gate_up|down)_proj"
    return listed[0] if len(listed) == 1 else f"({'|'.join(listed)})"

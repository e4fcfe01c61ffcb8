"""Model families: from a tensor's name to what the tensor is for.

Names are split at the dots and compared component by component, never by prefix or substring: `mlp.gate` (the router)
and `mlp.gate_proj` (a linear) differ in one component, and so do `weight_scale_inv` and `weight_scale_inv_norm`.
The names decide, not the config's counts: checkpoints spell the expert count in several ways (`n_routed_experts`,
`num_experts`, `num_local_experts`), and engines find experts by name as well.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from kizami.formats.errors import KizamiError, printable

KNOWN_FAMILIES = frozenset({"glm_moe_dsa", "glm4_moe", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"})
"""model_type words whose tensor names are known from published checkpoints."""

# Another architecture or another source format under a related name: GLM-5.3-Flash mixes linear attention in, Kimi-K3
# ships MXFP4, DeepSeek-V4 renames everything and stores E8M0 `.scale` tensors.
_REFUSED = re.compile(r"glm5_next|kimi_k3.*|deepseek_v4.*")

# The last component of a tensor name; what is left of it is the module.
_PARAMETERS = frozenset({
    "weight", "bias", "weight_scale_inv", "weight_scale", "weight_packed", "weight_shape", "weight_zero_point",
    "weight_g_idx", "input_scale", "scale",
})  # fmt: skip

_ATTENTION = frozenset({"self_attn", "attention", "attn"})
_MLP = frozenset({"mlp", "block_sparse_moe", "ffn", "feed_forward", "moe"})
_SHARED = frozenset({"shared_experts", "shared_expert"})
_INDEXER = frozenset({"indexer", "indexers_proj"})
_ROUTER = frozenset({"gate", "router", "e_score_correction_bias", "shared_expert_gate", "shared_experts_gate"})
_VISION = frozenset({
    "vision_tower", "vision_model", "vision_encoder", "visual", "mm_projector", "multi_modal_projector",
    "vision_projector",
})  # fmt: skip
EMBEDDINGS = frozenset({"embed_tokens", "word_embeddings", "wte"})  # last components of names; the class is no Linear
_HEADS = frozenset({"lm_head"})
# Mixtral-style names (w1 = gate, w3 = up, w2 = down) occur in block_sparse_moe and in DeepSeek's own layout.
_PROJECTIONS = {
    "gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj", "w1": "gate_proj", "w3": "up_proj",
    "w2": "down_proj",
}  # fmt: skip
# transformers 5 in memory: gate_up_proj [E, 2I, H] and down_proj [E, H, I] in one tensor each.
_FUSED = frozenset({
    "gate_up_proj", "down_proj", "gate_proj", "up_proj", "w13", "w13_weight", "w2", "w2_weight", "w1", "w3",
    "gate_up_proj_scale_inv", "down_proj_scale_inv", "gate_up_proj_bias", "down_proj_bias",
})  # fmt: skip
_NORM = re.compile(r"(?:.*_)?norm\d*|.*layernorm\d*|enorm|hnorm|ln(?:_\w+)?", re.ASCII)

_LAYERS_SHOWN = 8

FUSED_EXPERTS = "fused_experts"
"""`Place.part` of a tensor that holds all experts of a layer at once (3-D)."""


class Role(StrEnum):
    """What a tensor is for; the unit of policy ("routed experts go to INT4") and of the size tables."""

    ROUTED_EXPERT = "routed_expert"
    SHARED_EXPERT = "shared_expert"
    DENSE_MLP = "dense_mlp"
    ATTENTION = "attention"
    INDEXER = "indexer"
    ROUTER = "router"
    MTP = "mtp"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    VISION = "vision"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor sits.

    `part` is the module inside its parent: `gate_proj`, `up_proj`, `down_proj` for every spelling of the three (w1, w3,
    w2 included), else the name as it stands (`kv_b_proj`, `eh_proj`, `rotary_emb.inv_freq`), FUSED_EXPERTS for 3-D
    experts. `layer` is the index in the name (for `mtp.<i>` names num_hidden_layers + i). `in_mtp` says that the
    tensor belongs to a next-token layer, whatever its role.
    """

    role: Role
    part: str
    layer: int | None = None
    expert: int | None = None
    in_mtp: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A model as its config and its names describe it.

    `text_config` is the dict with the language model's numbers (the top level, or `text_config` of a vision model),
    `num_layers` its num_hidden_layers, `mtp_layers` the sorted indices of next-token layers found in the names,
    `prefix` what stands before `model.` or `layers.` (`language_model.` in Kimi-K2.5).
    """

    name: str
    known: bool
    text_config: Mapping[str, Any]
    num_layers: int | None
    prefix: str = ""
    mtp_layers: tuple[int, ...] = ()

    def place(self, name: str) -> Place:
        """The place of a tensor (`...gate_proj.weight`) or of a module (`...gate_proj`)."""
        parts = name.split(".")
        if len(parts) > 1 and parts[-1] in _PARAMETERS:
            parts.pop()
        at = _layer_at(parts)
        head = parts if at is None else parts[:at]
        if not _VISION.isdisjoint(head):
            return Place(Role.VISION, parts[-1])
        if at is not None:
            index = int(parts[at + 1])
            if "mtp" in head:
                return self._in_layer(parts[at + 2 :], self._mtp_index(index), True)
            return self._in_layer(parts[at + 2 :], index, self._is_mtp(index))
        if "mtp" in parts[:-1]:
            return self._in_mtp_module(parts[parts.index("mtp") + 1 :])
        return self._generic_expert(parts) or _outside_layers(parts)

    def _is_mtp(self, layer: int) -> bool:
        if self.num_layers is not None:
            return layer >= self.num_layers
        at = bisect_left(self.mtp_layers, layer)  # a hostile checkpoint has very many
        return self.mtp_layers[at : at + 1] == (layer,)

    def _mtp_index(self, index: int) -> int | None:
        return None if self.num_layers is None else self.num_layers + index

    def _in_mtp_module(self, rest: list[str]) -> Place:
        """`mtp.0.ffn.experts.0.w1` (DeepSeek's own layout) and `mtp.fc`, `mtp.norm`."""
        if _is_index(rest[0]) and len(rest) > 1:
            return self._in_layer(rest[1:], self._mtp_index(int(rest[0])), True)
        return self._in_layer(rest, None, True)

    def _in_layer(self, rest: list[str], layer: int | None, in_mtp: bool) -> Place:
        role, part, expert = _role_in_layer(tuple(rest)) if rest else (Role.OTHER, "", None)
        if role is Role.OTHER and not self.known and (found := self._generic_expert(rest)):
            role, part, expert = found.role, found.part, found.expert
        if role is Role.OTHER and in_mtp and rest and part in {"fc", "e_proj", "h_proj"}:
            role = Role.MTP  # the same job as eh_proj under the names of other publishers
        return Place(role, part, layer, expert, in_mtp)

    def _generic_expert(self, parts: list[str]) -> Place | None:
        """The rule for unknown families: `experts.<int>.` anywhere."""
        if self.known:
            return None
        for i in range(len(parts) - 2):
            if parts[i] == "experts" and _is_index(parts[i + 1]):
                layer = next((int(p) for p in parts[:i] if _is_index(p)), None)
                return Place(Role.ROUTED_EXPERT, _projection(parts[i + 2 :]), layer, int(parts[i + 1]))
        return None


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 6


def _layer_at(parts: list[str]) -> int | None:
    """Position of the first `layers.<int>`."""
    if "layers" not in parts:  # in C, as `index` is: this is asked of every name several times
        return None
    for i in range(parts.index("layers"), len(parts) - 1):
        if parts[i] == "layers" and _is_index(parts[i + 1]):
            return i
    return None


def _projection(rest: Sequence[str]) -> str:
    return _PROJECTIONS.get(rest[0], rest[0]) if len(rest) == 1 else ".".join(rest)


@lru_cache(maxsize=1 << 14)  # what stands in one layer stands in all of them; Kimi-K2 has 1,200 such names
def _role_in_layer(rest: tuple[str, ...]) -> tuple[Role, str, int | None]:
    """Role, part and expert of the components after `layers.<i>.` (parameter word already cut off)."""
    first, leaf = rest[0], rest[-1]
    if first in _MLP:
        return _role_in_mlp(rest[1:])
    if first == "shared_head":
        return (Role.HEAD if rest[1:] == ("head",) else Role.NORM if leaf == "norm" else Role.OTHER), leaf, None
    if _NORM.fullmatch(leaf):
        return Role.NORM, leaf, None
    if first in _ATTENTION and len(rest) > 1:
        role = Role.INDEXER if rest[1] in _INDEXER else Role.ATTENTION
        return role, ".".join(rest[2:] if rest[1] == "indexer" and len(rest) > 2 else rest[1:]), None
    if first in _INDEXER:
        return Role.INDEXER, leaf, None
    if rest == ("eh_proj",):
        return Role.MTP, leaf, None
    if len(rest) == 1 and first in EMBEDDINGS:
        return Role.EMBEDDING, leaf, None
    return Role.OTHER, ".".join(rest), None


def _role_in_mlp(rest: tuple[str, ...]) -> tuple[Role, str, int | None]:
    if not rest:
        return Role.OTHER, "", None
    first = rest[0]
    if first == "experts" and len(rest) > 1:
        if _is_index(rest[1]) and len(rest) > 2:
            return Role.ROUTED_EXPERT, _projection(rest[2:]), int(rest[1])
        if rest[1] in _FUSED:
            return Role.ROUTED_EXPERT, FUSED_EXPERTS, None
    if first in _SHARED and len(rest) > 1:
        return Role.SHARED_EXPERT, _projection(rest[1:]), None
    if first in _ROUTER:
        return Role.ROUTER, rest[-1], None
    if _NORM.fullmatch(rest[-1]):
        return Role.NORM, rest[-1], None
    if len(rest) == 1 and (first in _PROJECTIONS or first == "gate_up_proj"):
        return Role.DENSE_MLP, _projection(rest), None
    return Role.OTHER, ".".join(rest), None


def _outside_layers(parts: list[str]) -> Place:
    leaf = parts[-1]
    if leaf in EMBEDDINGS:
        return Place(Role.EMBEDDING, leaf)
    if leaf in _HEADS:
        return Place(Role.HEAD, leaf)
    if _NORM.fullmatch(leaf):
        return Place(Role.NORM, leaf)
    return Place(Role.OTHER, leaf)


def find_family(config: Mapping[str, Any], names: Iterable[str]) -> tuple[Family, tuple[str, ...]]:
    """The family of a checkpoint from its config.json and its tensor names, with warnings for the user.

    Raises KizamiError: `unsupported_model` for architectures that would come out wrong, `bad_config` for a
    `model_type`, `text_config` or layer count that is not what config.json may hold.
    """
    top = _model_type(config, "model_type")
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise _bad_config("text_config", text, "an object")
    if top == "kimi_k25" and text is None:
        raise _bad_config("text_config", text, "an object (model_type kimi_k25 keeps its numbers there)")
    inner = _model_type(text, "text_config.model_type") if text else None
    for found in (top, inner):
        if found is not None and _REFUSED.fullmatch(found):
            raise KizamiError(
                f'model_type "{found}" is not supported: its layers or its tensor format are not those of '
                f"{', '.join(sorted(KNOWN_FAMILIES))}",
                code="unsupported_model",
                file="config.json",
            )
    text_config: Mapping[str, Any] = text if text and "num_hidden_layers" in text else config
    layers = _count(text_config, "num_hidden_layers")
    nextn = _count(text_config, "num_nextn_predict_layers")
    known = top in KNOWN_FAMILIES or (top is None and inner in KNOWN_FAMILIES)
    facts = _scan(names)
    if layers is None:
        mtp = facts.joined_layers
    else:
        mtp = frozenset(i for i in facts.layers if i >= layers) | {layers + i for i in facts.mtp_indices}
    family = Family(top or inner or "", known, text_config, layers, facts.prefix, tuple(sorted(mtp)))
    return family, tuple(_warnings(family, facts, nextn))


@dataclass(frozen=True, slots=True)
class _NameFacts:
    layers: frozenset[int]
    joined_layers: frozenset[int]  # layers with an eh_proj: next-token layers whatever the config says
    mtp_indices: frozenset[int]  # i of `mtp.<i>.` and `mtp.layers.<i>.`
    prefix: str
    experts: bool


def _scan(names: Iterable[str]) -> _NameFacts:
    layers: set[int] = set()
    joined: set[int] = set()
    prefixes: Counter[str] = Counter()
    indices: set[int] = set()
    experts = False
    for name, count in Counter(map(_telling, names)).items():
        parts = name.split(".")
        at = _layer_at(parts)
        experts = experts or "experts" in parts
        head = parts[:at]
        if "mtp" in head:
            number = parts[parts.index("mtp") + 1 if at is None else at + 1 :][:1]
            indices |= {int(n) for n in number if _is_index(n)}
            continue
        if at is None or not _VISION.isdisjoint(head):
            continue
        layer = int(parts[at + 1])
        layers.add(layer)
        prefixes["".join(word + "." for word in (head[:-1] if head[-1:] == ["model"] else head))] += count
        if len(parts) > at + 2 and parts[at + 2] == "eh_proj":
            joined.add(layer)
    prefix = max(prefixes, key=lambda p: (prefixes[p], p), default="")
    return _NameFacts(frozenset(layers), frozenset(joined), frozenset(indices), prefix, experts)


def _telling(name: str) -> str:
    """The part of a name that `_scan` learns from: of 118,000 names of experts' tensors, 76 are left."""
    head, experts, tail = name.partition(".experts.")
    return name if not experts or "layers" in tail or "mtp" in tail else f"{head}.experts"


def _warnings(family: Family, facts: _NameFacts, nextn: int | None) -> Iterable[str]:
    if not family.known:
        yield (
            f'model_type "{printable(family.name) or "(none)"}" is not one kizami knows '
            f"({', '.join(sorted(KNOWN_FAMILIES))}): the generic rule applies. Routed experts are the 2-D weights "
            "named `...experts.<number>....weight`; everything else stays as it is in the default scheme. "
            "Check the plan before converting."
        )
    if not facts.experts:
        yield "no tensor is named `...experts...`: this looks like a model without routed experts"
    if family.num_layers is None:
        yield (
            "config.json has no num_hidden_layers: next-token (MTP) layers are recognised by their eh_proj alone "
            f"({_listed(family.mtp_layers)} found)"
        )
        return
    beyond = [i for i in family.mtp_layers if i >= family.num_layers + (nextn or 0)]
    if beyond:
        yield (
            f"layers {_listed(beyond)} lie beyond num_hidden_layers {family.num_layers} + num_nextn_predict_layers "
            f"{nextn or 0}; they are treated as next-token (MTP) layers"
        )


def _listed(layers: Sequence[int]) -> str:
    """`[78]`, `none`, and no more than a few of very many."""
    more = f" and {len(layers) - _LAYERS_SHOWN} more" if len(layers) > _LAYERS_SHOWN else ""
    return f"{list(layers[:_LAYERS_SHOWN]) or 'none'}{more}"


def _model_type(config: Mapping[str, Any], key: str) -> str | None:
    value = config.get("model_type")
    if value is not None and not isinstance(value, str):
        raise _bad_config(key, value, "a string")
    return value


def _count(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < 100_000:
        raise _bad_config(key, value, "a whole number from 0 to 99999")
    return value


def _bad_config(key: str, found: object, expected: str) -> KizamiError:
    text = printable(repr(found), 80)
    return KizamiError(f"{key} is {text}, expected {expected}", code="bad_config", file="config.json")

"""What an engine builds from a module of the checkpoint: its runtime name, its class, and what it is merged with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from kizami.formats.engines.finding import EngineName
from kizami.formats.engines.matching import Entries, Fused
from kizami.formats.engines.parts import Part
from kizami.formats.families import Family

Split = Literal["rows", "cols", "whole"]
Attention = Literal["mla", "gqa"]

_GATE_UP = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
_QKV = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}

MEMBERS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_CLASSES = {
    "gate_up_proj": "MergedColumnParallelLinear",
    "qkv_proj": "QKVParallelLinear",
    "fused_qkv_a_proj": "DeepSeekV2FusedQkvAProjLinear",
    "fused_qkv_a_proj_with_mqa": "ReplicatedLinear",
    "q_a_proj": "ReplicatedLinear",
    "kv_a_proj_with_mqa": "ReplicatedLinear",
    "wq_b": "ReplicatedLinear",
    "down_proj": "RowParallelLinear",
    "o_proj": "RowParallelLinear",
}


class Engine(Protocol):
    """How one engine names and matches. `moe_class`: the class that holds a layer's experts."""

    @property
    def name(self) -> EngineName: ...

    @property
    def moe_class(self) -> str: ...

    def runtime(self, module: str, family: Family) -> str:
        """The runtime name of a module that is merged with nothing."""

    def fused(self, attention: Attention, extra: Fused) -> Fused:
        """The merged names that matching expands to their members."""

    def entry(self, entry: str) -> str:
        """An entry of `ignore` or `targets` after the engine's name mapper."""

    def ignores(self, ignore: Entries, name: str, fused: Fused) -> bool: ...

    def target(self, targets: Entries, name: str, kind: str, fused: Fused) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Merging:
    """Which members the model class merges, and into what."""

    into: Mapping[str, str]

    @staticmethod
    def of(engine: EngineName, attention: Attention, has_q_lora: bool) -> "Merging":
        if engine == "transformers":
            return Merging({})
        into = dict(_GATE_UP)
        if attention == "gqa":
            into |= _QKV
        elif has_q_lora:
            a = "fused_qkv_a_proj_with_mqa" if engine == "sglang" else "fused_qkv_a_proj"
            into |= {"q_a_proj": a, "kv_a_proj_with_mqa": a}
        return Merging(into)

    def name(self, runtime: str) -> str:
        parent, dot, leaf = runtime.rpartition(".")
        return parent + dot + self.into.get(leaf, leaf)


def class_of(leaf: str, engine: EngineName) -> str:
    return "Linear" if engine == "transformers" else _CLASSES.get(leaf, "ColumnParallelLinear")


def split_of(leaf: str) -> Split:
    """How tensor parallelism cuts a linear of this name."""
    kind = _CLASSES.get(leaf, "ColumnParallelLinear")
    if kind == "RowParallelLinear":
        return "cols"
    return "whole" if kind in ("ReplicatedLinear", "DeepSeekV2FusedQkvAProjLinear") else "rows"


def leaf_of(part: Part) -> str:
    return part.name.rpartition(".")[2]


def without_layers_quirk(name: str) -> str:
    """`language_model.layers.` is read as `language_model.model.layers.` by both engines (models/kimi_k25.py)."""
    if name.startswith("language_model.layers."):
        return "language_model.model." + name.removeprefix("language_model.")
    return name


def next_token_layer(name: str, family: Family) -> tuple[str, str] | None:
    """(`model.layers.78.`, the rest) of a module in a next-token layer."""
    layer = family.num_layers
    for head in (f"{family.prefix}model.layers.{layer}.", f"model.layers.{layer}."):
        if layer is not None and name.startswith(head):
            return head, name.removeprefix(head)
    return None

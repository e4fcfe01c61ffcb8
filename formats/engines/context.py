"""What rules look at: the checkpoint as one engine would build it, at one degree of parallelism."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kizami.formats.engines.finding import READ, EngineName
from kizami.formats.engines.matching import Fused
from kizami.formats.engines.naming import (
    Attention,
    Engine,
    Merging,
    Split,
    class_of,
    leaf_of,
    split_of,
)
from kizami.formats.engines.parts import Part, find_parts
from kizami.formats.engines.quantization import Group, Quantization, read_quantization
from kizami.formats.engines.resolve import Scheme, Trouble, resolver
from kizami.formats.engines.served import Served
from kizami.formats.engines.sglang import Sglang
from kizami.formats.engines.transformers import Transformers
from kizami.formats.engines.vllm import Vllm
from kizami.formats.families import EMBEDDINGS, Family, Place, Role, find_family

_ENGINES: Mapping[EngineName, Engine] = {"sglang": Sglang(), "vllm": Vllm(), "transformers": Transformers()}

# Never quantized by SGLang and vLLM, whatever the config says: parameters, nn.Linear and fused BF16 matrices.
PLAIN_ROLES = frozenset({Role.EMBEDDING, Role.HEAD, Role.NORM, Role.ROUTER, Role.VISION, Role.MTP})
FUSED_INDEXER = ("wk", "weights_proj")
_TOO_MANY = 1 << 40
Signature = frozenset[tuple[str, str, tuple[int, ...]]]  # of a module: leaf, dtype and shape of each tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear of the running model: `name` and `kind` (class) as the engine has them, with its members' modules."""

    name: str
    kind: str
    leaf: str
    parts: tuple[Part, ...]
    scheme: Scheme
    split: Split

    @property
    def place(self) -> Place:
        return self.parts[0].place


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a layer: expert -> projection -> module."""

    name: str
    place: Place
    by_expert: Mapping[int, Mapping[str, Part]]
    scheme: Scheme

    @property
    def first(self) -> Part:
        return next(iter(self.by_expert[min(self.by_expert)].values()))

    def parts(self) -> Iterator[Part]:
        for projections in self.by_expert.values():
            yield from projections.values()


@dataclass(frozen=True)
class Model:
    """A checkpoint, read once for all engines."""

    served: Served
    family: Family
    quant: Quantization | None
    parts: Mapping[str, Part]

    @staticmethod
    def of(served: Served) -> "Model":
        family, _ = find_family(served.config, served.tensors)
        return Model(served, family, read_quantization(served.config), find_parts(served.tensors, family))

    @cached_property
    def outside_experts(self) -> tuple[Part, ...]:
        """All but the routed experts, which are nearly all."""
        return tuple(part for part in self.parts.values() if part.place.role is not Role.ROUTED_EXPERT)

    @cached_property
    def experts_by_kind(self) -> tuple[Part, ...]:
        """One of the routed experts of each kind: what a rule says of a name's end, forms and shapes holds for all of
        a kind, which differ in layer and number."""
        kinds: dict[tuple[str, bool, Any], Part] = {}
        for name, signature in self.signatures.items():
            part = self.parts[name]
            kinds.setdefault((leaf_of(part), part.place.in_mtp, signature), part)
        return tuple(kinds.values())

    def suspects(self, look: Callable[[Part], bool]) -> Iterator[Part]:
        """Parts of which `look` is true, in order; look may not ask for layer or number. Kinds are asked first, so that
        a sound model of 58,000 experts costs as little as its rest."""
        is_sound = not any(map(look, self.experts_by_kind))
        return filter(look, self.outside_experts if is_sound else self.parts.values())

    @cached_property
    def signatures(self) -> Mapping[str, Signature]:
        """What must be equal among the experts of a layer, by module. Equal ones are one object."""
        known: dict[Signature, Signature] = {}
        experts = (part for part in self.parts.values() if part.place.role is Role.ROUTED_EXPERT)
        found = ((part.name, _signature(part)) for part in experts)
        return {name: known.setdefault(signature, signature) for name, signature in found}

    @cached_property
    def attention(self) -> Attention:
        is_mla = any(part.place.part == "kv_b_proj" for part in self.parts.values())
        return "mla" if is_mla or self.number("kv_lora_rank") else "gqa"

    def number(self, *keys: str) -> int | None:
        """The first of `keys` that the text config (or the top level) has as a whole number of a likely size."""
        for key in keys:
            for holder in (self.family.text_config, self.served.config):
                if type(value := holder.get(key)) is int and 0 <= value < _TOO_MANY:
                    return value
        return None

    @cached_property
    def dtype(self) -> str:
        """The model's dtype as safetensors spells it; BF16 if the config does not say."""
        for holder in (self.family.text_config, self.served.config):
            for key in ("torch_dtype", "dtype"):
                word = holder.get(key)
                if isinstance(word, str):
                    return {"float16": "F16", "float32": "F32"}.get(word.removeprefix("torch."), "BF16")
        return "BF16"

    @cached_property
    def layers(self) -> Mapping[int, tuple[Part, ...]]:
        """Modules by layer, experts and vision left out."""
        found: dict[int, list[Part]] = {}
        for part in self.outside_experts:
            place = part.place
            if place.layer is not None and place.role is not Role.VISION:
                found.setdefault(place.layer, []).append(part)
        return {layer: tuple(parts) for layer, parts in found.items()}

    @cached_property
    def expert_layers(self) -> Mapping[str, Mapping[int, Mapping[str, Part]]]:
        """`...mlp.experts` -> expert -> projection, as the names have them."""
        found: dict[str, dict[int, dict[str, Part]]] = {}
        for part in self.parts.values():
            if part.place.role is Role.ROUTED_EXPERT and part.place.expert is not None:
                parent, number, leaf = _cut_expert(part.name, part.place.expert)
                if parent:
                    found.setdefault(parent, {}).setdefault(number, {})[leaf] = part
        return found


def _signature(part: Part) -> Signature:
    return frozenset([(leaf, info.dtype, info.shape) for leaf, info in part.leaves.items()])


def _cut_expert(name: str, expert: int) -> tuple[str, int, str]:
    parent, _, leaf = name.rpartition(f".{expert}.")
    if parent.endswith(".experts") and "." not in leaf:  # as published; the loop below finds it, too
        return parent, expert, leaf
    components = name.split(".")
    for i in range(len(components) - 2, 0, -1):
        if components[i - 1] == "experts" and components[i].isdigit() and int(components[i]) == expert:
            return ".".join(components[:i]), expert, ".".join(components[i + 1 :])
    return "", expert, ""


@dataclass(frozen=True)
class Context:
    """One engine and version, and tp, ep and pp."""

    model: Model
    engine: EngineName
    version: str = ""
    tp: int = 1
    ep: int = 1
    pp: int = 1
    _built: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # shared by `at`

    def __post_init__(self) -> None:
        if not self.version:
            object.__setattr__(self, "version", READ[self.engine])

    def at(self, tp: int, ep: int, pp: int = 1) -> "Context":
        return replace(self, tp=tp, ep=ep, pp=pp)

    @property
    def moe_tp(self) -> int:
        return max(1, self.tp // self.ep)

    @property
    def quant(self) -> Quantization | None:
        return self.model.quant

    @property
    def family(self) -> Family:
        return self.model.family

    @property
    def rules(self) -> Engine:
        return _ENGINES[self.engine]

    @property
    def fused(self) -> Fused:
        extra = self.quant.raw.get("packed_modules_mapping") if self.quant else None
        words = extra.items() if isinstance(extra, dict) else ()
        known = {
            key: tuple(value)
            for key, value in words
            if key and isinstance(value, list) and value and all(isinstance(word, str) for word in value)
        }
        return self.rules.fused(self.model.attention, known)

    @property
    def is_modelled(self) -> bool:
        """Whether the way from config to scheme is known for this quant_method."""
        return resolver(self.quant, self.rules, self.fused) is not None

    def vision_scheme(self, module: str) -> Scheme:
        """What the config gives to a linear of the vision tower, where the engine would ask."""
        if "resolver" not in self._built:
            self._built["resolver"] = resolver(self.quant, self.rules, self.fused)
        resolve = self._built["resolver"]
        scheme: Scheme = resolve.linear(module, "Linear") if resolve else None
        return scheme

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self._structure[0]

    @property
    def experts(self) -> tuple[Experts, ...]:
        return self._structure[1]

    @property
    def modules(self) -> tuple[Linear | Experts, ...]:
        return (*self.linears, *self.experts)

    @property
    def _structure(self) -> tuple[tuple[Linear, ...], tuple[Experts, ...]]:
        if "structure" not in self._built:
            self._built["structure"] = _build(self)
        built: tuple[tuple[Linear, ...], tuple[Experts, ...]] = self._built["structure"]
        return built


def _build(context: Context) -> tuple[tuple[Linear, ...], tuple[Experts, ...]]:
    model, engine, family = context.model, context.rules, context.family
    resolve = resolver(model.quant, engine, context.fused)
    merging = Merging.of(engine.name, model.attention, bool(model.number("q_lora_rank")))
    members: dict[str, list[Part]] = {}
    for part in model.outside_experts:
        if _is_linear(part, engine.name):
            members.setdefault(merging.name(engine.runtime(part.name, family)), []).append(part)
    linears = []
    for name, parts in members.items():
        leaf = name.rpartition(".")[2]
        kind = class_of(leaf, engine.name)
        scheme = resolve.linear(name, kind) if resolve else None
        linears.append(Linear(name, kind, leaf, tuple(parts), scheme, split_of(leaf)))
    experts = []
    for parent, by_expert in model.expert_layers.items():
        first = next(iter(by_expert[min(by_expert)].values()))
        if engine.name == "transformers" and first.place.in_mtp:
            continue  # never loaded there
        runtime = engine.runtime(parent, family)
        experts.append(Experts(runtime, first.place, by_expert, resolve.experts(runtime) if resolve else None))
    return tuple(linears), tuple(experts)


def _is_linear(part: Part, engine: EngineName) -> bool:
    place = part.place
    if part.form == "none":
        return False
    if part.form in ("plain", "fp8", "int8") and part.shape() is None:
        return False
    if engine == "transformers":
        embeds = place.role in (Role.EMBEDDING, Role.NORM, Role.ROUTER, Role.VISION) or leaf_of(part) in EMBEDDINGS
        return not embeds and not place.in_mtp
    if place.role in PLAIN_ROLES or leaf_of(part) in EMBEDDINGS:
        return False
    return not (place.role is Role.INDEXER and leaf_of(part) in FUSED_INDEXER)


def as_group(scheme: Scheme) -> Group | None:
    """The group of a module that gets one."""
    return None if scheme is None or isinstance(scheme, Trouble) else scheme

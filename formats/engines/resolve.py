"""The scheme that a config gives to one runtime module, by each quant_method that the rules know."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kizami.formats.engines.matching import Disagreement, Entries, Fused, Patterns
from kizami.formats.engines.naming import MEMBERS, Engine
from kizami.formats.engines.quantization import Args, Group, Quantization
from kizami.formats.foreign import bad_config

EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")  # both engines look at those of expert 0


@dataclass(frozen=True, slots=True)
class Trouble:
    """The engine raises while it builds this module."""

    message: str


Scheme = Group | Trouble | None  # None: unquantized


class Resolver(Protocol):
    def linear(self, name: str, kind: str) -> Scheme: ...

    def experts(self, name: str) -> Scheme:
        """`name`: that of the module that holds a layer's experts."""


def resolver(quant: Quantization | None, engine: Engine, fused: Fused) -> Resolver | None:
    """None for a method whose matching was not modelled."""
    if quant is None:
        return _Plain()
    if quant.is_compressed_tensors:
        return _CompressedTensors(quant, engine, fused)
    if engine.name == "transformers":
        return None
    if quant.method == "fp8":
        return _Fp8(quant, engine, fused)
    if quant.method == "w4afp8":
        return _W4AFp8()
    if quant.method in ("gptq", "gptq_marlin"):
        return _Gptq(quant)
    return _Awq(quant) if quant.method in ("awq", "awq_marlin") else None


class _Plain:
    def linear(self, name: str, kind: str) -> Scheme:
        return None

    def experts(self, name: str) -> Scheme:
        return None


class _CompressedTensors:
    def __init__(self, quant: Quantization, engine: Engine, fused: Fused) -> None:
        patterns = Patterns()
        self._engine, self._fused = engine, fused
        self._map = {engine.entry(target): group for group in quant.groups for target in group.targets}
        self._ignore = Entries([engine.entry(entry) for entry in quant.ignore], patterns)
        self._targets = Entries(list(self._map), patterns)
        # `_add_fused_moe_to_target_scheme_map` of both engines.
        moe = dict(self._map)
        if "Linear" in moe:
            moe.setdefault(engine.moe_class, moe["Linear"])
        self._moe, self._moe_targets = moe, Entries(list(moe), patterns)
        # SG: a top-level key that turns every linear into block FP8, whatever `ignore` says.
        special = quant.raw.get("linear_fp8_config") if engine.name == "sglang" else None
        self._all_linears = None if special is None else _fp8_group(special, f"{quant.path}.linear_fp8_config")

    def linear(self, name: str, kind: str) -> Scheme:
        if self._all_linears is not None:
            return self._all_linears
        return self._scheme(name, kind, self._targets, self._map)

    def experts(self, name: str) -> Scheme:
        found = [
            self._scheme(f"{name}.0.{projection}", self._engine.moe_class, self._moe_targets, self._moe)
            for projection in EXPERT_PROJECTIONS
        ]
        trouble = next((scheme for scheme in found if isinstance(scheme, Trouble)), None)
        if trouble is not None:
            return trouble
        first = found[0]
        if not all(_same(scheme, first) for scheme in found):
            return Trouble("gate, up and down of expert 0 get different schemes")
        return first

    def _scheme(self, name: str, kind: str, targets: Entries, groups: Mapping[str, Group]) -> Scheme:
        try:
            if self._engine.ignores(self._ignore, name, self._fused):
                return None
        except Disagreement:
            members = ", ".join(MEMBERS.get(name.rpartition(".")[2], ()))
            return Trouble(f"some of {members} are in ignore, and some are not")
        if not groups:
            return None
        target = self._engine.target(targets, name, kind, self._fused)
        if target is not None:
            return groups[target]
        if self._engine.name == "sglang":
            return Trouble("is neither in ignore nor a target")
        return None


def _same(one: Scheme, other: Scheme) -> bool:
    if isinstance(one, Group) and isinstance(other, Group):
        return (one.weights, one.inputs, one.format) == (other.weights, other.inputs, other.format)
    return one == other


_MAX_LISTED = 10_000  # names that are compared one by one; a real list has a few hundred

_FP8 = Args(8, "float", "tensor", None, True, False, None, None)


def _fp8_group(raw: Any, where: str) -> Group:
    if not isinstance(raw, dict):
        raise bad_config(where, raw, "an object")
    sizes = raw.get("weight_block_size")
    if sizes is None:
        return Group("fp8", (), _FP8, None, None)
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and 0 < n <= 1 << 20 for n in sizes):
        raise bad_config(f"{where}.weight_block_size", sizes, "two positive numbers")
    return Group("fp8", (), replace(_FP8, strategy="block", block=(sizes[0], sizes[1])), None, None)


class _Fp8:
    """quant_method fp8: all linears but those of modules_to_not_convert."""

    def __init__(self, quant: Quantization, engine: Engine, fused: Fused) -> None:
        self._group = _fp8_group(quant.raw, quant.path)
        names = quant.names("ignored_layers", "modules_to_not_convert")
        self._sglang = engine.name == "sglang"
        if self._sglang:  # with and without `model.` (layers/quantization/fp8.py)
            bare = {name.removeprefix("model.") for name in names}
            self._skipped = frozenset(bare | {f"model.{name}" for name in bare})
            self._fused: Fused = dict(fused) | {name: MEMBERS[name] for name in ("qkv_proj", "gate_up_proj")}
        else:
            self._skipped = frozenset(engine.entry(name) for name in names)
            self._fused = fused
        # A list of every expert comes down to one name per layer: nothing longer is ever asked.
        cut = {re.sub(r"(\bexperts)\.\d+\..*", r"\1", name) for name in self._skipped if "experts" in name}
        self._expert_names = sorted(cut)[:_MAX_LISTED]

    def linear(self, name: str, kind: str) -> Scheme:
        leaf = name.rpartition(".")[2]
        if leaf in self._fused and not (not self._sglang and name in self._skipped):
            answers = {self._is_skipped(name.replace(leaf, member)) for member in self._fused[leaf]}
            if len(answers) > 1:
                return Trouble(
                    f"some of {', '.join(self._fused[leaf])} are in modules_to_not_convert, and some are not"
                )
            skipped = answers.pop()
        elif "experts" in name:
            return self.experts(name)
        else:
            skipped = self._is_skipped(name)
        return None if skipped else self._group

    def experts(self, name: str) -> Scheme:
        """Also shared ones, where they are merged with nothing: a name that is part of a longer one counts."""
        skipped = self._is_skipped(name) or any(name in listed for listed in self._expert_names)
        return None if skipped else self._group

    def _is_skipped(self, name: str) -> bool:
        """vLLM: equal. SGLang: any run of whole components (`_module_path_match`)."""
        if name in self._skipped:
            return True
        if not self._sglang:
            return False
        parts = name.split(".")
        runs = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        return any(run in self._skipped for run in runs)


class _W4AFp8:
    """SGLang's own: linears block FP8, experts two nibbles a byte (layers/quantization/w4afp8.py)."""

    def linear(self, name: str, kind: str) -> Scheme:
        return Group("linears", (), replace(_FP8, strategy="block", block=(128, 128)), None, None)

    def experts(self, name: str) -> Scheme:
        return Group("experts", (), Args(4, "int", "group", 128, True, False, None, None), _FP8, "w4afp8")


class _Gptq:
    """`dynamic` is matched against runtime names. (vLLM also leaves out what has no integer tensor.)"""

    def __init__(self, quant: Quantization) -> None:
        self._bits = quant.whole("bits") or 4
        self._size = quant.whole("group_size") or 128
        dynamic = quant.raw.get("dynamic")
        if dynamic is not None and not isinstance(dynamic, dict):
            raise bad_config(f"{quant.path}.dynamic", dynamic, "an object")
        self._dynamic = list(dynamic or ())
        self._patterns = Patterns()

    def linear(self, name: str, kind: str) -> Scheme:
        for key in self._dynamic:
            if self._patterns.match(re.sub(r"^[-+]:", "", key), name):
                return None if key.startswith("-:") else self.experts(name)
        return self.experts(name)

    def experts(self, name: str) -> Scheme:
        strategy = "channel" if self._size == -1 else "group"
        return Group("gptq", (), Args(self._bits, "int", strategy, self._size, True, False, None, None), None, "gptq")


class _Awq:
    """modules_to_not_convert: substrings of the runtime name (SG: awq/awq.py `is_layer_skipped_awq`)."""

    def __init__(self, quant: Quantization) -> None:
        self._size = quant.whole("group_size", "q_group_size") or 128
        self._bits = quant.whole("bits", "w_bit") or 4
        self._skipped = quant.names("modules_to_not_convert")[:_MAX_LISTED]

    def linear(self, name: str, kind: str) -> Scheme:
        if any(word in name for word in self._skipped):
            return None
        return Group("awq", (), Args(self._bits, "int", "group", self._size, False, False, None, None), None, "awq")

    def experts(self, name: str) -> Scheme:
        return self.linear(name, "")

"""What a checkpoint itself says of its KV cache, layer by layer: bounds from its weights, and scales that it brings.

A few MB per layer are read, a matrix at a time; never a whole shard.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.dialects import Dialect, ScaledWeight, find_encoded_weights
from kizami.formats.errors import printable
from kizami.formats.families import Family
from kizami.formats.fused_experts import split_fused_experts
from kizami.formats.kv_scales.tensors import find_prefix
from kizami.formats.reader import TensorReader
from kizami.formats.serving.model import ServedModel
from kizami.formats.tensors import TensorInfo
from kizami.quantize.buffers import Buffers
from kizami.quantize.decode import float32_weight
from kizami.quantize.kv_scales.carried import FLOATS, Carried, floats, is_scale_of_attention, layer_scales
from kizami.quantize.kv_scales.certificate import (
    F64,
    Bound,
    linear_bound,
    norm_bound,
    rope_factor,
    rotated_linear_bound,
    rotated_norm_bound,
)
from kizami.quantize.kv_scales.known_classes import KNOWN_CLASSES, KNOWN_MODULES, KnownClass
from kizami.quantize.kv_scales.rule import E4M3_MAX
from kizami.quantize.plan import Step
from kizami.quantize.source_rows import SOURCE_VIEWS, opened, read_scales

# SGLang's and vLLM's QKVParallelLinear and fused_qkv_a_proj_with_mqa
FUSED = (("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
# An engine that makes FP8 of weights as it loads them (--quantization fp8) has one scale for what it fuses, which a
# projection may set that is not read here. Weights of up to this are reckoned with; real ones stay below 10.
LARGEST_PLAIN_WEIGHT = 100.0
MAX_WEIGHTS = 1 << 28  # of one matrix: the largest known K projection has 2^23


@dataclass(frozen=True, slots=True)
class LayerSource:
    """bounds: latent and k_pe, or k and v."""

    layer: int
    in_mtp: bool
    bounds: tuple[Bound, ...]
    carried: Carried | None


def read_layers(checkpoint: Checkpoint, family: Family, model: ServedModel) -> tuple[LayerSource, ...]:
    """Every layer of the model and every next-token layer that the names have, in order.

    KizamiError "bad_kv_scale" for a KV scale of 0, NaN, infinity or below 0; those of TensorReader and the dialects.
    """
    tensors, _ = split_fused_experts(checkpoint.config, checkpoint.tensors)
    whole = replace(checkpoint, tensors=tensors)
    dialect = find_encoded_weights(whole.config, tensors)
    modules = attention_names(family, tensors)
    layers = (*range(model.layers), *(layer for layer in family.mtp_layers if layer >= model.layers))
    with TensorReader(whole) as reader:
        source = _Source(family, model, dialect, reader, tensors)
        return tuple(
            LayerSource(
                layer,
                layer >= model.layers,
                source.bounds(modules.get(layer, {})),
                source.carried(modules.get(layer, {})),
            )
            for layer in layers
        )


def attention_names(family: Family, tensors: Mapping[str, TensorInfo]) -> dict[int, dict[str, str]]:
    """Layer -> what follows `layers.N.`, `self_attn.` cut off -> the tensor's whole name; of the language model and
    the next-token layers behind it."""
    found: dict[int, dict[str, str]] = {}
    prefix = find_prefix(tensors)
    for name in tensors:
        head, attention, rest = name.partition(".self_attn.")
        if rest.startswith("input_layernorm."):  # of the attention's own, which no class has; not the layer's
            rest = f"an {rest}"
        if not attention:
            head, norm, rest = name.partition(".input_layernorm.")
            rest = f"input_layernorm.{rest}"
            if not norm:
                continue
        layer = family.place(name).layer
        if layer is None or head != f"{prefix}{layer}":  # a deeper name, a vision tower, a draft model
            continue
        found.setdefault(layer, {})[rest] = name
    return found


@dataclass(frozen=True, slots=True)
class _Source:
    family: Family
    model: ServedModel
    dialect: Dialect
    reader: TensorReader
    tensors: Mapping[str, TensorInfo]

    def bounds(self, names: Mapping[str, str]) -> tuple[Bound, ...]:
        """Of one layer, by its tensors' names."""
        text = self.family.text_config
        kinds = ("latent", "k_pe") if self.model.is_mla else ("k", "v")
        if (why := self._unknown(names)) is not None:
            return tuple(Bound(kind, None, why) for kind in kinds)
        if (eps := text.get("rms_norm_eps")) is not None and (type(eps) not in (int, float) or not 0 <= eps < 1):
            why = f"rms_norm_eps is {printable(repr(eps), 40)}, expected a number from 0 to 1"
            return tuple(Bound(kind, None, why) for kind in kinds)
        factor = rope_factor(text, latent=self.model.is_mla)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite proves nothing
            return self._latent(names, factor) if self.model.is_mla else self._heads(names, factor)

    def _unknown(self, names: Mapping[str, str]) -> str | None:
        """Why nothing can be said of this class, or of this layer's attention; None where its computation is known."""
        known, kind = self.known, str(self.family.text_config.get("model_type") or self.family.name)
        architecture = printable(self.model.architecture, 60)
        if known is None:
            return f"what attention of the class {architecture} computes is not known here"
        if kind not in known.types or known.latent != self.model.is_mla:
            has = "a latent" if self.model.is_mla else "no latent"
            return f"the class {architecture} and a config of {printable(kind, 40)} with {has} do not belong together"
        heads = {rest.partition(".")[0] for rest in names if not is_scale_of_attention(rest)}
        if strange := sorted(heads - KNOWN_MODULES - {"input_layernorm"}):
            return f"its attention has {printable(strange[0], 60)}, and what that does is not known here"
        static = next((rest for rest in sorted(names) if rest.endswith(".input_scale")), None)
        return None if static is None else f"a static {static}: what it rounds away is not bounded here"

    @property
    def known(self) -> KnownClass | None:
        return KNOWN_CLASSES.get(self.model.architecture)

    def _latent(self, names: Mapping[str, str], factor: float | None) -> tuple[Bound, ...]:
        model = self.model
        gamma = self._vector(names, "kv_a_layernorm.weight", model.latent)
        latent = Bound("latent", None, gamma) if isinstance(gamma, str) else norm_bound("latent", gamma)
        read = self._linear(names, "kv_a_proj_with_mqa", model.latent + model.rope, factor)
        if isinstance(read, str) or factor is None:
            return latent, Bound("k_pe", None, str(read))
        weight, norm, bias, scale = read
        rows = slice(model.latent, None)
        offset = None if bias is None else bias[rows]
        k_pe = rotated_linear_bound(
            "k_pe",
            weight[rows],
            norm,
            offset,
            factor,
            heads=1,
            rotary=model.rope,
            pairing="either",
            largest_scale=scale,
        )
        return latent, k_pe

    def _heads(self, names: Mapping[str, str], factor: float | None) -> tuple[Bound, ...]:
        return self._k(names, factor), self._v(names)

    def _k(self, names: Mapping[str, str], factor: float | None) -> Bound:
        model, rows = self.model, self.model.kv_heads * self.model.head_dim
        if factor is None:
            return Bound("k", None, ROPE_UNKNOWN)
        normed = self._norms_keys(names)
        if isinstance(normed, str):
            return Bound("k", None, normed)
        if normed:
            wide = self.tensors[names["k_norm.weight"]].shape == (rows,)
            gamma = self._vector(names, "k_norm.weight", rows if wide else model.head_dim)
            return Bound("k", None, gamma) if isinstance(gamma, str) else rotated_norm_bound("k", gamma, factor)
        read = self._linear(names, "k_proj", rows, factor)
        if isinstance(read, str):
            return Bound("k", None, read)
        weight, norm, bias, scale = read
        widths = _rotary(self.family.text_config, model.head_dim)
        if isinstance(widths, str):
            return Bound("k", None, widths)
        bounds = [
            rotated_linear_bound(
                "k",
                weight,
                norm,
                bias,
                factor,
                heads=model.kv_heads,
                rotary=rotary,
                pairing="either",
                largest_scale=scale,
            )
            for rotary in widths
        ]
        return max(bounds, key=lambda bound: np.inf if bound.value is None else bound.value)

    def _norms_keys(self, names: Mapping[str, str]) -> bool | str:
        """Whether a norm follows k_proj; in words, why that is not known: one reader may apply a k_norm.weight that
        another leaves aside (vLLM's Qwen2 with `qk_norm`)."""
        assert self.known is not None  # `_unknown` has said so
        how, asked = self.known.norms_keys, {key: self.family.text_config.get(key) for key in NORMS_ASKED}
        wanted = how == "always" or (how == "asked" and asked["use_qk_norm"] is True)
        odd = [key for key, value in asked.items() if value is not None and type(value) is not bool]
        odd += [key for key, value in asked.items() if value and how == "never"]
        if odd and how != "always":
            said = printable(repr(asked[odd[0]]), 40)
            return f"{odd[0]} is {said}, and what the class makes of it is not known here"
        if wanted != ("k_norm.weight" in names):
            return "its class has a norm behind k_proj, and there is no k_norm.weight" if wanted else UNUSED_NORM
        return wanted

    def _v(self, names: Mapping[str, str]) -> Bound:
        read = self._linear(names, "v_proj", self.model.kv_heads * self.model.head_dim, 1.0)
        if isinstance(read, str):
            return Bound("v", None, read)
        weight, norm, bias, scale = read
        return linear_bound("v", weight, norm, bias, largest_scale=scale)

    def _linear(
        self, names: Mapping[str, str], module: str, rows: int, factor: float | None
    ) -> tuple[F64, F64, F64 | None, float] | str:
        """Weight [rows, d], gamma [d] of the norm before it, bias, the largest FP8 scale; or why not."""
        if factor is None:
            return ROPE_UNKNOWN
        name = names.get(f"{module}.weight") or names.get(f"{module}.weight_packed")
        if name is None:
            return f"no {module}.weight"
        step = self._step(name)
        if len(step.shape) != 2 or step.shape[0] != rows or prod(step.shape) > MAX_WEIGHTS:
            return f"{module} is {list(step.shape)}, expected {rows} rows"
        gamma = self._vector(names, "input_layernorm.weight", step.shape[1])
        if isinstance(gamma, str):
            return gamma
        bias = None
        if f"{module}.bias" in names:
            read = self._vector(names, f"{module}.bias", rows)
            if isinstance(read, str):
                return read
            bias = read
        if step.encoding is None and step.weight.dtype not in SOURCE_VIEWS:
            return f"{module} is {step.weight.dtype}"
        with opened(step, self.reader, Buffers(0)) as source:
            weight = float32_weight(source.rows, source.grid, source.block).astype(np.float64)
        return weight, gamma, bias, self._largest_scale(names, module) or LARGEST_PLAIN_WEIGHT / E4M3_MAX

    def _largest_scale(self, names: Mapping[str, str], module: str) -> float:
        """Of all FP8 projections that engines fuse with this one; 0 of none."""
        fused = next(group for group in FUSED if module in group)
        steps = [self._step(name) for one in fused if (name := names.get(f"{one}.weight"))]
        scaled = [step.encoding for step in steps if isinstance(step.encoding, ScaledWeight)]
        return max((float(np.abs(read_scales(one, self.reader)).max()) for one in scaled), default=0.0)

    def _step(self, name: str) -> Step:
        module = name.removesuffix(".weight").removesuffix(".weight_packed")
        encoding = self.dialect.weights.get(module) or self.dialect.packed.get(module)
        return Step(module, "copy", "", self.family.place(name), self.tensors[name], encoding, ())

    def _vector(self, names: Mapping[str, str], rest: str, size: int) -> F64 | str:
        """[size] float64, or why not."""
        if (name := names.get(rest)) is None:
            return f"no {rest}"
        info = self.tensors[name]
        if info.shape != (size,) or info.dtype not in FLOATS or not size:
            return f"{rest} is {info.dtype} {list(info.shape)}, expected {size} numbers"
        values = floats(info, self.reader.read(info))
        return values if np.isfinite(values).all() else f"{rest} has numbers that are not finite"

    def carried(self, names: Mapping[str, str]) -> Carried | None:
        infos = {rest: self.tensors[name] for rest, name in names.items()}
        return layer_scales(infos, self.model.kv_heads, self.reader.read)


NORMS_ASKED = ("use_qk_norm", "qk_norm")  # GLM-4.x's word, and vLLM's for Qwen2
UNUSED_NORM = "there is a k_norm.weight, and by class and config no norm behind k_proj"
ROPE_UNKNOWN = "whether this rope type scales cos and sin is not known"


def _rotary(text: Mapping[str, Any], head_dim: int) -> tuple[int, ...] | str:
    """How many of a head's channels RoPE may turn, one number for each reading of the config; or why not.

    Where nothing is said the class decides (Glm4Moe 0.5, most others 1), some classes do not know the word, and where
    places differ the reader does.
    """
    ropes = (text.get("rope_parameters"), text.get("rope_scaling"))
    holders = (text, *(rope for rope in ropes if isinstance(rope, dict)))
    said = [h["partial_rotary_factor"] for h in holders if h.get("partial_rotary_factor") is not None]
    for share in said:
        if type(share) not in (int, float) or not 0 < share <= 1:
            return f"partial_rotary_factor is {printable(repr(share), 40)}, expected a number above 0, at most 1"
    return tuple(sorted({int(head_dim * share) // 2 * 2 for share in (*said, 0.5, 1.0)}))

"""The language model of a checkpoint as modules of transformers, one decoder layer at a time and without its experts.

A layer is built on the meta device, filled with what its attention, its norms and its router need, used, and dropped.
The checkpoint's own code is never run: only classes that transformers itself has.
"""

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from transformers.utils import logging as log

from kizami.calibration.forward.attention import IMPLEMENTATION
from kizami.calibration.forward.checks import bad_config, check_all_used, check_numbers, check_said
from kizami.calibration.forward.weights import Weights
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError, printable
from kizami.formats.families import Family, find_family

# model_type -> folder of transformers.models and prefix of its classes. Kimi-K2's own code is DeepSeek-V3's under
# another name, and K2.5 keeps its text model in `text_config` under either.
CLASSES = {
    "deepseek_v3": ("deepseek_v3", "DeepseekV3"),
    "kimi_k2": ("deepseek_v3", "DeepseekV3"),
    "kimi_k25": ("deepseek_v3", "DeepseekV3"),
    "deepseek_v32": ("deepseek_v32", "DeepseekV32"),
    "glm_moe_dsa": ("glm_moe_dsa", "GlmMoeDsa"),
    "glm4_moe": ("glm4_moe", "Glm4Moe"),
}
# What these classes compute whatever the config says
_FIXED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "mlp_bias": False}
_FIXED_DSA = {"rope_interleave": True, "indexer_rope_interleave": True}  # of GlmMoeDsa
# Of no use to a language model's layers, or untrusted
_DROPPED = ("quantization_config", "model_type", "auto_map", "architectures", "torch_dtype", "dtype")
ROUTER = "mlp.gate."  # kept in float32, as transformers does (_keep_in_fp32_modules_strict)


class Layer(Protocol):
    """A decoder layer of the classes above."""

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    self_attn: nn.Module
    mlp: nn.Module


@dataclass(frozen=True, slots=True)
class Mlp:
    """Shapes of a layer's MLP. experts, top_k: 0 in a dense layer, whose `dense` is its width; shared: the width of the
    shared expert."""

    experts: int
    top_k: int
    inner: int
    shared: int
    dense: int


class Model:
    """Builds the layers of a checkpoint's language model. `prefix` stands before `model.` in the names on disk."""

    def __init__(self, checkpoint: Checkpoint, weights: Weights) -> None:
        """KizamiError "unsupported_model", "bad_config", "missing_tensor", "shape_mismatch", "unused_tensor": every
        tensor that will be read is looked up here."""
        self.family, _ = find_family(checkpoint.config, checkpoint.tensors)
        self.prefix = f"{self.family.prefix}model."
        self._weights = weights
        self._kind, self.config = _config(self.family)
        self.hidden: int = self.config.hidden_size
        self.layers: int = self.config.num_hidden_layers
        self.embedding = f"{self.prefix}embed_tokens.weight"
        _check_shape(weights, self.embedding, (self.config.vocab_size, self.hidden))
        self.attention_numel = 0  # weights of the largest attention
        self.shares_choice = False  # whether a layer takes the keys that another's indexer chose
        # cos and sin of position ids; the frequencies are computed, not read
        self.rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]] = self._build("RotaryEmbedding", self.config)
        self._check_frequencies()
        self._parts: dict[int, frozenset[str]] = {}  # of modules and tensors outside of experts
        self.mlps = tuple(self._check(layer) for layer in range(self.layers))
        check_all_used(weights.names, self.prefix, self._used, self.layers)
        self._parts.clear()

    @property
    def index_topk(self) -> int | None:
        """Keys that an indexer (DSA) selects; None for a model without one."""
        return getattr(self.config, "index_topk", None)

    def name(self, layer: int, module: str = "") -> str:
        """Of a module of a layer, or what stands before one, as it is on disk."""
        return f"{self.prefix}layers.{layer}.{module}"

    def skeleton(self, layer: int) -> Layer:
        """The layer on the meta device."""
        with torch.device("meta"):
            return cast(Layer, self._build("DecoderLayer", self.config, layer).eval())

    def load(self, layer: int, dtype: torch.dtype, device: torch.device) -> Layer:
        """The layer with its attention, norms and router read; its experts and linears of the MLP stay on meta."""
        built = self.skeleton(layer)
        for name, tensor in _needed(built):
            kept = torch.float32 if name.startswith(ROUTER) else dtype
            value = self._weights.read(self.name(layer, name), dtype=kept, device=device)
            module, _, leaf = name.rpartition(".")
            owner = cast(nn.Module, built).get_submodule(module)
            if isinstance(tensor, nn.Parameter):
                setattr(owner, leaf, nn.Parameter(value, requires_grad=False))
            else:
                owner.register_buffer(leaf, value)
        return built

    @property
    def head(self) -> str:
        """The matrix that makes logits: `lm_head.weight`, or the embedding where the config ties them."""
        return self.embedding if self.config.tie_word_embeddings else f"{self.family.prefix}lm_head.weight"

    def check_head(self) -> None:
        """The rest of the model, which statistics need not. KizamiError "missing_tensor", "shape_mismatch"."""
        _check_shape(self._weights, self.head, (self.config.vocab_size, self.hidden))
        _check_shape(self._weights, f"{self.prefix}norm.weight", (self.hidden,))

    def final_norm(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Before the head."""
        norm = cast(nn.Module, self._build("RMSNorm", self.hidden, self.config.rms_norm_eps))
        value = self._weights.read(f"{self.prefix}norm.weight", dtype=dtype, device=device)
        norm.register_parameter("weight", nn.Parameter(value, requires_grad=False))
        return norm.eval()

    def mlp(self, built: Layer) -> Mlp:
        inner: int = self.config.moe_intermediate_size
        if not is_sparse(built):
            return Mlp(0, 0, inner, 0, self.config.intermediate_size)
        router = cast(Any, built.mlp).gate
        _check_router(router)
        return Mlp(router.num_experts, router.top_k, inner, inner * self.config.n_shared_experts, 0)

    def _build(self, name: str, *arguments: Any) -> Any:
        folder, prefix = CLASSES[self._kind]
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        try:
            with _quiet():
                return getattr(module, prefix + name)(*arguments)
        except Exception as e:  # numbers that none can be built of
            raise bad_config(f"{prefix}{name} cannot be built: {type(e).__name__}: {printable(str(e), 300)}") from e

    def _check_frequencies(self) -> None:
        for name, buffer in cast(nn.Module, self.rotary).named_buffers():
            if not bool(buffer.isfinite().all()):
                raise bad_config(
                    f"rotary embedding: {name} has frequencies that are not finite (rope_theta, rope_scaling)"
                )
        config = self.config
        width, head_dim = 2 * cast(Any, self.rotary).inv_freq.numel(), getattr(config, "head_dim", None)
        mla = hasattr(config, "qk_rope_head_dim")
        most = config.qk_rope_head_dim if mla else head_dim or self.hidden // config.num_attention_heads
        if not 0 < width <= most or (mla and width != most):
            raise bad_config(
                f"head_dim {head_dim}: {width} channels would be rotated, expected {'' if mla else 'at most '}{most} "
                "(qk_rope_head_dim, head_dim, partial_rotary_factor)"
            )

    def _used(self, layer: int) -> frozenset[str]:
        experts = range(self.mlps[layer].experts)
        return self._parts[layer] | {f"mlp.experts.{e}.{name}" for e in experts for name in projections(0, 0)}

    def _check(self, layer: int) -> Mlp:
        built = self.skeleton(layer)
        self.attention_numel = max(self.attention_numel, sum(p.numel() for p in built.self_attn.parameters()))
        self.shares_choice |= bool(getattr(built.self_attn, "skip_topk", False))
        for name, tensor in _needed(built):
            _check_shape(self._weights, self.name(layer, name), tuple(tensor.shape))
        used = {name.removesuffix(".weight") for name, _ in _needed(built)}
        mlp = self.mlp(built)
        parts = {f"mlp.experts.{e}": mlp.inner for e in range(mlp.experts)}
        parts |= {"mlp.shared_experts": mlp.shared} if mlp.shared else {}
        parts |= {"mlp": mlp.dense} if mlp.dense else {}
        for part, width in parts.items():
            for projection, shape in projections(self.hidden, width).items():
                if not part.startswith("mlp.experts."):
                    used.add(f"{part}.{projection}")
                _check_shape(self._weights, f"{self.name(layer, part)}.{projection}.weight", shape)
        self._parts[layer] = frozenset(used)
        return mlp


def projections(hidden: int, width: int) -> dict[str, tuple[int, int]]:
    """Shapes of the three linears of a gated MLP."""
    return {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}


def is_sparse(layer: Layer) -> bool:
    """Whether its MLP has routed experts."""
    return hasattr(layer.mlp, "gate")


def _check_router(router: Any) -> None:
    experts, groups = router.num_experts, router.num_group or 1
    of_group = experts // groups
    chosen = min(router.topk_group or 1, groups) * of_group
    if experts % groups or of_group < 2 or not 1 <= router.top_k <= chosen or (router.topk_group or 1) > groups:
        raise bad_config(
            f"{router.top_k} of {experts} experts from {router.topk_group} of {groups} groups cannot be chosen"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """What torch and transformers think of a config is no talk for kizami's user: what they refuse is an error."""
    verbosity = log.get_verbosity()
    log.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)


def _needed(built: Layer) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers outside of the MLP's linears."""
    for name, tensor in cast(nn.Module, built).state_dict(keep_vars=True).items():
        if not name.startswith("mlp.") or name.startswith(ROUTER):
            yield name, tensor


def _check_shape(weights: Weights, name: str, expected: tuple[int, ...]) -> None:
    found = weights.shape(name)
    if found != expected:
        raise KizamiError(
            f"has shape {list(found)}, expected {list(expected)} by config.json", code="shape_mismatch", tensor=name
        )


def _config(family: Family) -> tuple[str, Any]:
    text, kind = family.text_config, family.name
    inner = text.get("model_type", kind)
    if kind not in CLASSES or inner not in CLASSES or CLASSES[inner] != CLASSES[kind]:
        raise KizamiError(
            f'model_type "{printable(str(inner or "(none)"), 60)}" cannot be calibrated, expected one of '
            f"{', '.join(sorted(CLASSES))}: the forward pass uses transformers' classes, never a checkpoint's own code",
            code="unsupported_model",
            file="config.json",
        )
    fixed = _FIXED | (_FIXED_DSA if kind == "glm_moe_dsa" else {})
    for key, computed in fixed.items():
        if text.get(key, computed) not in (computed, None):
            raise KizamiError(
                f"{key} is {printable(repr(text[key]), 60)}, and transformers' class computes {computed!r}",
                code="unsupported_model",
                file="config.json",
            )
    check_said(text)
    folder, prefix = CLASSES[kind]
    module = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    config = _build(getattr(module, f"{prefix}Config"), text)
    check_numbers(config, kind)
    return kind, config


def _build(config_class: Any, text: Mapping[str, Any]) -> Any:
    try:
        with _quiet():
            config = config_class(**{key: value for key, value in text.items() if key not in _DROPPED})
    except Exception as e:  # whatever a config class makes of values that it was not written for
        refusal = f"transformers' {config_class.__name__} refuses it: {type(e).__name__}: {printable(str(e), 300)}"
        raise bad_config(refusal) from e
    config._attn_implementation = IMPLEMENTATION
    return config

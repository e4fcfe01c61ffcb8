"""What engines take from config.json: the attention that decides the KV cache, experts, the class. Untrusted input."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kizami.formats.families import Family
from kizami.formats.foreign import bad_config

# SGLang 0.5.23 configs/model_config.py `is_deepseek_dsa`: those of its classes that kizami's families have.
DSA_CLASSES = frozenset({"DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"})
_MOST = 1 << 24  # no dimension, context length or count of a real config is larger
_MOST_LAYERS = 10_000


class Attention(StrEnum):
    MLA = "mla"  # one latent per token and layer, the same on every rank
    DSA = "dsa"  # the same, and an index key in the layers that choose tokens
    GQA = "gqa"  # K and V by head


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`index_layers`: layers of the main model with an index-K buffer. Dimensions that the attention lacks are 0."""

    architecture: str
    model_type: str
    attention: Attention
    layers: int
    mtp_layers: int
    heads: int
    latent: int
    rope: int
    index_layers: int
    index_dim: int
    kv_heads: int
    head_dim: int
    experts: int
    shared_experts: int
    moe_intermediate: int
    vocab: int
    context: int
    remote_code: bool
    vision: bool

    @property
    def is_mla(self) -> bool:
        return self.attention is not Attention.GQA


def compared_type(family: Family) -> str:
    """The model_type that engines compare: of the text config where there is one. KizamiError "bad_config"."""
    word = family.text_config.get("model_type") or family.name
    if not isinstance(word, str) or not 0 < len(word) <= 200:
        raise bad_config("model_type", word, "a word")
    return word


def read_model(config: Mapping[str, Any], family: Family) -> ServedModel:
    """The model that `config` describes. KizamiError "bad_config" for values that no engine could use."""
    text = family.text_config
    layers = _number(text, "num_hidden_layers", low=1, high=_MOST_LAYERS)
    latent = _number(text, "kv_lora_rank", default=0)
    heads = _number(text, "num_attention_heads", low=1)
    architecture = _architecture(config)
    attention = Attention.GQA
    index_layers = index_dim = kv_heads = head_dim = rope = 0
    if latent:
        rope = _number(text, "qk_rope_head_dim", low=1)
        if rope % 2:
            raise bad_config("qk_rope_head_dim", rope, "an even number: RoPE turns pairs")
        attention = Attention.MLA
        if text.get("index_topk") is not None and architecture in DSA_CLASSES:
            attention = Attention.DSA
            index_dim = _number(text, "index_head_dim", default=128, low=1)
            index_layers = count_index_layers(text, layers)
    else:
        kv_heads = _number(text, "num_key_value_heads", default=heads, low=1)
        hidden = _number(text, "hidden_size", low=1)
        head_dim = _number(text, "head_dim", default=hidden // heads, low=1)
    return ServedModel(
        architecture=architecture,
        model_type=family.name,
        attention=attention,
        layers=layers,
        mtp_layers=len(family.mtp_layers),
        heads=heads,
        latent=latent,
        rope=rope,
        index_layers=index_layers,
        index_dim=index_dim,
        kv_heads=kv_heads,
        head_dim=head_dim,
        experts=_first_number(text, ("n_routed_experts", "num_experts", "num_local_experts")),
        shared_experts=_number(text, "n_shared_experts", default=0),
        moe_intermediate=_number(text, "moe_intermediate_size", default=0),
        vocab=_number(text, "vocab_size", default=0),
        context=_number(text, "max_position_embeddings", default=0),
        remote_code=needs_code(config),
        vision=isinstance(config.get("vision_config"), dict),
    )


def count_index_layers(text: Mapping[str, Any], layers: int) -> int:
    """Layers of the main model that compute their own top-k and so keep index keys.

    SGLang 0.5.23 configs/model_config.py `dsa_layer_skips_topk`: `indexer_types`, else `index_topk_pattern`, else
    frequency and offset. vLLM 0.33 has the last two.
    """
    types = text.get("indexer_types")
    if types is not None:
        if not isinstance(types, list) or not all(isinstance(word, str) for word in types):
            raise bad_config("indexer_types", types, "a list of strings")
        return layers - types[:layers].count("shared")
    pattern = text.get("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, str):
            raise bad_config("index_topk_pattern", pattern, "a string")
        return layers - pattern[:layers].count("S")
    freq = _number(text, "index_topk_freq", default=1, low=1)
    offset = _number(text, "index_skip_topk_offset", default=2, low=1)
    return sum(max(layer - offset + 1, 0) % freq == 0 for layer in range(layers))


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise bad_config("architectures", names, "a list with the name of the model's class")
    return names[0]


def _first_number(text: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    return next((_number(text, key) for key in keys if text.get(key) is not None), 0)


def _number(text: Mapping[str, Any], key: str, *, default: int | None = None, low: int = 0, high: int = _MOST) -> int:
    value = text.get(key)
    if value is None and default is not None:
        value = default
    if type(value) is not int or not low <= value <= high:
        raise bad_config(key, value, f"a whole number from {low} to {high}")
    return value


def needs_code(config: Mapping[str, Any]) -> bool:
    """Whether config or tokenizer are Python in the checkpoint: an auto_map, or Kimi's types."""
    text = config.get("text_config")
    holders = [config, *([text] if isinstance(text, dict) else [])]
    return any(c.get("auto_map") or str(c.get("model_type")).startswith("kimi") for c in holders)

"""Model classes whose attention is known well enough to prove something of its cache.

A bound from weights holds for the class that an engine runs, not for what a config says. Of the classes here it is
known that `input_layernorm` stands before the projections, multiplies with gamma as it is stored (Gemma's and
Qwen3-Next's with 1 + gamma) and nothing else changes what goes into the cache: transformers 5.24, SGLang 0.5.23
srt/models/, vLLM 0.33 model_executor/models/. Exaone4, whose norms come after, is not among them, nor are classes for
speculative decoding, which leave norms out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class KnownClass:
    """types: words of model_type that checkpoints of this class have, in the text config. latent: MLA. norms_keys:
    whether a norm follows k_proj; `asked`: where `use_qk_norm` is true, a key that other classes do not know."""

    types: frozenset[str]
    latent: bool
    norms_keys: Literal["never", "always", "asked"] = "never"


def _latent(*types: str) -> KnownClass:
    return KnownClass(frozenset(types), latent=True)


def _heads(kind: str, norms_keys: Literal["never", "always", "asked"] = "never") -> KnownClass:
    return KnownClass(frozenset({kind}), latent=False, norms_keys=norms_keys)


KNOWN_CLASSES: Mapping[str, KnownClass] = {
    "DeepseekV2ForCausalLM": _latent("deepseek_v2"),
    "DeepseekV3ForCausalLM": _latent("deepseek_v3", "kimi_k2"),
    "DeepseekV32ForCausalLM": _latent("deepseek_v32"),
    "GlmMoeDsaForCausalLM": _latent("glm_moe_dsa"),
    "KimiK25ForConditionalGeneration": _latent("kimi_k2", "kimi_k25", "deepseek_v3"),
    "Kimi_K25ForConditionalGeneration": _latent("kimi_k2", "kimi_k25", "deepseek_v3"),  # transformers' own name of it
    "Glm4MoeForCausalLM": _heads("glm4_moe", "asked"),
    "LlamaForCausalLM": _heads("llama"),
    "MistralForCausalLM": _heads("mistral"),
    "MixtralForCausalLM": _heads("mixtral"),
    "Qwen2ForCausalLM": _heads("qwen2"),
    "Qwen2MoeForCausalLM": _heads("qwen2_moe"),
    "Qwen3ForCausalLM": _heads("qwen3", "always"),
    "Qwen3MoeForCausalLM": _heads("qwen3_moe", "always"),
}

# What stands in an attention block of these classes; a tensor of anything else may change what is cached.
KNOWN_MODULES = frozenset({
    "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "q_a_proj", "q_a_layernorm", "q_b_proj",
    "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "indexer", "rotary_emb",
})  # fmt: skip

"""What SGLang and vLLM really do with KV scales, by model class. `kizami check` and `kizami kv-scales` use one table.

Read in SGLang 0.5.23 and vLLM 0.33.0.
"""

from dataclasses import dataclass
from typing import Literal

from kizami.formats.kv_scales.neutral import AttentionKind, KvScales

# SGLang srt/models: classes with load_kv_cache_scales, the only ones that take --quantization-param-path.
JSON_CLASSES = frozenset({
    "ApertusForCausalLM", "ArceeForCausalLM", "Exaone4ForCausalLM", "Glm4ForCausalLM",
    "Glm5NextForConditionalGeneration", "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM",
    "IQuestCoderForCausalLM", "InternLM3ForCausalLM", "LlamaForCausalLM", "MiMoForCausalLM",
    "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "Ministral3ForCausalLM", "MistralForCausalLM", "OPTForCausalLM",
    "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SolarForCausalLM", "TeleFLMForCausalLM",
})  # fmt: skip
# SGLang srt/models: loaders without maybe_remap_kv_scale_name, by model_type; a tensor must have the parameter's name.
NOT_REMAPPED = frozenset({"glm4_moe", "qwen3_moe", "qwen2_moe", "qwen2", "mixtral"})

Engine = Literal["sglang", "vllm"]
Verdict = Literal["applied", "ignored", "harmful", "refused"]


@dataclass(frozen=True, slots=True)
class Effect:
    """What an engine does with scales in one form. verdict: of scales other than 1.0."""

    engine: Engine
    form: Literal["checkpoint", "json"]
    verdict: Verdict
    text: str
    source: str


def effects(scales: KvScales) -> tuple[Effect, ...]:
    """Of these scales, as tensors in the checkpoint and as SGLang's JSON file."""
    checkpoint = _latent(scales.attention) if scales.attention != "gqa" else _heads(scales)
    return (*checkpoint, _json(scales.architecture))


def _latent(attention: AttentionKind) -> tuple[Effect, ...]:
    inline = (
        "; rows of 656 bytes (fp8_ds_mla) keep a scale of their own per 128 values and use none of these"
        if attention == "dsa"
        else ""
    )
    return (
        Effect(
            "sglang",
            "checkpoint",
            "harmful",
            "writes the latent by a plain cast, and flashmla and trtllm multiply by k_scale when they read: any scale "
            f"but 1.0 gives wrong attention{inline}",
            "SGLang srt/mem_cache/memory_pool.py MLATokenToKVPool; sglang #34765",
        ),
        Effect(
            "vllm",
            "checkpoint",
            "ignored",
            f"gives MLA no KV method under compressed-tensors and fp8: 1.0 is used, tensors are skipped{inline}",
            "vLLM .../compressed_tensors.py get_quant_method; vllm #25968",
        ),
    )


def _heads(scales: KvScales) -> tuple[Effect, ...]:
    per_head = scales.granularity == "attn_head"
    if per_head:
        sglang = Effect(
            "sglang",
            "checkpoint",
            "ignored",
            "takes strategy tensor only: a scheme per KV head is left out with a warning, and 1.0 is used",
            "SGLang .../compressed_tensors.py CompressedTensorsKVCacheMethod.is_supported_scheme",
        )
    else:
        sglang = Effect(
            "sglang",
            "checkpoint",
            "applied",
            "takes one k_scale and one v_scale per layer, and --kv-cache-dtype auto becomes fp8_e4m3",
            "SGLang srt/layers/quantization/kv_cache.py; srt/mem_cache/kv_cache_dtype.py",
        )
    vllm = Effect(
        "vllm",
        "checkpoint",
        "applied",
        f"takes one k_scale and one v_scale per {'KV head, cut over ranks' if per_head else 'layer'}, and "
        "kv_cache_dtype auto becomes fp8",
        "vLLM .../compressed_tensors.py CompressedTensorsKVCacheMethod",
    )
    return sglang, vllm


def _json(architecture: str) -> Effect:
    if (why := json_refusal(architecture)) is not None:
        return Effect("sglang", "json", "refused", why, "SGLang srt/model_executor/.../load_model_utils.py")
    return Effect(
        "sglang",
        "json",
        "ignored",
        "--quantization-param-path sets k_scale as a plain float and never k_scale_float: FA fails on it, flashinfer "
        "and triton ignore it",
        "sglang #18818, #20705, #18373",
    )


def json_refusal(architecture: str) -> str | None:
    """Why SGLang's JSON file is of no use to a class; None where the class reads it."""
    if architecture in JSON_CLASSES:
        return None
    return f"the class {architecture} has no load_kv_cache_scales: --quantization-param-path ends in a RuntimeError"


def refusal(scales: KvScales) -> str | None:
    """Why scales in a checkpoint would spoil attention; None where they would not."""
    if scales.attention == "gqa":
        return None
    for layer in scales.layers:
        for value in layer.values:
            if value != 1.0:
                return (
                    f"layer {layer.layer} has a KV scale of {value:g}, and the model caches a latent "
                    f"({scales.attention.upper()}): SGLang writes it without the scale and multiplies by it when it "
                    "reads, vLLM ignores it; 1.0 is the only value that engines agree on"
                )
    return None

"""KV-cache scales: the scheme, the tensors' names by model class, and what a scale does on MLA."""

from collections.abc import Iterator, Mapping
from typing import Any

from kizami.formats.engines.context import Context
from kizami.formats.engines.finding import EngineName, Hit, Rule
from kizami.formats.engines.served import KV_SCALE_LEAVES
from kizami.formats.errors import printable
from kizami.formats.kv_scales.effects import NOT_REMAPPED, json_refusal

_JSON_NAMES = ("kv_cache_scales.json", "kv_scales.json")


def _scales(context: Context) -> list[str]:
    return [
        f"{part.name}.{leaf}"
        for part in context.model.parts.values()
        for leaf in part.leaves
        if leaf in KV_SCALE_LEAVES
    ]


def _scheme(context: Context) -> Iterator[Hit]:
    scheme = context.quant.kv_scheme if context.quant else None
    if scheme is None:
        return
    strategies = ("tensor",) if context.engine == "sglang" else ("tensor", "attn_head")
    if not _is_supported(scheme, strategies, context.engine):
        shown = printable(str({key: scheme[key] for key in list(scheme)[:8]}), 120)
        yield Hit(
            f"kv_cache_scheme {shown} is not type float, 8 bits, {' or '.join(strategies)}, symmetric, static",
            "write that scheme, or null",
            severity="error" if context.engine == "vllm" else "warning",
        )
        return
    if not _scales(context):
        yield Hit(
            "kv_cache_scheme is there, and no scale tensor is: every scale becomes 1.0 without a word",
            "write kv_cache_scheme null, or add the scales",
        )
    if context.engine == "sglang":
        yield Hit(
            "with this kv_cache_scheme --kv-cache-dtype auto becomes fp8_e4m3: a prefill or decode server whose "
            "checkpoint has none refuses the transfer",
            "give --kv-cache-dtype on both sides",
            severity="note",
        )


def _is_supported(scheme: Mapping[str, Any], strategies: tuple[str, ...], engine: EngineName) -> bool:
    symmetric = scheme.get("symmetric", engine == "sglang")
    static = engine != "sglang" or not scheme.get("dynamic", False)
    return (
        scheme.get("type") == "float"
        and scheme.get("num_bits") == 8
        and scheme.get("strategy") in strategies
        and symmetric is True
        and static
    )


def _mla(context: Context) -> Iterator[Hit]:
    """No engine path scales the latent when it is written and when it is read."""
    if context.model.attention != "mla":
        return
    for name in _scales(context):
        parent = name.rpartition(".")[0].rpartition(".")[2]
        values = context.model.served.kv_scales.get(name)
        if values and all(value == 1.0 for value in values):
            continue
        shown = f"is {values[0]:g}" if values else "is there"
        if context.engine == "vllm":
            yield Hit(
                "a KV scale of an MLA model: compressed-tensors and fp8 give MLA no KV method, and 1.0 is used",
                "remove the scale tensors",
                name,
                "warning",
            )
        elif parent in ("attn_mqa", "k_proj", "v_proj"):
            yield Hit(
                f"a KV scale of an MLA model {shown}: the latent is written without it, and flashmla and trtllm "
                "multiply by it when they read",
                "remove the scale tensors; a range certificate says whether plain FP8 is enough",
                name,
            )
        else:
            yield Hit(
                f"{parent}.{name.rpartition('.')[2]} is no name that the DeepSeek loader takes: dropped with a warning",
                "remove the scale tensors",
                name,
                "warning",
            )


def _dropped(context: Context) -> Iterator[Hit]:
    """Model classes whose loader has no remapping of KV scales."""
    if context.model.attention == "mla" or context.model.family.name not in NOT_REMAPPED:
        return
    for name in _scales(context):
        if ".attn." not in name:
            yield Hit(
                f"KV scales of {context.model.family.name} are not remapped by its loader: dropped, and 1.0 is used",
                "serve without FP8 KV, or name them self_attn.attn.k_scale and v_scale",
                name,
            )


def _fused_names(context: Context) -> Iterator[Hit]:
    for name in _scales(context):
        if ".qkv_proj." in name:
            yield Hit(
                "a KV scale under the merged name qkv_proj is taken by no loader", "name it self_attn.k_scale", name
            )


def _json(context: Context) -> Iterator[Hit]:
    names = context.model.served.config.get("architectures")
    name = names[0] if isinstance(names, list) and names else context.model.family.name
    why = json_refusal(printable(str(name), 60))
    for file in _JSON_NAMES:
        if file in context.model.served.files and why is not None:
            yield Hit(f"{file}: {why}", "do not pass the file")


RULES = (
    Rule(
        "kv_scheme",
        "warning",
        {
            "sglang": "SGLang .../compressed_tensors.py CompressedTensorsKVCacheMethod.is_supported_scheme",
            "vllm": "vLLM .../compressed_tensors.py validate_kv_cache_scheme",
        },
        _scheme,
    ),
    Rule(
        "kv_scale_on_mla",
        "error",
        {
            "sglang": "SGLang srt/mem_cache/memory_pool.py MLATokenToKVPool; deepseek_weight_loader.py",
            "vllm": "vllm #25968; vLLM .../compressed_tensors.py get_quant_method",
        },
        _mla,
    ),
    Rule("kv_scale_dropped", "warning", {"sglang": "SGLang srt/models/glm4_moe.py; sglang #39942"}, _dropped),
    Rule(
        "kv_scale_name",
        "warning",
        {
            "sglang": "SGLang srt/model_loader/weight_utils.py maybe_remap_kv_scale_name",
            "vllm": "vLLM model_executor/model_loader/weight_utils.py; llm-compressor #2494",
        },
        _fused_names,
    ),
    Rule("kv_json", "warning", {"sglang": "SGLang srt/model_loader/weight_utils.py; sglang #18818, #20705"}, _json),
)

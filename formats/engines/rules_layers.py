"""What a model of a known family has: its layers, indexers and next-token layer complete, and no name beyond them."""

from collections.abc import Iterator, Mapping, Sequence

from kizami.formats.engines.context import Context, Model
from kizami.formats.engines.finding import EngineName, Hit, Rule
from kizami.formats.engines.naming import leaf_of
from kizami.formats.engines.parts import Part
from kizami.formats.families import Role

_LOADER = "SGLang srt/models/deepseek_common/deepseek_weight_loader.py"
_VLLM_MODEL = "vLLM model_executor/models/deepseek_v2.py"
_MAX_LAYERS = 10_000
_SHOWN = 5


def _indexer(context: Context) -> Iterator[Hit]:
    model = context.model
    layers = model.family.num_layers
    if not model.number("index_topk") or layers is None or layers > _MAX_LAYERS or not model.layers:
        return
    owners = {part.place.layer for part in model.outside_experts if part.place.role is Role.INDEXER}
    expected = {layer for layer in range(layers) if owns_indexer(model, layer, context.engine)}
    count = f"{len(expected & owners)} of {len(expected)}"
    for layer in sorted(expected - owners):
        yield Hit(
            f"the config gives an indexer to this layer, which has none ({count} are there)",
            "take index_topk_freq, index_skip_topk_offset or indexer_types from the source's config",
            f"layers.{layer}.self_attn.indexer",
        )
    for layer in sorted(expected & owners):
        names = _suffixes(model.layers.get(layer, ()), layer)
        if missing := [part for part in _INDEXER_PARTS if f"self_attn.indexer.{part}" not in names]:
            yield _not_there([f"indexer.{part}" for part in missing], f"layers.{layer}.self_attn.indexer")
    for layer in sorted(owner for owner in owners - expected if owner is not None and owner < layers):
        yield Hit(
            "a layer that shares another one's indexer has one of its own: it is not read",
            "nothing to do; it takes space",
            f"layers.{layer}.self_attn.indexer",
            "note",
        )


def owns_indexer(model: Model, layer: int, engine: EngineName) -> bool:
    """SGLang reads indexer_types, else the pattern, else freq and offset; vLLM does not know indexer_types."""
    text = model.family.text_config
    types, pattern = text.get("indexer_types"), text.get("index_topk_pattern")
    if engine != "vllm" and isinstance(types, list) and layer < len(types):
        return bool(types[layer] == "full")
    if isinstance(pattern, str | list) and layer < len(pattern):
        return bool(pattern[layer] != "S")
    freq = model.number("index_topk_freq") or 1
    offset = model.number("index_skip_topk_offset")
    return max(layer - (2 if offset is None else offset) + 1, 0) % max(freq, 1) == 0


_MLA_PARTS = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "kv_a_layernorm")
_GQA_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
_INDEXER_PARTS = ("wq_b", "wk", "k_norm", "weights_proj")
_MTP_PARTS = ("eh_proj", "enorm", "hnorm", "shared_head.norm")


def _missing(context: Context) -> Iterator[Hit]:
    """Modules that every layer of a known family has."""
    model = context.model
    family = model.family
    if not family.known or family.num_layers is None or not 0 < family.num_layers <= _MAX_LAYERS:
        return
    with_experts = {experts.place.layer for experts in context.experts}
    dense = model.number("first_k_dense_replace")
    for layer in range(family.num_layers):
        is_dense = layer not in with_experts or (dense is not None and layer < dense)
        missing = _missing_in_layer(model, layer, not is_dense)
        if dense is not None and layer >= dense and layer not in with_experts:
            missing = [*(part for part in missing if not part.startswith("mlp.")), "mlp.experts"]
        if missing:
            yield _not_there(missing, f"layers.{layer}")
    top = {
        part.name.removeprefix(family.prefix)
        for part in model.parts.values()
        if part.place.layer is None and part.form != "none"
    }
    tied = model.served.config.get("tie_word_embeddings") is True
    for name in ("model.embed_tokens", "model.norm", *(() if tied else ("lm_head",))):
        if name not in top:
            yield _not_there([name], name)


def _missing_in_layer(model: Model, layer: int, has_experts: bool) -> list[str]:
    names = _suffixes(model.layers.get(layer, ()), layer)
    if not has_experts:
        mlp = [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    else:
        shared = [f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")]
        mlp = ["mlp.gate", *(shared if model.number("n_shared_experts") else [])]
    missing = [part for part in (*_wanted(model), *mlp) if part not in names]
    if model.attention == "gqa" and model.family.text_config.get("attention_bias") is True:
        with_bias = _suffixes([part for part in model.layers.get(layer, ()) if "bias" in part.leaves], layer)
        missing += [f"{name}.bias" for p in "qkv" if (name := f"self_attn.{p}_proj") in names - with_bias]
    if has_experts and model.family.text_config.get("topk_method") == "noaux_tc":
        biases = (part for part in model.layers.get(layer, ()) if "e_score_correction_bias" in part.leaves)
        missing += [] if any(biases) else ["mlp.gate.e_score_correction_bias"]
    return missing


def _suffixes(parts: Sequence[Part], layer: int) -> frozenset[str]:
    """Names after `layers.<i>.`, of modules that have a weight: a bias or a scale alone is what is left of one."""
    mark = f"layers.{layer}."
    return frozenset(part.name.rpartition(mark)[2] for part in parts if part.form != "none")


def _wanted(model: Model) -> list[str]:
    parts = [f"self_attn.{part}" for part in (_MLA_PARTS if model.attention == "mla" else _GQA_PARTS)]
    if model.attention == "mla":
        lora = bool(model.number("q_lora_rank"))
        parts += [f"self_attn.{part}" for part in (("q_a_proj", "q_b_proj", "q_a_layernorm") if lora else ("q_proj",))]
    elif model.family.text_config.get("use_qk_norm") is True:
        parts += ["self_attn.q_norm", "self_attn.k_norm"]
    return ["input_layernorm", "post_attention_layernorm", *parts]


def _not_there(missing: Sequence[str], where: str) -> Hit:
    return Hit(
        f"{_some(missing)}: not there",
        "restore them from the source: SGLang leaves such parameters as they were allocated",
        where,
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _mtp(context: Context) -> Iterator[Hit]:
    model = context.model
    layers, count = model.family.num_layers, model.number("num_nextn_predict_layers") or 0
    if layers is None or not 0 < count <= 16:
        return
    with_experts = {experts.place.layer for experts in context.experts}
    for layer in range(layers, layers + count):
        parts = model.layers.get(layer, ())
        if not parts and layer not in with_experts:
            yield Hit(
                f"next-token layer {layer} is not there, num_nextn_predict_layers is {count}: no speculative decoding",
                "serve without it; if that was not meant, restore its tensors and the index",
                f"layers.{layer}",
                "note" if model.served.mtp_dropped else "warning",
            )
        elif model.family.known:
            names = _suffixes(parts, layer)
            missing = [part for part in _MTP_PARTS if part not in names]
            if missing := missing + _missing_in_layer(model, layer, layer in with_experts):
                yield Hit(
                    f"the next-token layer is not complete: {_some(missing)} not there",
                    "restore it from the source, or drop the whole layer (--mtp drop)",
                    f"layers.{layer}",
                )


_LEAVES = frozenset({
    "weight", "bias", "weight_scale", "weight_scale_inv", "weight_packed", "weight_shape", "weight_zero_point",
    "weight_g_idx", "input_scale", "e_score_correction_bias", "qweight", "qzeros", "scales", "g_idx", "k_scale",
    "v_scale", "kv_scale", "output_scale", "inv_freq", "scale",
})  # fmt: skip
_KNOWN_PARTS: Mapping[str, frozenset[str]] = {
    "mla": frozenset({"q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
    "gqa": frozenset({"q_proj", "k_proj", "v_proj", "o_proj"}),
}
_KV_PARTS = frozenset({"attn", "attn_mqa", "rotary_emb", "k_proj", "v_proj"})


def _unknown(context: Context) -> Iterator[Hit]:
    """Names that no parameter has. Of a known family only; vision is not looked at."""
    model = context.model
    if not model.family.known:
        return
    known = _KNOWN_PARTS[model.attention]
    stops = context.engine == "vllm"

    def is_strange(part: Part) -> bool:
        place, leaf = part.place, leaf_of(part)
        if place.role is Role.VISION:
            return False
        is_known = place.role is not Role.OTHER and (
            place.role is not Role.ATTENTION or leaf in known or leaf in _KV_PARTS
        )
        return not (is_known or leaf == "self_attn") or bool(part.leaves.keys() - _LEAVES)

    for part in model.suspects(is_strange):
        place, leaf = part.place, leaf_of(part)
        strange = sorted(part.leaves.keys() - _LEAVES)
        name = f"{leaf}.{strange[0]}" if strange else leaf
        yield Hit(
            f"{name[:80]} is no name that {model.family.name} has: "
            + ("KeyError" if stops else "not loaded, with a warning at most"),
            "rename or remove it",
            part.name,
            "error" if stops and place.role is not Role.ROUTED_EXPERT else None,
        )


_ALL: Mapping[EngineName, str] = {
    "sglang": _LOADER,
    "vllm": _VLLM_MODEL,
    "transformers": "transformers core_model_loading.py",
}

RULES = (
    Rule("indexer_missing", "error", _ALL, _indexer),
    Rule("modules_missing", "error", _ALL, _missing),
    Rule(
        "mtp",
        "error",
        {
            "sglang": "SGLang srt/models/deepseek_nextn.py",
            "vllm": "vLLM model_executor/models/deepseek_mtp.py",
        },
        _mtp,
    ),
    Rule("unknown_name", "warning", {"sglang": _LOADER, "vllm": _VLLM_MODEL}, _unknown),
)

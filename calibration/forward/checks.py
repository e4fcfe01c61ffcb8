"""What must hold between config.json and the files before a model is run: numbers that can be computed with, and no
weight that the model would leave out."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from kizami.formats.errors import KizamiError, printable

_EVERY = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "vocab_size", "max_position_embeddings", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group",
)  # fmt: skip
_MLA = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DSA = ("q_lora_rank", "index_topk", "index_n_heads", "index_head_dim")
_GQA = ("num_key_value_heads", "head_dim")
_DSA_KINDS = ("deepseek_v32", "glm_moe_dsa")
# Only GLM-4.x has a default that its class leaves to `hidden_size / num_attention_heads`
_OPTIONAL = {"glm4_moe": {"head_dim"}}
_MOST = 1 << 31
# What shows in no tensor's shape
_SAID = (
    "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "rms_norm_eps",
)  # fmt: skip

# Of a layer that predicts a token beyond the next (DeepSeek-V3 technical report, 2.2): two norms and what joins them
_OF_MTP = frozenset({"eh_proj", "enorm", "hnorm"})
_WEIGHTS = frozenset({"weight", "weight_packed", "bias", "e_score_correction_bias"})  # no scale, no buffer of RoPE


def check_said(text: Mapping[str, Any]) -> None:
    """What a class of transformers would fill in with a number of its own, and nobody would see it in the result.
    KizamiError "bad_config" for a key that config.json lacks."""
    for key in _SAID:
        if text.get(key) is None:
            raise bad_config(f"{key} is missing")
    places = (text, *(text.get(key) for key in ("rope_parameters", "rope_scaling")))
    thetas = [place["rope_theta"] for place in places if isinstance(place, Mapping) and "rope_theta" in place]
    if not thetas:
        raise bad_config("rope_theta is missing, also in rope_parameters")
    for theta in thetas:
        if type(theta) not in (int, float) or not 0 < theta < 1e30:
            raise bad_config(f"rope_theta is {_shown(theta)}, expected a number between 0 and 1e30")


def check_numbers(config: Any, kind: str) -> None:
    """config: of a class of transformers, with its defaults. KizamiError "bad_config" that names the key."""
    dsa = kind in _DSA_KINDS
    keys = _EVERY + (_GQA if kind == "glm4_moe" else _MLA) + (_DSA if dsa else ())
    absent_may = _OPTIONAL.get(kind, set())
    for key in keys:
        found = getattr(config, key, None)
        if not (found is None and key in absent_may):
            _check_int(key, found, 1)
    for key in ("n_shared_experts", "first_k_dense_replace"):
        _check_int(key, getattr(config, key, None), 0)
    if not dsa and getattr(config, "index_topk", None) is not None:
        raise bad_config(f"index_topk is {_shown(config.index_topk)}, and the class of {kind} has no indexer")
    if (rank := getattr(config, "q_lora_rank", None)) is not None:
        _check_int("q_lora_rank", rank, 1)
    if kind != "glm4_moe" and config.qk_rope_head_dim % 2:
        raise bad_config(f"qk_rope_head_dim is {config.qk_rope_head_dim}, expected an even number")
    if kind == "glm4_moe" and config.num_attention_heads % config.num_key_value_heads:
        heads = f"{config.num_attention_heads} heads (num_attention_heads)"
        raise bad_config(f"{heads} cannot share {config.num_key_value_heads} (num_key_value_heads)")
    for key in ("routed_scaling_factor", "rms_norm_eps"):
        value: Any = getattr(config, key, None)
        if type(value) not in (int, float) or not math.isfinite(value) or not 0 < value < 1e30:
            raise bad_config(f"{key} is {_shown(value)}, expected a number between 0 and 1e30")


def _check_int(key: str, value: object, least: int) -> None:
    if type(value) is not int or not least <= value < _MOST:
        raise bad_config(f"{key} is {_shown(value)}, expected an integer from {least} to {_MOST - 1}")


def check_all_used(names: Iterable[str], prefix: str, parts: Callable[[int], Collection[str]], layers: int) -> None:
    """names: of tensors on disk; prefix: what stands before `layers.` in the model's own; parts: a layer's modules and
    tensors, without what stands before. KizamiError "unused_tensor" for the first weight without a place: a model that
    is run without it is another one."""
    form = re.compile(re.escape(prefix) + r"layers\.(0|[1-9][0-9]{0,8})\.(.+)", re.DOTALL)
    by_layer: dict[int, list[str]] = {}
    for name in names:
        if (found := form.fullmatch(name)) is not None:
            by_layer.setdefault(int(found[1]), []).append(found[2])
    for layer, rest in sorted(by_layer.items()):
        if layer >= layers and any(name.split(".")[0] in _OF_MTP for name in rest):
            continue
        used = parts(layer) if layer < layers else frozenset()
        for name in sorted(rest):
            module, _, leaf = name.rpartition(".")
            placed = name in used or (module in used and leaf != "bias")
            if leaf in _WEIGHTS and not placed:
                raise _unused(f"{prefix}layers.{layer}.{name}", layer, layers)


def _unused(tensor: str, layer: int, layers: int) -> KizamiError:
    beyond = f" (num_hidden_layers is {layers}, and this is no MTP layer)" if layer >= layers else ""
    return KizamiError(
        f"is in the checkpoint, and the model of config.json has no place for it{beyond}",
        code="unused_tensor",
        tensor=printable(tensor, 200),
        hint="config.json is another model's, or was edited: take it from the checkpoint's publisher",
    )


def bad_config(message: str) -> KizamiError:
    return KizamiError(message, code="bad_config", file="config.json")


def _shown(value: object) -> str:
    return "null" if value is None else printable(repr(value), 60)


def source_files(headers: Mapping[str, Any]) -> dict[str, list[int]]:
    """File -> [modification time in ns, bytes], as they were when the checkpoint was opened."""
    return {file: [header.mtime_ns, header.file_size] for file, header in headers.items()}

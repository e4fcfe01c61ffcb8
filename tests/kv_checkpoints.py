"""Checkpoints with an ordinary KV cache, and files of scales for them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_cases
from make_cases import f32, fp8_pair

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.fingerprint import config_sha256
from kizami.formats.kv_scales.neutral import KvScales, LayerScales

MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
GLM4 = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
VALUES = (((0.5,), (0.25,)), ((2.0,), (1.0,)))
BY_HEAD = (((0.5, 1.0), (0.25, 0.125)), ((2.0, 4.0), (1.0, 0.0625)))


def glm4(scales: dict[str, float] | None = None, **quant: Any) -> make_cases.Checkpoint:
    """Two layers and an MTP layer, 2 KV heads. scales: KV scale tensors, by what follows `model.layers.`; quant: what
    more the quantization_config says."""
    made = make_cases.tiny()
    made.config = {key: value for key, value in made.config.items() if key not in MLA_KEYS} | GLM4
    made.config["quantization_config"] |= quant
    for layer, shard in enumerate(made.shards.values()):
        for name in [name for name in shard if ".self_attn." in name]:
            del shard[name]
        for part, rows, cols in (
            ("q_proj", 256, 256),
            ("k_proj", 128, 256),
            ("v_proj", 128, 256),
            ("o_proj", 256, 256),
        ):
            shard |= fp8_pair(f"model.layers.{layer}.self_attn.{part}", rows, cols)
    for name, value in (scales or {}).items():
        made.shards[make_cases.shard_name(int(name[0]) + 1, 3)]["model.layers." + name] = f32([value])
    return made


def scales_of(source: Checkpoint, values: tuple[Any, ...] = VALUES, **more: Any) -> KvScales:
    """One scale per tensor, or per head where `values` has several. more: other fields of KvScales."""
    gqa = "kv_lora_rank" not in source.config
    layers = tuple(LayerScales(i, k, v, "calibrated") for i, (k, v) in enumerate(values))
    made = KvScales(
        source.config["model_type"],
        source.config["architectures"][0],
        "gqa" if gqa else "mla",
        2 if gqa else 0,
        "tensor" if len(values[0][0]) == 1 else "attn_head",
        config_sha256(source),
        None,
        layers,
    )
    return replace(made, **more)


def latent(value: float, source: str | None = None) -> Callable[[Checkpoint], KvScales]:
    """K and V of a latent are one row. By default 1.0 has a certificate, and what is not 1.0 was measured."""
    source = source or ("certificate" if value == 1.0 else "calibrated")

    def make(checkpoint: Checkpoint) -> KvScales:
        made = scales_of(checkpoint, (((value,), (value,)),) * 2)
        return replace(made, layers=tuple(replace(layer, source=source) for layer in made.layers))  # type: ignore[arg-type]

    return make


def write(scales: KvScales, path: Path) -> Path:
    scales.write(path)
    return path

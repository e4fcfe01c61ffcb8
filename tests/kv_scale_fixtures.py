"""Small checkpoints with GQA, and STATS that have KV ranges and nothing else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import make_cases
import numpy as np
from make_cases import Tensor, bf, f32

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.fingerprint import config_sha256, sample_contents
from kizami.formats.statistics import KvRange, LayerStatistics, Statistics, layer_file
from kizami.formats.statistics_writer import write_layer, write_manifest

HIDDEN, HEADS, KV_HEADS, WIDTH, LAYERS = 64, 4, 2, 16, 2
ROWS = KV_HEADS * WIDTH
TOKENS = {"sha256": "0" * 64, "sequences": 4, "seq_len": 8, "held_out": [1], "sources": [{"name": "a.txt"}]}


def gqa(
    *, model_type: str = "glm4_moe", architecture: str = "Glm4MoeForCausalLM", bias: bool = True, qk_norm: bool = False,
    size: float = 0.05, gamma: float = 1.0, **config: Any,
) -> make_cases.Checkpoint:  # fmt: skip
    """Two layers of attention, and one expert for the family's sake. size: of weights; gamma: of all norms."""
    rng = np.random.default_rng(6)
    tensors: dict[str, Tensor] = {"model.norm.weight": bf(np.ones(HIDDEN))}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows in (("q", HEADS * WIDTH), ("k", ROWS), ("v", ROWS)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = bf(size * rng.standard_normal((rows, HIDDEN)))
            if bias:
                tensors[f"{at}self_attn.{name}_proj.bias"] = bf(rng.standard_normal(rows))
        if qk_norm:
            tensors[f"{at}self_attn.k_norm.weight"] = bf(gamma * rng.uniform(0.5, 1.5, WIDTH))
        tensors[f"{at}input_layernorm.weight"] = bf(gamma * rng.uniform(0.5, 1.5, HIDDEN))
        tensors[f"{at}mlp.experts.0.up_proj.weight"] = bf(rng.standard_normal((32, HIDDEN)))
    full = {
        "architectures": [architecture], "model_type": model_type, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": WIDTH, "num_hidden_layers": LAYERS, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5, "vocab_size": 64, "use_qk_norm": qk_norm,
    }  # fmt: skip
    return make_cases.Checkpoint(config=full | config, shards={"model.safetensors": tensors}, indexed=False)


def with_scale(made: make_cases.Checkpoint, name: str, *values: float) -> make_cases.Checkpoint:
    made.shards["model.safetensors"][name] = f32(values)
    return made


def uniform_range(channels: int, amax: float, rms: float | None = None) -> KvRange:
    amax = float(np.float32(amax))
    each = np.full(channels, amax, np.float32)
    rms = amax / 4 if rms is None else rms
    return KvRange(each, np.zeros_like(each), np.full_like(each, rms), amax, rms, amax, amax)


def write_stats(source: Path, folder: Path, ranges: Mapping[int, Mapping[str, KvRange]], **changes: Any) -> Path:
    """STATS with these ranges by layer."""
    checkpoint = Checkpoint.open(source)
    folder.mkdir()
    files = {
        layer_file(layer): write_layer(folder, LayerStatistics(layer, None, {}, kv)) for layer, kv in ranges.items()
    }
    about = {"contents": sample_contents(checkpoint), "config": changes.get("config", config_sha256(checkpoint))}
    write_manifest(folder, about, TOKENS, {"keep": "none"}, {"kizami": "0"}, sorted(ranges), files, [])
    Statistics.open(folder)
    return folder

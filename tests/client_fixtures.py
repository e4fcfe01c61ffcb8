"""Checkpoints for the tests against real clients, all made from the tiny trained GLM. Needs torch.

`kimi_k2` and `kimi_k25` re-label its FP8 tensors the way Moonshot publishes them; `dense_twin` writes the BF16 model
that a quantized checkpoint stands for, decoded by the oracle (`kizami.quantize.reference`), not by the code under test.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from kizami.quantize import reference

Tensors = dict[str, torch.Tensor]

# The small MLA model under all three names: config keys that mean the same in glm_moe_dsa and deepseek_v3.
SHARED_KEYS = [
    "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "first_k_dense_replace",
    "hidden_act", "hidden_size", "initializer_range", "intermediate_size", "kv_lora_rank", "max_position_embeddings",
    "moe_intermediate_size", "n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob",
    "num_attention_heads", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads", "q_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "rms_norm_eps", "routed_scaling_factor", "tie_word_embeddings",
    "topk_group", "use_cache", "v_head_dim", "vocab_size",
]  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def load_tensors(folder: Path) -> Tensors:
    """Every tensor of a checkpoint, through its index where it has one."""
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    return {name: tensor for file in sorted(files) for name, tensor in load_file(folder / file).items()}


def write_checkpoint(
    folder: Path, tensors: Tensors, config: dict[str, Any], pattern: str = "model-{}-of-{}.safetensors", shards: int = 3
) -> Path:
    """Deal the tensors out to `shards` files in turn, so that weights and their scales often lie in different files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for k in range(shards):
        part = {name: tensors[name].contiguous() for name in names[k::shards]}
        file = pattern.format(k + 1, shards)
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.nbytes for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def convert(source: Path, out: Path, *options: str) -> Path:
    """`kizami convert` as a user runs it: another process, the same interpreter."""
    command = [
        sys.executable,
        "-c",
        "from kizami.cli.app import main; main()",
        "convert",
        str(source),
        str(out),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr[-4000:]}"
    return out


def _kimi_text(glm: Path) -> tuple[Tensors, dict[str, Any]]:
    """The GLM without what Kimi lacks (indexer, MTP layer), with the inv_freq buffers that K2 ships, and its config."""
    source = read_config(glm)
    layers = source["num_hidden_layers"]
    dropped = re.compile(rf"\.indexer\.|^model\.layers\.{layers}\.")
    tensors = {name: t for name, t in load_tensors(glm).items() if not dropped.search(name)}
    rope, theta = source["qk_rope_head_dim"], source["rope_parameters"]["rope_theta"]
    inv_freq = (1 / theta ** (torch.arange(0, rope, 2) / rope)).to(torch.bfloat16)
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": inv_freq.clone() for i in range(layers)}
    config = {key: source[key] for key in SHARED_KEYS} | {
        "rope_theta": theta,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "torch_dtype": "bfloat16",
    }
    quant = {k: v for k, v in source["quantization_config"].items() if k != "modules_to_not_convert"}
    return tensors, config | {"quantization_config": quant}


def kimi_k2(glm: Path, out: Path) -> Path:
    """Kimi-K2-Instruct's layout; `model_type` is deepseek_v3, as transformers has no `kimi_k2` without remote code."""
    tensors, config = _kimi_text(glm)
    return write_checkpoint(
        out, tensors, {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"} | config
    )


def kimi_k25(glm: Path, out: Path) -> Path:
    """Kimi-K2.5's layout: `language_model.` prefix, a vision tower, the text config and its quantization nested."""
    text, text_config = _kimi_text(glm)
    width, mlp, merged = 64, 128, 4 * 64
    shapes: dict[str, tuple[int, ...]] = {
        "mm_projector.pre_norm.weight": (width,),
        "mm_projector.pre_norm.bias": (width,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.0.bias": (merged,),
        "mm_projector.proj.2.weight": (text_config["hidden_size"], merged),
        "mm_projector.proj.2.bias": (text_config["hidden_size"],),
        "vision_tower.patch_embed.pos_emb.weight": (8, 8, width),
        "vision_tower.patch_embed.proj.weight": (width, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (width,),
        "vision_tower.encoder.final_layernorm.weight": (width,),
        "vision_tower.encoder.final_layernorm.bias": (width,),
    }
    linears = {"mlp.fc0": (mlp, width), "mlp.fc1": (width, mlp), "wqkv": (3 * width, width), "wo": (width, width)}
    for block in ("vision_tower.encoder.blocks.0", "vision_tower.encoder.blocks.1"):
        for name, (rows, cols) in linears.items():
            shapes |= {f"{block}.{name}.weight": (rows, cols), f"{block}.{name}.bias": (rows,)}
        for norm in ("norm0", "norm1"):
            shapes |= {f"{block}.{norm}.weight": (width,), f"{block}.{norm}.bias": (width,)}
    generator = torch.Generator().manual_seed(25)
    vision = {n: (torch.randn(s, generator=generator) * 0.02).to(torch.bfloat16) for n, s in shapes.items()}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": {"model_type": "kimi_k2"} | text_config,
        "vision_config": {
            "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": 2, "num_attention_heads": 2,
            "pos_emb_height": 8, "pos_emb_width": 8,
        },
        "projection_hidden_size": width,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    return write_checkpoint(out, {f"language_model.{n}": t for n, t in text.items()} | vision, config)


def decoded_fp8(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """BF16 value of a block-FP8 weight by the oracle."""
    return _bf16(reference.dequantize(weight.view(torch.uint8).numpy(), scale.numpy(), block))


def decoded_int4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """BF16 value of a packed weight by the oracle."""
    codes = reference.unpack(packed.numpy())
    steps = reference.from_bf16(scale.view(torch.uint16).numpy())
    return _bf16(codes * np.repeat(steps, codes.shape[1] // steps.shape[1], axis=1))


def _bf16(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(reference.to_bf16(values)).view(torch.bfloat16)


def dense_twin(quantized: Path, out: Path) -> Path:
    """Write the BF16 model that `quantized` (an output of kizami, or a block-FP8 source) stands for."""
    tensors, config = load_tensors(quantized), read_config(quantized)
    for level in (config, config.get("text_config", {})):
        level.pop("quantization_config", None)
    dense: Tensors = {}
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0]
        if name.endswith(".weight_packed"):
            dense[f"{module}.weight"] = decoded_int4(tensor, tensors[f"{module}.weight_scale"])
        elif tensor.dtype == torch.float8_e4m3fn:
            scale = tensors[f"{module}.weight_scale"]
            block = (1, tensor.shape[1]) if scale.shape == (len(tensor), 1) else (128, 128)
            dense[name] = decoded_fp8(tensor, scale, block)
        elif not name.endswith((".weight_scale", ".weight_shape")):
            dense[name] = tensor
    return write_checkpoint(out, dense, config, shards=1)

"""Small FP8 checkpoints with random weights, of model classes that transformers has: names and shapes are asked of the
class itself, so a name that no reader knows cannot get in. Needs torch and transformers.

The MLA models keep the true 512 + 64 rows of kv_a_proj_with_mqa: they are 4.5 blocks, and all that vLLM's CPU build
takes.
"""

from pathlib import Path
from typing import Any

import torch
from client_fixtures import Tensors, read_config, write_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

SHARED: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2,
    "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "num_attention_heads": 2, "vocab_size": 512, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "hidden_act": "silu", "rope_theta": 10000.0,
    "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 2, "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip
INDEXER = {"index_head_dim": 128, "index_n_heads": 2, "index_topk": 64}
GQA = {
    "num_key_value_heads": 1, "head_dim": 128, "partial_rotary_factor": 0.5, "use_qk_norm": True,
    "attention_bias": True,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", MLA),
    "deepseek_v32": ("DeepseekV32ForCausalLM", MLA | INDEXER),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", MLA | INDEXER | {"indexer_types": ["full"] * 2}),
    "glm4_moe": ("Glm4MoeForCausalLM", GQA),
}
BLOCK = (128, 128)


def fp8_model(family: str, out: Path) -> Path:
    """A checkpoint as its publisher ships it: GLM-4.x with a scale per output channel in compressed-tensors' form, the
    others with one per 128x128 block, V3.2 with F32 norms; all with an MTP layer behind the last."""
    architecture, own = FAMILIES[family]
    config = {"architectures": [architecture], "model_type": family} | SHARED | own
    channel = family == "glm4_moe"
    suffix = "weight_scale" if channel else "weight_scale_inv"
    tensors: Tensors = {}
    for name, weight in _with_mtp(_random(_shapes(config)), SHARED["num_hidden_layers"]).items():
        if name.endswith(("_proj.weight", "_with_mqa.weight", ".wk.weight", ".wq_b.weight")) and not name.endswith(
            (".weights_proj.weight", ".eh_proj.weight")
        ):
            block = (1, weight.shape[1]) if channel else BLOCK
            tensors[name], tensors[f"{name.removesuffix('weight')}{suffix}"] = fp8(weight, block)
        elif name.endswith("e_score_correction_bias") or (family == "deepseek_v32" and "norm" in name):
            tensors[name] = weight
        else:
            tensors[name] = weight.to(torch.bfloat16)
    return write_checkpoint(out, tensors, config | {"quantization_config": _channel() if channel else _blocks()})


def fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The e4m3 codes and F32 multipliers of a weight, by amax / 448; trailing blocks may be partial."""
    rows, cols = (torch.arange(size) // step for size, step in zip(weight.shape, block, strict=True))
    scale = torch.zeros(int(rows[-1]) + 1, int(cols[-1]) + 1)
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            scale[r, c] = weight[rows == r][:, cols == c].abs().max() / 448
    return (weight / scale[rows][:, cols]).to(torch.float8_e4m3fn), scale


def _blocks() -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def _channel() -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head", "re:.*eh_proj$", r"re:.*mlp\.gate$"],
    }  # fmt: skip


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What the model's class has, experts one by one as they are on disk."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert type(model).__name__ == config["architectures"][0]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        layer, fused, part = name.partition(".experts.")
        if not fused or tensor.ndim != 3:
            shapes[name] = tuple(tensor.shape)
            continue
        experts, rows, cols = tensor.shape
        parts = {"gate_up_proj": {"gate_proj": rows // 2, "up_proj": rows // 2}, "down_proj": {"down_proj": rows}}
        for part_name, part_rows in parts[part].items():
            shapes |= {f"{layer}.experts.{e}.{part_name}.weight": (part_rows, cols) for e in range(experts)}
    return shapes


def _random(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """Rows of very different size, so that a wrong row's scale shows; not the router's, so that no expert idles."""
    generator = torch.Generator().manual_seed(4)
    tensors: Tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensors[name] = 7 + values / 20
        elif name.endswith("norm.weight"):
            tensors[name] = 1 + values / 10
        elif len(shape) == 1:
            tensors[name] = values / 10
        elif name.endswith("mlp.gate.weight"):
            tensors[name] = values * shape[1] ** -0.5
        else:
            size = 2 ** torch.linspace(-1.5, 1.5, shape[0])[torch.randperm(shape[0], generator=generator)]
            tensors[name] = values * size[:, None] * (1 if "embed_tokens" in name else shape[1] ** -0.5)
    return tensors


def _with_mtp(tensors: Tensors, layers: int) -> Tensors:
    """The MTP layer: another of the last layer's kind, and what joins it to the model."""
    last, mtp = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    hidden = tensors["model.norm.weight"]
    joints = {f"{mtp}{name}.weight": hidden.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    joints[f"{mtp}eh_proj.weight"] = torch.cat([torch.eye(len(hidden))] * 2, dim=1) / 2
    copies = {name.replace(last, mtp, 1): t.flip(0) for name, t in tensors.items() if name.startswith(last)}
    return tensors | copies | joints


def open_model(folder: Path, **options: object) -> torch.nn.Module:
    """The model in BF16; nothing may be missing, and nothing left over but the MTP layer, which no model class has."""
    config = read_config(folder)
    auto = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True, **options)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    mtp = f"model.layers.{config.get('num_hidden_layers')}."
    assert [name for name in info["unexpected_keys"] if not name.startswith(mtp)] == []
    assert isinstance(model, torch.nn.Module)
    return model.eval()


@torch.inference_mode()
def logits(model: torch.nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=token_ids).logits[0].float()
    assert found.isfinite().all()
    return found

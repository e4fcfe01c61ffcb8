"""Write a synthetic FP8 checkpoint with DeepSeek-V3's names and sizes, for timing.

    python benchmarks/synthetic_checkpoint.py DIR

By default 4 shards of about 460 MB, one MoE layer each: 9 routed experts of 2048 x 7168 and small linears beside them.
The e4m3 codes are those of Gaussian weights under 128x128 blocks whose largest weight maps to about 448; every block
has its own F32 scale. Needs NumPy only; the same seed gives the same bytes.
"""

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist

import numpy as np

HIDDEN, INTERMEDIATE, BLOCK, VOCAB = 7168, 2048, 128, 1024
Q_LORA, KV_ROWS = 1536, 576  # 576 = kv_lora_rank 512 + rope 64: not a multiple of 128, so its last block is partial

Tensor = tuple[str, tuple[int, ...], np.ndarray]  # dtype word of the header, shape, bytes


def e4m3_values() -> np.ndarray:
    """The 127 finite magnitudes of e4m3fn in code order ("FP8 formats for deep learning", arXiv 2209.05433)."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))


def gaussian_codes() -> np.ndarray:
    """uint8 [65536]: a uniform 16-bit number in, the e4m3 code of a Gaussian weight out, +-4.27 sigma at 448."""
    half = np.array([NormalDist().inv_cdf(0.5 + (i + 0.5) / 65536) for i in range(32768)])
    values = e4m3_values()
    codes = np.searchsorted((values[1:] + values[:-1]) / 2, half * (448 / half[-1])).astype(np.uint8)
    return np.concatenate([codes | 0x80, codes])


class Maker:
    """Draws the tensors of one checkpoint from one random stream."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.codes = gaussian_codes()

    def fp8(self, module: str, rows: int, cols: int) -> Iterator[tuple[str, Tensor]]:
        weight = self.codes[self.rng.integers(0, 65536, (rows, cols), dtype=np.uint16)]
        grid = (-(-rows // BLOCK), -(-cols // BLOCK))
        scale = (0.02 * 4.27 / 448 * np.exp(0.25 * self.rng.standard_normal(grid))).astype(np.float32)
        yield f"{module}.weight", ("F8_E4M3", (rows, cols), weight)
        yield f"{module}.weight_scale_inv", ("F32", grid, scale.view(np.uint8))

    def bf16(self, name: str, *shape: int) -> tuple[str, Tensor]:
        values = (0.02 * self.rng.standard_normal(shape)).astype(np.float32)
        return name, ("BF16", shape, np.ascontiguousarray(values.view(np.uint16)[..., 1::2]).view(np.uint8))

    def layer(self, index: int, experts: int) -> Iterator[tuple[str, Tensor]]:
        prefix = f"model.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield self.bf16(f"{prefix}.{norm}.weight", HIDDEN)
        yield from self.fp8(f"{prefix}.self_attn.q_a_proj", Q_LORA, HIDDEN)
        yield from self.fp8(f"{prefix}.self_attn.kv_a_proj_with_mqa", KV_ROWS, HIDDEN)
        yield self.bf16(f"{prefix}.mlp.gate.weight", experts, HIDDEN)
        yield f"{prefix}.mlp.gate.e_score_correction_bias", ("F32", (experts,), np.zeros(4 * experts, np.uint8))
        for expert in (*(f"experts.{e}" for e in range(experts)), "shared_experts"):
            yield from self.fp8(f"{prefix}.mlp.{expert}.gate_proj", INTERMEDIATE, HIDDEN)
            yield from self.fp8(f"{prefix}.mlp.{expert}.up_proj", INTERMEDIATE, HIDDEN)
            yield from self.fp8(f"{prefix}.mlp.{expert}.down_proj", HIDDEN, INTERMEDIATE)


def write_shard(path: Path, tensors: dict[str, Tensor]) -> int:
    """Write one safetensors file (no library needed, so that this runs anywhere); returns its data bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + data.nbytes]}
        end += data.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(np.ascontiguousarray(data).data)
    return end


def config(layers: int, experts: int) -> dict[str, object]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": HIDDEN,
        "intermediate_size": 18432, "moe_intermediate_size": INTERMEDIATE, "num_hidden_layers": layers,
        "first_k_dense_replace": 0, "n_routed_experts": experts, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": Q_LORA, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": VOCAB,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
        },
    }  # fmt: skip


def write_checkpoint(folder: Path, *, layers: int = 4, experts: int = 9, seed: int = 0) -> int:
    """Write `layers` shards of one layer each into `folder` (made if absent); returns the data bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    maker, weight_map, total = Maker(seed), dict[str, str](), 0
    for index in range(layers):
        file = f"model-{index + 1:05d}-of-{layers:05d}.safetensors"
        tensors = dict(maker.layer(index, experts))
        if index == 0:
            tensors |= dict([maker.bf16("model.embed_tokens.weight", VOCAB, HIDDEN)])
        if index == layers - 1:
            tensors |= dict([maker.bf16("model.norm.weight", HIDDEN), maker.bf16("lm_head.weight", VOCAB, HIDDEN)])
        total += write_shard(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=1))
    (folder / "config.json").write_text(json.dumps(config(layers, experts), indent=1))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=4, help="shards, one MoE layer each (default 4)")
    parser.add_argument("--experts", type=int, default=9, help="routed experts per layer, 44 MB each (default 9)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    total = write_checkpoint(args.folder, layers=args.layers, experts=args.experts, seed=args.seed)
    print(f"{args.folder}: {args.layers} shards, {total / 1e9:.3f} GB")


if __name__ == "__main__":
    main()

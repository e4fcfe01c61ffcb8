"""Write a synthetic FP8 or BF16 checkpoint with DeepSeek-V3's names and sizes, for timing.

    python benchmarks/synthetic_checkpoint.py DIR [--layers 4] [--experts 9] [--dtype bf16] [--sparse]

By default 4 shards of about 460 MB, one MoE layer each: 9 routed experts of 2048 x 7168 and small linears beside them.
The e4m3 codes are those of Gaussian weights under 128x128 blocks whose largest weight maps to about 448; every block
has its own F32 scale. A sparse checkpoint has the same headers over holes, which read as zeros and take no disk. One
tensor at a time is in memory. Needs NumPy only; the same options give the same bytes.
"""

import argparse
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import numpy as np

Dtype = Literal["fp8", "bf16"]
BLOCK = 128
WIDTH = {"F8_E4M3": 1, "BF16": 2, "F32": 4}  # bytes of an element


@dataclass(frozen=True, slots=True)
class Widths:
    """Rows and columns of the linears. kv_rows = kv_lora_rank 512 + rope 64: not a multiple of 128, so its last block
    is partial."""

    hidden: int = 7168
    intermediate: int = 2048
    vocab: int = 1024
    q_lora: int = 1536
    kv_rows: int = 576


@dataclass(frozen=True, slots=True)
class Tensor:
    """dtype: the header's word; `data` draws the bytes, in the order in which tensors are written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * WIDTH[self.dtype]


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

    def __init__(self, seed: int, widths: Widths, dtype: Dtype) -> None:
        self.rng = np.random.default_rng(seed)
        self.widths, self.dtype = widths, dtype
        self.codes = gaussian_codes()

    def linear(self, module: str, rows: int, cols: int) -> Iterator[Tensor]:
        if self.dtype == "bf16":
            yield self.bf16(f"{module}.weight", rows, cols)
            return
        grid = (-(-rows // BLOCK), -(-cols // BLOCK))
        yield Tensor(f"{module}.weight", "F8_E4M3", (rows, cols), lambda: self._codes(rows, cols))
        yield Tensor(f"{module}.weight_scale_inv", "F32", grid, lambda: self._scales(grid))

    def _codes(self, rows: int, cols: int) -> np.ndarray:
        return self.codes[self.rng.integers(0, 65536, (rows, cols), dtype=np.uint16)]

    def _scales(self, grid: tuple[int, int]) -> np.ndarray:
        return (0.02 * 4.27 / 448 * np.exp(0.25 * self.rng.standard_normal(grid))).astype(np.float32)

    def bf16(self, name: str, *shape: int) -> Tensor:
        return Tensor(name, "BF16", shape, lambda: self._bf16(shape))

    def _bf16(self, shape: tuple[int, ...]) -> np.ndarray:
        values = (0.02 * self.rng.standard_normal(shape)).astype(np.float32)
        return np.ascontiguousarray(values.view(np.uint16)[..., 1::2])

    def layer(self, index: int, experts: int) -> Iterator[Tensor]:
        prefix, w = f"model.layers.{index}", self.widths
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield self.bf16(f"{prefix}.{norm}.weight", w.hidden)
        yield from self.linear(f"{prefix}.self_attn.q_a_proj", w.q_lora, w.hidden)
        yield from self.linear(f"{prefix}.self_attn.kv_a_proj_with_mqa", w.kv_rows, w.hidden)
        yield self.bf16(f"{prefix}.mlp.gate.weight", experts, w.hidden)
        bias = f"{prefix}.mlp.gate.e_score_correction_bias"
        yield Tensor(bias, "F32", (experts,), lambda: np.zeros(experts, np.float32))
        for expert in (*(f"experts.{e}" for e in range(experts)), "shared_experts"):
            yield from self.linear(f"{prefix}.mlp.{expert}.gate_proj", w.intermediate, w.hidden)
            yield from self.linear(f"{prefix}.mlp.{expert}.up_proj", w.intermediate, w.hidden)
            yield from self.linear(f"{prefix}.mlp.{expert}.down_proj", w.hidden, w.intermediate)

    def ends(self, index: int, layers: int) -> Iterator[Tensor]:
        """What goes into the file of the first layer and of the last one beside the layer."""
        w = self.widths
        if index == 0:
            yield self.bf16("model.embed_tokens.weight", w.vocab, w.hidden)
        if index == layers - 1:
            yield self.bf16("model.norm.weight", w.hidden)
            yield self.bf16("lm_head.weight", w.vocab, w.hidden)


def write_shard(path: Path, tensors: Sequence[Tensor], *, sparse: bool = False) -> int:
    """Write one safetensors file (no library needed, so that this runs anywhere); returns its data bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [end, end + tensor.nbytes],
        }  # fmt: skip
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if sparse:
            os.truncate(file.fileno(), 8 + len(text) + end)
            return end
        for tensor in tensors:
            file.write(np.ascontiguousarray(tensor.data()).data)
    return end


def config(layers: int, experts: int, widths: Widths, dtype: Dtype) -> dict[str, object]:
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": widths.hidden,
        "intermediate_size": 18432, "moe_intermediate_size": widths.intermediate, "num_hidden_layers": layers,
        "first_k_dense_replace": 0, "n_routed_experts": experts, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": widths.q_lora,
        "kv_lora_rank": widths.kv_rows - 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": widths.vocab, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    } | ({"quantization_config": fp8} if dtype == "fp8" else {})  # fmt: skip


def write_checkpoint(
    folder: Path,
    *,
    layers: int = 4,
    experts: int = 9,
    layers_per_file: int = 1,
    dtype: Dtype = "fp8",
    sparse: bool = False,
    widths: Widths | None = None,
    seed: int = 0,
) -> int:
    """Write the checkpoint into `folder` (made if absent); returns the data bytes, those of holes included."""
    folder.mkdir(parents=True, exist_ok=True)
    widths = widths or Widths()
    maker, weight_map, total = Maker(seed, widths, dtype), dict[str, str](), 0
    files = -(-layers // layers_per_file)
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        tensors: list[Tensor] = []
        for index in range(number * layers_per_file, min((number + 1) * layers_per_file, layers)):
            tensors += [*maker.layer(index, experts), *maker.ends(index, layers)]
        total += write_shard(folder / file, tensors, sparse=sparse)
        weight_map |= dict.fromkeys((tensor.name for tensor in tensors), file)
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=1))
    (folder / "config.json").write_text(json.dumps(config(layers, experts, widths, dtype), indent=1))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=4, help="MoE layers (default 4)")
    parser.add_argument("--experts", type=int, default=9, help="routed experts per layer, 44 MB each (default 9)")
    parser.add_argument("--layers-per-file", type=int, default=1, help="layers in one shard (default 1)")
    parser.add_argument("--dtype", choices=("fp8", "bf16"), default="fp8", help="of the linears (default fp8)")
    parser.add_argument("--sparse", action="store_true", help="headers over holes: the sizes without the bytes")
    widths = Widths()
    parser.add_argument("--hidden", type=int, default=widths.hidden, help="smaller ones: for tests")
    parser.add_argument("--intermediate", type=int, default=widths.intermediate)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    total = write_checkpoint(
        args.folder, layers=args.layers, experts=args.experts, layers_per_file=args.layers_per_file, dtype=args.dtype,
        sparse=args.sparse, widths=Widths(args.hidden, args.intermediate), seed=args.seed,
    )  # fmt: skip
    print(f"{args.folder}: {-(-args.layers // args.layers_per_file)} shards, {total / 1e9:.3f} GB")


if __name__ == "__main__":
    main()

"""`--method minmax` is compressed-tensors' rule bit for bit: by direct calls and against llm-compressor.

The direct tests run with any compressed-tensors; those of whole checkpoints need llm-compressor, which wants an
environment of its own. CPU only: on CUDA compressed-tensors 0.19 and 0.20 round differently (their Triton kernel
divides in FP32).
"""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")

import torch
from client_fixtures import Tensors, convert, load_tensors, write_checkpoint
from compressed_tensors.compressors import pack_to_int32
from compressed_tensors.entrypoints.convert import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, quantize
from compressed_tensors.quantization.utils import calculate_qparams

from kizami.quantize.linear import dequantize_rows, quantize_linear
from kizami.quantize.settings import Method

MINMAX = Method("minmax", scale_sign="positive")
EXPERTS = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"
LINEARS = r"re:.*_proj(_with_mqa)?$"


def group_args(group_size: int) -> QuantizationArgs:
    return QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group_size)


def fp8_weight(rows: int, cols: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaussian e4m3 codes and 128x128 block scales, with all that rounding can trip over: zero groups, negative zeros,
    groups of one magnitude, all 254 finite codes."""
    generator = torch.Generator().manual_seed(seed)
    grid = (-(-rows // 128), -(-cols // 128))
    weight = (torch.randn(rows, cols, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    codes = weight.view(torch.uint8)
    codes[1] = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8).repeat(1 + cols // 254)[
        :cols
    ]
    codes[2] = 0
    codes[3, ::2] = 0x80
    codes[3, 1::2] = 0
    codes[4] = 0x7E
    codes[4, ::3] = 0xFE
    codes[5, 128:] = 0
    scale = torch.rand(grid, generator=generator) * 1e-3 + 1e-5
    return weight, scale


def peer_dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    tensors = {"x.weight": weight, "x.weight_scale_inv": scale}
    return FP8BlockDequantizer(targets=["x"]).process(tensors)["x.weight"]


def peer_pack(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """weight_packed and weight_scale of a BF16 weight by compressed-tensors' own functions."""
    args = group_args(group_size)
    groups = weight.unflatten(-1, (-1, group_size))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    codes = quantize(x=weight, scale=scale, zero_point=None, args=args, dtype=torch.int8)
    return pack_to_int32(codes, 4), scale


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint16).numpy()


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("rows", [128, 200])
def test_fp8_linear_packs_like_compressed_tensors(group_size: int, rows: int) -> None:
    weight, scale = fp8_weight(rows, 384, seed=rows + group_size)
    packed, packed_scale = peer_pack(peer_dequantize(weight, scale), group_size)
    ours = quantize_linear(weight.view(torch.uint8).numpy(), scale.numpy(), (128, 128), group_size, MINMAX)
    np.testing.assert_array_equal(ours.scale, bits(packed_scale))
    np.testing.assert_array_equal(ours.packed, packed.numpy())


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_bf16_linear_packs_like_compressed_tensors(group_size: int) -> None:
    generator = torch.Generator().manual_seed(group_size)
    weight = (torch.randn(96, 256, generator=generator) * 0.03).to(torch.bfloat16)
    weight[7] = 0
    weight[8, :group_size] = 0
    weight[9] = 0.25
    packed, packed_scale = peer_pack(weight, group_size)
    ours = quantize_linear(bits(weight), None, None, group_size, MINMAX)
    np.testing.assert_array_equal(ours.scale, bits(packed_scale))
    np.testing.assert_array_equal(ours.packed, packed.numpy())


@pytest.mark.parametrize(("rows", "cols"), [(576, 256), (160, 256), (128, 200)])
def test_dequantised_rows_equal_the_peers_with_partial_blocks(rows: int, cols: int) -> None:
    weight, scale = fp8_weight(rows, cols, seed=rows + cols)
    ours = dequantize_rows(weight.view(torch.uint8).numpy(), scale.numpy(), (128, 128), 0)
    np.testing.assert_array_equal(ours, bits(peer_dequantize(weight, scale)))


def fp8_model(hidden: int, intermediate: int) -> tuple[Tensors, dict[str, object]]:
    """Two DeepSeek-V3 layers, the second with four experts, and every kind of tensor that the peer must pass by."""
    shapes = {}
    for layer in (0, 1):
        shapes[f"layers.{layer}.self_attn.q_a_proj"] = (128, hidden)
        shapes[f"layers.{layer}.self_attn.kv_a_proj_with_mqa"] = (160, hidden)
    # Wide enough for whole blocks: the peer cannot save a dequantised weight whose last block column is partial.
    mlps = {"layers.0.mlp": 256, "layers.1.mlp.shared_experts": 256}
    mlps |= {f"layers.1.mlp.experts.{e}": intermediate for e in range(4)}
    for module, width in mlps.items():
        shapes |= {f"{module}.{name}_proj": (width, hidden) for name in ("gate", "up")}
        shapes[f"{module}.down_proj"] = (hidden, width)
    tensors: Tensors = {}
    for seed, (module, (rows, cols)) in enumerate(shapes.items()):
        weight, scale = fp8_weight(rows, cols, seed)
        tensors |= {f"model.{module}.weight": weight, f"model.{module}.weight_scale_inv": scale}
    generator = torch.Generator().manual_seed(1)
    for name, rows in (("model.embed_tokens", 256), ("lm_head", 256), ("model.layers.1.mlp.gate", 4)):
        tensors[f"{name}.weight"] = torch.randn(rows, hidden, generator=generator).to(torch.bfloat16)
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = torch.linspace(6.8, 7.1, 4)
    config: dict[str, object] = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": hidden,
        "moe_intermediate_size": intermediate, "intermediate_size": 256, "num_hidden_layers": 2,
        "first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 0, "vocab_size": 256, "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        },
    }  # fmt: skip
    return tensors, config


def peer_convert(source: Path, out: Path, group_size: int) -> Path:
    """The peer as it must be called: every FP8 linear named for the dequantiser, the experts named for the scheme."""
    from llmcompressor import model_free_ptq

    scheme = QuantizationScheme(targets=[EXPERTS], weights=group_args(group_size), format="pack-quantized")
    model_free_ptq(
        source,
        out,
        config=QuantizationConfig(config_groups={"group_0": scheme}, ignore=[]),
        device="cpu",
        converter=FP8BlockDequantizer(targets=[LINEARS]),
    )
    return out


@pytest.mark.parity
@pytest.mark.parametrize(
    ("group_size", "hidden", "intermediate"),
    [
        (32, 384, 192),
        (64, 384, 192),
        (128, 384, 256),
    ],  # 192: a partial block in rows and in columns; 128 divides no 192
)
def test_checkpoint_equals_that_of_llm_compressor(
    tmp_path: Path, group_size: int, hidden: int, intermediate: int
) -> None:
    pytest.importorskip("llmcompressor")
    tensors, config = fp8_model(hidden, intermediate)
    source = write_checkpoint(tmp_path / "fp8", tensors, config)
    theirs = load_tensors(peer_convert(source, tmp_path / "theirs", group_size))
    ours = load_tensors(convert(source, tmp_path / "ours", "--method", "minmax", "--group-size", str(group_size)))
    assert sum(name.endswith("weight_packed") for name in ours) == 12
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if name.endswith("weight_shape"):  # the peer writes I64, kizami I32 like Kimi's own checkpoints
            assert tensor.tolist() == theirs[name].tolist(), name
        else:
            assert tensor.dtype == theirs[name].dtype, name
            assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


@pytest.mark.parity
def test_preset_w4a16_is_group_128(tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor")
    from llmcompressor import model_free_ptq

    tensors, config = fp8_model(256, 128)
    source = write_checkpoint(tmp_path / "fp8", tensors, config)
    model_free_ptq(
        source,
        tmp_path / "theirs",
        scheme="W4A16",
        ignore=["lm_head", "model.embed_tokens", "re:.*self_attn.*", "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|down)_proj$", r"re:.*mlp\.gate$"],
        device="cpu",
        converter=FP8BlockDequantizer(targets=[LINEARS]),
    )  # fmt: skip
    theirs = load_tensors(tmp_path / "theirs")
    ours = load_tensors(convert(source, tmp_path / "ours", "--method", "minmax", "--group-size", "128"))
    packed = [name for name in ours if name.endswith(("weight_packed", "weight_scale"))]
    assert len(packed) == 24
    for name in packed:
        assert torch.equal(ours[name], theirs[name]), name

"""The layouts as public readers read them: single functions of vLLM, SGLang and AutoAWQ, taken out of their files (the
packages without their dependencies are enough), and the linears of GPTQModel and AutoRound. Each test is skipped where
its package is not installed; the readers of test_layouts.py always run.

Versions that this was run with: vllm 0.33.0, sglang 0.5.23, autoawq 0.2.9, gptqmodel 7.7.0, auto-round 0.16.1.
"""

import ast
import importlib.util
import re
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from layout_readers import Array, random_linear

from kizami.formats.int4_layout import Format, layout_specs
from kizami.formats.method_configs import build_method_config
from kizami.quantize.arrange import arrange

torch = pytest.importorskip("torch")

N, K, GROUP = 64, 256, 32  # AutoRound wants multiples of 32 rows
QUANTIZATION = {"vllm": "model_executor/layers/quantization", "sglang": "srt/layers/quantization"}


def file_of(package: str, path: str) -> Path:
    """A file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    for root in spec.submodule_search_locations or [] if spec else []:
        if (Path(root) / path).exists():
            return Path(root) / path
    pytest.skip(f"{package} with {path} is not installed")


def functions_of(package: str, path: str, *wanted: str, **given: Any) -> SimpleNamespace:
    """Functions of one file by name, wherever they stand in it, with `given` for the names that they use."""
    tree = ast.parse(file_of(package, path).read_text())
    found = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in wanted}
    assert set(found) == set(wanted), f"{package} {path} has {sorted(found)} of {wanted}"
    header: list[ast.stmt] = [ast.ImportFrom("__future__", [ast.alias("annotations")], 0)]
    for node in found.values():
        node.decorator_list = []
    module = ast.fix_missing_locations(ast.Module(header + list(found.values()), []))
    space = {"torch": torch, "numpy": np, "np": np, "re": re, "MappingProxyType": MappingProxyType} | given
    exec(compile(module, path, "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in wanted})


def linear(format: Format, group: int = GROUP) -> tuple[dict[str, Any], Any, Array, Array]:
    """Tensors of one linear, its canonical words, its codes and its scales by column."""
    packed, scale, _ = random_linear(N, K, group, seed=11)
    scale[:1] = 0x3C00  # the largest scale of F16 times 8 is infinite
    specs = layout_specs(format, "m", N, K, group)
    arrays = arrange(format, packed, scale, group, (N, K), "m")
    tensors = {spec.name[2:]: torch.from_numpy(array.copy()) for spec, array in zip(specs, arrays, strict=True)}
    codes = ((packed.view(np.uint32)[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15).reshape(N, K)
    values = (scale.astype(np.uint32) << 16).view(np.float32).repeat(group, axis=1)
    return tensors, torch.from_numpy(packed.copy()), codes.astype(np.int64), values


def weights(codes: Array, scales: Array) -> Array:
    """[N, K] as a reader that computes in F16 gives them."""
    return ((codes - 8) * scales).astype(np.float16)


# ---------------------------------------------------------------- vLLM


def test_vllm_packs_gptq_and_awq_into_the_same_words() -> None:
    packers = functions_of(
        "vllm", f"{QUANTIZATION['vllm']}/utils/quant_utils.py", "gptq_pack", "awq_pack", "pack_rows", "pack_cols",
        "get_pack_factor",
    )  # fmt: skip
    gptq, _, codes, _ = linear("gptq")
    awq = linear("awq")[0]
    by_column = torch.from_numpy(codes.T.copy())
    assert torch.equal(packers.gptq_pack(by_column, 4, K, N), gptq["qweight"])
    assert torch.equal(packers.awq_pack(by_column, 4, K, N), awq["qweight"])
    eights = torch.full((K // GROUP, N), 8)
    assert torch.equal(packers.awq_pack(eights, 4, K // GROUP, N), awq["qzeros"])
    assert torch.equal(packers.pack_cols(eights, 4, K // GROUP, N), linear("gptq_v2")[0]["qzeros"])
    assert torch.equal(packers.pack_cols(eights - 1, 4, K // GROUP, N), gptq["qzeros"])


def test_vllm_turns_awq_into_gptqs_words_and_zero_points_of_8() -> None:
    convert = functions_of(
        "vllm", f"{QUANTIZATION['vllm']}/auto_awq.py", "_convert_awq_to_standard_format",
        PackedvLLMParameter=lambda data, **_: data, replace_parameter=setattr,
        _REVERSE_AWQ_PACK_ORDER=[0, 4, 1, 5, 2, 6, 3, 7],
    )._convert_awq_to_standard_format  # fmt: skip
    awq = linear("awq")[0]
    layer = SimpleNamespace(**{name: SimpleNamespace(data=awq[name], device="cpu") for name in ("qweight", "qzeros")})
    convert(layer, "qweight", "qzeros", 4)
    assert torch.equal(layer.qweight, linear("gptq")[0]["qweight"])
    assert (layer.qzeros == 0x88888888 - 2**32).all()


def test_vllms_triton_experts_get_the_same_nibbles_from_all_three() -> None:
    path = f"{QUANTIZATION['vllm']}/moe_wna16.py"
    convert = functions_of("vllm", path, "convert_awq_tensor", "convert_gptq_int4_qzeros")
    awq, packed, _, _ = linear("awq")
    assert torch.equal(convert.convert_awq_tensor(awq["qweight"], "qweight"), packed.view(torch.uint8))
    assert (convert.convert_awq_tensor(awq["qzeros"], "qzeros") == 0x88).all()
    gptq = linear("gptq")[0]
    assert torch.equal(gptq["qweight"].T.contiguous(), packed)
    assert (convert.convert_gptq_int4_qzeros(gptq["qzeros"].view(torch.uint8)) == 0x88).all()


# ---------------------------------------------------------------- SGLang, AutoAWQ


def test_sglang_makes_the_bytes_of_w4afp8_from_pack_quantized() -> None:
    repack = functions_of(
        "sglang", f"{QUANTIZATION['sglang']}/compressed_tensors/schemes/compressed_tensors_w4a8_fp8_moe.py",
        "_unpack_repack_int32_to_cutlass_int8",
    )._unpack_repack_int32_to_cutlass_int8  # fmt: skip
    tensors, packed, _, _ = linear("w4afp8", 128)
    assert torch.equal(repack(packed[None], 4)[0], tensors["weight"])


def test_sglang_dequantizes_awq_to_the_same_weights() -> None:
    tensors, _, codes, scales = linear("awq")
    path, name = "kernels/ops/quantization/awq_triton.py", "awq_dequantize_decomposition"
    dequantize = getattr(functions_of("sglang", path, name), name)
    got = dequantize(tensors["qweight"], tensors["scales"], tensors["qzeros"])
    assert np.array_equal(got.T.numpy(), weights(codes, scales))


def test_autoawq_dequantizes_awq_to_the_same_weights() -> None:
    reader = functions_of(
        "awq", "utils/packing_utils.py", "dequantize_gemm", "unpack_awq", "reverse_awq_order",
        AWQ_REVERSE_ORDER=[0, 4, 1, 5, 2, 6, 3, 7],
    )  # fmt: skip
    tensors, _, codes, scales = linear("awq")
    got = reader.dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, GROUP)
    assert np.array_equal(got.T.numpy(), weights(codes, scales))


# ---------------------------------------------------------------- GPTQModel, AutoRound


@pytest.mark.parametrize("format", ["gptq", "gptq_v2"])
def test_gptqmodels_linear_dequantizes_both_forms(format: Format) -> None:
    pytest.importorskip("gptqmodel")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    tensors, _, codes, scales = linear(format)
    layer = TorchLinear(4, GROUP, sym=True, desc_act=False, in_features=K, out_features=N, bias=False)
    assert not any(layer.load_state_dict(tensors, strict=True))
    if format == "gptq":
        convert_gptq_v1_to_v2_format_module(layer, 4, torch.int32)
    layer.eval()
    assert np.array_equal(layer.dequantize_weight().T.numpy(), weights(codes, scales))


def test_gptqmodels_linear_dequantizes_awq() -> None:
    pytest.importorskip("gptqmodel")
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    tensors, _, codes, scales = linear("awq")
    got = dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, GROUP)
    assert np.array_equal(got.T.numpy(), weights(codes, scales))


@pytest.mark.parametrize(("format", "module"), [("gptq", "qlinear_torch_zp"), ("gptq_v2", "qlinear_torch")])
def test_autorounds_linear_multiplies_by_the_same_weights(format: Format, module: str) -> None:
    pytest.importorskip("auto_round_extension")
    quant_linear = importlib.import_module(f"auto_round_extension.torch.{module}").QuantLinear
    tensors, _, codes, scales = linear(format)
    layer = quant_linear(4, GROUP, K, N, bias=False, g_idx=True)
    layer.load_state_dict(tensors, strict=False)
    layer.post_init()
    got = layer(torch.eye(K, dtype=torch.float32))
    assert np.array_equal(got.T.numpy(), weights(codes, scales).astype(np.float32))


# ---------------------------------------------------------------- configs

PACKED = [f"model.layers.1.mlp.experts.{i}.{p}_proj" for i in range(3) for p in ("gate", "up", "down")]
PLAIN = [
    "lm_head", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj",
    "model.layers.1.self_attn.q_a_proj", "model.layers.1.self_attn.kv_a_proj_with_mqa", "model.layers.1.mlp.gate",
    "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.shared_experts.up_proj", "model.layers.1.mixer.in_x",
]  # fmt: skip
MERGED = [
    "model.layers.0.mlp.gate_up_proj", "model.layers.1.mlp.shared_experts.gate_up_proj",
    "model.layers.1.self_attn.fused_qkv_a_proj_with_mqa", "model.layers.1.self_attn.fused_qkv_a_proj",
]  # fmt: skip
INT4 = [*PACKED, "model.layers.1.mlp.experts"]


@pytest.mark.parametrize(("package", "file"), [("vllm", "utils/gptq_utils.py"), ("sglang", "utils.py")])
def test_engines_skip_what_gptqs_dynamic_rules_name(package: str, file: str) -> None:
    override = functions_of(package, f"{QUANTIZATION[package]}/{file}", "get_dynamic_override").get_dynamic_override
    config = SimpleNamespace(**build_method_config("gptq", 32, packed=PACKED, plain=PLAIN))
    assert all(override(config, name) is False for name in PLAIN + MERGED)
    assert all(override(config, name) is None for name in INT4)


def test_gptqmodel_reads_the_config() -> None:
    pytest.importorskip("gptqmodel")
    from gptqmodel.quantization.config import QuantizeConfig

    for format in ("gptq", "gptq_v2"):
        config = QuantizeConfig.from_quant_config(build_method_config(format, 32, packed=PACKED, plain=PLAIN))
        assert (config.bits, config.group_size, config.sym, config.desc_act) == (4, 32, True, False)
        assert str(getattr(config.format, "value", config.format)) == format
        assert all(config.dynamic_get(name) is False for name in PLAIN)
        assert all(config.dynamic_get(name) is None for name in PACKED)


def test_vllm_skips_what_awqs_substrings_name() -> None:
    skipped = functions_of("vllm", f"{QUANTIZATION['vllm']}/utils/quant_utils.py", "is_layer_skipped").is_layer_skipped
    entries = build_method_config("awq", 32, packed=PACKED, plain=PLAIN)["modules_to_not_convert"]
    members = {"gate_up_proj": ["gate_proj", "up_proj"], "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"]}
    assert all(skipped(name, entries, members, match_mode="substring") for name in PLAIN + MERGED)
    assert not any(skipped(name, entries, members, match_mode="substring") for name in INT4)


def test_sglang_skips_what_awqs_substrings_name() -> None:
    path, name = f"{QUANTIZATION['sglang']}/awq/awq.py", "is_layer_skipped_awq"
    skipped = getattr(functions_of("sglang", path, name), name)
    entries = build_method_config("awq", 32, packed=PACKED, plain=PLAIN)["modules_to_not_convert"]
    assert all(skipped(module, entries) for module in PLAIN + MERGED)
    assert not any(skipped(module, entries) for module in INT4)

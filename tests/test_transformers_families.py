"""Every family that transformers has a class for, opened by it: one random model each, MLA with its true 576 rows.

test_transformers.py does the same with the trained GLM, whose kv_a_proj_with_mqa has 160 rows, and for Kimi's layouts.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers", minversion="5.24")

import torch
from case_runner import kizami
from client_fixtures import decoded_fp8, dense_twin, load_tensors
from client_models import BLOCK, FAMILIES, fp8_model, logits, open_model
from transformers import CompressedTensorsConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),
    pytest.mark.long,
]

TOKEN_IDS = torch.arange(0, 511, 7)[None]
Converted = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """converted(family, *options): the FP8 source and the output."""
    folder = tmp_path_factory.mktemp("families")
    source = cache(lambda family: fp8_model(family, folder / "sources" / family))

    @cache
    def make(family: str, *options: str) -> tuple[Path, Path]:
        out = folder / "_".join((family, *options))
        said = kizami("convert", source(family), out, *options)
        assert said.code == 0, said.stderr
        return source(family), out

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_the_oracle_decodes(family: str, converted: Converted, tmp_path: Path) -> None:
    _, out = converted(family)
    twin = open_model(dense_twin(out, tmp_path / "twin"))
    assert torch.equal(logits(open_model(out), TOKEN_IDS), logits(twin, TOKEN_IDS))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_that_is_not_packed_is_the_oracles_on_the_source(family: str, converted: Converted) -> None:
    source, out = map(load_tensors, converted(family))
    scales = {name: f"{name}_scale{'' if family == 'glm4_moe' else '_inv'}" for name in source}
    linears = [name for name, scale in scales.items() if scale in source and ".experts." not in name]
    assert len(linears) == {"deepseek_v3": 24, "deepseek_v32": 30, "glm_moe_dsa": 30, "glm4_moe": 21}[family]
    for name in linears:
        block = (1, source[name].shape[1]) if family == "glm4_moe" else BLOCK
        expected = decoded_fp8(source[name], source[scales[name]], block)
        assert torch.equal(out[name].view(torch.int16), expected.view(torch.int16)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mixed_output_computes_what_the_oracle_decodes(family: str, converted: Converted, tmp_path: Path) -> None:
    _, mixed = converted(family, "--rest", "fp8")
    twin = open_model(dense_twin(mixed, tmp_path / "twin"))
    dequantized = open_model(mixed, quantization_config=CompressedTensorsConfig(dequantize=True))
    assert torch.equal(logits(dequantized, TOKEN_IDS), logits(twin, TOKEN_IDS))
    module = f"model.layers.1.self_attn.{'k_proj' if family == 'glm4_moe' else 'kv_a_proj_with_mqa'}"
    tensors = load_tensors(mixed)
    assert tensors[f"{module}.weight"].dtype == torch.float8_e4m3fn
    shape = tensors[f"{module}.weight_scale"].shape
    assert shape == ((128, 1) if family == "glm4_moe" else (5, 2))  # 576 rows: the last block has 64
    ours, theirs = dequantized.state_dict(), twin.state_dict()
    assert torch.equal(ours[f"{module}.weight"], theirs[f"{module}.weight"])


def test_experts_in_fp8_compute_what_the_oracle_decodes(converted: Converted, tmp_path: Path) -> None:
    """Per channel: of experts in FP8 blocks transformers 5.24 multiplies weight and scale as they are, and ends with an
    error of shapes (integrations/compressed_tensors.py, CompressedTensorsDequantize)."""
    _, fp8 = converted("glm4_moe", "--scheme", "fp8-block")
    assert load_tensors(fp8)["model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn
    twin = open_model(dense_twin(fp8, tmp_path / "twin"))
    dequantized = open_model(fp8, quantization_config=CompressedTensorsConfig(dequantize=True))
    assert torch.equal(logits(dequantized, TOKEN_IDS), logits(twin, TOKEN_IDS))

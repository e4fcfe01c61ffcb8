"""What kizami writes, opened by transformers and compressed-tensors as a user opens it, on a small trained model.

One trained MLA mixture of experts in three published layouts: GLM-5 (as shipped in the demo), Kimi-K2 and Kimi-K2.5.
The truth is the dense BF16 twin that the oracle decodes from kizami's output bytes.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers", minversion="5.24")  # older ones refuse the demo's `indexed_attention` layers

import torch
from case_runner import kizami
from client_fixtures import decoded_fp8, dense_twin, kimi_k2, kimi_k25, load_tensors
from client_models import logits, open_model
from scripts import script
from transformers import AutoTokenizer, CompressedTensorsConfig

# transformers warns of every option passed beside a checkpoint's own quantization_config; it then honours `dequantize`.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")]

FAMILIES = ["glm", "kimi_k2", "kimi_k25"]
TEXT = "The default encoding of source code is UTF-8.\n\ndef main(argv=None):\n    parser = argparse.ArgumentParser()\n"
Converted = Callable[..., Path]


@pytest.fixture(scope="module")
def sources(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {
        "glm": demo_checkpoint,
        "kimi_k2": kimi_k2(demo_checkpoint, folder / "kimi_k2"),
        "kimi_k25": kimi_k25(demo_checkpoint, folder / "kimi_k25"),
    }


@pytest.fixture(scope="module")
def converted(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """converted(family, *options): the output folder, made once for all tests of this file."""
    folder = tmp_path_factory.mktemp("converted")

    @cache
    def make(family: str, *options: str) -> Path:
        out = folder / re.sub(r"\W+", "_", "_".join((family, *options)))
        said = kizami("convert", sources[family], out, *options)
        assert said.code == 0, said.stderr
        return out

    return make


@pytest.fixture(scope="module")
def token_ids(demo_checkpoint: Path) -> torch.Tensor:
    return torch.tensor([AutoTokenizer.from_pretrained(demo_checkpoint)(TEXT)["input_ids"]])


@pytest.mark.parametrize(
    ("family", "options"),
    [("glm", ()), ("glm", ("--method", "minmax", "--group-size", "128")), ("kimi_k2", ()), ("kimi_k25", ())],
    ids=["glm", "glm-minmax-g128", "kimi_k2", "kimi_k25"],
)
def test_logits_equal_those_of_the_dense_twin(
    family: str, options: tuple[str, ...], converted: Converted, tmp_path: Path, token_ids: torch.Tensor
) -> None:
    out = converted(family, *options)
    model = open_model(out)
    assert model.config.quantization_config.quantization_config.format == "pack-quantized"
    twin = open_model(dense_twin(out, tmp_path / "twin"))
    assert torch.equal(logits(model, token_ids), logits(twin, token_ids))


def test_dequantize_option_gives_the_same_logits(converted: Converted, token_ids: torch.Tensor) -> None:
    out = converted("glm")
    dequantized = open_model(out, quantization_config=CompressedTensorsConfig(dequantize=True))
    assert torch.equal(logits(dequantized, token_ids), logits(open_model(out), token_ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_dequantised_linears_equal_the_oracle_on_the_source(
    family: str, sources: dict[str, Path], converted: Converted
) -> None:
    source, ours = load_tensors(sources[family]), load_tensors(converted(family))
    block = (128, 128)
    linears = [name for name in source if f"{name}_scale_inv" in source and ".experts." not in name]
    assert len(linears) == {"glm": 60, "kimi_k2": 40, "kimi_k25": 40}[family]
    for name in linears:
        expected = decoded_fp8(source[name], source[f"{name}_scale_inv"], block)
        assert torch.equal(ours[name].view(torch.int16), expected.view(torch.int16)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_that_is_not_fp8_is_copied(family: str, sources: dict[str, Path], converted: Converted) -> None:
    source, ours = load_tensors(sources[family]), load_tensors(converted(family))
    copied = [
        name for name, tensor in source.items() if tensor.dtype != torch.float8_e4m3fn and "_scale_inv" not in name
    ]
    assert copied
    for name in copied:
        assert ours[name].dtype == source[name].dtype, name
        assert torch.equal(ours[name].view(torch.uint8), source[name].view(torch.uint8)), name


@pytest.mark.parametrize("family", ["kimi_k2", "kimi_k25"])
def test_the_layout_changes_no_packed_byte(family: str, converted: Converted, token_ids: torch.Tensor) -> None:
    glm, kimi = load_tensors(converted("glm")), load_tensors(converted(family))
    packed = [name for name in kimi if name.endswith(("weight_packed", "weight_scale", "weight_shape"))]
    assert len(packed) == 4 * 16 * 3 * 3
    for name in packed:
        assert torch.equal(kimi[name], glm[name.removeprefix("language_model.")]), name
    # Below index_topk tokens the GLM's indexer selects everything: then the two architectures are one function.
    assert torch.equal(
        logits(open_model(converted(family)), token_ids), logits(open_model(converted("glm")), token_ids)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_output_opens_and_agrees(
    family: str, converted: Converted, tmp_path: Path, token_ids: torch.Tensor
) -> None:
    mixed = converted(family, "--rest", "fp8")
    expected = logits(open_model(dense_twin(mixed, tmp_path / "twin")), token_ids)
    dequantized = open_model(mixed, quantization_config=CompressedTensorsConfig(dequantize=True))
    assert torch.equal(logits(dequantized, token_ids), expected)
    running = open_model(mixed)  # FP8 weights and FP8 activations: close, not equal
    fp8 = [name for name, tensor in running.state_dict().items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(fp8) == {"glm": 50, "kimi_k2": 40, "kimi_k25": 40}[family]
    found = logits(running, token_ids)
    kl = (expected.softmax(-1) * (expected.log_softmax(-1) - found.log_softmax(-1))).sum(-1).mean()
    assert 0 < kl < 0.01


@pytest.mark.slow
def test_perplexity_example_runs(
    demo_checkpoint: Path, converted: Converted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    module = script("examples", "perplexity")
    (tmp_path / "text.txt").write_text(TEXT * 40)
    arguments = [
        str(demo_checkpoint),
        str(converted("glm")),
        "--text",
        str(tmp_path / "text.txt"),
        "--tokens",
        "512",
        "--window",
        "128",
    ]
    monkeypatch.setattr("sys.argv", ["perplexity.py", *arguments])
    module.main()
    printed = capsys.readouterr().out
    found = re.search(r"mean KL\s+([\d.]+)", printed)
    assert found is not None
    assert 0 < float(found[1]) < 0.05

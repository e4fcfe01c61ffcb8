"""Weights as calibration reads them, against the oracle's decoding."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

import numpy as np
import torch
from client_fixtures import decoded_fp8, decoded_int4, load_tensors, write_checkpoint
from client_models import fp8

from kizami.calibration.forward import weights as module
from kizami.calibration.forward.weights import Weights
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError

ROWS, COLS = 300, 200  # partial blocks at both ends
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture(autouse=True)
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 50 rows: they begin and end inside of blocks."""
    monkeypatch.setattr(module, "BAND", 50 * COLS)


def matrix(rows: int = ROWS) -> torch.Tensor:
    return torch.randn((rows, COLS), generator=torch.Generator().manual_seed(rows))


def saved(folder: Path, tensors: dict[str, torch.Tensor], quantization: object = None) -> Weights:
    config = {"model_type": "deepseek_v3"} | ({} if quantization is None else {"quantization_config": quantization})
    return Weights(Checkpoint.open(write_checkpoint(folder, tensors, config, shards=1)))


@pytest.mark.parametrize(
    ("block", "shape"), [((128, 128), (3, 2)), ((1, COLS), (ROWS, 1)), ((ROWS, COLS), (1, 1)), ((ROWS, COLS), ())]
)
def test_fp8_is_the_oracles_in_every_rectangle(block: tuple[int, int], shape: tuple[int, ...], tmp_path: Path) -> None:
    codes, scale = fp8(matrix(), block)
    assert scale.numel() == np.prod(shape, dtype=int)
    expected = decoded_fp8(codes, scale, block)
    leaf, quantization = ("weight_scale_inv", BLOCKS) if block == (128, 128) else ("weight_scale", None)
    with saved(tmp_path / "src", {"m.weight": codes, f"m.{leaf}": scale.reshape(shape)}, quantization) as weights:
        assert weights.shape("m.weight") == (ROWS, COLS)
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(weights.read("m.weight", dtype=dtype), expected.to(dtype))
        part = weights.read("m.weight", rows=slice(37, 259), cols=slice(11, 140))
        assert torch.equal(part, expected[37:259, 11:140].float())
        ids = np.array([5, 299, 6, 5, 0])
        assert torch.equal(weights.gather("m.weight", ids), expected[ids].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_weights_keep_their_value(dtype: torch.dtype, tmp_path: Path) -> None:
    weight, vector = matrix().to(dtype), matrix()[0].to(dtype)
    with saved(tmp_path / "src", {"m.weight": weight, "m.bias": vector}) as weights:
        assert torch.equal(weights.read("m.weight", rows=slice(1, 77), cols=slice(3, 9)), weight[1:77, 3:9].float())
        assert torch.equal(weights.read("m.bias"), vector.float())
        assert weights.shape("m.bias") == (COLS,)


def test_int4_sources_are_the_oracles(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BAND", 4000)
    tensors = load_tensors(converted)
    packed = [name.removesuffix("_packed") for name in tensors if name.endswith(".weight_packed")][:3]
    with Weights(Checkpoint.open(converted)) as weights:
        for name in packed:
            expected = decoded_int4(tensors[f"{name}_packed"], tensors[f"{name}_scale"])
            assert weights.shape(name) == expected.shape
            assert torch.equal(weights.read(name), expected.float())
            assert torch.equal(weights.read(name, rows=slice(3, 20), cols=slice(8, 50)), expected[3:20, 8:50].float())


def test_fused_experts_are_read_one_by_one(tmp_path: Path) -> None:
    """As a state_dict of transformers 5 has them."""
    config = {"model_type": "deepseek_v3", "n_routed_experts": 3, "moe_intermediate_size": 8, "hidden_size": 32}
    base = "model.layers.0.mlp.experts"
    gate_up, down = torch.randn(3, 16, 32), torch.randn(3, 32, 8)
    folder = write_checkpoint(
        tmp_path / "src", {f"{base}.gate_up_proj": gate_up, f"{base}.down_proj": down}, config, shards=1
    )
    with Weights(Checkpoint.open(folder)) as weights:
        assert torch.equal(weights.read(f"{base}.1.up_proj.weight"), gate_up[1, 8:])
        assert torch.equal(weights.read(f"{base}.2.down_proj.weight"), down[2])


@pytest.mark.parametrize("place", ["code", "scale", "overflow", "plain"])
def test_a_number_that_is_not_finite_is_refused_by_name(place: str, tmp_path: Path) -> None:
    codes, scale = fp8(matrix(), (128, 128))
    plain = matrix()
    if place == "code":
        codes.view(torch.uint8)[299, 3] = 0x7F
    elif place == "scale":
        scale[2, 1] = float("inf")
    elif place == "overflow":  # finite in float32, beyond BF16
        scale[0, 0] = 3.4e38
        codes.view(torch.uint8)[0, 0] = 0x39
    else:
        plain[299, 0] = float("nan")
    tensors = {"m.weight": codes, "m.weight_scale_inv": scale, "p.weight": plain}
    with saved(tmp_path / "src", tensors, BLOCKS) as weights, pytest.raises(KizamiError) as refused:
        weights.read("p.weight" if place == "plain" else "m.weight")
    assert refused.value.code == "non_finite"
    assert refused.value.tensor == ("p.weight" if place == "plain" else "m.weight")
    assert refused.value.file is not None


def test_a_tensor_that_is_nowhere_is_named(tmp_path: Path) -> None:
    with saved(tmp_path / "src", {"m.weight": matrix()}) as weights, pytest.raises(KizamiError, match="is in no file"):
        weights.shape("model.norm.weight")


def test_integers_are_no_weights(tmp_path: Path) -> None:
    tensors = {"m.weight": torch.zeros(4, 4, dtype=torch.int32)}
    with saved(tmp_path / "src", tensors) as weights, pytest.raises(KizamiError) as refused:
        weights.read("m.weight")
    assert refused.value.code == "unsupported_dtype"

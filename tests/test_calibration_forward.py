"""The streamed forward pass against transformers' own, and what it measures against plain hooks."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

import numpy as np
import torch
from calibration_oracle import Layer, run
from calibration_runs import calibrate, random_tokens
from client_fixtures import convert, dense_twin, kimi_k2, kimi_k25, load_tensors, read_config, write_checkpoint
from client_models import FAMILIES, SHARED, fp8_model
from transformers import AutoConfig

from kizami.calibration.data.tokens import TokenSet
from kizami.calibration.forward import attention
from kizami.calibration.forward.model import CLASSES
from kizami.calibration.forward.settings import Settings
from kizami.formats.statistics import KvRange, LayerStatistics, Statistics

SMALL = Settings(token_chunk=64, query_block=32)  # so that sequences and experts take several


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("sources")

    @cache
    def make(name: str) -> Path:
        match name:
            case "trained":
                return demo_checkpoint
            case "kimi_k2" | "kimi_k25":
                made = (kimi_k2 if name == "kimi_k2" else kimi_k25)(demo_checkpoint, folder / name)
                if name == "kimi_k2":  # its own model_type, which transformers runs as deepseek_v3
                    config = read_config(made) | {"model_type": "kimi_k2"}
                    write_checkpoint(made, load_tensors(made), config, "again-{}-of-{}.safetensors")
                return made
            case "shared":  # GLM-5.2: layers that take the keys that another's indexer chose
                return shared_indexers(folder / name)
        return fp8_model(name, folder / name)

    return make


def shared_indexers(out: Path) -> Path:
    """A random GLM-5 with a second sparse layer, which has no indexer of its own."""
    made = fp8_model("glm_moe_dsa", out)
    tensors, config = load_tensors(made), read_config(made)
    moved = {name: t for name, t in tensors.items() if not name.startswith("model.layers.2.")}
    for name, tensor in tensors.items():
        if name.startswith("model.layers.1.") and ".indexer." not in name:
            moved[name.replace("layers.1.", "layers.2.")] = tensor.clone()
    more = {"num_hidden_layers": 3, "indexer_types": ["full", "full", "shared"], "num_nextn_predict_layers": 0}
    return write_checkpoint(out, moved, config | more, "again-{}-of-{}.safetensors")


def check_layers(source: Path, tokens: TokenSet, out: Path, twin: Path | None = None) -> None:
    """twin: the same model in another form, for the oracle."""
    expected, left = run(twin or source, tokens), calibrate(source, tokens, out, SMALL)
    statistics = Statistics.open(out)
    assert statistics.layers == tuple(range(len(expected)))
    for index, (layer, (hidden, ids)) in enumerate(zip(expected, left, strict=True)):
        cosine = torch.cosine_similarity(hidden.double(), layer.hidden.double(), dim=1)
        assert cosine.min() > 1 - 1e-9, index
        assert torch.allclose(hidden, layer.hidden, rtol=1e-3, atol=1e-4), index
        if layer.ids is not None:
            assert torch.equal(ids, layer.ids.int()), index
        check_statistics(statistics.layer(index), layer, tokens)


def check_statistics(found: LayerStatistics, expected: Layer, tokens: TokenSet) -> None:
    linears = {name.split(f"layers.{found.layer}.")[1]: h for name, h in found.linears.items()}
    assert linears.keys() == expected.linears.keys()
    for name, h in expected.linears.items():
        assert np.allclose(linears[name], h, rtol=1e-4), name
    assert (found.experts is not None) == bool(expected.experts)
    for name, values in expected.experts.items():
        ours = getattr(found.experts, name)
        assert ours.shape == tuple(values.shape), name
        assert np.allclose(ours, values, rtol=1e-4, atol=1e-7 * float(values.max())), name
    assert found.kv.keys() == expected.kv.keys()
    for name, rows in expected.kv.items():
        check_range(found.kv[name], rows.double(), rows[:: tokens.seq_len].abs().max().item())


def check_range(found: KvRange, rows: torch.Tensor, first_amax: float) -> None:
    assert found.amax == pytest.approx(rows.abs().max().item(), rel=1e-5)
    assert found.rms == pytest.approx(rows.square().mean().sqrt().item(), rel=1e-5)
    assert found.first_token_amax == pytest.approx(first_amax, rel=1e-5)
    assert np.allclose(found.channel_amax, rows.abs().amax(dim=0), rtol=1e-4)
    assert np.allclose(found.channel_mean, rows.mean(dim=0), atol=1e-5)
    assert np.allclose(found.channel_std, rows.std(dim=0, correction=0), rtol=1e-4)
    magnitudes = rows.abs().flatten().sort().values
    exact = float(magnitudes[int(np.ceil(0.9999 * len(magnitudes))) - 1])
    assert exact * (1 - 1e-5) <= found.p9999 <= min(exact * (1 + 1 / 16) * (1 + 1e-5), found.amax)


def test_every_layer_of_the_trained_glm_is_transformers_own(sources: Callable[[str], Path], tmp_path: Path) -> None:
    source = sources("trained")
    check_layers(source, random_tokens(source, 4, 48), tmp_path / "stats")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "seq_len"),
    [
        ("kimi_k2", 96), ("kimi_k25", 96), ("deepseek_v3", 80), ("glm4_moe", 80),
        ("deepseek_v32", 64), ("glm_moe_dsa", 64),  # index_topk is 64: every key is chosen
        ("deepseek_v32", 200), ("glm_moe_dsa", 200), ("shared", 200), ("shared", 48),
    ],
)  # fmt: skip
def test_every_layer_of_every_family_is_transformers_own(
    name: str, seq_len: int, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    source = sources(name)
    check_layers(source, random_tokens(source, 5, seq_len, (1, 3)), tmp_path / "stats")


@pytest.mark.long
def test_an_int4_source_is_run_as_what_it_stands_for(demo_checkpoint: Path, tmp_path: Path) -> None:
    source = convert(demo_checkpoint, tmp_path / "int4")
    tokens = random_tokens(source, 3, 48)
    check_layers(source, tokens, tmp_path / "stats", dense_twin(source, tmp_path / "twin"))


@pytest.mark.parametrize(("name", "seq_len"), [("deepseek_v32", 150), ("glm_moe_dsa", 50), ("glm4_moe", 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_works_on_the_device_and_in_the_dtype_of_its_weights(
    name: str, seq_len: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's meta device stands for one that is not the CPU: what mixes the two is an error."""
    monkeypatch.setattr(attention, "_finite", lambda rows: rows)  # asks for a value
    config = AutoConfig.for_model(name, **SHARED | FAMILIES[name][1])
    config._attn_implementation = attention.IMPLEMENTATION
    folder, prefix = CLASSES[name]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    layer = getattr(module, f"{prefix}DecoderLayer")(config, 0).to(dtype).to("meta")
    rotary = getattr(module, f"{prefix}RotaryEmbedding")(config)
    topk = getattr(config, "index_topk", None)
    if topk is not None and seq_len <= topk:
        layer.self_attn.indexer = attention.EveryKey()
    seen: list[tuple[str, torch.Tensor]] = []
    with torch.inference_mode(), attention.observed(layer, lambda *found: seen.append(found), lambda *_: None):
        x = torch.empty((seq_len, 256), device="meta", dtype=dtype)
        out, chosen = attention.attend(layer, x, rotary, 64, lambda *_: None, topk, None)
    assert (out.device.type, out.dtype, out.shape) == ("meta", dtype, x.shape)
    assert (chosen is None) == (topk is None or seq_len <= topk)
    assert {rows.dtype for _, rows in seen} == {dtype}
    assert {rows.device.type for _, rows in seen} == {"meta"}


@pytest.mark.long
def test_a_run_in_bfloat16_measures_nearly_the_same(sources: Callable[[str], Path], tmp_path: Path) -> None:
    source = sources("trained")
    tokens = random_tokens(source, 4, 48)
    expected = run(source, tokens)
    left = calibrate(source, tokens, tmp_path / "stats", replace(SMALL, dtype="bfloat16"))
    for index, (layer, (hidden, _)) in enumerate(zip(expected, left, strict=True)):
        assert torch.cosine_similarity(hidden, layer.hidden, dim=1).mean() > 0.99, index
    found = Statistics.open(tmp_path / "stats")
    assert found.manifest["settings"]["dtype"] == "bfloat16"
    for name, h in expected[0].linears.items():
        assert np.allclose(found.layer(0).linears[f"model.layers.0.{name}"], h, rtol=0.1, atol=1e-6), name


@pytest.mark.long
def test_the_kept_inputs_are_those_of_the_mlp(sources: Callable[[str], Path], tmp_path: Path) -> None:
    source = sources("trained")
    tokens = random_tokens(source, 3, 32)
    expected = run(source, tokens)
    calibrate(source, tokens, tmp_path / "all", replace(SMALL, keep="all"))
    calibrate(source, tokens, tmp_path / "some", replace(SMALL, keep="held-out"))
    calibrate(source, tokens, tmp_path / "none", replace(SMALL, keep="none"))
    kept = np.arange(32, 64)  # sequence 1 is held out
    for index in (0, 2):
        x, ids, gates = expected[index].mlp_input, expected[index].ids, expected[index].gates
        assert x is not None
        with (
            Statistics.open(tmp_path / "all").inputs(index) as all_of,
            Statistics.open(tmp_path / "some").inputs(index) as some,
        ):
            rows = all_of.rows(np.arange(96))
            assert np.allclose(rows, x.bfloat16().float(), rtol=2**-7)
            assert np.array_equal(some.rows(np.arange(32)), rows[kept])
            assert np.flatnonzero(all_of.held_out).tolist() == kept.tolist()
            assert some.held_out.all()
            if ids is None or gates is None:
                assert all_of.experts.shape == (96, 0)
                continue
            assert np.array_equal(all_of.experts, ids)
            assert np.allclose(all_of.gates, gates, rtol=1e-4)
            assert np.array_equal(some.experts, all_of.experts[kept])
            assert np.array_equal(some.gates, all_of.gates[kept])
    assert not [path for path in (tmp_path / "none").iterdir() if path.name.startswith("inputs")]


@pytest.mark.long
def test_held_out_sequences_are_in_no_sum(sources: Callable[[str], Path], tmp_path: Path) -> None:
    """Other tokens in the sequence that is held out change no statistic of weights, only the count beside them."""
    source = sources("trained")
    tokens = random_tokens(source, 3, 32)
    other = tokens.ids.copy()
    other[1] = other[1][::-1]
    for name, ids in (("one", tokens.ids), ("two", other)):
        calibrate(source, replace(tokens, ids=ids, sha256=name), tmp_path / name, SMALL)
    one, two = (Statistics.open(tmp_path / name).layer(1) for name in ("one", "two"))
    assert one.experts is not None
    assert two.experts is not None
    for name in ("h_x", "h_a", "sum_g2", "sum_g4", "n"):
        assert np.allclose(getattr(one.experts, name), getattr(two.experts, name), rtol=1e-6), name
    assert not np.array_equal(one.experts.n_held_out, two.experts.n_held_out)
    for name, h in one.linears.items():
        assert np.allclose(h, two.linears[name], rtol=1e-6), name


@pytest.mark.long
def test_an_mtp_layer_is_not_run_and_the_manifest_says_so(sources: Callable[[str], Path], tmp_path: Path) -> None:
    source = sources("trained")
    calibrate(source, random_tokens(source, 2, 16), tmp_path / "stats")
    manifest = Statistics.open(tmp_path / "stats").manifest
    assert manifest["layers"] == [0, 1, 2, 3, 4]
    assert "MTP layers [5] were not run" in manifest["notes"][0]

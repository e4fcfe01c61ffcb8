"""Which checkpoints are calibrated: names and shapes of published ones, and refusals before any weight is read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

import inventory
import numpy as np
import torch
from calibration_runs import random_tokens
from client_fixtures import load_tensors, read_config, write_checkpoint
from client_models import fp8_model

from kizami.calibration.forward.memory import choose_chunks, sizes_of
from kizami.calibration.forward.model import Model
from kizami.calibration.forward.run import run_calibration
from kizami.calibration.forward.settings import Settings
from kizami.calibration.forward.weights import Weights
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.statistics import Statistics


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fp8_model("deepseek_v3", tmp_path_factory.mktemp("model") / "src")


def refusal(checkpoint: Checkpoint) -> KizamiError:
    with Weights(checkpoint) as weights, pytest.raises(KizamiError) as refused:
        Model(checkpoint, weights)
    return refused.value


@pytest.mark.long
@pytest.mark.parametrize("name", ["glm-5.2-fp8", "deepseek-v3.2-fp8", "kimi-k2-fp8", "kimi-k2.5", "glm-4.7-fp8"])
def test_every_published_checkpoint_has_what_transformers_classes_need(name: str, tmp_path: Path) -> None:
    """Names and shapes of all their tensors, and 2 GB of memory for sequences of 2048 tokens."""
    inventory.write_sparse(tmp_path, name)
    checkpoint = Checkpoint.open(tmp_path)
    with Weights(checkpoint) as weights:
        model = Model(checkpoint, weights)
        config = inventory.config(name)
        assert model.layers == config.get("text_config", config)["num_hidden_layers"]  # type: ignore[attr-defined, index]
        chunks = choose_chunks(model, 128, 2048, Settings(), 4)
        assert chunks.needed <= 2_000_000_000
        assert chunks.tokens == 2048
        sizes = sizes_of(model, 128, 2048, chunks.tokens)
        assert (sizes.tokens, sizes.top_k, sizes.slots, sizes.chunks) == (262144, 8, 9, 128)


def test_yarn_and_scale_are_those_of_the_published_config() -> None:
    """Kimi-K2: 192^-0.5 * (0.1 ln 32 + 1)^2."""
    from kizami.calibration.forward.model import _config
    from kizami.formats.families import find_family

    family, _ = find_family(inventory.config("kimi-k2-fp8"), ())
    kind, config = _config(family)
    assert kind == "kimi_k2"
    assert config.rope_parameters["rope_type"] == "yarn"
    with torch.device("meta"):
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

        assert DeepseekV3Attention(config, 0).scaling == pytest.approx(192**-0.5 * 1.3465735902799727**2)


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"model_type": "qwen3_moe"}, "unsupported_model", "qwen3_moe"),
        ({"scoring_func": "softmax"}, "unsupported_model", "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "unsupported_model", "topk_method"),
        ({"moe_layer_freq": 2}, "unsupported_model", "moe_layer_freq"),
        ({"num_experts_per_tok": 9}, "bad_config", "9 of 8 experts"),
        ({"n_group": 3}, "bad_config", "3 groups"),
        ({"num_attention_heads": 3}, "shape_mismatch", "expected [576, 128]"),
        ({"num_attention_heads": "many"}, "bad_config", "refuses it"),
        ({"hidden_act": "swosh"}, "bad_config", "DecoderLayer cannot be built"),
        ({"rope_scaling": {"type": "bogus"}}, "bad_config", "RotaryEmbedding cannot be built"),
        ({"hidden_size": 512}, "shape_mismatch", "expected [512, 512]"),
        ({"num_hidden_layers": 90_000}, "missing_tensor", "is in no file"),
        ({"n_group": None}, "bad_config", "n_group is missing"),
        ({"topk_group": None}, "bad_config", "topk_group is missing"),
        ({"n_shared_experts": None}, "bad_config", "n_shared_experts"),
        ({"moe_intermediate_size": 0}, "bad_config", "moe_intermediate_size is 0"),
        ({"qk_rope_head_dim": 0}, "bad_config", "qk_rope_head_dim is 0"),
        ({"head_dim": 0}, "bad_config", "head_dim 0: 128 channels would be rotated, expected 64"),
        ({"head_dim": 32}, "bad_config", "head_dim 32: 32 channels"),
        ({"index_topk": 1}, "bad_config", "index_topk is 1"),
        ({"routed_scaling_factor": float("inf")}, "bad_config", "routed_scaling_factor is inf"),
        ({"routed_scaling_factor": 1e308}, "bad_config", "routed_scaling_factor is 1e+308"),
        (
            {"n_shared_experts": 0},
            "unused_tensor",
            "layers.1.mlp.shared_experts.down_proj.weight: is in the checkpoint",
        ),
        ({"num_hidden_layers": 1}, "unused_tensor", "num_hidden_layers is 1, and this is no MTP layer"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused(change: dict[str, Any], code: str, said: str, source: Path) -> None:
    checkpoint = Checkpoint.open(source)
    error = refusal(replace(checkpoint, config=checkpoint.config | change))
    assert error.code == code, error
    assert said in str(error)


@pytest.mark.parametrize(
    "key",
    [
        "num_experts_per_tok",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "routed_scaling_factor",
        "rms_norm_eps",
        "rope_theta",
    ],
)
def test_what_a_class_would_fill_in_unseen_is_asked_for(key: str, source: Path) -> None:
    checkpoint = Checkpoint.open(source)
    gone = {key, "rope_parameters"} if key == "rope_theta" else {key}
    config = {k: v for k, v in checkpoint.config.items() if k not in gone}
    error = refusal(replace(checkpoint, config=config))
    assert (error.code, f"{key} is missing" in error.message) == ("bad_config", True)


@pytest.mark.parametrize("theta", [float("inf"), 0, "x", None])
def test_a_rope_theta_that_is_no_number_is_refused(theta: object, source: Path) -> None:
    checkpoint = Checkpoint.open(source)
    odd = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    error = refusal(replace(checkpoint, config=checkpoint.config | odd))
    assert (error.code, "rope_theta is" in error.message) == ("bad_config", True)


def test_heads_of_no_width_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(fp8_model("glm4_moe", tmp_path / "src"))
    error = refusal(replace(checkpoint, config=checkpoint.config | {"head_dim": 0}))
    assert (error.code, error.file) == ("bad_config", "config.json")
    assert "head_dim is 0" in error.message


def test_what_torch_and_transformers_think_of_a_config_is_not_printed(
    source: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    checkpoint = Checkpoint.open(source)
    odd = {"n_shared_experts": 0, "rope_scaling": {"type": "linear", "factor": 0.5, "strange": 1}}
    refusal(replace(checkpoint, config=checkpoint.config | odd))
    assert not capfd.readouterr().err
    assert not [str(w.message) for w in recwarn.list]


def broken(source: Path, out: Path, tensor: str, value: float) -> Checkpoint:
    tensors = load_tensors(source)
    tensors[tensor] = torch.full_like(tensors[tensor], value)
    return Checkpoint.open(write_checkpoint(out, tensors, read_config(source)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("mlp.experts.3.up_proj.weight_scale_inv", 1e18, "h_a of expert 3"),
        ("mlp.experts.3.up_proj.weight_scale_inv", 5e35, "mlp.experts.3: inputs or products of"),
        ("mlp.shared_experts.up_proj.weight_scale_inv", 1e20, "mlp.shared_experts.down_proj are not finite"),
        ("mlp.gate.weight", -1e4, "mlp.gate: weights of the router of"),
        ("self_attn.kv_b_proj.weight_scale_inv", 1e26, "self_attn.o_proj are not finite"),
        # an RMSNorm whose sum of squares is infinite gives zeros, and everything behind it would seem sound
        ("self_attn.kv_a_proj_with_mqa.weight_scale_inv", 1e19, "self_attn.kv_b_proj: inputs of"),
        ("post_attention_layernorm.weight", 1e-30, "h_x of expert"),
        ("post_attention_layernorm.weight", 0, "h_x of expert"),
        ("self_attn.o_proj.weight_scale_inv", 1e20, "h_x of expert"),
        ("mlp.shared_experts.down_proj.weight_scale_inv", 1e22, "behind layer 1 the hidden states"),
        ("mlp.experts.3.down_proj.weight_scale_inv", 1e24, "behind layer 1 the hidden states"),
        ("mlp.experts.3.down_proj.weight_scale_inv", -1, "expected none below 0"),
    ],
)
def test_numbers_beyond_float32_are_refused_by_the_name_of_the_module(
    name: str, value: float, said: str, source: Path, tmp_path: Path
) -> None:
    """Also in the last layer, behind which nobody reads them."""
    tokens = random_tokens(source, 4, 32)
    checkpoint = broken(source, tmp_path / "src", f"model.layers.1.{name}", value)
    with pytest.raises(KizamiError) as refused:
        run_calibration(checkpoint, tokens, tmp_path / "stats", Settings())
    assert refused.value.code == "non_finite"
    assert said in str(refused.value), str(refused.value)
    assert "layer 1" in str(refused.value) or "model.layers.1" in str(refused.value)
    assert not (tmp_path / "stats").exists()


@pytest.mark.parametrize(
    "lost", ["model.layers.1.mlp.experts.7.down_proj.weight", "model.layers.0.self_attn.o_proj.weight"]
)
def test_a_tensor_that_is_missing_is_named_before_the_run(lost: str, source: Path) -> None:
    checkpoint = Checkpoint.open(source)
    gone = {lost, f"{lost}_scale_inv"}
    tensors = {name: info for name, info in checkpoint.tensors.items() if name not in gone}
    error = refusal(replace(checkpoint, tensors=tensors))
    assert (error.code, error.tensor) == ("missing_tensor", lost)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (Settings(max_memory=300_000_000), "memory"),
        (Settings(device="cuda:7"), "bad_device"),
        (Settings(device="toaster"), "bad_device"),
    ],
)
def test_a_run_that_cannot_work_is_refused_at_the_start(
    settings: Settings, code: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(KizamiError) as refused:
        run_calibration(Checkpoint.open(source), random_tokens(source, 2, 16), tmp_path / "stats", settings)
    assert refused.value.code == code
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("sequences", "seq_len", "token"), [(2, 16, 512), (2, 16, -1), (1, 513, 3)])
def test_tokens_of_another_model_are_refused(
    sequences: int, seq_len: int, token: int, source: Path, tmp_path: Path
) -> None:
    tokens = random_tokens(source, sequences, seq_len, ())
    tokens.ids[0, 3] = token
    with pytest.raises(KizamiError) as refused:
        run_calibration(Checkpoint.open(source), tokens, tmp_path / "stats", Settings())
    assert refused.value.code == "bad_token"


@pytest.mark.long
@pytest.mark.parametrize(("rows", "ends"), [(3, False), (60, True)])
def test_hidden_states_that_are_not_finite_are_counted_and_too_many_end_the_run(
    rows: int, ends: bool, source: Path, tmp_path: Path
) -> None:
    """One token is the only one to reach channel 0, which the first layer's MLP takes beyond float32."""
    tensors, config = load_tensors(source), read_config(source)
    for projection in ("gate_proj", "up_proj"):
        name = f"model.layers.0.mlp.{projection}.weight"
        del tensors[f"{name}_scale_inv"]
        tensors[name] = torch.zeros(tensors[name].shape, dtype=torch.bfloat16)
        tensors[name][0, 0] = 1e20
    tensors["model.layers.0.self_attn.o_proj.weight"].view(torch.uint8)[0] = 0
    tensors["model.embed_tokens.weight"][:, 0] = 0
    tokens = random_tokens(source, 4, 100, ())
    tokens.ids[:] = tokens.ids % 400
    for row in range(rows):
        tokens.ids[row % 4, row // 4] = 500
    tensors["model.embed_tokens.weight"][500, 0] = 1
    folder = write_checkpoint(tmp_path / "src", tensors, config)
    if ends:
        with pytest.raises(KizamiError) as refused:
            run_calibration(Checkpoint.open(folder), tokens, tmp_path / "stats", Settings())
        assert refused.value.code == "non_finite"
        assert "products of 60 of 400 tokens are not finite" in refused.value.message
        assert refused.value.tensor == "model.layers.0.mlp"
        return
    run_calibration(Checkpoint.open(folder), tokens, tmp_path / "stats", Settings(keep="all"))
    found = Statistics.open(tmp_path / "stats")
    assert [note for note in found.manifest["notes"] if "not finite" in note] == [
        f"layer {i}: 3 tokens were not finite behind it; they are in no sum" for i in (0, 1)
    ]
    experts = found.layer(1).experts
    assert experts is not None
    assert experts.n.sum() == 2 * 397
    with found.inputs(1) as inputs:
        assert np.flatnonzero(~inputs.rows(np.arange(400)).any(axis=1)).tolist() == [0, 100, 200]

"""What weights prove of the KV cache: no input whatever exceeds a bound, and bounds of norms are reached."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_cases
import numpy as np
import pytest
from kv_scale_fixtures import HIDDEN, KV_HEADS, LAYERS, ROWS, WIDTH, gqa

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.families import find_family
from kizami.formats.serving.model import read_model
from kizami.quantize.kv_scales.certificate import (
    Bound,
    linear_bound,
    norm_bound,
    pair_sigma,
    rope_factor,
    rotated_linear_bound,
    rotated_norm_bound,
)
from kizami.quantize.kv_scales.read_source import LayerSource, read_layers

RNG = np.random.default_rng(7)
EPS = 1e-6


def rms_norm(x: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    return gamma * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS)


def rope(x: np.ndarray, angles: np.ndarray, pairing: str, factor: float = 1.0) -> np.ndarray:
    """x [n, heads, w], angles [n, rotary/2]: the first `rotary` channels of each head are turned."""
    rotary = 2 * angles.shape[1]
    first, second = (slice(0, rotary, 2), slice(1, rotary, 2)) if pairing == "interleaved" else (
        slice(0, rotary // 2), slice(rotary // 2, rotary))  # fmt: skip
    cos, sin = factor * np.cos(angles)[:, None], factor * np.sin(angles)[:, None]
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def inputs(d: int, towards: np.ndarray) -> np.ndarray:
    """Gaussian, heavy-tailed, one-hot, tiny and huge inputs, and those along each row of `towards`, its worst case."""
    return np.concatenate([
        RNG.standard_normal((300, d)), RNG.standard_t(1.5, (300, d)), 1e4 * np.eye(d), 1e-5 * np.eye(d),
        1e3 * towards, -towards, 1e3 * np.sign(towards),
    ])  # fmt: skip


# --------------------------------------------------------------------------------------------------- brute force


def test_a_norms_output_never_exceeds_its_bound_and_reaches_it() -> None:
    gamma = RNG.standard_normal(512) * 3
    bound = norm_bound("latent", gamma)
    seen = np.abs(rms_norm(inputs(512, np.eye(512)), gamma)).max()
    assert bound.value is not None
    assert 0.98 * bound.value < seen <= bound.value  # 1.01 is for BF16


def test_a_latent_of_512_is_certified_up_to_gamma_19_6() -> None:
    assert norm_bound("latent", np.full(512, 19.6)).proves
    above = norm_bound("latent", np.full(512, 19.65))
    assert not above.proves
    assert above.says.startswith("cannot prove (bound 449")


def test_the_latent_of_a_bfloat16_norm_stays_below_as_well() -> None:
    gamma = make_cases.bf16_to_f32(make_cases.bf16(RNG.standard_normal(512).astype(np.float32)))
    x = inputs(512, np.eye(512)).astype(np.float32)

    def rounded(values: np.ndarray) -> np.ndarray:
        return make_cases.bf16_to_f32(make_cases.bf16(values))

    y = rounded(rounded(rms_norm(x, np.ones(512, np.float32)).astype(np.float32)) * gamma)
    assert np.abs(y).max() <= norm_bound("latent", gamma.astype(np.float64)).value


def test_the_plateau_of_a_norm_is_its_least_gamma() -> None:
    gamma = RNG.uniform(0.06, 2, 256)
    bound = norm_bound("latent", gamma)
    rms = np.sqrt((rms_norm(np.concatenate([1e3 * np.eye(256), RNG.standard_normal((200, 256))]), gamma) ** 2).mean(-1))
    assert bound.plateau is not None
    assert 0.98 * rms.min() < bound.plateau <= rms.min()
    assert bound.on_plateau
    assert not norm_bound("latent", np.append(gamma, 0.04)).on_plateau


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("factor", [1.0, 1.4, 0.7])
def test_a_rotated_norm_never_exceeds_its_bound_however_pairs_are_formed(pairing: str, factor: float) -> None:
    gamma = RNG.uniform(0.2, 3, 32)
    x = inputs(32, np.eye(32))
    k = rms_norm(x, gamma)[:, None]
    seen = max(
        np.abs(rope(k, np.broadcast_to(angle, (len(x), 8)), pairing, factor)).max()
        for angle in np.linspace(0, math.pi, 33)
    )
    bound = rotated_norm_bound("k", gamma, factor).value
    assert bound is not None
    assert 0.65 * bound < seen <= bound


def ascend(weight: np.ndarray, gamma: np.ndarray, bias: np.ndarray, pairing: str, rotary: int) -> float:
    """The largest value of rotated y = W norm(x) + b that is found by going uphill from random starts: for each row
    of a random rotation the best x is along W_j gamma, turned."""
    worst = 0.0
    heads = len(weight) // WIDTH
    for _ in range(60):
        angles = RNG.uniform(0, 2 * math.pi, (1, rotary // 2))
        basis = np.eye(len(weight)).reshape(len(weight), heads, WIDTH)
        turn = rope(basis, np.repeat(angles, len(weight), 0), pairing).reshape(len(weight), -1).T
        rows = turn @ (weight * gamma)
        x = np.concatenate([rows, -rows])  # the direction of steepest ascent, both ways
        y = rms_norm(1e4 * x, np.ones(weight.shape[1])) * gamma @ weight.T + bias
        worst = max(worst, float(np.abs(y @ turn.T).max()))
    return worst


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("biased", [False, True])
def test_k_never_exceeds_its_bound_on_the_steepest_inputs(pairing: str, biased: bool) -> None:
    weight = RNG.standard_normal((ROWS, HIDDEN)) * np.exp(RNG.standard_normal((ROWS, 1)))
    gamma, bias = RNG.uniform(0.3, 2, HIDDEN), RNG.standard_normal(ROWS) * (100 if biased else 0)
    bound = rotated_linear_bound(
        "k", weight, gamma, bias if biased else None, 1.0, heads=KV_HEADS, rotary=8, pairing="either", largest_scale=0
    ).value
    seen = ascend(weight, gamma, bias, pairing, 8)
    assert bound is not None
    assert 0.5 * bound < seen <= bound


def test_v_never_exceeds_its_bound_and_reaches_it() -> None:
    weight, gamma, bias = RNG.standard_normal((ROWS, HIDDEN)), RNG.uniform(0.3, 2, HIDDEN), RNG.standard_normal(ROWS)
    bound = linear_bound("v", weight, gamma, bias, largest_scale=0).value
    y = rms_norm(inputs(HIDDEN, weight * gamma), gamma) @ weight.T + bias
    assert bound is not None
    assert 0.95 * bound / 1.0625**2 < np.abs(y).max() <= bound  # without the roundings of FP8


def test_sigma_of_a_pair_is_the_largest_singular_value() -> None:
    a, b = RNG.standard_normal((2, 20, 30))
    expected = [np.linalg.svd(np.stack([x, y]), compute_uv=False)[0] for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(pair_sigma(a, b), expected, rtol=1e-12)


def e4m3(x: np.ndarray, scale: float = 1.0) -> np.ndarray:
    import torch

    codes = torch.from_numpy(x / scale).to(torch.float8_e4m3fn)
    return codes.double().numpy() * scale


# What engines make of FP8 weights when they load them: the largest scale of a fused projection, or a power of two.
@pytest.mark.parametrize("scale", [1.0, 1.0626, 16.0, 2.0**-9 / 0.001])
@pytest.mark.parametrize("code", [0.001953125, 0.013671875, 8.0, 448.0])
def test_v_of_weights_and_inputs_that_engines_round_once_more_stays_below_its_bound(scale: float, code: float) -> None:
    own = 1.0626
    weight, gamma = np.full((2, HIDDEN), code * own), np.full(HIDDEN, 0.9)
    bound = linear_bound("v", weight, gamma, None, largest_scale=max(scale, own)).value
    assert bound is not None
    loaded = e4m3(weight, scale)
    for level in np.linspace(0.4, 1.2, 201):
        x = np.full((1, HIDDEN), level)
        x[0, 0] = 1.0
        x = rms_norm(1e3 * x, gamma)
        step = np.abs(x).max() / 448
        seen = e4m3(x, step) @ loaded.T
        assert np.abs(seen).max() <= bound


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_k_of_weights_and_inputs_that_engines_round_once_more_stays_below_its_bound(pairing: str) -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        own, larger = rng.uniform(0.5, 2, 2)
        weight = (
            e4m3(np.exp(rng.normal(-5, 4, (ROWS, HIDDEN))).clip(0, 448) * rng.choice([-1, 1], (ROWS, HIDDEN))) * own
        )
        gamma, scale = rng.uniform(0.3, 2, HIDDEN), max(own, larger * 8)
        bound = rotated_linear_bound(
            "k", weight, gamma, None, 1.0, heads=KV_HEADS, rotary=8, pairing="either", largest_scale=scale
        ).value
        assert bound is not None
        assert ascend(e4m3(weight, scale), gamma, np.zeros(ROWS), pairing, 8) * 1.0625 <= bound


def test_the_scales_of_a_fused_projection_count_together(tmp_path: Path) -> None:
    """vLLM and SGLang round k_proj with the largest scale of q_proj, k_proj and v_proj, if they have one each."""

    def bound(q_scale: float) -> float:
        made = gqa(bias=False)
        tensors = made.shards["model.safetensors"]
        for part, rows, scale in (("q", 64, q_scale), ("k", ROWS, 0.01), ("v", ROWS, 0.01)):
            name = f"model.layers.0.self_attn.{part}_proj.weight"
            tensors[name] = make_cases.f8(np.full((rows, HIDDEN), 0x01))
            tensors[f"{name}_scale"] = make_cases.f32([scale])
        made.config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        found = bound_of(layers_of(made.save(tmp_path / f"src{q_scale}"))[0], "v").value
        assert found is not None
        return found

    assert bound(0.01) < bound(1.0) < bound(2.0)


# ------------------------------------------------------------------------------------------------------------ RoPE


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({}, 1.0),
        ({"rope_scaling": None}, 1.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1.0),
        # vLLM's models/deepseek_v2.py makes deepseek_yarn of every type but the default
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, 1 + 0.1 * math.log(8)),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 1 + 0.1 * math.log(8)),
        # Kimi-K2, DeepSeek-V3: both are 1, and cos and sin stay as they are
        ({"rope_scaling": {"type": "yarn", "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}}, 1.0),
        ({"rope_scaling": {"type": "yarn", "factor": 32.0}}, 1 + 0.1 * math.log(32)),
        ({"rope_scaling": {"type": "yarn", "factor": 32.0, "mscale": 2.0}}, 1 + 0.2 * math.log(32)),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}}, 1.5),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0, "attention_factor": 0.5}}, None),
        ({"rope_scaling": {"type": "of tomorrow"}}, None),
        ({"rope_scaling": {"type": "yarn", "factor": "32"}}, None),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, None),
    ],
)
def test_the_factor_of_cos_and_sin_is_that_of_the_rope_type(config: dict, factor: float | None) -> None:
    assert rope_factor(config, latent=True) == (None if factor is None else pytest.approx(factor))


def test_engines_know_no_mscale_where_there_is_no_latent() -> None:
    """SGLang's and vLLM's YaRNScalingRotaryEmbedding: (0.1 ln f + 1) * attn_factor, whatever mscale says."""
    rope = {"type": "yarn", "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    plain = 1 + 0.1 * math.log(64)
    assert rope_factor({"rope_scaling": rope}, latent=False) == pytest.approx(plain)
    assert rope_factor({"rope_scaling": rope | {"attn_factor": 1.2}}, latent=False) == pytest.approx(1.2 * plain)
    assert rope_factor({"rope_scaling": rope | {"attention_factor": 0.5}}, latent=False) == pytest.approx(plain)
    assert rope_factor({"rope_scaling": rope | {"attention_factor": 3.0}}, latent=False) == pytest.approx(3.0)


@pytest.mark.long
def test_the_factor_is_never_below_that_of_transformers() -> None:
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for more in ({}, {"mscale": 0.7}, {"mscale": 0.7, "mscale_all_dim": 1.0}, {"mscale_all_dim": 0.5}):
        rope = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4} | more
        config = DeepseekV3Config(rope_parameters=dict(rope), max_position_embeddings=163840)
        _, theirs = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
        ours = rope_factor({"rope_parameters": rope}, latent=True)
        assert ours is not None
        assert ours >= theirs * (1 - 1e-9)


# ----------------------------------------------------------------------------------------------------- checkpoints


def layers_of(folder: Path) -> tuple[LayerSource, ...]:
    checkpoint = Checkpoint.open(folder)
    family, _ = find_family(checkpoint.config, checkpoint.tensors)
    return read_layers(checkpoint, family, read_model(checkpoint.config, family))


def bound_of(source: LayerSource, what: str) -> Bound:
    return next(bound for bound in source.bounds if bound.what == what)


def test_every_layer_of_an_mla_checkpoint_has_bounds_that_its_inputs_do_not_exceed(demo_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(demo_checkpoint)
    layers = layers_of(demo_checkpoint)
    assert [(source.layer, source.in_mtp) for source in layers] == [*((i, False) for i in range(5)), (5, True)]
    made = {i.name: i for i in checkpoint.tensors.values()}
    for source in layers:
        at = f"model.layers.{source.layer}."
        gamma = plain(checkpoint, made[f"{at}input_layernorm.weight"].name)
        latent_gamma = plain(checkpoint, f"{at}self_attn.kv_a_layernorm.weight")
        weight = decoded(checkpoint, f"{at}self_attn.kv_a_proj_with_mqa")
        d = len(latent_gamma)
        y = rms_norm(inputs(len(gamma), weight * gamma), gamma) @ weight.T
        assert np.abs(rms_norm(y[:, :d], latent_gamma)).max() <= bound_of(source, "latent").value
        k_pe, angle = y[:, None, d:], RNG.uniform(0, 6, (len(y), (len(weight) - d) // 2))
        for pairing in ("interleaved", "half"):
            assert np.abs(rope(k_pe, angle, pairing)).max() <= bound_of(source, "k_pe").value
        assert all(bound.proves for bound in source.bounds)


def plain(checkpoint: Checkpoint, name: str) -> np.ndarray:
    info = checkpoint.tensors[name]
    tensor = make_cases.read_tensor(checkpoint.path(info.file), name)
    return make_cases.bf16_to_f32(np.frombuffer(tensor.data, np.uint16)).astype(np.float64).reshape(info.shape)


def decoded(checkpoint: Checkpoint, module: str) -> np.ndarray:
    file = checkpoint.path(checkpoint.tensors[f"{module}.weight"].file)
    weight = make_cases.read_tensor(file, f"{module}.weight")
    at = checkpoint.path(checkpoint.tensors[f"{module}.weight_scale_inv"].file)
    scale = make_cases.read_tensor(at, f"{module}.weight_scale_inv")
    byte = np.frombuffer(weight.data, np.uint8).reshape(weight.shape)
    return make_cases.decode(byte, np.frombuffer(scale.data, "<f4").reshape(scale.shape)).astype(np.float64)


def test_a_gqa_layer_is_bounded_by_its_projections_and_biases(tmp_path: Path) -> None:
    source = layers_of(gqa().save(tmp_path / "src"))[0]
    checkpoint = Checkpoint.open(tmp_path / "src")
    at = "model.layers.0."
    gamma = plain(checkpoint, f"{at}input_layernorm.weight")
    for part in ("k", "v"):
        weight, bias = (plain(checkpoint, f"{at}self_attn.{part}_proj.{leaf}") for leaf in ("weight", "bias"))
        y = rms_norm(inputs(HIDDEN, weight * gamma), gamma) @ weight.T + bias
        assert np.abs(y).max() <= bound_of(source, part).value < 4 * np.abs(y).max()
    assert "bias" in bound_of(source, "v").how


def test_a_k_with_a_norm_of_its_own_is_bounded_by_that(tmp_path: Path) -> None:
    small = layers_of(gqa(qk_norm=True, size=500.0).save(tmp_path / "src"))[0]
    assert bound_of(small, "k").proves
    assert bound_of(small, "k").how.startswith("QK-norm: sqrt(16)")
    assert not bound_of(small, "v").proves


def test_a_norm_that_the_class_leaves_aside_bounds_nothing(tmp_path: Path) -> None:
    used = layers_of(gqa(qk_norm=True).save(tmp_path / "used"))[0]
    stray = layers_of(gqa(qk_norm=True, use_qk_norm=False).save(tmp_path / "stray"))[0]
    assert bound_of(used, "k").how.startswith("QK-norm")
    assert "and by class and config no norm behind k_proj" in bound_of(stray, "k").says
    assert bound_of(stray, "v").value is not None


@pytest.mark.parametrize(
    ("model_type", "architecture", "there", "words", "said"),
    [
        ("llama", "LlamaForCausalLM", True, {"use_qk_norm": False}, "there is a k_norm.weight, and"),
        ("qwen2", "Qwen2ForCausalLM", True, {"qk_norm": True}, "qk_norm is True, and what the class makes of it"),
        ("qwen2", "Qwen2ForCausalLM", False, {"qk_norm": True}, "qk_norm is True, and what the class makes of it"),
        ("glm4_moe", "Glm4MoeForCausalLM", True, {"use_qk_norm": 1}, "use_qk_norm is 1, and what the class"),
        ("glm4_moe", "Glm4MoeForCausalLM", True, {"use_qk_norm": "true"}, "use_qk_norm is 'true', and what the class"),
        ("glm4_moe", "Glm4MoeForCausalLM", False, {"use_qk_norm": True}, "there is no k_norm.weight"),
        ("qwen3", "Qwen3ForCausalLM", False, {}, "there is no k_norm.weight"),
    ],
)
def test_where_readers_differ_on_a_norm_of_keys_nothing_is_proved_of_them(
    model_type: str, architecture: str, there: bool, words: dict, said: str, tmp_path: Path
) -> None:
    made = gqa(model_type=model_type, architecture=architecture, bias=False, qk_norm=there, size=0.001)
    made.config.update(words)
    first = layers_of(made.save(tmp_path / "src"))[0]
    assert bound_of(first, "k").value is None
    assert said in bound_of(first, "k").says
    assert bound_of(first, "v").value is not None


def test_a_norm_of_keys_that_nobody_asks_for_is_not_there(tmp_path: Path) -> None:
    made = gqa(model_type="qwen2", architecture="Qwen2ForCausalLM")
    assert "sigma_max" in bound_of(layers_of(made.save(tmp_path / "src"))[0], "k").how


def test_a_norm_of_the_same_name_inside_attention_does_not_stand_for_the_layers(tmp_path: Path) -> None:
    made = gqa(gamma=200.0)
    tensors = made.shards["model.safetensors"]
    tensors["model.layers.0.self_attn.input_layernorm.weight"] = make_cases.bf(np.full(HIDDEN, 0.1))
    first, second = layers_of(made.save(tmp_path / "src"))
    assert {bound.value for bound in first.bounds} == {None}
    assert all("its attention has an input_layernorm" in bound.says for bound in first.bounds)
    assert all(bound.value is not None for bound in second.bounds)


@pytest.mark.parametrize(
    "tower", ["speech_encoder", "audio_tower", "zaudio_tower", "draft_model", "mtp", "eagle.model"]
)
def test_another_tower_vouches_for_nothing(tower: str, tmp_path: Path) -> None:
    plain = layers_of(gqa(size=40.0).save(tmp_path / "plain"))
    made = gqa(size=40.0)
    tensors = made.shards["model.safetensors"]
    for name in [name for name in tensors if name.startswith("model.layers.")]:
        other = gqa(size=0.001).shards["model.safetensors"][name]
        tensors[name.replace("model.layers.", f"{tower}.layers.")] = other
    assert [source.bounds for source in layers_of(made.save(tmp_path / "src"))][:LAYERS] == [s.bounds for s in plain]


def test_where_the_config_leaves_open_what_rope_turns_the_larger_reading_counts(tmp_path: Path) -> None:
    """Glm4Moe turns half of a head where nothing is said, Llama knows no such word, and rope_parameters or rope_scaling
    goes before the top level in transformers only: whatever is said, half and whole heads are reckoned with."""

    def bound(name: str, **config: Any) -> float:
        made = bound_of(layers_of(gqa(size=1.0, **config).save(tmp_path / name))[0], "k")
        assert made.value is not None
        return made.value

    unsaid = bound("unsaid", partial_rotary_factor=None)
    rope = {"rope_type": "default", "partial_rotary_factor": 0.25}
    assert bound("half", partial_rotary_factor=0.5) == bound("whole", partial_rotary_factor=1.0) == unsaid
    quarter = bound("quarter", partial_rotary_factor=0.25)
    assert quarter >= unsaid
    assert bound("parameters", partial_rotary_factor=1.0, rope_parameters=rope) == quarter
    assert bound("scaling", partial_rotary_factor=1.0, rope_scaling=rope) == quarter


@pytest.mark.parametrize(
    ("key", "value"),
    [*(("partial_rotary_factor", v) for v in (0, -1, 2, "x", True)), *(("rms_norm_eps", v) for v in (-1, "x", 2.0))],
)
def test_numbers_that_no_reader_can_use_prove_nothing(key: str, value: object, tmp_path: Path) -> None:
    bound = bound_of(layers_of(gqa(**{key: value}).save(tmp_path / "src"))[0], "k")
    assert bound.value is None
    assert f"{key} is" in bound.says


def test_of_two_rope_entries_the_larger_factor_counts() -> None:
    """transformers 5.24 takes rope_scaling, others rope_parameters."""
    yarn, plain = {"type": "yarn", "factor": 40.0}, {"rope_type": "default"}
    both = rope_factor({"rope_parameters": plain, "rope_scaling": yarn}, latent=True)
    assert both == rope_factor({"rope_scaling": yarn}, latent=True) == pytest.approx(1.369, abs=1e-3)
    assert rope_factor({"rope_parameters": plain, "rope_scaling": {"type": "strange"}}, latent=True) is None


def test_a_yarn_factor_that_is_not_said_is_that_of_the_lengths() -> None:
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
    said = rope_factor({"rope_parameters": rope | {"factor": 40.0}}, latent=True)
    assert rope_factor({"rope_parameters": rope, "max_position_embeddings": 163840}, latent=True) == said
    assert said is not None
    assert said > 1.3
    assert (
        rope_factor({"rope_parameters": {"rope_type": "yarn"}, "max_position_embeddings": 163840}, latent=True) is None
    )


def test_the_class_decides_what_a_norm_multiplies_with(tmp_path: Path) -> None:
    made = gqa(model_type="llama", architecture="Gemma2ForCausalLM").save(tmp_path / "src")
    for bound in layers_of(made)[0].bounds:
        assert bound.value is None
        assert "of the class Gemma2ForCausalLM" in bound.says


def test_a_layer_under_two_numbers_vouches_for_nothing(tmp_path: Path) -> None:
    plain = layers_of(gqa(size=40.0).save(tmp_path / "plain"))
    made = gqa(size=40.0)
    tensors = made.shards["model.safetensors"]
    for name in [name for name in tensors if ".layers.1." in name]:
        tensors[name.replace(".1.", ".01.")] = gqa(size=0.001).shards["model.safetensors"][name]
    assert [source.bounds for source in layers_of(made.save(tmp_path / "src"))] == [source.bounds for source in plain]


def test_norms_that_may_multiply_with_one_plus_gamma_prove_nothing(tmp_path: Path) -> None:
    made = gqa(model_type="qwen3_next", architecture="Qwen3NextForCausalLM").save(tmp_path / "src")
    for bound in layers_of(made)[0].bounds:
        assert bound.value is None
        assert not bound.proves
        assert "of the class Qwen3NextForCausalLM computes is not known" in bound.says


def test_what_is_missing_or_damaged_proves_nothing_and_says_why(tmp_path: Path) -> None:
    made = gqa()
    tensors = made.shards["model.safetensors"]
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    tensors["model.layers.0.self_attn.v_proj.bias"] = make_cases.bf(np.ones(ROWS + 1))
    tensors["model.layers.1.input_layernorm.weight"] = make_cases.bf(np.full(HIDDEN, np.nan))
    first, second = layers_of(made.save(tmp_path / "src"))
    assert "no k_proj.weight" in bound_of(first, "k").says
    assert f"expected {ROWS} numbers" in bound_of(first, "v").says
    assert {bound.value for bound in second.bounds} == {None}
    assert "not finite" in bound_of(second, "k").says


def test_a_weight_that_is_not_finite_proves_nothing(tmp_path: Path) -> None:
    made = gqa()
    name = "model.layers.0.self_attn.k_proj.weight"
    weight = np.zeros((ROWS, HIDDEN), np.float32)
    weight[3, 3] = np.inf
    made.shards["model.safetensors"][name] = make_cases.f32(weight)
    bound = bound_of(layers_of(made.save(tmp_path / "src"))[0], "k")
    assert (bound.value, bound.proves) == (None, False)


def test_a_bound_says_what_it_proves() -> None:
    bound = Bound("k", 447.0, "x", 0.05)
    assert bound.says == "proves that scale 1.0 cannot clip (at most 447, x)"
    assert (bound.proves, bound.on_plateau) == (True, True)
    assert replace(bound, value=448.5).says == "cannot prove (bound 448.5 > 448, x)"


# -------------------------------------------------------------------------------------- the class decides what is known


@pytest.mark.parametrize(
    ("model_type", "architecture", "said"),
    [
        ("qwen3", "LlamaForCausalLM", "LlamaForCausalLM and a config of qwen3 with no latent do not belong together"),
        ("exaone4", "Exaone4ForCausalLM", "of the class Exaone4ForCausalLM computes is not known"),  # its norms follow
        ("llama", "LlamaForCausalLMEagle", "of the class LlamaForCausalLMEagle computes is not known"),
        ("glm4_moe", "Glm4MoeLiteForCausalLM", "is not known"),
    ],
)
def test_a_class_that_is_not_known_or_of_another_config_has_no_certificate(
    model_type: str, architecture: str, said: str, tmp_path: Path
) -> None:
    made = gqa(model_type=model_type, architecture=architecture, bias=False, qk_norm=True)
    for bound in layers_of(made.save(tmp_path / "src"))[0].bounds:
        assert bound.value is None
        assert said in bound.says


def test_a_latent_in_a_class_that_has_none_vouches_for_nothing(tmp_path: Path) -> None:
    made = gqa(model_type="llama", architecture="LlamaForCausalLM", kv_lora_rank=8, qk_rope_head_dim=2)
    tensors = made.shards["model.safetensors"]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}.self_attn."
        tensors[f"{at}kv_a_layernorm.weight"] = make_cases.bf(np.ones(8))
        tensors[f"{at}kv_a_proj_with_mqa.weight"] = make_cases.bf(np.ones((10, HIDDEN)))
    for bound in layers_of(made.save(tmp_path / "src"))[0].bounds:
        assert bound.value is None
        assert "with a latent do not belong together" in bound.says


@pytest.mark.parametrize(
    "stray",
    ["model.layers.0.post.input_layernorm.weight", "model.layers.0.zself_attn.x.self_attn.k_proj.weight",
     "model.layers.0.a.self_attn.v_proj.weight"],
)  # fmt: skip
def test_a_deeper_name_stands_for_nothing(stray: str, tmp_path: Path) -> None:
    alone = layers_of(gqa(size=40.0).save(tmp_path / "alone"))
    made = gqa(size=40.0)
    rows = HIDDEN if "norm" in stray else (ROWS, HIDDEN)
    made.shards["model.safetensors"][stray] = make_cases.bf(np.full(rows, 1e-3))
    assert [one.bounds for one in layers_of(made.save(tmp_path / "src"))] == [one.bounds for one in alone]


@pytest.mark.parametrize("strange", ["qkv_proj.weight", "v_norm.weight", "k_proj.input_scale", "adapter.down.weight"])
def test_what_may_change_what_is_cached_takes_the_certificate_away(strange: str, tmp_path: Path) -> None:
    made = gqa()
    made.shards["model.safetensors"][f"model.layers.0.self_attn.{strange}"] = make_cases.bf(np.ones(4))
    first, second = layers_of(made.save(tmp_path / "src"))
    assert {bound.value for bound in first.bounds} == {None}
    assert all(strange.partition(".")[0] in bound.says for bound in first.bounds)
    assert all(bound.value is not None for bound in second.bounds)


def test_scales_of_the_source_change_no_bound(tmp_path: Path) -> None:
    plain = layers_of(gqa().save(tmp_path / "plain"))
    made = gqa()
    made.shards["model.safetensors"]["model.layers.0.self_attn.attn.k_scale"] = make_cases.f32([0.5])
    assert [one.bounds for one in layers_of(made.save(tmp_path / "src"))] == [one.bounds for one in plain]


def test_odd_numbers_in_a_config_are_named(tmp_path: Path) -> None:
    made = gqa(rope_parameters={"rope_type": "default", "partial_rotary_factor": [1]})
    assert "partial_rotary_factor is [1]" in bound_of(layers_of(made.save(tmp_path / "src"))[0], "k").says
    with pytest.raises(KizamiError, match="qk_rope_head_dim is 63, expected an even number"):
        layers_of(gqa(kv_lora_rank=8, qk_rope_head_dim=63).save(tmp_path / "odd"))


def test_deepseek_yarn_in_a_class_without_a_latent_has_its_mscale() -> None:
    """vLLM's get_rope makes DeepseekScalingRotaryEmbedding of the word, whatever the class."""
    rope = {"rope_type": "deepseek_yarn", "factor": 40.0, "mscale": 5.0}
    assert rope_factor({"rope_scaling": rope}, latent=False) == pytest.approx(1 + 0.5 * math.log(40))


def test_an_attn_factor_below_1_lowers_no_bound() -> None:
    rope = {"rope_type": "yarn", "factor": 40.0}
    plain = rope_factor({"rope_scaling": rope}, latent=False)
    assert rope_factor({"rope_scaling": rope | {"attn_factor": 0.5}}, latent=False) == plain
    assert rope_factor({"rope_scaling": rope | {"attn_factor": 2.0}}, latent=False) == pytest.approx(2 * (plain or 0))

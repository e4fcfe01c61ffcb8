"""FP8 weights and their scales: pairing, block sizes, refusals, exact widening of scale values."""

import math
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kizami.formats.dialects import Dialect, ScaledWeight, decode_scales, find_encoded_weights
from kizami.formats.errors import KizamiError
from kizami.formats.tensors import DTYPE_BITS, TensorInfo

BLOCK = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
X = "model.layers.1.mlp.experts.0.gate_proj"


def tensors(*entries: tuple[str, str, tuple[int, ...]], file: str = "a.safetensors") -> dict[str, TensorInfo]:
    found, at = {}, 100
    for name, dtype, shape in entries:
        size = prod(shape) * DTYPE_BITS[dtype] // 8
        found[name] = TensorInfo(name, dtype, shape, file, at, at + size)
        at += size
    return found


def find(config: dict[str, Any], *entries: tuple[str, str, tuple[int, ...]]) -> Dialect:
    return find_encoded_weights(config, tensors(*entries))


def pair(
    shape: tuple[int, int], scale: tuple[int, ...], config: dict[str, Any] = BLOCK, *,
    suffix: str = "weight_scale_inv", dtype: str = "F32",
) -> ScaledWeight:  # fmt: skip
    dialect = find(config, (f"{X}.weight", "F8_E4M3", shape), (f"{X}.{suffix}", dtype, scale))
    return dialect.weights[X]


def refusal(config: dict[str, Any], *entries: tuple[str, str, tuple[int, ...]]) -> KizamiError:
    with pytest.raises(KizamiError) as error:
        find(config, *entries)
    return error.value


def ct(strategy: str, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, **weights}
    group = {"targets": ["Linear"], "weights": scheme}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}}


# ---------------------------------------------------------------------------------------------------- pairing


def test_pairs_span_files_and_are_listed_both_ways() -> None:
    weight = tensors((f"{X}.weight", "F8_E4M3", (576, 6144)), file="a.safetensors")
    scale = tensors((f"{X}.weight_scale_inv", "F32", (5, 48)), file="b.safetensors")
    plain = tensors(("model.norm.weight", "F32", (6144,)), ("model.layers.1.mlp.gate.weight", "BF16", (4, 6144)))
    dialect = find_encoded_weights(BLOCK, scale | plain | weight)
    assert dialect.weights[X] == ScaledWeight(weight[f"{X}.weight"], scale[f"{X}.weight_scale_inv"], (128, 128), "f32")
    assert dialect.scales == {f"{X}.weight_scale_inv": X}
    assert dialect.stale == {}
    assert dialect.label == "fp8 block 128x128, F32 weight_scale_inv"


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale", "scale"])
def test_three_scale_names_mean_the_same(suffix: str) -> None:
    found = pair((128, 256), (1, 2), suffix=suffix)
    assert (found.block, found.grid, found.scale.name) == ((128, 128), (1, 2), f"{X}.{suffix}")


def test_two_candidates_are_ambiguous() -> None:
    error = refusal(
        BLOCK, (f"{X}.weight", "F8_E4M3", (128, 256)), (f"{X}.weight_scale", "F32", (1, 2)),
        (f"{X}.weight_scale_inv", "F32", (1, 2)),
    )  # fmt: skip
    assert (error.code, error.file, error.tensor) == ("ambiguous_scale", "a.safetensors", f"{X}.weight")
    assert "ambiguous" in error.message
    assert f"{X}.weight_scale_inv" in error.message
    assert f"{X}.weight_scale (" in error.message


def test_a_missing_scale_names_what_was_looked_for() -> None:
    error = refusal(BLOCK, (f"{X}.weight", "F8_E4M3", (128, 256)))
    assert (error.code, error.file, error.tensor) == ("missing_scale", "a.safetensors", f"{X}.weight")
    for suffix in ("weight_scale_inv", "weight_scale", "scale"):
        assert f"{X}.{suffix}" in error.message


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16"])
def test_a_scale_beside_a_dense_weight_is_an_orphan(dtype: str) -> None:
    error = refusal(BLOCK, (f"{X}.weight", dtype, (128, 128)), (f"{X}.weight_scale_inv", "F32", (1, 1)))
    assert (error.code, error.tensor) == ("orphan_scale", f"{X}.weight_scale_inv")
    assert f"{X}.weight is {dtype}, not F8_E4M3" in error.message


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale"])
def test_a_scale_without_any_weight_is_an_orphan(suffix: str) -> None:
    error = refusal(BLOCK, ("m.norm.weight", "BF16", (4,)), (f"{X}.{suffix}", "F32", (1, 1)))
    assert error.code == "orphan_scale"
    assert f"there is no {X}.weight" in error.message


def test_a_lone_scale_parameter_is_ordinary_unless_the_dialect_uses_the_name() -> None:
    lone = ("model.layers.1.layer.scale", "F32", (4,))
    good = (f"{X}.weight", "F8_E4M3", (128, 128))
    assert find(BLOCK, good, (f"{X}.weight_scale_inv", "F32", (1, 1)), lone).scales == {f"{X}.weight_scale_inv": X}
    assert refusal(BLOCK, good, (f"{X}.scale", "F32", (1, 1)), lone).code == "orphan_scale"


def test_names_that_only_contain_a_scale_word_are_ordinary() -> None:
    dialect = find(
        BLOCK, (f"{X}.weight", "F8_E4M3", (128, 256)), (f"{X}.weight_scale_inv", "F32", (1, 2)),
        ("model.layers.1.weight_scale_inv_norm.weight", "BF16", (256,)),
        ("model.layers.1.self_attn.scale.bias", "BF16", (4,)), (f"{X}.weight_extra", "BF16", (4,)),
        ("model.layers.1.self_attn.k_scale", "F32", (1,)), ("model.layers.1.self_attn.v_scale", "F32", ()),
        ("model.layers.1.self_attn.k_proj.k_scale", "BF16", (1,)),
    )  # fmt: skip
    assert dialect.scales == {f"{X}.weight_scale_inv": X}
    assert list(dialect.weights) == [X]
    assert dialect.stale == {}


def test_the_skip_list_of_the_config_is_not_consulted() -> None:
    config = {"quantization_config": BLOCK["quantization_config"] | {"modules_to_not_convert": [X, "indexers_proj"]}}
    dialect = find(config, (f"{X}.weight", "F8_E4M3", (128, 128)), (f"{X}.weight_scale_inv", "F32", (1, 1)),
                   ("model.layers.0.self_attn.indexer.weights_proj.weight", "BF16", (32, 128)))  # fmt: skip
    assert list(dialect.weights) == [X]


def test_static_activation_scales_go_stale_only_beside_fp8() -> None:
    dialect = find(
        {}, (f"{X}.weight", "F8_E4M3", (128, 128)), (f"{X}.weight_scale", "F32", ()), (f"{X}.input_scale", "F32", ()),
        ("b.weight", "BF16", (4, 4)), ("b.input_scale", "F32", ()),
    )  # fmt: skip
    assert list(dialect.stale) == [f"{X}.input_scale"]
    assert "activation" in dialect.stale[f"{X}.input_scale"]


def test_a_dense_checkpoint_is_an_empty_dialect() -> None:
    dialect = find({}, ("a.weight", "BF16", (4, 4)), ("b.weight", "F32", (4,)))
    assert (dialect.weights, dialect.scales, dialect.label) == ({}, {}, "no FP8 weights (BF16)")


# ---------------------------------------------------------------------------------------------------- block size


@pytest.mark.parametrize(
    ("shape", "scale"),
    [((587, 320), (5, 3)), ((576, 6144), (5, 48)), ((192, 256), (2, 2)), ((128, 128), (1, 1)), ((1, 1), (1, 1))],
)
def test_the_grid_is_rounded_up(shape: tuple[int, int], scale: tuple[int, int]) -> None:
    found = pair(shape, scale)
    assert (found.block, found.grid) == ((128, 128), scale)


@pytest.mark.parametrize("scale", [(256, 1), (256,), (4, 1), (2,), (2, 1), (1, 2), (3, 2), (2, 2, 1), (1,), ()])
def test_another_grid_than_the_block_size_gives_is_refused(scale: tuple[int, ...]) -> None:
    error = refusal(BLOCK, (f"{X}.weight", "F8_E4M3", (256, 256)), (f"{X}.weight_scale_inv", "F32", scale))
    assert (error.code, error.tensor) == ("scale_grid", f"{X}.weight_scale_inv")
    found = ",".join(map(str, scale))
    assert f"scale grid [{found}], expected [2,2]" in error.message


@pytest.mark.parametrize("scale", [(), (1,), (1, 1)])
def test_one_value_fits_a_single_block(scale: tuple[int, ...]) -> None:
    found = pair((128, 100), scale)
    assert (found.block, found.grid) == ((128, 128), (1, 1))


@pytest.mark.parametrize(
    ("scale", "block", "grid", "label"),
    [
        ((), (256, 320), (1, 1), "fp8 per tensor, F32 weight_scale"),
        ((1,), (256, 320), (1, 1), "fp8 per tensor, F32 weight_scale"),
        ((256, 1), (1, 320), (256, 1), "fp8 per channel, F32 weight_scale"),
        ((256,), (1, 320), (256, 1), "fp8 per channel, F32 weight_scale"),
    ],
)
def test_without_a_block_size_the_scale_shape_tells(
    scale: tuple[int, ...], block: tuple[int, int], grid: tuple[int, int], label: str
) -> None:
    dialect = find({}, (f"{X}.weight", "F8_E4M3", (256, 320)), (f"{X}.weight_scale", "F32", scale))
    assert (dialect.weights[X].block, dialect.weights[X].grid, dialect.label) == (block, grid, label)


def test_a_block_size_is_never_inferred_from_the_grid() -> None:
    error = refusal({}, (f"{X}.weight", "F8_E4M3", (192, 256)), (f"{X}.weight_scale_inv", "F32", (2, 2)))
    assert error.code == "missing_block_size"
    assert "scale grid [2,2]" in error.message


@pytest.mark.parametrize("config", [ct("channel"), {"compression_config": ct("channel")["quantization_config"]}])
def test_channel_strategy_of_glm_4x(config: dict[str, Any]) -> None:
    found = pair((1536, 4096), (1536, 1), config, suffix="weight_scale", dtype="BF16")
    assert (found.block, found.grid, found.scale_format) == ((1, 4096), (1536, 1), "bf16")


def test_channel_strategy_refuses_a_block_grid() -> None:
    error = refusal(ct("channel"), (f"{X}.weight", "F8_E4M3", (256, 256)), (f"{X}.weight_scale", "F32", (2, 2)))
    assert error.code == "scale_grid"
    assert "scale grid [2,2], expected [256,1]" in error.message


@pytest.mark.parametrize("structure", [[128, 128], "128x128"])
def test_block_structure_of_compressed_tensors(structure: object) -> None:
    found = pair((576, 256), (5, 2), ct("block", block_structure=structure), suffix="weight_scale")
    assert found.block == (128, 128)


def test_block_and_channel_groups_side_by_side() -> None:
    config = ct("block", block_structure=[128, 128])
    config["quantization_config"]["config_groups"]["group_1"] = {"weights": {"strategy": "channel"}}
    dialect = find(
        config, ("a.weight", "F8_E4M3", (256, 256)), ("a.weight_scale", "F32", (2, 2)),
        ("b.weight", "F8_E4M3", (256, 256)), ("b.weight_scale", "F32", (256, 1)),
    )  # fmt: skip
    assert [dialect.weights[m].block for m in "ab"] == [(128, 128), (1, 256)]


def test_the_block_size_may_be_in_text_config() -> None:
    config = {"text_config": {"quantization_config": {"weight_block_size": [64, 32]}}}
    assert pair((128, 64), (2, 2), config).block == (64, 32)


def test_contradicting_block_sizes_are_refused() -> None:
    config = BLOCK | {"text_config": {"quantization_config": {"weight_block_size": [64, 64]}}}
    error = refusal(config, (f"{X}.weight", "F8_E4M3", (64, 64)), (f"{X}.weight_scale_inv", "F32", (1, 1)))
    assert (error.code, error.file) == ("bad_config", "config.json")
    assert "[128, 128] in quantization_config" in error.message
    assert "[64, 64] in text_config.quantization_config" in error.message


@pytest.mark.parametrize(
    "value", [[128], [128, 128, 1], [0, 128], [-128, 128], [True, 128], [128.0, 128], ["128", 128], "128x", "ax1", 128]
)
def test_bad_block_sizes_are_refused(value: object) -> None:
    error = refusal({"quantization_config": {"weight_block_size": value}}, ("a.weight", "BF16", (4, 4)))
    assert error.code == "bad_config"
    assert "quantization_config.weight_block_size" in error.message
    assert "two positive whole numbers" in error.message


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": []},
        {"quantization_config": {"config_groups": []}},
        {"quantization_config": {"config_groups": {"g": 1}}},
        {"quantization_config": {"config_groups": {"g": {"weights": "fp8"}}}},
        ct("block"),
    ],
)
def test_malformed_quantization_configs_are_refused(config: dict[str, Any]) -> None:
    assert refusal(config, ("a.weight", "BF16", (4, 4))).code == "bad_config"


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("dtype", ["F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_other_eight_bit_floats_are_refused_by_name(dtype: str) -> None:
    error = refusal(BLOCK, (f"{X}.weight", dtype, (128, 128)), (f"{X}.weight_scale_inv", "F32", (1, 1)))
    assert (error.code, error.tensor) == ("unsupported_dtype", f"{X}.weight")
    assert dtype in error.message


@pytest.mark.parametrize("dtype", ["I32", "F64", "F8_E4M3", "I8", "BOOL", "U8"])
def test_scale_dtypes_without_a_meaning_are_refused(dtype: str) -> None:
    error = refusal(BLOCK, (f"{X}.weight", "F8_E4M3", (128, 128)), (f"{X}.weight_scale_inv", dtype, (1, 1)))
    assert (error.code, error.tensor) == ("unsupported_dtype", f"{X}.weight_scale_inv")
    assert f"scale dtype {dtype}" in error.message


def test_byte_scales_count_as_exponents_only_if_the_config_says_ue8m0() -> None:
    config = {"quantization_config": BLOCK["quantization_config"] | {"scale_fmt": "ue8m0"}}
    assert pair((128, 128), (1, 1), config, dtype="U8").scale_format == "e8m0"
    assert pair((128, 128), (1, 1), config, dtype="F8_E8M0").scale_format == "e8m0"
    assert pair((128, 128), (1, 1), dtype="F8_E8M0").scale_format == "e8m0"


def test_ue8m0_in_the_config_does_not_change_f32_scales() -> None:
    """DeepSeek-V3.2 declares ue8m0 and ships F32."""
    config = {"quantization_config": BLOCK["quantization_config"] | {"scale_fmt": "ue8m0"}}
    assert pair((128, 128), (1, 1), config).scale_format == "f32"


def test_packed_int8_is_another_format() -> None:
    config = {"quantization_config": {"config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}}}}
    error = refusal(config, (f"{X}.weight_packed", "I32", (8, 8)))
    assert (error.code, error.file) == ("unsupported_format", "config.json")
    assert "weights.num_bits is 8, expected 4" in error.message


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([(f"{X}.weight", "U8", (8, 8)), (f"{X}.weight_scale", "F8_E4M3", (8, 1))], "packed FP4"),
        ([(f"{X}.weight_scale_2", "F32", ())], "NVFP4"),
        ([(f"{X}.weight_packed", "U8", (8, 8))], "NVFP4 or MXFP4"),
        ([(f"{X}.weight_global_scale", "F32", (1,))], "NVFP4"),
        ([(f"{X}.qweight", "I32", (8, 8))], "AWQ or GPTQ"),
        ([(f"{X}.qscale_weight", "F32", ())], "qscale"),
        ([(f"{X}.weight", "F4", (8, 8))], "FP4"),
        ([(f"{X}.weight", "I8", (8, 8)), (f"{X}.weight_scale", "F32", (8, 1))], "INT8"),
        ([(f"{X}.weight_zero_point", "I8", (8, 1))], "asymmetric"),
        ([("m.gate_up_proj_blocks", "U8", (8, 8)), ("m.gate_up_proj_scales", "U8", (8,))], "MXFP4"),
        ([("m.weight.quant_state.bitsandbytes__nf4", "U8", (8,))], "bitsandbytes"),
    ],
)
def test_neighbouring_formats_are_refused_by_name(entries: list[Any], words: str) -> None:
    error = refusal({}, *entries)
    assert error.code == "unsupported_format"
    assert words in error.message


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.gate_up_proj", f"{X}.weight"])
def test_fused_fp8_experts_are_refused(name: str) -> None:
    error = refusal(BLOCK, (name, "F8_E4M3", (4, 256, 128)))
    assert (error.code, error.tensor) == ("unsupported_shape", name)
    assert "[4, 256, 128]" in error.message


@pytest.mark.parametrize(
    ("name", "shape", "code"),
    [
        (f"{X}.bias", (128,), "missing_scale"),
        ("weight", (128, 128), "missing_scale"),
        (f"{X}.weight", (128,), "unsupported_shape"),
        (f"{X}.weight", (0, 128), "empty_tensor"),
        (f"{X}.weight", (128, 0), "empty_tensor"),
    ],
)
def test_fp8_tensors_that_are_no_two_dimensional_weight(name: str, shape: tuple[int, ...], code: str) -> None:
    error = refusal(BLOCK, (name, "F8_E4M3", shape), (f"{X}.weight_scale_inv", "F32", (1, 1)))
    assert (error.code, error.tensor) == (code, name)


# ---------------------------------------------------------------------------------------------------- scale values


def decode(dtype: str, raw: bytes, shape: tuple[int, ...], weight: tuple[int, int]) -> np.ndarray:
    config = {"quantization_config": {"weight_block_size": [1, 1], "scale_fmt": "ue8m0"}}
    return decode_scales(np.frombuffer(raw, np.uint8), pair(weight, shape, config, dtype=dtype))


@pytest.mark.parametrize("dtype", ["F8_E8M0", "U8"])
def test_exponent_bytes_are_powers_of_two(dtype: str) -> None:
    got = decode(dtype, bytes(range(256)), (16, 16), (16, 16)).reshape(-1)
    assert got.dtype == np.float32
    assert [float(v) for v in got[:255]] == [math.ldexp(1.0, b - 127) for b in range(255)]
    assert float(got[120]) == 0.0078125
    assert np.isnan(got[255])


def test_float_scales_widen_exactly_in_row_order() -> None:
    values = np.array([[1.5, -2.0, 2.0**-14], [448.0, 0.0, 3.0]], np.float32)
    assert np.array_equal(decode("F32", values.tobytes(), (2, 3), (2, 3)), values)
    assert np.array_equal(decode("F16", values.astype(np.float16).tobytes(), (2, 3), (2, 3)), values)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert np.array_equal(decode("BF16", bf16.tobytes(), (2, 3), (2, 3)), values)


def test_scalar_and_flat_scales_come_out_two_dimensional() -> None:
    scalar = find({}, (f"{X}.weight", "F8_E4M3", (4, 8)), (f"{X}.weight_scale", "F32", ())).weights[X]
    assert decode_scales(np.frombuffer(np.float32(2).tobytes(), np.uint8), scalar).tolist() == [[2.0]]
    flat = find({}, (f"{X}.weight", "F8_E4M3", (3, 8)), (f"{X}.weight_scale", "F32", (3,))).weights[X]
    raw = np.arange(3, dtype=np.float32).tobytes()
    assert decode_scales(np.frombuffer(raw, np.uint8), flat).tolist() == [[0.0], [1.0], [2.0]]


def test_non_finite_scales_pass_through_for_the_decoder_to_judge() -> None:
    raw = np.array([np.nan, np.inf, -np.inf, -1.0], np.float32)
    assert np.array_equal(decode("F32", raw.tobytes(), (2, 2), (2, 2)).reshape(-1), raw, equal_nan=True)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.integers(1, 700), st.integers(1, 700), st.integers(1, 130), st.integers(1, 130))
def test_every_element_lies_in_the_grid(rows: int, cols: int, b0: int, b1: int) -> None:
    grid = ((rows - 1) // b0 + 1, (cols - 1) // b1 + 1)
    found = pair((rows, cols), grid, {"quantization_config": {"weight_block_size": [b0, b1]}})
    assert found.grid == grid
    assert found.block == (b0, b1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format is 'sparse-24-bitmask'"),
        ({"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "the weights are rotated"),
    ],
)
@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16"])
def test_weights_that_are_rotated_or_halved_are_refused_in_every_form(
    change: dict[str, Any], said: str, dtype: str
) -> None:
    """The output's config would not say it, and engines would leave the rotation out."""
    entries = [("model.layers.0.mlp.up_proj.weight", dtype, (128, 128))]
    entries += [("model.layers.0.mlp.up_proj.weight_scale", "F32", (128, 1))] if dtype == "F8_E4M3" else []
    config = ct("channel")
    config["quantization_config"] |= change
    error = refusal(config, *entries)
    assert error.code == "unsupported_format"
    assert said in error.message


def test_empty_transforms_and_dense_sparsity_say_nothing() -> None:
    config = ct("channel")
    config["quantization_config"] |= {"transform_config": {}, "sparsity_config": {"format": "dense"}}
    assert not find(config, ("model.norm.weight", "BF16", (128,))).weights

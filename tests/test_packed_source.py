"""INT4 checkpoints as a source: found from headers, decoded as compressed-tensors does it."""

import copy
from pathlib import Path
from typing import Any

import make_cases
import numpy as np
import pytest

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.dialects import find_encoded_weights
from kizami.formats.errors import KizamiError
from kizami.formats.packed_source import PackedWeight, check_weight_shape, find_packed_weights
from kizami.formats.reader import TensorReader
from kizami.formats.tensors import TensorInfo, tensor_nbytes
from kizami.quantize import reference as ref
from kizami.quantize.linear import NonFiniteError, quantize_linear
from kizami.quantize.settings import Method
from kizami.quantize.unpack import PackedRows, bf16_scales, to_bf16

X = "model.layers.1.mlp.experts.0.gate_proj"
KIMI_WEIGHTS = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4, "observer": "minmax",
    "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
}  # fmt: skip
# As Kimi-K2-Thinking publishes it.
KIMI = {
    "config_groups": {
        "group_0": {
            "input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": KIMI_WEIGHTS,
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip
CONFIG = {"model_type": "kimi_k2", "quantization_config": KIMI}


def tensors(*entries: tuple[str, str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(name, dtype, shape, "a.safetensors", 0, tensor_nbytes(dtype, shape))
        for name, dtype, shape in entries
    }


def kimi_tensors(module: str = X, rows: int = 64, cols: int = 128, g: int = 32) -> dict[str, TensorInfo]:
    return tensors(
        (f"{module}.weight_packed", "I32", (rows, cols // 8)),
        (f"{module}.weight_scale", "BF16", (rows, cols // g)),
        (f"{module}.weight_shape", "I32", (2,)),
    )


def with_weights(**changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes  # type: ignore[index]
    return config


def refusal(config: dict[str, Any], given: dict[str, TensorInfo]) -> KizamiError:
    with pytest.raises(KizamiError) as e:
        find_packed_weights(config, given)
    return e.value


# ---------------------------------------------------------------- from headers


def test_a_kimi_weight_is_found_with_its_sizes() -> None:
    given = kimi_tensors()
    found = find_packed_weights(CONFIG, given)
    assert list(found) == [X]
    weight = found[X]
    assert (weight.rows, weight.cols, weight.group_size, weight.grid) == (64, 128, 32, (64, 4))
    assert set(weight.tensors) == set(given.values())


def test_the_config_may_lie_in_text_config_and_the_modules_behind_a_prefix() -> None:
    """Kimi-K2.5: the config class copies it to the top only when it loads."""
    config = {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", "quantization_config": KIMI}}
    module = f"language_model.{X}"
    others = tensors(
        ("vision_tower.encoder.blocks.0.wqkv.weight", "BF16", (8, 8)),
        ("language_model.model.layers.1.mlp.gate.weight", "BF16", (4, 128)),
    )
    assert list(find_packed_weights(config, kimi_tensors(module) | others)) == [module]
    dialect = find_encoded_weights(config, kimi_tensors(module) | others)
    assert list(dialect.packed) == [module]
    assert set(dialect.scales) == {f"{module}.weight_scale", f"{module}.weight_shape"}


@pytest.mark.parametrize("dtype", ["I64", "I32", None])
def test_weight_shape_may_be_of_either_width_or_absent(dtype: str | None) -> None:
    given = kimi_tensors()
    del given[f"{X}.weight_shape"]
    if dtype is not None:
        given |= tensors((f"{X}.weight_shape", dtype, (2,)))
    weight = find_packed_weights(CONFIG, given)[X]
    assert (weight.shape_tensor is None) == (dtype is None)
    if dtype is not None:
        check_weight_shape([64, 128], weight)
        check_weight_shape(np.array([64, 128]), weight)


@pytest.mark.parametrize("values", [[128, 64], [64, 126], [64], [64, 128, 1], [0, 0], [64, -128]])
def test_a_weight_shape_that_is_not_that_of_the_words_is_refused(values: list[int]) -> None:
    weight = find_packed_weights(CONFIG, kimi_tensors())[X]
    with pytest.raises(KizamiError, match=r"expected \[64, 128\]") as e:
        check_weight_shape(values, weight)
    assert (e.value.code, e.value.tensor) == ("packed_shape", f"{X}.weight_shape")


def test_fp8_and_plain_checkpoints_have_no_packed_weights() -> None:
    given = tensors((f"{X}.weight", "F8_E4M3", (128, 128)), (f"{X}.weight_scale", "F32", (1, 1)))
    assert find_packed_weights({}, given) == {}
    assert find_packed_weights(CONFIG, tensors(("a.weight_packed", "U8", (4, 4)))) == {}


def test_a_mixed_checkpoint_has_the_groups_of_its_int_group() -> None:
    config = copy.deepcopy(CONFIG)
    groups: dict[str, Any] = config["quantization_config"]["config_groups"]  # type: ignore[index]
    groups["group_0"]["format"] = "pack-quantized"
    groups["group_1"] = {
        "format": "float-quantized", "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    }  # fmt: skip
    rest = tensors(("m.o_proj.weight", "F8_E4M3", (128, 128)), ("m.o_proj.weight_scale", "F32", (1, 1)))
    assert list(find_packed_weights(config, kimi_tensors() | rest)) == [X]
    assert list(find_encoded_weights(config, kimi_tensors() | rest).weights) == ["m.o_proj"]


@pytest.mark.parametrize(
    ("leaf", "dtype", "shape", "code", "tensor"),
    [
        ("weight_scale", None, (), "missing_scale", "weight_packed"),
        ("weight_packed", None, (), "", ""),
        ("weight_scale", "F8_E4M3", (64, 4), "unsupported_dtype", "weight_scale"),
        ("weight_scale", "BF16", (64, 2), "scale_grid", "weight_scale"),
        ("weight_scale", "BF16", (4, 64), "scale_grid", "weight_scale"),
        ("weight_scale", "BF16", (64, 4, 1), "unsupported_shape", "weight_scale"),
        ("weight_packed", "I32", (64, 15), "scale_grid", "weight_scale"),
        ("weight_packed", "I32", (64, 4, 4), "unsupported_shape", "weight_packed"),
        ("weight_packed", "I32", (0, 16), "empty_tensor", "weight_packed"),
        ("weight_shape", "F32", (2,), "unsupported_dtype", "weight_shape"),
        ("weight_shape", "I32", (3,), "unsupported_shape", "weight_shape"),
        ("weight_g_idx", "I32", (128,), "unsupported_format", "weight_g_idx"),
        ("weight_zero_point", "I32", (8, 4), "unsupported_format", "weight_zero_point"),
        ("weight", "BF16", (64, 128), "ambiguous_weight", "weight_packed"),
    ],
)
def test_each_tensor_that_does_not_fit_is_named(
    leaf: str, dtype: str | None, shape: tuple[int, ...], code: str, tensor: str
) -> None:
    second = X.replace("experts.0", "experts.1")
    given = kimi_tensors() | kimi_tensors(second)
    given.pop(f"{X}.{leaf}", None)
    if dtype is not None:
        given |= tensors((f"{X}.{leaf}", dtype, shape))
    error = refusal(CONFIG, given)
    if not code:  # the words are lost, what belongs to them is there
        assert error.code == "missing_packed"
        assert f"{X}.weight_packed" in error.message
    else:
        assert (error.code, error.tensor) == (code, f"{X}.{tensor}")


def test_columns_that_are_no_whole_groups_are_refused_though_the_scales_would_be_as_many() -> None:
    given = kimi_tensors(cols=120) | tensors((f"{X}.weight_scale", "BF16", (64, 3)))
    error = refusal(CONFIG, given)
    assert (error.code, error.tensor) == ("scale_grid", f"{X}.weight_scale")
    assert "groups of 32, which does not divide 120" in error.message


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_bits": 8}, "num_bits"),
        ({"num_bits": 4.0}, "num_bits"),
        ({"num_bits": None}, "num_bits"),
        ({"symmetric": False}, "symmetric"),
        ({"strategy": "channel"}, "strategy"),
        ({"strategy": "tensor"}, "strategy"),
        ({"actorder": "group"}, "actorder"),
        ({"dynamic": True}, "dynamic"),
        ({"group_size": None}, "group_size"),
        ({"group_size": 12}, "group_size"),
        ({"group_size": -1}, "group_size"),
        ({"group_size": True}, "group_size"),
    ],
)
def test_other_int_forms_are_refused_by_their_key(change: dict[str, Any], key: str) -> None:
    error = refusal(with_weights(**change), kimi_tensors())
    assert error.code in ("unsupported_format", "bad_config")
    assert f"config_groups.group_0.weights.{key} is " in error.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "marlin-24"}, "format is 'marlin-24'"),
        ({"config_groups": []}, "what the words hold is unknown"),
        ({"config_groups": [1]}, "config_groups is [1], expected an object"),
        ({"config_groups": {"group_0": 1}}, "config_groups.group_0 is 1"),
        ({"quant_method": "gptq"}, "what the words hold is unknown"),
    ],
)
def test_what_else_the_config_may_say_of_the_words_is_refused(change: dict[str, Any], words: str) -> None:
    error = refusal({"quantization_config": KIMI | change}, kimi_tensors())
    assert words in error.message


def test_order_that_leaves_the_columns_in_place_is_read() -> None:
    assert find_packed_weights(with_weights(actorder="static"), kimi_tensors())
    assert find_packed_weights({"quantization_config": KIMI | {"sparsity_config": {}}}, kimi_tensors())


def test_without_a_config_the_words_are_unknown() -> None:
    error = refusal({}, kimi_tensors())
    assert (error.code, error.tensor) == ("bad_config", f"{X}.weight_packed")


# ---------------------------------------------------------------- values


def save(
    folder: Path,
    weights: dict[str, tuple[np.ndarray, np.ndarray]],
    scale_dtype: str = "BF16",
    extra: dict[str, make_cases.Tensor] | None = None,
    config: dict[str, Any] = CONFIG,
) -> Checkpoint:
    """codes int8 [N, K] and scales float32 [N, K/g] by module."""
    made: dict[str, make_cases.Tensor] = dict(extra or {})
    for module, (codes, scale) in weights.items():
        words = make_cases.pack(codes)
        other = {"BF16": "<f4", "F16": "<f2", "F32": "<f4"}[scale_dtype]
        raw = make_cases.bf16(scale) if scale_dtype == "BF16" else scale.astype(other)
        made[f"{module}.weight_packed"] = make_cases.Tensor("I32", words.shape, words.tobytes())
        made[f"{module}.weight_scale"] = make_cases.Tensor(scale_dtype, scale.shape, raw.tobytes())
        shape = np.array(codes.shape, "<i4")
        made[f"{module}.weight_shape"] = make_cases.Tensor("I32", (2,), shape.tobytes())
    checkpoint = make_cases.Checkpoint(config, {"model.safetensors": made}, indexed=False)
    return Checkpoint.open(checkpoint.save(folder))


def random_weight(rows: int, cols: int, g: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """All codes; scales of both signs, from BF16's subnormals to large ones, and zeros."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-8, 8, (rows, cols)).astype(np.int8)
    scale = (rng.standard_normal((rows, cols // g)) * np.exp2(rng.integers(-130, 40, (rows, cols // g)))).astype(
        np.float32
    )
    scale[0, 0] = 0
    return codes, make_cases.bf16_to_f32(make_cases.bf16(scale))


def group_config(g: int) -> dict[str, Any]:
    return with_weights(group_size=g)


@pytest.mark.parametrize("g", [8, 32, 64, 128])
@pytest.mark.parametrize("runs", [[(0, 33)], [(0, 1), (1, 20), (20, 33)], [(20, 33), (20, 33), (20, 25), (0, 5)]])
def test_rows_are_code_times_scale_exactly(tmp_path: Path, g: int, runs: list[tuple[int, int]]) -> None:
    codes, scale = random_weight(33, 384, g)
    source = save(tmp_path, {X: (codes, scale)}, config=group_config(g))
    expected = codes * np.repeat(scale.astype(np.float64), g, axis=1)
    with TensorReader(source) as reader:
        rows = PackedRows(find_packed_weights(source.config, source.tensors)[X], reader)
        assert (rows.shape, rows.dtype) == ((33, 384), np.float32)
        for first, last in runs:
            found = rows[first:last]
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found.astype(np.float64), expected[first:last])
        rows.close()


@pytest.mark.parametrize(
    ("config", "module"),
    [
        (CONFIG, X),
        ({"model_type": "kimi_k25", "text_config": {"quantization_config": KIMI}}, f"language_model.{X}"),
    ],
)
def test_bf16_is_that_of_compressed_tensors_bit_for_bit(tmp_path: Path, config: dict[str, Any], module: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    codes, scale = random_weight(64, 256, 32, seed=4)
    tower = make_cases.bf(np.ones((8, 8)))
    source = save(tmp_path, {module: (codes, scale)}, extra={"vision_tower.x.weight": tower}, config=config)
    packed = find_packed_weights(source.config, source.tensors)
    assert list(packed) == [module]
    with TensorReader(source) as reader:
        ours = to_bf16(PackedRows(packed[module], reader)[0:64])
        words = torch.from_numpy(reader.read(packed[module].packed).view("<i4").reshape(64, 32))
        bits = torch.from_numpy(reader.read(packed[module].scale).view("<u2").reshape(64, 8).copy())
    args = QuantizationArgs(**KIMI_WEIGHTS)
    state = {
        "weight_packed": words, "weight_scale": bits.view(torch.bfloat16), "weight_shape": torch.tensor([64, 256]),
    }  # fmt: skip
    theirs = PackedQuantizationCompressor.decompress(state, QuantizationScheme(targets=["Linear"], weights=args))
    assert theirs["weight"].dtype == torch.bfloat16
    np.testing.assert_array_equal(ours, theirs["weight"].contiguous().view(torch.uint16).numpy())


def test_an_int4_source_quantizes_like_its_decoded_weights(tmp_path: Path) -> None:
    codes, scale = random_weight(40, 256, 32, seed=2)
    scale = np.abs(np.clip(scale, -1, 1)) + np.float32(2.0**-8)
    scale = make_cases.bf16_to_f32(make_cases.bf16(scale))
    source = save(tmp_path, {X: (codes, scale)})
    decoded = codes * np.repeat(scale, 32, axis=1)
    with TensorReader(source) as reader:
        rows = PackedRows(find_packed_weights(source.config, source.tensors)[X], reader)
        found = quantize_linear(rows, None, None, 128, Method("search"), band=7)
    expected = quantize_linear(decoded.astype(np.float32), None, None, 128, Method("search"))
    np.testing.assert_array_equal(found.packed, expected.packed)
    np.testing.assert_array_equal(found.scale, expected.scale)


@pytest.mark.parametrize(("value", "word"), [(np.nan, "nan"), (np.inf, "inf"), (2.0**124, "2.12676e\\+37")])
def test_a_scale_that_is_not_finite_is_named(tmp_path: Path, value: float, word: str) -> None:
    codes, scale = random_weight(20, 128, 32)
    scale[17, 2] = value
    source = save(tmp_path, {X: (codes, scale)})
    with TensorReader(source) as reader:
        rows = PackedRows(find_packed_weights(source.config, source.tensors)[X], reader)
        rows[0:10]
        with pytest.raises(NonFiniteError, match=f"row 17, column 64: found group scale {word}"):
            rows[10:20]
        with pytest.raises(NonFiniteError, match="row 17, column 64"):
            bf16_scales(find_packed_weights(source.config, source.tensors)[X], reader)


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_scales_of_other_widths_are_read_and_repacked_only_where_bf16_can_hold_them(tmp_path: Path, dtype: str) -> None:
    codes, _ = random_weight(8, 128, 32)
    scale = np.random.default_rng(3).choice([0.5, 0.25, 1.5, -3.0], (8, 4)).astype(np.float32)
    source = save(tmp_path / "exact", {X: (codes, scale)}, dtype)
    with TensorReader(source) as reader:
        weight = find_packed_weights(source.config, source.tensors)[X]
        np.testing.assert_array_equal(ref.from_bf16(bf16_scales(weight, reader)), scale)
        np.testing.assert_array_equal(PackedRows(weight, reader)[0:8], codes * np.repeat(scale, 32, axis=1))
    scale[5, 3] = 1 + 2.0**-9
    source = save(tmp_path / "inexact", {X: (codes, scale)}, dtype)
    with TensorReader(source) as reader:
        weight = find_packed_weights(source.config, source.tensors)[X]
        assert PackedRows(weight, reader)[5:6][0, 127] == codes[5, 127] * scale[5, 3]
        with pytest.raises(KizamiError, match="group 3 of row 5") as e:
            bf16_scales(weight, reader)
    assert e.value.code == "inexact_scale"


def test_repacked_words_and_scales_are_those_on_disk(tmp_path: Path) -> None:
    codes, scale = random_weight(16, 128, 32, seed=8)
    source = save(tmp_path, {X: (codes, scale)})
    with TensorReader(source) as reader:
        weight: PackedWeight = find_packed_weights(source.config, source.tensors)[X]
        words, widened = PackedRows(weight, reader).packed(slice(4, 9))
        bits = bf16_scales(weight, reader)
    np.testing.assert_array_equal(ref.unpack(words.view(np.int32)), codes[4:9])
    np.testing.assert_array_equal(widened, scale[4:9])
    np.testing.assert_array_equal(bits, make_cases.bf16(scale))

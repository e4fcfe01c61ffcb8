"""Neighbours of cases 2 to 9: what scales an FP8 weight, in every place, spelling, shape and dtype."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_cases
import numpy as np
import pytest
from case_runner import assert_converted, assert_refused, error_object, kizami
from make_cases import DOWN, E4M3, GATE, UP, Checkpoint, Tensor, bf, bf16, bf16_to_f32, f8, f32, grid, mini, tiny

pytestmark = pytest.mark.long

Save = Callable[[Checkpoint], Path]
PLACES = {
    "expert": "model.layers.1.mlp.experts.3.down_proj",
    "expert of the MTP layer": "model.layers.2.mlp.experts.0.gate_proj",
    "shared expert": "model.layers.2.mlp.shared_experts.down_proj",
    "attention": "model.layers.0.self_attn.q_b_proj",
    "dense": "model.layers.0.mlp.down_proj",
}
each_place = pytest.mark.parametrize("module", PLACES.values(), ids=PLACES.keys())


def refused(source: Path, out: Path, code: str, *mentions: str, options: tuple[str, ...] = ()) -> None:
    """By convert and by plan, which reads headers only: with the same code, and before anything is written."""
    said = kizami("convert", source, out, *options, "--json")
    assert (said.code, error_object(said)["code"]) == (2, code), said
    assert_refused(kizami("plan", source, *options), list(mentions))
    assert not out.exists()
    assert not out.with_name("out.partial").exists()


@each_place
@pytest.mark.parametrize("dtype", ["F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_another_fp8_is_refused_wherever_it_is(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, dtype: str
) -> None:
    monkeypatch.setitem(make_cases.SIZES, dtype, 1)
    checkpoint = tiny()
    weight = checkpoint.tensors()[module + ".weight"]
    checkpoint.set(module + ".weight", Tensor(dtype, weight.shape, weight.data))
    refused(save(checkpoint), tmp_path / "out", "unsupported_dtype", dtype, module + ".weight")


@each_place
def test_an_fp8_weight_never_goes_without_its_scale(save: Save, tmp_path: Path, module: str) -> None:
    checkpoint = tiny()
    del checkpoint.find(module + ".weight_scale_inv")[module + ".weight_scale_inv"]
    mentions = (module + ".weight", "weight_scale_inv", "weight_scale", module + ".scale")
    refused(save(checkpoint), tmp_path / "out", "missing_scale", *mentions)


@each_place
@pytest.mark.parametrize("name", ["weight_scale", "scale"])
def test_two_scales_are_refused_wherever_they_are(save: Save, tmp_path: Path, module: str, name: str) -> None:
    """Even where both say the same."""
    checkpoint = tiny()
    shard = next(iter(checkpoint.shards))
    checkpoint.shards[shard][f"{module}.{name}"] = checkpoint.tensors()[module + ".weight_scale_inv"]
    refused(save(checkpoint), tmp_path / "out", "ambiguous_scale", f"{module}.{name}", "weight_scale_inv")


@each_place
def test_a_scale_that_has_lost_its_weight_is_refused(save: Save, tmp_path: Path, module: str) -> None:
    checkpoint = tiny()
    del checkpoint.find(module + ".weight")[module + ".weight"]
    refused(save(checkpoint), tmp_path / "out", "orphan_scale", module + ".weight_scale_inv")


@each_place
@pytest.mark.parametrize(
    "change", ["one row more", "one column more", "transposed", "flat", "3-D", "one value", "empty"]
)
def test_a_scale_of_another_grid_is_refused_wherever_it_is(
    save: Save, tmp_path: Path, module: str, change: str
) -> None:
    checkpoint = tiny()
    rows, cols = grid(*checkpoint.tensors()[module + ".weight"].shape)
    shape: tuple[int, ...] = {
        "one row more": (rows + 1, cols), "one column more": (rows, cols + 1), "transposed": (cols, rows),
        "flat": (rows * cols,), "3-D": (rows, cols, 1), "one value": (), "empty": (0, cols),
    }[change]  # fmt: skip
    assert shape != (rows, cols)
    checkpoint.set(module + ".weight_scale_inv", f32(np.ones(shape)))
    found = "[" + ",".join(map(str, shape)) + "]"
    refused(save(checkpoint), tmp_path / "out", "scale_grid", module, found, f"[{rows},{cols}]")


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale", "scale"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (256,), (256, 1)])
def test_scales_of_a_tensor_and_of_its_rows_have_any_name(
    save: Save, tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    """In every place, packed, decoded and dense; the config gives no block."""
    checkpoint = mini(256, 256)
    del checkpoint.config["quantization_config"]["weight_block_size"]
    attention = "model.layers.1.self_attn.o_proj"
    file = checkpoint.shards["model.safetensors"]
    file[attention + ".weight"] = f8(make_cases.random_bytes("attention", 256, 256))
    values = make_cases.rng("scales").uniform(0.01, 3, shape)
    for module in (GATE, UP, DOWN, attention):
        file.pop(module + ".weight_scale_inv", None)
        file[f"{module}.{name}"] = f32(values)
    source, out = save(checkpoint), tmp_path / "out"
    folder = assert_converted(kizami("convert", source, out), source, out)
    scale = np.broadcast_to(values.reshape(-1, 1).astype(np.float32), (256, 1))
    byte = np.frombuffer(file[attention + ".weight"].data, np.uint8).reshape(256, 256)
    assert np.array_equal(folder.array(attention + ".weight"), bf16(E4M3[byte] * scale))


@pytest.mark.parametrize("dtype", ["F8_E8M0", "U8"])
@pytest.mark.parametrize(("byte", "value"), [(0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (245, 2.0**118)])
def test_exponents_are_powers_of_two_up_to_both_ends(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, byte: int, value: float
) -> None:
    monkeypatch.setitem(make_cases.SIZES, "U8", 1)
    checkpoint = exponents(dtype, byte)
    source, out = save(checkpoint), tmp_path / "out"
    options = ["--ignore", r"re:.*\.(gate|up)_proj$", "--method", "minmax"]
    folder = assert_converted(kizami("convert", source, out, *options), source, out)
    assert (bf16_to_f32(folder.array(GATE + ".weight")) == np.float32(value)).all()
    assert folder.dtype(DOWN + ".weight_packed") == "I32"


@pytest.mark.parametrize("dtype", ["F8_E8M0", "U8"])
@pytest.mark.parametrize(("byte", "mention"), [(254, "too large"), (255, "nan")])
@pytest.mark.parametrize("options", [(), ("--ignore", r"re:.*\.(gate|up)_proj$")])
def test_exponents_that_no_bf16_can_hold_are_refused(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, byte: int, mention: str, options: Any
) -> None:
    monkeypatch.setitem(make_cases.SIZES, "U8", 1)
    checkpoint = exponents(dtype, byte, code=0x7E)
    source, out = save(checkpoint), tmp_path / "out"
    said = kizami("convert", source, out, *options, "--quiet")
    assert_refused(said, [mention, "_proj.weight", "row 0", "column 0"])
    assert not out.exists()


def exponents(dtype: str, byte: int, code: int = 0x38) -> Checkpoint:
    checkpoint = mini(128, 128, code, 1.0)
    checkpoint.config["quantization_config"]["scale_fmt"] = "ue8m0"
    for module in (GATE, UP, DOWN):
        checkpoint.set(module + ".weight_scale_inv", Tensor(dtype, (1, 1), bytes([byte])))
    return checkpoint


@each_place
@pytest.mark.parametrize("dtype", ["U8", "I32", "F8_E4M3", "F64", "I8"])
def test_a_scale_of_a_dtype_without_a_meaning_is_refused(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, dtype: str
) -> None:
    sizes = {"U8": 1, "I32": 4, "F8_E4M3": 1, "F64": 8, "I8": 1}
    monkeypatch.setattr(make_cases, "SIZES", make_cases.SIZES | sizes)
    checkpoint = tiny()
    shape = checkpoint.tensors()[module + ".weight_scale_inv"].shape
    data = bytes(sizes[dtype] * int(np.prod(shape)))
    checkpoint.set(module + ".weight_scale_inv", Tensor(dtype, shape, data))
    refused(save(checkpoint), tmp_path / "out", "unsupported_dtype", dtype, module + ".weight_scale_inv")


@pytest.mark.parametrize("method", ["search", "minmax", "signed"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "FP8 of -0.0", "scale 0", "scale -0.0"])
def test_nothing_is_packed_as_nothing_in_every_dtype(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, method: str
) -> None:
    """Zeros of both signs. Codes 0, a positive scale, no error."""
    monkeypatch.setitem(make_cases.SIZES, "F16", 2)
    checkpoint = mini(8, 96, 0x80, {"scale 0": 0.0, "scale -0.0": -0.0}.get(dtype, 1.0))
    for module in (GATE, UP, DOWN):
        signs = np.where(np.arange(8 * 96).reshape(8, 96) % 3, 0.0, -0.0)
        dense = {"BF16": bf, "F32": f32, "F16": lambda x: Tensor("F16", x.shape, x.astype("<f2").tobytes())}.get(dtype)
        if dense is not None:
            checkpoint.set(module + ".weight", dense(signs))
            del checkpoint.shards["model.safetensors"][module + ".weight_scale_inv"]
        elif dtype.startswith("scale"):
            checkpoint.set(module + ".weight", f8(make_cases.random_bytes(module, 8, 96)))
    source, out = save(checkpoint), tmp_path / "out"
    folder = assert_converted(kizami("convert", source, out, "--method", method), source, out)
    for module in (GATE, UP, DOWN):
        assert (folder.array(module + ".weight_packed") == make_cases.ZEROS).all()
        assert (bf16_to_f32(folder.array(module + ".weight_scale")) == 2.0**-7).all()
        assert folder.report[module]["rel_error"] == 0.0


@pytest.mark.parametrize("method", ["search", "minmax", "signed"])
@pytest.mark.parametrize("exponent", [-149, -140, -126, -100, 0, 100, 118])
def test_weights_of_any_size_keep_their_nearest_codes(save: Save, tmp_path: Path, exponent: int, method: str) -> None:
    """From the smallest float32 to the largest BF16; the oracle looks at every code."""
    source, out = save(mini(16, 128, None, 2.0**exponent)), tmp_path / "out"
    assert_converted(kizami("convert", source, out, "--method", method), source, out)


@pytest.mark.parametrize("fmt", ["e4m3fnuz", "E5M2", "float8_e4m3fnuz"])
def test_a_config_that_says_other_codes_is_believed(save: Save, tmp_path: Path, fmt: str) -> None:
    checkpoint = tiny()
    checkpoint.config["quantization_config"]["fmt"] = fmt
    assert_refused(kizami("convert", save(checkpoint), tmp_path / "out"), ["config.json", "fmt", fmt, "e4m3"])

"""`--kv-scales FILE.safetensors`: scales of other tools, under the names of a checkpoint."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli_fixtures import Run
from kv_checkpoints import BY_HEAD, VALUES, glm4, scales_of
from kv_scale_fixtures import LAYERS, ROWS, gqa, uniform_range, write_stats
from make_cases import Tensor, bf, f8, f32, write_file

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.kv_scales.neutral import MAX_BYTES, KvScales
from kizami.formats.kv_scales.tensors import RECORD, encode_tensors
from kizami.quantize.kv_scales.assess import assess
from kizami.quantize.kv_scales.scale_file import read_kv_scales

K0, V0, K1, V1 = (f"model.layers.{layer}.self_attn.{kind}_scale" for layer in (0, 1) for kind in "kv")
GOOD = {K0: f32([0.5]), V0: f32([0.25]), K1: f32([2.0]), V1: f32([1.0])}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(glm4().save(tmp_path_factory.mktemp("glm4") / "src"))


def save(folder: Path, tensors: dict[str, Tensor]) -> Path:
    write_file(folder / "kv.safetensors", tensors)
    return folder / "kv.safetensors"


def values_of(scales: KvScales) -> tuple[object, ...]:
    return tuple((layer.k, layer.v) for layer in scales.layers)


# ------------------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    "names",
    [
        (K0, V0, K1, V1),
        tuple(name.replace("self_attn.", "self_attn.attn.") for name in (K0, V0, K1, V1)),
        ("model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.v_proj.v_scale", K1, V1),
        ("model.layers.0.self_attn.k_proj.output_scale", "model.layers.0.self_attn.v_proj.output_scale", K1, V1),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_every_tools_names_and_shapes_are_read(
    source: Checkpoint, tmp_path: Path, names: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    tensors = {name: Tensor("F32", shape, tensor.data) for name, tensor in zip(names, GOOD.values(), strict=True)}
    scales = read_kv_scales(save(tmp_path, tensors), source)
    assert values_of(scales) == VALUES
    assert {layer.source for layer in scales.layers} == {"carried over"}
    assert (scales.granularity, scales.kv_heads, scales.model_type) == ("tensor", 2, "glm4_moe")
    assert (scales.config_sha256, scales.statistics_sha256) == (None, None)
    assert KvScales.parse(scales.document(), "kv") == scales


def test_one_scale_for_both_and_one_of_two_are_what_engines_make_of_them(source: Checkpoint, tmp_path: Path) -> None:
    both = {f"model.layers.{layer}.self_attn.kv_scale": f32([0.5 + layer]) for layer in (0, 1)}
    assert values_of(read_kv_scales(save(tmp_path, both), source)) == (((0.5,), (0.5,)), ((1.5,), (1.5,)))
    assert values_of(read_kv_scales(save(tmp_path, {K0: f32([0.5]), V1: f32([2.0])}), source)) == (
        ((0.5,), (0.5,)),
        ((2.0,), (2.0,)),
    )


def test_one_layer_by_head_makes_all_by_head(source: Checkpoint, tmp_path: Path) -> None:
    mixed = GOOD | {K0: f32([[[0.5]], [[1.0]]])}
    scales = read_kv_scales(save(tmp_path, mixed), source)
    assert scales.granularity == "attn_head"
    assert values_of(scales) == (((0.5, 1.0), (0.25, 0.25)), ((2.0, 2.0), (1.0, 1.0)))


def test_bf16_is_exact_and_1_says_nothing(source: Checkpoint, tmp_path: Path) -> None:
    scales = read_kv_scales(save(tmp_path, {K0: bf([0.5]), V0: bf([1.0]), K1: bf([1.0]), V1: bf([1.0])}), source)
    assert [layer.source for layer in scales.layers] == ["carried over", "not calibrated"]


@pytest.mark.parametrize("value", [1e-30, 1e-7, 448.0 * 10, 1e30])
def test_a_number_that_is_hardly_a_scale_is_flagged(
    kizami: Run, source: Checkpoint, tmp_path: Path, value: float
) -> None:
    file = save(tmp_path, GOOD | {V1: f32([value])})
    (found,) = read_kv_scales(file, source).layers[1].findings
    assert found.startswith(f"a scale of {np.float32(value):g}: is it a scale")
    assert found in kizami("kv-scales", source.root, "--from", file).err
    assert found in kizami("plan", source.root, "--kv-scales", file).err


@pytest.mark.parametrize("by_head", [False, True])
def test_what_kizami_writes_for_a_checkpoint_comes_back(source: Checkpoint, tmp_path: Path, by_head: bool) -> None:
    scales = scales_of(source, BY_HEAD if by_head else VALUES)
    path = tmp_path / "kv.safetensors"
    path.write_bytes(encode_tensors(scales))
    assert read_kv_scales(path, source) == scales, "with who vouches for them"


# ----------------------------------------------------------------------------------------------------------- refusals

BAD: dict[str, tuple[dict[str, Tensor], str, str, str | None]] = {
    "0": (GOOD | {K1: f32([0.0])}, "bad_kv_scale", "has a KV scale of 0", K1),
    "NaN": (GOOD | {V0: f32([float("nan")])}, "bad_kv_scale", "has a KV scale of nan", V0),
    "below 0": (GOOD | {V0: f32([-1.0])}, "bad_kv_scale", "has a KV scale of -1", V0),
    "denormal": (GOOD | {V0: f32([1e-40])}, "bad_kv_scale", "has a KV scale of 9.99995e-41", V0),
    "infinite": (GOOD | {V0: bf([float("inf")])}, "bad_kv_scale", "has a KV scale of inf", V0),
    "no float": (GOOD | {V0: f8(np.zeros(1))}, "bad_kv_scale", "is F8_E4M3", V0),
    "three": (GOOD | {V0: f32([1.0, 1.0, 1.0])}, "bad_kv_scale", "is F32 [3], expected 1 or 2 floats", V0),
    "none": (GOOD | {V0: f32([])}, "bad_kv_scale", "is F32 [0], expected 1 or 2 floats", V0),
    "one for both that differs": (
        {**GOOD, "model.layers.0.self_attn.kv_scale": f32([4.0])}, "bad_kv_scale", "is 4, and", 
        "model.layers.0.self_attn.kv_scale",
    ),
    "two that differ in number": (
        GOOD | {"model.layers.0.self_attn.attn.k_scale": f32([0.5, 0.5])}, "bad_kv_scale", "is 0.5, and", K0,
    ),
    "too large for a cache": (GOOD | {K1: f32([1e36])}, "bad_kv_scale", "has a KV scale of 1e+36", K1),
    "two that differ": (
        GOOD | {"model.layers.0.self_attn.attn.k_scale": f32([1.0])}, "bad_kv_scale", "is 0.5, and", K0,
    ),
    "a layer too few": ({K0: GOOD[K0], V0: GOOD[V0]}, "kv_scales_mismatch", "of layer 1 (1 of 2 layers", None),
    "a layer too many": (
        GOOD | {"model.layers.2.self_attn.k_scale": f32([1.0])}, "kv_scales_mismatch", "is of layer 2; the model has 2",
        "model.layers.2.self_attn.k_scale",
    ),
    "two models": (
        GOOD | {"draft.layers.0.self_attn.k_scale": f32([8.0])}, "bad_kv_scales", "one model's scales",
        "draft.layers.0.self_attn.k_scale",
    ),
    "a layer under two numbers": (
        GOOD | {"model.layers.01.self_attn.k_scale": f32([8.0])}, "bad_kv_scales",
        "expected model.layers.1.self_attn.k_scale", "model.layers.01.self_attn.k_scale",
    ),
    "a weight": (
        GOOD | {"model.norm.weight": f32([1.0])}, "bad_kv_scales", "is not the KV scale", "model.norm.weight",
    ),
    "no layer": (GOOD | {"self_attn.k_scale": f32([1.0])}, "bad_kv_scales", "is not the KV", "self_attn.k_scale"),
    "too large": (GOOD | {K0: f32([1.0] * (MAX_BYTES // 4 + 1))}, "bad_kv_scales", "at most 8388608: KV scales", None),
    "empty": ({}, "kv_scales_mismatch", "of layer 0 (0 of 2 layers", None),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD))
def test_a_file_that_is_not_the_scales_of_this_model_is_refused(source: Checkpoint, tmp_path: Path, name: str) -> None:
    tensors, code, message, tensor = BAD[name]
    with pytest.raises(KizamiError) as refused:
        read_kv_scales(save(tmp_path, tensors), source)
    assert message in refused.value.message
    assert (refused.value.code, refused.value.file, refused.value.tensor) == (code, "kv.safetensors", tensor)


def test_what_is_no_file_of_tensors_is_refused(source: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "kv.safetensors"
    with pytest.raises(KizamiError) as refused:
        read_kv_scales(path, source)
    assert refused.value.code == "missing_file"
    path.mkdir()
    with pytest.raises(KizamiError) as refused:
        read_kv_scales(path, source)
    assert refused.value.code == "not_a_file"
    path.rmdir()
    path.write_bytes(b'{"schema": "kizami.kv-scales/1"}')
    with pytest.raises(KizamiError) as refused:
        read_kv_scales(path, source)
    assert refused.value.code == "bad_header"


def test_tensors_that_kizami_made_of_another_config_are_refused(
    kizami: Run, source: Checkpoint, tmp_path: Path
) -> None:
    path = tmp_path / "kv.safetensors"
    path.write_bytes(encode_tensors(scales_of(source, config_sha256="0" * 64)))
    done = kizami("convert", source.root, tmp_path / "out", "--kv-scales", path, "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "kv_scales_mismatch")


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"schema": "kizami.kv-scales/1"}'])
def test_a_record_that_is_none_is_refused(source: Checkpoint, tmp_path: Path, record: str) -> None:
    path = tmp_path / "kv.safetensors"
    write_file(path, GOOD, {RECORD: record})
    with pytest.raises(KizamiError) as refused:
        read_kv_scales(path, source)
    assert refused.value.code in ("bad_json", "bad_kv_scales")


def test_tensors_that_their_record_does_not_have_are_refused(source: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "kv.safetensors"
    data = bytearray(encode_tensors(scales_of(source)))
    data[-4:] = np.float32(1.5).tobytes()
    path.write_bytes(data)
    with pytest.raises(KizamiError, match="not those that its metadata records"):
        read_kv_scales(path, source)


# ------------------------------------------------------------------------------------------------------------ the uses


def test_they_go_into_an_output_and_verify_holds_it_to_them(kizami: Run, source: Checkpoint, tmp_path: Path) -> None:
    file, out = save(tmp_path, GOOD), tmp_path / "out"
    assert kizami("convert", source.root, out, "--kv-scales", file, "-q").code == 0
    tensors = Checkpoint.open(out).tensors
    assert {"model.layers.0.self_attn.attn.k_scale", "model.layers.1.self_attn.attn.v_scale"} <= tensors.keys()
    done = kizami("verify", out, "--against", source.root, "--kv-scales", file)
    assert done.code == 0
    assert "KV scales are those of FILE: 2 layers" in done.err
    other = save(tmp_path / "other", GOOD | {V1: f32([1.5])})
    done = kizami("verify", out, "--kv-scales", other)
    assert done.code == 1
    assert "records of layer 1 k [2.0], v [1.0]; FILE has k [2.0], v [1.5]" in done.err
    assert "not checked" not in done.err, "OUT itself is right"


def test_verify_holds_measured_scales_to_the_numbers_of_a_file(kizami: Run, source: Checkpoint, tmp_path: Path) -> None:
    measured, out = scales_of(source, statistics_sha256="1" * 64), tmp_path / "out"
    measured.write(tmp_path / "kv.json")
    assert kizami("convert", source.root, out, "--kv-scales", tmp_path / "kv.json", "-q").code == 0
    assert kizami("verify", out, "--kv-scales", save(tmp_path, GOOD)).code == 0
    for theirs, code in ((measured, 0), (scales_of(source), 1), (scales_of(source, config_sha256="0" * 64), 1)):
        (tmp_path / "made.safetensors").write_bytes(encode_tensors(theirs))
        assert kizami("verify", out, "--kv-scales", tmp_path / "made.safetensors").code == code


def test_an_output_without_scales_is_not_held_to_a_file_in_silence(
    kizami: Run, source: Checkpoint, tmp_path: Path
) -> None:
    assert kizami("convert", source.root, tmp_path / "out", "-q").code == 0
    done = kizami("verify", tmp_path / "out", "--kv-scales", save(tmp_path, GOOD))
    assert done.code == 1
    assert "was converted without --kv-scales" in done.err


def test_they_are_written_in_another_format(kizami: Run, tmp_path: Path) -> None:
    """Of SRC they have no hash, so that the file says what was said and no more."""
    src = gqa(model_type="llama", architecture="LlamaForCausalLM").save(tmp_path / "src")
    file, made = save(tmp_path, GOOD), tmp_path / "kv.json"
    done = kizami("kv-scales", src, "--from", file, "-o", made)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == f"2 layers: 2 carried over; {made} written"
    scales = KvScales.read(made)
    assert values_of(scales) == VALUES
    done = kizami("kv-scales", src, "--from", made, "--format", "sglang", "--tp", 2, "-o", tmp_path / "s.json")
    assert done.code == 0
    assert "one number per layer: the larger of K's and V's is written of layers 0-1" in done.err
    ranks = json.loads((tmp_path / "s.json").read_text())["kv_cache"]["scaling_factor"]
    assert ranks == {"0": {"0": 0.5, "1": 2.0}, "1": {"0": 0.5, "1": 2.0}}


def test_they_are_held_to_what_was_measured(kizami: Run, tmp_path: Path) -> None:
    src = gqa(size=40.0).save(tmp_path / "src")
    ranges = {"k": uniform_range(ROWS, 20.0), "v": uniform_range(ROWS, 2000.0)}
    stats = write_stats(src, tmp_path / "stats", dict.fromkeys(range(LAYERS), ranges))
    done = kizami("kv-scales", src, "--from", save(tmp_path, GOOD), "--stats", stats)
    assert done.code == 1
    assert "layer 0: v: 2000 was measured; at scale 0.25 it is clipped" in done.err
    enough = save(tmp_path, {name: f32([32.0]) for name in GOOD})
    assert kizami("kv-scales", src, "--from", enough, "--stats", stats).code == 0


def test_how_many_there_are_is_the_files_word(kizami: Run, source: Checkpoint, tmp_path: Path) -> None:
    done = kizami("kv-scales", source.root, "--from", save(tmp_path, GOOD), "--per-head", "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "bad_option")


def test_the_order_of_a_files_tensors_changes_nothing(kizami: Run, source: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert kizami("convert", source.root, out, "--kv-scales", save(tmp_path, GOOD), "-q").code == 0
    whole = {path.name: path.read_bytes() for path in out.iterdir()}
    shutil.rmtree(out)
    assert (
        kizami("convert", source.root, out, "--kv-scales", save(tmp_path, dict(reversed(GOOD.items()))), "-q").code == 0
    )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole


def test_a_scale_below_what_the_weights_allow_may_clip(kizami: Run, tmp_path: Path) -> None:
    src = gqa(size=40.0).save(tmp_path / "src")
    done = kizami("kv-scales", src, "--from", save(tmp_path, {name: f32([0.01]) for name in GOOD}))
    assert done.code == 0
    assert "scales hold 4.48: may clip; not measured" in done.err


def test_ranks_that_heads_do_not_go_into_are_refused(kizami: Run, tmp_path: Path) -> None:
    src = gqa(model_type="llama", architecture="LlamaForCausalLM").save(tmp_path / "src")
    command = ["kv-scales", src, "--from", save(tmp_path, GOOD), "--format", "sglang", "-o", tmp_path / "s.json"]
    done = kizami(*command, "--tp", 3, "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "tp_does_not_divide")
    assert kizami(*command, "--tp", 4).code == 0


# ---------------------------------------------------------------------------------------------- what is claimed of them


def certified(folder: Path, size: float) -> tuple[Path, Path]:
    """A source of that size of weights, and the file that `kv-scales` makes of one whose weights are small."""
    small = gqa(size=0.02, bias=False).save(folder / "small")
    file = folder / "kv.json"
    checkpoint = Checkpoint.open(small)
    scales = assess(checkpoint, None, "tensor").scales
    assert {layer.source for layer in scales.layers} == {"certificate"}
    scales.write(file)
    return gqa(size=size, bias=False).save(folder / "src"), file


def test_a_certificate_holds_for_the_weights_that_it_was_made_of_alone(kizami: Run, tmp_path: Path) -> None:
    """Two checkpoints of one config.json: a model and its fine-tune."""
    source, file = certified(tmp_path, size=20.0)
    refused = kizami("convert", source, tmp_path / "out", "--kv-scales", file, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "kv_scales_mismatch")
    assert "layer 0 is said to be certified, and these weights give no certificate" in refused.json["error"]["message"]
    assert not (tmp_path / "out").exists()
    told = kizami("kv-scales", source, "--from", file, "--json").json
    assert {layer["source"] for layer in told["layers"]} == {"not calibrated"}
    assert "these weights give no certificate" in told["layers"][0]["findings"][0]["text"]


def test_a_certificate_of_these_weights_goes_into_the_output(kizami: Run, tmp_path: Path) -> None:
    source, file = certified(tmp_path, size=0.02)
    assert kizami("convert", source, tmp_path / "out", "--set", "attention=int4", "--kv-scales", file, "-q").code == 0

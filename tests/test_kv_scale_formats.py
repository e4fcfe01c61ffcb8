"""Files of KV scales: kizami's own, SGLang's, and tensors with their scheme, as those who read them read them."""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_checkpoints
import numpy as np
import pytest
from safetensors.numpy import load

from kizami.formats.engines.check import find_problems
from kizami.formats.errors import KizamiError
from kizami.formats.kv_scales.effects import JSON_CLASSES, NOT_REMAPPED, effects, json_refusal, refusal
from kizami.formats.kv_scales.neutral import KvScales, LayerScales, float32_scale
from kizami.formats.kv_scales.sglang import find_problems as find_sglang_problems
from kizami.formats.kv_scales.sglang import sglang_file
from kizami.formats.kv_scales.tensors import (
    KV_CACHE_SCHEME,
    encode_tensors,
    find_prefix,
    kv_cache_scheme,
    scale_tensors,
)

GQA = KvScales(
    "llama", "LlamaForCausalLM", "gqa", 2, "tensor", "a" * 64, "b" * 64,
    (LayerScales(0, (0.5,), (0.25,), "calibrated"), LayerScales(1, (1.0,), (4.0,), "carried over", ("x",))),
)  # fmt: skip
MLA = KvScales(
    "glm_moe_dsa", "GlmMoeDsaForCausalLM", "dsa", 0, "tensor", "a" * 64, None,
    (LayerScales(0, (1.0,), (1.0,), "certificate"), LayerScales(1, (1.0,), (1.0,), "not calibrated")),
)  # fmt: skip
HEADS = replace(
    GQA, granularity="attn_head", layers=(LayerScales(0, (0.5, 2.0), (0.25, 1.0), "calibrated"),)
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------ kizami's own


@pytest.mark.parametrize("scales", [GQA, MLA, HEADS], ids=["gqa", "mla", "per head"])
def test_what_is_written_is_read_back(scales: KvScales, tmp_path: Path) -> None:
    scales.write(tmp_path / "kv.json")
    assert KvScales.read(tmp_path / "kv.json") == scales
    assert json.loads((tmp_path / "kv.json").read_text())["schema"] == "kizami.kv-scales/1"


def test_scales_are_read_as_the_float32_numbers_that_engines_hold(tmp_path: Path) -> None:
    body = GQA.document()
    body["layers"][0]["k"] = [0.012]
    (tmp_path / "kv.json").write_text(json.dumps(body))
    assert KvScales.read(tmp_path / "kv.json").layers[0].k == (float(np.float32(0.012)),)


def _layer(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["layers"][0].update(changes)


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another schema": lambda b: b.update(schema="kizami.kv-scales/2"),
    "a key more": lambda b: b.update(note=1),
    "a key less": lambda b: b.pop("architecture"),
    "another dtype": lambda b: b.update(dtype="float8_e5m2"),
    "no word": lambda b: b.update(model_type=""),
    "a list for a word": lambda b: b.update(architecture=["LlamaForCausalLM"]),
    "another attention": lambda b: b.update(attention="mha"),
    "an unhashable attention": lambda b: b.update(attention={}),
    "a list for a granularity": lambda b: b.update(granularity=["tensor"]),
    "true heads": lambda b: b.update(kv_heads=True),
    "no heads": lambda b: b.update(kv_heads=0),
    "very many heads": lambda b: b.update(kv_heads=1 << 40),
    "heads of a latent": lambda b: b.update(attention="mla"),
    "a latent per head": lambda b: b.update(attention="mla", kv_heads=0, granularity="attn_head"),
    "a short hash": lambda b: b.update(config_sha256="abc"),
    "a certificate of 0.5": lambda b: b["layers"][0].update(source="certificate", k=[0.5]),
    "a hash that is a number": lambda b: b.update(config_sha256=0),
    "capital hash": lambda b: b.update(statistics_sha256="A" * 64),
    "no layers": lambda b: b.update(layers=[]),
    "layers by name": lambda b: b.update(layers={"0": {}}),
    "a layer twice": lambda b: b["layers"].append(copy.deepcopy(b["layers"][0])),
    "a layer that is missing": lambda b: b["layers"].pop(0),
    "a layer that is a number": lambda b: b["layers"].insert(0, 3),
    "a false layer": _layer(layer=False),
    "zero": _layer(k=[0.0]),
    "minus zero": _layer(k=[-0.0]),
    "below zero": _layer(v=[-1.0]),
    "NaN": _layer(k=[math.nan]),
    "infinity": _layer(k=[math.inf]),
    "a subnormal": _layer(k=[1e-40]),
    "too large for float32": _layer(k=[1e39]),
    "an integer of 400 digits": _layer(k=[10**400]),
    "true": _layer(k=[True]),
    "text": _layer(k=["0.5"]),
    "null": _layer(k=[None]),
    "a number without a list": _layer(k=0.5),
    "a scale more": _layer(k=[0.5, 0.5]),
    "no scale": _layer(k=[]),
    "another source": _layer(source="guessed"),
    "an unhashable source": _layer(source=[]),
    "not calibrated, and not 1.0": _layer(source="not calibrated"),
    "findings that are numbers": _layer(findings=[1]),
    "very many findings": _layer(findings=["x"] * 1000),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_file_that_kizami_did_not_write_is_refused(broken: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    body = GQA.document()
    broken(body)
    (tmp_path / "kv.json").write_text(json.dumps(body))
    with pytest.raises(KizamiError) as error:
        KvScales.read(tmp_path / "kv.json")
    assert error.value.code == "bad_kv_scales"
    assert error.value.file == "kv.json"


def test_k_and_v_of_a_latent_are_one_row(tmp_path: Path) -> None:
    body = MLA.document()
    body["layers"][0]["v"] = [2.0]
    (tmp_path / "kv.json").write_text(json.dumps(body))
    with pytest.raises(KizamiError, match="one row"):
        KvScales.read(tmp_path / "kv.json")


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'{"a": 1, "a": 2}', b"[" * 100_000, b'{"schema": 1}'])
def test_bytes_that_are_no_such_object_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "kv.json").write_bytes(data)
    with pytest.raises(KizamiError):
        KvScales.read(tmp_path / "kv.json")


def test_unity_without_proof_is_trivial_and_unity_with_a_certificate_is_not() -> None:
    ones = tuple(LayerScales(i, (1.0,), (1.0,), "not calibrated") for i in range(2))
    assert replace(MLA, layers=ones).trivial
    assert not MLA.trivial
    assert MLA.uncalibrated == (1,)


def test_numbers_that_no_engine_can_use_are_never_encoded() -> None:
    for value in (0.0, math.nan, math.inf, -1.0, 1e-45):
        bad = replace(GQA, layers=(LayerScales(0, (value,), (1.0,), "calibrated"),))
        with pytest.raises(KizamiError):
            bad.encode()
    assert float32_scale(2**-126) == 2**-126


# ------------------------------------------------------------------------------------------------------------ SGLang


def sglang_reads(text: str, model_type: str, rank: int, tp: int, layers: int) -> dict[int, float]:
    """The rules of serving-engines.md 3.1, which SGLang's schema class has: what a rank gets, or AssertionError."""
    file = json.loads(text)
    assert file["model_type"] is not None
    assert file["model_type"] == model_type
    cache = file["kv_cache"]
    assert cache["dtype"] == "float8_e4m3fn"
    factors = {int(r): {int(i): float(x) for i, x in of.items()} for r, of in cache["scaling_factor"].items()}
    assert len(factors) == tp
    assert all(i in factors for i in range(tp))
    assert all(len(of) == layers for of in factors.values())
    assert all(i in factors[rank] for i in range(layers))
    return factors[rank]


@pytest.mark.parametrize("tp", [1, 8])
def test_sglang_takes_the_file_on_every_rank_and_gets_the_larger_of_k_and_v(tp: int) -> None:
    text = json.dumps(sglang_file(GQA, tp))
    for rank in range(tp):
        assert sglang_reads(text, "llama", rank, tp, 2) == {0: 0.5, 1: 4.0}
    assert sglang_file(HEADS, 1)["kv_cache"]["scaling_factor"] == {"0": {"0": 2.0}}


SPOILED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no model_type": lambda f: f.update(model_type=None),
    "another model_type": lambda f: f.update(model_type="qwen2"),
    "another dtype": lambda f: f["kv_cache"].update(dtype="fp8_e4m3"),
    "a rank less": lambda f: f["kv_cache"]["scaling_factor"].pop("1"),
    "a rank more": lambda f: f["kv_cache"]["scaling_factor"].update({"2": {"0": 1.0, "1": 1.0}}),
    "a layer less": lambda f: f["kv_cache"]["scaling_factor"]["1"].pop("1"),
    "the MTP layer": lambda f: f["kv_cache"]["scaling_factor"]["0"].update({"2": 1.0}),
    "a layer of another number": lambda f: f["kv_cache"]["scaling_factor"].update({"0": {"0": 1.0, "2": 1.0}}),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_what_sglang_would_answer_with_unity_is_found(spoil: Callable[[dict[str, Any]], Any]) -> None:
    file = sglang_file(GQA, 2)
    assert find_sglang_problems(file, "llama", 2, 2) == []
    spoil(file)
    assert find_sglang_problems(file, "llama", 2, 2)
    text = json.dumps(file)
    with pytest.raises(AssertionError):
        assert [sglang_reads(text, "llama", rank, 2, 2) for rank in range(2)]


@pytest.mark.parametrize("value", [0, -1.0, math.nan, True, "1.0", None])
def test_a_scale_that_sglang_would_take_and_must_not_is_found(value: object) -> None:
    file = sglang_file(GQA, 1)
    file["kv_cache"]["scaling_factor"]["0"]["1"] = value
    (problem,) = find_sglang_problems(file, "llama", 1, 2)
    assert problem.startswith("rank 0, layer 1: ")


@pytest.mark.parametrize(
    "name", ["DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Glm4MoeForCausalLM", "GlmMoeDsaForCausalLM"]
)
def test_a_class_that_cannot_read_the_file_is_named(name: str) -> None:
    with pytest.raises(KizamiError, match=f"the class {name} has no load_kv_cache_scales") as error:
        sglang_file(replace(GQA, architecture=name), 8)
    assert error.value.code == "no_kv_json"
    assert json_refusal(name) is not None


# -------------------------------------------------------------------------------------------------------- checkpoint


@pytest.mark.long
def test_compressed_tensors_takes_the_scheme_and_the_number_of_scales() -> None:
    from compressed_tensors.quantization import QuantizationConfig

    for scales in (GQA, HEADS):
        config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {},
                  "kv_cache_scheme": kv_cache_scheme(scales)}  # fmt: skip
        scheme = QuantizationConfig.model_validate(config).kv_cache_scheme
        assert scheme is not None
        assert (scheme.num_bits, scheme.type, scheme.symmetric, scheme.dynamic) == (8, "float", True, False)
        assert scheme.strategy == scales.granularity


def test_tensors_have_the_names_that_a_classes_loader_takes() -> None:
    assert list(scale_tensors(GQA))[:2] == ["model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"]
    glm = replace(GQA, model_type="glm4_moe")
    assert next(iter(scale_tensors(glm))) == "model.layers.0.self_attn.attn.k_scale"
    wrapped = scale_tensors(MLA, "language_model.model.layers.")
    assert next(iter(wrapped)) == "language_model.model.layers.0.self_attn.k_proj.k_scale"


def sglang_name(name: str, remapped: bool) -> str:
    """maybe_remap_kv_scale_name of SGLang 0.5.23, for classes whose loader calls it."""
    leaf = name.rpartition(".")[2]
    if not remapped:
        return name
    return name.replace(f".{leaf[0]}_proj.{leaf}", f".attn.{leaf}") if "_proj." in name else (
        name.replace(f".{leaf}", f".attn.{leaf}"))  # fmt: skip


def vllm_name(name: str) -> str:
    """The mapper of vLLM 0.33.0's quantization configs: `.attn` before k_scale, unless it is there."""
    head, _, leaf = name.rpartition(".")
    return name if head.endswith(".attn") else f"{head.removesuffix('.k_proj').removesuffix('.v_proj')}.attn.{leaf}"


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "glm4_moe", "qwen3_moe", "qwen2", "mixtral"])
def test_both_engines_find_every_tensor_under_the_parameters_name(model_type: str) -> None:
    for name in scale_tensors(replace(GQA, model_type=model_type)):
        expected = f"{name.partition('.self_attn.')[0]}.self_attn.attn.{name.rpartition('.')[2]}"
        assert sglang_name(name, model_type not in NOT_REMAPPED) == expected
        assert vllm_name(name) == expected


def test_the_file_of_tensors_is_read_by_safetensors(tmp_path: Path) -> None:
    tensors = load(encode_tensors(GQA))
    assert {name: array.tolist() for name, array in tensors.items()} == {
        "model.layers.0.self_attn.k_scale": [0.5], "model.layers.0.self_attn.v_scale": [0.25],
        "model.layers.1.self_attn.k_scale": [1.0], "model.layers.1.self_attn.v_scale": [4.0],
    }  # fmt: skip
    assert {array.dtype for array in tensors.values()} == {np.dtype(np.float32)}
    per_head = load(encode_tensors(HEADS))["model.layers.0.self_attn.k_scale"]
    assert (per_head.shape, per_head.ravel().tolist()) == ((2, 1, 1), [0.5, 2.0])


def test_the_prefix_of_layers_is_that_of_the_names() -> None:
    names = ["language_model.model.layers.3.self_attn.o_proj.weight", "vision_tower.layers.0.self_attn.q.weight"]
    assert find_prefix(names) == "language_model.model.layers."
    assert find_prefix(["lm_head.weight"]) == "model.layers."
    towers = [f"speech_encoder.layers.{layer}.self_attn.k_proj.weight" for layer in range(4)]
    assert find_prefix(towers) == "speech_encoder.layers."
    assert find_prefix([*towers, "model.layers.0.self_attn.k_proj.weight"]) == "model.layers."
    with pytest.raises(
        KizamiError, match=r"under speech_encoder\.layers\., thinker\.layers\.: which of them"
    ) as refused:
        find_prefix([*towers, "thinker.layers.0.self_attn.k_proj.weight"])
    assert refused.value.code == "kv_scales_unplaced"
    with pytest.raises(KizamiError, match=r"under language_model\.model\.layers\., model\.layers\.: which of them"):
        find_prefix([*names, "model.layers.0.self_attn.k_proj.weight"])


# ----------------------------------------------------------------------------------------------------------- effects


def test_a_latent_with_another_scale_is_refused_and_unity_is_not() -> None:
    assert refusal(MLA) is None
    assert refusal(GQA) is None
    scaled = replace(MLA, layers=(MLA.layers[0], LayerScales(1, (2.0,), (2.0,), "calibrated")))
    why = refusal(scaled)
    assert why is not None
    assert why.startswith("layer 1 has a KV scale of 2")


def test_engines_are_told_apart() -> None:
    def verdicts(scales: KvScales) -> dict[tuple[str, str], str]:
        return {(e.engine, e.form): e.verdict for e in effects(scales)}

    assert verdicts(MLA) == {
        ("sglang", "checkpoint"): "harmful", ("vllm", "checkpoint"): "ignored", ("sglang", "json"): "refused",
    }  # fmt: skip
    assert verdicts(GQA) == {
        ("sglang", "checkpoint"): "applied", ("vllm", "checkpoint"): "applied", ("sglang", "json"): "ignored",
    }  # fmt: skip
    assert verdicts(HEADS)[("sglang", "checkpoint")] == "ignored"
    assert "656" in effects(MLA)[0].text
    assert "656" not in effects(replace(MLA, attention="mla"))[0].text


def test_the_check_of_engines_has_nothing_against_what_is_written() -> None:
    """One table: what kv-scales writes for GLM-4.x is what `kizami check` finds nothing wrong with."""
    made = engine_checkpoints.good("glm4 fp8")
    layers = made.config["num_hidden_layers"]
    of_layers = tuple(replace(GQA.layers[0], layer=i) for i in range(layers))
    scales = replace(GQA, model_type="glm4_moe", architecture="Glm4MoeForCausalLM", layers=of_layers)
    for name, values in scale_tensors(scales).items():
        made.add(name, "F32", *values.shape)
        made.kv_scales[name] = tuple(values.tolist())
    made.quant["kv_cache_scheme"] = dict(KV_CACHE_SCHEME)
    for engine in ("sglang", "vllm"):
        found = [f for f in find_problems(made.served, engine) if f.code.startswith("kv_") and f.severity != "note"]
        assert found == []


def test_classes_are_spelled_as_configs_spell_them() -> None:
    assert all(name[0].isupper() and "For" in name for name in JSON_CLASSES)
    assert not JSON_CLASSES & {"Glm4MoeForCausalLM", "GlmMoeDsaForCausalLM", "DeepseekV3ForCausalLM"}

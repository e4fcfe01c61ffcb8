"""quantization_config: exact forms, derived `ignore`, reading back, placement in config.json."""

import copy
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kizami.formats.errors import KizamiError
from kizami.formats.quant_config import build_quantization_config, output_config, resolve, resolver

KIMI_IGNORE = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
MLA = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
SWIGLU = ("gate_proj", "up_proj", "down_proj")
EXPERTS = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"


def model(prefix: str = "", *, layers: int = 2, mtp: int = 1, indexer: bool = False, mlp: str = "mlp") -> list[str]:
    """Module names of the 2-D weights of a small DeepSeek-like model with one dense layer and two experts."""
    names = [f"{prefix}lm_head", f"{prefix}model.embed_tokens"]
    for i in range(layers + mtp):
        at = f"{prefix}model.layers.{i}."
        names += [f"{at}self_attn.{p}" for p in MLA]
        if indexer:
            names += [f"{at}self_attn.indexer.{p}" for p in ("wq_b", "wk", "weights_proj")]
        if i == 0:
            names += [f"{at}mlp.{p}" for p in SWIGLU]
            continue
        names += [f"{at}{mlp}.gate"]
        for group in ("shared_experts", "experts.0", "experts.1"):
            names += [f"{at}{mlp}.{group}.{p}" for p in SWIGLU]
        if i >= layers:
            names += [f"{at}eh_proj", f"{at}shared_head.head", f"{at}embed_tokens"]
    return names


def is_expert(name: str) -> bool:
    return ".experts." in name


def build(
    packed: list[str], plain: list[str], fp8: list[str] | None = None, *, layers: int | None = 2,
    mtp_packed: bool | None = True, block: tuple[int, int] | None = (128, 128), group_size: int = 32,
) -> dict[str, Any]:  # fmt: skip
    return build_quantization_config(
        group_size=group_size, packed=packed, fp8=fp8 or [], plain=plain, fp8_block=block, num_hidden_layers=layers,
        mtp_packed=mtp_packed,
    )  # fmt: skip


def split(names: list[str]) -> tuple[list[str], list[str]]:
    return [n for n in names if is_expert(n)], [n for n in names if not is_expert(n)]


def rest_in_fp8(name: str) -> bool:
    """The linears that GLM-5 and DeepSeek ship in FP8 besides routed experts."""
    return bool(
        re.search(r"(self_attn\.[a-z_]*proj[a-z_]*|indexer\.w[kq]\w*|mlp\.(shared_experts\.)?\w+_proj)$", name)
    ) and not name.endswith("weights_proj")


# ---------------------------------------------------------------------------------------------------- exact forms


def test_kimi_k2_gets_the_published_config() -> None:
    """Kimi-K2-Thinking's own JSON, plus the router, key for key and in order."""
    packed, plain = split(model(mtp=0))
    got = build(packed, plain, mtp_packed=None)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True,
               "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax",
               "observer_kwargs": {}}  # fmt: skip
    want = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": weights,
            }
        },
        "ignore": [*KIMI_IGNORE, r"re:.*mlp\.gate$"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    assert got == want
    assert list(got) == list(want)
    assert list(got["config_groups"]["group_0"]["weights"]) == list(weights)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_group_size_is_the_one_asked_for(group_size: int) -> None:
    packed, plain = split(model())
    weights = build(packed, plain, group_size=group_size)["config_groups"]["group_0"]["weights"]
    assert (weights["group_size"], weights["num_bits"]) == (group_size, 4)


def test_glm_and_deepseek_add_the_mtp_parts() -> None:
    packed, plain = split(model(indexer=True))
    want = [*KIMI_IGNORE, "re:.*eh_proj.*", "re:.*shared_head.*", r"re:.*mlp\.gate$"]
    assert build(packed, plain)["ignore"] == want


def test_mtp_kept_dense_is_ignored_under_both_runtime_names() -> None:
    packed, plain = split(model(layers=78))
    moved = [n for n in packed if ".layers.78." in n]
    packed = [n for n in packed if n not in moved]
    ignore = build(packed, plain + moved, layers=78, mtp_packed=False)["ignore"]
    assert ignore[-2:] == [r"re:.*\.layers\.78\..*", r"re:.*\.decoder\..*"]


def mixed(names: list[str], **options: Any) -> tuple[dict[str, Any], dict[str, str]]:
    packed, others = split(names)
    fp8 = [n for n in others if rest_in_fp8(n)]
    plain = [n for n in others if not rest_in_fp8(n)]
    forms = dict.fromkeys(packed, "int4") | dict.fromkeys(fp8, "fp8") | dict.fromkeys(plain, "none")
    return build(packed, plain, fp8, **options), forms


def test_mixed_output_is_the_one_json_for_both_engines() -> None:
    got, _ = mixed(model(indexer=True))
    want = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "format": "pack-quantized",
                "targets": [EXPERTS],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True,
                            "dynamic": False, "actorder": None},
                "input_activations": None,
                "output_activations": None,
            },
            "group_1": {
                "format": "float-quantized",
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128],
                            "symmetric": True, "dynamic": False},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128,
                                      "symmetric": True, "dynamic": True},
                "output_activations": None,
            },
        },
        "ignore": ["lm_head", "re:.*eh_proj.*", "re:.*shared_head.*", r"re:.*mlp\.gate$",
                   r"re:.*indexer\.weights_proj.*"],
        "kv_cache_scheme": None,
    }  # fmt: skip
    assert got == want
    assert list(got) == list(want)
    assert list(got["config_groups"]["group_1"]["weights"]) == list(want["config_groups"]["group_1"]["weights"])


def test_channel_fp8_stays_per_channel_with_token_activations() -> None:
    got, _ = mixed(model(), block=None)
    group = got["config_groups"]["group_1"]
    assert group["weights"] == {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True,
                                "dynamic": False}  # fmt: skip
    assert group["input_activations"] == {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True,
                                          "dynamic": True}  # fmt: skip


def test_a_kv_cache_scheme_is_passed_on() -> None:
    packed, plain = split(model())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    got = build_quantization_config(group_size=32, packed=packed, fp8=[], plain=plain, fp8_block=None,
                                    num_hidden_layers=2, mtp_packed=True, kv_cache_scheme=scheme)  # fmt: skip
    assert got["kv_cache_scheme"] == scheme


# ---------------------------------------------------------------------------------------------------- runtime names


def runtime_names(name: str, layers: int) -> list[str]:
    """The names under which SGLang, vLLM and transformers look `name` up."""
    bare = name.removeprefix("language_model.")
    found = [name, bare, f"model.language_model.{bare.removeprefix('model.')}" if bare != name else bare]
    inside = rf"model\.layers\.{layers}\."
    if re.match(inside, bare) and not bare.endswith(("eh_proj", "embed_tokens", "shared_head.head")):
        found.append(re.sub(inside, "model.decoder.", bare))
        found.append(re.sub(inside, f"model.layers.{layers}.mtp_block.", bare))
    if re.search(r"\.(gate|up)_proj$", name) and not is_expert(name):
        found += [re.sub(r"\.(gate|up)_proj$", ".gate_up_proj", n) for n in found]
    return found


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("layers", [2, 78])
@pytest.mark.parametrize("mtp", ["quantize", "keep"])
@pytest.mark.parametrize("rest", ["bf16", "fp8"])
def test_each_engine_reads_what_was_written(rest: str, mtp: str, layers: int, prefix: str) -> None:
    names = model(prefix, layers=layers, indexer=True)
    if prefix:
        names += ["vision_tower.encoder.blocks.0.mlp.fc0", "vision_tower.encoder.blocks.0.wqkv", "mm_projector.proj.0"]
    forms = {}
    for name in names:
        in_mtp = f".layers.{layers}." in name
        if is_expert(name) and not (in_mtp and mtp == "keep"):
            forms[name] = "int4"
        else:
            forms[name] = "fp8" if rest == "fp8" and (is_expert(name) or rest_in_fp8(name)) else "none"
    by_form = {form: [n for n in names if forms[n] == form] for form in ("int4", "fp8", "none")}
    config = build(by_form["int4"], by_form["none"], by_form["fp8"], layers=layers, mtp_packed=mtp == "quantize")
    form_of = resolver(config)
    wrong = {
        alias: (form_of(alias), forms[name])
        for name in names
        for alias in runtime_names(name, layers)
        if form_of(alias) != forms[name]
    }
    assert wrong == {}


def test_an_fp8_mtp_layer_is_kept_out_of_the_experts_target() -> None:
    names = model(layers=78)
    kept = [n for n in names if ".layers.78.mlp.experts." in n]
    packed = [n for n in names if is_expert(n) and n not in kept]
    fp8 = [n for n in names if rest_in_fp8(n)] + kept
    plain = [n for n in names if n not in packed and n not in fp8]
    config = build(packed, plain, fp8, layers=78, mtp_packed=False)
    assert config["config_groups"]["group_0"]["targets"] == [
        r"re:.*\.layers\.(?!78\.)\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj$"
    ]
    assert r"re:.*\.decoder\..*" not in config["ignore"]


def test_patterns_do_not_rely_on_the_language_model_prefix() -> None:
    packed, plain = split(model("language_model.", mtp=0))
    ignore = build(packed, plain, mtp_packed=None)["ignore"]
    assert [entry for entry in ignore if "language_model" in entry] == []
    assert "re:.*lm_head$" in ignore


# ---------------------------------------------------------------------------------------------------- ignore


def test_lm_head_is_listed_even_when_the_embeddings_are_tied() -> None:
    packed, plain = split(model(mtp=0))
    plain.remove("lm_head")
    assert build(packed, plain, mtp_packed=None)["ignore"][0] == "lm_head"


def test_one_dense_layer_of_experts_is_one_entry() -> None:
    names = model(layers=4, mtp=0)
    dense = [n for n in names if ".layers.2.mlp.experts." in n]
    packed = [n for n in names if is_expert(n) and n not in dense]
    config = build(packed, [n for n in names if n not in packed], layers=4, mtp_packed=None)
    assert config["ignore"] == [*KIMI_IGNORE, r"re:.*mlp\.gate$", r"re:.*\.layers\.2\.mlp\.experts\..*"]


def test_one_expert_kept_dense_everywhere_is_named_by_its_number() -> None:
    names = model(layers=4, mtp=0)
    packed = [n for n in names if is_expert(n) and ".experts.1." not in n]
    config = build(packed, [n for n in names if n not in packed], layers=4, mtp_packed=None)
    assert config["ignore"][-2:] == [
        r"re:.*\.mlp\.experts\.1\.(gate|up|gate_up)_proj$", r"re:.*\.mlp\.experts\.1\.down_proj$",
    ]  # fmt: skip


def test_one_module_of_one_layer_is_named_exactly() -> None:
    names = model(layers=4, mtp=0)
    one = "model.layers.2.mlp.experts.1.up_proj"
    packed = [n for n in names if is_expert(n) and n != one]
    config = build(packed, [n for n in names if n not in packed], layers=4, mtp_packed=None)
    assert config["ignore"][-1] == r"re:.*\.layers\.2\.mlp\.experts\.1\.up_proj$"


def test_forced_targets_give_up_the_wide_patterns_only_where_they_must() -> None:
    names = model()
    packed = [n for n in names if is_expert(n) or n.endswith(("eh_proj", "o_proj"))]
    config = build(packed, [n for n in names if n not in packed])
    assert "re:.*self_attn.*" not in config["ignore"]
    assert "re:.*eh_proj.*" not in config["ignore"]
    assert r"re:.*\.self_attn\.kv_b_proj$" in config["ignore"]
    assert "re:.*shared_experts.*" in config["ignore"]
    assert resolve(config, "model.layers.1.self_attn.o_proj") == "int4"
    assert resolve(config, "model.layers.2.eh_proj") == "int4"


def test_forced_targets_in_mixed_output_get_targets_of_their_own() -> None:
    names = model()
    packed = [n for n in names if is_expert(n) or n.endswith("eh_proj")]
    fp8 = [n for n in names if rest_in_fp8(n)]
    config = build(packed, [n for n in names if n not in packed and n not in fp8], fp8)
    assert config["config_groups"]["group_0"]["targets"] == [EXPERTS, r"re:.*\.eh_proj$"]


def test_grouped_query_attention_names_the_fused_projection() -> None:
    names = [f"model.layers.{i}.self_attn.{p}" for i in range(2) for p in ("q_proj", "k_proj", "v_proj", "o_proj")]
    names += [f"model.layers.{i}.mlp.experts.0.{p}" for i in range(2) for p in SWIGLU]
    packed = [n for n in names if is_expert(n) or n.endswith("o_proj")]
    config = build(packed, [n for n in names if n not in packed], mtp_packed=None)
    assert config["ignore"] == ["lm_head", r"re:.*\.self_attn\.(q|k|v|qkv)_proj$"]
    assert resolve(config, "model.layers.0.self_attn.qkv_proj") == "none"


def test_other_expert_parents_are_packed_and_their_routers_ignored() -> None:
    names = [n.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2") if is_expert(n) else n
             for n in model(mlp="block_sparse_moe", mtp=0)]  # fmt: skip
    packed, plain = split(names)
    assert build(packed, plain, mtp_packed=None)["ignore"][-1] == r"re:.*\.block_sparse_moe\.gate$"
    fp8 = [n for n in plain if rest_in_fp8(n)]
    targets = build(packed, [n for n in plain if n not in fp8], fp8, mtp_packed=None)["config_groups"]["group_0"]
    assert targets["targets"] == [r"re:.*\.block_sparse_moe\.experts\.\d+\.(w1|w2|w3)$"]


def test_mtp_names_of_deepseeks_own_layout() -> None:
    names = [f"{at}.ffn.experts.{e}.{w}" for at in ("layers.1", "mtp.0") for e in (0, 1) for w in ("w1", "w2", "w3")]
    packed = [n for n in names if n.startswith("layers.")]
    config = build(packed, [n for n in names if n not in packed], mtp_packed=False)
    assert config["ignore"][-2:] == [r"re:.*\.decoder\..*", r"re:mtp\.0\.ffn\.experts\..*"]
    assert resolve(config, "mtp.0.ffn.experts.1.w2") == "none"


def test_names_with_regular_expression_characters_are_taken_literally() -> None:
    odd = "model.layers.0.a+b(c).x[1]"
    packed = ["model.layers.0.mlp.experts.0.up_proj", "model.layers.0.aab(c).x1"]
    config = build(packed, [odd], mtp_packed=None)
    assert resolve(config, odd) == "none"
    assert resolve(config, packed[1]) == "int4"


@pytest.mark.long
@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.data())
def test_any_split_of_modules_reads_back(data: st.DataObject) -> None:
    """build_quantization_config checks itself; what it returns must also hold by the plain reading of the rules."""
    names = model(data.draw(st.sampled_from(["", "language_model."])), layers=3, indexer=True)
    names += ["vision_tower.blocks.0.mlp.fc0", "odd.proj"]
    linears = [n for n in names if not n.endswith("embed_tokens")]
    forms = {n: data.draw(st.sampled_from(["int4", "int4", "none", "fp8"])) for n in linears}
    forms |= {n: "none" for n in names if n not in linears} | {linears[5]: "int4"}
    by_form = {form: [n for n in names if forms[n] == form] for form in ("int4", "fp8", "none")}
    config = build(by_form["int4"], by_form["none"], by_form["fp8"], layers=3,
                   mtp_packed=data.draw(st.sampled_from([True, False, None])))  # fmt: skip
    assert {n: resolve(config, n) for n in names} == forms
    assert len(config["ignore"]) == len(set(config["ignore"]))


def test_a_full_size_model_takes_little_time() -> None:
    packed = [f"model.layers.{i}.mlp.experts.{e}.{p}" for i in range(3, 79) for e in range(256) for p in SWIGLU]
    plain = [f"model.layers.{i}.self_attn.{p}" for i in range(79) for p in MLA]
    config = build(packed, plain, layers=78)
    form_of = resolver(config)
    assert sum(form_of(module) == "int4" for module in packed) == len(packed) == 58_368


def test_a_module_in_two_forms_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="one form"):
        build(["a.b.c"], ["a.b.c"])


# ---------------------------------------------------------------------------------------------------- reading


def config_with(ignore: list[Any], targets: list[Any]) -> dict[str, Any]:
    group = {"targets": targets, "weights": {"num_bits": 4, "type": "int"}}
    return {"config_groups": {"g": group}, "ignore": ignore}


@pytest.mark.parametrize(
    ("ignore", "targets", "module", "form"),
    [
        ([], ["Linear"], "a.b", "int4"),
        ([], ["Linear"], "model.embed_tokens", "none"),
        ([], ["Embedding"], "model.embed_tokens", "int4"),
        (["a.b"], ["Linear"], "a.b", "none"),
        (["a.b"], ["Linear"], "x.a.b", "int4"),
        (["a"], ["Linear"], "a.b", "int4"),
        (["re:b"], ["Linear"], "a.b", "int4"),
        (["re:a"], ["Linear"], "a.b", "none"),
        (["re:.*b"], ["Linear"], "a.bc", "none"),
        (["re:.*b$"], ["Linear"], "a.bc", "int4"),
        (["Linear"], ["Linear"], "a.b", "none"),
        ([], ["re:.*c"], "a.b", "none"),
        (["a.b"], ["a.b"], "a.b", "none"),
    ],
)
def test_ignore_and_targets(ignore: list[str], targets: list[str], module: str, form: str) -> None:
    assert resolve(config_with(ignore, targets), module) == form


@pytest.mark.parametrize("order", [("int", "float"), ("float", "int")])
def test_a_name_beats_the_class_whatever_the_order_of_the_groups(order: tuple[str, str]) -> None:
    groups = {
        "int": {"targets": [r"re:.*experts\.\d+\."], "weights": {"num_bits": 4, "type": "int"}},
        "float": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}},
    }
    config = {"config_groups": {kind: groups[kind] for kind in order}, "ignore": []}
    assert resolve(config, "m.experts.0.up_proj") == "int4"
    assert resolve(config, "m.up_proj") == "fp8"


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({}, "bad_config"),
        ({"config_groups": []}, "bad_config"),
        ({"config_groups": {"g": {}}}, "bad_config"),
        ({"config_groups": {"g": {"weights": {"num_bits": 3, "type": "int"}, "targets": []}}}, "bad_config"),
        (config_with([], [3]), "bad_config"),
        (config_with("lm_head", []), "bad_config"),  # type: ignore[arg-type]
        (config_with(["re:("], []), "bad_pattern"),
    ],
)
def test_configs_that_no_reader_could_apply_are_refused(config: dict[str, Any], code: str) -> None:
    with pytest.raises(KizamiError) as error:
        resolve(config, "a")
    assert error.value.code == code


# ---------------------------------------------------------------------------------------------------- config.json

NEW = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
OLD = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def test_the_stale_config_is_replaced_in_its_place_and_nothing_else_changes() -> None:
    source = {"a": 1, "quantization_config": OLD, "b": {"c": [1, {"d": None}]}, "num_nextn_predict_layers": 1}
    before = copy.deepcopy(source)
    got = output_config(source, NEW)
    assert got == before | {"quantization_config": NEW}
    assert list(got) == list(before)
    assert source == before
    assert got["b"] is not source["b"]


def test_without_a_source_config_it_goes_to_the_top_level() -> None:
    assert output_config({"a": 1}, NEW) == {"a": 1, "quantization_config": NEW}
    assert output_config({"text_config": {"x": 1}}, NEW) == {"text_config": {"x": 1}, "quantization_config": NEW}


def test_kimi_k25_keeps_it_in_text_config() -> None:
    source = {"text_config": {"x": 1, "quantization_config": OLD, "y": 2}, "vision_config": {"z": 3}}
    got = output_config(source, NEW)
    assert got == {"text_config": {"x": 1, "quantization_config": NEW, "y": 2}, "vision_config": {"z": 3}}
    assert list(got["text_config"]) == ["x", "quantization_config", "y"]


@pytest.mark.parametrize(
    "source",
    [
        {"quantization_config": OLD, "text_config": {"quantization_config": OLD}},
        {"compression_config": OLD, "text_config": {"quantization_config": OLD}},
        {"quantization_config": OLD, "compression_config": OLD},
        {"quantization_config": None, "text_config": {"compression_config": OLD}},
        {"vision_config": {"quantization_config": OLD}, "parts": [{"quantization_config": OLD}]},
        {"text_config": {"quantization_config": OLD, "inner": {"compression_config": OLD}}},
    ],
)
def test_exactly_one_copy_is_left(source: dict[str, Any]) -> None:
    got = output_config(source, NEW)
    text = repr(got)
    assert text.count("quantization_config") == 1
    assert "compression_config" not in text
    assert "weight_block_size" not in text
    assert NEW in (got.get("quantization_config"), got.get("text_config", {}).get("quantization_config"))


# ---------------------------------------------------------------------------------------------------- other readers


@pytest.mark.parametrize("kind", ["int4", "mixed", "channel"])
def test_compressed_tensors_accepts_the_config(kind: str) -> None:
    library = pytest.importorskip("compressed_tensors.quantization")
    if kind == "int4":
        packed, plain = split(model(indexer=True))
        config = build(packed, plain)
    else:
        config, _ = mixed(model(indexer=True), block=None if kind == "channel" else (128, 128))
    parsed = library.QuantizationConfig.model_validate(config)
    assert parsed.format == "pack-quantized"
    assert parsed.ignore == config["ignore"]
    for name, group in config["config_groups"].items():
        scheme = parsed.config_groups[name]
        assert scheme.targets == group["targets"]
        for key, value in group["weights"].items():
            if key not in {"block_structure", "observer_kwargs"}:
                assert getattr(scheme.weights, key) == value


def test_compressed_tensors_matches_names_as_resolve_does() -> None:
    match = pytest.importorskip("compressed_tensors.utils.match")
    config, forms = mixed(model(indexer=True))
    experts = config["config_groups"]["group_0"]["targets"]
    for name, form in forms.items():
        if name.endswith("embed_tokens"):
            continue
        ignored = any(match.match_name(name, entry) for entry in config["ignore"])
        expert = any(match.match_name(name, entry) for entry in experts)
        assert ("none" if ignored else "int4" if expert else "fp8") == form

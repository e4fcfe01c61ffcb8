"""quantization_config of gptq, awq and w4afp8: what it says of each module to the engines that read it."""

import json
import re
from typing import Any

import inventory
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kizami.formats.errors import KizamiError
from kizami.formats.int4_layout import Format
from kizami.formats.method_configs import build_method_config
from kizami.formats.method_rules import form_by_method_config, format_of_config, method_resolver
from kizami.formats.quant_config import build_quantization_config

INT4_ONLY: tuple[Format, ...] = ("gptq", "gptq_v2", "awq")
METHODS: tuple[Format, ...] = (*INT4_ONLY, "w4afp8")
SWIGLU = ("gate_proj", "up_proj", "down_proj")
MLA = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
NAMES = [
    "lm_head", "model.embed_tokens", *(f"model.layers.0.mlp.{p}" for p in SWIGLU), "model.layers.1.mlp.gate",
    *(f"model.layers.{i}.self_attn.{p}" for i in (0, 1) for p in MLA), "model.layers.1.self_attn.indexer.weights_proj",
    *(f"model.layers.1.mlp.{e}.{p}" for e in ("shared_experts", "experts.0", "experts.1") for p in SWIGLU),
]  # fmt: skip
PACKED = [name for name in NAMES if ".experts." in name]
REST = [name for name in NAMES if name not in PACKED]
FP8 = [name for name in REST if re.search(r"_proj(_with_mqa)?$", name) and "weights_proj" not in name]


def engines_say(config: dict[str, Any], name: str) -> str:
    """The engines' own rules for a linear or a layer's experts under its runtime name, copied from no one: see
    kizami.formats.method_configs for where they stand."""
    if config["quant_method"] == "gptq":
        rules = [re.match(rule.removeprefix("-:"), name) for rule in config["dynamic"]]
        return "none" if any(rules) else "int4"
    if config["quant_method"] == "awq":
        return "none" if any(entry in name for entry in config["modules_to_not_convert"]) else "int4"
    return "int4" if re.search(r"\.experts(\.\d+\.\w+)?$", name) else "fp8"


def build(format: Format, packed: list[str] = PACKED, rest: list[str] = REST, **options: Any) -> dict[str, Any]:
    fp8 = [name for name in rest if name in FP8] if format == "w4afp8" else []
    plain = [name for name in rest if name not in fp8]
    group = 128 if format == "w4afp8" else 32
    return build_method_config(format, group, packed=packed, plain=plain, fp8=fp8, **options)


def test_gptq_has_the_keys_of_gptqmodel_and_a_negative_rule_for_each_kind_of_module() -> None:
    for format in ("gptq", "gptq_v2"):
        assert build(format) == {
            "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False,
            "static_groups": False, "true_sequential": False, "lm_head": False, "format": format,
            "checkpoint_format": format, "pack_dtype": "int32",
            "dynamic": {
                "-:lm_head$": {}, "-:.*self_attn.*": {}, "-:.*shared_experts.*": {},
                r"-:.*mlp\.(gate|up|gate_up|down)_proj.*": {}, r"-:.*mlp\.gate$": {},
            },
        }  # fmt: skip


def test_awq_lists_substrings() -> None:
    assert build("awq") == {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", "lm_head": False,
        "modules_to_not_convert": [
            "lm_head", "self_attn", "shared_experts", "mlp.gate", "mlp.up_proj", "mlp.down_proj",
        ],
    }  # fmt: skip


def test_w4afp8_has_experts_in_int4_and_every_linear_of_sglang_in_fp8() -> None:
    assert build("w4afp8") == {
        "quant_method": "w4afp8", "group_size": 128, "weight_block_size": [128, 128],
        "linear_activation_scheme": "dynamic", "moe_activation_scheme": "static",
        "ignored_layers": ["lm_head", "mlp.gate", "indexer.weights_proj"],
    }  # fmt: skip


@pytest.mark.parametrize("format", METHODS)
def test_engines_read_every_module_as_it_is_written(format: Format) -> None:
    """Under the names at run time too: merged linears, a layer's experts, no `language_model.` prefix in SGLang."""
    for prefix in ("", "language_model."):
        packed, rest, fp8 = ([prefix + name for name in names] for names in (PACKED, REST, FP8))
        fp8 = fp8 if format == "w4afp8" else []
        plain = [name for name in rest if name not in fp8]
        config = build_method_config(format, 128, packed=packed, plain=plain, fp8=fp8)
        config = json.loads(json.dumps(config))
        assert format_of_config(config) == format
        form_of = method_resolver(config)
        forms = dict.fromkeys(packed, "int4") | dict.fromkeys(fp8, "fp8") | dict.fromkeys(plain, "none")
        assert {name: form_of(name) for name in forms} == forms
        merged = {
            "model.layers.0.mlp.gate_up_proj": "model.layers.0.mlp.up_proj",
            "model.layers.1.mlp.shared_experts.gate_up_proj": "model.layers.1.mlp.shared_experts.up_proj",
            "model.layers.1.self_attn.fused_qkv_a_proj_with_mqa": "model.layers.1.self_attn.q_a_proj",
            "model.layers.1.self_attn.fused_qkv_a_proj": "model.layers.1.self_attn.q_a_proj",
            "model.layers.1.mlp.experts": "model.layers.1.mlp.experts.0.up_proj",
        }
        for runtime, module in [*merged.items(), *((name, name) for name in PACKED + FP8)]:
            for start in ("", prefix):
                assert engines_say(config, start + runtime) == forms[prefix + module], runtime


def test_configs_of_a_whole_model_are_short_and_say_what_is_written() -> None:
    modules = {
        tensor.name.rpartition(".")[0]: tensor.dtype
        for tensor in inventory.source_tensors("glm-5.2-fp8")
        if len(tensor.shape) == 2 and tensor.name.endswith(".weight")
    }
    packed = [module for module in modules if ".experts." in module]
    rest = [module for module in modules if ".experts." not in module]
    fp8 = [module for module in rest if modules[module] == "F8_E4M3"]
    heads = [module for module in rest if not module.endswith("embed_tokens")]
    for format in ("gptq", "awq"):
        config = build_method_config(format, 32, packed=packed, plain=rest)
        assert len(config.get("dynamic") or config["modules_to_not_convert"]) <= 10
        assert all(engines_say(config, module) == "none" for module in heads)
        assert all(engines_say(config, module) == "int4" for module in packed[::97])
    plain = [module for module in rest if module not in set(fp8)]
    config = build_method_config("w4afp8", 128, packed=packed, plain=plain, fp8=fp8)
    assert len(config["ignored_layers"]) <= 6


# ---------------------------------------------------------------- refusals


def refusal(format: Format, group: int = 128, **modules: Any) -> KizamiError:
    with pytest.raises(KizamiError) as error:
        build_method_config(format, group, **modules)
    assert error.value.hint
    return error.value


@pytest.mark.parametrize("format", METHODS)
def test_an_expert_that_stays_as_it_is_is_refused(format: Format) -> None:
    """SGLang's FusedMoE is INT4 under these methods, whatever the config lists."""
    error = refusal(format, packed=PACKED[1:], plain=[*REST, PACKED[0]])
    assert (error.code, error.tensor) == ("unsupported_layout", f"{PACKED[0]}.weight")
    mtp = "model.layers.2.mlp.experts.0.up_proj"
    assert refusal(format, packed=PACKED, plain=REST, fp8=[mtp]).tensor == f"{mtp}.weight"


@pytest.mark.parametrize("format", INT4_ONLY)
def test_fp8_beside_gptq_and_awq_is_refused(format: Format) -> None:
    error = refusal(format, packed=PACKED, plain=[], fp8=FP8)
    assert (error.code, error.tensor) == ("unsupported_layout", f"{FP8[0]}.weight")
    assert "--rest bf16" in str(error.hint)


def test_a_bf16_linear_that_sglang_would_cast_to_fp8_is_refused() -> None:
    left = "model.layers.1.self_attn.o_proj"
    fp8 = [name for name in FP8 if name != left]
    error = refusal("w4afp8", packed=PACKED, plain=[n for n in REST if n not in fp8], fp8=fp8)
    assert (error.code, error.tensor) == ("unsupported_layout", f"{left}.weight")


@pytest.mark.parametrize(
    "module",
    ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.shared_experts.up_proj", "model.layers.1.mlp.experts.0.w1"],
)
def test_int4_that_sglangs_w4afp8_does_not_look_for_is_refused(module: str) -> None:
    error = refusal("w4afp8", packed=[*PACKED, module], plain=["lm_head"])
    assert (error.code, error.tensor) == ("unsupported_layout", f"{module}.weight")


def test_w4afp8_has_one_group_size_and_one_block() -> None:
    assert refusal("w4afp8", 64, packed=PACKED, plain=[]).code == "unsupported_group_size"
    for block, words in ((None, "one FP8 scale per row"), ((64, 64), r"[64, 64]")):
        error = refusal("w4afp8", packed=PACKED, plain=[], fp8=FP8, fp8_block=block)
        assert (error.code, error.tensor) == ("unsupported_layout", f"{FP8[0]}.weight")
        assert words in error.message


def test_a_name_that_is_part_of_another_cannot_be_told_apart_in_awq() -> None:
    names = ["model.layers.1.mlp.experts.0.up_proj", "model.layers.0.proj_out"]
    error = refusal("awq", packed=names, plain=["model.layers.0.proj"])
    assert (error.code, error.tensor) == ("unsupported_layout", "model.layers.0.proj.weight")


def test_an_entry_that_hits_a_module_at_run_time_is_refused() -> None:
    """Layer 0 has gate and up merged on disk and stays as it is; engines merge those of layer 1."""
    packed = ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]
    error = refusal("awq", packed=packed, plain=["model.layers.0.mlp.gate_up_proj"])
    assert (error.code, error.tensor) == ("unsupported_layout", "model.layers.1.mlp.gate_up_proj.weight")


def test_dense_and_shared_experts_may_be_int4_as_well() -> None:
    packed = [*PACKED, *(name for name in REST if "mlp." in name and name.endswith("_proj"))]
    for format in INT4_ONLY:
        config = build(format, packed, [name for name in REST if name not in packed])
        assert engines_say(config, "model.layers.0.mlp.gate_up_proj") == "int4"
        assert engines_say(config, "model.layers.1.mlp.shared_experts.down_proj") == "int4"
        assert engines_say(config, "model.layers.1.self_attn.o_proj") == "none"


def test_one_part_of_a_layer_in_another_form_is_listed_by_name() -> None:
    fp8 = [*FP8, "model.layers.0.self_attn.indexer.wk"]
    plain = ["model.layers.1.self_attn.indexer.wk", "lm_head"]
    config = build_method_config("w4afp8", 128, packed=PACKED, plain=plain, fp8=fp8)
    assert config["ignored_layers"] == plain
    assert form_by_method_config(config, fp8[-1]) == "fp8"


def test_a_head_is_int4_only_where_the_config_says_so() -> None:
    for format in INT4_ONLY:
        config = build(format, [*PACKED, "lm_head"], [name for name in REST if name != "lm_head"])
        assert config["lm_head"] is True
        assert form_by_method_config(config, "lm_head") == "int4"
        assert form_by_method_config(config | {"lm_head": False}, "lm_head") == "none"


# ---------------------------------------------------------------- reading what anyone wrote


def test_pack_quantized_is_read_by_its_own_rules() -> None:
    config = build_quantization_config(
        group_size=32, packed=PACKED, fp8=[], plain=REST, fp8_block=None, num_hidden_layers=2, mtp_packed=None
    )
    assert format_of_config(config) == "pack-quantized"
    assert form_by_method_config(config, PACKED[0]) == "int4"
    assert form_by_method_config(config, "lm_head") == "none"


@pytest.mark.parametrize(
    ("format", "change"),
    [
        *((f, {"bits": bits}) for f in INT4_ONLY for bits in (8, "4", None, 4.0, True)),
        ("gptq", {"sym": False}),
        ("gptq", {"desc_act": True}),
        ("gptq", {"sym": 1}),
        ("gptq", {"checkpoint_format": "marlin"}),
        ("gptq", {"checkpoint_format": ["gptq"]}),
        ("gptq", {"dynamic": None}),
        ("gptq", {"dynamic": ["-:lm_head"]}),
        ("gptq", {"dynamic": {"+:.*": {"bits": 8}}}),
        ("gptq", {"dynamic": {"lm_head": {}}}),
        ("awq", {"zero_point": False}),
        ("awq", {"version": "gemv"}),
        ("awq", {"modules_to_not_convert": None}),
        ("awq", {"modules_to_not_convert": "self_attn"}),
        ("awq", {"modules_to_not_convert": [""]}),
        ("awq", {"modules_to_not_convert": [3]}),
        ("w4afp8", {"group_size": 64}),
        ("w4afp8", {"weight_block_size": [64, 64]}),
        ("w4afp8", {"ignored_layers": {}}),
        *((f, {"quant_method": m}) for f in METHODS for m in ("fp8", None, 4, ["gptq"])),
    ],
)
def test_a_config_of_another_meaning_is_refused(format: Format, change: dict[str, Any]) -> None:
    with pytest.raises(KizamiError) as error:
        method_resolver(build(format) | change)
    assert (error.value.code, error.value.file) == ("bad_config", "config.json")


def test_a_pattern_that_could_run_for_ever_is_refused() -> None:
    with pytest.raises(KizamiError) as error:
        method_resolver(build("gptq") | {"dynamic": {"-:(a+)+$": {}}})
    assert error.value.code == "bad_pattern"


@pytest.mark.parametrize(("format", "key"), [("awq", "modules_to_not_convert"), ("w4afp8", "ignored_layers")])
def test_too_many_entries_for_many_modules_are_refused(
    format: Format, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kizami.formats.method_rules.MAX_STEPS", 1_000_000)
    form_of = method_resolver(build(format) | {key: ["no such module"] * 1000})
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(100)]
    with pytest.raises(KizamiError, match="1000 entries") as error:
        list(map(form_of, names))
    assert error.value.code == "bad_config"


def test_names_that_nobody_knows_are_listed_once_for_all_layers() -> None:
    plain = [f"model.layers.{i}.mixer.{part}" for i in range(50) for part in ("in_x", "out_x")]
    packed = [f"model.layers.{i}.mlp.experts.0.up_proj" for i in range(50)]
    assert build("awq", packed, plain)["modules_to_not_convert"] == ["mixer.in_x", "mixer.out_x"]


def test_names_are_listed_without_the_prefix_that_sglang_drops() -> None:
    config = build("awq", PACKED, ["language_model.model.extra.proj"])
    assert config["modules_to_not_convert"] == ["model.extra.proj"]


WORDS = st.sampled_from(["mlp", "gate", "gate_proj", "experts", "shared_experts", "self_attn", "a.b", "0", "x-1", "λ"])


@given(st.sets(st.lists(WORDS, min_size=1, max_size=5).map(".".join), max_size=12), st.sampled_from(INT4_ONLY))
@settings(derandomize=True, deadline=None, max_examples=150)
def test_whatever_the_names_each_config_says_what_is_written_or_is_refused(names: set[str], format: Format) -> None:
    """build_method_config reads its result back itself: AssertionError would be a bug."""
    plain = [f"model.layers.0.{name}" for name in sorted(names)]
    packed = ["model.layers.0.mlp.experts.0.up_proj"]
    try:
        config = build_method_config(format, 32, packed=packed, plain=plain)
    except KizamiError as error:
        code = error.code
    else:
        code = "unsupported_layout"
        assert all(engines_say(config, name) == "none" for name in plain)
        assert engines_say(config, packed[0]) == "int4"
    assert code == "unsupported_layout"

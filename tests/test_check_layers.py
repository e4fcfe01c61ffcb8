"""Rules of `check` about what a model consists of, one part at a time, and what must not be reported."""

import inventory
import pytest
from engine_checkpoints import Made, good
from engine_failures import Mutation, chain, gptq, ignore, pack_all, scale_inv, set_quant

from kizami.formats.engines.check import Checker, find_problems
from kizami.formats.engines.context import Model
from kizami.formats.engines.finding import EngineName
from kizami.formats.engines.rules_layers import owns_indexer

MLA = ("q_a_proj", "q_b_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
ANY = ("input_layernorm", "post_attention_layernorm")
MOE = ("mlp.gate", *(f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")))
DENSE = tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down"))
MTP = ("eh_proj", "enorm", "hnorm", "shared_head.norm")


def _codes(made: Made, engine: EngineName = "sglang", **parallel: int) -> set[str]:
    return {found.code for found in find_problems(made.served, engine, **parallel) if found.severity == "error"}


@pytest.mark.parametrize(
    ("base", "layer", "part", "code"),
    [
        *(("glm int4", 0, f"self_attn.{part}", "modules_missing") for part in MLA),
        *(("glm int4", 0, part, "modules_missing") for part in (*ANY, *DENSE)),
        *(("glm int4", 1, part, "modules_missing") for part in MOE),
        *(("glm4 fp8", 0, f"self_attn.{part}_proj", "modules_missing") for part in "qkvo"),
        *(("glm int4", 2, part, "mtp") for part in (*MTP, *MOE, "self_attn.o_proj")),
    ],
)
def test_a_module_that_is_missing_is_named(base: str, layer: int, part: str, code: str) -> None:
    made = good(base)
    for name in [name for name in made.tensors if f".layers.{layer}.{part}." in name]:
        if "e_score_correction_bias" not in name:  # the router's bias alone is no router
            del made.tensors[name]
    found = [finding for finding in find_problems(made.served, "sglang") if finding.code == code]
    assert [finding.severity for finding in found] == ["error"]
    assert part in found[0].message
    assert f"layers.{layer}" in str(found[0].module)


def test_the_routers_bias_is_missed_where_routing_needs_it() -> None:
    made = good("glm int4")
    made.drop("layers.1.mlp.gate.e_score_correction_bias")
    assert "modules_missing" in _codes(made)
    made.config["topk_method"] = "greedy"
    assert "modules_missing" not in _codes(made)


def test_a_layer_without_experts_is_no_dense_layer_after_all() -> None:
    made = good("glm int4")
    for name in [name for name in made.tensors if ".layers.1.mlp." in name]:
        del made.tensors[name]
    (found,) = [found for found in find_problems(made.served, "vllm") if found.code == "modules_missing"]
    assert found.message.startswith("mlp.experts")


def test_tied_embeddings_need_no_head() -> None:
    made = good("glm int4")
    made.drop("lm_head.weight")
    assert "modules_missing" in _codes(made)
    made.config["tie_word_embeddings"] = True
    assert "modules_missing" not in _codes(made)
    made.drop("model.norm.weight")
    assert "modules_missing" in _codes(made)


def test_a_family_that_nobody_read_misses_nothing() -> None:
    made = good("glm int4")
    made.drop("layers.0.self_attn.o_proj.weight", "eh_proj.weight")
    made.config["model_type"] = "mine"
    assert not _codes(made) & {"modules_missing", "mtp"}


# ------------------------------------------------------------------------------------------------ indexers

GLM52 = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
OWNERS_52 = [0, 1, 2, *range(6, 78, 4)]


@pytest.mark.parametrize(
    ("config", "engine", "owners"),
    [
        (GLM52, "sglang", OWNERS_52),
        (GLM52, "vllm", OWNERS_52),
        ({}, "vllm", list(range(78))),
        ({"index_topk_freq": 4}, "sglang", [0, 1, *range(5, 78, 4)]),  # the offset is 2 by default
        ({"indexer_types": ["full", "shared"] * 39}, "sglang", list(range(0, 78, 2))),
        ({"indexer_types": ["full", "shared"] * 39}, "vllm", list(range(78))),
        ({"indexer_types": ["shared"]}, "sglang", list(range(1, 78))),  # too short: the rest as without it
        ({"index_topk_pattern": "FS" * 39} | GLM52, "vllm", list(range(0, 78, 2))),
        ({"index_topk_pattern": ["S"]} | GLM52, "sglang", OWNERS_52[1:]),
        ({"indexer_types": ["full"] * 78, "index_topk_pattern": "S" * 78}, "sglang", list(range(78))),
    ],
)
def test_the_schedule_says_which_layers_own_an_indexer(config: dict, engine: EngineName, owners: list[int]) -> None:
    made = good("glm int4")
    for key in ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"):
        made.config.pop(key, None)
    model = Model.of(Made(made.config | config, made.tensors).served)
    assert [layer for layer in range(78) if owns_indexer(model, layer, engine)] == owners


def test_glm_52_at_full_size_owns_21() -> None:
    config = dict(inventory.config("glm-5.2-fp8"))
    model = Model.of(Made(config, good("glm int4").tensors).served)
    for engine in ("sglang", "vllm"):
        assert [layer for layer in range(78) if owns_indexer(model, layer, engine)] == OWNERS_52


def test_an_indexer_too_many_is_a_note() -> None:
    made = good("glm int4")
    made.config |= {"indexer_types": ["full", "shared"]}
    (found,) = [found for found in find_problems(made.served, "sglang") if found.code == "indexer_missing"]
    assert (found.severity, found.module) == ("note", "layers.1.self_attn.indexer")


# ------------------------------------------------------------------------------------------------ spared

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NO_ATTENTION = ("re:.*self_attn.*",)


def _head(*targets: str) -> Mutation:
    def mutate(made: Made) -> None:
        made.pack("lm_head")
        made.quant["config_groups"]["group_0"]["targets"] += targets

    return mutate


def _other_shape(made: Made) -> None:
    for leaf, cols in (("weight_packed", 256), ("weight_scale", 64)):
        made.add(f"model.layers.1.mlp.experts.5.gate_proj.{leaf}", "I32" if cols == 256 else "BF16", 1024, cols)


def _no_quantization(made: Made) -> None:
    """BF16 throughout."""
    del made.config["quantization_config"]
    for name in [name for name in made.tensors if name.endswith("weight_packed")]:
        rows, words = made.tensors.pop(name).shape
        made.add(name.removesuffix("_packed"), "BF16", rows, words * 8)
    made.drop("weight_scale", "weight_shape")


@pytest.mark.parametrize(
    ("base", "mutation", "engine", "code", "found"),
    [
        ("glm int4", _head(), "sglang", "not_plain", True),
        ("glm int4", _head("re:lm_head"), "sglang", "not_plain", False),
        ("glm int4", _head("re:lm_head"), "vllm", "not_plain", False),
        ("glm4 fp8", lambda m: m.retype("shared_head.head.weight", "F8_E4M3"), "sglang", "not_plain", False),
        ("glm4 fp8", lambda m: m.retype("lm_head.weight", "F8_E4M3"), "sglang", "not_plain", True),
        ("glm int4", chain(ignore(r"re:.*self_attn\.[qko].*", without=NO_ATTENTION), pack_all("indexer.wq_b")), "vllm",
         "mla_int4", False),
        ("glm int4", pack_all("indexer.wk"), "vllm", "mla_int4", True),
        ("kimi thinking", gptq(dynamic={}), "sglang", "scheme_mismatch", True),
        ("kimi thinking", gptq(dynamic={}), "vllm", "scheme_mismatch", False),  # it asks the tensors
        ("kimi mixed", scale_inv, "sglang", "fp8_scale_name", True),
        ("kimi mixed", chain(scale_inv, set_quant(linear_fp8_config=FP8)), "sglang", "fp8_scale_name", False),
        ("kimi mixed", chain(scale_inv, set_quant(linear_fp8_config=FP8)), "vllm", "fp8_scale_name", True),
        ("kimi mixed", set_quant(linear_fp8_config=FP8), "sglang", "fp8_scale_name", True),
        ("glm int4", _other_shape, "vllm", "expert_differs", True),
        ("kimi thinking", lambda m: m.config.pop("n_routed_experts"), "sglang", "experts_missing", False),
        ("glm int4 g128", lambda m: None, "sglang", "shared_experts_fusion", False),
        ("glm int4 g128", set_quant(format="mixed-precision"), "sglang", "shared_experts_fusion", True),
        ("glm int4 g128", _no_quantization, "sglang", "shared_experts_fusion", False),
        ("glm mixed", lambda m: m.config.update(n_shared_experts=2), "sglang", "shared_experts_fusion", False),
        ("glm mixed", set_quant(quant_method="w4afp8"), "sglang", "shared_experts_fusion", False),
        ("glm4 int4", set_quant(quant_method="w4afp8"), "sglang", "shared_experts_fusion", False),
        ("glm4 int4", lambda m: None, "sglang", "shared_experts_fusion", True),
    ],
)  # fmt: skip
def test_what_is_right_is_not_reported(
    base: str, mutation: Mutation, engine: EngineName, code: str, found: bool
) -> None:
    made = good(base)
    mutation(made)
    assert (code in {finding.code for finding in find_problems(made.served, engine)}) == found


def test_expert_parallelism_switches_the_fusion_off() -> None:
    checker = Checker(good("glm mixed").served)
    for ep, expected in ((1, True), (8, False)):
        codes = {found.code for found in checker.find("sglang", tp=8, ep=ep)}
        assert ("shared_experts_fusion" in codes) == expected

"""Names to roles: the published layouts, other spellings of the same parts, and names that only look alike."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kizami.formats.errors import KizamiError
from kizami.formats.families import FUSED_EXPERTS, Family, Place, Role, find_family

CONFIG = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
EXPERT = "model.layers.1.mlp.experts.0.gate_proj.weight"


def family(config: dict | None = None, names: tuple[str, ...] = (EXPERT,)) -> Family:
    return find_family(CONFIG if config is None else config, names)[0]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("lm_head.weight", Place(Role.HEAD, "lm_head")),
        ("model.embed_tokens.weight", Place(Role.EMBEDDING, "embed_tokens")),
        ("model.norm.weight", Place(Role.NORM, "norm")),
        ("model.layers.0.input_layernorm.weight", Place(Role.NORM, "input_layernorm", 0)),
        ("model.layers.0.post_attention_layernorm.weight", Place(Role.NORM, "post_attention_layernorm", 0)),
        ("model.layers.0.mlp.gate_proj.weight", Place(Role.DENSE_MLP, "gate_proj", 0)),
        ("model.layers.0.mlp.down_proj.weight_scale_inv", Place(Role.DENSE_MLP, "down_proj", 0)),
        ("model.layers.1.mlp.gate.weight", Place(Role.ROUTER, "gate", 1)),
        ("model.layers.1.mlp.gate.e_score_correction_bias", Place(Role.ROUTER, "e_score_correction_bias", 1)),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", Place(Role.SHARED_EXPERT, "up_proj", 1)),
        ("model.layers.1.mlp.shared_expert.up_proj.weight", Place(Role.SHARED_EXPERT, "up_proj", 1)),
        ("model.layers.1.mlp.shared_expert_gate.weight", Place(Role.ROUTER, "shared_expert_gate", 1)),
        (EXPERT, Place(Role.ROUTED_EXPERT, "gate_proj", 1, 0)),
        ("model.layers.1.mlp.experts.255.down_proj.weight_scale_inv", Place(Role.ROUTED_EXPERT, "down_proj", 1, 255)),
        ("model.layers.1.mlp.experts.7.up_proj.weight_packed", Place(Role.ROUTED_EXPERT, "up_proj", 1, 7)),
        ("model.layers.1.mlp.experts.7.up_proj", Place(Role.ROUTED_EXPERT, "up_proj", 1, 7)),
        ("model.layers.0.self_attn.q_a_proj.weight", Place(Role.ATTENTION, "q_a_proj", 0)),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", Place(Role.ATTENTION, "kv_a_proj_with_mqa", 0)),
        ("model.layers.0.self_attn.kv_b_proj.weight", Place(Role.ATTENTION, "kv_b_proj", 0)),
        ("model.layers.0.self_attn.k_proj.bias", Place(Role.ATTENTION, "k_proj", 0)),
        ("model.layers.0.self_attn.k_scale", Place(Role.ATTENTION, "k_scale", 0)),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", Place(Role.ATTENTION, "rotary_emb.inv_freq", 0)),
        ("model.layers.0.self_attn.q_a_layernorm.weight", Place(Role.NORM, "q_a_layernorm", 0)),
        ("model.layers.0.self_attn.q_norm.weight", Place(Role.NORM, "q_norm", 0)),
        ("model.layers.0.self_attn.indexer.wq_b.weight", Place(Role.INDEXER, "wq_b", 0)),
        ("model.layers.0.self_attn.indexer.weights_proj.weight", Place(Role.INDEXER, "weights_proj", 0)),
        ("model.layers.0.self_attn.indexers_proj.weight", Place(Role.INDEXER, "indexers_proj", 0)),
        ("model.layers.0.self_attn.indexer.k_norm.bias", Place(Role.NORM, "k_norm", 0)),
        ("model.layers.2.eh_proj.weight", Place(Role.MTP, "eh_proj", 2, None, True)),
        ("model.layers.2.enorm.weight", Place(Role.NORM, "enorm", 2, None, True)),
        ("model.layers.2.hnorm.weight", Place(Role.NORM, "hnorm", 2, None, True)),
        ("model.layers.2.shared_head.norm.weight", Place(Role.NORM, "norm", 2, None, True)),
        ("model.layers.2.shared_head.head.weight", Place(Role.HEAD, "head", 2, None, True)),
        ("model.layers.2.embed_tokens.weight", Place(Role.EMBEDDING, "embed_tokens", 2, None, True)),
        ("model.layers.2.mlp.experts.3.up_proj.weight", Place(Role.ROUTED_EXPERT, "up_proj", 2, 3, True)),
        ("mtp.0.ffn.experts.3.w1.weight", Place(Role.ROUTED_EXPERT, "gate_proj", 2, 3, True)),
        ("mtp.layers.0.mlp.experts.3.up_proj.weight", Place(Role.ROUTED_EXPERT, "up_proj", 2, 3, True)),
        ("mtp.fc.weight", Place(Role.MTP, "fc", None, None, True)),
        ("mtp.norm.weight", Place(Role.NORM, "norm", None, None, True)),
    ],
)
def test_place_of_each_part(name: str, place: Place) -> None:
    assert family().place(name) == place


@pytest.mark.parametrize(("spelling", "part"), [("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")])
@pytest.mark.parametrize("parent", ["mlp", "block_sparse_moe", "ffn"])
def test_mixtral_spellings_are_the_same_projections(parent: str, spelling: str, part: str) -> None:
    place = family().place(f"model.layers.1.{parent}.experts.4.{spelling}.weight")
    assert place == Place(Role.ROUTED_EXPERT, part, 1, 4)


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model.", "a.b.c.model."])
def test_any_prefix_gives_the_same_place(prefix: str) -> None:
    assert family().place(f"{prefix}layers.1.mlp.experts.3.down_proj.weight") == Place(
        Role.ROUTED_EXPERT, "down_proj", 1, 3
    )


@pytest.mark.parametrize(
    ("name", "role", "part"),
    [
        ("model.layers.1.weight_scale_inv_norm.weight", Role.NORM, "weight_scale_inv_norm"),
        ("model.layers.1.self_attn.scale.bias", Role.ATTENTION, "scale"),
        ("model.layers.1.mlp.experts.0.gate_proj.weight_extra", Role.ROUTED_EXPERT, "gate_proj.weight_extra"),
        ("model.layers.1.mlp.gate_projx.weight", Role.OTHER, "gate_projx"),
        ("model.layers.1.mlp.my_experts.0.gate_proj.weight", Role.OTHER, "my_experts.0.gate_proj"),
        ("model.layers.1.mlp.experts.x.gate_proj.weight", Role.OTHER, "experts.x.gate_proj"),
        ("model.layers.1.mlp.experts.².gate_proj.weight", Role.OTHER, "experts.².gate_proj"),
        ("model.layers.1.eh_proj_norm.weight", Role.NORM, "eh_proj_norm"),
        ("model.layers.1.notmtp.weight", Role.OTHER, "notmtp"),
        ("model.lm_head_proj.weight", Role.OTHER, "lm_head_proj"),
        ("model.layersx.1.mlp.gate.weight", Role.OTHER, "gate"),
    ],
)
def test_names_that_only_look_alike(name: str, role: Role, part: str) -> None:
    place = family().place(name)
    assert (place.role, place.part) == (role, part)


@pytest.mark.parametrize("leaf", ["gate_up_proj", "down_proj", "gate_up_proj_scale_inv"])
def test_fused_experts_are_recognised(leaf: str) -> None:
    place = family().place(f"model.layers.1.mlp.experts.{leaf}")
    assert place == Place(Role.ROUTED_EXPERT, FUSED_EXPERTS, 1)


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.encoder.blocks.0.mlp.fc0.weight",
        "model.vision_tower.encoder.layers.0.mlp.experts.0.gate_proj.weight",
        "visual.blocks.0.attn.qkv.weight",
        "model.visual.merger.mlp.0.weight",
        "mm_projector.proj.0.weight",
        "multi_modal_projector.linear_1.weight",
    ],
)
def test_vision_parts_are_vision_whatever_is_inside(name: str) -> None:
    assert family().place(name).role is Role.VISION


def test_kimi_k25_reads_text_config_and_finds_the_prefix() -> None:
    config = {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", "num_hidden_layers": 61}}
    names = ("vision_tower.encoder.blocks.0.wo.weight", "language_model.model.layers.1.mlp.experts.0.up_proj.weight")
    found, warnings = find_family(config, names)
    assert (found.name, found.known, found.num_layers, found.prefix) == ("kimi_k25", True, 61, "language_model.")
    assert found.text_config is config["text_config"]
    assert warnings == ()


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "glm4_moe", "deepseek_v3", "deepseek_v32", "kimi_k2"])
def test_known_families_give_no_warning(model_type: str) -> None:
    found, warnings = find_family(CONFIG | {"model_type": model_type}, [EXPERT, "model.layers.2.eh_proj.weight"])
    assert (found.known, found.mtp_layers, warnings) == (True, (2,), ())


@pytest.mark.parametrize("key", ["n_routed_experts", "num_experts", "num_local_experts", None])
def test_the_name_of_the_expert_count_does_not_matter(key: str | None) -> None:
    config = CONFIG if key is None else CONFIG | {key: 4}
    found, warnings = find_family(config, [EXPERT])
    assert found.place(EXPERT) == Place(Role.ROUTED_EXPERT, "gate_proj", 1, 0)
    assert warnings == ()


def test_unknown_model_type_follows_the_generic_rule_and_says_so() -> None:
    found, warnings = find_family({"model_type": "novel_moe", "num_hidden_layers": 2}, [EXPERT])
    assert not found.known
    assert len(warnings) == 1
    assert "novel_moe" in warnings[0]
    assert "experts.<number>" in warnings[0]
    assert found.place(EXPERT) == Place(Role.ROUTED_EXPERT, "gate_proj", 1, 0)
    assert found.place("transformer.h.3.sparse.experts.12.fc1.weight") == Place(Role.ROUTED_EXPERT, "fc1", 3, 12)
    assert found.place("model.layers.1.sparse.experts.12.w1.weight") == Place(Role.ROUTED_EXPERT, "gate_proj", 1, 12)
    assert found.place("model.layers.1.sparse.router.weight").role is Role.OTHER


def test_a_known_family_does_not_take_experts_from_unknown_parents() -> None:
    assert family().place("model.layers.1.sparse.experts.12.w1.weight").role is Role.OTHER


@pytest.mark.parametrize("model_type", ["glm5_next", "kimi_k3", "kimi_k3_text", "deepseek_v4", "deepseek_v4_flash"])
@pytest.mark.parametrize("nested", [False, True])
def test_other_architectures_are_refused_by_name(model_type: str, nested: bool) -> None:
    config = (
        {"model_type": "some_vl", "text_config": {"model_type": model_type}} if nested else {"model_type": model_type}
    )
    with pytest.raises(KizamiError, match=f'"{model_type}" is not supported') as error:
        find_family(config, [])
    assert (error.value.code, error.value.file) == ("unsupported_model", "config.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": 3}, "model_type is 3, expected a string"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, expected a whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers is '1'"),
        ({"text_config": []}, r"text_config is \[\], expected an object"),
        ({"model_type": "kimi_k25"}, "text_config is None, expected an object"),
    ],
)
def test_config_values_of_the_wrong_kind_are_refused(change: dict, words: str) -> None:
    with pytest.raises(KizamiError, match=words) as error:
        find_family(CONFIG | change, [])
    assert error.value.code == "bad_config"


def test_without_a_layer_count_eh_proj_tells_the_mtp_layer() -> None:
    names = [EXPERT, "model.layers.5.eh_proj.weight"]
    found, warnings = find_family({"model_type": "glm_moe_dsa"}, names)
    assert found.mtp_layers == (5,)
    assert found.place("model.layers.5.mlp.experts.0.up_proj.weight").in_mtp
    assert not found.place(EXPERT).in_mtp
    assert any("num_hidden_layers" in w for w in warnings)


def test_layers_beyond_the_declared_ones_are_mtp_with_a_warning() -> None:
    found, warnings = find_family(CONFIG, [EXPERT, "model.layers.2.eh_proj.weight", "model.layers.3.eh_proj.weight"])
    assert found.mtp_layers == (2, 3)
    assert [w for w in warnings if "[3]" in w]


@pytest.mark.parametrize("name", ["mtp.0.ffn.experts.0.w1.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"])
def test_mtp_names_count_as_layers_after_the_last(name: str) -> None:
    found, warnings = find_family(CONFIG, [EXPERT, name])
    assert (found.mtp_layers, warnings) == ((2,), ())


def test_a_model_without_experts_is_named_as_such() -> None:
    _, warnings = find_family(CONFIG, ["model.layers.0.mlp.gate_proj.weight"])
    assert any("without routed experts" in w for w in warnings)


def test_control_characters_of_a_model_type_do_not_reach_the_warning() -> None:
    _, warnings = find_family({"model_type": "\x1b[2Jx", "num_hidden_layers": 1}, [EXPERT])
    assert "\x1b" not in "".join(warnings)


WORDS = st.sampled_from(
    ["model", "layers", "mtp", "1", "2", "mlp", "experts", "gate", "gate_proj", "weight", "scale", "self_attn", "norm",
     "indexer", "shared_head", "head", "", "eh_proj", "visual", "ffn", "w1", "\n", "²"]
)  # fmt: skip


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(WORDS, min_size=0, max_size=8), st.booleans(), st.sampled_from([None, 0, 2]))
def test_every_name_has_a_place(words: list[str], known: bool, layers: int | None) -> None:
    found = Family("x", known, {}, layers)
    place = found.place(".".join(words))
    assert isinstance(place.role, Role)
    assert (place.expert is not None) <= (place.role is Role.ROUTED_EXPERT)

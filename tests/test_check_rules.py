"""Rules of `check` beyond the public failures: each finds its fault, and says nothing of the checkpoint before it."""

import pytest
from engine_checkpoints import Made, good
from engine_failures import Mutation, Row, awq, become, chain, gptq, ignore, set_quant, set_weights, to_fp8

from kizami.formats.engines.check import MATRIX_TP, RULES, Checker, engines_that_load, find_problems
from kizami.formats.engines.finding import ENGINES, RANGES, READ, Finding, in_range, version_key
from kizami.formats.tensors import TensorSpec

MTP_PLAIN = r"re:.*\.layers\.2\..*"


def _plain_mtp(made: Made) -> None:
    """The next-token layer (2) in BF16."""
    for name in [name for name in made.tensors if ".layers.2." in name and name.endswith("weight_packed")]:
        rows, words = made.tensors.pop(name).shape
        made.drop(name.replace("_packed", "_scale"), name.replace("_packed", "_shape"))
        made.add(name.removesuffix("_packed"), "BF16", rows, words * 8)


def _misnamed(made: Made) -> None:
    for leaf in ("weight_packed", "weight_scale", "weight_shape"):
        spec = made.tensors.pop(f"model.layers.1.mlp.experts.3.up_proj.{leaf}")
        made.add(f"model.layers.1.mlp.experts.3.w3.{leaf}", spec.dtype, *spec.shape)


def _stale(made: Made) -> None:
    made.config["text_config"] = {"quantization_config": {"quant_method": "fp8"}}


def _swap_targets(made: Made) -> None:
    made.quant["config_groups"]["group_1"]["targets"] = ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp.*_proj"]


def _three_d(made: Made) -> None:
    made.drop(*(f"experts.{e}.{p}_proj.{leaf}" for e in range(256) for p in ("gate", "up", "down") for leaf in
                ("weight_packed", "weight_scale", "weight_shape")))  # fmt: skip
    made.add("model.layers.1.mlp.experts.gate_up_proj", "BF16", 256, 4096, 6144)
    made.add("model.layers.1.mlp.experts.down_proj", "BF16", 256, 6144, 2048)


def _mixed_expert(made: Made) -> None:
    """down_proj of every expert in BF16."""
    for name in [name for name in made.tensors if name.endswith("down_proj.weight_packed")]:
        rows, words = made.tensors.pop(name).shape
        made.drop(name.replace("_packed", "_scale"), name.replace("_packed", "_shape"))
        made.add(name.removesuffix("_packed"), "BF16", rows, words * 8)


def _odd_q_a(made: Made) -> None:
    for i in range(2):
        at = f"model.layers.{i}.self_attn.q_a_proj.weight"
        made.add(at, "F8_E4M3", 1504, 7168)
        made.add(f"{at}_scale", "F32", 12, 56)


def _experts_in_fp8_target(made: Made) -> None:
    made.quant["config_groups"]["group_1"]["targets"].append("re:.*shared_experts.*")


def _config(**values: object) -> Mutation:
    return lambda made: made.config.update(values)


def _extra(made: Made) -> None:
    made.add("model.layers.1.mlp.extra.weight", "BF16", 8)


KV = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
FP8_WORDS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
EXPERT = "model.layers.1.mlp.experts.5."

ROWS = (
    *(Row(f"a missing expert scale, {e}", e, "kimi thinking", lambda m: m.drop(f"{EXPERT}up_proj.weight_scale"),
          "expert_differs", words="weight_scale") for e in ENGINES),
    *(Row(f"a missing expert, {e}", e, "kimi thinking", lambda m: m.drop(*(f"{EXPERT}{p}_proj.weight_{leaf}"
          for p in ("gate", "up", "down") for leaf in ("packed", "scale", "shape"))), "experts_missing",
          words="1 of 32") for e in ("sglang", "vllm")),
    Row("a projection under another name", "sglang", "kimi thinking", _misnamed, "experts_missing", words="w3"),
    Row("more experts than the config counts", "sglang", "kimi thinking", _config(n_routed_experts=16),
        "experts_missing", words="expert 31"),
    Row("two quantization configs", "sglang", "glm int4", _stale, "stale_config", "warning", words="text_config"),
    Row("actorder in vLLM", "vllm", "glm int4", set_weights(actorder="group"), "actorder"),
    Row("actorder in SGLang", "sglang", "glm int4", set_weights(actorder="group"), "actorder", "warning"),
    Row("an unknown key", "vllm", "glm int4", set_weights(bits=4), "bad_scheme", words="bits"),
    Row("a group strategy without a size", "vllm", "glm int4", set_weights(group_size=None), "bad_scheme"),
    Row("another group size", "vllm", "glm int4", set_weights(group_size=64), "scale_shape", words="groups of 32"),
    Row("asymmetric without zero points", "vllm", "glm int4", set_weights(symmetric=False), "scale_shape",
        words="zero_point"),
    Row("a group size without a kernel", "sglang", "glm int4", set_weights(group_size=16), "no_kernel", words="16"),
    Row("a plain MTP layer under one name", "sglang", "deepseek int4", chain(_plain_mtp, ignore(MTP_PLAIN)),
        "scheme_mismatch", words="next-token"),
    Row("a plain head that is not ignored", "transformers", "glm int4", ignore(without=("lm_head",)),
        "scheme_mismatch", words="lm_head"),
    Row("packed and ignored", "sglang", "glm int4", ignore("re:.*experts.*"), "scheme_mismatch",
        words="unquantized"),
    Row("regex targets alone", "sglang", "glm mixed", lambda m: m.quant["config_groups"].pop("group_1"),
        "scheme_conflict", words="neither", ep=8, tp=8),
    Row("half of a fused pair ignored", "vllm", "glm int4", ignore("re:.*q_b_proj", "re:.*q_a_proj", "re:.*kv_b.*",
        "re:.*o_proj", "re:.*indexer.*", without=("re:.*self_attn.*",)), "scheme_conflict", words="kv_a_proj_with_mqa"),
    Row("half of a fused pair packed", "vllm", "glm int4", lambda m: m.pack("layers.0.mlp.gate_proj"),
        "fused_members"),
    Row("a bias left of o_proj", "sglang", "glm int4", lambda m: (m.drop("layers.0.self_attn.o_proj.weight"),
        m.add("model.layers.0.self_attn.o_proj.bias", "BF16", 6144)), "modules_missing", words="o_proj"),
    Row("no k_norm", "vllm", "glm4 int4", lambda m: m.drop("layers.1.self_attn.k_norm.weight"), "modules_missing",
        words="k_norm"),
    Row("no bias where the config has one", "sglang", "glm4 fp8", lambda m: m.drop("layers.1.self_attn.q_proj.bias"),
        "modules_missing", words="q_proj.bias"),
    Row("a layer of experts that is to be dense", "transformers", "kimi thinking", _config(first_k_dense_replace=2),
        "modules_missing", words="mlp.gate_proj"),
    Row("part of an indexer", "sglang", "glm int4", lambda m: m.drop("layers.0.self_attn.indexer.wq_b.weight"),
        "indexer_missing", words="indexer.wq_b"),
    Row("FP8 that the config calls int8", "transformers", "glm mixed", lambda m: m.quant["config_groups"]["group_1"][
        "weights"].update(type="int", strategy="channel"), "scheme_mismatch", words="is FP8"),
    *(Row(f"another size, {e}", e, "glm int4", _config(moe_intermediate_size=4096), "dimensions",
          words="[2048, 6144], config.json makes it [4096, 6144]") for e in ENGINES),
    Row("half a router", "sglang", "kimi thinking", lambda m: m.add("model.layers.1.mlp.gate.weight", "BF16", 16, 7168),
        "dimensions", words="gate is [16, 7168], config.json makes it [32, 7168]"),
    Row("another vocabulary", "vllm", "kimi 2.5", lambda m: m.config["text_config"].update(vocab_size=163841),
        "dimensions", words="[163841, 7168]"),
    Row("more heads", "transformers", "glm4 fp8", _config(head_dim=256), "dimensions", words="q_proj"),
    Row("a status of other writers", "transformers", "glm mixed", set_quant(quantization_status="frozen"),
        "not_compressed", words="'frozen'"),
    Row("no status", "transformers", "kimi thinking", lambda m: m.quant.pop("quantization_status"), "not_compressed",
        words="None"),
    Row("a format of no compressor", "transformers", "kimi thinking", set_quant(format="dense"), "group_format",
        words="dense"),
    *(Row(f"true for a number, {e}", e, "glm int4", _config(v_head_dim=True), "bad_number",
          words="v_head_dim is True") for e in ENGINES),
    Row("null for a number", "vllm", "glm int4", _config(hidden_size=None), "bad_number", words="None"),
    Row("weight_packed under another method", "transformers", "glm int4", set_quant(quant_method="fp8"),
        "scheme_mismatch", words="which reads no such tensor"),
    Row("no config", "vllm", "glm int4", lambda m: m.config.pop("quantization_config"), "no_config"),
    Row("a method nobody knows", "vllm", "glm int4", set_quant(quant_method="mine"), "no_loader", words='"mine"'),
    Row("w4afp8 in vLLM", "vllm", "glm fp8", set_quant(quant_method="w4afp8"), "no_loader"),
    Row("asymmetric gptq in SGLang", "sglang", "kimi thinking", gptq(sym=False), "no_loader", words="gptq_marlin",
        before=gptq()),
    Row("gptq of another version", "vllm", "kimi thinking", gptq(sym=False, checkpoint_format="gptq_v2"), "gptq",
        "warning", words="gptq_v2", before=gptq()),
    Row("gptq experts in BF16 under SGLang", "sglang", "kimi thinking", gptq(), "gptq", "warning", words="F16"),
    Row("a family nobody read", "vllm", "glm int4", _config(model_type="mine"), "unknown_family", "note",
        words="DeepSeek"),
    Row("awq beside a plain q_a_proj", "sglang", "glm int4", awq, "awq_fused_a"),
    Row("gptq cut at tp 32 in groups of 128", "vllm", "kimi thinking", gptq(group_size=128), "expert_shape", tp=32,
        before=gptq(), words="64"),
    Row("weight_scale under quant_method fp8", "sglang", "glm fp8", lambda m: [m.add(n.removesuffix("_inv"), "F32",
        *m.tensors.pop(n).shape) for n in list(m.tensors) if n.endswith("o_proj.weight_scale_inv")], "fp8_scale_name"),
    Row("another block", "sglang", "glm fp8", set_quant(weight_block_size=[64, 128]), "scale_shape"),
    Row("a BF16 linear that fp8 takes for its own", "vllm", "glm fp8", lambda m: m.retype("o_proj.weight", "BF16"),
        "scheme_mismatch", words="o_proj"),
    Row("FP8 off Linear", "sglang", "kimi mixed", _swap_targets, "kv_b_not_on_linear", "warning"),
    Row("weights_proj in FP8", "vllm", "glm fp8", to_fp8("weights_proj"), "fp8_weights_proj"),
    Row("an FP8 router", "vllm", "glm fp8", to_fp8("mlp.gate"), "not_plain", words="router"),
    Row("no o_proj", "sglang", "glm int4", lambda m: m.drop("layers.0.self_attn.o_proj.weight"), "modules_missing"),
    Row("no head", "vllm", "glm int4", lambda m: m.drop("lm_head.weight"), "modules_missing", words="lm_head"),
    Row("an unknown module in vLLM", "vllm", "glm int4", _extra, "unknown_name", words="KeyError"),
    Row("an unknown module in SGLang", "sglang", "glm int4", _extra, "unknown_name", "warning"),
    Row("heads", "vllm", "glm int4", _config(num_attention_heads=60), "parallel_sizes", tp=8, words="7.5"),
    Row("KV heads", "vllm", "glm4 fp8", _config(num_key_value_heads=6), "parallel_sizes", tp=4),
    Row("experts on ep ranks", "sglang", "kimi thinking", _config(n_routed_experts=31), "parallel_sizes", tp=8, ep=8),
    Row("a KV scheme without scales", "sglang", "glm4 fp8", set_quant(kv_cache_scheme=KV), "kv_scheme", "warning",
        words="no scale tensor"),
    Row("a KV scheme that vLLM refuses", "vllm", "glm4 fp8", set_quant(kv_cache_scheme=KV | {"num_bits": 4}),
        "kv_scheme"),
    Row("fusion in GLM-4.x", "sglang", "glm4 fp8", become("glm4 int4"),
        "shared_experts_fusion", "warning"),
    Row("one projection of the experts plain", "vllm", "kimi thinking", _mixed_expert, "expert_forms"),
    Row("q_a of no whole blocks", "sglang", "kimi mixed", _odd_q_a, "fused_rows", words="1504"),
    Row("an FP8 group of the wrong format", "vllm", "kimi mixed", lambda m: m.quant["config_groups"]["group_1"].pop(
        "format"), "group_format", words="float-quantized"),
    Row("experts in an FP8 target", "transformers", "kimi mixed", _experts_in_fp8_target, "group_order", "warning"),
    Row("an MTP layer in transformers", "transformers", "deepseek fp8", become("deepseek fp8"), "mtp_not_loaded",
        "note", before=lambda m: m.drop(*(n for n in m.tensors if ".layers.2." in n))),
    Row("a method that was not modelled", "sglang", "glm fp8", set_quant(quant_method="quark"), "not_modelled", "note"),
    Row("block FP8 on MLA", "sglang", "kimi fp8", become("kimi mixed"), "not_proven", "note"),
    Row("a vision tower under Linear", "transformers", "kimi 2.5", ignore(without=("re:.*vision_tower.*",)),
        "vision_scheme", "note", before=ignore("re:.*vision_tower.*", "re:.*mm_projector.*")),
    Row("experts in 3-D", "vllm", "glm int4", _three_d, "experts_in_3d", "note"),
    Row("negative scales", "sglang", "glm int4", lambda m: setattr(m, "negative", True), "negative_scales", "note"),
    Row("no auto_map", "transformers", "deepseek fp8", _config(model_type="kimi_k2"), "not_registered"),
    Row("192 rows", "transformers", "deepseek fp8", lambda m: [m.add(f"model.layers.{i}.self_attn.kv_a_proj_with_mqa."
        f"weight{leaf}", kind, *shape) for i in range(2) for leaf, kind, shape in (("", "F8_E4M3", (192, 7168)),
        ("_scale_inv", "F32", (2, 56)))], "fp8_partial_blocks", words="blocks of 96"),
)  # fmt: skip


def _find(row: Row, mutation: Mutation | None) -> list[Finding]:
    made = good(row.base)
    row.before(made)
    if mutation:
        mutation(made)
    return find_problems(made.served, row.engine, row.version, row.tp, row.ep)


@pytest.mark.parametrize("row", ROWS, ids=[row.number for row in ROWS])
def test_a_rule_finds_its_fault_and_not_before(row: Row) -> None:
    before = [finding for finding in _find(row, None) if finding.code == row.code]
    assert [finding for finding in before if finding.severity == row.severity] == []
    found = _find(row, row.mutation)
    hits = [finding for finding in found if finding.code == row.code and row.words in finding.message]
    assert hits, found
    assert {finding.severity for finding in hits} == {row.severity}


def test_a_plain_mtp_layer_under_both_names_is_fine() -> None:
    made = good("deepseek int4")
    chain(_plain_mtp, ignore(MTP_PLAIN, r"re:.*\.decoder\..*"))(made)
    assert engines_that_load(made.served) == ENGINES


def test_scales_of_one_do_no_harm_on_mla() -> None:
    made = good("glm int4")
    name = "model.layers.0.self_attn.k_proj.k_scale"
    made.add(name, "F32", 1)
    made.kv_scales = {name: (1.0,)}
    assert not [found for found in find_problems(made.served, "sglang") if found.code == "kv_scale_on_mla"]
    made.kv_scales = {name: (0.9,)}
    assert [found for found in find_problems(made.served, "sglang") if found.code == "kv_scale_on_mla"]


def test_sixty_modules_with_one_fault_are_one_finding_that_names_the_first() -> None:
    made = good("glm int4")
    made.retype("e_score_correction_bias", "BF16")
    (found,) = [found for found in find_problems(made.served, "vllm") if found.severity == "error"]
    assert (found.module, found.count) == ("model.layers.1.mlp.gate", 2)


def test_errors_come_first() -> None:
    made = good("glm int4")
    made.retype("e_score_correction_bias", "BF16")
    made.retype("weight_scale", "F16")
    kinds = [found.severity for found in find_problems(made.served, "sglang")]
    assert kinds == sorted(kinds, key=("error", "warning", "note").index)
    assert set(kinds) == {"error", "warning", "note"}


@pytest.mark.parametrize(("base", "tp", "ep", "engines"), [
    ("glm4 int4", 8, 1, ("sglang", "vllm")),
    ("glm int4", 32, 1, ("sglang", "vllm")),
    ("glm int4 g128", 32, 1, ()),
    ("glm int4 g128", 32, 32, ("sglang", "vllm")),
    ("glm fp8", 32, 1, ()),
])  # fmt: skip
def test_sizes_load_that_cut_no_group_and_no_block(base: str, tp: int, ep: int, engines: tuple[str, ...]) -> None:
    cells = Checker(good(base).served).matrix(("sglang", "vllm"))
    assert {cell.engine for cell in cells if (cell.tp, cell.ep, cell.ok) == (tp, ep, True)} == set(engines)
    assert all(cell.ok == (cell.why is None) for cell in cells)


def test_the_matrix_has_the_sizes_that_make_sense() -> None:
    cells = Checker(good("kimi thinking").served).matrix()
    assert {cell.tp for cell in cells if cell.engine == "sglang"} == set(MATRIX_TP)
    assert {(cell.tp, cell.ep) for cell in cells if cell.engine == "vllm" and cell.tp == 8} == {(8, 1), (8, 8)}
    assert len({(cell.engine, cell.tp, cell.ep) for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    ("version", "severity"),
    [("0.5.23", None), ("v0.5.23.post1", "note"), ("0.5.2", "note"), ("0.7.0", "warning"), ("newest", "warning")],
)
def test_a_version_that_was_not_read_is_said(version: str, severity: str | None) -> None:
    made = good("glm int4")
    made.retype("e_score_correction_bias", "BF16")
    found = find_problems(made.served, "sglang", version)
    said = [finding for finding in found if finding.code == "version_not_read"]
    assert [finding.severity for finding in said] == ([severity] if severity else [])
    assert all("0.5.23" in finding.message for finding in said)
    assert ("router_bias_dtype" in {finding.code for finding in found}) == (severity != "warning")


def test_every_rule_has_a_source_and_ranges_that_can_be_read() -> None:
    for rule in RULES:
        assert rule.sources
        assert set(rule.ranges or {}) <= set(rule.sources)
        for engine, source in rule.sources.items():
            assert len(source) > 8
            assert rule.applies(engine, READ[engine]) or rule.ranges
    assert len({rule.code for rule in RULES}) == len(RULES)
    assert all(in_range(READ[engine], RANGES[engine]) for engine in ENGINES)


@pytest.mark.parametrize(("text", "key"), [("0.5.23", (0, 5, 23)), ("v1.0", (1,)), ("0.33.0rc1", (0, 33)), ("", None)])
def test_versions_are_numbers(text: str, key: tuple[int, ...] | None) -> None:
    assert version_key(text) == key


def test_a_shape_of_no_dimension_is_no_crash() -> None:
    made = good("kimi thinking")
    made.tensors = {name: TensorSpec(name, spec.dtype, ()) for name, spec in made.tensors.items()}
    assert all(find_problems(made.served, engine, tp=8) for engine in ENGINES)

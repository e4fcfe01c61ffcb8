"""`ignore` and `targets` as the engines match them: what their own functions answered on these configs.

The answers are those of SGLang 0.5.23 and vLLM 0.32; on 200,000 random configs the functions here gave the same ones.
"""

import inventory
import pytest
from engine_checkpoints import IGNORE_GLM, mixed_quantization

from kizami.formats.engines.matching import Disagreement, Entries, Patterns, sglang_ignores, vllm_ignores
from kizami.formats.engines.naming import class_of
from kizami.formats.engines.quantization import Group, read_quantization
from kizami.formats.engines.resolve import Trouble, resolver
from kizami.formats.engines.sglang import Sglang
from kizami.formats.engines.vllm import Vllm
from kizami.formats.errors import KizamiError

ENGINES = {"sglang": Sglang(), "vllm": Vllm()}
DENSE = "model.layers.0.mlp.gate_up_proj"
FUSED_A = {
    "sglang": "model.layers.3.self_attn.fused_qkv_a_proj_with_mqa",
    "vllm": "model.layers.3.self_attn.fused_qkv_a_proj",
}
MTP = {"sglang": "model.decoder", "vllm": "model.layers.78.mtp_block"}
REST = ("self_attn.o_proj", "self_attn.kv_b_proj", "mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj",
        "self_attn.indexer.wq_b")  # fmt: skip
MTP_KEPT = [r"re:.*\.layers\.78\..*", r"re:.*\.decoder\..*"]


def _kimi(*ignore: str, targets: tuple[str, ...] = ("Linear",)) -> dict:
    quant = inventory.kimi_quantization_config() | {"ignore": list(ignore)}
    quant["config_groups"]["group_0"]["targets"] = list(targets)
    return quant


def _answer(quant: dict, engine: str, module: str) -> str:
    """int4, fp8, ignored, or ValueError, for a runtime name; `...experts` stands for the layer's experts."""
    read = read_quantization({"quantization_config": quant})
    rules = ENGINES[engine]
    resolve = resolver(read, rules, rules.fused("mla", {}))
    assert resolve is not None
    leaf = module.rpartition(".")[2]
    scheme = resolve.experts(module) if leaf == "experts" else resolve.linear(module, class_of(leaf, rules.name))
    if isinstance(scheme, Trouble):
        return "ValueError"
    return "ignored" if not isinstance(scheme, Group) else f"{'fp' if scheme.is_fp8 else 'int'}{scheme.weights.bits}"


KIMI = _kimi(*inventory.KIMI_IGNORE)
NO_GATE_UP = _kimi(*inventory.KIMI_IGNORE[:3], r"re:.*mlp\.(gate|up|down)_proj.*")
EXACT = _kimi("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
PREFIXED = _kimi("language_model.model.layers.3.self_attn.o_proj")
KEPT = _kimi(*IGNORE_GLM, *MTP_KEPT)
EXPERTS_ONLY = _kimi(targets=(r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$",))

TABLE = [
    *((KIMI, e, "model.layers.3.mlp.experts", "int4") for e in ENGINES),
    *((KIMI, e, f"{MTP[e]}.mlp.experts", "int4") for e in ENGINES),
    *((KIMI, e, f"model.layers.3.{part}", "ignored") for e in ENGINES for part in REST),
    *((KIMI, e, FUSED_A[e], "ignored") for e in ENGINES),
    *((KIMI, e, DENSE, "ignored") for e in ENGINES),
    *((KIMI, e, f"{MTP[e]}.self_attn.o_proj", "ignored") for e in ENGINES),
    (NO_GATE_UP, "sglang", DENSE, "int4"),
    (NO_GATE_UP, "vllm", DENSE, "ignored"),
    (EXACT, "sglang", DENSE, "int4"),
    (EXACT, "vllm", DENSE, "ignored"),
    *((_kimi("model.layers.5.mlp.experts.0"), e, "model.layers.5.mlp.experts", "int4") for e in ENGINES),
    (PREFIXED, "sglang", "model.layers.3.self_attn.o_proj", "int4"),
    (PREFIXED, "vllm", "language_model.model.layers.3.self_attn.o_proj", "ignored"),
    *((_kimi("re:.*q_a_proj.*"), e, FUSED_A[e], "ValueError") for e in ENGINES),
    *((KEPT, e, f"{MTP[e]}.{part}", "ignored") for e in ENGINES for part in ("mlp.experts", "self_attn.o_proj")),
    *((mixed_quantization(), e, at, "int4") for e in ENGINES for at in ("model.layers.3.mlp.experts",
                                                                       f"{MTP[e]}.mlp.experts")),
    *((mixed_quantization(), e, f"model.layers.3.{part}", "fp8") for e in ENGINES for part in REST),
    *((mixed_quantization(), e, at, "fp8") for e in ENGINES for at in (DENSE, FUSED_A[e],
                                                                      f"{MTP[e]}.self_attn.o_proj")),
    *((EXPERTS_ONLY, "sglang", at, "ValueError") for at in ("model.layers.3.self_attn.o_proj", DENSE)),
    *((EXPERTS_ONLY, "vllm", at, "ignored") for at in ("model.layers.3.self_attn.o_proj", DENSE)),
]  # fmt: skip


@pytest.mark.parametrize(("quant", "engine", "module", "answer"), TABLE)
def test_a_module_gets_what_the_engines_own_functions_answer(
    quant: dict, engine: str, module: str, answer: str
) -> None:
    assert _answer(quant, engine, module) == answer


@pytest.mark.parametrize(
    ("entry", "sglang", "vllm"),
    [
        ("model.layers.0.self_attn.o_proj", True, True),
        ("self_attn.o_proj", True, False),  # a dotted suffix
        ("attn.o_proj", False, False),
        ("model.layers.0.self_attn", False, False),  # a parent
        ("re:.*o_proj", True, True),
        ("re:self_attn", False, False),  # re.match: anchored at the start
        ("re:model.layers.0.self", True, True),  # and not at the end
        ("o_proj", True, False),
        ("Linear", False, False),
    ],
)
def test_a_plain_entry_is_a_suffix_to_sglang_and_the_whole_name_to_vllm(entry: str, sglang: bool, vllm: bool) -> None:
    entries = Entries([entry], Patterns())
    name = "model.layers.0.self_attn.o_proj"
    assert (sglang_ignores(entries, name, {}), vllm_ignores(entries, name, {})) == (sglang, vllm)


def test_the_fused_name_itself_may_be_listed() -> None:
    fused = {"gate_up_proj": ("gate_proj", "up_proj")}
    whole = Entries([DENSE, "model.layers.0.mlp.gate_proj"], Patterns())
    assert sglang_ignores(whole, DENSE, fused)
    assert vllm_ignores(whole, DENSE, fused)
    half = Entries(["model.layers.0.mlp.gate_proj"], Patterns())
    for ignores in (sglang_ignores, vllm_ignores):
        with pytest.raises(Disagreement):
            ignores(half, DENSE, fused)


def test_the_first_target_wins_and_a_name_beats_a_class() -> None:
    targets = Entries(["Linear", "re:.*o_proj", "model.layers.0.self_attn.o_proj"], Patterns())
    assert targets.first("model.layers.0.self_attn.o_proj") == "re:.*o_proj"
    assert targets.of_class("RowParallelLinear") == "Linear"
    assert targets.first("model.layers.0.self_attn.k_proj") is None


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
O_PROJ = "model.layers.3.self_attn.o_proj"
SHARED_DOWN = "model.layers.3.mlp.shared_experts.down_proj"


@pytest.mark.parametrize(
    ("listed", "module", "sglang", "vllm"),
    [
        ([], O_PROJ, "fp8", "fp8"),
        ([O_PROJ], O_PROJ, "ignored", "ignored"),
        (["layers.3.self_attn.o_proj"], O_PROJ, "ignored", "fp8"),  # with and without `model.`
        (["self_attn"], O_PROJ, "ignored", "fp8"),  # whole components anywhere
        (["attn.o_proj"], O_PROJ, "fp8", "fp8"),
        (["model.layers.0.mlp.gate_proj"], DENSE, "ValueError", "ValueError"),
        (["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"], DENSE, "ignored", "ignored"),
        ([DENSE], DENSE, "fp8", "ignored"),
        (["mlp.gate"], DENSE, "fp8", "fp8"),
        (["model.layers.3.mlp.experts"], "model.layers.3.mlp.experts", "ignored", "ignored"),
        (["model.layers.3.mlp.experts.7.up_proj"], "model.layers.3.mlp.experts", "ignored", "ignored"),
        (["model.layers.30.mlp.experts"], "model.layers.3.mlp.experts", "fp8", "fp8"),
        ([f"x.{SHARED_DOWN}.y"], SHARED_DOWN, "ignored", "ignored"),
        (["indexers_proj"], "model.layers.3.self_attn.indexer.wq_b", "fp8", "fp8"),
    ],
)
def test_modules_to_not_convert_are_whole_names_to_vllm_and_parts_to_sglang(
    listed: list[str], module: str, sglang: str, vllm: str
) -> None:
    quant = FP8 | {"modules_to_not_convert": listed}
    assert (_answer(quant, "sglang", module), _answer(quant, "vllm", module)) == (sglang, vllm)


def test_linear_fp8_config_turns_every_linear_into_fp8_in_sglang_alone() -> None:
    quant = KIMI | {"linear_fp8_config": FP8}
    for module in (O_PROJ, DENSE):
        assert (_answer(quant, "sglang", module), _answer(quant, "vllm", module)) == ("fp8", "ignored")
    assert _answer(quant, "sglang", "model.layers.3.mlp.experts") == "int4"


@pytest.mark.parametrize(
    ("dynamic", "answer"),
    [({}, "int4"), ({"-:.*self_attn.*": {}}, "ignored"), ({"+:.*self_attn.*": {"bits": 4}, "-:.*": {}}, "int4"),
     ({"-:self_attn": {}}, "int4"), ({".*o_proj": {}, "-:.*": {}}, "int4")],
)  # fmt: skip
def test_the_first_dynamic_rule_of_gptq_decides(dynamic: dict, answer: str) -> None:
    quant = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "dynamic": dynamic}
    assert {_answer(quant, engine, O_PROJ) for engine in ENGINES} == {answer}
    assert _answer(quant, "sglang", "model.layers.3.mlp.experts") == "int4"  # experts never ask


def test_awq_leaves_out_by_substring() -> None:
    quant = {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["self_at", "experts.0."]}
    assert {_answer(quant, engine, O_PROJ) for engine in ENGINES} == {"ignored"}
    assert {_answer(quant, engine, DENSE) for engine in ENGINES} == {"int4"}
    assert {_answer(quant, engine, "model.layers.3.mlp.experts") for engine in ENGINES} == {"int4"}


def test_w4afp8_has_int4_experts_and_fp8_linears() -> None:
    quant = {"quant_method": "w4afp8"}
    assert _answer(quant, "sglang", O_PROJ) == "fp8"
    assert _answer(quant, "sglang", "model.layers.3.mlp.experts") == "int4"


def test_experts_whose_projections_differ_are_refused() -> None:
    quant = mixed_quantization()
    quant["config_groups"]["group_0"]["targets"] = [r"re:.*mlp\.experts\.\d+\.(gate|up)_proj$"]
    assert {_answer(quant, engine, "model.layers.3.mlp.experts") for engine in ENGINES} == {"ValueError"}


@pytest.mark.parametrize("expression", ["(a+)+$", "(.*x){20}", "a" * 2000, "(", r"(\w+)\1", ".*a.*b.*c.*d.*e"])
def test_a_pattern_that_could_run_away_is_not_tried(expression: str) -> None:
    with pytest.raises(KizamiError) as refused:
        Patterns().match(expression, "a" * 60)
    assert refused.value.code == "bad_pattern"


def test_patterns_have_a_budget() -> None:
    patterns = Patterns()

    def spend() -> None:
        for number in range(3_000):
            patterns.match(f".*a{number % 1500}.*b.*c$", "x" * 120)

    with pytest.raises(KizamiError) as refused:
        spend()
    assert refused.value.code == "bad_config"

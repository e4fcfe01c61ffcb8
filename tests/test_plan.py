"""One action and one reason per tensor; what cannot be done is refused before anything is written."""

from collections import Counter

import make_cases
import pytest

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.quantize.capacity import bytes_per_gpu, split_groups, tensor_parallel_sizes
from kizami.quantize.plan import Plan
from kizami.quantize.planner import build_plan
from kizami.quantize.settings import Method, Policy

SEARCH = Method()


@pytest.fixture
def plan(save):
    """Saves a made checkpoint and plans it."""

    def build(source: make_cases.Checkpoint | None = None, method: Method = SEARCH, **policy) -> Plan:
        return build_plan(Checkpoint.open(save(source or make_cases.tiny())), Policy(**policy), method)

    return build


def actions(plan: Plan) -> dict[str, str]:
    return {step.module: step.action for step in plan.steps}


def test_every_source_tensor_has_one_action_and_a_reason(plan, tiny_checkpoint):
    made = plan()
    source = Checkpoint.open(tiny_checkpoint)
    covered = [step.weight.name for step in made.steps] + [s.encoding.scale.name for s in made.steps if s.encoding]
    assert sorted(covered) == sorted(source.tensors)
    assert all(step.reason for step in made.steps)


def test_by_default_only_routed_experts_are_packed_the_mtp_layer_included(plan):
    packed = [module for module, action in actions(plan()).items() if action == "quantize"]
    assert sorted(packed) == sorted(make_cases.PACKED)


@pytest.mark.parametrize(
    ("mtp", "action", "packed"), [("quantize", "quantize", 24), ("keep", "dequantize", 12), ("drop", "drop", 12)]
)
def test_mtp_layer_is_packed_kept_or_dropped(plan, mtp, action, packed):
    made = plan(mtp=mtp)
    assert actions(made)["model.layers.2.mlp.experts.0.up_proj"] == action
    assert made.counts["quantize"] == packed
    assert made.config["num_nextn_predict_layers"] == (0 if mtp == "drop" else 1)
    kept = [step for step in made.steps if step.place.in_mtp and step.outputs]
    assert bool(kept) == (mtp != "drop")


def test_rest_fp8_keeps_the_other_linears_with_their_scales_renamed(plan):
    made = plan(rest="fp8")
    kept = {step.module: step for step in made.steps if step.action == "keep_fp8"}
    assert set(kept) >= set(make_cases.FP8_REST)
    weight, scale = kept["model.layers.0.self_attn.kv_a_proj_with_mqa"].outputs
    assert (weight.name, weight.dtype, weight.shape) == (weight.name, "F8_E4M3", (192, 256))
    assert (scale.name.rpartition(".")[2], scale.dtype, scale.shape) == ("weight_scale", "F32", (2, 2))


def test_rest_fp8_refuses_blocks_that_no_engine_kernel_has(plan):
    source = make_cases.tiny()
    source.config["quantization_config"]["weight_block_size"] = [64, 64]
    for name, tensor in source.tensors().items():
        if name.endswith("_scale_inv"):
            rows, cols = source.tensors()[name.removesuffix("_scale_inv")].shape
            grid = (-(-rows // 64), -(-cols // 64))
            source.set(name, make_cases.Tensor("F32", grid, tensor.data[:4] * (grid[0] * grid[1])))
    with pytest.raises(KizamiError, match=r"\[64, 64\]; FP8 can be kept in blocks of \[128, 128\]"):
        plan(source, rest="fp8")


def test_targets_replace_the_default_choice_and_ignore_wins(plan):
    made = plan(targets=(r"re:.*shared_experts.*",), ignore=(r"re:model\.layers\.2\.",))
    packed = [module for module, action in actions(made).items() if action == "quantize"]
    assert sorted(packed) == [f"model.layers.1.mlp.shared_experts.{p}" for p in ("down_proj", "gate_proj", "up_proj")]


def test_what_an_ignore_pattern_spares_is_said(plan):
    made = plan(ignore=(r"re:model\.layers\.1\.",))
    (step,) = [s for s in made.steps if s.module == "model.layers.1.mlp.experts.0.up_proj"]
    assert (step.action, step.reason) == (
        "dequantize",
        r"routed expert, matches --ignore re:model\.layers\.1\., FP8 in the source",
    )
    assert not any("--ignore" in warning for warning in made.warnings)


@pytest.mark.parametrize("pattern", ["re:.*no_such", "model.layers.1.mlp.experts.0", "model.norm"])
def test_an_ignore_pattern_that_matches_nothing_is_warned_about(plan, pattern):
    assert any(f"--ignore {pattern} matches no module" in warning for warning in plan(ignore=(pattern,)).warnings)


def test_an_exact_name_is_not_a_prefix(plan):
    made = plan(targets=("model.layers.1.mlp.experts.1.gate_proj", "model.layers.1.mlp.experts.1.up_proj"))
    assert made.counts["quantize"] == 2


def test_a_pattern_is_anchored_at_the_start_as_in_compressed_tensors(plan):
    with pytest.raises(KizamiError, match="0 modules matched"):
        plan(targets=(r"re:mlp\.experts",))


def test_a_pattern_that_is_no_regular_expression_is_refused(plan):
    with pytest.raises(KizamiError, match="cannot be used: nothing to repeat") as e:
        plan(ignore=("re:*experts",))
    assert e.value.code == "bad_pattern"


@pytest.mark.parametrize("pattern", [r"re:.*experts\.1\.up_proj$", r"re:.*experts\.1\.gate_proj$"])
def test_gate_and_up_need_one_scheme(plan, pattern):
    with pytest.raises(KizamiError, match=r"gate_proj.*up_proj") as e:
        plan(ignore=(pattern,))
    assert e.value.code == "fused_pair_split"
    assert e.value.tensor == "model.layers.1.mlp.experts.1"


def test_a_layer_with_some_experts_unpacked_is_warned_about(plan):
    made = plan(ignore=(r"re:model\.layers\.1\.mlp\.experts\.3\.",))
    assert any("layer 1: 9 expert modules are packed and 3 are not" in warning for warning in made.warnings)
    assert not any("layer 2" in warning for warning in made.warnings)


def test_packing_a_part_that_engines_read_plainly_is_warned_about(plan):
    made = plan(targets=(r"re:.*kv_b_proj$",))
    assert any("kv_b_proj" in warning and "SGLang" in warning for warning in made.warnings)


@pytest.mark.parametrize(("group", "cols"), [(128, 336), (32, 336), (64, 96)])
def test_columns_that_the_group_does_not_divide_are_refused_with_numbers(plan, group, cols):
    with pytest.raises(KizamiError) as e:
        plan(make_cases.mini(128, cols), group_size=group)
    assert e.value.code == "group_does_not_divide"
    assert str(cols) in e.value.message
    assert str(group) in e.value.message
    assert "gate_proj" in str(e.value)


@pytest.mark.parametrize(
    ("policy", "method", "says"),
    [
        ({"group_size": 48}, Method(), "group size 48"),
        ({"group_size": 0}, Method(), "group size 0"),
        ({"max_shard_bytes": 0}, Method(), "shard size 0"),
        ({}, Method("signed", scale_sign="positive"), "both signs"),
        ({}, Method("minmax", clip_allowance=0.5), "clip allowance 0.5 with --method minmax"),
        ({}, Method("search", clip_allowance=0.25), "clip allowance 0.25"),
        ({}, Method("search", clip_allowance=float("nan")), "clip allowance nan"),
    ],
)
def test_settings_without_meaning_are_refused(plan, policy, method, says):
    with pytest.raises(KizamiError, match=says):
        plan(method=method, **policy)


def test_modules_stay_whole_and_large_tensors_stand_alone(plan):
    made = plan(max_shard_bytes=100_000)
    for shard in made.shards:
        assert shard.steps
        assert shard.data_nbytes <= 100_000 or len(shard.steps) == 1
    homes = Counter(spec.name for shard in made.shards for spec in shard.tensors)
    assert set(homes.values()) == {1}
    for shard in made.shards:
        names = {spec.name for spec in shard.tensors}
        assert all(spec.name in names for step in shard.steps for spec in step.outputs)


def test_every_tensor_begins_at_a_multiple_of_its_item(plan):
    source = make_cases.mini(587, 32 * 9)  # 587 x 9 BF16 scales: not a multiple of 8 bytes
    source.shards["model.safetensors"] |= {
        "model.odd": make_cases.f8(make_cases.random_bytes("odd", 1, 3)[0], "F8_E8M0")
    }
    for shard in plan(source).shards:
        at = 0
        for spec in shard.tensors:
            assert at % {"F8_E8M0": 1, "BF16": 2}.get(spec.dtype, 4) == 0, spec
            at += spec.nbytes


def test_the_hash_tells_plans_apart_and_nothing_else(plan, save):
    assert plan().hash == plan().hash
    other = make_cases.tiny()
    other.set("model.norm.weight", make_cases.bf([2.0] * 256))  # other data, same headers: told by `verify --against`
    assert plan(other).hash == plan().hash
    assert len({plan().hash, plan(group_size=64).hash, plan(method=Method("minmax")).hash, plan(mtp="keep").hash}) == 4


def test_unknown_families_are_planned_by_the_generic_rule_with_a_warning(plan):
    source = make_cases.tiny()
    source.config["model_type"] = "brand_new_moe"
    made = plan(source)
    assert sorted(step.module for step in made.packed) == sorted(make_cases.PACKED)
    assert any("brand_new_moe" in warning for warning in made.warnings)


def test_a_checkpoint_without_experts_has_nothing_to_pack(plan):
    source = make_cases.tiny()
    for shard in source.shards.values():
        for name in [n for n in shard if ".mlp.experts." in n]:
            del shard[name]
    with pytest.raises(KizamiError, match="0 modules matched") as e:
        plan(source)
    assert e.value.code == "nothing_matched"


def test_bytes_per_gpu_divides_what_engines_divide(plan):
    made = plan()
    whole = bytes_per_gpu(made, 1)
    assert whole == made.output.bytes
    replicated = 2 * bytes_per_gpu(made, 2) - whole
    assert 0 < replicated < whole
    assert bytes_per_gpu(made, 4) == pytest.approx((whole - replicated) / 4 + replicated, abs=4)


def test_tensor_parallel_sizes_follow_the_group_rule(plan):
    made = plan(group_size=64)  # down_proj has 128 columns: two groups
    assert tensor_parallel_sizes(made) == [1, 2]
    (finding,) = split_groups(made, 4)
    assert (finding.axis, finding.size, finding.tp) == ("K", 128, 4)
    assert "down_proj" in str(finding)
    assert "32 per rank" in str(finding)


@pytest.mark.parametrize(
    ("name", "shape", "code"),
    [
        ("model.layers.1.mlp.experts.7.gate_proj.weight", (0, 64), "empty_tensor"),
        ("model.layers.1.mlp.experts.7.down_proj.weight", (8, 0), "empty_tensor"),
        ("model." + "x" * 978 + ".layers.1.mlp.experts.9.down_proj.weight", (8, 64), "bad_name"),  # + "_packed"
    ],
)
def test_what_cannot_be_written_is_refused_by_name(plan, name, shape, code):
    source = make_cases.tiny()
    source.shards[make_cases.shard_name(2, 3)][name] = make_cases.bf(make_cases.np.zeros(shape))
    with pytest.raises(KizamiError) as e:
        plan(source)
    assert e.value.code == code
    assert e.value.tensor.startswith(name[:200])


@pytest.mark.parametrize("name", ["re:.*.weight", "re:(.weight", "Linear.weight", "re:model.weight"])
def test_a_name_that_reads_like_a_rule_hits_no_other_module(plan, name):
    source = make_cases.tiny()
    source.shards[make_cases.shard_name(2, 3)] |= make_cases.normal(name, 8, 32)
    made = plan(source)
    assert sorted(step.module for step in made.packed) == sorted(make_cases.PACKED)
    assert all(entry not in ("re:.*", "Linear") for entry in made.quantization_config["ignore"])


@pytest.mark.parametrize("pattern", ["re:(", "re:a{1,99999999999}", "re:" + "(" * 3000])
def test_no_pattern_breaks_the_plan(plan, pattern):
    with pytest.raises(KizamiError) as e:
        plan(targets=(pattern,))
    assert e.value.code == "bad_pattern"

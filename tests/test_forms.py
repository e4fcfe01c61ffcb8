"""What linears become besides INT4 experts in BF16 company: forms by role, other schemes, INT4 sources, layouts.

Expected bytes come from torch and compressed-tensors, never from kizami's own arithmetic.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import make_cases
import numpy as np
import pytest
import torch
from cli_fixtures import Run
from client_fixtures import load_tensors
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from forging import forge, forge_tensors
from output_oracle import form_by_config

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.foreign import quantization_configs
from kizami.quantize.arrange import canonical
from kizami.quantize.plan import Plan
from kizami.quantize.planner import build_plan
from kizami.quantize.settings import Method, Policy

EXPERT = "model.layers.1.mlp.experts.0.gate_proj"
Save = Callable[[make_cases.Checkpoint], Path]
Convert = Callable[..., Path]


@pytest.fixture
def convert(kizami: Run, tmp_path: Path) -> Convert:
    """`kizami convert SRC OUT options` and `verify --against SRC`, both of which must go well."""

    def run(source: Path, *options: str) -> Path:
        out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
        done = kizami("convert", source, out, *options)
        assert done.code == 0, done.err
        proved = kizami("verify", out, "--against", source)
        assert proved.code == 0, proved.err
        return out

    return run


@pytest.fixture
def foreign(converted: Path, tmp_path: Path) -> Path:
    """An INT4 checkpoint as others publish it: no kizami.json, no report."""
    folder = shutil.copytree(converted, tmp_path / "published")
    for name in ("kizami.json", "kizami-report.jsonl", "README.md"):
        (folder / name).unlink()
    return folder


def actions(plan: Plan) -> dict[str, str]:
    return {step.module: step.action for step in plan.steps}


def planned(source: Path, **policy: object) -> Plan:
    return build_plan(Checkpoint.open(source), Policy(**policy), Method())  # type: ignore[arg-type]


def report(out: Path) -> dict[str, dict]:
    return {row["name"]: row for row in map(json.loads, (out / "kizami-report.jsonl").read_text().splitlines())}


def unpacked(tensors: dict[str, torch.Tensor], module: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """compressed-tensors' own decoding of a packed linear, in BF16 as it does, or exact in float32."""
    shape = torch.Size(tensors[f"{module}.weight_shape"].tolist())
    codes = unpack_from_int32(tensors[f"{module}.weight_packed"], 4, shape)
    scale = tensors[f"{module}.weight_scale"].to(dtype)
    groups = codes.to(dtype).unflatten(1, (scale.shape[1], -1))
    return (groups * scale[:, :, None]).flatten(1)


# ---------------------------------------------------------------------------------------------------- by role


def test_a_role_can_be_given_a_form(tiny_checkpoint: Path) -> None:
    made = actions(planned(tiny_checkpoint, roles=(("shared_expert", "int4"), ("dense_mlp", "fp8"), ("mtp", "keep"))))
    assert made["model.layers.1.mlp.experts.0.up_proj"] == "quantize"
    assert made["model.layers.1.mlp.shared_experts.up_proj"] == "quantize"
    assert made["model.layers.0.mlp.up_proj"] == "keep_fp8"
    assert made["model.layers.1.self_attn.o_proj"] == "dequantize"
    assert made["model.layers.2.mlp.experts.0.up_proj"] == "keep_fp8"
    assert made["model.layers.2.eh_proj"] == "copy"


def test_a_pattern_goes_before_a_role(tiny_checkpoint: Path) -> None:
    chosen = {
        "targets": (r"re:.*\.shared_experts\..*",),
        "roles": (("shared_expert", "fp8"), ("routed_expert", "keep")),
    }
    made = actions(planned(tiny_checkpoint, **chosen))
    assert made["model.layers.1.mlp.shared_experts.up_proj"] == "quantize"
    assert made["model.layers.1.mlp.experts.0.up_proj"] == "keep_fp8"


@pytest.mark.long
def test_what_is_given_by_role_is_what_the_config_says(tiny_checkpoint: Path, convert: Convert) -> None:
    out = convert(tiny_checkpoint, "--set", "shared_expert=int4", "--set", "attention=fp8", "--set", "mtp=fp8")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    forms = {name.removesuffix(".weight"): "float8" for name, t in load_tensors(out).items() if t.itemsize == 1}
    assert len(forms) > 10
    for module in (*forms, "model.layers.1.mlp.shared_experts.up_proj", "model.layers.0.mlp.up_proj"):
        expected = forms.get(module, "int4" if "shared" in module else "none")
        assert form_by_config(config, module) == expected, module


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"roles": (("experts", "int4"),)}, "no such role"),
        ({"roles": (("router", "fp8"),)}, "no such role"),
        ({"roles": (("attention", "fp8"), ("attention", "bf16"))}, "two forms"),
        ({"roles": (("mtp", "int4"),)}, "eh_proj"),
        ({"roles": (("mtp", "keep"),), "mtp": "drop"}, "two things"),
    ],
)
def test_a_role_that_makes_no_sense_is_refused(tiny_checkpoint: Path, policy: dict, words: str) -> None:
    with pytest.raises(KizamiError, match=words):
        planned(tiny_checkpoint, **policy)


def test_a_role_that_the_model_does_not_have_is_warned_about(tiny_checkpoint: Path) -> None:
    assert "--set indexer=fp8 matches no module" in planned(tiny_checkpoint, roles=(("indexer", "fp8"),)).warnings


def test_parts_that_engines_fuse_must_have_one_form(tiny_checkpoint: Path) -> None:
    with pytest.raises(KizamiError, match="engines fuse q_a_proj, kv_a_proj_with_mqa"):
        planned(tiny_checkpoint, targets=(r"re:.*\.q_a_proj$",))


# ---------------------------------------------------------------------------------------------------- other schemes


def test_scheme_bf16_decodes_everything_and_leaves_no_quantization_config(
    tiny_checkpoint: Path, convert: Convert
) -> None:
    out = convert(tiny_checkpoint, "--scheme", "bf16")
    assert quantization_configs(json.loads((out / "config.json").read_text())) == ()
    source, made = make_cases.tiny(), load_tensors(out)
    expected = torch.from_numpy(source.dense(EXPERT)).to(torch.bfloat16)
    assert torch.equal(made[f"{EXPERT}.weight"], expected)
    assert not [name for name in made if "scale" in name]


@pytest.mark.long
def test_scheme_fp8_block_rounds_as_torch_does(converted: Path, convert: Convert) -> None:
    out = convert(converted, "--scheme", "fp8-block")
    made, module = load_tensors(out), "model.layers.1.mlp.experts.1.down_proj"
    weight = unpacked(load_tensors(converted), module, torch.float32)
    for i in range(0, weight.shape[0], 128):
        for j in range(0, weight.shape[1], 128):
            block = weight[i : i + 128, j : j + 128]
            scale = block.abs().max() / 448
            assert made[f"{module}.weight_scale"][i // 128, j // 128] == scale
            found = made[f"{module}.weight"][i : i + 128, j : j + 128]
            assert torch.equal(found.view(torch.uint8), (block / scale).to(torch.float8_e4m3fn).view(torch.uint8))
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "float-quantized"
    assert form_by_config(config, module) == "float8"
    row = report(out)[module]
    error = weight - made[f"{module}.weight"].float() * made[f"{module}.weight_scale"].repeat_interleave(
        128, 0
    ).repeat_interleave(128, 1)
    assert row["rel_error"] == pytest.approx(float(error.norm() / weight.norm()), rel=1e-5)
    assert row["scheme"] == "fp8-block"


def test_an_fp8_result_is_a_source_again(converted: Path, convert: Convert) -> None:
    """What a prefill server is given can be converted like any FP8 checkpoint."""
    out = convert(convert(converted, "--scheme", "fp8-block"), "--group-size", "64")
    assert report(out)[EXPERT]["source_dtype"] == "F8_E4M3"


def test_a_source_that_has_the_form_already_is_refused(
    converted: Path, tiny_checkpoint: Path, convert: Convert
) -> None:
    with pytest.raises(KizamiError, match="already INT4"):
        planned(converted)
    plain = convert(tiny_checkpoint, "--scheme", "bf16")
    with pytest.raises(KizamiError, match="nothing to convert"):
        planned(plain, to="bf16")


def test_channel_scales_are_kept_with_a_config_that_says_so(save: Save, convert: Convert) -> None:
    checkpoint = make_cases.tiny()
    for name in list(checkpoint.tensors()):
        if name.endswith(".weight_scale_inv"):
            module, shard = name.removesuffix(".weight_scale_inv"), checkpoint.find(name)
            rows = checkpoint.tensors()[f"{module}.weight"].shape[0]
            del shard[name]
            shard[f"{module}.weight_scale"] = make_cases.f32(np.linspace(0.001, 0.01, rows).reshape(rows, 1))
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    checkpoint.config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": fp8}}, "ignore": ["lm_head"],
    }  # fmt: skip
    out = convert(save(checkpoint), "--rest", "fp8")
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    assert groups["group_1"]["weights"] == fp8
    assert groups["group_1"]["input_activations"]["strategy"] == "token"
    assert load_tensors(out)["model.layers.1.self_attn.o_proj.weight_scale"].shape[1] == 1


# ---------------------------------------------------------------------------------------------------- INT4 sources


def test_int4_becomes_bf16_as_compressed_tensors_decodes_it(converted: Path, convert: Convert) -> None:
    made, source = load_tensors(convert(converted, "--scheme", "bf16")), load_tensors(converted)
    modules = [name.removesuffix(".weight_packed") for name in source if name.endswith(".weight_packed")]
    assert len(modules) == len(make_cases.PACKED)
    for module in modules:
        assert torch.equal(made[f"{module}.weight"], unpacked(source, module)), module


@pytest.mark.parametrize("format", ["gptq", "gptq_v2", "awq"])
def test_int4_changes_its_layout_and_no_bit_of_its_codes_and_scales(
    converted: Path, convert: Convert, format: str
) -> None:
    out = convert(converted, "--format", format)
    made, source = Checkpoint.open(out), load_tensors(converted)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == format.partition("_")[0]
    for module in make_cases.PACKED:
        names = [name for name in made.tensors if name.startswith(f"{module}.")]
        loaded = load_tensors(out)
        by_leaf = {name.rpartition(".")[2]: loaded[name].numpy() for name in names}
        order = ("qweight", "qzeros", "scales") if format == "awq" else ("qweight", "qzeros", "g_idx", "scales")
        shape = tuple(source[f"{module}.weight_shape"].tolist())
        packed, scale = canonical(format, tuple(by_leaf[leaf] for leaf in order), 32, shape, module)
        assert np.array_equal(packed, source[f"{module}.weight_packed"].numpy())
        assert np.array_equal(scale, source[f"{module}.weight_scale"].view(torch.uint16).numpy())
    assert report(out)[EXPERT]["rel_error"] == 0


def test_int4_in_groups_of_128_goes_to_groups_of_32_without_loss(tiny_checkpoint: Path, convert: Convert) -> None:
    wide = convert(tiny_checkpoint, "--group-size", "128")
    narrow = convert(wide)
    for module in make_cases.PACKED:
        assert torch.equal(unpacked(load_tensors(narrow), module), unpacked(load_tensors(wide), module))
    assert load_tensors(narrow)[f"{EXPERT}.weight_scale"].shape[1] == 8


def test_int4_is_not_rounded_again_unless_told(converted: Path, convert: Convert, kizami: Run, tmp_path: Path) -> None:
    refused = kizami("convert", converted, tmp_path / "no", "--group-size", "64")
    assert refused.code == 2
    assert "rounded once more" in refused.err
    assert "--allow-requantize" in refused.err
    out = convert(converted, "--group-size", "64", "--allow-requantize")
    before, after = (unpacked(load_tensors(folder), EXPERT, torch.float32) for folder in (converted, out))
    cost = float((before - after).norm() / before.norm())
    assert cost > 0.01
    assert report(out)[EXPERT]["rel_error"] == pytest.approx(cost, rel=1e-5)


def test_kimi_k25s_own_layout_is_a_source(converted: Path, tmp_path: Path, convert: Convert, kizami: Run) -> None:
    """Prefix, quantization_config in text_config, a vision tower, I64 weight_shape."""
    from client_fixtures import read_config, write_checkpoint

    tensors = {f"language_model.{name}": tensor for name, tensor in load_tensors(converted).items()}
    tensors |= {n: t.to(torch.int64) for n, t in tensors.items() if n.endswith("weight_shape")}
    tensors["vision_tower.blocks.0.wqkv.weight"] = torch.ones(96, 32, dtype=torch.bfloat16)
    text = read_config(converted)
    config = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    text["quantization_config"]["ignore"].append("re:.*vision_tower.*")
    source = write_checkpoint(tmp_path / "k25", tensors, config, "model-{}-of-{}.safetensors")
    assert "int4 pack-quantized, group 32" in kizami("inspect", source).out
    assert kizami("verify", source).code == 0
    out = convert(source, "--scheme", "bf16")
    made = load_tensors(out)
    assert torch.equal(made[f"language_model.{EXPERT}.weight"], unpacked(load_tensors(converted), EXPERT))
    assert torch.equal(made["vision_tower.blocks.0.wqkv.weight"], tensors["vision_tower.blocks.0.wqkv.weight"])
    assert quantization_configs(json.loads((out / "config.json").read_text())) == ()


def test_a_zero_scale_is_decoded_but_not_copied(foreign: Path, convert: Convert, kizami: Run, tmp_path: Path) -> None:
    info = Checkpoint.open(foreign).tensors[f"{EXPERT}.weight_scale"]
    data = bytearray((foreign / info.file).read_bytes())
    data[info.begin + 2 : info.begin + 4] = b"\x00\x80"  # -0.0, of the second group
    (foreign / info.file).write_bytes(data)
    refused = kizami("convert", foreign, tmp_path / "no", "--format", "gptq")
    assert refused.code == 2
    assert "weight_scale: scale of group 1 of row 0 is zero (1 in all)" in refused.err
    made = load_tensors(convert(foreign, "--scheme", "bf16"))[f"{EXPERT}.weight"]
    assert not made[0, 32:64].any()
    assert torch.equal(made[1:], unpacked(load_tensors(foreign), EXPERT)[1:])


# ---------------------------------------------------------------------------------------------------- verify


def test_an_int4_checkpoint_of_others_is_verified_as_far_as_it_can_be(foreign: Path, kizami: Run) -> None:
    done = kizami("verify", foreign)
    assert done.code == 0
    assert "there is no kizami.json" in done.out + done.err


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("rules", "the config's rules say none"),
        ("zero scale", "is zero"),
        ("shape", "holds [1, "),
        ("lost", "no scale"),
    ],
)
def test_what_is_wrong_with_an_int4_checkpoint_of_others_is_found(
    foreign: Path, kizami: Run, damage: str, words: str
) -> None:
    checkpoint = Checkpoint.open(foreign)
    if damage == "rules":
        config = json.loads((foreign / "config.json").read_text())
        config["quantization_config"]["ignore"].append(EXPERT)
        make_cases.put_json(foreign / "config.json", config)
    elif damage == "lost":
        index = json.loads((foreign / "model.safetensors.index.json").read_text())
        info = checkpoint.tensors[f"{EXPERT}.weight_scale"]
        data = bytearray((foreign / info.file).read_bytes())
        at = data.index(f"{EXPERT}.weight_scale".encode())
        data[at : at + len(info.name)] = f"{EXPERT}.weight_other".encode()
        (foreign / info.file).write_bytes(data)
        index["weight_map"] = {
            k.replace(info.name, f"{EXPERT}.weight_other"): v for k, v in index["weight_map"].items()
        }
        make_cases.put_json(foreign / "model.safetensors.index.json", index)
    else:
        info = checkpoint.tensors[f"{EXPERT}.weight_{'scale' if damage == 'zero scale' else 'shape'}"]
        data = bytearray((foreign / info.file).read_bytes())
        data[info.begin : info.begin + 4] = b"\x00\x00\x00\x00" if damage == "zero scale" else b"\x01\x00\x00\x00"
        (foreign / info.file).write_bytes(data)
    done = kizami("verify", foreign)
    assert done.code == 1
    assert words in done.out + done.err
    assert EXPERT in done.out + done.err


def test_a_folder_of_fp8_weights_is_no_output(tiny_checkpoint: Path, kizami: Run) -> None:
    assert "kizami.json: not found" in kizami("verify", tiny_checkpoint).err


@pytest.mark.parametrize(
    ("format", "leaf", "code"),
    [
        ("gptq", "qzeros", "qzeros are not 8"),
        ("gptq_v2", "g_idx", "g_idx is not"),
        ("awq", "qzeros", "qzeros are not 8"),
        ("awq", "qweight", "a code is not the nearest"),
        ("gptq", "scales", "a code is not the nearest"),
        ("w4afp8", "weight_scale_inv", "a scale is none that BF16 can hold"),  # a bit too low to move a code
    ],
)
def test_a_forged_tensor_of_another_layout_is_found_by_the_source(
    tiny_checkpoint: Path, convert: Convert, kizami: Run, format: str, leaf: str, code: str
) -> None:
    rest = ("--rest", "fp8") if format == "w4afp8" else ()
    out = convert(tiny_checkpoint, "--format", format, *rest)
    info = Checkpoint.open(out).tensors[f"{EXPERT}.{leaf}"]

    def change(data: bytearray) -> None:
        data[info.begin + (0 if format == "w4afp8" else 1)] ^= 0x11

    forge(out, info.file, change)
    done = kizami("verify", out, "--against", tiny_checkpoint)
    assert done.code == 1
    assert f"{EXPERT}: " in done.err
    assert code in done.err
    if code.startswith(leaf):  # what must be the same in every output needs no source
        assert code in kizami("verify", out).err


@pytest.mark.parametrize(
    ("options", "leaf", "words"),
    [
        (("--scheme", "bf16"), "weight", "is not bf16(q * scale)"),
        (("--scheme", "fp8-block"), "weight", ", expected 0x"),
        (("--scheme", "fp8-block"), "weight_scale", "expected max|W| / 448"),
        (("--format", "gptq"), "qweight", "is not the source's"),
        (("--format", "gptq"), "scales", "is not the source's"),
    ],
)
def test_a_forged_tensor_made_of_int4_is_found_by_the_source(
    converted: Path, convert: Convert, kizami: Run, options: tuple[str, ...], leaf: str, words: str
) -> None:
    out = convert(converted, *options)
    info = Checkpoint.open(out).tensors[f"{EXPERT}.{leaf}"]

    def change(data: bytearray) -> None:
        data[info.begin + 1] ^= 0x01

    forge(out, info.file, change)
    done = kizami("verify", out, "--against", converted)
    assert done.code == 1
    assert f"{EXPERT}: " in done.err
    assert words in done.err


def test_a_missing_tensor_of_another_layout_is_found_without_the_source(
    tiny_checkpoint: Path, convert: Convert, kizami: Run
) -> None:
    out = convert(tiny_checkpoint, "--format", "gptq")
    forge_tensors(out, [f"{EXPERT}.qzeros"])
    done = kizami("verify", out)
    assert done.code == 1
    assert f"{EXPERT}: is INT4, but has no qzeros" in done.err


@pytest.mark.parametrize("method", ["minmax", "signed", "search"])
def test_scales_too_small_for_f16_are_raised_to_one_that_it_holds(save: Save, convert: Convert, method: str) -> None:
    checkpoint = make_cases.mini(128, 128, scale=np.float32(2.0**-30))
    out = convert(save(checkpoint), "--format", "gptq", "--method", method)
    scales = load_tensors(out)[f"{EXPERT}.scales"].float().abs()
    assert float(scales.min()) == 2.0**-17


def test_w4afp8_keeps_fp8_linears_and_their_scales_under_sglangs_name(tiny_checkpoint: Path, convert: Convert) -> None:
    out = convert(tiny_checkpoint, "--format", "w4afp8", "--rest", "fp8")
    made = load_tensors(out)
    assert made["model.layers.1.self_attn.o_proj.weight_scale_inv"].dtype == torch.float32
    assert made[f"{EXPERT}.weight"].dtype == torch.int8
    assert made[f"{EXPERT}.weight_scale_inv"].shape[1] == made[f"{EXPERT}.weight"].shape[1] * 2 // 128
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "w4afp8"


def test_a_layout_is_named_in_the_command_of_the_card(tiny_checkpoint: Path, convert: Convert) -> None:
    out = convert(tiny_checkpoint, "--format", "awq", "--set", "attention=bf16")
    card = (out / "README.md").read_text()
    assert "kizami convert SRC OUT --format awq --set attention=bf16" in card
    assert "- awq" in card.split("---")[1]


# ---------------------------------------------------------------------------------------------------- fused experts


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_experts_in_one_tensor_per_layer_give_the_bytes_of_experts_one_by_one(
    tmp_path: Path, convert: Convert, kizami: Run, dtype: str
) -> None:
    """transformers 5's layout in memory, saved to disk: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    single, fused = make_cases.tiny(), make_cases.tiny()
    if dtype == "bf16":
        for checkpoint in (single, fused):
            for module in make_cases.PACKED:
                shard = checkpoint.find(f"{module}.weight")
                shard[f"{module}.weight"] = make_cases.bf(checkpoint.dense(module))
                del checkpoint.find(f"{module}.weight_scale_inv")[f"{module}.weight_scale_inv"]
    for layer in (1, 2):
        experts = f"model.layers.{layer}.mlp.experts"
        count = len([m for m in make_cases.PACKED if m.startswith(f"{experts}.")]) // 3
        for leaf in ("weight", "weight_scale_inv") if dtype == "fp8" else ("weight",):
            parts = {
                part: [
                    fused.find(name).pop(name) for e in range(count) if (name := f"{experts}.{e}.{part}_proj.{leaf}")
                ]
                for part in ("gate", "up", "down")
            }
            for name, order in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
                members = [parts[part][e] for e in range(count) for part in order]
                rows, cols = members[0].shape
                data = b"".join(member.data for member in members)
                whole = make_cases.Tensor(members[0].dtype, (count, rows * len(order), cols), data)
                suffix = "" if leaf == "weight" else "_scale_inv"
                fused.shards[make_cases.shard_name(layer + 1, 3)][f"{experts}.{name}{suffix}"] = whole
    fused.config["moe_intermediate_size"] = single.config["moe_intermediate_size"] = members[0].shape[1] * (
        128 if dtype == "fp8" else 1
    )
    expected = load_tensors(convert(single.save(tmp_path / "single")))
    source = fused.save(tmp_path / "fused")
    assert kizami("inspect", source).out.splitlines()[-1] == "convertible: yes"
    found = load_tensors(convert(source))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# ---------------------------------------------------------------------------------------------------- engines


def test_what_no_engine_would_load_is_refused_unless_told(demo_checkpoint: Path, kizami: Run, tmp_path: Path) -> None:
    """The indexer's matrix in INT4 loads in neither SGLang nor vLLM, experts in FP8 blocks not in transformers."""
    forms = ("--set", "routed_expert=fp8", "--set", "attention=int4", "--set", "indexer=int4")
    asked = ("convert", demo_checkpoint, tmp_path / "out", "--dry-run", *forms)
    refused = kizami(*asked)
    assert refused.code == 2
    assert "no engine would load the output: sglang: " in refused.err
    assert kizami(*asked, "--allow-unloadable").code == 0


def test_who_names_modules_is_warned_about_what_no_engine_loads(
    demo_checkpoint: Path, kizami: Run, tmp_path: Path
) -> None:
    words = ("convert", demo_checkpoint, tmp_path / "out", "--ignore", r"re:.*\.experts\.1\..*")
    done = kizami(*words, "--dry-run")
    assert done.code == 0
    assert "kizami: warning: no engine would load the output: " in done.err
    for mode in ("--dry-run", "--quiet"):
        told = kizami(*words, mode, "--json").json["warnings"]
        assert [text for text in told if text.startswith("no engine would load the output: sglang: ")]
    missed = kizami(*words[:2], tmp_path / "other", *words[3:], "--max-rel-error", "0.001", "--json")
    assert missed.code == 1
    assert [text for text in missed.json["warnings"] if text.startswith("no engine would load the output: sglang: ")]
    refused = kizami(*words, "--executor", "ray", "--ray-address", "127.0.0.1:1", "--json")
    assert (refused.code, refused.json["schema"]) == (2, "kizami.error/1")
    assert [text for text in refused.json["warnings"] if text.startswith("no engine would load the output: sglang: ")]


def test_a_part_of_a_checkpoint_is_converted_and_said_to_load_nowhere(
    demo_checkpoint: Path, kizami: Run, tmp_path: Path
) -> None:
    """No engine would load that file of the source either, so it is not refused."""
    file = sorted(demo_checkpoint.glob("*.safetensors"))[0]
    done = kizami("convert", file, tmp_path / "out")
    assert done.code == 0
    assert done.err.splitlines()[-1].startswith("no engine would load the output: sglang: ")
    told = kizami("convert", file, tmp_path / "json", "--json").json["warnings"]
    assert told[-1].startswith("no engine would load the output: sglang: ")
    assert kizami("check", tmp_path / "out").code == 1


def test_a_size_that_one_serving_engine_takes_is_converted_with_a_warning_of_the_other(
    demo_checkpoint: Path, kizami: Run, tmp_path: Path
) -> None:
    """SGLang computes something else where Marlin's tile does not divide the width."""
    plan = kizami("plan", demo_checkpoint, "--tp", "4", "--json").json["engines"]
    (bad,) = [found for found in plan if not found["loads"] and found["engine"] != "transformers"]
    done = kizami("convert", demo_checkpoint, tmp_path / "out", "--dry-run", "--tp", "4")
    assert done.code == 0
    assert f"kizami: warning: {bad['engine']} at tp 4: {bad['error']}" in " ".join(done.err.split())
    assert "at tp" not in kizami("convert", demo_checkpoint, tmp_path / "out", "--dry-run").err


def test_a_plan_says_what_each_engine_would_do(tiny_checkpoint: Path, demo_checkpoint: Path, kizami: Run) -> None:
    plan = kizami("plan", demo_checkpoint, "--json").json
    assert [found["engine"] for found in plan["engines"]] == ["sglang", "vllm", "transformers"]
    assert all(found["loads"] for found in plan["engines"])
    mixed = kizami("plan", demo_checkpoint, "--set", "attention=int4").out
    assert "sglang: no: " in mixed


def test_a_size_that_no_serving_engine_takes_is_refused(
    tiny_checkpoint: Path, converted: Path, kizami: Run, tmp_path: Path
) -> None:
    done = kizami("convert", tiny_checkpoint, tmp_path / "out", "--tp", "4", "--dry-run")
    assert done.code == 2
    assert "no serving engine loads it at tp 4" in done.err
    told = kizami("convert", tiny_checkpoint, tmp_path / "out", "--tp", "4", "--dry-run", "--allow-unloadable")
    assert told.code == 0
    assert "kizami: warning: no serving engine loads it at tp 4" in told.err
    blocks = kizami("plan", converted, "--scheme", "fp8-block", "--tp", "2")  # an expert whole on each rank
    assert blocks.code == 0


# ---------------------------------------------------------------------------------------------------- words


def test_options_that_contradict_each_other_are_refused(tiny_checkpoint: Path, kizami: Run) -> None:
    done = kizami("plan", tiny_checkpoint, "--scheme", "fp8-block", "--format", "gptq")
    assert done.code == 2
    assert "--int4-format gptq is a layout of INT4, and --scheme fp8-block makes none" in done.err
    moved = kizami("plan", tiny_checkpoint, "--set", "routed_expert=bf16")
    assert "--set routed_expert=bf16 leaves nothing for --scheme w4a16-g32" in moved.err


def test_the_variable_of_another_commands_option_is_told(
    tiny_checkpoint: Path, kizami: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIZAMI_FORMAT", "gptq")
    assert (
        "KIZAMI_FORMAT=gptq is for kizami report; here it is KIZAMI_INT4_FORMAT" in kizami("plan", tiny_checkpoint).err
    )
    monkeypatch.delenv("KIZAMI_FORMAT")
    monkeypatch.setenv("KIZAMI_INT4_FORMAT", "gptq")
    assert "qzeros" not in kizami("plan", tiny_checkpoint).err
    assert kizami("plan", tiny_checkpoint, "--json").json["warnings"]
    monkeypatch.setenv("KIZAMI_INT4_FORMAT", "markdown")
    assert "KIZAMI_INT4_FORMAT" in kizami("plan", tiny_checkpoint).err


def test_a_written_recipe_says_what_it_leaves_out_and_reads_back_in_silence(
    tiny_checkpoint: Path, kizami: Run, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    mixed = kizami("plan", tiny_checkpoint, "--rest", "fp8", "--write-recipe", recipe)
    assert "recipe.yaml: 24 FP8 modules" in mixed.err
    again = kizami("plan", tiny_checkpoint, "--rest", "fp8", "--recipe", recipe, "--json").json
    assert (
        again["output"]["bytes"] == kizami("plan", tiny_checkpoint, "--rest", "fp8", "--json").json["output"]["bytes"]
    )
    assert not [line for line in again["warnings"] if "matches no module" in line]


def test_rest_fp8_without_fp8_is_told(converted: Path, kizami: Run) -> None:
    done = kizami("plan", converted, "--scheme", "bf16", "--rest", "fp8")
    assert "--rest fp8 keeps nothing" in done.err


@pytest.mark.parametrize(
    ("options", "words", "never"),
    [
        ((), ("INT4 (w4a16-g32)", "BF16 scales, pack-quantized layout", "base_model"), ("FP8 modules",)),
        (("--rest", "fp8"), ("INT4 (w4a16-g32) + FP8", "FP8 modules", "FP8 codes and scales of the source"), ()),
        (("--format", "gptq"), ("F16 scales, gptq layout", "--dtype float16", "- gptq"), ("BF16 scales",)),
        (("--scheme", "bf16"), ("BF16", "No weight was rounded"), ("INT4 modules", "- int4", "relation: quantized")),
        (("--scheme", "bf16", "--set", "shared_expert=fp8"), ("BF16 + FP8",), ()),
        (("--mtp", "drop"), ("left out: no speculative decoding",), ()),
        (("--format", "w4afp8", "--rest", "fp8"), ("F32 scales", "scale 1.0", "no: quant_method"), ("vllm serve",)),
    ],
)
def test_a_card_is_true_of_its_output(
    tiny_checkpoint: Path, convert: Convert, options: tuple[str, ...], words: tuple[str, ...], never: tuple[str, ...]
) -> None:
    card = (convert(tiny_checkpoint, *options) / "README.md").read_text()
    assert [word for word in words if word not in card] == []
    assert [word for word in never if word in card] == []


def test_a_card_says_that_the_source_was_int4(converted: Path, convert: Convert) -> None:
    card = (convert(converted, "--scheme", "fp8-block") / "README.md").read_text()
    assert "The source is INT4 (groups of 32): nothing here can be more exact than that." in card
    assert "transformers does" not in card
    assert "| transformers 5.24.0 | no: experts are FP8 in blocks" in card

"""Neighbours of cases 10 to 30 and 46 to 48: names, fused sets, the MTP layer, the config's rules, cuts into files."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_cases
import numpy as np
import pytest
from case_runner import assert_converted, assert_mentions, assert_refused, kizami
from make_cases import PACKED, Checkpoint, Tensor, bf, f8, fp8_pair, normal, rng, shard_name, tiny, v4_name
from output_oracle import form_by_config, parse_json

from kizami.quantize import layout

pytestmark = pytest.mark.long  # each of them converts

Save = Callable[[Checkpoint], Path]
LAYER = "model.layers.1."
MIDDLE = shard_name(2, 3)


def dense(checkpoint: Checkpoint, module: str) -> None:
    """The FP8 module as BF16."""
    del checkpoint.find(module + ".weight_scale_inv")[module + ".weight_scale_inv"]
    rows, cols = checkpoint.tensors()[module + ".weight"].shape
    checkpoint.set(module + ".weight", bf(rng(module).standard_normal((rows, cols))))


# ---------------------------------------------------------------- names


STYLES: dict[str, Callable[[str], str]] = {
    "no model.": lambda n: n.removeprefix("model."),
    "language_model.": lambda n: "language_model." + n,
    "model.language_model.": lambda n: n.replace("model.", "model.language_model.", 1),
    "model.decoder.": lambda n: n.replace("model.layers", "model.decoder.layers"),
    "block_sparse_moe": lambda n: n.replace(".mlp.", ".block_sparse_moe."),
    "w1, w3, w2": lambda n: n.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2"),
    "mtp.0": v4_name,
    "two stacks": lambda n: n.replace("model.layers.0", "dec.layers.1").replace("model.layers", "enc.layers"),
    "a regex": lambda n: "re:" + n,
}


@pytest.mark.parametrize("mtp", ["quantize", *(pytest.param(m, marks=pytest.mark.long) for m in ("keep", "drop"))])
@pytest.mark.parametrize("rest", ["bf16", "fp8"])
@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
def test_every_style_of_names_gives_the_same_experts_and_rules_that_fit(
    save: Save, tmp_path: Path, style: Callable[[str], str], rest: str, mtp: str
) -> None:
    checkpoint = tiny()
    last = {n for n in checkpoint.tensors() if n.startswith("model.layers.2.")}
    checkpoint.rename(style)
    source, out = save(checkpoint), tmp_path / "out"
    dropped = {style(n) for n in last} if mtp == "drop" else set()
    said = kizami("convert", source, out, "--rest", rest, "--mtp", mtp)
    folder = assert_converted(said, source, out, dropped)
    experts = [m for m in PACKED if mtp == "quantize" or "layers.2." not in m]
    assert sorted(folder.packed) == sorted(style(m + ".x").removesuffix(".x") for m in experts)
    assert folder.config["num_nextn_predict_layers"] == (0 if mtp == "drop" else 1)
    targets = [len(group["targets"]) for group in folder.quantization["config_groups"].values()]
    assert max(targets) < 4, "patterns, not a list of all modules"


ODD = [
    "model.layers.0.down_proj", "model.layers.1.foo.²", "model.layers.1.foo.².bar", "model.layers.1.x.٣.down_proj",
    "re:.*", "Linear", "Embedding", "model..", "", "a b", "model.layers.1.(|[", "model.layers.1.mlp.gate.",
    "x.layers.1.mlp.experts_0.up_proj", "lm_head2", "language_model.lm_head", "model.layers.999999999999.o",
]  # fmt: skip


@pytest.mark.parametrize("rest", ["bf16", pytest.param("fp8", marks=pytest.mark.long)])
@pytest.mark.parametrize("module", ODD)
def test_a_linear_of_any_name_is_left_alone_and_the_rules_say_so(
    save: Save, tmp_path: Path, module: str, rest: str
) -> None:
    checkpoint = tiny()
    checkpoint.shards[MIDDLE] |= normal(module + ".weight", 128, 256)
    source, out = save(checkpoint), tmp_path / "out"
    folder = assert_converted(kizami("convert", source, out, "--rest", rest), source, out)
    assert sorted(folder.packed) == sorted(PACKED)
    assert form_by_config(folder.quantization, module) == "none"


@pytest.mark.parametrize("module", ["re:.*", "Linear", "a b", "language_model.x", "model.layers.1.(|["])
@pytest.mark.parametrize("rest", ["bf16", "fp8"])
def test_a_linear_of_any_name_can_be_packed(save: Save, tmp_path: Path, module: str, rest: str) -> None:
    checkpoint = tiny()
    checkpoint.shards[MIDDLE] |= fp8_pair(module, 128, 256)
    source, out = save(checkpoint), tmp_path / "out"
    options = ["--targets", "re:.*experts.*", "--targets", f"re:{re.escape(module)}$", "--rest", rest]
    folder = assert_converted(kizami("convert", source, out, *options), source, out)
    assert module in folder.packed
    assert len(folder.packed) == 24 + 6 + 1  # `experts` is in `shared_experts`, too


@pytest.mark.parametrize("name", ["model.norm", "model.layers.0.mlp.down_proj", "model.layers.2.mlp.experts.0.up_proj"])
@pytest.mark.parametrize("shape", [(4, 4), (4,), ()])
def test_a_tensor_with_the_name_of_a_module_is_another_tensor(
    save: Save, tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    checkpoint = tiny()
    checkpoint.shards[MIDDLE][name] = bf(np.zeros(shape))
    source, out = save(checkpoint), tmp_path / "out"
    folder = assert_converted(kizami("convert", source, out), source, out)
    assert folder.shape(name) == shape


# ---------------------------------------------------------------- what engines fuse


@pytest.mark.parametrize(
    ("members", "pattern"),
    [
        (("q_proj", "k_proj", "v_proj"), r"re:.*(q|k)_proj$"),
        (("q_proj", "k_proj", "v_proj"), r"re:.*v_proj$"),
        (("gate_proj", "up_proj"), r"re:.*vision.*gate_proj$"),
        (("w1", "w3"), r"re:.*w3$"),
    ],
)
def test_no_target_splits_what_engines_fuse(save: Save, tmp_path: Path, members: tuple[str, ...], pattern: str) -> None:
    checkpoint = tiny()
    for member in members:
        checkpoint.shards[MIDDLE] |= normal(f"vision.layers.0.self_attn.{member}.weight", 64, 64)
    source, out = save(checkpoint), tmp_path / "out"
    said = kizami("convert", source, out, "--targets", pattern, "--targets", r"re:.*experts.*")
    assert_refused(said, ["vision.layers.0.self_attn", "packed", "left unpacked", *members])
    assert not out.exists()


def test_a_fused_set_of_two_source_dtypes_is_one_scheme_in_bf16_and_two_in_fp8(save: Save, tmp_path: Path) -> None:
    checkpoint = tiny()
    for module in (LAYER + "mlp.shared_experts.up_proj", "model.layers.0.mlp.gate_proj"):
        dense(checkpoint, module)
    source = save(checkpoint)
    assert_converted(kizami("convert", source, tmp_path / "bf16"), source, tmp_path / "bf16")
    said = kizami("convert", source, tmp_path / "fp8", "--rest", "fp8")
    assert_refused(said, ["gate_proj", "up_proj", "kept in FP8", "left unpacked", "--rest bf16"])
    assert not (tmp_path / "fp8").exists()


@pytest.mark.parametrize("experts", [{0}, {3}, {1, 2}])
def test_experts_of_two_source_dtypes_are_all_packed(save: Save, tmp_path: Path, experts: set[int]) -> None:
    checkpoint = tiny()
    for module in PACKED:
        if int(module.split(".")[5]) in experts:
            dense(checkpoint, module)
    source, out = save(checkpoint), tmp_path / "out"
    folder = assert_converted(kizami("convert", source, out), source, out)
    assert sorted(folder.packed) == sorted(PACKED)


@pytest.mark.parametrize(
    "module",
    [
        "model.embed_tokens", "lm_head", "model.layers.2.shared_head.head", LAYER + "mlp.gate",
        LAYER + "self_attn.embed_tokens", "vision_tower.embed_tokens",
    ],
)  # fmt: skip
def test_what_engines_read_as_plain_weights_is_never_kept_in_fp8(save: Save, tmp_path: Path, module: str) -> None:
    checkpoint = tiny()
    old = checkpoint.tensors().get(module + ".weight")
    rows, cols = old.shape if old else (64, 64)
    (checkpoint.find(module + ".weight") if old else checkpoint.shards[MIDDLE]).update(fp8_pair(module, rows, cols))
    source, out = save(checkpoint), tmp_path / "out"
    folder = assert_converted(kizami("convert", source, out, "--rest", "fp8"), source, out)
    assert folder.dtype(module + ".weight") == "BF16"
    assert folder.dtype(LAYER + "self_attn.o_proj.weight") == "F8_E4M3"


# ---------------------------------------------------------------- what was asked for


def test_each_pattern_that_matches_nothing_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    words = ["--targets", r"re:.*\.experts\.\d+\..*", "--targets", "re:.*exprets.*", "--ignore", "re:.*nowhere$"]
    said = kizami("plan", tiny_checkpoint, *words)
    assert said.code == 0
    assert_mentions(said.stderr, ["--targets re:.*exprets.* matches no module", "--ignore re:.*nowhere$ matches no"])
    assert r"experts\.\d+\..* matches no" not in said.stderr


def test_experts_that_are_no_linears_are_named_beside_those_that_are(save: Save, tmp_path: Path) -> None:
    """3-D, or a bare parameter: what is copied in silence would be an unquantized half of the model."""
    checkpoint = tiny()
    checkpoint.shards[MIDDLE] |= normal("model.layers.0.mlp.experts.gate_up_proj", 2, 8, 64)
    checkpoint.shards[MIDDLE] |= normal(LAYER + "mlp.experts.4.w1", 128, 256)
    source, out = save(checkpoint), tmp_path / "out"
    said = kizami("convert", source, out)
    assert_converted(said, source, out)
    assert_mentions(said.stderr, ["model.layers.0.mlp.experts.gate_up_proj", "3-D", LAYER + "mlp.experts.4.w1"])


@pytest.mark.parametrize("key", ["n_routed_experts", "num_experts", "num_local_experts", "moe_intermediate_size"])
@pytest.mark.parametrize("value", [None, -1, 0, 10**6, "4", [4], {"a": 1}])
def test_no_number_of_the_config_decides_what_is_an_expert(save: Save, tmp_path: Path, key: str, value: Any) -> None:
    checkpoint = tiny()
    checkpoint.config[key] = value
    plan = tmp_path / "plan.json"
    assert kizami("plan", save(checkpoint), "-o", plan, "-q").code == 0
    packed = [t["name"] for t in parse_json(plan.read_bytes())["tensors"] if t["action"] == "quantize"]
    assert sorted(packed) == sorted(m + ".weight" for m in PACKED)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("shards", [1, 7])
def test_one_expert_and_one_layer_are_enough(
    save: Save, tmp_path: Path, layers: int, experts: int, shards: int
) -> None:
    checkpoint = tiny()
    tensors = {
        name: tensor
        for name, tensor in checkpoint.tensors().items()
        if (found := re.match(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.", name))
        and 1 <= int(found[1]) <= layers
        and int(found[2]) < experts
    }
    names = list(tensors)
    checkpoint.shards = {f"s-{i}.safetensors": {n: tensors[n] for n in names[i::shards]} for i in range(shards)}
    checkpoint.shards = {file: some for file, some in checkpoint.shards.items() if some}
    source, out = save(checkpoint), tmp_path / "out"
    folder = assert_converted(kizami("convert", source, out, "--max-shard-size", "1"), source, out)
    assert len(folder.packed) == len(folder.files) == 3 * layers * experts


# ---------------------------------------------------------------- cuts into files


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("limit", ["1", "100KB", "300KB"])
def test_empty_tensors_never_have_a_file_of_their_own(save: Save, tmp_path: Path, place: str, limit: str) -> None:
    checkpoint = tiny()
    shard = shard_name({"first": 1, "middle": 2, "last": 3}[place], 3)
    empty = {f"{c}.empty": Tensor("F32", shape, b"") for c, shape in (("!", (0,)), ("m", (3, 0, 2)), ("~", (0, 0)))}
    checkpoint.shards[shard] |= empty
    source, out = save(checkpoint), tmp_path / "out"
    folder = assert_converted(kizami("convert", source, out, "--max-shard-size", limit), source, out)
    assert set(empty) <= set(folder.entries)
    assert all((out / file).stat().st_size > folder.begin[file] for file in folder.files)


def test_more_files_than_their_numbers_have_digits_are_refused(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "MAX_FILES", 8)
    said = kizami("convert", tiny_checkpoint, tmp_path / "out", "--max-shard-size", "100KB")
    assert_refused(said, ["files", "8", "--max-shard-size"])
    assert kizami("plan", tiny_checkpoint, "--max-shard-size", "1MB").code == 0


@pytest.mark.parametrize("pattern", ["model-{}-of-{}.safetensors", "m{:02}.safetensors", "{}.safetensors"])
def test_source_files_are_taken_by_their_numbers(save: Save, tmp_path: Path, pattern: str) -> None:
    """11 files, their numbers without leading zeros; the output is in that order."""
    checkpoint = tiny()
    names = [n for n in checkpoint.tensors() if not n.endswith("_scale_inv")]
    tensors = checkpoint.tensors()
    checkpoint.shards = {}
    for i in range(11):
        part = names[i::11]
        scales = [n + "_scale_inv" for n in part if n + "_scale_inv" in tensors]
        checkpoint.shards[pattern.format(i + 1, 11)] = {n: tensors[n] for n in (*part, *scales)}
    source, out = save(checkpoint), tmp_path / "out"
    folder = assert_converted(kizami("convert", source, out, "--max-shard-size", "1"), source, out)
    order = [
        folder.file_of.get(names[i], folder.file_of.get(names[i].removesuffix("weight") + "weight_packed"))
        for i in range(11)
    ]
    assert order == sorted(order)


def test_the_same_bytes_come_from_any_cut_of_the_source(save: Save, tmp_path: Path) -> None:
    """Wherever a tensor lies, and whether there is an index: the tensors of the output are the same."""
    one = tiny()
    one.shards = {"model.safetensors": one.tensors()}
    one.indexed = False
    many = tiny()
    many.shards = {f"{i}.safetensors": {n: t} for i, (n, t) in enumerate(reversed(many.tensors().items()))}
    folders = []
    for name, checkpoint in (("one", one), ("many", many)):
        source, out = checkpoint.save(tmp_path / name), tmp_path / f"{name}-out"
        folders.append(assert_converted(kizami("convert", source, out, "--rest", "fp8"), source, out))
    assert set(folders[0].entries) == set(folders[1].entries)
    assert all(folders[0].tensor(n) == folders[1].tensor(n) for n in folders[0].entries)


def test_weights_that_are_no_floats_are_refused_as_experts(save: Save, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(make_cases, "SIZES", make_cases.SIZES | {"I64": 8, "F64": 8})
    for dtype, size in (("I32", 4), ("I64", 8), ("F64", 8)):
        checkpoint = tiny()
        module = PACKED[-1]
        dense(checkpoint, module)
        rows, cols = checkpoint.tensors()[module + ".weight"].shape
        checkpoint.set(module + ".weight", Tensor(dtype, (rows, cols), bytes(size * rows * cols)))
        source = checkpoint.save(tmp_path / dtype)
        assert_refused(kizami("plan", source), [dtype, module + ".weight", "--ignore"])


def test_case_14_holds_for_the_last_module_alone(save: Save, tmp_path: Path) -> None:
    checkpoint = tiny()
    module = PACKED[-1]
    checkpoint.find(module + ".weight").update(
        {module + ".weight": f8(make_cases.random_bytes(module, 256, 144))}
        | {module + ".weight_scale_inv": make_cases.f32(np.ones((2, 2)))}
    )
    source, out = save(checkpoint), tmp_path / "out"
    assert_refused(kizami("convert", source, out), [module, "144", "32"])
    assert not out.with_name("out.partial").exists()
    said = kizami("convert", source, out, "--ignore", module)
    folder = assert_converted(said, source, out)
    assert module in said.stderr  # engines take one scheme for all experts of a layer
    assert sorted(folder.packed) == sorted(set(PACKED) - {module})

"""Experts fused into 3-D tensors: split into the published layout by arithmetic on headers, or left alone."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import make_cases
import pytest
from make_cases import Tensor, bf

from kizami.formats import fused_experts
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.fused_experts import split_fused_experts
from kizami.formats.reader import TensorReader
from kizami.formats.tensors import TensorInfo, tensor_nbytes

E, INNER, H = 4, 128, 256
LAYER = "model.layers.1.mlp.experts"
CONFIG = make_cases.tiny_config()
Entries = tuple[str, str, tuple[int, ...]]


def tensors(*entries: Entries) -> dict[str, TensorInfo]:
    found, at = {}, 1000
    for name, dtype, shape in entries:
        nbytes = tensor_nbytes(dtype, shape)
        found[name] = TensorInfo(name, dtype, shape, "a.safetensors", at, at + nbytes)
        at += nbytes
    return found


def fused(layer: str = LAYER, dtype: str = "BF16", e: int = E, i: int = INNER, h: int = H) -> dict[str, TensorInfo]:
    return tensors((f"{layer}.gate_up_proj", dtype, (e, 2 * i, h)), (f"{layer}.down_proj", dtype, (e, h, i)))


def fused_fp8(**changes: tuple[str, tuple[int, ...]] | None) -> dict[str, TensorInfo]:
    parts: dict[str, tuple[str, tuple[int, ...]] | None] = {
        "gate_up_proj": ("F8_E4M3", (E, 2 * INNER, H)),
        "down_proj": ("F8_E4M3", (E, H, INNER)),
        "gate_up_proj_scale_inv": ("F32", (E, 2, 2)),
        "down_proj_scale_inv": ("F32", (E, 2, 1)),
    }
    parts |= changes
    return tensors(*((f"{LAYER}.{leaf}", *of) for leaf, of in parts.items() if of is not None))


def config(**changes: Any) -> dict[str, Any]:
    return CONFIG | changes


# ---------------------------------------------------------------- what is split


def test_each_part_is_a_range_of_the_fused_tensors_bytes() -> None:
    given = tensors(("a.weight", "BF16", (2,))) | fused() | tensors(("z.weight", "BF16", (2,)))
    split, notes = split_fused_experts(CONFIG, given)
    names = [f"{LAYER}.{e}.{p}.weight" for e in range(E) for p in ("gate_proj", "up_proj")]
    names += [f"{LAYER}.{e}.down_proj.weight" for e in range(E)]
    assert list(split) == ["a.weight", *names, "z.weight"]
    gate_up, down = given[f"{LAYER}.gate_up_proj"], given[f"{LAYER}.down_proj"]
    ranges = [(split[name].begin, split[name].end) for name in names]
    assert ranges[0][0] == gate_up.begin
    assert ranges[2 * E - 1][1] == gate_up.end
    assert ranges[2 * E][0] == down.begin
    assert ranges[-1][1] == down.end
    for group in (ranges[: 2 * E], ranges[2 * E :]):
        assert all(a[1] == b[0] for a, b in pairwise(group))
    assert split[f"{LAYER}.2.up_proj.weight"].shape == (INNER, H)
    assert split[f"{LAYER}.2.down_proj.weight"].shape == (H, INNER)
    assert all(split[name].nbytes == tensor_nbytes("BF16", split[name].shape) for name in names)
    assert len(notes) == 1
    assert "1 layers hold all their experts" in notes[0]


def test_a_checkpoint_without_fused_experts_passes_unchanged(tiny_checkpoint: Path) -> None:
    given = Checkpoint.open(tiny_checkpoint).tensors
    assert split_fused_experts(CONFIG, given) == (given, ())


FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def fuse(shard: dict[str, Tensor]) -> None:
    """Puts the experts of every layer together as transformers 5 holds them in memory."""
    parts = {name: shard.pop(name) for name in list(shard) if ".mlp.experts." in name}
    for layer in {name.partition(".experts.")[0] for name in parts}:
        for suffix in ("", "_scale_inv"):
            for leaf, projections in FUSED.items():
                names = [f"{layer}.experts.{e}.{p}.weight{suffix}" for e in range(E) for p in projections]
                if names[0] in parts:
                    rows, cols = parts[names[0]].shape
                    raw = b"".join(parts[name].data for name in names)
                    shape = (E, rows * len(projections), cols)
                    shard[f"{layer}.experts.{leaf}{suffix}"] = Tensor(parts[names[0]].dtype, shape, raw)


def without_fp8(checkpoint: make_cases.Checkpoint) -> None:
    for shard in checkpoint.shards.values():
        for scale in [name for name in shard if name.endswith("_scale_inv")]:
            weight = scale.removesuffix("_scale_inv")
            shard[weight] = bf(checkpoint.dense(weight.removesuffix(".weight")))
        for scale in [name for name in shard if name.endswith("_scale_inv")]:
            del shard[scale]


@pytest.mark.parametrize("dense", [False, True])
def test_the_bytes_of_each_part_are_those_before_the_fusion(save: Callable[..., Path], dense: bool) -> None:
    checkpoint = make_cases.tiny()
    if dense:
        without_fp8(checkpoint)
    before = checkpoint.tensors()
    for shard in checkpoint.shards.values():
        fuse(shard)
    source = Checkpoint.open(save(checkpoint))
    assert not any(".mlp.experts.0." in name for name in source.tensors)
    split, _ = split_fused_experts(source.config, source.tensors)
    assert set(split) == set(before)
    with TensorReader(source) as reader:
        for name, tensor in before.items():
            assert (split[name].dtype, split[name].shape) == (tensor.dtype, tensor.shape)
            assert reader.read(split[name]).tobytes() == tensor.data, name


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa"])
def test_a_saved_state_dict_of_transformers_splits_into_what_save_pretrained_writes(
    family: str, demo_checkpoint: Path, tmp_path: Path
) -> None:
    """Fusion and its reverse are transformers' own here: names, shapes and bytes of every expert."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    torch.manual_seed(1)
    if family == "deepseek_v3":
        made = transformers.DeepseekV3Config(
            hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
            first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
            num_attention_heads=2, num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16,
            qk_rope_head_dim=16, v_head_dim=16, vocab_size=64,
        )  # fmt: skip
    else:
        made = transformers.AutoConfig.from_pretrained(demo_checkpoint)
        del made.quantization_config
    assert made.model_type == family
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "published")
    published = load_file(tmp_path / "published" / "model.safetensors")
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((tmp_path / "published" / "config.json").read_bytes())
    source = Checkpoint.open(tmp_path)
    split, notes = split_fused_experts(source.config, source.tensors)
    assert set(split) == set(published)
    assert "hold all their experts" in notes[0]
    experts = [name for name in split if ".experts." in name]
    assert len(experts) >= 3 * made.n_routed_experts
    with TensorReader(source) as reader:
        for name in experts:
            assert split[name].shape == tuple(published[name].shape)
            assert reader.read(split[name]).tobytes() == published[name].view(torch.uint16).numpy().tobytes(), name


# ---------------------------------------------------------------- what is left alone


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            tensors(
                (f"{LAYER}.gate_up_proj", "BF16", (E, H, 2 * INNER)), (f"{LAYER}.down_proj", "BF16", (E, INNER, H))
            ),
            "down_proj is [4,128,256], expected [4,256,128]",  # Llama 4's layout; gate_up is square here
        ),
        (
            tensors(
                (f"{LAYER}.gate_up_proj", "BF16", (E, 64, 2 * INNER)), (f"{LAYER}.down_proj", "BF16", (E, INNER, 64))
            ),
            "gate_up_proj is [4,64,256], expected [4,256,256]",
        ),
        (fused(e=3), "gate_up_proj is [3,256,256], expected [4,256,256]"),
        (fused(i=64), "gate_up_proj is [4,128,256]"),
        (fused(dtype="I32"), "gate_up_proj is I32"),
        (tensors((f"{LAYER}.gate_up_proj", "BF16", (E, 2 * INNER, H))), "there is no down_proj beside it"),
        (tensors((f"{LAYER}.down_proj", "BF16", (E, H, INNER))), "there is no gate_up_proj beside it"),
        (fused() | tensors((f"{LAYER}.gate_up_proj_bias", "BF16", (E, 2 * INNER))), "there is a gate_up_proj_bias"),
        (
            tensors(
                (f"{LAYER}.gate_up_proj", "BF16", (E, 2 * INNER, H)), (f"{LAYER}.down_proj", "BF16", (E * H, INNER))
            ),
            "down_proj is [1024,128]",
        ),
    ],
)
def test_other_layouts_are_left_with_the_reason(given: dict[str, TensorInfo], words: str) -> None:
    split, notes = split_fused_experts(CONFIG, given)
    assert split == given
    assert len(notes) == 1
    assert words in notes[0]


@pytest.mark.parametrize(("i", "h"), [(128, 256), (128, 128), (64, 64), (96, 192)])
def test_a_transposed_pair_is_never_split_whatever_the_sizes(i: int, h: int) -> None:
    numbers = config(hidden_size=h, moe_intermediate_size=i)
    right = tensors((f"{LAYER}.gate_up_proj", "BF16", (E, 2 * i, h)), (f"{LAYER}.down_proj", "BF16", (E, h, i)))
    wrong = tensors((f"{LAYER}.gate_up_proj", "BF16", (E, h, 2 * i)), (f"{LAYER}.down_proj", "BF16", (E, i, h)))
    assert len(split_fused_experts(numbers, right)[0]) == 3 * E
    assert split_fused_experts(numbers, wrong)[0] == wrong


def test_unknown_model_types_are_left_alone() -> None:
    split, notes = split_fused_experts(config(model_type="gpt_oss"), fused())
    assert split == fused()
    assert "model type" in notes[0]


@pytest.mark.parametrize("key", ["n_routed_experts", "moe_intermediate_size", "hidden_size"])
@pytest.mark.parametrize("value", [None, "4", 0, -1, True, 4.0])
def test_without_the_configs_numbers_nothing_is_split(key: str, value: object) -> None:
    split, notes = split_fused_experts(config(**{key: value}), fused())
    assert split == fused()
    assert "config.json lacks" in notes[0]


def test_the_numbers_may_have_other_names_and_lie_in_text_config() -> None:
    text = {k: v for k, v in CONFIG.items() if k != "n_routed_experts"} | {"num_experts": E}
    split, _ = split_fused_experts({"model_type": "kimi_k25", "text_config": text}, fused("language_model." + LAYER))
    assert len(split) == 3 * E


def test_each_layer_is_judged_by_itself() -> None:
    other = "model.layers.2.mlp.experts"
    split, notes = split_fused_experts(CONFIG, fused() | fused(other, i=64))
    assert f"{LAYER}.0.gate_proj.weight" in split
    assert f"{other}.gate_up_proj" in split
    assert len(notes) == 2


def test_many_reasons_are_counted_not_listed() -> None:
    given: dict[str, TensorInfo] = {}
    for layer in range(40):
        given |= fused(f"model.layers.{layer}.mlp.experts", i=layer + 1)
    _, notes = split_fused_experts(CONFIG, given)
    assert len(notes) == fused_experts._MOST_REASONS + 1
    assert "40 layers in all" in notes[-1]


# ---------------------------------------------------------------- what is refused


def refusal(configuration: dict[str, Any], given: dict[str, TensorInfo]) -> KizamiError:
    with pytest.raises(KizamiError) as e:
        split_fused_experts(configuration, given)
    return e.value


def test_fp8_experts_get_their_own_scales() -> None:
    split, _ = split_fused_experts(CONFIG, fused_fp8())
    assert len(split) == 6 * E
    scale = split[f"{LAYER}.3.up_proj.weight_scale_inv"]
    assert (scale.dtype, scale.shape, scale.nbytes) == ("F32", (1, 2), 8)
    assert scale.end == fused_fp8()[f"{LAYER}.gate_up_proj_scale_inv"].end
    assert split[f"{LAYER}.1.down_proj.weight_scale_inv"].shape == (2, 1)


@pytest.mark.parametrize(
    ("changes", "code", "tensor"),
    [
        ({"gate_up_proj_scale_inv": None}, "missing_scale", "gate_up_proj"),
        ({"down_proj_scale_inv": None}, "missing_scale", "down_proj"),
        ({"gate_up_proj_scale_inv": ("F32", (E, 2, 1))}, "scale_grid", "gate_up_proj_scale_inv"),
        ({"gate_up_proj_scale_inv": ("F32", (E, 1, 1))}, "scale_grid", "gate_up_proj_scale_inv"),
        ({"gate_up_proj_scale_inv": ("F32", (E * 2, 2))}, "scale_grid", "gate_up_proj_scale_inv"),
        ({"gate_up_proj_scale_inv": ("F32", ())}, "scale_grid", "gate_up_proj_scale_inv"),
        ({"down_proj_scale_inv": ("F32", (E, 1, 2))}, "scale_grid", "down_proj_scale_inv"),
        ({"down_proj": ("BF16", (E, H, INNER))}, "orphan_scale", "down_proj_scale_inv"),
    ],
)
def test_scales_that_do_not_fit_are_refused(changes: dict[str, Any], code: str, tensor: str) -> None:
    error = refusal(CONFIG, fused_fp8(**changes))
    assert (error.code, error.tensor) == (code, f"{LAYER}.{tensor}")


def test_a_block_across_the_edge_of_gate_and_up_is_refused() -> None:
    """192 rows of gate_proj: the second row of blocks has 64 of them, and 64 of up_proj."""
    given = fused_fp8(
        gate_up_proj=("F8_E4M3", (E, 384, H)), down_proj=("F8_E4M3", (E, H, 192)),
        gate_up_proj_scale_inv=("F32", (E, 3, 2)), down_proj_scale_inv=("F32", (E, 2, 2)),
    )  # fmt: skip
    error = refusal(config(moe_intermediate_size=192), given)
    assert (error.code, error.tensor) == ("unsupported_shape", f"{LAYER}.gate_up_proj_scale_inv")
    assert "at row 192" in error.message


def test_fp8_without_a_block_size_is_refused() -> None:
    assert refusal(config(quantization_config=None), fused_fp8()).code == "missing_block_size"


@pytest.mark.parametrize("leaf", ["0.gate_proj.weight", "3.up_proj.weight", "2.down_proj.weight"])
@pytest.mark.parametrize("first", [True, False])
def test_a_part_that_is_there_as_well_is_refused(leaf: str, first: bool) -> None:
    other = tensors((f"{LAYER}.{leaf}", "BF16", (2, 2)))
    error = refusal(CONFIG, other | fused() if first else fused() | other)
    assert (error.code, error.tensor) == ("duplicate_tensor", f"{LAYER}.{leaf}")


@pytest.mark.parametrize("experts", [200_000, 10**9, 2**40])
def test_more_parts_than_a_checkpoint_may_have_are_refused_before_they_are_made(experts: int) -> None:
    numbers = config(n_routed_experts=experts, hidden_size=2, moe_intermediate_size=1)
    given = tensors((f"{LAYER}.gate_up_proj", "BF16", (experts, 2, 2)), (f"{LAYER}.down_proj", "BF16", (experts, 2, 1)))
    assert refusal(numbers, given).code == "too_large"


def test_long_names_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_experts, "MAX_ALL_HEADER_BYTES", 20_000)
    assert split_fused_experts(CONFIG, fused())[1]
    assert refusal(CONFIG, fused("x" * 2000 + ".experts")).code == "too_large"

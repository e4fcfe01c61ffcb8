"""FP8 in the KV cache, simulated in the streamed forward pass: against a whole model with hooks, and its own rules."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

import kv_accuracy_oracle as oracle
import numpy as np
import torch
from calibration_runs import random_tokens
from client_fixtures import convert, load_tensors, read_config, write_checkpoint
from client_models import fp8_model
from test_calibration_forward import shared_indexers

from kizami.calibration.forward.settings import Settings
from kizami.calibration.kv_accuracy import logits as logits_module
from kizami.calibration.kv_accuracy.logits import Head, Outputs, compare_logits
from kizami.calibration.kv_accuracy.measures import Bucket, buckets_of, find_channels, rank_layers, skip_list
from kizami.calibration.kv_accuracy.passes import Event, LayerDone
from kizami.calibration.kv_accuracy.rounding import round_e4m3, round_tiles
from kizami.calibration.kv_accuracy.run import KvAccuracy, Options, measure_kv_accuracy
from kizami.calibration.kv_accuracy.variants import Variant
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.kv_scales.neutral import KvScales, LayerScales
from kizami.formats.serving.kv_layout import Layout
from kizami.quantize.kv_cache.layouts import gqa_rows, mla_rows

SAME = Variant("bf16 again", Layout.BF16)
RAW = Variant("fp8", Layout.RAW)
TILED = Variant("fp8_ds_mla", Layout.DS_MLA)
SMALL = Settings(token_chunk=64, query_block=32)  # so that sequences and experts take several
Make = Callable[[str], Path]


def marked_long(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.long)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("sources")

    @cache
    def make(name: str) -> Path:
        if name == "shared":
            return shared_indexers(folder / name)
        if name in BIASED:
            return biased(folder / name, BIASED[name])
        return fp8_model(name, folder / name)

    return make


BIASED = {"biased": 127, "biased and turned": 3}  # channel of K


def biased(out: Path, channel: int) -> Path:
    """A GLM-4.x without norms of Q and K, whose second layer adds 304, half way between two numbers of E4M3, to a
    channel of K. RoPE turns the first 64 of 128."""
    made = fp8_model("glm4_moe", out)
    tensors = {name: t for name, t in load_tensors(made).items() if "q_norm" not in name and "k_norm" not in name}
    tensors["model.layers.1.self_attn.k_proj.bias"][channel] = 304
    return write_checkpoint(out, tensors, read_config(made) | {"use_qk_norm": False}, "again-{}-of-{}.safetensors")


def measure(folder: Path, variants: tuple[Variant, ...], tokens: Any, **more: Any) -> KvAccuracy:
    options = Options(variants, **({"skip": (), "settings": SMALL} | more))
    return measure_kv_accuracy(Checkpoint.open(folder), tokens, options)


def kv_scales(folder: Path, k: tuple[float, ...], v: tuple[float, ...]) -> KvScales:
    config = read_config(folder)
    is_mla = "kv_lora_rank" in config
    layers = tuple(LayerScales(at, k, v, "calibrated") for at in range(config["num_hidden_layers"]))
    kind, heads = ("mla", 0) if is_mla else ("gqa", config["num_key_value_heads"])
    per = "tensor" if len(k) == 1 else "attn_head"
    return KvScales(config["model_type"], config["architectures"][0], kind, heads, per, "0" * 64, None, layers)


def everything(found: KvAccuracy, at: int = 0) -> Bucket:
    tokens = found.measured[at].tokens
    return tokens.bucket(0, tokens.kl.shape[1])


# ------------------------------------------------------------------------------------------------------------ roundings


def hard_rows(width: int) -> torch.Tensor:
    """BF16 rows over all magnitudes, with zeros, a tile of zeros, ties and numbers beyond E4M3."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(512, width, generator=generator) * 2.0 ** torch.randint(-30, 12, (512, 1), generator=generator)
    rows[0], rows[1, :128], rows[2] = 0, 0, 1e-38
    rows[3] = torch.linspace(-500, 500, width)
    rows[4, :2] = torch.tensor([torch.inf, -torch.inf])
    return rows.to(torch.bfloat16)


def test_rows_are_rounded_as_the_paged_cache_rounds_them() -> None:
    rows = hard_rows(576)
    wide = rows.float()
    for scale in (1.0, 0.25, 0.3):
        codec = mla_rows(Layout.RAW, scale=scale)
        found = round_e4m3(wide, torch.tensor(scale))
        assert torch.equal(found, codec.decode(codec.encode(rows)))
    codec = mla_rows(Layout.DS_MLA)
    kept = codec.decode(codec.encode(rows))
    assert torch.equal(round_tiles(wide[:, :512]), kept[:, :512])
    assert torch.equal(wide[:, 512:], kept[:, 512:])
    heads = gqa_rows(Layout.RAW, 3, 64, k_scale=(0.5, 2.0, 0.07), v_scale=1.0)
    k = hard_rows(192)
    found = round_e4m3(k.float().unflatten(1, (3, 64)), torch.tensor([[0.5], [2.0], [0.07]])).flatten(1)
    assert torch.equal(found, heads.decode(heads.encode(torch.cat((k, k), dim=1)))[:, :192])


def test_the_oracle_rounds_every_number_between_two_codes_to_the_nearer() -> None:
    x = torch.linspace(-470, 470, 100_001)
    assert np.array_equal(oracle.e4m3(x.numpy()), round_e4m3(x, torch.tensor(1.0)).numpy())


# ------------------------------------------------------------------------------------------------------- the whole pass


@pytest.mark.parametrize("family", [marked_long("deepseek_v3"), "glm_moe_dsa", "glm4_moe", marked_long("deepseek_v32")])
def test_the_pass_is_that_of_a_whole_model_with_rounded_tensors(
    family: str, sources: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sources(family)
    tokens = random_tokens(source, 2, 64)
    unit = oracle.scaled((1.0,))
    roundings = {RAW: (unit, unit), TILED: (oracle.tiles, oracle.bf16)}
    if family == "glm4_moe":
        scales = kv_scales(source, (0.07,), (0.031,))
        roundings = {RAW: (unit, unit)}
        roundings[replace(RAW, name="scaled", scales=scales)] = (oracle.scaled((0.07,)), oracle.scaled((0.031,)))
    found = measure(source, tuple(roundings), tokens)
    reference = oracle.logits(source, tokens.ids, oracle.bf16, oracle.bf16, monkeypatch)
    expected = oracle.nll(reference, tokens.ids)
    for measured, (first, second) in zip(found.measured, roundings.values(), strict=True):
        other = oracle.logits(source, tokens.ids, first, second, monkeypatch)
        kl, delta = oracle.kl(reference, other), oracle.nll(other, tokens.ids) - expected
        assert kl.mean() > 1e-3
        # a number on the edge between two codes may fall to either side: few tokens, and a little
        assert np.median(np.abs(measured.tokens.kl - kl)) < 1e-6
        assert np.abs(measured.tokens.kl - kl).max() < 2e-3
        assert measured.tokens.kl.mean() == pytest.approx(kl.mean(), rel=2e-3)
        assert np.median(np.abs(measured.tokens.nll[:, :-1] - expected)) < 1e-5
        assert np.median(np.abs(measured.tokens.nll_delta[:, :-1] - delta)) < 1e-5
        same = (reference.argmax(-1) == other.argmax(-1)).numpy()
        assert (measured.tokens.same != same).sum() <= 1


@pytest.mark.long
def test_scales_of_heads_belong_to_their_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fp8_model("glm4_moe", tmp_path / "wide")
    tensors, config = load_tensors(made), read_config(made)
    for name in [name for name in tensors if "k_proj" in name or "v_proj" in name]:
        tensors[name] = torch.cat((tensors[name], tensors[name].flip(0)))
    source = write_checkpoint(made, tensors, config | {"num_key_value_heads": 2}, "again-{}-of-{}.safetensors")
    tokens = random_tokens(source, 1, 48)
    k, v = (0.002, 1.0), (1.0, 0.004)  # clip one head of each
    found = measure(source, (replace(RAW, scales=kv_scales(source, k, v)),), tokens)
    reference = oracle.logits(source, tokens.ids, oracle.bf16, oracle.bf16, monkeypatch)
    other = oracle.logits(source, tokens.ids, oracle.scaled(k), oracle.scaled(v), monkeypatch)
    assert found.measured[0].tokens.kl.mean() == pytest.approx(oracle.kl(reference, other).mean(), rel=2e-3)
    swapped = measure(source, (replace(RAW, scales=kv_scales(source, k[::-1], v[::-1])),), tokens)
    assert swapped.measured[0].tokens.kl.mean() != pytest.approx(oracle.kl(reference, other).mean(), rel=0.02)


@pytest.mark.parametrize("family", ["glm4_moe", marked_long("deepseek_v3")])
def test_the_same_rows_give_the_very_same_logits(family: str, sources: Make) -> None:
    found = measure(sources(family), (SAME, RAW), random_tokens(sources(family), 3, 72))
    same = found.measured[0]
    assert same.tokens.kl.max() == 0.0
    assert same.tokens.same.all()
    assert np.nanmax(np.abs(same.tokens.nll_delta)) == 0.0
    for layer in same.layers:
        assert layer.local.relative() == layer.propagated.relative() == 0.0
        assert all(row.sqnr_db is None and row.rmse == 0 for row in layer.rows.values())
    assert everything(found, 1).kl_mean > 0
    # what stands before the first rounded layer is equal, so its error is local
    first = found.measured[1].layers[0]
    assert first.local.relative() == first.propagated.relative() > 0


def test_all_layers_in_bf16_are_the_reference_and_one_less_is_between(sources: Make) -> None:
    source = sources("glm4_moe")
    tokens = random_tokens(source, 2, 64)
    whole = measure(source, (RAW,), tokens, skip=(1, 0)).measured[0]
    assert whole.skip == (1, 0)
    assert whole.without is not None
    assert whole.without.kl.max() < 1e-8  # a pass of other sizes: products may be summed in another order
    part = measure(source, (RAW,), tokens, skip=(0,)).measured[0]
    assert part.without is not None
    assert 0 < part.without.kl.mean() < part.tokens.kl.mean()


@pytest.mark.parametrize("name", [marked_long("shared"), "deepseek_v32"])
def test_sequences_longer_than_an_indexer_selects_run(name: str, sources: Make) -> None:
    tokens = random_tokens(sources(name), 2, 160)  # index_topk is 64
    found = measure(sources(name), (SAME, RAW, TILED), tokens)
    assert found.measured[0].tokens.kl.max() == 0.0
    raw, tiled = (found.measured[at].layers[-1].rows for at in (1, 2))
    assert raw["k_pe"].sqnr_db == pytest.approx(31.5, abs=0.5)
    assert tiled["k_pe"].sqnr_db is None
    assert everything(found, 1).kl_mean > everything(found, 2).kl_mean > 0


def test_a_channel_that_is_mostly_a_constant_is_found_and_its_layer_is_skipped_first(sources: Make) -> None:
    source = sources("biased")
    found = measure(source, (RAW,), random_tokens(source, 2, 96), skip=None)
    channels = found.channels[1]["k"]
    assert [channel for channel, _, _ in channels.biased] == [127]
    assert channels.biased[0][1] == pytest.approx(304, abs=4)
    assert channels.amax_channel == 127
    assert not found.channels[0]["k"].biased
    measured = found.measured[0]
    assert measured.ranking[0] == 1
    assert measured.skip == (1,)
    assert measured.without is not None
    other = measure(source, (RAW,), random_tokens(source, 2, 96), skip=(0,)).measured[0].without
    assert other is not None
    assert measured.without.kl.mean() < other.kl.mean() < measured.tokens.kl.mean()


@pytest.mark.long
def test_a_constant_that_rope_turns_is_found_in_its_pair(sources: Make) -> None:
    found = measure(sources("biased and turned"), (RAW,), random_tokens(sources("biased and turned"), 2, 96), skip=None)
    assert not found.channels[1]["k"].biased  # its mean over all angles is next to nothing
    assert [pair for pair, _, _ in found.channels[1]["k pairs"].biased] == [3]
    assert found.channels[1]["k pairs"].biased[0][1] == pytest.approx(304, abs=4)
    assert not found.channels[0]["k pairs"].biased
    assert found.measured[0].skip == (1,)


@pytest.mark.parametrize("family", ["glm4_moe", marked_long("deepseek_v3")])
def test_a_scale_that_clips_costs_far_more_than_rounding(family: str, sources: Make) -> None:
    source = sources(family)
    clipping = replace(RAW, name="clips", scales=kv_scales(source, (2.0**-11,), (2.0**-11,)))
    found = measure(source, (RAW, clipping), random_tokens(source, 2, 64))
    assert everything(found, 1).kl_mean > 20 * everything(found, 0).kl_mean
    assert all(row.clipped == 0 for row in found.measured[0].layers[0].rows.values())
    assert all(row.clipped > row.count // 10 for row in found.measured[1].layers[0].rows.values())


@pytest.mark.long
def test_an_int4_checkpoint_is_measured_with_its_own_weights(demo_checkpoint: Path, tmp_path: Path) -> None:
    tokens = random_tokens(demo_checkpoint, 2, 64)
    int4 = convert(demo_checkpoint, tmp_path / "int4", "-q")
    fp8, packed = (measure(folder, (SAME, RAW), tokens) for folder in (demo_checkpoint, int4))
    assert packed.measured[0].tokens.kl.max() == 0.0
    assert everything(packed, 1).kl_mean > 0
    assert everything(packed).nll != everything(fp8).nll


# ------------------------------------------------------------------------------------------------------------ the parts


def test_bands_of_the_vocabulary_change_nothing(sources: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from kizami.calibration.forward.model import Model
    from kizami.calibration.forward.weights import Weights

    monkeypatch.setattr(logits_module, "TOKENS", 7)
    rng = torch.Generator().manual_seed(1)
    x, y = (3 * torch.randn(40, 256, generator=rng) for _ in range(2))
    ids = np.arange(40, dtype=np.int32).reshape(2, 20) * 12
    with torch.inference_mode(), Weights(Checkpoint.open(sources("glm4_moe"))) as weights:
        model = Model(Checkpoint.open(sources("glm4_moe")), weights)
        head = Head(model, weights, torch.device("cpu"), 100)
        (found,) = compare_logits(ids, Outputs(head, lambda a, b: x[a:b]), [Outputs(head, lambda a, b: y[a:b])])
        norm = model.final_norm(torch.float32, torch.device("cpu"))
        ours, other = ((norm(rows) @ weights.read(model.head).T).double().reshape(2, 20, -1) for rows in (x, y))
    assert found.kl == pytest.approx(oracle.kl(ours, other), rel=1e-6)
    assert found.nll[:, :-1] == pytest.approx(oracle.nll(ours, ids), rel=1e-6)
    assert found.nll_delta[:, :-1] == pytest.approx(oracle.nll(other, ids) - oracle.nll(ours, ids), abs=1e-5)
    assert np.isnan(found.nll[:, -1]).all()
    assert np.array_equal(found.same, (ours.argmax(-1) == other.argmax(-1)).numpy())


def test_positions_are_counted_in_their_ranges() -> None:
    assert buckets_of(100) == ((0, 100),)
    assert buckets_of(128) == ((0, 128),)
    assert buckets_of(4096) == ((0, 128), (128, 512), (512, 2048), (2048, 4096))
    assert buckets_of(9000)[-1] == (8192, 9000)


def test_layers_that_stand_out_are_skipped_the_worst_first_and_a_quarter_at_most() -> None:
    errors = [0.01, 0.5, 0.01, 0.02, 0.3, 0.01, 0.01, 0.01]
    calm = [False] * 8
    assert rank_layers(errors, calm) == (1, 4, 3, 0, 2, 5, 6, 7)
    assert skip_list(errors, calm) == (1, 4)
    assert skip_list([0.1] * 8, calm) == ()
    assert skip_list([0.1] * 8, [False, True] + [False] * 6) == (1,)
    assert skip_list([0.0] * 8, [True] * 8) == ()


def test_a_channel_is_biased_only_if_its_mean_is_large_against_its_spread() -> None:
    mean = np.array([0, 60, 60, -51, 49], np.float32)
    std = np.array([1, 7, 8, 1, 0.1], np.float32)
    found = find_channels(np.abs(mean) + std, mean, std)
    assert [channel for channel, _, _ in found.biased] == [1, 3]
    assert found.amax_channel == 2


def test_layouts_and_scales_of_another_model_are_refused(sources: Make) -> None:
    tokens = random_tokens(sources("glm4_moe"), 1, 16)
    with pytest.raises(KizamiError, match="holds a latent in tiles of 128, and this model has K and V by head"):
        measure(sources("glm4_moe"), (TILED,), tokens)
    other = kv_scales(sources("deepseek_v3"), (1.0,), (1.0,))
    with pytest.raises(KizamiError, match="attention is a latent, expected K and V by head"):
        measure(sources("glm4_moe"), (replace(RAW, scales=other),), tokens)
    with pytest.raises(KizamiError, match="layer 7 cannot be skipped: the model has layers 0 to 1"):
        measure(sources("glm4_moe"), (RAW,), tokens, skip=(7,))


def test_scratch_has_no_name_while_the_run_goes_on_and_is_gone_after_it(sources: Make, tmp_path: Path) -> None:
    seen = []

    def look(event: Event) -> None:
        if isinstance(event, LayerDone):
            seen.append(list(tmp_path.iterdir()))

    tokens = random_tokens(sources("glm4_moe"), 1, 16)
    options = Options((RAW,), (1,), tmp_path, SMALL)
    measure_kv_accuracy(Checkpoint.open(sources("glm4_moe")), tokens, options, look)
    assert seen == [[], [], [], []]
    with pytest.raises(KizamiError, match="cannot make a folder for scratch"):
        measure_kv_accuracy(
            Checkpoint.open(sources("glm4_moe")), tokens, replace(options, scratch=tmp_path / "absent"), look
        )


def test_a_damaged_source_is_refused_and_not_measured(sources: Make, tmp_path: Path) -> None:
    """Its hidden states are finite, and their squares are not: the norms behind make zeros of them."""
    made = sources("glm4_moe")
    tensors = load_tensors(made)
    next(t for name, t in tensors.items() if "layers.0.self_attn.o_proj.weight_scale" in name).fill_(1e20)
    damaged = write_checkpoint(tmp_path / "src", tensors, read_config(made))
    with pytest.raises(KizamiError, match="mlp: inputs or products of") as refused:
        measure(damaged, (Variant("fp8", Layout.RAW),), random_tokens(damaged, 2, 32))
    assert refused.value.code == "non_finite"

"""STATS on disk: what is written is read again, and a folder that was changed since is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kizami.formats.errors import KizamiError
from kizami.formats.statistics import MANIFEST, ExpertStatistics, KvRange, LayerStatistics, Statistics
from kizami.formats.statistics_writer import InputsWriter, write_layer, write_manifest
from kizami.formats.tensors import TensorSpec
from kizami.formats.writer import ShardWriter, WrittenShard

EXPERTS, HIDDEN, WIDTH, TOKENS = 4, 64, 32, 10
MODULE = "model.layers.3.self_attn.o_proj"


TOKEN_FACTS = {"sha256": "c", "sequences": 5, "seq_len": 2, "held_out": [0], "sources": [{"name": "a.txt"}]}


def layer_statistics() -> LayerStatistics:
    random = np.random.RandomState(1)
    experts = ExpertStatistics(
        random.rand(EXPERTS, HIDDEN).astype(np.float32),
        random.rand(EXPERTS, WIDTH).astype(np.float32),
        np.array([0.0, 1.0, 2.0, 3.0]),
        np.array([0.0, 1.0, 2.0, 4.5]),
        np.arange(EXPERTS),
        np.array([1, 2, 1, 0]),
    )
    mean, std = 0.1 * random.rand(2, 8).astype(np.float32)
    amax = np.arange(8, dtype=np.float32) / 2 + 0.5
    kv = {"latent": KvRange(amax, mean, std, amax=4.0, rms=1.0, p9999=3.5, first_token_amax=2.0)}
    return LayerStatistics(3, experts, {MODULE: random.rand(16).astype(np.float32)}, kv)


def x_bits() -> np.ndarray:
    return (np.arange(TOKENS * HIDDEN) % 100 + 0x3F00).astype(np.uint16).reshape(TOKENS, HIDDEN)


def write_inputs(folder: Path, **changes: np.ndarray) -> WrittenShard:
    """Token t goes to the experts t % 4 and (t + 1) % 4, the first two are held out."""
    tokens = np.arange(TOKENS)
    ids = changes.get("experts", np.stack([tokens % 4, (tokens + 1) % 4], axis=1).astype(np.int32))
    x = changes.get("x", x_bits())
    with InputsWriter(folder, 3, len(x), x.shape[1], ids.shape[1]) as writer:
        gates = changes.get("gates", (ids + 1).astype(np.float32))
        writer.routing(ids, gates, changes.get("held_out", tokens < 2))
        for run in (x[:4], x[4:]):
            writer.append(run)
        return writer.finish()


def publish(folder: Path, *files: WrittenShard) -> Path:
    source = {"contents": {"a": "b"}, "config": "d"}
    write_manifest(folder, source, TOKEN_FACTS, {"keep": "all"}, {}, [3], {file.file: file for file in files}, [])
    return folder


@pytest.fixture
def stats(tmp_path: Path) -> Path:
    return publish(tmp_path, write_layer(tmp_path, layer_statistics()), write_inputs(tmp_path))


def test_statistics_are_read_as_they_were_written(stats: Path) -> None:
    found, wrote = Statistics.open(stats).layer(3), layer_statistics()
    assert found.experts is not None
    assert wrote.experts is not None
    for name in ("h_x", "h_a", "sum_g2", "sum_g4", "n", "n_held_out"):
        assert np.array_equal(getattr(found.experts, name), getattr(wrote.experts, name)), name
    assert np.array_equal(found.linears[MODULE], wrote.linears[MODULE])
    assert np.array_equal(found.kv["latent"].channel_std, wrote.kv["latent"].channel_std)
    assert (found.kv["latent"].amax, found.kv["latent"].first_token_amax) == (4.0, 2.0)


def test_an_experts_tokens_are_found_with_their_gates_and_rows(stats: Path) -> None:
    with Statistics.open(stats).inputs(3) as inputs:
        tokens, gates = inputs.of_expert(1)
        assert tokens.tolist() == [0, 1, 4, 5, 8, 9]
        assert gates.tolist() == [2.0] * 6
        assert inputs.held_out.nonzero()[0].tolist() == [0, 1]
        rows = inputs.rows(np.array([9, 0]))
        assert np.array_equal(rows.view(np.uint32) >> 16, x_bits()[[9, 0]])


def test_tokens_of_equal_weight_count_one_each(stats: Path) -> None:
    experts = Statistics.open(stats).layer(3).experts
    assert experts is not None
    assert experts.effective_n.tolist() == [0.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("file", ["layer-00003.safetensors", "inputs-00003.safetensors"])
def test_a_changed_byte_is_refused(stats: Path, file: str) -> None:
    data = bytearray((stats / file).read_bytes())
    data[-1] ^= 1
    (stats / file).write_bytes(data)
    with pytest.raises(KizamiError, match=r"SHA-256") as e:
        Statistics.open(stats).layer(3) if file.startswith("layer") else Statistics.open(stats).inputs(3)
    assert (e.value.code, e.value.file) == ("bad_statistics", file)


def test_a_layer_without_kept_inputs_is_named(stats: Path) -> None:
    with pytest.raises(KizamiError, match=r"inputs-00004\.safetensors is not among the files"):
        Statistics.open(stats).inputs(4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema", "kizami.stats/2"), ("source", {}), ("source", {"contents": {"a": 1}}),
        ("settings", {"keep": "some"}), ("layers", [-1]), ("layers", "3"), ("files", {"a": "b"}), ("tokens", None),
        ("files", {"a": {"sha256": "b", "bytes": "c"}}), ("tokens", {}), *(("tokens", TOKEN_FACTS | odd) for odd in (
            {"sha256": None}, {"sequences": 0}, {"seq_len": True}, {"held_out": [5]}, {"held_out": ["0"]},
            {"held_out": [-1]}, {"held_out": [1, 0]}, {"held_out": [0, 0]}, {"sources": [None]},
        )),
    ],
)  # fmt: skip
def test_a_manifest_of_another_form_is_refused(stats: Path, key: str, value: object) -> None:
    manifest = json.loads((stats / MANIFEST).read_text())
    (stats / MANIFEST).write_text(json.dumps(manifest | {key: value}))
    with pytest.raises(KizamiError) as e:
        Statistics.open(stats)
    assert e.value.code == "bad_statistics"


def test_a_forged_layer_file_is_refused(tmp_path: Path) -> None:
    """Its hash is right, its numbers are not."""
    layer = layer_statistics()
    assert layer.experts is not None
    layer.experts.h_x[1, 2] = np.nan
    file = write_layer(tmp_path, layer)
    publish(tmp_path, file)
    with pytest.raises(KizamiError, match=r"experts\.h_x has numbers that are not finite"):
        Statistics.open(tmp_path).layer(3)


def test_a_file_outside_the_folder_is_not_opened(stats: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "layer.safetensors"
    (stats / "layer-00003.safetensors").rename(outside)
    (stats / "layer-00003.safetensors").symlink_to(outside)
    with pytest.raises(KizamiError) as e:
        Statistics.open(stats).layer(3)
    assert e.value.code == "outside_folder"


def test_what_is_no_folder_of_statistics_is_named(tmp_path: Path) -> None:
    with pytest.raises(KizamiError) as e:
        Statistics.open(tmp_path)
    assert (e.value.code, e.value.file) == ("missing_file", MANIFEST)


IDS = np.stack([np.arange(TOKENS) % 4, (np.arange(TOKENS) + 1) % 4], axis=1).astype(np.int32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": IDS + 1}, "from 0 to 3"),
        ({"experts": IDS - 1}, "from 0 to 3"),
        ({"experts": np.zeros_like(IDS), "gates": np.ones((TOKENS, 2), np.float32)}, "different numbers"),
        ({"gates": np.full((TOKENS, 2), -1, np.float32)}, "negative"),
        ({"held_out": np.zeros(TOKENS, bool)}, "held-out"),
        ({"held_out": np.ones(TOKENS, bool)}, "10 of them held out, expected 10 and 2"),
        ({"x": x_bits()[:, :32]}, "32 wide"),
        ({"experts": IDS[:, :0]}, "of 4 experts"),
    ],
)
def test_inputs_that_contradict_their_layer_are_refused(
    tmp_path: Path, changes: dict[str, np.ndarray], words: str
) -> None:
    publish(tmp_path, write_layer(tmp_path, layer_statistics()), write_inputs(tmp_path, **changes))
    with pytest.raises(KizamiError, match=words) as e:
        Statistics.open(tmp_path).inputs(3)
    assert e.value.code == "bad_statistics"


@pytest.mark.parametrize("shape", [(), (TOKENS, 1), (TOKENS, 3)])
def test_held_out_flags_of_another_shape_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    specs = [TensorSpec(*spec) for spec in (("experts", "I32", (TOKENS, 2)), ("gates", "F32", (TOKENS, 2)))]
    specs += [TensorSpec("x", "BF16", (TOKENS, HIDDEN)), TensorSpec("held_out", "U8", shape)]
    with ShardWriter(tmp_path / "inputs-00003.safetensors", specs) as writer:
        for spec in specs:
            writer.append(spec.name, bytes(spec.nbytes))
        inputs = writer.finish()
    publish(tmp_path, write_layer(tmp_path, layer_statistics()), inputs)
    with pytest.raises(KizamiError, match="has shapes"):
        Statistics.open(tmp_path).inputs(3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", np.array([0, 1, 2, 1 << 50])), ("sum_g2", np.zeros(4)), ("sum_g2", np.full(4, 1e-320)),
        ("sum_g4", np.full(4, 5e-324)), ("sum_g4", np.full(4, np.inf)), ("h_x", np.full((4, HIDDEN), -1.0)),
        ("h_x", np.zeros((4, HIDDEN), np.float32)),
    ],
)  # fmt: skip
def test_figures_that_no_tokens_have_are_refused(tmp_path: Path, name: str, value: np.ndarray) -> None:
    wrote = layer_statistics()
    assert wrote.experts is not None
    forged = replace(wrote, experts=replace(wrote.experts, **{name: value}))
    publish(tmp_path, write_layer(tmp_path, forged))
    with pytest.raises(KizamiError) as e:
        Statistics.open(tmp_path).layer(3)
    assert (e.value.code, e.value.file) == ("bad_statistics", "layer-00003.safetensors")


@pytest.mark.parametrize(
    "odd",
    [
        {"amax": 5.0}, {"rms": 4.1}, {"p9999": -1.0}, {"first_token_amax": 9.0},
        {"channel_std": np.full(8, 1e38, np.float32)}, {"channel_mean": np.full(8, 2, np.float32)},
    ],
)  # fmt: skip
def test_ranges_that_contradict_themselves_are_refused(tmp_path: Path, odd: dict[str, Any]) -> None:
    wrote = layer_statistics()
    publish(tmp_path, write_layer(tmp_path, replace(wrote, kv={"latent": replace(wrote.kv["latent"], **odd)})))
    with pytest.raises(KizamiError, match="the range of latent contradict each other") as e:
        Statistics.open(tmp_path).layer(3)
    assert e.value.code == "bad_statistics"

"""STATS on disk: what is written is read again, and a folder that was changed since is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from kizami.formats.errors import KizamiError
from kizami.formats.statistics import MANIFEST, ExpertStatistics, KvRange, LayerStatistics, Statistics
from kizami.formats.statistics_writer import InputsWriter, write_layer, write_manifest

EXPERTS, HIDDEN, WIDTH, TOKENS = 4, 64, 32, 10
MODULE = "model.layers.3.self_attn.o_proj"


def layer_statistics() -> LayerStatistics:
    random = np.random.RandomState(1)
    experts = ExpertStatistics(
        random.rand(EXPERTS, HIDDEN).astype(np.float32),
        random.rand(EXPERTS, WIDTH).astype(np.float32),
        np.array([0.0, 1.0, 2.0, 3.0]),
        np.array([0.0, 0.5, 1.0, 9.0]),
        np.arange(EXPERTS),
        np.arange(EXPERTS)[::-1].copy(),
    )
    channels = random.rand(3, 8).astype(np.float32)
    kv = {"latent": KvRange(*channels, amax=4.0, rms=1.0, p9999=3.5, first_token_amax=2.0)}
    return LayerStatistics(3, experts, {MODULE: random.rand(16).astype(np.float32)}, kv)


def x_bits() -> np.ndarray:
    return (np.arange(TOKENS * HIDDEN) % 100 + 0x3F00).astype(np.uint16).reshape(TOKENS, HIDDEN)


@pytest.fixture
def stats(tmp_path: Path) -> Path:
    """A folder of one layer; token t goes to the experts t % 4 and (t + 1) % 4, every fifth token is held out."""
    layer = write_layer(tmp_path, layer_statistics())
    tokens = np.arange(TOKENS)
    with InputsWriter(tmp_path, 3, TOKENS, HIDDEN, 2) as writer:
        ids = np.stack([tokens % 4, (tokens + 1) % 4], axis=1).astype(np.int32)
        writer.routing(ids, (ids + 1).astype(np.float32), tokens % 5 == 0)
        for run in (x_bits()[:4], x_bits()[4:]):
            writer.append(run)
        inputs = writer.finish()
    files = {layer.file: layer, inputs.file: inputs}
    write_manifest(tmp_path, {"contents": {"a": "b"}}, {"sha256": "c"}, {"keep": "all"}, {}, [3], files, [])
    return tmp_path


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
        assert inputs.held_out.nonzero()[0].tolist() == [0, 5]
        rows = inputs.rows(np.array([9, 0]))
        assert np.array_equal(rows.view(np.uint32) >> 16, x_bits()[[9, 0]])


def test_tokens_of_equal_weight_count_one_each(stats: Path) -> None:
    experts = Statistics.open(stats).layer(3).experts
    assert experts is not None
    assert experts.effective_n.tolist() == [0.0, 2.0, 4.0, 1.0]


def test_the_pooled_statistics_weigh_experts_with_their_tokens(stats: Path) -> None:
    experts = Statistics.open(stats).layer(3).experts
    assert experts is not None
    expected = (experts.h_x * np.array([0, 1, 2, 3])[:, None]).sum(axis=0) / 6
    assert np.allclose(experts.pooled_h_x, expected, rtol=1e-6)


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
    write_manifest(tmp_path, {"contents": {}}, {}, {"keep": "none"}, {}, [3], {file.file: file}, [])
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

"""`kizami kv-scales`: who vouches for a layer's scales, what is written, what is refused, and how it ends."""

import json
import re
from pathlib import Path

import make_cases
import numpy as np
import pytest
from cli_fixtures import Run
from kv_scale_fixtures import LAYERS, ROWS, gqa, uniform_range, with_scale, write_stats
from safetensors.numpy import load_file

from kizami.formats.kv_scales.neutral import KvScales
from kizami.formats.statistics import KvRange

PLAIN = {"k": uniform_range(ROWS, 20.0), "v": uniform_range(ROWS, 2000.0)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """GQA whose weights prove nothing."""
    return gqa(size=40.0).save(tmp_path / "src")


@pytest.fixture
def stats(source: Path, tmp_path: Path) -> Path:
    return write_stats(source, tmp_path / "stats", dict.fromkeys(range(LAYERS), PLAIN))


def test_tensors_and_json_are_told_apart_by_their_names(kizami: Run, source: Path, stats: Path, tmp_path: Path) -> None:
    for name, form in (("kv.safetensors", "json"), ("kv.json", "checkpoint"), ("kv.safetensors", "sglang")):
        more = ["--tp", 1] if form == "sglang" else []
        done = kizami("kv-scales", source, "--stats", stats, "--format", form, *more, "-o", tmp_path / name, "--json")
        assert (done.code, done.json["error"]["code"]) == (2, "bad_file")
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("words", [["report", "OUT"], ["plan", "SRC"], ["kv-scales", "SRC", "--format", "checkpoint"]])
def test_a_file_of_tensors_is_never_replaced(
    kizami: Run, source: Path, converted: Path, tmp_path: Path, words: list[str]
) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"tensors")
    (tmp_path / "link.json").symlink_to(file)
    places: dict[str, object] = {"OUT": converted, "SRC": source}
    command = [places.get(word, word) for word in words]
    for name in ("x.safetensors", "link.json"):
        done = kizami(*command, "-o", tmp_path / name, "--json")
        assert (done.code, done.json["error"]["code"]) == (2, "bad_file")
    assert file.read_bytes() == b"tensors"


# ----------------------------------------------------------------------------------------------------- order of trust


def test_weights_that_prove_unity_come_first(kizami: Run, tmp_path: Path) -> None:
    made = with_scale(gqa(), "model.layers.0.self_attn.k_scale", 0.5).save(tmp_path / "src")
    done = kizami("kv-scales", made)
    assert (done.code, done.err) == (0, "")
    assert re.search(r"^0 +certificate +1 +1 .*the source's k_scale 0.5 gives way to 1$", done.out, re.M)
    assert re.search(r"^1 +certificate +1 +1 ", done.out, re.M)
    assert done.out.splitlines()[-1] == "2 layers: 2 certificate"


def test_measured_ranges_come_second(kizami: Run, source: Path, stats: Path) -> None:
    body = kizami("kv-scales", source, "--stats", stats, "--json").json
    assert body["schema"] == "kizami.kv-scales/1"
    assert [(x["source"], x["k"], x["v"]) for x in body["layers"]] == [("calibrated", [1.0], [32.0])] * 2
    assert body["layers"][0]["headroom"] == pytest.approx(448 * 32 / 2000)  # of V; K has 22x
    assert body["layers"][0]["measured"]["v"]["lo"] == pytest.approx(4 * 2000 / 448)
    assert not body["layers"][0]["bounds"][0]["proves"]
    assert (body["ok"], body["trivial"], body["not_calibrated"]) == (True, False, [])


def test_measured_ranges_off_the_plateau_go_before_a_certificate(kizami: Run, tmp_path: Path) -> None:
    src = gqa(size=1e-3, bias=False).save(tmp_path / "src")
    small = {"k": uniform_range(ROWS, 0.002, 0.0005), "v": uniform_range(ROWS, 0.002, 0.0005)}
    stats = write_stats(src, tmp_path / "stats", dict.fromkeys(range(LAYERS), small))
    assert kizami("kv-scales", src, "--json").json["layers"][0]["source"] == "certificate"
    layer = kizami("kv-scales", src, "--stats", stats, "--json").json["layers"][0]
    assert (layer["source"], layer["k"]) == ("calibrated", [2.0**-7])


def test_scales_of_the_source_come_third_and_unity_is_nobodys_word(kizami: Run, tmp_path: Path) -> None:
    made = gqa(size=40.0)
    with_scale(made, "model.layers.0.self_attn.k_scale", 0.5)
    with_scale(made, "model.layers.0.self_attn.v_scale", 0.25)
    with_scale(made, "model.layers.1.self_attn.k_proj.k_scale", 1.0)
    done = kizami("kv-scales", made.save(tmp_path / "src"))
    assert done.code == 0
    assert re.search(r"^0 +carried over +0.5 +0.25", done.out, re.M)
    assert re.search(r"^1 +not calibrated +1 +1", done.out, re.M)
    assert "layers 1 are not calibrated" in done.err


def test_one_scale_of_the_source_is_taken_for_both(kizami: Run, tmp_path: Path) -> None:
    made = with_scale(gqa(size=40.0), "model.layers.0.self_attn.kv_scale", 0.5).save(tmp_path / "src")
    layer = kizami("kv-scales", made, "--json").json["layers"][0]
    assert (layer["k"], layer["v"], layer["source"]) == ([0.5], [0.5], "carried over")


def test_two_scales_of_one_key_that_differ_are_refused(kizami: Run, tmp_path: Path) -> None:
    made = with_scale(gqa(size=40.0), "model.layers.0.self_attn.k_scale", 0.5)
    with_scale(made, "model.layers.0.self_attn.attn.k_scale", 4.0)
    done = kizami("kv-scales", made.save(tmp_path / "src"))
    assert done.code == 2
    assert "self_attn.k_scale: is 0.5, and model.layers.0.self_attn.attn.k_scale is 4" in done.err


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_a_scale_of_the_source_that_cannot_be_is_named_with_its_tensor(
    kizami: Run, tmp_path: Path, value: float
) -> None:
    made = with_scale(gqa(), "model.layers.1.self_attn.v_scale", value).save(tmp_path / "src")
    done = kizami("kv-scales", made)
    assert done.code == 2
    assert f"model.layers.1.self_attn.v_scale: has a KV scale of {value:g}, expected a positive" in done.err


def test_unity_everywhere_without_a_word_for_it_is_not_calibrated(kizami: Run, source: Path) -> None:
    done = kizami("kv-scales", source)
    assert done.code == 0
    assert done.out.splitlines()[-1] == "2 layers: 2 not calibrated"
    assert "not calibrated: every scale is 1.0, and nothing says that it is right" in done.err


def test_scales_per_head_are_those_of_each_head(kizami: Run, source: Path, tmp_path: Path) -> None:
    amax = np.repeat([20.0, 2000.0], ROWS // 2).astype(np.float32)
    kv = KvRange(amax, np.zeros_like(amax), amax / 4, 2000.0, 353.0, 2000.0, 2000.0)
    stats = write_stats(source, tmp_path / "stats", {layer: {"k": kv, "v": kv} for layer in range(LAYERS)})
    out = tmp_path / "kv.json"
    assert kizami("kv-scales", source, "--stats", stats, "--per-head", "-o", out).code == 0
    scales = KvScales.read(out)
    assert (scales.granularity, scales.kv_heads) == ("attn_head", 2)
    assert scales.layers[0].k == (1.0, 32.0)


# ------------------------------------------------------------------------------------------------------------ findings


def test_channels_of_the_bias_type_are_flagged(kizami: Run, source: Path, tmp_path: Path) -> None:
    mean = np.zeros(ROWS, np.float32)
    mean[5] = 60.0
    std = np.ones_like(mean)
    k = KvRange(np.abs(mean) + 3, mean, std, 63.0, 10.0, 60.0, 63.0)
    stats = write_stats(source, tmp_path / "stats", {0: PLAIN, 1: {"k": k, "v": PLAIN["v"]}})
    done = kizami("kv-scales", source, "--stats", stats)
    assert done.code == 0
    assert "layer 1: k: 1 channels of the bias type (channel 5: mean 60, std 1)" in done.err
    assert "--kv-cache-dtype-skip-layers" in done.err


def test_a_layer_that_was_never_seen_is_not_calibrated(kizami: Run, source: Path, tmp_path: Path) -> None:
    nothing = uniform_range(ROWS, 0.0)
    stats = write_stats(source, tmp_path / "stats", {0: PLAIN, 1: {"k": nothing, "v": PLAIN["v"]}})
    body = kizami("kv-scales", source, "--stats", stats, "--json").json
    assert body["not_calibrated"] == [1]
    assert body["layers"][1]["k"] == [1.0]
    assert "no value but 0 was seen" in body["layers"][1]["findings"][0]["text"]


def test_values_above_their_bound_are_told(kizami: Run, tmp_path: Path) -> None:
    src = gqa().save(tmp_path / "src")
    stats = write_stats(src, tmp_path / "stats", dict.fromkeys(range(LAYERS), PLAIN))
    done = kizami("kv-scales", src, "--stats", stats)
    assert "one of the two is not of this model" in done.err
    assert done.out.splitlines()[-1] == "2 layers: 2 calibrated"


def mla_stats(folder: Path, out: Path, latent: float, k_pe: float) -> Path:
    ranges = {"latent": uniform_range(128, latent), "k_pe": uniform_range(32, k_pe)}
    return write_stats(folder, out, dict.fromkeys(range(5), ranges))


def test_a_latent_that_engines_will_clip_ends_with_1(kizami: Run, demo_checkpoint: Path, tmp_path: Path) -> None:
    fine = kizami("kv-scales", demo_checkpoint, "--stats", mla_stats(demo_checkpoint, tmp_path / "fine", 9.0, 9.0))
    assert fine.code == 0
    stats = mla_stats(demo_checkpoint, tmp_path / "clips", 9.0, 900.0)
    done = kizami("kv-scales", demo_checkpoint, "--stats", stats)
    assert done.code == 1
    assert "kizami: failed: layer 0: k_pe: 900 was measured; engines store at most 448 (scale 1.0)" in done.err
    assert done.out.splitlines()[-1] == "5 layers: 5 calibrated; measured values will be clipped"
    assert kizami("kv-scales", demo_checkpoint, "--stats", stats, "--json").json["ok"] is False


# ------------------------------------------------------------------------------------------------------ what is written


def test_the_neutral_file_is_what_convert_reads(kizami: Run, source: Path, stats: Path, tmp_path: Path) -> None:
    out = tmp_path / "kv.json"
    done = kizami("kv-scales", source, "--stats", stats, "-o", out)
    assert done.code == 0
    assert done.out.splitlines()[-1] == f"2 layers: 2 calibrated; {out} written"
    scales = KvScales.read(out)
    assert (scales.model_type, scales.attention, scales.kv_heads) == ("glm4_moe", "gqa", 2)
    assert [layer.v for layer in scales.layers] == [(32.0,), (32.0,)]
    assert kizami("kv-scales", source, "--stats", stats, "-o", out).code == 0  # replaced whole


def test_tensors_and_their_scheme_go_together(kizami: Run, source: Path, stats: Path, tmp_path: Path) -> None:
    out = tmp_path / "scales" / "kv.safetensors"
    out.parent.mkdir()
    done = kizami("kv-scales", source, "--stats", stats, "--format", "checkpoint", "-o", out)
    assert done.code == 0
    assert '{"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": true, "dynamic": false}' in done.out
    assert load_file(out)["model.layers.1.self_attn.attn.v_scale"].tolist() == [32.0]
    again = kizami("kv-scales", source, "--stats", stats, "--format", "checkpoint", "-o", out)
    assert again.code == 2
    assert "never replaced" in again.err


def test_sglangs_file_has_every_rank_and_no_mtp_layer(kizami: Run, tmp_path: Path) -> None:
    made = gqa(model_type="llama", architecture="LlamaForCausalLM", size=40.0)
    made.shards["model.safetensors"]["model.layers.2.eh_proj.weight"] = make_cases.bf(np.ones((2, 2)))
    src = made.save(tmp_path / "src")
    stats = write_stats(src, tmp_path / "stats", dict.fromkeys(range(LAYERS), PLAIN))
    out = tmp_path / "kv.json"
    done = kizami("kv-scales", src, "--stats", stats, "--format", "sglang", "--tp", 4, "-o", out)
    assert done.code == 0, done.err
    file = json.loads(out.read_text())
    assert file["model_type"] == "llama"
    assert file["kv_cache"]["scaling_factor"] == {str(rank): {"0": 32.0, "1": 32.0} for rank in range(4)}


def test_sglangs_file_is_refused_for_a_class_that_cannot_read_it(kizami: Run, source: Path, tmp_path: Path) -> None:
    done = kizami("kv-scales", source, "--format", "sglang", "--tp", 8, "-o", tmp_path / "kv.json")
    assert done.code == 2
    assert "the class Glm4MoeForCausalLM has no load_kv_cache_scales" in done.err
    assert not (tmp_path / "kv.json").exists()


def test_sglangs_file_needs_the_number_of_ranks(kizami: Run, source: Path) -> None:
    done = kizami("kv-scales", source, "--format", "sglang")
    assert (done.code, "add --tp N" in done.err) == (2, True)
    assert kizami("kv-scales", source, "--tp", 8).code == 2


def test_a_latent_gets_no_tensors(kizami: Run, demo_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "kv.safetensors"
    done = kizami("kv-scales", demo_checkpoint, "--format", "checkpoint", "-o", out)
    assert done.code == 1
    assert "nothing to write: engines store this latent at scale 1.0" in done.err
    assert done.out.splitlines()[-1] == "5 layers: 5 certificate; nothing written"
    assert not out.exists()
    assert kizami("kv-scales", demo_checkpoint, "--format", "checkpoint").code == 0


def test_a_latents_scale_is_written_by_force_only(kizami: Run, demo_checkpoint: Path, tmp_path: Path) -> None:
    stats = mla_stats(demo_checkpoint, tmp_path / "stats", 9.0, 300.0)
    out = tmp_path / "kv.safetensors"
    words = ("kv-scales", demo_checkpoint, "--stats", stats, "--format", "checkpoint", "-o", out)
    done = kizami(*words)
    assert done.code == 1
    assert "layer 0 has a KV scale of 4, and the model caches a latent (DSA)" in done.err
    assert not out.exists()
    assert kizami(*words, "--force").code == 0
    assert load_file(out)["model.layers.0.self_attn.k_proj.k_scale"].tolist() == [4.0]


def test_tensors_without_any_calibration_are_refused(kizami: Run, source: Path, tmp_path: Path) -> None:
    done = kizami("kv-scales", source, "--format", "checkpoint", "-o", tmp_path / "kv.safetensors")
    assert done.code == 1
    assert "no layer is calibrated" in done.err
    assert not (tmp_path / "kv.safetensors").exists()


# ------------------------------------------------------------------------------------------------------ what is refused


def test_statistics_of_another_checkpoint_are_refused(kizami: Run, source: Path, stats: Path, tmp_path: Path) -> None:
    other = gqa(size=39.0).save(tmp_path / "other")
    done = kizami("kv-scales", other, "--stats", stats)
    assert (done.code, "STATS was made from another checkpoint" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ({0: PLAIN}, "STATS lacks layer 1"),
        ({0: PLAIN, 1: {"k": uniform_range(8, 1.0)}}, "8 channels of k; expected 32"),
        ({0: PLAIN, 1: {"latent": uniform_range(8, 1.0)}}, "ranges of latent; expected k, v"),
    ],
)
def test_statistics_that_do_not_fit_are_refused(
    kizami: Run, source: Path, tmp_path: Path, ranges: dict[int, dict[str, KvRange]], words: str
) -> None:
    done = kizami("kv-scales", source, "--stats", write_stats(source, tmp_path / "stats", ranges))
    assert (done.code, words in done.err) == (2, True)


def test_a_latent_has_no_scale_per_head(kizami: Run, demo_checkpoint: Path) -> None:
    done = kizami("kv-scales", demo_checkpoint, "--per-head")
    assert (done.code, "one latent for all heads" in done.err) == (2, True)


@pytest.mark.parametrize(
    "changes", [{"num_key_value_heads": 5000}, {"architectures": ["X" * 300]}, {"model_type": "x" * 300}]
)
def test_configs_beyond_reason_are_refused(kizami: Run, tmp_path: Path, changes: dict[str, object]) -> None:
    made = gqa()
    made.config |= changes
    assert kizami("kv-scales", made.save(tmp_path / "src")).code == 2


def test_nothing_is_written_into_the_checkpoint(kizami: Run, source: Path, stats: Path) -> None:
    assert kizami("kv-scales", source, "--stats", stats, "-o", source / "kv.json").code == 2


# ------------------------------------------------------------------------------------------------ other checkpoints


@pytest.mark.long
def test_what_a_trained_model_really_stores_stays_below_its_bounds(
    kizami: Run, demo_checkpoint: Path, tmp_path: Path
) -> None:
    stats, text = tmp_path / "stats", tmp_path / "a.txt"
    text.write_text("".join(f"The tide of day {i} came in at {i % 24}:{i % 60:02}.\n" for i in range(400)))
    words = ("--samples", 4, "--seq-len", 256, "--threads", 1, "--keep", "none")
    assert kizami("calibrate", demo_checkpoint, "-o", stats, "--data", text, *words).code == 0
    body = kizami("kv-scales", demo_checkpoint, "--stats", stats, "--json").json
    for layer in body["layers"]:
        assert layer["source"] == "certificate"
        for bound in layer["bounds"]:
            seen = layer["measured"][bound["what"]]
            assert 0 < seen["amax"] <= bound["bound"]
            assert bound["plateau"] is None or bound["plateau"] <= seen["rms"]


def test_a_wrapped_model_is_known_by_its_text_config(kizami: Run, tmp_path: Path) -> None:
    made = make_cases.Checkpoint(
        config={"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
                "text_config": make_cases.tiny_config() | {"num_hidden_layers": 1, "model_type": "kimi_k2"}},
        shards={"model.safetensors": {
            f"language_model.{name}": tensor for name, tensor in make_cases.tiny_layer(0).items()
        }}, indexed=False,
    )  # fmt: skip
    body = kizami("kv-scales", made.save(tmp_path / "src"), "--json").json
    assert (body["model_type"], body["attention"], len(body["layers"])) == ("kimi_k2", "mla", 1)
    assert {bound["what"]: bound["bound"] is not None for bound in body["layers"][0]["bounds"]} == {
        "latent": True, "k_pe": True,
    }  # fmt: skip


def test_a_bound_that_proves_the_loss_of_precision_is_no_certificate(kizami: Run, tmp_path: Path) -> None:
    """At scale 1.0 all of K would be 0; the source's scale keeps it."""
    made = gqa(size=1e-5, bias=False)
    for part in ("k", "v"):
        for layer in range(2):
            with_scale(made, f"model.layers.{layer}.self_attn.{part}_scale", 2.0**-12)
    layer = kizami("kv-scales", made.save(tmp_path / "src"), "--json").json["layers"][0]
    assert (layer["source"], layer["k"], layer["v"]) == ("carried over", [2.0**-12], [2.0**-12])
    assert any("loses precision below 0.05" in finding["text"] for finding in layer["findings"])


@pytest.mark.parametrize("command", ["kv-scales", "plan"])
def test_a_file_that_a_run_reads_is_not_replaced_by_it(
    kizami: Run, source: Path, stats: Path, tmp_path: Path, command: str
) -> None:
    file = tmp_path / "kv.json"
    assert kizami("kv-scales", source, "--stats", stats, "-o", file).code == 0
    before = file.read_bytes()
    (tmp_path / "link").symlink_to(file)
    option = {"kv-scales": "--from", "plan": "--kv-scales"}[command]
    for name in ("kv.json", "link"):
        done = kizami(command, source, option, file, "-o", tmp_path / name, "--json")
        assert (done.code, done.json["error"]["code"]) == (2, "bad_file")
    assert file.read_bytes() == before

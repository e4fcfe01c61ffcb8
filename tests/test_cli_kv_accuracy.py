"""`kizami kv-accuracy`: its words, thresholds, the object of --json, and what an interruption leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

from cli_fixtures import Done, Run

from kizami.cli.kv_accuracy import _parse_skip
from kizami.cli.kv_accuracy_text import problems_of
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.kv_scales.neutral import KvScales, LayerScales

SMALL = ("--samples", "2", "--seq-len", "160", "--threads", "1")
Measure = Callable[..., Done]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text("".join(f"The tide of day {i} came in at {i % 24}:{i * 50 % 60:02}.\n" for i in range(90)))
    return path


@pytest.fixture
def run(kizami: Run, demo_checkpoint: Path, text: Path) -> Measure:
    """`kizami kv-accuracy` of the demo on the text, two sequences of 160 tokens."""
    return lambda *words: kizami("kv-accuracy", demo_checkpoint, "--data", text, *SMALL, *words)


def test_json_and_the_file_are_one_object_with_all_measures(run: Measure, tmp_path: Path) -> None:
    body = run("--json", "--skip-layers", "3", "-o", tmp_path / "kv.json").json
    assert body == json.loads((tmp_path / "kv.json").read_text())
    assert body["schema"] == "kizami.kv-accuracy/1"
    assert body["ok"] is True
    assert body["problems"] == []
    assert [variant["name"] for variant in body["variants"]] == ["fp8 at 1.0", "fp8_ds_mla"]
    raw, tiled = body["variants"]
    assert [(at["first"], at["last"], at["tokens"]) for at in raw["positions"]] == [(0, 128, 256), (128, 160, 64)]
    assert raw["all"]["tokens"] == 320
    assert 0 < tiled["all"]["kl_mean"] < raw["all"]["kl_mean"] < 0.1
    assert raw["all"]["kl_mean"] <= raw["all"]["kl_p999"] <= raw["all"]["kl_max"]
    assert 0.9 < raw["all"]["top1"] <= 1
    assert [layer["layer"] for layer in raw["layers"]] == [0, 1, 2, 3, 4]
    assert raw["layers"][0]["local"] == raw["layers"][0]["propagated"] > 0
    assert len(raw["layers"][0]["local_by_position"]) == 2
    assert 31 < raw["layers"][0]["rows"]["latent"]["sqnr_db"] < 32
    assert raw["layers"][0]["rows"]["k_pe"]["numbers"] == 320 * 32
    assert tiled["layers"][0]["rows"]["k_pe"]["sqnr_db"] is None
    assert sorted(raw["ranking"]) == [0, 1, 2, 3, 4]
    assert raw["skip_layers"] == body["skip"] == [3]
    assert raw["with_skip"]["all"]["kl_mean"] != raw["all"]["kl_mean"]
    assert {one["part"] for one in body["channels"]} == {"latent", "k_pe", "k_pe pairs"}
    assert body["needs"]["scratch_bytes"] > 3 * 320 * 256 * 4
    assert any("teacher forcing" in note for note in body["notes"])


@pytest.mark.long
def test_the_summary_has_positions_layers_and_what_skipping_buys(run: Measure) -> None:
    done = run("--layout", "fp8", "--skip-layers", "3,4")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert any(line.startswith("fp8 at 1.0") and " 0-127 " in line for line in lines)
    assert any("fp8 at 1.0, layers 3, 4 in BF16" in line for line in lines)
    assert "2 of 5 layers in BF16 (vLLM: --kv-cache-dtype-skip-layers 3 4): mean KL" in done.out
    assert "fp8_ds_mla" not in done.out
    assert lines[-1].startswith("largest mean KL ")
    assert "(fp8 at 1.0, layers 3, 4 in BF16)" in lines[-1]
    assert done.err.count("layer 0 (1 of 5)") == 2  # two passes


def test_thresholds_end_with_1_and_say_where(run: Measure) -> None:
    done = run("--layout", "fp8", "--skip-layers", "none", "--max-kl", "1e-9", "--min-top1", "0.1")
    assert done.code == 1
    assert "failed: fp8 at 1.0, all positions: mean KL " in done.err
    assert "fp8 at 1.0, 128-159: mean KL" in done.err
    assert "top-1" not in done.err


def test_a_threshold_holds_in_every_range_and_for_the_layers_that_are_skipped() -> None:
    at = {"bad": 0, "kl_mean": 0.1, "top1": 0.9, "tokens": 8, "first": 0, "last": 8}
    late = at | {"kl_mean": 0.5, "top1": 0.5, "first": 8, "last": 16}
    other = {"all": at | {"bad": 2}, "positions": []}
    body = {"variants": [{"name": "fp8", "all": at, "positions": [at, late], "with_skip": other, "judged": True}]}
    assert problems_of(body, 0.2, 0.8, skip=False) == [
        "fp8, 8-15: mean KL 0.5, expected at most 0.2",
        "fp8, 8-15: top-1 agreement 0.5000, expected at least 0.8",
    ]
    assert problems_of(body, None, None, skip=True) == ["fp8, all positions: the logits of 2 positions are not finite"]
    body["variants"][0]["judged"] = False
    assert problems_of(body, 0.2, 0.8, skip=False) == []


@pytest.mark.long
def test_scales_of_a_file_are_a_variant_of_their_own(run: Measure, demo_checkpoint: Path, tmp_path: Path) -> None:
    config = Checkpoint.open(demo_checkpoint).config
    layers = tuple(LayerScales(at, (2.0**-10,), (2.0**-10,), "calibrated") for at in range(5))
    path = tmp_path / "small.json"
    KvScales(
        config["model_type"], config["architectures"][0], "dsa", 0, "tensor", "0" * 64, None, layers
    ).write(path)  # fmt: skip
    body = run("--json", "--layout", "fp8", "--kv-scales", path, "--skip-layers", "none").json
    assert "small.json (per layer) is measured, and no engine serves it" in body["warnings"][0]
    unit, small = body["variants"]
    assert small["name"] == "fp8, small.json (per layer)"
    assert small["scales"]["granularity"] == "tensor"
    assert small["all"]["kl_mean"] > 10 * unit["all"]["kl_mean"]
    assert small["layers"][0]["rows"]["latent"]["clipped"] > 0
    assert small["with_skip"] is None


def test_layers_to_skip_are_words_or_numbers() -> None:
    assert _parse_skip("auto") is None
    assert _parse_skip("none") == ()
    assert _parse_skip("0, 17,3,0") == (0, 17, 3)
    for text in ("", "1,", "-1", "all", "1 2", "٣"):
        with pytest.raises(KizamiError, match="expected auto, none, or layers such as"):
            _parse_skip(text)


def test_what_cannot_be_is_refused_before_the_work(run: Measure, demo_checkpoint: Path) -> None:
    for words, said in (
        (("--layout", "fp4"), "--layout fp4; expected fp8 or fp8_ds_mla"),
        (("--skip-layers", "9"), "layer 9 cannot be skipped: the model has layers 0 to 4"),
        (("-o", demo_checkpoint / "kv.json"), "which is only read"),
        (("--seq-len", "9000", "--samples", "1"), "expected at least one sequence of 9,000"),
    ):
        done = run(*words)
        assert done.code == 2
        assert said in done.err


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing(demo_checkpoint: Path, text: Path, tmp_path: Path, number: int) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "kizami.cli", "kv-accuracy", str(demo_checkpoint), "--data", str(text), *SMALL]
    started = subprocess.Popen(
        [*command, "--scratch", str(scratch), "-o", str(tmp_path / "kv.json")],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert started.stderr is not None
    for line in started.stderr:
        if line.startswith("layer 0"):
            break
    time.sleep(0.05)
    started.send_signal(number)
    rest = started.stderr.read()
    assert started.wait() in (128 + number, -number)
    assert list(scratch.iterdir()) == []
    assert not (tmp_path / "kv.json").exists()
    if number != signal.SIGKILL:
        assert "interrupted; nothing is left on the disk, and the same command starts over" in rest


def test_scales_that_an_output_was_written_with_are_its_own(tmp_path: Path, kizami: Run) -> None:
    from kv_checkpoints import glm4, scales_of

    from kizami.cli.kv_accuracy import _of_other_configs, _own_scales, scaled_variant

    source = Checkpoint.open(glm4().save(tmp_path / "src"))
    scales = scales_of(source)
    scales.write(tmp_path / "kv.json")
    assert kizami("convert", source.root, tmp_path / "out", "--kv-scales", tmp_path / "kv.json", "-q").code == 0
    own = _own_scales(Checkpoint.open(tmp_path / "out"))
    assert own == scales
    assert _own_scales(source) is None
    variant = scaled_variant("its own scales", scales)
    assert variant.name == "fp8, its own scales (per layer)"
    assert _of_other_configs((variant,), own, "0" * 64) == []
    (warning,) = _of_other_configs((variant,), None, "0" * 64)
    assert "another config.json" in warning

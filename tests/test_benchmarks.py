"""benchmarks/: a model in memory is what transformers loads; the arithmetic behind the tables of docs/methods.md."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers", minversion="5.24")

import torch
from case_runner import kizami
from client_models import open_model
from scripts import script
from transformers import CompressedTensorsConfig

# transformers warns of every option passed beside a checkpoint's own quantization_config; it then honours `dequantize`.
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")


in_memory = script("benchmarks", "in_memory")
calibrated_methods = script("benchmarks", "calibrated_methods")
under_sampling = script("benchmarks", "under_sampling")
mixed_text = script("benchmarks", "mixed_text")

TOKENS = torch.arange(4 * 32).view(4, 32) * 13 % 2048


@pytest.mark.long
def test_int4_put_into_the_model_is_what_transformers_loads(demo_checkpoint: Path, tmp_path: Path) -> None:
    assert kizami("convert", demo_checkpoint, tmp_path / "int4").code == 0
    model = in_memory.load(demo_checkpoint)
    reference = in_memory.Reference(model, TOKENS, tmp_path)
    in_memory.fill(model, in_memory.Folder(tmp_path / "int4"))
    loaded = open_model(tmp_path / "int4", quantization_config=CompressedTensorsConfig(dequantize=True))
    torch.nn.Module.float(loaded)
    ours, theirs = (in_memory.log_probabilities(m, TOKENS) for m in (model, loaded))
    assert (ours - theirs).abs().max() < 1e-4
    scores, same = reference.compare(model), reference.compare(None)
    assert scores.kl.min() > 1e-4
    assert (same.kl == 0).all()
    assert (same.agree == 1).all()


def test_an_interval_of_paired_differences_is_narrower_than_that_of_the_values() -> None:
    rng = np.random.default_rng(0)
    first = rng.normal(1, 0.5, 64)
    second = first - 0.02 + rng.normal(0, 0.01, 64)
    values, difference = in_memory.interval(first), in_memory.interval(second - first)
    assert values.low < 1 < values.high
    assert difference.outside_zero
    assert difference.high - difference.low < (values.high - values.low) / 10
    assert not in_memory.interval(rng.normal(0, 1, 64)).outside_zero
    spread = np.std(first) / 8 * 1.96
    assert (values.high - values.low) / 2 == pytest.approx(spread, rel=0.1)


def test_plain_gptq_from_the_formulas_is_kizamis_solver_without_shrinkage() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    w = torch.randn(16, 64, generator=generator)
    scale = torch.from_numpy(under_sampling.mse_scales(w.numpy(), 32))
    h = (x.T @ x).double()
    plain = under_sampling.plain_factor(h)
    assert plain is not None
    ours = under_sampling.gptq.factorize(h.clone())
    codes = under_sampling.gptq.solve(w, scale, ours)
    step = scale.repeat_interleave(32, 1)
    solved = under_sampling.plain_gptq(w, scale, plain)
    assert (solved != codes * step).float().mean() < 0.01  # a tie that FP32 breaks differently
    nearest = torch.clamp(torch.round(w / step), -8, 7) * step
    one = torch.ones(len(x))
    assert under_sampling.loss(x, one, w - solved) < 0.7 * under_sampling.loss(x, one, w - nearest)


def test_mse_scales_are_no_worse_than_absmax() -> None:
    w = np.random.default_rng(0).standard_t(4, (8, 64)).astype(np.float32)

    def error(scale: np.ndarray) -> float:
        step = np.repeat(scale, 32, 1)
        return float(np.square(w - np.clip(np.rint(w / step), -8, 7) * step).sum())

    absmax = np.abs(w.reshape(8, 2, 32)).max(2) / 7.5
    assert error(under_sampling.mse_scales(w, 32)) < error(absmax)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("search", ["--method", "search", "--group-size", "64"]),
        ("weighted@0.5", ["--method", "weighted", "--group-size", "64", "--clip-allowance", "0.5"]),
        ("llmcompressor:gptq", ["--method", "gptq", "--group-size", "64", "--engine", "llmcompressor"]),
    ],
)
def test_a_variant_spells_the_options_of_convert(name: str, options: list[str]) -> None:
    assert calibrated_methods.Variant(name, 64).options == options


def test_a_table_says_where_a_difference_is_within_its_interval() -> None:
    rng = np.random.default_rng(0)
    kl = np.abs(rng.normal(0.1, 0.02, 32))

    def row(method: str, kl: np.ndarray) -> dict[str, object]:
        return {"method": method, "group_size": 32, "kl": kl, "nll": 2 + kl, "agree": np.full(32, 0.9)}

    rows = [row("search", kl), row("better", kl - 0.01), row("alike", kl + rng.normal(0, 0.01, 32))]
    settings = {"source": "s", "heldout": "h", "windows": [32, 256]}
    results = {"settings": settings, "reference": {"nll": np.full(32, 2.0)}, "rows": {r["method"]: r for r in rows}}
    lines = calibrated_methods.table(results, "search").splitlines()[-3:]
    assert [line.split(" | ")[1] for line in lines] == ["`search`", "`better`", "`alike`"]
    assert "-0.01000 [-0.01000, -0.01000] |" in lines[1]
    assert "(not shown)" in lines[2]


def test_no_document_is_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(20):
        (tmp_path / f"{i:02}.rst.txt").write_text(f"document {i} says this much in one line\n\n" * 20)
    (tmp_path / "known.txt").write_text("document 7 says this much in one line\n")
    out = tmp_path / "out"
    monkeypatch.setattr(
        sys, "argv", ["mixed_text.py", str(out), "--docs", str(tmp_path), "--exclude", str(tmp_path / "known.txt")]
    )
    mixed_text.main()
    sides = [set((out / f"{name}.txt").read_text().split("\n\n")) for name in ("calibration", "heldout")]
    lines = [{line.strip() for line in side if line.strip()} for side in sides]
    assert not lines[0] & lines[1]
    assert len(lines[0] | lines[1]) == 19

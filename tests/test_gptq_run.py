"""`--method gptq` on the trained tiny GLM: what it decides is held against plain NumPy, from the output's bytes."""

import builtins
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from cli_fixtures import Run, files_of
from gptq_fixtures import Layer, Made, by_the_book, make_stats
from output_oracle import Folder

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.reader import TensorReader
from kizami.formats.statistics import Statistics
from kizami.quantize import reference
from kizami.quantize.calibrated import hessian
from kizami.quantize.calibrated.solver import (
    FEWEST_HELD_OUT,
    Outcome,
    Solver,
    check_gptq,
    linears,
    makers,
    source_weight,
)
from kizami.quantize.calibrated.solver_cost import solve_operations
from kizami.quantize.calibrated.statistics import facts_of
from kizami.quantize.estimate import estimate
from kizami.quantize.linear import PackedLinear, quantize_linear
from kizami.quantize.pipeline import run
from kizami.quantize.plan import Plan, Step
from kizami.quantize.planner import build_plan
from kizami.quantize.settings import Method, MethodName, Policy
from kizami.quantize.threads import Stopped
from kizami.quantize.verify import verify

pytestmark = pytest.mark.long

# Three experts of a layer and one that no token reached, what all tokens pass, a linear without kept inputs, and MTP.
TARGETS = (
    r"re:model\.layers\.1\.mlp\.experts\.([0-2]|15)\.\w+_proj$", r"re:model\.layers\.1\.mlp\.shared_experts\.\w+_proj$",
    r"re:model\.layers\.0\.mlp\.\w+_proj$", "model.layers.1.self_attn.o_proj", "model.layers.5.mlp.experts.0.down_proj",
)  # fmt: skip


def convert(made: Made, out: Path, workers: int) -> Path:
    checkpoint, statistics = Checkpoint.open(made.source), Statistics.open(made.folder)
    method = Method("gptq", stats=statistics.sha256)
    plan = build_plan(checkpoint, Policy(targets=TARGETS), method, facts_of(statistics))
    run(plan, checkpoint, out, statistics=statistics, workers=workers)
    return out


@pytest.fixture(scope="module")
def converted(demo_stats: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(demo_stats, tmp_path_factory.mktemp("out") / "out", workers=2)


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    rows = map(json.loads, (out / "kizami-report.jsonl").read_text().splitlines())
    return {row["name"]: row for row in rows if row["action"] == "quantize"}


def held_out_loss(made: Made, module: str, codes: np.ndarray, scale: np.ndarray) -> float:
    """sum g^2 ||(W - Q) x||^2 in float64."""
    x, g = made.input_of(module, held_out=True)
    error = made.weights[module].astype(np.float64) - codes * np.repeat(scale, codes.shape[1] // scale.shape[1], axis=1)
    return float(np.square((x.astype(np.float64) @ error.T) * g[:, None]).sum())


def test_losses_are_those_of_the_bytes_and_no_module_is_worse_than_weighted(converted: Path, demo_stats: Made) -> None:
    out, rows = Folder(converted), rows_of(converted)
    compared = {name: row for name, row in rows.items() if row.get("loss_gptq") is not None}
    assert len(compared) == 15  # three experts, the shared one, the dense layer
    for name, row in compared.items():
        codes = reference.unpack(out.array(f"{name}.weight_packed").view(np.int32))
        scale = reference.from_bf16(out.array(f"{name}.weight_scale").view(np.uint16))
        nearest = reference.nearest_codes(demo_stats.weights[name], scale, 32)
        ours, theirs = (held_out_loss(demo_stats, name, q, scale) for q in (codes, nearest))
        assert row["loss_weighted"] == pytest.approx(theirs, rel=1e-3), name
        assert ours <= theirs, name
        if row["method"] == "gptq":
            assert row["loss_gptq"] == pytest.approx(ours, rel=1e-3), name
            assert row["loss_gptq"] < row["loss_weighted"]
        else:
            assert np.array_equal(codes, nearest), name
    assert sum(row["method"] == "gptq" for row in compared.values()) >= 12


@pytest.mark.parametrize("module", ["experts.0.gate_proj", "experts.2.down_proj", "shared_experts.up_proj"])
def test_codes_are_those_of_the_plain_loop_over_the_kept_inputs(module: str, converted: Path, demo_stats: Made) -> None:
    out, name = Folder(converted), f"model.layers.1.mlp.{module}"
    x, g = demo_stats.input_of(name, held_out=False)
    weighted, g2 = x.astype(np.float64) * g[:, None], g.astype(np.float64) ** 2
    n = g2.sum() ** 2 / (g2**2).sum()
    scale = reference.from_bf16(out.array(f"{name}.weight_scale").view(np.uint16))
    expected = by_the_book(demo_stats.weights[name], scale, weighted.T @ weighted, n / (n + x.shape[1]))
    codes = reference.unpack(out.array(f"{name}.weight_packed").view(np.int32))
    assert rows_of(converted)[name]["method"] == "gptq"
    assert (codes != expected).mean() < 2e-3
    unshrunk = by_the_book(demo_stats.weights[name], scale, weighted.T @ weighted, 1.0)
    assert (codes != unshrunk).mean() > 2e-2


@pytest.mark.long
def test_the_summary_names_what_gptq_did_not_do(demo_stats: Made, tmp_path: Path, kizami: Run) -> None:
    words = ("convert", demo_stats.source, tmp_path / "out", "--method", "gptq", "--stats", demo_stats.folder)
    words += tuple(word for target in TARGETS[3:] for word in ("--targets", target))
    done = kizami(*words, "--json", "--workers", 1)
    assert done.json["fallbacks"] == [
        {"name": TARGETS[3], "reason": "inputs are not kept", "method": "weighted"},
        {"name": TARGETS[4], "reason": "layer 5 (MTP: never calibrated)", "method": "search"},
    ]
    shutil.rmtree(tmp_path / "out")
    said = kizami(*words, "--workers", 1).out
    assert f"weighted in place of gptq: inputs are not kept: 1 module ({TARGETS[3]})" in said
    assert f"search in place of gptq: layer 5 (MTP: never calibrated): 1 module ({TARGETS[4]})" in said
    assert "GPTQ in 0 of 1 calibrated module\n" in said
    assert "is loud" not in said


def test_the_summary_of_gptq_is_the_pooled_loss_on_held_out_tokens(converted: Path, kizami: Run) -> None:
    chosen = [row for row in rows_of(converted).values() if row["method"] == "gptq"]
    ratio = sum(row["loss_gptq"] for row in chosen) / sum(row["loss_weighted"] for row in chosen)
    body = kizami("report", converted, "--json").json["gptq"]
    assert body == {"modules": 16, "chosen": len(chosen), "loss_ratio": pytest.approx(ratio)}
    assert 0 < ratio < 1
    said = kizami("report", converted).out
    assert (
        f"GPTQ in {len(chosen)} of 16 calibrated modules; squared output error on held-out tokens {ratio:.2f} of "
        "weighted's" in said
    )
    assert "is loud" not in said


def test_rows_say_what_was_seen(converted: Path, demo_stats: Made) -> None:
    rows = rows_of(converted)
    for name in ("model.layers.1.mlp.experts.2.down_proj", "model.layers.1.mlp.shared_experts.up_proj"):
        _, fit = demo_stats.input_of(name, held_out=False)
        _, held_out = demo_stats.input_of(name, held_out=True)
        g2 = fit.astype(np.float64) ** 2
        assert rows[name]["effective_tokens"] == pytest.approx(g2.sum() ** 2 / (g2**2).sum(), abs=1e-3)
        assert rows[name]["held_out_tokens"] == len(held_out)


def test_what_gptq_cannot_do_is_said(converted: Path) -> None:
    rows = rows_of(converted)
    unseen = rows["model.layers.1.self_attn.o_proj"]
    assert (unseen["method"], unseen["gptq_reason"]) == ("weighted", "inputs are not kept")
    starved = rows["model.layers.1.mlp.experts.15.gate_proj"]
    assert (starved["method"], starved["fallback"]) == ("search", "no calibration token reached the expert")
    assert rows["model.layers.5.mlp.experts.0.down_proj"]["method"] == "search"


def test_the_output_verifies_against_source_and_statistics(converted: Path, demo_stats: Made) -> None:
    source, statistics = Checkpoint.open(demo_stats.source), Statistics.open(demo_stats.folder)
    found = verify(converted, against=source, statistics=statistics, workers=2)
    assert not found.problems


@pytest.mark.long
def test_the_same_bytes_come_out_whatever_the_workers(converted: Path, demo_stats: Made, tmp_path: Path) -> None:
    assert files_of(convert(demo_stats, tmp_path / "again", workers=1)) == files_of(converted)


def test_what_a_shard_needs_of_others_is_gate_and_up_of_its_downs(demo_checkpoint: Path) -> None:
    plan = build_plan(Checkpoint.open(demo_checkpoint), Policy(max_shard_bytes=1_000_000), Method())
    modules = {step.module for step in plan.steps}
    found, all_linears = 0, linears(plan.steps)
    for shard in plan.shards:
        own = {step.module for step in shard.steps}
        downs = [name.removesuffix("down_proj") for name in own if ".mlp." in name and name.endswith("down_proj")]
        wanted = {down + part for down in downs for part in ("gate_proj", "up_proj")} & modules - own
        assert {step.module for step in makers(shard.steps, all_linears)} == wanted
        found += len(wanted)
    assert found


def test_the_manifest_names_what_the_bytes_depend_on(converted: Path) -> None:
    libraries = json.loads((converted / "kizami.json").read_text())["calibration"]["libraries"]
    assert libraries["torch"] == torch.__version__
    assert libraries["device"] == "cpu"
    assert int(libraries["threads"]) >= 1


# ---------------------------------------------------------------------------------------------------- the guard


Improve = Callable[..., tuple[PackedLinear, PackedLinear, Outcome]]


@pytest.fixture
def improve(demo_checkpoint: Path, tmp_path: Path) -> Improve:
    """improve(module, change): GPTQ against plain search for a module of layer 1, on STATS made with `change`."""

    def solve(
        module: str, change: Callable[[int, Layer], None] = lambda layer, data: None, **more: Any
    ) -> tuple[PackedLinear, PackedLinear, Outcome]:
        made = make_stats(
            demo_checkpoint, tmp_path / "STATS", **{"only": (1,), "unused": 8, "tokens": 600, "change": change} | more
        )
        checkpoint = Checkpoint.open(demo_checkpoint)
        with TensorReader(checkpoint) as reader:
            plan = build_plan(checkpoint, Policy(), Method())
            solver = Solver(Statistics.open(made.folder), plan.steps, reader)
            step = step_of(plan, module)
            weight = source_weight(step, reader)
            before = quantize_linear(weight, None, None, 32, Method())
            try:
                return before, *solver.improve(step, lambda: weight, before)
            finally:
                solver.close()

    return solve


def step_of(plan: Plan, module: str) -> Step:
    return next(step for step in plan.steps if step.module == f"model.layers.1.mlp.{module}")


@pytest.mark.parametrize("part", ["gate_proj", "down_proj"])
def test_gptq_is_taken_where_it_is_better(part: str, improve: Improve) -> None:
    before, after, outcome = improve(f"experts.3.{part}")
    assert outcome.chosen == "gptq"
    assert outcome.loss_gptq is not None
    assert outcome.loss_weighted is not None
    assert outcome.loss_gptq < 0.95 * outcome.loss_weighted
    assert np.array_equal(before.scale, after.scale)
    assert not np.array_equal(before.packed, after.packed)


def test_a_poisoned_hessian_is_rejected(improve: Improve) -> None:
    """All fit tokens point one way, which the held-out ones do not: making good their errors makes others worse."""

    def poison(layer: int, data: Layer) -> None:
        data.x[~data.held_out] = np.sign(np.random.RandomState(7).standard_normal(data.x.shape[1])) * 4

    before, after, outcome = improve("experts.3.gate_proj", poison)
    assert (outcome.chosen, outcome.reason) == ("weighted", "not better on held-out tokens")
    assert outcome.loss_gptq is not None
    assert outcome.loss_weighted is not None
    assert outcome.loss_gptq > outcome.loss_weighted
    assert np.array_equal(after.packed, before.packed)


def test_a_hessian_without_a_factor_leaves_weighted(improve: Improve) -> None:
    def overflow(layer: int, data: Layer) -> None:
        data.x[np.flatnonzero(~data.held_out)] *= np.float32(2.0**120)

    before, after, outcome = improve("experts.3.up_proj", overflow)
    assert (outcome.chosen, outcome.reason) == ("weighted", "the Hessian has no Cholesky factor")
    assert after is before


@pytest.mark.long
def test_losses_that_are_no_numbers_leave_weighted(improve: Improve) -> None:
    def overflow(layer: int, data: Layer) -> None:
        data.x[data.held_out] = np.sign(data.x[data.held_out]) * np.float32(3.3e38)  # times a gate weight above 1

    before, after, outcome = improve("experts.3.up_proj", overflow)
    assert (outcome.chosen, outcome.loss_gptq, outcome.loss_weighted) == ("weighted", None, None)
    assert after is before


def test_few_held_out_tokens_decide_nothing(improve: Improve) -> None:
    before, after, outcome = improve("experts.3.up_proj", tokens=400, unused=0)
    assert 0 < outcome.n_held_out < FEWEST_HELD_OUT
    assert outcome.reason == "fewer than 32 held-out tokens"
    assert after is before


@pytest.mark.long
def test_held_out_tokens_alone_make_no_hessian(improve: Improve) -> None:
    def never_fit(layer: int, data: Layer) -> None:
        data.experts[~data.held_out] = np.where(data.experts[~data.held_out] == 3, 12, data.experts[~data.held_out])

    before, after, outcome = improve("experts.3.up_proj", never_fit)
    assert (outcome.n, outcome.reason) == (0, "no fit tokens")
    assert after is before


def test_gate_and_up_share_their_hessian(demo_stats: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    formed: list[int] = []
    real = hessian.hessian
    monkeypatch.setattr(
        hessian, "hessian", lambda rows, width, device: formed.append(width) or real(rows, width, device)
    )
    checkpoint = Checkpoint.open(demo_stats.source)
    with TensorReader(checkpoint) as reader:
        plan = build_plan(checkpoint, Policy(), Method())
        solver = Solver(Statistics.open(demo_stats.folder), plan.steps, reader)
        for part in ("gate_proj", "down_proj", "up_proj"):
            step = step_of(plan, f"experts.1.{part}")
            weight = source_weight(step, reader)
            solver.improve(step, lambda: weight, quantize_linear(weight, None, None, 32, Method()))  # noqa: B023
        solver.close()
    assert formed == [256, 128]


def test_a_run_that_is_stopped_does_not_finish_its_hessian(demo_stats: Made) -> None:
    checkpoint, stop = Checkpoint.open(demo_stats.source), Event()
    with TensorReader(checkpoint) as reader:
        plan = build_plan(checkpoint, Policy(), Method())
        solver = Solver(Statistics.open(demo_stats.folder), plan.steps, reader, stop=stop)
        step = step_of(plan, "experts.1.gate_proj")
        weight = source_weight(step, reader)
        stop.set()
        with pytest.raises(Stopped):
            solver.improve(step, lambda: weight, quantize_linear(weight, None, None, 32, Method()))
        solver.close()


# ---------------------------------------------------------------------------------------------------- refusals


def test_inputs_of_all_tokens_are_needed(demo_checkpoint: Path, tmp_path: Path, kizami: Run) -> None:
    made = make_stats(demo_checkpoint, tmp_path / "STATS", tokens=100, keep="held-out", only=(0,))
    done = kizami("convert", demo_checkpoint, tmp_path / "out", "--method", "gptq", "--stats", made.folder)
    assert done.code == 2
    assert "holds the inputs of held-out tokens" in done.err
    assert "--keep all" in done.err
    nothing = make_stats(demo_checkpoint, tmp_path / "none", tokens=100, keep="none", only=(0,))
    with pytest.raises(KizamiError, match="holds no inputs;"):
        check_gptq(Statistics.open(nothing.folder), {"hidden_act": "silu"})
    assert not (tmp_path / "out.partial").exists()


def test_torch_is_loaded_for_this_method_only() -> None:
    code = "import sys, kizami.cli.convert, kizami.cli.report, kizami.quantize.pipeline; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_torch_is_asked_for(demo_stats: Made, tmp_path: Path, kizami: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_torch(name: str, *more: Any) -> Any:
        if name in ("torch", "kizami.quantize.calibrated.gptq"):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    done = kizami("convert", demo_stats.source, tmp_path / "out", "--method", "gptq", "--stats", demo_stats.folder)
    assert done.code == 2
    assert "pip install 'kizami[torch]'; --method weighted needs only NumPy\n" in done.err


def test_a_device_is_looked_for_before_the_work(demo_stats: Made, tmp_path: Path, kizami: Run) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    words = ("convert", demo_stats.source, tmp_path / "out", "--device", "cuda")
    done = kizami(*words, "--method", "gptq", "--stats", demo_stats.folder)
    assert (done.code, "finds no CUDA device" in done.err) == (2, True)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_a_gpu_gives_nearly_the_same_codes(demo_stats: Made) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    checkpoint, found = Checkpoint.open(demo_stats.source), []
    with TensorReader(checkpoint) as reader:
        plan = build_plan(checkpoint, Policy(), Method())
        step = step_of(plan, "experts.1.down_proj")
        weight = source_weight(step, reader)
        before = quantize_linear(weight, None, None, 32, Method())
        for device in ("cpu", "cuda"):
            solver = Solver(Statistics.open(demo_stats.folder), plan.steps, reader, device)
            found.append(solver.improve(step, lambda: weight, before)[0])
            solver.close()
    a, b = (reference.unpack(linear.packed) for linear in found)
    assert (a != b).mean() < 0.01


@pytest.mark.parametrize("activation", ["gelu", None])
def test_another_activation_is_refused(activation: str | None, demo_stats: Made) -> None:
    with pytest.raises(KizamiError, match="hidden_act is") as refused:
        check_gptq(Statistics.open(demo_stats.folder), {"hidden_act": activation})
    assert refused.value.code == "unsupported_model"


# ---------------------------------------------------------------------------------------------------- what it costs


def test_the_estimate_counts_the_solves(demo_stats: Made) -> None:
    """Of one expert and one shared expert, by hand: fit tokens are 600, and 4 of 16 experts see each."""
    checkpoint, statistics = Checkpoint.open(demo_stats.source), Statistics.open(demo_stats.folder)

    def plan_of(name: MethodName) -> Plan:
        policy = Policy(targets=(r"re:model\.layers\.1\.mlp\.(experts\.7|shared_experts)\.\w+_proj$",))
        return build_plan(checkpoint, policy, Method(name, stats=statistics.sha256), facts_of(statistics))

    def operations(n: int) -> float:
        h, i = 256, 128
        inputs = 2 * n * h**2 + 4 / 3 * h**3 + 2 * (i * h**2 + 0.4 * n * h * i)
        neurons = 4 * n * h * i + 2 * n * i**2 + 4 / 3 * i**3 + h * i**2 + 0.4 * n * h * i
        return inputs + neurons

    gptq, weighted = plan_of("gptq"), plan_of("weighted")
    assert solve_operations(gptq) == pytest.approx(operations(150) + operations(600))
    with_solves, without = estimate(gptq, "gptq", 2), estimate(weighted, "weighted", 2)
    assert with_solves.seconds > without.seconds
    assert with_solves.memory_bytes - without.memory_bytes > 300 << 20  # torch

"""The error of a layer's output, against transformers' own modules with weights that the oracle decodes."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from cli_fixtures import Run
from gptq_fixtures import Layer, Made, make_stats
from output_oracle import Folder

from kizami.cli.output import Ui
from kizami.cli.report_outputs import fail_over_output_error, layer_rows, notes
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.fingerprint import config_sha256, sample_contents
from kizami.formats.int4_layout import Format
from kizami.formats.statistics import MANIFEST as STATS_MANIFEST
from kizami.formats.statistics import Statistics
from kizami.quantize import output_error, reference
from kizami.quantize.manifest import read_manifest
from kizami.quantize.output_error import LayerError, ModuleError, OutputErrors
from kizami.quantize.pipeline import run
from kizami.quantize.planner import build_plan
from kizami.quantize.settings import Form, Method, Policy, Rest

pytestmark = pytest.mark.long

WHOLE: tuple[tuple[str, Form], ...] = (("shared_expert", "int4"), ("dense_mlp", "int4"))


def convert(source: Path, out: Path, policy: Policy) -> Path:
    checkpoint = Checkpoint.open(source)
    run(build_plan(checkpoint, policy, Method("minmax", scale_sign="positive")), checkpoint, out, workers=1)
    return out


@pytest.fixture(scope="module")
def converted(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts, shared experts and the dense MLP in INT4."""
    return convert(demo_checkpoint, tmp_path_factory.mktemp("out") / "out", Policy(roles=WHOLE))


def errors_of(out: Path, made: Made) -> OutputErrors:
    return OutputErrors(
        Checkpoint.open(out), read_manifest(out), Checkpoint.open(made.source), Statistics.open(made.folder)
    )


@pytest.fixture(scope="module")
def measured(converted: Path, demo_stats: Made) -> dict[int, LayerError]:
    return {layer.layer: layer for layer in errors_of(converted, demo_stats).each()}


def stats_of(source: Path, made: Made) -> Made:
    """The same STATS, said to be of another source of the same shapes."""
    manifest = json.loads((made.folder / "kizami-stats.json").read_text())
    checkpoint = Checkpoint.open(source)
    manifest["source"] = {"contents": sample_contents(checkpoint), "config": config_sha256(checkpoint)}
    (made.folder / "kizami-stats.json").write_text(json.dumps(manifest))
    return Made(made.folder, source, made.layers, made.weights)


def output_weight(out: Folder, module: str) -> np.ndarray:
    """float32 [N, K]: q * s of the output's bytes."""
    codes = reference.unpack(out.array(f"{module}.weight_packed").view(np.int32))
    steps = reference.from_bf16(out.array(f"{module}.weight_scale").view(np.uint16))
    return codes * np.repeat(steps, codes.shape[1] // steps.shape[1], axis=1)


def moe_outputs(made: Made, layer: int, weight_of: Any) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """transformers' MoE in float32 on the held-out tokens: the layer's output, and g y of each expert by token."""
    torch = pytest.importorskip("torch")
    glm = pytest.importorskip("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")
    values = json.loads((made.source / "config.json").read_text())
    values.pop("quantization_config")
    config = glm.GlmMoeDsaConfig(**values, _attn_implementation="eager", _experts_implementation="eager")
    moe, data = glm.GlmMoeDsaMoE(config).float(), made.layers[layer]

    def load(module: str) -> Any:
        return torch.from_numpy(np.ascontiguousarray(weight_of(f"model.layers.{layer}.mlp.{module}")))

    for e in range(config.n_routed_experts):
        gate_up = torch.cat([load(f"experts.{e}.gate_proj"), load(f"experts.{e}.up_proj")])
        moe.experts.gate_up_proj.data[e] = gate_up
        moe.experts.down_proj.data[e] = load(f"experts.{e}.down_proj")
    for part in ("gate_proj", "up_proj", "down_proj"):
        getattr(moe.shared_experts, part).weight.data = load(f"shared_experts.{part}")
    x, ids, gates = (torch.from_numpy(a[data.held_out]) for a in (data.x, data.experts, data.gates))
    with torch.inference_mode():
        whole = moe.experts(x, ids.long(), gates) + moe.shared_experts(x)
        alone = {}
        for e in (0, 7):
            only = torch.where(ids == e, gates, torch.zeros_like(gates))
            alone[e] = moe.experts(x, ids.long(), only).numpy()
    return whole.numpy(), alone


def relative(reference_output: np.ndarray, output: np.ndarray) -> float:
    return float(
        np.linalg.norm(output.astype(float) - reference_output) / np.linalg.norm(reference_output.astype(float))
    )


@pytest.mark.parametrize("layer", [1, pytest.param(4, marks=pytest.mark.long)])
def test_moe_error_is_that_of_transformers_modules(
    layer: int, converted: Path, demo_stats: Made, measured: dict[int, LayerError]
) -> None:
    out = Folder(converted)
    before = moe_outputs(demo_stats, layer, lambda m: reference.from_bf16(reference.to_bf16(demo_stats.weights[m])))
    after = moe_outputs(demo_stats, layer, lambda m: output_weight(out, m))
    found = measured[layer]
    assert found.rel_error == pytest.approx(relative(before[0], after[0]), rel=1e-4)
    assert found.sqnr_db == pytest.approx(-20 * np.log10(relative(before[0], after[0])), abs=1e-3)
    assert found.tokens == demo_stats.layers[layer].held_out.sum()
    for expert in (0, 7):
        module = next(m for m in found.modules if m.expert == expert)
        assert module.name == f"model.layers.{layer}.mlp.experts.{expert}"
        assert module.rel_error == pytest.approx(relative(before[1][expert], after[1][expert]), rel=1e-4)
        assert module.tokens == (demo_stats.layers[layer].experts[demo_stats.layers[layer].held_out] == expert).sum()


@pytest.mark.long
def test_dense_layer_is_measured_as_one_module(
    converted: Path, demo_stats: Made, measured: dict[int, LayerError]
) -> None:
    x = demo_stats.layers[0].x[demo_stats.layers[0].held_out].astype(float)
    out, names = Folder(converted), [f"model.layers.0.mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")]

    def forward(gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        g = x @ gate.T
        y: np.ndarray = (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T
        return y

    before = forward(*(reference.from_bf16(reference.to_bf16(demo_stats.weights[name])) for name in names))
    after = forward(*(output_weight(out, name) for name in names))
    assert measured[0].rel_error == pytest.approx(relative(before, after), rel=1e-4)
    assert [(m.name, m.expert, m.tokens) for m in measured[0].modules] == [("model.layers.0.mlp", None, len(x))]
    assert measured[0].routing is None


@pytest.mark.long
def test_windows_of_tokens_do_not_show(
    converted: Path, demo_stats: Made, measured: dict[int, LayerError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_error, "WINDOW_BYTES", 1)
    monkeypatch.setattr(output_error, "CHUNK", 48)
    errors = errors_of(converted, demo_stats)
    monkeypatch.setattr(OutputErrors, "layers", property(lambda self: [0, 2]))
    for layer in errors.each():
        whole = measured[layer.layer]
        assert layer.rel_error == pytest.approx(whole.rel_error, rel=1e-6)
        assert [m.tokens for m in layer.modules] == [m.tokens for m in whole.modules]
        found, expected = ([m.rel_error or 0.0 for m in each.modules] for each in (layer, whole))
        assert found == pytest.approx(expected, rel=1e-6)


def test_starved_experts_are_named(demo_stats: Made, measured: dict[int, LayerError]) -> None:
    routing = measured[3].routing
    assert routing is not None
    fit = demo_stats.layers[3].experts[~demo_stats.layers[3].held_out]
    counts = np.bincount(fit.reshape(-1), minlength=16)
    assert (routing.min, routing.median, routing.max) == (counts.min(), np.median(counts), counts.max())
    assert routing.starved == ("model.layers.3.mlp.experts.15",)
    unused = next(m for m in measured[3].modules if m.expert == 15)
    assert (unused.tokens, unused.rel_error, unused.sqnr_db) == (0, None, None)


@pytest.mark.long
def test_weights_that_were_only_decoded_have_no_error(demo_checkpoint: Path, demo_stats: Made, tmp_path: Path) -> None:
    out = convert(demo_checkpoint, tmp_path / "out", Policy(to="bf16"))
    for layer in errors_of(out, demo_stats).each():
        assert (layer.rel_error, layer.sqnr_db) == (0.0, None)


def layer_errors(source: Path, out: Path, policy: Policy, made: Made) -> list[float | None]:
    return [layer.rel_error for layer in errors_of(convert(source, out, policy), made).each()]


@pytest.mark.long
@pytest.mark.parametrize("format", ["gptq", "gptq_v2", "awq", "w4afp8"])
def test_every_layout_is_read(format: Format, demo_checkpoint: Path, demo_stats: Made, tmp_path: Path) -> None:
    rest: Rest
    g, rest = 32, "bf16"
    if format == "w4afp8":
        g, rest = 128, "fp8"
    found = layer_errors(demo_checkpoint, tmp_path / "a", Policy(format=format, group_size=g, rest=rest), demo_stats)
    plain = layer_errors(demo_checkpoint, tmp_path / "b", Policy(group_size=g, rest=rest), demo_stats)
    assert found == pytest.approx(plain, rel=1e-6)
    assert all(found[1:])


@pytest.mark.long
def test_fp8_blocks_are_read(demo_checkpoint: Path, demo_stats: Made, tmp_path: Path) -> None:
    """A BF16 source in FP8: an error of about 2^-5.5 per weight, an eighth of INT4's."""
    decoded = convert(demo_checkpoint, tmp_path / "bf16", Policy(to="bf16"))
    made = stats_of(decoded, make_stats(demo_checkpoint, tmp_path / "STATS"))
    found = layer_errors(decoded, tmp_path / "fp8", Policy(to="fp8", targets=("re:.*experts.*_proj",)), made)
    assert found[0] == 0
    assert all(error is not None and 1e-4 < error < 0.03 for error in found[1:])


def test_statistics_of_another_source_are_refused(
    converted: Path, demo_stats: Made, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    ours = Checkpoint.open(demo_stats.source), Statistics.open(demo_stats.folder)
    with pytest.raises(KizamiError, match="another checkpoint") as refused:
        OutputErrors(Checkpoint.open(converted), read_manifest(converted), Checkpoint.open(tiny_checkpoint), ours[1])
    assert refused.value.code == "stats_mismatch"
    other = convert(tiny_checkpoint, tmp_path / "other", Policy())
    with pytest.raises(KizamiError, match="not the one that the output was made of") as refused:
        OutputErrors(Checkpoint.open(other), read_manifest(other), *ours)
    assert refused.value.code == "other_source"


def test_an_output_of_other_weights_is_refused(converted: Path, demo_checkpoint: Path, tmp_path: Path) -> None:
    retrained = Path(shutil.copytree(demo_checkpoint, tmp_path / "src"))
    shard = sorted(retrained.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    made = stats_of(retrained, make_stats(demo_checkpoint, tmp_path / "STATS", tokens=100, only=(0,)))
    with pytest.raises(KizamiError, match="not the one that the output was made of"):
        errors_of(converted, made)


def test_inputs_are_needed(converted: Path, demo_checkpoint: Path, tmp_path: Path) -> None:
    made = make_stats(demo_checkpoint, tmp_path / "STATS", tokens=100, keep="none", only=(0,))
    with pytest.raises(KizamiError, match="holds no inputs") as refused:
        errors_of(converted, made)
    assert refused.value.code == "missing_inputs"


def test_inputs_that_are_not_finite_are_refused(converted: Path, demo_checkpoint: Path, tmp_path: Path) -> None:
    def spoil(layer: int, data: Layer) -> None:
        data.x[np.flatnonzero(data.held_out)[3], 5] = np.inf

    made = make_stats(demo_checkpoint, tmp_path / "STATS", tokens=400, change=spoil)
    with pytest.raises(KizamiError, match="not finite") as refused:
        next(errors_of(converted, made).each())
    assert refused.value.code == "bad_statistics"


@pytest.mark.long
@pytest.mark.filterwarnings("error")
def test_an_output_beyond_float32_is_no_pass(converted: Path, demo_checkpoint: Path, tmp_path: Path) -> None:
    def spoil(layer: int, data: Layer) -> None:
        data.gates[:] = np.float32(3e38)

    with np.errstate(over="ignore", invalid="ignore"):  # the fixture's own sums
        made = make_stats(demo_checkpoint, tmp_path / "STATS", tokens=400, change=spoil)
    with pytest.raises(KizamiError, match="is beyond float32") as refused:
        list(errors_of(converted, made).each())
    assert refused.value.code == "non_finite"


@pytest.mark.long
def test_report_shows_outputs_and_fails_over_the_threshold(
    converted: Path, demo_stats: Made, measured: dict[int, LayerError], kizami: Run
) -> None:
    words = ("report", converted, "--stats", demo_stats.folder, "--against", demo_stats.source, "--top", 3)
    worst = output_error.worst_modules(measured.values())
    limit = worst[5].rel_error
    assert limit is not None
    done = kizami(*words, "--json", "--max-output-error", limit + 1e-9)
    outputs = done.json["outputs"]
    assert [entry["name"] for entry in outputs["worst"]] == [module.name for module in worst[:3]]
    over = [module.name for module in worst if module.rel_error and module.rel_error > limit]
    assert len(over) == 5
    assert [entry["name"] for entry in outputs["exceeding"]] == over
    assert done.code == 1
    assert outputs["unmeasured"] == 51  # the MTP layer's
    assert [line["layer"] for line in outputs["layers"]] == [0, 1, 2, 3, 4]
    text = kizami(*words, "--max-output-error", limit + 1e-9)
    assert text.code == 1
    assert f"{worst[0].name}: output error {worst[0].rel_error:.4f} is above {limit:g}" in text.err
    assert re.search(r"^\d+ experts with fewer than 32 fit tokens: model\.layers\.1\.mlp\.experts\.15", text.out, re.M)
    markdown = kizami(*words, "--format", "markdown")
    assert markdown.code == 0
    assert f"| {worst[0].rel_error:.4f} |" in markdown.out


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (("--stats", "x"), "--stats without --against"),
        (("--against", "x"), "--against without --stats"),
        (("--max-output-error", "1"), "--max-output-error without --stats"),
    ],
)
def test_options_that_belong_together_are_asked_for(
    words: tuple[str, ...], missing: str, converted: Path, kizami: Run
) -> None:
    done = kizami("report", converted, *words)
    assert done.code == 2
    assert missing in done.err


def module(name: str, tokens: int, rel_error: float | None) -> ModuleError:
    return ModuleError(name, 1, 0, tokens, rel_error, None)


def test_experts_of_too_few_held_out_tokens_are_in_no_list_of_the_worst() -> None:
    modules = (module("noise", 31, 0.9), module("none", 0, None), module("less", 32, 0.1), module("worst", 99, 0.2))
    layer = LayerError(1, 200, 0.15, None, None, modules)
    assert [m.name for m in output_error.worst_modules([layer])] == ["worst", "less"]
    assert [m.name for m in output_error.unsure_modules([layer])] == ["noise", "none"]


@pytest.mark.parametrize("quiet", [False, True])
def test_the_last_line_of_a_report_has_the_output_error(
    quiet: bool, converted: Path, demo_stats: Made, kizami: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutputErrors, "layers", property(lambda self: [0, 1]))
    words = ("report", converted, "--stats", demo_stats.folder, "--against", demo_stats.source)
    done = kizami(*words, "--max-output-error", "0.5", *(("-q",) if quiet else ()))
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert re.fullmatch(r"output error 0\.\d{4}, the median of 2 layers; at most 0\.\d{4}, in layer \d", lines[-1])
    if quiet:
        assert len(lines) == 1
    else:
        assert lines[-2].startswith("relative error 0.")
        assert re.search(r"^\d+ modules? with too few tokens, under 32 held out, to tell", done.out, re.M)
        assert "also chose between gptq's codes" not in done.out


def test_a_dense_layer_that_is_passed_on_has_blanks_for_figures() -> None:
    line = {"layer": 0, "tokens": 26, "rel_error": 0.0, "sqnr_db": None, "routing": None, "worst": None}
    assert layer_rows({"layers": [line]}) == [("0", "", "", "26", "", "", "", "", "")]


def test_the_tokens_that_chose_gptqs_codes_are_named() -> None:
    body: dict[str, Any] = {
        "layers": [],
        "few_tokens": [],
        "few_tokens_below": 32,
        "unmeasured": 0,
        "other_stats": False,
    }
    assert notes(body | {"chose_codes": False}, 5) == []
    (line,) = notes(body | {"chose_codes": True}, 5)
    assert "these held-out tokens also chose" in line


def test_the_output_is_not_its_own_source(converted: Path, demo_stats: Made, kizami: Run) -> None:
    done = kizami("report", converted, "--stats", demo_stats.folder, "--against", converted)
    assert done.code == 2
    assert "--against wants the source" in done.err


def test_statistics_without_held_out_tokens_measure_nothing_and_say_so(
    converted: Path, demo_stats: Made, tmp_path: Path
) -> None:
    shutil.copytree(demo_stats.folder, tmp_path / "STATS")
    path = tmp_path / "STATS" / STATS_MANIFEST
    manifest = json.loads(path.read_text())
    manifest["tokens"]["held_out"] = []
    path.write_text(json.dumps(manifest))
    with pytest.raises(KizamiError, match="no tokens were held out") as refused:
        errors_of(converted, replace(demo_stats, folder=tmp_path / "STATS"))
    assert refused.value.code == "missing_inputs"


def test_statistics_that_lack_a_layer_are_refused(converted: Path, demo_checkpoint: Path, tmp_path: Path) -> None:
    made = make_stats(demo_checkpoint, tmp_path / "STATS", tokens=400, only=(0, 1))
    with pytest.raises(KizamiError, match="nothing in layer 2") as refused:
        errors_of(converted, made)
    assert refused.value.code == "stats_mismatch"


def test_a_limit_that_nothing_was_held_to_is_not_met(capsys: pytest.CaptureFixture[str]) -> None:
    few = {"max_output_error": 0.5, "few_tokens": ["a"], "modules": 0, "few_tokens_below": 32, "exceeding": []}
    with pytest.raises(typer.Exit) as ended:
        fail_over_output_error(Ui(quiet=True), few)
    assert ended.value.exit_code == 1
    assert "no expert has 32 held-out tokens: nothing was held to --max-output-error" in capsys.readouterr().err
    for met in ({"modules": 1}, {"few_tokens": []}, {"max_output_error": None}):
        fail_over_output_error(Ui(quiet=True), few | met)


def test_statistics_that_the_run_did_not_use_are_named() -> None:
    body = {"layers": [], "unmeasured": 0, "few_tokens": [], "chose_codes": False, "other_stats": True}
    assert notes(body, None) == [
        "these are not the statistics that the run used: errors are of other tokens than it calibrated on"
    ]

"""`convert --method weighted`: whose statistics a linear gets, what is done without any, and what an output says of
it."""

import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_fixtures import Run
from forging import forge, forge_manifest, forge_rows
from made_statistics import TOKENS, make_statistics

from kizami.cli.output import counted
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.reader import TensorReader
from kizami.formats.statistics import Statistics
from kizami.quantize import reference as ref
from kizami.quantize.buffers import Buffers
from kizami.quantize.calibrated.column_weights import integer_weights
from kizami.quantize.calibrated.statistics import NO_TOKEN, NOT_SEEN, Calibration, check_statistics, facts_of, unseen
from kizami.quantize.linear import quantize_linear
from kizami.quantize.manifest import method_of, read_manifest
from kizami.quantize.pipeline import run
from kizami.quantize.plan import Plan
from kizami.quantize.planner import build_plan
from kizami.quantize.report import read_report
from kizami.quantize.settings import Method, Policy
from kizami.quantize.source_rows import opened, read_scales
from kizami.quantize.verification.calibrated import Witness
from kizami.quantize.verify import verify

EXPERT = "model.layers.1.mlp.experts.3.down_proj"
MTP = "layer 2 (MTP: never calibrated)"


@pytest.fixture(scope="module")
def source(tiny_checkpoint: Path) -> Checkpoint:
    return Checkpoint.open(tiny_checkpoint)


@pytest.fixture(scope="module")
def stats(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Statistics:
    return make_statistics(tiny_checkpoint, tmp_path_factory.mktemp("statistics") / "STATS")


def plan_of(source: Checkpoint, stats: Statistics, policy: Policy = Policy(), **more: Any) -> Plan:  # noqa: B008
    return build_plan(source, policy, Method("weighted", stats=stats.sha256, **more), facts_of(stats))


@pytest.fixture(scope="module")
def converted(source: Checkpoint, stats: Statistics, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    out = tmp_path_factory.mktemp("weighted") / "out"
    run(plan_of(source, stats), source, out, statistics=stats, workers=2)
    return out


@pytest.fixture
def out(converted: Path, tmp_path: Path) -> Path:
    """A copy to forge."""
    return Path(shutil.copytree(converted, tmp_path / "out"))


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in read_report(out)}


def stored(out: Path, module: str) -> tuple[bytes, bytes]:
    checkpoint = Checkpoint.open(out)
    with TensorReader(checkpoint) as reader:
        packed, scale = (reader.read(checkpoint.tensors[f"{module}.weight_{part}"]) for part in ("packed", "scale"))
    return packed.tobytes(), scale.tobytes()


def test_every_module_has_the_codes_of_its_own_statistics(
    source: Checkpoint, stats: Statistics, converted: Path
) -> None:
    experts = stats.layer(1).experts
    assert experts is not None
    seen = {"weighted": 0, "search": 0}
    with TensorReader(source) as reader:
        for step in plan_of(source, stats).packed:
            place, h = step.place, None
            if place.layer == 1:  # the MTP layer is not in STATS
                rows = experts.h_a if place.part == "down_proj" else experts.h_x
                pooled = place.part != "down_proj"
                h = ref.shrunk_mean_squares(rows, experts.sum_g2, experts.sum_g4, place.expert or 0, pooled=pooled)
            method = Method("search") if h is None else Method("weighted", stats="")
            weights = None if h is None else integer_weights(h, 32)
            with opened(step, reader, Buffers(0)) as opened_source:
                made = quantize_linear(*opened_source, 32, method, weights=weights, h=h)
            assert stored(converted, step.module) == (made.packed.tobytes(), made.scale.tobytes()), step.module
            row = rows_of(converted)[step.module]
            assert row["method"] == method.name
            assert row["fallback"] == (unseen(place) if place.in_mtp else None if h is not None else NO_TOKEN)
            assert row["tokens"] == (None if place.in_mtp else int(experts.n[place.expert or 0]))
            assert row.get("weighted_rel_error") == (None if h is None else pytest.approx(made.sums.weighted_rel_error))
            seen[method.name] += 1
    assert seen == {"weighted": 9, "search": 15}  # 3 experts; one without a token, and the MTP layer's four


def test_other_linears_get_their_statistics_by_name(source: Checkpoint, stats: Statistics, tmp_path: Path) -> None:
    plan = plan_of(source, stats, Policy(targets=("Linear",), ignore=("re:.*(head|gate|eh_proj|experts.*)$",)))
    run(plan, source, tmp_path / "out", statistics=stats, workers=2)
    rows = [row for row in read_report(tmp_path / "out") if row["action"] == "quantize" and not row["mtp"]]
    assert {row["role"] for row in rows} == {"attention", "dense_mlp"}
    assert {(row["method"], row["fallback"], row["tokens"]) for row in rows} == {("weighted", None, None)}
    calibration = Calibration(stats)
    for step in plan.packed:
        if not step.place.in_mtp:
            expected = stats.layer(step.place.layer or 0).linears[step.module]
            np.testing.assert_array_equal(calibration.columns(step).h, expected)  # type: ignore[arg-type]
    assert verify(tmp_path / "out", against=source, statistics=stats).ok


@pytest.mark.parametrize("workers", [1, 5])
def test_worker_count_does_not_change_a_byte(
    source: Checkpoint, stats: Statistics, converted: Path, tmp_path: Path, workers: int
) -> None:
    run(plan_of(source, stats), source, tmp_path / "out", statistics=stats, workers=workers)
    for path in converted.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "more"),
    [
        ({"format": "gptq"}, {"scale_sign": "positive"}),
        ({"format": "awq", "group_size": 64}, {}),
        ({"format": "w4afp8", "group_size": 128, "rest": "fp8"}, {"clip_allowance": 0.5}),
        ({"group_size": 128}, {"clip_allowance": 0.75}),
    ],
)
def test_other_layouts_signs_and_allowances_verify(
    source: Checkpoint, stats: Statistics, tmp_path: Path, policy: dict[str, Any], more: dict[str, Any]
) -> None:
    plan = plan_of(source, stats, Policy(**policy), **more)
    manifest = run(plan, source, tmp_path / "out", statistics=stats, workers=2)
    assert method_of(manifest) == plan.method
    assert verify(tmp_path / "out", against=source, statistics=stats).problems == ()
    assert verify(tmp_path / "out", against=source).problems == ()


# ---------------------------------------------------------------------------------- STATS that do not fit


def wrong(source: Checkpoint, stats: Statistics) -> KizamiError:
    with pytest.raises(KizamiError) as e:
        check_statistics(plan_of(source, stats), stats)
    assert e.value.code == "stats_mismatch"
    return e.value


def test_statistics_of_other_experts_or_widths_are_refused_with_module_and_numbers(
    source: Checkpoint, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    few = wrong(source, make_statistics(tiny_checkpoint, tmp_path / "few", experts=3))
    assert "3 experts in layer 1; expected at least 4" in few.message
    assert few.tensor == "model.layers.1.mlp.experts.3.down_proj"
    wide = wrong(source, make_statistics(tiny_checkpoint, tmp_path / "wide", hidden=288))
    assert "288 input channels in layer 1; expected 256" in wide.message
    assert wide.tensor == "model.layers.1.mlp.experts.0.gate_proj"
    missing = wrong(source, make_statistics(tiny_checkpoint, tmp_path / "missing", layers=[0]))
    assert "nothing in layer 1; expected the layer; it has layers 0 to 0" in missing.message


def test_statistics_of_another_checkpoint_are_refused_before_anything_is_written(
    source: Checkpoint, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    first = next(iter(source.headers))
    other = make_statistics(tiny_checkpoint, tmp_path / "STATS", contents={first: "1" * 64})
    with pytest.raises(KizamiError, match="another checkpoint") as e:
        run(plan_of(source, other), source, tmp_path / "out", statistics=other)
    assert (e.value.code, e.value.file) == ("stats_mismatch", first)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("gates", [1e307, 1e200, 1e-200])
def test_sums_of_gates_that_no_tokens_have_are_refused(
    source: Checkpoint, tiny_checkpoint: Path, tmp_path: Path, gates: float
) -> None:
    stats = make_statistics(tiny_checkpoint, tmp_path / "STATS", gates=gates)
    with pytest.raises(KizamiError, match=r"not finite|cannot have"):
        check_statistics(plan_of(source, stats), stats)


def test_a_layer_file_that_changed_is_refused(source: Checkpoint, tiny_checkpoint: Path, tmp_path: Path) -> None:
    stats = make_statistics(tiny_checkpoint, tmp_path / "STATS")
    path = tmp_path / "STATS" / "layer-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(KizamiError, match="SHA-256"):
        check_statistics(plan_of(source, stats), stats)


@pytest.mark.parametrize(
    "tokens", [{}, TOKENS | {"sequences": "16"}, TOKENS | {"held_out": 3}, TOKENS | {"sources": [{"name": 3}]}]
)
def test_a_manifest_that_does_not_tell_its_tokens_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, tokens: dict[str, Any]
) -> None:
    with pytest.raises(KizamiError, match="tokens, layers or files are not what kizami writes") as refused:
        make_statistics(tiny_checkpoint, tmp_path / "STATS", tokens=tokens)
    assert refused.value.code == "bad_statistics"


def test_an_unfinished_job_of_other_statistics_is_not_resumed(
    source: Checkpoint, stats: Statistics, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    class Stop(Exception): ...

    def stop(event: object) -> None:
        raise Stop

    with pytest.raises(Stop):
        run(plan_of(source, stats), source, tmp_path / "out", statistics=stats, on_event=stop)
    other = make_statistics(tiny_checkpoint, tmp_path / "STATS", seed=1)
    with pytest.raises(KizamiError, match=r"method\.stats: \w+\.\.\. then, \w+\.\.\. now"):
        run(plan_of(source, other), source, tmp_path / "out", statistics=other)
    run(plan_of(source, stats), source, tmp_path / "out", statistics=stats)


# -------------------------------------------------------------------------------------- the command line


def test_the_command_line_asks_for_statistics_and_for_no_more_than_are_used(
    kizami: Run, tiny_checkpoint: Path, stats: Statistics, tmp_path: Path
) -> None:
    for method, given, says in (
        ("weighted", [], "--method weighted needs --stats"),
        ("gptq", [], "--method gptq needs --stats"),
        ("search", ["--stats", stats.root], "--stats with --method search"),
        ("weighted", ["--stats", tmp_path], "kizami-stats.json"),
        ("gptq", ["--stats", stats.root], "--keep all"),
    ):
        for command in (["plan", tiny_checkpoint], ["convert", tiny_checkpoint, tmp_path / "out"]):
            done = kizami(*command, "--method", method, *given)
            assert done.code == 2, done.err
            assert says in done.err
    assert not (tmp_path / "out").exists()


def test_fallbacks_are_counted_and_named(kizami: Run, tiny_checkpoint: Path, stats: Statistics, tmp_path: Path) -> None:
    options = ["--method", "weighted", "--stats", stats.root]
    planned = json.loads(kizami("plan", tiny_checkpoint, *options, "--json").out)
    done = kizami("convert", tiny_checkpoint, tmp_path / "a", *options, "--json")
    body = json.loads(done.out)
    assert planned["fallbacks"] == body["fallbacks"]
    assert [entry["reason"] for entry in body["fallbacks"]].count(NO_TOKEN) == 3
    assert {entry["name"].split(".")[2] for entry in body["fallbacks"] if entry["reason"] == MTP} == {"2"}
    assert body["calibration"] == facts_of(stats)
    errors = [row["weighted_rel_error"] for row in read_report(tmp_path / "a") if "weighted_rel_error" in row]
    assert body["weighted_rel_error"] == pytest.approx(np.sqrt(np.mean(np.square(errors))))
    reported = json.loads(kizami("report", tmp_path / "a", "--json").out)
    assert reported["weighted_rel_error"] == body["weighted_rel_error"] < reported["rel_error"]
    assert f"relative error {body['weighted_rel_error']:.4f} where" in kizami("report", tmp_path / "a").out
    text = kizami("convert", tiny_checkpoint, tmp_path / "b", *options).out
    assert f"search in place of weighted: {NO_TOKEN}: 3 modules (model.layers.1.mlp.experts.0.down_proj" in text
    assert f"search in place of weighted: {MTP}: 12 modules (model.layers.2" in text
    experts = stats.layer(1).experts
    assert experts is not None
    few = [{"name": f"model.layers.1.mlp.experts.{i}", "tokens": n} for i, n in enumerate(experts.n) if 0 < n < 32]
    assert body["few_tokens"] == {"below": 32, "experts": few}
    assert few
    names = ", ".join(expert["name"] for expert in few)
    assert f"few tokens: their statistics are shrunk; {counted(len(few), 'expert')}" in text
    assert f"with fewer than 32 fit tokens ({names})" in text
    dry = kizami("convert", tiny_checkpoint, tmp_path / "c", *options, "--dry-run")
    assert f"{NO_TOKEN}: 3 modules" in dry.out


def test_the_hint_for_gptq_keeps_all_inputs(kizami: Run, tiny_checkpoint: Path) -> None:
    for method, keep in (("weighted", ""), ("gptq", "--keep all ")):
        done = kizami("plan", tiny_checkpoint, "--method", method)
        assert f"kizami calibrate SRC --data FILE {keep}-o STATS makes them" in done.err


def test_a_method_that_nothing_uses_is_warned_of(kizami: Run, tiny_checkpoint: Path, stats: Statistics) -> None:
    words = ("plan", tiny_checkpoint, "--scheme")
    given = ("--method", "weighted", "--stats", stats.root)
    for scheme in ("bf16", "fp8-block"):
        (said,) = [text for text in kizami(*words, scheme, *given, "--json").json["warnings"] if "no effect" in text]
        assert said == "no weight is rounded to INT4 here: --method weighted and --stats have no effect"
    assert "--method minmax has no effect" in kizami(*words, "bf16", "--method", "minmax").err
    assert "no effect" not in kizami(*words, "bf16").err
    assert "no effect" not in kizami("plan", tiny_checkpoint, *given).err


def test_a_limit_on_weights_that_is_not_met_points_to_the_outputs(
    kizami: Run, converted: Path, tiny_checkpoint: Path, stats: Statistics, tmp_path: Path
) -> None:
    hint = (
        "weighted makes outputs more exact and weights less, on purpose: kizami report OUT --stats STATS --against SRC "
        "--max-output-error X holds the outputs to a limit"
    )
    given, limit = ("--method", "weighted", "--stats", stats.root), ("--max-rel-error", 0.01)
    for words in (
        ("convert", tiny_checkpoint, tmp_path / "out", *given, *limit),
        ("report", converted, *limit),
        ("verify", converted, *limit),
    ):
        done = kizami(*words)
        assert (done.code, f"kizami: failed: {hint}" in done.err) == (1, True), done.err
    assert kizami("verify", converted, *limit, "--json").json["hint"] == hint
    assert kizami("verify", converted, "--json").json["hint"] is None
    plain = kizami("convert", tiny_checkpoint, tmp_path / "plain", *limit)
    assert (plain.code, "on purpose" in plain.err) == (1, False)


def test_card_and_manifest_tell_what_it_was_calibrated_on(converted: Path, stats: Statistics) -> None:
    card = (converted / "README.md").read_text()
    assert "kizami convert SRC OUT --method weighted --stats STATS" in card
    assert "calibrated on 3,840 tokens of chat.jsonl, a.txt" in card
    assert "A calibrated method makes outputs more exact and single weights less, on purpose." in card
    manifest = read_manifest(converted)
    assert manifest["calibration"] == facts_of(stats)
    assert method_of(manifest) == Method("weighted", stats=stats.sha256)


def test_methods_without_statistics_keep_the_plan_hash_and_the_manifest_of_old(source: Checkpoint) -> None:
    plan = build_plan(source, Policy(), Method())
    assert "stats" not in plan.identity["method"]
    assert plan.identity["method"] == {k: v for k, v in asdict(Method()).items() if k != "stats"}


# ------------------------------------------------------------------------------------------- verification


def honest(out: Path, values: dict[str, bytes], **figures: Any) -> None:
    """New bytes for tensors of EXPERT, with the checksums of the report, and figures of its row."""
    tensors = Checkpoint.open(out).tensors
    for name, value in values.items():
        info = tensors[name]
        assert len(value) == info.nbytes
        forge(out, info.file, lambda data, i=info, v=value: data.__setitem__(slice(i.begin, i.end), v))

    def change(rows: list[dict[str, Any]]) -> None:
        row = next(row for row in rows if row["name"] == EXPERT)
        row["crc32"] |= {name: f"{zlib.crc32(value):08x}" for name, value in values.items()}
        row |= figures

    forge_rows(out, change)


def with_scales(source: Checkpoint, out: Path, change: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
    """EXPERT with other scales and the codes nearest under them, all figures in the report right."""
    step = next(step for step in build_plan(source, Policy(), Method()).steps if step.module == EXPERT)
    with TensorReader(source) as reader:
        raw = reader.read(step.weight).reshape(step.shape)
        w = ref.dequantize(raw, read_scales(step.encoding, reader), (128, 128))  # type: ignore[arg-type]
    scale = np.frombuffer(stored(out, EXPERT)[1], "<u2").reshape(w.shape[0], -1)
    s = ref.from_bf16(ref.to_bf16(change(ref.from_bf16(scale), w).astype(np.float32)))
    codes = ref.nearest_codes(w, s, 32)
    values = {f"{EXPERT}.weight_packed": ref.pack(codes).tobytes(), f"{EXPERT}.weight_scale": ref.to_bf16(s).tobytes()}
    sums = ref.error_sums(w, codes, s, 32)
    honest(
        out, values, rel_error=float(np.sqrt(sums["sum_e2"] / sums["sum_w2"])), error_energy=sums["sum_e2"],
        weight_energy=sums["sum_w2"], max_abs_error=sums["max_abs_error"], clipped_fraction=sums["clipped"] / w.size,
    )  # fmt: skip


@pytest.mark.parametrize("factor", [4.0, -4.0, 2.0**-20, 2.0**40])
def test_scales_that_no_weights_of_columns_lead_to_are_found_without_statistics(
    source: Checkpoint, out: Path, factor: float
) -> None:
    with_scales(source, out, lambda s, w: s * factor)
    assert [(p.code, p.tensor) for p in verify(out, against=source).problems] == [("bad_codes", EXPERT)]


def test_scales_that_lose_what_matters_are_found_with_statistics(
    source: Checkpoint, stats: Statistics, out: Path
) -> None:
    """Every group's scale fits its loudest column alone."""
    with_scales(source, out, lambda s, w: np.abs(w).reshape(*s.shape, -1).max(axis=2) / 40)
    assert "bad_codes" not in {p.code for p in verify(out, against=source).problems}
    found = verify(out, against=source, statistics=stats).problems
    assert [(p.code, p.tensor) for p in found] == [("bad_codes", EXPERT)]
    assert "as its columns weigh" in found[0].message


def other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case str():
            return value + "x"
        case int():
            return value + 1
        case float():
            return value * 1.001 + 1e-6
        case dict():
            return dict.fromkeys(value, "00000000")
    return 3


@pytest.mark.long
def test_no_field_of_a_row_can_be_changed(
    converted: Path, source: Checkpoint, stats: Statistics, tmp_path: Path
) -> None:
    for name, only_stats_tell in (
        (EXPERT, {"tokens", "weighted_rel_error"}),
        ("model.layers.1.mlp.experts.0.up_proj", {"tokens"}),
    ):
        fields = {"method", "tokens", "fallback", "rel_error"} | only_stats_tell
        for field in sorted(fields):
            out = Path(shutil.copytree(converted, tmp_path / f"{name}.{field}"))

            def change(rows: list[dict[str, Any]], name: str = name, field: str = field) -> None:
                row = next(row for row in rows if row["name"] == name)
                row[field] = other(row[field])

            forge_rows(out, change)
            assert verify(out, against=source).ok == (field in only_stats_tell), field
            assert not verify(out, against=source, statistics=stats).ok, field


DECIDED = {
    "gptq_reason": "the smaller loss", "effective_tokens": 3.5, "held_out_tokens": 40, "loss_gptq": 1.0,
    "loss_weighted": 2.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"method": "search", "fallback": NO_TOKEN},  # with the error that only weighted has
        {"method": "search"},
        {"method": "gptq"},
        {"method": None},
        {"fallback": "no time"},
        {"fallback": NOT_SEEN, "method": "weighted"},
        {"tokens": -1},
        {"tokens": 1.5},
        {"weighted_rel_error": -0.1},
        {"weighted_rel_error": "low"},
        {"weighted_rel_error": None},
        {"weighted_rel_error": float("nan")},
        {"loss_gptq": 1.0},
        DECIDED,
    ],
)
def test_rows_that_contradict_themselves_are_found_without_statistics(
    converted: Path, source: Checkpoint, stats: Statistics, change: dict[str, Any]
) -> None:
    plan = plan_of(source, stats)
    step, row = next(step for step in plan.packed if step.module == EXPERT), rows_of(converted)[EXPERT]
    assert Witness(None).claim(plan, step, row)[1] is None
    assert Witness(None).claim(plan, step, row | change)[1] is not None


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({"method": "gptq"}, True),
        ({"method": "weighted"}, True),
        ({"method": "search"}, False),
        ({"method": "gptq", "loss_gptq": 2.0}, False),  # not smaller
        ({"method": "gptq", "loss_weighted": None}, False),
        ({"method": "weighted", "loss_gptq": None}, True),
        ({"method": "weighted", "held_out_tokens": -1}, False),
        ({"method": "weighted", "effective_tokens": "many"}, False),
        ({"method": "weighted", "gptq_reason": 5}, False),
    ],
)
def test_what_gptq_decided_must_fit_what_it_says(
    converted: Path, source: Checkpoint, stats: Statistics, change: dict[str, Any], fits: bool
) -> None:
    plan = replace(plan_of(source, stats), method=Method("gptq", stats=stats.sha256))
    step, row = next(step for step in plan.packed if step.module == EXPERT), rows_of(converted)[EXPERT]
    assert (Witness(None).claim(plan, step, row | DECIDED | change)[1] is None) == fits
    assert Witness(None).claim(plan, step, row | change)[1] is not None


def test_a_row_that_contradicts_itself_is_a_problem(out: Path, source: Checkpoint) -> None:
    forge_rows(out, lambda rows: next(row for row in rows if row["name"] == EXPERT).update(loss_gptq=1.0))
    found = verify(out, against=source).problems
    assert [(p.code, p.tensor, p.message) for p in found] == [
        ("report_row", EXPERT, "has loss_gptq of what gptq decides")
    ]


def test_other_statistics_are_not_those_of_the_run(
    converted: Path, source: Checkpoint, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    other_stats = make_statistics(tiny_checkpoint, tmp_path / "STATS", seed=1)
    with pytest.raises(KizamiError, match="these are not the statistics of this run") as e:
        verify(converted, against=source, statistics=other_stats)
    assert e.value.code == "stats_mismatch"
    for sha256 in (other_stats.sha256, read_manifest(converted)["calibration"]["sha256"]):
        assert f"{sha256} (of chat.jsonl, a.txt)" in e.value.message


def test_statistics_of_a_run_without_any_are_refused(
    kizami: Run, source: Checkpoint, tiny_checkpoint: Path, stats: Statistics, tmp_path: Path
) -> None:
    run(build_plan(source, Policy(targets=(EXPERT,)), Method()), source, tmp_path / "out", workers=1)
    done = kizami("verify", tmp_path / "out", "--against", tiny_checkpoint, "--stats", stats.root)
    assert done.code == 2
    assert "no statistics were used" in done.err
    assert "leave --stats out" in done.err


def test_statistics_that_do_not_fit_are_a_problem_and_no_crash(
    out: Path, source: Checkpoint, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    few = make_statistics(tiny_checkpoint, tmp_path / "few", experts=2)
    forge_manifest(out, lambda manifest: manifest.update(calibration=facts_of(few)))
    problems = verify(out, against=source, statistics=few).problems
    assert [(p.code, p.tensor) for p in problems] == [("stats_mismatch", "model.layers.1.mlp.experts.2.down_proj")]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("calibration"),
        lambda m: m.update(method="search"),
        lambda m: m["calibration"].update(tokens=1 << 70),
        lambda m: m["calibration"].update(data=[{}]),
        lambda m: m["calibration"].update(note="better than all others"),
        lambda m: m["calibration"].update(libraries={"torch": 2}),
    ],
)
def test_a_manifest_that_says_something_else_of_its_calibration_is_refused(
    out: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    forge_manifest(out, change)
    assert {problem.code for problem in verify(out).problems} == {"bad_manifest"}


def test_what_manifest_and_statistics_say_of_the_tokens_must_agree(
    out: Path, source: Checkpoint, stats: Statistics
) -> None:
    forge_manifest(out, lambda manifest: manifest["calibration"].update(tokens=10**9))
    assert verify(out, against=source, statistics=stats).problems[0].message == "calibration is not what STATS says"


def test_without_statistics_verify_says_what_it_could_not_see(
    kizami: Run, converted: Path, tiny_checkpoint: Path, stats: Statistics
) -> None:
    done = kizami("verify", converted, "--against", tiny_checkpoint)
    assert done.code == 0
    assert "--stats STATS does" in done.err
    done = kizami("verify", converted, "--against", tiny_checkpoint, "--stats", stats.root)
    assert done.code == 0
    assert "--stats" not in done.err
    assert "statistics: 24 modules held to them" in done.out
    assert kizami("verify", converted, "--stats", stats.root).code == 2


def test_statistics_of_another_config_are_refused(source: Checkpoint, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """top_k or rope_theta changed: the same weights, another forward pass."""
    other = make_statistics(tiny_checkpoint, tmp_path / "STATS", config="0" * 64)
    with pytest.raises(KizamiError, match=r"another config\.json") as e:
        run(plan_of(source, other), source, tmp_path / "OUT", statistics=other)
    assert (e.value.code, e.value.file) == ("stats_mismatch", "config.json")
    assert not (tmp_path / "OUT.partial").exists()

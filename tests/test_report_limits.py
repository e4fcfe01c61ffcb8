"""Limits of `kizami report` by role, JUnit XML, and two outputs held against each other."""

import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cli_fixtures import Run
from client_fixtures import convert

from kizami.cli import report_limits as limits
from kizami.cli.report import last_line
from kizami.cli.report_limits import MAX_REL_ERROR, MIN_SQNR, Kind, missed, parse_limits
from kizami.formats.errors import KizamiError
from kizami.quantize.comparison import compare_rows, ratio_map
from kizami.quantize.report import encode_row, measured, pooled_error, read_report

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def outputs(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("outputs")
    return (
        convert(demo_checkpoint, folder / "search", "-q"),
        convert(demo_checkpoint, folder / "minmax", "--method", "minmax", "--group-size", "128", "-q"),
    )


@pytest.mark.parametrize("kind", [MAX_REL_ERROR, MIN_SQNR])
def test_limits_are_numbers_or_numbers_of_a_role(kind: Kind) -> None:
    assert parse_limits(kind, ["20", "routed_expert=21.5"]) == {"": 20.0, "routed_expert": 21.5}
    assert parse_limits(kind, None) == {}
    for text in ("x", "=20", "a=b", "nan", "inf", "routed_expert="):
        with pytest.raises(KizamiError, match=f"{kind.option} {text}; expected {kind.unit}, or ROLE={kind.unit}"):
            parse_limits(kind, [text])
    with pytest.raises(KizamiError, match="twice"):
        parse_limits(kind, ["20", "21"])


def test_no_error_is_below_zero_but_a_ratio_in_decibels_may_be() -> None:
    assert parse_limits(MIN_SQNR, ["-3"]) == {"": -3.0}
    with pytest.raises(KizamiError, match="expected X"):
        parse_limits(MAX_REL_ERROR, ["routed_expert=-0.1"])


def test_tensors_below_the_limit_of_their_role_are_named(kizami: Run, outputs: tuple[Path, Path]) -> None:
    rows = sorted(measured(read_report(outputs[0])), key=lambda row: row["sqnr_db"])
    limit = (rows[1]["sqnr_db"] + rows[2]["sqnr_db"]) / 2
    for word in (f"{limit}", f"routed_expert={limit}"):
        done = kizami("report", outputs[0], "--min-sqnr", word)
        assert done.code == 1
        assert f"{rows[0]['name']}: SQNR {rows[0]['sqnr_db']:.2f} dB, expected at least" in done.err
        body = kizami("report", outputs[0], "--min-sqnr", word, "--json").json
        assert {one["name"] for one in body["below"]} == {row["name"] for row in rows[:2]}
    assert kizami("report", outputs[0], "--min-sqnr", "1").code == 0


def test_tensors_above_the_limit_of_their_role_are_named_the_worst_first(
    kizami: Run, outputs: tuple[Path, Path]
) -> None:
    rows = sorted(measured(read_report(outputs[0])), key=lambda row: -row["rel_error"])
    limit = (rows[1]["rel_error"] + rows[2]["rel_error"]) / 2
    for word in (f"{limit}", f"routed_expert={limit}"):
        done = kizami("report", outputs[0], "--max-rel-error", word)
        assert done.code == 1
        assert f"{rows[0]['name']}: relative error {rows[0]['rel_error']:.4f}, expected at most {limit:g}" in done.err
        body = kizami("report", outputs[0], "--max-rel-error", word, "--json").json
        assert [one["name"] for one in body["exceeding"]] == [row["name"] for row in rows[:2]]
    assert kizami("report", outputs[0], "--max-rel-error", "0", "--max-rel-error", "routed_expert=0.5").code == 0


@pytest.mark.long
def test_both_limits_are_named_where_both_are_missed(kizami: Run, outputs: tuple[Path, Path]) -> None:
    done = kizami("report", outputs[0], "--max-rel-error", "0.0001", "--min-sqnr", "99")
    assert (done.code, "relative error" in done.err, "SQNR" in done.err) == (1, True, True)


def test_a_row_with_its_relative_error_alone_is_held_to_the_limit() -> None:
    rows = [{"name": "a", "role": "routed_expert", "rel_error": 0.1}, {"name": "b", "role": "norm", "rel_error": None}]
    assert missed(MIN_SQNR, rows, {"": 20.5}) == [
        {"name": "a", "role": "routed_expert", "sqnr_db": 20.0, "limit": 20.5}
    ]
    assert missed(MIN_SQNR, rows, {"": 19.5}) == []


def test_a_role_has_its_own_limit_before_that_of_all(kizami: Run, outputs: tuple[Path, Path]) -> None:
    assert kizami("report", outputs[0], "--min-sqnr", "99", "--min-sqnr", "routed_expert=1").code == 0


def test_a_limit_for_a_role_without_packed_tensors_is_a_mistake(kizami: Run, outputs: tuple[Path, Path]) -> None:
    done = kizami("report", outputs[0], "--min-sqnr", "attention=20", "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "bad_option")
    assert "routed_expert" in done.json["error"]["message"]


def test_a_limit_is_kept_by_codes_that_are_the_sources(kizami: Run, outputs: tuple[Path, Path], tmp_path: Path) -> None:
    exact = convert(outputs[0], tmp_path / "exact", "--format", "gptq", "-q")
    for words in (["--min-sqnr", "routed_expert=20"], ["--max-rel-error", "routed_expert=0"], ["--min-sqnr", "20"]):
        assert kizami("report", exact, *words).code == 0
    assert kizami("report", exact, "--min-sqnr", "attention=20").code == 2


# --------------------------------------------------------------------------------------------------------------- JUnit


def suite_of(text: str) -> tuple[ElementTree.Element, dict[str, ElementTree.Element | None]]:
    suite = ElementTree.fromstring(text)
    return suite, {case.get("name", ""): case.find("failure") for case in suite.iter("testcase")}


def test_each_limit_is_a_test_of_the_pipeline(kizami: Run, outputs: tuple[Path, Path], tmp_path: Path) -> None:
    words = ["--min-sqnr", "99", "--max-rel-error", "0.5", "--format", "junit", "-o", tmp_path / "r.xml"]
    assert kizami("report", outputs[0], *words).code == 1
    suite, cases = suite_of((tmp_path / "r.xml").read_text())
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert cases["relative error of every tensor at most 0.5"] is None
    failure = cases["SQNR of every tensor at least 99 dB"]
    assert failure is not None
    assert failure.get("message") == "240 tensors miss it"
    assert (failure.text or "").splitlines()[-1] == "and 40 more"


def test_without_limits_there_is_one_test_that_passes(kizami: Run, outputs: tuple[Path, Path]) -> None:
    _, cases = suite_of(kizami("report", outputs[0], "--format", "junit").out)
    assert cases == {"the report is whole": None}


# ---------------------------------------------------------------------------------------------------------- comparison


def test_the_same_weights_are_held_against_each_other(kizami: Run, outputs: tuple[Path, Path]) -> None:
    search, minmax = map(read_report, outputs)
    body = kizami("report", outputs[0], "--compare", outputs[1], "--json").json["compared"]
    (experts,) = body["roles"]
    a, b = pooled_error(measured(search)), pooled_error(measured(minmax))
    assert (experts["name"], experts["weights"]) == ("routed_expert", 240)
    assert (experts["a_error"], experts["b_error"]) == (pytest.approx(a), pytest.approx(b))
    assert a is not None
    assert b is not None
    assert experts["ratio"] == pytest.approx(b / a)
    assert experts["better"] == 0
    assert [layer["name"] for layer in body["layers"]] == [f"layer {i}" for i in range(1, 6)]
    assert experts["b_bytes"] < experts["a_bytes"]
    assert (body["here"], body["there"]) == ("w4a16-g32 search", "w4a16-g128 minmax")


def test_a_comparison_is_shown_in_words_and_in_markdown(kizami: Run, outputs: tuple[Path, Path]) -> None:
    done = kizami("report", outputs[0], "--compare", outputs[1])
    assert "here w4a16-g32 search, there w4a16-g128 minmax (minmax)" in done.out
    markdown = kizami("report", outputs[0], "--compare", outputs[1], "--format", "markdown").out
    assert "## Compared: here" in markdown
    assert "| routed_expert | 240 |" in markdown


def test_the_map_of_ratios_is_that_of_the_two_maps(outputs: tuple[Path, Path]) -> None:
    search, minmax = map(read_report, outputs)
    ratios = ratio_map(search, minmax)
    assert ratios.errors.shape == (3, 5)
    assert (ratios.errors > 0).all(), "minmax in larger groups is worse everywhere"
    assert abs(ratio_map(search, search).errors).max() == 0


def test_what_only_one_has_packed_is_named(outputs: tuple[Path, Path]) -> None:
    search, minmax = map(read_report, outputs)
    found = compare_rows(search, measured(minmax)[1:])
    assert found.only_a == (measured(minmax)[0]["name"],)
    assert found.only_b == ()
    assert found.roles[0].weights == 239


def test_outputs_of_two_sources_are_not_compared(
    kizami: Run, outputs: tuple[Path, Path], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    other = convert(tiny_checkpoint, tmp_path / "other", "-q")
    done = kizami("report", outputs[0], "--compare", other, "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "other_source")


# -------------------------------------------------------------------------------------------------- a report that lacks


def test_the_report_of_an_output_without_a_layer_of_the_source_is_whole(
    kizami: Run, outputs: tuple[Path, Path], demo_checkpoint: Path, tmp_path: Path
) -> None:
    out = convert(demo_checkpoint, tmp_path / "out", "--mtp", "drop", "-q")
    assert kizami("verify", out, "--against", demo_checkpoint).code == 0
    assert kizami("report", out, "--max-rel-error", "0.5").code == 0
    assert kizami("report", out, "--json").json["actions"]["drop"] == 71
    assert kizami("report", outputs[0], "--compare", out).code == 0


@pytest.mark.parametrize("kept", [0, 100])
def test_limits_are_not_kept_by_a_report_that_is_not_whole(
    kizami: Run, outputs: tuple[Path, Path], tmp_path: Path, kept: int
) -> None:
    out = shutil.copytree(outputs[0], tmp_path / "out")
    lines = (out / "kizami-report.jsonl").read_bytes().splitlines(keepends=True)
    (out / "kizami-report.jsonl").write_bytes(b"".join(lines[:kept]))
    for words in (["--max-rel-error", "0.5"], ["--compare", str(outputs[1])], ["--format", "junit"]):
        done = kizami("report", out, *words)
        assert done.code == 2
        assert "kizami-report.jsonl: is not whole:" in done.err
        assert "kizami.json counts" in done.err
    assert kizami("report", outputs[1], "--compare", out).code == 2


@pytest.mark.parametrize("change", [{"rel_error": None, "error_energy": None, "weight_energy": None}])
def test_a_rounded_weight_without_an_error_is_no_row(
    kizami: Run, outputs: tuple[Path, Path], tmp_path: Path, change: dict[str, object]
) -> None:
    out = shutil.copytree(outputs[0], tmp_path / "out")
    rows = read_report(out)
    at = next(i for i, row in enumerate(rows) if row["action"] == "quantize")
    rows[at] = {key: value for key, value in (rows[at] | change).items() if key != "row_crc32"}
    data = [encode_row({key: value for key, value in row.items() if key != "row_crc32"}) for row in rows]
    (out / "kizami-report.jsonl").write_bytes(b"".join(data))
    done = kizami("report", out, "--max-rel-error", "0.5")
    assert done.code == 2
    assert "was rounded, and its row has no error" in done.err


@pytest.mark.parametrize("change", [{"zero_groups": "x"}, {"shape": [2**62, 2**62]}])
def test_a_row_of_impossible_figures_is_refused(
    kizami: Run, outputs: tuple[Path, Path], tmp_path: Path, change: dict[str, object]
) -> None:
    out = shutil.copytree(outputs[0], tmp_path / "out")
    rows = [{key: value for key, value in row.items() if key != "row_crc32"} for row in read_report(out)]
    (out / "kizami-report.jsonl").write_bytes(b"".join(map(encode_row, [rows[0] | change, *rows[1:]])))
    done = kizami("report", out)
    assert (done.code, "line 1 is not a report row" in done.err) == (2, True)


def test_one_tensor_is_one() -> None:
    row = {"name": "x", "role": "routed_expert", "rel_error": 0.2, "limit": 0.1}
    body = {"out": "o", "max_rel_error": {"": 0.1}, "exceeding": [row], "min_sqnr": {}, "below": [], "outputs": None}
    assert b'message="1 tensor misses it"' in limits.junit(body)
    assert b'message="2 tensors miss it"' in limits.junit(body | {"exceeding": [row, row]})
    assert last_line({"rel_error": 0.1, "packed_modules": 1}).endswith(" over 1 module")
    assert last_line({"rel_error": 0.1, "packed_modules": 2000}).endswith(" over 2,000 modules")

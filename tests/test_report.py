"""Views on the report rows: pooled errors, worst tensors, thresholds."""

import json
from math import log10, sqrt

import pytest

from kizami.formats.errors import KizamiError
from kizami.quantize.report import (
    MAX_LINE_BYTES,
    SUMMED,
    encode_row,
    experts_of_few_tokens,
    fallback_reason,
    fallbacks,
    gptq_summary,
    layer_summaries,
    narrowed,
    over_threshold,
    pooled_error,
    read_report,
    role_summaries,
    weighted_error,
    worst_tensors,
)


def row(name: str, error: float | None, weight: float = 1.0, **more) -> dict:
    """A report row; error is the energy of the error, None for a tensor that was not packed."""
    base = {"name": name, "role": "routed_expert", "action": "quantize", "layer": 1, "shape": [2, 4]}
    base |= {"bytes": 10, "source_bytes": 20, "shard": "x.safetensors", "crc32": {name: "00000000"}}
    if error is not None:
        base |= {"error_energy": error, "weight_energy": weight}
        base |= {"rel_error": sqrt(error / weight) if weight else 0.0}
    return base | more


ROWS = [
    row("a", 0.04, 4.0),
    row("b", 0.25, 1.0, layer=2),
    row("zero", 0.0, 0.0),
    row("norm", None, role="norm", action="copy", layer=None),
]


def test_errors_are_pooled_by_energy_not_averaged():
    assert pooled_error(ROWS[:2]) == pytest.approx(sqrt(0.29 / 5))
    (experts,) = [line for line in role_summaries(ROWS) if line.role == "routed_expert"]
    assert experts.rel_error == pytest.approx(sqrt(0.29 / 5))
    assert experts.sqnr_db == pytest.approx(-10 * log10(0.29 / 5))
    assert (experts.max_rel_error, experts.worst, experts.tensors, experts.weights) == (0.5, "b", 3, 24)


def test_tensors_that_were_not_rounded_have_no_error():
    (norms,) = [line for line in role_summaries(ROWS) if line.role == "norm"]
    assert (norms.rel_error, norms.sqnr_db, norms.worst) == (None, None, None)


def test_a_zero_tensor_has_no_error_and_no_nan():
    assert pooled_error([row("zero", 0.0, 0.0)]) == 0.0
    assert pooled_error([]) is None


CALIBRATED = [
    row("e.0.weight", 0.1, method="gptq", gptq_reason="better", loss_gptq=1.0, loss_weighted=2.0, tokens=3),
    row("e.1.weight", 0.2, method="weighted", gptq_reason="worse", weighted_rel_error=0.5, tokens=900),
    row("e.2.weight", 0.3, method="search", fallback="no statistics", negative_scale_fraction=0.5),
]


@pytest.mark.parametrize("rows", [ROWS, CALIBRATED], ids=["plain", "calibrated"])
def test_what_a_run_sums_up_needs_no_other_keys_of_a_row(rows):
    fewer = [narrowed(one, SUMMED) for one in rows]
    assert all(one.keys() <= SUMMED and len(one) < len(whole) for one, whole in zip(fewer, rows, strict=True))
    for view in (role_summaries, pooled_error, gptq_summary, weighted_error, experts_of_few_tokens):
        assert view([one for one in fewer if "rel_error" in one]) == view([one for one in rows if "rel_error" in one])
    for named in (fallbacks, lambda found: worst_tensors(found, 9), lambda found: over_threshold(found, 0.2)):
        assert [one["name"] for one in named(fewer)] == [one["name"] for one in named(rows)]
    assert list(map(fallback_reason, fewer)) == list(map(fallback_reason, rows))


def test_the_rows_of_a_file_can_be_read_with_few_keys(tmp_path):
    (tmp_path / "kizami-report.jsonl").write_bytes(b"".join(map(encode_row, ROWS)))
    assert read_report(tmp_path, SUMMED) == [narrowed(one, SUMMED) for one in read_report(tmp_path)]
    assert read_report(tmp_path, {"name"}) == [{"name": one["name"]} for one in ROWS]


def test_layers_are_in_order_and_name_their_worst_tensor():
    assert [(line.layer, line.tensors, line.worst) for line in layer_summaries(ROWS)] == [(1, 2, "a"), (2, 1, "b")]


def test_worst_tensors_are_sorted_by_error_then_name():
    rows = [row("y", 0.25), row("x", 0.25), row("z", 0.5)]
    assert [r["name"] for r in worst_tensors(rows, 2)] == ["z", "x"]


def test_a_threshold_is_exceeded_only_above_it():
    assert [r["name"] for r in over_threshold(ROWS, 0.1)] == ["b"]
    assert over_threshold(ROWS, 0.5) == []


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", '{"name": 3}', "\udcff"),
        *(json.dumps(ROWS[0] | {key: value}) for key, value in (("rel_error", "x"), ("shape", 3), ("bytes", True))),
        *(json.dumps(ROWS[0] | {key: value}) for key, value in (("crc32", {"a": 1}), ("crc32", []), ("shard", None))),
        json.dumps(ROWS[0] | {"error_energy": float("nan")}),
        json.dumps(ROWS[0] | {"name": "n" * MAX_LINE_BYTES}),
        encode_row(ROWS[0]).decode().rstrip().replace('"layer":1', '"layer":2'),
    ],
)
def test_a_damaged_report_names_the_line(tmp_path, line):
    path = tmp_path / "kizami-report.jsonl"
    path.write_bytes(encode_row(ROWS[0]) + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(KizamiError, match=r"kizami-report\.jsonl: (a: )?line 2"):
        read_report(tmp_path)

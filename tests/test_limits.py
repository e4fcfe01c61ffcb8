"""The dearest inputs that are still read, and those beyond: nobody's folder takes minutes or gigabytes."""

import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mutations
import pytest
from case_runner import assert_refused, kizami, measure
from forging import row_line

from kizami.formats import checkpoint, index
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.families import find_family
from kizami.quantize.planner import build_plan
from kizami.quantize.settings import Method, Policy

CONFIG = {"model_type": "deepseek_v3", "num_hidden_layers": 2}
EXPERT = "model.layers.1.mlp.experts.0.up_proj.weight"
TIB = 1 << 40


def entry(dtype: str, shape: list[int], begin: int, nbytes: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + nbytes]}


def save(folder: Path, files: dict[str, dict[str, Any]], data: int | None = None) -> Path:
    """Headers with holes for data: as much of it as they say, or `data` bytes."""
    folder.mkdir()
    for file, header in files.items():
        text = json.dumps(header).encode()
        claimed = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(folder / file, 8 + len(text) + (claimed if data is None else data))
    if list(files) != ["model.safetensors"]:
        weight_map = {name: file for file, header in files.items() for name in header}
        (folder / index.INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    mutations.good_source().save(folder / "src")
    said = kizami("convert", folder / "src", folder / "out", "--workers", "1", "--method", "minmax")
    assert said.code == 0, said.stderr
    return folder


@pytest.mark.long
@pytest.mark.slow
def test_terabytes_in_a_header_cost_no_memory(tmp_path: Path, good: Path) -> None:
    huge = {EXPERT: entry("BF16", [1 << 20, 1 << 20], 0, 2 * TIB)}
    claims = save(tmp_path / "claims", {"model.safetensors": huge}, data=1000)
    has = save(tmp_path / "has", {f"m-{i}.safetensors": {f"{i}.{EXPERT}": huge[EXPERT]} for i in range(4)})
    for folder, code in ((claims, 2), (has, 0)):
        for command in ("inspect", "plan"):  # which for so long a job would load the kernels, to time them
            options = ["--measure", "never"] if command == "plan" else []
            done = measure([command, str(good / "src"), *options], [command, str(folder), *options])
            assert (done["loaded"], done["code"]) == (0, code)
            assert done["mib"] < 8
            assert done["seconds"] < 2
    assert_refused(kizami("plan", claims), ["expected 2199023255", "by its header"])


def test_terabytes_that_do_not_fit_are_refused_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "src", {"model.safetensors": {EXPERT: entry("BF16", [1 << 20, 1 << 20], 0, 2 * TIB)}})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**11))
    tracemalloc.start()
    said = kizami("convert", source, tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert_refused(said, ["bytes are still to be written, and 100,000,000,000 are free"])
    assert peak < 64 << 20
    assert not list(tmp_path.rglob("*model-*"))


@pytest.mark.parametrize(("limit", "value"), [("MAX_TENSORS", 5), ("MAX_ALL_HEADER_BYTES", 300)])
def test_tensors_and_headers_are_limited_over_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    files = {f"m-{i}.safetensors": {f"{i}.{j}": entry("U8", [1], j, 1) for j in range(2)} for i in range(4)}
    source = save(tmp_path / "src", files)
    assert len(Checkpoint.open(source).tensors) == 8
    monkeypatch.setattr(checkpoint, limit, value)
    with pytest.raises(KizamiError, match=f"expected at most .*{value}") as caught:
        Checkpoint.open(source)
    assert caught.value.code == "too_large"
    assert caught.value.file == "m-2.safetensors"


def test_an_index_of_more_files_than_any_model_has_is_refused_before_one_is_looked_up(tmp_path: Path) -> None:
    source = save(tmp_path / "src", {"a.safetensors": {"a": entry("U8", [1], 0, 1)}})
    names = {f"t{i}": f"{i}.safetensors" for i in range(index.MAX_FILES + 1)}
    (source / index.INDEX_NAME).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(KizamiError, match=f"names {index.MAX_FILES + 1} files, expected at most {index.MAX_FILES}"):
        Checkpoint.open(source)


def test_a_config_of_nothing_but_brackets_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    source = save(tmp_path / "src", {"model.safetensors": {"a": entry("U8", [1], 0, 1)}})
    (source / "config.json").write_text('{"a":[' + ("[" * 60 + "]" * 60 + ",") * 17_000 + "0]}")
    with pytest.raises(KizamiError, match=f"expected at most {checkpoint.MAX_CONFIG_MARKS}"):
        Checkpoint.open(source)


def test_a_hundred_thousand_next_token_layers_are_a_short_warning_and_no_long_search() -> None:
    names = [f"model.layers.{i}.eh_proj.weight" for i in range(99_999)]
    begin = time.process_time()
    family, warnings = find_family({}, names)
    assert family.mtp_layers == tuple(range(99_999))
    assert all(family.place(name).in_mtp for name in names)
    assert not family.place("model.layers.99999.x").in_mtp
    assert max(map(len, warnings)) < 400
    assert "[0, 1, 2, 3, 4, 5, 6, 7] and 99991 more found" in warnings[-1]
    _, warnings = find_family(CONFIG, names)
    assert "layers [2, 3, 4, 5, 6, 7, 8, 9] and 99989 more lie beyond" in warnings[-1]
    assert time.process_time() - begin < 5


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.layers.{0}.b{0}.c{0}", "layers.{0}.{1}x", "language_model.q{0}.z{0}", "{0}"])
def test_ten_thousand_modules_of_any_name_are_planned_in_seconds(tmp_path: Path, name: str) -> None:
    packed = {f"model.layers.1.mlp.experts.{i}.x{i}.weight": entry("BF16", [1, 32], 64 * i, 64) for i in range(2000)}
    at = 64 * 2000
    plain = {name.format(i, "1." * 400) + ".weight": entry("BF16", [1, 0], at, 0) for i in range(8000)}
    source = save(tmp_path / "src", {"model.safetensors": packed | plain})
    begin = time.process_time()
    plan = build_plan(Checkpoint.open(source), Policy(), Method())
    assert plan.counts == {"copy": 8000, "quantize": 2000}
    assert time.process_time() - begin < 10


def forged(good: Path, folder: Path, file: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """The output with `change` made in a JSON file of it, and hashes that say nothing of it."""
    files = mutations.load(good / "out")
    value = json.loads(files[file])
    change(value)
    files[file] = json.dumps(value, indent=2).encode() + b"\n"
    mutations.store(mutations.forge(files), folder)
    return folder


@pytest.mark.parametrize("where", ["ignore", "targets"])
def test_a_pattern_without_end_in_an_output_is_found_and_not_tried(tmp_path: Path, good: Path, where: str) -> None:
    def change(config: dict[str, Any]) -> None:
        quant = config["quantization_config"]
        (quant if where == "ignore" else quant["config_groups"]["group_0"])[where].append("re:(.*.*.*.*)*(x|x)*!")

    said = kizami("verify", forged(good, tmp_path / "out", "config.json", change))
    assert said.code == 1
    assert "which is none that kizami writes" in said.stderr


def test_a_pattern_without_end_in_a_manifest_is_found_and_not_tried(tmp_path: Path, good: Path) -> None:
    out = forged(good, tmp_path / "out", "kizami.json", lambda m: m["policy"]["ignore"].append("re:(.*.*)*!"))
    said = kizami("verify", out, "--against", good / "src")
    assert said.code == 1
    assert "a repeated group" in said.stderr


def test_a_pattern_without_end_is_not_taken_from_the_user_either(good: Path) -> None:
    assert_refused(kizami("plan", good / "src", "--ignore", "re:(a+)+$"), ["re:(a+)+$", "a repeated group"])


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(rope_theta=1.0),
        lambda c: c.update(auto_map={"AutoModel": "evil.py"}),
        lambda c: c["quantization_config"]["ignore"].append(r"re:.*\.decoder\..*"),
    ],
)
def test_a_forged_config_that_fits_the_tensors_is_held_against_the_source(
    tmp_path: Path, good: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    out = forged(good, tmp_path / "out", "config.json", change)
    assert kizami("verify", out).code == 0  # nothing in the folder tells
    said = kizami("verify", out, "--against", good / "src")
    assert said.code == 1
    assert "config.json: is not what follows from the source and the policy" in said.stderr


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("warnings"),
        lambda m: m.pop("family"),
        lambda m: m.pop("counts"),
        lambda m: m.pop("clip_allowance"),
        lambda m: m.update(dialect=[]),
        lambda m: m.update(scheme=1),
        lambda m: m.update(warnings=[None]),
        lambda m: m.update(extra=float("nan")),
        lambda m: m["output"].update(bits_per_weight="4"),
        lambda m: m["output"].update(bits_per_weight=float("inf")),
        lambda m: m["output"].update(bytes=10**400),
        lambda m: m["output"].pop("file_bytes"),
        lambda m: m["policy"].update(max_shard_bytes="5GB"),
        lambda m: m["counts"].update(quantize=None),
    ],
)
def test_a_forged_manifest_is_refused_by_every_reader_of_it(
    tmp_path: Path, good: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    out = forged(good, tmp_path / "out", "kizami.json", change)
    for words in (["report", out], ["report", out, "--json"], ["report", out, "--format", "markdown"]):
        said = kizami(*words)
        assert said.code == 2
        assert "kizami.json" in said.stdout + said.stderr
    for words in (["verify", out], ["verify", out, "--against", good / "src"], ["verify", out, "--json"]):
        said = kizami(*words)
        assert said.code == 1
        assert "kizami.json" in said.stdout + said.stderr


NOT_MEASURED = dict.fromkeys(("rel_error", "error_energy", "weight_energy"))  # as of a tensor that is not packed


@pytest.mark.parametrize("value", ["x", [], [1], {}, None, 0, {"ignore": 1}, {"config_groups": []}])
@pytest.mark.parametrize("key", ["quantization_config", "text_config"])
def test_a_forged_config_of_the_wrong_types_is_a_problem_and_no_crash(
    tmp_path: Path, good: Path, key: str, value: Any
) -> None:
    def change(config: dict[str, Any]) -> None:
        config.pop("quantization_config")
        config[key] = value

    said = kizami("verify", forged(good, tmp_path / "out", "config.json", change))
    assert said.code == 1
    assert "config.json" in said.stderr


ROWS: list[dict[str, Any]] = [
    {"sqnr_db": "x"},
    {"clipped_fraction": "0.1"},
    {"max_abs_error": 1e400},
    {"bytes": -1},
    {"bytes": 10**30},
    {"shape": [2**62] * 40},
    {"layer": "1"},
    {"error_energy": -1.0},
    {"error_energy": 1e308, "weight_energy": 1e-308},
    {"rel_error": None},
    NOT_MEASURED,
    {"extra": float("nan")},
    {"extra": {"a": [float("nan")]}},
    {"name": None},
    {"role": 1},
]


@pytest.mark.parametrize("key", ["layer", "shape", "crc32", "bytes", "rel_error"])
def test_a_report_row_without_what_every_row_has_is_refused(tmp_path: Path, good: Path, key: str) -> None:
    files = mutations.load(good / "out")
    rows = [json.loads(line) for line in files["kizami-report.jsonl"].splitlines()]
    del next(row for row in rows if row["action"] == "quantize")[key]
    files["kizami-report.jsonl"] = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    mutations.store(mutations.forge(files), tmp_path / "out")
    assert_refused(kizami("report", tmp_path / "out"), ["is not a report row"])


@pytest.mark.parametrize("values", ROWS)
def test_a_forged_report_row_is_refused_or_shown_by_every_reader_of_it(
    tmp_path: Path, good: Path, values: dict[str, Any]
) -> None:
    files = mutations.load(good / "out")
    rows = [json.loads(line) for line in files["kizami-report.jsonl"].splitlines()]
    next(row for row in rows if row["action"] == "quantize").update(values)
    files["kizami-report.jsonl"] = b"".join(row_line(row) for row in rows)
    mutations.store(mutations.forge(files), tmp_path / "out")
    out = tmp_path / "out"
    for words in (["report", out], ["report", out, "--json"], ["report", out, "--format", "markdown"]):
        said = kizami(*words)
        assert said.code == 2, said
    for words in (["verify", out, "--against", good / "src"], ["verify", out, "--json"]):
        said = kizami(*words)
        assert said.code == (0 if values == NOT_MEASURED and "--json" in words else 1), said

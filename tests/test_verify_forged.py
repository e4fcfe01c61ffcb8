"""verify --against finds what a forger changed in a finished output, whose every hash agrees with what it now holds."""

import hashlib
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forging import forge, forge_manifest, forge_rows

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.header import encode_header
from kizami.formats.strict_json import dump_json
from kizami.quantize.pipeline import run
from kizami.quantize.planner import build_plan
from kizami.quantize.report import read_report
from kizami.quantize.settings import Method, Policy
from kizami.quantize.verify import verify

EXPERT = "model.layers.1.mlp.experts.3.up_proj"


@pytest.fixture(scope="module")
def source(tiny_checkpoint: Path) -> Checkpoint:
    return Checkpoint.open(tiny_checkpoint)


@pytest.fixture(scope="module")
def converted(source: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("forged") / "out"
    run(build_plan(source, Policy(), Method()), source, out, workers=2)
    assert verify(out, against=source).ok
    return out


@pytest.fixture
def out(converted: Path, tmp_path: Path) -> Path:
    """A copy to forge."""
    return Path(shutil.copytree(converted, tmp_path / "out"))


def found(out: Path, source: Checkpoint) -> set[tuple[str, str | None]]:
    return {(problem.code, problem.file) for problem in verify(out, against=source).problems}


def put(out: Path, values: dict[str, bytes]) -> None:
    """New bytes for tensors, with the checksums of the report."""
    tensors = Checkpoint.open(out).tensors
    for name, value in values.items():
        info = tensors[name]
        assert len(value) == info.nbytes

        def write(data: bytearray, begin: int = info.begin, end: int = info.end, value: bytes = value) -> None:
            data[begin:end] = value

        forge(out, info.file, write)


@pytest.mark.parametrize("scale", [2.0**60, 2.0**-60, 1.0])
def test_a_ruined_expert_is_found_though_every_code_is_the_nearest(out: Path, source: Checkpoint, scale: float) -> None:
    packed = Checkpoint.open(out).tensors[EXPERT + ".weight_packed"]
    rows, cols = packed.shape[0], packed.shape[1] * 8
    word = np.full(rows * cols // 32, np.float32(scale).view(np.uint32) >> 16, np.uint16)
    weight = source.tensors[EXPERT + ".weight"]
    with open(source.path(weight.file), "rb") as file:
        file.seek(weight.begin)
        sign = np.frombuffer(file.read(weight.nbytes), np.uint8).reshape(rows, cols) >> 7
    codes = np.zeros((rows, cols), np.uint32) if scale > 1e-9 else np.where(sign, -8, 7)
    nibbles = (codes.astype(np.int64) + 8).astype(np.uint32).reshape(rows, -1, 8)
    words = (nibbles << (4 * np.arange(8, dtype=np.uint32))).sum(axis=2, dtype=np.uint32)
    values = {EXPERT + ".weight_packed": words.tobytes(), EXPERT + ".weight_scale": word.tobytes()}
    put(out, values)

    def honest(rows: list[dict[str, Any]]) -> None:
        row = next(row for row in rows if row["name"] == EXPERT)
        row["crc32"] |= {name: f"{zlib.crc32(value):08x}" for name, value in values.items()}

    forge_rows(out, honest)
    problems = verify(out, against=source).problems
    assert [(p.code, p.tensor) for p in problems] == [("bad_codes", EXPERT)]


def rows_of(converted: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (converted / "kizami-report.jsonl").read_text().splitlines()]


def other(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case str():
            return value + "x"
        case int():
            return value + 1
        case float():
            return value * 1.001 + 1e-6
        case list():
            return value[::-1]
        case dict():
            return dict.fromkeys(value, "00000000")
    return 3


@pytest.mark.long
def test_no_field_of_a_row_can_be_changed(converted: Path, source: Checkpoint, tmp_path: Path) -> None:
    fields = {*next(row for row in rows_of(converted) if row["name"] == EXPERT)} - {"row_crc32", "sqnr_top_db"}
    assert len(fields) > 20
    for field in sorted(fields):
        out = Path(shutil.copytree(converted, tmp_path / field))

        def change(rows: list[dict[str, Any]], field: str = field) -> None:
            row = next(row for row in rows if row["name"] == EXPERT)
            row[field] = other(row[field])

        forge_rows(out, change)
        assert not verify(out, against=source).ok, field


@pytest.mark.parametrize("change", ["reversed", "invented", "missing", "key"])
def test_rows_are_those_of_the_plan(out: Path, source: Checkpoint, change: str) -> None:
    def edit(rows: list[dict[str, Any]]) -> None:
        match change:
            case "reversed":
                rows.reverse()
            case "invented":
                rows.append(rows[0] | {"name": "model.layers.1.mlp.experts.9.up_proj", "crc32": {}})
            case "missing":
                del rows[5]
            case "key":
                rows[5]["note"] = "perfect"

    forge_rows(out, edit)
    assert not verify(out, against=source).ok


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("family", "glm5"),
        ("dialect", "none"),
        ("counts", {"quantize": 1}),
        ("warnings", ["all is well"]),
        ("scheme", "w4a16-g128"),
        ("has_negative_scales", False),
        ("plan_hash", "0" * 64),
        ("note", "perfect"),
    ],
)
def test_no_key_of_the_manifest_can_be_changed(out: Path, source: Checkpoint, key: str, value: object) -> None:
    forge_manifest(out, lambda manifest: manifest.update({key: value}))
    assert not verify(out, against=source).ok


@pytest.mark.parametrize("origin", ["gone", {}, 5, {"repo": "a", "revision": 5}])
def test_an_origin_of_another_form_is_no_crash(out: Path, source: Checkpoint, origin: object) -> None:
    forge_manifest(out, lambda m: m.pop("origin") if origin == "gone" else m.update(origin=origin))
    assert verify(out, against=source).ok == (origin == "gone")


def test_more_patterns_than_anyone_writes_are_refused(out: Path, source: Checkpoint) -> None:
    forge_manifest(out, lambda m: m["policy"].update(ignore=[f"re:.*{i}x" for i in range(100_000)]))
    assert {p.code for p in verify(out, against=source).problems} == {"bad_pattern"}


@pytest.mark.parametrize("change", [{"mtp": 0}, {"expert": 3.0}, {"sqnr_top_db": "gone"}])
def test_the_types_and_keys_of_a_row_are_held_too(out: Path, source: Checkpoint, change: dict[str, Any]) -> None:
    def edit(rows: list[dict[str, Any]]) -> None:
        row = next(row for row in rows if row["name"] == EXPERT)
        row.update(change)
        if row["sqnr_top_db"] == "gone":
            del row["sqnr_top_db"]

    forge_rows(out, edit)
    assert not verify(out, against=source).ok


@pytest.mark.parametrize("key", ["bits_per_weight", "file_bytes", "bytes", "tensors"])
def test_no_total_of_the_manifest_can_be_changed(out: Path, source: Checkpoint, key: str) -> None:
    forge_manifest(out, lambda manifest: manifest["output"].update({key: manifest["output"][key] + 1}))
    assert not verify(out, against=source).ok


def test_an_origin_that_cannot_be_checked_is_said(out: Path, source: Checkpoint) -> None:
    forge_manifest(out, lambda manifest: manifest.update(origin={"repo": "a/b", "revision": "c"}))
    result = verify(out, against=source)
    assert result.ok
    assert ["was not checked" in note for note in result.notes] == [True]


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "more": "words"}])
def test_the_metadata_of_a_shard_cannot_be_changed(
    out: Path, source: Checkpoint, metadata: dict[str, str] | None
) -> None:
    header = next(iter(Checkpoint.open(out).headers.values()))
    specs = [info.spec for info in header.tensors]
    forge(out, header.file, lambda data: data.__setitem__(slice(header.data_begin), encode_header(specs, metadata)))
    assert ("other_header", header.file) in found(out, source)


def test_index_and_config_are_held_to_every_byte(out: Path, source: Checkpoint) -> None:
    index, config = "model.safetensors.index.json", "config.json"
    forge(
        out,
        index,
        lambda data: data.__setitem__(slice(None), bytes(data).replace(b'"total_size": ', b'"total_size": 1')),
    )
    forge(out, config, lambda data: data.__setitem__(slice(None), json.dumps(json.loads(bytes(data))).encode()))
    assert found(out, source) == {("other_file", index), ("other_file", config)}


def test_a_config_that_says_more_is_found(out: Path, source: Checkpoint) -> None:
    def trust(data: bytearray) -> None:
        data[:] = dump_json(json.loads(bytes(data)) | {"auto_map": {"AutoModel": "evil.Model"}})

    forge(out, "config.json", trust)
    assert found(out, source) == {("other_file", "config.json")}


@pytest.mark.parametrize("name", ["tokenizer.json", "kizami-report.jsonl", "kizami.json"])
def test_a_file_that_leads_out_of_the_output_is_found(out: Path, tmp_path: Path, name: str) -> None:
    shutil.move(out / name, tmp_path / name)
    os.symlink(tmp_path / name, out / name)
    code = "outside_folder" if name == "kizami.json" else "changed_file"
    assert (code, name) in {(p.code, p.file) for p in verify(out).problems}


def test_weights_behind_a_link_out_of_the_output_are_not_looked_at(out: Path, tmp_path: Path) -> None:
    shard = next(iter(Checkpoint.open(out).headers))
    shutil.move(out / shard, tmp_path / shard)
    os.symlink(tmp_path / shard, out / shard)
    (problem,) = verify(out).problems
    assert (problem.code, problem.file) == ("changed_file", shard)
    assert "leads out of the folder" in problem.message


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_card_may_be_edited_but_must_be_a_file(out: Path, source: Checkpoint, tmp_path: Path, kind: str) -> None:
    (out / "README.md").unlink()
    (tmp_path / "elsewhere").write_text("a secret")
    os.symlink(tmp_path / "elsewhere", out / "README.md") if kind == "link" else os.mkfifo(out / "README.md")
    assert ("changed_file", "README.md") in found(out, source)


def test_a_report_that_leads_out_of_the_output_is_not_read(out: Path, tmp_path: Path) -> None:
    shutil.move(out / "kizami-report.jsonl", tmp_path / "rows")
    os.symlink(tmp_path / "rows", out / "kizami-report.jsonl")
    with pytest.raises(KizamiError, match="leads out of the folder"):
        read_report(out)


@pytest.mark.parametrize("name", [".gitattributes/modeling.py", ".cache", ".gitignore/x"])
def test_only_what_git_and_the_hub_leave_may_be_hidden(out: Path, name: str) -> None:
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("import os")
    assert [(p.code, p.file) for p in verify(out).problems] == [("stranger", name)]


def test_a_hole_of_terabytes_is_not_hashed(out: Path) -> None:
    names = ["tokenizer.json", next(iter(Checkpoint.open(out).headers))]
    for name in names:
        os.truncate(out / name, 1 << 42)
    assert {p.file for p in verify(out).problems} == set(names)
    for name in names:
        os.truncate(out / name, 0)


def test_the_forger_of_these_tests_leaves_no_hash_wrong(out: Path) -> None:
    forge_rows(out, lambda rows: rows[3].update(reason="none"))
    assert verify(out).ok
    digest = hashlib.sha256((out / "kizami-report.jsonl").read_bytes()).hexdigest()
    assert json.loads((out / "kizami.json").read_bytes())["files"]["kizami-report.jsonl"] == digest

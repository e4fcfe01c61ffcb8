"""verify finds what is not as it must be, in any file, and names file and tensor."""

import json
import os
import shutil
from pathlib import Path

import make_cases
import numpy as np
import pytest
from forging import forge, forge_rows

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.files import file_sha256
from kizami.formats.strict_json import dump_json
from kizami.quantize.manifest import self_hash
from kizami.quantize.pipeline import run
from kizami.quantize.planner import build_plan
from kizami.quantize.settings import Method, Policy
from kizami.quantize.verify import verify

DEFAULT = Policy()
SEARCH = Method()


def convert(source: Path, out: Path, policy: Policy = DEFAULT, method: Method = SEARCH) -> Path:
    checkpoint = Checkpoint.open(source)
    run(build_plan(checkpoint, policy, method), checkpoint, out, workers=2)
    return out


@pytest.fixture(scope="module")
def converted(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tiny_checkpoint, tmp_path_factory.mktemp("verify") / "out", Policy(max_shard_bytes=1_000_000))


@pytest.fixture
def out(converted: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(converted, tmp_path / "out"))


@pytest.mark.parametrize(
    ("policy", "method"),
    [
        (Policy(), Method("search")),
        (Policy(group_size=64), Method("search", clip_allowance=0.5)),
        (Policy(group_size=128), Method("search", scale_sign="positive")),
        (Policy(), Method("minmax")),
        (Policy(mtp="drop"), Method("signed")),
        (Policy(rest="fp8"), Method("minmax")),
        (Policy(targets=("re:.*",), ignore=("re:.*(embed_tokens|head|mlp\\.gate)$",)), Method("search")),
    ],
)
def test_what_was_just_converted_is_right_to_the_last_bit(tiny_checkpoint, tmp_path, policy, method):
    out = convert(tiny_checkpoint, tmp_path / "out", policy, method)
    found = verify(out, against=Checkpoint.open(tiny_checkpoint))
    assert found.problems == ()
    assert found.checked["tensors against the source"] > 40


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_unscaled_sources_are_verified_too(tmp_path, dtype):
    source = make_cases.tiny()
    w = make_cases.rng("plain").standard_normal((128, 256)).astype(np.float32) * 0.02
    data = {"BF16": make_cases.bf16(w), "F16": w.astype(np.float16), "F32": w}[dtype].tobytes()
    for proj in ("gate_proj", "up_proj"):
        name = f"model.layers.1.mlp.experts.0.{proj}.weight"
        shard = source.find(name)
        shard[name] = make_cases.Tensor(dtype, (128, 256), data)
        del shard[name + "_scale_inv"]
    folder = source.save(tmp_path / "src")
    out = convert(folder, tmp_path / "out")
    assert verify(out, against=Checkpoint.open(folder)).problems == ()


def test_every_flipped_bit_is_found_and_its_file_named(out, fault_row):
    files = sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file() and p.name != "README.md")
    random = np.random.default_rng(0)
    flips = 0
    for file in files:
        path = out / file
        original = path.read_bytes()
        for bit in {0, 8 * len(original) - 1, *(int(b) for b in random.integers(0, 8 * len(original), 6))}:
            data = bytearray(original)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            found = verify(out)
            assert not found.ok, (file, bit)
            assert {p.file for p in found.problems} == {file}, (file, bit)
            flips += 1
        path.write_bytes(original)
    assert verify(out).ok
    fault_row("a flipped bit in any file of `OUT` but `README.md`: 8 of each", flips, FOUND + "the file")


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


FOUND = "`verify`: exit code 1, names "


@pytest.mark.long
def test_a_flipped_bit_of_a_tensor_names_the_tensor(out, fault_row):
    checkpoint = Checkpoint.open(out)
    random = np.random.default_rng(1)
    flips = 0
    for info in checkpoint.tensors.values():
        for bit in {8 * info.begin, 8 * info.end - 1, int(random.integers(8 * info.begin, 8 * info.end))}:
            flip(out / info.file, bit)
            whole, tensor = verify(out).problems
            assert (whole.code, whole.file) == ("changed_file", info.file)
            assert (tensor.code, tensor.file, tensor.tensor) == ("changed_tensor", info.file, info.name), bit
            flip(out / info.file, bit)
            flips += 1
    fault_row("a flipped bit in a tensor of `OUT`: first, last and any of each", flips, FOUND + "file and tensor")


@pytest.mark.parametrize("place", ["length", "dtype", "shape", "offset", "name", "metadata", "padding"])
def test_a_flipped_bit_of_a_header_is_told_from_one_of_a_tensor(out, place):
    path = min(out.glob("*.safetensors"))
    data = path.read_bytes()
    word = {"length": b"", "dtype": b'"BF1', "shape": b'"shape":[', "offset": b'"data_offsets":[', "name": b".weight"}
    word |= {"metadata": b'"format":"p', "padding": b"}}"}
    flip(path, 8 * (data.index(word[place]) + len(word[place]) - (place == "name")))
    whole, *rest = verify(out).problems
    assert (whole.code, whole.file) == ("changed_file", path.name)
    assert rest
    assert {p.file for p in rest} == {path.name}
    if place in ("metadata", "padding"):
        assert [p.code for p in rest] in (["changed_header"], ["bad_json"])
    if place == "name":
        assert {p.code for p in rest} == {"changed_tensor"}
        assert {p.tensor.endswith(".weight") for p in rest} == {True, False}  # the old name is missed, the new unknown


def test_a_flipped_bit_of_the_index_names_the_tensor_of_its_entry(out, fault_row):
    path = out / "model.safetensors.index.json"
    data = path.read_bytes()
    name = f"{EXPERT}.weight_scale"
    for at in (data.index(name.encode()) + 9, data.index(b".safetensors", data.index(name.encode()))):
        flip(path, 8 * at)
        whole, entry, *_ = verify(out).problems
        assert (whole.code, whole.file, whole.tensor) == ("changed_file", path.name, None)
        assert (entry.code, entry.file, entry.tensor) == ("changed_entry", path.name, name)
        assert "line " in entry.message
        flip(path, 8 * at)
    flip(path, 8 * (data.index(b'"total_size": ') + 15))
    assert [(p.code, p.tensor) for p in verify(out).problems][1] == ("changed_entry", None)
    fault_row("a flipped bit in the index of `OUT`", 3, FOUND + "file, line and tensor")


def test_a_flipped_bit_of_the_report_names_line_and_tensor(out, fault_row):
    path = out / "kizami-report.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if f'"name":"{EXPERT}"'.encode() in line)
    figure = lines[number].index(b'"rel_error":0.') + 14
    flip(path, 8 * (sum(map(len, lines[:number])) + figure))
    whole, row, *_ = verify(out).problems
    assert (whole.code, whole.file) == ("changed_file", path.name)
    assert (row.code, row.tensor) == ("changed_row", EXPERT)
    assert f"line {number + 1} " in row.message
    fault_row("a flipped bit in the report of `OUT`", 1, FOUND + "file, line and tensor")


def test_a_tensor_and_one_called_weight_inside_it_are_two_rows(tmp_path):
    source = make_cases.tiny()
    shard = source.shards[make_cases.shard_name(2, 3)]
    shard |= make_cases.normal("model.layers.1.thing", 8) | make_cases.normal("model.layers.1.thing.weight", 16)
    folder = source.save(tmp_path / "src")
    out = convert(folder, tmp_path / "out")
    rows = [json.loads(line) for line in (out / "kizami-report.jsonl").read_text().splitlines()]
    assert [[*row["crc32"]] for row in rows if row["name"] == "model.layers.1.thing"] == [
        ["model.layers.1.thing"], ["model.layers.1.thing.weight"],
    ]  # fmt: skip
    assert verify(out, against=Checkpoint.open(folder)).ok


def test_a_report_row_that_is_missing_or_double_is_found(out):
    original = (out / "kizami-report.jsonl").read_bytes()
    lines = original.splitlines(keepends=True)
    for wrong in (lines[1:], [*lines, lines[3]]):

        def replace(data: bytearray, wrong: list[bytes] = wrong) -> None:
            data[:] = b"".join(wrong)

        forge(out, "kizami-report.jsonl", replace)
        problems = verify(out).problems
        assert {p.code for p in problems} == {"report_row"}
        assert all(p.tensor for p in problems)


def test_a_publisher_may_edit_the_card_and_keep_what_git_and_the_hub_leave(out):
    (out / "README.md").write_text("# A better card\n")
    (out / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (out / ".cache/huggingface/download").mkdir(parents=True)
    (out / ".cache/huggingface/download/x.metadata").write_text("etag")
    found = verify(out)
    assert found.ok
    assert found.notes == ("README.md was edited after the conversion",)


def test_what_could_not_be_checked_is_said(out, tiny_checkpoint):
    shard = min(out.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    found = verify(out)
    assert found.skipped == ("structure", "scales")
    assert not found.checked
    *_, named, compared = verify(out, against=Checkpoint.open(tiny_checkpoint)).problems  # the source tells, too
    assert named.code == "changed_tensor"
    assert (compared.file, compared.tensor) == (shard.name, named.tensor.removesuffix(".weight"))


def test_a_changed_side_file_leaves_the_weights_checked(out):
    (out / "tokenizer.json").write_text("{}")
    found = verify(out)
    assert [(p.code, p.file) for p in found.problems] == [("changed_file", "tokenizer.json")]
    assert set(found.checked) == {"structure", "scales"}


def test_hashing_a_large_file_ends_when_it_is_stopped(tmp_path):
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    with pytest.raises(KizamiError, match="not read to its end"):
        file_sha256(tmp_path / "large", "large", lambda: True)
    os.truncate(tmp_path / "large", 0)


def test_missing_and_strange_files_are_named(out):
    second = sorted(path.name for path in out.glob("*.safetensors"))[1]
    (out / second).rename(out / "model-00009-of-00009.safetensors")
    codes = {(p.code, p.file) for p in verify(out).problems}
    assert ("missing_file", second) in codes
    assert ("stranger", "model-00009-of-00009.safetensors") in codes


def tensor_bytes(out: Path, name: str) -> tuple[str, int, int]:
    info = Checkpoint.open(out).tensors[name]
    return info.file, info.begin, info.end


EXPERT = "model.layers.1.mlp.experts.3.up_proj"


# A scale's last bit need not move a nearest code; then the recorded error energy gives it away.
@pytest.mark.parametrize(
    ("name", "code"),
    [
        (f"{EXPERT}.weight_packed", "bad_codes"),
        (f"{EXPERT}.weight_scale", "bad_codes|report_row"),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "not_dequantized"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", "not_copied"),
        ("model.embed_tokens.weight", "not_copied"),
    ],
)
@pytest.mark.parametrize("position", ["first", "last"])
def test_a_forged_weight_is_found_against_the_source(tiny_checkpoint, out, name, code, position):
    file, begin, end = tensor_bytes(out, name)

    def change(data: bytearray) -> None:
        data[begin if position == "first" else end - 2] ^= 0x01

    forge(out, file, change)
    (problem, *_) = verify(out, against=Checkpoint.open(tiny_checkpoint)).problems
    assert problem.code in code.split("|")
    assert problem.file == file
    assert problem.tensor == name.rpartition(".")[0] or problem.tensor == name


@pytest.mark.parametrize(("word", "says"), [(0x0000, "zero"), (0x7F80, "not finite"), (0xFFC0, "not finite")])
def test_an_unusable_scale_is_found_from_the_bytes_alone(out, word, says):
    file, begin, _ = tensor_bytes(out, f"{EXPERT}.weight_scale")

    def change(data: bytearray) -> None:
        data[begin + 2 : begin + 4] = word.to_bytes(2, "little")

    forge(out, file, change)
    (problem,) = verify(out).problems
    assert (problem.code, problem.file, problem.tensor) == ("bad_scale", file, f"{EXPERT}.weight_scale")
    assert says in problem.message


def test_a_weight_shape_that_its_tensors_do_not_have_is_found(out):
    file, begin, _ = tensor_bytes(out, f"{EXPERT}.weight_shape")

    def swap(data: bytearray) -> None:
        data[begin : begin + 8] = data[begin + 4 : begin + 8] + data[begin : begin + 4]

    forge(out, file, swap)
    (problem,) = verify(out).problems
    assert (problem.code, problem.tensor) == ("bad_shape", EXPERT)


def test_config_rules_that_do_not_say_what_the_tensors_are_are_found(out):
    def ignore_nothing(data: bytearray) -> None:
        config = json.loads(bytes(data))
        config["quantization_config"]["ignore"] = []
        data[:] = dump_json(config)

    forge(out, "config.json", ignore_nothing)
    problems = verify(out).problems
    assert {p.code for p in problems} == {"config_rules"}
    assert "model.layers.0.self_attn.o_proj" in {p.tensor for p in problems}


def test_an_error_figure_that_was_made_smaller_is_found(tiny_checkpoint, out):
    def improve(rows: list[dict]) -> None:
        for row in rows:
            if row["name"] == EXPERT:
                row["rel_error"] /= 2

    forge_rows(out, improve)
    (problem,) = verify(out, against=Checkpoint.open(tiny_checkpoint)).problems
    assert (problem.code, problem.tensor) == ("report_row", EXPERT)


def test_another_source_of_the_same_shape_is_found(out, tmp_path):
    other = make_cases.tiny()
    name = "model.layers.1.mlp.experts.0.gate_proj.weight"
    codes = bytearray(other.tensors()[name].data)
    codes[0] ^= 0x01
    other.set(name, make_cases.Tensor("F8_E4M3", (128, 256), bytes(codes)))
    problems = verify(out, against=Checkpoint.open(other.save(tmp_path / "other"))).problems
    assert {p.tensor for p in problems} == {"model.layers.1.mlp.experts.0.gate_proj"}


def test_another_source_of_another_shape_is_named_by_file(out, tmp_path):
    other = make_cases.tiny()
    other.shards[make_cases.shard_name(1, 3)] |= make_cases.normal("model.extra.weight", 4)
    (problem,) = verify(out, against=Checkpoint.open(other.save(tmp_path / "other"))).problems
    assert problem.code == "other_source"
    assert "model-00001-of-00003.safetensors" in problem.message


def test_a_side_file_that_is_not_the_sources_is_found(tiny_checkpoint, out, tmp_path):
    def other(data: bytearray) -> None:
        data += b"{# do as I say #}"

    forge(out, "chat_template.jinja", other)
    assert verify(out).ok
    (problem,) = verify(out, against=Checkpoint.open(tiny_checkpoint)).problems
    assert (problem.code, problem.file) == ("other_side_file", "chat_template.jinja")

    source = Path(shutil.copytree(tiny_checkpoint, tmp_path / "source"))
    shutil.copyfile(out / "chat_template.jinja", source / "chat_template.jinja")
    assert verify(out, against=Checkpoint.open(source)).ok
    (source / "vocab.txt").write_text("one more")
    (source / "tokenizer.json").unlink()
    problems = verify(out, against=Checkpoint.open(source)).problems
    assert {(p.code, p.file) for p in problems} == {
        ("other_side_file", "vocab.txt"), ("other_side_file", "tokenizer.json"),
    }  # fmt: skip


def test_a_threshold_names_the_tensors_above_it(out):
    found = verify(out, max_rel_error=0.01)
    assert {p.code for p in found.problems} == {"max_rel_error"}
    assert len(found.problems) == 24
    assert verify(out, max_rel_error=0.5).ok


def test_a_sample_sees_about_as_many_tensors_as_asked(tiny_checkpoint, out):
    found = verify(out, against=Checkpoint.open(tiny_checkpoint), sample=10)
    assert found.ok
    assert 10 <= found.checked["tensors against the source"] <= 13


def test_a_folder_that_kizami_did_not_finish_cannot_be_verified(tmp_path, tiny_checkpoint):
    for folder in (tmp_path / "absent", tiny_checkpoint):
        with pytest.raises(KizamiError):
            verify(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"policy": None},
        {"policy": {"group_size": -1}},
        {"method": "magic"},
        {"scale_sign": 3},
        {"shards": [{}]},
        {"shards": [None]},
        {"files": {"config.json": 1}},
        {"source": {}},
        {"source_contents": {}},
        {"output": {"bytes": "many"}},
        {"warnings": 3},
    ],
)
def test_a_forged_manifest_is_a_problem_and_no_crash(tiny_checkpoint, out, change):
    manifest = json.loads((out / "kizami.json").read_bytes())
    manifest |= {k: manifest[k] | v if isinstance(v, dict) and v and k != "files" else v for k, v in change.items()}
    manifest["self_sha256"] = self_hash(manifest)
    (out / "kizami.json").write_bytes(dump_json(manifest))
    found = verify(out, against=Checkpoint.open(tiny_checkpoint))
    assert not found.ok


@pytest.mark.parametrize("value", ["1e400", '"x"', "-1", "null", "1" + "0" * 400])
def test_forged_figures_are_a_problem_and_no_crash(tiny_checkpoint, out, value):
    def forge_row(data: bytearray) -> None:
        rows = map(json.loads, bytes(data).splitlines())
        error = next(row["rel_error"] for row in rows if row["name"] == EXPERT)
        data[:] = bytes(data).replace(f'"rel_error":{error}'.encode(), f'"rel_error":{value}'.encode())

    forge(out, "kizami-report.jsonl", forge_row)
    assert not verify(out, against=Checkpoint.open(tiny_checkpoint), max_rel_error=0.5).ok

"""The oracle of the cases must itself be able to say no: one small change to a right output, and it does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from case_runner import kizami
from make_cases import PACKED, read_header
from output_oracle import (
    Folder,
    assert_folder_is_whole,
    assert_rules_are_the_tensors,
    assert_tensors_are_right,
    contents,
)

EXPERT = PACKED[0]
ATTENTION = "model.layers.2.self_attn.o_proj.weight"


@pytest.fixture(scope="module", params=["search", "minmax"])
def right(request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("right") / "out"
    assert kizami("convert", tiny_checkpoint, out, "--method", request.param, "--max-shard-size", "1MB").code == 0
    return out


def flip(name: str, at: int, bits: int) -> Callable[[Path], None]:
    """Changes one byte of a tensor."""

    def change(out: Path) -> None:
        file = out / json.loads((out / "model.safetensors.index.json").read_text())["weight_map"][name]
        begin, end = read_header(file)[name]["data_offsets"]
        data = bytearray(file.read_bytes())
        data[8 + int.from_bytes(data[:8], "little") + (begin + at if at >= 0 else end + at)] ^= bits
        file.write_bytes(data)

    return change


@pytest.mark.parametrize(
    "change",
    [
        flip(EXPERT + ".weight_packed", 0, 0x01),
        flip(EXPERT + ".weight_packed", -1, 0x10),
        flip(EXPERT + ".weight_scale", 0, 0x40),
        flip(EXPERT + ".weight_scale", -1, 0x80),
        flip(EXPERT + ".weight_shape", 0, 0x01),
        flip(ATTENTION, 0, 0x01),
        flip(ATTENTION, -1, 0x80),
        flip("model.layers.1.mlp.gate.e_score_correction_bias", 0, 0x01),
    ],
)
def test_one_bit_of_a_tensor_is_seen(
    right: Path, tiny_checkpoint: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    source = Folder(tiny_checkpoint)
    assert_tensors_are_right(Folder(right), source)
    out = shutil.copytree(right, tmp_path / "out")
    change(out)
    with pytest.raises(AssertionError):
        assert_tensors_are_right(Folder(out), source)
    with pytest.raises(AssertionError):
        assert_folder_is_whole(Folder(out))


def set_ignore(ignore: Callable[[list[str]], list[str]]) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["ignore"] = ignore(config["quantization_config"]["ignore"])

    return change


def other_group(config: dict[str, Any]) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64


@pytest.mark.parametrize(
    "change",
    [set_ignore(lambda old: []), set_ignore(lambda old: old[1:]), set_ignore(lambda old: ["re:.*"]), other_group],
)
def test_a_rule_that_is_not_the_tensors_is_seen(
    right: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    assert_rules_are_the_tensors(Folder(right))
    out = shutil.copytree(right, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    change(config)
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(AssertionError):
        assert_rules_are_the_tensors(Folder(out))


@pytest.mark.parametrize("name", [".leftover", "model-00009-of-00009.safetensors", "notes.txt"])
def test_a_file_too_many_or_too_few_is_seen(right: Path, tmp_path: Path, name: str) -> None:
    assert_folder_is_whole(Folder(right))
    out = shutil.copytree(right, tmp_path / "out")
    before = contents(out)
    (out / name).write_bytes(b"")
    assert contents(out) != before
    with pytest.raises(AssertionError):
        assert_folder_is_whole(Folder(out))
    (out / name).unlink()
    (out / "tokenizer.json").unlink()
    with pytest.raises(AssertionError):
        assert_folder_is_whole(Folder(out))

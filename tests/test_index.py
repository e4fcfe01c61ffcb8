import json
import os
from pathlib import Path
from typing import Any

import pytest

from kizami.formats import index
from kizami.formats.errors import KizamiError
from kizami.formats.index import INDEX_NAME, encode_index, load_index, natural_key


def save(folder: Path, content: Any) -> Path:
    path = folder / INDEX_NAME
    path.write_text(json.dumps(content))
    return path


def refusal(path: Path) -> KizamiError:
    with pytest.raises(KizamiError) as caught:
        load_index(path)
    assert caught.value.file == INDEX_NAME
    return caught.value


def test_an_index_maps_tensors_to_files(tmp_path: Path) -> None:
    path = save(
        tmp_path, {"metadata": {"total_size": 7, "x": 1}, "weight_map": {"b": "w-b.safetensors", "a": "w.safetensors"}}
    )
    assert load_index(path).weight_map == {"b": "w-b.safetensors", "a": "w.safetensors"}
    assert load_index(path).total_size == 7


@pytest.mark.parametrize("metadata", [None, {}, [], {"total_size": "7"}, {"total_size": 7.5}, {"total_size": True}])
def test_a_total_size_that_is_no_integer_counts_as_none(tmp_path: Path, metadata: Any) -> None:
    path = save(tmp_path, {"metadata": metadata, "weight_map": {"a": "w.safetensors"}})
    assert load_index(path).total_size is None


@pytest.mark.parametrize(
    "file",
    [
        "../evil.safetensors",
        "/etc/evil.safetensors",
        "sub/../../evil.safetensors",
        "sub/w.safetensors",
        "..\\evil.safetensors",
        "C:\\evil.safetensors",
        "..safetensors",
        "model.safetensors\0x",
        "model\0.safetensors",
        "model\n.safetensors",
        "\x1b[2Jmodel.safetensors",
        "",
        ".",
        "..",
        "pytorch_model.bin",
        "model.safetensors ",
        "é" * 130 + ".safetensors",
        1,
        None,
        ["w.safetensors"],
        {"a": "b"},
    ],
)
def test_a_file_name_that_is_not_a_safetensors_file_beside_the_index_is_refused_with_the_tensor(
    tmp_path: Path, file: Any
) -> None:
    error = refusal(save(tmp_path, {"weight_map": {"good": "w.safetensors", "layers.1.weight": file}}))
    assert (error.code, error.tensor) == ("bad_index", "layers.1.weight")


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 1025])
def test_a_tensor_name_that_no_header_may_have_is_refused(tmp_path: Path, name: str) -> None:
    assert refusal(save(tmp_path, {"weight_map": {name: "w.safetensors"}})).code == "bad_index"


@pytest.mark.parametrize(
    ("content", "words"),
    [({}, "missing"), ({"weight_map": {}}, "empty"), ({"weight_map": []}, "list"), ({"weight_map": "x"}, "str")],
)
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, content: Any, words: str) -> None:
    error = refusal(save(tmp_path, content))
    assert error.message == f"weight_map is {words}, expected an object of tensor -> file"


def test_a_tensor_listed_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / INDEX_NAME
    path.write_text('{"weight_map": {"a": "w.safetensors", "a": "v.safetensors"}}')
    assert "'a' twice" in refusal(path).message


def test_an_index_beyond_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / INDEX_NAME
    path.touch()
    os.truncate(path, index.MAX_INDEX_BYTES + 1)
    assert f"expected at most {index.MAX_INDEX_BYTES}" in refusal(path).message


def test_files_sort_by_the_value_of_their_numbers() -> None:
    names = [f"model-{i}-of-12.safetensors" for i in range(1, 13)]
    assert sorted(set(names), key=natural_key) == names != sorted(names)
    padded = [f"model-{i:05}-of-000163.safetensors" for i in range(1, 164)]
    assert sorted(set(padded), key=natural_key) == padded
    assert sorted(["b", "a10", "a", "a9", "a09", "a0", "10", "9"], key=natural_key) == [
        "9", "10", "a", "a0", "a09", "a9", "a10", "b"
    ]  # fmt: skip


def test_an_encoded_index_is_sorted_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / INDEX_NAME
    path.write_bytes(encode_index({"b": "2.safetensors", "a": "1.safetensors"}, 12))
    assert path.read_text().endswith("}\n")
    assert json.loads(path.read_text()) == {
        "metadata": {"total_size": 12},
        "weight_map": {"a": "1.safetensors", "b": "2.safetensors"},
    }
    assert list(load_index(path).weight_map) == ["a", "b"]

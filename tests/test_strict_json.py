import json
import os
import tracemalloc
from pathlib import Path

import pytest

from kizami.formats.errors import KizamiError
from kizami.formats.strict_json import MAX_DEPTH, MAX_MARKS, dump_json, parse_json_object, read_json_object


def refusal(data: bytes) -> KizamiError:
    with pytest.raises(KizamiError) as caught:
        parse_json_object(data, "config.json", what="config")
    assert caught.value.code == "bad_json"
    assert caught.value.file == "config.json"
    return caught.value


def test_an_object_is_returned_with_its_key_order() -> None:
    value = parse_json_object('{"b": [1, {"c": null}], "a": "é", "f": 1e-05}'.encode(), "f", what="config")
    assert list(value) == ["b", "a", "f"]
    assert value == {"b": [1, {"c": None}], "a": "é", "f": 1e-05}


def test_nan_and_infinity_are_read_as_published_configs_have_them() -> None:
    value = parse_json_object(b'{"a": NaN, "b": -Infinity}', "f", what="config")
    assert value["a"] != value["a"]
    assert value["b"] == -float("inf")


@pytest.mark.parametrize("data", [b'{"a":1,"b":2,"a":3}', b'{"x":[{"a":1,"a":1}]}', b'{"a":1,"\\u0061":2}'])
def test_a_key_twice_is_refused_by_name(data: bytes) -> None:
    assert "key 'a' twice" in refusal(data).message


@pytest.mark.parametrize("data", [b"[]", b"1", b"null", b'"{}"'])
def test_anything_but_an_object_is_refused(data: bytes) -> None:
    assert "expected an object" in refusal(data).message


def test_bytes_that_are_not_utf8_are_refused_with_their_place() -> None:
    assert "byte 0xff at 6" in refusal(b'{"a":"\xff"}').message


@pytest.mark.parametrize(
    "data", [b"", b"{", b"{'a': 1}", b'{"a":1}x', b'{"a":' + b"9" * 5000 + b"}", b'\xef\xbb\xbf{"a":1}', b"{}\0"]
)
def test_what_is_not_json_is_refused(data: bytes) -> None:
    assert "not valid JSON" in refusal(data).message


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


def test_depth_is_bounded() -> None:
    assert parse_json_object(nested(MAX_DEPTH), "f", what="config")
    assert f"at most {MAX_DEPTH} levels" in refusal(nested(MAX_DEPTH + 1)).message
    assert "nested too deeply" in refusal(nested(100_000)).message
    assert "nested too deeply" in refusal(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}").message


@pytest.mark.parametrize(
    "data", [b'{"a":[' + b"[]," * 2_000_000 + b"[]]}", b'{"a":[' + b"0," * 4_000_000 + b"0]}", b'{"":0,' * 1_400_000]
)
def test_text_that_would_fill_the_memory_is_refused_before_it_is_parsed(data: bytes) -> None:
    tracemalloc.start()
    error = refusal(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"brackets, colons and commas, expected at most {MAX_MARKS}" in error.message
    assert peak < 1 << 20


def test_half_a_surrogate_pair_is_refused_and_a_whole_one_is_not() -> None:
    assert "surrogate" in refusal(b'{"a": ["\\ud83d"]}').message
    assert "surrogate" in refusal(b'{"\\uDC00": 1}').message
    assert parse_json_object(b'{"a": "\\ud83d\\ude00"}', "f", what="config") == {"a": "\U0001f600"}


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b'{"a":1}')
    assert read_json_object(path, "x.json", limit=7) == {"a": 1}
    with pytest.raises(KizamiError, match="7 bytes, expected at most 6") as caught:
        read_json_object(path, "x.json", limit=6)
    assert caught.value.code == "bad_json"


def test_a_pipe_or_folder_or_nothing_in_place_of_the_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, code in (("pipe", "not_a_file"), (".", "not_a_file"), ("none", "missing_file")):
        with pytest.raises(KizamiError) as caught:
            read_json_object(tmp_path / name, name, limit=100)
        assert caught.value.code == code


def test_dumped_json_is_transformers_style_and_comes_back_equal() -> None:
    value = {"b": {"é": [1, 2.5]}, "a": None}
    data = dump_json(value)
    assert data.decode() == '{\n  "b": {\n    "é": [\n      1,\n      2.5\n    ]\n  },\n  "a": null\n}\n'
    assert json.loads(data) == value

import hashlib
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kizami.formats.errors import KizamiError
from kizami.formats.header import MAX_DIMS, MAX_HEADER_BYTES, MAX_NAME_BYTES, Header, encode_header, read_header
from kizami.formats.tensors import DTYPE_BITS, TensorSpec


def save(path: Path, header: bytes | dict[str, Any], nbytes: int = 0) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(nbytes))
    return path


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    listed = [list(value) if isinstance(value, tuple) else value for value in (shape, offsets)]
    return {"dtype": dtype, "shape": listed[0], "data_offsets": listed[1]}


def refusal(path: Path) -> KizamiError:
    with pytest.raises(KizamiError) as caught:
        read_header(path, "s.safetensors")
    assert caught.value.file == "s.safetensors"
    return caught.value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.safetensors"


def test_tensors_come_by_offset_with_absolute_places(path: Path) -> None:
    save(path, {"b": entry("BF16", (2, 3), (4, 16)), "a": entry()}, 16)
    header = read_header(path, "s.safetensors")
    status = path.stat()
    begin = header.data_begin
    assert begin == status.st_size - 16
    assert [(t.name, t.dtype, t.shape, t.file, t.begin, t.end) for t in header.tensors] == [
        ("a", "U8", (4,), "s.safetensors", begin, begin + 4),
        ("b", "BF16", (2, 3), "s.safetensors", begin + 4, begin + 16),
    ]
    assert (header.file_size, header.mtime_ns, header.inode) == (status.st_size, status.st_mtime_ns, status.st_ino)
    assert header.sha256 == hashlib.sha256(path.read_bytes()[:begin]).hexdigest()


@pytest.mark.parametrize("extra", [{}, {"__metadata__": {}}, {"__metadata__": None}, {"__metadata__": {"a": "b"}}])
def test_metadata_may_be_missing_empty_or_null(path: Path, extra: dict[str, Any]) -> None:
    assert [t.name for t in read_header(save(path, {**extra, "a": entry()}, 4), "s").tensors] == ["a"]


@pytest.mark.parametrize("metadata", [[], "pt", 1, {"format": 1}, {"format": None}, {"a": {"b": "c"}}])
def test_other_metadata_is_refused(path: Path, metadata: Any) -> None:
    error = refusal(save(path, {"__metadata__": metadata, "a": entry()}, 4))
    assert error.code == "bad_header"
    assert "__metadata__" in error.message


def test_a_file_without_tensors_and_scalars_and_empty_tensors_are_read(path: Path) -> None:
    assert read_header(save(path, {}), "s").tensors == ()
    save(path, {"z": entry("F32", (0, 7), (4, 4)), "s": entry("F32", (), (0, 4)), "y": entry("I8", (0,), (0, 0))}, 4)
    assert [t.name for t in read_header(path, "s").tensors] == ["y", "s", "z"]


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_without_room_for_the_length_is_refused(path: Path, size: int) -> None:
    path.write_bytes(bytes(size))
    error = refusal(path)
    assert error.code == "wrong_size"
    assert error.message == f"file of {size} bytes, expected at least 8 for the header's length"


def test_lengths_that_cannot_be_true_are_refused_without_memory(path: Path) -> None:
    tracemalloc.start()
    for length, size, code in (
        (2**64 - 1, 16, "bad_header"),
        (10**11, 1024, "bad_header"),
        (0, 8, "bad_header"),
        (1, 9, "bad_header"),
        (200 << 20, 201 << 20, "bad_header"),
        (MAX_HEADER_BYTES + 1, 101 << 20, "bad_header"),
        (MAX_HEADER_BYTES, 101 << 20, "bad_header"),  # a hole: its first byte is no brace
        (9, 16, "wrong_size"),
    ):
        path.write_bytes(length.to_bytes(8, "little"))
        os.truncate(path, size)  # sparse
        error = refusal(path)
        assert error.code == code
        assert error.hint if code == "wrong_size" else "expected" in error.message
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_git_lfs_pointer_is_recognised(path: Path) -> None:
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    error = refusal(path)
    assert "Git LFS pointer" in error.message
    assert "git lfs pull" in str(error.hint)


@pytest.mark.parametrize("text", [b'["a"]', b"\xff\xfe{}", b'{"a":', b'{"a":1,"a":1}', b'{"\xff":1}', b" {}"])
def test_a_header_that_is_not_one_json_object_is_refused(path: Path, text: bytes) -> None:
    assert refusal(save(path, text)).code in ("bad_header", "bad_json")


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"dtype": "U8", "shape": [4]},
        {**entry(), "strides": [1]},
        entry(shape=4),
        entry(shape=[4.0]),
        entry(shape=[True, 4]),
        entry(shape=[-4]),
        entry(shape=["4"]),
        entry(shape=[[4]]),
        entry(shape=[2**63]),
        entry(shape=[0, 2**64]),
        entry(shape=[1] * (MAX_DIMS + 1) + [4]),
        entry(shape=[2**32, 2**32]),
        entry(shape=[2**60]),
        entry(offsets=4),
        entry(offsets=[0]),
        entry(offsets=[0, 4, 8]),
        entry(offsets=[0.0, 4]),
        entry(offsets=[False, 4]),
        entry(offsets=[-4, 0]),
        entry(offsets=[4, 0]),
        entry(offsets=[0, 5]),
        entry(offsets=[0, 3]),
        entry(offsets=[0, 2**64]),
    ],
)
def test_an_entry_with_wrong_keys_types_or_numbers_is_refused_by_name(path: Path, value: Any) -> None:
    error = refusal(save(path, {"good": entry(), "bad": value}, 8))
    assert (error.code, error.tensor) == ("bad_header", "bad")
    assert "expected" in error.message or "2^63" in error.message


def test_a_shape_beyond_64_bits_is_refused_before_its_offsets(path: Path) -> None:
    error = refusal(save(path, {"w": entry("F32", (2**31, 2**30), (0, 2**62))}))
    assert error.message == "shape [2147483648, 1073741824] of F32 has more than 2^63-1 bits"


@pytest.mark.parametrize("dtype", ["F8_E4M3FN", "f32", "", None, 8, ["U8"]])
def test_an_unknown_dtype_is_named(path: Path, dtype: Any) -> None:
    error = refusal(save(path, {"w": entry(dtype)}, 4))
    assert (error.code, error.tensor) == ("unknown_dtype", "w")
    assert f"dtype {dtype!r}" in error.message
    assert "F8_E4M3FNUZ" in error.message


def test_dtypes_below_a_byte_must_fill_whole_bytes(path: Path) -> None:
    assert read_header(save(path, {"w": entry("F4", (3, 2), (0, 3))}, 3), "s").tensors[0].nbytes == 3
    assert read_header(save(path, {"w": entry("F6_E2M3", (4,), (0, 3))}, 3), "s").tensors[0].nbytes == 3
    error = refusal(save(path, {"w": entry("F4", (3,), (0, 1))}, 1))
    assert error.message == "shape [3] of F4 has 12 bits, expected a multiple of 8"


@pytest.mark.parametrize(
    ("tensors", "nbytes", "code", "words"),
    [
        ({"a": entry(offsets=(1, 5))}, 5, "bad_header", "begins at data byte 1, expected 0"),
        ({"a": entry(), "b": entry(offsets=(3, 7))}, 7, "bad_header", "begins at data byte 3 and overlaps a"),
        (
            {"a": entry(), "b": entry(offsets=(5, 9))},
            9,
            "bad_header",
            "begins at data byte 5 and leaves a hole after a",
        ),
        ({"a": entry(), "b": entry()}, 4, "bad_header", "overlaps a"),
        ({"a": entry(), "e": entry(shape=(0,), offsets=(2, 2))}, 4, "bad_header", "overlaps a"),
        ({"a": entry(), "e": entry(shape=(0,), offsets=(9, 9))}, 9, "bad_header", "leaves a hole after a"),
    ],
)
def test_tensors_must_tile_the_data(path: Path, tensors: dict[str, Any], nbytes: int, code: str, words: str) -> None:
    error = refusal(save(path, tensors, nbytes))
    assert error.code == code
    assert words in error.message


@pytest.mark.parametrize("wrong", [-4, -1, 1, 4096])
def test_a_file_of_the_wrong_size_is_refused_with_both_sizes(path: Path, wrong: int) -> None:
    save(path, {"a": entry()}, 4)
    right = path.stat().st_size
    os.truncate(path, right + wrong)
    error = refusal(path)
    assert error.code == "wrong_size"
    assert error.message == f"file of {right + wrong} bytes, expected {right} by its header"


@pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "\x1b[2J", "a\x85b", "x" * (MAX_NAME_BYTES + 1), "é" * 600])
def test_names_that_are_empty_long_or_have_control_characters_are_refused(path: Path, name: str) -> None:
    assert refusal(save(path, {name: entry()}, 4)).code == "bad_header"


def test_names_in_any_script_are_read(path: Path) -> None:
    name = "模型.層 0.重み"
    assert read_header(save(path, {name: entry()}, 4), "s").tensors[0].name == name


def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path, path: Path) -> None:
    os.mkfifo(path)
    assert refusal(path).message == "is a named pipe, expected a regular file"
    assert refusal(tmp_path).code == "not_a_file"
    assert refusal(tmp_path / "none").code == "missing_file"


def test_an_encoded_header_is_the_formats_and_starts_the_data_at_a_multiple_of_8() -> None:
    data = encode_header([TensorSpec("w", "I32", (2, 3)), TensorSpec("é", "BF16", ())], {"format": "pt"})
    text = (
        '{"__metadata__":{"format":"pt"},"w":{"dtype":"I32","shape":[2,3],"data_offsets":[0,24]},'
        '"é":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}}'
    )
    assert data[8:].decode().rstrip(" ") == text
    assert len(data) % 8 == 0
    assert int.from_bytes(data[:8], "little") == len(data) - 8
    assert encode_header([], None) == b"\x08" + bytes(7) + b"{}      "


def test_one_name_twice_cannot_be_encoded() -> None:
    spec = TensorSpec("w", "U8", (1,))
    with pytest.raises(KizamiError, match="a second tensor of this name"):
        encode_header([spec, spec], None)


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(
    lambda name: name != "__metadata__"
)
SPECS = st.lists(
    st.builds(
        TensorSpec,
        NAMES,
        st.sampled_from([dtype for dtype, bits in DTYPE_BITS.items() if bits % 8 == 0]),
        st.lists(st.integers(0, 5), max_size=4).map(tuple),
    ),
    max_size=8,
    unique_by=lambda spec: spec.name,
)


def write_specs(path: Path, specs: list[TensorSpec], metadata: dict[str, str] | None) -> Header:
    path.write_bytes(encode_header(specs, metadata) + bytes(sum(spec.nbytes for spec in specs)))
    return read_header(path, "s")


@settings(derandomize=True, max_examples=100, deadline=None)
@given(SPECS, st.none() | st.dictionaries(NAMES, NAMES, max_size=3))
def test_what_is_encoded_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, specs: list[TensorSpec], metadata: dict[str, str] | None
) -> None:
    header = write_specs(tmp_path_factory.getbasetemp() / "roundtrip", specs, metadata)
    assert sorted(info.spec.name for info in header.tensors) == sorted(spec.name for spec in specs)
    assert {info.spec for info in header.tensors} == set(specs)
    raw = (tmp_path_factory.getbasetemp() / "roundtrip").read_bytes()[8 : header.data_begin]
    assert json.loads(raw).get("__metadata__") == metadata
    filled = [spec for spec in specs if spec.nbytes]
    assert [info.spec for info in header.tensors if info.nbytes] == filled


def mutate(data: bytes, rng: random.Random) -> bytes:
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(result))
        kind = rng.randrange(5)
        if kind == 0:
            result[at] = rng.randrange(256)
        elif kind == 1:
            result[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del result[at : at + rng.randint(1, 9)]
        elif kind == 3:
            result[at:at] = rng.choice([b"[", b"{", b'"', b"-", b"9" * 30, b"null", b"1e5", b"\\ud800", b",", b"true"])
        else:
            other = rng.randrange(len(result))
            result[at : at + 6] = result[other : other + 6]
        if len(result) < 9:
            break
    return bytes(result)


@pytest.mark.long
def test_a_damaged_file_is_either_read_or_refused_and_never_crashes(path: Path) -> None:
    specs = [TensorSpec("a.weight", "F8_E4M3", (4, 6)), TensorSpec("b", "BF16", (3,)), TensorSpec("c", "F4", (2, 2))]
    good = encode_header(specs, {"format": "pt"}) + bytes(range(32))
    rng = random.Random(5)
    refused = 0
    for _ in range(1500):
        path.write_bytes(mutate(good, rng))
        try:
            header = read_header(path, "s")
        except KizamiError:
            refused += 1
        else:
            assert (header.tensors[-1].end if header.tensors else header.data_begin) == path.stat().st_size
    assert 750 < refused < 1500

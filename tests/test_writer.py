import errno
import hashlib
import os
import stat
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from kizami.formats.errors import KizamiError
from kizami.formats.header import encode_header
from kizami.formats.tensors import DTYPE_BITS, TensorSpec
from kizami.formats.writer import AtomicFile, ShardWriter, WrittenShard, aligned_order, write_file_durably

SPECS = (TensorSpec("a", "I32", (2, 3)), TensorSpec("z", "F32", (0,)), TensorSpec("b", "BF16", (5,)))
A = np.arange(6, dtype=np.int32).reshape(2, 3)
B = np.arange(5, dtype=np.uint16)


def refusal_of_the_system(error: KizamiError, text: str) -> None:
    assert (error.code, error.file) == ("io_error", "x.safetensors")
    assert text in error.message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


def write(path: Path, specs: tuple[TensorSpec, ...], *parts: tuple[str, Any]) -> WrittenShard:
    with ShardWriter(path, specs) as writer:
        for name, data in parts:
            writer.append(name, data)
        return writer.finish()


def test_a_shard_is_header_and_data_and_nothing_else(path: Path) -> None:
    shard = write(path, SPECS, ("a", A), ("b", B))
    data = path.read_bytes()
    assert data == encode_header(SPECS, {"format": "pt"}) + A.tobytes() + B.tobytes()
    crc32 = {"a": zlib.crc32(A.tobytes()), "z": 0, "b": zlib.crc32(B.tobytes())}
    assert shard == WrittenShard("x.safetensors", len(data), hashlib.sha256(data).hexdigest(), crc32)
    assert os.listdir(path.parent) == ["x.safetensors"]


def test_safetensors_opens_it_with_equal_values(path: Path) -> None:
    write(path, SPECS[:2], ("a", A))
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        np.testing.assert_array_equal(file.get_tensor("a"), A)
        assert file.get_tensor("z").shape == (0,)


def test_parts_and_early_tensors_give_the_same_bytes(path: Path) -> None:
    expected = write(path, SPECS, ("a", A), ("b", B)).sha256
    raw = A.tobytes()
    early = bytearray(B[:2].tobytes())
    with ShardWriter(path, SPECS) as writer:
        writer.append("b", early)
        early[:] = bytes(len(early))  # the writer has its own copy
        writer.append("a", raw[:5])
        writer.append("z", b"")
        writer.append("b", B[2:4])
        writer.append("a", memoryview(raw)[5:])
        writer.append("b", B[4:])
        assert writer.finish().sha256 == expected


def test_any_native_c_ordered_buffer_is_taken(path: Path) -> None:
    arrays: list[Any] = [
        np.array(3, dtype=np.float64),
        np.ones((2, 2), dtype=bool),
        np.ones((4, 3), dtype=np.float16)[1:3],
        np.ones((1, 8), dtype=np.int8).T,  # a column of one row's values lies in C order too
        bytearray(b"1234"),
        np.ones((2, 3), dtype=np.uint8).data,
        np.zeros((0, 4), dtype=np.int64),
        np.zeros((0, 4), dtype=np.int64).data,
    ]
    expected = b"".join(a.tobytes() if hasattr(a, "tobytes") else bytes(a) for a in arrays)
    specs = (TensorSpec("w", "U8", (len(expected),)),)
    write(path, specs, *[("w", a) for a in arrays])
    assert path.read_bytes().endswith(expected)


@pytest.mark.parametrize(
    "data",
    [
        np.arange(6, dtype=np.int32).reshape(3, 2).T,
        np.arange(12, dtype=np.int32)[::2],
        np.arange(12, dtype=np.int32).reshape(2, 6)[:, :3],
        np.asfortranarray(A).data,
        np.arange(6, dtype=">i4"),
    ],
)
def test_views_that_are_not_in_c_order_or_byte_order_are_a_bug_of_the_caller(path: Path, data: Any) -> None:
    with ShardWriter(path, SPECS) as writer, pytest.raises(AssertionError, match="order"):
        writer.append("a", data)


def test_wrong_names_and_sizes_are_a_bug_of_the_caller_and_leave_no_file(path: Path) -> None:
    with ShardWriter(path, SPECS) as writer:
        with pytest.raises(AssertionError, match=r"c is not in x\.safetensors"):
            writer.append("c", b"1")
        with pytest.raises(AssertionError, match="a: 25 bytes, 24 left"):
            writer.append("a", bytes(25))
        writer.append("a", A)
        with pytest.raises(AssertionError, match="a: 1 bytes, 0 left"):
            writer.append("a", b"1")
        writer.append("b", bytes(9))
        with pytest.raises(AssertionError, match=r"never appended: \{'b': 1\}"):
            writer.finish()
    assert os.listdir(path.parent) == []


def test_a_file_has_its_final_name_only_when_finished(path: Path) -> None:
    with ShardWriter(path, SPECS) as writer:
        assert os.listdir(path.parent) == [".x.safetensors.tmp"]
        writer.append("a", A)
        writer.append("b", B)
        assert not path.exists()
        writer.finish()
        assert os.listdir(path.parent) == ["x.safetensors"]
    assert path.exists()


def test_an_error_in_the_body_removes_the_temporary_and_keeps_an_older_file(path: Path) -> None:
    path.write_bytes(b"old")

    def stopped() -> None:
        with ShardWriter(path, SPECS) as writer:
            writer.append("a", A)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert os.listdir(path.parent) == ["x.safetensors"]
    assert path.read_bytes() == b"old"


def test_the_temporary_of_a_killed_run_is_replaced_and_a_link_in_its_place_not_followed(path: Path) -> None:
    victim = path.with_name("victim")
    victim.write_bytes(b"precious")
    path.with_name(".x.safetensors.tmp").symlink_to("victim")
    write(path, SPECS, ("a", A), ("b", B))
    assert victim.read_bytes() == b"precious"
    assert not path.is_symlink()


def test_a_link_that_takes_the_temporary_name_at_the_last_moment_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = path.with_name("victim")
    victim.write_bytes(b"precious")
    path.with_name(".x.safetensors.tmp").symlink_to("victim")
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    with pytest.raises(KizamiError) as caught:
        ShardWriter(path, SPECS)
    refusal_of_the_system(caught.value, "File exists")
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_mode_follows_the_umask(path: Path, mask: int, mode: int) -> None:
    old = os.umask(mask)
    try:
        write(path, SPECS, ("a", A), ("b", B))
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_writes_that_take_only_a_part_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    monkeypatch.setattr(os, "write", lambda fd, view: original(fd, view[:3]))
    shard = write(path, SPECS, ("a", A), ("b", B))
    assert shard.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert shard.nbytes == path.stat().st_size


def test_a_full_disk_is_told_in_the_systems_words_and_leaves_no_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with ShardWriter(path, SPECS) as writer:
        writer.append("a", A)
        writer.append("b", B)
        with pytest.raises(KizamiError) as caught:
            writer.finish()
        refusal_of_the_system(caught.value, "No space left on device")
        assert "make room" in str(caught.value.hint)
        assert os.listdir(path.parent) == []
    half = np.zeros(32 << 20, np.uint8)
    spec = TensorSpec("w", "U8", (2 * half.size,))
    with ShardWriter(path, (spec,)) as writer, pytest.raises(KizamiError):  # of much data not only at the end
        writer.append("w", half)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failure_at_the_end_leaves_no_file(path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with ShardWriter(path, SPECS) as writer:
        writer.append("a", A)
        writer.append("b", B)
        monkeypatch.setattr(os, name, fail)
        with pytest.raises(KizamiError) as caught:
            writer.finish()
        refusal_of_the_system(caught.value, "Input/output error")
    assert os.listdir(path.parent) == []


def test_the_file_size_limit_of_the_shell_is_an_error_not_a_death(path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from kizami.formats.writer import write_file_durably\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: write_file_durably(Path(sys.argv[1]), bytes(2000))\n"
        "except Exception as e: print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert "x.safetensors: cannot write after 1000 bytes: File too large" in done.stdout
    assert os.listdir(path.parent) == []


def test_a_missing_folder_is_an_io_error(path: Path) -> None:
    with pytest.raises(KizamiError) as caught:
        ShardWriter(path.parent / "none" / path.name, SPECS)
    refusal_of_the_system(caught.value, "No such file or directory")


def test_the_data_and_the_folder_are_synced_around_the_rename(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original_fsync, original_replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        calls.append("sync folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"sync {os.fstat(fd).st_size} bytes")
        original_fsync(fd)

    def replace(old: Path, new: Path) -> None:
        calls.append("rename")
        original_replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    size = write(path, SPECS, ("a", A), ("b", B)).nbytes
    assert calls == [f"sync {size} bytes", "rename", "sync folder"]


def test_memory_does_not_grow_with_the_file(path: Path) -> None:
    piece = np.zeros(1 << 20, dtype=np.uint8)
    with ShardWriter(path, (TensorSpec("w", "U8", (32 << 20,)),)) as writer:
        tracemalloc.start()
        for _ in range(32):
            writer.append("w", piece)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 19


def test_a_small_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for data in (b"", b"{}\n", b"x" * 100_000):
        write_file_durably(path, data)
        assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["config.json"]


def test_an_atomic_file_left_without_commit_vanishes(tmp_path: Path) -> None:
    with AtomicFile(tmp_path / "x") as file:
        file.write(b"1")
        file.write(memoryview(b"23"))
        assert file.written == 3
    assert os.listdir(tmp_path) == []
    with pytest.raises(AssertionError):
        file.write(b"4")


def test_units_of_whole_words_keep_their_order_and_the_rest_goes_last_by_width() -> None:
    def unit(name: str, rows: int) -> list[TensorSpec]:
        packed = TensorSpec(f"{name}.packed", "I32", (rows, 8))
        return [packed, TensorSpec(f"{name}.shape", "I32", (2,)), TensorSpec(f"{name}.scale", "BF16", (rows, 2))]

    bias, odd = TensorSpec("bias", "F32", (3,)), TensorSpec("odd", "F8_E4M3", (3,))
    norm, wide = TensorSpec("norm", "BF16", (4,)), TensorSpec("wide", "I64", (1,))
    order = aligned_order([[odd], unit("x", 3), [bias], unit("y", 2), [norm], [wide]])
    assert [spec.name for spec in order] == [
        "y.packed", "y.shape", "y.scale", "norm", "wide", "x.packed", "x.shape", "bias", "x.scale", "odd",
    ]  # fmt: skip


UNITS = st.lists(
    st.lists(
        st.builds(
            lambda dtype, shape: (dtype, tuple(shape)),
            st.sampled_from([dtype for dtype, bits in DTYPE_BITS.items() if bits % 8 == 0]),
            st.lists(st.integers(0, 9), max_size=3),
        ),
        max_size=4,
    ),
    max_size=6,
)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(UNITS)
def test_every_tensor_begins_at_a_multiple_of_its_element(units: list[list[tuple[str, tuple[int, ...]]]]) -> None:
    specs = [[TensorSpec(f"{i}.{j}", *one) for j, one in enumerate(unit)] for i, unit in enumerate(units)]
    order = aligned_order(specs)
    assert sorted(order, key=lambda s: s.name) == sorted((s for unit in specs for s in unit), key=lambda s: s.name)
    offset = len(encode_header(order, {"format": "pt"}))
    for spec in order:
        assert offset % (DTYPE_BITS[spec.dtype] // 8) == 0
        offset += spec.nbytes


NUMPY = {"I32": np.int32, "F32": np.float32, "U8": np.uint8, "I64": np.int64, "F16": np.float16, "BOOL": np.bool_}


@st.composite
def shards(draw: st.DrawFn) -> list[np.ndarray]:
    shapes = st.lists(st.integers(0, 4), max_size=3)
    kinds = draw(st.lists(st.tuples(st.sampled_from(sorted(NUMPY)), shapes), max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return [rng.integers(0, 2, size=shape).astype(NUMPY[dtype]) for dtype, shape in kinds]


@settings(derandomize=True, max_examples=60, deadline=None)
@given(shards(), st.randoms(use_true_random=False))
def test_whatever_the_order_of_appends_safetensors_reads_equal_arrays(
    tmp_path_factory: pytest.TempPathFactory, arrays: list[np.ndarray], rng: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "property.safetensors"
    words = {np.dtype(kind): word for word, kind in NUMPY.items()}
    named = {f"t{i}": array for i, array in enumerate(arrays)}
    specs = aligned_order([[TensorSpec(name, words[a.dtype], a.shape)] for name, a in named.items()])
    appends = list(named.items())
    rng.shuffle(appends)
    write(path, specs, *appends)
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(named)
        for name, array in named.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)
            assert file.get_tensor(name).dtype == array.dtype


@pytest.fixture(autouse=True)
def no_file_stays_open() -> Iterator[None]:
    before = len(os.listdir("/dev/fd"))
    yield
    assert len(os.listdir("/dev/fd")) == before

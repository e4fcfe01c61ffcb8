import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kizami.formats import reader
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.header import encode_header
from kizami.formats.index import INDEX_NAME
from kizami.formats.reader import TensorReader
from kizami.formats.tensors import TensorSpec

SPECS = [TensorSpec("w", "BF16", (50, 10)), TensorSpec("empty", "F32", (0, 3)), TensorSpec("s", "F8_E4M3", (17,))]


def content(file: int) -> bytes:
    return np.random.default_rng(file).bytes(1017)


@pytest.fixture
def ckpt(tmp_path: Path) -> Checkpoint:
    weight_map: dict[str, str] = {}
    for i in range(5):
        file = f"{i}.safetensors"
        specs = [TensorSpec(f"{i}.{spec.name}", spec.dtype, spec.shape) for spec in SPECS]
        (tmp_path / file).write_bytes(encode_header(specs, None) + content(i))
        weight_map |= {spec.name: file for spec in specs}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text("{}")
    return Checkpoint.open(tmp_path)


def test_a_tensors_bytes_are_read_into_memory_that_the_caller_owns(ckpt: Checkpoint) -> None:
    with TensorReader(ckpt) as source:
        whole = source.read(ckpt.tensors["2.w"])
        assert whole.dtype == np.uint8
        assert (whole.shape, whole.flags.writeable, whole.flags.owndata) == ((1000,), True, True)
        assert whole.tobytes() == content(2)[:1000]
        whole[:] = 0
        assert source.read(ckpt.tensors["2.w"]).tobytes() == content(2)[:1000]
        assert source.read(ckpt.tensors["2.s"]).tobytes() == content(2)[1000:]


def test_a_part_of_a_tensor_is_read(ckpt: Checkpoint) -> None:
    info = ckpt.tensors["1.w"]
    with TensorReader(ckpt) as source:
        assert source.read(info, first=20, nbytes=40).tobytes() == content(1)[20:60]
        assert source.read(info, first=990).tobytes() == content(1)[990:1000]
        assert source.read(info, first=1000).size == 0
        assert source.read(info, nbytes=0).size == 0
        for first, nbytes in ((-1, 1), (0, 1001), (1001, None), (5, -1)):
            with pytest.raises(AssertionError):
                source.read(info, first=first, nbytes=nbytes)


def test_an_empty_tensor_is_an_empty_array(ckpt: Checkpoint) -> None:
    with TensorReader(ckpt) as source:
        assert source.read(ckpt.tensors["0.empty"]).shape == (0,)


def test_reads_that_come_back_short_are_continued(ckpt: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: original(fd, [views[0][:7]], at))
    with TensorReader(ckpt) as source:
        assert source.read(ckpt.tensors["3.w"], first=1).tobytes() == content(3)[1:1000]


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


def test_each_file_is_opened_once_and_all_are_closed(ckpt: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()
    opened = []
    original = os.open

    def spy(path: Path, flags: int) -> int:
        opened.append(path)
        return original(path, flags)

    monkeypatch.setattr(os, "open", spy)
    with TensorReader(ckpt) as source:
        for _ in range(3):
            for info in ckpt.tensors.values():
                source.read(info)
        assert len(opened) == 5
        assert open_files() == before + 5
    assert open_files() == before
    with TensorReader(ckpt) as source:
        source.close()
        assert source.read(ckpt.tensors["0.s"]).tobytes() == content(0)[1000:]
    assert open_files() == before


def test_the_least_recently_used_files_are_closed_beyond_the_limit(
    ckpt: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_OPEN_FILES", 2)
    before = open_files()
    with TensorReader(ckpt) as source:
        for i in (0, 1, 0, 2, 3, 4, 0, 1):
            assert source.read(ckpt.tensors[f"{i}.w"]).tobytes() == content(i)[:1000]
            assert open_files() <= before + 2
        for i in (0, 1, 0, 2):
            source.read(ckpt.tensors[f"{i}.w"])
        monkeypatch.setattr(os, "open", None)  # 0 and 2 are still open
        for i in (0, 2):
            source.read(ckpt.tensors[f"{i}.w"])


def test_many_threads_read_through_few_open_files(ckpt: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_OPEN_FILES", 1)
    before = open_files()
    with TensorReader(ckpt) as source, ThreadPoolExecutor(8) as pool:
        jobs = [(i % 5, pool.submit(source.read, ckpt.tensors[f"{i % 5}.w"])) for i in range(400)]
        assert all(job.result().tobytes() == content(i)[:1000] for i, job in jobs)
    assert open_files() == before


def test_a_file_cut_during_the_run_is_refused_with_the_tensor(ckpt: Checkpoint) -> None:
    info = ckpt.tensors["4.w"]
    with TensorReader(ckpt) as source:
        source.read(info)
        os.truncate(ckpt.path("4.safetensors"), info.begin + 600)
        with pytest.raises(KizamiError, match=f"file ends at byte {info.begin + 600}") as caught:
            source.read(info)
        assert (caught.value.code, caught.value.file, caught.value.tensor) == ("truncated", "4.safetensors", "4.w")


def test_a_file_replaced_since_its_header_was_read_is_refused(ckpt: Checkpoint) -> None:
    path = ckpt.path("4.safetensors")
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)
    before = open_files()
    with TensorReader(ckpt) as source:
        with pytest.raises(KizamiError, match="has changed") as caught:
            source.read(ckpt.tensors["4.w"])
        assert caught.value.code == "source_changed"
        path.unlink()
        with pytest.raises(KizamiError) as caught:
            source.read(ckpt.tensors["4.w"])
        assert caught.value.code == "missing_file"
    assert open_files() == before


def test_a_disk_error_is_told_in_the_systems_words(ckpt: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with TensorReader(ckpt) as source, pytest.raises(KizamiError, match="Input/output error") as caught:
        source.read(ckpt.tensors["0.w"])
    assert (caught.value.code, caught.value.file, caught.value.tensor) == ("io_error", "0.safetensors", "0.w")

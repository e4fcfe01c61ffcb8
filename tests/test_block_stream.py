"""Bytes that a thread hashes and writes past the page cache are the bytes that were appended, or there is an error."""

import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kizami.formats.block_stream import BLOCK_BYTES, BlockStream

DIRECT = getattr(os, "O_DIRECT", 0)
SIZES = (0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 5 * BLOCK_BYTES + 4097)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


def data(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).tobytes()


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kizami-write"]


@pytest.mark.parametrize("piece", [1 << 20, BLOCK_BYTES, 3 * BLOCK_BYTES + 5, 777_777])
@pytest.mark.parametrize("nbytes", SIZES)
def test_bytes_of_any_size_in_pieces_of_any_size_arrive(fd: int, tmp_path: Path, nbytes: int, piece: int) -> None:
    whole, stream = data(nbytes), BlockStream(fd)
    for at in range(0, nbytes, piece):
        stream.append(memoryview(whole)[at : at + piece])
    assert stream.appended == nbytes
    assert stream.end() == hashlib.sha256(whole).hexdigest()
    assert stream.stored == nbytes
    assert (tmp_path / "x").read_bytes() == whole
    assert writers() == []


def test_what_fits_into_a_block_starts_no_thread(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread"))
    stream = BlockStream(fd)
    stream.append(data(BLOCK_BYTES - 1))
    stream.end()
    assert os.fstat(fd).st_size == BLOCK_BYTES - 1


@pytest.mark.skipif(not DIRECT, reason="this system has no O_DIRECT")
def test_whole_blocks_pass_the_page_cache_by_and_the_rest_goes_through_it(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_RDWR | DIRECT)
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_RDWR)
    except OSError:
        pytest.skip("the temporary folder's file system has no O_DIRECT")
    written: list[tuple[int, bool]] = []
    write = os.write

    def seen(to: int, view: memoryview) -> int:
        written.append((len(view), bool(fcntl.fcntl(to, fcntl.F_GETFL) & DIRECT)))
        return write(to, view)

    monkeypatch.setattr(os, "write", seen)
    stream = BlockStream(fd)
    stream.append(data(2 * BLOCK_BYTES + 10))
    stream.end()
    assert written == [(BLOCK_BYTES, True), (BLOCK_BYTES, True), (10, False)]


@pytest.mark.parametrize("taken", [0, 1000, BLOCK_BYTES - 512])
def test_a_file_system_that_refuses_direct_writes_gets_them_through_the_cache(
    fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """At once, or behind a write that was taken in part, which no longer ends with a page."""
    monkeypatch.setattr(
        "kizami.formats.block_stream._DIRECT", 0 if not DIRECT else os.O_NONBLOCK
    )  # any flag that sticks
    write, calls = os.write, []

    def picky(to: int, view: memoryview) -> int:
        calls.append(len(view))
        direct = fcntl.fcntl(to, fcntl.F_GETFL) & os.O_NONBLOCK
        if direct and (len(calls) > 1 or not taken):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(to, view[: taken if direct else None])

    monkeypatch.setattr(os, "write", picky)
    whole, stream = data(3 * BLOCK_BYTES + 7), BlockStream(fd)
    stream.append(whole)
    assert stream.end() == hashlib.sha256(whole).hexdigest()
    assert (tmp_path / "x").read_bytes() == whole


def test_an_error_of_the_thread_is_raised_where_bytes_are_appended_or_ended(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    stream = BlockStream(fd)
    with pytest.raises(OSError, match="No space left"):
        stream.append(data(4 * BLOCK_BYTES))
    stream.stop()
    assert writers() == []
    again = BlockStream(fd)
    again.append(data(BLOCK_BYTES))
    with pytest.raises(OSError, match="No space left"):
        again.end()
    assert (again.stored, writers()) == (0, [])


def test_a_signal_while_the_thread_starts_or_ends_leaves_nothing_behind(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, join = threading.Thread.start, threading.Thread.join
    broken: list[str] = []

    def once(name: str, call: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        def called(thread: threading.Thread) -> None:
            if thread.name == "kizami-write" and name not in broken:
                broken.append(name)
                raise KeyboardInterrupt
            call(thread)

        return called

    monkeypatch.setattr(threading.Thread, "start", once("start", start))
    monkeypatch.setattr(threading.Thread, "join", once("join", join))
    first = BlockStream(fd)
    with pytest.raises(KeyboardInterrupt):
        first.append(data(BLOCK_BYTES))
    first.stop()
    second = BlockStream(fd)
    second.append(data(2 * BLOCK_BYTES))
    with pytest.raises(KeyboardInterrupt):
        second.end()
    second.stop()
    assert (broken, writers()) == (["start", "join"], [])


def test_nothing_is_written_after_a_stop(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, write = threading.Event(), threading.Event(), os.write

    def slow(to: int, view: memoryview) -> int:
        begun.set()
        go_on.wait(10)
        return write(to, view)

    monkeypatch.setattr(os, "write", slow)
    stream = BlockStream(fd)
    stream.append(data(2 * BLOCK_BYTES))
    begun.wait(10)
    threading.Timer(0.05, go_on.set).start()
    stream.stop()
    assert stream.stored in (0, BLOCK_BYTES)  # the block in hand may arrive, the one behind it does not
    assert os.fstat(fd).st_size == stream.stored
    assert writers() == []

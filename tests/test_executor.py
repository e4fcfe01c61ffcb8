"""Threads that end: whoever fails, is stopped by a signal, or stops asking."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from threading import Event, Semaphore, current_thread, main_thread

import pytest

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.quantize import pipeline, shard
from kizami.quantize.planner import build_plan
from kizami.quantize.run import local_pool
from kizami.quantize.settings import Method, Policy
from kizami.quantize.threads import from_thread, in_thread, thread_map

SLOTS = 3


class Broken(Exception):
    pass


def free(slots: Semaphore) -> int:
    count = 0
    while slots.acquire(blocking=False):
        count += 1
    return count


def compute(item: int) -> int:
    if item == 5:
        raise Broken
    return item * item


def broken_items() -> Iterator[int]:
    yield from (0, 1)
    raise Broken


def consume(results: Iterator[tuple[int, int]]) -> None:
    with closing(results):  # type: ignore[type-var]
        for item, _ in results:
            if item == 1:
                raise Broken


@pytest.mark.parametrize("end", ["normal", "compute", "items", "consumer", "close", "pool"])
def test_slots_are_all_free_after_any_end(end: str) -> None:
    slots = Semaphore(SLOTS)
    items = {"compute": iter(range(9)), "items": broken_items()}.get(end, iter([0, 1, 2, 3, 4]))
    with ThreadPoolExecutor(2) as pool:
        results = shard.in_order(pool, compute, items, slots)
        if end == "normal":
            assert list(results) == [(i, i * i) for i in range(5)]
        elif end == "close":
            assert next(results) == (0, 0)
            results.close()
        elif end == "consumer":
            with pytest.raises(Broken):
                consume(results)
        elif end == "pool":
            assert next(results) == (0, 0)
            pool.shutdown(wait=False)
            with pytest.raises(RuntimeError):
                list(results)
        else:
            with pytest.raises(Broken):
                list(results)
    assert free(slots) == SLOTS


class Impatient(Semaphore):
    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        got = super().acquire(blocking, 5 if blocking else timeout)
        assert got or not blocking, "no slot in 5 seconds"
        return got


def test_a_run_whose_every_shard_fails_ends(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More failures than slots, before anyone has looked at the first: nobody may wait for a slot for ever."""
    watch = local_pool._wait_for_first_failure

    def late(futures: list[Future[None]]) -> None:
        wait(futures)
        watch(futures)

    def unreadable(*args: object, **options: object) -> None:
        raise KizamiError("cannot read", code="io_error", file="x")

    monkeypatch.setattr(local_pool, "Semaphore", Impatient)
    monkeypatch.setattr(local_pool, "_wait_for_first_failure", late)
    monkeypatch.setattr(shard, "produce", unreadable)
    checkpoint = Checkpoint.open(tiny_checkpoint)
    plan = build_plan(checkpoint, Policy(max_shard_bytes=100_000), Method())
    assert len(plan.shards) > 20
    with pytest.raises(KizamiError, match="cannot read"):
        pipeline.run(plan, checkpoint, tmp_path / "out", workers=2)


def test_work_is_done_in_a_thread_of_its_own() -> None:
    assert in_thread(lambda stop: current_thread()) is not main_thread()
    assert list(thread_map(2, lambda item, _: compute(item), [1, 2, 3])) == [1, 4, 9]
    with pytest.raises(Broken):
        in_thread(lambda stop: compute(5))


def test_who_stops_asking_stops_the_work() -> None:
    ended = Event()

    def numbers(stop: Event) -> Iterator[int]:
        yield 1
        assert stop.wait(20)
        ended.set()

    results = from_thread(numbers)
    assert next(results) == 1
    results.close()
    assert ended.is_set()
    seen: list[int] = []

    def slow(item: int, _: Event) -> None:
        time.sleep(0.001)
        seen.append(item)

    several = thread_map(1, slow, range(10_000))
    next(several)
    several.close()
    assert len(seen) < 10_000


# A signal at every STEP-th line that the main thread runs in kizami's, threading's and concurrent.futures' code while a
# command works; in a child each, whose end is watched.
SIGNALLED = """
import contextlib, faulthandler, io, os, signal, sys
from itertools import count
from kizami.cli.app import main
step, again, *words = sys.argv[1:]
PLACES = ("concurrent/futures", "/threading.py", "ze/pipeline.py", "run/local_pool.py", "ze/threads.py")
def call(out):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main([word.format(out=out) for word in words])
        except SystemExit as e:
            return e.code
def child(at, number, out):
    faulthandler.dump_traceback_later(20, exit=True)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.default_int_handler)
    lines = count(1)
    def trace(frame, event, argument):
        if event == "line" and next(lines) == at:
            sys.settrace(None)
            signal.raise_signal(number)
        return trace
    sys.settrace(lambda frame, *_: trace if any(place in frame.f_code.co_filename for place in PLACES) else None)
    code = call(out)
    sys.settrace(None)
    os._exit(code if next(lines) > at else 0)
assert call(again) == 0  # everything is loaded before the first fork
for at in count(1, int(step)):
    number = (signal.SIGINT, signal.SIGTERM)[at % 2]
    pid = os.fork()
    if not pid:
        child(at, number, again.replace("again", str(at)))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        break
    assert code == 128 + number, (at, code)
print(at)
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("command", ["convert", "verify"])
def test_a_signal_at_any_line_of_the_waiting_thread_ends_the_command(
    tiny_checkpoint: Path, tmp_path: Path, command: str
) -> None:
    done = tmp_path / "done"
    words: list[object] = ["convert", tiny_checkpoint, "{out}", "--workers", 3, "--max-shard-size", "300KB"]
    step = 29
    if command == "verify":
        checkpoint = Checkpoint.open(tiny_checkpoint)
        pipeline.run(build_plan(checkpoint, Policy(), Method()), checkpoint, done)
        words, step = ["verify", done, "--workers", 3], 41
    script = [sys.executable, "-c", SIGNALLED, str(step), str(tmp_path / "again"), *map(str, words)]
    ended = subprocess.run(script, capture_output=True, text=True, check=False, env=os.environ)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 5 * step

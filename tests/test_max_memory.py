"""--max-memory: never more than that, never another byte, never a wait for ever."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event, Lock, Semaphore, Thread

import pytest
from cli_fixtures import Run, files_of
from hypothesis import given, settings
from hypothesis import strategies as st
from large_tensors import MIB, Ran, expert, process, write_large

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.quantize import shard
from kizami.quantize.admission import ByteLimit, Need
from kizami.quantize.buffers import Buffers
from kizami.quantize.max_memory import Crew, base_bytes, crew_within, resident_bytes
from kizami.quantize.piece_bytes import held_bytes, need_of
from kizami.quantize.pipeline import run
from kizami.quantize.plan import Plan
from kizami.quantize.planner import build_plan
from kizami.quantize.run import local_pool
from kizami.quantize.settings import Method, Policy
from kizami.quantize.tensor import pieces

SECONDS = 60  # within which whoever waits for ever has failed
SMALL = Policy(max_shard_bytes=200_000)


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> tuple[Checkpoint, Plan]:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    return checkpoint, build_plan(checkpoint, SMALL, Method())


def largest_need(plan: Plan) -> int:
    return max(need_of(piece, plan.policy).total for step in plan.steps for piece in pieces(step))


# ------------------------------------------------------------------------------------------------------------ waiting


class Watched(ByteLimit[int]):
    """Notes the most that was taken at a time."""

    def __init__(self, limit: int) -> None:
        self.most, self.lock = 0, Lock()
        super().__init__(limit, lambda size: Need(size - size // 3, size // 3), self.look)

    def look(self, left: int) -> None:
        self.most = max(self.most, self.limit - left)


def drive(shards: list[list[int]], limit: Watched, slots: int, workers: int, compute: Callable[[int], int]) -> None:
    """A thread per shard, all at once. AssertionError where one is still at work after SECONDS."""
    semaphore, begin, ends = Semaphore(slots), Barrier(len(shards)), [Event() for _ in shards]
    with ThreadPoolExecutor(workers) as pool:

        def work(sizes: list[int], end: Event) -> None:
            begin.wait()
            assert [item for item, _ in shard.in_order(pool, compute, iter(sizes), semaphore, limit)] == sizes
            end.set()

        for sizes, end in zip(shards, ends, strict=True):
            Thread(target=work, args=(sizes, end), daemon=True).start()
        for end in ends:
            assert end.wait(SECONDS), "somebody waits for ever"
    assert limit.most <= limit.limit
    assert limit.take(limit.limit, wait=False) is not None  # all of it is free again
    assert all(semaphore.acquire(blocking=False) for _ in range(slots))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shards=st.lists(st.lists(st.integers(1, 100), max_size=30), min_size=1, max_size=6),
    spare=st.sampled_from([0, 1, 30, 250]),
    slots=st.integers(1, 9),
    workers=st.integers(1, 8),
)
def test_nobody_waits_for_ever_whatever_the_sizes(
    shards: list[list[int]], spare: int, slots: int, workers: int
) -> None:
    """Down to a limit of the largest piece alone, and to one place for six shards."""
    largest = max((size for sizes in shards for size in sizes), default=1)
    drive(shards, Watched(largest + spare), slots, workers, lambda size: size)


def test_small_pieces_do_not_starve_a_large_one() -> None:
    """One piece takes the whole limit, while seven shards have small ones without a break."""
    rng = random.Random(0)
    shards = [[rng.randint(1, 9) for _ in range(400)] for _ in range(7)]
    drive([[100], *shards], Watched(100), 16, 8, lambda size: size)


def test_bytes_are_free_after_any_end() -> None:
    def broken(size: int) -> int:
        if size == 5:
            raise ZeroDivisionError
        return size

    limit, slots = Watched(20), Semaphore(3)
    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(ZeroDivisionError):
            list(shard.in_order(pool, broken, iter([1, 2, 5, 7, 8]), slots, limit))
        results = shard.in_order(pool, broken, iter([1, 2, 7]), slots, limit)
        assert next(results) == (1, 1)
        results.close()  # type: ignore[attr-defined]
    assert limit.take(20, wait=False) is not None


def test_unused_buffers_take_what_pieces_leave() -> None:
    buffers = Buffers(8, slack=1.0)
    limit: ByteLimit[int] = ByteLimit(10 * MIB, lambda size: Need(0, size), buffers.allow)
    arrays = [buffers.empty((2 * MIB,), "u1") for _ in range(4)]
    for array in arrays:
        buffers.give(array)
    assert len(buffers._free) == 4
    share = limit.take(5 * MIB, wait=False)
    assert share is not None
    assert sum(buffer.nbytes for buffer in buffers._free) == 4 * MIB
    buffers.give(buffers.empty((3 * MIB,), "u1"))
    assert sum(buffer.nbytes for buffer in buffers._free) <= 5 * MIB


# -------------------------------------------------------------------------------------------------------- the decision


def test_threads_and_pieces_stay_within_any_limit(tiny: tuple[Checkpoint, Plan]) -> None:
    plan = tiny[1]
    with pytest.raises(KizamiError) as refused:
        crew_within(1, plan, 8)
    least = int(re.search(r"at least ([\d,]+)", refused.value.message)[1].replace(",", ""))  # type: ignore[index]
    for limit in range(least, least + 200 * MIB, 4 * MIB):
        crew = crew_within(limit, plan, 8)
        assert crew.peak <= limit
        assert crew.piece_bytes >= largest_need(plan)
        assert 1 <= crew.drivers <= max(1, crew.workers)
    assert crew.workers == 8
    with pytest.raises(KizamiError, match="expected at least"):
        crew_within(least - 1, plan, 8)


def test_a_process_that_has_more_than_the_model_says_counts_as_it_is(tiny: tuple[Checkpoint, Plan]) -> None:
    plan = tiny[1]
    limit = base_bytes(plan) + 100 * MIB
    assert crew_within(limit, plan, 2, base=base_bytes(plan) + 20 * MIB).piece_bytes == (
        crew_within(limit, plan, 2).piece_bytes - 20 * MIB
    )
    now, peak = resident_bytes()
    assert 20 * MIB < now <= peak


def test_a_limit_that_was_passed_before_the_run_is_refused(tiny: tuple[Checkpoint, Plan], tmp_path: Path) -> None:
    checkpoint, plan = tiny
    with pytest.raises(KizamiError, match="already had") as refused:
        run(plan, checkpoint, tmp_path / "out", max_memory=1 * MIB)
    assert refused.value.code == "max_memory"
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_wait_for_their_turn_are_counted(tiny: tuple[Checkpoint, Plan]) -> None:
    shard = tiny[1].shards[0]
    in_order = replace(shard, tensors=tuple(spec for step in shard.steps for spec in step.outputs))
    assert held_bytes(in_order) == 0
    backwards = replace(in_order, tensors=in_order.tensors[::-1])
    assert held_bytes(backwards) == sum(spec.nbytes for spec in backwards.tensors[1:])


# --------------------------------------------------------------------------------------------------------- same bytes


@pytest.mark.parametrize("workers", [1, 2, 7, 16])
@pytest.mark.parametrize("spare", [0, 1 << 20, 1 << 24])
def test_every_limit_gives_the_same_bytes(
    tiny: tuple[Checkpoint, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, spare: int
) -> None:
    """Down to bytes for the largest piece alone, with more threads and shards at a time than such a limit would get."""
    checkpoint, plan = tiny
    crew = Crew(0, workers, max(1, min(workers, len(plan.shards))), largest_need(plan) + spare, 0)
    monkeypatch.setattr(local_pool, "crew_here", lambda *_, **__: crew)
    ended: list[object] = []
    work = Thread(target=lambda: ended.append(run(plan, checkpoint, tmp_path / "out", max_memory=1)), daemon=True)
    work.start()
    work.join(SECONDS)
    assert ended, "somebody waits for ever, or the run failed"
    run(plan, checkpoint, tmp_path / "plain", workers=2)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "plain")


KILLED = """
import os, signal, sys
from pathlib import Path
from kizami.formats.checkpoint import Checkpoint
from kizami.quantize.pipeline import ShardDone, run
from kizami.quantize.planner import build_plan
from kizami.quantize.settings import Method, Policy
def die(event):
    if isinstance(event, ShardDone) and event.done == 3:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint = Checkpoint.open(sys.argv[1])
plan = build_plan(checkpoint, Policy(max_shard_bytes=200_000), Method())
run(plan, checkpoint, Path(sys.argv[2]), max_memory=int(sys.argv[3]), on_event=die)
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_run_goes_on_with_another_limit(tiny_checkpoint: Path, tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, tiny_checkpoint, tmp_path / "out", str(10**9)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "out.partial").is_dir()
    for out, words in (("out", ("--max-memory", "400MB", "--workers", 3)), ("plain", ())):
        done = process("convert", tiny_checkpoint, tmp_path / out, "--max-shard-size", "200KB", *words)
        assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == files_of(tmp_path / "plain")


# --------------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("words", [(), ("--dry-run",), ("--shards", "1/3"), ("--executor", "ray")])
def test_what_cannot_fit_is_refused_before_anything_is_written(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = kizami("convert", tiny_checkpoint, tmp_path / "out", "--max-memory", "100MB", "--json", *words)
    assert done.code == 2
    error = done.json["error"]
    assert error["code"] == "max_memory"
    assert error["file"] is not None
    assert error["tensor"] is not None
    least = int(re.search(r"100,000,000 bytes; expected at least ([\d,]+):", error["message"])[1].replace(",", ""))  # type: ignore[index]
    assert error["hint"] == f"give --max-memory {-(-least // 10**6)}MB or more"
    assert list(tmp_path.iterdir()) == []


def test_plan_says_what_fits(kizami: Run, tiny_checkpoint: Path) -> None:
    plain = kizami("plan", tiny_checkpoint, "--json").json
    told = kizami("plan", tiny_checkpoint, "--max-memory", "2GB", "--json").json
    assert plain["estimate"]["max_memory_bytes"] is None
    assert told["plan_hash"] == plain["plan_hash"]
    guess = told["estimate"]
    assert guess["max_memory_bytes"] == 2_000_000_000
    assert guess["memory_bytes"] < 400 * MIB
    assert guess["workers"] == len(os.sched_getaffinity(0))
    text = kizami("plan", tiny_checkpoint, "--max-memory", "2GB").out
    assert re.search(r"memory +at most [\d,]+ MiB of 1,907: \d+ workers?, \d+ shards? at a time", text)
    refused = kizami("plan", tiny_checkpoint, "--max-memory", "50MB", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "max_memory")
    assert kizami("plan", tiny_checkpoint, "--max-memory", "2XB", "--json").json["error"]["code"] == "bad_option"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--engine", "llmcompressor", "--method", "gptq"), "--max-memory with --engine, which has the whole model in"),
        (("--device", "cuda"), "--max-memory with --device, which has a driver, which takes what it likes, in memory"),
    ],
)
def test_what_takes_memory_of_its_own_takes_no_limit(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    done = kizami("convert", tiny_checkpoint, tmp_path / "out", *words, "--max-memory", "9GB")
    assert done.code == 2
    assert said in done.err


# ------------------------------------------------------------------------------------------------------- what it takes


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP8 of 64, 64, 16 and 256 MB, a linear that is decoded, in about 0.6 GB."""
    sizes = {expert(0): 8192, expert(1): 8192, expert(2): 2048, expert(3): 32768}
    sizes |= {"model.layers.0.self_attn.o_proj": 8192, "model.layers.1.self_attn.o_proj": 8192}
    return write_large(tmp_path_factory.mktemp("large") / "src", sizes)


@pytest.fixture(scope="module")
def unlimited(large: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("unlimited") / "out"
    done = convert(large, out, "--workers", 2)
    assert done.code == 0, done.err
    return files_of(out)


def convert(source: Path, out: Path, *words: object) -> Ran:
    return process("convert", source, out, "--allow-unloadable", "--max-shard-size", "200MB", "-q", *words)


def least_for(source: Path, *words: object) -> int:
    """The smallest limit that is not refused."""
    done = convert(source, source.parent / "none", "--max-memory", "1MB", "--json", *words)
    found = re.search(r"expected at least ([\d,]+)", json.loads(done.out)["error"]["message"])
    assert found is not None, done
    return int(found[1].replace(",", ""))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("mb", [0, 600, 900, 1600])
def test_a_process_takes_no_more_than_its_limit(
    large: Path, unlimited: dict[str, str], tmp_path: Path, mb: int, workers: int
) -> None:
    """0: the least that is not refused."""
    limit = mb * 10**6 or least_for(large)
    done = convert(large, tmp_path / "out", "--workers", workers, "--max-memory", f"{limit}B")
    assert done.code == 0, done.err
    assert done.peak <= limit
    assert files_of(tmp_path / "out") == unlimited


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("form", ["pack-quantized", "gptq"])
def test_a_run_of_very_many_tensors_ends_within_what_plan_says(tmp_path: Path, form: str) -> None:
    """Tensors of next to nothing: memory is that of plan, index, report rows and card."""
    source = write_large(tmp_path / "src", {expert(number): 8 for number in range(20_000)})
    words = ("--format", form, "--max-shard-size", "20MB")
    guess = json.loads(process("plan", source, *words, "--json").out)["estimate"]
    done = process("convert", source, tmp_path / "out", *words, "--allow-unloadable", "-q")
    assert done.code == 0, done.err
    assert 0.7 * guess["memory_bytes"] < done.peak < guess["memory_bytes"]


FORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "minmax": ("F8_E4M3", ("--method", "minmax")),
    "groups of 128": ("F8_E4M3", ("--group-size", "128")),
    "awq": ("F8_E4M3", ("--format", "awq")),
    "gptq": ("F8_E4M3", ("--format", "gptq")),
    "w4afp8": ("F8_E4M3", ("--format", "w4afp8")),
    "decoded": ("F8_E4M3", ("--scheme", "bf16")),
    "from BF16": ("BF16", ()),
    "BF16 to FP8": ("BF16", ("--scheme", "fp8-block")),
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_form_keeps_to_the_least_limit(tmp_path: Path, form: str) -> None:
    dtype, words = FORMS[form]
    source = write_large(tmp_path / "src", {expert(i): 16384 for i in range(3)}, dtype)
    limit = least_for(source, *words)
    assert convert(source, tmp_path / "plain", *words).code == 0  # which also compiles what is not compiled yet
    for workers in (1, 8):
        out = tmp_path / f"out-{workers}"
        done = convert(source, out, "--workers", workers, "--max-memory", f"{limit}B", *words)
        assert done.code == 0, done.err
        assert done.peak <= limit
        assert files_of(out) == files_of(tmp_path / "plain")

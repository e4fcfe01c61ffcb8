"""`convert --device`: how it is spelled, what is refused, who gets which tensor, and whole runs. On torch's CPU device;
the test marked `gpu` needs a GPU."""

import builtins
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_fixtures import Run, files_of
from gptq_fixtures import Made

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.statistics import Statistics
from kizami.quantize import pipeline
from kizami.quantize.linear import NonFiniteError, quantize_linear
from kizami.quantize.on_device import compute as compute_module
from kizami.quantize.on_device import probe, rounding, scales
from kizami.quantize.on_device.choice import check_device
from kizami.quantize.on_device.compute import LANES, Compute
from kizami.quantize.on_device.names import numbers_of
from kizami.quantize.on_device.transfer import Lane
from kizami.quantize.planner import build_plan
from kizami.quantize.run.events import RunEvent, ShardDone
from kizami.quantize.run.local_pool import LocalPool
from kizami.quantize.settings import GROUP_SIZES, Method, Policy

CPU = torch.device("cpu")
METHODS = [
    Method("minmax"),
    Method("signed"),
    Method("search"),
    Method("search", "positive", 0.5),
    Method("weighted", stats=""),
    Method("weighted", "positive", 0.5, stats=""),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's threads gain nothing at these sizes, and other tests wait for the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("word", "numbers"),
    [("cpu", None), ("cuda", ()), ("cuda:1", (1,)), ("cuda:0,1", (0, 1)), ("cuda:3,0", (3, 0))],
)
def test_devices_are_spelled(word: str, numbers: tuple[int, ...] | None) -> None:
    assert numbers_of(word) == numbers


@pytest.mark.parametrize("word", ["", "gpu", "cuda:", "cuda:a", "cuda:0,", "cuda:0,0", "cuda:-1", "mps", "CUDA", "0"])
def test_other_words_are_no_device(word: str, demo_checkpoint: Path, tmp_path: Path, kizami: Run) -> None:
    with pytest.raises(ValueError, match="device" if word == "cuda:0,0" else "is not cpu, cuda"):
        numbers_of(word)
    done = kizami("convert", demo_checkpoint, tmp_path / "out", f"--device={word}")
    assert (done.code, "--device" in done.err) == (2, True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--device", "cuda"), "bad_device", "finds no CUDA device"),
        (("--device", "cuda:0,1", "--method", "minmax"), "bad_device", "finds no CUDA device"),
        (("--device", "cuda", "--shards", "1/1"), "bad_device", "finds no CUDA device"),
        (("--device", "cuda", "--scheme", "bf16"), "bad_option", "nothing is rounded to INT4"),
        (("--device", "cuda", "--executor", "ray"), "bad_option", "--executor with --device"),
    ],
)
def test_a_device_is_looked_for_before_anything_is_written(
    demo_checkpoint: Path, tmp_path: Path, kizami: Run, options: tuple[str, ...], code: str, said: str
) -> None:
    if torch.cuda.is_available() and code == "bad_device":
        pytest.skip("there is one")
    done = kizami("convert", demo_checkpoint, tmp_path / "out", *options, "--json")
    assert (done.code, done.json["error"]["code"]) == (2, code)
    assert said in done.json["error"]["message"]
    assert not list(tmp_path.iterdir())


def test_torch_is_asked_for(
    demo_checkpoint: Path, tmp_path: Path, kizami: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_torch(name: str, *more: Any) -> Any:
        if name in ("torch", "kizami.quantize.calibrated.gptq"):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    done = kizami("convert", demo_checkpoint, tmp_path / "out", "--device", "cuda", "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "missing_torch")
    assert done.json["error"]["message"] == "--device cuda computes with torch, which is not installed"
    assert done.json["error"]["hint"] == "pip install 'kizami[torch]'; --device cpu needs none"
    assert not list(tmp_path.iterdir())


def test_methods_and_numbers_that_a_device_does_not_have(
    demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    tried: list[object] = []
    monkeypatch.setattr(probe, "try_device", lambda device, method, group_size: tried.append(device.index))
    checkpoint = Checkpoint.open(demo_checkpoint)

    def refused(method: Method, device: str) -> tuple[str, str]:
        with pytest.raises(KizamiError) as refusal:
            check_device(build_plan(checkpoint, Policy(), method), device)
        return refusal.value.code, refusal.value.message

    assert refused(Method(), "cuda:2") == (
        "bad_device", '"cuda:2" cannot be used: torch finds 2 CUDA devices, numbered from 0',
    )  # fmt: skip
    assert refused(Method("gptq", stats="x"), "cuda:0,1")[0] == "bad_option"
    assert refused(Method("llmcompressor-gptq", stats="x"), "cuda")[0] == "bad_option"
    for device in ("cpu", "cuda", "cuda:1", "cuda:0,1"):
        check_device(build_plan(checkpoint, Policy(), Method()), device)
    assert tried == [0, 1, 1, 0, 1]
    check_device(build_plan(checkpoint, Policy(), Method("gptq", stats="x")), "cuda:1")


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_device_is_tried_and_found_right(method: Method, group_size: int) -> None:
    probe.try_device(CPU, method, group_size)


def test_a_device_that_rounds_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA would with a Python number for a divisor; and one whose sums come in another order."""
    monkeypatch.setattr(probe, "_tried", set())
    with monkeypatch.context() as patch:
        patch.setattr(scales, "nearest", lambda w, step: (w * (1 / step)[:, None]).clamp(-8, 7).round())
        patch.setattr(rounding, "nearest", scales.nearest)
        with pytest.raises(KizamiError, match="cpu does not round as this CPU does") as refusal:
            probe.try_device(CPU, Method("signed"), 32)
    assert refusal.value.code == "bad_device"
    with monkeypatch.context() as patch:
        patch.setattr(rounding, "added_up", lambda lanes: lanes.flip(1).cumsum(1)[:, -1])
        with pytest.raises(KizamiError, match="does not round"):
            probe.try_device(CPU, Method("minmax"), 32)
    with monkeypatch.context() as patch:

        def no_kernel(*args: object, **more: object) -> None:
            raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

        patch.setattr(probe, "quantize_on", no_kernel)
        with pytest.raises(KizamiError, match="cpu cannot be used: CUDA error: no kernel image"):
            probe.try_device(CPU, Method("minmax"), 32)
    probe.try_device(CPU, Method("minmax"), 32)


# ------------------------------------------------------------------------------------------- lanes and devices


def test_tensors_are_dealt_round_robin_and_come_back_whole_from_threads() -> None:
    two = Compute([torch.device("cpu", 0), torch.device("cpu", 0)])
    assert two.lanes == 2 * LANES
    rng, block = np.random.default_rng(0), (128, 128)
    codes = [rng.integers(0, 0x7F, (60, 256)).astype(np.uint8) for _ in range(12)]
    scale = rng.uniform(0.5, 2, (1, 2)).astype(np.float32)
    wanted = [quantize_linear(one, scale, block, 32, Method()) for one in codes]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda one: two.quantize(one, scale, block, 32, Method()), codes))
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours.packed, theirs.packed)
        assert ours.sums == theirs.sums
    order: list[Lane] = []
    for _ in range(two.lanes):
        order.append(two._free.get())
    assert len(set(map(id, order))) == two.lanes


def test_lanes_go_from_device_to_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_module, "Lane", lambda device: device)
    devices = [torch.device("cuda", i) for i in range(3)]
    compute = Compute(devices)
    assert [compute._free.get() for _ in range(compute.lanes)] == devices * LANES  # type: ignore[comparison-overlap]


def test_a_full_device_is_named_and_its_lane_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **more: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(compute_module, "quantize_on", full)
    compute = Compute([CPU])
    for _ in range(LANES + 1):
        with pytest.raises(KizamiError, match=r"weight of 4 x 128: CUDA out of memory. Tried to allocate 2.00 GiB\b"):
            compute.quantize(np.zeros((4, 128), np.float32), None, None, 32, Method())


def test_a_lane_is_clean_after_an_exception() -> None:
    lane, to = Lane(CPU), np.zeros(4, np.float32)

    def broken() -> None:
        with lane.entered():
            lane.take(torch.ones(4), to)
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        broken()
    assert not to.any()
    with lane.entered():
        for value in range(5):
            lane.take(lane.sent(np.full(4, value, np.float32)), to)
    assert (to == 4).all()


# --------------------------------------------------------------------------------------------------- whole runs


def convert(source: Path, out: Path, method: Method, stats: Path | None, compute: Compute | None, **more: Any) -> Path:
    checkpoint = Checkpoint.open(source)
    statistics = None if stats is None else Statistics.open(stats)
    plan = build_plan(checkpoint, Policy(max_shard_bytes=300_000), method)
    pipeline.run(plan, checkpoint, out, statistics=statistics, executor=LocalPool(2, compute), **more)
    return out


@pytest.mark.parametrize("name", ["search", pytest.param("minmax", marks=pytest.mark.long), "weighted"])
def test_a_conversion_is_the_same_to_the_last_byte(demo_stats: Made, tmp_path: Path, name: Any) -> None:
    stats = demo_stats.folder if name == "weighted" else None
    method = Method(name, stats=Statistics.open(stats).sha256 if stats else None)
    wanted = convert(demo_stats.source, tmp_path / "cpu", method, stats, None)
    found = convert(demo_stats.source, tmp_path / "torch", method, stats, Compute([CPU, CPU]))
    assert files_of(found) == files_of(wanted)
    assert {"kizami.json", "kizami-report.jsonl"} < set(files_of(found))


def test_a_run_that_a_device_began_is_finished_by_the_cpu(tiny_checkpoint: Path, tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def after_three(event: RunEvent) -> None:
        if isinstance(event, ShardDone) and event.done >= 3:
            raise Enough

    wanted = convert(tiny_checkpoint, tmp_path / "cpu", Method(), None, None)
    with pytest.raises(Enough):
        convert(tiny_checkpoint, tmp_path / "both", Method(), None, Compute([CPU]), on_event=after_three)
    found = convert(tiny_checkpoint, tmp_path / "both", Method(), None, None)
    assert files_of(found) == files_of(wanted)


def test_a_damaged_source_is_refused_by_the_run(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **more: object) -> None:
        raise NonFiniteError(3, 5, "nan")

    monkeypatch.setattr(compute_module, "quantize_on", broken)
    with pytest.raises(KizamiError, match="found nan at row 3, column 5") as refusal:
        convert(tiny_checkpoint, tmp_path / "out", Method(), None, Compute([CPU]))
    assert (refusal.value.code, refusal.value.tensor is None) == ("non_finite", False)


# --------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bytes(demo_stats: Made, tmp_path: Path, kizami: Run) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for method in ("minmax", "signed", "search", "weighted"):
        more = ("--method", method, *(("--stats", demo_stats.folder) if method == "weighted" else ()))
        wanted, found = tmp_path / f"{method}-cpu", tmp_path / f"{method}-cuda"
        assert kizami("convert", demo_stats.source, wanted, *more).code == 0
        assert kizami("convert", demo_stats.source, found, *more, "--device", "cuda").code == 0
        assert files_of(found) == files_of(wanted)

"""`convert --device cuda`: the torch path gives the kernels' bytes and figures. All of it runs on torch's CPU device;
the tests marked `gpu` do the same on a GPU where there is one."""

import builtins
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_fixtures import Run, files_of
from gptq_fixtures import Made
from hypothesis import given, settings
from hypothesis import strategies as st

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.statistics import Statistics
from kizami.quantize import pipeline
from kizami.quantize import reference as ref
from kizami.quantize.calibrated.column_weights import integer_weights
from kizami.quantize.kernels import scales as kernel_scales
from kizami.quantize.linear import NonFiniteError, quantize_linear
from kizami.quantize.on_device import compute as compute_module
from kizami.quantize.on_device import probe, rounding, scales
from kizami.quantize.on_device.arithmetic import added_up, divided, folded, round_bf16
from kizami.quantize.on_device.choice import check_device
from kizami.quantize.on_device.compute import LANES, Compute
from kizami.quantize.on_device.linear import quantize_on
from kizami.quantize.on_device.names import numbers_of
from kizami.quantize.on_device.rounding import packed_words
from kizami.quantize.on_device.scales import groups_of, guard, nearest
from kizami.quantize.on_device.transfer import KINDS, Lane
from kizami.quantize.on_device.weight import Weight, floor_of, values
from kizami.quantize.planner import build_plan
from kizami.quantize.run.events import RunEvent, ShardDone
from kizami.quantize.run.local_pool import LocalPool
from kizami.quantize.settings import GROUP_SIZES, Method, Policy

CPU = torch.device("cpu")
LANE = Lane(CPU)
METHODS = [
    Method("minmax"),
    Method("signed"),
    Method("search"),
    Method("search", "positive"),
    Method("search", "signed", 0.5),
    Method("search", "positive", 2.0),
    Method("weighted", stats=""),
    Method("weighted", "positive", 0.5, stats=""),
]
SHAPES: list[tuple[tuple[int, int], tuple[int, int] | None]] = [
    ((130, 384), (128, 128)),  # partial rows of blocks
    ((7, 640), (128, 128)),
    ((40, 256), (1, 256)),  # per channel
    ((33, 512), (128, 16)),  # blocks narrower than a group
    ((70, 384), (64, 96)),  # groups across two blocks, but for groups of 32
    ((1, 128), (128, 128)),
    ((70, 128), None),
    ((1, 1280), None),
]
examples = settings(derandomize=True, deadline=None, max_examples=60)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's threads gain nothing at these sizes, and other tests wait for the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_codes(rows: int, columns: int, seed: int) -> np.ndarray:
    codes = np.random.default_rng(seed).integers(0, 256, (rows, columns)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    return codes


def random_grid(rows: int, columns: int, block: tuple[int, int], seed: int) -> np.ndarray:
    shape = -(-rows // block[0]), -(-columns // block[1])
    return (np.random.default_rng(seed).uniform(0.5, 2, shape) * 2.0**-7).astype(np.float32)


def column_options(method: Method, columns: int, group_size: int, seed: int = 0) -> dict[str, Any]:
    if method.name != "weighted":
        return {}
    h = np.random.default_rng(seed).standard_t(3, columns) ** 2
    h[: columns // 4] *= 1e-6
    return {"weights": integer_weights(h, group_size), "h": h}


def assert_same(
    weight: np.ndarray,
    scale: np.ndarray | None,
    block: tuple[int, int] | None,
    group_size: int,
    method: Method,
    band: int | None = None,
    smallest: float = 0.0,
) -> None:
    """Codes, scales and sums, to the bit."""
    more = column_options(method, weight.shape[1], group_size) | {"smallest_scale": smallest}
    wanted = quantize_linear(weight, scale, block, group_size, method, **more)
    found = quantize_on(LANE, weight, scale, block, group_size, method, band=band, **more)
    np.testing.assert_array_equal(found.scale, wanted.scale)
    np.testing.assert_array_equal(found.packed, wanted.packed)
    assert (found.packed.dtype, found.scale.dtype) == (np.int32, np.uint16)
    assert found.sums == wanted.sums  # floats, exactly


# ------------------------------------------------------------------------------------------------------ stages


SCALES = [1.0, 0.0, 2.0**-7, 1.1754944e-38, 1e-45, 3e-41, 2.0**-149, 3.3e35, 2.0**118 - 2.0**94, 7.7e-3]


def test_every_code_under_every_kind_of_scale_is_decoded_as_the_oracle_does() -> None:
    codes = np.arange(256, dtype=np.uint8)[None].repeat(len(SCALES), 0)
    scale = np.array(SCALES, np.float32)[:, None]
    weight = Weight(torch.from_numpy(codes), torch.from_numpy(scale), (1, 256), True)
    found, wanted = values(weight, 0, len(SCALES)).numpy(), ref.dequantize(codes, scale, (1, 256))
    finite = (codes & 0x7F) != 0x7F
    np.testing.assert_array_equal(found.view(np.uint32)[finite], wanted.view(np.uint32)[finite])
    assert np.isnan(found[~finite]).all()


@pytest.mark.parametrize("kind", [np.uint16, np.float16, np.float32])
def test_other_sources_are_widened_exactly(kind: Any) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 16, (64, 512)).astype(np.uint16)
    raw = bits if kind == np.uint16 else bits.view(np.float16)
    wanted = ref.from_bf16(bits) if kind == np.uint16 else raw.astype(np.float32)
    raw = raw.astype(np.float32) if kind == np.float32 else raw
    held = torch.empty(raw.shape, dtype=KINDS[raw.dtype])
    with LANE.entered():
        LANE.send(raw, held)
    np.testing.assert_array_equal(values(Weight(held, None, None, False), 0, 64).numpy(), wanted)


def test_bf16_is_rounded_on_the_bits() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    edges = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000], np.uint32)
    bits = np.concatenate([bits, edges, edges | np.uint32(1 << 31)])
    bits = bits[(bits & 0x7FFFFFFF) <= 0x7F800000]
    found = round_bf16(torch.from_numpy(bits.view(np.float32))).numpy()
    np.testing.assert_array_equal(found, ref.from_bf16(ref.to_bf16(bits.view(np.float32))))


def test_quotients_are_those_of_ieee() -> None:
    x = np.random.default_rng(2).standard_normal(100_000).astype(np.float32)
    for by in (7.5, 7.0, 8.5):
        np.testing.assert_array_equal(divided(torch.from_numpy(x), by).numpy(), x / np.float32(by))


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_nearest_codes_are_the_oracles_next_to_ties(group_size: int) -> None:
    rng = np.random.default_rng(3)
    s = (rng.integers(128, 256, 400) * np.exp2(rng.integers(-133, 90, 400)) * rng.choice([-1, 1], 400)).astype("f4")
    half = (rng.integers(-20, 20, (400, group_size)) / 2).astype(np.float32)
    w = half * s[:, None]
    w = (w.view(np.int32) + rng.integers(-2, 3, w.shape, dtype=np.int32) * (w != 0)).view(np.float32)
    found = nearest(torch.from_numpy(w), torch.from_numpy(s))
    np.testing.assert_array_equal(found.numpy(), ref.nearest_codes(w, s[:, None], group_size))
    np.testing.assert_array_equal(packed_words(found).numpy(), ref.pack(found.numpy().astype(np.int8)))


@pytest.mark.parametrize("kappa", [0.5, 1.0, 2.0, np.inf, 0.3])
def test_guard_is_that_of_the_kernels(kappa: float) -> None:
    rng = np.random.default_rng(4)
    size = np.exp2(rng.uniform(-140, 126, (3000, 1)))
    w = (rng.standard_normal((3000, 32)) * size / 8).astype(np.float32)
    w = np.where(rng.random((3000, 1)) < 0.1, np.float32(0), w)
    groups = groups_of(torch.from_numpy(w), None, 32)
    m = groups.extreme.numpy().astype(np.float64)
    s = m / rng.choice([-8 - min(kappa, 3), -6.3, 5.9, 7 + min(kappa, 3)], 3000)
    found = guard(torch.from_numpy(s), groups, 7 + kappa, 8 + kappa).numpy()
    p, n = np.maximum(w.max(1), 0), np.maximum((-w).max(1), 0)
    wanted = [kernel_scales.guard(*one, 7 + kappa, 8 + kappa) for one in zip(s, p, n, strict=True)]
    np.testing.assert_array_equal(found.view(np.uint32), np.array(wanted, np.float32).view(np.uint32))


def test_sums_are_added_in_the_order_that_is_written() -> None:
    x = np.random.default_rng(5).standard_normal((3, 160)) * np.exp2(np.arange(160) % 50)
    lanes = folded(torch.from_numpy(x)).numpy()
    total = added_up(torch.from_numpy(lanes)).numpy()
    for row in range(3):
        sums = [0.0] * 8
        for chunk in x[row].reshape(-1, 32).tolist():
            for j in range(8):
                sums[j] += (chunk[j] + chunk[j + 16]) + (chunk[j + 8] + chunk[j + 24])
        assert total[row].tolist() == sums


def test_the_floor_of_the_largest_is_the_rank_that_is_counted() -> None:
    for size in (1, 31, 32, 4096):
        peaks = np.random.default_rng(size).integers(0, 9, size).astype(np.float32)
        n = 32 * size
        wanted = np.sort(peaks)[::-1][n - int(0.999 * n) - 1]
        assert floor_of(torch.from_numpy(peaks)).item() == wanted


# ------------------------------------------------------------------------------------------------ whole weights


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_linears_are_the_kernels_to_the_bit(method: Method, group_size: int) -> None:
    for seed, (shape, block) in enumerate(SHAPES):
        if shape[1] % group_size:
            continue
        codes = random_codes(*shape, seed)
        codes[0, :64] = 0
        if block is not None:
            assert_same(codes, random_grid(*shape, block, seed), block, group_size, method, band=3 + seed)
            continue
        w = np.random.default_rng(seed).standard_t(3, shape).astype(np.float32)
        for weight in (w, w.astype(np.float16), (w.view(np.uint32) >> 16).astype(np.uint16), ref.decode_e4m3(codes)):
            assert_same(weight, None, None, group_size, method)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_rules_are_the_oracles_to_the_bit(group_size: int) -> None:
    codes, block = random_codes(130, 384, 1), (128, 128)
    scale = random_grid(130, 384, block, 1)
    w = ref.dequantize(codes, scale, block)
    for name, oracle in (("minmax", ref.minmax), ("signed", ref.signed)):
        found = quantize_on(LANE, codes, scale, block, group_size, Method(name))  # type: ignore[arg-type]
        wanted, s = oracle(w, group_size)
        np.testing.assert_array_equal(ref.unpack(found.packed), wanted)
        np.testing.assert_array_equal(ref.from_bf16(found.scale), s)
    for method in METHODS[2:6]:
        found = quantize_on(LANE, codes, scale, block, group_size, method)
        s = ref.from_bf16(found.scale)
        np.testing.assert_array_equal(ref.unpack(found.packed), ref.nearest_codes(w, s, group_size))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_height_of_the_bands_does_not_show(method: Method) -> None:
    codes, block = random_codes(150, 256, 4), (128, 128)
    codes[7, :64], codes[11] = 0, codes[12]  # more than one weight on the threshold of the top 0.1 %
    scale = random_grid(150, 256, block, 4)
    for band in (1, 31, 128, 150):
        assert_same(codes, scale, block, 32, method, band=band)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize(
    "scale", [0.0, 1e-45, 2.0**-149, 3e-41, 2.0**-133, 1.1754944e-38, 2.0**-100, 2.0**100, 2.0**118 * 0.99]
)
def test_scales_at_the_ends_of_float32(method: Method, scale: float) -> None:
    """Subnormal weights, products that vanish, codes that differ where weights do not, weights just below 2^127."""
    codes, grid = random_codes(8, 256, 6), np.full((1, 2), scale, np.float32)
    assert_same(codes, grid, (128, 128), 32, method)
    assert_same(codes, np.full((1, 16), scale, np.float32), (128, 16), 32, method)
    assert_same(ref.dequantize(codes, grid, (128, 128)), None, None, 64, method)
    assert_same(codes, grid, (128, 128), 64, method, smallest=2.0**-14)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_weights_of_few_values(method: Method) -> None:
    """Constants, one sign, both extremes at once, nearly all zeros: ties, and a floor that many weights lie on."""
    block, scale = (128, 128), np.full((1, 2), 0.01, np.float32)
    for fill in (0x00, 0x80, 0x38, 0xB8, 0x7E, 0x01, 0x81):
        assert_same(np.full((4, 256), fill, np.uint8), scale, block, 32, method)
    codes = np.zeros((64, 256), np.uint8)
    assert_same(codes, scale, block, 128, method)
    codes[5, 7], codes[9, 200], codes[9, 201] = 0x55, 0x7E, 0xFE
    assert_same(codes, scale, block, 128, method)
    assert_same(np.where(random_codes(16, 256, 8) < 128, 0x40, 0xC0).astype(np.uint8), scale, block, 64, method)
    assert_same(np.full((4, 256), -0.0, np.float32), None, None, 32, method)


@examples
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 9),
    groups=st.integers(1, 5),
    group_size=st.sampled_from(GROUP_SIZES),
    method=st.sampled_from(METHODS),
    low=st.integers(-149, 100),
    spread=st.integers(0, 30),
    kind=st.sampled_from(["fp8", "narrow", "f32", "bf16"]),
)
def test_random_weights_of_any_size(
    seed: int, rows: int, groups: int, group_size: int, method: Method, low: int, spread: int, kind: str
) -> None:
    rng, shape = np.random.default_rng(seed), (rows, groups * group_size)
    if kind in ("fp8", "narrow"):
        block = (4, 128 if kind == "fp8" else 16)
        grid = -(-rows // block[0]), -(-shape[1] // block[1])
        scale = np.exp2(rng.uniform(low, min(low + spread, 117), grid)).astype(np.float32)
        codes = random_codes(*shape, seed)
        assert_same(np.where(rng.random(shape) < 0.2, 0, codes).astype(np.uint8), scale, block, group_size, method, 2)
        return
    w = (rng.standard_t(2, shape) * np.exp2(rng.uniform(low, low + spread, (rows, 1)))).astype(np.float32)
    w = np.clip(w, -(2.0**126), 2.0**126)
    weight = (w.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else w
    assert_same(weight, None, None, group_size, method, 2)


def test_nothing_is_nothing() -> None:
    for shape in ((0, 128), (4, 0)):
        found = quantize_on(LANE, np.empty(shape, np.float32), None, None, 32, Method())
        wanted = quantize_linear(np.empty(shape, np.float32), None, None, 32, Method())
        assert (found.packed.shape, found.scale.shape) == (wanted.packed.shape, wanted.scale.shape)
        assert found.sums == wanted.sums


# --------------------------------------------------------------------------------------------------- refusals


def damaged() -> Iterator[tuple[np.ndarray, np.ndarray | None, tuple[int, int] | None]]:
    codes, scale = random_codes(9, 256, 1), random_grid(9, 256, (4, 128), 1)
    for row, column, byte in ((0, 0, 0x7F), (8, 255, 0xFF), (5, 100, 0x7F)):
        bad = codes.copy()
        bad[row, column] = byte
        yield bad, scale, (4, 128)
    for value in (np.nan, np.inf, -np.inf, -1.0, 3e38):
        bad_scale = scale.copy()
        bad_scale[1, 1] = value
        yield codes, bad_scale, (4, 128)
    w = np.ones((9, 256), np.float32)
    for value in (np.nan, np.inf, -np.inf, 2.0**127, -(2.0**127)):
        bad_w = w.copy()
        bad_w[3, 77], bad_w[4, 2] = value, np.nan
        yield bad_w, None, None
        yield (bad_w.view(np.uint32) >> 16).astype(np.uint16), None, None
    half = w.astype(np.float16)
    half[8, 0] = np.inf
    yield half, None, None


def test_what_cannot_be_used_is_refused_with_the_kernels_words() -> None:
    for weight, scale, block in damaged():
        with pytest.raises(NonFiniteError) as wanted:
            quantize_linear(weight, scale, block, 32, Method())
        with pytest.raises(NonFiniteError) as found:
            quantize_on(LANE, weight, scale, block, 32, Method(), band=2)
        assert (found.value.row, found.value.col, found.value.found) == (
            wanted.value.row, wanted.value.col, wanted.value.found
        )  # fmt: skip
    codes, scale = random_codes(4, 128, 2), np.array([[1.0], [np.nan]], np.float32)
    assert_same(codes, scale, (4, 128), 32, Method())  # of rows that are not there; and the lane works on


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
    codes, block = [random_codes(60, 256, seed) for seed in range(12)], (128, 128)
    scale = random_grid(60, 256, block, 0)
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


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_gpu_gives_the_same_bits(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every comparison of this file that takes the device from LANE."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setitem(globals(), "LANE", Lane(torch.device("cuda", 0)))
    checks: list[Callable[[], None]] = [
        lambda: test_linears_are_the_kernels_to_the_bit(method, 32),
        lambda: test_linears_are_the_kernels_to_the_bit(method, 128),
        lambda: test_weights_of_few_values(method),
        *(lambda scale=scale: test_scales_at_the_ends_of_float32(method, scale) for scale in SCALES[:-2]),  # type: ignore[misc]
    ]
    for check in checks:
        check()

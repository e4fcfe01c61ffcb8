"""`convert --device cuda`: the torch path gives the kernels' bytes and figures. All of it runs on torch's CPU device;
the tests marked `gpu` do the same on a GPU where there is one."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kizami.quantize import reference as ref
from kizami.quantize.calibrated.column_weights import integer_weights
from kizami.quantize.kernels import scales as kernel_scales
from kizami.quantize.linear import NonFiniteError, quantize_linear
from kizami.quantize.on_device.arithmetic import added_up, divided, folded, round_bf16
from kizami.quantize.on_device.linear import quantize_on
from kizami.quantize.on_device.rounding import packed_words
from kizami.quantize.on_device.scales import groups_of, guard, nearest
from kizami.quantize.on_device.transfer import KINDS, Lane
from kizami.quantize.on_device.weight import Weight, floor_of, values
from kizami.quantize.settings import GROUP_SIZES, Method

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


# --------------------------------------------------------------------------------------------------------- GPU


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

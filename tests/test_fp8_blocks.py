"""FP8 in blocks of 128x128: the kernel, the oracle and PyTorch give the same bytes; what verify says of others."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kizami.quantize import reference as ref
from kizami.quantize.fp8 import Fp8Blocks, to_fp8_blocks
from kizami.quantize.linear import NonFiniteError
from kizami.quantize.unpack import as_float32, to_bf16
from kizami.quantize.verification.fp8 import fp8_fault

torch = pytest.importorskip("torch")

SHAPES = [(128, 128), (256, 384), (576, 256), (130, 200), (1, 1), (7, 33), (128, 127), (129, 129)]
LARGEST = np.nextafter(np.float32(2.0**127), np.float32(0))


def normal(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, columns)) * 0.02).astype(np.float32)


def spread(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.repeat(np.repeat(scale, 128, axis=0), 128, axis=1)[: shape[0], : shape[1]]


def by_torch(w: np.ndarray, scale: np.ndarray) -> np.ndarray:
    quotient = torch.from_numpy(w) / torch.from_numpy(np.ascontiguousarray(spread(scale, w.shape)))
    return quotient.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def assert_same(w: np.ndarray) -> Fp8Blocks:
    """The kernel's result, after comparing it with the oracle's and PyTorch's."""
    made = to_fp8_blocks(w)
    codes, scale = ref.fp8_blocks(w)
    np.testing.assert_array_equal(made.scale.view(np.uint32), scale.view(np.uint32))
    np.testing.assert_array_equal(made.codes, codes)
    np.testing.assert_array_equal(made.codes, by_torch(w, made.scale))
    assert ((made.codes & 0x7F) != 0x7F).all(), "a NaN code"
    assert (np.isfinite(made.scale) & (made.scale >= 2.0**-126)).all()
    assert fp8_fault(w, made.codes, made.scale) is None
    return made


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_and_scales_are_those_of_the_oracle_and_of_torch(shape: tuple[int, int]) -> None:
    made = assert_same(normal(*shape))
    assert made.scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    assert made.codes.dtype == np.uint8


def test_every_quotient_near_a_boundary_of_two_codes_is_rounded_as_torch_does() -> None:
    """All 253 middles of neighbouring codes and the floats beside them, in a block whose scale is a power of two."""
    values = ref.e4m3_table()[:127]
    middles = (values[1:] + values[:-1]) / 2
    near = np.concatenate(
        [values, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e9))]
    )
    w = np.zeros((128, 128), np.float32)
    w.reshape(-1)[: near.size] = near
    w.reshape(-1)[8192 : 8192 + near.size] = -near
    for exponent in (0, -20, 30):
        made = assert_same(np.ldexp(w, exponent))
        assert made.scale[0, 0] == 2.0**exponent
    assert set(made.codes.reshape(-1).tolist()) == set(range(127)) | set(range(128, 255))


def test_the_scale_is_the_largest_magnitude_of_its_own_block_by_448() -> None:
    w = np.zeros((200, 300), np.float32)
    for i, j, value in ((127, 127, -3.0), (128, 127, 5.0), (127, 128, 7.0), (199, 299, -11.0), (0, 256, 13.0)):
        w[i, j] = value
    made = assert_same(w)
    found = made.scale * np.float32(448)
    np.testing.assert_allclose(found, [[3, 7, 13], [5, 448, 11]], rtol=1e-6)
    assert made.codes[127, 127] == 0xFE
    assert made.codes[199, 299] == 0xFE


def test_a_block_of_zeros_has_scale_one_and_keeps_signs() -> None:
    w = np.zeros((128, 256), np.float32)
    w[3, 5] = -0.0
    w[0, 128] = 1
    made = assert_same(w)
    assert made.scale.tolist() == [[1.0, np.float32(1) / np.float32(448)]]
    assert made.codes[3, 5] == 0x80
    assert np.count_nonzero(made.codes) == 2
    assert made.sums.zero_groups == 1


@pytest.mark.parametrize("largest", [2.0**-149, 2.0**-140, 2.0**-126, 448 * 2.0**-126, 500 * 2.0**-126, 1e-30, LARGEST])
def test_weights_at_both_ends_of_float32_give_finite_scales_and_no_nan(largest: float) -> None:
    w = (normal(128, 128, 3) / 0.1 * largest).astype(np.float32).clip(-largest, largest)
    w[0, 0] = largest
    made = assert_same(w)
    decoded = ref.dequantize(made.codes, made.scale, (128, 128))
    assert np.isfinite(decoded).all()
    if largest >= 448 * 2.0**-126:
        assert made.codes[0, 0] == 0x7E


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf, 2.0**127, -(2.0**127)])
def test_a_weight_that_is_not_finite_or_too_large_is_named(value: float) -> None:
    w = normal(130, 200)
    w[129, 199] = w[129, 150] = value
    with pytest.raises(NonFiniteError) as e:
        to_fp8_blocks(w, first_row=256)
    assert (e.value.row, e.value.col) == (385, 150)
    assert "expected a finite weight" in str(e.value)


def test_rows_in_pieces_give_the_bytes_of_the_whole() -> None:
    w = normal(576, 384, 5)
    whole = to_fp8_blocks(w)
    parts = [to_fp8_blocks(w[first : first + 256], first) for first in (0, 256, 512)]
    np.testing.assert_array_equal(np.concatenate([p.codes for p in parts]), whole.codes)
    np.testing.assert_array_equal(np.concatenate([p.scale for p in parts]), whole.scale)
    summed = sum((p.sums for p in parts[1:]), parts[0].sums)
    assert summed.sum_e2 == pytest.approx(whole.sums.sum_e2, rel=1e-12)
    assert summed.max_abs_error == whole.sums.max_abs_error


@pytest.mark.parametrize("shape", SHAPES)
def test_error_sums_are_the_oracles(shape: tuple[int, int]) -> None:
    w = normal(*shape, seed=9)
    w[:, : shape[1] // 2] *= np.float32(1e-5)  # many codes below 2^-6
    w[:1, :1] = 0
    made = to_fp8_blocks(w)
    for name, expected in ref.fp8_error_sums(w, made.codes, made.scale).items():
        assert getattr(made.sums, name) == pytest.approx(expected, rel=1e-12), name


@given(
    st.integers(0, 2**32 - 1), st.floats(-40, 40), st.sampled_from([(5, 40), (128, 128), (131, 129)]), st.floats(0, 30)
)
@settings(max_examples=60, deadline=None)
def test_any_magnitudes_are_rounded_as_torch_does(
    seed: int, exponent: float, shape: tuple[int, int], wide: float
) -> None:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(shape) * np.exp2(exponent + wide * rng.standard_normal(shape).clip(-1.5, 1.5))
    assert_same(w.astype(np.float32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.codes.__setitem__((140, 7), m.codes[140, 7] ^ 1), "row 396, column 7 is code"),
        (lambda m: m.codes.__setitem__((0, 200), m.codes[0, 200] ^ 0x80), "row 256, column 200"),
        (lambda m: m.scale.__setitem__((1, 0), np.nextafter(m.scale[1, 0], np.float32(1))), "row 384, column 0 is"),
        (lambda m: m.scale.__setitem__((0, 1), np.nan), "column 128 is nan"),
    ],
)
def test_verify_names_the_code_or_the_scale_that_is_not_the_oracles(
    change: Callable[[Fp8Blocks], None], words: str
) -> None:
    w = normal(200, 256, 11)
    w[w == 0] = 1
    made = to_fp8_blocks(w, first_row=256)
    change(made)
    fault = fp8_fault(w, made.codes, made.scale, 256)
    assert fault is not None
    assert words in fault


def test_the_scale_of_a_block_of_zeros_is_checked_too() -> None:
    """Scales are compared by their bits: every one of them is served."""
    w = np.zeros((128, 128), np.float32)
    made = to_fp8_blocks(w)
    made.scale[0, 0] = 2.0
    assert "expected max|W| / 448 = 1" in str(fp8_fault(w, made.codes, made.scale))


def test_bf16_rows_are_rounded_to_nearest_even_and_refused_where_they_overflow() -> None:
    bits = np.random.default_rng(1).integers(0, 0x7F7F8000, 4096).astype(np.uint32)
    bits[:8] = [0, 1, 0x8000, 0x8001, 0x18000, 0x17FFF, 0x7F7F7FFF, 0x80000000]
    bits[8:2000] |= 0x80000000
    w = bits.view(np.float32).reshape(32, 128)
    np.testing.assert_array_equal(to_bf16(w), torch.from_numpy(w).to(torch.bfloat16).view(torch.uint16).numpy())
    w = w.copy()
    w.view(np.uint32)[3, 4] = 0x7F7F8000
    with pytest.raises(NonFiniteError, match=r"row 13, column 4.*too large for BF16"):
        to_bf16(w, first_row=10)
    np.testing.assert_array_equal(as_float32(np.array([0x3F80, 0xC000], np.uint16)), np.array([1, -2], np.float32))

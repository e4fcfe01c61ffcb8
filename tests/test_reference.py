"""The oracle itself, against arithmetic that is slower and plainer still."""

import numpy as np
import pytest

from kizami.quantize import reference as ref

ALL_BF16 = ref.from_bf16(np.arange(0x0080, 0x7F80, dtype=np.uint16)).astype(np.float64)  # normal, positive


def test_e4m3_values_are_those_of_the_format() -> None:
    known = {
        0x00: 0.0,
        0x01: 2.0**-9,
        0x07: 7 * 2.0**-9,
        0x08: 2.0**-6,
        0x38: 1.0,
        0x70: 128.0,
        0x72: 160.0,
        0x7E: 448.0,
    }
    table = ref.decode_e4m3(np.arange(256, dtype=np.uint8))
    for byte, value in known.items():
        assert table[byte] == value
        assert table[byte | 0x80] == -value
    assert np.isnan(table[[0x7F, 0xFF]]).all()
    assert np.isfinite(np.delete(table, [0x7F, 0xFF])).all()
    assert (np.diff(table[:0x7F]) > 0).all()  # bytes are in the order of their magnitudes
    assert (512 * table[:0x7F] == np.rint(512 * table[:0x7F])).all()


def test_dequantize_of_a_row_slice_takes_the_scales_of_those_rows() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7F, (300, 200)).astype(np.uint8)
    scale = rng.uniform(0.5, 2, (3, 2)).astype(np.float32)
    whole = ref.dequantize(codes, scale, (128, 128))
    assert whole[256, 127] == ref.decode_e4m3(codes)[256, 127] * scale[2, 0]
    assert whole[255, 128] == ref.decode_e4m3(codes)[255, 128] * scale[1, 1]
    np.testing.assert_array_equal(ref.dequantize(codes[100:], scale, (128, 128), first_row=100), whole[100:])


def test_bf16_rounds_to_nearest_and_ties_to_even() -> None:
    x = np.array(
        [1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 2.0**-133, 2.0**-134, 3 * 2.0**-134, -1.0], np.float32
    )
    expected = [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, 2.0**-133, 0.0, 2.0**-132, -1.0]
    assert ref.from_bf16(ref.to_bf16(x)).tolist() == expected
    assert ref.from_bf16(ref.to_bf16(np.array([3.4e38], np.float32)))[0] == np.inf
    random = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    np.testing.assert_array_equal(ref.from_bf16(ref.to_bf16(random)), ref.round_to_bf16(random.astype(np.float64)))


def test_words_have_the_first_column_in_the_lowest_nibble() -> None:
    codes = np.array([[-8, -7, -1, 0, 1, 2, 6, 7], [0] * 8, [7] * 8], np.int8)
    words = ref.pack(codes)
    assert words.tolist() == [[-22444272], [-2004318072], [-1]]
    np.testing.assert_array_equal(ref.unpack(words), codes)


def test_division_rounds_every_adversarial_weight_to_its_nearest_code() -> None:
    """1.4: all BF16 significands x all half-integers x -2..+2 ulp."""
    s = ref.from_bf16(np.arange(0x3F80, 0x4000, dtype=np.uint16))
    s = np.concatenate([s, -s, s * np.float32(2.0**-126), s * np.float32(2.0**100)])
    half = np.arange(-7.5, 7)
    at = (s[:, None] * half.astype(np.float32)).astype(np.float32)
    for ulps in range(-2, 3):
        w = (at.view(np.int32) + ulps).view(np.float32)
        codes = np.clip(np.rint(w / s[:, None]), -8, 7)
        doubled, step = 2 * w.astype(np.float64), s.astype(np.float64)[:, None]
        sign = np.sign(step)
        assert ((2 * codes - 1) * step * sign <= doubled * sign).all()
        assert (doubled * sign <= (2 * codes + 1) * step * sign).all()
        tie = doubled == 2 * half * step
        assert (codes[tie] % 2 == 0).all()
        assert tie.all() == (ulps == 0)


def test_division_is_needed_where_the_reciprocal_gives_another_code() -> None:
    s = ref.from_bf16(np.arange(0x3F80, 0x4000, dtype=np.uint16))[:, None, None]
    at = (s * np.arange(-7.5, 7).astype(np.float32)[:, None]).view(np.int32)
    w = (at + np.arange(-2, 3, dtype=np.int32)).view(np.float32)
    assert (np.rint(w / s) != np.rint(w * (1 / s))).any()


@pytest.mark.parametrize("kappa", [None, 0.5, 1.0])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_sweep_finds_what_trying_every_bf16_scale_finds(kappa: float | None, positive: bool, weighted: bool) -> None:
    rng = np.random.RandomState(3)
    w = np.concatenate([rng.standard_normal((4, 32)), rng.standard_t(3.0, (4, 32))]).astype(np.float32)
    h = np.where(rng.uniform(size=32) < 0.2, 0.0, np.exp(rng.standard_normal(32))) if weighted else np.ones(32)
    s = ref.best_scales(w, 32, kappa=kappa, positive=positive, h=h)[:, 0].astype(np.float64)
    near = ALL_BF16[(ALL_BF16 > 1e-4) & (ALL_BF16 < 1e3)]
    candidates = near if positive else np.concatenate([near, -near])
    for row, scale in zip(w.astype(np.float64), s, strict=True):
        ratio = row / candidates[:, None]
        error = (h * (row - candidates[:, None] * np.clip(np.rint(ratio), -8, 7)) ** 2).sum(axis=1)
        if kappa is not None:
            error[(ratio > 7 + kappa).any(axis=1) | (ratio < -8 - kappa).any(axis=1)] = np.inf
        own = (h * (row - scale * np.clip(np.rint(row / scale), -8, 7)) ** 2).sum()
        assert own == pytest.approx(error.min(), rel=1e-12)
        assert scale in candidates[error <= error.min() * (1 + 1e-12)]


def test_lowest_scale_is_the_smallest_bf16_within_the_allowance() -> None:
    rng = np.random.default_rng(4)
    high, low = rng.uniform(0.1, 10, (2, 400))
    for kappa in (0.5, 1.0, 2.0):
        fits = (high[:, None] <= (7 + kappa) * ALL_BF16) & (low[:, None] <= (8 + kappa) * ALL_BF16)
        np.testing.assert_array_equal(ref.lowest_scale(high, low, kappa), ALL_BF16[fits.argmax(axis=1)])


def test_minmax_divides_by_seven_and_a_half() -> None:
    a = np.float32(448)
    w = np.zeros((3, 32), np.float32)
    w[0, :2], w[1, 0], w[2, 0] = (a, -a), -a, a
    codes, s = ref.minmax(w, 32)
    assert s.ravel().tolist() == [59.75] * 3
    assert [hex(int(word) & 0xFFFFFFFF) for word in ref.pack(codes)[:, 0]] == ["0x8888880f", "0x88888880", "0x8888888f"]


def test_signed_maps_the_extreme_to_minus_eight_and_prefers_the_positive_one() -> None:
    w = np.zeros((3, 32), np.float32)
    w[0, 3], w[1, 3], w[2, 3:5] = 4.0, -4.0, (-4.0, 4.0)
    codes, s = ref.signed(w, 32)
    assert s.ravel().tolist() == [-0.5, 0.5, -0.5]
    assert codes[0, 3] == -8
    assert codes[1, 3] == -8
    assert codes[2, 3:5].tolist() == [7, -8]


def test_zero_groups_have_the_scale_of_compressed_tensors() -> None:
    w = np.zeros((2, 64), np.float32)
    w[0, 40], w[1] = 1.0, -0.0
    for codes, s in (ref.minmax(w, 32), ref.signed(w, 32), (None, ref.best_scales(w, 32))):
        assert s[0, 0] == s[1, 0] == s[1, 1] == 2.0**-7
        assert codes is None or not codes[1].any()

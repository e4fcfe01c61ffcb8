"""The scale of measured K and V: what e4m3 does inside and outside its window, and the rule that stays inside."""

import math

import numpy as np
import pytest
from synthetic import to_e4m3

from kizami.formats.statistics import KvRange
from kizami.quantize import reference as ref
from kizami.quantize.kv_scales.rule import biased_channels, choose_window, per_head

RNG = np.random.default_rng(14)


def sqnr(x: np.ndarray, scale: float) -> float:
    """dB of e4m3 at a static scale, saturating."""
    codes = to_e4m3((x / scale).astype(np.float32))
    error = ref.decode_e4m3(codes).astype(np.float64) * scale - x
    return 10 * math.log10(float((x**2).sum() / (error**2).sum()))


@pytest.mark.parametrize(
    ("ratio", "db"),
    [(1e-3, 5.0), (5e-3, 19.0), (1e-2, 25.0), (2e-2, 29.6), (5e-2, 31.4), (0.1, 31.5), (100, 31.5), (200, 22.1)],
)
def test_precision_is_flat_in_a_window_of_2000_to_1_and_falls_off_outside(ratio: float, db: float) -> None:
    assert sqnr(ratio * RNG.standard_normal(1 << 16), 1.0) == pytest.approx(db, abs=0.3)


def test_headroom_costs_nothing_and_saves_what_amax_alone_loses() -> None:
    x = RNG.standard_normal(1 << 18)
    amax, rms = float(np.abs(x).max()), float(np.sqrt((x**2).mean()))
    window = choose_window(amax, rms)
    assert window is not None
    assert sqnr(x, amax / 448) == pytest.approx(31.54, abs=0.1)
    assert sqnr(x, window.scale) == pytest.approx(31.54, abs=0.1)
    assert sqnr(4 * x, amax / 448) < 13
    assert sqnr(4 * x, window.scale) > 31


@pytest.mark.parametrize(
    ("amax", "rms", "scale", "empty"),
    [
        (100.0, 2.0, 1.0, False),
        (112.0, 2.0, 1.0, False),  # lo is 1: just 4x
        (112.5, 2.0, 2.0, False),
        (224.0, 2.0, 2.0, False),  # lo is 2 exactly, not rounded up to 4
        (1000.0, 2.0, 16.0, False),
        (0.4, 0.01, 0.125, False),  # hi 0.2: the largest power of two on the plateau
        (0.4, 0.0125, 0.25, False),  # hi 0.25 exactly
        (10.0, 0.001, 0.125, True),  # headroom before precision
        (1000.0, 0.1, 16.0, True),
    ],
)
def test_the_scale_is_the_rules(amax: float, rms: float, scale: float, empty: bool) -> None:
    window = choose_window(amax, rms)
    assert window is not None
    assert (window.scale, window.is_empty) == (scale, empty)


def test_every_scale_is_a_normal_power_of_two_with_headroom() -> None:
    for _ in range(3000):
        amax = float(np.exp(RNG.uniform(-60, 60)))
        window = choose_window(amax, amax * float(np.exp(RNG.uniform(-12, 0))))
        assert window is not None
        assert math.frexp(window.scale)[0] == 0.5
        assert float(np.float32(window.scale)) == window.scale
        assert 4 * window.amax <= 448 * window.scale
        if not window.is_empty and window.scale != 1.0:
            assert window.lo <= window.scale <= max(window.hi, 2 * window.lo)


@pytest.mark.parametrize("amax", [1e-44, 5e-324, 3.4e38, 1e300])
def test_figures_at_the_edge_of_float_give_a_normal_scale(amax: float) -> None:
    window = choose_window(amax, amax)
    assert window is not None
    assert np.finfo(np.float32).tiny <= window.scale < math.inf


@pytest.mark.parametrize(
    ("amax", "rms"), [(0.0, 0.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, 2.0), (-1, -2)]
)
def test_what_was_never_seen_or_cannot_be_has_no_scale(amax: float, rms: float) -> None:
    assert choose_window(amax, rms) is None


def kv_range(mean: list[float], std: list[float]) -> KvRange:
    m, s = np.array(mean, np.float32), np.array(std, np.float32)
    amax = np.abs(m) + 3 * s
    rms = float(np.sqrt((m.astype(np.float64) ** 2 + s.astype(np.float64) ** 2).mean()))
    return KvRange(amax, m, s, float(amax.max()), rms, float(amax.max()), float(amax.max()))


def test_a_channel_of_the_bias_type_has_a_mean_above_8_deviations_and_above_50() -> None:
    kv = kv_range([60, -60, 60, 49, 0, 80.5], [7, 7, 7.6, 1, 1, 10])
    assert biased_channels(kv).tolist() == [0, 1, 5]


def test_heads_have_ranges_of_their_own() -> None:
    heads = per_head(kv_range([0, 0, 3, 4], [1, 1, 0, 0]), 2)
    assert heads[0] == (3.0, 1.0)
    assert heads[1] == (4.0, pytest.approx(math.sqrt(12.5)))
    assert per_head(kv_range([5.0], [0.0]), 1) == [(5.0, 5.0)]

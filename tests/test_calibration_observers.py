"""Sums and ranges, against numpy on whole arrays."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

import numpy as np
import torch

from kizami.calibration.forward.observers import RangeMeter, SquareSums, square_sums


def rows(count: int, channels: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((count, channels), generator=generator) * torch.logspace(-3, 3, channels)


def test_square_sums_are_weighted_sums_of_squares() -> None:
    x, weight = rows(700, 9), torch.rand(700, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sums, count = square_sums(x, weight)
    assert count == 700
    assert sums.dtype == torch.float64
    assert torch.allclose(sums, (weight[:, None] * x.double() ** 2).sum(dim=0), rtol=1e-12)


def test_rows_that_are_not_finite_are_in_no_sum() -> None:
    x = rows(700, 9)
    bad = x.clone()
    bad[[3, 300, 699], [0, 8, 4]] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    kept = [i for i in range(700) if i not in (3, 300, 699)]
    sums, count = square_sums(bad)
    assert count == 697
    assert torch.allclose(sums, (x[kept].double() ** 2).sum(dim=0), rtol=1e-12)
    squares, meter = SquareSums(), RangeMeter(9)
    squares.add("m", bad[None])
    meter.add(bad, first=True)
    assert np.allclose(squares.means()["m"], (x[kept].double() ** 2).mean(dim=0), rtol=1e-6)
    found = meter.result()
    assert np.allclose(found.channel_amax, x[kept].abs().amax(dim=0))
    assert np.isfinite([found.amax, found.rms, found.p9999, found.first_token_amax]).all()


def test_means_of_parts_are_the_mean_of_the_whole() -> None:
    x, squares = rows(1000, 5), SquareSums()
    for part in (x[:1], x[1:400], x[400:]):
        squares.add("m", part)
    assert np.allclose(squares.means()["m"], (x.double() ** 2).mean(dim=0), rtol=1e-6)
    squares.same("n", "m")
    assert np.array_equal(squares.means()["n"], squares.means()["m"])


def test_ranges_are_those_of_the_whole() -> None:
    x, meter = rows(5000, 16), RangeMeter(16)
    meter.add(x[:600], first=True)
    meter.add(x[600:], first=False)
    found = meter.result()
    exact = x.double().numpy()
    assert found.amax == np.abs(exact).max()
    assert found.rms == pytest.approx(np.sqrt((exact**2).mean()), rel=1e-9)
    assert found.first_token_amax == np.abs(exact[0]).max()
    assert np.allclose(found.channel_std, exact.std(axis=0), rtol=1e-6)
    assert np.allclose(found.channel_mean, exact.mean(axis=0), rtol=1e-4, atol=1e-6)
    quantile = np.sort(np.abs(exact).reshape(-1))[int(np.ceil(0.9999 * exact.size)) - 1]
    assert quantile <= found.p9999 <= quantile * (1 + 1 / 16)


@pytest.mark.parametrize("value", [0.0, 1.0, 448.0, 1e-40, 3e38])
def test_the_bound_of_equal_numbers_is_that_number(value: float) -> None:
    meter = RangeMeter(3)
    meter.add(torch.full((10, 3), value), first=True)
    assert meter.result().p9999 == np.float32(value)


def test_nothing_seen_is_zeros() -> None:
    found = RangeMeter(4).result()
    assert (found.amax, found.rms, found.p9999, found.first_token_amax) == (0, 0, 0, 0)
    assert not found.channel_std.any()


def test_a_state_that_is_loaded_goes_on_as_if_never_saved() -> None:
    x = rows(900, 6)
    whole, first, second = RangeMeter(6), RangeMeter(6), RangeMeter(6)
    for meter in (whole, first):
        meter.add(x[:500], first=True)
    second.load({name: value.copy() for name, value in first.state().items()})
    for meter in (whole, second):
        meter.add(x[500:], first=True)
    assert all(np.array_equal(a, second.state()[name]) for name, a in whole.state().items())
    one, two = SquareSums(), SquareSums()
    one.add("self_attn.o_proj", x[:500])
    two.load(one.state())
    for sums in (one, two):
        sums.add("self_attn.o_proj", x[500:])
    assert np.array_equal(one.means()["self_attn.o_proj"], two.means()["self_attn.o_proj"])

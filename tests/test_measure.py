"""Figures of given codes: those of the oracle, and for codes that quantize_linear has chosen those that it gives."""

from dataclasses import asdict

import numpy as np
import pytest

from kizami.quantize import reference
from kizami.quantize.linear import quantize_linear
from kizami.quantize.measure import measure
from kizami.quantize.metrics import ErrorSums
from kizami.quantize.settings import Method

BLOCK = (128, 128)


def fp8(rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(seed)
    codes, scale = reference.fp8_blocks((rng.standard_t(4, (rows, columns)) * 0.02).astype(np.float32))
    codes[1, :128] = 0
    return codes, scale


def figures(sums: ErrorSums) -> dict[str, float]:
    return {name: value for name, value in asdict(sums).items() if value or name not in ("sum_hw2", "sum_he2")}


@pytest.mark.parametrize("g", [32, 64, 128])
@pytest.mark.parametrize("source", ["fp8", "bf16", "float32"])
def test_codes_that_were_chosen_are_measured_as_they_were(g: int, source: str) -> None:
    codes, scale = fp8(200, 384)
    w = reference.dequantize(codes, scale, BLOCK)
    given = {"fp8": (codes, scale, BLOCK), "bf16": (reference.to_bf16(w), None, None), "float32": (w, None, None)}
    made = quantize_linear(*given[source], g, Method())
    found = measure(*given[source], made.packed, made.scale)
    expected = figures(made.sums)
    assert figures(found).keys() == expected.keys()
    for name, value in figures(found).items():
        assert value == pytest.approx(expected[name], rel=1e-7), name


def test_any_codes_are_measured_as_the_oracle_does() -> None:
    codes, scale = fp8(70, 256)
    rng = np.random.RandomState(1)
    q = rng.randint(-8, 8, (70, 256)).astype(np.int8)
    bits = reference.to_bf16((rng.standard_normal((70, 8)) * 0.003).astype(np.float32))
    found = measure(codes, scale, BLOCK, reference.pack(q), bits)
    w = reference.dequantize(codes, scale, BLOCK)
    expected = reference.error_sums(w, q, reference.from_bf16(bits), 32)
    assert found.clipped > 100
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12), name


def test_errors_are_weighted_with_the_inputs_mean_squares() -> None:
    codes, scale = fp8(16, 128)
    w, h = reference.dequantize(codes, scale, BLOCK), np.random.RandomState(0).random_sample(128)
    made = quantize_linear(w, None, None, 32, Method())
    error = w - reference.unpack(made.packed) * np.repeat(reference.from_bf16(made.scale), 32, axis=1).astype(float)
    found = measure(w, None, None, made.packed, made.scale, h)
    assert found.sum_hw2 == pytest.approx((w.astype(float) ** 2 * h).sum(), rel=1e-12)
    assert found.sum_he2 == pytest.approx((error**2 * h).sum(), rel=1e-12)

"""Error sums and the figures made of them."""

import dataclasses
import json
import math

import numpy as np
import pytest

from kizami.quantize import reference as ref
from kizami.quantize.linear import quantize_linear
from kizami.quantize.metrics import ErrorSums
from kizami.quantize.settings import Method

METHODS = [Method("minmax"), Method("signed"), Method("search"), Method("search", clip_allowance=0.5)]


def fp8(
    rows: int, columns: int, block: tuple[int, int], seed: int = 0
) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    rng = np.random.default_rng(seed)
    codes = (rng.integers(0, 100, (rows, columns)) | rng.choice([0, 0x80], (rows, columns))).astype(np.uint8)
    shape = -(-rows // block[0]), -(-columns // block[1])
    return codes, rng.uniform(0.001, 0.01, shape).astype(np.float32), block


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("block", [(128, 128), (1, 320), (150, 320), (16, 16)])
def test_sums_are_those_of_the_oracle(method: Method, block: tuple[int, int]) -> None:
    codes, scale, _ = source = fp8(150, 320, block)
    codes[3, :64] = 0
    w = ref.dequantize(codes, scale, block)
    for given in (source, (w, None, None), (ref.to_bf16(w), None, None)):
        result = quantize_linear(*given, 32, method)
        used = ref.from_bf16(given[0]) if given[0].dtype == np.uint16 else w
        expected = ref.error_sums(used, ref.unpack(result.packed), ref.from_bf16(result.scale), 32)
        found = dataclasses.asdict(result.sums)
        for name in ("n", "top_n", "clipped", "groups", "zero_groups", "negative_scales"):
            assert found[name] == expected[name], name
        for name in ("sum_w2", "sum_e2", "sum_q2", "top_w2", "top_e2", "max_abs_error"):
            assert found[name] == pytest.approx(expected[name], rel=1e-7), name


@pytest.mark.parametrize("share", [0, 0.0005, 0.01])
@pytest.mark.parametrize("method", METHODS[:3], ids=str)
def test_of_mostly_zeros_all_weights_are_the_largest_thousandth(method: Method, share: float) -> None:
    """Where that begins at 0, every zero belongs to it."""
    codes, scale, block = fp8(128, 320, (128, 128))
    codes[np.random.default_rng(1).random(codes.shape) >= share] = 0
    w = ref.dequantize(codes, scale, block)
    for given in ((codes, scale, block), (w, None, None)):
        result = quantize_linear(*given, 32, method)
        expected = ref.error_sums(w, ref.unpack(result.packed), ref.from_bf16(result.scale), 32)
        assert result.sums.top_n == expected["top_n"]
        assert (result.sums.top_n == w.size) == (share < 0.001)
        assert result.sums.top_e2 == pytest.approx(expected["top_e2"], rel=1e-7)


@pytest.mark.parametrize("shape", [(1, 32), (31, 32), (32, 32), (250, 64), (200, 320)])
def test_the_largest_thousandth_begins_at_an_exact_rank(shape: tuple[int, int]) -> None:
    codes, scale, block = fp8(*shape, (128, 128), seed=9)
    w = ref.dequantize(codes, scale, block)
    ordered = np.sort(np.abs(w).ravel())
    threshold = ordered[int(0.999 * w.size)]
    assert ref.top_threshold(w) == threshold
    for given in ((codes, scale, block), (w, None, None)):
        sums = quantize_linear(*given, 32, METHODS[0]).sums
        assert sums.top_n == (ordered >= threshold).sum()
        assert sums.top_w2 == pytest.approx((ordered[ordered >= threshold].astype(np.float64) ** 2).sum(), rel=1e-12)


def test_figures_of_known_sums() -> None:
    sums = ErrorSums(
        n=1000, sum_w2=100.0, sum_e2=1.0, sum_q2=98.0, top_n=1, top_w2=10.0, top_e2=0.1, max_abs_error=0.5,
        clipped=5, groups=10, zero_groups=2, negative_scales=4,
    )  # fmt: skip
    figures = sums.figures()
    assert figures["rel_error"] == 0.1
    assert figures["sqnr_db"] == 20.0
    assert figures["sqnr_top_db"] == 20.0
    assert figures["max_abs_error"] == 0.5
    assert figures["cosine"] == pytest.approx(98.5 / math.sqrt(9800))
    assert figures["clipped_fraction"] == 0.005
    assert figures["zero_groups"] == 2
    assert figures["negative_scale_fraction"] == 0.4


def test_cosine_is_that_of_the_vectors() -> None:
    codes, scale, block = fp8(64, 256, (128, 128))
    w = ref.dequantize(codes, scale, block).astype(np.float64).ravel()
    result = quantize_linear(codes, scale, block, 128, METHODS[1])
    q = (ref.unpack(result.packed) * np.repeat(ref.from_bf16(result.scale).astype(np.float64), 128, axis=1)).ravel()
    assert result.sums.figures()["cosine"] == pytest.approx(w @ q / np.sqrt((w @ w) * (q @ q)), abs=1e-12)
    assert result.sums.sum_wq == pytest.approx(w @ q, rel=1e-9)


def test_figures_are_numbers_or_null_never_nan() -> None:
    tiny = ErrorSums(n=1, sum_w2=5e-324, sum_e2=5e-324, groups=1)
    for sums in (
        ErrorSums(),
        ErrorSums(n=4, groups=1, zero_groups=1),
        ErrorSums(n=4, sum_w2=1.0, sum_q2=1.0, groups=1),
        tiny,
    ):
        json.dumps(sums.figures(), allow_nan=False)
    zero = quantize_linear(np.zeros((4, 64), np.float32), None, None, 32, METHODS[2]).sums.figures()
    assert zero["rel_error"] == 0.0
    assert zero["sqnr_db"] is None
    assert zero["sqnr_top_db"] is None
    assert zero["cosine"] == 1.0
    assert zero["zero_groups"] == 8
    assert ErrorSums(n=4, sum_w2=1.0, sum_q2=1.0).figures()["sqnr_db"] is None  # exact: infinite
    assert ErrorSums(n=4, sum_w2=1.0, sum_e2=1.0).figures()["cosine"] == 0.0  # all lost


def test_sums_of_two_tensors_are_those_of_both_together() -> None:
    codes, scale, block = fp8(256, 256, (128, 128))
    whole = quantize_linear(codes, scale, block, 64, METHODS[2]).sums
    halves = [quantize_linear(codes[i : i + 128], scale[i // 128 :][:1], block, 64, METHODS[2]).sums for i in (0, 128)]
    both = halves[0] + halves[1]
    for field in dataclasses.fields(ErrorSums):
        if not field.name.startswith("top"):  # the largest thousandth is each tensor's own
            assert getattr(both, field.name) == pytest.approx(getattr(whole, field.name), rel=1e-12), field.name
    assert both.top_n == halves[0].top_n + halves[1].top_n
    assert both + ErrorSums() == both


@pytest.mark.parametrize(
    ("method", "low", "high"), [(METHODS[0], 0.005, 0.015), (METHODS[2], 0.005, 0.02), (METHODS[3], 0, 0)]
)
def test_clipped_is_what_lies_half_a_step_beyond_the_outermost_codes(method: Method, low: float, high: float) -> None:
    w = np.random.default_rng(0).standard_normal((256, 1024)).astype(np.float32)
    result = quantize_linear(w, None, None, 32, method)
    ratio = ref.steps_off(w, np.zeros(w.shape, np.int8), ref.from_bf16(result.scale), 32)
    ratio *= np.sign(np.repeat(ref.from_bf16(result.scale), 32, axis=1))
    assert result.sums.clipped == ((ratio > 7.5) | (ratio < -8.5)).sum()
    assert low <= result.sums.figures()["clipped_fraction"] <= high

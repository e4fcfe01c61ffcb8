"""Quantise one linear's weight [N, K], or decode rows of it. NumPy arrays in and out; safe to call from threads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kizami.quantize.kernels import survey
from kizami.quantize.kernels.lanes import CHUNK
from kizami.quantize.kernels.methods import (
    Search,
    Source,
    Span,
    Totals,
    add_top,
    new_span,
    new_totals,
    rule_rows,
    search_rows,
)
from kizami.quantize.kernels.search_tables import MINUS, candidates, error_table
from kizami.quantize.kernels.weighted import Columns, new_columns, weighted_rows
from kizami.quantize.metrics import ErrorSums
from kizami.quantize.settings import CALIBRATED, GROUP_SIZES, SEARCHED, Method

BAND_BYTES = 1 << 19  # of source that is looked at at a time: between reading and use it stays in the second cache
TILE = 1 << 18  # the same in float32 values, where a source has to be widened

_NO_VALUES = np.empty(0, np.float32)
_NO_BITS = np.empty(0, np.int32)
_NO_CODES = np.empty(0, np.uint8)
_NO_GRID = np.empty((0, 0), np.float32)
_NO_MAXIMA = np.empty(0, np.int8)

Array = NDArray[Any]
Empty = Callable[[tuple[int, ...], Any], Array]
Block = tuple[int, int]


class Rows(Protocol):
    """A weight [N, K] whose rows are asked for in runs, each used before the next is asked for: an array, or a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __getitem__(self, rows: slice, /) -> Array: ...


class NonFiniteError(ValueError):
    """A weight that is not a number, or too large: the first in row-major order. `found` says what is there."""

    def __init__(self, row: int, col: int, found: str) -> None:
        super().__init__(f"row {row}, column {col}: found {found}, expected a finite weight")
        self.row, self.col, self.found = row, col, found

    def __reduce__(self) -> tuple[Any, ...]:  # survives a process pool
        return NonFiniteError, (self.row, self.col, self.found)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """packed int32 [N, K/8], nibble i of word j is column 8j+i holding q+8; scale uint16 [N, K/g], BF16 bits."""

    packed: NDArray[np.int32]
    scale: NDArray[np.uint16]
    sums: ErrorSums


def quantize_linear(
    weight: Rows,
    scale: NDArray[np.float32] | None,
    block: Block | None,
    group_size: int,
    method: Method,
    empty: Empty = np.empty,
    band: int | None = None,
    smallest_scale: float = 0.0,
    weights: NDArray[np.int64] | None = None,
    h: NDArray[np.float64] | None = None,
) -> PackedLinear:
    """weight [N, K]: uint8 e4m3 bytes with float32 `scale` [ceil(N/b0), ceil(K/b1)], or uint16 BF16 bits, float16 or
    float32 without one. K is a multiple of group_size. `empty` (shape, dtype) provides the memory of the result.
    smallest_scale: in BF16, the least magnitude of a scale that the output's layout holds.
    weights: of `weighted` and `gptq`, `column_weights.integer_weights` [K]; h: the mean squares [K] that they came
    from, for the sums that are reported (default: the weights).
    The weight is gone through twice in bands of rows; their height, `band`, does not show in the result.
    Raises NonFiniteError.
    """
    assert group_size in GROUP_SIZES, group_size
    assert weight.shape[1] % group_size == 0, (group_size, weight.shape)
    assert (weights is None) == (method.name not in CALIBRATED), method
    rows, columns = weight.shape
    n = rows * columns
    bands = bands_of(weight, scale, block, group_size, band)
    floor, above = bands.survey() if n else (np.float32(0), 0)
    packed = empty((rows, columns // 8), np.int32)  # not before the survey, which needs memory of its own
    scales = empty((rows, columns // group_size), np.uint16)
    span, totals = new_span(min(rows, bands.band), columns, group_size), new_totals(above * CHUNK)
    by_column = None
    if weights is not None:
        assert weights.shape == (columns,), (weights.shape, columns)
        by_column = new_columns(weights, weights.astype(np.float64) if h is None else h, span)
    for first, last, source in bands.sources() if n else ():
        to = packed[first:last].reshape(-1), scales[first:last].reshape(-1)
        _quantize_rows(source, span, method, by_column, np.float32(smallest_scale), floor, *to, totals)
    lanes = None if by_column is None else by_column.sums
    return PackedLinear(packed, scales, error_sums(totals, lanes, floor, n, scales.size))


def bands_of(
    weight: Rows, scale: NDArray[np.float32] | None, block: Block | None, group_size: int, band: int | None = None
) -> "Codes | Values":
    """How the kernels see a weight: as e4m3 codes where each group has one block scale, else as values."""
    if scale is None or block is None:
        return Values(weight, None, None, band)
    grid, block = _grid(weight, scale, block, 0)
    grid = grid + np.float32(0)  # -0.0 scales to zeros, too, but the kernels order magnitudes by their bits
    kind = Codes if block[1] % group_size == 0 or block[1] >= weight.shape[1] else Values
    return kind(weight, grid, block, band)


class Codes:
    """A weight of e4m3 codes whose groups lie inside one block column. `survey` first, then `sources`."""

    def __init__(self, weight: Rows, grid: NDArray[np.float32], block: Block, band: int | None) -> None:
        self.weight, self.grid, self.block = weight, grid, block
        self.band = band or max(1, BAND_BYTES // max(1, weight.shape[1]))
        self.maxima = np.empty((2, weight.shape[0], weight.shape[1] // CHUNK), np.int8)  # of each sign, by chunk

    def _bands(self) -> Iterator[tuple[int, int, Array, Array]]:
        """First and last row, their codes and maxima."""
        for first, last in _runs(self.weight, self.band):
            codes = np.require(self.weight[first:last], requirements=["C", "W"])
            yield first, last, codes, self.maxima[:, first:last]

    def survey(self) -> tuple[np.float32, int]:
        def count(half: int, counts: Array) -> None:
            if half != survey.HIGH_HALF:
                survey.count_codes(self.maxima[0], self.maxima[1], self.grid, *self.block, 0, half, counts)
                return
            for first, _, codes, (positive, negative) in self._bands():
                _check_scales(codes, self.grid, self.block, first)
                survey.maxima(codes.reshape(-1).view(np.int8), positive.reshape(-1), negative.reshape(-1))
                largest = survey.count_codes(positive, negative, self.grid, *self.block, first, half, counts)
                if largest >= survey.TOO_LARGE_BITS:
                    raise _first_bad(codes, self.grid, self.block, first, survey.TOO_LARGE)

        return _floor(count, self.weight)

    def sources(self) -> Iterator[tuple[int, int, Source]]:
        for first, last, codes, (positive, negative) in self._bands():
            flat = codes.reshape(-1), positive.reshape(-1), negative.reshape(-1)
            yield first, last, Source(*flat, _NO_VALUES, _NO_BITS, self.grid, *self.block, first, self.weight.shape[1])


class Values:
    """Any other weight: widened to float32 band by band."""

    def __init__(self, weight: Rows, grid: NDArray[np.float32] | None, block: Block | None, band: int | None) -> None:
        assert weight.dtype in (np.uint8, np.uint16, np.float16, np.float32), weight.dtype
        self.weight, self.grid, self.block = weight, grid, block
        self.band = min(band or max(1, TILE // max(1, weight.shape[1])), max(1, weight.shape[0]))

    def _bands(self) -> Iterator[tuple[int, int, Array, NDArray[np.float32]]]:
        memory = np.empty((self.band, self.weight.shape[1]), np.float32)
        for first, last in _runs(self.weight, self.band):
            raw, values = self.weight[first:last], memory[: last - first]
            if self.grid is not None and self.block is not None:
                codes = np.require(raw, requirements=["C", "W"])
                survey.decode_rows(codes, self.grid, *self.block, first, values)
            elif raw.dtype == np.uint16:
                np.left_shift(raw, np.uint32(16), out=values.view(np.uint32), dtype=np.uint32)
            else:
                np.copyto(values, raw)
            yield first, last, raw, values

    def survey(self) -> tuple[np.float32, int]:
        peaks = np.empty((self.weight.shape[0], self.weight.shape[1] // CHUNK), np.int32)  # bits of max |W|

        def count(half: int, counts: Array) -> None:
            if half != survey.HIGH_HALF:
                survey.count_values(peaks.reshape(-1), half, counts)
                return
            for first, last, raw, values in self._bands():
                if self.grid is not None and self.block is not None:
                    _check_scales(raw, self.grid, self.block, first)
                part = peaks[first:last].reshape(-1)
                negative = np.empty_like(part)
                survey.maxima(values.reshape(-1).view(np.int32), part, negative)
                np.maximum(part, negative, out=part)
                nan = self.grid is not None and bool(((raw & 0x7F) == 0x7F).any())
                if nan or survey.count_values(part, half, counts) >= survey.TOO_LARGE_BITS:
                    raise _first_bad(raw, self.grid, self.block, first, survey.TOO_LARGE)

        return _floor(count, self.weight)

    def sources(self) -> Iterator[tuple[int, int, Source]]:
        for first, last, _, values in self._bands():
            flat = values.reshape(-1)
            yield (
                first,
                last,
                Source(
                    _NO_CODES,
                    _NO_MAXIMA,
                    _NO_MAXIMA,
                    flat,
                    flat.view(np.int32),
                    _NO_GRID,
                    1,
                    1,
                    first,
                    self.weight.shape[1],
                ),
            )


def _runs(weight: Rows, height: int) -> Iterator[tuple[int, int]]:
    rows = weight.shape[0]
    return ((first, min(first + height, rows)) for first in range(0, rows, height))


def _floor(count: Callable[[int, Array], None], weight: Rows) -> tuple[np.float32, int]:
    """A bound not above the threshold of the top 0.1 %, and how many chunks of weights reach beyond it.

    As many chunks as that is weights have their peak, hence a weight, not below it. Exact, by counting the upper and
    then the lower halves of the peaks' bits: cheaper than a partition of them all.
    """
    rank = survey.top_count(weight.shape[0] * weight.shape[1])
    counts = np.zeros(1 << 16, np.int32)
    count(survey.HIGH_HALF, counts)
    high, above = survey.bin_of(counts, rank)
    counts[:] = 0
    count(high, counts)
    low, more = survey.bin_of(counts, rank - above)
    return np.uint32(high << 16 | low).view(np.float32), above + more


def dequantize_rows(
    weight: NDArray[np.uint8],
    scale: NDArray[np.float32],
    block: tuple[int, int],
    first_row: int,
    empty: Empty = np.empty,
) -> NDArray[np.uint16]:
    """bf16(fl32(e4m3 * scale)) of rows first_row.. of a tensor: uint8 [n, K] to BF16 bits [n, K]. `scale` is the whole
    tensor's grid. Raises NonFiniteError; its row counts from the tensor's first.
    """
    grid, block = _grid(weight, scale, block, first_row)
    weight = np.require(weight, requirements=["C", "W"])
    out = empty(weight.shape, np.uint16)
    if weight.size:
        _check_scales(weight, grid, block, first_row)
        if not survey.dequantize(weight, grid, *block, first_row, out):
            raise _first_bad(weight, grid, block, first_row, survey.BF16_OVERFLOW)
    return out


def warm_up(method: Method, group_size: int) -> None:
    """Compile, or load from the cache, whatever a job with this method needs."""
    codes = np.full((1, group_size), 0x38, np.uint8)
    scale, narrow = np.ones((1, 1), np.float32), np.ones((1, group_size // 16), np.float32)
    weights = np.ones(group_size, np.int64) if method.name in CALIBRATED else None
    quantize_linear(codes, scale, (128, 128), group_size, method, weights=weights)
    quantize_linear(codes, narrow, (128, 16), group_size, method, weights=weights)  # the float path
    if weights is not None:
        warm_up(Method("search"), group_size)  # in its place where nothing is known
    dequantize_rows(codes, scale, (128, 128), 0)


def _grid(weight: Rows, scale: NDArray[np.float32], block: Block, first_row: int) -> tuple[NDArray[np.float32], Block]:
    """Arguments of the one kind the kernels are compiled for: a contiguous, writable array, plain integers."""
    b0, b1 = int(block[0]), int(block[1])
    end = first_row + weight.shape[0]
    assert min(block) > 0, block
    assert weight.dtype == np.uint8, weight.dtype
    assert scale.dtype == np.float32, scale.dtype
    assert scale.shape[0] >= -(-end // b0), (weight.shape, scale.shape, block)
    assert scale.shape[1:] == (-(-weight.shape[1] // b1),), (weight.shape, scale.shape, block)
    return np.require(scale, requirements=["C", "W"]), (b0, b1)


def _check_scales(weight: Array, grid: NDArray[np.float32], block: Block, first_row: int) -> None:
    used = grid[first_row // block[0] : -(-(first_row + len(weight)) // block[0])]
    if not (np.isfinite(used) & (used >= 0)).all():
        raise _first_bad(weight, grid, block, first_row, survey.TOO_LARGE)


def _first_bad(
    weight: Array, grid: NDArray[np.float32] | None, block: Block | None, first_row: int, limit: float
) -> NonFiniteError:
    """Slow and only on the way out: look again, row by row, for the first weight that is not finite or beyond limit."""
    for r, row in enumerate(weight):
        s: Any = None
        if grid is not None and block is not None:
            s = grid[(first_row + r) // block[0]][np.arange(row.size) // block[1]]
            nan = (row & 0x7F) == 0x7F
            with np.errstate(over="ignore", invalid="ignore"):
                w = np.where(nan, np.float32(np.nan), survey.SIGNED[row] * s)
            bad = nan | ~(np.isfinite(s) & (s >= 0)) | ~(np.abs(w) < limit)
        else:
            w = (row.astype(np.uint32) << 16).view(np.float32) if row.dtype == np.uint16 else row.astype(np.float32)
            bad = ~(np.abs(w) < limit)
        if bad.any():
            c = int(np.argmax(bad))
            return NonFiniteError(first_row + r, c, _found(row[c], w[c], None if s is None else s[c]))
    raise AssertionError("a kernel saw a weight that is not finite, the search for it did not")


def _found(raw: Any, value: Any, scale: Any) -> str:
    if scale is not None and not (np.isfinite(scale) and scale >= 0):
        return f"block scale {scale:g}"
    if scale is not None and raw & 0x7F == 0x7F:
        return f"FP8 NaN code 0x{raw:02X}"
    return f"{value:g}, too large for BF16" if np.isfinite(value) or scale is not None else f"{value:g}"


def _quantize_rows(
    source: Source,
    span: Span,
    method: Method,
    columns: Columns | None,
    smallest: np.float32,
    floor: np.float32,
    packed: Array,
    scale: Array,
    totals: Totals,
) -> None:
    if method.name not in SEARCHED:
        rule_rows(source, method.name == "minmax", smallest, span, floor, packed, scale, totals)
        return
    group_size = span.relative.size
    is_weighted = columns is not None
    chosen = candidates(group_size, method.clip_allowance, is_weighted)
    table = error_table(group_size, method.clip_allowance, is_weighted).reshape(-1)
    positive = method.scale_sign == "positive"
    search = Search(table, chosen.divisors, MINUS, chosen.reach_plus, chosen.reach_minus, positive)
    if columns is None:
        search_rows(source, search, smallest, span, floor, packed, scale, totals)
    else:
        weighted_rows(source, search, columns, smallest, span, floor, packed, scale, totals)


def error_sums(
    totals: Totals, weighted: NDArray[np.float64] | None, floor: np.float32, n: int, groups: int
) -> ErrorSums:
    """weighted: lanes of h W^2 and h E^2 [2 * SUMS]; floor: of the survey, above which `totals.found` holds weights."""
    w2, e2, q2 = (_add_lanes(lanes) for lanes in totals.sums.reshape(3, -1))
    found = totals.found[:, : int(totals.found_count[0])]
    threshold = survey.threshold_of(found[0], floor, n) if n else floor
    top = np.zeros(3)
    add_top(found, threshold, top)
    if threshold == floor:
        many, squares = (float(x) for x in totals.at_floor)
        top += (many, many * float(floor) ** 2, squares)
    hw2, he2 = (0.0, 0.0) if weighted is None else (_add_lanes(lanes) for lanes in weighted.reshape(2, -1))
    return ErrorSums(
        n=n,
        sum_w2=w2,
        sum_e2=e2,
        sum_q2=q2,
        top_n=int(top[0]),
        top_w2=float(top[1]),
        top_e2=float(top[2]),
        max_abs_error=float(totals.largest.max().view(np.float32)),
        clipped=int(totals.clipped[0]),
        groups=groups,
        zero_groups=int(totals.groups[0]),
        negative_scales=int(totals.groups[1]),
        sum_hw2=hw2,
        sum_he2=he2,
    )


def _add_lanes(lanes: NDArray[np.float64]) -> float:
    """In this order; NumPy's own order depends on the CPU."""
    total = 0.0
    for lane in lanes:
        total += float(lane)
    return total

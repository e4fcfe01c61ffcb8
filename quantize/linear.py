"""Quantise one linear's weight [N, K], or decode rows of it. NumPy arrays in and out; safe to call from threads."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.quantize.kernels import survey
from kizami.quantize.kernels.methods import Output, Search, Source, new_output, rule_rows, search_rows
from kizami.quantize.kernels.rows import CHUNK
from kizami.quantize.kernels.search_tables import MINUS, candidates, error_table
from kizami.quantize.metrics import ErrorSums
from kizami.quantize.settings import GROUP_SIZES, Method

TILE = 1 << 18  # float32 values held at a time where a source has to be widened

_NO_VALUES = np.empty((0, 0), np.float32)
_NO_CODES = np.empty((0, 0), np.uint8)
_NO_GRID = np.empty((0, 0), np.float32)
_NO_MAXIMA = np.empty((0, 0), np.int8)

Array = NDArray[Any]
Empty = Callable[[tuple[int, ...], Any], Array]
Tiles = Callable[[], Iterator[tuple[int, NDArray[np.float32]]]]  # (first row, float32 rows), restartable


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
    weight: Array,
    scale: NDArray[np.float32] | None,
    block: tuple[int, int] | None,
    group_size: int,
    method: Method,
    empty: Empty = np.empty,
) -> PackedLinear:
    """weight [N, K]: uint8 e4m3 bytes with float32 `scale` [ceil(N/b0), ceil(K/b1)], or uint16 BF16 bits, float16 or
    float32 without one. K is a multiple of group_size. `empty` (shape, dtype) provides the memory of the result.
    Raises NonFiniteError.
    """
    assert group_size in GROUP_SIZES, group_size
    assert weight.shape[1] % group_size == 0, (group_size, weight.shape)
    rows, columns = weight.shape
    if not weight.size:
        nothing = new_output(rows, columns, group_size)
        return PackedLinear(nothing.packed, nothing.scale, _sums(nothing, 0))
    grid, tiles = None, _float_tiles(weight)
    if scale is not None and block is not None:
        weight, grid, block = _fp8(weight, scale, block)
        _check_scales(weight, grid, block, 0)
        tiles = _fp8_tiles(weight, grid, block)
    parts: Iterable[tuple[slice, Source]]
    if grid is not None and block is not None and (block[1] % group_size == 0 or block[1] >= columns):
        source, threshold = _survey_codes(weight, grid, block)
        parts = [(slice(0, rows), source)]
    else:
        threshold = _survey_values(weight, grid, block, tiles)
        parts = ((slice(first, first + len(values)), _value_source(values)) for first, values in tiles())
    out = new_output(rows, columns, group_size, empty)  # not before the survey, which needs memory of its own
    for rows_of, source in parts:
        part = out._replace(packed=out.packed[rows_of], scale=out.scale[rows_of])
        _quantize_rows(source, group_size, method, threshold, part)
    return PackedLinear(out.packed, out.scale, _sums(out, weight.size))


def _value_source(values: NDArray[np.float32]) -> Source:
    return Source(_NO_CODES, _NO_MAXIMA, _NO_MAXIMA, values, _NO_GRID, 1, 1)


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
    weight, grid, block = _fp8(weight, scale, block, first_row)
    out = empty(weight.shape, np.uint16)
    if weight.size:
        _check_scales(weight, grid, block, first_row)
        if not survey.dequantize(weight, grid, *block, first_row, out):
            raise _first_bad(weight, grid, block, first_row, survey.BF16_OVERFLOW)
    return out


def warm_up(method: Method, group_size: int) -> None:
    """Compile, or load from the cache, whatever a job with this method needs."""
    codes = np.full((1, group_size), 0x38, np.uint8)
    scale = np.ones((1, 1), np.float32)
    quantize_linear(codes, scale, (128, 128), group_size, method)
    quantize_linear(codes, np.ones((1, group_size // 16), np.float32), (128, 16), group_size, method)  # the float path
    dequantize_rows(codes, scale, (128, 128), 0)


def _fp8(
    weight: Array, scale: NDArray[np.float32], block: tuple[int, int], first_row: int = 0
) -> tuple[Array, NDArray[np.float32], tuple[int, int]]:
    """Arguments of the one kind the kernels are compiled for: contiguous, writable arrays, plain integers."""
    b0, b1 = int(block[0]), int(block[1])
    end = first_row + weight.shape[0]
    assert min(block) > 0, block
    assert weight.dtype == np.uint8, weight.dtype
    assert scale.dtype == np.float32, scale.dtype
    assert scale.shape[0] >= -(-end // b0), (weight.shape, scale.shape, block)
    assert scale.shape[1:] == (-(-weight.shape[1] // b1),), (weight.shape, scale.shape, block)
    return np.require(weight, requirements=["C", "W"]), np.require(scale, requirements=["C", "W"]), (b0, b1)


def _check_scales(weight: Array, grid: NDArray[np.float32], block: tuple[int, int], first_row: int) -> None:
    used = grid[first_row // block[0] : -(-(first_row + len(weight)) // block[0])]
    if not (np.isfinite(used) & (used >= 0)).all():
        raise _first_bad(weight, grid, block, first_row, survey.TOO_LARGE)


def _fp8_tiles(weight: Array, grid: NDArray[np.float32], block: tuple[int, int]) -> Tiles:
    def tiles() -> Iterator[tuple[int, NDArray[np.float32]]]:
        for first, codes in _row_tiles(weight):
            values = np.empty(codes.shape, np.float32)
            survey.decode_rows(codes, grid, *block, first, values)
            yield first, values

    return tiles


def _float_tiles(weight: Array) -> Tiles:
    assert weight.dtype in (np.uint8, np.uint16, np.float16, np.float32), weight.dtype

    def tiles() -> Iterator[tuple[int, NDArray[np.float32]]]:
        for first, rows in _row_tiles(weight):
            if rows.dtype == np.uint16:
                yield first, (rows.astype(np.uint32) << 16).view(np.float32)
            else:
                yield first, rows.astype(np.float32, order="C")

    return tiles


def _row_tiles(weight: Array) -> Iterator[tuple[int, Array]]:
    step = max(1, TILE // weight.shape[1])
    for first in range(0, len(weight), step):
        yield first, weight[first : first + step]


def _survey_codes(weight: Array, grid: NDArray[np.float32], block: tuple[int, int]) -> tuple[Source, np.float32]:
    """The tensor with its extremes, and the threshold of its top 0.1 %."""
    signed = weight.view(np.int8)
    chunks = (weight.shape[0], weight.shape[1] // CHUNK)
    positive, negative, peaks = np.empty(chunks, np.int8), np.empty(chunks, np.int8), np.empty(chunks, np.float32)
    survey.code_maxima(signed, positive, negative)
    survey.code_peaks(positive, negative, grid, *block, peaks)
    nan = max(positive.max(), negative.max()) == survey.NAN_CODE
    if nan or not peaks.max() < survey.TOO_LARGE:
        raise _first_bad(weight, grid, block, 0, survey.TOO_LARGE)
    floor = survey.floor_of(peaks, weight.size)
    found = np.empty(survey.top_count(weight.size) * CHUNK, np.float32)
    count = survey.codes_above(weight, grid, *block, peaks, floor, found)
    source = Source(weight, positive, negative, _NO_VALUES, grid, *block)
    return source, survey.threshold_of(found[:count], floor, weight.size)


def _survey_values(
    weight: Array, grid: NDArray[np.float32] | None, block: tuple[int, int] | None, tiles: Tiles
) -> np.float32:
    """The same for weights that are widened tile by tile."""
    peaks = np.empty((weight.shape[0], weight.shape[1] // CHUNK), np.float32)
    for first, values in tiles():
        codes, part = weight[first : first + len(values)], peaks[first : first + len(values)]
        survey.value_peaks(values, part)
        nan = grid is not None and bool(((codes & 0x7F) == 0x7F).any())
        if nan or not (part < survey.TOO_LARGE).all():
            raise _first_bad(codes, grid, block, first, survey.TOO_LARGE)
    floor = survey.floor_of(peaks, weight.size)
    found = np.empty(survey.top_count(weight.size) * CHUNK, np.float32)
    count = 0
    for first, values in tiles():
        count += survey.values_above(values, peaks[first : first + len(values)], floor, found[count:])
    return survey.threshold_of(found[:count], floor, weight.size)


def _first_bad(
    weight: Array, grid: NDArray[np.float32] | None, block: tuple[int, int] | None, first_row: int, limit: float
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


def _quantize_rows(source: Source, group_size: int, method: Method, threshold: np.float32, out: Output) -> None:
    if method.name != "search":
        rule_rows(source, group_size, method.name == "minmax", threshold, out)
        return
    chosen = candidates(group_size, method.clip_allowance)
    table = error_table(group_size, method.clip_allowance).reshape(-1)
    positive = method.scale_sign == "positive"
    search = Search(table, chosen.divisors, MINUS, chosen.reach_plus, chosen.reach_minus, positive)
    search_rows(source, group_size, search, threshold, out)


def _sums(out: Output, n: int) -> ErrorSums:
    w2, e2, q2 = (float(x) for x in _add_lanes(out.sums))
    return ErrorSums(
        n=n,
        sum_w2=w2,
        sum_e2=e2,
        sum_q2=q2,
        top_n=int(out.top[0]),
        top_w2=float(out.top[1]),
        top_e2=float(out.top[2]),
        max_abs_error=float(np.uint32(out.counts[3]).view(np.float32)),
        clipped=int(out.counts[2]),
        groups=out.scale.size,
        zero_groups=int(out.counts[0]),
        negative_scales=int(out.counts[1]),
    )


def _add_lanes(lanes: NDArray[np.float64]) -> NDArray[np.float64]:
    """In this order; NumPy's own order depends on the CPU."""
    while lanes.shape[1] % 2 == 0 and lanes.shape[1]:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    total = np.zeros(lanes.shape[0])
    for lane in lanes.T:
        total += lane
    return total

"""The kernels that quantise a tensor: each goes through its rows and calls the passes of `rows` and `scales`."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kizami.quantize.kernels.jit import kernel
from kizami.quantize.kernels.rows import (
    CHUNK,
    Array,
    add_squares,
    add_top,
    bf16_bits,
    chunk_scales,
    count_clipped,
    decode_row,
    e4m3,
    errors_row,
    group_maxima,
    largest_bits,
    largest_magnitude,
    minmax_codes,
    nearest_codes,
    pack_row,
    spread,
)
from kizami.quantize.kernels.scales import (
    CODE_UNITS,
    VALUE_UNITS,
    choose,
    code_units,
    fit_sums,
    minmax_scale,
    refit,
    relative_values,
    signed_scale,
    sum_codes,
    sum_values,
    value_units,
)
from kizami.quantize.kernels.vectors import COUNT


class Source(NamedTuple):
    """Weights as e4m3 codes whose groups lie inside one block column, or as float32 values (the other is [0, 0])."""

    codes: Array  # uint8 [N, K]
    positive: Array  # int8 [N, K/32]: largest magnitude code of each sign in each chunk
    negative: Array
    values: Array  # float32 [N, K]
    grid: Array  # float32 [gr, gc] block scales of the codes
    b0: int
    b1: int


class Output(NamedTuple):
    """Results for the rows of a Source, and accumulators that go on from one Source to the next."""

    packed: NDArray[np.int32]  # [N, K/8]
    scale: NDArray[np.uint16]  # [N, K/g]
    sums: NDArray[np.float64]  # [3, K/4]: squares of W, of the error, of q*s
    top: NDArray[np.float64]  # [3]: count, squares of W and of the error over |W| >= threshold
    counts: NDArray[np.int64]  # [4]: zero groups, negative scales, clipped weights, bits of max |error|


class Search(NamedTuple):
    table: Array  # uint16, flat
    divisors: Array  # float64
    minus: int
    reach_plus: float
    reach_minus: float
    positive_scale: bool


def new_output(rows: int, columns: int, group_size: int, empty: Any = np.empty) -> Output:
    return Output(
        empty((rows, columns // 8), np.int32),
        empty((rows, columns // group_size), np.uint16),
        np.zeros((3, columns // 4)),
        np.zeros(3),
        np.zeros(4, np.int64),
    )


@kernel
def finish_row(
    w: Array, scale: Array, step: Array, codes: Array, restored: Array, error: Array, error_bits: Array,
    positive: Array, negative: Array, threshold: Any, r: int, out: Any,
) -> None:  # fmt: skip
    """Pack the codes, store the scales, measure. positive, negative: largest magnitude per chunk."""
    pack_row(codes, out.packed[r])
    for k in range(scale.size):
        out.scale[r, k] = bf16_bits(scale[k])
        out.counts[1] += scale[k] < 0
    errors_row(w, step, codes, restored, error)
    add_squares(w, out.sums[0])
    add_squares(error, out.sums[1])
    add_squares(restored, out.sums[2])
    out.counts[2] += count_clipped(w, step, positive, negative)
    out.counts[3] = max(out.counts[3], np.int64(largest_magnitude(error_bits)))
    add_top(w, error, positive, negative, threshold, out.top)


@kernel
def load_codes(
    codes: Array, positive_code: Array, negative_code: Array, block_scale: Array, w: Array, positive: Array,
    negative: Array,
) -> None:  # fmt: skip
    """A row of e4m3 codes to float32, and the largest weight of each sign per chunk."""
    decode_row(codes, block_scale, w)
    for c in range(positive.size):
        positive[c] = e4m3(positive_code[c]) * block_scale[c]
        negative[c] = e4m3(negative_code[c]) * block_scale[c]


@kernel
def rule_rows(source: Any, g: int, is_minmax: bool, threshold: Any, out: Any) -> None:
    """`minmax` or `signed`."""
    rows, groups = out.scale.shape
    columns = out.packed.shape[1] * 8
    row = np.empty((3, columns), np.float32)
    w, restored, error = row[0], row[1], row[2]
    row_bits, codes = row.view(np.int32), np.empty(columns, np.uint8)
    bits, error_bits = row_bits[0], row_bits[2]
    chunks = np.empty((4, columns // CHUNK), np.float32)
    step, block_scale, positive, negative = chunks[0], chunks[1], chunks[2], chunks[3]
    bit_maxima = chunks.view(np.int32)
    group = np.empty((3, groups), np.float32)
    group_positive, group_negative, scale = group[0], group[1], group[2]
    for r in range(rows):
        if source.codes.shape[0]:
            if r % source.b0 == 0:
                chunk_scales(source.grid[r // source.b0], source.b1, block_scale)
            load_codes(source.codes[r], source.positive[r], source.negative[r], block_scale, w, positive, negative)
        else:
            w[:] = source.values[r]
            largest_bits(bits, bit_maxima[2], bit_maxima[3])
        group_maxima(positive, group_positive)
        group_maxima(negative, group_negative)
        for k in range(groups):
            p, n = group_positive[k], group_negative[k]
            out.counts[0] += max(p, n) == 0
            scale[k] = minmax_scale(p, n) if is_minmax else signed_scale(p, n)
        spread(scale, step)
        if is_minmax:
            minmax_codes(w, step, codes)
        else:
            nearest_codes(w, step, codes)
        finish_row(w, scale, step, codes, restored, error, error_bits, positive, negative, threshold, r, out)


@kernel
def search_rows(source: Any, g: int, search: Any, threshold: Any, out: Any) -> None:
    """`search`: sums for all candidates, the best one, one refit."""
    rows, groups = out.scale.shape
    columns = out.packed.shape[1] * 8
    per_group = g // CHUNK
    row = np.empty((4, columns), np.float32)
    w, restored, error, relative = row[0], row[1], row[2], row[3]
    row_bits, codes = row.view(np.int32), np.empty(columns, np.uint8)
    bits, error_bits = row_bits[0], row_bits[2]
    chunks = np.empty((4, columns // CHUNK), np.float32)
    step, block_scale, positive, negative = chunks[0], chunks[1], chunks[2], chunks[3]
    bit_maxima = chunks.view(np.int32)
    group = np.empty((3, groups), np.float32)
    group_positive, group_negative, scale = group[0], group[1], group[2]
    group_codes, fit = np.empty((2, groups), np.int32), np.empty((2, columns // CHUNK), np.int32)
    unit, sums = np.empty(groups, np.float64), np.empty((groups, COUNT), np.int32)
    units = np.empty(columns, np.int32)
    for r in range(rows):
        if source.codes.shape[0]:
            if r % source.b0 == 0:
                chunk_scales(source.grid[r // source.b0], source.b1, block_scale)
            load_codes(source.codes[r], source.positive[r], source.negative[r], block_scale, w, positive, negative)
        else:
            w[:] = source.values[r]
            largest_bits(bits, bit_maxima[2], bit_maxima[3])
        group_maxima(positive, group_positive)
        group_maxima(negative, group_negative)
        if source.codes.shape[0]:
            group_maxima(source.positive[r], group_codes[0])
            group_maxima(source.negative[r], group_codes[1])
            sum_codes(source.codes[r], group_codes[0], group_codes[1], search.table, sums)
            code_units(source.codes[r], units)
            for k in range(groups):
                unit[k] = np.float64(block_scale[k * per_group]) / np.float64(CODE_UNITS)
        else:
            relative_values(w, group_positive, group_negative, relative)
            sum_values(relative, search.divisors, sums)
            value_units(relative, units)
            for k in range(groups):
                p, n = np.float64(group_positive[k]), np.float64(group_negative[k])
                unit[k] = (-n if n > p else p) / np.float64(VALUE_UNITS)
        for k in range(groups):
            out.counts[0] += max(group_positive[k], group_negative[k]) == 0
        choose(
            sums, search.divisors, search.minus, group_positive, group_negative,
            search.reach_plus, search.reach_minus, search.positive_scale, scale,
        )  # fmt: skip
        spread(scale, step)
        fit_sums(w, units, step, fit[0], fit[1])
        refit(fit[0], fit[1], unit, group_positive, group_negative, search.reach_plus, search.reach_minus, scale)
        spread(scale, step)
        nearest_codes(w, step, codes)
        finish_row(w, scale, step, codes, restored, error, error_bits, positive, negative, threshold, r, out)

"""`weighted` (int4-algorithms section 7): `search` with errors that count by column. Codes and error sums as in
`methods`, whose passes it shares."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kizami.quantize.kernels.jit import kernel
from kizami.quantize.kernels.lanes import CHUNK
from kizami.quantize.kernels.methods import (
    BATCH,
    Span,
    aligned,
    end_row,
    group_extremes,
    load_extremes,
    store_codes,
    store_scales,
)
from kizami.quantize.kernels.rows import Array
from kizami.quantize.kernels.scales import (
    VALUE_UNITS,
    ZERO_GROUP_SCALE,
    allowed,
    guard,
    refit,
    relative_values,
    value_units,
)
from kizami.quantize.kernels.search_tables import WEIGHTED_COUNT, WEIGHTED_MINUS
from kizami.quantize.kernels.search_vectors import CODE_UNITS
from kizami.quantize.kernels.vectors import SUMS
from kizami.quantize.kernels.weighted_vectors import (
    add_candidate_errors,
    add_weighted_rows,
    fit_weighted,
    smallest_weighted,
    weighted_errors,
)

# Candidates are compared with weights that add up to 2^15 in each group, so that 16 bits hold each of them and 32 the
# sums. At groups of 32 that is a thousandth of the group's mean, at 128 four thousandths. The least squares that follow
# take the weights as they are.
SHARES = 1 << 15
DROPPED_BITS = 5  # of the sums, which then leave room for the candidate's index; the smallest step is 1e-5 of a sum


class Columns(NamedTuple):
    """shares: int16 [K], integers that add up to SHARES per group (at least 1 each); exact: float64 [K], the integer
    weights themselves; h: float64 [K], mean squares, for what is reported; fit: float64 [groups * 2], memory; sums:
    float64 [2 * SUMS], lanes of h W^2 and h E^2, which go on from one run of rows to the next; row: the same of the row
    in work; candidates: int32 [WEIGHTED_COUNT] of BATCH groups, and errors: int64 [WEIGHTED_COUNT], memory."""

    shares: Array
    exact: Array
    h: Array
    fit: Array
    sums: Array
    row: Array
    candidates: Array
    errors: Array


def column_shares(weights: NDArray[np.int64], group_size: int) -> NDArray[np.float64]:
    """[K], integers: the weights of each group, made to add up to about SHARES."""
    groups = weights.reshape(-1, group_size)
    shares: NDArray[np.float64] = np.rint(groups * (SHARES / groups.sum(axis=1, keepdims=True)))
    return np.clip(shares, 1, SHARES - 1).reshape(-1)


def new_columns(weights: NDArray[np.int64], h: NDArray[np.float64], span: Span) -> Columns:
    columns = Columns(
        aligned(np.int16, weights.size),
        aligned(np.float64, weights.size),
        aligned(np.float64, weights.size),
        aligned(np.float64, 2 * span.step.size),
        aligned(np.float64, 2 * SUMS),
        aligned(np.float64, 2 * SUMS),
        aligned(np.int32, BATCH * WEIGHTED_COUNT),
        aligned(np.int64, WEIGHTED_COUNT),
    )
    columns.shares[:] = column_shares(weights, span.relative.size)
    columns.exact[:] = weights
    columns.h[:] = h
    return columns


@kernel
def sum_weighted_values(
    relative: Array, divisors: Array, shares: Array, column: int, errors: Array, sums: Array, at: int
) -> None:
    """As scales.sum_values; a weight of the mean share counts as there. errors: memory."""
    mean = np.float64(SHARES) / relative.size
    errors[:] = 0
    for o in range(0, relative.size, CHUNK):
        add_candidate_errors(relative, o, divisors, shares, column + o, errors)
    for j in range(WEIGHTED_COUNT):
        sums[at + j] = np.int32(np.rint(errors[j] / (divisors[j] * divisors[j] * mean)))


@kernel
def choose_weighted(source: Any, first: int, groups: int, per_group: int, search: Any, columns: Any, span: Any) -> None:
    """As methods.choose_scales."""
    codes, values, is_code = source.codes, source.values, source.codes.size > 0
    step, p, n, p_code, n_code = span.step, span.p, span.n, span.p_code, span.n_code
    sums, relative, extreme, table, divisors = (
        columns.candidates,
        span.relative,
        span.extreme,
        search.table,
        search.divisors,
    )
    errors, shares, by_row = columns.errors, columns.shares, columns.shares.size // (per_group * CHUNK)
    for batch in range(0, groups, BATCH):
        end = min(batch + BATCH, groups)
        sums[:] = 0
        for k in range(batch, end):
            at, chunk, column = (k - batch) * WEIGHTED_COUNT, first + k * per_group, (k % by_row) * per_group * CHUNK
            if is_code:
                a, b = np.int64(p_code[k]), np.int64(n_code[k])
                flip = np.int64(b > a) << 7  # codes relative to the sign of the extreme
                for c in range(per_group):
                    add_weighted_rows(
                        table, max(a, b), flip, codes, (chunk + c) * CHUNK, shares, column + c * CHUNK, sums, at
                    )
            else:
                relative_values(values, chunk * CHUNK, extreme[k], relative)
                sum_weighted_values(relative, divisors, shares, column, errors, sums, at)
        if is_code:
            for i in range(sums.size):
                sums[i] = np.int32(sums[i] >> DROPPED_BITS)
        for k in range(batch, end):
            step[k] = ZERO_GROUP_SCALE
            if max(p[k], n[k]) > 0:
                last, end = allowed(
                    divisors, WEIGHTED_MINUS, WEIGHTED_COUNT, p[k], n[k], search.reach_plus, search.positive_scale
                )
                d = divisors[smallest_weighted(sums, (k - batch) * WEIGHTED_COUNT, last, WEIGHTED_MINUS, end)]
                step[k] = guard(np.float64(extreme[k]) / d, p[k], n[k], search.reach_plus, search.reach_minus)


@kernel
def refit_weighted(source: Any, first: int, groups: int, per_group: int, search: Any, columns: Any, span: Any) -> None:
    """As methods.refit_scales: a/b is the vertex of the weighted error's parabola."""
    codes, values, is_code = source.codes, source.values, source.codes.size > 0
    step, p, n, extreme, block_scale, units = span.step, span.p, span.n, span.extreme, span.block_scale, span.units
    fit, exact = columns.fit, columns.exact
    shift, width = per_group >> 1, columns.exact.size // CHUNK
    fit[:] = 0
    for c in range(groups * per_group):
        k, begin, column = c >> shift, (first + c) * CHUNK, (c % width) * CHUNK
        if is_code:
            fit_weighted(codes, begin, block_scale[c], step[k], units, exact, column, fit, k)
        else:
            value_units(values, begin, extreme[k], units)
            fit_weighted(values, begin, block_scale[c], step[k], units, exact, column, fit, k)
    for k in range(groups):
        if is_code:
            unit = np.float64(block_scale[k * per_group]) / np.float64(CODE_UNITS)
        else:
            unit = np.float64(extreme[k]) / np.float64(VALUE_UNITS)
        step[k] = refit(fit[2 * k], fit[2 * k + 1], unit, step[k], p[k], n[k], search.reach_plus, search.reach_minus)


@kernel
def add_weighted_errors(
    source: Any, first: int, chunks: int, per_group: int, columns: Any, span: Any, packed: Array
) -> None:
    codes, values, is_code = source.codes, source.values, source.codes.size > 0
    block_scale, step, h, row = span.block_scale, span.step, columns.h, columns.row
    shift, width = per_group >> 1, columns.h.size // CHUNK
    for c in range(chunks):
        begin, word, s, column = (first + c) * CHUNK, (first + c) * (CHUNK // 8), step[c >> shift], (c % width) * CHUNK
        if is_code:
            weighted_errors(codes, begin, block_scale[c], s, packed, word, h, column, row)
        else:
            weighted_errors(values, begin, block_scale[c], s, packed, word, h, column, row)
        if column + CHUNK == columns.h.size:
            end_row(row, columns.sums)


@kernel
def weighted_rows(
    source: Any, search: Any, columns: Any, smallest: Any, span: Any, floor: Any, packed: Array, scale: Array,
    totals: Any,
) -> None:  # fmt: skip
    """Weighted sums for all candidates, the best one, one refit. packed int32 [n * K/8], scale uint16 [n * K/g]."""
    per_group = span.relative.size // CHUNK
    width, is_code = source.columns // CHUNK, source.codes.size > 0
    rows, height = packed.size * 8 // source.columns, span.peak.size // width
    for row in range(0, rows, height):
        count = min(height, rows - row)
        first, chunks, groups = row * width, count * width, count * width // per_group
        load_extremes(source, row, count, span)
        group_extremes(is_code, groups, per_group, span)
        choose_weighted(source, first, groups, per_group, search, columns, span)
        for _ in range(2 if search.reach_plus == np.inf else 1):  # without a bound the candidates lie further apart
            refit_weighted(source, first, groups, per_group, search, columns, span)
        store_scales(groups, smallest, span, scale, first // per_group, totals)
        store_codes(source, False, first, chunks, per_group, span, floor, packed, totals)
        add_weighted_errors(source, first, chunks, per_group, columns, span, packed)

"""The kernels that quantise rows: each goes through them group by group. A group's weights stay in the first cache."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kizami.quantize.kernels.jit import kernel
from kizami.quantize.kernels.lanes import CHUNK
from kizami.quantize.kernels.rows import Array, bf16_bits, chunk_scales, e4m3
from kizami.quantize.kernels.scales import (
    VALUE_UNITS,
    choose,
    minmax_scale,
    refit,
    relative_values,
    signed_scale,
    sum_values,
    value_units,
)
from kizami.quantize.kernels.search_tables import COUNT
from kizami.quantize.kernels.search_vectors import CODE_UNITS, add_table_rows, fit_codes
from kizami.quantize.kernels.vectors import LARGEST, SUMS, decode, extremes, minmax_codes, nearest_codes

LINE = 64
SPAN = 1 << 16  # weights that a pass goes through, in whole rows: with all that is kept of them, the second cache
BATCH = 16  # groups whose sums are kept at a time


class Source(NamedTuple):
    """Rows, as e4m3 codes whose groups lie inside one block column, or as float32 values (the other is empty). Flat."""

    codes: Array  # uint8 [n * K]
    positive: Array  # int8 [n * K/32]: largest magnitude code of each sign in each chunk
    negative: Array
    values: Array  # float32 [n * K]
    bits: Array  # the same as int32
    grid: Array  # float32 [gr, gc] block scales of the codes, the whole tensor's
    b0: int
    b1: int
    first_row: int  # of the tensor
    columns: int


class Span(NamedTuple):
    """Memory for what is known of a few rows: chunks in the tensor's order, and groups. Each pass goes through them
    all, so that the processor has many groups to work on at a time; weights are decoded again in each pass.

    Kernels take the arrays out of these tuples before their loops: numba counts a reference at each access.
    """

    block_scale: Array  # float32, by chunk
    peak: Array  # float32, by chunk: max |W|
    p_bits: Array  # int32, by chunk: the largest magnitude of each sign, as code or as float32 bits
    n_bits: Array
    p: Array  # float32, by group: the largest weight of each sign
    n: Array
    extreme: Array  # float32, by group: the weight of largest magnitude, the positive one of two; 1 where all are 0
    p_code: Array  # int32, by group: the largest code of each sign
    n_code: Array
    step: Array  # float32, by group: the scale
    fit: Array  # int64 [2], by group
    sums: Array  # int32 [COUNT] of BATCH groups
    w: Array  # float32 [CHUNK]
    units: Array
    relative: Array  # float32 [g]


class Totals(NamedTuple):
    """Accumulators that go on from one run of rows to the next."""

    sums: NDArray[np.float64]  # [3 * SUMS]: lanes of the squares of W, of the error, of q*s; row after row
    row: NDArray[np.float64]  # the same of the row in work, zeros between rows
    largest: NDArray[np.int32]  # [LARGEST]: lanes of the bits of max |error|
    groups: NDArray[np.int64]  # [2]: zero groups, negative scales
    clipped: NDArray[np.int64]  # [1]
    found: NDArray[np.float32]  # [2, ...]: |W| and error where |W| > floor, in row order
    found_count: NDArray[np.int64]  # [1]
    at_floor: NDArray[np.float64]  # [2]: count and squares of the error where |W| = floor


class Search(NamedTuple):
    table: Array  # uint16, flat
    divisors: Array  # float64
    minus: int
    reach_plus: float
    reach_minus: float
    positive_scale: bool


def aligned(kind: Any, *shape: int) -> Array:
    """Zeros that begin with a cache line: a vector that lies across two is slow to read after it was written."""
    nbytes = int(np.prod(shape)) * np.dtype(kind).itemsize
    memory = np.zeros(nbytes + LINE, np.uint8)
    begin = -memory.ctypes.data % LINE
    return memory[begin : begin + nbytes].view(kind).reshape(shape)


def new_span(rows: int, columns: int, group_size: int) -> Span:
    height = max(1, min(rows, SPAN // max(1, columns)))
    chunks, groups = height * columns // CHUNK, height * columns // group_size
    by_chunk, bits = aligned(np.float32, 2, chunks), aligned(np.int32, 2, chunks)
    by_group, codes = aligned(np.float32, 4, groups), aligned(np.int32, 2, groups)
    fit, sums = aligned(np.int64, 2 * groups), aligned(np.int32, BATCH * COUNT)
    chunk, relative = aligned(np.float32, 2, CHUNK), aligned(np.float32, group_size)
    arrays: tuple[Array, ...] = (*by_chunk, *bits, *by_group[:3], *codes, by_group[3], fit, sums, *chunk, relative)
    return Span(*arrays)


def new_totals(found: int) -> Totals:
    return Totals(
        aligned(np.float64, 3 * SUMS),
        aligned(np.float64, 3 * SUMS),
        aligned(np.int32, LARGEST),
        np.zeros(2, np.int64),
        np.zeros(1, np.int64),
        np.empty((2, found), np.float32),
        np.zeros(1, np.int64),
        np.zeros(2),
    )


@kernel
def load_extremes(source: Any, row: int, rows: int, span: Any) -> None:
    """Block scales and the largest of each chunk. `row`: the source's, first of the span."""
    codes, positive, negative, bits = source.codes, source.positive, source.negative, source.bits
    grid, b0, b1 = source.grid, source.b0, source.b1
    block_scale, peak, p_bits, n_bits = span.block_scale, span.peak, span.p_bits, span.n_bits
    width = source.columns // CHUNK
    if codes.size:
        for r in range(rows):
            block_row = grid[(source.first_row + row + r) // b0]
            chunk_scales(block_row, b1, block_scale[r * width : (r + 1) * width])
        for c in range(rows * width):
            p_bits[c] = positive[row * width + c]
        for c in range(rows * width):
            n_bits[c] = negative[row * width + c]
        for c in range(rows * width):
            peak[c] = e4m3(max(p_bits[c], n_bits[c])) * block_scale[c]
    else:
        for c in range(rows * width):
            extremes(bits, (row * width + c) * CHUNK, p_bits, n_bits, c)
            peak[c] = np.int32(max(p_bits[c], n_bits[c])).view(np.float32)


@kernel
def group_extremes(is_code: bool, groups: int, per_group: int, span: Any) -> None:
    p_bits, n_bits, block_scale, p_code, n_code = span.p_bits, span.n_bits, span.block_scale, span.p_code, span.n_code
    p, n, extreme = span.p, span.n, span.extreme
    for k in range(groups):
        begin = k * per_group
        a, b = p_bits[begin], n_bits[begin]
        for c in range(begin + 1, begin + per_group):
            a, b = max(a, p_bits[c]), max(b, n_bits[c])
        p_code[k], n_code[k] = a, b
        if is_code:
            s = block_scale[begin]
            x, y = e4m3(a) * s, e4m3(b) * s
        else:
            x, y = np.int32(a).view(np.float32), np.int32(b).view(np.float32)
        m = -y if y > x else x
        p[k], n[k], extreme[k] = x, y, m if m != 0 else np.float32(1)


@kernel
def collect_top(
    w: Array, words: Array, word: int, step: Any, floor: Any, found: Array, found_count: Array, at_floor: Array
) -> None:
    """|W| and the error of a chunk's weights above the floor; those at the floor are only added up. `found` has room
    for all that the survey saw; a file that changes between the passes must not lead beyond it."""
    n = found_count[0]
    for i in range(CHUNK):
        a = abs(w[i])
        if a >= floor:
            q = ((words[word + (i >> 3)] >> (4 * (i & 7))) & 15) - 8
            e = w[i] - np.float32(q) * step
            if a > floor:
                if n < found.shape[1]:
                    found[0, n], found[1, n] = a, e
                    n += 1
            else:
                at_floor[0] += 1.0
                at_floor[1] += np.float64(e) * np.float64(e)
    found_count[0] = n


@kernel
def add_top(found: Array, threshold: Any, top: Array) -> None:
    """Count, squares of W and of the error over |W| >= threshold, in the order given, to top [3]."""
    for i in range(found.shape[1]):
        if found[0, i] >= threshold:
            top[0] += 1.0
            top[1] += np.float64(found[0, i]) * np.float64(found[0, i])
            top[2] += np.float64(found[1, i]) * np.float64(found[1, i])


@kernel
def end_row(row: Array, sums: Array) -> None:
    """A row has lanes of its own, which begin at zero: so a device that works on many rows at a time gives the same
    sums, to the bit."""
    for k in range(row.size):
        sums[k] += row[k]
        row[k] = 0


@kernel
def store_scales(groups: int, smallest: Any, span: Any, scale: Array, at: int, totals: Any) -> None:
    """As BF16 bits, to scale[at:]; magnitudes are raised to `smallest`, BF16, for layouts that hold no smaller one."""
    step, p, n = span.step, span.p, span.n
    zero, negative = 0, 0
    for k in range(groups):
        if abs(step[k]) < smallest:
            step[k] = -smallest if step[k] < 0 else smallest
        scale[at + k] = bf16_bits(step[k])
        zero += max(p[k], n[k]) == 0
        negative += step[k] < 0
    totals.groups[0] += zero
    totals.groups[1] += negative


@kernel
def store_codes(
    source: Any, is_minmax: bool, first: int, chunks: int, per_group: int, span: Any, floor: Any, packed: Array,
    totals: Any,
) -> None:  # fmt: skip
    """Codes of whole rows, packed, and what is reported of them. `first`: the source's chunk where the span begins."""
    codes, values, is_code = source.codes, source.values, source.codes.size > 0
    block_scale, peak, step, w = span.block_scale, span.peak, span.step, span.w
    row, largest, clipped = totals.row, totals.largest, totals.clipped
    found, found_count, at_floor = totals.found, totals.found_count, totals.at_floor
    shift = per_group >> 1  # 1, 2 or 4 chunks to a group
    left = source.columns // CHUNK  # chunks of the row
    for c in range(chunks):
        begin, word, s, b = (first + c) * CHUNK, (first + c) * (CHUNK // 8), step[c >> shift], block_scale[c]
        if is_code and is_minmax:
            minmax_codes(codes, begin, b, s, packed, word, row, largest, clipped)
        elif is_code:
            nearest_codes(codes, begin, b, s, packed, word, row, largest, clipped)
        elif is_minmax:
            minmax_codes(values, begin, b, s, packed, word, row, largest, clipped)
        else:
            nearest_codes(values, begin, b, s, packed, word, row, largest, clipped)
        if peak[c] == 0:  # zeros, and no error
            at_floor[0] += CHUNK * (floor == 0)
        elif peak[c] >= floor:
            if is_code:
                decode(codes, begin, b, w)
            else:
                for i in range(CHUNK):
                    w[i] = values[begin + i]
            collect_top(w, packed, word, s, floor, found, found_count, at_floor)
        left -= 1
        if left == 0:
            end_row(row, totals.sums)
            left = source.columns // CHUNK


@kernel
def rule_scales(groups: int, is_minmax: bool, span: Any) -> None:
    step, p, n = span.step, span.p, span.n
    for k in range(groups):
        step[k] = minmax_scale(p[k], n[k]) if is_minmax else signed_scale(p[k], n[k])


@kernel
def choose_scales(source: Any, first: int, groups: int, per_group: int, search: Any, span: Any) -> None:
    """The best candidate of each group. BATCH groups at a time, so that one's sums need not wait for another's."""
    codes, values, is_code = source.codes, source.values, source.codes.size > 0
    step, p, n, p_code, n_code = span.step, span.p, span.n, span.p_code, span.n_code
    sums, relative, extreme, table, divisors = span.sums, span.relative, span.extreme, search.table, search.divisors
    for batch in range(0, groups, BATCH):
        end = min(batch + BATCH, groups)
        sums[:] = 0
        for k in range(batch, end):
            at, chunk = (k - batch) * COUNT, first + k * per_group
            if is_code:
                a, b = np.int64(p_code[k]), np.int64(n_code[k])
                flip = np.int64(b > a) << 7  # codes relative to the sign of the extreme
                for c in range(chunk, chunk + per_group):
                    add_table_rows(table, max(a, b), flip, codes, c * CHUNK, sums, at)
            else:
                relative_values(values, chunk * CHUNK, extreme[k], relative)
                sum_values(relative, divisors, sums, at)
        for k in range(batch, end):
            step[k] = choose(
                sums, (k - batch) * COUNT, divisors, search.minus, p[k], n[k], extreme[k], search.reach_plus,
                search.reach_minus, search.positive_scale,
            )  # fmt: skip


@kernel
def refit_scales(source: Any, first: int, groups: int, per_group: int, search: Any, span: Any) -> None:
    """Every scale becomes the least-squares one of its codes."""
    codes, values, is_code = source.codes, source.values, source.codes.size > 0
    step, p, n, extreme, block_scale = span.step, span.p, span.n, span.extreme, span.block_scale
    fit, units = span.fit, span.units
    shift = per_group >> 1  # 1, 2 or 4 chunks to a group
    fit[:] = 0
    for c in range(groups * per_group):
        k, begin = c >> shift, (first + c) * CHUNK
        if is_code:
            fit_codes(codes, begin, block_scale[c], step[k], units, fit, k)
        else:
            value_units(values, begin, extreme[k], units)
            fit_codes(values, begin, block_scale[c], step[k], units, fit, k)
    for k in range(groups):
        if is_code:
            unit = np.float64(block_scale[k * per_group]) / np.float64(CODE_UNITS)
        else:
            unit = np.float64(extreme[k]) / np.float64(VALUE_UNITS)
        step[k] = refit(fit[2 * k], fit[2 * k + 1], unit, step[k], p[k], n[k], search.reach_plus, search.reach_minus)


@kernel
def rule_rows(
    source: Any, is_minmax: bool, smallest: Any, span: Any, floor: Any, packed: Array, scale: Array, totals: Any
) -> None:
    """`minmax` or `signed`. packed int32 [n * K/8], scale uint16 [n * K/g]."""
    per_group = span.relative.size // CHUNK
    width, is_code = source.columns // CHUNK, source.codes.size > 0
    rows, height = packed.size * 8 // source.columns, span.peak.size // width
    for row in range(0, rows, height):
        count = min(height, rows - row)
        first, chunks, groups = row * width, count * width, count * width // per_group
        load_extremes(source, row, count, span)
        group_extremes(is_code, groups, per_group, span)
        rule_scales(groups, is_minmax, span)
        store_scales(groups, smallest, span, scale, first // per_group, totals)
        store_codes(source, is_minmax, first, chunks, per_group, span, floor, packed, totals)


@kernel
def search_rows(
    source: Any, search: Any, smallest: Any, span: Any, floor: Any, packed: Array, scale: Array, totals: Any
) -> None:
    """`search`: sums for all candidates, the best one, one refit."""
    per_group = span.relative.size // CHUNK
    width, is_code = source.columns // CHUNK, source.codes.size > 0
    rows, height = packed.size * 8 // source.columns, span.peak.size // width
    for row in range(0, rows, height):
        count = min(height, rows - row)
        first, chunks, groups = row * width, count * width, count * width // per_group
        load_extremes(source, row, count, span)
        group_extremes(is_code, groups, per_group, span)
        choose_scales(source, first, groups, per_group, search, span)
        refit_scales(source, first, groups, per_group, search, span)
        store_scales(groups, smallest, span, scale, first // per_group, totals)
        store_codes(source, False, first, chunks, per_group, span, floor, packed, totals)

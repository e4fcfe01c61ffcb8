"""The two kernels that quantise a tensor row by row: `rule_rows` (minmax, signed) and `search_rows`."""

from typing import Any, NamedTuple

import numpy as np

from kizami.quantize.jit import kernel
from kizami.quantize.rows import (
    CHUNK,
    LANES,
    ZERO_GROUP_SCALE,
    Array,
    bf16_bits,
    chunk_scales,
    decode_row,
    e4m3,
    largest_codes,
    largest_values,
    measure_row,
    measure_top,
    minmax_codes,
    nearest_codes,
    pack_row,
)
from kizami.quantize.scales import (
    SURROGATE,
    UNITS,
    byte_units,
    choose,
    float_units,
    guard,
    minmax_scale,
    refit,
    relative_weights,
    signed_scale,
    sum_float,
    sum_table,
    table_offsets,
)


class Source(NamedTuple):
    """Weights as e4m3 codes whose groups lie inside one block column, or as float32 values; the other array is [0, K]."""

    codes: Array  # uint8 [N, K]
    signed: Array  # the same memory as int8
    values: Array  # float32 [N, K]
    grid: Array  # float32 [gr, gc] block scales of the codes
    b0: int
    b1: int


class Output(NamedTuple):
    """Results for the rows of a Source, and accumulators that go on from one Source to the next."""

    packed: Array  # int32 [N, K/8]
    scale: Array  # uint16 [N, K/g]
    sums: Array  # float64 [3, LANES]: squares of W, of the error, of q*s
    top: Array  # float64 [3]: count, squares of W and of the error over |W| >= threshold
    largest: Array  # int32 [LANES]: bits of max |error|
    clipped: Array  # int32 [LANES]
    counts: Array  # int64 [2]: zero groups, negative scales


class Search(NamedTuple):
    table: Array  # int32, flat
    divisors: Array  # float64
    reach_plus: float
    reach_minus: float
    positive_scale: bool


class Scratch(NamedTuple):
    """Of one row: per column, then per chunk."""

    w: Array
    bits: Array  # w as int32
    codes: Array
    block_scale: Array
    step: Array
    peak: Array
    positive: Array  # largest positive weight, float32
    negative: Array  # largest magnitude of a negative weight
    positive_code: Array  # int8
    negative_code: Array
    positive_bits: Array  # positive and negative as int32
    negative_bits: Array


@kernel
def new_scratch(columns: int) -> Scratch:
    chunks = columns // CHUNK
    w = np.empty(columns, np.float32)
    positive = np.empty(chunks, np.float32)
    negative = np.empty(chunks, np.float32)
    return Scratch(
        w,
        w.view(np.int32),
        np.empty(columns, np.uint8),
        np.empty(chunks, np.float32),
        np.empty(chunks, np.float32),
        np.empty(chunks, np.float32),
        positive,
        negative,
        np.empty(chunks, np.int8),
        np.empty(chunks, np.int8),
        positive.view(np.int32),
        negative.view(np.int32),
    )


@kernel
def load_row(source: Source, r: int, t: Scratch) -> None:
    """Row r as float32, and its extremes per chunk."""
    if source.codes.shape[0]:
        if r % source.b0 == 0:
            chunk_scales(source.grid[r // source.b0], source.b1, t.block_scale)
        decode_row(source.codes[r], t.block_scale, t.w)
        largest_codes(source.signed[r], t.positive_code, t.negative_code)
        for c in range(t.peak.size):
            t.positive[c] = e4m3(t.positive_code[c]) * t.block_scale[c]
            t.negative[c] = e4m3(t.negative_code[c]) * t.block_scale[c]
    else:
        t.w[:] = source.values[r]
        largest_values(t.bits, t.positive_bits, t.negative_bits)
    for c in range(t.peak.size):
        t.peak[c] = max(t.positive[c], t.negative[c])


@kernel
def extremes(positive: Array, negative: Array, begin: int, end: int) -> tuple[Any, Any]:
    """Over the chunks of a group."""
    p, n = positive[begin], negative[begin]
    for c in range(begin + 1, end):
        p = max(p, positive[c])
        n = max(n, negative[c])
    return p, n


@kernel
def store_scale(s: Any, r: int, k: int, per_group: int, t: Scratch, out: Output) -> None:
    out.scale[r, k] = bf16_bits(s)
    out.counts[1] += s < 0
    for c in range(k * per_group, (k + 1) * per_group):
        t.step[c] = s


@kernel
def finish_row(r: int, t: Scratch, threshold: Any, out: Output) -> None:
    pack_row(t.codes, out.packed[r])
    measure_row(t.w, t.step, t.codes, out.sums, out.largest, out.clipped)
    measure_top(t.w, t.step, t.codes, t.peak, threshold, out.top)


@kernel
def rule_rows(source: Source, g: int, is_minmax: bool, threshold: Any, out: Output) -> None:
    rows, groups = out.scale.shape
    per_group = g // CHUNK
    t = new_scratch(out.packed.shape[1] * 8)
    for r in range(rows):
        load_row(source, r, t)
        for k in range(groups):
            p, n = extremes(t.positive, t.negative, k * per_group, (k + 1) * per_group)
            m = max(p, n)
            s = minmax_scale(m) if is_minmax else signed_scale(p, n)
            if m == 0:
                s = ZERO_GROUP_SCALE
                out.counts[0] += 1
            store_scale(s, r, k, per_group, t, out)
        if is_minmax:
            minmax_codes(t.w, t.step, t.codes)
        else:
            nearest_codes(t.w, t.step, t.codes)
        finish_row(r, t, threshold, out)


@kernel
def search_group(
    source: Source, search: Search, r: int, begin: int, end: int, t: Scratch, offsets: Array, units: Array,
    relative: Array, errors: Array,
) -> Any:  # fmt: skip
    """Scale of the columns begin..end of row r (not all zero): lookup or sums over all candidates, then one refit."""
    first, last = begin // CHUNK, end // CHUNK
    p, n = extremes(t.positive, t.negative, first, last)
    m = max(p, n)
    count = search.divisors.size
    if source.codes.shape[0]:
        p_code, n_code = extremes(t.positive_code, t.negative_code, first, last)
        flip = 128 if n_code > p_code else 0
        table_offsets(source.codes[r], begin, end, np.int64(max(p_code, n_code)), flip, count, offsets)
        for j in range(0, count, 16):
            sum_table(search.table, offsets, begin, end, j, errors)
        byte_units(source.codes[r], begin, end, units)
        unit = np.float64(t.block_scale[first]) / np.float64(UNITS)
    else:
        relative_weights(t.w, begin, end, -m if n > p else m, relative)
        sum_float(relative, begin, end, search.divisors, errors)
        float_units(relative, begin, end, units)
        unit = np.float64(-m if n > p else m) / np.float64(SURROGATE)
    d = choose(errors, search.divisors, p, n, search.reach_plus, search.positive_scale)
    s = guard((-np.float64(m) if n > p else np.float64(m)) / d, p, n, search.reach_plus, search.reach_minus)
    ratio = refit(t.w, units, begin, end, s)
    if ratio != 0:
        s = guard(unit * ratio, p, n, search.reach_plus, search.reach_minus)
    return s


@kernel
def search_rows(source: Source, g: int, search: Search, threshold: Any, out: Output) -> None:
    rows, groups = out.scale.shape
    per_group = g // CHUNK
    columns = out.packed.shape[1] * 8
    t = new_scratch(columns)
    offsets, units = np.empty(columns, np.int32), np.empty(columns, np.int32)
    relative, errors = np.empty(columns, np.float32), np.empty(search.divisors.size, np.float64)
    for r in range(rows):
        load_row(source, r, t)
        for k in range(groups):
            p, n = extremes(t.positive, t.negative, k * per_group, (k + 1) * per_group)
            if max(p, n) == 0:
                s = ZERO_GROUP_SCALE
                out.counts[0] += 1
            else:
                s = search_group(source, search, r, k * g, (k + 1) * g, t, offsets, units, relative, errors)
            store_scale(s, r, k, per_group, t, out)
        nearest_codes(t.w, t.step, t.codes)
        finish_row(r, t, threshold, out)


def new_output(rows: int, columns: int, group_size: int) -> Output:
    return Output(
        np.empty((rows, columns // 8), np.int32),
        np.empty((rows, columns // group_size), np.uint16),
        np.zeros((3, LANES)),
        np.zeros(3),
        np.zeros(LANES, np.int32),
        np.zeros(LANES, np.int32),
        np.zeros(2, np.int64),
    )

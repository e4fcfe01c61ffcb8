"""The inner loops of `weighted`, a chunk of weights at a time, as `search_vectors`: each weight's error counts as often
as its column weighs. Sums are exact: integers, or float64 that holds integers below 2^53."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from kizami.quantize.kernels.lanes import CHUNK, F32, F64, I8, I16, I32, I64, Lanes, constant
from kizami.quantize.kernels.search_tables import WEIGHTED_COUNT
from kizami.quantize.kernels.search_vectors import (
    CODE_UNITS,
    INDEX_BITS,
    VALUE_QUANTUM,
    smallest_of,
    squared_steps,
)
from kizami.quantize.kernels.vectors import (
    HIGHEST,
    LOWEST,
    ROUND,
    SUMS,
    F,
    e4m3_lanes,
    e4m3_python,
    either,
    is_code,
    round_codes,
)

WIDTHS = (16,) * (WEIGHTED_COUNT // 16)
assert sum(WIDTHS) == WEIGHTED_COUNT <= 1 << INDEX_BITS


def _add_rows_python(
    table: Any, top: int, flip: int, codes: Any, begin: int, shares: Any, column: int, sums: Any, at: int
) -> None:
    rows = (int(top) << 8) + (codes[begin : begin + CHUNK].astype(np.int64) ^ int(flip))
    cells = table.reshape(-1, WEIGHTED_COUNT)[rows].astype(np.int64)
    sums[at : at + WEIGHTED_COUNT] += (shares[column : column + CHUNK, None] * cells).sum(axis=0).astype(np.int32)


def _add_rows(
    typing: Any, table: Any, top: Any, flip: Any, codes: Any, begin: Any, shares: Any, column: Any, sums: Any, at: Any
) -> tuple[Any, Any]:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = Lanes(context, builder, signature, args)
        places = [v.plus(args[8], sum(WIDTHS[:k])) for k in range(len(WIDTHS))]
        totals = [v.load(7, place, I32, width) for place, width in zip(places, WIDTHS, strict=True)]
        base = builder.shl(args[1], I64(8))
        for i in range(CHUNK):
            code = builder.zext(v.scalar(3, v.plus(args[4], i), I8), I64)
            offset = builder.mul(builder.add(base, builder.xor(code, args[2])), I64(WEIGHTED_COUNT))
            share = v.scalar(5, v.plus(args[6], i), I16)
            for k, width in enumerate(WIDTHS):
                row = v.load(0, v.plus(offset, sum(WIDTHS[:k])), I16, width)
                # Both are below 2^15, and said to be signed: then one instruction multiplies and widens.
                product = builder.mul(v.cast("sext", row, I32), v.cast("sext", v.splat(share, width), I32))
                totals[k] = builder.add(totals[k], product)
        for total, place in zip(totals, places, strict=True):
            v.store(total, 7, place)
        return context.get_dummy_value()

    index = types.int64
    return types.void(table, index, index, codes, index, shares, index, sums, index), build


def _add_errors_python(relative: Any, at: int, divisors: Any, shares: Any, column: int, sums: Any) -> None:
    x = relative[at : at + CHUNK, None] * divisors.astype(F)
    e = x - ((np.minimum(np.maximum(x, F(LOWEST)), F(HIGHEST)) + F(ROUND)) - F(ROUND))
    steps = (e * e * F(VALUE_QUANTUM)).astype(np.int32).astype(np.int64)
    sums += (steps * shares[column : column + CHUNK, None]).sum(axis=0)


def _add_errors(
    typing: Any, relative: Any, at: Any, divisors: Any, shares: Any, column: Any, sums: Any
) -> tuple[Any, Any]:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = Lanes(context, builder, signature, args)
        for k, width in enumerate(WIDTHS):
            place = I64(sum(WIDTHS[:k]))
            divisor = v.cast("fptrunc", v.load(2, place, F64, width), F32)
            total = v.load(5, place, I64, width)
            for i in range(CHUNK):
                steps = squared_steps(v, v.scalar(0, v.plus(args[1], i), F32), divisor)
                share = v.splat(builder.sext(v.scalar(3, v.plus(args[4], i), I16), I64), width)
                total = builder.add(total, builder.mul(v.cast("sext", steps, I64), share))
            v.store(total, 5, place)
        return context.get_dummy_value()

    index = types.int64
    return types.void(relative, index, divisors, shares, index, sums), build


def _fit_python(
    weights: Any, begin: int, scale: Any, step: Any, units: Any, exact: Any, column: int, fit: Any, group: int
) -> None:
    x = weights[begin : begin + CHUNK]
    if is_code(weights):
        value = e4m3_python(x)
        x, units = value * F(scale), value * F(CODE_UNITS)
    q = (np.minimum(np.maximum(x / F(step), F(LOWEST)), F(HIGHEST)) + F(ROUND)) - F(ROUND)
    weight = exact[column : column + CHUNK]
    fit[2 * group] += ((q * units).astype(np.float64) * weight).sum()
    fit[2 * group + 1] += ((q * q).astype(np.float64) * weight).sum()


def _fit(
    typing: Any, weights: Any, begin: Any, scale: Any, step: Any, units: Any, exact: Any, column: Any, fit: Any,
    group: Any,
) -> tuple[Any, Any]:  # fmt: skip
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = Lanes(context, builder, signature, args)
        if is_code(weights):
            value = e4m3_lanes(v, v.load(0, args[1], I8))
            x, unit = builder.fmul(value, v.splat(args[2])), builder.fmul(value, constant(F32, CODE_UNITS))
        else:
            x, unit = v.load(0, args[1], F32), v.load(4, I64(0), F32)
        q, _ = round_codes(v, x, v.splat(args[3]), is_minmax=False)
        weight = v.load(5, args[6], F64)
        place = builder.shl(args[8], I64(1))
        for k, factor in enumerate((unit, q)):
            product = builder.fmul(v.cast("fpext", builder.fmul(q, factor), F64), weight)
            at = v.plus(place, k)
            v.store(builder.fadd(v.scalar(7, at, F64), v.fold(product, 1)), 7, at)
        return context.get_dummy_value()

    index, real = types.int64, types.float32
    return types.void(weights, index, real, real, units, exact, index, fit, index), build


def _lanes_python(x: Any) -> Any:
    while x.size > SUMS:
        x = x[: x.size // 2] + x[x.size // 2 :]
    return x


def _errors_python(
    weights: Any, begin: int, scale: Any, step: Any, words: Any, word: int, h: Any, column: int, sums: Any
) -> None:
    x, s = weights[begin : begin + CHUNK], F(step)
    x = e4m3_python(x) * F(scale) if is_code(weights) else x
    packed = words[word : word + CHUNK // 8].view(np.uint32)
    nibbles = (packed[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(15)
    q = (nibbles.reshape(-1).astype(np.int32) - 8).astype(F)
    weight = h[column : column + CHUNK]
    error = x - q * s
    sums += np.concatenate([_lanes_python(y.astype(np.float64) ** 2 * weight) for y in (x, error)])


def unpack_lanes(v: Lanes, argument: int, word: Any) -> Any:
    """<32 x float> of the codes in four words."""
    four = v.load(argument, word, I32, CHUNK // 8)
    pick = ir.Constant(ir.VectorType(I32, CHUNK), [i // 8 for i in range(CHUNK)])
    shift = ir.Constant(ir.VectorType(I32, CHUNK), [4 * (i % 8) for i in range(CHUNK)])
    spread = v.build.shuffle_vector(four, four, pick)
    nibbles = v.build.and_(v.build.lshr(spread, shift), constant(I32, 15))
    return v.cast("sitofp", v.build.sub(nibbles, constant(I32, 8)), F32)


def _errors(
    typing: Any, weights: Any, begin: Any, scale: Any, step: Any, words: Any, word: Any, h: Any, column: Any, sums: Any
) -> tuple[Any, Any]:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = Lanes(context, builder, signature, args)
        if is_code(weights):
            x = builder.fmul(e4m3_lanes(v, v.load(0, args[1], I8)), v.splat(args[2]))
        else:
            x = v.load(0, args[1], F32)
        error = builder.fsub(x, builder.fmul(unpack_lanes(v, 4, args[5]), v.splat(args[3])))
        weight = v.load(6, args[7], F64)
        for k, y in enumerate((x, error)):
            wide = v.cast("fpext", y, F64)
            v.add_to(8, I64(k * SUMS), v.fold(builder.fmul(builder.fmul(wide, wide), weight), SUMS))
        return context.get_dummy_value()

    index, real = types.int64, types.float32
    return types.void(weights, index, real, real, words, index, h, index, sums), build


# (table uint16, top, flip, codes uint8, begin, shares int16, column, sums int32, at): to the WEIGHTED_COUNT sums from
# `at` on the cells at [top, code ^ flip] for each of codes[begin : begin + CHUNK], times the shares from `column` on.
add_weighted_rows: Any = either(_add_rows_python, _add_rows)
# As search_vectors.smallest, of WEIGHTED_COUNT sums.
smallest_weighted: Any = either(*smallest_of(WIDTHS))
# (relative float32, at, divisors float64 [WEIGHTED_COUNT], shares int16, column, sums int64 [WEIGHTED_COUNT]): as
# search_vectors.add_value_errors, each weight's squared error times its share.
add_candidate_errors: Any = either(_add_errors_python, _add_errors)
# (weights, begin, scale, step, units, exact float64, column, fit float64 [groups * 2], group): as fit_codes, with
# weights exact[column : column + CHUNK], integers up to 2^17: sums over a group of 128 stay below 2^42.
fit_weighted: Any = either(_fit_python, _fit)
# (weights, begin, scale, step, words, word, h float64, column, sums float64 [2 * SUMS]): adds h W^2 and h (W - q*s)^2
# of the packed codes in words[word:].
weighted_errors: Any = either(_errors_python, _errors)

"""The inner loops of `search`, a chunk of weights at a time, as `vectors`."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from kizami.quantize.kernels.lanes import CHUNK, F32, F64, I8, I16, I32, I64, Lanes, constant
from kizami.quantize.kernels.search_tables import COUNT
from kizami.quantize.kernels.vectors import (
    HIGHEST,
    LOWEST,
    ROUND,
    F,
    e4m3_lanes,
    e4m3_python,
    either,
    is_code,
    nearest_integer,
    round_codes,
)

WIDTHS = (32,)  # of the COUNT candidates: an AVX-512 register of uint16
SATURATED = 0xFFFF
INDEX_BITS = 6  # of a candidate, `weighted` has 64
NEVER = 0x7FFFFFFF
CODE_UNITS = 512.0  # 512 times an e4m3 value is an integer
VALUE_QUANTUM = 2.0**18  # squared error in steps; 128 * (11 - 7)^2 of them stay below 2^31
assert sum(WIDTHS) == COUNT < 1 << INDEX_BITS


def _add_rows_python(table: Any, top: int, flip: int, codes: Any, begin: int, sums: Any, at: int) -> None:
    rows = (int(top) << 8) + (codes[begin : begin + CHUNK].astype(np.int64) ^ int(flip))
    total = table.reshape(-1, COUNT)[rows].sum(axis=0, dtype=np.int64)
    sums[at : at + COUNT] += np.minimum(total, SATURATED).astype(np.int32)


def _add_rows(
    typing: Any, table: Any, top: Any, flip: Any, codes: Any, begin: Any, sums: Any, at: Any
) -> tuple[Any, Any]:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = Lanes(context, builder, signature, args)
        totals = [constant(I16, 0, width) for width in WIDTHS]
        base = builder.shl(args[1], I64(8))
        for i in range(CHUNK):
            code = builder.zext(v.scalar(3, v.plus(args[4], i), I8), I64)
            offset = builder.mul(builder.add(base, builder.xor(code, args[2])), I64(COUNT))
            for k, width in enumerate(WIDTHS):
                row = v.load(0, v.plus(offset, sum(WIDTHS[:k])), I16, width)
                totals[k] = v.call("uadd.sat", totals[k], row)
        for k, total in enumerate(totals):
            at = v.plus(args[6], sum(WIDTHS[:k]))
            v.store(builder.add(v.load(5, at, I32, WIDTHS[k]), v.cast("zext", total, I32)), 5, at)
        return context.get_dummy_value()

    index = types.int64
    return types.void(table, index, index, codes, index, sums, index), build


def smallest_of(widths: tuple[int, ...]) -> tuple[Any, Any]:
    """`smallest` among as many sums, as Python and as an intrinsic."""

    def python(sums: Any, begin: int, hole: int, resume: int, last: int) -> int:
        j = np.arange(sum(widths))
        allowed = (j < hole) | ((j >= resume) & (j < last))
        keys = (sums[begin : begin + sum(widths)].astype(np.int64) << INDEX_BITS) | j
        return int(np.where(allowed, keys, NEVER).min()) & ((1 << INDEX_BITS) - 1)

    def llvm(typing: Any, sums: Any, begin: Any, hole: Any, resume: Any, last: Any) -> tuple[Any, Any]:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            v = Lanes(context, builder, signature, args)
            best = []
            for k, width in enumerate(widths):
                at = sum(widths[:k])
                j = ir.Constant(ir.VectorType(I32, width), list(range(at, at + width)))
                bounds = [v.splat(builder.trunc(limit, I32), width) for limit in args[2:]]
                before, after, below = (
                    builder.icmp_signed(how, j, bound) for how, bound in zip(("<", ">=", "<"), bounds, strict=True)
                )
                keys = builder.or_(
                    builder.shl(v.load(0, v.plus(args[1], at), I32, width), constant(I32, INDEX_BITS, width)), j
                )
                allowed = builder.or_(before, builder.and_(after, below))
                keys = builder.select(allowed, keys, constant(I32, NEVER, width))
                best.append(v.call("vector.reduce.smin", keys))
            first = best[0]
            for other in best[1:]:
                first = builder.select(builder.icmp_signed("<", first, other), first, other)
            return builder.zext(builder.and_(first, I32((1 << INDEX_BITS) - 1)), I64)

        return types.int64(sums, types.int64, types.int64, types.int64, types.int64), build

    return python, llvm


def _fit_python(weights: Any, begin: int, scale: Any, step: Any, units: Any, fit: Any, group: int) -> None:
    x = weights[begin : begin + CHUNK]
    if is_code(weights):
        value = e4m3_python(x)
        x, units = value * F(scale), value * F(CODE_UNITS)
    q = (np.minimum(np.maximum(x / F(step), F(LOWEST)), F(HIGHEST)) + F(ROUND)) - F(ROUND)
    fit[2 * group] += int((q * units).astype(np.int64).sum())
    fit[2 * group + 1] += int((q * q).sum())


def _fit(
    typing: Any, weights: Any, begin: Any, scale: Any, step: Any, units: Any, fit: Any, group: Any
) -> tuple[Any, Any]:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = Lanes(context, builder, signature, args)
        if is_code(weights):
            value = e4m3_lanes(v, v.load(0, args[1], I8))
            x, unit = builder.fmul(value, v.splat(args[2])), builder.fmul(value, constant(F32, CODE_UNITS))
        else:
            x, unit = v.load(0, args[1], F32), v.load(4, I64(0), F32)
        q, _ = round_codes(v, x, v.splat(args[3]), is_minmax=False)
        place = builder.shl(args[6], I64(1))
        product = v.cast("fptosi", builder.fmul(q, unit), I32)
        v.add_to(5, place, builder.sext(v.fold(product, 1), I64))
        v.add_to(5, v.plus(place, 1), builder.fptosi(v.fold(builder.fmul(q, q), 1), I64))
        return context.get_dummy_value()

    index, real = types.int64, types.float32
    return types.void(weights, index, real, real, units, fit, index), build


def _add_errors_python(relative: Any, at: int, divisors: Any, sums: Any, begin: int) -> None:
    x = relative[at : at + CHUNK, None] * divisors.astype(F)
    e = x - ((np.minimum(np.maximum(x, F(LOWEST)), F(HIGHEST)) + F(ROUND)) - F(ROUND))
    sums[begin : begin + COUNT] += (e * e * F(VALUE_QUANTUM)).astype(np.int32).sum(axis=0, dtype=np.int32)


def _add_errors(typing: Any, relative: Any, at: Any, divisors: Any, sums: Any, begin: Any) -> tuple[Any, Any]:
    """A lane is a candidate, and weights follow each other: with a weight to a lane every candidate's sum would have to
    be folded, which took as long as the errors themselves."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = Lanes(context, builder, signature, args)
        divisor = v.cast("fptrunc", v.load(2, I64(0), F64, COUNT), F32)
        total = v.load(3, args[4], I32, COUNT)
        for i in range(CHUNK):
            total = builder.add(total, squared_steps(v, v.scalar(0, v.plus(args[1], i), F32), divisor))
        v.store(total, 3, args[4])
        return context.get_dummy_value()

    index = types.int64
    return types.void(relative, index, divisors, sums, index), build


def squared_steps(v: Lanes, weight: Any, divisor: Any) -> Any:
    """int32 of each divisor: the squared error of one weight, W/m, in steps of 1/VALUE_QUANTUM, cut to an integer."""
    lanes = divisor.type.count
    x = v.build.fmul(v.splat(weight, lanes), divisor)
    q, _ = nearest_integer(v, x)
    e = v.build.fsub(x, q)
    return v.cast("fptosi", v.build.fmul(v.build.fmul(e, e), constant(F32, VALUE_QUANTUM, lanes)), I32)


# (table uint16, top, flip, codes uint8, begin, sums int32, at): to each of sums[at : at + COUNT] the sum, at most
# SATURATED, of the table's COUNT cells at [top, code ^ flip] for each of codes[begin : begin + CHUNK]. Saturating sums
# of non-negative numbers do not depend on their order.
add_table_rows: Any = either(_add_rows_python, _add_rows)
# (sums int32, begin, hole, resume, last): of the COUNT sums from `begin` on, the index of the first smallest of
# [:hole] and [resume:last].
smallest: Any = either(*smallest_of(WIDTHS))
# (weights, begin, scale, step, units, fit int64 [groups * 2], group): adds to the group's pair the exact sums of
# q * units and of q^2, for the nearest codes q of weights[begin : begin + CHUNK] under `step`. Units are integers, of
# e4m3 bytes CODE_UNITS times their values, of float32 units [CHUNK]; q * units stays below 2^24, 32 of them below 2^31.
fit_codes: Any = either(_fit_python, _fit)
# (relative float32, at, divisors float64 [COUNT], sums int32, begin): to each of sums[begin : begin + COUNT] the
# squared error, in steps of 1/VALUE_QUANTUM squared code steps, cut to integers, of relative[at : at + CHUNK] under the
# scale 1 / divisor.
add_value_errors: Any = either(_add_errors_python, _add_errors)

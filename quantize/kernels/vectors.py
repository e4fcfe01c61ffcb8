"""A chunk of weights at a time: extremes, decoding, codes with their errors. As LLVM vectors, and as NumPy for a run
without the compiler. No argument may overlap another."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kizami.quantize.kernels.jit import config
from kizami.quantize.kernels.lanes import CHUNK, F32, F64, I8, I32, I64, Lanes, constant

LOWEST, HIGHEST = -8.0, 7.0
ROUND = 12582920.0  # 1.5 * 2^23 + 8: adding it to a float32 rounds to integer, ties to even; the low byte is q + 8
# e4m3 bits moved to float32's exponent field are 2^-120 of the value. The smallest, m * 2^-9, are denormal floats on
# the way, which costs an AMD Zen 5 fifty cycles per chunk that has one; doing without takes a dozen in every chunk,
# and fewer than one weight in a thousand is that small.
E4M3_BIAS = 2.0**120
SUMS = 8  # float64 lanes of each sum of squares
LARGEST = 16  # int32 lanes of the largest |error|
ABS = 0x7FFFFFFF

F = np.float32


def _extremes_python(bits: Any, begin: int, positive: Any, negative: Any, at: int) -> None:
    x = bits[begin : begin + CHUNK]
    positive[at] = max(x.max(), 0)
    negative[at] = max((x ^ np.iinfo(x.dtype).min).max(), 0)


def _extremes(typing: Any, bits: Any, begin: Any, positive: Any, negative: Any, at: Any) -> tuple[Any, Any]:
    kind = {8: I8, 32: I32}[bits.dtype.bitwidth]

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = Lanes(context, builder, signature, args)
        x = v.load(0, args[1], kind)
        flipped = builder.xor(x, constant(kind, -(1 << (kind.width - 1))))
        for vector, argument in ((x, 2), (flipped, 3)):
            largest = v.call("vector.reduce.smax", vector)
            positive = builder.select(builder.icmp_signed(">", largest, kind(0)), largest, kind(0))
            v.store(positive, argument, args[4])
        return context.get_dummy_value()

    return types.void(bits, types.int64, positive, negative, types.int64), build


def e4m3_python(codes: Any) -> Any:
    """float32 values of e4m3 bytes."""
    b = codes.astype(np.uint32)
    bits = ((b & np.uint32(0x7F)) << np.uint32(20)) | ((b & np.uint32(0x80)) << np.uint32(24))
    return bits.view(F) * F(E4M3_BIAS)


def e4m3_lanes(v: Lanes, codes: Any) -> Any:
    """The same of <32 x i8>."""
    wide = v.cast("sext", codes, I32)  # the sign fills the upper bits
    bits = v.build.and_(v.build.shl(wide, constant(I32, 20)), constant(I32, 0x87F00000))
    return v.build.fmul(v.cast("bitcast", bits, F32), constant(F32, E4M3_BIAS))


def is_code(weights: Any) -> bool:
    """Of an array or its numba type: e4m3 bytes rather than float32."""
    return str(weights.dtype) == "uint8"


def _decode_python(codes: Any, begin: int, scale: Any, w: Any) -> None:
    w[:] = e4m3_python(codes[begin : begin + CHUNK]) * F(scale)


def _decode(typing: Any, codes: Any, begin: Any, scale: Any, w: Any) -> tuple[Any, Any]:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = Lanes(context, builder, signature, args)
        v.store(builder.fmul(e4m3_lanes(v, v.load(0, args[1], I8)), v.splat(args[2])), 3, I64(0))
        return context.get_dummy_value()

    return types.void(codes, types.int64, types.float32, w), build


def _bf16_python(x: Any) -> Any:
    bits = x.view(np.uint32)
    low = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + low) & np.uint32(0xFFFF0000)).view(F)


def _bf16(v: Lanes, x: Any) -> Any:
    bits = v.cast("bitcast", x, I32)
    low = v.build.and_(v.build.lshr(bits, constant(I32, 16)), constant(I32, 1))
    near = v.build.add(v.build.add(bits, constant(I32, 0x7FFF)), low)
    return v.cast("bitcast", v.build.and_(near, constant(I32, 0xFFFF0000)), F32)


def _squares_python(x: Any) -> Any:
    lanes = x.astype(np.float64) ** 2
    while lanes.size > SUMS:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return lanes


def _bodies(is_minmax: bool) -> tuple[Any, Any]:
    """The same with either rounding, as Python and as an intrinsic."""

    def python(
        weights: Any, begin: int, scale: Any, step: Any, words: Any, word: int, sums: Any, largest: Any, clipped: Any
    ) -> None:
        x, s = weights[begin : begin + CHUNK], F(step)
        x = e4m3_python(x) * F(scale) if is_code(weights) else x
        quotient = _bf16_python(_bf16_python(x) / s) if is_minmax else x / s
        rounded = np.minimum(np.maximum(quotient, F(LOWEST)), F(HIGHEST)) + F(ROUND)
        q = rounded - F(ROUND)
        error = x - q * s
        nibbles = (rounded.view(np.uint32) & np.uint32(15)).reshape(-1, 8) << np.arange(0, 32, 4, dtype=np.uint32)
        words[word : word + CHUNK // 8] = np.bitwise_or.reduce(nibbles, axis=1).view(np.int32)
        squares = (q * q).reshape(-1, SUMS).sum(axis=0).astype(np.float64) * (np.float64(s) * np.float64(s))
        sums += np.concatenate([_squares_python(x), _squares_python(error), squares])
        bits = error.view(np.int32) & np.int32(ABS)
        largest[:] = np.maximum(largest, np.maximum(bits[:LARGEST], bits[LARGEST:]))
        a, b = F(7.5) * s, F(-8.5) * s
        clipped[0] += int(((x > max(a, b)) | (x < min(a, b))).sum())

    def llvm(
        typing: Any, weights: Any, begin: Any, scale: Any, step: Any, words: Any, word: Any, sums: Any, largest: Any,
        clipped: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            v = Lanes(context, builder, signature, args)
            if is_code(weights):
                x = builder.fmul(e4m3_lanes(v, v.load(0, args[1], I8)), v.splat(args[2]))
            else:
                x = v.load(0, args[1], F32)
            s = v.splat(args[3])
            q, bits = round_codes(v, x, s, is_minmax)
            v.store(_pack(v, bits), 4, args[5])
            error = builder.fsub(x, builder.fmul(q, s))
            wide = builder.fpext(args[3], F64)
            squares = v.cast("fpext", v.fold(builder.fmul(q, q), SUMS), F64)  # small integers, exact in float32
            squares = builder.fmul(squares, v.splat(builder.fmul(wide, wide), SUMS))
            for k, addend in enumerate((_squares(v, x), _squares(v, error), squares)):
                v.add_to(6, I64(k * SUMS), addend)
            magnitude = v.fold(builder.and_(v.cast("bitcast", error, I32), constant(I32, ABS)), LARGEST, v.larger)
            v.store(v.larger(v.load(7, I64(0), I32, LARGEST), magnitude), 7, I64(0))
            v.add_to(8, I64(0), _clipped(v, x, args[3]))
            return context.get_dummy_value()

        index, real = types.int64, types.float32
        return types.void(weights, index, real, real, words, index, sums, largest, clipped), build

    return python, llvm


def _fp8_errors_python(values: Any, begin: int, codes: Any, scale: Any, sums: Any, largest: Any) -> None:
    x = values[begin : begin + CHUNK]
    q = e4m3_python(codes[begin : begin + CHUNK]) * F(scale)
    error = x - q
    sums += np.concatenate([_squares_python(x), _squares_python(error), _squares_python(q)])
    bits = error.view(np.int32) & np.int32(ABS)
    largest[:] = np.maximum(largest, np.maximum(bits[:LARGEST], bits[LARGEST:]))


def _fp8_errors(
    typing: Any, values: Any, begin: Any, codes: Any, scale: Any, sums: Any, largest: Any
) -> tuple[Any, Any]:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = Lanes(context, builder, signature, args)
        x = v.load(0, args[1], F32)
        q = builder.fmul(e4m3_lanes(v, v.load(2, args[1], I8)), v.splat(args[3]))
        error = builder.fsub(x, q)
        for k, addend in enumerate((x, error, q)):
            v.add_to(4, I64(k * SUMS), _squares(v, addend))
        magnitude = v.fold(builder.and_(v.cast("bitcast", error, I32), constant(I32, ABS)), LARGEST, v.larger)
        v.store(v.larger(v.load(5, I64(0), I32, LARGEST), magnitude), 5, I64(0))
        return context.get_dummy_value()

    return types.void(values, types.int64, codes, types.float32, sums, largest), build


def round_codes(v: Lanes, x: Any, step: Any, is_minmax: bool) -> tuple[Any, Any]:
    """q, and int32 whose low byte is q + 8."""
    quotient = v.build.fdiv(_bf16(v, x) if is_minmax else x, step)
    return nearest_integer(v, _bf16(v, quotient) if is_minmax else quotient)


def nearest_integer(v: Lanes, quotient: Any) -> tuple[Any, Any]:
    """The same of W / s."""
    low, high, magic = (constant(F32, value, quotient.type.count) for value in (LOWEST, HIGHEST, ROUND))
    bounded = v.build.select(v.build.fcmp_ordered(">", quotient, low), quotient, low)
    bounded = v.build.select(v.build.fcmp_ordered("<", bounded, high), bounded, high)
    rounded = v.build.fadd(bounded, magic)
    return v.build.fsub(rounded, magic), v.cast("bitcast", rounded, I32)


def _pack(v: Lanes, codes: Any) -> Any:
    """Eight codes, seen as one little-endian i64, to one i32: the first column in the lowest nibble."""
    eight = v.build.bitcast(v.cast("trunc", codes, I8), ir.VectorType(I64, CHUNK // 8))
    for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF)):
        eight = v.build.or_(eight, v.build.lshr(eight, constant(I64, shift, CHUNK // 8)))
        eight = v.build.and_(eight, constant(I64, mask, CHUNK // 8))
    return v.cast("trunc", v.build.or_(eight, v.build.lshr(eight, constant(I64, 16, CHUNK // 8))), I32)


def _squares(v: Lanes, x: Any) -> Any:
    wide = v.cast("fpext", x, F64)
    return v.fold(v.build.fmul(wide, wide), SUMS)


def _clipped(v: Lanes, x: Any, step: Any) -> Any:
    """How many lie outside [-8.5 s, 7.5 s]; both bounds are exact in float32."""
    a, b = (v.build.fmul(step, F32(bound)) for bound in (7.5, -8.5))
    less = v.build.fcmp_ordered("<", a, b)
    low, high = v.build.select(less, a, b), v.build.select(less, b, a)
    outside = v.build.or_(v.build.fcmp_ordered(">", x, v.splat(high)), v.build.fcmp_ordered("<", x, v.splat(low)))
    return v.build.zext(v.build.ctpop(v.build.bitcast(outside, I32)), I64)


def either(python: Any, llvm: Any) -> Any:
    return python if config.DISABLE_JIT else intrinsic(llvm)


# (bits, begin, positive, negative, at): positive[at] = the largest of int8 or int32 bits[begin : begin + CHUNK], not
# below 0; negative[at] the same with the signs flipped. The bits of e4m3 and of float32 magnitudes are in the order of
# their values, so these are the largest magnitudes of either sign; an e4m3 NaN is the largest of all, 127.
extremes: Any = either(_extremes_python, _extremes)
# (codes uint8, begin, scale, w float32 [CHUNK]): w = scale * e4m3 values; the NaN codes give +-480.
decode: Any = either(_decode_python, _decode)
# (weights, begin, scale, step, words int32, word, sums, largest, clipped): quantises weights[begin : begin + CHUNK],
# e4m3 bytes times `scale` or float32, with the scale `step`. Packs the codes to words[word:] and adds to
# sums [3 * SUMS], float64, the squares of W, of the error W - q*s (exact where the code is the nearest one, by
# Sterbenz; q*s always is) and of q*s, to largest [LARGEST] the largest bits of |error|, and to clipped [1] the weights
# beyond half a step from the outermost codes.
nearest_codes: Any = either(*_bodies(is_minmax=False))  # clamp(rint(W / s)), exact by int4-algorithms 1.4
minmax_codes: Any = either(*_bodies(is_minmax=True))  # compressed-tensors' chain: BF16 weight, BF16 quotient
# (values float32, begin, codes uint8, scale, sums [3 * SUMS], largest [LARGEST]): adds the same squares and |error| of
# values[begin : begin + CHUNK] against their FP8 codes. The error is exact, by Sterbenz.
fp8_errors: Any = either(_fp8_errors_python, _fp8_errors)

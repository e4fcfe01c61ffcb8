"""The oracle: what the kernels must compute, written for the eye, in NumPy and float64, sharing no code with them.

Weights `w` are float32 [N, K]; groups are `g` consecutive columns of a row; scales are float32 [N, K/g] that BF16 can
hold; codes are int8 in [-8, 7]. Formulas: int4-algorithms sections 1 to 6.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Codes = NDArray[np.int8]

ZERO_GROUP_SCALE = np.float32(2.0**-7)
SMALLEST_SCALE = 2.0**-126
SWEEP_GROUPS = 2048  # groups per pass of the sweep: bounds its memory


def e4m3_table() -> F32:
    """float32 [256]: value of each e4m3fn byte; 0x7F and 0xFF are NaN."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, np.ldexp(1 + mantissa / 8, exponent - 7))
    value[(byte & 0x7F) == 0x7F] = np.nan
    return np.where(byte & 0x80, -value, value).astype(np.float32)


_E4M3 = e4m3_table()


def decode_e4m3(codes: NDArray[np.uint8]) -> F32:
    return _E4M3[codes]


def dequantize(codes: NDArray[np.uint8], scale: F32, block: tuple[int, int], first_row: int = 0) -> F32:
    """float32 product of e4m3 values and block scales; `codes` are rows first_row.. of the tensor of `scale`."""
    rows = (first_row + np.arange(codes.shape[0])) // block[0]
    columns = np.arange(codes.shape[1]) // block[1]
    with np.errstate(over="ignore", invalid="ignore"):
        return decode_e4m3(codes) * scale[rows][:, columns]


def to_bf16(x: F32) -> NDArray[np.uint16]:
    """Bits of the nearest BF16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def from_bf16(bits: NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pack(codes: Codes) -> NDArray[np.int32]:
    """int8 [N, K] to int32 [N, K/8]: column 8j+i is nibble i of word j, stored as q + 8."""
    nibbles: NDArray[np.int64] = (codes.astype(np.int64) + 8).reshape(codes.shape[0], -1, 8)
    words: NDArray[np.uint32] = (nibbles << (4 * np.arange(8))).sum(axis=2).astype(np.uint32)
    return words.view(np.int32)


def unpack(words: NDArray[np.int32]) -> Codes:
    nibbles = (words.view(np.uint32)[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & np.uint32(15)
    return (nibbles.astype(np.int8) - np.int8(8)).reshape(words.shape[0], -1)


def fp8_blocks(w: F32, side: int = 128) -> tuple[NDArray[np.uint8], F32]:
    """(e4m3fn codes [N, K], scales): max|w| / 448 of each block of side x side, at least 2^-126, and 1 where all are 0;
    the code nearest to fl32(w / scale), ties to the even code. Weights are finite."""
    (n, k), (rows, columns) = w.shape, (-(-w.shape[0] // side), -(-w.shape[1] // side))
    padded = np.zeros((rows * side, columns * side), np.float32)
    padded[:n, :k] = np.abs(w)
    blocks = padded.reshape(rows, side, columns, side)
    peak = blocks.max(axis=(1, 3)).astype(np.float64)
    scale = np.where(peak == 0, 1, np.maximum((peak / 448).astype(np.float32), SMALLEST_SCALE)).astype(np.float32)
    quotient = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:n, :k]
    exponent = np.where(quotient < 2.0**-6, -6, np.frexp(quotient)[1] - 1)  # codes below 2^-6 are 2^-9 apart, too
    eighths = np.rint(np.ldexp(quotient, 3 - exponent)).astype(np.int32)  # 8 to 16 of a power of two; less below 2^-6
    return (8 * (exponent + 6) + eighths + np.where(np.signbit(w), 0x80, 0)).astype(np.uint8), scale


def minmax(w: F32, g: int, smallest: float = 0.0) -> tuple[Codes, F32]:
    """compressed-tensors' chain on CPU: weight, scale and quotient are each rounded to BF16 (section 3). smallest: the
    least scale that the output's layout holds."""
    wb = _groups(from_bf16(to_bf16(w)), g)
    s = from_bf16(to_bf16(np.abs(wb).max(axis=2) / np.float32(7.5)))
    s = np.maximum(np.where(s == 0, ZERO_GROUP_SCALE, s), np.float32(smallest))
    quotient = from_bf16(to_bf16(wb / s[:, :, None]))
    return np.rint(np.clip(quotient, -8, 7)).astype(np.int8).reshape(w.shape), s


def signed(w: F32, g: int, smallest: float = SMALLEST_SCALE) -> tuple[Codes, F32]:
    """The extreme weight, positive in a tie, becomes the code -8 (section 4)."""
    groups = _groups(w, g)
    high, low = np.maximum(groups.max(axis=2), 0), np.maximum((-groups).max(axis=2), 0)
    magnitude = np.maximum(from_bf16(to_bf16(np.maximum(high, low) / np.float32(8))), np.float32(smallest))
    s = np.where(low > high, magnitude, -magnitude)
    s = np.where(np.maximum(high, low) == 0, ZERO_GROUP_SCALE, s)
    return nearest_codes(w, s, g), s


def nearest_codes(w: F32, s: F32, g: int) -> Codes:
    """clamp(rint(w / s)): the nearest code, ties to even; exact by 1.4."""
    with np.errstate(over="ignore"):
        quotient = _groups(w, g) / s[:, :, None]
    codes: Codes = np.clip(np.rint(quotient), -8, 7).astype(np.int8)
    return codes.reshape(w.shape)


def steps_off(w: F32, codes: Codes, s: F32, g: int) -> F64:
    """(W - q s) / |s| for every weight. Comparing it with k/2 decides exactly: float64 has bits to spare."""
    s64 = np.repeat(s.astype(np.float64), g, axis=1)
    off: F64 = (w.astype(np.float64) - codes * s64) / np.abs(s64)
    return off


def is_nearest(w: F32, codes: Codes, s: F32, g: int) -> NDArray[np.bool_]:
    """Section 1.3's test in exact arithmetic: 2w between (2q-1)s and (2q+1)s, open-ended at the outermost codes."""
    s64 = np.repeat(s.astype(np.float64), g, axis=1)
    ratio_side = 2 * w.astype(np.float64) * np.sign(s64)
    q, step = codes.astype(np.float64), np.abs(s64)
    above = ((2 * q - 1) * step <= ratio_side) | (codes == -8)
    below = (ratio_side <= (2 * q + 1) * step) | (codes == 7)
    both: NDArray[np.bool_] = above & below
    return both


def round_to_bf16(x: F64) -> F64:
    """float64 to the nearest BF16 value in one rounding."""
    _, exponent = np.frexp(x)
    quantum = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
    rounded: F64 = np.rint(x / quantum) * quantum
    return rounded


def lowest_scale(high: F64, low: F64, kappa: float | None) -> F64:
    """Smallest BF16 s >= 2^-126 with high <= (7+kappa) s and low <= (8+kappa) s; no bound where kappa is None."""
    floor = np.full(high.shape, SMALLEST_SCALE)
    if kappa is None:
        return floor

    def fits(s: F64) -> NDArray[np.bool_]:
        inside: NDArray[np.bool_] = (high <= (7 + kappa) * s) & (low <= (8 + kappa) * s)
        return inside

    s = np.maximum(round_to_bf16(np.maximum(high / (7 + kappa), low / (8 + kappa))), floor)
    s = np.where(fits(_bf16_neighbour(s, -1)), _bf16_neighbour(s, -1), s)
    lowest: F64 = np.maximum(np.where(fits(s), s, _bf16_neighbour(s, 1)), floor)
    return lowest


def _bf16_neighbour(s: F64, by: int) -> F64:
    bits = to_bf16(s.astype(np.float32)).astype(np.int32) + by
    return from_bf16(bits.astype(np.uint16)).astype(np.float64)


def best_scales(w: F32, g: int, *, kappa: float | None = None, positive: bool = False, h: F64 | None = None) -> F32:
    """The optimum over all BF16 scales under the clip allowance kappa, by the breakpoint sweep of section 5.

    h: weights of the squared errors per column [K], non-negative.
    """
    groups = _groups(w, g).reshape(-1, g).astype(np.float64)
    weights = np.ones((1, w.shape[1])) if h is None else np.asarray(h, np.float64)[None]
    weights = np.broadcast_to(weights.reshape(1, -1, g), (w.shape[0], w.shape[1] // g, g)).reshape(-1, g)
    scale = np.empty(len(groups))
    for first in range(0, len(groups), SWEEP_GROUPS):
        part = slice(first, first + SWEEP_GROUPS)
        error, scale[part] = _sweep(groups[part], weights[part], kappa)
        if not positive:
            other, mirrored = _sweep(-groups[part], weights[part], kappa)
            scale[part] = np.where(other < error, -mirrored, scale[part])
    scale[(groups == 0).all(axis=1)] = ZERO_GROUP_SCALE
    return scale.astype(np.float32).reshape(w.shape[0], -1)


def _sweep(u: F64, h: F64, kappa: float | None) -> tuple[F64, F64]:
    """(error, scale > 0) per group: every code vector that is nearest for some s, with its best allowed BF16 scale."""
    a = np.abs(u)
    k = np.arange(8)
    used = (a > 0) & (h > 0)
    live = used[:, :, None] & (k < np.where(u > 0, 7, 8)[:, :, None])
    with np.errstate(divide="ignore"):
        t = np.where(live, (k + 0.5) / a[:, :, None], np.inf).reshape(len(u), -1)
    step_a = np.where(live, (h * a)[:, :, None], 0).reshape(t.shape)
    step_b = np.where(live, h[:, :, None] * (2 * k + 1), 0).reshape(t.shape)
    order = np.argsort(t, axis=1, kind="stable")
    sum_a = np.cumsum(np.take_along_axis(step_a, order, axis=1), axis=1)
    sum_b = np.cumsum(np.take_along_axis(step_b, order, axis=1), axis=1)
    low = lowest_scale(np.maximum(u.max(axis=1), 0), np.maximum((-u).max(axis=1), 0), kappa)
    vertex = sum_a / np.where(sum_b > 0, sum_b, 1)
    s = np.maximum(round_to_bf16(vertex), low[:, None])
    error = (h * u * u).sum(axis=1)[:, None] - 2 * s * sum_a + s * s * sum_b
    best = np.argmin(error, axis=1)[:, None]
    return np.take_along_axis(error, best, axis=1)[:, 0], np.take_along_axis(s, best, axis=1)[:, 0]


def top_threshold(w: F32) -> np.float32:
    """The int(0.999 n)-th smallest |W|, counted from 0: the largest 0.1 % are the weights not below it."""
    rank = int(0.999 * w.size)
    return np.float32(np.partition(np.abs(w).reshape(-1), rank)[rank]) if w.size else np.float32(0)


def error_sums(w: F32, codes: Codes, s: F32, g: int, threshold: np.float32 | None = None) -> dict[str, Any]:
    """The sums behind the report (metrics.ErrorSums, same names), with q*s exact and all else in float64. 7.5 s and
    8.5 s are exact in float32: s has 8 bits. A threshold of infinity leaves the top_* sums at 0."""
    threshold = top_threshold(w) if threshold is None else threshold
    groups, step = _groups(w, g), s[:, :, None]
    restored = codes.reshape(groups.shape) * step.astype(np.float64)
    error = groups - restored
    top = np.abs(groups) >= threshold if np.isfinite(threshold) else np.zeros(0, np.bool_)
    with np.errstate(over="ignore"):
        ends = np.float32(7.5) * step, np.float32(-8.5) * step
    return {
        "n": w.size,
        "sum_w2": float(np.square(w, dtype=np.float64).sum()),
        "sum_e2": float(np.einsum("ijk,ijk->", error, error)),
        "sum_q2": float(np.einsum("ijk,ijk->", restored, restored)),
        "top_n": int(top.sum()),
        "top_w2": float(np.square(groups[top], dtype=np.float64).sum()) if top.size else 0.0,
        "top_e2": float(np.square(error[top]).sum()) if top.size else 0.0,
        "max_abs_error": float(max(error.max(initial=0), -error.min(initial=0))),
        "clipped": int(((groups > np.maximum(*ends)) | (groups < np.minimum(*ends))).sum()),
        "groups": s.size,
        "zero_groups": int((~groups.any(axis=2)).sum()),
        "negative_scales": int((s < 0).sum()),
    }


def fp8_error_sums(w: F32, codes: NDArray[np.uint8], scale: F32, side: int = 128) -> dict[str, Any]:
    """The same for FP8 blocks, without the top_* sums: nothing is clipped, no scale is negative."""
    restored = dequantize(codes, scale, (side, side)).astype(np.float64)
    error = w - restored
    return {
        "n": w.size,
        "sum_w2": float(np.square(w, dtype=np.float64).sum()),
        "sum_e2": float(np.square(error).sum()),
        "sum_q2": float(np.square(restored).sum()),
        "max_abs_error": float(np.abs(error).max(initial=0)),
        "groups": scale.size,
        "zero_groups": sum(
            not w[i : i + side, j : j + side].any()
            for i in range(0, w.shape[0], side)
            for j in range(0, w.shape[1], side)
        ),
    }


def weighted_sums(w: F32, codes: Codes, s: F32, g: int, h: F64) -> dict[str, Any]:
    """Sums of h W^2 and of h (W - q s)^2, h [K] by column, under their names in metrics.ErrorSums."""
    error = w - codes * np.repeat(s.astype(np.float64), g, axis=1)
    return {
        "sum_hw2": float((np.square(w, dtype=np.float64) * h).sum()),
        "sum_he2": float((np.square(error) * h).sum()),
    }


def shrunk_mean_squares(h: F32, sum_g2: F64, sum_g4: F64, expert: int, *, pooled: bool) -> F64 | None:
    """Section 7.2 for one expert: h [E, K] of all experts of a layer; pooled: drawn to the layer's mean (gate and up)
    rather than to its own (down). None of an expert that no token reached."""
    if sum_g4[expert] == 0:
        return None
    n = sum_g2[expert] ** 2 / sum_g4[expert]
    own = h[expert].astype(np.float64)
    if pooled:
        layer = (sum_g2 @ h.astype(np.float64)) / sum_g2.sum()
        near: F64 = (n * own + 4 * layer) / (n + 4)
    else:
        near = (n * own + 16 * own.mean()) / (n + 16)
    return near


def column_weights(h: F64, g: int) -> F64:
    """Section 7.1: integers [K]; a column of the mean of its group weighs 1024."""
    groups = h.reshape(-1, g)
    mean = groups.mean(axis=1, keepdims=True)
    relative = np.divide(groups, mean, out=np.zeros(groups.shape), where=mean > 0)
    weights: F64 = np.clip(np.rint(1024 * relative), 1, 2**17).reshape(-1)
    return weights


def group_errors(w: F32, codes: Codes, s: F32, g: int, weights: F64 | None = None) -> F64:
    """Sum of squared errors of each group [N, K/g], weighted by column [K] if weights are given."""
    error = _groups(w, g) - codes.reshape(w.shape[0], -1, g) * s[:, :, None].astype(np.float64)
    if weights is not None:
        error *= np.sqrt(weights).reshape(-1, g)
    energy: F64 = np.einsum("ijk,ijk->ij", error, error)
    return energy


def _groups(w: F32, g: int) -> F32:
    return w.reshape(w.shape[0], -1, g)

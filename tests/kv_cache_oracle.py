"""KV rows from the formats' definitions, in NumPy, one value at a time where it matters. Shares no code with
kizami.quantize.kv_cache, and no torch: E4M3 is a table of 127 numbers here, and rounding a search in it.
"""

import numpy as np
import numpy.typing as npt

F32 = np.float32
U8 = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]
FLT_MIN = F32(2.0**-126)


def e4m3_value(code: int) -> float:
    """OCP: 1 sign, 4 exponent bits with bias 7, 3 mantissa bits; 0x7F and 0xFF are NaN, there is no infinity."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


TABLE = np.array([e4m3_value(code) for code in range(256)])
GRID = TABLE[:127]  # 0 to 448, ascending: the code is the index
MIDDLES = (GRID[1:] + GRID[:-1]) / 2  # exact in float64


def e4m3_code(values: Values) -> U8:
    """Nearest of the grid, ties to the even code; beyond 448 saturates; NaN is 0x7F."""
    with np.errstate(invalid="ignore"):
        size = np.abs(values.astype(np.float64))
    below, above = np.searchsorted(MIDDLES, size, "left"), np.searchsorted(MIDDLES, size, "right")
    code = np.where(below % 2 == 0, below, above)  # they differ on a tie only, and one of two neighbours is even
    code = code | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


def bf16(bits: npt.NDArray[np.uint16]) -> Values:
    return (bits.astype(np.uint32) << 16).view(F32)


def bf16_bits(values: Values) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even, by bits. Not for NaN."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def static_row(values: Values, scales: list[float]) -> U8:
    """values [width], a scale for each len / len(scales) of them."""
    each = np.repeat(np.array(scales, F32), len(values) // len(scales))
    return e4m3_code(values / each)


def static_values(row: U8, scales: list[float]) -> Values:
    each = np.repeat(np.array(scales, F32), len(row) // len(scales))
    return TABLE[row].astype(F32) * each


def next_power_of_two(x: float) -> F32:
    power = F32(1)
    while power < x:
        power *= F32(2)
    while power / F32(2) >= x:
        power /= F32(2)
    return power


def tile(values: Values, writer: str) -> tuple[U8, F32]:
    """Codes and scale of 128 values."""
    finite = np.abs(values[np.isfinite(values)])
    scale = F32(max(finite, default=F32(0)) / F32(448))
    if writer == "power_of_two":
        scale = next_power_of_two(max(scale, F32(1e-4)))
    scale = max(scale, FLT_MIN)
    with np.errstate(invalid="ignore", over="ignore"):
        return e4m3_code(values * (F32(1) / scale) if writer == "sglang" else values / scale), scale


def ds_row(values: Values, writer: str) -> bytes:
    """656 bytes of 576 values: codes, scales, rope."""
    tiles = [tile(values[i : i + 128], writer) for i in range(0, 512, 128)]
    codes = b"".join(code.tobytes() for code, _ in tiles)
    scales = b"".join(scale.astype("<f4").tobytes() for _, scale in tiles)
    return codes + scales + bf16_bits(values[512:]).astype("<u2").tobytes()


def ds_values(row: bytes) -> Values:
    codes = np.frombuffer(row[:512], np.uint8)
    scales = np.frombuffer(row[512:528], "<f4")
    rope = np.frombuffer(row[528:656], "<u2")
    return np.concatenate([TABLE[codes].astype(F32) * np.repeat(scales, 128), bf16(rope)])


def index_page(values: Values) -> bytes:
    """8448 bytes of 64 keys [64, 128]: all codes, then all scales."""
    scales = [F32(max(np.abs(v).max(), F32(1e-4)) / F32(448)) for v in values]
    codes = [e4m3_code(v / s) for v, s in zip(values, scales, strict=True)]
    return b"".join(c.tobytes() for c in codes) + np.array(scales, "<f4").tobytes()

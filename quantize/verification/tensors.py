"""One tensor of the output held against its source, with the oracle's arithmetic and none of the run's."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.formats.dialects import ScaledWeight
from kizami.formats.int4_layout import smallest_scale
from kizami.formats.packed_source import PackedWeight
from kizami.formats.reader import TensorReader
from kizami.formats.tensors import TensorInfo
from kizami.quantize import reference, reference_layouts
from kizami.quantize.decide import FP8_BLOCK
from kizami.quantize.given import own_method
from kizami.quantize.metrics import ErrorSums
from kizami.quantize.plan import Step
from kizami.quantize.settings import CALIBRATED, GIVEN, Method, Policy
from kizami.quantize.verification.fp8 import fp8_fault

BAND_WEIGHTS = 1 << 17  # the oracle works in float64: 1 MB per array and band
COPY_BYTES = 8 << 20
NO_TOP = np.float32(np.inf)  # the largest 0.1 % of a tensor are not known band by band
MOST_ERROR = 1.5  # of half a step everywhere; found at most: 0.88, for groups made to round badly
# The same where errors count by column: candidates are compared with shares that are at least two thirds of the
# weights, and one of them lies within 2 % of max|W| / 7, which clips nothing.
MOST_WEIGHTED_ERROR = 1.75
# max|W| / |s| of `weighted`, whatever the weights. Divisors lie between 5.6 and 48. Each of two fits takes a mean of
# W/q over the codes q that are not 0; it is at least half the scale, and at most 1.5 times it or a seventh of max|W|.
LEAST_DIVISOR, MOST_DIVISOR = 5.6 / 1.5 / 1.5, 48 * 2.0 * 2.0
BF16_STEP = 2.0**-6  # of a few roundings to BF16

LAYOUT_VIEWS = {"I32": "<i4", "I8": "i1", "F16": "<f2", "F32": "<f4"}

Fault = tuple[str, str]  # code, message
Tensors = Mapping[str, TensorInfo]


_FLOATS = {"BF16": ("<u2", 0x7F80, 0x8000), "F16": ("<u2", 0x7C00, 0x8000), "F32": ("<u4", 0x7F800000, 0x80000000)}


def scale_faults(raw: NDArray[np.uint8], dtype: str) -> tuple[str | None, bool]:
    """(what is wrong with a scale tensor, whether it has negative scales)."""
    if dtype not in _FLOATS:
        return f"is {dtype}, expected one of {', '.join(_FLOATS)}", False
    word, exponent, sign = _FLOATS[dtype]
    words = raw.view(word)
    not_finite = (words & exponent) == exponent
    negative = bool((words & sign).any())
    if not_finite.any():
        return f"element {int(np.argmax(not_finite))} is not finite", negative
    zero = (words & (sign - 1)) == 0
    if zero.any():
        return f"element {int(np.argmax(zero))} is zero", negative
    return None, negative


def check_step(
    step: Step,
    source: TensorReader,
    out: TensorReader,
    tensors: Tensors,
    policy: Policy,
    method: Method,
    h: NDArray[np.float64] | None = None,
) -> tuple[list[Fault], ErrorSums | None]:
    """What is wrong with the outputs of `step`, nothing when every bit is as it must be; and the error of a rounded
    weight, but for its top_* sums. `tensors` are the output's. h: mean squares of the step's columns, where they are
    known."""
    method = own_method(method, step)
    match step.action:
        case "quantize":
            return _check_packed(step, source, out, tensors, policy, method, h)
        case "repack":
            return _check_repacked(step, source, out, tensors, policy)
        case "to_fp8":
            return _check_fp8(step, source, out, tensors)
        case "dequantize":
            return list(_check_dequantized(step, source, out, tensors)), None
        case "kv_scale":
            return list(_check_kv_scale(step, out, tensors)), None
    faults = list(_check_copied(step.weight, tensors[step.outputs[0].name], source, out))
    if isinstance(step.encoding, ScaledWeight) and step.action == "keep_fp8":
        kept = out.read(tensors[step.outputs[1].name]).view("<f4").reshape(step.encoding.grid)
        if not np.array_equal(kept.view("<u4"), _scales(step.encoding, source).view("<u4")):
            faults.append(("kept_scale", f"{step.outputs[1].name} is not the source's scale"))
    return faults, None


def _check_copied(info: TensorInfo, copy: TensorInfo, source: TensorReader, out: TensorReader) -> Iterator[Fault]:
    for first in range(0, info.nbytes, COPY_BYTES):
        count = min(COPY_BYTES, info.nbytes - first)
        a, b = source.read(info, first=first, nbytes=count), out.read(copy, first=first, nbytes=count)
        if not np.array_equal(a, b):
            yield "not_copied", f"byte {first + int(np.argmax(a != b))} differs from the source's"
            return


def _check_kv_scale(step: Step, out: TensorReader, tensors: Tensors) -> Iterator[Fault]:
    """No source has it: the values are those that the manifest records."""
    found = out.read(tensors[step.outputs[0].name]).view("<u4")
    if not np.array_equal(found, np.array(step.values, "<f4").view("<u4")):
        yield "other_kv_scale", f"is {found.view('<f4').tolist()[:4]}, recorded {list(step.values[:4])}"


def _check_dequantized(step: Step, source: TensorReader, out: TensorReader, tensors: Tensors) -> Iterator[Fault]:
    for first, rows in _bands(step):
        expected = reference.to_bf16(_source_rows(step, source, first, rows))
        found = _rows(out, tensors[step.outputs[0].name], first, rows).view("<u2").reshape(expected.shape)
        if not np.array_equal(found, expected):
            i, j = (int(x) for x in np.argwhere(found != expected)[0])
            kind = "q" if isinstance(step.encoding, PackedWeight) else "e4m3"
            yield "not_dequantized", f"row {first + i}, column {j} is not bf16({kind} * scale)"
            return


def _check_packed(
    step: Step,
    source: TensorReader,
    out: TensorReader,
    tensors: Tensors,
    policy: Policy,
    method: Method,
    h: NDArray[np.float64] | None,
) -> tuple[list[Fault], ErrorSums]:
    group_size, packed = policy.group_size, PackedOutput(step, out, tensors, policy)
    sums, weights = ErrorSums(), None if h is None else reference.column_weights(h, group_size)
    for first, rows in _bands(step):
        w = _source_rows(step, source, first, rows)
        codes, steps = packed.rows(first, rows)
        fault = check_codes(w, codes, steps, group_size, method, smallest_scale(policy.format), weights)
        if fault is not None:
            return [("bad_codes", f"rows {first} to {first + rows - 1}: {fault}")], sums
        weighted = {} if h is None else reference.weighted_sums(w, codes, steps, group_size, h)
        sums += ErrorSums(**reference.error_sums(w, codes, steps, group_size, NO_TOP), **weighted)
    if method.name == "gptq" and sums.sum_e2 > sums.sum_w2:
        return [("bad_codes", "zeros would be nearer to the weights")], sums
    return ([("bad_layout", packed.fault)] if packed.fault else []), sums


def _check_repacked(
    step: Step, source: TensorReader, out: TensorReader, tensors: Tensors, policy: Policy
) -> tuple[list[Fault], ErrorSums]:
    encoding = step.encoding
    assert isinstance(encoding, PackedWeight)
    packed = PackedOutput(step, out, tensors, policy)
    sums = ErrorSums()
    for first, rows in _bands(step):
        codes, steps = packed.rows(first, rows)
        expected_codes, expected_steps = _packed_source(encoding, source, first, rows)
        expected_steps = np.repeat(expected_steps, encoding.group_size // policy.group_size, axis=1)
        pairs: list[tuple[str, Any, Any]] = [("code", codes, expected_codes), ("scale", steps, expected_steps)]
        for what, found, expected in pairs:
            if not np.array_equal(found, expected):
                i, j = (int(x) for x in np.argwhere(found != expected)[0])
                return [("not_repacked", f"{what} {j} of row {first + i} is not the source's")], sums
        zero = ~codes.reshape(rows, -1, policy.group_size).any(axis=2)
        sums += ErrorSums(
            n=codes.size, groups=steps.size, zero_groups=int(zero.sum()), negative_scales=int((steps < 0).sum())
        )
    return ([("bad_layout", packed.fault)] if packed.fault else []), sums


def _check_fp8(step: Step, source: TensorReader, out: TensorReader, tensors: Tensors) -> tuple[list[Fault], ErrorSums]:
    weight, scales = (tensors[spec.name] for spec in step.outputs)
    grid = out.read(scales).view("<f4").reshape(step.outputs[1].shape)
    sums = ErrorSums()
    height = max(1, BAND_WEIGHTS // step.shape[1] // FP8_BLOCK[0]) * FP8_BLOCK[0]
    for first in range(0, step.shape[0], height):
        rows = min(height, step.shape[0] - first)
        w = _source_rows(step, source, first, rows)
        codes = _rows(out, weight, first, rows).reshape(w.shape)
        part = grid[first // FP8_BLOCK[0] : -(-(first + rows) // FP8_BLOCK[0])]
        if (fault := fp8_fault(w, codes, part, first)) is not None:
            return [("bad_codes", fault)], sums
        sums += ErrorSums(**reference.fp8_error_sums(w, codes, part))
    return [], sums


class PackedOutput:
    """An INT4 weight of the output, in whatever layout it lies, read by the oracle. fault: what is wrong with what lies
    beside its codes and scales."""

    def __init__(self, step: Step, out: TensorReader, tensors: Tensors, policy: Policy) -> None:
        self._out, self._infos = out, [tensors[spec.name] for spec in step.outputs]
        self._whole: tuple[NDArray[np.int8], NDArray[np.float32]] | None = None  # some layouts go by columns
        self.fault: str | None = None
        if policy.format == "pack-quantized":
            shape = out.read(self._infos[1]).view("<i4").tolist()
            self.fault = None if shape == list(step.shape) else f"weight_shape is {shape}, expected {list(step.shape)}"
        else:
            arrays = [out.read(info).view(LAYOUT_VIEWS[info.dtype]).reshape(info.shape) for info in self._infos]
            codes, steps, self.fault = reference_layouts.read_layout(policy.format, arrays, policy.group_size)
            self._whole = codes, steps

    def rows(self, first: int, rows: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """Codes [rows, K] and scales [rows, K/g]."""
        if self._whole is not None:
            codes, steps = self._whole
            return codes[first : first + rows], steps[first : first + rows]
        packed, _, scale = self._infos
        words = _rows(self._out, packed, first, rows).view("<i4").reshape(rows, -1)
        bits = _rows(self._out, scale, first, rows).view("<u2").reshape(rows, -1)
        return reference.unpack(words), reference.from_bf16(bits)


def check_codes(
    w: NDArray[np.float32],
    codes: NDArray[np.int8],
    steps: NDArray[np.float32],
    group_size: int,
    method: Method,
    smallest: float = 0.0,
    weights: NDArray[np.float64] | None = None,
) -> str | None:
    """What may be asserted of codes [n, K] and stored scales [n, K/g] of each method. smallest: the least scale that
    the layout holds; weights: of the columns [K], for `weighted` and `gptq`, where they are known."""
    if (steps.view(np.uint32) & 0xFFFF).any():  # F32 and F16 have room for less than the figures of an error show
        return "a scale is none that BF16 can hold"
    if method.name == "minmax":
        expected_codes, expected_steps = reference.minmax(w, group_size, smallest)
        if not np.array_equal(steps, expected_steps):
            return "scales are not those of minmax"
        return None if np.array_equal(codes, expected_codes) else "codes are not those of minmax"
    if method.name == "llmcompressor-gptq":  # scales by the rule of minmax, codes by error feedback
        right = np.array_equal(steps, reference.minmax(w, group_size, 0.0)[1])
        return None if right else "scales are not max|W| / 7.5"
    if method.name in GIVEN:  # AWQ has moved factors between two weights: nothing follows from one of them
        return "a scale is negative" if (steps < 0).any() else None
    smallest = max(smallest, reference.SMALLEST_SCALE)
    if method.name == "signed" and not np.array_equal(steps, reference.signed(w, group_size, smallest)[1]):
        return "scales are not those of signed"
    if method.scale_sign == "positive" and (steps < 0).any():
        return "a scale is negative, but --scale-sign is positive"
    nearest = reference.nearest_codes(w, steps, group_size)
    if method.name != "gptq" and not np.array_equal(codes, nearest):
        return "a code is not the nearest one under its stored scale"
    zero = ~w.reshape(len(w), -1, group_size).any(axis=2)
    if (steps[zero] != reference.ZERO_GROUP_SCALE).any():
        return "an all-zero group has another scale than 2^-7"
    if method.name == "search":
        errors = reference.group_errors(w, codes, steps, group_size)
        if (errors > MOST_ERROR * group_size * _half_step(w, group_size, smallest) ** 2).any():
            return "a group is rounded worse than with the scale max|W| / 7"
    if method.name in CALIBRATED and (fault := _weighted_fault(w, nearest, steps, group_size, smallest, weights)):
        return fault
    kappa = method.clip_allowance
    if kappa is not None and (np.abs(reference.steps_off(w, nearest, steps, group_size)) > kappa).any():
        return f"a weight is more than {kappa:g} steps from its code"
    return None


def _half_step(w: NDArray[np.float32], group_size: int, smallest: float) -> NDArray[np.float64]:
    """Of each group at the scale max|W| / 7, which clips nothing: the largest error of a weight. The sums of squares
    that a search finds stay near it, whatever the group and the clip allowance; scales that ruin a group do not."""
    half: NDArray[np.float64] = np.maximum(_largest(w, group_size) / 7, smallest) / 2
    return half


def _largest(w: NDArray[np.float32], group_size: int) -> NDArray[np.float64]:
    largest: NDArray[np.float32] = np.abs(w).reshape(len(w), -1, group_size).max(axis=2)
    return largest.astype(np.float64)


def _weighted_fault(
    w: NDArray[np.float32],
    nearest: NDArray[np.int8],
    steps: NDArray[np.float32],
    group_size: int,
    smallest: float,
    weights: NDArray[np.float64] | None,
) -> str | None:
    """Of the scales of `weighted`, from the codes nearest under them. The plain error of a group may be that of nearly
    all its weights, where one column outweighs the rest."""
    largest, size = _largest(w, group_size), np.abs(steps.astype(np.float64))
    too_large = size > np.maximum(largest / LEAST_DIVISOR * (1 + BF16_STEP), smallest)
    if (too_large & (largest > 0)).any() or (size * MOST_DIVISOR * (1 + BF16_STEP) < largest).any():
        return "a scale is not one that the candidates of weighted lead to"
    if weights is None:
        return None
    errors = reference.group_errors(w, nearest, steps, group_size, weights)
    half = _half_step(w, group_size, smallest)
    if (errors > MOST_WEIGHTED_ERROR * weights.reshape(-1, group_size).sum(axis=1) * half * half).any():
        return "a group is rounded worse, as its columns weigh, than with the scale max|W| / 7"
    return None


def _bands(step: Step) -> Iterator[tuple[int, int]]:
    """(first row, rows) of a 2-D source weight."""
    n, k = step.shape
    size = max(1, BAND_WEIGHTS // k)
    for first in range(0, n, size):
        yield first, min(size, n - first)


def _rows(reader: TensorReader, info: TensorInfo, first: int, rows: int) -> NDArray[np.uint8]:
    row_bytes = info.nbytes // info.shape[0]
    raw: NDArray[np.uint8] = reader.read(info, first=first * row_bytes, nbytes=rows * row_bytes)
    return raw


def _source_rows(step: Step, source: TensorReader, first: int, rows: int) -> NDArray[np.float32]:
    """Rows of the source weight in float32, by the oracle."""
    encoding = step.encoding
    if isinstance(encoding, PackedWeight):
        quants, steps = _packed_source(encoding, source, first, rows)
        return quants.astype(np.float32) * np.repeat(steps, encoding.group_size, axis=1)
    raw = _rows(source, step.weight, first, rows)
    if encoding is not None:
        return reference.dequantize(raw.reshape(rows, -1), _scales(encoding, source), encoding.block, first_row=first)
    return _floats(raw, step.weight.dtype).reshape(rows, -1)


def _packed_source(
    encoding: PackedWeight, source: TensorReader, first: int, rows: int
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    words = _rows(source, encoding.packed, first, rows).view("<i4").reshape(rows, -1)
    steps = _floats(_rows(source, encoding.scale, first, rows), encoding.scale.dtype)
    return reference.unpack(words), steps.reshape(rows, -1)


def _scales(scaled: ScaledWeight, source: TensorReader) -> NDArray[np.float32]:
    raw = source.read(scaled.scale)
    if scaled.scale.dtype in ("F8_E8M0", "U8"):  # an exponent with bias 127
        powers: NDArray[np.float32] = np.exp2(raw.astype(np.float64) - 127).astype(np.float32)
        return powers.reshape(scaled.grid)
    return _floats(raw, scaled.scale.dtype).reshape(scaled.grid)


def _floats(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        return reference.from_bf16(raw.view(np.uint16))
    widened: NDArray[np.float32] = raw.view({"F16": "<f2", "F32": "<f4"}[dtype]).astype(np.float32)
    return widened

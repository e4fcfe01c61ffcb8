"""One tensor of the output held against its source, with the oracle's arithmetic and none of the run's."""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from kizami.formats.dialects import ScaledWeight
from kizami.formats.int4_layout import WEIGHT_PACKED, WEIGHT_SCALE
from kizami.formats.reader import TensorReader
from kizami.formats.tensors import TensorInfo
from kizami.quantize import reference
from kizami.quantize.metrics import ErrorSums
from kizami.quantize.plan import Step
from kizami.quantize.settings import Method, Policy

BAND_WEIGHTS = 1 << 17  # the oracle works in float64: 1 MB per array and band
COPY_BYTES = 8 << 20
NO_TOP = np.float32(np.inf)  # the largest 0.1 % of a tensor are not known band by band
MOST_ERROR = 1.5  # of half a step everywhere; found at most: 0.88, for groups made to round badly

Fault = tuple[str, str]  # code, message
Tensors = Mapping[str, TensorInfo]


def scale_faults(raw: NDArray[np.uint8]) -> tuple[str | None, bool]:
    """(what is wrong with a BF16 scale tensor, whether it has negative scales)."""
    words = raw.view(np.uint16)
    exponent = words & 0x7F80
    negative = bool((words & 0x8000).any())
    if (exponent == 0x7F80).any():
        return f"element {int(np.argmax(exponent == 0x7F80))} is not finite", negative
    if ((words & 0x7FFF) == 0).any():
        return f"element {int(np.argmax((words & 0x7FFF) == 0))} is zero", negative
    return None, negative


def check_step(
    step: Step,
    source: TensorReader,
    out: TensorReader,
    tensors: Tensors,
    policy: Policy,
    method: Method,
) -> tuple[list[Fault], ErrorSums | None]:
    """What is wrong with the outputs of `step`, nothing when every bit is as it must be; and the error of a packed
    weight, but for its top_* sums. `tensors` are the output's."""
    if step.action == "quantize":
        return _check_packed(step, source, out, tensors, policy.group_size, method)
    if step.action == "dequantize":
        return list(_check_dequantized(step, source, out, tensors)), None
    faults = list(_check_copied(step.weight, tensors[step.outputs[0].name], source, out))
    if step.action == "keep_fp8":
        assert step.scaled is not None
        kept = out.read(tensors[step.outputs[1].name]).view("<f4").reshape(step.scaled.grid)
        if not np.array_equal(kept.view("<u4"), _scales(step.scaled, source).view("<u4")):
            faults.append(("kept_scale", "weight_scale is not the source's scale"))
    return faults, None


def _check_copied(info: TensorInfo, copy: TensorInfo, source: TensorReader, out: TensorReader) -> Iterator[Fault]:
    for first in range(0, info.nbytes, COPY_BYTES):
        count = min(COPY_BYTES, info.nbytes - first)
        a, b = source.read(info, first=first, nbytes=count), out.read(copy, first=first, nbytes=count)
        if not np.array_equal(a, b):
            yield "not_copied", f"byte {first + int(np.argmax(a != b))} differs from the source's"
            return


def _check_dequantized(step: Step, source: TensorReader, out: TensorReader, tensors: Tensors) -> Iterator[Fault]:
    for first, rows in _bands(step):
        expected = reference.to_bf16(_source_rows(step, source, first, rows))
        found = _rows(out, tensors[step.outputs[0].name], first, rows).view("<u2").reshape(expected.shape)
        if not np.array_equal(found, expected):
            i, j = (int(x) for x in np.argwhere(found != expected)[0])
            yield "not_dequantized", f"row {first + i}, column {j} is not bf16(e4m3 * scale)"
            return


def _check_packed(
    step: Step, source: TensorReader, out: TensorReader, tensors: Tensors, group_size: int, method: Method
) -> tuple[list[Fault], ErrorSums]:
    cols = step.weight.shape[1]
    sums = ErrorSums()
    for first, rows in _bands(step):
        w = _source_rows(step, source, first, rows)
        words = _rows(out, tensors[f"{step.module}.{WEIGHT_PACKED}"], first, rows).view("<i4").reshape(rows, cols // 8)
        scales = _rows(out, tensors[f"{step.module}.{WEIGHT_SCALE}"], first, rows).view("<u2").reshape(rows, -1)
        codes = reference.unpack(words)
        steps = reference.from_bf16(scales)
        fault = check_codes(w, codes, steps, group_size, method)
        if fault is not None:
            return [("bad_codes", f"rows {first} to {first + rows - 1}: {fault}")], sums
        sums += ErrorSums(**reference.error_sums(w, codes, steps, group_size, NO_TOP))
    return [], sums


def check_codes(
    w: NDArray[np.float32], codes: NDArray[np.int8], steps: NDArray[np.float32], group_size: int, method: Method
) -> str | None:
    """What may be asserted of codes [n, K] and stored scales [n, K/g] of each method."""
    if method.name == "minmax":
        expected_codes, expected_steps = reference.minmax(w, group_size)
        if not np.array_equal(steps, expected_steps):
            return "scales are not those of minmax"
        return None if np.array_equal(codes, expected_codes) else "codes are not those of minmax"
    if method.name == "signed" and not np.array_equal(steps, reference.signed(w, group_size)[1]):
        return "scales are not those of signed"
    if method.scale_sign == "positive" and (steps < 0).any():
        return "a scale is negative, but --scale-sign is positive"
    if not np.array_equal(codes, reference.nearest_codes(w, steps, group_size)):
        return "a code is not the nearest one under its stored scale"
    zero = ~w.reshape(len(w), -1, group_size).any(axis=2)
    if (steps[zero] != reference.ZERO_GROUP_SCALE).any():
        return "an all-zero group has another scale than 2^-7"
    errors = reference.group_errors(w, codes, steps, group_size) if method.name == "search" else None
    if errors is not None and (errors > _most_error(w, group_size)).any():
        return "a group is rounded worse than with the scale max|W| / 7"
    kappa = method.clip_allowance
    if kappa is not None and (np.abs(reference.steps_off(w, codes, steps, group_size)) > kappa).any():
        return f"a weight is more than {kappa:g} steps from its code"
    return None


def _most_error(w: NDArray[np.float32], group_size: int) -> NDArray[np.float64]:
    """A bound from errors of half a step everywhere at the scale max|W| / 7, which clips nothing. What a search finds
    stays below it, whatever the group and the clip allowance; scales that ruin a group do not."""
    largest = np.abs(w).reshape(len(w), -1, group_size).max(axis=2).astype(np.float64)
    half: NDArray[np.float64] = np.maximum(largest / 7, reference.SMALLEST_SCALE) / 2
    return MOST_ERROR * group_size * half * half


def _bands(step: Step) -> Iterator[tuple[int, int]]:
    """(first row, rows) of a 2-D source weight."""
    n, k = step.weight.shape
    size = max(1, BAND_WEIGHTS // k)
    for first in range(0, n, size):
        yield first, min(size, n - first)


def _rows(reader: TensorReader, info: TensorInfo, first: int, rows: int) -> NDArray[np.uint8]:
    row_bytes = info.nbytes // info.shape[0]
    raw: NDArray[np.uint8] = reader.read(info, first=first * row_bytes, nbytes=rows * row_bytes)
    return raw


def _source_rows(step: Step, source: TensorReader, first: int, rows: int) -> NDArray[np.float32]:
    """Rows of the source weight in float32, by the oracle."""
    raw = _rows(source, step.weight, first, rows)
    if step.scaled is not None:
        codes = raw.reshape(rows, -1)
        return reference.dequantize(codes, _scales(step.scaled, source), step.scaled.block, first_row=first)
    return _floats(raw, step.weight.dtype).reshape(rows, -1)


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

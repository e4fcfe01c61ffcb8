"""From source bytes to output bytes for one step, in pieces that bound the memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isfinite, prod

import numpy as np
from numpy.typing import NDArray

from kizami.formats.dialects import ScaledWeight
from kizami.formats.errors import KizamiError
from kizami.formats.int4_layout import smallest_scale
from kizami.formats.packed_source import PackedWeight
from kizami.formats.reader import TensorReader
from kizami.quantize.arrange import arrange
from kizami.quantize.buffers import Buffers
from kizami.quantize.calibrated.column_weights import integer_weights
from kizami.quantize.calibrated.solver import Outcome, source_weight
from kizami.quantize.calibrated.statistics import Calibration, Chosen
from kizami.quantize.decide import FP8_BLOCK
from kizami.quantize.fp8 import to_fp8_blocks
from kizami.quantize.given import Given, chosen_instead, is_given, own_method
from kizami.quantize.kv_scales.carried import is_kv_scale, scale_values
from kizami.quantize.linear import NonFiniteError, PackedLinear, dequantize_rows, quantize_linear
from kizami.quantize.measure import measure
from kizami.quantize.metrics import ErrorSums
from kizami.quantize.plan import Step
from kizami.quantize.settings import Method, Policy
from kizami.quantize.source_rows import check_packed_shape, opened, read_scales
from kizami.quantize.unpack import as_float32, bf16_scales, to_bf16

# Source bytes per piece of a tensor that needs no look at the whole: a core is busy with it for 5 ms.
PIECE_BYTES = 8 << 20
ZERO_CODES = np.uint32(0x88888888).view(np.int32)  # a word of eight codes 0
BYTE_FOR_BYTE = ("copy", "keep_fp8")


Quantize = Callable[..., PackedLinear]
"""quantize_linear, or another that takes the same and gives the same."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of whole rows (or, for a copy, of bytes) of one step."""

    step: Step
    first: int
    count: int
    last: bool  # the step's last piece

    @property
    def source_nbytes(self) -> int:
        """Bytes of the source weight that this piece reads."""
        if not self.step.sources:
            return 0
        rows = self.step.weight.nbytes if self.step.action in BYTE_FOR_BYTE else self.step.shape[0]
        return self.step.weight.nbytes * self.count // rows if rows else 0


@dataclass(frozen=True, slots=True)
class Produced:
    """The bytes to append to each output tensor, and the error sums of the piece where it was rounded. chosen: of a
    linear that was rounded with a calibrated method."""

    chunks: tuple[tuple[str, NDArray[np.generic]], ...]
    sums: ErrorSums | None = None
    chosen: Chosen | None = None


def pieces(step: Step) -> Iterator[Piece]:
    """INT4 is made in one piece: its largest weights decide on the whole tensor, and some layouts are transposed. The
    rest is cut, FP8 at the edges of its blocks."""
    if step.form == "int4" or not step.sources:
        yield Piece(step, 0, step.shape[0] if step.sources else 0, True)
        return
    total, unit = (step.weight.nbytes, 1) if step.action in BYTE_FOR_BYTE else step.shape
    size = max(1, PIECE_BYTES // unit)
    if step.action == "to_fp8":
        size = -(-size // FP8_BLOCK[0]) * FP8_BLOCK[0]
    starts = range(0, total, size) if total else range(1)
    for first in starts:
        yield Piece(step, first, min(size, total - first), first + size >= total)


def produce(
    piece: Piece,
    reader: TensorReader,
    policy: Policy,
    method: Method,
    buffers: Buffers,
    calibration: Calibration | None = None,
    given: Given | None = None,
    quantize: Quantize = quantize_linear,
) -> Produced:
    """Reads the piece, computes it, and gives the bytes in output order, in arrays that `buffers` takes back.
    calibration, given: of a method that needs it. quantize: who packs linears.

    Raises KizamiError naming file and tensor.
    """
    step = piece.step
    try:
        match step.action:
            case "quantize":
                if calibration is not None:
                    return _quantize_calibrated(step, reader, policy, method, buffers, calibration, quantize)
                if given is not None:
                    return _take_given(step, reader, policy, method, buffers, given)
                return _quantize(step, reader, policy, method, buffers, quantize)
            case "repack":
                return _repack(step, reader, policy)
            case "dequantize":
                return _dequantize(piece, reader, buffers)
            case "to_fp8":
                return _to_fp8(piece, reader, buffers)
            case "kv_scale":
                return Produced(((step.outputs[0].name, np.array(step.values, "<f4")),))
        return _pass_on(piece, reader, buffers)
    except NonFiniteError as e:
        raise non_finite(step, e) from None


def _pass_on(piece: Piece, reader: TensorReader, buffers: Buffers) -> Produced:
    """copy and keep_fp8: the source's bytes, looked at for NaN where they are FP8."""
    step = piece.step
    raw = reader.read(step.weight, first=piece.first, nbytes=piece.count, empty=buffers.empty)
    chunks: list[tuple[str, NDArray[np.generic]]] = [(step.outputs[0].name, raw)]
    if step.action == "keep_fp8":
        _check_codes(step, raw, piece.first)
        if piece.last:
            chunks.append((step.outputs[1].name, _kept_scales(step, reader)))
    elif is_kv_scale(step.weight.name):
        scale_values(step.weight, raw)  # what engines could not use is refused here
    return Produced(tuple(chunks))


def _quantize(
    step: Step,
    reader: TensorReader,
    policy: Policy,
    method: Method,
    buffers: Buffers,
    quantize: Quantize = quantize_linear,
) -> Produced:
    smallest = smallest_scale(policy.format)
    with opened(step, reader, buffers) as source:
        linear = quantize(*source, policy.group_size, method, buffers.empty, smallest_scale=smallest)
    return Produced(_arranged(step, policy, linear.packed, linear.scale), linear.sums)


def _quantize_calibrated(
    step: Step,
    reader: TensorReader,
    policy: Policy,
    method: Method,
    buffers: Buffers,
    calibration: Calibration,
    quantize: Quantize,
) -> Produced:
    """`weighted`; `search` where nothing is known of the input; and GPTQ's codes where they serve better."""
    columns = calibration.columns(step)
    if columns.h is None:
        made = _quantize(step, reader, policy, replace(method, name="search", stats=None), buffers, quantize)
        return replace(made, chosen=Chosen("search", columns.tokens, columns.fallback))
    weights = integer_weights(columns.h, policy.group_size)
    smallest = smallest_scale(policy.format)
    with opened(step, reader, buffers) as source:
        linear = quantize(
            *source, policy.group_size, method, buffers.empty, smallest_scale=smallest, weights=weights, h=columns.h
        )
    chosen = Chosen("weighted", columns.tokens)
    if calibration.solver is not None:
        linear, outcome = calibration.solver.improve(step, lambda: source_weight(step, reader), linear, columns.h)
        chosen = Chosen("gptq" if outcome.chosen == "gptq" else "weighted", columns.tokens, None, _figures(outcome))
    return Produced(_arranged(step, policy, linear.packed, linear.scale), linear.sums, chosen)


def _take_given(
    step: Step, reader: TensorReader, policy: Policy, method: Method, buffers: Buffers, given: Given
) -> Produced:
    """The engine's codes and scales; `search` for what its model does not have."""
    if not is_given(method, step):
        made = _quantize(step, reader, policy, own_method(method, step), buffers)
        return replace(made, chosen=chosen_instead(method, step))
    packed, scale = given.read(step)
    with opened(step, reader, buffers) as source:
        sums = measure(*source, packed, scale)
    if not isfinite(sums.sum_w2):  # the engine refuses such a source, and it may have run before it was damaged
        raise KizamiError("has weights that are not finite", code="non_finite", tensor=step.weight.name)
    return Produced(_arranged(step, policy, packed, scale), sums)


def _figures(outcome: Outcome) -> dict[str, float | int | str | None]:
    """Keys of the report's row: they may not be those of other things."""
    return {
        "gptq_reason": outcome.reason,
        "effective_tokens": round(outcome.effective_n, 3),
        "held_out_tokens": outcome.n_held_out,
        "loss_gptq": outcome.loss_gptq,
        "loss_weighted": outcome.loss_weighted,
    }


def _repack(step: Step, reader: TensorReader, policy: Policy) -> Produced:
    """The source's own codes and scales; groups that are divided share their scale."""
    encoding = step.encoding
    assert isinstance(encoding, PackedWeight)
    check_packed_shape(encoding, reader)
    packed = reader.read(encoding.packed).view("<i4").reshape(encoding.rows, -1)
    scale = bf16_scales(encoding, reader)
    _check_no_zero_scale(scale, encoding)
    scale = np.repeat(scale, encoding.group_size // policy.group_size, axis=1)
    zero = (packed.reshape(*scale.shape, -1) == ZERO_CODES).all(axis=2)
    negative = int((scale >> 15).sum())
    sums = ErrorSums(n=prod(step.shape), groups=scale.size, zero_groups=int(zero.sum()), negative_scales=negative)
    return Produced(_arranged(step, policy, packed, scale), sums)


def _arranged(
    step: Step, policy: Policy, packed: NDArray[np.int32], scale: NDArray[np.uint16]
) -> tuple[tuple[str, NDArray[np.generic]], ...]:
    rows, cols = step.shape
    arrays = arrange(policy.format, packed, scale, policy.group_size, (rows, cols), step.module)
    return tuple((spec.name, array) for spec, array in zip(step.outputs, arrays, strict=True))


def _dequantize(piece: Piece, reader: TensorReader, buffers: Buffers) -> Produced:
    step, encoding = piece.step, piece.step.encoding
    if not isinstance(encoding, ScaledWeight):
        with opened(step, reader, buffers) as source:
            values = source.rows[piece.first : piece.first + piece.count]
            return Produced(((step.outputs[0].name, to_bf16(values, piece.first, buffers.empty)),))
    k = step.weight.shape[1]
    raw = reader.read(step.weight, first=piece.first * k, nbytes=piece.count * k, empty=buffers.empty)
    codes = raw.reshape(piece.count, k)
    rows = dequantize_rows(codes, read_scales(encoding, reader), encoding.block, piece.first, buffers.empty)
    buffers.give(codes)
    return Produced(((step.outputs[0].name, rows),))


def _to_fp8(piece: Piece, reader: TensorReader, buffers: Buffers) -> Produced:
    step = piece.step
    with opened(step, reader, buffers) as source:
        values = as_float32(source.rows[piece.first : piece.first + piece.count])
        made = to_fp8_blocks(values, piece.first, buffers.empty)
    names = [spec.name for spec in step.outputs]
    return Produced(((names[0], made.codes), (names[1], made.scale)), made.sums)


def _check_no_zero_scale(scale: NDArray[np.uint16], encoding: PackedWeight) -> None:
    """What `verify` refuses in an output must not be copied into one; other scales were checked when they were read."""
    zero = np.argwhere((scale & 0x7FFF) == 0)
    if len(zero):
        i, j = (int(x) for x in zero[0])
        raise KizamiError(
            f"scale of group {j} of row {i} is zero ({len(zero)} in all): its weights are lost, and an output may "
            "not have one",
            code="bad_scale",
            file=encoding.scale.file,
            tensor=encoding.scale.name,
            hint="compare its SHA-256 with the publisher's; --scheme bf16 decodes it as it is, with zeros there",
        )


def _check_codes(step: Step, codes: NDArray[np.uint8], first: int) -> None:
    nan = np.flatnonzero((codes & 0x7F) == 0x7F)  # e4m3fn has two NaN codes and no infinity
    if len(nan):
        row, col = divmod(first + int(nan[0]), step.weight.shape[1])
        raise NonFiniteError(row, col, f"NaN code 0x{codes[nan[0]]:02X}")


def _kept_scales(step: Step, reader: TensorReader) -> NDArray[np.float32]:
    assert isinstance(step.encoding, ScaledWeight)
    scales = read_scales(step.encoding, reader)
    bad = np.argwhere(~np.isfinite(scales) | (scales < 0))
    if len(bad):
        (i, j), (b0, b1) = bad[0], step.encoding.block
        raise NonFiniteError(int(i) * b0, int(j) * b1, f"scale {scales[i, j]}")
    return scales


def non_finite(step: Step, e: NonFiniteError) -> KizamiError:
    return KizamiError(
        f"found {e.found} at row {e.row}, column {e.col}; expected finite weights and scales",
        code="non_finite",
        file=step.weight.file,
        tensor=step.weight.name,
        hint="the source is damaged there: compare its SHA-256 with the publisher's and download it again",
    )

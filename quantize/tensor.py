"""From source bytes to output bytes for one step, in pieces that bound the memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kizami.formats.dialects import ScaledWeight, decode_scales
from kizami.formats.errors import KizamiError
from kizami.formats.reader import TensorReader
from kizami.quantize.buffers import Buffers
from kizami.quantize.linear import NonFiniteError, dequantize_rows, quantize_linear
from kizami.quantize.metrics import ErrorSums
from kizami.quantize.plan import Step
from kizami.quantize.settings import Method

# Source bytes per piece of a tensor that needs no look at the whole: a core is busy with it for 5 ms.
PIECE_BYTES = 8 << 20
SOURCE_VIEWS = {"F8_E4M3": np.uint8, "BF16": np.uint16, "F16": np.float16, "F32": np.float32}


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
        rows = self.step.weight.shape[0] if self.step.action in ("quantize", "dequantize") else self.step.weight.nbytes
        return self.step.weight.nbytes * self.count // rows if rows else 0


@dataclass(frozen=True, slots=True)
class Produced:
    """The bytes to append to each output tensor, and the error sums once the tensor is whole."""

    chunks: tuple[tuple[str, NDArray[np.generic]], ...]
    sums: ErrorSums | None = None


def pieces(step: Step) -> Iterator[Piece]:
    """quantize is one piece: its largest weights decide on the whole tensor. The rest is cut."""
    if step.action == "quantize":
        yield Piece(step, 0, step.weight.shape[0], True)
        return
    total, unit = (step.weight.nbytes, 1) if step.action in ("copy", "keep_fp8") else step.weight.shape
    size = max(1, PIECE_BYTES // unit)
    starts = range(0, total, size) if total else range(1)
    for first in starts:
        yield Piece(step, first, min(size, total - first), first + size >= total)


def produce(piece: Piece, reader: TensorReader, method: Method, group_size: int, buffers: Buffers) -> Produced:
    """Reads the piece, computes it, and gives the bytes in output order, in arrays that `buffers` takes back.

    Raises KizamiError naming file and tensor.
    """
    step = piece.step
    if step.action == "quantize":
        return _quantize(step, reader, method, group_size, buffers)
    if step.action == "dequantize":
        return _dequantize(piece, reader, buffers)
    raw = reader.read(step.weight, first=piece.first, nbytes=piece.count, empty=buffers.empty)
    chunks: list[tuple[str, NDArray[np.generic]]] = [(step.outputs[0].name, raw)]
    if step.action == "keep_fp8":
        _check_codes(step, raw, piece.first)
        if piece.last:
            chunks.append((step.outputs[1].name, _kept_scales(step, reader)))
    return Produced(tuple(chunks))


def read_scales(scaled: ScaledWeight, reader: TensorReader) -> NDArray[np.float32]:
    """The scale grid [ceil(N/b0), ceil(K/b1)] in float32."""
    return decode_scales(reader.read(scaled.scale), scaled)


class SourceRows:
    """A 2-D source weight in its own dtype (FP8 and BF16 as raw uint8 and uint16), read as it is asked for. Each run of
    rows lies in the memory of the run before it."""

    def __init__(self, step: Step, reader: TensorReader, buffers: Buffers) -> None:
        self.shape = step.weight.shape
        self.dtype = np.dtype(SOURCE_VIEWS[step.weight.dtype])
        self._step, self._reader, self._buffers = step, reader, buffers
        self._memory: NDArray[np.uint8] | None = None
        self._held: tuple[slice, NDArray[Any]] | None = None  # a tensor of one run is read once

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        if self._held is None or self._held[0] != rows:
            width = self.shape[1] * self.dtype.itemsize
            first, nbytes = rows.start * width, (rows.stop - rows.start) * width
            raw = self._reader.read(self._step.weight, first=first, nbytes=nbytes, empty=self._empty)
            self._held = rows, raw.view(self.dtype).reshape(rows.stop - rows.start, self.shape[1])
        return self._held[1]

    def _empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        if self._memory is None or self._memory.nbytes < shape[0]:
            self.close()
            self._memory = self._buffers.empty(shape, dtype)
        return self._memory[: shape[0]]

    def close(self) -> None:
        """Gives the memory back; the rows must not be used any more."""
        if self._memory is not None:
            self._buffers.give(self._memory)
        self._memory = self._held = None


def _quantize(step: Step, reader: TensorReader, method: Method, group_size: int, buffers: Buffers) -> Produced:
    scale = None if step.scaled is None else read_scales(step.scaled, reader)
    block = None if step.scaled is None else step.scaled.block
    weight = SourceRows(step, reader, buffers)
    try:
        linear = quantize_linear(weight, scale, block, group_size, method, buffers.empty)
    except NonFiniteError as e:
        raise non_finite(step, e) from None
    finally:
        weight.close()
    packed, shape, scales = step.outputs
    chunks = (
        (packed.name, linear.packed),
        (shape.name, np.array(step.weight.shape, dtype="<i4")),
        (scales.name, linear.scale),
    )
    return Produced(chunks, linear.sums)


def _dequantize(piece: Piece, reader: TensorReader, buffers: Buffers) -> Produced:
    step = piece.step
    assert step.scaled is not None
    k = step.weight.shape[1]
    raw = reader.read(step.weight, first=piece.first * k, nbytes=piece.count * k, empty=buffers.empty)
    codes = raw.reshape(piece.count, k)
    scales = read_scales(step.scaled, reader)
    try:
        rows = dequantize_rows(codes, scales, step.scaled.block, piece.first, buffers.empty)
    except NonFiniteError as e:
        raise non_finite(step, e) from None
    buffers.give(codes)
    return Produced(((step.outputs[0].name, rows),))


def _check_codes(step: Step, codes: NDArray[np.uint8], first: int) -> None:
    nan = np.flatnonzero((codes & 0x7F) == 0x7F)  # e4m3fn has two NaN codes and no infinity
    if len(nan):
        row, col = divmod(first + int(nan[0]), step.weight.shape[1])
        raise non_finite(step, NonFiniteError(row, col, f"NaN code 0x{codes[nan[0]]:02X}"))


def _kept_scales(step: Step, reader: TensorReader) -> NDArray[np.float32]:
    assert step.scaled is not None
    scales = read_scales(step.scaled, reader)
    bad = np.argwhere(~np.isfinite(scales) | (scales < 0))
    if len(bad):
        (i, j), (b0, b1) = bad[0], step.scaled.block
        raise non_finite(step, NonFiniteError(int(i) * b0, int(j) * b1, f"scale {scales[i, j]}"))
    return scales


def non_finite(step: Step, e: NonFiniteError) -> KizamiError:
    return KizamiError(
        f"found {e.found} at row {e.row}, column {e.col}; expected finite weights and scales",
        code="non_finite",
        file=step.weight.file,
        tensor=step.weight.name,
        hint="the source is damaged there: compare its SHA-256 with the publisher's and download it again",
    )

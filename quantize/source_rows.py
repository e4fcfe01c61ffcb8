"""A step's source weight as quantize_linear takes it: rows that are read as they are asked for, and block scales."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kizami.formats.dialects import ScaledWeight, decode_scales
from kizami.formats.packed_source import PackedWeight, check_weight_shape
from kizami.formats.reader import TensorReader
from kizami.quantize.buffers import Buffers
from kizami.quantize.linear import Block, Rows
from kizami.quantize.plan import Step
from kizami.quantize.unpack import PackedRows

SOURCE_VIEWS = {"F8_E4M3": np.uint8, "BF16": np.uint16, "F16": np.float16, "F32": np.float32}


class Source(NamedTuple):
    """grid, block: scales [ceil(N/b0), ceil(K/b1)] of an FP8 weight, else None."""

    rows: Rows
    grid: NDArray[np.float32] | None
    block: Block | None


@contextmanager
def opened(step: Step, reader: TensorReader, buffers: Buffers) -> Iterator[Source]:
    """The rows' memory goes back at the end."""
    grid, block = None, None
    rows: SourceRows | PackedRows
    if isinstance(step.encoding, ScaledWeight):
        grid, block = read_scales(step.encoding, reader), step.encoding.block
    if isinstance(step.encoding, PackedWeight):
        check_packed_shape(step.encoding, reader)
        rows = PackedRows(step.encoding, reader, buffers)
    else:
        rows = SourceRows(step, reader, buffers)
    try:
        yield Source(rows, grid, block)
    finally:
        rows.close()


def read_scales(scaled: ScaledWeight, reader: TensorReader) -> NDArray[np.float32]:
    """The scale grid [ceil(N/b0), ceil(K/b1)] in float32."""
    return decode_scales(reader.read(scaled.scale), scaled)


def check_packed_shape(encoding: PackedWeight, reader: TensorReader) -> None:
    """KizamiError if weight_shape says something else than the other tensors."""
    if encoding.shape_tensor is not None:
        dtype = {"I32": "<i4", "I64": "<i8"}[encoding.shape_tensor.dtype]
        check_weight_shape(reader.read(encoding.shape_tensor).view(dtype).tolist(), encoding)


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

"""INT4 weights of a source as float32 rows, and float32 rows as BF16."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.formats.errors import KizamiError
from kizami.formats.packed_source import PackedWeight
from kizami.formats.reader import TensorReader
from kizami.formats.tensors import TensorInfo
from kizami.quantize.buffers import Buffers
from kizami.quantize.fp8 import first_bad
from kizami.quantize.kernels import unpack
from kizami.quantize.kernels.survey import BF16_OVERFLOW
from kizami.quantize.linear import Empty, NonFiniteError

# Below it q * scale stays below 2^127 for all 16 codes: what quantize_linear and to_fp8_blocks take.
SCALE_TOO_LARGE = 2.0**124
_OVERFLOW_BITS = int(np.float32(BF16_OVERFLOW).view(np.uint32))


class PackedRows:
    """An INT4 weight [N, K] in float32, read as it is asked for: the `Rows` of quantize_linear.

    q * scale is exact for scales in BF16 and F16 (4 bits times 8 or 11); in F32 it is rounded once. Each run of rows
    lies in the memory of the run before it. A scale that is not finite or too large is a NonFiniteError.
    """

    def __init__(self, weight: PackedWeight, reader: TensorReader, buffers: Buffers | None = None) -> None:
        self.shape: tuple[int, ...] = (weight.rows, weight.cols)
        self.dtype: np.dtype[Any] = np.dtype(np.float32)
        self._weight, self._reader, self._buffers = weight, reader, buffers or Buffers(0)
        self._memory: NDArray[np.float32] | None = None
        self._held: tuple[slice, NDArray[np.float32]] | None = None  # a tensor of one run is read once

    def __getitem__(self, rows: slice, /) -> NDArray[np.float32]:
        if self._held is None or self._held[0] != rows:
            words, scale = self.packed(rows)
            values = self._values(len(words))
            unpack.unpack_rows(words, scale, values)
            self._held = rows, values
        return self._held[1]

    def packed(self, rows: slice) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """The same rows as they are stored: words [n, K/8] and scales [n, K/g], widened to float32 and checked."""
        weight, count = self._weight, rows.stop - rows.start
        words = self._read(weight.packed, rows).view("<u4").reshape(count, -1)
        scale = _widened(self._read(weight.scale, rows), weight.scale.dtype).reshape(count, weight.grid[1])
        _check_scales(scale, weight, rows.start)
        return words, scale

    def close(self) -> None:
        """Gives the memory back; the rows must not be used any more."""
        if self._memory is not None:
            self._buffers.give(self._memory)
        self._memory = self._held = None

    def _read(self, info: TensorInfo, rows: slice) -> NDArray[np.uint8]:
        width = info.nbytes // info.shape[0]
        read: NDArray[np.uint8] = self._reader.read(
            info, first=rows.start * width, nbytes=(rows.stop - rows.start) * width
        )
        return read

    def _values(self, count: int) -> NDArray[np.float32]:
        if self._memory is None or len(self._memory) < count:
            self.close()
            self._memory = self._buffers.empty((count, self.shape[1]), np.float32)
        return self._memory[:count]


def bf16_scales(weight: PackedWeight, reader: TensorReader) -> NDArray[np.uint16]:
    """The group scales [N, K/g] as BF16 bits, for a repack that keeps every code. NonFiniteError as in PackedRows.

    KizamiError "inexact_scale" for a scale in F16 or F32 that BF16 cannot hold: the weights would not be the source's.
    """
    scale = _widened(reader.read(weight.scale), weight.scale.dtype).reshape(weight.grid)
    _check_scales(scale, weight, 0)
    bits = scale.view(np.uint32)
    inexact = np.argwhere(bits & np.uint32(0xFFFF))
    if len(inexact):
        i, j = (int(x) for x in inexact[0])
        raise KizamiError(
            f"scale {scale[i, j]:.9g} of group {j} of row {i} ({weight.scale.dtype}) is none that BF16 can hold: kept "
            "codes would stand for other weights",
            code="inexact_scale",
            file=weight.scale.file,
            tensor=weight.scale.name,
            hint="decode the weights with --scheme bf16 instead",
        )
    return (bits >> np.uint32(16)).astype(np.uint16)


def _check_scales(scale: NDArray[np.float32], weight: PackedWeight, first_row: int) -> None:
    bad = np.argwhere(~(np.abs(scale) < SCALE_TOO_LARGE))
    if len(bad):
        i, j = (int(x) for x in bad[0])
        raise NonFiniteError(first_row + i, j * weight.group_size, f"group scale {scale[i, j]:g}")


def as_float32(raw: NDArray[Any]) -> NDArray[np.float32]:
    """BF16 bits (uint16), float16 or float32 as float32: every value is exact."""
    if raw.dtype == np.uint16:
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(np.float32, copy=False)


def to_bf16(values: NDArray[np.float32], first_row: int = 0, empty: Empty = np.empty) -> NDArray[np.uint16]:
    """BF16 bits [n, K] of rows first_row.. of a tensor, ties to even. `empty` (shape, dtype) provides their memory.
    Raises NonFiniteError, also for a weight that would become infinite; its row counts from the tensor's first."""
    assert values.dtype == np.float32, values.dtype
    values = np.require(values, requirements=["C", "W"])
    out = empty(values.shape, np.uint16)
    if not unpack.round_rows(values.reshape(-1).view(np.uint32), _OVERFLOW_BITS, out.reshape(-1)):
        raise first_bad(values, first_row, BF16_OVERFLOW)
    return out


def _widened(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    return as_float32(raw.view({"BF16": "<u2", "F16": "<f2", "F32": "<f4"}[dtype]))

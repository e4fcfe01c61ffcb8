"""A whole weight as float32, from a source or an output, in whatever form it lies there."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.int4_layout import Format, layout_specs
from kizami.formats.reader import TensorReader
from kizami.quantize.arrange import canonical
from kizami.quantize.kernels import survey, unpack
from kizami.quantize.linear import Block, Rows
from kizami.quantize.unpack import as_float32

BAND_WEIGHTS = 1 << 20  # as many are widened at a time; float64 copies of them have 8 MB
LAYOUT_VIEWS = {"I32": "<i4", "I8": "i1", "F16": "<f2", "F32": "<f4", "BF16": "<u2"}

F32 = NDArray[np.float32]


def bands(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """First and last row of runs of about BAND_WEIGHTS weights."""
    height = max(1, BAND_WEIGHTS // max(1, columns))
    return ((first, min(first + height, rows)) for first in range(0, rows, height))


def float32_weight(weight: Rows, grid: F32 | None, block: Block | None) -> F32:
    """float32 [N, K] of what quantize_linear takes, in memory of its own. Exact, but for the one rounding of e4m3 * S.
    NaN and infinity stay what they are: whoever quantises has looked for them."""
    rows, columns = weight.shape
    values = np.empty((rows, columns), np.float32)
    for first, last in bands(rows, columns):
        raw, to = weight[first:last], values[first:last]
        if grid is not None and block is not None:
            survey.decode_rows(np.require(raw, requirements=["C", "W"]), grid, int(block[0]), int(block[1]), first, to)
        else:
            np.copyto(to, as_float32(raw))
    return values


def int4_weight(packed: NDArray[np.int32], scale: NDArray[np.uint16], out: F32 | None = None) -> F32:
    """q * s in float32 [N, K], exact: 4 bits times 8. packed int32 [N, K/8], scale BF16 bits [N, K/g]."""
    out = np.empty((packed.shape[0], packed.shape[1] * 8), np.float32) if out is None else out
    words = np.require(packed, requirements=["C", "W"]).view(np.uint32)
    unpack.unpack_rows(words, np.require(as_float32(scale), requirements=["C", "W"]), out)
    return out


def packed_of(
    format: Format, module: str, shape: tuple[int, int], group_size: int, out: Checkpoint, reader: TensorReader
) -> tuple[NDArray[np.int32], NDArray[np.uint16]]:
    """packed and scale of an INT4 module of an output, whatever its layout. KizamiError "bad_layout" as `canonical`."""
    arrays: list[NDArray[Any]] = []
    for spec in layout_specs(format, module, *shape, group_size):
        info = out.tensors[spec.name]
        arrays.append(reader.read(info).view(LAYOUT_VIEWS[info.dtype]).reshape(info.shape))
    return canonical(format, tuple(arrays), group_size, shape, module)

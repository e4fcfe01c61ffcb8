"""One packed weight looked at closely: its values before and after, its codes and its scales, counted into bins."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.dialects import ScaledWeight, find_encoded_weights
from kizami.formats.errors import KizamiError
from kizami.formats.families import find_family
from kizami.formats.fused_experts import split_fused_experts
from kizami.formats.packed_source import PackedWeight
from kizami.formats.reader import TensorReader
from kizami.quantize.buffers import Buffers
from kizami.quantize.decode import float32_weight
from kizami.quantize.plan import Step
from kizami.quantize.source_rows import opened
from kizami.quantize.unpack import as_float32, bf16_scales

BINS = 81
Counts = NDArray[np.int64]
F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class WeightFigures:
    """edges: float64 [BINS + 1], of before and after alike. before: None without the source. codes: weights with each
    of the codes -8 to 7. scale_edges: of log2 |scale|. zero_groups: groups whose codes are all 0."""

    name: str
    shape: tuple[int, int]
    edges: F64
    before: Counts | None
    after: Counts
    codes: Counts
    scale_edges: F64
    scales: Counts
    groups: int
    zero_groups: int


def weight_figures(out: Checkpoint, name: str, source: Checkpoint | None = None) -> WeightFigures:
    """Of the module `name`, packed in `out`, and what it was in `source`. KizamiError "not_packed" where it is not
    pack-quantized INT4, "missing_tensor" where the source has none of that name; those of reading."""
    after, encoding, scale = _packed(out, name)
    before = None if source is None else _weight(source, name)
    reach = max(float(np.abs(values).max()) for values in (after, before) if values is not None) or 1.0
    edges = np.linspace(-reach, reach, BINS + 1)
    codes = _codes(after, scale, encoding.group_size)
    magnitudes = np.log2(np.abs(scale))
    scale_edges = np.linspace(float(magnitudes.min()) - 0.5, float(magnitudes.max()) + 0.5, BINS // 2 + 1)
    grouped = codes.reshape(scale.shape[0], scale.shape[1], -1)
    return WeightFigures(
        name=name,
        shape=(after.shape[0], after.shape[1]),
        edges=edges,
        before=None if before is None else np.histogram(before, edges)[0],
        after=np.histogram(after, edges)[0],
        codes=np.bincount(codes.ravel() + 8, minlength=16),
        scale_edges=scale_edges,
        scales=np.histogram(magnitudes, scale_edges)[0],
        groups=scale.size,
        zero_groups=int((grouped == 0).all(axis=2).sum()),
    )


def _packed(out: Checkpoint, name: str) -> tuple[NDArray[np.float32], PackedWeight, NDArray[np.float32]]:
    """Values, encoding, and scales [N, groups]."""
    encoding = find_encoded_weights(out.config, out.tensors).packed.get(name)
    if encoding is None:
        raise KizamiError("is not packed INT4", code="not_packed", tensor=name)
    with TensorReader(out) as reader:
        values = _decode(out, reader, encoding.packed.name, name, encoding)
        return values, encoding, as_float32(bf16_scales(encoding, reader))


def _weight(source: Checkpoint, name: str) -> NDArray[np.float32]:
    tensors, _ = split_fused_experts(source.config, source.tensors)
    dialect = find_encoded_weights(source.config, tensors)
    encoding = dialect.weights.get(name) or dialect.packed.get(name)
    stored = encoding.packed.name if isinstance(encoding, PackedWeight) else f"{name}.weight"
    if stored not in tensors:
        raise KizamiError("is not in the source", code="missing_tensor", tensor=stored)
    whole = replace(source, tensors=tensors)
    with TensorReader(whole) as reader:
        return _decode(whole, reader, stored, name, encoding)


def _decode(
    checkpoint: Checkpoint, reader: TensorReader, stored: str, name: str, encoding: ScaledWeight | PackedWeight | None
) -> NDArray[np.float32]:
    family, _ = find_family(checkpoint.config, checkpoint.tensors)
    step = Step(name, "copy", "", family.place(stored), checkpoint.tensors[stored], encoding, ())
    with opened(step, reader, Buffers(0)) as source:
        return float32_weight(source.rows, source.grid, source.block)


def _codes(values: NDArray[np.float32], scale: NDArray[np.float32], group_size: int) -> NDArray[np.int64]:
    """Of values that are code times scale."""
    wide = np.repeat(scale, group_size, axis=1)[:, : values.shape[1]]
    codes: NDArray[np.int64] = np.rint(values / wide).astype(np.int64)
    return codes

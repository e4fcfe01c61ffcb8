"""What an engine is given: a config and the tensors that lie beside it, on disk or planned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.reader import TensorReader
from kizami.formats.tensors import TensorInfo, TensorSpec

Described = TensorSpec | TensorInfo

KV_SCALE_LEAVES = frozenset({"k_scale", "v_scale", "kv_scale", "output_scale", "k_output_scale", "v_output_scale"})
MAX_KV_SCALES = 2000  # K and V of the largest model: 200
_MAX_SCALE_BYTES = 4096  # one per head at most
_AS_FLOAT = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}


@dataclass(frozen=True, slots=True)
class Served:
    """`config` is config.json. No weight is needed.

    files: names of the side files. has_negative_scales: whether INT4 scales may be negative, None if nobody knows.
    mtp_dropped: whether the next-token layer was left out on purpose. kv_scales: values of KV scale tensors, as far as
    they were read.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Described]
    files: tuple[str, ...] = ()
    has_negative_scales: bool | None = None
    mtp_dropped: bool | None = None
    kv_scales: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @staticmethod
    def of(
        checkpoint: Checkpoint,
        *,
        files: Sequence[str] = (),
        has_negative_scales: bool | None = None,
        mtp_dropped: bool | None = None,
    ) -> "Served":
        """A checkpoint on disk. Only KV scales are read, a few bytes each."""
        return Served(
            checkpoint.config,
            checkpoint.tensors,
            tuple(files),
            has_negative_scales,
            mtp_dropped,
            _kv_scales(checkpoint),
        )


def _kv_scales(checkpoint: Checkpoint) -> dict[str, tuple[float, ...]]:
    wanted = [
        info
        for name, info in checkpoint.tensors.items()
        if name.rpartition(".")[2] in KV_SCALE_LEAVES and info.nbytes <= _MAX_SCALE_BYTES
    ]
    values: dict[str, tuple[float, ...]] = {}
    with TensorReader(checkpoint) as reader:
        for info in wanted[:MAX_KV_SCALES]:
            raw = reader.read(info)
            if info.dtype == "BF16":
                numbers = (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
            elif info.dtype in _AS_FLOAT:
                numbers = raw.view(_AS_FLOAT[info.dtype])
            else:
                continue
            values[info.name] = tuple(float(number) for number in numbers)
    return values

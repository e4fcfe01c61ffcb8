"""Weights of a checkpoint as torch tensors, in bands of rows: what is in memory beside the result is one band.

FP8 and INT4 weights are decoded in float32 and rounded once to BF16, as `convert --rest bf16` and the engines have
them; tensors that are stored plainly keep their value. A number that is not finite is refused by its tensor's name.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.dialects import ScaledWeight, decode_scales, find_encoded_weights
from kizami.formats.errors import KizamiError
from kizami.formats.fused_experts import split_fused_experts
from kizami.formats.packed_source import PackedWeight, check_weight_shape
from kizami.formats.reader import TensorReader
from kizami.formats.tensors import TensorInfo

BAND = 1 << 21  # weights that are decoded at once: 20 MB of temporaries
_PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# |e4m3| <= 448: below it no product of code and scale rounds to infinity in BF16
_SAFE_SCALE = float(torch.finfo(torch.bfloat16).max) / 512
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()
_NIBBLES = np.arange(0, 32, 4, dtype=np.uint32)


class Weights:
    """Reads the weights of a checkpoint by the names that they have on disk. A context manager that closes its files.

    KizamiError: "missing_tensor", "non_finite", "unsupported_dtype", and those of TensorReader and of the dialects.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        tensors, _ = split_fused_experts(checkpoint.config, checkpoint.tensors)
        self._checkpoint = replace(checkpoint, tensors=tensors)
        self._dialect = find_encoded_weights(checkpoint.config, tensors)
        self._reader = TensorReader(self._checkpoint)

    def __enter__(self) -> "Weights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()

    def check_unchanged(self) -> None:
        """KizamiError "source_changed" if a file is not the one that was opened."""
        self._checkpoint.check_unchanged()

    @property
    def names(self) -> Iterator[str]:
        """Of all tensors, those of experts one by one."""
        return iter(self._checkpoint.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the values of `name` (`X.weight` also where the file has `X.weight_packed`)."""
        source = self._find(name)
        return (source.rows, source.cols) if isinstance(source, PackedWeight) else _info(source).shape

    def read(
        self,
        name: str,
        *,
        rows: slice | None = None,
        cols: slice | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """The tensor, or a rectangle of a matrix, in `dtype` on `device`."""
        shape = self.shape(name)
        if len(shape) != 2:
            assert (rows, cols) == (None, None), (name, shape)
            info = _info(self._find(name))
            return self._plain(info, 0, info.nbytes).reshape(shape).to(device, dtype)
        rows, cols = rows or slice(0, shape[0]), cols or slice(0, shape[1])
        out = torch.empty((rows.stop - rows.start, cols.stop - cols.start), dtype=dtype, device=device)
        for first, last in _bands(rows, shape[1]):
            out[first - rows.start : last - rows.start] = self._band(name, first, last, out.device)[:, cols]
        return out

    def gather(self, name: str, ids: NDArray[np.int64]) -> torch.Tensor:
        """float32 [len(ids), K]: rows of a matrix, each of those that occur read once."""
        unique, inverse = np.unique(ids, return_inverse=True)
        out = torch.empty((len(unique), self.shape(name)[1]))
        for begin, end in _runs(unique):
            first = int(unique[begin])
            out[begin:end] = self.read(name, rows=slice(first, first + end - begin))
        return out[torch.from_numpy(inverse)]

    def _find(self, name: str) -> TensorInfo | ScaledWeight | PackedWeight:
        module = name.removesuffix(".weight")
        if module != name:
            if (scaled := self._dialect.weights.get(module)) is not None:
                return scaled
            if (packed := self._dialect.packed.get(module)) is not None:
                return packed
        if (info := self._checkpoint.tensors.get(name)) is not None:
            return info
        raise KizamiError(
            "is in no file, and the model's class has it",
            code="missing_tensor",
            tensor=name,
            hint="the checkpoint is incomplete, or its config.json is another model's",
        )

    def _band(self, name: str, first: int, last: int, device: torch.device) -> torch.Tensor:
        """Rows first to last, BF16 or as they are stored."""
        match source := self._find(name):
            case ScaledWeight():
                return self._scaled(source, first, last, device)
            case PackedWeight():
                return self._packed(source, first, last)
            case _:
                width = source.nbytes // source.shape[0]
                return self._plain(source, first * width, (last - first) * width).reshape(last - first, -1)

    def _plain(self, info: TensorInfo, first: int, nbytes: int) -> torch.Tensor:
        if info.dtype not in _PLAIN:
            raise KizamiError(
                f"has dtype {info.dtype}, expected one of {', '.join(_PLAIN)}",
                code="unsupported_dtype",
                file=info.file,
                tensor=info.name,
            )
        values = torch.from_numpy(self._reader.read(info, first=first, nbytes=nbytes)).view(_PLAIN[info.dtype])
        return _checked(values, info)

    def _scaled(self, weight: ScaledWeight, first: int, last: int, device: torch.device) -> torch.Tensor:
        info, cols = weight.weight, weight.weight.shape[1]
        codes = self._reader.read(info, first=first * cols, nbytes=(last - first) * cols).reshape(-1, cols)
        scale = decode_scales(self._reader.read(weight.scale), weight)
        if (scale < 0).any():
            raise KizamiError(
                f"has a block scale of {scale.min():g}, expected none below 0",
                code="non_finite",
                file=weight.scale.file,
                tensor=weight.scale.name,
                hint="download the file again, or take the checkpoint from its publisher",
            )
        safe = bool((np.abs(scale) <= _SAFE_SCALE).all()) and not ((codes & 0x7F) == 0x7F).any()
        rounded = decode(codes, torch.from_numpy(scale).to(device), weight.block, first)
        return rounded if safe else _checked(rounded, info)

    def _packed(self, weight: PackedWeight, first: int, last: int) -> torch.Tensor:
        if first == 0 and weight.shape_tensor is not None:
            dtype = "<i4" if weight.shape_tensor.dtype == "I32" else "<i8"
            check_weight_shape(self._reader.read(weight.shape_tensor).view(dtype).tolist(), weight)
        count, width = last - first, weight.cols // 2
        words = self._reader.read(weight.packed, first=first * width, nbytes=count * width).view("<u4")
        codes = ((words.reshape(count, -1, 1) >> _NIBBLES) & 15).astype(np.float32) - 8
        row = weight.scale.nbytes // weight.rows
        scale = self._plain(weight.scale, first * row, count * row).to(torch.float32).reshape(count, -1, 1)
        values = torch.from_numpy(codes).reshape(count, -1, weight.group_size) * scale
        return _checked(values.reshape(count, -1).to(torch.bfloat16), weight.packed)


def decode(codes: NDArray[np.uint8], scale: torch.Tensor, block: tuple[int, int], first: int) -> torch.Tensor:
    """BF16 [n, K] on the device of `scale`, the whole weight's grid: e4m3 codes of its rows from `first` on."""
    (count, cols), (height, width) = codes.shape, block
    if scale.device.type == "cpu":  # four times as fast as torch's conversion
        values = torch.from_numpy(np.take(_E4M3, codes, mode="clip"))
    else:
        values = torch.from_numpy(codes).to(scale.device).view(torch.float8_e4m3fn).to(torch.float32)
    top, bottom = first // height, -(-(first + count) // height)
    wide = scale[top:bottom].repeat_interleave(width, dim=1)[:, :cols]
    if height == 1:
        values *= wide
    for row in range(top, bottom) if height > 1 else ():
        values[max(row * height - first, 0) : (row + 1) * height - first] *= wide[row - top]
    return values.to(torch.bfloat16)


def _info(source: TensorInfo | ScaledWeight | PackedWeight) -> TensorInfo:
    match source:
        case ScaledWeight():
            return source.weight
        case PackedWeight():
            return source.packed
    return source


def _checked(values: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    bad = int(values.numel() - values.isfinite().sum()) if values.numel() else 0
    if bad:
        raise KizamiError(
            f"has {bad} numbers that are not finite (NaN, infinity, or beyond BF16), expected none",
            code="non_finite",
            file=info.file,
            tensor=info.name,
            hint="download the file again, or take the checkpoint from its publisher",
        )
    return values


def _bands(rows: slice, cols: int) -> Iterator[tuple[int, int]]:
    step = max(BAND // max(cols, 1), 1)
    for first in range(rows.start, rows.stop, step):
        yield first, min(first + step, rows.stop)


def _runs(ids: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers in ascending `ids`, as ranges of positions."""
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    yield from zip([0, *cuts.tolist()], [*cuts.tolist(), len(ids)], strict=True)

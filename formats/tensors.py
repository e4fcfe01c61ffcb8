"""Tensor descriptions: what a safetensors header says about one tensor."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

# Bits per element of every dtype word that safetensors 0.8 knows (safetensors/src/tensor.rs, `Dtype::bitsize`).
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
    "U64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@lru_cache(maxsize=1 << 12)  # a checkpoint has few shapes, and each is asked for a hundred thousand times
def tensor_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor; `dtype` must be a key of DTYPE_BITS and the bit count a multiple of 8."""
    bits = DTYPE_BITS[dtype] * prod(shape)
    assert bits % 8 == 0, (dtype, shape)
    return bits // 8


@lru_cache(maxsize=1 << 12)
def one_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The first of all equal shapes: a sixth of the memory of a large plan would be their copies."""
    return shape


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor found in a file: `begin` and `end` are absolute byte offsets in `file` (a name inside the folder)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, self.shape)

"""Float32 to OCP E4M3 (e4m3fn) bytes and back, the same on every device and in every build of PyTorch.

Three things differ between PyTorch builds and kernels and are fixed here:
- above 448: PyTorch 2.13 on CPU saturates, others give NaN (e4m3fn has no infinity). Here: clamped to +-448 first,
  infinity included, as CUDA's `__NV_SATFINITE` conversion does, which vLLM's kernels use.
- NaN: stays NaN, always as the code 0x7F. Its sign and payload are lost; 0xFF, the other NaN, is never written.
- division: by a tensor, never by a Python number. PyTorch on CUDA multiplies by the inverse of a scalar divisor
  (aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu), which is another number in the last bit.
"""

import torch

LARGEST = 448.0  # of e4m3fn: OCP 8-bit Floating Point Specification 1.0, section 5
NAN = 0x7F


def encode(values: torch.Tensor) -> torch.Tensor:
    """uint8 codes of float32 values, the shape kept: to nearest, ties to even, -0 and subnormals included."""
    codes = values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill_(values.isnan(), NAN)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of uint8 codes, exact; 0x7F and 0xFF are NaN."""
    return codes.view(torch.float8_e4m3fn).float()


def divide(values: torch.Tensor, by: float) -> torch.Tensor:
    """values / by, rounded once on every device."""
    return values / torch.full_like(values, by)


def power_of_two_above(values: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2(values)) for float32 normal numbers, from the exponent: no logarithm that may round across one."""
    mantissa, exponent = torch.frexp(values)  # in [0.5, 1)
    return torch.ldexp(torch.ones_like(values), exponent - (mantissa == 0.5).int())

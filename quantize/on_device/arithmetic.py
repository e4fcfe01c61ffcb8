"""float32 steps that give the same bits on every device.

Each is one eager operation of IEEE arithmetic, rounded once: nothing is fused, so nothing becomes a fused multiply-add;
there is no matrix product, hence no TF32; PyTorch's kernels do not flush subnormal numbers. Division is by a tensor,
never by a Python number: PyTorch on CUDA multiplies by the inverse of a scalar divisor
(aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu), which is another number in the last bit. Rounding to BF16 is done on
the bits. A sum is one of integers or exact in float64, or it is added up in a written order.
"""

import torch

from kizami.quantize.kernels.lanes import CHUNK
from kizami.quantize.kernels.vectors import SUMS

SIGN = -(1 << 31)
UPPER_HALF = -(1 << 16)


def divided(x: torch.Tensor, by: float) -> torch.Tensor:
    """x / by, rounded once on every device."""
    return x / torch.full_like(x, by)


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """float32 rounded to the nearest BF16 value, ties to even (finite input, or infinity)."""
    bits = x.view(torch.int32)
    low = (bits >> 16) & 1
    return ((bits + 0x7FFF + low) & UPPER_HALF).view(torch.float32)


def bf16_bits(x: torch.Tensor) -> torch.Tensor:
    """int16 bits of float32 that BF16 holds."""
    return (x.view(torch.int32) >> 16).to(torch.int16)


def folded(x: torch.Tensor) -> torch.Tensor:
    """float64 [rows, K] to [rows, K / 32, SUMS], as Lanes.fold adds each chunk: the halves, then the halves of that."""
    quarters = x.view(x.shape[0], -1, CHUNK // SUMS, SUMS)
    return (quarters[:, :, 0] + quarters[:, :, 2]) + (quarters[:, :, 1] + quarters[:, :, 3])


def added_up(lanes: torch.Tensor) -> torch.Tensor:
    """float64 [rows, chunks, n] to [rows, n]: chunk after chunk, as the kernels go through a row. Rows are worked on
    at a time; torch.sum would choose its own order."""
    first, *others = lanes.unbind(1)
    total = first.clone()
    for chunk in others:
        total += chunk
    return total

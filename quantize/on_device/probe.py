"""A device is tried before it is trusted: a small weight is packed on it and on the CPU, and every bit is compared.

Drivers, builds of PyTorch and GPUs that nobody has run this on are refused before anything is written, if they round
otherwise.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from kizami.formats.errors import KizamiError
from kizami.quantize.calibrated.column_weights import integer_weights
from kizami.quantize.linear import PackedLinear, quantize_linear
from kizami.quantize.on_device.linear import quantize_on
from kizami.quantize.on_device.transfer import Lane
from kizami.quantize.settings import CALIBRATED, Method

ROWS, COLUMNS, BLOCK = 96, 512, (32, 128)

_tried: set[tuple[Any, ...]] = set()


def try_device(device: torch.device, method: Method, group_size: int) -> None:
    """Once per process and setting. KizamiError "bad_device"."""
    key = device, method, group_size
    if key in _tried:
        return
    try:
        lane = Lane(device)
        for case in _cases():
            h = np.random.default_rng(2).standard_normal(COLUMNS) ** 2
            weighted = method.name in CALIBRATED
            more: dict[str, Any] = {"weights": integer_weights(h, group_size), "h": h} if weighted else {}
            wanted = quantize_linear(*case, group_size, method, **more)
            found = quantize_on(lane, *case, group_size, method, band=ROWS // 2, **more)
            if not _is_same(found, wanted):
                raise KizamiError(
                    f"{device} does not round as this CPU does: a weight packed on both differs",
                    code="bad_device",
                    hint="use --device cpu, and report it with what kizami env says",
                )
    except RuntimeError as e:  # of torch: no kernel for this GPU, no memory, a driver that is too old
        raise KizamiError(
            f"{device} cannot be used: {str(e).splitlines()[0][:200].rstrip('.')}",
            code="bad_device",
            hint="use --device cpu",
        ) from e
    _tried.add(key)


def _cases() -> Iterator[tuple[Any, Any, Any]]:
    """Codes with every byte, a block of zeros, and scales from subnormal to large; the same in blocks narrower than
    groups; values; and values next to ties, where an inverse in place of a division gives other codes."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (ROWS, COLUMNS)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    exponents = np.array([[-149, -130, -126, -20], [-9, -8, -7, -6], [0, 20, 100, 110]])
    scale = (rng.uniform(1, 2, exponents.shape) * np.exp2(exponents)).astype(np.float32)
    codes[:2, :128] = 0
    yield codes, scale, BLOCK
    yield codes, np.repeat(scale, COLUMNS // 16 // scale.shape[1], axis=1), (BLOCK[0], 16)
    values = rng.standard_t(3, (ROWS, COLUMNS)) * np.exp2(rng.uniform(-140, 100, (ROWS, 1)))
    yield values.astype(np.float32), None, None
    step = (rng.integers(128, 256, (ROWS, COLUMNS // 128, 1)) * 2.0**-12).astype(np.float32)
    ties = (rng.integers(-8, 7, (ROWS, COLUMNS // 128, 128)) + np.float32(0.5)).astype(np.float32) * step
    ties = (ties.view(np.int32) + rng.integers(-2, 3, ties.shape, dtype=np.int32)).view(np.float32)
    ties[:, :, ::32] = 8 * step  # `signed` makes it the code -8
    yield ties.reshape(ROWS, COLUMNS), None, None


def _is_same(found: PackedLinear, wanted: PackedLinear) -> bool:
    arrays = ((found.packed, wanted.packed), (found.scale, wanted.scale))
    return all(np.array_equal(ours, theirs) for ours, theirs in arrays) and found.sums == wanted.sums

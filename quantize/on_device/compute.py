"""Who computes INT4 weights in a run: devices with lanes, each of which has one tensor in work at a time."""

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kizami.formats.errors import KizamiError
from kizami.quantize.linear import Block, Empty, PackedLinear, Rows
from kizami.quantize.on_device.linear import quantize_on
from kizami.quantize.on_device.names import numbers_of
from kizami.quantize.on_device.transfer import Lane
from kizami.quantize.settings import Method

LANES = 2  # per device: one computes while the other reads, sends and takes


class Compute:
    """Safe to use from threads. A thread that asks for more than the lanes have room for waits."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._free: SimpleQueue[Lane] = SimpleQueue()
        for _ in range(LANES):  # device after device, so that tensors are dealt round robin
            for device in devices:
                self._free.put(Lane(device))
        self.lanes = LANES * len(devices)

    def quantize(
        self,
        weight: Rows,
        scale: NDArray[np.float32] | None,
        block: Block | None,
        group_size: int,
        method: Method,
        empty: Empty = np.empty,
        **more: Any,
    ) -> PackedLinear:
        """As quantize_linear. KizamiError "out_of_memory"."""
        lane = self._free.get()
        try:
            return quantize_on(lane, weight, scale, block, group_size, method, empty, **more)
        except torch.OutOfMemoryError as e:
            raise KizamiError(
                f"{lane.device} has too little memory for a weight of {weight.shape[0]} x {weight.shape[1]}: "
                f"{str(e).splitlines()[0][:200].rstrip('.')}",
                code="out_of_memory",
                hint="--device cpu takes less; or free the device of other processes",
            ) from e
        finally:
            self._free.put(lane)


def compute_on(device: str) -> Compute:
    """`cuda` or `cuda:0,1`, which check_device has accepted."""
    numbers = numbers_of(device)
    assert numbers is not None, device
    return Compute([torch.device("cuda", i) for i in numbers or range(torch.cuda.device_count())])

"""Bytes between NumPy arrays and a device, through page-locked memory that is used again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

PER_DIRECTION = 2  # while one buffer is on its way, the other is filled or emptied

KINDS = {  # BF16 is raw bits in NumPy
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.uint16): torch.bfloat16,
    np.dtype(np.float16): torch.float16,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
T = TypeVar("T")


class _Buffer:
    """Host memory, page-locked where the device is a GPU, and what is to be done when its transfer has ended."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._event = torch.cuda.Event() if self._is_pinned else None
        self._then: Callable[[], None] | None = None

    def view(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], once the last transfer has ended."""
        self.settle()
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        return self._memory[:nbytes]

    def started(self, then: Callable[[], None] | None = None) -> None:
        if self._event is not None:
            self._event.record()
        self._then = then or _nothing

    def settle(self) -> None:
        if self._then is None:
            return
        if self._event is not None:
            self._event.synchronize()
        then, self._then = self._then, None
        then()

    def forget(self) -> None:
        """What was to be done is not: its arrays may be gone."""
        if self._then is not None and self._event is not None:
            self._event.synchronize()
        self._then = None


def _nothing() -> None:
    pass


class Lane:
    """A stream of one device with its buffers; one thread at a time works in it, inside `entered`. On a CPU the same
    without a stream: every copy has ended when it returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._out = [_Buffer(device) for _ in range(PER_DIRECTION)]
        self._back = [_Buffer(device) for _ in range(PER_DIRECTION)]
        self._kept: dict[Any, Any] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """At the end everything that was asked for is there; after an exception nothing is on its way."""
        with torch.inference_mode():
            if self._stream is None:
                yield from self._guarded()
            else:
                with torch.cuda.stream(self._stream):
                    yield from self._guarded()

    def _guarded(self) -> Iterator[None]:
        try:
            yield
            for buffer in (*self._out, *self._back):
                buffer.settle()
        finally:
            for buffer in (*self._out, *self._back):
                buffer.forget()

    def kept(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` gives, on the device, the same for many tensors."""
        if key not in self._kept:
            self._kept[key] = make()
        found: T = self._kept[key]
        return found

    def send(self, array: NDArray[Any], to: torch.Tensor) -> None:
        """Copies an array to a tensor of its shape and kind; the array may change as soon as this returns."""
        self._out.append(buffer := self._out.pop(0))
        memory = buffer.view(array.nbytes)
        np.copyto(memory.numpy().view(array.dtype).reshape(array.shape), array)
        to.copy_(memory.view(to.dtype).view(to.shape), non_blocking=True)
        buffer.started()

    def sent(self, array: NDArray[Any]) -> torch.Tensor:
        """A tensor of it on the device."""
        to = torch.empty(array.shape, dtype=KINDS[array.dtype], device=self.device)
        self.send(array, to)
        return to

    def take(self, tensor: torch.Tensor, to: NDArray[Any]) -> None:
        """Copies a contiguous tensor to an array of its shape and size of items, that is filled at the end of `entered`
        or before."""
        self._back.append(buffer := self._back.pop(0))
        memory = buffer.view(to.nbytes)
        memory.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        held = memory.numpy().view(to.dtype).reshape(to.shape)
        buffer.started(lambda: np.copyto(to, held))

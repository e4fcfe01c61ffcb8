"""What a command that does not import torch itself has to tell it, or to hear from it."""

import ctypes

import torch

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


def use_threads(count: int) -> None:
    """torch's own choice counts the cores of the machine, not those that this process may use."""
    torch.set_num_threads(count)


def is_out_of_memory(error: BaseException) -> bool:
    """MemoryError; torch.OutOfMemoryError of a GPU; the RuntimeError of torch's allocator for CPUs."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def give_back_memory() -> None:
    """To the system, what was freed: of a freed tensor of up to 32 MB glibc keeps the pages, more or less by chance of
    threads. Layers of Kimi-K2's width took 1.33 to 1.64 GB, and 1.36 to 1.40 with this between pieces of work, in the
    same time [measured]. Nothing where the C library has no malloc_trim."""
    if _TRIM is not None:
        _TRIM(0)

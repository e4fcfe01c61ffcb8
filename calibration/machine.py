"""What a command that does not import torch itself has to tell it, or to hear from it."""

import torch


def use_threads(count: int) -> None:
    """torch's own choice counts the cores of the machine, not those that this process may use."""
    torch.set_num_threads(count)


def is_out_of_memory(error: BaseException) -> bool:
    """MemoryError; torch.OutOfMemoryError of a GPU; the RuntimeError of torch's allocator for CPUs."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)

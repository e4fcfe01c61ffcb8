"""GPUs by name: the memory that nvidia-smi reports, and where that figure was published."""

from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30
GPUS_PER_NODE = 8  # HGX boards; more GPUs in one server are several nodes


@dataclass(frozen=True, slots=True)
class Gpu:
    """`mib`: memory.total of nvidia-smi, which SGLang's default memory fraction is computed from. What CUDA gives to a
    process is up to 1 GiB less (B200: 178.35 GiB of 179.06, pytorch/ao #4002)."""

    name: str
    mib: int
    capability: int  # the major number: 9 Hopper, 10 Blackwell
    source: str

    @property
    def nbytes(self) -> int:
        return self.mib * MIB


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 81_559, 9, "nvidia-smi in modal-labs/modal-client #2797 and wilicc/gpu-burn #114 (80 GB HBM3)"),
        Gpu("h200", 143_771, 9, "nvidia-smi in sgl-project/sglang #3196"),
        Gpu("h20-3e", 143_771, 9, "nvidia-smi in sgl-project/sglang #6418"),
        Gpu("b200", 183_359, 10, "nvidia-smi in NVIDIA/TensorRT-LLM #10278"),
    )
}

"""The memory that is left for the KV cache: SGLang's and vLLM's rules, with what they leave open stated."""

from dataclasses import dataclass
from fractions import Fraction

from kizami.formats.serving.gpus import GIB, MIB, Gpu

VLLM_UTILIZATION = 0.92  # vLLM 0.33 config/cache.py `gpu_memory_utilization`
# vLLM profiles the rest (activations, CUDA graphs, NCCL, the CUDA context). vllm-project/recipes #115, Kimi-K2-Thinking
# on 8 H200 at the utilization of its time, 0.9: 0.9 * 143,771 MiB - 70.95 GiB of weights - 46.80 GiB of KV cache.
VLLM_OTHER_BYTES = 8_818 * MIB
MULTIMODAL_BYTES = 100 * MIB  # SGLang's SGLANG_VLM_CACHE_SIZE_MB, taken out of the pool


@dataclass(frozen=True, slots=True)
class Pool:
    """`nbytes` may be negative: the weights do not fit. `how` says what it was computed from."""

    nbytes: int
    how: str
    assumptions: tuple[str, ...]
    fraction: float | None = None


def default_fraction(gpu: Gpu, role: str, tp: int, *, mla: bool, vision: bool, dcp: int = 1) -> float:
    """SGLang 0.5.23 arg_groups/memory_hook.py `handle_gpu_memory_settings`, on CUDA, with nothing set by the user.

    Reserved: 512 MiB, 1.5 MiB per token of the largest forward, 1 GiB per 8 GPUs, 2 MiB per decode graph slot, and for
    prefill graphs 1536 MiB with MLA or 8 MiB per graph; at least 10 GiB on GPUs of more than 60 GiB.
    """
    chunk, slots = _defaults(gpu.mib, tp)
    tokens = max(slots if role == "decode" else chunk, 2048)
    reserved: float = 512 + tokens * 1.5 + tp / 8 * 1024
    if role != "prefill":
        reserved += slots * 2
    if role != "decode" and dcp == 1 and not vision:  # cuda_graph_hook.py: no prefill graphs with either
        reserved += 1536 if mla else 8 * _prefill_graphs(chunk)
    if gpu.mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    fraction = round((gpu.mib - reserved) / gpu.mib, 3)
    # `adjust_mem_fraction_for_vlm`: 0.95 for a tower without `num_hidden_layers` (Kimi-K2.5 calls it otherwise).
    return fraction * 0.95 if vision and role != "decode" else fraction


def _defaults(mib: int, tp: int) -> tuple[int, int]:
    """Chunked prefill size and decode graph slots by memory; smaller GPUs hold none of these models."""
    if mib < 60 * 1024:
        return 4096, 32 if tp < 4 else 160
    if mib < 160 * 1024:
        return 8192, 256 if tp < 4 else 512
    return 16384, 512


def _prefill_graphs(largest: int) -> int:
    """How many sizes `generate_prefill_cuda_graph_batch_sizes` captures."""
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, largest + 1, 512))
    return sum(size <= largest for step in steps for size in range(*step))


def sglang_pool(gpu: Gpu, weights: int, fraction: float, *, given: bool, vision: bool) -> Pool:
    """mem_cache/kv_cache_configurator.py `_profile_available_bytes`: free after weights - free before * (1 - f)."""
    nbytes = int(gpu.nbytes * Fraction(str(fraction))) - weights - (MULTIMODAL_BYTES if vision else 0)
    origin = "given" if given else "SGLang's default for this GPU and role"
    assumptions = [
        "an upper bound: free memory before loading is taken as all of nvidia-smi's memory.total, but the CUDA context "
        "and NCCL have some of it"
    ]
    if vision:
        assumptions.append("100 MiB for the multimodal cache (SGLANG_VLM_CACHE_SIZE_MB)")
    how = f"{gpu.name} {gpu.mib:,} MiB * {fraction:g} ({origin}) - weights"
    return Pool(nbytes, how, tuple(assumptions), fraction)


def vllm_pool(gpu: Gpu, weights: int, utilization: float) -> Pool:
    nbytes = int(gpu.nbytes * Fraction(str(utilization))) - weights - VLLM_OTHER_BYTES
    how = f"{gpu.name} {gpu.mib:,} MiB * {utilization:g} - weights - {VLLM_OTHER_BYTES / GIB:.2f} GiB"
    assumption = (
        f"{VLLM_OTHER_BYTES / GIB:.2f} GiB for activations, graphs and the CUDA context: what vLLM profiles; here the "
        "figure that vllm-project/recipes #115 leaves (Kimi-K2-Thinking, 8 x H200)"
    )
    return Pool(nbytes, how, (assumption,), utilization)


def measured_pool(gib: float, weights: int, measured_with: int) -> Pool:
    """--pool-gib: stated for weights of `measured_with` bytes per GPU; other weights leave more or less."""
    nbytes = int(Fraction(str(gib)) * GIB) + measured_with - weights
    if weights == measured_with:
        return Pool(nbytes, f"{gib:g} GiB, as stated with --pool-gib", ())
    return Pool(nbytes, f"{gib:g} GiB as stated, and the difference of the weights", ("all else on the GPU the same",))

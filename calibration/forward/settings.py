"""What a calibration run is asked for."""

from dataclasses import dataclass
from typing import Literal

from kizami.formats.statistics import Keep

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Settings:
    """keep: which tokens' MLP inputs stay in STATS. device: torch's word. dtype: of activations and products; weights
    are BF16's numbers in either; None: float32 on CPUs, bfloat16 elsewhere. max_memory: bytes of this process on CPUs,
    and of what it allocates on another device. token_chunk, query_block: rows that are worked on at once in the MLP
    and in attention; None: the most that max_memory allows."""

    keep: Keep = "held-out"
    device: str = "cpu"
    dtype: Dtype | None = None
    max_memory: int = 2_000_000_000
    token_chunk: int | None = None
    query_block: int | None = None

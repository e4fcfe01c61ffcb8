"""How many rows are worked on at once, and what a run takes: from the model's dimensions, before it starts."""

from dataclasses import dataclass
from typing import Any

from kizami.calibration.forward.experts import units_of
from kizami.calibration.forward.model import Model
from kizami.calibration.forward.observers import ROWS
from kizami.calibration.forward.settings import Settings
from kizami.calibration.forward.weights import BAND
from kizami.formats.errors import KizamiError

# Python, NumPy, torch and transformers with one model's modules take 350 MB [measured, torch 2.13 for CPUs]
BASE = 420_000_000
# More rows at once make no product faster
TOKEN_CHUNKS = (2048, 1024, 512, 256, 128, 64)
QUERY_BLOCKS = (512, 256, 128, 64)
COUNTS = 5  # numbers of a unit, see work.Work


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the files of a run's state, see work.Work. chunks: runs of tokens; inner: the widest unit."""

    tokens: int
    hidden: int
    slots: int
    top_k: int
    units: int
    inner: int
    chunks: int
    chosen: int

    def disk(self, itemsize: int) -> int:
        """Bytes that the files take."""
        rows = self.tokens * (2 + self.slots) * self.hidden * itemsize
        return (
            rows
            + 4 * self.tokens * (2 * self.top_k + self.chosen)
            + 8 * self.units * (self.hidden + self.inner + COUNTS)
        )


@dataclass(frozen=True, slots=True)
class Chunks:
    """tokens: rows at once in the MLP; queries: in attention; needed: estimated bytes of memory."""

    tokens: int
    queries: int
    needed: int


def sizes_of(model: Model, sequences: int, seq_len: int, chunk: int) -> Sizes:
    units = [units_of(mlp) for mlp in model.mlps]
    slices = [sum(unit.expert is None for unit in those) for those in units]
    topk = model.index_topk
    shared = topk is not None and seq_len > topk and model.shares_choice
    return Sizes(
        tokens=sequences * seq_len,
        hidden=model.hidden,
        slots=max(mlp.top_k + count for mlp, count in zip(model.mlps, slices, strict=True)),
        top_k=max(mlp.top_k for mlp in model.mlps),
        units=max(len(those) for those in units),
        inner=max(unit.last - unit.first for those in units for unit in those),
        chunks=-(-sequences * seq_len // chunk),
        chosen=topk if shared and topk is not None else 0,
    )


def choose_chunks(model: Model, sequences: int, seq_len: int, settings: Settings, itemsize: int) -> Chunks:
    """The most rows that `max_memory` allows. KizamiError "memory" with the least that would do."""
    queries = (settings.query_block,) if settings.query_block else QUERY_BLOCKS
    tokens = (settings.token_chunk,) if settings.token_chunk else TOKEN_CHUNKS
    sizes = sizes_of(model, sequences, seq_len, tokens[-1])
    base = BASE if settings.device == "cpu" else 0
    base += sizes.tokens * sizes.top_k * 24  # who goes where

    def most(rows: tuple[int, ...], each: int, fixed: int) -> tuple[int, int]:
        for count in rows:
            if base + fixed + count * each <= settings.max_memory or count == rows[-1]:
                break
        return count, base + fixed + count * each

    block, attention = most(queries, *_attention(model, seq_len, itemsize))
    chunk, mlp = most(tokens, *_mlp(sizes, itemsize))
    needed = max(attention, mlp)
    if needed > settings.max_memory:
        raise KizamiError(
            f"the run needs {needed / 1e9:.2f} GB of memory (attention {attention / 1e9:.2f} with {block} queries at "
            f"once, MLP {mlp / 1e9:.2f} with {chunk} tokens), and max-memory is {settings.max_memory / 1e9:.2f} GB",
            code="memory",
            hint="allow more with --max-memory, or take shorter sequences with --seq-len",
        )
    return Chunks(chunk, block, needed)


def _attention(model: Model, seq_len: int, itemsize: int) -> tuple[int, int]:
    """Bytes per query at work, and bytes whatever their number."""
    config: Any = model.config
    heads, hidden = config.num_attention_heads, model.hidden
    mla = hasattr(config, "kv_lora_rank")
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    key = config.qk_nope_head_dim + config.qk_rope_head_dim if mla else head_dim
    value = config.v_head_dim if mla else head_dim
    kept = heads if mla else config.num_key_value_heads
    query = itemsize * (5 * heads * key + 3 * kept * (key + value) + 3 * heads * value) + 30 * hidden + 8 * seq_len
    if model.index_topk is not None and seq_len > model.index_topk:
        query += 12 * config.index_n_heads * seq_len + 16 * seq_len
    kept_bytes = 2 * itemsize * kept * seq_len * max(key, value)
    return query, kept_bytes + itemsize * model.attention_numel + 2 * itemsize * hidden * seq_len + 16 * BAND


def _mlp(sizes: Sizes, itemsize: int) -> tuple[int, int]:
    token = itemsize * (4 * sizes.hidden + 3 * sizes.inner) + 12 * sizes.hidden
    return token, 3 * itemsize * sizes.inner * sizes.hidden + 16 * BAND + 16 * ROWS * sizes.hidden

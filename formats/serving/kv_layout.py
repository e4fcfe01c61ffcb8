"""The KV cache in bytes, and how many tokens a pool holds.

Tensor parallelism does not shard a latent: every rank holds it. Decode context parallelism (dcp) shards latents over
ranks and replicates index keys, and a draft (MTP) layer is not sharded (SGLang 0.5.23
model_executor/pool_configurator.py `DefaultPoolConfigurator`; row sizes: `calculate_mla_kv_cache_dim` in
mem_cache/kv_cache_configurator.py, and vLLM 0.33 model_executor/layers/attention/mla_attention.py `get_kv_cache_spec`).
"""

from dataclasses import dataclass
from enum import StrEnum

from kizami.formats.serving.model import Attention, ServedModel

_TILE = 128  # values that share an F32 scale, in 656-byte rows and in index keys


class Layout(StrEnum):
    BF16 = "bf16"
    RAW = "fp8"  # E4M3 at scale 1
    DS_MLA = "fp8_ds_mla"  # E4M3 latent with an F32 scale per 128, BF16 rope: 656 bytes for 512 + 64


def layouts_of(model: ServedModel) -> tuple[Layout, ...]:
    """SGLang and vLLM have rows with scales for sparse attention only, and for latents of whole tiles."""
    scaled = model.attention is Attention.DSA and model.latent % _TILE == 0
    return tuple(Layout) if scaled else (Layout.BF16, Layout.RAW)


def row_bytes(model: ServedModel, layout: Layout, *, tp: int = 1, dcp: int = 1) -> int:
    """Of one token in one layer on one rank that holds it."""
    if model.attention is Attention.GQA:
        heads = max(1, model.kv_heads // max(1, tp // dcp))
        return 2 * heads * model.head_dim * (2 if layout is Layout.BF16 else 1)  # K and V
    if layout is Layout.BF16:
        return 2 * (model.latent + model.rope)
    if layout is Layout.RAW:
        return model.latent + model.rope
    assert layout in layouts_of(model), (layout, model.attention, model.latent)
    return model.latent + model.latent // _TILE * 4 + 2 * model.rope


def index_bytes(model: ServedModel) -> int:
    """The index key of one token in one layer: E4M3 and an F32 scale per 128, whatever the KV dtype."""
    return model.index_dim + model.index_dim // _TILE * 4


@dataclass(frozen=True, slots=True)
class KvCost:
    """What a token costs on one GPU, and all it was computed from.

    draft_layers: MTP layers that are served as a draft; each adds one row, and with sparse attention one index key.
    """

    layout: Layout
    layers: int
    row: int
    index_layers: int
    index: int
    draft_layers: int
    dcp: int

    @property
    def bytes_of_dcp_tokens(self) -> int:
        """Of `dcp` consecutive tokens on one GPU, which keeps the rows of one of them and the index keys of all."""
        replicated = self.index_layers * self.index + self.draft_layers * (self.row + self.index)
        return self.layers * self.row + self.dcp * replicated

    @property
    def bytes_per_token(self) -> int:
        """Rounded up; exact where dcp divides."""
        return -(-self.bytes_of_dcp_tokens // self.dcp)

    def tokens(self, pool: int, page: int) -> int:
        """Whole pages only; a page of one GPU stands for page * dcp tokens."""
        per_gpu = max(0, pool) // self.bytes_of_dcp_tokens // page * page
        return per_gpu * self.dcp


def kv_cost(model: ServedModel, layout: Layout, *, tp: int = 1, dcp: int = 1, draft_layers: int = 0) -> KvCost:
    return KvCost(
        layout=layout,
        layers=model.layers,
        row=row_bytes(model, layout, tp=tp, dcp=dcp),
        index_layers=model.index_layers,
        index=index_bytes(model),
        draft_layers=draft_layers,
        dcp=dcp,
    )

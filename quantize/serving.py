"""Capacity rows: weights in each format, the pool they leave, and the tokens it holds in each KV layout."""

from collections.abc import Sequence
from dataclasses import dataclass

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.families import Family, find_family
from kizami.formats.serving.foretell import Finding, Severity
from kizami.formats.serving.gpus import GIB
from kizami.formats.serving.kv_layout import KvCost, Layout, kv_cost, layouts_of
from kizami.formats.serving.model import ServedModel, read_model
from kizami.formats.serving.pool import (
    VLLM_OTHER_BYTES,
    VLLM_UTILIZATION,
    Pool,
    default_fraction,
    measured_pool,
    sglang_pool,
    vllm_pool,
)
from kizami.formats.serving.server import SGLANG, VLLM, Server
from kizami.formats.serving.stored import StoredForm, read_stored
from kizami.quantize.capacity import Weights, as_fp8, as_int4, checkpoint_weights

TWIN_GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class Served:
    """A checkpoint as a launch sees it, from its config and headers."""

    checkpoint: Checkpoint
    family: Family
    model: ServedModel
    stored: StoredForm
    weights: Weights

    @staticmethod
    def of(checkpoint: Checkpoint) -> "Served":
        family, _ = find_family(checkpoint.config, checkpoint.tensors)
        return Served(
            checkpoint,
            family,
            read_model(checkpoint.config, family),
            read_stored(checkpoint.config, checkpoint.tensors, family),
            checkpoint_weights(checkpoint.tensors, family),
        )

    def twin(self) -> "WeightSet":
        """The other format, computed: block FP8 for INT4, and INT4 g32 under the default policy for anything else."""
        tensors = self.checkpoint.tensors
        if self.stored.group_sizes:
            return WeightSet("FP8", as_fp8(tensors, self.family), computed=True)
        weights = as_int4(tensors, self.family, TWIN_GROUP_SIZE)
        return WeightSet(f"INT4 g{TWIN_GROUP_SIZE}", weights, computed=True)


@dataclass(frozen=True, slots=True)
class WeightSet:
    """`computed`: from the tensors of the other format, not from a checkpoint."""

    label: str
    weights: Weights
    computed: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Weights, pool and tokens of one server with one weight format and one KV layout. The `_mtp` values are with the
    MTP layer loaded as a draft; None without such a layer. `chosen`: what the command launches; `option`: the
    --kv-cache-dtype that gives these rows, None if the engine has none here."""

    role: str
    label: str
    computed: bool
    chosen: bool
    weights: int
    pool: Pool
    cost: KvCost
    tokens: int
    page: int
    option: str | None
    weights_mtp: int | None = None
    pool_mtp: Pool | None = None
    cost_mtp: KvCost | None = None
    tokens_mtp: int | None = None


def rows_of(server: Server, sets: Sequence[WeightSet], pool_gib: float | None) -> list[Row]:
    """`sets[0]` is what the server loads; a stated pool was measured with it."""
    return [_row(server, sets, each, layout, pool_gib) for each in sets for layout in layouts_of(server.model)]


def _row(server: Server, sets: Sequence[WeightSet], each: WeightSet, layout: Layout, pool_gib: float | None) -> Row:
    model = server.model

    def per_gpu(of: WeightSet, mtp: bool) -> int:
        return of.weights.per_gpu(server.tp, mtp=mtp, kv_heads=model.kv_heads)

    weights = per_gpu(each, False)
    measured_with = per_gpu(sets[0], False)
    pool = _pool(server, weights, pool_gib, measured_with)
    cost = kv_cost(model, layout, tp=server.tp, dcp=server.dcp)
    chosen = each is sets[0] and layout is server.layout
    page, option = server.page_size, server.option_for(layout)
    tokens = cost.tokens(pool.nbytes, page)
    if not model.mtp_layers:
        return Row(server.role, each.label, each.computed, chosen, weights, pool, cost, tokens, page, option)
    drafting = per_gpu(each, True)
    pool_mtp = _pool(server, drafting, pool_gib, measured_with)
    cost_mtp = kv_cost(model, layout, tp=server.tp, dcp=server.dcp, draft_layers=model.mtp_layers)
    tokens_mtp = cost_mtp.tokens(pool_mtp.nbytes, page)
    return Row(
        server.role, each.label, each.computed, chosen, weights, pool, cost, tokens, page, option, drafting, pool_mtp,
        cost_mtp, tokens_mtp,
    )  # fmt: skip


def _pool(server: Server, weights: int, pool_gib: float | None, measured_with: int) -> Pool:
    if pool_gib is not None:
        return measured_pool(pool_gib, weights, measured_with)
    if server.engine == "vllm":
        return vllm_pool(server.gpu, weights, VLLM_UTILIZATION if server.fraction is None else server.fraction)
    model, given = server.model, server.fraction
    fraction = given if given is not None else default_fraction(
        server.gpu, server.role, server.tp, mla=model.is_mla, vision=model.vision, dcp=server.dcp
    )  # fmt: skip
    return sglang_pool(server.gpu, weights, fraction, given=given is not None, vision=model.vision)


def about_capacity(server: Server, rows: Sequence[Row]) -> list[Finding]:
    """Whether what is launched has room for a page at all, and, in vLLM, for the config's context."""
    row = next((row for row in rows if row.chosen and row.role == server.role), None)
    if row is None:
        return []
    source = f"{SGLANG} mem_cache/kv_cache_configurator.py _profile_available_bytes"
    if server.engine == "vllm":
        source = f"{VLLM} v1/core/kv_cache_utils.py"
    numbers: dict[str, int | str] = {
        "weights_per_gpu": row.weights, "pool_bytes": row.pool.nbytes, "tokens": row.tokens,
        "context": server.model.context, "tp": server.tp,
    }  # fmt: skip
    if row.tokens == 0:
        certain = server.engine == "sglang" or row.pool.nbytes + VLLM_OTHER_BYTES <= 0
        message = (
            f"no room for the KV cache{'' if certain else ' by this estimate'}: {row.weights / GIB:.2f} GiB of weights "
            f"on each of {server.tp} {server.gpu.name} leave {row.pool.nbytes / GIB:.2f} GiB ({row.pool.how})"
        )
        advice = "a larger --tp, a larger GPU, or a higher --mem-fraction"
        severity: Severity = "error" if certain else "warning"
        return [Finding(severity, "no_memory", server.role, message, source, advice, numbers)]
    if row.tokens >= server.model.context:
        return []
    message = f"the KV cache holds {row.tokens:,} tokens, less than one request of max_position_embeddings"
    advice = "shorter requests; FP8 rows or more GPUs for the whole context"
    return [
        Finding(
            "warning", "short_of_context", server.role, f"{message} {server.model.context:,}", source, advice, numbers
        )
    ]

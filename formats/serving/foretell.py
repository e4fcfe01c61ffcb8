"""Launch errors foretold: rules about one server and about a pair, each resting on a public file."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from kizami.formats.serving.kv_layout import Layout, layouts_of
from kizami.formats.serving.model import Attention
from kizami.formats.serving.server import DSA_PAGE, SGLANG, VLLM, Server

Severity = Literal["error", "warning", "note"]
Numbers = dict[str, int | str]
MARLIN_TILE = 64  # columns: SGLang layers/quantization/marlin_utils.py check_moe_marlin_supports_layer


@dataclass(frozen=True, slots=True)
class Finding:
    """error: the launch fails or the answers are wrong; warning: it may; note: worth knowing. `role`: whose."""

    severity: Severity
    code: str
    role: str
    message: str
    source: str
    advice: str
    numbers: Numbers = field(default_factory=dict)


def about_server(server: Server) -> list[Finding]:
    return [finding for rule in _RULES for finding in rule(server)]


def _inter_r(server: Server) -> Iterator[Finding]:
    model = server.model
    if not model.experts or not model.moe_intermediate:
        return
    numbers: Numbers = {"moe_intermediate_size": model.moe_intermediate, "tp": server.tp, "ep": server.ep}
    if model.moe_intermediate % server.moe_tp:
        yield _finding(
            server,
            "error",
            "experts_uneven",
            f"{model.moe_intermediate} columns of an expert on {server.moe_tp} ranks is no whole number",
            f"{SGLANG} layers/moe/fused_moe_triton/layer.py; {VLLM} model_executor/layers/fused_moe",
            _more_ep(server),
            numbers,
        )
        return
    share = server.inter_per_rank
    numbers["per_rank"] = share
    for group in server.stored.group_sizes:
        if share % group:
            what = "wrong scales without a message" if server.engine == "sglang" else "ValueError at load"
            yield _finding(
                server,
                "error",
                "group_split",
                f"{share} columns of an expert per rank (of {model.moe_intermediate}, on {server.moe_tp} ranks) are no "
                f"multiple of the group size {group}: {what}",
                f"{SGLANG} layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16_moe.py; {VLLM} "
                "model_executor/layers/fused_moe/oracle/int_wna16.py",
                _more_ep(server),
                numbers | {"group_size": group},
            )
        elif server.engine == "sglang" and share % MARLIN_TILE:
            yield _finding(
                server,
                "warning",
                "marlin_tile",
                f"{share} columns of an expert per rank are no multiple of {MARLIN_TILE}, which SGLang's Marlin kernel "
                "documents and does not check for this format",
                f"{SGLANG} layers/quantization/marlin_utils.py check_moe_marlin_supports_layer",
                _more_ep(server),
                numbers,
            )
    block = server.stored.fp8_block
    if block is not None and (share % block[0] or (server.tp > 1 and share % block[1])):
        yield _finding(
            server,
            "error",
            "block_split",
            f"{share} columns of an expert per rank are no multiple of the FP8 block {block[0]}x{block[1]}: ValueError",
            f"{SGLANG} layers/quantization/fp8.py; {VLLM} model_executor/layers/quantization/fp8.py",
            _more_ep(server),
            numbers | {"block": block[0]},
        )


def _more_ep(server: Server) -> str:
    """The smallest expert parallelism at which nothing is cut; vLLM knows 1 and tp only."""
    block = server.stored.fp8_block
    sizes = [*server.stored.group_sizes, *(block or ())]
    if server.engine == "sglang" and server.stored.group_sizes:
        sizes.append(MARLIN_TILE)
    choices = [server.tp] if server.engine == "vllm" else [n for n in range(2, server.tp + 1) if server.tp % n == 0]
    for ep in choices:
        moe_tp = server.tp // ep
        whole = server.model.moe_intermediate % moe_tp == 0
        fits = whole and not any(server.model.moe_intermediate // moe_tp % size for size in sizes)
        if fits and server.model.experts % ep == 0:
            return f"--ep {ep}"
    return "a smaller --tp"


def _parallel(server: Server) -> Iterator[Finding]:
    model, tp, ep, dcp = server.model, server.tp, server.ep, server.dcp
    if model.heads % tp:
        yield _finding(
            server,
            "error",
            "heads_uneven",
            f"{model.heads} attention heads on {tp} ranks is no whole number",
            f"{SGLANG} models/deepseek_v2.py, models/glm4_moe.py; {VLLM} config/model.py",
            "a --tp that divides the heads",
            {"heads": model.heads, "tp": tp},
        )
    if ep > 1 and (tp % ep or (server.engine == "vllm" and ep != tp)):
        rule = "1 or equal to --tp" if server.engine == "vllm" else "a divisor of --tp"
        yield _finding(
            server,
            "error",
            "ep_size",
            f"--ep {ep} with --tp {tp}: it must be {rule}",
            f"{SGLANG} layers/moe/fused_moe_triton/layer.py; {VLLM} config/parallel.py",
            f"--ep {tp}",
            {"ep": ep, "tp": tp},
        )
    elif ep > 1 and model.experts % ep:
        yield _finding(
            server,
            "error",
            "experts_per_rank",
            f"{model.experts} experts in {ep} groups is no whole number",
            f"{SGLANG} layers/moe/fused_moe_triton/layer.py",
            "an --ep that divides the experts",
            {"experts": model.experts, "ep": ep},
        )
    if dcp > 1 and tp % dcp:
        yield _finding(
            server,
            "error",
            "dcp_size",
            f"--dcp {dcp} does not divide --tp {tp}",
            f"{SGLANG} arg_groups/parallel_hook.py; {VLLM} config/parallel.py",
            "a --dcp that divides --tp",
            {"dcp": dcp, "tp": tp},
        )


def _dcp(server: Server) -> Iterator[Finding]:
    if server.dcp == 1:
        return
    numbers: Numbers = {"dcp": server.dcp, "tp": server.tp, "kv_heads": server.model.kv_heads}
    if server.engine == "sglang" and server.is_dsa and server.role != "single":
        yield _finding(
            server,
            "error",
            "dcp_dsa_pair",
            "ValueError: DSA DCP does not support PD disaggregation",
            f"{SGLANG} arg_groups/model_overrides/deepseek_v2.py _dsa_dcp_overrides",
            "--dcp 1",
            numbers,
        )
    if server.engine == "sglang" and server.is_dsa and server.layout is Layout.DS_MLA:
        yield _finding(
            server,
            "warning",
            "dcp_dsa_backend",
            "under dcp SGLang takes its trtllm backend (raw rows) by itself; with "
            "flashmla_kv forced, it is not proven to work",
            f"{SGLANG} arg_groups/model_overrides/deepseek_v2.py _dsa_dcp_overrides",
            "--kv-cache-dtype fp8_e4m3",
            numbers,
        )
    if server.engine == "vllm" and server.model.attention is Attention.GQA:
        heads = server.model.kv_heads
        if server.role != "single" or server.tp <= heads or server.dcp > server.tp // heads:
            yield _finding(
                server,
                "error",
                "dcp_gqa",
                f"--dcp {server.dcp} with {heads} KV heads on --tp {server.tp}: vLLM wants tp > heads and "
                "dcp <= tp / heads, and no pair of servers",
                f"{VLLM} config/model.py, config/vllm.py",
                "--dcp 1",
                numbers,
            )
    elif server.engine == "vllm" and server.role != "single" and server.dcp != server.tp:
        yield _finding(
            server,
            "error",
            "dcp_nixl",
            f"--dcp {server.dcp}: with NIXL it must be 1 or --tp {server.tp}",
            f"{VLLM} config/vllm.py",
            f"--dcp {server.tp}",
            numbers,
        )
    if server.engine == "vllm" and server.is_dsa and server.layout is Layout.BF16:
        yield _finding(
            server,
            "warning",
            "dcp_sparse_bf16",
            "FLASHMLA_SPARSE has no BF16 path under dcp (NotImplementedError) where it is the backend that vLLM takes",
            f"{VLLM} v1/attention/backends/mla/flashmla_sparse.py",
            "--kv-cache-dtype fp8_ds_mla",
            numbers,
        )


def _kv(server: Server) -> Iterator[Finding]:
    if server.is_dsa and (server.page_size % DSA_PAGE if server.engine == "vllm" else server.page_size != DSA_PAGE):
        yield _finding(
            server,
            "error",
            "dsa_page",
            f"--page-size {server.page_size}: pages of sparse attention hold {DSA_PAGE} tokens",
            f"{SGLANG} arg_groups/model_overrides/deepseek_v2.py; {VLLM} v1/attention/backends/mla/flashmla_sparse.py",
            f"--page-size {DSA_PAGE}",
            {"page_size": server.page_size},
        )
    if server.layout not in layouts_of(server.model):
        model = server.model
        yield _finding(
            server,
            "error",
            "no_such_rows",
            f"fp8_ds_mla rows are for sparse attention with a latent of whole tiles of 128; {model.architecture} has "
            f"{model.attention} with a latent of {model.latent}",
            f"{SGLANG} mem_cache/kv_cache_configurator.py; {VLLM} v1/attention/backends/mla",
            "--kv-cache-dtype " + ("bf16" if server.is_dsa else "fp8_e4m3"),
            {"latent": model.latent},
        )
    if server.is_dsa and server.kv_dtype != "bf16":
        yield from _sparse_fp8(server)
    if server.stored.kv_scheme and server.model.is_mla:
        yield _finding(
            server,
            "warning",
            "kv_scheme_mla",
            "kv_cache_scheme is set for a model with a latent cache: SGLang's auto turns to FP8, some of its backends "
            "write without the scale and read with it, and vLLM ignores it",
            f"{SGLANG} mem_cache/kv_cache_dtype.py, mem_cache/memory_pool.py; {VLLM} "
            "model_executor/layers/attention/mla_attention.py",
            "no kv_cache_scheme, or scales of 1.0",
        )
    has_scales = server.stored.kv_scheme and not server.model.is_mla
    if has_scales and server.kv_dtype == "bf16":
        yield _finding(
            server,
            "note",
            "kv_scales_unused",
            "the checkpoint has scales for an FP8 KV cache, and a BF16 one leaves them unused",
            f"{SGLANG} mem_cache/kv_cache_dtype.py; {VLLM} config/cache.py",
            "--kv-cache-dtype fp8_e4m3, for twice the tokens",
        )
    if server.engine == "sglang" and server.kv_word == "fp8_e4m3":
        yield _finding(
            server,
            "note",
            "no_scale_file",
            f"no --quantization-param-path: {server.model.architecture} has no load_kv_cache_scales, and with a file "
            "the launch ends in RuntimeError. "
            + ("Its own scales are used" if has_scales else "The warning about scaling factors of 1.0 is expected"),
            f"{SGLANG} model_executor/model_runner_components/load_model_utils.py load_kv_cache_scales",
            "leave it out" if has_scales else "leave it out; see what range the cache needs with a calibration",
        )


def _sparse_fp8(server: Server) -> Iterator[Finding]:
    """FP8 rows of sparse attention that need more than a dtype."""
    if server.engine == "sglang" and server.kv_dtype == "fp8_ds_mla" and server.gpu.capability >= 10:
        yield _finding(
            server,
            "warning",
            "flashmla_blackwell",
            "SGLang's own FP8 backend on Blackwell is trtllm (raw rows); flashmla_kv, which 656-byte rows need, is not "
            "proven there",
            f"{SGLANG} arg_groups/overrides.py _dsa_split_backend_resolution",
            "--kv-cache-dtype fp8_e4m3 if both sides are Blackwell",
        )
    if server.engine == "vllm" and server.kv_dtype == "fp8_e4m3" and server.gpu.capability == 9:
        yield _finding(
            server,
            "note",
            "flashinfer_sm90",
            "on Hopper fp8_e4m3 means raw rows and FlashInfer 0.6.18 or later; the 656-byte rows of FlashMLA are "
            "fp8_ds_mla",
            f"{VLLM} v1/attention/backends/mla/flashmla_sparse.py, flashinfer_mla_sparse_sm90.py",
            "--kv-cache-dtype fp8_ds_mla for FlashMLA",
        )


_RULES: tuple[Callable[[Server], Iterator[Finding]], ...] = (_parallel, _inter_r, _dcp, _kv)


def _finding(
    server: Server,
    severity: Severity,
    code: str,
    message: str,
    source: str,
    advice: str,
    numbers: Numbers | None = None,
) -> Finding:
    return Finding(severity, code, server.role, message, source, advice, numbers or {})

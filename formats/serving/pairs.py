"""Rules about a pair of servers, prefill and decode: what each engine compares, and what neither does."""

from collections.abc import Iterator

from kizami.formats.serving.foretell import Finding
from kizami.formats.serving.server import SGLANG, VLLM, Server


def about_pair(prefill: Server, decode: Server) -> list[Finding]:
    return [*_same_model(prefill, decode), *_same_cache(prefill, decode), *_front(prefill)]


def _front(prefill: Server) -> Iterator[Finding]:
    if prefill.engine == "vllm":
        yield Finding(
            "note",
            "vllm_proxy",
            "pair",
            "vLLM's package has no router for a pair; its repository has a plain proxy, "
            "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py",
            "docs.vllm.ai features/nixl_connector_usage",
            "put a proxy before the two that sends a request to prefill first",
        )


def _same_model(prefill: Server, decode: Server) -> Iterator[Finding]:
    """Neither engine compares what it is given: SGLang compares neither weights nor path, vLLM the path."""
    for key in (
        "architecture",
        "attention",
        "layers",
        "latent",
        "rope",
        "kv_heads",
        "head_dim",
        "index_layers",
        "index_dim",
        "vocab",
    ):
        ours, theirs = getattr(prefill.model, key), getattr(decode.model, key)
        if ours != theirs:
            yield Finding(
                "error",
                "model_differs",
                "pair",
                f"{key} is {ours} on the prefill side and {theirs} on the decode side",
                f"{SGLANG} disaggregation/common/conn.py",
                "two forms of the same model",
                {"prefill": str(ours), "decode": str(theirs)},
            )


def _same_cache(prefill: Server, decode: Server) -> Iterator[Finding]:
    source = f"{SGLANG} disaggregation/common/conn.py"
    if prefill.engine == "vllm":
        source = f"{VLLM} distributed/kv_transfer/kv_connector/v1/nixl/metadata.py"
    if prefill.kv_word != decode.kv_word:
        yield Finding(
            "error",
            "kv_dtype_differs",
            "pair",
            f"KV cache dtype mismatch: prefill {prefill.kv_word}, decode {decode.kv_word}. The engines refuse it, and "
            "there is no conversion in the transfer",
            source,
            f"--prefill-kv-cache-dtype {decode.kv_dtype}; it also halves the transfer if that is FP8",
            {"prefill": prefill.kv_word, "decode": decode.kv_word},
        )
    elif prefill.layout != decode.layout:
        yield Finding(
            "error",
            "kv_rows_differ",
            "pair",
            f"one word ({decode.kv_word}), two layouts: prefill on {prefill.gpu.name} writes {prefill.layout} rows, "
            f"decode on {decode.gpu.name} reads {decode.layout} rows. The handshake compares the word only",
            f"{SGLANG} mem_cache/kv_cache_configurator.py calculate_mla_kv_cache_dim",
            "--kv-cache-dtype fp8_ds_mla (the same rows on both), or bf16",
            {"prefill": prefill.layout.value, "decode": decode.layout.value},
        )
    if prefill.page_size != decode.page_size:
        yield Finding(
            "error" if prefill.engine == "sglang" else "warning",
            "page_size_differs",
            "pair",
            f"page size mismatch: prefill {prefill.page_size}, decode {decode.page_size}",
            source,
            "one --page-size",
            {"prefill": prefill.page_size, "decode": decode.page_size},
        )
    if prefill.stored.kv_scheme != decode.stored.kv_scheme:
        side = "prefill" if prefill.stored.kv_scheme else "decode"
        yield Finding(
            "warning",
            "kv_scheme_one_side",
            "pair",
            f"only the {side} checkpoint has a kv_cache_scheme: with --kv-cache-dtype auto the two sides would differ. "
            "The commands here name the dtype on both",
            f"{SGLANG} mem_cache/kv_cache_dtype.py",
            "keep --kv-cache-dtype on both sides",
        )
    if prefill.engine == "sglang" and prefill.tp != decode.tp:
        yield Finding(
            "warning",
            "checksum_tp",
            "pair",
            f"tp is {prefill.tp} on the prefill side and {decode.tp} on the decode side: SGLang admits such a prefill "
            "unverified, with one warning, whatever the checksum flag",
            f"{SGLANG} arg_groups/fields/disagg.py disaggregation_enable_kv_checksum",
            "the same --tp on both sides",
            {"prefill": prefill.tp, "decode": decode.tp},
        )

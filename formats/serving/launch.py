"""Launch commands as data: every flag with the reason it is there and the public file that the reason rests on."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from kizami.formats.serving.gpus import GPUS_PER_NODE
from kizami.formats.serving.kv_layout import Layout
from kizami.formats.serving.server import DSA_PAGE, SGLANG, VLLM, Server

PORTS = {"single": 30000, "prefill": 30000, "decode": 30001}
VLLM_PORTS = {"single": 8000, "prefill": 8100, "decode": 8200}
BOOTSTRAP_PORT = 8998


class Slot(str):
    """A word with a shell variable for what only the user knows. `${X:?}` stops the shell while X is unset."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag and its values; `reason` is empty for what a command cannot do without (the model, its port)."""

    words: tuple[str, ...]
    reason: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """`role`: single, prefill, decode or router. `program` and `env` stand before the flags."""

    role: str
    env: tuple[tuple[str, str], ...]
    program: tuple[str, ...]
    flags: tuple[Flag, ...]

    @property
    def words(self) -> list[str]:
        return [*self.program, *(word for flag in self.flags for word in flag.words)]

    @property
    def lines(self) -> list[str]:
        """For a shell, one flag a line."""
        head = [*(f"{name}={quoted(value)}" for name, value in self.env), *map(quoted, self.program)]
        rows = [" ".join(head), *("  " + " ".join(map(quoted, flag.words)) for flag in self.flags)]
        return [row + " \\" for row in rows[:-1]] + rows[-1:]

    @property
    def placeholders(self) -> list[str]:
        words = [*(value for _, value in self.env), *self.words]
        return sorted({word.split("${")[1].split(":?")[0] for word in words if isinstance(word, Slot)})


def quoted(word: str) -> str:
    return f'"{word}"' if isinstance(word, Slot) else shlex.quote(word)


def commands(servers: list[Server]) -> list[Command]:
    """One command per server, and the router of a SGLang pair. vLLM's package has no router."""
    if servers[0].engine == "vllm":
        differ = len({server.path for server in servers}) > 1
        return [_vllm(server, differ) for server in servers]
    made = [_sglang(server) for server in servers]
    return made if len(servers) == 1 else [*made, _router()]


def _sglang(server: Server) -> Command:
    flags = [*_model("--model-path", server), *_sglang_parallel(server), *_sglang_memory(server)]
    if server.fuses_shared_experts:
        flags.append(
            Flag(
                ("--disable-shared-experts-fusion",),
                "the routed experts are INT4 and the shared ones are not: fused, the shared experts would stay "
                "unloaded with only a warning",
                f"{SGLANG} models/deepseek_v2.py, models/glm4_moe.py shared_experts_fusion_disable_reason",
            )
        )
    if server.stored.method == "gptq":
        flags.append(
            Flag(
                ("--dtype", "float16"),
                "experts in GPTQ have F16 scales there, and the kernel wants one dtype",
                f"{SGLANG} layers/quantization/gptq/schemes/gptq_moe.py",
            )
        )
    if server.role != "single":
        flags += _sglang_pair(server)
    return Command(server.role, (), ("python", "-m", "sglang.launch_server"), tuple(flags))


def _model(flag: str, server: Server) -> Iterator[Flag]:
    path = f"./{server.path}" if server.path.startswith("-") else server.path  # else argparse takes it for an option
    yield Flag((flag, path) if flag else (path,))
    if server.revision:
        yield Flag(("--revision", server.revision), "the part of the Hub id after @")
    if server.model.remote_code:
        yield Flag(
            ("--trust-remote-code",),
            f"config.json has an auto_map or is of a Kimi type ({server.model.model_type}): config or tokenizer is "
            "Python in the checkpoint. It runs on the servers: read it first",
            "huggingface/transformers src/transformers/dynamic_module_utils.py",
        )


def _sglang_parallel(server: Server) -> Iterator[Flag]:
    yield Flag(("--tp", str(server.tp)))
    if server.ep > 1:
        yield Flag(
            ("--ep", str(server.ep)),
            f"{server.ep} groups of experts, each expert on {server.moe_tp} ranks "
            f"({server.inter_per_rank} of {server.model.moe_intermediate} columns each)",
            f"{SGLANG} layers/moe/fused_moe_triton/layer.py",
        )
    if server.dcp > 1:
        yield Flag(
            ("--dcp-size", str(server.dcp)), "latents sharded over ranks", f"{SGLANG} arg_groups/parallel_hook.py"
        )
    yield from _nodes(server, ("--dist-init-addr", Slot(f"${{{server.role.upper()}_NODE0:?}}:20000")))


def _nodes(server: Server, address: tuple[str, ...]) -> Iterator[Flag]:
    nodes = -(-server.tp // GPUS_PER_NODE)
    if nodes > 1:
        rank = Slot("${NODE_RANK:?}")
        yield Flag(
            ("--nnodes", str(nodes), "--node-rank", rank, *address),
            f"{server.tp} GPUs are {nodes} nodes of {GPUS_PER_NODE}: run this on each, NODE_RANK 0 to {nodes - 1}"
            + (", with --headless above 0" if server.engine == "vllm" else ""),
        )


def _sglang_memory(server: Server) -> Iterator[Flag]:
    pair = server.role != "single"
    if server.fraction is not None:
        yield Flag(("--mem-fraction-static", f"{server.fraction:g}"), "given with --mem-fraction")
    if pair or server.kv_word != server.kv_word_of_auto:
        reason = (
            "both sides must say the same word: it is compared as a string, and auto differs from bf16"
            if pair
            else f"auto would become {server.kv_word_of_auto} here"
        )
        source = "disaggregation/common/conn.py" if pair else "arg_groups/overrides.py, mem_cache/kv_cache_dtype.py"
        yield Flag(("--kv-cache-dtype", server.kv_word), reason, f"{SGLANG} {source}")
    if server.kv_dtype == "fp8_ds_mla":
        backends = ("--dsa-prefill-backend", "flashmla_kv", "--dsa-decode-backend", "flashmla_kv")
        yield Flag(
            backends,
            "656-byte rows come with this backend; SGLang has no dtype word for them",
            f"{SGLANG} mem_cache/kv_cache_configurator.py calculate_mla_kv_cache_dim",
        )
    if server.page is not None or server.is_dsa or pair:
        yield Flag(("--page-size", str(server.page_size)), _page_reason(server), f"{SGLANG} {_page_source(server)}")


def _page_reason(server: Server) -> str:
    if server.is_dsa:
        return f"pages of sparse attention hold {DSA_PAGE} tokens; SGLang sets it itself, too"
    return "both sides must have the same; the default depends on GPU and backend" if server.page is None else "given"


def _page_source(server: Server) -> str:
    if server.is_dsa:
        return "arg_groups/model_overrides/deepseek_v2.py"
    return "disaggregation/common/conn.py, arg_groups/overrides.py"


def _sglang_pair(server: Server) -> Iterator[Flag]:
    yield Flag(("--disaggregation-mode", server.role))
    yield Flag(
        ("--disaggregation-enable-kv-checksum",),
        "verifies the KV pages after the transfer; needed on both sides, or it checks nothing (sglang #24527 is the "
        "kind of fault it finds)",
        f"{SGLANG} arg_groups/fields/disagg.py",
    )
    yield Flag(
        ("--host", "0.0.0.0", "--port", str(PORTS[server.role])),
        "the default host is 127.0.0.1, which the router and the other side cannot reach",
        f"{SGLANG} arg_groups/fields/serving.py",
    )


def _router() -> Command:
    prefill = Slot(f"http://${{PREFILL_HOST:?}}:{PORTS['prefill']}")
    flags = (
        Flag(("--pd-disaggregation",)),
        Flag(
            ("--prefill", prefill, str(BOOTSTRAP_PORT)),
            "the second word is the prefill server's bootstrap port, 8998 by default",
            "sglang-router 0.3.2 router_args.py",
        ),
        Flag(("--decode", Slot(f"http://${{DECODE_HOST:?}}:{PORTS['decode']}"))),
    )
    return Command("router", (), ("python", "-m", "sglang_router.launch_router"), flags)


def _vllm(server: Server, paths_differ: bool) -> Command:
    flags = [*_model("", server), *_vllm_parallel(server), *_vllm_memory(server)]
    env: tuple[tuple[str, str], ...] = ()
    if server.role != "single":
        name = f"{server.role.upper()}_HOST"
        env = (("VLLM_NIXL_SIDE_CHANNEL_HOST", Slot(f"${{{name}:?}}")),)
        flags.append(Flag(("--port", str(VLLM_PORTS[server.role]))))
        flags.append(_transfer(server, paths_differ))
    return Command(server.role, env, ("vllm", "serve"), tuple(flags))


def _vllm_parallel(server: Server) -> Iterator[Flag]:
    yield Flag(("--tensor-parallel-size", str(server.tp)))
    if server.ep > 1:
        yield Flag(
            ("--enable-expert-parallel",),
            f"whole experts on each of {server.tp} ranks: vLLM's EP is always as wide as its TP",
            f"{VLLM} config/parallel.py",
        )
    if server.dcp > 1:
        yield Flag(
            ("--decode-context-parallel-size", str(server.dcp)),
            "latents sharded over ranks",
            f"{VLLM} config/parallel.py",
        )
    yield from _nodes(server, ("--master-addr", Slot(f"${{{server.role.upper()}_NODE0:?}}")))


def _vllm_memory(server: Server) -> Iterator[Flag]:
    if server.fraction is not None:
        yield Flag(("--gpu-memory-utilization", f"{server.fraction:g}"), "given with --mem-fraction")
    if server.role != "single" or server.kv_word != server.kv_word_of_auto:
        rows = "656-byte" if server.layout is Layout.DS_MLA else f"{server.layout}"
        reason = "the dtype is part of the handshake" if server.role != "single" else f"{rows} rows, not those of auto"
        yield Flag(("--kv-cache-dtype", server.kv_word), reason, f"{VLLM} config/cache.py")
    if server.page is not None:
        yield Flag(("--block-size", str(server.page)), "given with --page-size")
    if server.short_of_context:
        yield Flag(
            ("--max-model-len", "auto"),
            f"the KV cache holds less than the {server.model.context:,} tokens of the config, and vLLM then refuses to "
            "start; auto takes what fits",
            f"{VLLM} config/model.py, v1/core/kv_cache_utils.py",
        )


def _transfer(server: Server, paths_differ: bool) -> Flag:
    content: dict[str, object] = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if server.role == "prefill" else "kv_consumer",
    }
    reason = "transfers the KV cache by NIXL"
    if paths_differ:
        content["kv_connector_extra_config"] = {"enforce_handshake_compat": False}
        reason += (
            "; the handshake's hash holds the model's path, and the two paths differ. Without enforcement nobody "
            "compares dtype, layers and backend either: the findings here do"
        )
    words = ("--kv-transfer-config", json.dumps(content, separators=(",", ":")))
    return Flag(words, reason, f"{VLLM} distributed/kv_transfer/kv_connector/v1/nixl/metadata.py, base_worker.py")

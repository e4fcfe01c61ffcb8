"""The options of `kizami serve`."""

from typing import Annotated, Literal

import typer

from kizami.cli.options import option

SERVER, MEMORY, PREFILL = "Server", "Memory", "Prefill server"

EngineName = Literal["sglang", "vllm"]
GpuName = Literal["h100", "h200", "h20-3e", "b200"]
KvName = Literal["bf16", "fp8_e4m3", "fp8_ds_mla"]

Served = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        show_default=False,
        help="What will be served: the output of kizami convert or any checkpoint, as a folder or a Hub id in the "
        "local Hub cache.",
    ),
]
Engine = Annotated[EngineName, option("--engine", panel=SERVER, help="sglang (default) or vllm.")]
TensorParallel = Annotated[
    int, option("--tp", panel=SERVER, metavar="N", min=1, max=1024, help="GPUs that share one model. Default 8.")
]
ExpertParallel = Annotated[
    int,
    option("--ep", panel=SERVER, metavar="N", min=1, max=1024, help="Groups of experts among these GPUs. Default 1."),
]
ContextParallel = Annotated[
    int,
    option(
        "--dcp",
        panel=SERVER,
        metavar="N",
        min=1,
        max=1024,
        help="Decode context parallelism: latents shared by N GPUs.",
    ),
]
Gpu = Annotated[GpuName, option("--gpu", panel=SERVER, help="h100, h200 (default), h20-3e or b200.")]
Gpus = Annotated[
    int | None,
    option("--gpus", panel=SERVER, metavar="N", min=1, max=100_000, help="GPUs in all, for tokens of all replicas."),
]
MemFraction = Annotated[
    float | None,
    option(
        "--mem-fraction",
        panel=MEMORY,
        metavar="F",
        min=0.01,
        max=1.0,
        help="SGLang's --mem-fraction-static or vLLM's --gpu-memory-utilization. Default: the engine's own.",
    ),
]
KvCacheDtype = Annotated[
    KvName,
    option(
        "--kv-cache-dtype", panel=MEMORY, help="bf16 (default), fp8_e4m3, or fp8_ds_mla: rows with scales of their own."
    ),
]
PageSize = Annotated[
    int | None,
    option(
        "--page-size", panel=MEMORY, metavar="N", min=1, max=4096, help="Tokens in a page. Default: what is needed."
    ),
]
PoolGib = Annotated[
    float | None,
    option(
        "--pool-gib",
        panel=MEMORY,
        metavar="GIB",
        min=0.0,
        max=100_000.0,
        help="The KV pool of one GPU of OUT's server as the engine's log states it, in place of the estimate.",
    ),
]
Prefill = Annotated[
    str | None,
    option(
        "--prefill",
        panel=PREFILL,
        metavar="SRC",
        help="Prefill with this checkpoint (the FP8 source), decode with OUT.",
    ),
]
PrefillTp = Annotated[
    int | None,
    option("--prefill-tp", panel=PREFILL, metavar="N", min=1, max=1024, help="Its GPUs, if not as many as --tp."),
]
PrefillGpu = Annotated[GpuName | None, option("--prefill-gpu", panel=PREFILL, help="Its GPU, if not that of --gpu.")]
PrefillKvCacheDtype = Annotated[
    KvName | None,
    option("--prefill-kv-cache-dtype", panel=PREFILL, help="Its KV dtype, to see what comes of a difference."),
]

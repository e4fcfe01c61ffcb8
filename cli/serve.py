"""`kizami serve`: launch commands, what would go wrong with them, and what fits into memory. It starts nothing."""

import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

from kizami.cli import options as o
from kizami.cli import serve_options as so
from kizami.cli.command import Command
from kizami.cli.output import Ui
from kizami.formats.errors import KizamiError, printable

if TYPE_CHECKING:
    from kizami.formats.serving import launch
    from kizami.formats.serving.server import Server
    from kizami.quantize.launch import Launch
    from kizami.quantize.serving import Row, Served


def serve(
    context: typer.Context,
    out: so.Served,
    engine: so.Engine = "sglang",
    tp: so.TensorParallel = 8,
    ep: so.ExpertParallel = 1,
    dcp: so.ContextParallel = 1,
    gpu: so.Gpu = "h200",
    gpus: so.Gpus = None,
    mem_fraction: so.MemFraction = None,
    kv_cache_dtype: so.KvCacheDtype = "bf16",
    page_size: so.PageSize = None,
    pool_gib: so.PoolGib = None,
    prefill: so.Prefill = None,
    prefill_tp: so.PrefillTp = None,
    prefill_gpu: so.PrefillGpu = None,
    prefill_kv_cache_dtype: so.PrefillKvCacheDtype = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Print launch commands and a capacity plan for SGLang or vLLM. Starts nothing.

    With --prefill: a pair, prefill and decode, and the router. Every flag comes with its reason and the public file
    that it rests on. Reads headers and configs only. Exit code 1 if the launch would fail.
    """
    from kizami.cli.serve_text import show_serve
    from kizami.quantize.launch import plan_launch

    ui = Ui(quiet=quiet, verbose=verbose, json=json)
    _check_options(
        context, gpus, tp, {} if prefill is not None else {
            "prefill_tp": prefill_tp, "prefill_gpu": prefill_gpu, "prefill_kv_cache_dtype": prefill_kv_cache_dtype,
        }
    )  # fmt: skip
    served = _served(out)
    server = replace(
        _server(engine, served, out, gpu), tp=tp, ep=ep, dcp=dcp, kv_dtype=kv_cache_dtype, page=page_size,
        fraction=mem_fraction,
    )  # fmt: skip
    if prefill is None:
        made = plan_launch([(server, served)], pool_gib)
    else:
        source = _served(prefill)
        before = replace(
            _server(engine, source, prefill, prefill_gpu or gpu), role="prefill", tp=prefill_tp or tp,
            ep=_prefill_ep(ep, tp, prefill_tp), dcp=dcp, kv_dtype=prefill_kv_cache_dtype or kv_cache_dtype,
            page=page_size, fraction=mem_fraction,
        )  # fmt: skip
        made = plan_launch([(before, source), (replace(server, role="decode"), served)], pool_gib)
    body = serve_body(made, gpus)
    if json:
        ui.emit("serve", body)
    else:
        show_serve(ui, made, gpus)
    if not body["ok"]:
        raise typer.Exit(1)


def _check_options(context: typer.Context, gpus: int | None, tp: int, homeless: dict[str, object]) -> None:
    """`homeless`: options of the prefill server where there is none."""
    for name, given in homeless.items():
        if given is not None:
            raise KizamiError(f"{o.spelled(context, name)} without --prefill", code="usage", hint="add --prefill SRC")
    if gpus is not None and gpus < tp:
        raise KizamiError(
            f"{o.spelled(context, 'gpus')} {gpus} is less than the {tp} of --tp",
            code="bad_option",
            hint="a smaller --tp",
        )


def _prefill_ep(ep: int, tp: int, prefill_tp: int | None) -> int:
    """As wide as its own TP where decode's is as wide as decode's."""
    return prefill_tp if prefill_tp is not None and ep == tp else ep


def _server(engine: so.EngineName, served: "Served", path: str, gpu: str) -> "Server":
    """`org/name@revision` is two words to the engines."""
    from kizami.formats.serving.gpus import GPUS
    from kizami.formats.serving.server import Server

    name, _, revision = (path, "", "") if os.path.lexists(path) else path.partition("@")
    return Server(engine, "single", name, served.model, served.stored, GPUS[gpu], revision=revision)


def _served(path: str) -> "Served":
    from kizami.cli.source import open_source
    from kizami.quantize.serving import Served

    if printable(path, len(path)) != path:
        raise KizamiError(
            "has characters that a printed command cannot carry", code="bad_option", file=path, hint="rename the folder"
        )
    checkpoint = open_source(path)
    if os.path.isfile(path):
        raise KizamiError("is one file; engines load folders", code="bad_option", file=path, hint="name its folder")
    return Served.of(checkpoint)


# ------------------------------------------------------------------------------------------------------------- --json


def serve_body(made: "Launch", gpus: int | None) -> dict[str, Any]:
    """Sizes and counts are whole numbers of bytes and tokens."""
    server = made.server
    return {
        "engine": server.engine,
        "ok": made.ok,
        "model": {**asdict(server.model), "attention": server.model.attention.value},
        "servers": [_server_body(each) for each in made.servers],
        "commands": [_command_body(command) for command in made.commands],
        "capacity": [_row_body(row, _of(made, row.role), gpus) for row in made.rows],
        "findings": [asdict(finding) for finding in made.findings],
    }


def _of(made: "Launch", role: str) -> "Server":
    return next(server for server in made.servers if server.role == role)


def _server_body(server: "Server") -> dict[str, Any]:
    return {
        "role": server.role,
        "path": server.path,
        "revision": server.revision,
        "weights": server.stored.label,
        "gpu": {"name": server.gpu.name, "mib": server.gpu.mib, "source": server.gpu.source},
        "tp": server.tp,
        "ep": server.ep,
        "dcp": server.dcp,
        "kv_cache_dtype": server.kv_word,
        "kv_layout": server.layout.value,
        "page_size": server.page_size,
    }


def _command_body(command: "launch.Command") -> dict[str, Any]:
    return {
        "role": command.role,
        "shell": "\n".join(command.lines),
        "argv": command.words,
        "env": dict(command.env),
        "placeholders": command.placeholders,
        "flags": [asdict(flag) for flag in command.flags],
    }


def _row_body(row: "Row", server: "Server", gpus: int | None) -> dict[str, Any]:
    replicas = None if gpus is None else gpus // server.tp
    body: dict[str, Any] = {
        "role": row.role,
        "weights": row.label,
        "weights_computed": row.computed,
        "launched": row.chosen,
        "kv_layout": row.cost.layout.value,
        "kv_cache_dtype_option": row.option,
        "page_size": row.page,
        "layers": row.cost.layers,
        "row_bytes": row.cost.row,
        "index_layers": row.cost.index_layers,
        "index_bytes": row.cost.index,
        "dcp": row.cost.dcp,
        "pool_how": row.pool.how,
        "assumptions": list(row.pool.assumptions),
        "plain": _case(row.weights, row.pool.nbytes, row.cost, row.tokens, replicas),
        "with_mtp": None,
    }
    if row.pool_mtp is not None and row.cost_mtp is not None and row.weights_mtp is not None:
        body["with_mtp"] = _case(row.weights_mtp, row.pool_mtp.nbytes, row.cost_mtp, row.tokens_mtp or 0, replicas)
    return body


def _case(weights: int, pool: int, cost: Any, tokens: int, replicas: int | None) -> dict[str, Any]:
    return {
        "weight_bytes_per_gpu": weights,
        "pool_bytes_per_gpu": pool,
        "bytes_per_token_per_gpu": cost.bytes_per_token,
        "tokens_per_replica": tokens,
        "token_rows_per_gpu": tokens // cost.dcp,
        "replicas": replicas,
        "tokens_of_all_replicas": None if replicas is None else tokens * replicas,
    }


COMMAND = Command(
    "serve",
    serve,
    (
        "kizami serve GLM-5.2-INT4/ --gpu h200 --tp 8",
        "kizami serve GLM-5.2-INT4/ --prefill GLM-5.2-FP8/ --kv-cache-dtype fp8_e4m3",
        "kizami serve GLM-5.2-INT4/ --engine vllm --prefill GLM-5.2-FP8/ --kv-cache-dtype fp8_ds_mla --json",
    ),
)

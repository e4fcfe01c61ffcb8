"""`kizami kv-scales`: scales of an FP8 KV cache, who vouches for them, and what engines do with them."""

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from kizami.cli import kv_scales_options as k
from kizami.cli import options as o
from kizami.cli.command import Command
from kizami.cli.output import Ui
from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from kizami.cli.target import Target
    from kizami.formats.kv_scales.neutral import KvScales
    from kizami.quantize.kv_scales.assess import Assessment
    from kizami.quantize.kv_scales.certificate import Bound
    from kizami.quantize.kv_scales.choose import LayerChoice


def kv_scales(
    context: typer.Context,
    src: o.Source,
    stats: k.Stats = None,
    given: k.From = None,
    per_head: k.PerHead = False,
    kv_format: k.Format = "json",
    tp: k.TensorParallel = None,
    force: k.Force = False,
    output: o.ToFile = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Scales for an FP8 KV cache, layer by layer, and who vouches for them.

    A certificate proves from the weights that scale 1.0 cannot clip; --stats has what was measured; last come the
    scales that SRC brings. A layer without any of these is "not calibrated". Says what SGLang and vLLM really do with
    the scales, and writes nothing that would spoil attention. Exit code 1 if measured values will be clipped, or if
    FILE was not written.
    """
    from kizami.cli.kv_scales_text import show_kv_scales
    from kizami.cli.source import open_source
    from kizami.cli.target import Target
    from kizami.formats.statistics import Statistics
    from kizami.quantize.kv_scales.assess import assess
    from kizami.quantize.kv_scales.scale_file import read_kv_scales

    ui = Ui(quiet=quiet, verbose=verbose, json=json)
    _check_options(context, kv_format, tp)
    _check_name(output, kv_format)
    if per_head and given is not None:
        raise KizamiError("--per-head beside --from, whose FILE says how many there are", code="bad_option")
    checkpoint = open_source(src)
    target = None if output is None else Target.checked(output, checkpoint.root, given)
    made = assess(
        checkpoint,
        None if stats is None else Statistics.open(stats),
        "attn_head" if per_head else "tensor",
        None if given is None else read_kv_scales(given, checkpoint),
    )
    data = _encode(made, kv_format, tp, force=force)
    if tp is not None and kv_format == "sglang" and made.model.heads % tp:
        raise KizamiError(f"{made.model.heads} heads do not go into {tp} ranks", code="tp_does_not_divide")
    refused = None if force else _refusal(made.scales, kv_format)
    written = _write(target, data, kv_format) if refused is None else None
    body = kv_scales_body(made, kv_format, refused, written)
    if json:
        ui.emit("kv-scales", body)
    else:
        show_kv_scales(ui, made, body, wanted=output is not None)
    if made.clips or (refused is not None and output is not None):
        raise typer.Exit(1)


def _check_options(context: typer.Context, kv_format: str, tp: int | None) -> None:
    if kv_format == "sglang" and tp is None:
        raise KizamiError(
            "SGLang wants a scale for each rank, and refuses a file of another number of ranks",
            code="usage",
            hint="add --tp N, the server's",
        )
    if kv_format != "sglang" and tp is not None and not o.from_environment(context, "tp"):
        raise KizamiError(f"--tp without --format sglang; {kv_format} is the same for any", code="usage")


def _check_name(output: str | None, kv_format: str) -> None:
    """--kv-scales and --from tell tensors from JSON by the name."""
    if output is None or (os.path.exists(output) and not os.path.isfile(output)):  # a pipe has any name
        return
    from kizami.formats.kv_scales.neutral import SUFFIX

    has_tensors = kv_format == "checkpoint"
    if output.endswith(SUFFIX) != has_tensors:
        expected = f"a name that ends in {SUFFIX}" if has_tensors else "another name: what is written is JSON"
        raise KizamiError(f"expected {expected}", code="bad_file", file=output)


def _encode(made: "Assessment", kv_format: str, tp: int | None, *, force: bool) -> bytes:
    """The file's bytes. KizamiError "no_kv_json"."""
    from kizami.formats.kv_scales.sglang import sglang_file
    from kizami.formats.kv_scales.tensors import encode_tensors
    from kizami.formats.strict_json import dump_json

    if kv_format == "sglang":
        assert tp is not None
        return dump_json(sglang_file(made.scales, tp, force=force))
    return encode_tensors(made.scales, made.prefix) if kv_format == "checkpoint" else made.scales.encode()


def _refusal(scales: "KvScales", kv_format: str) -> str | None:
    """Why a file for engines is not written; kizami's own always is."""
    from kizami.formats.kv_scales.effects import refusal

    if kv_format == "json":
        return None
    if (why := refusal(scales)) is not None:
        return f"{why}. --force writes them all the same"
    if scales.attention != "gqa":
        return (
            "nothing to write: engines store this latent at scale 1.0 without any tensor, and the table above is a "
            "check of its range"
        )
    if scales.trivial:
        return "nothing to write: no layer is calibrated, and every scale would be 1.0, which engines use without any"
    return None


def _write(target: "Target | None", data: bytes, kv_format: str) -> dict[str, Any] | None:
    if target is None:
        return None
    target.write(data)
    return {"file": target.name, "format": kv_format, "bytes": len(data)}


# ------------------------------------------------------------------------------------------------------------- --json


def kv_scales_body(
    made: "Assessment", kv_format: str, refused: str | None, written: dict[str, Any] | None
) -> dict[str, Any]:
    from kizami.formats.kv_scales.effects import effects
    from kizami.formats.kv_scales.tensors import kv_cache_scheme

    scheme = kv_cache_scheme(made.scales) if kv_format == "checkpoint" and refused is None else None
    layers = [_layer_body(layer) for layer in made.layers]
    return {
        "ok": not made.clips,
        "format": kv_format,
        **{key: value for key, value in made.scales.document().items() if key not in ("schema", "layers")},
        "not_calibrated": list(made.scales.uncalibrated),
        "trivial": made.scales.trivial,
        "layers": layers,
        "mtp_layers": [{"layer": s.layer, "bounds": [_bound_body(b) for b in s.bounds]} for s in made.mtp],
        "effects": [asdict(effect) for effect in effects(made.scales)],
        "refused": refused,
        "kv_cache_scheme": scheme,
        "written": written,
    }


def _layer_body(layer: "LayerChoice") -> dict[str, Any]:
    return {
        "layer": layer.scales.layer,
        "source": layer.scales.source,
        "k": list(layer.scales.k),
        "v": list(layer.scales.v),
        "bounds": [_bound_body(bound) for bound in layer.bounds],
        "measured": {name: asdict(window) for name, window in layer.windows.items()},
        "headroom": layer.headroom,
        "findings": [asdict(finding) for finding in layer.findings],
    }


def _bound_body(bound: "Bound") -> dict[str, Any]:
    return {
        "what": bound.what,
        "bound": bound.value,
        "proves": bound.proves,
        "plateau": bound.plateau,
        "on_plateau": bound.on_plateau,
        "how": bound.how,
    }


COMMAND = Command(
    "kv-scales",
    kv_scales,
    (
        "kizami kv-scales GLM-5.2-FP8/",
        "kizami kv-scales GLM-4.7-FP8/ --stats stats/ -o kv.json",
        "kizami kv-scales Llama-3.3-70B/ --from kv.safetensors --format sglang --tp 8 -o kv_cache_scales.json",
    ),
)

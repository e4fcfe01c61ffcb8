"""`kizami report --stats --against`: the error of what comes out of each layer's experts."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from kizami.cli import options as o
from kizami.cli.output import Ui, counted, figure
from kizami.formats.errors import KizamiError

LAYER_COLUMNS = (
    ">layer",
    ">rel error",
    ">SQNR dB",
    ">tokens",
    ">fit min",
    ">median",
    ">max",
    ">starved",
    "worst module",
)
MODULE_COLUMNS = (">rel error", ">SQNR dB", ">tokens", "module")
STARVED_SHOWN = 8
EXCEEDING_SHOWN = 5
Body = dict[str, Any]


def check_options(
    context: typer.Context, stats: Path | None, against: str | None, max_output_error: float | None, *, pictures: bool
) -> None:
    """What goes together must be given together; pictures of the worst weights need the source alone."""
    if (stats is None) != (against is None) and not (pictures and stats is None):
        given, missing = ("stats", "--against SRC") if against is None else ("against", "--stats STATS")
        raise KizamiError(
            f"{o.spelled(context, given)} without {missing.split()[0]}: the error of the outputs needs the inputs that "
            "STATS keeps, and the source's weights",
            code="usage",
            hint=f"add {missing}",
        )
    if max_output_error is not None and stats is None:
        raise KizamiError(
            f"{o.spelled(context, 'max_output_error')} without --stats and --against: no outputs are looked at",
            code="usage",
            hint="add --stats STATS --against SRC",
        )


def outputs_body(ui: Ui, out: Path, stats: Path, against: str, top: int | None, max_output_error: float | None) -> Body:
    """The part of --json. top: how many modules, the worst first; None for all."""
    from kizami.cli.source import open_source
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.statistics import STARVED, Statistics
    from kizami.quantize.calibrated.solver import FEWEST_HELD_OUT
    from kizami.quantize.manifest import method_of, read_manifest
    from kizami.quantize.output_error import (
        OutputErrors,
        median_error,
        unsure_modules,
        worst_modules,
    )

    statistics, manifest, source = Statistics.open(stats), read_manifest(out), open_source(against)
    if source.root.resolve() == out.resolve():
        raise KizamiError(
            "--against wants the source, and this is OUT itself",
            code="other_source",
            file=against,
            hint="name the checkpoint that OUT was made of",
        )
    errors = OutputErrors(Checkpoint.open(out), manifest, source, statistics)
    layers = []
    for done, layer in enumerate(errors.each(), 1):
        layers.append(layer)
        ui.progress(f"layer {layer.layer} ({done} of {len(errors.layers)}): output error {_error(layer.rel_error)}")
    worst = worst_modules(layers)
    over = [module for module in worst if max_output_error is not None and (module.rel_error or 0) > max_output_error]
    unmeasured, unsure = errors.unmeasured, unsure_modules(layers)
    used = method_of(manifest).stats
    return {
        "stats_sha256": statistics.sha256,
        "rel_error": median_error(layers),
        "layers": [_layer(asdict(layer), FEWEST_HELD_OUT) for layer in layers],
        "worst": [asdict(module) for module in worst[:top]],
        "modules": len(worst),
        "starved_below": STARVED,
        "unmeasured": len(unmeasured),
        "few_tokens_below": FEWEST_HELD_OUT,
        "few_tokens": [module.name for module in unsure],
        "chose_codes": manifest["method"] == "gptq" and used == statistics.sha256,
        "other_stats": used is not None and used != statistics.sha256,
        "max_output_error": max_output_error,
        "exceeding": [{"name": module.name, "rel_error": module.rel_error} for module in over],
    }


def _layer(line: Body, fewest: int) -> Body:
    """Without its modules, but for the worst of those with `fewest` tokens."""
    modules = [m for m in line.pop("modules") if m["rel_error"] and m["tokens"] >= fewest]
    worst = max(modules, key=lambda module: module["rel_error"], default=None)
    return line | {"worst": worst and {key: worst[key] for key in ("name", "rel_error")}}


def _error(rel_error: float | None) -> str:
    return figure(rel_error) if rel_error else "none"


def layer_rows(body: Body) -> list[tuple[str, ...]]:
    return [
        (
            str(line["layer"]),
            figure(line["rel_error"] or None),
            figure(line["sqnr_db"], 2),
            f"{line['tokens']:,}",
            *_routing(line["routing"]),
            f"{line['worst']['name']} ({figure(line['worst']['rel_error'])})" if line["worst"] else "",
        )
        for line in body["layers"]
    ]


def _routing(routing: Body | None) -> tuple[str, ...]:
    if routing is None:
        return ("", "", "", "")
    return f"{routing['min']:,}", f"{routing['median']:,.0f}", f"{routing['max']:,}", f"{len(routing['starved']):,}"


def module_rows(body: Body) -> list[tuple[str, ...]]:
    return [
        (figure(row["rel_error"]), figure(row["sqnr_db"], 2), f"{row['tokens']:,}", row["name"])
        for row in body["worst"]
    ]


def show_outputs(ui: Ui, body: Body) -> None:
    ui.heading("what comes out of each layer's experts, on held-out tokens")
    ui.table(LAYER_COLUMNS, layer_rows(body))
    if body["worst"]:
        ui.heading(f"worst {counted(len(body['worst']), 'module')} by output")
        ui.table(MODULE_COLUMNS, module_rows(body))
    ui.say()
    for line in notes(body, None if ui.verbose else STARVED_SHOWN):
        ui.prose(line)


def notes(body: Body, names_shown: int | None) -> list[str]:
    """What the tables do not say."""
    starved = [name for line in body["layers"] if line["routing"] for name in line["routing"]["starved"]]
    lines = []
    if starved:
        shown = ", ".join(starved[:names_shown])
        more = f" and {len(starved) - names_shown} more" if names_shown and len(starved) > names_shown else ""
        few = f"fewer than {body['starved_below']} fit tokens"
        lines.append(f"{counted(len(starved), 'expert')} with {few}: {shown}{more}")
    if body["unmeasured"]:
        lines.append(
            f"{counted(body['unmeasured'], 'packed module')} not looked at: STATS keeps no inputs of theirs "
            "(attention, MTP layers)"
        )
    if body["few_tokens"]:
        few = f"too few tokens, under {body['few_tokens_below']} held out, to tell"
        lines.append(f"{counted(len(body['few_tokens']), 'module')} with {few}: in no list of the worst")
    if body["other_stats"]:
        lines.append("these are not the statistics that the run used: errors are of other tokens than it calibrated on")
    if body["chose_codes"]:
        lines.append("these held-out tokens also chose between gptq's codes and weighted's: its error looks smaller")
    return lines


def last_line(body: Body) -> str:
    lines = [line for line in body["layers"] if line["rel_error"]]
    worst, changed = max(lines, key=lambda line: line["rel_error"], default=None), len(lines)
    if worst is None:
        return "output error: none, no layer's output differs"
    return (
        f"output error {figure(body['rel_error'])}, the median of {counted(changed, 'layer')}; at most "
        f"{figure(worst['rel_error'])}, in layer {worst['layer']}"
    )


def fail_over_output_error(ui: Ui, body: Body | None) -> None:
    """Exit code 1, naming the experts; also where a limit was given and too few tokens were held out to judge any."""
    if body is None or body["max_output_error"] is None:
        return
    if body["few_tokens"] and not body["modules"]:
        few = f"no expert has {body['few_tokens_below']} held-out tokens: nothing was held to --max-output-error"
        ui.fail([f"{few}; run kizami calibrate with more --samples"])
        raise typer.Exit(1)
    if not body["exceeding"]:
        return
    limit = body["max_output_error"]
    ui.fail(
        [f"{row['name']}: output error {figure(row['rel_error'])} is above {limit:g}" for row in body["exceeding"]],
        EXCEEDING_SHOWN,
    )
    raise typer.Exit(1)

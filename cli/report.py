"""`kizami report`: what the conversion cost in accuracy, per role, layer and tensor."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from kizami.cli import options as o
from kizami.cli import report_compare as comparison
from kizami.cli import report_limits as limits
from kizami.cli import report_options as r
from kizami.cli import report_outputs as outputs
from kizami.cli.command import Command
from kizami.cli.convert import show_roles
from kizami.cli.kv_options import kv_body
from kizami.cli.method_words import method_body, method_lines
from kizami.cli.output import Ui, counted, figure, gib, plain_table
from kizami.cli.report_html import html, refuse_missing_packages
from kizami.cli.target import Target
from kizami.formats.errors import KizamiError, printable


def report(
    context: typer.Context,
    out: o.Out,
    format: r.ReportFormat = None,
    output: o.ToFile = None,
    top: r.Top = 10,
    max_rel_error: r.MaxRelError = None,
    min_sqnr: r.MinSqnr = None,
    compare: r.Compare = None,
    stats: r.InputStats = None,
    against: r.OutputAgainst = None,
    max_output_error: r.MaxOutputError = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Show the error of each role, each layer and the worst tensors.

    The figures were measured while converting and lie in OUT/kizami-report.jsonl, one line per tensor. With --stats and
    --against the error of what comes out of each layer's experts is measured now, on the tokens that calibration held
    out.
    """
    from kizami.cli.source import finished_output

    pictures = format == "html"
    outputs.check_options(context, stats, against, max_output_error, pictures=pictures)
    if pictures:
        refuse_missing_packages()
        if output is None:
            raise KizamiError("html is a file", code="usage", hint="add -o FILE")
    if json and format not in (None, "json"):
        given, other = o.spelled(context, "json"), o.spelled(context, "format")
        raise KizamiError(
            f"{given} and {other} {format} contradict each other", code="usage", hint="give one of the two"
        )
    as_json = json or format == "json"
    # who names a format wants the report
    ui = Ui(quiet=quiet and (format is None or output is not None), verbose=verbose, json=as_json)
    folder = finished_output(out)
    target = None if output is None else Target.checked(output, folder)
    shown = None if verbose else top
    most = limits.parse_limits(limits.MAX_REL_ERROR, max_rel_error)
    body = report_body(folder, shown, most, limits.parse_limits(limits.MIN_SQNR, min_sqnr))
    if compare is not None:
        body["compared"] = comparison.comparison_body(folder, compare)
    if stats is not None and against is not None:
        body["outputs"] = outputs.outputs_body(ui, folder, stats, against, shown, max_output_error)
    if target is not None:
        made = (
            html(ui, body, folder, against, stats)
            if pictures
            else _document(body, "json" if as_json else format or "text")
        )
        target.write(made)
        if not quiet:
            ui.progress(f"written to {output}")
    elif as_json:
        ui.emit("report", body)
    elif format in ("markdown", "junit"):
        for line in _document(body, format).decode("utf-8").splitlines():
            ui.say(line)
    else:
        show_report(ui, body)
    outputs.fail_over_output_error(ui, body["outputs"])
    limits.fail_missed(ui, body)


def report_body(
    out: Path,
    top: int | None,
    max_rel_error: dict[str, float] | None = None,
    min_sqnr: dict[str, float] | None = None,
) -> dict[str, Any]:
    from kizami.quantize.manifest import read_manifest
    from kizami.quantize.report import (
        layer_summaries,
        measured,
        packed,
        pooled_error,
        read_whole_report,
        role_summaries,
        worst_tensors,
    )

    manifest = read_manifest(out)
    rows = read_whole_report(out, manifest)
    rounded, limited = measured(rows), packed(rows)
    return {
        "out": str(out),
        "family": manifest["family"],
        "dialect": manifest["dialect"],
        "scheme": manifest["scheme"],
        "method": manifest["method"],
        "actions": manifest["counts"],
        "output": manifest["output"],
        "kv_scales": kv_body(manifest),
        "packed_modules": len(rounded),
        "rel_error": pooled_error(rounded),
        **method_body(rounded),
        "roles": [asdict(line) for line in role_summaries(rows)],
        "layers": [asdict(line) for line in layer_summaries(rows)],
        "worst": worst_tensors(rows, len(rounded) if top is None else top),
        "max_rel_error": max_rel_error or {},
        "exceeding": limits.missed(limits.MAX_REL_ERROR, limited, max_rel_error or {}),
        "min_sqnr": min_sqnr or {},
        "below": limits.missed(limits.MIN_SQNR, limited, min_sqnr or {}),
        "compared": None,
        "outputs": None,
        "warnings": manifest["warnings"],
    }


def title(body: dict[str, Any]) -> str:
    output = body["output"]
    size = f"{gib(output['bytes'])}, {output['bits_per_weight']:.2f} bits per weight"
    how = f", --method {body['method']}" if "quantize" in body["actions"] else ""
    return f"{body['family'] or 'model'}, {body['scheme']}{how}: {size}"


def last_line(body: dict[str, Any]) -> str:
    from math import log10

    error = body["rel_error"]
    if not body["packed_modules"]:
        return "no weight was rounded to fewer bits: there is no error to report"
    sqnr = f" (SQNR {-20 * log10(error):.2f} dB)" if error else ""
    return f"relative error {figure(error)}{sqnr} over {counted(body['packed_modules'], 'module')}"


LAYER_COLUMNS = (">layer", ">packed", ">rel error", ">max", "worst tensor")
WORST_COLUMNS = (">rel error", ">SQNR dB", ">top 0.1% dB", ">max abs", ">clipped", "tensor")
NARROW = (0, 1, 4, 5)  # of WORST_COLUMNS, for a terminal of 80 columns


def _layer_rows(body: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            "-" if line["layer"] is None else str(line["layer"]),
            f"{line['tensors']:,}",
            figure(line["rel_error"]),
            figure(line["max_rel_error"]),
            line["worst"],
        )
        for line in body["layers"]
    ]


def worst_rows(body: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            figure(row["rel_error"]),
            figure(row.get("sqnr_db"), 2),
            figure(row.get("sqnr_top_db"), 2),
            figure(row.get("max_abs_error"), 5),
            "" if row.get("clipped_fraction") is None else f"{100 * row['clipped_fraction']:.2f} %",
            row["name"],
        )
        for row in body["worst"]
    ]


def show_report(ui: Ui, body: dict[str, Any]) -> None:
    ui.say(title(body), "bold")
    ui.say()
    show_roles(ui, body["roles"])
    ui.heading("measured modules by layer")
    ui.table(LAYER_COLUMNS, _layer_rows(body))
    if body["worst"]:
        ui.heading(f"worst {counted(len(body['worst']), 'tensor')}")
        chosen = range(len(WORST_COLUMNS)) if ui.verbose else NARROW
        ui.table([WORST_COLUMNS[i] for i in chosen], [[row[i] for i in chosen] for row in worst_rows(body)])
    if body["outputs"]:
        outputs.show_outputs(ui, body["outputs"])
    if found := body["compared"]:
        ui.heading(comparison.title(found))
        ui.table(comparison.COLUMNS, comparison.rows_of([*found["roles"], *found["layers"]]))
        for line in comparison.notes(found):
            ui.prose(line)
    for line in method_lines(body):
        ui.prose(line)
    if body["kv_scales"]:
        ui.prose(f"KV scales: {body['kv_scales']['statement']}")
    ui.warn(body["warnings"])
    ui.say()
    if body["outputs"]:
        ui.say(last_line(body))
        ui.result(outputs.last_line(body["outputs"]))
    else:
        ui.result(last_line(body))


def markdown(body: dict[str, Any]) -> list[str]:
    """For a pull request or a model card."""
    roles = [
        (
            line["role"],
            line["action"],
            f"{line['tensors']:,}",
            gib(line["bytes"]),
            figure(line["rel_error"]),
            figure(line["max_rel_error"]),
            figure(line["sqnr_db"], 2),
        )
        for line in body["roles"]
    ]
    lines = ["# Error report", "", _cell(title(body)), ""]
    lines += _md_table(("role", "action", ">tensors", ">bytes", ">rel error", ">max", ">SQNR dB"), roles)
    lines += ["", "## Packed modules by layer", "", *_md_table(LAYER_COLUMNS, _layer_rows(body))]
    if body["worst"]:
        lines += ["", "## Worst tensors", "", *_md_table(WORST_COLUMNS, worst_rows(body))]
    if found := body["compared"]:
        lines += ["", f"## Compared: {_cell(comparison.title(found))}", ""]
        lines += _md_table(comparison.COLUMNS, comparison.rows_of([*found["roles"], *found["layers"]]))
        lines += [text for line in comparison.notes(found) for text in ("", _cell(line))]
    if found := body["outputs"]:
        lines += ["", "## Outputs of each layer's experts, on held-out tokens", ""]
        lines += _md_table(outputs.LAYER_COLUMNS, outputs.layer_rows(found))
        if found["worst"]:
            lines += ["", "## Worst modules by output", ""]
            lines += _md_table(outputs.MODULE_COLUMNS, outputs.module_rows(found))
        lines += [line for note in outputs.notes(found, outputs.STARVED_SHOWN) for line in ("", _cell(note))]
    lines += [text for line in method_lines(body) for text in ("", _cell(line))]
    ends = [last_line(body), *([outputs.last_line(found)] if found else [])]
    return [*lines, *(line for end in ends for line in ("", end))]


def _md_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    heads = [name.removeprefix(">") for name in columns]
    rules = ["---:" if name.startswith(">") else "---" for name in columns]
    return ["| " + " | ".join(map(_cell, row)) + " |" for row in (heads, rules, *rows)]


def _cell(text: str) -> str:
    """A tensor name cannot end a cell or start markup: it comes from an untrusted file."""
    safe = printable(text, 2000)
    return "".join("\\" + c if c in "\\`|<>[]*" else c for c in safe)


def _document(body: dict[str, Any], format: str) -> bytes:
    from kizami.formats.strict_json import dump_json

    if format == "json":
        return dump_json({"schema": "kizami.report/1", **body})
    if format == "junit":
        return limits.junit(body)
    lines = markdown(body) if format == "markdown" else text(body)
    return ("\n".join(lines) + "\n").encode("utf-8", "backslashreplace")


def text(body: dict[str, Any]) -> list[str]:
    """The text form as lines, for a file."""
    collected = _Lines()
    show_report(collected, body)
    return collected.lines


class _Lines(Ui):
    """A Ui that keeps its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str = "", style: str = "") -> None:
        self.lines.append(printable(text, 2000))

    def result(self, text: str) -> None:
        self.say(text)

    def table(self, heads: Any, rows: Any) -> None:
        cells = [[printable(cell, 2000) for cell in row] for row in rows]
        self.lines += plain_table(heads, cells) if cells else []

    def warn(self, texts: Any) -> None:
        self.lines += [f"warning: {printable(text, 2000)}" for text in texts]


COMMAND = Command(
    "report",
    report,
    (
        "kizami report GLM-5.2-INT4/",
        "kizami report GLM-5.2-INT4/ --format markdown -o errors.md",
        "kizami report GLM-5.2-INT4/ --format html --against GLM-5.2-FP8/ -o report.html",
        "kizami report out/ --top 50 --max-rel-error 0.12",
        "kizami report out/ --min-sqnr routed_expert=20 --format junit -o report.xml",
        "kizami report gptq/ --compare search/",
        "kizami report out/ --stats STATS/ --against src/ --max-output-error 0.15",
    ),
)

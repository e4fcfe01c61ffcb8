"""`kizami report --format html`: the same figures as the other forms, pictures, a close look at the worst tensors, the
KV cache's headroom, which engines load it, and hashes."""

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kizami.cli import report_compare as comparison
from kizami.cli import report_limits as limits
from kizami.cli import report_outputs as outputs
from kizami.cli.output import Ui, counted, figure, gib
from kizami.formats.errors import KizamiError, printable

if TYPE_CHECKING:
    from kizami.cli.html.page import Page, Section
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.statistics import Statistics

Body = dict[str, Any]
CLOSE = 4  # worst tensors that are looked at closely
OUTLIERS_SHOWN = 20
MISSED_SHOWN = 20  # tensors that miss a limit
INSTALL = "pip install 'kizami[report]'"


def refuse_missing_packages() -> None:
    """KizamiError "missing_package"."""
    from importlib.util import find_spec

    absent = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if absent:
        raise KizamiError(f"{' and '.join(absent)} not installed", code="missing_package", hint=INSTALL)


def html(ui: Ui, body: Body, out: Path, against: str | None, stats: Path | None) -> bytes:
    """The file. body: of `report_body`. against: SRC, for the worst weights as they were."""
    from kizami.cli.html.page import render
    from kizami.cli.source import open_source
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.statistics import Statistics
    from kizami.quantize.manifest import read_manifest
    from kizami.quantize.report import read_report

    source = None if against is None else open_source(against)
    statistics = None if stats is None else Statistics.open(stats)
    page = _page(ui, body, read_manifest(out), read_report(out), Checkpoint.open(out), source, statistics)
    return render(page).encode("utf-8", "backslashreplace")


def _page(
    ui: Ui,
    body: Body,
    manifest: Body,
    rows: Sequence[Body],
    out: "Checkpoint",
    against: "Checkpoint | None",
    statistics: "Statistics | None",
) -> "Page":
    from kizami.cli.html.page import Page
    from kizami.cli.report import last_line, title

    sections = [
        _sizes(body, rows),
        _errors(rows),
        _compared(body, rows),
        _experts(rows),
        _worst(ui, body, out, against),
        _groups(rows),
        _outputs(body),
        _kv(body, out, against, statistics),
        _engines(ui, out),
        _hashes(manifest),
    ]
    return Page(
        title=printable(title(body), 200),
        subtitle=printable(f"{Path(body['out']).name}: {last_line(body)}", 400),
        facts=tuple(_facts(body, manifest)),
        sections=tuple(section for section in sections if section is not None),
        footer=f"kizami {manifest['kizami_version']} wrote the checkpoint, kizami {version('kizami')} this report.",
        warnings=tuple(printable(text, 1000) for text in [*body["warnings"], *_over(body)]),
    )


def _facts(body: Body, manifest: Body) -> Iterator[tuple[str, str]]:
    output, source = body["output"], manifest["source"]
    yield gib(output["bytes"]), f"of {gib(source['bytes'])} in the source"
    yield f"{output['bits_per_weight']:.2f}", "bits per weight"
    if body["packed_modules"]:
        yield f"{body['rel_error']:.4f}", f"relative error of {counted(body['packed_modules'], 'packed weight')}"
    actions = ", ".join(f"{count:,} {action}" for action, count in body["actions"].items())
    yield str(sum(body["actions"].values())), f"tensors: {actions}"
    yield body["method"], f"method, {body['scheme']}"


def _over(body: Body) -> list[str]:
    lines = [limits.words(one) for one in (*body["exceeding"], *body["below"])]
    return lines if len(lines) <= MISSED_SHOWN else [*lines[:MISSED_SHOWN], f"and {len(lines) - MISSED_SHOWN:,} more"]


def _sizes(body: Body, rows: Sequence[Body]) -> "Section":
    from kizami.cli.html.page import Picture, Section, table
    from kizami.cli.html.plots import sizes

    by_role: dict[str, tuple[int, int]] = {}
    for row in rows:
        before, after = by_role.get(row["role"], (0, 0))
        by_role[row["role"]] = before + row["source_bytes"], after + row["bytes"]
    pairs = sorted(((role, *both) for role, both in by_role.items()), key=lambda one: -max(one[1:]))
    lines = [
        (
            line["role"], line["action"], f"{line['tensors']:,}", gib(line["source_bytes"]), gib(line["bytes"]),
            figure(line["rel_error"]), figure(line["max_rel_error"]), figure(line["sqnr_db"], 2),
        )
        for line in body["roles"]
    ]  # fmt: skip
    heads = ("role", "action", ">tensors", ">before", ">after", ">rel error", ">max", ">SQNR dB")
    return Section("What was done", pictures=(Picture(sizes(pairs)),), tables=(table(heads, lines),))


def _errors(rows: Sequence[Body]) -> "Section | None":
    from kizami.cli.html.page import Picture, Section
    from kizami.cli.html.plots import MOST_ROWS, heat_map
    from kizami.quantize.figures import error_map

    found = error_map(rows)
    if not found.modules:
        return None
    caption = "Relative error sqrt(sum e^2 / sum W^2) of all weights that share a module and a layer."
    if len(found.modules) > MOST_ROWS:
        caption += f" The {MOST_ROWS} modules with the largest errors of {len(found.modules)}."
    return Section("Error by layer and module", pictures=(Picture(heat_map(found), caption),))


def _compared(body: Body, rows: Sequence[Body]) -> "Section | None":
    from kizami.cli.html.page import Picture, Section, table
    from kizami.cli.html.plots import heat_map
    from kizami.quantize.comparison import ratio_map
    from kizami.quantize.report import read_report

    if not (found := body["compared"]):
        return None
    ratios = ratio_map(rows, read_report(Path(found["other"])))
    caption = "Below 0 the error is smaller there, above 0 here; 1 is a factor of 2."
    pictures = (Picture(heat_map(ratios, ratio=True), caption),) if ratios.modules and ratios.layers else ()
    tables = (
        table(comparison.COLUMNS, comparison.rows_of(found["roles"])),
        table(comparison.COLUMNS, comparison.rows_of(found["layers"]), "By layer", folded=True),
    )
    words = (comparison.title(found), *comparison.notes(found))
    return Section("Compared with another output", words_of(words), pictures, tables)


def words_of(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(printable(text, 2000) for text in texts)


def _experts(rows: Sequence[Body]) -> "Section | None":
    from kizami.cli.html.page import Picture, Section, table
    from kizami.cli.html.plots import experts
    from kizami.quantize.figures import OUTLIER, expert_errors

    found = expert_errors(rows)
    if not found.layers:
        return None
    count, total = len(found.outliers), sum(len(errors) for errors in found.errors)
    words = f"{count:,} of {counted(total, 'expert')} lie more than {OUTLIER:g} spreads from their layer's median."
    lines = [
        (str(one.layer), str(one.expert), f"{one.rel_error:.4f}", f"{one.distance:+.1f}")
        for one in found.outliers[:OUTLIERS_SHOWN]
    ]
    shown = "Experts that stand out" + (f", the first {OUTLIERS_SHOWN}" if count > OUTLIERS_SHOWN else "")
    tables = (table((">layer", ">expert", ">rel error", ">spreads from the median"), lines, shown),) if lines else ()
    return Section("Experts", (words,), (Picture(experts(found)),), tables)


def _worst(ui: Ui, body: Body, out: "Checkpoint", against: "Checkpoint | None") -> "Section | None":
    from kizami.cli.html.page import Picture, Section, table
    from kizami.cli.html.plots import weight
    from kizami.cli.report import WORST_COLUMNS, worst_rows
    from kizami.quantize.weight_figures import weight_figures

    if not body["worst"]:
        return None
    pictures, words = [], []
    for row in body["worst"][:CLOSE]:
        try:
            found = weight_figures(out, row["name"], against)
        except KizamiError as e:
            words = [printable(f"No close look at {row['name']}: {e.message}.", 600)]
            break
        zeros = f"{found.zero_groups:,} of {counted(found.groups, 'group')} have codes of 0 only"
        pictures.append(Picture(weight(found), f"{row['name']} {list(found.shape)}: {zeros}."))
        ui.progress(f"looked at {row['name']}")
    if against is None and pictures:
        words.append("Weights before are shown with --against SRC.")
    return Section("The worst tensors", tuple(words), tuple(pictures), (table(WORST_COLUMNS, worst_rows(body)),))


def _groups(rows: Sequence[Body]) -> "Section | None":
    from kizami.cli.html.page import Section, table

    roles: dict[str, list[Body]] = {}
    for row in rows:
        if row.get("clipped_fraction") is not None:
            roles.setdefault(row["role"], []).append(row)
    if not roles:
        return None
    lines = []
    for role, members in sorted(roles.items()):
        weights = [_weights(row) for row in members]
        clipped = sum(row["clipped_fraction"] * n for row, n in zip(members, weights, strict=True))
        share = clipped / max(sum(weights), 1)
        zero = sum(row.get("zero_groups") or 0 for row in members)
        largest = max(members, key=lambda row: row["clipped_fraction"])
        lines.append((role, f"{share:.3%}", f"{largest['clipped_fraction']:.3%}", f"{zero:,}", largest["name"]))
    heads = ("role", ">clipped", ">most in a tensor", ">groups of zeros", "the tensor that clips most")
    return Section("Clipped weights and groups of zeros", tables=(table(heads, lines),))


def _weights(row: Body) -> int:
    count = 1
    for size in row["shape"]:
        count *= size
    return count


def _outputs(body: Body) -> "Section | None":
    from kizami.cli.html.page import Section, table

    found = body["outputs"]
    if not found:
        return None
    tables = [table(outputs.LAYER_COLUMNS, outputs.layer_rows(found))]
    if found["worst"]:
        tables.append(table(outputs.MODULE_COLUMNS, outputs.module_rows(found), "The worst modules by output"))
    words = [outputs.last_line(found), *outputs.notes(found, outputs.STARVED_SHOWN)]
    return Section("Outputs of each layer's experts, on held-out tokens", tuple(words), (), tuple(tables))


def _kv(
    body: Body, out: "Checkpoint", against: "Checkpoint | None", statistics: "Statistics | None"
) -> "Section | None":
    """With STATS what was measured of the source; else what the weights prove of the output, whose attention is the
    source's."""
    from kizami.cli.html.page import Picture, Section
    from kizami.cli.html.plots import headroom
    from kizami.quantize.kv_scales.assess import assess

    words = [f"KV scales: {body['kv_scales']['statement']}"] if body["kv_scales"] else []
    try:
        made = assess(out, None, "tensor") if against is None else assess(against, statistics, "tensor")
    except KizamiError as e:
        return Section("KV cache", (*words, f"What an FP8 cache would hold is not known: {e.message}."))
    known = [(layer.scales.layer, layer.headroom) for layer in made.layers if layer.headroom is not None]
    sources = sorted({layer.scales.source for layer in made.layers})
    words.append(f"Who vouches for the scales: {', '.join(sources)}.")
    if not known:
        return Section("KV cache", (*words, "Neither a bound nor a measurement of the cache's values is there."))
    of = "what was measured" if against is not None and statistics is not None else "the weights' bound, which is loose"
    picture = headroom([layer for layer, _ in known], [room or 0.0 for _, room in known])
    caption = f"How many times larger values may become before an FP8 cache clips them: 448 x scale over {of}."
    return Section("KV cache", tuple(words), (Picture(picture, caption),))


def _engines(ui: Ui, out: "Checkpoint") -> "Section":
    from kizami.cli.check import served_from
    from kizami.cli.html.page import Section, table
    from kizami.formats.engines.check import Checker
    from kizami.formats.engines.finding import ENGINES, READ

    cells = Checker(served_from(out, ui)).matrix()
    lines = []
    for engine in ENGINES:
        for tp in sorted({cell.tp for cell in cells if cell.engine == engine}):
            found = [cell for cell in cells if (cell.engine, cell.tp) == (engine, tp)]
            fits = ", ".join(str(cell.ep) for cell in found if cell.ok)
            why = next((cell.why for cell in found if not cell.ok), None)
            lines.append((engine, str(tp), fits or "none", why or ""))
    read = ", ".join(f"{engine} {READ[engine]}" for engine in ENGINES)
    words = (f"As config and headers tell, by the sources of {read}. kizami check says more.",)
    return Section("Which engines load it", words, (), (table(("engine", ">tp", "with ep", "why not"), lines),))


def _hashes(manifest: Body) -> "Section":
    from kizami.cli.html.page import Section, table

    words = (
        f"plan {manifest['plan_hash']}",
        f"config.json of the source {manifest['source']['config_sha256']}",
        "kizami verify OUT compares all of these with the files; --against SRC proves every tensor.",
    )
    lines = [*((shard["file"], shard["sha256"]) for shard in manifest["shards"]), *sorted(manifest["files"].items())]
    return Section("Hashes", words, (), (table(("file", "SHA-256"), lines, counted(len(lines), "file"), folded=True),))

"""What `kizami serve` says to a reader: commands, reasons, findings, one table per server, a chart."""

from typing import TYPE_CHECKING

from kizami.cli.output import Ui, counted
from kizami.formats.serving.server import SGLANG, VLLM

if TYPE_CHECKING:
    from kizami.formats.serving.foretell import Finding
    from kizami.formats.serving.kv_layout import KvCost
    from kizami.formats.serving.launch import Command
    from kizami.formats.serving.server import Server
    from kizami.quantize.launch import Launch
    from kizami.quantize.serving import Row

BAR = 40  # characters of the longest bar

HEADS = ("weights", "KV rows", ">weights/GPU", ">pool GiB", ">pool GB", ">B/token", ">tokens")


def show_serve(ui: Ui, made: "Launch", gpus: int | None) -> None:
    for command in made.commands:
        _command(ui, command)
    _reasons(ui, made)
    for server in reversed(made.servers):
        _capacity(ui, made, server)
    _chart(ui, made)
    _findings(ui, made)
    ui.result(_last(made, gpus))


def _command(ui: Ui, command: "Command") -> None:
    ui.heading(f"# {command.role}")
    if command.placeholders:
        ui.say(f"# set these first; the shell stops where one is missing: {', '.join(command.placeholders)}")
    for line in command.lines:
        ui.say(line)


def _reasons(ui: Ui, made: "Launch") -> None:
    """Each flag once, with the reason; -v has the files that the reasons rest on."""
    ui.heading("why these flags")
    rows: dict[tuple[str, str], str] = {}
    for command in made.commands:
        for flag in command.flags:
            if flag.reason:
                rows.setdefault((flag.words[0], flag.reason), flag.source)
    ui.table(
        ("flag", "reason"),
        [(word, reason + (f" [{source}]" if ui.verbose and source else "")) for (word, reason), source in rows.items()],
    )
    ui.say("Parsers of tool calls and reasoning, and names of network devices, are left to you.")


def _capacity(ui: Ui, made: "Launch", server: "Server") -> None:
    rows = [row for row in made.rows if row.role == server.role]
    if not rows:
        return
    version = SGLANG if server.engine == "sglang" else VLLM
    ui.heading(f"capacity of one {_name(server)} ({version}, tp {server.tp}, ep {server.ep}, dcp {server.dcp})")
    drafts = any(row.tokens_mtp is not None for row in rows)
    ui.table((*HEADS, ">with MTP draft") if drafts else HEADS, [_cells(row, drafts) for row in rows])
    ui.say(_legend(rows))
    first = rows[0]
    ui.pairs([
        ("GPU", f"{server.gpu.name}, {server.gpu.mib:,} MiB ({server.gpu.source})"),
        ("pool", first.pool.how),
        ("rows", _rows_text(server, rows)),
        ("pages", f"{first.page} {'token' if first.page == 1 else 'tokens'}; counts are rounded down to whole pages"),
        *(("assumed", text) for text in dict.fromkeys(text for row in rows for text in row.pool.assumptions)),
    ])  # fmt: skip


def _name(server: "Server") -> str:
    return "server" if server.role == "single" else f"{server.role} server"


def _legend(rows: "list[Row]") -> str:
    words = ["* what the command launches"]
    if any(row.computed for row in rows):
        words.append("(computed) from the other format")
    if not all(row.option for row in rows):
        words.append("(not here) no --kv-cache-dtype gives these rows on this engine and GPU")
    return "; ".join(words)


def _cells(row: "Row", drafts: bool) -> tuple[str, ...]:
    label = row.label + (" (computed)" if row.computed else "")
    mtp = "" if row.tokens_mtp is None else f"{row.tokens_mtp:,}"
    return (
        ("* " if row.chosen else "  ") + label,
        row.cost.layout.value + ("" if row.option else " (not here)"),
        f"{row.weights / 2**30:.2f} GiB",
        f"{row.pool.nbytes / 2**30:.2f}",
        f"{row.pool.nbytes / 10**9:.2f}",
        f"{row.cost.bytes_per_token:,}",
        f"{row.tokens:,}" if row.pool.nbytes > 0 else "does not fit",
        *([mtp] if drafts else []),
    )


def _rows_text(server: "Server", rows: "list[Row]") -> str:
    """L, row bytes, index layers: what a token count means nothing without."""
    costs: dict[str, KvCost] = {row.cost.layout.value: row.cost for row in rows}
    sizes = ", ".join(f"{name} {cost.row} B" for name, cost in costs.items())
    cost = rows[0].cost
    index = (
        f"; index keys in {cost.index_layers} layers, {cost.index} B each" if cost.index_layers else "; no index keys"
    )
    per = "row per layer (K and V of this rank's heads)" if not server.model.is_mla else "latent row per layer"
    dcp = f"; 1 of {cost.dcp} rows per GPU, all index keys" if cost.dcp > 1 else ""
    return f"{cost.layers} layers; {per}: {sizes}{index}{dcp}"


def _chart(ui: Ui, made: "Launch") -> None:
    """Tokens of OUT's server by weight format and KV layout."""
    rows = [row for row in made.rows if row.role == made.server.role]
    most = max((row.tokens for row in rows), default=0)
    if not most:
        return
    ui.heading("tokens by weight format and KV rows")
    names = [f"{row.label}, {row.cost.layout.value}" for row in rows]
    width = max(map(len, names))
    for name, row in zip(names, rows, strict=True):
        ui.say(f"{name:<{width}}  {'#' * round(BAR * row.tokens / most):<{BAR}}  {row.tokens:,}".rstrip())


def _findings(ui: Ui, made: "Launch") -> None:
    notes = [finding for finding in made.findings if finding.severity == "note"]
    warnings = [finding for finding in made.findings if finding.severity == "warning"]
    if notes:
        ui.heading("notes")
        for line in _merged(notes, ui.verbose):
            ui.prose(line)
    ui.warn(_merged(warnings, ui.verbose))
    errors = _merged([finding for finding in made.findings if finding.severity == "error"], True)
    ui.fail(errors, len(errors))


def _merged(findings: "list[Finding]", sourced: bool) -> list[str]:
    """One line for what is said of both sides."""
    roles: dict[str, list[str]] = {}
    for finding in findings:
        roles.setdefault(_line(finding, sourced), []).append(finding.role)
    return [f"{', '.join(who)}: {line}" for line, who in roles.items()]


def _line(finding: "Finding", sourced: bool) -> str:
    advice = f" Do: {finding.advice}." if finding.advice else ""
    source = f" [{finding.source}]" if sourced else ""
    return f"{finding.message}.{advice}{source}"


def _last(made: "Launch", gpus: int | None) -> str:
    server = made.server
    row = next((row for row in made.rows if row.chosen and row.role == server.role), None)
    errors = sum(finding.severity == "error" for finding in made.findings)
    if errors or row is None:
        return f"this launch would fail: {counted(errors, 'error')}"
    cost = row.cost
    index = f"index keys in {cost.index_layers}" if cost.index_layers else "no index keys"
    text = (
        f"{row.tokens:,} tokens per {'replica' if server.role == 'single' else 'decode replica'} of {server.tp} "
        f"{server.gpu.name} ({row.label}; {cost.layers} layers, {cost.layout.value} rows of {cost.row} B, {index}, "
        f"dcp {cost.dcp}, pages of {row.page}; pool {row.pool.nbytes / 2**30:.2f} GiB = "
        f"{row.pool.nbytes / 10**9:.2f} GB per GPU)"
    )
    if gpus is None:
        return text
    replicas = gpus // server.tp
    return f"{text}; {counted(replicas, 'replica')} on {gpus:,} GPUs: {replicas * row.tokens:,} tokens"

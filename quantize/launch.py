"""A launch planned: servers, their commands, what fits into memory, and all that is said about them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kizami.formats.engines.served import Served as Checked
from kizami.formats.serving import loading
from kizami.formats.serving.foretell import Finding, about_server
from kizami.formats.serving.launch import Command, commands
from kizami.formats.serving.pairs import about_pair
from kizami.formats.serving.server import Server
from kizami.formats.serving.tokenizers import compare_tokenizers
from kizami.quantize.serving import Row, Served, WeightSet, about_capacity, rows_of


@dataclass(frozen=True, slots=True)
class Launch:
    """Servers in the order in which they start, with all that is said about them."""

    servers: tuple[Server, ...]
    commands: tuple[Command, ...]
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]

    @property
    def server(self) -> Server:
        """The one that OUT is for."""
        return self.servers[-1]

    @property
    def ok(self) -> bool:
        return all(finding.severity != "error" for finding in self.findings)


_ORDER = {"error": 0, "warning": 1, "note": 2}


def plan_launch(pairs: Sequence[tuple[Server, Served]], pool_gib: float | None) -> Launch:
    findings = [
        finding
        for server, served in pairs
        for finding in (*about_server(server), *loading.about_loading(server, Checked.of(served.checkpoint)))
    ]
    if len(pairs) == 2:
        findings += about_pair(pairs[0][0], pairs[1][0])
        findings += compare_tokenizers(pairs[0][1].checkpoint, pairs[1][1].checkpoint)
    rows: list[Row] = []
    if all(finding.code not in _NO_CAPACITY for finding in findings):
        rows, more = _capacity(pairs, pool_gib)
        findings += more
    short = {finding.role for finding in findings if finding.code == "short_of_context"}
    servers = [replace(server, short_of_context=server.role in short) for server, _ in pairs]
    findings.sort(key=lambda finding: _ORDER[finding.severity])
    return Launch(tuple(servers), tuple(commands(servers)), tuple(rows), tuple(findings))


# Nothing can be computed under these.
_NO_CAPACITY = frozenset({"no_such_rows", "dcp_size"})


def _capacity(pairs: Sequence[tuple[Server, Served]], pool_gib: float | None) -> tuple[list[Row], list[Finding]]:
    """Rows of OUT's server in both formats, then those of the prefill server. A stated pool is that of OUT's server."""
    server, served = pairs[-1]
    sets = [WeightSet(served.stored.label, served.weights)]
    if len(pairs) == 2 and pairs[0][1].stored.label != served.stored.label:
        sets.append(WeightSet(pairs[0][1].stored.label, pairs[0][1].weights))
    else:
        sets.append(served.twin())
    rows = rows_of(server, sets, pool_gib)
    for other, source in pairs[:-1]:
        rows += rows_of(other, [WeightSet(source.stored.label, source.weights)], None)
    return rows, [finding for each, _ in pairs for finding in about_capacity(each, rows)]

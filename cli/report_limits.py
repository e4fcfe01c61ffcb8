"""Limits of `kizami report`, by role: which tensors miss them, in words and as JUnit XML for pipelines."""

from collections.abc import Sequence
from math import log10
from typing import Any
from xml.etree import ElementTree

import typer

from kizami.cli.output import Ui
from kizami.formats.errors import KizamiError, printable

SHOWN = 5
IN_A_FAILURE = 200  # tensors in one failure of the XML
ALL = ""  # the role of a limit for every tensor


def parse_limits(texts: Sequence[str] | None) -> dict[str, float]:
    """By role, ALL for a bare number. KizamiError "bad_option"."""
    limits: dict[str, float] = {}
    for text in texts or ():
        role, mark, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = float("nan")
        if not abs(value) < 1e6 or (mark and not role):
            raise KizamiError(
                f"--min-sqnr {printable(text, 60)}; expected dB, or ROLE=dB such as routed_expert=20", code="bad_option"
            )
        if role in limits:
            raise KizamiError(f"--min-sqnr {printable(text, 60)}: given twice for one role", code="bad_option")
        limits[role] = value
    return limits


def below(rows: Sequence[dict[str, Any]], limits: dict[str, float]) -> list[dict[str, Any]]:
    """Packed tensors whose SQNR is below the limit of their role, or of all; the worst first. KizamiError "bad_option"
    for a role that has none: a limit that nothing is held to is a mistake."""
    measured = [(row, sqnr) for row in rows if (sqnr := _sqnr(row)) is not None]
    roles = {row["role"] for row, _ in measured}
    for role in limits:
        if role != ALL and role not in roles:
            known = ", ".join(sorted(roles)) or "none"
            raise KizamiError(
                f"--min-sqnr {printable(role, 60)}: no packed tensor has that role; roles with some: {known}",
                code="bad_option",
            )
    found = []
    for row, sqnr in measured:
        limit = limits.get(row["role"], limits.get(ALL))
        if limit is not None and sqnr < limit:
            found.append({"name": row["name"], "role": row["role"], "sqnr_db": sqnr, "limit": limit})
    return sorted(found, key=lambda one: (one["sqnr_db"], one["name"]))


def _sqnr(row: dict[str, Any]) -> float | None:
    """Of a packed tensor; from its relative error where the row has that alone."""
    if row.get("sqnr_db") is not None:
        return float(row["sqnr_db"])
    error = row.get("rel_error")
    return None if not error else -20 * log10(error)


def fail_below(ui: Ui, found: Sequence[dict[str, Any]]) -> None:
    """Exit code 1, naming the tensors."""
    if found:
        ui.fail([words(one) for one in found], SHOWN)
        raise typer.Exit(1)


def junit(body: dict[str, Any]) -> bytes:
    """A test case for each limit, whose failure names the tensors that miss it; without limits, one that passes: there
    is a report. As Jenkins, GitLab and GitHub's actions read it."""
    cases: list[tuple[str, list[str]]] = []
    if (most := body["max_rel_error"]) is not None:
        lines = [f"{row['name']}: relative error {row['rel_error']:.4f}" for row in body["exceeding"]]
        cases.append((f"relative error at most {most:g}", lines))
    for role, limit in body["min_sqnr"].items():
        missed = [one for one in body["below"] if one["limit"] == limit and (role in (ALL, one["role"]))]
        cases.append((f"SQNR of {role or 'every tensor'} at least {limit:g} dB", [words(one) for one in missed]))
    outputs = body["outputs"]
    if outputs and (most := outputs["max_output_error"]) is not None:
        lines = [f"{one['name']}: output error {one['rel_error']:.4f}" for one in outputs["exceeding"]]
        cases.append((f"output error at most {most:g}", lines))
    cases = cases or [("the report is whole", [])]
    failed = sum(bool(lines) for _, lines in cases)
    suite = ElementTree.Element(
        "testsuite", name=printable(f"kizami report {body['out']}", 300), tests=str(len(cases)), failures=str(failed)
    )
    for name, lines in cases:
        case = ElementTree.SubElement(suite, "testcase", classname="kizami.report", name=name)
        if lines:
            more = [f"and {len(lines) - IN_A_FAILURE:,} more"] if len(lines) > IN_A_FAILURE else []
            failure = ElementTree.SubElement(case, "failure", message=f"{len(lines):,} tensors miss it")
            failure.text = "\n".join(printable(line, 1200) for line in [*lines[:IN_A_FAILURE], *more])
    written: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return written


def words(one: dict[str, Any]) -> str:
    return f"{one['name']}: SQNR {one['sqnr_db']:.2f} dB, expected at least {one['limit']:g}"

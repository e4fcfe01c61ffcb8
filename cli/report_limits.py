"""Limits of `kizami report`, by role: which tensors miss them, in words and as JUnit XML for pipelines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log10
from typing import Any
from xml.etree import ElementTree

import typer

from kizami.cli.output import Ui, counted
from kizami.formats.errors import KizamiError, printable

SHOWN = 5
IN_A_FAILURE = 200  # tensors in one failure of the XML
ALL = ""  # the role of a limit for every tensor


Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """What tensors are held to. worse: 1 where the larger figure is the worse one, -1 where the smaller is. least: that
    a limit may be. name: of the figure in --json. figure: of a report row; None where nothing was rounded."""

    option: str
    unit: str
    example: str
    worse: int
    least: float
    name: str
    figure: Callable[[Row], float | None]


def _rel_error(row: Row) -> float | None:
    return row.get("rel_error")


def _sqnr(row: Row) -> float | None:
    """From its relative error where the row has that alone. None for what is exact."""
    if row.get("sqnr_db") is not None:
        return float(row["sqnr_db"])
    error = row.get("rel_error")
    return None if not error else -20 * log10(error)


MAX_REL_ERROR = Kind("--max-rel-error", "X", "0.12", 1, 0.0, "rel_error", _rel_error)
MIN_SQNR = Kind("--min-sqnr", "dB", "20", -1, -1e6, "sqnr_db", _sqnr)


def parse_limits(kind: Kind, texts: Sequence[str] | None) -> dict[str, float]:
    """By role, ALL for a bare number. KizamiError "usage"."""
    limits: dict[str, float] = {}
    for text in texts or ():
        role, mark, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = float("nan")
        given, unit = f"{kind.option} {printable(text, 60)}", kind.unit
        if not kind.least <= value < 1e6 or (mark and not role):
            raise KizamiError(
                f"{given}; expected {unit}, or ROLE={unit} such as routed_expert={kind.example}", code="usage"
            )
        if role in limits:
            raise KizamiError(f"{given}: given twice for one role", code="usage")
        limits[role] = value
    return limits


def missed(kind: Kind, packed: Sequence[Row], limits: dict[str, float]) -> list[dict[str, Any]]:
    """Rows of packed tensors beyond the limit of their role, or of all; the worst first. KizamiError "bad_option" for a
    role that has none: a limit that nothing is held to is a mistake."""
    roles = {row["role"] for row in packed}
    for role in limits:
        if role != ALL and role not in roles:
            known = ", ".join(sorted(roles)) or "none"
            raise KizamiError(
                f"{kind.option} {printable(role, 60)}: no packed tensor has that role; roles with some: {known}",
                code="bad_option",
            )
    found = []
    for row in packed:
        value, limit = kind.figure(row), limits.get(row["role"], limits.get(ALL))
        if value is not None and limit is not None and kind.worse * value > kind.worse * limit:
            found.append({"name": row["name"], "role": row["role"], kind.name: value, "limit": limit})
    return sorted(found, key=lambda one: (-kind.worse * one[kind.name], one["name"]))


def fail_missed(ui: Ui, body: dict[str, Any]) -> None:
    """Exit code 1, naming the tensors."""
    from kizami.quantize.report import threshold_hint

    for found in (body["exceeding"], body["below"]):
        if found:
            ui.fail([words(one) for one in found], SHOWN)
    if body["exceeding"] and (hint := threshold_hint(body["method"])) is not None:
        ui.fail([hint])
    if body["exceeding"] or body["below"]:
        raise typer.Exit(1)


def junit(body: dict[str, Any]) -> bytes:
    """A test case for each limit, whose failure names the tensors that miss it; without limits, one that passes: there
    is a report. As Jenkins, GitLab and GitHub's actions read it."""
    cases: list[tuple[str, list[str]]] = []
    for role, limit in body["max_rel_error"].items():
        what = f"relative error of {role or 'every tensor'} at most {limit:g}"
        cases.append((what, _of(role, body["max_rel_error"], body["exceeding"])))
    for role, limit in body["min_sqnr"].items():
        what = f"SQNR of {role or 'every tensor'} at least {limit:g} dB"
        cases.append((what, _of(role, body["min_sqnr"], body["below"])))
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
        case = ElementTree.SubElement(suite, "testcase", classname="kizami.report", name=printable(name, 300))
        if lines:
            more = [f"and {len(lines) - IN_A_FAILURE:,} more"] if len(lines) > IN_A_FAILURE else []
            verb = "misses" if len(lines) == 1 else "miss"
            failure = ElementTree.SubElement(case, "failure", message=f"{counted(len(lines), 'tensor')} {verb} it")
            failure.text = "\n".join(printable(line, 1200) for line in [*lines[:IN_A_FAILURE], *more])
    written: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return written


def _of(role: str, limits: dict[str, float], found: Sequence[dict[str, Any]]) -> list[str]:
    """In words, the tensors that were held to the limit of this role; for ALL: those without one of their own."""
    return [words(one) for one in found if (one["role"] if one["role"] in limits else ALL) == role]


def words(one: dict[str, Any]) -> str:
    if "rel_error" in one:
        return f"{one['name']}: relative error {one['rel_error']:.4f}, expected at most {one['limit']:g}"
    return f"{one['name']}: SQNR {one['sqnr_db']:.2f} dB, expected at least {one['limit']:g}"

"""Views on kizami-report.jsonl: what each role and each tensor cost in accuracy."""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log10, prod, sqrt
from pathlib import Path
from typing import Any

from kizami.formats.errors import KizamiError
from kizami.quantize.manifest import REPORT

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RoleSummary:
    """Tensors of one role and action. Error figures are None where nothing was rounded to INT4.

    rel_error: sqrt(sum e^2 / sum W^2) over all weights of the role; sqnr_db: the same in dB; worst: name of max.
    """

    role: str
    action: str
    tensors: int
    weights: int
    source_bytes: int
    bytes: int
    rel_error: float | None
    max_rel_error: float | None
    sqnr_db: float | None
    worst: str | None


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """Packed tensors of one layer, pooled as in RoleSummary."""

    layer: int | None
    tensors: int
    rel_error: float
    max_rel_error: float
    worst: str


def read_report(out: Path) -> list[Row]:
    """The rows of a finished output, in file order. Raises KizamiError naming the line that is not a row."""
    path = out / REPORT
    if not path.is_file():
        raise KizamiError(
            "not found", code="no_report", file=REPORT, hint=f"is {out.name} an output of kizami convert?"
        )
    rows: list[Row] = []
    with open(path, encoding="utf-8", errors="replace") as f:
        for number, line in enumerate(f, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict) or not _is_row(row):
                raise KizamiError(f"line {number} is not a report row", code="bad_report", file=REPORT)
            rows.append(row)
    return rows


_COUNTS, _FIGURES = ("bytes", "source_bytes"), ("rel_error", "error_energy", "weight_energy")


def _is_row(row: Row) -> bool:
    """What the views below read has the types that kizami writes; the file may come from anyone."""
    words = all(isinstance(row.get(key), str) for key in ("name", "role", "action"))
    counts = all(type(row.get(key)) is int for key in _COUNTS) and isinstance(row.get("layer", 0), int | None)
    shape = isinstance(row.get("shape"), list) and all(type(size) is int for size in row["shape"])
    figures = [row.get(key) for key in _FIGURES]
    numbers = all(isinstance(figure, int | float) and abs(figure) <= sys.float_info.max for figure in figures)
    return words and counts and shape and (numbers or figures == [None] * len(figures))


def measured(rows: Iterable[Row]) -> list[Row]:
    """Rows with error figures: the packed tensors."""
    return [row for row in rows if row.get("rel_error") is not None]


def role_summaries(rows: Sequence[Row]) -> list[RoleSummary]:
    """One line per role and action, the largest output first."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["role"], row["action"]), []).append(row)
    lines = [_role(role, action, members) for (role, action), members in groups.items()]
    return sorted(lines, key=lambda line: (-line.bytes, line.role, line.action))


def _role(role: str, action: str, rows: list[Row]) -> RoleSummary:
    figures = measured(rows)
    worst = worst_tensors(figures, 1)
    error = pooled_error(figures)
    return RoleSummary(
        role=role,
        action=action,
        tensors=len(rows),
        weights=sum(prod(row["shape"]) for row in rows),
        source_bytes=sum(row["source_bytes"] for row in rows),
        bytes=sum(row["bytes"] for row in rows),
        rel_error=error,
        max_rel_error=worst[0]["rel_error"] if worst else None,
        sqnr_db=-20 * log10(error) if error else None,
        worst=worst[0]["name"] if worst else None,
    )


def layer_summaries(rows: Sequence[Row]) -> list[LayerSummary]:
    layers: dict[int | None, list[Row]] = {}
    for row in measured(rows):
        layers.setdefault(row["layer"], []).append(row)
    lines = []
    for layer, members in sorted(layers.items(), key=lambda item: (item[0] is None, item[0] or 0)):
        worst = worst_tensors(members, 1)[0]
        lines.append(LayerSummary(layer, len(members), pooled_error(members) or 0.0, worst["rel_error"], worst["name"]))
    return lines


def pooled_error(rows: Iterable[Row]) -> float | None:
    """sqrt(sum e^2 / sum W^2); None without rows; 0 for all-zero weights."""
    energy = [(row["error_energy"], row["weight_energy"]) for row in rows]
    if not energy:
        return None
    error, weight = sum(e for e, _ in energy), sum(w for _, w in energy)
    return sqrt(error / weight) if weight else 0.0


def worst_tensors(rows: Iterable[Row], top: int) -> list[Row]:
    return sorted(measured(rows), key=lambda row: (-row["rel_error"], row["name"]))[:top]


def over_threshold(rows: Iterable[Row], max_rel_error: float) -> list[Row]:
    """Packed tensors whose relative error is above the threshold, the worst first."""
    over = [row for row in measured(rows) if row["rel_error"] > max_rel_error]
    return worst_tensors(over, len(over))

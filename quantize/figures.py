"""Rows of the report pooled for pictures: a map of error by layer and module, and experts that stand out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kizami.quantize.report import Row, measured, pooled_error

F64 = NDArray[np.float64]
OUTLIER = 4.0  # times the spread of its layer's experts, as a normal distribution's sigma
SIGMA = 1.4826  # sigma of a normal distribution over its median absolute deviation


@dataclass(frozen=True, slots=True, eq=False)
class ErrorMap:
    """errors: relative error of all weights that share a module and a layer, [modules, layers]; NaN where there are
    none. modules: `routed_expert down_proj`, the largest error first; layers: ascending."""

    modules: tuple[str, ...]
    layers: tuple[int, ...]
    errors: F64


@dataclass(frozen=True, slots=True)
class ExpertError:
    """distance: from the median of its layer's experts, in spreads of these."""

    layer: int
    expert: int
    rel_error: float
    distance: float


@dataclass(frozen=True, slots=True, eq=False)
class ExpertErrors:
    """By layer, ascending: relative errors of its routed experts, [experts]. outliers: the farthest first."""

    layers: tuple[int, ...]
    errors: tuple[F64, ...]
    outliers: tuple[ExpertError, ...]


def error_map(rows: Sequence[Row]) -> ErrorMap:
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in measured(rows):
        if row["layer"] is not None:
            groups.setdefault((f"{row['role']} {row.get('part') or ''}".strip(), row["layer"]), []).append(row)
    layers = sorted({layer for _, layer in groups})
    pooled = {key: pooled_error(members) for key, members in groups.items()}
    modules = sorted({module for module, _ in groups}, key=lambda module: (-_largest(pooled, module), module))
    errors = np.full((len(modules), len(layers)), np.nan)
    for (module, layer), value in pooled.items():
        errors[modules.index(module), layers.index(layer)] = np.nan if value is None else value
    return ErrorMap(tuple(modules), tuple(layers), errors)


def _largest(pooled: dict[tuple[str, int], float | None], module: str) -> float:
    return max(value or 0.0 for (name, _), value in pooled.items() if name == module)


def expert_errors(rows: Sequence[Row]) -> ExpertErrors:
    """Of routed experts, all their linears pooled."""
    groups: dict[int, dict[int, list[Row]]] = {}
    for row in measured(rows):
        if row["role"] == "routed_expert" and type(row.get("expert")) is int and row["layer"] is not None:
            groups.setdefault(row["layer"], {}).setdefault(row["expert"], []).append(row)
    layers = sorted(groups)
    errors, outliers = [], []
    for layer in layers:
        experts = sorted(groups[layer])
        found = np.array([pooled_error(groups[layer][expert]) or 0.0 for expert in experts])
        errors.append(found)
        outliers += _outliers(layer, experts, found)
    return ExpertErrors(tuple(layers), tuple(errors), tuple(sorted(outliers, key=lambda one: -abs(one.distance))))


def _outliers(layer: int, experts: Sequence[int], errors: F64) -> list[ExpertError]:
    middle = float(np.median(errors))
    spread = SIGMA * float(np.median(np.abs(errors - middle)))
    if spread == 0:
        return []
    distances = (errors - middle) / spread
    return [
        ExpertError(layer, experts[i], float(errors[i]), float(distances[i]))
        for i in np.flatnonzero(np.abs(distances) > OUTLIER).tolist()
    ]

"""Two outputs of one source, held against each other weight by weight: two methods, two group sizes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kizami.quantize.figures import ErrorMap, error_map
from kizami.quantize.report import Row, measured, pooled_error


@dataclass(frozen=True, slots=True)
class Pooled:
    """What both have of one group. name: a role, or `layer 3`. better: weights whose error is smaller in the second;
    a_error, b_error: pooled."""

    name: str
    weights: int
    better: int
    a_error: float
    b_error: float
    a_bytes: int
    b_bytes: int

    @property
    def ratio(self) -> float | None:
        """Of the second's error to the first's; None where the first has none."""
        return self.b_error / self.a_error if self.a_error else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """only_a, only_b: names of packed weights that the other has not packed."""

    roles: tuple[Pooled, ...]
    layers: tuple[Pooled, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def compare_rows(a: Sequence[Row], b: Sequence[Row]) -> Comparison:
    """Of the packed weights that both reports have, by name."""
    ours, theirs = ({row["name"]: row for row in measured(rows)} for rows in (a, b))
    both = [(row, theirs[name]) for name, row in ours.items() if name in theirs]
    roles: dict[str, list[tuple[Row, Row]]] = {}
    layers: dict[int, list[tuple[Row, Row]]] = {}
    for pair in both:
        roles.setdefault(pair[0]["role"], []).append(pair)
        if pair[0]["layer"] is not None:
            layers.setdefault(pair[0]["layer"], []).append(pair)
    pooled = [_pool(role, pairs) for role, pairs in roles.items()]
    return Comparison(
        roles=tuple(sorted(pooled, key=lambda one: (-one.a_bytes, one.name))),
        layers=tuple(_pool(f"layer {layer}", pairs) for layer, pairs in sorted(layers.items())),
        only_a=tuple(name for name in ours if name not in theirs),
        only_b=tuple(name for name in theirs if name not in ours),
    )


def _pool(name: str, pairs: Sequence[tuple[Row, Row]]) -> Pooled:
    a, b = ([pair[side] for pair in pairs] for side in (0, 1))
    return Pooled(
        name=name,
        weights=len(pairs),
        better=sum(theirs["rel_error"] < ours["rel_error"] for ours, theirs in pairs),
        a_error=pooled_error(a) or 0.0,
        b_error=pooled_error(b) or 0.0,
        a_bytes=sum(row["bytes"] for row in a),
        b_bytes=sum(row["bytes"] for row in b),
    )


def ratio_map(a: Sequence[Row], b: Sequence[Row]) -> ErrorMap:
    """log2 of the second's error over the first's, by module and layer that both have; NaN elsewhere."""
    ours, theirs = error_map(a), error_map(b)
    modules = tuple(module for module in ours.modules if module in theirs.modules)
    layers = tuple(layer for layer in ours.layers if layer in theirs.layers)
    first, second = (
        found.errors[np.ix_([found.modules.index(m) for m in modules], [found.layers.index(n) for n in layers])]
        for found in (ours, theirs)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log2(second / first)
    return ErrorMap(modules, layers, np.where(np.isfinite(ratio), ratio, np.nan))

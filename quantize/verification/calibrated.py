"""What an output says of a calibrated method, held against STATS where there are any, else against itself.

Which statistics belong to which linear, and what is made of them, is found here a second time, with the oracle's
arithmetic.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.formats.errors import KizamiError
from kizami.formats.families import Role
from kizami.formats.run_log import canonical
from kizami.formats.statistics import LayerStatistics, Statistics
from kizami.quantize import reference
from kizami.quantize.calibrated.statistics import NO_TOKEN, Chosen, facts_of, unseen
from kizami.quantize.manifest import MANIFEST
from kizami.quantize.plan import Plan, Step
from kizami.quantize.report import Row
from kizami.quantize.settings import CALIBRATED
from kizami.quantize.verification.files import Problem

GPTQ_FIGURES = ("effective_tokens", "gptq_reason", "held_out_tokens", "loss_gptq", "loss_weighted")
DATA_SHOWN = 5  # files
UNKNOWN = ("weighted_rel_error",)  # keys of a row that only STATS can tell


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """What a row says of how its linear was made. h: mean squares of its columns, known from STATS only."""

    chosen: Chosen
    h: NDArray[np.float64] | None = None


class Witness:
    """The statistics of a run, or none. For use by threads."""

    def __init__(self, statistics: Statistics | None) -> None:
        self._statistics = statistics
        self._lock = Lock()
        self._held: tuple[int, LayerStatistics] | None = None  # steps come layer by layer

    def holds(self, plan: Plan, step: Step) -> bool:
        """Whether a step is held to the statistics."""
        calibrated = plan.method.name in CALIBRATED and step.action == "quantize"
        return calibrated and self._statistics is not None

    def claim(self, plan: Plan, step: Step, row: Row) -> tuple[Claim | None, str | None]:
        """Of a row of a calibrated method, and what is wrong with it; (None, None) of any other row."""
        if plan.method.name not in CALIBRATED or step.action != "quantize":
            return None, None
        fault = next(_faults(plan.method.name, row, unseen(step.place)), None)
        if fault is not None:
            return None, fault
        figures = {key: row[key] for key in GPTQ_FIGURES if key in row}
        chosen = Chosen(row["method"], row["tokens"], row["fallback"], figures)
        if self._statistics is None:
            return Claim(chosen), None
        h, tokens, fallback = self._known(step)
        if (tokens, fallback) != (chosen.tokens, chosen.fallback):
            return (
                None,
                f"STATS has {_words(tokens, fallback)}; the report says {_words(chosen.tokens, chosen.fallback)}",
            )
        if h is not None and not np.isfinite(h).all():
            return None, "its statistics in STATS are too large to compute with"
        return Claim(chosen, h), None

    def _known(self, step: Step) -> tuple[NDArray[np.float64] | None, int | None, str | None]:
        """Mean squares, tokens, why there are none."""
        place, statistics = step.place, self._statistics
        assert statistics is not None
        if place.layer is None or place.layer not in statistics.layers:
            return None, None, unseen(place)
        layer = self._layer(place.layer)
        if place.role is not Role.ROUTED_EXPERT or place.expert is None:
            plain = layer.linears.get(step.module)
            return (None, None, unseen(place)) if plain is None else (plain.astype(np.float64), None, None)
        experts = layer.experts
        assert experts is not None
        is_down = place.part == "down_proj"
        rows, tokens = (experts.h_a if is_down else experts.h_x), int(experts.n[place.expert])
        h = reference.shrunk_mean_squares(rows, experts.sum_g2, experts.sum_g4, place.expert, pooled=not is_down)
        return (None, tokens, NO_TOKEN) if h is None or not tokens else (h, tokens, None)

    def _layer(self, number: int) -> LayerStatistics:
        assert self._statistics is not None
        with self._lock:
            if self._held is None or self._held[0] != number:
                self._held = number, self._statistics.layer(number)
            return self._held[1]


def require_statistics_of(manifest: Mapping[str, Any], statistics: Statistics) -> None:
    """KizamiError "stats_mismatch" unless these are the statistics that the run of `manifest` used."""
    if manifest["method"] not in CALIBRATED:
        raise KizamiError(
            f"--stats with an output of --method {manifest['method']}: no statistics were used",
            code="stats_mismatch",
            hint="leave --stats out",
        )
    recorded = manifest["calibration"]
    if statistics.sha256 != recorded["sha256"]:
        names = [source["name"] for source in statistics.manifest["tokens"]["sources"]]
        raise KizamiError(
            f"these are not the statistics of this run: STATS is {_identity(statistics.sha256, names)}, the run used "
            + _identity(recorded["sha256"], recorded["data"]),
            code="stats_mismatch",
            file=str(statistics.root),
            hint="give the STATS that the run used, or leave --stats out",
        )


def _identity(sha256: str, names: list[Any]) -> str:
    """`3f... (of chat.jsonl, a.txt)`."""
    shown = ", ".join(str(name) for name in names[:DATA_SHOWN])
    more = f" and {len(names) - DATA_SHOWN} more" if len(names) > DATA_SHOWN else ""
    return sha256 + (f" (of {shown}{more})" if shown else "")


def check_statistics_are_those(statistics: Statistics, manifest: Mapping[str, Any]) -> Iterator[Problem]:
    """Those with the right hash, in all that the manifest tells of them."""
    recorded = manifest["calibration"]
    libraries = {"libraries": recorded["libraries"]} if "libraries" in recorded else {}
    if canonical(facts_of(statistics) | libraries) != canonical(recorded):
        yield Problem("other_manifest", "calibration is not what STATS says", MANIFEST)


def _faults(method: str, row: Row, not_seen: str) -> Iterator[str]:
    """What does not fit together in a row, whatever STATS says. not_seen: the reason if that has nothing on it."""
    used, fallback, tokens = row.get("method"), row.get("fallback"), row.get("tokens")
    may = ("search",) if fallback is not None else ("weighted",) if method == "weighted" else ("gptq", "weighted")
    if used not in may:
        yield f"method is {used!r}, expected {' or '.join(may)}"
    if fallback not in (None, NO_TOKEN, not_seen):
        yield f"fallback is {fallback!r}, which is no reason"
    if tokens is not None and (type(tokens) is not int or tokens < 0):
        yield f"tokens is {tokens!r}"
    error = row.get("weighted_rel_error")
    if (fallback is None) != ("weighted_rel_error" in row) or not _is_amount(error, missing=fallback is not None):
        yield f"weighted_rel_error is {error!r}"
    decided = {key for key in GPTQ_FIGURES if key in row}
    if decided != ({*GPTQ_FIGURES} if method == "gptq" and fallback is None else set()):
        yield f"has {', '.join(sorted(decided)) or 'nothing'} of what gptq decides"
    elif decided and not (
        isinstance(row["gptq_reason"], str)
        and _is_amount(row["effective_tokens"])
        and type(row["held_out_tokens"]) is int
        and row["held_out_tokens"] >= 0
        and all(_is_amount(row[key], missing=True) for key in ("loss_gptq", "loss_weighted"))
    ):
        yield "what gptq decided is not told in numbers"
    ours: Any = row.get("loss_gptq")
    theirs: Any = row.get("loss_weighted")
    if used == "gptq" and not (_is_amount(ours) and _is_amount(theirs) and ours < theirs):
        yield f"gptq was taken with a loss of {ours!r} on held-out tokens, and weighted has {theirs!r}"


def _is_amount(value: Any, *, missing: bool = False) -> bool:
    return (value is None and missing) or (type(value) in (int, float) and isfinite(value) and value >= 0)


def _words(tokens: int | None, fallback: str | None) -> str:
    return f"{'no count of' if tokens is None else f'{tokens:,}'} tokens" + (f" ({fallback})" if fallback else "")

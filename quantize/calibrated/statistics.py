"""STATS as a run uses it: whose statistics belong to which step, what is done without any, layers kept in memory."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.formats.checkpoint import CONFIG_NAME, Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.families import Place, Role
from kizami.formats.fingerprint import config_sha256
from kizami.formats.reader import TensorReader
from kizami.formats.statistics import LayerStatistics, Statistics, layer_file
from kizami.quantize.calibrated.column_weights import pooled_input, shrunk_input, shrunk_neurons
from kizami.quantize.calibrated.solver import Solver, check_gptq
from kizami.quantize.on_device.names import CPU
from kizami.quantize.plan import Plan, Step
from kizami.quantize.settings import MethodName

NO_TOKEN = "no calibration token reached the expert"
NOT_SEEN = "not in STATS"
NEVER_SEEN = "MTP: never calibrated"  # transformers' models have no such layers
LAYERS_HELD = 4  # of 14 MB each for Kimi-K2

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ColumnStatistics:
    """What is known of a linear's input. h: mean squares of its columns [K], shrunk where an expert saw few tokens;
    None where nothing is known, and `fallback` says why: then `search` takes the method's place. tokens: how many
    made them; None of linears that see all tokens."""

    h: F64 | None
    tokens: int | None = None
    fallback: str | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """How a calibrated method went for one linear; all of it goes into the report's row.

    method: what was really used. figures: what else a method has to tell, numbers and short words.
    """

    method: MethodName
    tokens: int | None = None
    fallback: str | None = None
    figures: Mapping[str, float | int | str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fallback:
    module: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    statistics: LayerStatistics
    pooled: F64 | None  # [hidden]


@contextmanager
def calibration_of(
    plan: Plan,
    statistics: Statistics | None,
    reader: TensorReader,
    *,
    held: int,
    makers: Sequence[Step] = (),
    device: str = CPU,
    stop: Event | None = None,
) -> Iterator["Calibration | None"]:
    """What the threads of a run share; None of a method without STATS. makers: as `Solver`, beside the plan's steps."""
    if statistics is None:
        yield None
    elif plan.method.name != "gptq":
        yield Calibration(statistics, held)
    else:
        with closing(Solver(statistics, (*plan.steps, *makers), reader, device, stop)) as solver:
            yield Calibration(statistics, held, solver)


class Calibration:
    """An opened STATS. Safe to use from threads; the layers that were asked for last stay in memory.
    solver: of `gptq`."""

    def __init__(self, statistics: Statistics, held: int = LAYERS_HELD, solver: Solver | None = None) -> None:
        self.statistics, self.solver = statistics, solver
        self._held = held
        self._layers: OrderedDict[int, _Layer] = OrderedDict()
        self._lock = Lock()

    def columns(self, step: Step) -> ColumnStatistics:
        """KizamiError "bad_statistics", or "stats_mismatch" where they are not of this linear."""
        place = step.place
        if place.layer is None or place.layer not in self.statistics.layers:
            return ColumnStatistics(None, fallback=unseen(place))
        layer = self._layer(place.layer)
        if place.role is Role.ROUTED_EXPERT and place.expert is not None:
            return _of_expert(step, layer)
        h = layer.statistics.linears.get(step.module)
        if h is None:
            return ColumnStatistics(None, fallback=unseen(place))
        _check_width(step, h.shape[0])
        return ColumnStatistics(h.astype(np.float64))

    def _layer(self, number: int) -> _Layer:
        with self._lock:
            if number not in self._layers:
                statistics = self.statistics.layer(number)
                experts = statistics.experts
                self._layers[number] = _Layer(
                    statistics, None if experts is None else pooled_input(experts.h_x, experts.sum_g2)
                )
            self._layers.move_to_end(number)
            while len(self._layers) > self._held:
                self._layers.popitem(last=False)
            return self._layers[number]


def unseen(place: Place) -> str:
    """Why STATS has nothing on a module."""
    if not place.in_mtp:
        return NOT_SEEN
    return NEVER_SEEN if place.layer is None else f"layer {place.layer} ({NEVER_SEEN})"


def _of_expert(step: Step, layer: _Layer) -> ColumnStatistics:
    experts, expert = layer.statistics.experts, step.place.expert
    if experts is None or layer.pooled is None:
        raise _mismatch(step, "no routed experts", "statistics of this one")
    assert expert is not None
    if not expert < len(experts.n):
        raise _mismatch(step, f"{len(experts.n)} experts", f"at least {expert + 1}")
    is_down = step.place.part == "down_proj"
    mean_squares = (experts.h_a if is_down else experts.h_x)[expert]
    _check_width(step, mean_squares.shape[0])
    tokens, n = int(experts.n[expert]), float(experts.effective_n[expert])
    if not tokens or not n:
        return ColumnStatistics(None, tokens, NO_TOKEN)
    if is_down:
        return ColumnStatistics(shrunk_neurons(mean_squares, n), tokens)
    return ColumnStatistics(shrunk_input(mean_squares, n, layer.pooled), tokens)


def _check_width(step: Step, found: int) -> None:
    if found != step.shape[1]:
        raise _mismatch(step, f"statistics of {found} input channels", f"{step.shape[1]}, the width of the weight")


def _mismatch(step: Step, found: str, expected: str) -> KizamiError:
    layer = step.place.layer
    return KizamiError(
        f"STATS has {found} in layer {layer}; expected {expected}",
        code="stats_mismatch",
        file=None if layer is None else layer_file(layer),
        tensor=step.module,
        hint="run kizami calibrate on this checkpoint; STATS of another one does not fit",
    )


def check_source(statistics: Statistics, checkpoint: Checkpoint, contents: Mapping[str, str]) -> None:
    """KizamiError "stats_mismatch" unless STATS is of this checkpoint: its sampled `contents` and its config, which
    decides routing and positions."""
    theirs = statistics.source_contents
    for name in sorted(contents.keys() | theirs.keys()):
        if contents.get(name) != theirs.get(name):
            who = "the source has no such file" if name not in contents else "STATS knows no such file"
            what = "its sampled pages differ" if name in contents and name in theirs else who
            raise KizamiError(
                f"STATS was made from another checkpoint: {what}",
                code="stats_mismatch",
                file=name,
                hint="run kizami calibrate on this checkpoint",
            )
    if statistics.manifest["source"].get("config") != config_sha256(checkpoint):
        raise KizamiError(
            "STATS was made with another config.json: who is routed where may be different",
            code="stats_mismatch",
            file=CONFIG_NAME,
            hint="run kizami calibrate on this checkpoint",
        )


def check_statistics(plan: Plan, statistics: Statistics) -> list[Fallback]:
    """As `find_fallbacks`; KizamiError also for what check_gptq finds."""
    if plan.method.name == "gptq":
        text = plan.config.get("text_config")
        check_gptq(statistics, text if isinstance(text, dict) else plan.config)
    return find_fallbacks(plan, statistics)


def find_fallbacks(plan: Plan, statistics: Statistics) -> list[Fallback]:
    """Reads every layer that the plan needs, and says which modules go without, in the plan's order.

    KizamiError "bad_statistics"; "stats_mismatch" where a layer is missing that calibration sees (it does not see MTP
    layers), or where experts or widths are others than the weights'.
    """
    calibration, found = Calibration(statistics, held=2), []
    for step in plan.steps:
        if step.action != "quantize":
            continue
        layer = step.place.layer
        if layer is not None and layer not in statistics.layers and not step.place.in_mtp and _is_text(step):
            raise _mismatch(step, "nothing", f"the layer; it has {_ranges(statistics.layers)}")
        if (reason := calibration.columns(step).fallback) is not None:
            found.append(Fallback(step.module, reason))
    return found


def _is_text(step: Step) -> bool:
    return step.place.role is not Role.VISION


def _ranges(layers: tuple[int, ...]) -> str:
    return f"layers {min(layers)} to {max(layers)} ({len(layers)} in all)" if layers else "none"


def facts_of(statistics: Statistics) -> dict[str, Any]:
    """What manifest and card tell of STATS: no paths. tokens: those that the statistics are of."""
    tokens = statistics.manifest["tokens"]
    return {
        "sha256": statistics.sha256,
        "tokens_sha256": tokens["sha256"],
        "tokens": (tokens["sequences"] - len(tokens["held_out"])) * tokens["seq_len"],
        "data": [source["name"] for source in tokens["sources"]],
    }

"""What quantisation does to what comes out of a layer's MLP, on the tokens that calibration held out.

The inputs are those of the FP8 model (STATS keeps them): errors of earlier layers do not enter, so a layer's figure is
its own. The reference is bf16(e4m3 * S), as the forward pass of calibration has it and as `--scheme bf16` writes it;
against it stands what the output's bytes say, q * s. Sums, products and activations in float32: BLAS decides the last
digits. One expert is in memory at a time, and a window of tokens.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite, log10, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.families import Role
from kizami.formats.fingerprint import sample_contents
from kizami.formats.reader import TensorReader
from kizami.formats.statistics import STARVED, LayerInputs, Statistics
from kizami.quantize.calibrated.solver import FEWEST_HELD_OUT, MLP_ROLES, PARTS, check_activation, source_weight
from kizami.quantize.calibrated.statistics import check_source, find_fallbacks
from kizami.quantize.decode import float32_weight, int4_weight, packed_of
from kizami.quantize.kv_scales.merge import asked_of
from kizami.quantize.manifest import MANIFEST, method_of, policy_of
from kizami.quantize.plan import Plan, Step
from kizami.quantize.planner import build_plan
from kizami.quantize.unpack import as_float32, to_bf16

WINDOW_BYTES = 1 << 30  # of inputs, outputs and their errors; 12,000 tokens of Kimi-K2
CHUNK = 1024  # tokens that go through an expert at a time
GATES = ("shared_expert_gate", "shared_experts_gate")
CHANGED = ("quantize", "repack", "to_fp8")  # actions; after any other one the weights are the reference's

F32 = NDArray[np.float32]
Mlp = tuple[F32, F32, F32]  # gate, up, down


@dataclass(slots=True)
class Energy:
    """Squares of the reference's output and of the error, each token weighted as the layer adds it up."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, signal: F32, noise: F32) -> None:
        self.signal += float(np.square(signal, dtype=np.float64).sum())
        self.noise += float(np.square(noise, dtype=np.float64).sum())

    @property
    def rel_error(self) -> float | None:
        """None where there was no output to compare with."""
        return sqrt(self.noise / self.signal) if self.signal else None

    def check(self, module: str) -> None:
        """KizamiError "non_finite"."""
        if not isfinite(self.signal + self.noise):
            raise KizamiError(
                "its output on the held-out tokens, of the source or of the output, is beyond float32",
                code="non_finite",
                tensor=module,
                hint="the weights there are damaged (kizami verify finds which), or STATS is",
            )

    @property
    def sqnr_db(self) -> float | None:
        """None also where there was no error."""
        return round(-20 * log10(error), 6) if (error := self.rel_error) else None


@dataclass(frozen=True, slots=True)
class ModuleError:
    """Of a routed expert, the shared expert or a dense MLP. tokens: held-out ones that it saw."""

    name: str
    layer: int
    expert: int | None
    tokens: int
    rel_error: float | None
    sqnr_db: float | None


@dataclass(frozen=True, slots=True)
class Routing:
    """Fit tokens by expert: smallest, middle and largest count, and the experts of fewer than STARVED."""

    min: int
    median: float
    max: int
    starved: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LayerError:
    """Of the sum that the layer's MLP gives: its routed experts and its shared one together, or a dense MLP."""

    layer: int
    tokens: int  # held out
    rel_error: float | None
    sqnr_db: float | None
    routing: Routing | None
    modules: tuple[ModuleError, ...]


@dataclass(slots=True)
class _Layer:
    """Steps by part: of each routed expert, and of what sees every token."""

    experts: dict[int, dict[str, Step]] = field(default_factory=dict)
    whole: dict[str, Step] = field(default_factory=dict)


class OutputErrors:
    """Of one output. KizamiError "stats_mismatch", "other_source", "missing_inputs", "unsupported_model" where
    STATS, source and output do not belong together, or say too little."""

    def __init__(
        self, out: Checkpoint, manifest: Mapping[str, Any], source: Checkpoint, statistics: Statistics
    ) -> None:
        contents = sample_contents(source)
        check_source(statistics, source, contents)
        self._plan = build_plan(source, policy_of(dict(manifest)), method_of(dict(manifest)), kv=asked_of(manifest))
        if contents != manifest["source_contents"] or self._plan.hash != manifest["plan_hash"]:
            raise KizamiError(
                "the source is not the one that the output was made of",
                code="other_source",
                file=str(source.root),
                hint=f"{MANIFEST} of the output tells of its source; kizami verify OUT --against SRC says what differs",
            )
        if statistics.keep == "none":
            raise KizamiError(
                "holds no inputs of the layers",
                code="missing_inputs",
                file=str(statistics.root),
                hint="run kizami calibrate with --keep held-out",
            )
        if not statistics.manifest["tokens"].get("held_out"):
            raise KizamiError(
                "no tokens were held out, so nothing can be measured",
                code="missing_inputs",
                file=str(statistics.root),
                hint="run kizami calibrate with more --samples: one sequence of ten is held out, of two or more",
            )
        find_fallbacks(self._plan, statistics)  # refuses STATS without a layer that they should have
        text = source.config.get("text_config")
        check_activation(text if isinstance(text, dict) else source.config)
        self._out, self._source, self._statistics = out, source, statistics
        self._steps = _mlps(self._plan)

    @property
    def layers(self) -> list[int]:
        """Those that can be looked at."""
        return [layer for layer in self._statistics.layers if layer in self._steps]

    @property
    def unmeasured(self) -> list[str]:
        """Packed modules whose inputs are not kept: of attention, of MTP layers."""
        seen = {step.module for layer in self.layers for step in _steps(self._steps[layer])}
        return [step.module for step in self._plan.steps if step.action in CHANGED and step.module not in seen]

    def each(self) -> Iterator[LayerError]:
        """Layer by layer; each takes a while."""
        with TensorReader(self._source) as source, TensorReader(self._out) as out:
            weights = _Weights(self._plan, source, out, self._out)
            for layer in self.layers:
                with self._statistics.inputs(layer) as inputs:
                    yield _measure(layer, self._steps[layer], weights, inputs, self._routing(layer))

    def _routing(self, layer: int) -> Routing | None:
        experts = self._statistics.layer(layer).experts
        if experts is None or not len(experts.n):
            return None
        few = np.flatnonzero(experts.n < STARVED).tolist()
        starved = tuple(_parent(self._steps[layer].experts[e]) for e in few if e in self._steps[layer].experts)
        return Routing(int(experts.n.min()), float(np.median(experts.n)), int(experts.n.max()), starved)


class _Weights:
    """gate, up and down of an MLP: of the reference, and of the output."""

    def __init__(self, plan: Plan, source: TensorReader, reader: TensorReader, out: Checkpoint) -> None:
        self._plan, self._source, self._reader, self._out = plan, source, reader, out

    def of(self, steps: Mapping[str, Step]) -> tuple[Mlp, Mlp]:
        before = [as_float32(to_bf16(source_weight(steps[part], self._source))) for part in PARTS]
        after = [self._output(steps[part], w) for part, w in zip(PARTS, before, strict=True)]
        return (before[0], before[1], before[2]), (after[0], after[1], after[2])

    def _output(self, step: Step, reference: F32) -> F32:
        if step.action not in CHANGED:
            return reference
        if step.form == "int4":
            policy, (rows, columns) = self._plan.policy, step.shape
            shape = (rows, columns)
            return int4_weight(
                *packed_of(policy.format, step.module, shape, policy.group_size, self._out, self._reader)
            )
        weight, scale = (self._out.tensors[spec.name] for spec in step.outputs)
        grid = self._reader.read(scale).view("<f4").reshape(scale.shape)
        return float32_weight(self._reader.read(weight).reshape(weight.shape), grid, (128, 128))


@np.errstate(over="ignore", invalid="ignore")  # what is not finite at the end is found by `check`
def _measure(layer: int, steps: _Layer, weights: _Weights, inputs: LayerInputs, routing: Routing | None) -> LayerError:
    held_out = np.flatnonzero(inputs.held_out)
    experts, gates, hidden = inputs.experts, inputs.gates, inputs.shape[1]
    total, of_whole, tokens = Energy(), Energy(), dict.fromkeys(steps.experts, 0)
    of_expert = {expert: Energy() for expert in steps.experts}
    for rows in _windows(held_out, hidden):
        x = inputs.rows(rows)
        output, error = np.zeros_like(x), np.zeros_like(x)
        for expert, mlp in steps.experts.items():
            seen, slots = np.nonzero(experts[rows] == expert)
            if not len(seen):
                continue
            tokens[expert] += len(seen)
            pair = weights.of(mlp)
            for part in _runs(seen):
                y, e = _outputs(x[seen[part]], *pair)
                g = gates[rows[seen[part]], slots[part]][:, None]
                of_expert[expert].add(g * y, g * e)
                output[seen[part]] += g * y  # an expert sees a token once
                error[seen[part]] += g * e
        if steps.whole:
            pair = weights.of(steps.whole)
            for part in _runs(rows):
                y, e = _outputs(x[part], *pair)
                of_whole.add(y, e)
                output[part] += y
                error[part] += e
        total.add(output, error)
    for expert, mlp in steps.experts.items():
        of_expert[expert].check(_parent(mlp))
    if steps.whole:
        of_whole.check(_parent(steps.whole))
    total.check(f"the MLP of layer {layer}")
    modules = [
        ModuleError(_parent(mlp), layer, expert, tokens[expert], of_expert[expert].rel_error, of_expert[expert].sqnr_db)
        for expert, mlp in steps.experts.items()
    ]
    if steps.whole:
        name = _parent(steps.whole)
        modules.append(ModuleError(name, layer, None, len(held_out), of_whole.rel_error, of_whole.sqnr_db))
    return LayerError(layer, len(held_out), total.rel_error, total.sqnr_db, routing, tuple(modules))


def _windows(rows: NDArray[np.int64], hidden: int) -> Iterator[NDArray[np.int64]]:
    size = max(CHUNK, WINDOW_BYTES // (3 * 4 * hidden))
    return (rows[first : first + size] for first in range(0, len(rows), size))


def _runs(rows: NDArray[np.int64]) -> Iterator[slice]:
    return (slice(first, first + CHUNK) for first in range(0, len(rows), CHUNK))


def _outputs(x: F32, before: Mlp, after: Mlp) -> tuple[F32, F32]:
    """The reference's output and the error, [n, hidden]."""
    reference = _forward(x, before)
    if all(a is b for a, b in zip(before, after, strict=True)):
        return reference, np.zeros_like(reference)
    return reference, _forward(x, after) - reference


def _forward(x: F32, mlp: Mlp) -> F32:
    """silu(x Wg^T) * (x Wu^T), then down."""
    gate, up, down = mlp
    g = x @ gate.T
    g /= np.float32(1) + np.exp(-g)  # exp(100) is infinite, and silu(-100) then 0, as it must be
    g *= x @ up.T
    y: F32 = (g @ down.T).astype(np.float32, copy=False)
    return y


def _mlps(plan: Plan) -> dict[int, _Layer]:
    """Steps by layer. KizamiError "unsupported_model" for an MLP that is no gate, up and down."""
    layers: dict[int, _Layer] = {}
    for step in plan.steps:
        place = step.place
        if place.part in GATES and not place.in_mtp:
            raise KizamiError(
                "is a gate of the shared expert: what it lets through is not known",
                code="unsupported_model",
                tensor=step.module,
            )
        if place.role not in MLP_ROLES or place.in_mtp or place.layer is None or not step.is_linear:
            continue
        layer = layers.setdefault(place.layer, _Layer())
        expert = place.expert if place.role is Role.ROUTED_EXPERT else None
        mlp = layer.whole if expert is None else layer.experts.setdefault(expert, {})
        mlp[place.part] = step
    for layer in layers.values():
        layer.experts = dict(sorted(layer.experts.items()))
        for mlp in filter(None, (layer.whole, *layer.experts.values())):
            if sorted(mlp) != sorted(PARTS):
                raise KizamiError(
                    f"has {', '.join(sorted(mlp))}; expected {', '.join(PARTS)}: what comes out of it is not known",
                    code="unsupported_model",
                    tensor=_parent(mlp),
                )
    return layers


def _steps(layer: _Layer) -> Iterable[Step]:
    for mlp in (layer.whole, *layer.experts.values()):
        yield from mlp.values()


def _parent(mlp: Mapping[str, Step]) -> str:
    return next(iter(mlp.values())).module.rpartition(".")[0]


def worst_modules(layers: Iterable[LayerError]) -> list[ModuleError]:
    """Of all layers, the largest error first; those without an error are not among them, nor `unsure_modules`."""
    found = [module for layer in layers for module in layer.modules if module.rel_error and not is_unsure(module)]
    return sorted(found, key=lambda module: (-(module.rel_error or 0.0), module.layer, module.name))


def unsure_modules(layers: Iterable[LayerError]) -> list[ModuleError]:
    """Those of too few held-out tokens: the error of a handful is noise."""
    return [module for layer in layers for module in layer.modules if is_unsure(module)]


def is_unsure(module: ModuleError) -> bool:
    return module.tokens < FEWEST_HELD_OUT


def median_error(layers: Iterable[LayerError]) -> float | None:
    """Of the layers whose MLP was changed; None without any."""
    found = [layer.rel_error for layer in layers if layer.rel_error]
    return float(np.median(found)) if found else None

"""`--method gptq`: of every packed linear with kept inputs GPTQ's codes, where they serve held-out tokens better than
those of `weighted`, whose scales they share. One solve at a time: it takes all cores and, at 7168 columns, 1 GB."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kizami.formats.errors import KizamiError
from kizami.formats.families import Role
from kizami.formats.reader import TensorReader
from kizami.formats.statistics import LayerInputs, Statistics
from kizami.quantize.buffers import Buffers
from kizami.quantize.decode import bands, float32_weight, int4_weight
from kizami.quantize.linear import PackedLinear
from kizami.quantize.measure import measure_values
from kizami.quantize.plan import Step
from kizami.quantize.source_rows import opened
from kizami.quantize.threads import Stopped, available_cores

if TYPE_CHECKING:
    import torch

    from kizami.quantize.calibrated.gptq import Factor
    from kizami.quantize.calibrated.hessian import SwiGlu, Tokens

FEWEST_HELD_OUT = 32  # tokens: below it a comparison is noise
LAYERS_OPEN = 2  # neighbouring shards are worked on at a time
FACTORS_KEPT = 2  # of 205 MB at 7168 columns; gate and up of an expert share one
SOLVER_WORKERS = 2  # one solves, with all cores; the other reads and searches. More would only take turns with factors
MLP_ROLES = (Role.ROUTED_EXPERT, Role.SHARED_EXPERT, Role.DENSE_MLP)
PARTS = ("gate_proj", "up_proj", "down_proj")

NOT_KEPT = "inputs are not kept"  # of one module or of many: so all reasons are worded

Key = tuple[Any, ...]  # role, layer, expert, part
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was decided of a linear, and why. Losses: sum over held-out tokens of g^2 ||(W - Q) x||^2; None where the
    comparison was not made."""

    chosen: str  # "gptq" or "weighted"
    reason: str
    n: int = 0  # fit tokens
    effective_n: float = 0.0
    n_held_out: int = 0
    loss_gptq: float | None = None
    loss_weighted: float | None = None

    def row(self) -> dict[str, Any]:
        """For the report: words and finite numbers."""
        return {
            "chosen": self.chosen,
            "reason": self.reason,
            "n": self.n,
            "n_eff": round(self.effective_n, 3),
            "n_held_out": self.n_held_out,
            "loss_gptq": self.loss_gptq,
            "loss_weighted": self.loss_weighted,
        }


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """The input of a linear: rows of STATS, and what makes it of them."""

    tokens: "Tokens"
    activation: "SwiGlu | None"


def check_gptq(statistics: Statistics, config: Mapping[str, Any]) -> None:
    """What a run would stumble over. config: with the language model's numbers. KizamiError "missing_torch",
    "missing_inputs", "unsupported_model"."""
    require_torch()
    if statistics.keep != "all":
        held = "no inputs" if statistics.keep == "none" else f"the inputs of {statistics.keep} tokens"
        raise KizamiError(
            f"holds {held}; gptq forms its Hessians from the inputs of all tokens",
            code="missing_inputs",
            file=str(statistics.root),
            hint="run kizami calibrate with --keep all",
        )
    check_activation(config)


def check_activation(config: Mapping[str, Any]) -> None:
    """The input of down is computed here, from gate and up. KizamiError "unsupported_model"."""
    activation = config.get("hidden_act")
    if activation != "silu":
        raise KizamiError(
            f"hidden_act is {activation!r}; expected 'silu': the input of down_proj is recomputed as "
            "silu(gate_proj x) * (up_proj x)",
            code="unsupported_model",
            file="config.json",
        )


def require_torch(asked: str = "--method gptq", without: str = "--method weighted needs only NumPy") -> None:
    """KizamiError "missing_torch"."""
    try:
        import kizami.quantize.calibrated.gptq  # noqa: F401
    except ImportError as e:
        if e.name != "torch":
            raise
        raise KizamiError(
            f"{asked} computes with torch, which is not installed",
            code="missing_torch",
            hint=f"pip install 'kizami[torch]'; {without}",
        ) from None


def libraries(device: str) -> dict[str, str]:
    """For the manifest: what the bytes of a gptq run depend on beside its settings."""
    import torch

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
    return {"torch": torch.__version__, "device": name, "threads": str(available_cores())}


class Solver:
    """Shared by the threads of a run. reader: the source's. steps: those that are improved, and their `makers`. stop:
    once it is set, `improve` soon raises Stopped. `close` it at the end."""

    def __init__(
        self,
        statistics: Statistics,
        steps: Sequence[Step],
        reader: TensorReader,
        device: str = "cpu",
        stop: Event | None = None,
    ) -> None:
        self._statistics, self._reader, self._device = statistics, reader, device
        self._stop = stop or Event()
        self._steps = linears(steps)
        self._lock = Lock()
        self._inputs: OrderedDict[int, LayerInputs] = OrderedDict()
        self._factors: OrderedDict[Any, Factor | None] = OrderedDict()

    def close(self) -> None:
        """No `improve` may be at work."""
        while self._inputs:
            self._inputs.popitem()[1].__exit__()

    def improve(
        self, step: Step, weight: Callable[[], F32], weighted: PackedLinear, h: F64 | None = None
    ) -> tuple[PackedLinear, Outcome]:
        """weight: gives the source's float32 [N, K], when it is needed; h: mean squares of its columns, for the sums.
        Returns `weighted` or what is better. KizamiError as Statistics.inputs."""
        import torch

        layer = step.place.layer
        if _key(step) not in self._steps or step.place.in_mtp or layer not in self._statistics.layers:
            return weighted, Outcome("weighted", NOT_KEPT)
        assert layer is not None
        with self._lock, torch.inference_mode():
            torch.set_num_threads(available_cores())  # not the caller's number of workers: sums depend on it
            seen = self._seen(step, self._open(layer))
            if isinstance(seen, str):
                return weighted, Outcome("weighted", seen)
            fit, held_out = seen.tokens.where(False), seen.tokens.where(True)
            outcome = Outcome("weighted", "", fit.n, fit.effective_n, held_out.n)
            if held_out.n < FEWEST_HELD_OUT:
                return weighted, replace(outcome, reason=f"fewer than {FEWEST_HELD_OUT} held-out tokens")
            if not fit.n:
                return weighted, replace(outcome, reason="no fit tokens")
            factor = self._factor(step, fit, seen.activation)
            if factor is None:
                return weighted, replace(outcome, reason="the Hessian has no Cholesky factor")
            return self._compare(weight(), weighted, factor, replace(seen, tokens=held_out), outcome, h)

    def _seen(self, step: Step, inputs: LayerInputs) -> "_Seen | str":
        """Or why that is not known."""
        from kizami.quantize.calibrated.hessian import SwiGlu, to_bf16, tokens_of

        place, width = step.place, step.shape[1]
        if (inputs.experts.shape[1] > 0) == (place.role is Role.DENSE_MLP):
            return NOT_KEPT
        activation = None
        if place.part == "down_proj":
            makers = [self._steps.get((*_key(step)[:3], part)) for part in PARTS[:2]]
            if any(maker is None or maker.shape != (width, inputs.shape[1]) for maker in makers):
                return "there are no gate_proj and up_proj that make the input"
            gate, up = (to_bf16(self._tensor(source_weight(maker, self._reader))) for maker in makers if maker)
            activation = SwiGlu(gate, up)
        elif width != inputs.shape[1]:
            return f"inputs are {inputs.shape[1]} wide, the weight has {width} columns"
        expert = place.expert if place.role is Role.ROUTED_EXPERT else None
        return _Seen(tokens_of(inputs, expert), activation)

    def _factor(self, step: Step, fit: "Tokens", activation: "SwiGlu | None") -> "Factor | None":
        from kizami.quantize.calibrated.gptq import factorize, shrink
        from kizami.quantize.calibrated.hessian import hessian

        def make() -> "Factor | None":
            width = step.shape[1]
            h = hessian(self._rows(_Seen(fit, activation)), width, self._device)
            return factorize(shrink(h, fit.effective_n / (fit.effective_n + width)))

        if activation is not None:
            return make()
        key = _key(step)[:3]
        if key not in self._factors:
            while len(self._factors) >= FACTORS_KEPT:
                self._factors.popitem(last=False)
            self._factors[key] = make()
        self._factors.move_to_end(key)
        return self._factors[key]

    def _compare(
        self,
        w: F32,
        weighted: PackedLinear,
        factor: "Factor",
        held_out: "_Seen",
        outcome: Outcome,
        h: F64 | None,
    ) -> tuple[PackedLinear, Outcome]:
        from kizami.quantize.calibrated.gptq import solve
        from kizami.quantize.calibrated.hessian import output_losses

        target = self._tensor(w)
        scale = self._tensor((weighted.scale.astype(np.uint32) << np.uint32(16)).view(np.float32))
        codes = solve(target, scale, factor).cpu().numpy()
        packed = pack(codes)
        errors = [target - self._tensor(int4_weight(words, weighted.scale)) for words in (packed, weighted.packed)]
        ours, theirs = output_losses(self._rows(held_out), errors)
        better = ours < theirs  # false where one is not a number
        outcome = replace(
            outcome,
            chosen="gptq" if better else "weighted",
            reason="better on held-out tokens" if better else "not better on held-out tokens",
            loss_gptq=ours if isfinite(ours) else None,
            loss_weighted=theirs if isfinite(theirs) else None,
        )
        if not better:
            return weighted, outcome
        sums = measure_values(w, packed, weighted.scale, h)
        return PackedLinear(packed, weighted.scale, sums), outcome

    def _rows(self, seen: _Seen) -> "Iterator[torch.Tensor]":
        from kizami.quantize.calibrated.hessian import chunks

        for rows in chunks(seen.tokens, self._device, seen.activation):
            if self._stop.is_set():
                raise Stopped
            yield rows

    def _open(self, layer: int) -> LayerInputs:
        """Opened, and hashed, once for all linears of the layer."""
        if layer not in self._inputs:
            while len(self._inputs) >= LAYERS_OPEN:
                self._inputs.popitem(last=False)[1].__exit__()
            self._inputs[layer] = self._statistics.inputs(layer)
        self._inputs.move_to_end(layer)
        return self._inputs[layer]

    def _tensor(self, array: NDArray[Any]) -> "torch.Tensor":
        import torch

        return torch.from_numpy(array).to(self._device)


def linears(steps: Sequence[Step]) -> dict[Key, Step]:
    """Those of an MLP, by what they are."""
    return {_key(step): step for step in steps if step.place.role in MLP_ROLES and step.place.part in PARTS}


def makers(wanted: Sequence[Step], of: Mapping[Key, Step]) -> tuple[Step, ...]:
    """Gate and up, `of` the plan's linears, of each down_proj that is `wanted`: they make its input. Without those that
    are wanted themselves."""
    there = linears(wanted)
    keys = ((*key[:3], part) for key in there if key[3] == "down_proj" for part in PARTS[:2])
    return tuple(of[key] for key in keys if key in of and key not in there)


def source_weight(step: Step, reader: TensorReader) -> F32:
    """float32 [N, K] of a step's source."""
    with opened(step, reader, Buffers(0)) as source:
        return float32_weight(*source)


def pack(codes: NDArray[np.int8]) -> NDArray[np.int32]:
    """int8 [N, K] to int32 [N, K/8], nibble i of word j is column 8j+i holding q + 8."""
    packed = np.empty((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for first, last in bands(*codes.shape):
        nibbles = (codes[first:last] + np.int8(8)).astype(np.uint8)
        packed[first:last] = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).view("<u4")
    return packed.view(np.int32)


def _key(step: Step) -> Key:
    place = step.place
    return place.role, place.layer, place.expert, place.part

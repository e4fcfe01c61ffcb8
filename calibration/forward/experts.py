"""The MLP of a layer as units of work: one routed expert, or a slice of the shared expert's or a dense MLP's width.

Every unit is a small gated MLP over some of the tokens, each with a gate weight. Its products go to rows of their own,
so that nothing accumulates: doing a unit again writes the same bytes to the same place.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from kizami.calibration.forward.model import Mlp
from kizami.calibration.forward.observers import square_sums
from kizami.calibration.forward.weights import Weights

Activation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Unit:
    """Columns `first` to `last` of the inner width of `module` (its name in the layer); `expert` is None for a slice
    that all tokens pass."""

    module: str
    expert: int | None
    first: int
    last: int


def units_of(mlp: Mlp) -> tuple[Unit, ...]:
    """Experts in ascending order, then the slices of the shared expert; or those of the dense MLP."""
    experts = tuple(Unit(f"mlp.experts.{e}", e, 0, mlp.inner) for e in range(mlp.experts))
    if mlp.dense:
        return _slices("mlp", mlp.dense, slice_width(mlp.inner, mlp.dense))
    return experts + _slices("mlp.shared_experts", mlp.shared, mlp.inner)


def slice_width(inner: int, dense: int) -> int:
    """A dense MLP is cut as wide as an expert (Kimi's: 18432 = 9 x 2048), into 16 slices at most."""
    return max(inner, -(-dense // 16))


def _slices(module: str, width: int, step: int) -> tuple[Unit, ...]:
    return tuple(Unit(module, None, first, min(first + step, width)) for first in range(0, width, step))


class Routing:
    """Which tokens each expert gets. ids, gates: [tokens, top_k], ascending experts within a token.

    A row is a place in the file of products: those of an expert lie side by side, its tokens ascending.
    """

    def __init__(self, ids: NDArray[np.int32], gates: NDArray[np.float32], experts: int) -> None:
        self.ids, self.gates = ids, gates
        flat = ids.reshape(-1)
        self._order = np.argsort(flat, kind="stable").astype(np.uint32)
        self._begins = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=experts))])
        self._rows = np.empty(len(flat), np.uint32)
        self._rows[self._order] = np.arange(len(flat), dtype=np.uint32)

    def of_expert(self, expert: int) -> tuple[int, NDArray[np.int64], NDArray[np.float32]]:
        """Its first row, its tokens, and their gate weights."""
        begin, end = self._begins[expert], self._begins[expert + 1]
        places = self._order[begin:end].astype(np.int64)
        return int(begin), places // self.ids.shape[1], self.gates.reshape(-1)[places]

    def rows(self, slot: int, first: int, last: int) -> NDArray[np.int64]:
        """Rows of the products of tokens first to last with their slot-th expert."""
        return self._rows.reshape(self.ids.shape)[first:last, slot].astype(np.int64)


@dataclass(frozen=True, slots=True)
class UnitWeights:
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    @staticmethod
    def read(
        weights: Weights, name: str, unit: Unit, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> "UnitWeights":
        """name: the module's on disk; tokens: how many will pass it."""
        part = slice(unit.first, unit.last)

        def matrix(projection: str, rows: slice | None = None, cols: slice | None = None) -> torch.Tensor:
            full = f"{name}.{projection}.weight"
            found = weights.read(full, rows=rows, cols=cols, dtype=dtype, device=device)
            return _fast(found) if tokens >= MANY else found

        return UnitWeights(matrix("gate_proj", rows=part), matrix("up_proj", rows=part), matrix("down_proj", cols=part))


MANY = 256  # tokens for which another form of the weights is worth its making


def _fast(weight: torch.Tensor) -> torch.Tensor:
    """In the form of oneDNN where that is the faster library. Products of float32 go to MKL by default, which is half
    as fast on AMD's CPUs [measured, EPYC with AVX-512: 100 and 230 GFLOP/s] and no faster on Intel's."""
    cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return weight.to_mkldnn() if cpu and there else weight


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x.to_mkldnn(), weight).to_dense() if weight.is_mkldnn else F.linear(x, weight)


@dataclass(slots=True)
class UnitSums:
    """Over fit tokens whose numbers are finite, g their gate weights: sum g^2 x^2 of the input of gate and up, sum g^2
    a^2 of down's, sum g^2, sum g^4, n; n_held_out counts the others. A token whose weight is 0 is none of the unit's.
    overflown: tokens with finite inputs and products that are not, or with inputs of zeros."""

    x: NDArray[np.float64]
    a: NDArray[np.float64]
    g2: float = 0.0
    g4: float = 0.0
    n: int = 0
    n_held_out: int = 0
    overflown: int = 0


def run_unit(
    weights: UnitWeights,
    act: Activation,
    inputs: Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    write: Callable[[torch.Tensor], None],
) -> UnitSums:
    """inputs: runs of (x [n, hidden], gates float32 [n], fit bool [n]); write takes g * down(act(gate x) * up x)."""
    hidden, inner = weights.down.shape
    sums = UnitSums(np.zeros(hidden), np.zeros(inner))
    for x, gates, fit in inputs:
        a = _linear(x, weights.gate)
        a = act(a).mul_(_linear(x, weights.up))
        y = _linear(a, weights.down)
        write((y * gates[:, None]).to(x.dtype))
        sound = x.isfinite().all(dim=1)
        finite = sound & a.isfinite().all(dim=1) & (gates != 0)
        right = a.isfinite().all(dim=1) & y.isfinite().all(dim=1) & x.any(dim=1)
        sums.overflown += int((sound & ~right).sum())
        del y
        weight = torch.where(fit & finite, gates.double().square(), 0.0)
        sums.x += square_sums(x, weight)[0].cpu().numpy()
        sums.a += square_sums(a, weight)[0].cpu().numpy()
        sums.g2 += float(weight.sum())
        sums.g4 += float(weight.square().sum())
        sums.n += int((fit & finite).sum())
        sums.n_held_out += int((~fit & finite).sum())
    return sums

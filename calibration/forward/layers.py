"""One layer of the forward pass, in phases; each is a row of pieces that can be done again with the same result.

attention   per sequence: attended = x + attention(norm(x)), with what is observed on the way
routing     per run of tokens: who goes to which expert, with which weight
units       per expert or slice: its products, and sums over its inputs
combine     per run of tokens: x = attended + the token's products; the only phase that overwrites an input
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from kizami.calibration.forward.attention import EveryKey, attend, observed
from kizami.calibration.forward.experts import Routing, Unit, UnitWeights, run_unit, units_of
from kizami.calibration.forward.memory import COUNTS, Chunks
from kizami.calibration.forward.model import Layer, Mlp, Model, is_sparse
from kizami.calibration.forward.observers import Arrays, RangeMeter, SquareSums
from kizami.calibration.forward.weights import Weights
from kizami.calibration.forward.work import Work
from kizami.formats.errors import KizamiError
from kizami.formats.statistics import ExpertStatistics, LayerStatistics

Piece = tuple[int, Callable[[int], None]]  # how many there are, and what does one
TOO_MANY_BAD = 0.1  # of a layer's tokens
# A norm makes zeros of numbers whose squares are beyond float32, and what lies behind would seem sound
NOT_ZEROS = "finite and not all zeros"


DAMAGED = "the checkpoint is damaged there, or its config.json; or the numbers are beyond the dtype of the run"


@dataclass(frozen=True, slots=True)
class Pass:
    """What all layers of a run share. ids: [sequences, seq_len]; fit: bool [sequences], those that are not held out."""

    model: Model
    weights: Weights
    work: Work
    ids: NDArray[np.int32]
    fit: NDArray[np.bool_]
    chunks: Chunks
    dtype: torch.dtype
    device: torch.device

    @property
    def tokens(self) -> int:
        return int(self.ids.size)

    @property
    def seq_len(self) -> int:
        return int(self.ids.shape[1])

    @property
    def fit_tokens(self) -> NDArray[np.bool_]:
        return np.repeat(self.fit, self.seq_len)

    def runs(self) -> int:
        return -(-self.tokens // self.chunks.tokens)

    def run(self, number: int) -> tuple[int, int]:
        """First and last token of a run."""
        first = number * self.chunks.tokens
        return first, min(first + self.chunks.tokens, self.tokens)


def embed(job: Pass) -> Piece:
    """Hidden states that enter the first layer, a run of tokens at a time."""

    def piece(number: int) -> None:
        first, last = job.run(number)
        ids = job.ids.reshape(-1)[first:last].astype(np.int64)
        job.work.x.store(first, job.weights.gather(job.model.embedding, ids).to(job.dtype))

    return job.runs(), piece


class LayerRun:
    """The phases of layer `index`."""

    def __init__(self, job: Pass, index: int) -> None:
        self.job, self.index = job, index
        self.layer: Layer = job.model.load(index, job.dtype, job.device)
        self.mlp: Mlp = job.model.mlp(self.layer)
        self.units: tuple[Unit, ...] = units_of(self.mlp)
        self.squares = SquareSums()
        self.ranges: dict[str, RangeMeter] = {}
        self._routing: Routing | None = None

    # ------------------------------------------------------------------------------------------------ attention

    def attention(self) -> Piece:
        topk, indexer = self.job.model.index_topk, getattr(self.layer.self_attn, "indexer", None)
        if topk is not None and self.job.seq_len <= topk and indexer is not None:
            self.layer.self_attn.indexer = EveryKey()
        return len(self.job.ids), self._sequence

    def _sequence(self, number: int) -> None:
        job, work = self.job, self.job.work
        first, last = number * job.seq_len, (number + 1) * job.seq_len
        taken = work.chosen is not None and bool(getattr(self.layer.self_attn, "skip_topk", False))
        chosen = torch.from_numpy(cast(Any, work.chosen).read(first, last)).to(job.device) if taken else None
        fit = bool(job.fit[number])
        inputs = self.squares.add if fit else lambda name, x: None
        begun: set[str] = set()

        def ranges(name: str, rows: torch.Tensor) -> None:
            meter = self.ranges.setdefault(name, RangeMeter(rows.shape[-1]))
            meter.add(rows, first=name not in begun)
            begun.add(name)

        with observed(self.layer, inputs, ranges):
            out, picked = attend(
                self.layer, work.x.load(first, last), job.model.rotary, job.chunks.queries, ranges,
                job.model.index_topk, chosen,
            )  # fmt: skip
        work.attended.store(first, out)
        if picked is not None and work.chosen is not None and not taken:
            work.chosen.write(first, picked.cpu().numpy())

    # ------------------------------------------------------------------------------------------------ routing

    def route(self) -> Piece:
        return (self.job.runs() if self.mlp.experts else 0), self._route

    def _route(self, number: int) -> None:
        first, last = self.job.run(number)
        _, gates, ids = cast(Any, self.layer.mlp).gate(self._normed(self.job.work.attended.load(first, last)))
        ids, order = ids.sort(dim=1)
        self.job.work.ids.write(first, self._wide(ids.cpu().numpy(), np.int32))
        gates = gates.gather(1, order).float()
        gates[~gates.isfinite().all(dim=1)] = 0  # rows that count for nothing
        self.job.work.gates.write(first, self._wide(gates.cpu().numpy(), np.float32))

    def _wide(self, values: NDArray[Any], dtype: type) -> NDArray[Any]:
        """[n, columns of the file]: layers of one model have one top_k."""
        assert values.shape[1] == self.job.work.ids.width, values.shape
        return values.astype(dtype)

    def normed(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        """The MLP's input of these tokens, [n, hidden]."""
        return self._normed(self.job.work.attended.pick(tokens))

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer.post_attention_layernorm(x)
        return found

    @property
    def routing(self) -> Routing:
        """Once all tokens are routed."""
        if self._routing is None:
            work = self.job.work
            ids, gates = work.ids.read(0, self.job.tokens), work.gates.read(0, self.job.tokens)
            self._routing = Routing(ids, gates, self.mlp.experts)
        return self._routing

    # ------------------------------------------------------------------------------------------------ units

    def mlps(self) -> Piece:
        """KizamiError "non_finite" if the router gave too many tokens nothing to go by."""
        if self.mlp.experts:
            bad = int((self.routing.gates == 0).all(axis=1).sum())
            self._check_share("weights of the router", bad, self.job.tokens, "mlp.gate", "finite and not all 0")
        return len(self.units), self._unit

    def _unit(self, number: int) -> None:
        job, unit = self.job, self.units[number]
        if unit.expert is not None:
            row, tokens, gates = self.routing.of_expert(unit.expert)
        else:
            row = self._slice_row(number)
            tokens, gates = np.arange(job.tokens), np.ones(job.tokens, np.float32)
        counts = np.zeros((1, COUNTS))
        sum_x, sum_a = np.zeros((1, job.model.hidden)), np.zeros((1, job.work.unit_a.width))
        if len(tokens):
            name = job.model.name(self.index, unit.module)
            weights = UnitWeights.read(job.weights, name, unit, len(tokens), job.dtype, job.device)
            writer = _RowWriter(job.work, row)
            sums = run_unit(weights, self._act, self._inputs(tokens, gates), writer)
            counts[0] = sums.g2, sums.g4, sums.n, sums.n_held_out, sums.overflown
            sum_x[0], sum_a[0, : len(sums.a)] = sums.x, sums.a
        job.work.unit_x.write(number, sum_x)
        job.work.unit_a.write(number, sum_a)
        job.work.unit_counts.write(number, counts)

    def _slice_row(self, number: int) -> int:
        """Where the products of a slice begin: behind those of the experts."""
        return self.job.tokens * (self.mlp.top_k + number - self.mlp.experts)

    @property
    def _act(self) -> Callable[[torch.Tensor], torch.Tensor]:
        mlp: Any = self.layer.mlp
        found: Callable[[torch.Tensor], torch.Tensor] = (mlp.experts if is_sparse(self.layer) else mlp).act_fn
        return found

    def _inputs(
        self, tokens: NDArray[np.int64], gates: NDArray[np.float32]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        job, step = self.job, self.job.chunks.tokens
        for at in range(0, len(tokens), step):
            part = tokens[at : at + step]
            x = self.normed(part)
            fit = torch.from_numpy(job.fit[part // job.seq_len]).to(job.device)
            yield x, torch.from_numpy(gates[at : at + step]).to(job.device), fit

    # ------------------------------------------------------------------------------------------------ combine

    def combine(self) -> Piece:
        return self.job.runs(), self._combine

    def _combine(self, number: int) -> None:
        """In transformers' order: the experts' products one by one, the shared expert's, then the residual."""
        job, work = self.job, self.job.work
        first, last = job.run(number)
        total = torch.zeros((last - first, job.model.hidden), dtype=job.dtype, device=job.device)
        for slot in range(self.mlp.top_k):
            total += work.products.pick(self.routing.rows(slot, first, last))
        for unit in range(self.mlp.experts, len(self.units)):
            row = self._slice_row(unit)
            total += work.products.load(row + first, row + last)
        total += work.attended.load(first, last)
        bad = int((~total.float().square().mean(dim=1).isfinite()).sum())
        work.bad.write(number, np.array([[bad]]))
        work.x.store(first, total)

    @property
    def bad_rows(self) -> int:
        """Tokens whose hidden state behind the layer is not finite, or whose mean square is not in float32: of such a
        one an RMSNorm makes zeros, and the layers behind it would seem sound."""
        return int(self.job.work.bad.read(0, self.job.runs()).sum())

    # ------------------------------------------------------------------------------------------------ results

    def measured(self) -> Arrays:
        """What attention has summed so far, for the journal."""
        arrays = {f"linear|{key}": value for key, value in self.squares.state().items()}
        for name, meter in self.ranges.items():
            arrays |= {f"kv|{name}|{key}": value for key, value in meter.state().items()}
        return arrays

    def restore(self, arrays: Arrays) -> None:
        self.squares.load({key.removeprefix("linear|"): v for key, v in arrays.items() if key.startswith("linear|")})
        for name in sorted({key.split("|")[1] for key in arrays if key.startswith("kv|")}):
            state = {key.split("|")[2]: v for key, v in arrays.items() if key.startswith(f"kv|{name}|")}
            self.ranges[name] = RangeMeter(len(state["amax"]))
            self.ranges[name].load(state)

    def check(self) -> None:
        """KizamiError "non_finite" if too much of what was measured was left out of the sums."""
        job = self.job
        fit = int(job.fit.sum()) * job.seq_len
        for name, count in self.squares.counts.items():
            self._check_share("inputs", fit - count, fit, name, NOT_ZEROS)
        for name, meter in self.ranges.items():
            self._check_share(f"rows of the KV cache ({name})", job.tokens - meter.count, job.tokens, "self_attn")

    def check_behind(self) -> None:
        """KizamiError "non_finite" if too few tokens are sound in the MLP, or behind the layer."""
        job = self.job
        counts = job.work.unit_counts.read(0, len(self.units))
        ids = self.routing.ids if self.mlp.experts else np.zeros(0, np.int32)
        routed = np.bincount(ids.reshape(-1), minlength=self.mlp.experts)
        for unit, overflown in zip(self.units, counts[:, 4].tolist(), strict=True):
            total = job.tokens if unit.expert is None else int(routed[unit.expert])
            self._check_share("inputs or products", int(overflown), total, unit.module, NOT_ZEROS)
        if self.bad_rows > TOO_MANY_BAD * job.tokens:
            raise KizamiError(
                f"behind layer {self.index} the hidden states of {self.bad_rows} of {job.tokens} tokens are not "
                f"finite, expected at most {TOO_MANY_BAD:.0%}",
                code="non_finite",
                hint=DAMAGED,
            )

    def _check_share(self, what: str, bad: int, total: int, module: str, expected: str = "finite") -> None:
        if bad > TOO_MANY_BAD * total:
            raise KizamiError(
                f"{what} of {bad} of {total} tokens are not {expected}, expected at most {TOO_MANY_BAD:.0%}",
                code="non_finite",
                tensor=self.job.model.name(self.index, module),
                hint=DAMAGED,
            )

    def statistics(self) -> LayerStatistics:
        work, count = self.job.work, len(self.units)
        counts, sum_x, sum_a = work.unit_counts.read(0, count), work.unit_x.read(0, count), work.unit_a.read(0, count)
        linears = self._attention_means() | self._slice_means(counts, sum_x, sum_a)
        named = {self.job.model.name(self.index, name): h for name, h in linears.items()}
        experts = _experts(counts, sum_x, sum_a, self.mlp) if self.mlp.experts else None
        return LayerStatistics(self.index, experts, named, {name: m.result() for name, m in self.ranges.items()})

    def _attention_means(self) -> dict[str, NDArray[np.float32]]:
        """An indexer that did not run would have had the same inputs as projections that did."""
        if isinstance(getattr(self.layer.self_attn, "indexer", None), EveryKey):
            for name, other in (("wk", "q_a_proj"), ("weights_proj", "q_a_proj"), ("wq_b", "q_b_proj")):
                self.squares.same(f"self_attn.indexer.{name}", f"self_attn.{other}")
        return self.squares.means()

    def _slice_means(
        self, counts: NDArray[np.float64], sum_x: NDArray[np.float64], sum_a: NDArray[np.float64]
    ) -> dict[str, NDArray[np.float32]]:
        found: dict[str, NDArray[np.float32]] = {}
        slices = [(i, unit) for i, unit in enumerate(self.units) if unit.expert is None]
        for i, unit in slices:
            n = max(counts[i, 2], 1)
            if unit.first == 0:
                for projection in ("gate_proj", "up_proj"):
                    found[f"{unit.module}.{projection}"] = (sum_x[i] / n).astype(np.float32)
        if slices:
            parts = [sum_a[i, : unit.last - unit.first] / max(counts[i, 2], 1) for i, unit in slices]
            found[f"{slices[0][1].module}.down_proj"] = np.concatenate(parts).astype(np.float32)
        return found


class _RowWriter:
    """Puts products into rows that follow each other."""

    def __init__(self, work: Work, row: int) -> None:
        self._work, self._row = work, row

    def __call__(self, values: torch.Tensor) -> None:
        self._work.products.store(self._row, values)
        self._row += len(values)


def _experts(
    counts: NDArray[np.float64], sum_x: NDArray[np.float64], sum_a: NDArray[np.float64], mlp: Mlp
) -> ExpertStatistics:
    counts = counts[: mlp.experts]
    g2 = np.where(counts[:, :1] > 0, counts[:, :1], 1)
    return ExpertStatistics(
        h_x=(sum_x[: mlp.experts] / g2).astype(np.float32),
        h_a=(sum_a[: mlp.experts, : mlp.inner] / g2).astype(np.float32),
        sum_g2=counts[:, 0],
        sum_g4=counts[:, 1],
        n=counts[:, 2].astype(np.int64),
        n_held_out=counts[:, 3].astype(np.int64),
    )

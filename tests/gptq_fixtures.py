"""STATS of random inputs with the shapes of a real checkpoint, and what they say by plain NumPy and the oracle."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.dialects import find_encoded_weights
from kizami.formats.fingerprint import config_sha256, sample_contents
from kizami.formats.reader import TensorReader
from kizami.formats.statistics import ExpertStatistics, LayerStatistics
from kizami.formats.statistics_writer import InputsWriter, write_layer, write_manifest
from kizami.quantize import reference

SEQUENCE = 100
PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass
class Layer:
    """x float32 [tokens, hidden] (BF16 values), experts and gates [tokens, top_k], held_out [tokens]."""

    x: np.ndarray
    experts: np.ndarray
    gates: np.ndarray
    held_out: np.ndarray

    def of(self, expert: int | None, held_out: bool) -> tuple[np.ndarray, np.ndarray]:
        """Rows and gate weights that an expert sees (None: a linear that sees all)."""
        if expert is None:
            rows, gates = np.arange(len(self.x)), np.ones(len(self.x), np.float32)
        else:
            rows, slots = np.nonzero(self.experts == expert)
            gates = self.gates[rows, slots]
        keep = self.held_out[rows] == held_out
        return rows[keep], gates[keep]


@dataclass
class Made:
    """STATS in `folder`, and the source's weights by the oracle: module -> float32 [N, K]."""

    folder: Path
    source: Path
    layers: dict[int, Layer]
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def input_of(self, module: str, held_out: bool) -> tuple[np.ndarray, np.ndarray]:
        """What a linear of an MLP sees, float32 [n, K], and g [n]."""
        parent, _, part = module.rpartition(".")
        layer = self.layers[int(module.split(".layers.")[1].split(".")[0])]
        expert = int(parent.rpartition(".")[2]) if ".mlp.experts." in module else None
        rows, g = layer.of(expert, held_out)
        x = layer.x[rows]
        if part == "down_proj":
            x = swiglu(x, bf16(self.weights[f"{parent}.gate_proj"]), bf16(self.weights[f"{parent}.up_proj"]))
        return x, g


def bf16(x: np.ndarray) -> np.ndarray:
    return reference.from_bf16(reference.to_bf16(np.ascontiguousarray(x, np.float32)))


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(x Wg^T) * (x Wu^T) in float32."""
    g = x @ gate.T
    with np.errstate(over="ignore", invalid="ignore"):  # a test gives inputs that overflow
        made: np.ndarray = g / (1 + np.exp(-g)) * (x @ up.T)
    return made


def source_weights(source: Path) -> dict[str, np.ndarray]:
    checkpoint = Checkpoint.open(source)
    found = {}
    with TensorReader(checkpoint) as reader:
        for module, w in find_encoded_weights(checkpoint.config, checkpoint.tensors).weights.items():
            scale = reader.read(w.scale).view("<f4").reshape(w.grid)
            codes = reader.read(w.weight).reshape(w.weight.shape)
            found[module] = reference.dequantize(codes, scale, w.block)
    return found


def correlated(rng: np.random.RandomState, n: int, width: int) -> np.ndarray:
    """float32 [n, width], BF16 values: a spectrum of 1/i behind channels of unequal size, like a layer's inputs."""
    mix = rng.standard_normal((width, width)) / np.sqrt(width)
    spectrum = np.sqrt(1 / (1 + np.arange(width)) / np.mean(1 / (1 + np.arange(width))))
    z = np.sqrt(0.6) * (rng.standard_normal((n, width)) * spectrum) @ mix + np.sqrt(0.4) * rng.standard_normal(
        (n, width)
    )
    return bf16((z * np.exp(0.8 * rng.standard_normal(width))).astype(np.float32))


def make_stats(
    source: Path,
    folder: Path,
    *,
    tokens: int = 800,
    sequence: int = SEQUENCE,
    keep: str = "all",
    seed: int = 0,
    unused: int = 1,
    only: tuple[int, ...] | None = None,
    change: Callable[[int, Layer], None] = lambda layer, data: None,
) -> Made:
    """unused: how many of the last experts no token reaches; only: these layers and no others; change: called with each
    layer's data before it is written. Every fourth sequence is held out."""
    checkpoint = Checkpoint.open(source)
    config, rng = checkpoint.config, np.random.RandomState(seed)
    experts, top_k = config["n_routed_experts"], config["num_experts_per_tok"]
    weights, layers, files = source_weights(source), {}, {}
    made = Made(folder, source, layers, weights)
    folder.mkdir(parents=True)
    for i in range(config["num_hidden_layers"]) if only is None else only:
        dense = i < config["first_k_dense_replace"]
        k = 0 if dense else top_k
        chosen = np.argsort(rng.random_sample((tokens, experts - unused)), axis=1)[:, :k].astype(np.int32)
        gates = rng.random_sample((tokens, k)) + 0.05
        gates = (2.5 * gates / gates.sum(axis=1, keepdims=True)).astype(np.float32) if k else gates.astype(np.float32)
        held_out = np.arange(tokens) // sequence % 4 == 3
        layers[i] = data = Layer(correlated(rng, tokens, config["hidden_size"]), chosen, gates, held_out)
        change(i, data)
        for written in (write_layer(folder, statistics(made, i, 0 if dense else experts)), *inputs(made, i, keep)):
            files[written.file] = written
    contents = {"contents": sample_contents(checkpoint), "config": config_sha256(checkpoint)}
    settings = {"keep": keep}
    write_manifest(
        folder,
        contents,
        {
            "sequences": tokens // sequence,
            "seq_len": sequence,
            "sha256": "0" * 64,
            "sources": [],
            "held_out": list(range(3, tokens // sequence, 4)),
        },
        settings,
        {},
        sorted(layers),
        files,
        [],
    )
    return made


def inputs(made: Made, i: int, keep: str) -> list[Any]:
    if keep == "none":
        return []
    data = made.layers[i]
    rows = slice(None) if keep == "all" else data.held_out
    x = data.x[rows]
    with InputsWriter(made.folder, i, len(x), x.shape[1], data.experts.shape[1]) as writer:
        writer.routing(data.experts[rows], data.gates[rows], data.held_out[rows])
        writer.append(reference.to_bf16(x))
        return [writer.finish()]


def statistics(made: Made, i: int, experts: int) -> LayerStatistics:
    data, prefix = made.layers[i], f"model.layers.{i}.mlp"

    def moments(module: str) -> np.ndarray:
        x, g = made.input_of(module, held_out=False)
        g2 = np.square(g.astype(np.float64))
        total = (np.square(x.astype(np.float64)) * g2[:, None]).sum(axis=0)
        mean = total / g2.sum() if g2.sum() else total
        return np.minimum(mean, np.finfo(np.float32).max).astype(np.float32)  # a test gives inputs that overflow

    alone = prefix if not experts else f"{prefix}.shared_experts"
    linears = {f"{alone}.{part}": moments(f"{alone}.{part}") for part in PARTS}
    attention = f"model.layers.{i}.self_attn.o_proj"
    linears[attention] = np.linspace(0.1, 2, made.weights[attention].shape[1], dtype=np.float32)
    if not experts:
        return LayerStatistics(i, None, linears)
    names = [f"{prefix}.experts.{e}" for e in range(experts)]
    g2 = [np.square(data.of(e, False)[1].astype(np.float64)) for e in range(experts)]
    found = ExpertStatistics(
        h_x=np.stack([moments(f"{name}.gate_proj") for name in names]),
        h_a=np.stack([moments(f"{name}.down_proj") for name in names]),
        sum_g2=np.array([v.sum() for v in g2]),
        sum_g4=np.array([np.square(v).sum() for v in g2]),
        n=np.array([len(v) for v in g2]),
        n_held_out=np.array([len(data.of(e, True)[0]) for e in range(experts)]),
    )
    return LayerStatistics(i, found, linears)


def by_the_book(w: np.ndarray, scale: np.ndarray, h: np.ndarray, share: float) -> np.ndarray:
    """int8 codes [N, d]: int4-algorithms section 8, column by column, every matrix formed as it is written there."""
    d, g = w.shape[1], w.shape[1] // scale.shape[1]
    h = h.copy()
    h[np.diag_indices(d)] = np.where(np.diag(h) == 0, 1, np.diag(h))
    h = share * h + (1 - share) * np.diag(np.diag(h))
    h += 0.01 * np.diag(h).mean() * np.eye(d)
    order = np.argsort(-np.diag(h), kind="stable")
    upper = np.linalg.cholesky(np.linalg.inv(h[np.ix_(order, order)])).T
    left, codes = w[:, order].astype(np.float64), np.empty(w.shape, np.int8)
    for j, c in enumerate(order):
        s = scale[:, c // g].astype(np.float64)
        q = np.clip(np.rint(left[:, j].astype(np.float32) / s.astype(np.float32)), -8, 7)
        codes[:, c] = q
        left[:, j + 1 :] -= np.outer((left[:, j] - q * s) / upper[j, j], upper[j, j + 1 :])
    return codes

"""Second moments of a linear's input, from the rows that STATS keeps. torch, on any device.

H = sum over fit tokens of g^2 x x^T, where g is the weight that the router gives the expert's output for the token (1
elsewhere): the loss of the layer's output is then tr((W - Q) H (W - Q)^T), exactly for down, and for gate and up to the
nonlinearity behind them. A Hessian is formed when it is needed and dropped after use: those of the 384 experts of one
Kimi-K2 layer have 79 GB, the rows that they are made of 3.8 GB.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kizami.formats.statistics import LayerInputs

CHUNK = 1024  # tokens at a time; products in FP32, added up in FP64

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Which rows of the kept inputs a linear sees, and with which weights. rows int64 [n], g float32 [n]."""

    inputs: LayerInputs
    rows: NDArray[np.int64]
    g: F32

    @property
    def n(self) -> int:
        return len(self.rows)

    @property
    def effective_n(self) -> float:
        """How many tokens of equal weight count as much: (sum g^2)^2 / sum g^4."""
        g2 = np.square(self.g.astype(np.float64))
        fourth = float(np.square(g2).sum())
        return float(g2.sum()) ** 2 / fourth if fourth else 0.0

    def where(self, held_out: bool) -> "Tokens":
        keep = self.inputs.held_out[self.rows] == held_out
        return Tokens(self.inputs, self.rows[keep], self.g[keep])


def tokens_of(inputs: LayerInputs, expert: int | None) -> Tokens:
    """Of a routed expert, or of a linear that sees every token."""
    if expert is not None:
        return Tokens(inputs, *inputs.of_expert(expert))
    count = inputs.shape[0]
    return Tokens(inputs, np.arange(count, dtype=np.int64), np.ones(count, np.float32))


@dataclass(frozen=True, slots=True, eq=False)
class SwiGlu:
    """gate and up of the expert whose down is looked at, float32 [intermediate, hidden], rounded to BF16 as the forward
    pass has them."""

    gate: torch.Tensor
    up: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """a = silu(x Wg^T) * (x Wu^T), float32 [n, intermediate] of x [n, hidden]. Nothing in between is rounded, as in
        a forward pass on a CPU; what a GPU's rounds to BF16 is far below the errors that a Hessian is for."""
        return torch.nn.functional.silu(x @ self.gate.T) * (x @ self.up.T)


def chunks(tokens: Tokens, device: str, activation: SwiGlu | None = None) -> Iterator[torch.Tensor]:
    """g x of runs of tokens, float32 [<= CHUNK, d], on the device; of a = activation(x) where one is given."""
    for first in range(0, tokens.n, CHUNK):
        part = slice(first, first + CHUNK)
        x = torch.from_numpy(tokens.inputs.rows(tokens.rows[part])).to(device)
        if activation is not None:
            x = activation(x)
        yield x * torch.from_numpy(tokens.g[part]).to(device)[:, None]


def hessian(rows: Iterator[torch.Tensor], width: int, device: str) -> torch.Tensor:
    """sum (g x)(g x)^T, float64 [width, width]."""
    total = torch.zeros(width, width, dtype=torch.float64, device=device)
    for x in rows:
        total += x.T @ x
    return total


def output_losses(rows: Iterator[torch.Tensor], errors: list[torch.Tensor]) -> list[float]:
    """sum over tokens of g^2 ||x E^T||^2 for each error E = W - Q, float32 [N, d]: FP32 products, FP64 sums."""
    losses = [0.0] * len(errors)
    for x in rows:
        for i, error in enumerate(errors):
            losses[i] += float((x @ error.T).double().square().sum())
    return losses


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Rounded to BF16, in float32."""
    return x.bfloat16().float()

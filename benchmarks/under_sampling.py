"""What GPTQ does to experts that saw few tokens, by tokens per input channel; plain, and as kizami does it.

    python benchmarks/under_sampling.py smollm2-moe-fp8 under --calibration texts/calibration.txt \
        --heldout texts/heldout.txt --layers 5 15 25

The router of the FP8 model sends calibration text to the experts. Of the tokens that an expert got, a random part is
kept, n of them for d input channels; the expert is quantised from these, and judged on its tokens of the held-out text:
SQNR of its output, sum g^2 ||x W^T||^2 over sum g^2 ||x (W - Q)^T||^2, in dB, with g the gate weight. Methods:

    search, weighted    kizami's, rounded to nearest; no Hessian
    nearest, mse        scales of least squared error among positive ones, rounded to nearest: where plain GPTQ starts
    GPTQ, mse           plain GPTQ from there: the whole Hessian, damping 0.01 of the mean diagonal, act-order, static
                        groups; written here from the formulas (arXiv 2210.17323), as llm-compressor has them
    GPTQ, weighted      plain GPTQ on the scales of `weighted`
    gptq                kizami's: scales of `weighted`, Hessian shrunk by n/(n+d) toward its diagonal, and taken only
                        where it is better on other calibration tokens, n/9 of them and at least 32. (Experts of 7168
                        channels have more than that held out wherever n/d is above 0.05.)
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import in_memory
import numpy as np
import torch
import transformers

from kizami.quantize import reference
from kizami.quantize.calibrated import column_weights, gptq
from kizami.quantize.linear import quantize_linear
from kizami.quantize.settings import Method

METHODS = ("search", "weighted", "nearest, mse", "GPTQ, mse", "GPTQ, weighted", "gptq")
FEWEST_HELD_OUT = 32
RATIOS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)  # tokens per input channel
STATS = "0" * 64  # a Method of statistics names them; these come from no file


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """x float32 [tokens, hidden], experts int64 and gates float32 [tokens, top_k], sequence int64 [tokens]."""

    x: torch.Tensor
    experts: torch.Tensor
    gates: torch.Tensor
    sequence: torch.Tensor

    def of(self, expert: int, sequences: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, g) of the expert's tokens in these sequences."""
        token, slot = torch.nonzero(self.experts == expert, as_tuple=True)
        keep = torch.isin(self.sequence[token], sequences)
        return self.x[token[keep]], self.gates[token[keep], slot[keep]]


@torch.inference_mode()
def route(model: torch.nn.Module, tokens: torch.Tensor, layers: list[int]) -> dict[int, Routed]:
    """What the routed experts of these layers are given."""
    seen: dict[int, list[tuple[torch.Tensor, ...]]] = {layer: [] for layer in layers}
    hooks = [
        model.model.layers[layer].mlp.experts.register_forward_pre_hook(
            lambda _, args, to=seen[layer]: to.append(tuple(a.clone() for a in args))
        )
        for layer in layers
    ]
    for part in tokens.split(in_memory.BATCH):
        model.model(input_ids=part, use_cache=False)
    for hook in hooks:
        hook.remove()
    sequence = torch.arange(tokens.shape[0]).repeat_interleave(tokens.shape[1])
    return {
        layer: Routed(*(torch.cat(column) for column in zip(*parts, strict=True)), sequence)
        for layer, parts in seen.items()
    }


def mse_scales(w: np.ndarray, group_size: int, steps: int = 80) -> np.ndarray:
    """float32 [N, K/g]: positive BF16 scales of least squared error on a grid of shrunk absmax/7.5."""
    groups = w.reshape(w.shape[0], -1, group_size)
    peak = np.abs(groups).max(2)
    best, error = np.zeros_like(peak), np.full(peak.shape, np.inf)
    for shrink in np.linspace(0.5, 1.05, steps):
        s = reference.from_bf16(reference.to_bf16((peak * np.float32(shrink / 7.5)).astype(np.float32)))
        s = np.where(s == 0, reference.ZERO_GROUP_SCALE, s)
        q = np.clip(np.rint(groups / s[..., None]), -8, 7)
        e = np.square(groups - q * s[..., None]).sum(2)
        best, error = np.where(e < error, s, best), np.minimum(e, error)
    return best.astype(np.float32)


def plain_factor(h: torch.Tensor) -> gptq.Factor | None:
    """Of the whole Hessian float64 [d, d], damped, nothing shrunk; dead columns are decoupled."""
    h = h.clone()
    diagonal = h.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal += 0.01 * diagonal.mean()
    order = torch.argsort(diagonal, descending=True, stable=True)
    lower, failed = torch.linalg.cholesky_ex(h[order][:, order])
    if int(failed):
        return None
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return None if int(failed) else gptq.Factor(upper.float(), order)


def plain_gptq(w: torch.Tensor, scale: torch.Tensor, factor: gptq.Factor) -> torch.Tensor:
    """Restored weights of w [N, d] under scales [N, d/g]: a column at a time, its error made good in the later ones."""
    group = scale.repeat_interleave(w.shape[1] // scale.shape[1], 1)
    left, step, upper = w[:, factor.order], group[:, factor.order], factor.upper
    done = torch.empty_like(left)
    for j in range(w.shape[1]):
        done[:, j] = torch.clamp(torch.round(left[:, j] / step[:, j]), -8, 7) * step[:, j]
        error = (left[:, j] - done[:, j]) / upper[j, j]
        left[:, j + 1 :] -= error[:, None] * upper[j, j + 1 :]
    out = torch.empty_like(done)
    out[:, factor.order] = done
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A weight of one expert as it is stored, as float32, and its `mse_scales`."""

    codes: np.ndarray
    grid: np.ndarray
    w: torch.Tensor
    mse: torch.Tensor

    @staticmethod
    def read(folder: in_memory.Folder, name: str, group_size: int) -> "Linear":
        codes, w = folder.raw(name).view(torch.uint8).numpy(), folder.weight(name)
        mse = torch.from_numpy(mse_scales(w.numpy(), group_size))
        return Linear(codes, folder.raw(f"{name}_scale_inv").numpy(), w, mse)

    @property
    def group_size(self) -> int:
        return self.w.shape[1] // self.mse.shape[1]

    def nearest(self, method: Method, h: np.ndarray | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(restored, scales) of a method of kizami."""
        weights = None if h is None else column_weights.integer_weights(h, self.group_size)
        packed = quantize_linear(self.codes, self.grid, (128, 128), self.group_size, method, weights=weights, h=h)
        scale = reference.from_bf16(packed.scale)
        restored = reference.unpack(packed.packed) * np.repeat(scale, self.group_size, 1)
        return torch.from_numpy(restored.astype(np.float32)), torch.from_numpy(scale)


def loss(x: torch.Tensor, g: torch.Tensor, error: torch.Tensor) -> float:
    return float(((x @ error.T) * g[:, None]).double().square().sum())


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What a linear was given: inputs and gate weights to fit, to decide on, and to be judged on."""

    fit: tuple[torch.Tensor, torch.Tensor]
    decide: tuple[torch.Tensor, torch.Tensor]
    judge: tuple[torch.Tensor, torch.Tensor]
    pooled: np.ndarray | None  # mean squares over all experts, for gate and up


def restored(linear: Linear, sample: Sample) -> Iterator[tuple[str, torch.Tensor]]:
    """Every method's weights. Hessian methods without a token, or without a Cholesky factor, are their start."""
    x, g = sample.fit
    g2 = g.double().square()
    n = float(g2.sum() ** 2 / g2.square().sum()) if len(g) else 0.0
    mean = ((g2 @ x.double().square()) / g2.sum()).numpy() if len(g) else np.zeros(x.shape[1])
    yield "search", linear.nearest(Method())[0]
    if sample.pooled is None:
        h = column_weights.shrunk_neurons(mean, n)
    else:
        h = column_weights.shrunk_input(mean, n, sample.pooled)
    weighted, scale = linear.nearest(Method("weighted", stats=STATS), h)
    yield "weighted", weighted
    step = linear.mse.repeat_interleave(linear.group_size, 1)
    nearest = torch.clamp(torch.round(linear.w / step), -8, 7) * step
    yield "nearest, mse", nearest
    rows = (x * g[:, None]).double()
    hessian = rows.T @ rows
    plain = plain_factor(hessian) if len(g) else None
    yield "GPTQ, mse", nearest if plain is None else plain_gptq(linear.w, linear.mse, plain)
    yield "GPTQ, weighted", weighted if plain is None else plain_gptq(linear.w, scale, plain)
    yield "gptq", _accepted(linear, sample, scale, hessian, n, weighted)


def _accepted(
    linear: Linear, sample: Sample, scale: torch.Tensor, hessian: torch.Tensor, n: float, weighted: torch.Tensor
) -> torch.Tensor:
    if n == 0 or len(sample.decide[1]) < FEWEST_HELD_OUT:
        return weighted
    factor = gptq.factorize(gptq.shrink(hessian.clone(), n / (n + linear.w.shape[1])))
    if factor is None:
        return weighted
    codes = gptq.solve(linear.w, scale, factor).float()
    solved = codes * scale.repeat_interleave(linear.group_size, 1)
    return solved if loss(*sample.decide, linear.w - solved) < loss(*sample.decide, linear.w - weighted) else weighted


def judge(linear: Linear, sample: Sample) -> dict[str, float]:
    """dB of every method on the tokens to be judged on."""
    signal = loss(*sample.judge, linear.w)
    return {name: 10 * np.log10(signal / loss(*sample.judge, linear.w - q)) for name, q in restored(linear, sample)}


@torch.inference_mode()
def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    folder, model = in_memory.Folder(args.source), in_memory.load(args.source)
    model.model.layers = model.model.layers[: max(args.layers) + 1]  # the others come after what is looked at
    given = route(model, in_memory.windows(args.source, args.calibration, args.sequences, args.length), args.layers)
    judged = route(model, in_memory.windows(args.source, args.heldout, args.judged, args.length), args.layers)
    del model
    rows = []
    for layer in args.layers:
        g2 = given[layer].gates.double().square().sum(1)
        pooled = ((g2 @ given[layer].x.double().square()) / g2.sum()).numpy()
        for expert in args.experts or range(int(given[layer].experts.max()) + 1):
            rows += list(_expert(args, folder, given[layer], judged[layer], pooled, f"{layer}.mlp.experts.{expert}."))
        print(f"layer {layer}", file=sys.stderr)
    return rows


def _expert(
    args: argparse.Namespace,
    folder: in_memory.Folder,
    given: Routed,
    judged: Routed,
    pooled: np.ndarray,
    name: str,
) -> Iterator[dict[str, Any]]:
    """A row per linear and ratio. A tenth of the calibration sequences decides."""
    expert = int(name.split(".")[-2])
    held_out = max(1, args.sequences // 10)
    fit, decide = given.of(expert, torch.arange(held_out, args.sequences)), given.of(expert, torch.arange(held_out))
    judge_on = judged.of(expert, torch.arange(args.judged))
    if min(len(decide[1]), len(judge_on[1])) < FEWEST_HELD_OUT:
        return
    order = torch.randperm(len(fit[1]), generator=torch.Generator().manual_seed(0))
    names = [f"model.layers.{name}{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")]
    gate, up, down = (Linear.read(folder, name, args.group_size) for name in names)
    for part, linear in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        for ratio in RATIOS:
            n = round(ratio * linear.w.shape[1])
            if n > len(order):
                break
            chosen = (fit[0][order[:n]], fit[1][order[:n]])
            few = max(FEWEST_HELD_OUT, n // 9)
            parts = [chosen, (decide[0][:few], decide[1][:few]), judge_on]
            if part == "down_proj":
                parts = [(torch.nn.functional.silu(x @ gate.w.T) * (x @ up.w.T), g) for x, g in parts]
            sample = Sample(*parts, None if part == "down_proj" else pooled)
            yield {"linear": f"{name}{part}", "ratio": ratio, "db": judge(linear, sample)}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, by tokens per input channel: mean dB over linears, and paired differences with 95 % intervals."""
    lines = []
    for title, parts in (("gate_proj, up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        lines += [
            f"| {title}: n/d | linears | " + " | ".join(METHODS) + " | GPTQ, mse minus its start "
            "| GPTQ, weighted minus its start | gptq minus weighted |",
            "|---" * (len(METHODS) + 5) + "|",
        ]
        for ratio in RATIOS:
            found = [row["db"] for row in rows if row["ratio"] == ratio and row["linear"].endswith(parts)]
            if found:
                cells = [f"{ratio:.3g}", str(len(found)), *(f"{np.mean([db[m] for db in found]):.2f}" for m in METHODS)]
                pairs = ("GPTQ, mse", "nearest, mse"), ("GPTQ, weighted", "weighted"), ("gptq", "weighted")
                lines.append("| " + " | ".join(cells + [_gain(found, *pair) for pair in pairs]) + " |")
        lines.append("")
    return "\n".join(lines)


def _gain(found: list[dict[str, float]], name: str, other: str) -> str:
    gains = np.array([db[name] - db[other] for db in found])
    mean = in_memory.interval(gains)
    return f"{mean.mean:+.2f} [{mean.low:+.2f}, {mean.high:+.2f}]; worse in {np.mean(gains < 0):.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("results", type=Path, help="where .json and .md go, without the ending")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--layers", type=int, nargs="+", required=True, help="layers with experts")
    parser.add_argument("--experts", type=int, nargs="+", help="some of the experts (default all)")
    parser.add_argument("--sequences", type=int, default=128, help="of the calibration text")
    parser.add_argument("--judged", type=int, default=64, help="sequences of the held-out text")
    parser.add_argument("--length", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--group-size", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = measure(args)
    args.results.with_suffix(".json").write_text(json.dumps(rows))
    args.results.with_suffix(".md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()

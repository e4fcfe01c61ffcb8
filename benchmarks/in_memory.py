"""A checkpoint as a dense float32 model in memory, and what its predictions are worth beside the reference's.

FP8, BF16 and pack-quantized INT4 tensors are decoded by kizami's reference code, the oracle of its tests, and put into
transformers' own model class; the values of INT4 weights are rounded to BF16, as transformers and the engines do.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kizami.quantize import reference

RESAMPLES = 10_000
BATCH = 4


class Folder:
    """The tensors of a checkpoint, decoded when they are asked for."""

    def __init__(self, path: Path) -> None:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        self.files: dict[str, str] = index["weight_map"]
        self.path, self.opened = path, {}
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.block = self.config.pop("quantization_config", {}).get("weight_block_size")

    def raw(self, name: str) -> torch.Tensor:
        file = self.files[name]
        if file not in self.opened:
            self.opened[file] = safe_open(self.path / file, framework="pt")
        return self.opened[file].get_tensor(name)

    def weight(self, name: str) -> torch.Tensor:
        """float32, whatever the form it is stored in."""
        if name not in self.files:
            stem = name.removesuffix(".weight")
            codes = reference.unpack(self.raw(f"{stem}.weight_packed").numpy())
            scale = (
                self.raw(f"{stem}.weight_scale")
                .float()
                .repeat_interleave(codes.shape[1] // self.raw(f"{stem}.weight_scale").shape[1], 1)
            )
            return (torch.from_numpy(codes).float() * scale).to(torch.bfloat16).float()
        tensor = self.raw(name)
        if tensor.dtype == torch.float8_e4m3fn:
            if self.block is None:
                raise SystemExit(f"{self.path}: {name} is FP8 without weight_block_size; this script reads no other")
            scale = self.raw(f"{name}_scale_inv").numpy()
            codes = tensor.view(torch.uint8).numpy()
            return torch.from_numpy(reference.dequantize(codes, scale, (self.block[0], self.block[1])))
        return tensor.float()


def empty_model(config: dict[str, Any]) -> torch.nn.Module:
    known = AutoConfig.for_model(**config)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(known, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def fill(model: torch.nn.Module, folder: Folder) -> None:
    """Every parameter and persistent buffer of the model from the folder. Experts lie one by one on disk."""
    for name, parameter in model.state_dict().items():
        layer, is_fused, part = name.partition(".experts.")
        if not is_fused:
            parameter.copy_(folder.weight(name))
            continue
        for e, expert in enumerate(parameter):
            expert.copy_(fused(folder, f"{layer}.experts.{e}", part))


def fused(folder: Folder, expert: str, part: str) -> torch.Tensor:
    names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    return torch.cat([folder.weight(f"{expert}.{name}.weight") for name in names])


def load(path: Path) -> torch.nn.Module:
    folder = Folder(path)
    model = empty_model(folder.config)
    fill(model, folder)
    return model


def windows(tokenizer: Path, text: Path, count: int, length: int) -> torch.Tensor:
    """Token ids [count, length]: the beginning of the text, cut."""
    ids = AutoTokenizer.from_pretrained(tokenizer)(text.read_text("utf-8"), verbose=False)["input_ids"]
    if len(ids) < count * length:
        raise SystemExit(f"{text} has {len(ids)} tokens, {count} x {length} are asked for")
    return torch.tensor(ids[: count * length]).view(count, length)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Per window: mean negative log-likelihood, mean KL(reference || model) in nats, share of equal top tokens."""

    nll: np.ndarray
    kl: np.ndarray
    agree: np.ndarray


class Reference:
    """The FP8 model's log-probabilities for the windows, computed once and kept in a file."""

    def __init__(self, model: torch.nn.Module, tokens: torch.Tensor, scratch: Path) -> None:
        self.tokens = tokens
        vocabulary = model.config.vocab_size
        shape = (tokens.shape[0], tokens.shape[1] - 1, vocabulary)
        self.log_p = np.memmap(scratch / "log_p.f32", np.float32, "w+", shape=shape)
        for first in range(0, len(tokens), BATCH):
            part = tokens[first : first + BATCH]
            self.log_p[first : first + len(part)] = log_probabilities(model, part).numpy()
        self.scores = self.compare(None)

    @torch.inference_mode()
    def compare(self, model: torch.nn.Module | None) -> Scores:
        """Scores of the model; None is the reference itself."""
        found: list[tuple[float, float, float]] = []
        for first in range(0, len(self.tokens), BATCH):
            part = self.tokens[first : first + BATCH]
            p = torch.from_numpy(self.log_p[first : first + len(part)])
            q = p if model is None else log_probabilities(model, part)
            nll = -q.gather(-1, part[:, 1:, None])[..., 0].double().mean(1)
            kl = torch.stack([(a.exp() * (a - b)).sum(-1).double().mean() for a, b in zip(p, q, strict=True)])
            agree = (p.argmax(-1) == q.argmax(-1)).double().mean(1)
            found += zip(nll.tolist(), kl.tolist(), agree.tolist(), strict=True)
        return Scores(*(np.array(column) for column in zip(*found, strict=True)))


@torch.inference_mode()
def log_probabilities(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return logits.float().log_softmax(-1)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over windows and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    @property
    def outside_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def interval(values: np.ndarray) -> Interval:
    """Percentile bootstrap over windows: neighbouring tokens depend on each other, windows hardly do."""
    n = len(values)
    counts = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    low, high = np.quantile(counts @ values / n, (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high))


def perplexity(scores: Scores) -> Interval:
    nll = interval(scores.nll)
    return Interval(math.exp(nll.mean), math.exp(nll.low), math.exp(nll.high))

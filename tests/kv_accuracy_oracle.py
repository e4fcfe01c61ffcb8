"""FP8 KV by a whole model in memory: transformers' forward pass in float32, with the same tensors rounded by hooks.

Independent of the code under test: the latent is rounded behind `kv_a_layernorm`, k_pe and K behind RoPE's function, V
behind `v_proj`; roundings are NumPy's, from a table of E4M3. Needs torch and transformers.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibration_oracle import dense_model

Round = Callable[[np.ndarray], np.ndarray]
# The positive numbers of E4M3, ascending: codes 0 to 126, the last is 448
TABLE = np.array([
    (code % 8) / 8 * 2.0**-6 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(127)
])  # fmt: skip


def bf16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def e4m3(x: np.ndarray) -> np.ndarray:
    """To nearest, ties to the even code, saturating."""
    size = np.abs(x.astype(np.float64)).clip(max=448)
    above = np.searchsorted(TABLE, size).clip(1, 126)
    low, high = TABLE[above - 1], TABLE[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return (np.where(up, high, low) * np.sign(x)).astype(np.float32)


def scaled(scales: tuple[float, ...]) -> Round:
    """x: [..., heads, d], or anything for one scale."""
    scale = np.array(scales, np.float32)
    scale = scale[0] if len(scale) == 1 else scale[:, None]
    return lambda x: e4m3(bf16(x) / scale) * scale


def tiles(x: np.ndarray) -> np.ndarray:
    rows = bf16(x).reshape(*x.shape[:-1], -1, 128)
    scale = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(448)
    return (e4m3(rows * (np.float32(1) / scale)) * scale).reshape(x.shape)


def logits(folder: Path, ids: np.ndarray, first: Round, second: Round, patch: pytest.MonkeyPatch) -> torch.Tensor:
    """float64 [sequences, seq_len, vocab]. first, second: of latent and k_pe, or of K and V with heads second to
    last."""
    model: Any = dense_model(folder)
    module = sys.modules[type(model).__module__]
    is_mla = hasattr(model.config, "kv_lora_rank")

    def rounded(x: torch.Tensor, by: Round) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(by(x.numpy())))

    for name in ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"):
        original = getattr(module, name, None)
        if original is not None:

            def rotate(q: Any, k: Any, *rest: Any, original: Any = original, **more: Any) -> Any:
                q, k = original(q, k, *rest, **more)
                by = second if is_mla else first
                return q, rounded(k.transpose(1, 2), by).transpose(1, 2)

            patch.setattr(module, name, rotate)
    for layer in model.model.layers:
        attention = layer.self_attn
        if is_mla:
            attention.kv_a_layernorm.register_forward_hook(lambda _m, _a, out: rounded(out, first))
        else:
            heads = (-1, model.config.num_key_value_heads, attention.head_dim)
            attention.v_proj.register_forward_hook(
                lambda _m, _a, out, heads=heads: rounded(out.unflatten(-1, heads[1:]), second).flatten(-2)
            )
    with torch.inference_mode():
        found = [model(input_ids=torch.from_numpy(row)[None].long()).logits[0].double() for row in ids]
    patch.undo()
    return torch.stack(found)


def kl(reference: torch.Tensor, other: torch.Tensor) -> np.ndarray:
    p, q = reference.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).numpy()


def nll(found: torch.Tensor, ids: np.ndarray) -> np.ndarray:
    """[sequences, seq_len - 1]."""
    targets = torch.from_numpy(ids[:, 1:]).long()
    return -found.log_softmax(-1)[:, :-1].gather(-1, targets[..., None])[..., 0].numpy()

"""Attention over one sequence in blocks of queries, by transformers' own modules.

The modules hand queries, keys and values to the function registered here. It keeps the keys and values of the sequence
so far, so a block costs what its own tokens cost, and no matrix of all queries by all keys exists.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IMPLEMENTATION = "kizami_streamed"

Observe = Callable[[str, torch.Tensor], None]  # name, rows [..., channels]
# What a KV cache makes of the rows of a block: MLA's latent [1, 1, s, c] and post-RoPE k_pe [1, 1, s, r], or GQA's
# post-RoPE K and V [1, Hkv, s, d]
Rounding = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Prefix:
    """Keys and values of a sequence up to the block at work. As the `cache` of an indexer it keeps the indexer's keys.

    selects: whether the indexer's choice of keys counts. rounding: of the rows that a server would cache; every query
    then reads rounded rows, its own among them.
    """

    def __init__(self, length: int, selects: bool, observe: Observe, rounding: Rounding | None = None) -> None:
        self.length, self.selects, self._observe, self._rounding = length, selects, observe, rounding
        self.position = 0
        self.chosen: Any = None  # keys that the last block's indexer picked, [1, s, k]
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._index_keys: torch.Tensor | None = None

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        chosen: Any,
    ) -> torch.Tensor:
        """query [1, H, s, d], key [1, Hkv, s, d], value [1, Hkv, s, dv] of the block -> [1, s, H, dv]."""
        self._look(module, key, value)
        self.chosen = chosen
        begin, end = self.position, self.position + query.shape[2]
        # torch's fused kernel for CPUs takes heads of one size only
        width = max(key.shape[-1], value.shape[-1])
        if self._keys is None or self._values is None:
            self._keys = key.new_zeros((1, key.shape[1], self.length, width))
            self._values = value.new_zeros((1, value.shape[1], self.length, width))
        self._keys[:, :, begin:end, : key.shape[-1]] = _finite(key)
        self._values[:, :, begin:end, : value.shape[-1]] = _finite(value)
        out = F.scaled_dot_product_attention(
            F.pad(query, (0, width - query.shape[-1])) if query.shape[-1] < width else query,
            self._keys[:, :, :end],
            self._values[:, :, :end],
            attn_mask=self._mask(begin, end, chosen, query.device),
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return out[..., : value.shape[-1]].transpose(1, 2)

    def _mask(self, begin: int, end: int, chosen: Any, device: torch.device) -> torch.Tensor:
        """bool [s, end]; of the chosen keys int [1, s, k] those that are not of the future."""
        keys = torch.arange(end, device=device)
        mask = keys[None] <= keys[begin:, None]
        if self.selects:
            picked = torch.zeros((end - begin, self.length), dtype=torch.bool, device=device)
            mask &= picked.scatter_(1, chosen[0].long(), True)[:, :end]
        return mask

    def _look(self, module: nn.Module, key: torch.Tensor, value: torch.Tensor) -> None:
        rope = getattr(module, "qk_rope_head_dim", None)
        if rope is not None:  # MLA: all heads share it; the latent is seen behind its norm
            self._observe("k_pe", key[0, 0, :, -rope:])
        else:
            self._observe("k", key[0].transpose(0, 1).flatten(1))
            self._observe("v", value[0].transpose(0, 1).flatten(1))

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' cache: the rows of the block go on, rounded if asked; `attend` keeps what they become."""
        return (key, value) if self._rounding is None else self._rounding(key, value)

    def update_indexer(self, key: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """[1, length, d]: rows of the future are zeros, which the causal mask hides. All are there from the first
        block on, so that ties are decided as they are without blocks."""
        if self._index_keys is None:
            self._index_keys = key.new_zeros((1, self.length, key.shape[-1]))
        self._index_keys[:, self.position : self.position + key.shape[1]] = _finite(key)
        return self._index_keys

    def causal(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """The additive mask [1, 1, count, length] that an indexer asks for."""
        keys = torch.arange(self.length, device=like.device)
        future = keys[None] > keys[self.position : self.position + count, None]
        return torch.zeros((1, 1, count, self.length), device=like.device).masked_fill_(future, float("-inf"))


def _finite(rows: torch.Tensor) -> torch.Tensor:
    """A token that is not finite must not reach the others: what the mask hides is multiplied with 0, and 0 * NaN is
    NaN."""
    return rows if rows.isfinite().all() else rows.nan_to_num(0, 0, 0)


def _streamed(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    streamed: Prefix,
    indices: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    return streamed.attend(module, query, key, value, scaling, indices), None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _streamed)


class EveryKey(nn.Module):
    """Stands for an indexer where a sequence has no more keys than it would select: nothing is computed."""

    def forward(self, *_: Any, **__: Any) -> None:
        return None


def attend(
    layer: Any,
    x: torch.Tensor,
    rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    block: int,
    observe: Observe,
    index_topk: int | None,
    chosen: torch.Tensor | None,
    rounding: Rounding | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x + attention(norm(x)) of one sequence x [S, hidden], and the keys that an indexer chose, int32 [S, k].

    chosen: those of the last layer that has an indexer, for layers that share them. They and the result are None where
    the sequence has at most index_topk tokens: then every key is chosen.
    """
    selects = index_topk is not None and len(x) > index_topk
    prefix = Prefix(len(x), selects, observe, rounding)
    out, picked = torch.empty_like(x), []
    for begin in range(0, len(x), block):
        part = x[begin : begin + block]
        normed = layer.input_layernorm(part[None])
        positions = torch.arange(begin, begin + len(part), device=x.device)[None]
        more: dict[str, Any] = {}
        if index_topk is not None:
            more = {"attention_mask": prefix.causal(len(part), normed) if selects else normed.new_empty((1, 1, 0, 0))}
            if hasattr(layer.self_attn, "skip_topk"):
                unused = torch.empty(0) if layer.self_attn.skip_topk else None
                more["prev_topk_indices"] = chosen[None, begin : begin + block] if chosen is not None else unused
        result = layer.self_attn(
            hidden_states=normed,
            position_embeddings=rotary(normed, positions),
            **{"attention_mask": None} | more,
            position_ids=positions,
            cache=prefix if selects or rounding is not None else None,
            streamed=prefix,
        )
        out[begin : begin + block] = part + result[0][0]
        prefix.position += len(part)
        if selects:
            picked.append(prefix.chosen[0])
    return out, torch.cat(picked).to(torch.int32) if picked else None


@contextmanager
def observed(layer: Any, inputs: Observe, ranges: Observe) -> Iterator[None]:
    """While it lasts, `inputs` sees what comes to each linear of the layer's attention, by the module's name in the
    layer, and `ranges` the latents of MLA."""
    handles = []
    for name, module in cast(nn.Module, layer.self_attn).named_modules(prefix="self_attn"):
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_pre_hook(lambda _, args, name=name: inputs(name, args[0])))
    latent = getattr(layer.self_attn, "kv_a_layernorm", None)
    if latent is not None:
        handles.append(latent.register_forward_hook(lambda _module, _args, out: ranges("latent", out[0])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

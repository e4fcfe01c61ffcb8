"""The KV caches that are compared, and what each makes of the rows of a layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kizami.calibration.forward.model import Model
from kizami.calibration.kv_accuracy.rounding import TILE, count_clipped, round_bf16, round_e4m3, round_tiles
from kizami.formats.errors import KizamiError
from kizami.formats.kv_scales.neutral import KvScales
from kizami.formats.serving.kv_layout import Layout

Rows = tuple[torch.Tensor, torch.Tensor]
Seen = Callable[[str, torch.Tensor, torch.Tensor, int], None]  # name, BF16 rows, what became of them, clipped


@dataclass(frozen=True, slots=True)
class Variant:
    """scales: of `fp8`; None: 1.0 everywhere. skip: layers that stay in BF16."""

    name: str
    layout: Layout
    scales: KvScales | None = None
    skip: frozenset[int] = frozenset()

    def without(self, layers: frozenset[int]) -> "Variant":
        return Variant(f"{self.name}, some layers in BF16", self.layout, self.scales, layers)


REFERENCE = Variant("bf16", Layout.BF16)


def parts_of(model: Model) -> tuple[str, str]:
    """What a row of the cache has, as STATS and reports name it."""
    return ("latent", "k_pe") if hasattr(model.config, "kv_lora_rank") else ("k", "v")


class Rounder:
    """A variant in one layer. Rows are rounded to BF16 first: a server's model computes in BF16, and a prefill on BF16
    KV hands over such rows. `seen` is told of every row, if given."""

    def __init__(self, variant: Variant, layer: int, parts: tuple[str, str], seen: Seen | None = None) -> None:
        self._layout = Layout.BF16 if layer in variant.skip else variant.layout
        self._parts, self._seen = parts, seen
        scales = variant.scales.layers[layer] if variant.scales is not None else None
        self._scales = (
            ((1.0,), (1.0,)) if scales is None else (scales.k, scales.k if parts[0] == "latent" else scales.v)
        )

    def __call__(self, first: torch.Tensor, second: torch.Tensor) -> Rows:
        return self._round(0, first), self._round(1, second)

    def _round(self, which: int, x: torch.Tensor) -> torch.Tensor:
        rows, clipped = round_bf16(x.float()), 0
        if self._layout is Layout.RAW:
            scale = torch.tensor(self._scales[which], dtype=torch.float32, device=x.device).reshape(1, -1, 1, 1)
            rounded = round_e4m3(rows, scale)
            clipped = count_clipped(rows, scale) if self._seen is not None else 0
        elif self._layout is Layout.DS_MLA and which == 0:
            rounded = round_tiles(rows)
        else:
            rounded = rows
        if self._seen is not None:
            self._seen(self._parts[which], rows, rounded, clipped)
        return rounded.to(x.dtype)


def check_variant(variant: Variant, model: Model) -> None:
    """KizamiError "bad_option" for a layout that the model's cache cannot have, "bad_kv_scales" for scales of another
    model."""
    config: Any = model.config
    latent = getattr(config, "kv_lora_rank", None)
    if variant.layout is Layout.DS_MLA and (latent is None or latent % TILE):
        has = "K and V by head" if latent is None else f"a latent of {latent}"
        raise KizamiError(
            f"{variant.layout} holds a latent in tiles of {TILE}, and this model has {has}",
            code="bad_option",
            hint=f"--layout {Layout.RAW}",
        )
    if any(layer >= model.layers for layer in variant.skip):
        raise KizamiError(
            f"layer {max(variant.skip)} cannot be skipped: the model has layers 0 to {model.layers - 1}",
            code="bad_option",
        )
    if variant.scales is not None:
        _check_scales(variant.scales, model)


def _check_scales(scales: KvScales, model: Model) -> None:
    config: Any = model.config
    is_gqa = not hasattr(config, "kv_lora_rank")
    pairs = {
        "attention": (
            "K and V by head" if scales.attention == "gqa" else "a latent",
            "K and V by head" if is_gqa else "a latent",
        ),
        "layers": (len(scales.layers), model.layers),
        "kv_heads": (scales.kv_heads, config.num_key_value_heads if is_gqa else 0),
        "model_type": (scales.model_type, model.family.text_config.get("model_type", model.family.name)),
    }
    for what, (found, expected) in pairs.items():
        if found != expected:
            raise KizamiError(
                f"the scales are of another model: {what} is {found}, expected {expected}",
                code="bad_kv_scales",
                hint="kizami kv-scales SRC makes those of this one",
            )

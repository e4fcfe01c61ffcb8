"""What a row of the KV cache is worth after its round trip: BF16, E4M3 at a scale, E4M3 with a scale per tile.

Arithmetic only, float32 in and out. Rows come as BF16 numbers, which is what servers hand to their caches.
"""

import torch

LARGEST = 448.0  # of E4M3 (OCP, no infinity)
TILE = 128  # latents that share a scale in 656-byte rows


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """To the nearest BF16, in x's dtype."""
    return x.to(torch.bfloat16).to(x.dtype)


def round_e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """code * scale, where code is E4M3's nearest to x / scale. scale: positive, float32, broadcast against x.

    Beyond 448 it saturates, infinities included, whatever torch's conversion does; NaN stays NaN.
    """
    return _codes(x / scale) * scale


def round_tiles(x: torch.Tensor) -> torch.Tensor:
    """As the 656-byte rows hold a latent: each 128 channels [..., k * 128] with scale amax / 448 in float32, codes of
    x * (1 / scale) (SGLang 0.5.23 kernels/ops/quantization/dsa_quant_k_cache.py).

    A tile of zeros has scale 0 there, and 0 * inf = NaN; here scales are at least 2^-126, as in vLLM, and zeros stay
    zeros. Numbers that are not finite take no part in amax.
    """
    tiles = x.reshape(*x.shape[:-1], -1, TILE)
    amax = torch.where(tiles.isfinite(), tiles.abs(), 0.0).amax(dim=-1, keepdim=True)
    # by a tensor: CUDA multiplies by the inverse of a number, which is another in its last bit
    scale = (amax / torch.full_like(amax, LARGEST)).clamp_min(2.0**-126)
    return (_codes(tiles * scale.reciprocal()) * scale).flatten(-2)


def count_clipped(x: torch.Tensor, scale: torch.Tensor) -> int:
    """Numbers that E4M3 at this scale cannot hold: beyond 464, which would still round to 448."""
    return int(((x / scale).abs() > 464.0).sum())


def _codes(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(torch.float32)

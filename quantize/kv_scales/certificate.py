"""Bounds on what can enter a KV cache, from weights alone: for any input whatever.

An RMSNorm's output y_i = gamma_i x_i / sqrt(mean(x^2) + eps) has sum (y_i / gamma_i)^2 <= d, whatever x and eps >= 0
are. Everything else is Cauchy-Schwarz on the linear that follows. Bounds of a norm's own output are reached; those
through a linear are loose, 5 to 30 times: they prove that scale 1.0 cannot clip or prove nothing, and never set a
scale. Pure functions, float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kizami.quantize.kv_scales.rule import E4M3_MAX, PLATEAU

F64 = NDArray[np.float64]
Pairing = Literal["interleaved", "half", "either"]

# Each BF16 rounding adds up to 2^-8. The norm rounds twice (x / rms, times gamma), a linear three times (its weight,
# its input's cast, its output), RoPE three times (cos, product, sum).
NORM_ROUNDING = 1.01
ROPE_ROUNDING = 1.02
LINEAR_ROUNDING = 1.02
# An FP8 linear rounds its input to e4m3, whatever SRC has: --quantization fp8, W4A8. And engines round FP8 weights once
# more when they load them: with the largest scale of a fused projection (`requantize_with_max_scale`), or with powers
# of two (`requant_weight_ue8m0`; both in vLLM 0.33 and SGLang 0.5.23).
E4M3_ROUNDING = 1 + 2**-4
PAIR_ROUNDING = 1 + 2**-4 * sqrt(2)  # of two rows' sigma_max, whose elements are each off by 2^-4
E4M3_HALF_STEP = 2.0**-10  # of the smallest codes


@dataclass(frozen=True, slots=True)
class Bound:
    """No value of `what` (latent, k_pe, k, v) exceeds `value`, roundings included. None: nothing is proved, and `how`
    says why. plateau: the least rms that a whole vector can have, where that is known."""

    what: str
    value: float | None
    how: str
    plateau: float | None = None

    @property
    def proves(self) -> bool:
        """That scale 1.0 cannot clip."""
        return self.value is not None and self.value <= E4M3_MAX

    @property
    def on_plateau(self) -> bool:
        """Whether it is proved that scale 1.0 loses no precision to small numbers."""
        return self.plateau is not None and self.plateau >= PLATEAU

    @property
    def says(self) -> str:
        if self.value is None:
            return f"cannot prove ({self.how})"
        if self.proves:
            return f"proves that scale 1.0 cannot clip (at most {self.value:.4g}, {self.how})"
        return f"cannot prove (bound {self.value:.4g} > {E4M3_MAX:g}, {self.how})"


def norm_bound(what: str, gamma: F64) -> Bound:
    """Of an RMSNorm's output itself: the latent. Reached by an input along its largest |gamma|."""
    value = NORM_ROUNDING * sqrt(gamma.size) * _largest(gamma)
    least = float(np.abs(gamma).min()) / NORM_ROUNDING
    return _bound(what, value, f"sqrt({gamma.size}) * max |gamma|", least)


def rotated_norm_bound(what: str, gamma: F64, factor: float) -> Bound:
    """K after its own norm (QK-norm) and RoPE. RoPE rotates pairs: no element grows beyond the pair's length, which
    is at most sqrt(d) max |gamma|, however the pairs are formed; f scales cos and sin."""
    rotation = max(factor, 1.0)  # channels that RoPE passes through have a factor of 1
    value = NORM_ROUNDING * ROPE_ROUNDING * rotation * sqrt(gamma.size) * _largest(gamma)
    least = min(factor, 1.0) * float(np.abs(gamma).min()) / (NORM_ROUNDING * ROPE_ROUNDING)
    return _bound(what, value, f"QK-norm: sqrt({gamma.size}) * max |gamma| * rope {factor:g}", least)


def linear_bound(what: str, weight: F64, gamma: F64, bias: F64 | None, *, largest_scale: float) -> Bound:
    """V: rows of W [N, d] behind a norm of `gamma` [d]: |y_j| <= sqrt(d) ||W_j * gamma|| + |b_j|. largest_scale: of an
    FP8 weight and those that engines fuse with it, 0 of others."""
    lengths = E4M3_ROUNDING * np.sqrt(np.square(weight * gamma).sum(axis=1)) + _lost(gamma, largest_scale)
    added = 0.0 if bias is None else np.abs(bias)
    value = float((_input_norm(gamma.size) * lengths + added).max()) * LINEAR_ROUNDING
    return _bound(what, value, f"sqrt({gamma.size}) * max ||W_j gamma||{' + bias' if bias is not None else ''}")


def rotated_linear_bound(
    what: str,
    weight: F64,
    gamma: F64,
    bias: F64 | None,
    factor: float,
    *,
    heads: int,
    rotary: int,
    pairing: Pairing,
    largest_scale: float,
) -> Bound:
    """K without a norm of its own, and k_pe: rows [heads * width, d], of which RoPE turns the first `rotary` of each
    head. A pair of rows gives a vector of at most sqrt(d) sigma_max(the two rows) + ||the two biases||, and RoPE keeps
    its length but for f. The other rows, and largest_scale, as in `linear_bound`."""
    scaled = (weight * gamma).reshape(heads, -1, gamma.size)
    offsets = None if bias is None else bias.reshape(heads, -1)
    width = scaled.shape[1]
    reach, lengths, lost = _input_norm(gamma.size), [0.0], _lost(gamma, largest_scale)
    for head in range(heads):
        rows, added = scaled[head], np.zeros(width) if offsets is None else offsets[head]
        for first, second in _pairs(rotary, pairing):
            sigma = PAIR_ROUNDING * pair_sigma(rows[first], rows[second]) + sqrt(2) * lost
            lengths.append(factor * _largest(reach * sigma + np.hypot(added[first], added[second])))
        if rotary < width:
            rest = slice(rotary, width)
            plain = reach * (E4M3_ROUNDING * np.sqrt(np.square(rows[rest]).sum(axis=1)) + lost)
            lengths.append(_largest(plain + np.abs(added[rest])))
    named = "either pairing" if pairing == "either" else f"{pairing} pairs"
    how = f"sqrt({gamma.size}) * sigma_max of {named} * rope {factor:g}{' + bias' if bias is not None else ''}"
    largest = float(np.max(lengths))  # max() of Python drops a NaN
    return _bound(what, largest * LINEAR_ROUNDING * ROPE_ROUNDING, how)


def pair_sigma(first: F64, second: F64) -> F64:
    """sigma_max of each 2 x d matrix of row i of `first` and of `second`: sqrt(((p+q) + sqrt((p-q)^2 + 4 t^2)) / 2)."""
    p, q, t = (np.einsum("nd,nd->n", a, b) for a, b in ((first, first), (second, second), (first, second)))
    sigma: F64 = np.sqrt((p + q + np.sqrt((p - q) ** 2 + 4 * t**2)) / 2)
    return sigma


def rope_factor(text: Any, *, latent: bool) -> float | None:
    """What RoPE multiplies cos and sin with, the larger where readers of the config differ; None for a rope type that
    is not known to keep lengths. `text`: the text config. latent: whether the class is one with a latent.

    transformers modeling_rope_utils.py. SGLang and vLLM: classes with a latent take `DeepseekScalingRotaryEmbedding`,
    which divides with one of mscale and mscale_all_dim missing, where transformers does not; vLLM does so for every
    rope type but `default` (models/deepseek_v2.py). Others take `YaRNScalingRotaryEmbedding`, which knows neither, but
    for the type `deepseek_yarn`. Some leave attn_factor aside. longrope has four readings, and none is sure.
    """
    holders = [rope for key in ("rope_parameters", "rope_scaling") if (rope := text.get(key))]
    factors = [_factor_of(text, rope, latent) for rope in holders]  # readers differ in which goes before the other
    known = [factor for factor in factors if factor is not None]
    return max(known, default=1.0) if len(known) == len(factors) else None


def _factor_of(text: Any, rope: Any, latent: bool) -> float | None:
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return None
    kind = rope.get("rope_type") or rope.get("type") or "default"
    keeps = kind in ("linear", "dynamic", "llama3", "mrope")
    if kind == "default" or (keeps and not latent):
        return 1.0
    if not keeps and kind not in ("yarn", "deepseek_yarn"):
        return None
    words = ("factor", "attention_factor", "attn_factor", "mscale", "mscale_all_dim")
    numbers = {key: _positive(rope.get(key)) for key in words}
    if any(rope.get(key) and numbers[key] is None for key in words):
        return None
    if numbers["factor"] is None:
        numbers["factor"] = _stretch(text, rope)  # as transformers fills it in
        if numbers["factor"] is None:
            return None
    read = [_deepseek(numbers)] if latent or kind == "deepseek_yarn" else []
    if not keeps:
        read.append(_transformers(numbers))
    if not latent:
        read.append(_mscale(numbers["factor"], 1.0))
    return max(1.0, *read) * max(1.0, numbers["attn_factor"] or 1.0)


def _transformers(numbers: dict[str, float | None]) -> float:
    factor, given = numbers["factor"] or 1.0, numbers["attention_factor"]
    mscale, all_dim = numbers["mscale"], numbers["mscale_all_dim"]
    if given is not None:
        return given
    return _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)


def _deepseek(numbers: dict[str, float | None]) -> float:
    factor = numbers["factor"] or 1.0
    return _mscale(factor, numbers["mscale"] or 1.0) / _mscale(factor, numbers["mscale_all_dim"] or 0.0)


def _mscale(factor: float, mscale: float | None) -> float:
    return 0.1 * (mscale or 0.0) * log(factor) + 1.0 if factor > 1 else 1.0


def _original(text: Any, rope: Any) -> float | None:
    length = _positive(rope.get("original_max_position_embeddings", text.get("original_max_position_embeddings")))
    return length if length is not None and length > 1 else None


def _stretch(text: Any, rope: Any) -> float | None:
    """How many times longer than in training contexts may be."""
    original, longest = _original(text, rope), _positive(text.get("max_position_embeddings"))
    return None if original is None or longest is None else longest / original


def _positive(value: object) -> float | None:
    if type(value) not in (int, float):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        return None
    return number if 0 < number < 1e9 else None


def _pairs(rotary: int, pairing: Pairing) -> Sequence[tuple[slice, slice]]:
    """Rows that RoPE turns together: (2i, 2i+1) or (i, i + rotary/2)."""
    interleaved = (slice(0, rotary, 2), slice(1, rotary, 2))
    half = (slice(0, rotary // 2), slice(rotary // 2, rotary))
    return {"interleaved": (interleaved,), "half": (half,), "either": (interleaved, half)}[pairing] if rotary else ()


def _input_norm(width: int) -> float:
    """The longest input of a linear behind a norm, before gamma."""
    return sqrt(width) * NORM_ROUNDING * E4M3_ROUNDING


def _lost(gamma: F64, largest_scale: float) -> float:
    """What a row of FP8 weights that are rounded once more may gain below e4m3's normal numbers, where errors are not
    relative; a power of two is at most twice the scale."""
    return E4M3_HALF_STEP * 2 * largest_scale * float(np.sqrt(np.square(gamma).sum()))


def _largest(values: F64) -> float:
    return float(np.abs(values).max())


def _bound(what: str, value: float, how: str, plateau: float | None = None) -> Bound:
    if not np.isfinite(value):
        return Bound(what, None, "the weights have numbers that are not finite", None)
    return Bound(what, value, how, plateau)

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
FP8_INPUT_ROUNDING = 1 + 2**-4  # an FP8 linear of the engines rounds its input to e4m3 as well


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


def linear_bound(what: str, weight: F64, gamma: F64, bias: F64 | None, *, fp8: bool) -> Bound:
    """V: rows of W [N, d] behind a norm of `gamma` [d]: |y_j| <= sqrt(d) ||W_j * gamma|| + |b_j|."""
    lengths = np.sqrt(np.square(weight * gamma).sum(axis=1))
    added = 0.0 if bias is None else np.abs(bias)
    value = float((_input_norm(gamma.size, fp8) * lengths + added).max()) * LINEAR_ROUNDING
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
    fp8: bool,
) -> Bound:
    """K without a norm of its own, and k_pe: rows [heads * width, d], of which RoPE turns the first `rotary` of each
    head. A pair of rows gives a vector of at most sqrt(d) sigma_max(the two rows) + ||the two biases||, and RoPE keeps
    its length but for f. The other rows as `linear_bound`."""
    scaled = (weight * gamma).reshape(heads, -1, gamma.size)
    offsets = None if bias is None else bias.reshape(heads, -1)
    width = scaled.shape[1]
    reach, lengths = _input_norm(gamma.size, fp8), [0.0]
    for head in range(heads):
        rows, added = scaled[head], np.zeros(width) if offsets is None else offsets[head]
        for first, second in _pairs(rotary, pairing):
            sigma = pair_sigma(rows[first], rows[second])
            lengths.append(factor * _largest(reach * sigma + np.hypot(added[first], added[second])))
        if rotary < width:
            rest = slice(rotary, width)
            plain = reach * np.sqrt(np.square(rows[rest]).sum(axis=1))
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


def rope_factor(text: Any) -> float | None:
    """What RoPE multiplies cos and sin with, the larger where readers of the config differ; None for a rope type that
    is not known to keep lengths. `text`: the text config.

    transformers modeling_rope_utils.py; SGLang and vLLM `DeepseekScalingRotaryEmbedding`: with one of mscale and
    mscale_all_dim missing they divide, transformers does not.
    """
    holders = [rope for key in ("rope_parameters", "rope_scaling") if (rope := text.get(key))]
    factors = [_factor_of(text, rope) for rope in holders]  # readers differ in which of the two goes before the other
    known = [factor for factor in factors if factor is not None]
    return max(known, default=1.0) if len(known) == len(factors) else None


def _factor_of(text: Any, rope: Any) -> float | None:
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return None
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("default", "linear", "dynamic", "llama3", "mrope"):
        return 1.0
    if kind not in ("yarn", "deepseek_yarn", "longrope"):
        return None
    words = ("factor", "attention_factor", "attn_factor", "mscale", "mscale_all_dim")
    numbers = {key: _positive(rope.get(key)) for key in words}
    if any(rope.get(key) and numbers[key] is None for key in words):
        return None
    if kind != "longrope" and numbers["factor"] is None:
        numbers["factor"] = _stretch(text, rope)  # as transformers fills it in
        if numbers["factor"] is None:
            return None
    given = numbers["attention_factor"] or numbers["attn_factor"]
    return _yarn(numbers) * (numbers["attn_factor"] or 1.0) if kind != "longrope" else given or _longrope(text, rope)


def _yarn(numbers: dict[str, float | None]) -> float:
    factor, given = numbers["factor"] or 1.0, numbers["attention_factor"]
    mscale, all_dim = numbers["mscale"], numbers["mscale_all_dim"]
    in_transformers = (
        given or _mscale(factor, mscale) / _mscale(factor, all_dim)
        if given or (mscale and all_dim)
        else _mscale(factor, 1.0)
    )
    in_engines = _mscale(factor, mscale or 1.0) / _mscale(factor, all_dim or 0.0)
    return max(in_transformers, in_engines)


def _mscale(factor: float, mscale: float | None) -> float:
    return 0.1 * (mscale or 0.0) * log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(text: Any, rope: Any) -> float | None:
    """sqrt(1 + ln(factor) / ln(original length))."""
    original, stretch = _original(text, rope), _stretch(text, rope)
    if original is None or stretch is None:
        return None
    factor = _positive(rope.get("factor")) or stretch
    return sqrt(1 + log(factor) / log(original)) if factor > 1 else 1.0


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


def _input_norm(width: int, fp8: bool) -> float:
    """The longest input of a linear behind a norm, before gamma."""
    return sqrt(width) * NORM_ROUNDING * (FP8_INPUT_ROUNDING if fp8 else 1.0)


def _largest(values: F64) -> float:
    return float(np.abs(values).max())


def _bound(what: str, value: float, how: str, plateau: float | None = None) -> Bound:
    if not np.isfinite(value):
        return Bound(what, None, "the weights have numbers that are not finite", None)
    return Bound(what, value, how, plateau)

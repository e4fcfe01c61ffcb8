"""The scale of measured values: a power of two with 4x headroom that stays on e4m3's plateau. Pure arithmetic.

e4m3 has 448 as its largest number and the same relative precision over four decades below it: the value of a static
scale is irrelevant in a window of 2000:1 and fatal outside. Hence headroom costs nothing, and percentiles, which trade
clipping for precision that is not needed, are wrong here.
"""

from dataclasses import dataclass
from math import frexp, isfinite, ldexp, sqrt

import numpy as np
from numpy.typing import NDArray

from kizami.formats.statistics import KvRange

E4M3_MAX = 448.0
HEADROOM = 4.0  # values at run time may be as many times larger than any seen: 31.5 dB stay, at 1x there are 12
PLATEAU = 0.05  # in units of the scale: an rms below it loses precision (31.4 dB at 0.05, 25.0 at 0.01)
BIAS_STDS, BIAS_MEAN = 8.0, 50.0  # a channel that is a constant with a little noise
_SMALLEST, _LARGEST = -126, 127  # exponents of float32's normal numbers


@dataclass(frozen=True, slots=True)
class Window:
    """amax, rms: what was measured. lo: the least scale with headroom; hi: the largest on the plateau."""

    amax: float
    rms: float
    lo: float
    hi: float
    scale: float

    @property
    def is_empty(self) -> bool:
        return self.lo > self.hi

    @property
    def clips_unscaled(self) -> bool:
        """Whether values were seen that scale 1.0 cannot hold."""
        return self.amax > E4M3_MAX


def choose_window(amax: float, rms: float) -> Window | None:
    """None where nothing was seen (amax 0), and for figures that no values can have.

    Raises nothing: figures come from files.
    """
    if not (isfinite(amax) and isfinite(rms)) or not 0 < rms <= amax * 1.001:
        return None
    lo, hi = HEADROOM * amax / E4M3_MAX, rms / PLATEAU
    if lo <= 1.0 <= hi:
        scale = 1.0
    elif lo > 1.0:
        scale = _power(_ceil_log2(lo))
    else:
        scale = max(_power(_floor_log2(hi)), _power(_ceil_log2(lo)))
    return Window(amax, rms, lo, hi, scale)


def biased_channels(kv: KvRange) -> NDArray[np.int64]:
    """Channels whose error stays about 3 % of their constant whatever the scale (families with a bias on K)."""
    mean = np.abs(kv.channel_mean.astype(np.float64))
    found: NDArray[np.int64] = np.nonzero((mean > BIAS_STDS * kv.channel_std.astype(np.float64)) & (mean > BIAS_MEAN))[
        0
    ]
    return found


def per_head(kv: KvRange, heads: int) -> list[tuple[float, float]]:
    """amax and rms of each of `heads` KV heads, from its channels."""
    amax = kv.channel_amax.astype(np.float64).reshape(heads, -1).max(axis=1)
    squares = kv.channel_mean.astype(np.float64) ** 2 + kv.channel_std.astype(np.float64) ** 2
    rms = [sqrt(mean) for mean in squares.reshape(heads, -1).mean(axis=1).tolist()]
    # Of stored float32 means: an rms a hair above the largest magnitude is rounding
    return [(a, min(r, a) if r <= a * 1.001 else r) for a, r in zip(amax.tolist(), rms, strict=True)]


def _ceil_log2(x: float) -> int:
    """Exact, where log2 may round a power of two up."""
    mantissa, exponent = frexp(x)
    return exponent - 1 if mantissa == 0.5 else exponent


def _floor_log2(x: float) -> int:
    return frexp(x)[1] - 1


def _power(exponent: int) -> float:
    return ldexp(1.0, min(max(exponent, _SMALLEST), _LARGEST))

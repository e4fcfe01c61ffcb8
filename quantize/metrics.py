"""What is reported of a quantised tensor: sums that add up over tensors, and the figures made of them."""

import math
from dataclasses import dataclass

Figures = dict[str, float | int | None]


@dataclass(frozen=True, slots=True)
class ErrorSums:
    """Sums over the weights of one tensor, or of several: `a + b`. W is the FP32 weight, Q = q * s, E = W - Q.

    top_*: over the weights of a tensor with |W| >= its int(0.999 n)-th smallest |W| (counted from 0).
    clipped: weights outside [-8.5 s, 7.5 s], that is, more than half a step beyond the outermost codes.
    zero_groups: groups of nothing but zeros.
    sum_hw2, sum_he2: sums of h W^2 and h E^2 for the mean squares h of the inputs of W's columns; 0 without statistics.
    """

    n: int = 0
    sum_w2: float = 0.0
    sum_e2: float = 0.0
    sum_q2: float = 0.0
    top_n: int = 0
    top_w2: float = 0.0
    top_e2: float = 0.0
    max_abs_error: float = 0.0
    clipped: int = 0
    groups: int = 0
    zero_groups: int = 0
    negative_scales: int = 0
    sum_hw2: float = 0.0
    sum_he2: float = 0.0

    @property
    def sum_wq(self) -> float:
        return (self.sum_w2 + self.sum_q2 - self.sum_e2) / 2

    def __add__(self, other: "ErrorSums") -> "ErrorSums":
        return ErrorSums(
            n=self.n + other.n,
            sum_w2=self.sum_w2 + other.sum_w2,
            sum_e2=self.sum_e2 + other.sum_e2,
            sum_q2=self.sum_q2 + other.sum_q2,
            top_n=self.top_n + other.top_n,
            top_w2=self.top_w2 + other.top_w2,
            top_e2=self.top_e2 + other.top_e2,
            max_abs_error=max(self.max_abs_error, other.max_abs_error),
            clipped=self.clipped + other.clipped,
            groups=self.groups + other.groups,
            zero_groups=self.zero_groups + other.zero_groups,
            negative_scales=self.negative_scales + other.negative_scales,
            sum_hw2=self.sum_hw2 + other.sum_hw2,
            sum_he2=self.sum_he2 + other.sum_he2,
        )

    @property
    def weighted_rel_error(self) -> float:
        """Of what comes out of the linear, for inputs whose channels are uncorrelated: what `weighted` minimises."""
        return math.sqrt(self.sum_he2 / self.sum_hw2) if self.sum_hw2 else 0.0

    def figures(self) -> Figures:
        """The report's numbers; None where a ratio is infinite or undefined, never NaN.

        dB are rounded to 1e-6: log10 differs in the last bit between libraries, square roots and quotients do not.
        """
        return {
            "rel_error": math.sqrt(self.sum_e2 / self.sum_w2) if self.sum_w2 else 0.0,
            "sqnr_db": _db(self.sum_w2, self.sum_e2),
            "sqnr_top_db": _db(self.top_w2, self.top_e2),
            "max_abs_error": self.max_abs_error,
            "cosine": self._cosine(),
            "clipped_fraction": self.clipped / self.n if self.n else 0.0,
            "zero_groups": self.zero_groups,
            "negative_scale_fraction": self.negative_scales / self.groups if self.groups else 0.0,
        }

    def _cosine(self) -> float:
        if (
            not self.sum_w2 or not self.sum_q2
        ):  # zeros reproduced as zeros are a perfect match, weights lost to 0 are none
            return 1.0 if self.sum_w2 == self.sum_q2 else 0.0
        return min(1.0, self.sum_wq / (math.sqrt(self.sum_w2) * math.sqrt(self.sum_q2)))


def _db(signal: float, noise: float) -> float | None:
    return round(10 * math.log10(signal / noise), 6) if signal and noise else None

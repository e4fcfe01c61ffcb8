"""Two models that answered the same questions: exact test, interval, non-inferiority, and what n could have shown.

Drops are A's share of right answers minus B's: positive where B is worse. Two totals do not say whether a drop is real;
that depends on how many questions changed sides, which only the answers by question tell.
Formulas: A. Agresti, An Introduction to Categorical Data Analysis, 8.1 (McNemar; the interval of a paired difference).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist, fmean, variance

_NORMAL = NormalDist()
TWO_SIDED, ONE_SIDED = _NORMAL.inv_cdf(0.975), _NORMAL.inv_cdf(0.95)  # 95 %
POWER = _NORMAL.inv_cdf(0.8)


@dataclass(frozen=True, slots=True)
class Paired:
    """n questions; lost: A right and B wrong; won: A wrong and B right."""

    n: int
    lost: int
    won: int

    def __post_init__(self) -> None:
        if not (self.lost >= 0 and self.won >= 0 and 0 < self.n >= self.discordant):
            raise ValueError(f"{self.lost} lost and {self.won} won of {self.n} questions, expected at most all of them")

    @property
    def discordant(self) -> int:
        return self.lost + self.won

    @property
    def drop(self) -> float:
        return (self.lost - self.won) / self.n

    @property
    def p_value(self) -> float:
        """Exact, two-sided: how likely so uneven a split of the discordant questions is by chance."""
        tail = ways = 1  # of choosing none; exact, in whole numbers
        for k in range(1, min(self.lost, self.won) + 1):
            ways = ways * (self.discordant - k + 1) // k
            tail += ways
        return float(min(1.0, 2 * tail / 2**self.discordant))

    @property
    def standard_error(self) -> float:
        return sqrt(self.discordant - (self.lost - self.won) ** 2 / self.n) / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """Of the drop, two-sided, 95 % (Wald)."""
        return self.drop - TWO_SIDED * self.standard_error, self.drop + TWO_SIDED * self.standard_error

    @property
    def wald_bound(self) -> float:
        """Of the drop, one-sided, 95 %."""
        return self.drop + ONE_SIDED * self.standard_error

    @property
    def score_bound(self) -> float:
        """The same by the score test, which holds where few or no questions change sides: there Wald's spread is 0, and
        ten questions would prove anything (T. Tango, Statistics in Medicine 17 (1998), 891)."""
        low, high = self.drop, 1.0
        for _ in range(200):  # bisection to the last bit
            middle = (low + high) / 2
            if middle in (low, high):
                break
            low, high = (middle, high) if self._score(middle) > -ONE_SIDED else (low, middle)
        return high

    def _score(self, drop: float) -> float:
        """z of the counts if the true drop were `drop`, the share of wins as likely as that allows."""
        n, b, c = self.n, self.lost, self.won
        half = (2 * n - b + c) * drop - b - c
        share = (sqrt(max(half**2 + 8 * n * c * drop * (1 - drop), 0.0)) - half) / (4 * n)
        spread = n * (2 * share + drop * (1 - drop))
        return (b - c - n * drop) / sqrt(spread) if spread > 0 else float("-inf")

    @property
    def upper_bound(self) -> float:
        """The larger of the two."""
        return max(self.wald_bound, self.score_bound)

    def is_non_inferior(self, margin: float) -> bool:
        """Whether a drop of `margin` or more is excluded. "Not significant" does not say so."""
        return self.upper_bound < margin

    @property
    def visible_drop(self) -> float:
        """The smallest true drop that these n questions would have shown, in 4 of 5 runs, at this discordance, or at
        that of one question where none changed sides."""
        return smallest_drop(self.n, max(self.discordant, 1) / self.n)


@dataclass(frozen=True, slots=True)
class Clustered:
    """Several answers to each question: `drop` of each, A's share minus B's. Answers to one question are alike, so
    questions are what counts."""

    drops: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.drops)

    @property
    def drop(self) -> float:
        return fmean(self.drops)

    @property
    def standard_error(self) -> float:
        return sqrt(variance(self.drops) / self.n) if self.n > 1 else float("inf")

    @property
    def p_value(self) -> float:
        """Two-sided, by the normal approximation over questions."""
        if self.standard_error == 0:
            return 1.0 if self.drop == 0 else 0.0
        return 2 * _NORMAL.cdf(-abs(self.drop) / self.standard_error)

    @property
    def interval(self) -> tuple[float, float]:
        return self.drop - TWO_SIDED * self.standard_error, self.drop + TWO_SIDED * self.standard_error

    @property
    def upper_bound(self) -> float:
        return self.drop + ONE_SIDED * self.standard_error

    def is_non_inferior(self, margin: float) -> bool:
        return self.upper_bound < margin


def pair(a: Sequence[bool], b: Sequence[bool]) -> Paired:
    """Of right and wrong answers, question by question."""
    both = list(zip(a, b, strict=True))
    return Paired(len(both), sum(x and not y for x, y in both), sum(y and not x for x, y in both))


def questions_needed(drop: float, discordance: float) -> float:
    """How many questions show a true `drop` in 4 of 5 runs (two-sided 5 %), where a share `discordance` of them changes
    sides (J. T. Connett et al., Statistics in Medicine 6 (1987), 5)."""
    return (TWO_SIDED * sqrt(discordance) + POWER * sqrt(discordance - drop**2)) ** 2 / drop**2


def questions_for_margin(margin: float, discordance: float) -> float:
    """How many show non-inferiority at `margin` in 4 of 5 runs, where there is no true drop."""
    return (ONE_SIDED + POWER) ** 2 * discordance / margin**2


def smallest_drop(n: int, discordance: float) -> float:
    """The drop for which `questions_needed` is n: no more than `discordance`, by which everything that changes sides is
    a loss; then n shows nothing smaller."""
    low, high = 0.0, discordance
    if discordance == 0 or questions_needed(discordance, discordance) > n:
        return discordance
    for _ in range(200):  # bisection to the last bit
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if questions_needed(middle, discordance) > n else (low, middle)
    return high

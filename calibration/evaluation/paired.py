"""Two models that answered the same questions: exact test, interval, non-inferiority, and what n could have shown.

Drops are A's share of right answers minus B's: positive where B is worse. Two totals do not say whether a drop is real;
that depends on how many questions changed sides, which only the answers by question tell.
Formulas: A. Agresti, An Introduction to Categorical Data Analysis, 8.1 (McNemar; the interval of a paired difference).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import atan2, ceil, comb, cos, floor, fsum, pi, sin, sqrt
from statistics import NormalDist, fmean, variance

_NORMAL = NormalDist()
TWO_SIDED, ONE_SIDED = _NORMAL.inv_cdf(0.975), _NORMAL.inv_cdf(0.95)  # 95 %
POWER = _NORMAL.inv_cdf(0.8)
FEWEST = 6  # answers lost and none won, of which McNemar's test is below 5 %
MANY_QUESTIONS = 20
# With fewer, Wald's 95 % interval misses the true drop in up to 10 % of runs (36 % with sides all one way)
WALDS_QUESTIONS = 100
MANY = 100_000  # degrees of freedom: t is the normal distribution to 1e-5


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
    def wald_interval(self) -> tuple[float, float]:
        """Of the drop, two-sided, 95 %."""
        return self.drop - TWO_SIDED * self.standard_error, self.drop + TWO_SIDED * self.standard_error

    @property
    def interval(self) -> tuple[float, float]:
        """Of the drop, two-sided, 95 %: Wald's, neither end nearer than a one-sided bound; of few questions, or few
        that changed sides, as far as one of 97.5 %."""
        return -self._turned._upper_end, self._upper_end

    @property
    def _upper_end(self) -> float:
        if self.n < WALDS_QUESTIONS or self.discordant < FEWEST:
            return self._bound(TWO_SIDED, 0.025)
        return min(max(self.drop + TWO_SIDED * self.standard_error, self.upper_bound), 1.0)

    @property
    def _turned(self) -> "Paired":
        """B held against A."""
        return Paired(self.n, self.won, self.lost)

    @property
    def wald_bound(self) -> float:
        """Of the drop, one-sided, 95 %."""
        return self.drop + ONE_SIDED * self.standard_error

    @property
    def score_bound(self) -> float:
        """Of the drop, one-sided, 95 %, by the score test."""
        return self._score_bound(ONE_SIDED)

    def _bound(self, z: float, tail: float) -> float:
        """Of the drop, above; z: the normal quantile of `tail`."""
        found = max(self.drop + z * self.standard_error, self._score_bound(z))
        if self.discordant < FEWEST:  # both exclude a true drop too often there; lost answers alone bound it from above
            found = max(found, _largest_share(self.lost, self.n, tail))
        return min(found, 1.0)

    def _score_bound(self, z: float) -> float:
        """It holds where few or no questions change sides: there Wald's spread is 0, and ten questions would prove
        anything (T. Tango, Statistics in Medicine 17 (1998), 891)."""
        low, high = self.drop, 1.0
        for _ in range(200):  # bisection to the last bit
            middle = (low + high) / 2
            if middle in (low, high):
                break
            low, high = (middle, high) if self._score(middle) > -z else (low, middle)
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
        """Of the drop, one-sided, 95 %: the larger of Wald's and the score test's; where fewer than FEWEST questions
        changed sides, no smaller than the exact one of the lost answers, which for none lost is 1 - 0.05^(1/n): the
        others would exclude a true drop in 7 % of runs there."""
        return self._bound(ONE_SIDED, 0.05)

    def is_non_inferior(self, margin: float) -> bool:
        """Whether a drop of `margin` or more is excluded. "Not significant" does not say so."""
        return self.upper_bound < margin

    @property
    def visible_drop(self) -> float | None:
        """The smallest true drop that these n questions would have shown, in 4 of 5 runs, where as many more change
        sides; None where not even a loss of all would have been."""
        if self.n < MANY_QUESTIONS:
            return _smallest_seen(self.n, self.discordant / self.n)
        return smallest_drop(self.n, self.discordant / self.n)


@dataclass(frozen=True, slots=True)
class Clustered:
    """Several answers to each question, or scores between right and wrong: `drop` of each question, A's mean score
    minus B's, from -1 to 1. Answers to one question are alike, so questions are what counts.

    Student's t over questions, and never narrower than what equal questions show: n of them without a loss exclude
    losses of 1 - 0.05^(1/n) only; nor than what as many whole losses and wins would show, which t is too sure of where
    they are rare.
    """

    drops: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.drops)

    @property
    def drop(self) -> float:
        return fmean(self.drops)

    @property
    def standard_error(self) -> float:
        """0 of one question."""
        return sqrt(variance(self.drops) / self.n) if self.n > 1 else 0.0

    @property
    def p_value(self) -> float:
        """Two-sided, of the t-test; no smaller than that of the signs where all agree."""
        signs = sum(value != 0 for value in self.drops)
        least: float = min(1.0, 2.0 * 0.5**signs) if self.drop else 1.0
        if self.n < 2 or self.standard_error <= abs(self.drop) * 1e-12:
            return least
        return max(least, 2.0 * t_tail(abs(self.drop) / self.standard_error, self.n - 1))

    @property
    def interval(self) -> tuple[float, float]:
        """No end nearer than a one-sided bound."""
        half, turned = self._half(0.025), Clustered(tuple(-value for value in self.drops))
        low = min(self.drop - half, -turned.upper_bound)
        return max(low, -1.0), min(max(self.drop + half, self.upper_bound), 1.0)

    @property
    def upper_bound(self) -> float:
        lost = min(ceil(fsum(max(value, 0.0) for value in self.drops) - 1e-9), self.n)
        won = min(floor(fsum(max(-value, 0.0) for value in self.drops) + 1e-9), self.n - lost)
        return min(max(self.drop + self._half(0.05), Paired(self.n, lost, won).upper_bound), 1.0)

    def is_non_inferior(self, margin: float) -> bool:
        return self.upper_bound < margin

    @property
    def visible_drop(self) -> float | None:
        """As `Paired.visible_drop`, at this spread."""
        if self.n < 2:
            return None
        steps = t_quantile(0.025, self.n - 1) + t_quantile(0.2, self.n - 1)
        drop = max(steps * self.standard_error, smallest_drop(self.n, 0.0) or 1.0)
        return drop if drop < 1 else None

    def _half(self, tail: float) -> float:
        if self.n < 2:
            return 2.0
        least: float = 1 - tail ** (1 / self.n)
        return max(t_quantile(tail, self.n - 1) * self.standard_error, least)


def _largest_share(lost: int, n: int, tail: float) -> float:
    """The share of which `lost` or fewer of n happen with the probability `tail` (Clopper and Pearson)."""
    low, high = lost / n, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        likely = fsum(comb(n, k) * middle**k * (1 - middle) ** (n - k) for k in range(lost + 1))
        low, high = (middle, high) if likely > tail else (low, middle)
    return high


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


def smallest_drop(n: int, discordance: float) -> float | None:
    """The drop for which `questions_needed` is n, a drop above `discordance` being all that changes sides; None where
    that is more than all."""

    def needed(drop: float) -> float:
        return questions_needed(drop, max(discordance, drop))

    low, high = 1e-9, 1.0
    if needed(high) > n:
        return None
    for _ in range(200):  # bisection to the last bit
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if needed(middle) > n else (low, middle)
    return high


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the mean, 95 %, two-sided, by Student's t; of two values or more."""
    middle, half = fmean(values), t_quantile(0.025, len(values) - 1) * sqrt(variance(values) / len(values))
    return middle - half, middle + half


def _smallest_seen(n: int, discordance: float) -> float | None:
    """The same by the exact test, for n so few that no formula holds."""
    low, high = 0.0, 1.0
    if _power(n, high, 1.0) < 0.8:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _power(n, middle, max(discordance, middle)) < 0.8 else (low, middle)
    return high


def _power(n: int, drop: float, discordance: float) -> float:
    """How often McNemar's exact test is below 5 % in the direction of a true `drop`."""
    lost, won = (discordance + drop) / 2, (discordance - drop) / 2
    found = 0.0
    for changed in range(FEWEST, n + 1):
        ways = comb(n, changed) * (1 - discordance) ** (n - changed)
        for b in range(changed // 2 + 1, changed + 1):
            if Paired(n, b, changed - b).p_value < 0.05:
                found += ways * comb(changed, b) * lost**b * won ** (changed - b)
    return found


def t_tail(t: float, degrees: int) -> float:
    """P(T > t) of Student's t with whole degrees of freedom, t >= 0: the finite series (Abramowitz and Stegun, 26.7.3
    and 26.7.4)."""
    angle = atan2(t, sqrt(degrees))
    cosine = cos(angle) ** 2
    if degrees % 2:
        term = total = cos(angle) if degrees > 1 else 0.0
        for k in range(3, degrees - 1, 2):
            term *= cosine * (k - 1) / k
            total += term
        inside = 2 / pi * (angle + sin(angle) * total)
    else:
        term = total = 1.0
        for k in range(2, degrees - 1, 2):
            term *= cosine * (k - 1) / k
            total += term
        inside = sin(angle) * total
    return float(max(0.0, (1 - inside) / 2))


def t_quantile(tail: float, degrees: int) -> float:
    """The t with P(T > t) = tail."""
    if degrees > MANY:
        return _NORMAL.inv_cdf(1 - tail)
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_tail(middle, degrees) > tail else (low, middle)
    return high

"""Totals that others published, and what they show: an example of the arithmetic, and a warning about such tables.

A pair of totals does not say how many questions changed sides. `kizami evaluate` on the answers does.
`python -m kizami.calibration.evaluation.published` prints the table of docs/evaluation.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

from kizami.calibration.evaluation.paired import Paired

TYPICAL = (0.02, 0.03, 0.05)  # share of questions that change sides between a model and its quantised form


@dataclass(frozen=True, slots=True)
class Totals:
    """Shares of right answers, in percent, of n questions; n None where it was not published."""

    what: str
    a: float
    b: float
    n: int | None

    @property
    def right(self) -> tuple[int, int]:
        assert self.n is not None
        return round(self.a * self.n / 100), round(self.b * self.n / 100)

    @property
    def unpaired_p(self) -> float:
        """Two-sided z-test of two proportions: all that totals allow."""
        assert self.n is not None
        a, b = (count / self.n for count in self.right)
        pooled = (a + b) / 2
        if pooled in (0, 1):
            return 1.0
        z = (a - b) / sqrt(2 * pooled * (1 - pooled) / self.n)
        return 2 * NormalDist().cdf(-abs(z))

    def paired(self, discordance: float) -> Paired:
        """What the answers would show if that share of them had changed sides: at least the difference has."""
        assert self.n is not None
        a, b = self.right
        discordant = max(round(discordance * self.n), abs(a - b))
        discordant += (discordant - (a - b)) % 2  # lost and won are whole
        return Paired(self.n, (discordant + a - b) // 2, (discordant - a + b) // 2)


# FP8 weights and BF16 KV against INT4 weights and FP8 KV, as published for one serving set-up.
EXAMPLES: Sequence[Totals] = (
    Totals("GSM8K", 94.39, 93.56, 1319),
    Totals("MMLU", 86.60, 86.54, 14042),
    Totals("ARC-C", 64.93, 64.85, 1172),
    Totals("GSM8K, BF16 KV against FP8 KV", 94.24, 94.09, 1319),  # 1243 and 1241 of 1319
    Totals("tool calls, valid", 92.2, 92.6, None),
)


def rows() -> list[str]:
    """The table's lines, in Markdown."""
    heads = ("", "n", "A", "B", "unpaired p", *(f"if {share:.0%} changed sides" for share in TYPICAL))
    return [
        _line(heads),
        "|---|---:|---:|---:|---:|" + "---|" * len(TYPICAL),
        *(_line(_cells(one)) for one in EXAMPLES),
    ]


def _cells(totals: Totals) -> tuple[str, ...]:
    shares = f"{totals.a:.2f}", f"{totals.b:.2f}"
    if totals.n is None:
        return (totals.what, "not published", *shares, *[""] * (1 + len(TYPICAL)))
    shown = [totals.paired(share) for share in TYPICAL]
    found = [f"p {one.p_value:.3f}, at most {100 * one.upper_bound:.2f} points" for one in shown]
    return (totals.what, f"{totals.n:,}", *shares, f"{totals.unpaired_p:.2f}", *found)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(rows()))

"""What answers by question come to: figures of one task, filter and metric."""

from dataclasses import dataclass
from statistics import fmean

from kizami.calibration.evaluation.lm_eval_logs import Joined
from kizami.calibration.evaluation.paired import Clustered, Paired, pair, questions_for_margin


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of n questions. a, b: mean scores; drop: how much worse b is, a - b where higher is better. lost, won,
    discordance: of single answers that are right or wrong, else None. upper_bound: of the drop, one-sided, 95 %.
    visible_drop: what n would have shown in 4 of 5 runs, None for nothing. needed: questions that would show
    non-inferiority at the margin, if there is no drop."""

    task: str
    filter: str
    metric: str
    n: int
    runs_a: int
    runs_b: int
    a: float
    b: float
    drop: float
    interval: tuple[float, float]
    p_value: float
    upper_bound: float
    non_inferior: bool
    visible_drop: float | None
    lost: int | None = None
    won: int | None = None
    discordance: float | None = None
    needed: float | None = None


def judge(joined: Joined, margin: float) -> Verdict:
    """McNemar's exact test where each question was answered once, right or wrong; else a test of questions' means."""
    counted: Paired | Clustered
    lost = won = discordance = needed = None
    if joined.is_single and joined.is_right_or_wrong and joined.higher_is_better:
        counted = pair([a[0] == 1 for a in joined.a], [b[0] == 1 for b in joined.b])
        lost, won, discordance = counted.lost, counted.won, counted.discordant / counted.n
        needed = questions_for_margin(margin, max(counted.discordant, 1) / counted.n)
    else:
        sign = 1 if joined.higher_is_better else -1
        counted = Clustered(tuple(sign * (fmean(a) - fmean(b)) for a, b in zip(joined.a, joined.b, strict=True)))
    return Verdict(
        task=joined.task,
        filter=joined.filter,
        metric=joined.metric,
        n=counted.n,
        runs_a=len(joined.a[0]),
        runs_b=len(joined.b[0]),
        a=fmean(fmean(answers) for answers in joined.a),
        b=fmean(fmean(answers) for answers in joined.b),
        drop=counted.drop,
        interval=counted.interval,
        p_value=counted.p_value,
        upper_bound=counted.upper_bound,
        non_inferior=counted.is_non_inferior(margin),
        visible_drop=counted.visible_drop,
        lost=lost,
        won=won,
        discordance=discordance,
        needed=needed,
    )

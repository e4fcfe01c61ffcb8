"""Paired comparison: McNemar, intervals, non-inferiority and power, against scipy, statsmodels and a worked example."""

import math
from pathlib import Path

import numpy as np
import pytest

from kizami.calibration.evaluation.paired import (
    Clustered,
    Paired,
    pair,
    questions_for_margin,
    questions_needed,
    smallest_drop,
    t_quantile,
    t_tail,
)
from kizami.calibration.evaluation.published import EXAMPLES, rows

RNG = np.random.default_rng(7)
TABLES = [
    (int(n), int(lost), int(won))
    for n in (1, 2, 10, 281, 1319, 14042)
    for lost, won in RNG.integers(0, n // 2 + 1, (20, 2))
]


@pytest.mark.parametrize(("n", "lost", "won"), TABLES)
def test_the_exact_test_is_scipys_and_statsmodels(n: int, lost: int, won: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    tables = pytest.importorskip("statsmodels.stats.contingency_tables")
    ours = Paired(n, lost, won).p_value
    expected = stats.binomtest(lost, lost + won).pvalue if lost + won else 1.0
    assert ours == pytest.approx(expected, rel=1e-9)
    table = [[n - lost - won, lost], [won, 0]]
    assert ours == pytest.approx(tables.mcnemar(table, exact=True).pvalue, rel=1e-9)


@pytest.mark.parametrize(("n", "lost", "won"), TABLES)
def test_the_interval_is_that_of_a_mean_of_differences(n: int, lost: int, won: int) -> None:
    """statsmodels has it as a z-interval of the mean with the standard deviation of all n."""
    weightstats = pytest.importorskip("statsmodels.stats.weightstats")
    drops = np.repeat([1.0, -1.0, 0.0], [lost, won, n - lost - won])
    described = weightstats.DescrStatsW(drops)  # ddof 0
    paired = Paired(n, lost, won)
    assert paired.drop == pytest.approx(described.mean, abs=1e-12)
    assert paired.standard_error == pytest.approx(described.std / math.sqrt(n), rel=1e-9, abs=1e-12)
    half = 1.959963984540054 * described.std / math.sqrt(n)
    assert paired.wald_interval == pytest.approx((described.mean - half, described.mean + half), rel=1e-9, abs=1e-12)


def test_gsm8k_of_two_published_totals() -> None:
    """1245 and 1234 of 1319: what they show depends on how many questions changed sides."""
    found = {}
    for discordant in (15, 21, 25, 31, 41, 51, 61, 81):
        one = Paired(1319, (discordant + 11) // 2, (discordant - 11) // 2)
        half = 100 * (one.interval[1] - one.drop)
        found[discordant] = (round(one.p_value, 3), round(half, 2))
        assert 100 * one.drop == pytest.approx(0.834, abs=1e-3)
    assert found == {
        15: (0.007, 0.57), 21: (0.027, 0.68), 25: (0.043, 0.74), 31: (0.071, 0.83), 41: (0.117, 0.95),
        51: (0.161, 1.06), 61: (0.2, 1.16), 81: (0.266, 1.34),
    }  # fmt: skip
    bounds = [100 * Paired(1319, (d + 11) // 2, (d - 11) // 2).wald_bound for d in (41, 61, 81)]
    assert bounds == pytest.approx([1.63, 1.81, 1.96], abs=5e-3)
    assert not Paired(1319, 26, 15).is_non_inferior(0.01)
    assert Paired(1319, 46, 35).is_non_inferior(0.02)


@pytest.mark.parametrize(("drop", "n"), [(0.003, 34_882), (0.005, 12_556), (0.0083, 4_555), (0.01, 3_137), (0.02, 783)])
def test_the_questions_that_a_drop_needs(drop: float, n: int) -> None:
    assert questions_needed(drop, 0.04) == pytest.approx(n, abs=1)


@pytest.mark.parametrize(("discordance", "margin", "n"), [
    (0.04, 0.005, 9_892), (0.04, 0.01, 2_473), (0.04, 0.015, 1_099), (0.04, 0.02, 618),
    (0.02, 0.005, 4_946), (0.02, 0.01, 1_237), (0.02, 0.015, 550), (0.02, 0.02, 309),
])  # fmt: skip
def test_the_questions_that_a_margin_needs(discordance: float, margin: float, n: int) -> None:
    assert questions_for_margin(margin, discordance) == pytest.approx(n, abs=1)


def test_power_is_what_simulated_experiments_have() -> None:
    """Of 4,000 experiments of that many questions 80 % are significant by the test that the formula is of."""
    drop, discordance = 0.05, 0.2
    n = math.ceil(questions_needed(drop, discordance))
    shares = [(discordance + drop) / 2, (discordance - drop) / 2, 1 - discordance]
    tables = np.random.default_rng(1).multinomial(n, shares, 4000)
    z = (tables[:, 0] - tables[:, 1]) / np.sqrt(tables[:, 0] + tables[:, 1])
    assert np.mean(np.abs(z) > 1.96) == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("n", [8, 50, 281, 1319, 100_000])
@pytest.mark.parametrize("discordance", [0.0, 0.005, 0.04, 0.3, 1.0])
def test_the_smallest_drop_is_seen_by_four_of_five_experiments(n: int, discordance: float) -> None:
    drop = smallest_drop(n, discordance)
    assert drop is not None
    assert questions_needed(drop, max(discordance, drop)) == pytest.approx(n, rel=1e-6)
    changed = max(discordance, drop)
    shares = [(changed + drop) / 2, (changed - drop) / 2, 1 - changed]
    tables = np.random.default_rng(1).multinomial(n, np.clip(shares, 0, 1), 2000)
    z = (tables[:, 0] - tables[:, 1]) / np.sqrt(np.maximum(tables[:, 0] + tables[:, 1], 1))
    assert np.mean(np.abs(z) > 1.96) > 0.72, "the formula is of many questions"


@pytest.mark.parametrize(("n", "lost", "won"), [(6, 0, 0), (10, 0, 0), (10, 2, 1), (15, 4, 4), (19, 0, 5)])
def test_the_smallest_drop_of_few_questions_is_seen_by_four_of_five_exact_tests(n: int, lost: int, won: int) -> None:
    drop = Paired(n, lost, won).visible_drop
    assert drop is not None
    changed = max((lost + won) / n, drop)
    shares = np.clip([(changed + drop) / 2, (changed - drop) / 2, 1 - changed], 0, 1)
    tables = np.random.default_rng(1).multinomial(n, shares / shares.sum(), 3000)
    seen = [b > c and Paired(n, int(b), int(c)).p_value < 0.05 for b, c, _ in tables]
    assert np.mean(seen) == pytest.approx(0.8, abs=0.025)


@pytest.mark.parametrize("n", [1, 10, 281, 1319])
def test_questions_that_all_stay_exclude_what_they_exactly_can(n: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    bound = Paired(n, 0, 0).upper_bound
    assert (1 - bound) ** n == pytest.approx(0.05)
    assert bound == pytest.approx(stats.binomtest(0, n).proportion_ci(0.90).high)


@pytest.mark.parametrize(
    ("n", "true"),
    [pytest.param(610, 0.01, marks=pytest.mark.long), (122, 0.05), pytest.param(1220, 0.005, marks=pytest.mark.long)],
)
def test_rare_losses_of_several_runs_are_not_excluded_too_often(n: int, true: float) -> None:
    rng = np.random.default_rng(5)
    excluded = []
    for lost in rng.binomial(n, true, 400):
        drops = (1.0,) * int(lost) + (0.0,) * (n - int(lost))
        excluded.append(Clustered(drops).is_non_inferior(true))
    assert np.mean(excluded) < 0.08
    assert Clustered((1.0,) * 3 + (0.0,) * 607).upper_bound == Paired(610, 3, 0).upper_bound


def test_a_few_questions_show_nothing() -> None:
    assert smallest_drop(3, 0.0) is None
    assert smallest_drop(1, 1.0) is None


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 30, 999, 20_000])
def test_students_t_is_scipys(degrees: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    for t in (0.0, 0.3, 1.0, 2.5, 7.0):
        assert t_tail(t, degrees) == pytest.approx(stats.t.sf(t, degrees), rel=1e-7, abs=1e-13)
    for tail in (0.025, 0.05, 0.2):
        assert t_quantile(tail, degrees) == pytest.approx(stats.t.isf(tail, degrees), rel=1e-9)


def test_no_question_that_changed_sides_is_no_proof_of_anything() -> None:
    same = Paired(100, 0, 0)
    assert (same.p_value, same.drop, same.wald_interval, same.wald_bound) == (1.0, 0.0, (0.0, 0.0), 0.0)
    assert same.score_bound == pytest.approx(1.6448536269514722**2 / (100 + 1.6448536269514722**2), rel=1e-9)
    assert not same.is_non_inferior(0.02)
    assert Paired(1000, 0, 0).is_non_inferior(0.01)
    assert not Paired(10, 0, 0).is_non_inferior(0.2)
    assert Paired(5, 0, 0).visible_drop is None


@pytest.mark.parametrize(
    ("n", "lost", "won"), [(20, 0, 0), (20, 3, 0), (50, 1, 4), (281, 9, 5), (1319, 26, 15), (10, 10, 0)]
)
def test_the_score_bound_is_where_the_score_test_is_five_percent(n: int, lost: int, won: int) -> None:
    """Against a likelihood that is maximised by search, and a root that scipy finds."""
    optimize = pytest.importorskip("scipy.optimize")
    paired = Paired(n, lost, won)

    def score(drop: float) -> float:
        def loss(share: float) -> float:  # of wins; of losses it is share + drop
            parts = ((lost, share + drop), (won, share), (n - lost - won, 1 - 2 * share - drop))
            return -sum(count * math.log(max(p, 1e-300)) for count, p in parts if count)

        high = (1 - drop) / 2
        share = optimize.minimize_scalar(loss, bounds=(0, high), method="bounded", options={"xatol": 1e-13}).x
        share = min((share, 0.0, high), key=loss)
        return (lost - won - n * drop) / math.sqrt(n * (2 * share + drop * (1 - drop)))

    if paired.score_bound == 1.0:
        assert score(1 - 1e-9) > -1.645
    else:
        found = optimize.brentq(lambda drop: score(drop) + 1.6448536269514722, paired.drop + 1e-9, 1 - 1e-9)
        assert paired.score_bound == pytest.approx(found, abs=1e-5)


def test_where_enough_questions_change_sides_the_interval_is_walds() -> None:
    assert Paired(1319, 40, 29).interval == Paired(1319, 40, 29).wald_interval


@pytest.mark.parametrize("n", [1, 6, 10, 20, 60, 100])
def test_no_interval_ends_before_the_bound_that_stands_beside_it(n: int) -> None:
    for lost in range(n + 1):
        for won in range(0, n + 1 - lost, 1 + n // 20):
            one = Paired(n, lost, won)
            low, high = one.interval
            assert low <= one.drop <= one.upper_bound <= high <= 1
            assert low <= -Paired(n, won, lost).upper_bound
            assert high - low > 0, "six of six prove no loss of all"
    for drops in ((0.5,) * 50 + (-0.5,) * 50, (0.5,) * 6, (1.0, 0.0, -0.5)):
        assert Clustered(drops).interval[1] >= Clustered(drops).upper_bound
        assert Clustered(drops).interval[0] <= -Clustered(tuple(-one for one in drops)).upper_bound


@pytest.mark.parametrize(("drop", "wins"), [(0.9, 0.0), (0.2, 0.4), (0.5, 0.0), (0.05, 0.4)])
def test_the_interval_of_few_questions_holds_the_true_drop_in_nine_of_ten_runs(drop: float, wins: float) -> None:
    rng = np.random.default_rng(5)
    for n in (10, 20, 60, 120):
        tables = rng.multinomial(n, [drop + wins, wins, max(0.0, 1 - drop - 2 * wins)], 2000)
        intervals = {(b, c): Paired(n, b, c).interval for b, c, _ in tables.tolist()}
        held = np.mean([intervals[b, c][0] <= drop <= intervals[b, c][1] for b, c, _ in tables.tolist()])
        assert held > 0.92


@pytest.mark.parametrize(("n", "lost", "won"), [(1, 1, 0), (2, 1, 0), (3, 2, 0), (10, 0, 0), (12, 9, 3), (60, 60, 0)])
def test_an_interval_leaves_room_and_stays_within_all_and_nothing(n: int, lost: int, won: int) -> None:
    low, high = Paired(n, lost, won).interval
    assert -1 <= low <= Paired(n, lost, won).drop <= high <= 1
    assert (low, high) == tuple(-end for end in reversed(Paired(n, won, lost).interval))
    if lost + won < 6:
        assert high - low > 0.5
    assert Paired(n, lost, won).upper_bound <= 1


@pytest.mark.parametrize("n", [20, 100, 1319])
@pytest.mark.parametrize("true_losses", [1.5, 2.0, 3.0, 5.0])
def test_the_bound_is_kept_also_where_few_answers_are_lost(n: int, true_losses: float) -> None:
    """Exactly, over all tables: with one answer lost, Wald's and the score test's would be broken in 7 % of runs."""
    share = true_losses / n
    broken = sum(
        math.comb(n, lost) * share**lost * (1 - share) ** (n - lost)
        for lost in range(min(n, 40) + 1)
        if Paired(n, lost, 0).upper_bound < share
    )
    assert broken <= 0.052


def test_the_bound_is_kept_in_nineteen_of_twenty_runs() -> None:
    """Where questions hardly change sides Wald's is kept far less often."""
    rng, n, true = np.random.default_rng(11), 200, 0.01
    tables = rng.multinomial(n, [0.012, 0.002, 0.986], 4000)
    kept = [Paired(n, int(b), int(c)).upper_bound >= true for b, c, _ in tables]
    wald = [Paired(n, int(b), int(c)).wald_bound >= true for b, c, _ in tables]
    assert np.mean(kept) >= 0.94
    assert np.mean(wald) < 0.9


@pytest.mark.parametrize("counts", [(0, 0, 0), (3, 2, 2), (5, -1, 0), (5, 0, -1)])
def test_counts_that_cannot_be_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected at most all"):
        Paired(*counts)


def test_answers_become_a_table() -> None:
    assert pair([True, True, False, False], [True, False, True, False]) == Paired(4, 1, 1)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        pair([True, True], [True])


def test_several_answers_to_a_question_count_as_one_question() -> None:
    """Repeating every answer ten times shows no more than once did: the variance is between questions."""
    rng = np.random.default_rng(3)
    drops = tuple(rng.choice([-1.0, 0.0, 1.0], 400, p=[0.1, 0.75, 0.15]))
    once, table = Clustered(drops), Paired(400, drops.count(1.0), drops.count(-1.0))
    assert once.standard_error == pytest.approx(table.standard_error * math.sqrt(400 / 399))
    stats = pytest.importorskip("statsmodels.api")
    repeated = np.repeat(drops, 10) + rng.normal(0, 0.1, 4000)
    model = stats.OLS(repeated, np.ones(4000)).fit(
        cov_type="cluster", cov_kwds={"groups": np.repeat(np.arange(400), 10), "use_correction": False}, use_t=False
    )
    clustered = Clustered(tuple(repeated.reshape(400, 10).mean(1)))
    assert clustered.standard_error == pytest.approx(model.bse[0] * math.sqrt(400 / 399), rel=1e-9)
    assert clustered.drop == pytest.approx(model.params[0], rel=1e-9)
    stats_t = pytest.importorskip("scipy.stats").ttest_1samp(clustered.drops, 0)
    assert clustered.p_value == pytest.approx(stats_t.pvalue, rel=1e-9)
    assert clustered.interval == pytest.approx(tuple(stats_t.confidence_interval(0.95)), rel=1e-9)
    one_sided = pytest.importorskip("scipy.stats").ttest_1samp(clustered.drops, 0, alternative="less")
    assert clustered.upper_bound >= one_sided.confidence_interval(0.95).high
    dense = Clustered(tuple(rng.uniform(-0.5, 0.6, 400)))
    one_sided = pytest.importorskip("scipy.stats").ttest_1samp(dense.drops, 0, alternative="less")
    assert dense.upper_bound >= one_sided.confidence_interval(0.95).high


def test_equal_questions_are_no_proof_either() -> None:
    """Ten equal answers show as little where each was given three times."""
    same = Clustered((0.0,) * 10)
    assert (same.p_value, same.drop) == (1.0, 0.0)
    assert same.upper_bound == pytest.approx(1 - 0.05**0.1)
    assert same.interval == pytest.approx((-(1 - 0.025**0.1), 1 - 0.025**0.1))
    assert not same.is_non_inferior(0.2)
    assert Clustered((0.1,) * 3).p_value == 0.25, "three signs that agree, one chance in four"
    alone = Clustered((0.5,))
    assert (alone.p_value, alone.interval, alone.upper_bound, alone.visible_drop) == (1.0, (-1.0, 1.0), 1.0, None)


# ----------------------------------------------------------------------------------------------------- published totals


def test_the_published_table_of_the_docs_is_what_the_arithmetic_gives() -> None:
    docs = (Path(__file__).parents[1] / "docs" / "evaluation.md").read_text()
    assert "\n".join(rows()) in docs


def test_totals_with_few_changed_answers_are_a_loss_and_with_more_are_none() -> None:
    (gsm8k,) = [one for one in EXAMPLES if one.what == "GSM8K"]
    assert gsm8k.right == (1245, 1234)
    assert round(gsm8k.unpaired_p, 2) == 0.37
    assert (gsm8k.paired(0).lost, gsm8k.paired(0).won) == (11, 0), "at least the difference changed sides"
    assert gsm8k.paired(0).p_value < 0.001
    assert (gsm8k.paired(41 / 1319).lost, gsm8k.paired(41 / 1319).won) == (26, 15)


def test_the_unpaired_test_is_that_of_statsmodels() -> None:
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    for one in EXAMPLES:
        if one.n is not None:
            _, expected = proportion.proportions_ztest(one.right, (one.n, one.n))
            assert one.unpaired_p == pytest.approx(expected, rel=1e-9)

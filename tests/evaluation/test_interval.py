"""The interval of a headline figure, against a literal loop."""

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, norm, t, ttest_1samp, ttest_ind

from dml.evaluation.interval import (
    Estimate,
    Spread,
    interval_of_share,
    intervals,
    over_classes,
    over_sums,
    spread_of_pairs,
    spread_over_seeds,
)
from dml.evaluation.metrics import Ranking, rank


def test_over_classes_is_a_literal_loop() -> None:
    random = np.random.default_rng(0)
    classes = np.repeat(np.arange(9), [3, 9, 2, 5, 5, 1, 8, 4, 4])
    values = random.random(len(classes))
    found = over_classes(values, classes, draws=4000)
    assert found.value == pytest.approx(values.mean())
    means = []
    for _ in range(4000):
        chosen = random.integers(9, size=9)
        means.append(np.concatenate([values[classes == c] for c in chosen]).mean())
    assert np.quantile(found.draws, [0.025, 0.975]) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.012)
    assert found.error == pytest.approx(np.std(means) * (9 / 8) ** 0.5, rel=0.06)
    assert (found.freedom, len(found.draws)) == (8, 4000)
    low, high, p = found.interval()
    half = 2.306004 * found.error  # Student's t with 8 degrees of freedom, from a printed table
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=1e-6)
    assert p < 1e-4


def test_the_p_is_that_of_a_t_test() -> None:
    """Classes of one query each are independent values: the bootstrap's error is the usual one."""
    values = np.random.default_rng(5).normal(0.4, 1, 12)
    found = over_classes(values, np.arange(12), draws=200_000)
    known = ttest_1samp(values, 0)
    ends = known.confidence_interval(0.95)
    assert found.interval() == pytest.approx((ends.low, ends.high, known.pvalue), abs=0.01)


def test_the_spread_over_seeds_is_added() -> None:
    """Without classes' share it is the t-test with pooled variances, with it Welch and Satterthwaite's degrees."""
    a, b = [0.61, 0.63, 0.66], [0.70, 0.67]
    single = spread_over_seeds([a, b])
    assert single is not None
    spread = single.of_difference(3, 2)
    assert spread.freedom == 3
    known = ttest_ind(b, a).confidence_interval(0.95)
    apart = float(np.mean(b) - np.mean(a))
    assert Estimate(apart, 0.0, 97, np.zeros(1)).interval(spread)[:2] == pytest.approx((known.low, known.high))
    total = 0.02**2 + spread.variance
    freedom = total**2 / (0.02**4 / 97 + spread.variance**2 / 3)
    low, high, p = Estimate(apart, 0.02, 97, np.zeros(1)).interval(spread)
    assert high - low == pytest.approx(2 * t.ppf(0.975, freedom) * total**0.5)
    assert p == pytest.approx(2 * t.cdf(-apart / total**0.5, freedom))
    assert spread_over_seeds([[0.6], [0.5, 0.52], [0.4, 0.44]]) == Spread(pytest.approx((0.0002 + 0.0008) / 2), 2)
    assert spread_over_seeds([[0.6], [0.7]]) is None


def test_the_spread_of_pairs_is_that_of_their_differences() -> None:
    """1, 2 and -1 have the variance 7/3."""
    found = spread_of_pairs([1, 2, 4], [2, 4, 3])
    assert (found.variance, found.freedom) == (pytest.approx(7 / 9), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "seeds"), [(3, 1), (8, 1), (98, 2), (98, 3)])
def test_coverage_with_few_classes_and_with_seeds(classes: int, seeds: int) -> None:
    """Near 95 %, or above it. Without the spread over seeds it is far below, as another seed moves all classes."""
    random = np.random.default_rng(0)
    sizes = random.integers(40, 95, classes)
    common = 0.0 if seeds == 1 else 0.8
    hits, without = 0, 0
    for trial in range(300):
        of_class = random.normal(0, 4, classes)
        a, b = (
            random.normal(0, 5, (seeds, classes)) + random.normal(0, common, (seeds, 1)) + shift
            for shift in (np.zeros(classes), of_class)
        )
        found = over_sums(sizes * (b - a).mean(0), sizes, draws=300, seed=trial)
        spread = spread_over_seeds(side @ sizes / sizes.sum() for side in (a, b))
        low, high, _ = found.interval(spread and spread.of_difference(seeds, seeds))
        hits += low <= 0 <= high
        low, high, _ = found.interval()
        without += low <= 0 <= high
    assert hits / 300 >= 0.92
    if seeds == 1:
        assert hits / 300 <= 0.975
    else:
        assert without < hits


def test_ends_are_around_the_figures_of_counted_queries() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.cat([torch.arange(12).repeat_interleave(5), torch.tensor([99])])  # the last one is alone
    points = torch.randn(12, 4, generator=generator)[labels.clamp(max=11)] + torch.randn(61, 4, generator=generator)
    ranking = rank(points, labels)
    found = intervals(ranking, labels.numpy(), draws=500)
    assert list(found) == ["recall@1/low", "recall@1/high", "map@r/low", "map@r/high"]
    assert found["recall@1/low"] < (ranking.best_rank[:60] == 1).mean() < found["recall@1/high"]
    assert found["map@r/low"] < ranking.values["map@r"][:60].mean() < found["map@r/high"]
    ends = ends_of(over_classes(ranking.values["map@r"][:60], labels[:60].numpy(), draws=500))
    assert (found["map@r/low"], found["map@r/high"]) == pytest.approx(ends, abs=1e-12)
    without = Ranking(ranking.best_rank[:60], {"map@r": ranking.values["map@r"][:60]}, ranking.positives[:60])
    assert intervals(without, labels[:60].numpy(), draws=500) == found


def ends_of(found: Estimate) -> tuple[float, float]:
    return interval_of_share(found.value, found.error, found.freedom)


def test_of_single_queries_they_are_wilsons() -> None:
    """Of 40 classes of one query; scipy's has the quantile of a normal distribution."""
    hits = np.repeat([1.0, 0.0], [34, 6])
    found = over_classes(hits, np.arange(40), draws=400_000)
    known = binomtest(34, 40).proportion_ci(0.95, "wilson")
    middle, error = 34 / 40, (34 * 6 / 40**3 * (norm.ppf(0.975) / t.ppf(0.975, 39)) ** 2) ** 0.5
    assert interval_of_share(middle, error, 39) == pytest.approx(tuple(known))
    assert ends_of(found) == pytest.approx(tuple(known), abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [6, 12, 98])
@pytest.mark.parametrize("truth", [0.5, 0.95, 0.99])
def test_coverage_near_the_ends(classes: int, truth: float) -> None:
    """Near 95 %, or above it, where Student's interval holds in 30 to 90 % of the trials."""
    random = np.random.default_rng(0)
    hits, plain = 0, 0
    for trial in range(1000):
        sums = random.binomial(20, random.beta(20 * truth, 20 * (1 - truth), classes)).astype(float)
        found = over_sums(sums, np.full(classes, 20), draws=100, seed=trial)
        low, high = ends_of(found)
        assert 0 <= low < high <= 1
        hits += low <= truth <= high
        plain += abs(found.value - truth) <= t.ppf(0.975, classes - 1) * found.error
    assert hits >= 920
    assert plain < 960
    if classes < 98 and truth > 0.9:
        assert plain + 20 < hits


@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
def test_classes_that_are_all_alike(value: float) -> None:
    """With the largest share of other classes that 5 draws miss 2.5 % of the time, at the lowest and highest value."""
    found = over_sums(np.full(5, 4 * value), np.full(5, 4))
    other = 1 - 0.025 ** (1 / 5)
    assert (1 - other) ** 5 == pytest.approx(0.025)
    assert ends_of(found) == pytest.approx(((1 - other) * value, (1 - other) * value + other))
    low, high, p = found.interval()
    assert (low, high) == pytest.approx(((1 - other) * value - other, (1 - other) * value + other))
    assert p == pytest.approx(min(1, 2 / (1 + value) ** 5))  # two-sided; of a sign test for a difference of 1


def test_ends_are_fractions() -> None:
    """Of two classes, Student's interval is wide."""
    ranking = Ranking(np.array([1, 1, 1, 3]), {"map@r": np.array([1.0, 1.0, 1.0, 0.2])}, np.ones(4))
    found = intervals(ranking, np.array([0, 0, 1, 1]))
    assert 0 < found["recall@1/low"] < 0.05
    assert 0.95 < found["recall@1/high"] < 1


def test_one_class_has_none() -> None:
    assert intervals(Ranking(np.ones(4), {"map@r": np.ones(4)}, np.ones(4)), np.zeros(4)) == {}


@pytest.mark.parametrize("share", [1 / 3, 0.2, 5 / 6])
def test_classes_that_are_all_alike_but_for_rounding(share: float) -> None:
    """Equal draws have a deviation of 1e-16, which is no knowledge of how much classes vary."""
    sizes = 30 * np.arange(1, 13)
    found, exact = over_sums(share * sizes, sizes), Estimate(share, 0.0, 11, np.full(9, share))
    assert ends_of(found) == pytest.approx(ends_of(exact), abs=1e-9)
    assert found.interval() == pytest.approx(exact.interval(), abs=1e-9)
    of_seeds = spread_over_seeds([[0.1] * 3, [0.7] * 6])  # seeds that agree
    assert of_seeds is not None
    assert found.interval(of_seeds) == pytest.approx(exact.interval(), abs=1e-9)

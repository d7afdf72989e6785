"""Intervals of a mean over queries, by a bootstrap over classes, and by the spread over seeds if it is known.

Images of one class are not independent, and another test set would bring other classes. So the interval over classes is
the one to report; the one over images is too narrow. Another seed moves all classes together, which no bootstrap of one
training sees: that is in the interval if several trainings tell how much it is (`Spread`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap, t

from dml.configuration.defaults import DRAWS
from dml.errors import UserError
from dml.evaluation.metric import METRICS
from dml.evaluation.metrics import Ranking

LEVEL = 0.95

ENDS = ("/low", "/high")  # what `metrics.json` adds to a metric's name for the ends of its interval

ALIKE = 1e-12  # a standard error below this is rounding: all classes, or seeds, are alike

BATCH = 2**24  # numbers that a bootstrap holds at a time


@dataclass(frozen=True)
class Spread:
    """By how much a figure varies with the seeds of the trainings that it comes from.

    Attributes:
        variance: of the figure.
        freedom: degrees of freedom of the variance.
    """

    variance: float
    freedom: int

    def of_difference(self, *counts: int) -> "Spread":
        """Returns that of a difference of two means over so many trainings, if this one is of a single training."""
        return Spread(self.variance * sum(1 / count for count in counts), self.freedom)


def spread_over_seeds(groups: Iterable[Sequence[float] | np.ndarray]) -> Spread | None:
    """Pools the variance of a figure between trainings that differ in their seed alone.

    Args:
        groups: for each setting the figures of its trainings. Settings are taken to vary alike.

    Returns:
        The spread of a single training; None if no setting has several trainings.
    """
    several = [np.asarray(one, float) for one in groups if len(one) > 1]
    if not several:
        return None
    freedom = sum(len(one) - 1 for one in several)
    return Spread(sum(float(((one - one.mean()) ** 2).sum()) for one in several) / freedom, freedom)


def spread_of_pairs(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> Spread:
    """Returns the spread of the difference of two means, whose terms are paired.

    Args:
        a, b: `[n]`, n > 1, a figure of either side, for example in each fold, which moves both alike. Repetitions of a
            fold are not independent of one another, so their mean is one term. Folds share training classes: the spread
            holds for these classes, and other ones may change more (Nadeau & Bengio, Machine Learning 2003).
    """
    differences = np.asarray(b, float) - np.asarray(a, float)
    return Spread(float(differences.var(ddof=1)) / len(differences), len(differences) - 1)


@dataclass(frozen=True)
class Estimate:
    """A mean over queries, and how far it may be off.

    Attributes:
        value: the mean.
        error: its standard error: that of the draws, times the root of n / (n - 1) for n classes, by which draws vary
            less than the mean does.
        freedom: n - 1.
        draws: `[draws]`, the mean of each draw.
    """

    value: float
    error: float
    freedom: int
    draws: np.ndarray

    def interval(self, seeds: Spread | None = None) -> tuple[float, float, float]:
        """Returns the lower and upper end of the 95 % interval of a difference between -1 and 1, and the two-sided p of
        a difference of 0.

        They are Student's, which holds for few classes too. The variances over classes and over seeds are added up;
        the degrees of freedom of the sum are those of Welch (1947) and Satterthwaite (1946). If all classes differ
        alike, see `_all_alike`.
        """
        variance, freedom = self.error**2, float(self.freedom)
        if seeds is not None and seeds.variance > ALIKE**2:
            of_classes, variance = variance, variance + seeds.variance
            freedom = variance**2 / (of_classes**2 / self.freedom + seeds.variance**2 / seeds.freedom)
        if variance <= ALIKE**2:
            # The largest share of classes whose difference is another, with which the mean could be 0.
            other = abs(self.value) / (1 + abs(self.value))
            return *_all_alike(self.value, self.freedom + 1, -1), min(1.0, 2 * (1 - other) ** (self.freedom + 1))
        error = float(np.sqrt(variance))
        half = float(t.ppf((1 + LEVEL) / 2, freedom)) * error
        return self.value - half, self.value + half, float(2 * t.sf(abs(self.value) / error, freedom))


def interval_of_share(value: float, error: float, freedom: int) -> tuple[float, float]:
    """Returns the lower and upper end of the 95 % interval of a mean of values between 0 and 1.

    It is Wilson's (1927) with Student's quantile, for as many independent queries as have this standard error (the
    effective sample size of Korn and Graubard, Survey Methodology 1998). Value plus and minus a multiple of the error
    would be far too narrow near 0 and 1: of 12 classes with a Recall@1 of 0.95 such intervals hold 71 to 86 % of the
    time, these 97. If all classes score alike, see `_all_alike`.

    Args:
        value: the mean.
        error: its standard error.
        freedom: number of classes less 1.
    """
    if error <= ALIKE or not 0 < value < 1:
        return _all_alike(value, freedom + 1, 0)
    square = float(t.ppf((1 + LEVEL) / 2, freedom)) ** 2 * error**2 / (value * (1 - value))  # t^2 / n
    middle = (value + square / 2) / (1 + square)
    half = (square * value * (1 - value) + square**2 / 4) ** 0.5 / (1 + square)
    return middle - half, middle + half


def _all_alike(value: float, classes: int, least: float) -> tuple[float, float]:
    """Returns the ends for a mean of values between `least` and 1 that is the same in all classes that were drawn.

    Nothing tells how much classes vary. But if a share of more than 1 - 0.025^(1/C) of all classes had another value,
    C draws would meet one of them 97.5 % of the time. With such a share at either bound the mean would be at the ends.
    """
    same = ((1 - LEVEL) / 2) ** (1 / classes)
    return same * value + (1 - same) * least, same * value + (1 - same)


def over_classes(values: np.ndarray, classes: np.ndarray, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """Bootstraps the mean over queries by drawing whole classes, with all their queries.

    Args:
        values: `[Q]`, one of each query.
        classes: `[Q]`, the classes of the queries.
        draws: number of draws.
        seed: of the draws.

    Raises:
        UserError: all queries are of one class.
    """
    _, number = np.unique(classes, return_inverse=True)
    return over_sums(np.bincount(number, values), np.bincount(number), draws, seed)


def over_sums(sums: np.ndarray, sizes: np.ndarray, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """Does the same as `over_classes`, from the sum of the values of each class and its number of queries, `[C]`.

    Raises:
        UserError: there is one class only.
    """
    if len(sums) < 2:
        raise UserError("all queries are of one class: an interval over classes needs at least two.")

    def mean(of: np.ndarray, count: np.ndarray, axis: int = -1) -> np.ndarray:
        return of.sum(axis) / count.sum(axis)

    return _bootstrap((sums, sizes), mean, draws, seed)


def over_images(values: np.ndarray, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """Bootstraps the mean by drawing queries one by one, as if they were independent. See `over_classes`."""
    return _bootstrap((values,), np.mean, draws, seed)


def _bootstrap(data: tuple[np.ndarray, ...], mean: Callable[..., np.ndarray], draws: int, seed: int) -> Estimate:
    count = len(data[0])
    found = bootstrap(
        data,
        mean,
        paired=True,
        vectorized=True,
        n_resamples=draws,
        batch=max(1, BATCH // count),
        method="percentile",  # of which the draws are taken alone
        rng=np.random.default_rng(seed),
    )
    error = float(found.standard_error) * (count / (count - 1)) ** 0.5
    return Estimate(float(mean(*data)), error, count - 1, found.bootstrap_distribution)


def intervals(ranking: Ranking, classes: np.ndarray, draws: int = DRAWS) -> dict[str, float]:
    """Computes intervals over classes for the metrics by which runs are compared.

    Args:
        ranking: of Q queries; those without a positive are left out, as metrics leave them out.
        classes: `[Q]`, the classes of the queries.
        draws: number of draws of the bootstrap.

    Returns:
        `<metric>/low` and `<metric>/high`; nothing if fewer than two classes have a query with a positive.
    """
    valid = ranking.positives > 0
    if len(np.unique(classes[valid])) < 2:
        return {}
    result: dict[str, float] = {}
    for name, values in of_comparisons(ranking).items():
        found = over_classes(values[valid], classes[valid], draws)
        ends = interval_of_share(found.value, found.error, found.freedom)
        result |= dict(zip((name + end for end in ENDS), ends, strict=True))
    return result


def of_comparisons(ranking: Ranking) -> Mapping[str, np.ndarray]:
    """Returns, by name, the values `[Q]` float64 of each metric by which runs are compared and that the ranking has."""
    found = {}
    for one in METRICS:
        if "compare" in one.tables:
            if one.name.startswith("recall@"):
                found[one.name] = (ranking.best_rank <= int(one.name.removeprefix("recall@"))).astype(float)
            elif one.name in ranking.values:
                found[one.name] = ranking.values[one.name]
    return found

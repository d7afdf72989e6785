"""Bootstrap intervals of a mean over queries.

Images of one class are not independent, and another test set would bring other classes. So the interval over classes is
the one to report; the one over images is too narrow. Neither contains how much runs differ by their seed.
"""

from collections.abc import Callable, Mapping

import numpy as np
from scipy.stats import bootstrap

from dml.configuration.defaults import DRAWS
from dml.errors import UserError
from dml.evaluation.metric import METRICS
from dml.evaluation.metrics import Ranking

LEVEL = 0.95

ENDS = ("/low", "/high")  # what `metrics.json` adds to a metric's name for the ends of its interval

BATCH = 2**24  # numbers that a bootstrap holds at a time

Found = tuple[float, float, float, np.ndarray]  # the mean, the ends of its percentile interval, the mean of each draw


def over_classes(values: np.ndarray, classes: np.ndarray, draws: int = DRAWS, seed: int = 0) -> Found:
    """Bootstraps the mean over queries by drawing whole classes, with all their queries.

    Args:
        values: `[Q]`, one of each query.
        classes: `[Q]`, the classes of the queries.
        draws: number of draws.
        seed: of the draws.

    Returns:
        The mean, the lower and upper end of its 95 % percentile interval, and the mean of each draw, `[draws]`.

    Raises:
        UserError: all queries are of one class.
    """
    _, number = np.unique(classes, return_inverse=True)
    return over_sums(np.bincount(number, values), np.bincount(number), draws, seed)


def over_sums(sums: np.ndarray, sizes: np.ndarray, draws: int = DRAWS, seed: int = 0) -> Found:
    """Does the same as `over_classes`, from the sum of the values of each class and its number of queries, `[C]`.

    Raises:
        UserError: there is one class only.
    """
    if len(sums) < 2:
        raise UserError("all queries are of one class: an interval over classes needs at least two.")

    def mean(of: np.ndarray, count: np.ndarray, axis: int = -1) -> np.ndarray:
        return of.sum(axis) / count.sum(axis)

    return _bootstrap((sums, sizes), mean, draws, seed)


def over_images(values: np.ndarray, draws: int = DRAWS, seed: int = 0) -> Found:
    """Bootstraps the mean by drawing queries one by one, as if they were independent. See `over_classes`."""
    return _bootstrap((values,), np.mean, draws, seed)


def _bootstrap(data: tuple[np.ndarray, ...], mean: Callable[..., np.ndarray], draws: int, seed: int) -> Found:
    found = bootstrap(
        data,
        mean,
        paired=True,
        vectorized=True,
        n_resamples=draws,
        batch=max(1, BATCH // len(data[0])),
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    ends = found.confidence_interval
    return float(mean(*data)), float(ends.low), float(ends.high), found.bootstrap_distribution


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
        _, low, high, _ = over_classes(values[valid], classes[valid], draws)
        result |= dict(zip((name + end for end in ENDS), (low, high), strict=True))
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

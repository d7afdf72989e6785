"""How sure a mean over queries is: a bootstrap.

Images of one class are not independent: classes are what would be drawn anew in another test set, so theirs is the
interval to print; one over images is too narrow. How much runs differ by their seed is in none of them.
"""

from collections.abc import Callable, Mapping

import numpy as np
from scipy.stats import bootstrap

from dml.configuration.defaults import DRAWS
from dml.errors import UserError
from dml.evaluation.metric import METRICS
from dml.evaluation.metrics import Ranking

LEVEL = 0.95

ENDS = ("/low", "/high")  # of the names of an interval's ends in `metrics.json`, behind that of its metric

BATCH = 2**24  # numbers that a bootstrap holds at a time

Found = tuple[float, float, float, np.ndarray]  # the mean, its percentile interval, and the draws


def over_classes(values: np.ndarray, classes: np.ndarray, draws: int = DRAWS, seed: int = 0) -> Found:
    """Draws whole classes, with all their queries.

    Args:
        values: `[Q]`, of each query.
        classes: `[Q]`, their classes.
        draws: how many.
        seed: of the draws.

    Raises:
        UserError: a single class.
    """
    _, number = np.unique(classes, return_inverse=True)
    if number.max() == 0:
        raise UserError("all queries are of one class: none can be drawn.")
    sums, sizes = np.bincount(number, values), np.bincount(number)

    def mean(of: np.ndarray, count: np.ndarray, axis: int = -1) -> np.ndarray:
        return of.sum(axis) / count.sum(axis)

    return _bootstrap((sums, sizes), mean, draws, seed)


def over_images(values: np.ndarray, draws: int = DRAWS, seed: int = 0) -> Found:
    """Draws queries one by one, as if they were independent. Arguments as `over_classes`."""
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
    """`<metric>/low` and `<metric>/high` of the metrics by which runs are compared, over classes.

    Args:
        ranking: of Q queries; those without a positive are left out, as they are of the metrics.
        classes: `[Q]`.
        draws: of the bootstrap.

    Returns:
        Nothing where fewer than two classes have a query with a positive.
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
    """`[Q]` float64 of each metric of comparisons that the ranking gives."""
    found = {}
    for one in METRICS:
        if "compare" in one.tables:
            if one.name.startswith("recall@"):
                found[one.name] = (ranking.best_rank <= int(one.name.removeprefix("recall@"))).astype(float)
            elif one.name in ranking.values:
                found[one.name] = ranking.values[one.name]
    return found

"""Calibration: the probability that two images of a given similarity are of one class, and how reliable it is.

b bins. A test set has thousands of times as many pairs of different classes as pairs of one class, and in use the
proportion is another one. So each kind gets half of the weight here, as in Brümmer & du Preez 2006 (section 4). Users
who know the proportion add its log odds to those given here.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from dml.evaluation.pairs import LOWER, Pairs, values_at

BANDS = 10  # in which predicted and observed probabilities are compared


@dataclass(frozen=True)
class Calibration:
    """Log odds of one class = slope * similarity + offset, if pairs of one and of two classes are equally frequent.

    Similarities are rounded to the bins of `Pairs.counts`, which are 2^-12 wide between 0.5 and 1.
    """

    slope: float
    offset: float

    @classmethod
    def of(cls, pairs: Pairs) -> "Calibration":
        """Fits slope and offset by logistic regression."""
        from sklearn.linear_model import LogisticRegression

        similarities, weights = _bins(pairs)
        kinds = np.repeat([0, 1], weights.shape[1])
        # The penalty keeps the slope finite where similarities separate the kinds; else it is far below the last digit.
        model = LogisticRegression(C=1e12, solver="newton-cholesky", max_iter=500, tol=1e-10)
        flat = weights.reshape(-1)
        known = flat > 0
        model.fit(np.tile(similarities, 2)[known, None], kinds[known], sample_weight=flat[known])
        return cls(float(model.coef_[0, 0]), float(model.intercept_[0]))

    def probability(self, similarities: np.ndarray) -> np.ndarray:
        """Returns the probability that pairs of these similarities are of one class, in the same shape."""
        found: np.ndarray = expit(self.slope * similarities + self.offset)
        return found

    def on(self, pairs: Pairs) -> "Reliability":
        """Measures how well the calibration fits some pairs."""
        similarities, weights = _bins(pairs)
        odds = self.slope * similarities + self.offset
        cost = np.logaddexp(0, np.stack([odds, -odds])) / np.log(2)
        predicted = self.probability(similarities)
        band = np.minimum((predicted * BANDS).astype(int), BANDS - 1)
        share = np.bincount(band, weights.sum(0), BANDS)
        with np.errstate(invalid="ignore"):
            observed = np.bincount(band, weights[1], BANDS) / share
            mean = np.bincount(band, weights.sum(0) * predicted, BANDS) / share
        there = share > 0
        error = float((share[there] * np.abs(mean - observed)[there]).sum())
        return Reliability(float((weights * cost).sum()), error, mean[there], observed[there], share[there])


@dataclass(frozen=True)
class Reliability:
    """How well a calibration fits some pairs.

    Attributes:
        cllr: mean cost of the log odds in bits (Brümmer & du Preez 2006, equation 8): 0 for a calibration that is
            always sure and right, 1 for one that says nothing.
        error: expected calibration error: the mean distance between predicted and observed probability over the bands,
            weighted by `share`.
        predicted, observed, share: `[bands]`, one value for each band of predicted probability that holds pairs: the
            mean prediction, the share of pairs of one class, and the band's share of all weight.
    """

    cllr: float
    error: float
    predicted: np.ndarray
    observed: np.ndarray
    share: np.ndarray


def _bins(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Returns the middle similarity of each occupied bin, `[b]`, and the bin's weight among the pairs of each kind,
    `[2,b]`; the weights of a kind sum to a half."""
    used = np.flatnonzero(pairs.counts.sum(0))
    middle = values_at((used << LOWER) + (1 << LOWER - 1)).astype(float)
    counts = pairs.counts[:, used]
    return middle, counts / counts.sum(1, keepdims=True) / 2

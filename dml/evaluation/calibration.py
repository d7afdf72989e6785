"""From a similarity to the probability that two images are of one class, and how far it can be believed.

b bins. Pairs of two classes are thousands of times as many as those of one, in a test set otherwise than in use. So
both kinds weigh a half here, as in Brümmer & du Preez 2006 (section 4): a user's own odds are added to the log odds.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from dml.evaluation.pairs import LOWER, Pairs, values_at

BANDS = 10  # of predicted probability


@dataclass(frozen=True)
class Calibration:
    """Log odds of one class = slope * similarity + offset, where both kinds of pairs are as frequent.

    Similarities are taken in the bins of `Pairs.counts`, 2^-12 wide between 0.5 and 1.
    """

    slope: float
    offset: float

    @classmethod
    def of(cls, pairs: Pairs) -> "Calibration":
        """By logistic regression."""
        from sklearn.linear_model import LogisticRegression

        similarities, weights = _bins(pairs)
        kinds = np.repeat([0, 1], weights.shape[1])
        # The penalty keeps the slope finite where the kinds are apart; it is far below the last digit otherwise.
        model = LogisticRegression(C=1e6, solver="newton-cholesky", max_iter=500)
        flat = weights.reshape(-1)
        known = flat > 0
        model.fit(np.tile(similarities, 2)[known, None], kinds[known], sample_weight=flat[known])
        return cls(float(model.coef_[0, 0]), float(model.intercept_[0]))

    def probability(self, similarities: np.ndarray) -> np.ndarray:
        """Of one class."""
        found: np.ndarray = expit(self.slope * similarities + self.offset)
        return found

    def on(self, pairs: Pairs) -> "Reliability":
        """How it does on some pairs."""
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
    """Of a calibration, on some pairs.

    Attributes:
        cllr: mean cost of the log odds in bits (Brümmer & du Preez 2006, equation 8): 0 of a calibration that is always
            sure and right, 1 of one that says nothing.
        error: expected calibration error: how far predicted and observed are apart on average over bands.
        predicted, observed, share: `[bands]` of each occupied band of predicted probability the mean of it, the share
            of one class, and how much of all weight is there.
    """

    cllr: float
    error: float
    predicted: np.ndarray
    observed: np.ndarray
    share: np.ndarray


def _bins(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """The middle similarity of each occupied bin `[b]`, and its weight among either kind `[2,b]`, each half in all."""
    used = np.flatnonzero(pairs.counts.sum(0))
    middle = values_at((used << LOWER) + (1 << LOWER - 1)).astype(float)
    counts = pairs.counts[:, used]
    return middle, counts / counts.sum(1, keepdims=True) / 2

"""Thresholds over all pairs, against all pairs held and sorted."""

import itertools
import math
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest

from dml.errors import UserError
from dml.evaluation import pairs as module
from dml.evaluation.calibration import Calibration
from dml.evaluation.interval import interval_of_share, over_sums
from dml.evaluation.pairs import Matches, Pairs

FMRS = [0.5, 0.1, 0.01, 1e-3, 1e-4, 1e-6]


def clustered(count: int, classes: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors around a centre a class, and labels in no order."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, count)
    points = random.normal(size=(classes, width))[labels] + 1.2 * random.normal(size=(count, width))
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32), labels


def coarse(count: int, classes: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Halves between -2 and 2, whose products float32 holds exactly: similarities tie in thousands, at 0 too."""
    random = np.random.default_rng(1)
    return random.integers(-4, 5, (count, width)) / np.float32(2), random.integers(0, classes, count)


def held(points: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Similarities of all pairs in double precision: of two classes, and of one."""
    first, second = np.triu_indices(len(points), 1)
    similarities = (points.astype(float) @ points.astype(float).T)[first, second]
    same = labels[first] == labels[second]
    return similarities[~same], similarities[same]


@pytest.mark.parametrize(
    "data", [clustered(5000, 300, 32), coarse(1500, 40, 8), clustered(700, 2, 8), coarse(90, 80, 2)]
)
def test_operating_points_are_those_of_all_pairs_held_and_sorted(data: tuple[np.ndarray, np.ndarray]) -> None:
    points, labels = data
    different, same = held(points, labels)
    found = Pairs(points, labels)
    assert (found.different, found.same) == (len(different), len(same))
    fmrs = [fmr for fmr in FMRS if fmr >= found.resolves()]
    descending = np.sort(different)[::-1]
    for fmr, point in zip(fmrs, found.operating(fmrs), strict=True):
        # The largest similarity that must not match, and the share that does.
        forbidden = descending[math.floor(fmr * len(different) * (1 + 1e-12))]
        assert point.threshold == pytest.approx(forbidden, abs=3e-7, rel=2e-7)
        assert point.fmr <= fmr
        # Coarse points have exact similarities; of others float32 may tell those apart that tie in double, or not.
        exact = np.array_equal(points * 2, np.round(points * 2))
        for rate, of in ((point.fmr, different), (1 - point.fnmr, same)):
            near = 0 if exact else int((np.abs(of - forbidden) < 5e-7).sum())
            assert abs(rate * len(of) - (of > forbidden).sum()) <= near + 1e-6


def test_an_fmr_that_is_nearly_1_changes_no_other() -> None:
    found = Pairs(*clustered(700, 40, 8))
    alone, together = found.operating([0.01]), found.operating([1 - 1e-15, 0.01])
    assert together[1] == alone[0]
    assert together[0].fmr == 1 - 1 / found.different


def test_the_curve_is_exact_where_it_is_given() -> None:
    points, labels = coarse(600, 30, 6)
    different, same = held(points, labels)
    thresholds, fmr, fnmr = Pairs(points, labels).curve()
    assert (fmr[0], fnmr[0], fmr[-1], fnmr[-1]) == (1, 0, 0, 1)
    for at, threshold in enumerate(thresholds):
        assert fmr[at] == pytest.approx((different >= threshold).mean(), abs=1e-12)
        assert fnmr[at] == pytest.approx((same < threshold).mean(), abs=1e-12)


@pytest.mark.parametrize("groups", [2048, 7])
def test_matches_by_class(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted pair by pair; and a bootstrap draw that takes every class once is the estimate."""
    monkeypatch.setattr(module, "GROUPS", groups)
    points, labels = coarse(400, 20, 6)
    matches = Pairs(points, labels).at(3.0)
    different, same = held(points, labels)
    assert matches.fmr == (different >= 3).mean()
    assert matches.fnmr == pytest.approx((same < 3).mean(), abs=1e-12)
    assert len(matches.same) == min(20, groups)
    if groups < 20:
        return
    false = np.zeros((20, 20))
    for i in range(400):
        for j in range(i):
            if labels[i] != labels[j] and float(points[i] @ points[j]) >= 3:
                false[labels[i], labels[j]] += 1
                false[labels[j], labels[i]] += 1
    np.testing.assert_array_equal(matches.false, false)
    images = np.bincount(labels)
    np.testing.assert_array_equal(matches.different, np.outer(images, images) - np.diag(images**2))


def errors(classes: int, hubs: float, random: np.random.Generator) -> Matches:
    """Of 36 images a class, an FMR of 0.02 and an FNMR of 0.25; with `hubs` 1, some classes are confused with many."""
    own = random.gamma(4, 1 / 4, classes) ** hubs
    rate = np.minimum(0.02 * random.gamma(0.5, 2, (classes, classes)) * np.outer(own, own), 1)
    false = np.triu(random.binomial(36, rate), 1).astype(float)
    missed = random.binomial(15, random.beta(1, 3, classes)).astype(float)
    return Matches(missed, np.full(classes, 15.0), false + false.T, 36.0 * (1 - np.eye(classes)), classes)


def test_intervals_are_those_of_a_literal_loop() -> None:
    """Over all two pairs of classes that share a class."""
    matches = errors(10, 1.0, np.random.default_rng(3))
    pairs = list(itertools.combinations(range(10), 2))
    error = {pair: matches.false[pair] - matches.fmr * matches.different[pair] for pair in pairs}
    variance = sum(error[a] * error[b] for a in pairs for b in pairs if set(a) & set(b)) / (36 * len(pairs)) ** 2
    assert variance > sum(one**2 for one in error.values()) / (36 * len(pairs)) ** 2
    found = matches.intervals()
    assert found["fmr"] == pytest.approx(interval_of_share(matches.fmr, (variance * 10 / 9) ** 0.5, 9))
    missed = over_sums(matches.missed, matches.same, draws=100_000)
    assert found["fnmr"] == pytest.approx(interval_of_share(missed.value, missed.error, 9), rel=0.02)


def test_groups_of_classes_take_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 classes in 20 groups: pairs of two classes of one group count too."""
    points, labels = clustered(900, 60, 8)
    apart = Pairs(points, labels).at(0.5)
    monkeypatch.setattr(module, "GROUPS", 20)
    grouped = Pairs(points, labels).at(0.5)
    assert (grouped.fmr, grouped.fnmr) == pytest.approx((apart.fmr, apart.fnmr))
    for name, ends in apart.intervals().items():
        assert grouped.intervals()[name] == pytest.approx(ends, rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("hubs", [0.0, 1.0])
@pytest.mark.parametrize("classes", [8, 40])
def test_coverage_of_intervals(hubs: float, classes: int) -> None:
    """Whether pairs of classes err one by one, or some classes with all others."""
    random, hits = np.random.default_rng(0), np.zeros(2)
    for _ in range(1000):
        ends = errors(classes, hubs, random).intervals().values()
        hits += [low <= truth <= high for (low, high), truth in zip(ends, (0.02, 0.25), strict=True)]
    assert (hits >= 900).all()
    assert (hits < 990).all()


def test_no_false_match_has_an_interval() -> None:
    """If more than a share of 0.08 of the classes matched others, 45 classes would hold one of them."""
    points, labels = clustered(450, 45, 64)
    found = Pairs(points, labels).at(10.0).intervals()
    assert found["fmr"] == (0, pytest.approx(1 - 0.025 ** (1 / 45)))


def test_calibration_is_that_of_a_regression_on_all_pairs() -> None:
    from scipy.optimize import minimize

    points, labels = clustered(500, 20, 16)
    different, same = held(points, labels)

    def cost(of: np.ndarray) -> float:
        one, two = of[0] * same + of[1], of[0] * different + of[1]
        return float((np.logaddexp(0, -one).mean() + np.logaddexp(0, two).mean()) / 2 / np.log(2))

    expected = minimize(cost, np.array([10.0, -3.0]), method="BFGS")
    pairs = Pairs(points, labels)
    found = Calibration.of(pairs)
    assert (found.slope, found.offset) == pytest.approx(tuple(expected.x), rel=1e-3)
    reliability = found.on(pairs)
    assert reliability.cllr == pytest.approx(expected.fun, abs=1e-4)
    assert reliability.share.sum() == pytest.approx(1)
    probability = found.probability(same)
    inside = (probability >= 0.9).mean() / ((probability >= 0.9).mean() + (found.probability(different) >= 0.9).mean())
    assert reliability.observed[-1] == pytest.approx(inside, abs=2e-3)
    apart = 0.0
    for at in np.arange(10) / 10:
        ours, others = _in_band(same, found, at), _in_band(different, found, at)
        weight = (len(ours) / len(same) + len(others) / len(different)) / 2
        if weight:
            mean = (ours.sum() / len(same) + others.sum() / len(different)) / 2 / weight
            apart += weight * abs(mean - len(ours) / len(same) / 2 / weight)
    assert reliability.error == pytest.approx(apart, abs=2e-3)
    assert apart > 0.005


def test_reliability_is_that_of_a_loop_over_pairs_whose_bands_count_by_their_weight() -> None:
    points, labels = coarse(60, 6, 6)
    cost, bands = 0.0, np.zeros((10, 3))  # weight, weighted prediction, weight of pairs of one class
    for one_class, similarities in enumerate(held(points, labels)):
        for similarity in similarities.astype(np.float32):
            bits = similarity.view(np.int32)  # the middle of its bin, of values that share their upper bits
            middle = float((bits & ~0xFFF | (0x7FF if bits < 0 else 0x800)).view(np.float32))
            predicted = 1 / (1 + np.exp(1 - 0.5 * middle))
            cost -= np.log2(predicted if one_class else 1 - predicted) / 2 / len(similarities)
            bands[int(predicted * 10)] += np.array([1, predicted, one_class]) / 2 / len(similarities)
    found = Calibration(0.5, -1.0).on(Pairs(points, labels))
    weight, predicted, ours = bands[bands[:, 0] > 0].T
    assert found.cllr == pytest.approx(cost, abs=1e-9)
    assert found.share == pytest.approx(weight, abs=1e-9)
    assert found.predicted == pytest.approx(predicted / weight, abs=1e-9)
    assert found.observed == pytest.approx(ours / weight, abs=1e-9)
    assert found.error == pytest.approx(np.abs(predicted - ours).sum(), abs=1e-9)


def test_calibration_of_kinds_that_hardly_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against Newton's method without a penalty."""
    draws = np.random.default_rng(0)
    similarities = np.linspace(-1, 1, 801)
    kinds = [np.histogram(draws.normal(mean, 0.12, 20_000), np.append(similarities, 1.01))[0] for mean in (0.1, 0.75)]
    weights = np.stack([counts / counts.sum() / 2 for counts in kinds])
    X = np.stack([similarities, np.ones_like(similarities)])
    at = np.zeros(2)
    for _ in range(40):
        p = 1 / (1 + np.exp(-at @ X))
        gradient = X @ (weights.sum(0) * p - weights[1])
        at -= np.linalg.solve((X * weights.sum(0) * p * (1 - p)) @ X.T, gradient)
    assert np.abs(gradient).max() < 1e-12
    monkeypatch.setattr("dml.evaluation.calibration._bins", lambda pairs: (similarities, weights))
    found = Calibration.of(Mock())
    assert found.slope > 30
    assert (found.slope, found.offset) == pytest.approx(tuple(at), rel=1e-5)


def _in_band(similarities: np.ndarray, found: Calibration, at: float) -> np.ndarray:
    """The predicted probabilities that lie in a tenth."""
    predicted = found.probability(similarities)
    return predicted[(predicted >= at) & ((predicted < at + 0.1) | (at > 0.85))]


def test_an_embedding_that_has_collapsed_matches_nothing() -> None:
    """No threshold parts equal similarities: it lies above all of them."""
    point = Pairs(np.ones((50, 4), np.float32), np.arange(50) // 5).operating([0.5])[0]
    assert (point.fmr, point.fnmr) == (0, 1)
    assert point.threshold > 4


def test_no_points_are_asked_for() -> None:
    """As of the table of few images, whose pairs resolve none of its FMRs."""
    assert Pairs(*clustered(6, 2, 4)).operating([]) == []


def test_what_has_no_pairs_is_told() -> None:
    points, _ = clustered(6, 2, 4)
    with pytest.raises(UserError, match="no two images are of one class"):
        Pairs(points, np.arange(6))
    with pytest.raises(UserError, match="all images are of one class"):
        Pairs(points, np.zeros(6, int))


@pytest.mark.exhaustive
def test_sixty_thousand_images_take_less_than_a_gigabyte() -> None:
    script = """
import numpy as np
from dml.bench.memory import resident
from dml.evaluation.pairs import Pairs
random = np.random.default_rng(0)
labels = random.integers(0, 11316, 60502)
points = random.normal(size=(11316, 128)).astype(np.float32)[labels]
points += random.standard_normal(points.shape, np.float32)
points /= np.linalg.norm(points, axis=1, keepdims=True)
pairs = Pairs(points, labels)
point = pairs.operating([1e-3])[0]
matches = pairs.at(point.threshold)
assert max(abs(matches.fmr - point.fmr), abs(matches.fnmr - point.fnmr)) < 1e-12
matches.intervals()
print(resident("VmHWM"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1


def test_products_beyond_single_precision_are_refused() -> None:
    points = np.random.default_rng(0).normal(size=(6, 4)) * 1e20
    with pytest.raises(UserError, match="exceed single precision: normalise them"):
        Pairs(points, np.arange(6) // 2)


def test_false_matches_that_even_out_over_classes_vary_as_independent_pairs_do() -> None:
    """Where each class has as many false matches as any other, classes would seem to explain less than nothing."""
    false = np.zeros((4, 4))
    false[[0, 1, 2, 3], [1, 0, 3, 2]] = 9
    different = 9 * (1 - np.eye(4))
    found = Matches(np.array([1.0, 0, 2, 1]), np.full(4, 3.0), false, different, 4)
    assert found.fmr == pytest.approx(1 / 3)
    squares = 2 * (9 - 3) ** 2 + 4 * (0 - 3) ** 2  # two pairs of classes match always, and four never
    assert found.intervals()["fmr"] == interval_of_share(found.fmr, (squares * 4 / 3) ** 0.5 / 54, 3)


def test_pairs_at_the_threshold_or_above_match_at_the_rates_that_are_told() -> None:
    """Where thousands tie with the largest similarity that must not match, they do not match."""
    points, labels = coarse(400, 20, 6)
    different, same = held(points, labels)
    found = Pairs(points, labels)
    for point in found.operating([0.5, 0.1, 0.01, 1e-3]):
        assert point.fmr == pytest.approx((different >= point.threshold).mean(), abs=1e-12)
        assert point.fnmr == pytest.approx((same < point.threshold).mean(), abs=1e-12)
        assert found.at(point.threshold).fmr == pytest.approx(point.fmr, abs=1e-12)

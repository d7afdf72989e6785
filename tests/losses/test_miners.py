"""Distance-weighted negatives against the formula of Wu et al. 2017, entry by entry."""

import math
from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from dml.losses.functional import squared_distances
from dml.losses.miners import DistanceWeighted

pytestmark = pytest.mark.usefixtures("one_thread")


def unit(n: int, d: int, spread: float = 1.0, seed: int = 0) -> torch.Tensor:
    centre = torch.zeros(d, dtype=torch.float64)
    centre[0] = 1 / spread
    return F.normalize(centre + torch.randn(n, d, generator=torch.Generator().manual_seed(seed)), dim=-1)


def probabilities(points: torch.Tensor, labels: list[int], anchor: int, cutoff: float, far: float) -> list[float]:
    """Of each image to be drawn as the negative of an anchor, from 1 / q(D)."""
    weights = []
    for i, point in enumerate(points):
        apart = math.dist(points[anchor].tolist(), point.tolist())
        clamped, d = max(apart, cutoff), points.shape[1]
        density = clamped ** (d - 2) * (1 - clamped**2 / 4) ** ((d - 3) / 2)
        weights.append(0.0 if labels[i] == labels[anchor] or apart >= far else 1 / density)
    if sum(weights) == 0:
        weights = [float(label != labels[anchor]) for label in labels]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize(("d", "spread"), [(3, 1.0), (8, 0.3), (32, 0.2), (128, 0.2)])
def test_weights_are_the_formula(d: int, spread: float) -> None:
    points, labels = unit(12, d, spread), torch.arange(12) % 4
    miner = DistanceWeighted(cutoff=0.5, nonzero_loss_cutoff=1.4)
    same = labels[:, None] == labels
    weights = miner.weights(squared_distances(points, points).sqrt(), same, d)
    for anchor in range(12):
        expected = torch.tensor(probabilities(points, labels.tolist(), anchor, 0.5, 1.4), dtype=torch.float64)
        torch.testing.assert_close(weights[anchor] / weights[anchor].sum(), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.slow
def test_negatives_are_drawn_with_these_weights() -> None:
    points, labels = unit(8, 6, 0.5).float(), torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])
    torch.manual_seed(0)
    drawn: Counter[tuple[int, int]] = Counter()
    for _ in range(3000):
        anchors, positives, negatives = DistanceWeighted()(points, labels)
        pairs = set(zip(anchors.tolist(), positives.tolist(), strict=True))
        assert len(pairs) == len(anchors) == 10  # 3 * 2 + 2 + 2: every ordered positive pair once, 7 has none
        drawn.update(zip(anchors.tolist(), negatives.tolist(), strict=True))
    for anchor in range(7):
        total = sum(count for (a, _), count in drawn.items() if a == anchor)
        for image, p in enumerate(probabilities(points.double(), labels.tolist(), anchor, 0.5, 1.4)):
            spread = math.sqrt(total * p * (1 - p))
            assert abs(drawn[anchor, image] - total * p) <= 5 * spread + 1e-9


def test_an_anchor_without_a_near_negative_draws_any() -> None:
    """Two tight groups on opposite sides of the sphere: every negative is farther than 1.4."""
    points = F.normalize(torch.tensor([[1.0, 0.01], [1.0, -0.01], [-1.0, 0.0], [-1.0, 0.02]]), dim=-1)
    labels = torch.tensor([0, 0, 1, 2])
    torch.manual_seed(0)
    negatives = Counter()
    for _ in range(400):
        anchor, positive, negative = DistanceWeighted()(points, labels)
        assert sorted(zip(anchor.tolist(), positive.tolist(), strict=True)) == [(0, 1), (1, 0)]
        negatives.update(negative.tolist())
    assert set(negatives) == {2, 3}
    assert abs(negatives[2] - 400) < 5 * math.sqrt(200)


def test_a_batch_of_one_class_or_without_pairs_has_no_triplets() -> None:
    for labels in (torch.zeros(4, dtype=torch.int64), torch.arange(4)):
        assert [len(part) for part in DistanceWeighted()(unit(4, 3).float(), labels)] == [0, 0, 0]


def test_coinciding_images_are_no_trouble() -> None:
    points = torch.tensor([[1.0, 0.0, 0.0]]).expand(4, 3)
    anchors, _, negatives = DistanceWeighted()(points, torch.tensor([0, 0, 1, 1]))
    assert len(anchors) == 4
    assert ((anchors < 2) != (negatives < 2)).all()

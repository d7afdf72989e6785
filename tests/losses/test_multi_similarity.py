"""Multi-similarity against pytorch-metric-learning and the equations of Wang et al. 2019, in float64."""

import math

import pytest
import pytorch_metric_learning.losses as pml_losses
import pytorch_metric_learning.miners as pml_miners
import torch
from torch import Tensor
from torch.nn import functional as F

from dml.losses import Loss
from dml.losses.miners import DistanceWeighted, MultiSimilarityMiner
from dml.losses.pairwise import MultiSimilarity

pytestmark = pytest.mark.usefixtures("one_thread")

BATCHES = {
    "classes of two": [0, 0, 1, 1, 2, 2, 3, 3],
    "lonely ones": [0, 0, 0, 1, 2, 3, 3, 4],
    "one class": [5, 5, 5, 5],
    "no positives": [0, 1, 2, 3],
    "a pair and a stranger": [0, 0, 1],
    "two": [0, 0],
    "one": [0],
}


def value_and_gradient(loss: torch.nn.Module, raw: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    raw = raw.clone().requires_grad_()
    value = loss(F.normalize(raw, dim=1), labels)
    value.backward()
    assert raw.grad is not None
    return value.detach(), raw.grad


def same(raw: Tensor, labels: Tensor, epsilon: float | None, **options: float) -> Tensor:
    """Compares ours with the library's, with their miners or without; the value."""
    ours = Loss(MultiSimilarity(**options), None if epsilon is None else MultiSimilarityMiner(epsilon))
    miner = None if epsilon is None else pml_miners.MultiSimilarityMiner(epsilon)
    theirs = Loss(pml_losses.MultiSimilarityLoss(**options), miner)
    found = value_and_gradient(ours, raw, labels)
    torch.testing.assert_close(found, value_and_gradient(theirs, raw, labels), rtol=1e-10, atol=1e-10)
    return found[0]


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("epsilon", [None, 0.1, 0.0, -0.2, 0.7])
def test_it_is_the_librarys(kind: str, epsilon: float | None) -> None:
    labels = torch.tensor(BATCHES[kind])
    for seed in range(20):
        raw = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        same(raw, labels, epsilon, alpha=2.0, beta=40.0, base=0.5)
        same(raw + 1, labels, epsilon, alpha=18.0, beta=75.0, base=0.77)


def test_large_batches_of_random_classes() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 12, (40,), generator=generator)
        raw = torch.randn(40, 8, generator=generator, dtype=torch.float64)
        assert same(raw, labels, 0.1, alpha=2.0, beta=40.0, base=0.5) > 0


@pytest.mark.parametrize("epsilon", [None, 0.1, 0.0])
def test_equal_embeddings(epsilon: float | None) -> None:
    """All similarities tie: 1 within the first four and within the last four."""
    raw = torch.eye(2, 3, dtype=torch.float64).repeat_interleave(4, 0)
    for labels in ([0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1], [0] * 8, list(range(8))):
        same(raw, torch.tensor(labels), epsilon, alpha=2.0, beta=40.0, base=0.5)


def test_it_is_the_equations() -> None:
    raw = torch.randn(9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points, labels, total = F.normalize(raw, dim=1).tolist(), [0, 0, 0, 1, 1, 2, 2, 2, 3], 0.0
    for i in range(9):
        s = [_dot(points[i], other) for other in points]
        pos = [s[j] for j in range(9) if j != i and labels[j] == labels[i]]
        neg = [s[j] for j in range(9) if labels[j] != labels[i]]
        hard_pos = [x for x in pos if x < max(neg) + 0.1]  # eq. 12
        hard_neg = [x for x in neg if pos and x > min(pos) - 0.1]  # eq. 11
        total += math.log(1 + sum(math.exp(-2 * (x - 0.5)) for x in hard_pos)) / 2
        total += math.log(1 + sum(math.exp(40 * (x - 0.5)) for x in hard_neg)) / 40
    loss = Loss(MultiSimilarity(), MultiSimilarityMiner())
    value = loss(F.normalize(raw, dim=1), torch.tensor(labels))
    assert value.item() == pytest.approx(total / 9, rel=1e-12)


def _dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", BATCHES)
def test_masks_and_indices_become_each_other(kind: str) -> None:
    """Our miner with the library's loss, and the library's miners with ours, are what they are among themselves."""
    labels = torch.tensor(BATCHES[kind])
    raw = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = MultiSimilarity(), pml_losses.MultiSimilarityLoss(alpha=2, beta=40, base=0.5)
    for mine, other in (
        (Loss(theirs, MultiSimilarityMiner()), Loss(theirs, pml_miners.MultiSimilarityMiner())),
        (Loss(ours, pml_miners.MultiSimilarityMiner()), Loss(ours, MultiSimilarityMiner())),
        (Loss(ours, pml_miners.PairMarginMiner()), Loss(theirs, pml_miners.PairMarginMiner())),
        (Loss(ours, DistanceWeighted()), Loss(theirs, DistanceWeighted())),
    ):
        torch.manual_seed(1)
        found = value_and_gradient(mine, raw, labels)
        torch.manual_seed(1)
        torch.testing.assert_close(found, value_and_gradient(other, raw, labels), rtol=1e-10, atol=1e-10)

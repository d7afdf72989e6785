"""Formulas against slow loops written from the papers' equations, in float64."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from pytorch_metric_learning.losses import RankedListLoss
from torch.nn import functional as F

from dml.losses import functional
from dml.losses.pairwise import SquaredContrastive


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    embeddings = F.normalize(torch.randn(9, 3, 5, generator=generator, dtype=torch.float64), dim=-1)
    return embeddings, torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])


@pytest.mark.parametrize("margin", [0.5, 1.0, 3.0])
def test_contrastive_is_equation_10(batch: tuple[torch.Tensor, torch.Tensor], margin: float) -> None:
    embeddings, labels = batch[0][:, 0], batch[1]
    total = 0.0
    for i in range(9):
        for j in range(9):
            distance = math.dist(embeddings[i].tolist(), embeddings[j].tolist())
            same = labels[i] == labels[j]
            total += distance**2 if same else max(0.0, margin - distance**2)
    assert functional.contrastive(embeddings, labels, margin).item() == pytest.approx(total / 9, rel=1e-12)


@pytest.mark.parametrize("margin", [0.5, 1.0, 3.0])
def test_contrastive_of_drawn_pairs_is_equation_10(batch: tuple[torch.Tensor, torch.Tensor], margin: float) -> None:
    """The same sum over both orders of the pairs (i, i + 4), divided by the 8 images."""
    embeddings, labels = batch[0][:8, 0], torch.tensor([0, 1, 2, 3, 0, 1, 0, 0])
    drawn = {(i, i + 4) for i in range(4)} | {(i + 4, i) for i in range(4)}
    total = 0.0
    for i in range(8):
        for j in range(8):
            distance = math.dist(embeddings[i].tolist(), embeddings[j].tolist())
            same = labels[i] == labels[j]
            total += (distance**2 if same else max(0.0, margin - distance**2)) if (i, j) in drawn else 0.0
    found = SquaredContrastive(margin, pairs="explicit")(embeddings, labels)
    assert found.item() == pytest.approx(total / 8, rel=1e-12)
    assert SquaredContrastive(margin)(embeddings, labels).item() > 2 * found.item()


def test_the_losses_of_diablo(configure: Callable[..., DictConfig]) -> None:
    """As they are configured, against loops over pairs and triplets on cosines; most are active, and not all."""
    centre = torch.tensor([1.0, 0, 0, 0, 0])
    points = F.normalize(0.8 * centre + torch.randn(9, 5, generator=torch.Generator().manual_seed(1)), dim=-1)
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])
    cosine = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in points.tolist()] for x in points.tolist()]
    pairs = [(i, j) for i in range(9) for j in range(9) if i != j]
    positive = [cosine[i][j] for i, j in pairs if labels[i] == labels[j]]
    negative = [cosine[i][j] for i, j in pairs if labels[i] != labels[j]]
    above = [s - 0.5 for s in negative if s > 0.5]
    contrastive = sum((s - 1) ** 2 for s in positive) / len(positive) / 2 + sum(above) / (2 * len(above))
    triplets = [
        cosine[a][n] - cosine[a][p] + 0.1
        for a, p in pairs
        for n in range(9)
        if labels[a] == labels[p] and labels[n] != labels[a]
    ]
    active = [violation for violation in triplets if violation > 0]
    assert 3 < len(above) < len(negative)
    assert 3 < len(active) < len(triplets)
    for name, expected in (("diablo_contrastive", contrastive), ("diablo/triplet", sum(active) / len(active))):
        config = configure(f"loss={name}")
        assert not config.miner
        loss = instantiate(config.loss)
        assert loss(points, labels).item() == pytest.approx(expected, rel=1e-5)


def test_the_triplet_loss_of_dces(configure: Callable[..., DictConfig]) -> None:
    """Eq. 2, as it is configured, against a loop over semi-hard triplets on squared distances."""
    points = F.normalize(torch.randn(12, 3, generator=torch.Generator().manual_seed(2)), dim=-1)
    labels = torch.arange(4).repeat(3)
    squared = [[sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) for y in points.tolist()] for x in points.tolist()]
    violations = [
        squared[a][p] - squared[a][n] + 0.2
        for a, p, n in itertools.product(range(12), repeat=3)
        if a != p and labels[a] == labels[p] and labels[n] != labels[a]
    ]
    semihard = [one for one in violations if 0 < one <= 0.2]
    assert 3 < len(semihard) < len(violations)
    config = configure("loss=dces/triplet")
    loss = instantiate(config.loss, miner=instantiate(config.miner))
    assert loss(points, labels).item() == pytest.approx(sum(semihard) / len(semihard), rel=1e-5)


def test_the_contrastive_loss_of_xbm(configure: Callable[..., DictConfig]) -> None:
    """C1 as it is configured, with and without a memory, against a loop over pairs on cosines (GSP section 1.6.7)."""

    def expected(batch: torch.Tensor, seen: torch.Tensor, labels: torch.Tensor, of_seen: torch.Tensor) -> float:
        total = 0.0
        for i, j in itertools.product(range(len(batch)), range(len(seen))):
            cosine = sum(a * b for a, b in zip(batch[i].tolist(), seen[j].tolist(), strict=True))
            if labels[i] == of_seen[j] and cosine < 1 - 1e-5:  # not an image with itself
                total += 1 - cosine
            elif labels[i] != of_seen[j] and cosine > 0.5:
                total += cosine - 0.5
        return total / len(batch)

    generator = torch.Generator().manual_seed(3)
    batches = [F.normalize(torch.randn(8, 3, generator=generator), dim=-1) for _ in range(3)]
    labels = torch.arange(4).repeat(2)
    alone = instantiate(configure("loss=gsp/c1").loss)
    config = configure("experiment=gsp_cub", "dataset=birds100", "loss=gsp/xbm", "loss.memory_from=1")
    config.loss.loss.update(memory_size=16, embedding_size=3)
    remembered = instantiate(config.loss)
    for step, batch in enumerate(batches):
        of_batch = expected(batch, batch, labels, labels)
        assert alone(batch, labels).item() == pytest.approx(of_batch, rel=1e-5)
        seen = batches[1 : step + 1]  # the first batch came before the memory
        of_memory = expected(batch, torch.cat(seen), labels, labels.repeat(len(seen))) if seen else 0
        assert remembered(batch, labels).item() == pytest.approx(of_batch + of_memory, rel=1e-5)


def test_cosine_contrastive_without_pairs() -> None:
    points = F.normalize(torch.randn(4, 5), dim=-1).requires_grad_()
    value = functional.cosine_contrastive(points, torch.arange(4), 1.0)
    value.backward()
    assert value.item() == 0
    assert points.grad is not None
    assert not points.grad.any()


@pytest.mark.parametrize("margin", [0.5, 1.0, 3.0])
def test_divergence_is_equation_9(batch: tuple[torch.Tensor, torch.Tensor], margin: float) -> None:
    embeddings = batch[0]
    total = 0.0
    for i in range(9):
        for p in range(3):
            for q in range(3):
                distance = math.dist(embeddings[i, p].tolist(), embeddings[i, q].tolist())
                total += max(0.0, margin - distance**2) if p != q else 0.0
    assert functional.divergence(embeddings, margin).item() == pytest.approx(total / 9, rel=1e-12)


def test_learners_that_are_alike_do_not_break_their_repulsion() -> None:
    alike = F.normalize(torch.ones(2, 3, 4), dim=-1).requires_grad_()
    value = functional.repulsion(alike)
    value.backward()
    assert value.item() == 3 * 2**2 / 2
    assert alike.grad is not None
    assert not alike.grad.any()


def test_divergence_of_one_learner_is_zero(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert functional.divergence(batch[0][:, :1]).item() == 0


def test_binomial_deviance_is_its_formula(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    embeddings, labels = batch[0][:, 0], batch[1]
    positive, negative = [], []
    for i in range(9):
        for j in range(9):
            s = sum(a * b for a, b in zip(embeddings[i].tolist(), embeddings[j].tolist(), strict=True))
            if i != j and labels[i] == labels[j]:
                positive.append(math.log(1 + math.exp(-2 * (s - 0.5))))
            elif labels[i] != labels[j]:
                negative.append(math.log(1 + math.exp(2 * 25 * (s - 0.5))))
    expected = sum(positive) / len(positive) + sum(negative) / len(negative)
    assert functional.binomial_deviance(embeddings, labels).item() == pytest.approx(expected, rel=1e-12)


def test_binomial_deviance_without_positives_counts_the_negatives_alone() -> None:
    embeddings = F.normalize(torch.randn(4, 3, dtype=torch.float64), dim=-1)
    assert torch.isfinite(functional.binomial_deviance(embeddings, torch.arange(4)))


def test_instance_is_its_loop(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Labels in any order; the first image of each class stands for it."""
    points, labels = batch[0][:, 0], torch.tensor([7, 2, 7, 4, 2, 2, 9, 4, 7])
    first = {7: 0, 2: 1, 4: 3, 9: 6}
    lost = []
    for i in range(9):
        if first[int(labels[i])] != i:
            logits = torch.stack([10 * points[i] @ points[j] for j in first.values()])
            lost.append(logits.logsumexp(0) - logits[list(first).index(int(labels[i]))])
    expected = torch.stack(lost).mean()
    torch.testing.assert_close(functional.instance(points, labels, 10.0), expected, rtol=1e-12, atol=0)
    assert functional.instance(points, torch.arange(9)).item() == 0


@pytest.mark.parametrize("temperatures", [(0.0, 10.0), (2.0, 3.0)])
def test_ranked_list_is_its_loop(batch: tuple[torch.Tensor, torch.Tensor], temperatures: tuple[float, float]) -> None:
    points, labels, total = batch[0][:, 0], batch[1].tolist(), 0.0
    for i in range(9):
        apart = [math.dist(points[i].tolist(), other.tolist()) for other in points]
        positive = [apart[j] - 0.8 for j in range(9) if j != i and labels[j] == labels[i] and apart[j] > 0.8]
        negative = [1.2 - apart[j] for j in range(9) if labels[j] != labels[i] and apart[j] < 1.2]
        for share, over, temperature in zip((0.3, 0.7), (positive, negative), temperatures, strict=True):
            weights = [math.exp(temperature * x) for x in over]
            total += share * sum(w * x for w, x in zip(weights, over, strict=True)) / (sum(weights) or 1)
    found = functional.ranked_list(points, batch[1], temperatures=temperatures, imbalance=0.7)
    assert found.item() == pytest.approx(total / 9, rel=1e-9)
    if temperatures[1] < 5:  # else the library warns
        library = RankedListLoss(margin=0.4, Tn=3.0, Tp=2.0, alpha=1.2, imbalance=0.7)
        assert library(points, batch[1]).item() == pytest.approx(found.item(), rel=1e-3)


def test_ranked_list_of_coinciding_images() -> None:
    points = torch.eye(3)[[0, 0, 0, 0]].requires_grad_()  # at distances of exactly 0
    functional.ranked_list(points, torch.tensor([0, 0, 1, 1])).backward()
    assert points.grad is not None
    assert points.grad.isfinite().all()


@pytest.mark.parametrize(
    "loss",
    [
        lambda e: functional.contrastive(e[:, 0], torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])),
        lambda e: functional.contrastive_of_pairs(e[:8, 0], torch.tensor([0, 1, 2, 3, 0, 1, 0, 0])),
        lambda e: functional.divergence(e, 1.3),
        functional.repulsion,
        lambda e: functional.binomial_deviance(e[:, 0], torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])),
        lambda e: functional.instance(e[:, 0], torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3]), 8.0),
        lambda e: functional.ranked_list(e[:, 0], torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])),
    ],
)
def test_gradients(batch: tuple[torch.Tensor, torch.Tensor], loss: object) -> None:
    raw = batch[0].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(F.normalize(x, dim=-1)), raw)


def test_gradient_at_distance_zero_is_finite() -> None:
    raw = torch.ones(4, 2, 3, dtype=torch.float64, requires_grad=True)
    embeddings = F.normalize(raw, dim=-1)
    loss = functional.contrastive(embeddings[:, 0], torch.tensor([0, 0, 1, 1])) + functional.divergence(embeddings)
    loss.backward()
    assert torch.isfinite(raw.grad).all()

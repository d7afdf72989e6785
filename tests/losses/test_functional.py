"""Formulas against slow loops written from the papers' equations, in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
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
    for name, expected in (("contrastive", contrastive), ("triplet", sum(active) / len(active))):
        loss = instantiate(configure(f"loss=diablo_{name}").loss)
        assert loss(points, labels).item() == pytest.approx(expected, rel=1e-5)


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


@pytest.mark.parametrize(
    "loss",
    [
        lambda e: functional.contrastive(e[:, 0], torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])),
        lambda e: functional.contrastive_of_pairs(e[:8, 0], torch.tensor([0, 1, 2, 3, 0, 1, 0, 0])),
        lambda e: functional.divergence(e, 1.3),
        lambda e: functional.binomial_deviance(e[:, 0], torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])),
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

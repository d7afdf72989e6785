"""Losses on angles: the library's, and finite where vectors coincide."""

import pytest
import torch
from pytorch_metric_learning import losses
from torch import Tensor
from torch.nn import functional as F

from dml.losses.pairwise import TupletMargin

pytestmark = pytest.mark.usefixtures("one_thread")


def value_and_gradient(loss: torch.nn.Module, points: Tensor, labels: Tensor) -> Tensor:
    points = points.clone().requires_grad_()
    value = loss(points, labels)
    value.backward()
    assert points.grad is not None
    return torch.cat([value.detach()[None], points.grad.flatten()])


def test_tuplet_margin_is_the_librarys() -> None:
    points = F.normalize(torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=1)
    labels = torch.arange(4).repeat(3)
    expected = value_and_gradient(losses.TupletMarginLoss(), points, labels)
    torch.testing.assert_close(value_and_gradient(TupletMargin(), points, labels), expected)


@pytest.mark.parametrize("vectors", [([1.0, 2.0, 3.0], [3.0, 1.0, 2.0]), ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])], ids=str)
def test_coinciding_images(vectors: tuple[list[float], list[float]]) -> None:
    """Their cosine is 1, or larger by rounding."""
    points = F.normalize(torch.tensor([vectors[0]] * 3 + [vectors[1]] * 3), dim=1)
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    assert not value_and_gradient(losses.TupletMarginLoss(), points, labels).isfinite().all()  # else this says nothing
    assert value_and_gradient(TupletMargin(), points, labels).isfinite().all()
    assert TupletMargin()(points, torch.zeros_like(labels)) == 0  # no negatives


@pytest.mark.parametrize("kind", [losses.ArcFaceLoss, losses.SubCenterArcFaceLoss])
@pytest.mark.parametrize("vector", [[1.0, 0.0, 0.0], [1.0, 2.0, 3.0], [3.0, 4.0, 0.0]])
def test_an_image_that_is_its_classes_vector(kind: type[torch.nn.Module], vector: list[float]) -> None:
    """The library's own clamp sees to it."""
    point = F.normalize(torch.tensor([vector]), dim=1)
    loss = kind(num_classes=2, embedding_size=3, scale=4)
    assert isinstance(loss.W, Tensor)
    loss.W.data = point.T.repeat(1, loss.W.shape[1])
    assert value_and_gradient(loss, point, torch.tensor([0])).isfinite().all()

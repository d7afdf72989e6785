"""Smoothed retrieval metrics against loops over queries and ranks, in float64, with their gradients."""

from collections.abc import Callable

import pytest
import torch
from pytorch_metric_learning.losses import SmoothAPLoss
from torch import Tensor
from torch.nn import functional as F

from dml.losses.ranking import recall_at_k, smooth_ap

pytestmark = pytest.mark.usefixtures("one_thread")

BATCHES = ([0, 0, 0, 1, 1, 2, 2, 2, 3], [2, 0, 1, 0, 2, 2, 1, 0, 3], [0, 0, 0, 0], [0, 1])


def value_and_gradient(loss: Callable[[Tensor, Tensor], Tensor], raw: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    raw = raw.clone().requires_grad_()
    value = loss(F.normalize(raw, dim=1), labels)
    (gradient,) = torch.autograd.grad(value, raw)
    return value.detach(), gradient


def looped_ap(points: Tensor, labels: Tensor, temperature: float) -> Tensor:
    total, count = points.new_zeros(()), len(labels)
    for q in range(count):
        s = [points[q] @ other for other in points]
        mine = [j for j in range(count) if labels[j] == labels[q]]
        precision = points.new_zeros(())
        for i in mine:
            within = 1 + sum(torch.sigmoid((s[j] - s[i]) / temperature) for j in mine if j != i)
            among_all = 1 + sum(torch.sigmoid((s[j] - s[i]) / temperature) for j in range(count) if j != i)
            precision = precision + within / among_all
        total = total + 1 - precision / len(mine)
    return total / count


def looped_recall(points: Tensor, labels: Tensor, ks: tuple[int, ...], temperature: float, of_k: float) -> Tensor:
    lost, asked = points.new_zeros(()), 0
    for q in range(len(labels)):
        s = [points[q] @ other for other in points]
        others = [j for j in range(len(labels)) if j != q]
        positives = [j for j in others if labels[j] == labels[q]]
        asked += bool(positives)
        for k in ks if positives else ():
            found = points.new_zeros(())
            for x in positives:
                rank = 1 + sum(torch.sigmoid((s[z] - s[x]) / temperature) for z in others if z != x)
                found = found + torch.sigmoid((k - rank) / of_k)
            if found > k:
                found = points.new_tensor(float(k))
            lost = lost + (1 - found / min(k, len(positives))) / len(ks)
    return lost / max(asked, 1) + 0 * points.sum()


@pytest.mark.parametrize("labels", BATCHES, ids=str)
@pytest.mark.parametrize("temperature", [0.01, 0.3])
def test_smooth_ap_is_its_loop(labels: list[int], temperature: float) -> None:
    raw = torch.randn(len(labels), 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = value_and_gradient(lambda e, y: smooth_ap(e, y, temperature), raw, torch.tensor(labels))
    expected = value_and_gradient(lambda e, y: looped_ap(e, y, temperature), raw, torch.tensor(labels))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_smooth_ap_is_the_librarys_where_that_takes_the_batch() -> None:
    labels = torch.arange(4).repeat_interleave(4)
    raw = torch.randn(16, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = value_and_gradient(lambda e, y: smooth_ap(e, y, 0.05), raw, labels)
    value, gradient = value_and_gradient(SmoothAPLoss(temperature=0.05), raw, labels)
    # The library counts in float32 in part.
    torch.testing.assert_close(found, (value.double(), gradient), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("labels", BATCHES, ids=str)
@pytest.mark.parametrize(("temperature", "of_k"), [(0.01, 1.0), (0.3, 0.2), (0.1, 5.0)])
def test_recall_at_k_is_its_loop(labels: list[int], temperature: float, of_k: float) -> None:
    """Also where recall is more than all that can be found among k, and where no image has a positive."""
    ks, truth = (1, 2, 4, 16), torch.tensor(labels)
    raw = torch.randn(len(labels), 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = value_and_gradient(lambda e, y: recall_at_k(e, y, ks, temperature, of_k), raw, truth)
    expected = value_and_gradient(lambda e, y: looped_recall(e, y, ks, temperature, of_k), raw, truth)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_sharp_recall_is_recall() -> None:
    points = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.3], [1.0, 0.35]], dtype=torch.float64), dim=1)
    value = recall_at_k(points, torch.tensor([0, 1, 0, 1]), (1, 2), 1e-5, 1e-2)
    ranks = [2, 3, 3, 2]  # of the other of each image's class; one at k itself is half in
    expected = sum(1 - (0.5 if rank == k else float(rank < k)) for rank in ranks for k in (1, 2)) / 8
    assert value.item() == pytest.approx(expected, abs=1e-6)


def test_a_training_step_raises_the_metric() -> None:
    labels = torch.arange(6).repeat_interleave(4)
    for loss in (smooth_ap, recall_at_k):
        raw = torch.randn(24, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        optimizer = torch.optim.Adam([raw], 0.05)
        values = []
        for _ in range(60):
            value = loss(F.normalize(raw, dim=1), labels)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            values.append(value.item())
        assert values[-1] < 0.6 * values[0]

"""Poolings against plain NumPy; the head's contract."""

import numpy as np
import pytest
import torch

from dml.errors import UserError
from dml.models.heads import Head, LocalHead
from dml.models.poolings.means import AvgMaxPool, GeneralizedMeanPool, MaxPool


@pytest.fixture
def features() -> torch.Tensor:
    return torch.rand(2, 5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_avg_max_is_the_sum_of_both(features: torch.Tensor) -> None:
    array = features.numpy().reshape(2, 5, -1)
    np.testing.assert_allclose(AvgMaxPool()(features).numpy()[..., 0, 0], array.mean(-1) + array.max(-1), rtol=1e-12)


def test_max_is_that_of_pytorch(features: torch.Tensor) -> None:
    """Its gradient too; PyTorch's own is not deterministic on a GPU."""
    found, other = features.clone().requires_grad_(), features.clone().requires_grad_()
    pooled, expected = MaxPool()(found), torch.nn.functional.adaptive_max_pool2d(other, 1)
    torch.testing.assert_close(pooled, expected, rtol=0, atol=0)
    pooled.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(found.grad, other.grad, rtol=0, atol=0)


@pytest.mark.parametrize("p", [1.0, 3.0, 4.5])
def test_generalised_mean_is_its_formula(features: torch.Tensor, p: float) -> None:
    array = features.numpy().reshape(2, 5, -1)
    pooled = GeneralizedMeanPool(p).double()(features)[..., 0, 0]
    np.testing.assert_allclose(pooled.detach().numpy(), (array**p).mean(-1) ** (1 / p), rtol=1e-12)


def test_generalised_mean_approaches_the_maximum(features: torch.Tensor) -> None:
    pooled = GeneralizedMeanPool(400.0).double()(features)[..., 0, 0]
    torch.testing.assert_close(pooled, features.amax((2, 3)), rtol=0.02, atol=0)


@pytest.mark.parametrize("p", [3.0, 8.0, 30.0])
def test_generalised_mean_of_a_channel_without_any_activation(p: float) -> None:
    """In float32, where 1e-6 ** 8 is 0: values and gradients are those of double precision."""
    features = torch.rand(2, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    features[0, 1] = 0
    found = []
    for kind in (torch.float32, torch.float64):
        pool = GeneralizedMeanPool(p).to(kind)
        seen = features.to(kind, copy=True).requires_grad_()
        pooled = pool(seen)
        pooled.sum().backward()
        found.append([one.double() for one in (pooled.detach(), pool.p.grad, seen.grad)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-7)
    assert found[1][0][0, 1].item() == pytest.approx(1e-6)


def test_generalised_mean_learns_p(features: torch.Tensor) -> None:
    pool = GeneralizedMeanPool().double()
    pool(features.requires_grad_()).sum().backward()
    assert pool.p.grad is not None
    assert pool.p.grad.abs() > 0
    assert torch.isfinite(features.grad).all()


def test_the_layer_starts_at_glorot_s_scale() -> None:
    """Uniform up to sqrt(6 / (fan_in + fan_out)), and without a bias (ABE section 4)."""
    layer = Head(torch.nn.AdaptiveAvgPool2d(1), in_channels=200, dim=40).projection
    bound = (6 / 240) ** 0.5
    assert 0.98 * bound < layer.weight.abs().max() <= bound
    assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
    assert not layer.bias.any()


def test_head_shapes() -> None:
    head = Head(torch.nn.AdaptiveAvgPool2d(1), in_channels=5, dim=7)
    assert head.dim == 7
    assert head(torch.rand(3, 5, 2, 2)).shape == (3, 7)


def test_a_pooling_without_prototypes_takes_none() -> None:
    with pytest.raises(UserError, match=r"head\.prototypes=8: AdaptiveAvgPool2d has no prototypes"):
        LocalHead(torch.nn.AdaptiveAvgPool2d(1), 16, 24, prototypes=8)

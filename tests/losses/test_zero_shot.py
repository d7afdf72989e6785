"""Cross-batch zero-shot prediction against closed forms and a loop."""

from typing import Literal

import numpy as np
import pytest
import torch

from dml.losses.zero_shot import ZeroShotPrediction, class_halves, ridge_prediction

pytestmark = pytest.mark.usefixtures("one_thread")


def test_ridge_prediction_is_the_closed_form() -> None:
    """P3's minimum in the primal form, `A = Y Z (Z Z^T + ridge I)^-1`, in NumPy."""
    rng = np.random.default_rng(0)
    z, y, queries = rng.random((12, 5)), rng.normal(size=(12, 3)), rng.random((4, 5))
    a = y.T @ z @ np.linalg.inv(z.T @ z + 0.05 * np.eye(5))
    rows, targets = np.concatenate([queries, z]), np.concatenate([np.full((4, 3), np.nan), y])
    known = torch.arange(16) >= 4
    found = ridge_prediction(torch.as_tensor(rows), torch.as_tensor(targets), torch.stack([known, known]), 0.05)
    for one in found.numpy():
        np.testing.assert_allclose(one, rows @ a.T, rtol=1e-9)


def test_ridge_prediction_of_half_precision_is_in_single() -> None:
    z = torch.rand(6, 4).bfloat16()
    assert ridge_prediction(z, torch.rand(6, 3), torch.arange(6) < 3, 0.05).dtype == torch.float32


@pytest.mark.parametrize("classes", [2, 3, 5, 8])
@pytest.mark.parametrize("order", ["sorted", "shuffled", "alternating"])
def test_halves_share_no_class(classes: int, order: str) -> None:
    labels = torch.arange(classes).repeat_interleave(4) + 7
    if order == "shuffled":
        labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    elif order == "alternating":
        labels = torch.arange(classes).repeat(4)
    firsts = set()
    for seed in range(40):
        torch.manual_seed(seed)
        half = class_halves(labels)
        one, other = set(labels[half].tolist()), set(labels[~half].tolist())
        assert not one & other
        assert len(one) == classes // 2
        assert len(one | other) == classes
        firsts.add(frozenset(one))
    assert len(firsts) > 1  # random ones


def test_all_halves_are_drawn_alike() -> None:
    torch.manual_seed(0)
    labels = torch.tensor([9, 2, 2, 4, 9, 9, 9, 9, 7, 4])
    drawn = [frozenset(labels[class_halves(labels)].tolist()) for _ in range(1200)]
    counts = {half: drawn.count(half) for half in set(drawn)}
    assert len(counts) == 6  # of four classes two
    assert all(150 < count < 250 for count in counts.values())


def test_a_batch_of_one_class_has_nothing_to_predict() -> None:
    loss = ZeroShotPrediction(classes=6, width=4)
    attributes = torch.rand(3, 5, requires_grad=True)
    value = loss(attributes, torch.tensor([3, 3, 3]))
    value.backward()
    assert value.item() == 0
    assert all(not torch.any(x.grad) for x in (attributes, loss.embeddings))


def test_the_loss_is_its_loop() -> None:
    torch.manual_seed(0)
    loss = ZeroShotPrediction(classes=6, width=4, ridge=0.05, logit_scale=2.0).double()
    attributes, labels = torch.rand(10, 3, dtype=torch.double), torch.tensor([0, 2, 5, 0, 2, 5, 4, 4, 0, 4])
    torch.manual_seed(5)
    value = loss(attributes, labels)
    torch.manual_seed(5)
    first = class_halves(labels)
    upsilon, total = loss.embeddings.detach().numpy(), 0.0
    for known in (first.numpy(), ~first.numpy()):
        z, y = attributes.numpy()[known], upsilon[labels.numpy()[known]]
        a = y.T @ np.linalg.inv(z @ z.T + 0.05 * np.eye(len(z))) @ z  # Algorithm 4
        terms = []
        for zi, label in zip(attributes.numpy()[~known], labels.numpy()[~known], strict=True):
            scores = 2.0 * upsilon @ (a @ zi)
            terms.append(np.log(1 + sum(np.exp(scores[j] - scores[label]) for j in range(6) if j != label)))
        total += np.mean(terms) / 2
    assert value.item() == pytest.approx(total, rel=1e-10)


@pytest.mark.parametrize(("how", "over"), [("fan_in", 32), ("fan_out", 2000)])
def test_class_embeddings_start_at_he_s_scale(how: Literal["fan_in", "fan_out"], over: int) -> None:
    torch.manual_seed(0)
    loss = ZeroShotPrediction(classes=2000, width=32, class_init=how)
    assert loss.embeddings.std().item() == pytest.approx((2 / over) ** 0.5, rel=0.02)


def test_gradients() -> None:
    torch.manual_seed(0)
    loss = ZeroShotPrediction(classes=4, width=3).double()
    attributes = torch.rand(8, 5, dtype=torch.double, requires_grad=True)
    labels = torch.arange(4).repeat(2)

    def value(z: torch.Tensor, upsilon: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return torch.func.functional_call(loss, {"embeddings": upsilon}, (z, labels))

    assert torch.autograd.gradcheck(value, (attributes, loss.embeddings.detach().requires_grad_()))

"""Each pooling against its paper's formula, written out."""

import math

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import functional as F

from dml.configuration.composition import CONF
from dml.errors import UserError
from dml.models.heads import Head, LocalHead
from dml.models.poolings.attention import CBAM, SOLAR, DeLF, GSoP
from dml.models.poolings.means import GeneralizedMaxPool, GeneralizedMeanPool, Weldon
from dml.models.poolings.prototypes import VLAD, TransportPool
from dml.models.poolings.saliency import CroW, TrainableSMK
from dml.models.poolings.transformer import TransformerPool

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def maps() -> Tensor:
    """`[2,4,3,5]`, of both signs."""
    return torch.randn(2, 4, 3, 5, dtype=torch.double, generator=torch.Generator().manual_seed(0))


def seeded(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module.double()


def test_weldon(maps: Tensor) -> None:
    cells = np.sort(maps.flatten(2).numpy(), axis=-1)
    torch.testing.assert_close(Weldon(2)(maps), torch.as_tensor(cells[..., -2:].mean(-1) + cells[..., :2].mean(-1)))
    torch.testing.assert_close(Weldon(1)(maps), maps.amax((2, 3)) + maps.amin((2, 3)))
    torch.testing.assert_close(Weldon(99)(maps), 2 * maps.mean((2, 3)))  # more than there are: both means are of all


def test_gemax_has_even_products(maps: Tensor) -> None:
    """Eq. 6 by its normal equations in the primal form; without a penalty all products are one."""
    cells = maps.flatten(2)
    for ridge in (0.1, 1.0):
        for found, F_ in zip(GeneralizedMaxPool(ridge)(maps), cells, strict=True):
            primal = torch.linalg.solve(F_ @ F_.T + ridge * torch.eye(4).double(), F_ @ torch.ones(15).double())
            torch.testing.assert_close(found, primal)
    few = maps[..., :1, :3]  # fewer locations than dimensions
    products = torch.einsum("bc,bcn->bn", GeneralizedMaxPool(1e-9)(few), few.flatten(2))
    torch.testing.assert_close(products, torch.ones_like(products), rtol=1e-6, atol=1e-6)
    towards = F.cosine_similarity(GeneralizedMaxPool(1e6)(maps), maps.sum((2, 3)))
    assert (towards > 0.999).all()


def test_crow(maps: Tensor) -> None:
    pooled = CroW(eps=0.0)(maps)
    for image, found in zip(maps.clamp(min=0).numpy(), pooled, strict=True):
        space = image.sum(0)
        space = np.sqrt(space / np.sqrt((space**2).sum()))
        share = (image > 0).mean((1, 2))
        assert (share > 0).all()
        wanted = np.log(share.sum() / share) * (image * space).sum((1, 2))
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-10)


def test_crow_of_a_blank_image_has_a_gradient() -> None:
    blank = torch.zeros(1, 4, 3, 3, requires_grad=True)
    CroW()(blank).sum().backward()
    assert blank.grad is not None
    assert torch.isfinite(blank.grad).all()


def test_smk(maps: Tensor) -> None:
    pooled = TrainableSMK()(maps)
    for image, found in zip(maps.numpy(), pooled, strict=True):
        total = np.zeros(4)
        for y in range(3):
            for x in range(5):
                around = image[:, max(0, y - 1) : y + 2, max(0, x - 1) : x + 2].mean((1, 2))
                total += np.linalg.norm(image[:, y, x]) * around
        np.testing.assert_allclose(found.numpy(), total / 15, rtol=1e-10)


def test_cbam(maps: Tensor) -> None:
    pool = seeded(CBAM(4, reduction=2))
    one, two = pool.channels[0], pool.channels[2]

    def perceptron(x: Tensor) -> Tensor:
        return F.relu(x @ one.weight.T + one.bias) @ two.weight.T + two.bias

    weights = torch.sigmoid(perceptron(maps.mean((2, 3))) + perceptron(maps.amax((2, 3))))
    weighted = maps * weights[..., None, None]
    space = torch.sigmoid(pool.space(torch.cat([weighted.mean(1, True), weighted.amax(1, True)], 1)))
    torch.testing.assert_close(pool(maps), (weighted * space).flatten(2).mean(-1))


def test_delf(maps: Tensor) -> None:
    pool = seeded(DeLF(4, hidden=6))
    first, second = pool.score[0], pool.score[2]
    total = torch.zeros(2, 4, dtype=torch.double)
    for b in range(2):
        for y in range(3):
            for x in range(5):
                f = maps[b, :, y, x]
                score = second.weight.flatten() @ F.relu(first.weight.flatten(1) @ f + first.bias) + second.bias
                total[b] += torch.log(1 + torch.exp(score)) * f / 15
    torch.testing.assert_close(pool(maps), total)


def test_gsop(maps: Tensor) -> None:
    pool = seeded(GSoP(4, reduced=3)).eval()
    cells = pool.reduce(maps).flatten(2)
    for b in range(2):
        covariance = torch.as_tensor(np.cov(cells[b].detach().numpy(), bias=True))
        rows = [
            covariance[r] @ pool.rows.weight[4 * r + i, 0] + pool.rows.bias[4 * r + i]
            for r in range(3)
            for i in range(4)
        ]
        weights = torch.sigmoid(pool.excite(F.leaky_relu(torch.stack(rows), 0.1)))
        torch.testing.assert_close(pool(maps)[b], maps[b].mean((1, 2)) * weights)


def test_solar(maps: Tensor) -> None:
    pool = SOLAR(4, reduction=2).double()
    torch.testing.assert_close(pool(maps), GeneralizedMeanPool().double()(maps))  # where training starts
    seeded(pool)
    pool.pool.p.data.fill_(2.0)
    attended = torch.empty_like(maps)
    for b in range(2):
        q, k, v = (layer(maps)[b].flatten(1) for layer in (pool.query, pool.key, pool.value))
        z = torch.softmax(q.T @ k / math.sqrt(2), dim=1)
        attended[b] = maps[b] + pool.out((v @ z.T).view(1, 2, 3, 5))[0]
    wanted = attended.clamp(min=1e-6).square().mean((2, 3)).sqrt()
    torch.testing.assert_close(pool(maps)[..., 0, 0], wanted)


def test_transformer(maps: Tensor) -> None:
    pool = TransformerPool(4, layers=2, heads=2).double()
    pooled = pool(maps)
    assert pooled.shape == (2, 4)
    torch.testing.assert_close(pool(maps[:1]), pooled[:1])  # images do not see one another
    assert not torch.allclose(pool(maps.flip(3)), pooled)  # places are told
    with torch.no_grad():  # layers that add nothing leave the token, normalised
        for layer in pool.layers.layers:
            for last in (layer.self_attn.out_proj, layer.linear2):
                last.weight.zero_()
                last.bias.zero_()
    torch.testing.assert_close(pool(maps)[0], F.layer_norm(pool.token[0, 0], (4,)))
    firsts = [layer.linear1.weight for layer in TransformerPool(4, layers=2, heads=2).layers.layers]
    assert not torch.equal(*firsts)


def test_vlad_is_its_sum_over_residuals(maps: Tensor) -> None:
    pool = seeded(VLAD(4, prototypes=3))
    for b in range(2):
        sums = torch.zeros(3, 4, dtype=torch.double)
        for f in maps[b].flatten(1).T:
            scores = torch.stack([pool.assign.weight[k] @ f + pool.assign.bias[k] for k in range(3)])
            share = torch.exp(scores) / torch.exp(scores).sum()
            for k in range(3):
                sums[k] += share[k] * (f - pool.prototypes[k])
        wanted = torch.cat([row / row.norm() for row in sums])
        torch.testing.assert_close(pool(maps)[b], wanted)


def test_vlads_assignment_starts_as_that_of_distances(maps: Tensor) -> None:
    pool = VLAD(4, prototypes=3, alpha=2.0).double()
    cells = maps.flatten(2).transpose(1, 2)
    squares = torch.cdist(cells, pool.prototypes.expand(2, -1, -1)).square()
    torch.testing.assert_close(pool.assign(cells).softmax(-1), (-2.0 * squares).softmax(-1))


def test_transport_pool_is_barycentric(maps: Tensor) -> None:
    """GSP eq. B.1, and what it remarks: the parts sum up to the average."""
    pool = TransportPool(4, prototypes=3, iterations=500).double()
    plan = pool.plan(maps.flatten(2).transpose(1, 2))
    torch.testing.assert_close(plan.sum(1), torch.full((2, 15), 1 / 15, dtype=torch.double))
    torch.testing.assert_close(plan.sum(2), torch.full((2, 3), 1 / 3, dtype=torch.double))
    # A plan with entropy is a product of what depends on the row, on the column, and exp(-eps c).
    costs = torch.cdist(pool.prototypes.expand(2, -1, -1), maps.flatten(2).transpose(1, 2))
    rest = plan.log() + pool.eps * costs
    mixed = rest - rest.mean(1, keepdim=True) - rest.mean(2, keepdim=True) + rest.mean((1, 2), keepdim=True)
    assert mixed.abs().max() < 1e-6
    parts = pool(maps).view(2, 3, 4)
    torch.testing.assert_close(parts.sum(1) / math.sqrt(3), maps.mean((2, 3)))
    torch.testing.assert_close(parts[0, 1], math.sqrt(3) * (plan[0, 1] * maps[0].flatten(1)).sum(1))


HEADS = ["avg", "max", "avg_max", "gem", "cbam", "crow", "delf", "gemax", "gsop", "gsp", "otp", "smk", "solar"]


@pytest.mark.parametrize("name", [*HEADS, "transformer", "vlad", "weldon"])
def test_every_head_of_conf(name: str) -> None:
    """A learner of the width asked for, from maps of any size, with gradients everywhere, under bf16 too."""
    torch.manual_seed(0)
    head = instantiate(OmegaConf.load(CONF / "head" / f"{name}.yaml"), in_channels=6, dim=16)
    assert isinstance(head, Head)
    assert head.dim == 16
    head.eval()(torch.rand(2, 6, 3, 5))
    features = torch.rand(8, 6, 4, 4, requires_grad=True)
    pooled = head.train()(features)
    assert pooled.shape == (8, 16)
    pooled.square().sum().backward()
    assert features.grad is not None
    assert torch.isfinite(features.grad).all()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in head.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.isfinite(head(torch.rand(2, 6, 4, 4))).all()


def test_local_average_is_the_average(maps: Tensor) -> None:
    """A linear layer and a mean can change places."""
    torch.manual_seed(0)
    late = Head(torch.nn.AdaptiveAvgPool2d(1), 4, 3).double()
    local = LocalHead(torch.nn.AdaptiveAvgPool2d(1), 4, 3).double()
    local.load_state_dict(late.state_dict())
    torch.testing.assert_close(local(maps), late(maps))


def test_prototypes_share_the_width() -> None:
    head = LocalHead(VLAD, 6, 16, prototypes=8)
    assert head.projection.out_features == 2
    assert head(torch.rand(3, 6, 2, 2)).shape == (3, 16)
    with pytest.raises(UserError, match=r"head\.dim=16.*5 prototypes"):
        LocalHead(VLAD, 6, 16, prototypes=5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SOLAR(4, 8), "reduction=8"),
        (lambda: TransformerPool(6, 1, 4), "heads=4"),
    ],
)
def test_options_out_of_range(make: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()

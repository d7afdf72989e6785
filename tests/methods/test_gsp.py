"""GSP: its pooling as a head, and the method that adds the zero-shot loss."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.nn import functional as F

from dml.errors import UserError
from dml.methods.base import Method
from dml.methods.gsp import GSP
from dml.models.gsp import GeneralizedSumPool, GSPHead, k_centres
from dml.models.transport import transport_plan
from dml.runs.folder import RunFolder
from dml.runs.log import read_metrics
from dml.training import run as train
from dml.training.rebuild import load_method
from tests.conftest import TINY, loss_of, objective_of

Configure = Callable[..., DictConfig]
SMALL = [*TINY, "method=gsp", "head.m=6", "protocol.every=100", "protocol.clustering=false"]


def maps(batch: int = 2, dim: int = 4, kind: torch.dtype = torch.double) -> Tensor:
    return 2 * torch.randn(batch, dim, 3, 5, dtype=kind, generator=torch.Generator().manual_seed(0))


# The pooling.


@pytest.mark.parametrize("then", ["sum", "gemean"])
def test_it_is_algorithm_2(then: str) -> None:
    torch.manual_seed(0)
    pool = GeneralizedSumPool(4, m=3, mu=0.4, eps=6.0, then=then).double()
    with torch.no_grad():
        pool.prototypes[0] *= 3  # one longer than 1, and one shorter
        pool.prototypes[1] *= 0.5
    pooled, attributes = pool(maps(), attributes=True)
    assert attributes is not None
    for image, found, shares in zip(maps(), pooled, attributes, strict=True):
        cells = image.flatten(1).T
        cost = torch.empty(3, 15, dtype=torch.double)
        for i, w in enumerate(pool.prototypes):
            for j, f in enumerate(cells):
                cost[i, j] = (w / max(1, w.norm()) - f / max(1, f.norm())).norm()
        rho, plan = transport_plan(cost, 0.4, 6.0)
        weighted = ((1 - 15 * rho) / 0.4)[:, None] * cells
        wanted = {
            "sum": weighted.mean(0),
            "gemean": (weighted.clamp(min=1e-6) ** 3).mean(0) ** (1 / 3),
        }[then]
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(shares, plan.sum(1) / 0.4)
    torch.testing.assert_close(attributes.sum(1), torch.ones(2, dtype=attributes.dtype))


@pytest.mark.parametrize("attributes", [False, True])
def test_the_maximum_of_the_features_is_added(attributes: bool) -> None:
    """GMP+GSP: both parts are embedded by one linear layer."""
    torch.manual_seed(0)
    head = GSPHead(7, 4, m=3, add_max=True).double()
    features = torch.randn(2, 7, 3, 5, dtype=torch.double)
    found = head(features, attributes)
    weights, plan = head.pooling.transport(head.locals(features))
    for i, image in enumerate(features.flatten(2)):
        local = image.T @ head.projection.weight.T + head.projection.bias
        largest = image.max(1).values @ head.projection.weight.T + head.projection.bias
        wanted = (weights[i][:, None] * local).mean(0) + largest
        torch.testing.assert_close((found[0] if attributes else found)[i], wanted)
    if attributes:
        torch.testing.assert_close(found[1], plan.sum(-1) / head.pooling.mu)


@pytest.mark.parametrize("solver", ["newton", "fixed_point"])
def test_all_of_the_image_is_the_average(solver: str) -> None:
    pooled = GeneralizedSumPool(4, mu=1.0, solver=solver)(maps(kind=torch.float))
    torch.testing.assert_close(pooled, maps(kind=torch.float).mean((2, 3)))


def test_what_is_near_to_a_prototype_counts() -> None:
    """Fig. 2: red and blue prototypes, a map of which half is green."""
    image = torch.zeros(1, 3, 10, 10)
    image[0, 1], image[0, 0, :, :3], image[0, 2, :, 8:] = 1, 1, 1
    image[0, 1, :, :3] = image[0, 1, :, 8:] = 0
    pool = GeneralizedSumPool(3, m=2, mu=0.5, eps=20.0)
    with torch.no_grad():
        pool.prototypes.copy_(torch.tensor([[1.0, 0, 0], [0, 0, 1.0]]))
        weights, plan = pool.transport(image)
    weights = weights.view(10, 10)
    assert weights[:, :3].min() > 1.9
    assert weights[:, 3:8].max() < 0.1
    owner = plan.argmax(1).view(10, 10)
    assert (owner[:, :3] == 0).all()
    assert (owner[:, 8:] == 1).all()


def test_autocast_does_not_reach_the_transport() -> None:
    torch.manual_seed(0)
    head = GSPHead(6, 16, m=8, eps=50.0)
    features = torch.rand(2, 6, 5, 5)
    local = head.locals(features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, within = head(features), head.pooling.transport(local)
    torch.testing.assert_close(within, head.pooling.transport(local), rtol=0, atol=0)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, head(features), rtol=0.05, atol=0.05)  # the linear layer is in bf16


def test_a_location_at_a_prototype_has_a_gradient() -> None:
    pool = GeneralizedSumPool(4, m=3)
    image = pool.prototypes.detach().T[None, :, None].clone().requires_grad_()  # [1,4,1,3]
    pool(image).sum().backward()
    assert image.grad is not None
    assert torch.isfinite(image.grad).all()
    assert torch.isfinite(pool.prototypes.grad).all()


# Prototypes.


def test_k_centres_are_the_farthest() -> None:
    points = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    chosen = [0]
    for _ in range(7):
        chosen.append(max(range(50), key=lambda i: min(float((points[i] - points[c]).norm()) for c in chosen)))
    torch.testing.assert_close(k_centres(points, 8), points[chosen], rtol=0, atol=0)


def test_prototypes_by_k_centre(monkeypatch: pytest.MonkeyPatch) -> None:
    """Averages until 24 images were seen, then the farthest of the last 24 averages, in the same parameter."""
    monkeypatch.setattr("dml.models.gsp.SEEDS", 24)
    torch.manual_seed(0)
    pool = GeneralizedSumPool(4, m=5, mu=0.3, init="kcenter", init_steps=4).train()
    parameter, batches = pool.prototypes, torch.randn(6, 8, 4, 3, 3)
    for step, batch in enumerate(batches):
        pooled, attributes = pool(batch, attributes=True)
        averaged = torch.allclose(pooled, batch.mean((2, 3)))
        assert averaged == (attributes is None) == (step < 4)
        pool.eval()(batch + 1)  # evaluations are not remembered
        pool.train()
    assert pool.prototypes is parameter
    means = F.normalize(batches[2:5].flatten(0, 1).mean((2, 3)))
    torch.testing.assert_close(parameter, k_centres(means, 5))


@pytest.mark.slow
@pytest.mark.parametrize("init", ["random", "kcenter"])
def test_the_optimizer_moves_prototypes(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, init: str, tmp_path: Path
) -> None:
    """In a training; and a checkpoint brings back whether there are any."""
    monkeypatch.setattr("dml.models.gsp.SEEDS", 32)
    seen: list[Tensor] = []
    step = GSP.training_step

    def spy(self: GSP, *arguments: object) -> Tensor:
        assert self.zero_shot is not None
        pair = self.head.pooling.prototypes, self.zero_shot.embeddings
        seen.append(torch.cat([part.detach() for part in pair]))
        return step(self, *arguments)

    monkeypatch.setattr(GSP, "training_step", spy)
    options = [*SMALL, f"head.init={init}", "trainer.max_steps=6"]
    train.run(configure(*options), options)
    moved = [(a != b).any(1) for a, b in itertools.pairwise(seen)]  # rows of prototypes and class embeddings
    # Two batches of 16 give 32 embeddings: the second one's step is already one of prototypes. Before, both rest.
    assert [bool(rows.any()) for rows in moved] == [init == "random", True, True, True, True]
    assert all(rows[:6].all() for rows in moved[1:])
    loaded = load_method(str(tmp_path / "run" / "checkpoints" / "last.ckpt"))
    assert isinstance(loaded, GSP)
    assert not loaded.head.pooling.waiting


# The method.


def test_options_reach_the_pooling_and_the_zero_shot_loss(method_of: Callable[..., Method]) -> None:
    options = ["head.m=5", "head.mu=0.4", "head.eps=2", "head.solver=fixed_point", "head.iterations=1"]
    options += ["method.ridge=0.3", "method.logit_scale=9.5", "method.class_init=fan_out"]
    torch.manual_seed(0)
    method = method_of("method=gsp", *options).eval()
    assert isinstance(method, GSP)
    assert method.zero_shot is not None
    assert (method.zero_shot.ridge, method.zero_shot.logit_scale) == (0.3, 9.5)
    classes = len(method.zero_shot.embeddings)
    assert method.zero_shot.embeddings.std().item() == pytest.approx((2 / classes) ** 0.5, rel=0.2)
    pooling, maps = method.head.pooling, torch.randn(2, 24, 4, 4)
    weights, plan = pooling.transport(maps)
    cells = maps.flatten(2).mT
    cells = cells / cells.norm(dim=-1, keepdim=True).clamp(min=1)
    costs = torch.cdist(pooling.prototypes / pooling.prototypes.norm(dim=-1, keepdim=True).clamp(min=1), cells)
    rho, expected = transport_plan(costs, 0.4, 2.0, "fixed_point", 1)
    torch.testing.assert_close(plan, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights, (1 - 16 * rho) / 0.4, rtol=1e-4, atol=1e-6)
    exact = transport_plan(costs, 0.4, 2.0)[1]
    assert not torch.allclose(plan, exact, rtol=1e-3, atol=1e-6)  # one round is not enough: the options are seen


def test_prototypes_start_in_directions_of_their_own() -> None:
    prototypes = GeneralizedSumPool(24, m=16).prototypes.detach()
    torch.testing.assert_close(prototypes.norm(dim=-1), torch.ones(16))
    assert (prototypes @ prototypes.T - torch.eye(16)).abs().max() < 0.9


def test_the_objective_is_the_mixture(method_of: Callable[..., Method]) -> None:
    method = method_of("method=gsp", "head.m=6", "method.lambda_zs=0.3", "loss=contrastive")
    assert isinstance(method, GSP)
    assert method.zero_shot is not None
    images, labels = torch.rand(10, 3, 32, 32), torch.arange(5).repeat(2)
    output = method.learners(method.normalized(images))
    attributes = output.auxiliary["attributes"]
    torch.manual_seed(3)
    terms = method.objective(output, {"label": labels, "index": labels})
    torch.manual_seed(3)
    torch.testing.assert_close(terms["zero_shot"], 0.3 * method.zero_shot(attributes, labels))
    torch.testing.assert_close(terms["metric"], 0.7 * method.losses[0](output.embeddings[:, 0], labels))


def test_without_choice_and_zero_shot_it_is_the_baseline(method_of: Callable[..., Method]) -> None:
    """mu = 1, lambda = 0: a linear layer at each location and the mean, or the mean and a linear layer."""
    gsp = method_of("method=gsp", "head.mu=1", "method.lambda_zs=0", "loss=contrastive")
    baseline = method_of("method=baseline", "loss=contrastive")
    baseline.load_state_dict({k: v for k, v in gsp.state_dict().items() if "pooling" not in k})
    images, labels = torch.rand(10, 3, 32, 32), torch.arange(5).repeat(2)
    values = []
    for method in (gsp, baseline):
        embeddings = method.train().embed(images)
        terms = objective_of(method, embeddings, labels)
        assert set(terms) == {"metric"}
        terms["metric"].backward()
        values.append([embeddings, terms["metric"], next(method.backbone.parameters()).grad])
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["abe", "dces", "diablo", "deml", "mtails", "baseline"])
def test_every_method_takes_the_head(method_of: Callable[..., Method], name: str) -> None:
    method = method_of(f"method={name}", "head=gsp", "head.m=4")
    embeddings = method.embed(torch.rand(10, 3, 32, 32))
    assert embeddings.shape[1] * embeddings.shape[2] == 24
    loss_of(method, torch.rand(10, 3, 32, 32), torch.arange(5).repeat(2)).backward()
    pools = [module for module in method.modules() if isinstance(module, GeneralizedSumPool)]
    assert pools
    assert all(pool.prototypes.grad is not None for pool in pools)


@pytest.mark.slow
def test_what_is_drawn_and_resumed(configure: Configure, tmp_path: Path) -> None:
    """A run with its pictures; stopped half-way, it ends the same."""
    options = [
        *SMALL,
        "scheduler=plateau",
        "scheduler.patience=0",
        "method.warm_up=0.5",
        "loss=proxy_nca",
        "head.add_max=true",
    ]
    options += ["trainer.max_steps=18", "trainer.checkpoint_every=6", "lr=1e-6", "report=true"]  # a plateau
    whole = train.run(configure(*options), options)
    for name in ("weights", "prototypes"):
        assert (tmp_path / "run" / "figures" / f"{name}.png").stat().st_size > 5000
    page = (tmp_path / "run" / "report.html").read_text()
    assert "the prototype with the largest share of it" in page
    assert "shares in the images of some test classes" in page
    config = configure(*options, f"paths.output_dir={tmp_path / 'again'}")
    folder = RunFolder(tmp_path / "again")
    parts, trainer = train.prepare_run(config, folder)
    folder.open(config, [])

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        if trainer.global_step == 6:  # after the checkpoint of this step, in the middle of an epoch of 4
            raise Stop

    parts.method.on_train_batch_end = stop
    with pytest.raises(Stop):
        train.fit(config, folder, parts, trainer)
    again = train.run(config, options)
    clock = ("run/seconds", "run/seconds_between_steps", "run/images_per_second")
    assert {k: v for k, v in again.items() if k not in clock} == {k: v for k, v in whole.items() if k not in clock}
    logs = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "again")]
    assert logs[0] == logs[1]
    rates = [record["train/lr/backbone"] for record in logs[0] if "train/lr/backbone" in record][4::4]
    assert len(rates) == 4  # after epochs of 4 steps
    losses = [record["train/loss"] for record in logs[0] if "train/loss" in record]
    rate, best, wanted = 1e-6, float("inf"), []
    for epoch in range(4):
        mean = sum(losses[4 * epoch : 4 * epoch + 4])
        rate, best = (rate, mean) if mean < best * (1 - 1e-4) else (rate / 2, best)
        wanted.append(rate)
    assert rates == pytest.approx(wanted)
    assert min(rates) < 1e-6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["head=avg"], "head=gsp"),
        (["method.lambda_zs=1.5"], r"method\.lambda_zs=1.5"),
        (["head.mu=0"], r"head\.mu=0"),
        (["head.eps=0"], r"head\.eps=0"),
        (["head.m=0"], r"head\.m=0"),
        (["head.then=max"], r"head\.then=max"),
        (["head.init=zeros"], r"head\.init=zeros"),
        (["head.init=kcenter", "head.m=2000"], r"head\.m=2000"),
        (["head.init_steps=-1"], r"head\.init_steps=-1"),
        (["head.init_steps=1"], r"head\.init_steps=1 is for head\.init=kcenter"),
        (["method.ridge=0"], r"method\.ridge=0"),
        (["method.warm_up=-1"], r"method\.warm_up=-1"),
        (["method.warm_up=inf"], "warm_up=Infinity has to be a finite number"),
    ],
)
def test_mistakes_are_told(method_of: Callable[..., Method], options: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        method_of("method=gsp", *options)


def test_every_parameter_takes_part_while_prototypes_are_awaited(method_of: Callable[..., Method]) -> None:
    """And where there is no choice: DDP stops at a parameter that does not."""
    for options in (["head.init=kcenter"], ["head.mu=1"]):
        for more in (["method=gsp"], ["method=gsp", "method.lambda_zs=0"], ["method=baseline", "head=gsp"]):
            method = method_of(*more, *options, "loss=contrastive")
            loss_of(method, torch.rand(10, 3, 32, 32), torch.arange(5).repeat(2)).backward()
            assert all(p.grad is not None for p in method.parameters())


def test_half_precision_throughout(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [*SMALL, "trainer.precision=bf16-true", "trainer.max_steps=2"]
    train.run(configure(*options), options)


def test_a_batch_of_one_class_is_told(configure: Configure) -> None:
    with pytest.raises(UserError, match="batches have one class"):
        train.run(configure(*SMALL, "sampler.batch_size=4", "sampler.m=4", "loss=proxy_anchor"), [])


def test_the_wait_for_prototypes_goes_on_from_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dml.models.gsp.SEEDS", 24)

    def made() -> GeneralizedSumPool:
        return GeneralizedSumPool(4, m=5, init="kcenter", init_steps=3).train()

    whole, resumed = made(), made()
    for step, batch in enumerate(torch.randn(4, 8, 4, 3, 3, generator=torch.Generator().manual_seed(0))):
        whole(batch)
        resumed(batch)
        state, resumed = resumed.state_dict(), made()
        resumed.load_state_dict(state)
        assert resumed.waiting == whole.waiting == (step < 3)
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_resting_parameters(method_of: Callable[..., Method], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the warm-up the backbone gets no gradient at all: not even weight decay moves it."""
    method = method_of("method=gsp", "loss=proxy_anchor")
    method.rests_until = 3
    for step, rests in ((0, True), (2, True), (3, False)):
        monkeypatch.setattr(GSP, "global_step", step)
        method.zero_grad()
        loss_of(method, torch.rand(10, 3, 32, 32), torch.arange(5).repeat(2)).backward()
        method.on_after_backward()
        assert all((p.grad is None) == rests for p in method.backbone.parameters())
        assert all(p.grad is not None for p in method.head.parameters())
        assert all(p.grad is not None for p in method.losses.parameters())


@pytest.mark.parametrize("init", ["random", "kcenter"])
def test_class_embeddings_rest_while_prototypes_are_awaited(method_of: Callable[..., Method], init: str) -> None:
    """And only then."""
    method = method_of("method=gsp", f"head.init={init}", "loss=contrastive")
    assert isinstance(method, GSP)
    assert method.zero_shot is not None
    loss_of(method, torch.rand(10, 3, 32, 32), torch.arange(5).repeat(2)).backward()
    method.on_after_backward()
    assert (method.zero_shot.embeddings.grad is None) == (init == "kcenter")


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", ["cub", "cars", "inshop", "sop"])
def test_the_papers_settings(configure: Configure, benchmark: str) -> None:
    """Section 1.6.7, as printed; every loss composes with every benchmark."""
    c2 = {"cub": (0, 0.3841), "cars": (0.2652, 0.5409)}.get(benchmark, (0.2858, 0.5130))
    ms = {"cars": (14.35, 75.83, 0.66), "inshop": (8.49, 57.38, 0.41)}.get(benchmark, (2, 40, 0.5))
    triplet = {"cub": 0.0961, "cars": 0.1190}.get(benchmark, 0.0451)
    batches = {"cub": 25, "cars": 25, "inshop": 400, "sop": 1400}[benchmark]

    def config(name: str) -> DictConfig:
        return configure(f"experiment=gsp_{benchmark}", "dataset=birds100", f"loss=gsp/{name}")

    found = config("c2").loss.loss
    assert (found.pos_margin, found.neg_margin) == c2
    found = config("ms").loss.loss
    assert (found.alpha, found.beta, found.base) == ms
    found = config("triplet")
    assert found.loss.loss.margin == triplet
    assert not found.miner
    found = config("xbm").loss
    assert (found.loss.memory_size, found.memory_from, found.add_batch) == (32 * batches, 1000, True)
    assert found.loss.loss == config("c1").loss.loss
    baseline = configure(f"experiment=gsp_{benchmark}", "dataset=birds100", "method=baseline", "head=delf")
    assert baseline.optimizer._target_ == "torch.optim.Adam"
    assert baseline.image_size == 227

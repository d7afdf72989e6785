"""The contract of every method in conf/method, and ABE against its own definition."""

import copy
from collections.abc import Callable

import pytest
import torch
from omegaconf import DictConfig

from dml.build import build_method, complexity
from dml.errors import UserError
from dml.methods.abe import ABE
from dml.methods.base import Method, NonFiniteLoss
from dml.run import CONF

METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
SMALL = ["dataset=glyphs", "backbone=small", "head.dim=24", "image_size=32"]
Configure = Callable[..., DictConfig]


def method_of(configure: Configure, *overrides: str) -> Method:
    config = configure(*SMALL, *overrides)
    config.runtime.train_classes = 5
    torch.manual_seed(0)
    return build_method(config)


@pytest.mark.parametrize("name", METHODS)
def test_embeds_learners_of_unit_norm(configure: Configure, name: str) -> None:
    method = method_of(configure, f"method={name}").eval()
    embeddings = method.embed(torch.rand(3, 3, 32, 32))
    assert embeddings.ndim == 3
    assert embeddings.shape[0] == 3
    assert embeddings.shape[1] * embeddings.shape[2] == 24
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(embeddings.shape[:2]))


@pytest.mark.parametrize("name", METHODS)
def test_every_parameter_is_in_one_group_and_gets_a_gradient(configure: Configure, name: str) -> None:
    method = method_of(configure, f"method={name}", "loss=proxy_anchor")
    embeddings = method.embed(torch.rand(10, 3, 32, 32))
    sum(method.objective(embeddings, torch.arange(5).repeat(2)).values()).backward()  # type: ignore[union-attr]
    grouped = [p for group in method.configure_optimizers().param_groups for p in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, method.parameters()))
    assert [n for n, p in method.named_parameters() if p.grad is None] == []


def test_groups_have_their_own_rates(configure: Configure) -> None:
    method = method_of(configure, "method=baseline", "loss=proxy_anchor", "method.lr=0.5", "method.head_lr_factor=10")
    groups = method.configure_optimizers().param_groups
    assert [group["lr"] for group in groups] == [0.5, 5.0, 50.0]
    assert groups[2]["params"] == list(method.losses.parameters())
    assert groups[2]["weight_decay"] == 0


def test_loss_parameters_move(configure: Configure) -> None:
    method = method_of(configure, "method=baseline", "loss=margin")
    beta = method.losses[0].loss.beta  # type: ignore[union-attr, operator]
    before = beta.detach().clone()
    optimizer = method.configure_optimizers()
    images, labels = torch.rand(10, 3, 32, 32), torch.arange(5).repeat(2)
    for _ in range(3):
        optimizer.zero_grad()
        sum(method.objective(method.embed(images), labels).values()).backward()  # type: ignore[union-attr]
        optimizer.step()
    assert (beta != before).any()


def test_abe_learners_are_the_definition(configure: Configure) -> None:
    """Eq. 7, a learner at a time: G(S(x) * A_m(S(x)))."""
    method = method_of(configure, "method=abe", "method.M=3").eval()
    assert isinstance(method, ABE)
    images = method.normalize(torch.rand(2, 3, 32, 32))
    spatial = method.spatial(images)
    logits = method.masks(method.attention(spatial))
    channels = spatial.shape[1]
    looped = [
        method.head(method.embedding(spatial * torch.sigmoid(logits[:, m * channels : (m + 1) * channels])))
        for m in range(3)
    ]
    torch.testing.assert_close(method.learners(images), torch.stack(looped, dim=1), rtol=1e-4, atol=1e-6)


def test_abe_with_open_masks_and_one_learner_is_the_baseline(configure: Configure) -> None:
    abe = method_of(configure, "method=abe", "method.M=1").eval()
    baseline = method_of(configure, "method=baseline").eval()
    assert isinstance(abe, ABE)
    with torch.no_grad():
        abe.masks.weight.zero_()
        abe.masks.bias.fill_(100.0)  # type: ignore[union-attr]  # sigmoid(100) = 1
    baseline.head.load_state_dict(abe.head.state_dict())
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(abe.embed(images), baseline.embed(images), rtol=1e-4, atol=1e-6)


def test_abe_attention_is_a_copy_that_starts_as_the_backbone(configure: Configure) -> None:
    method = method_of(configure, "method=abe")
    assert isinstance(method, ABE)
    ours, theirs = method.attention.state_dict(), method.embedding.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {id(p) for p in method.attention.parameters()}.isdisjoint(id(p) for p in method.embedding.parameters())


def test_abe_without_divergence_has_no_such_term(configure: Configure) -> None:
    method = method_of(configure, "method=abe", "method.lambda_div=0")
    terms = method.objective(method.embed(torch.rand(4, 3, 32, 32)), torch.tensor([0, 0, 1, 1]))
    assert set(terms) == {"metric"}


def test_width_that_learners_cannot_share(configure: Configure) -> None:
    with pytest.raises(UserError, match=r"head\.dim=24 .* 5 learners .* for example head\.dim=25"):
        method_of(configure, "method=abe", "method.M=5")


def test_unknown_stage_lists_the_stages(configure: Configure) -> None:
    with pytest.raises(UserError, match=r"nowhere.*block1"):
        method_of(configure, "method=abe", "method.branch=nowhere")


def test_a_value_of_the_wrong_kind_names_its_component(configure: Configure) -> None:
    with pytest.raises(UserError, match="backbone"):
        method_of(configure, "method=baseline", "+backbone.nonsense=1")


def test_complexity_counts_multiply_adds(configure: Configure) -> None:
    method = method_of(configure, "method=baseline", "loss=proxy_anchor")
    by_hand = 0

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal by_hand
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        by_hand += weight[0].numel() * output.numel()  # an output value sums the products of one filter

    for module in (probe := copy.deepcopy(method).eval()).modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.register_forward_hook(count)
    probe.embed(torch.zeros(1, 3, 32, 32))
    expected = sum(p.numel() for name, p in method.named_parameters() if not name.startswith("losses."))
    assert complexity(method, 32) == {"params": expected, "flops": by_hand}


def test_the_objective_is_computed_in_float32_under_mixed_precision(configure: Configure) -> None:
    method = method_of(configure, "method=abe")
    seen: list[torch.dtype] = []

    def objective(embeddings: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        seen.extend([embeddings.dtype, (embeddings[:, 0] @ embeddings[:, 0].T).dtype])
        return {"metric": embeddings.sum()}

    method.objective = objective  # type: ignore[method-assign]
    method.log = lambda *_, **__: None  # type: ignore[method-assign]  # there is no trainer
    with torch.autocast("cpu", dtype=torch.bfloat16):
        method.training_step({"image": torch.rand(2, 3, 32, 32), "label": torch.tensor([0, 0])}, 0)
    assert seen == [torch.float32, torch.float32]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_its_term_and_step(configure: Configure, bad: float) -> None:
    method = method_of(configure, "method=abe")
    method.objective = lambda *_: {"metric": torch.tensor(1.0), "divergence": torch.tensor(bad)}  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLoss, match=r"'divergence' became (nan|inf) at step 1"):
        method.training_step({"image": torch.rand(2, 3, 32, 32), "label": torch.tensor([0, 0])}, 0)

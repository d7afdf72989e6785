"""The contract of every method in conf/method."""

import copy
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from omegaconf import DictConfig
from pytorch_metric_learning.losses import ContrastiveLoss

from dml.configuration.composition import composed
from dml.configuration.trainings import declared
from dml.errors import UserError
from dml.losses import Loss
from dml.methods.base import Batch, Method, Output
from dml.training.build import build_method
from dml.training.complexity import complexity
from tests.components import components
from tests.conftest import loss_of

METHODS = components("method")
# Those with one option that says how many learners they have.
COUNTED = [
    (name, counted[0])
    for name in METHODS
    if len(counted := declared(composed(f"method={name}").method, "counted_by")) == 1
]
MethodOf = Callable[..., Method]


@pytest.mark.parametrize("name", METHODS)
def test_embeds_learners_of_unit_norm(method_of: MethodOf, name: str) -> None:
    method = method_of(f"method={name}").eval()
    embeddings = method.embed(torch.rand(3, 3, 32, 32))
    assert embeddings.ndim == 3
    assert embeddings.shape[0] == 3
    assert embeddings.shape[1] * embeddings.shape[2] == 24
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(embeddings.shape[:2]))


@pytest.mark.parametrize("name", METHODS)
def test_every_parameter_is_in_one_group_and_gets_a_gradient(method_of: MethodOf, name: str) -> None:
    method = method_of(f"method={name}", "loss=proxy_anchor")
    loss_of(method, torch.rand(10, 3, 32, 32), torch.arange(5).repeat(2)).backward()
    grouped = [p for group in method.optimizer_alone().param_groups for p in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, method.parameters()))
    assert [n for n, p in method.named_parameters() if p.grad is None] == []


def test_groups_have_their_own_rates(method_of: MethodOf) -> None:
    method = method_of("method=baseline", "loss=proxy_anchor", "lr=0.5", "method.head_lr_factor=10")
    groups = method.optimizer_alone().param_groups
    assert [group["lr"] for group in groups] == [0.5, 5.0, 50.0]
    assert groups[2]["params"] == list(method.losses.parameters())
    assert groups[2]["weight_decay"] == 0


# What starts from random values, and learns at head_lr_factor times the backbone's rate. In DeML these are the learners
# alone, "10 times learning rate for the learners" (section 4): its CAMs and adversary learn as the backbone does.
FRESH = {
    "abe": ("masks.A.", "head."),
    "baseline": ("head.",),
    "dces": ("head.",),
    "deml": tuple(f"scales.{i}.heads." for i in range(2)),
    "diablo": ("dictionary.", "heads."),
    "gsp": ("head.", "zero_shot."),
    "mheads": ("heads.",),
    "mheads_att": ("masks.A.", "heads."),
    "mtails": ("head.",),
}


@pytest.mark.parametrize("name", METHODS)
def test_what_learns_at_the_rate_of_the_head(method_of: MethodOf, name: str) -> None:
    method = method_of(f"method={name}", "method.head_lr_factor=7", "lr=0.5")
    names = {id(parameter): said for said, parameter in method.named_parameters()}
    groups = {group["name"]: group for group in method.optimizer_alone().param_groups}
    assert (groups["backbone"]["lr"], groups["head"]["lr"]) == (0.5, 3.5)
    found = {names[id(parameter)] for parameter in groups["head"]["params"]}
    if name in FRESH:
        expected = {said for said in names.values() if said.startswith(FRESH[name])}
    else:  # a method that is new here, and the losses' own parameters
        modules = [*method.new_modules(), method.losses]
        expected = {names[id(parameter)] for module in modules for parameter in module.parameters()}
    assert found == expected


def test_the_adversary_is_not_counted_as_part_of_the_network(method_of: MethodOf) -> None:
    """It is not used to embed."""
    with_it, without = (
        complexity(method_of("method=deml", f"method.adversary={kind}"), 32) for kind in ("grl", "none")
    )
    assert with_it == without


def test_loss_parameters_move(method_of: MethodOf) -> None:
    method = method_of("method=baseline", "loss=margin")
    beta = method.losses[0].loss.beta
    before = beta.detach().clone()
    optimizer = method.optimizer_alone()
    images, labels = torch.rand(10, 3, 32, 32), torch.arange(5).repeat(2)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(method, images, labels).backward()
        optimizer.step()
    assert (beta != before).any()


@pytest.mark.parametrize(("name", "learners"), COUNTED)
def test_width_that_learners_cannot_share(method_of: MethodOf, name: str, learners: str) -> None:
    with pytest.raises(UserError, match=r"head\.dim=24 .* 5 learners .* for example head\.dim=25"):
        method_of(f"method={name}", f"method.{learners}=5")
    with pytest.raises(UserError, match=rf"method\.{learners}=0 has to be at least 1"):
        method_of(f"method={name}", f"method.{learners}=0")


def test_unknown_stage_lists_the_stages(method_of: MethodOf) -> None:
    with pytest.raises(UserError, match=r"nowhere.*block1"):
        method_of("method=abe", "method.branch=nowhere")


def test_a_value_of_the_wrong_kind_names_its_component(method_of: MethodOf) -> None:
    with pytest.raises(UserError, match="backbone"):
        method_of("method=baseline", "+backbone.nonsense=1")


def test_complexity_counts_multiply_adds(method_of: MethodOf) -> None:
    method = method_of("method=baseline", "loss=proxy_anchor")
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
    assert complexity(method, 32) == {"params": expected, "trained_params": expected, "flops": by_hand}


@pytest.mark.parametrize(("shape", "learners"), [((1, 24, 1, 1), 24), ((1, 1, 20), 1), ((1, 5, 5), 5)])
def test_a_head_of_another_width_is_told(
    method_of: MethodOf, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], learners: int
) -> None:
    method = method_of("method=baseline")
    assert complexity(method, 32, 24) == complexity(method, 32)
    monkeypatch.setattr(type(method), "embed", Mock(return_value=torch.zeros(shape)))
    with pytest.raises(UserError, match=rf"shape \[{learners}, .*\] \(learners, width\): a head has to return \[B,d\]"):
        complexity(method, 32, 24)


def test_learners_that_do_not_fill_the_width_are_let_pass(method_of: MethodOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeML(3,3) of 512 dimensions has nine learners of 56 (Table 2)."""
    method = method_of("method=baseline")
    monkeypatch.setattr(type(method), "embed", Mock(return_value=torch.zeros(1, 9, 56)))
    assert complexity(method, 32, 512)["flops"] == 0


def made_by_a_function(**_: object) -> Loss:
    return Loss(ContrastiveLoss())


def test_a_file_that_names_a_bare_loss_is_told(configure: Callable[..., DictConfig]) -> None:
    config = configure("method=baseline", "runtime.train_classes=5")
    config.loss = {"_target_": "pytorch_metric_learning.losses.ContrastiveLoss"}
    with pytest.raises(
        UserError, match=r"names pytorch_metric_learning\.losses\.ContrastiveLoss: put it under loss: of"
    ):
        build_method(config)
    config.loss = {"_target_": f"{__name__}.made_by_a_function"}
    assert isinstance(build_method(config).losses[0].loss, ContrastiveLoss)


def test_too_little_memory_is_not_told_as_too_small_an_image(
    method_of: MethodOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = method_of("method=baseline")
    monkeypatch.setattr(type(method), "embed", Mock(side_effect=RuntimeError("[enforce fail] Cannot allocate memory")))
    with pytest.raises(UserError, match="There is too little memory"):
        complexity(method, 32)
    monkeypatch.setattr(type(method), "embed", Mock(side_effect=RuntimeError("Output size is too small")))
    with pytest.raises(UserError, match=r"image_size=32 does not fit the network .*: choose a larger one"):
        complexity(method, 32)


def test_the_objective_is_computed_in_float32_under_mixed_precision(method_of: MethodOf) -> None:
    method = method_of("method=abe")
    seen: list[torch.dtype] = []
    batch = {"image": torch.rand(2, 3, 32, 32), "label": torch.tensor([0, 0]), "index": torch.tensor([0, 1])}

    def objective(output: Output, batch: Batch) -> dict[str, torch.Tensor]:
        first = output.embeddings[:, 0]
        seen.extend([output.raw.dtype, (first @ first.T).dtype])
        return {"metric": first.sum()}

    method.objective = objective
    with torch.autocast("cpu", dtype=torch.bfloat16):
        method.training_step(batch, 0)
    assert seen == [torch.float32, torch.float32]

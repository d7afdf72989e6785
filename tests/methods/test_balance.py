"""Side losses weigh the same beside every metric loss."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dml.methods.balance import MOST, STEPS, Balance
from dml.methods.base import Method, Output
from tests.conftest import loss_of

MethodOf = Callable[..., Method]


def _norm(loss: Tensor, outputs: Tensor) -> float:
    return float(torch.autograd.grad(loss, outputs, retain_graph=True)[0].norm())


DEML = ["method=deml", "method.I=1", "method.J=3", "method.lambda_adv=0.3"]


@pytest.mark.parametrize(
    ("side", "options"),
    [
        ("divergence", ["method=abe", "method.M=3", "method.lambda_div=0.3"]),
        (
            "divergence",
            ["method=mheads", "method.M=3", "method.lambda_div=0.3", "method.margin_div=3", "method.balance=true"],
        ),
        ("adversary", [*DEML, "method.shared_head=false"]),
        ("hinge", [*DEML, "method.shared_head=false", "method.adversary=hinge"]),
    ],
)
@pytest.mark.parametrize("loss", ["abe_contrastive", "multi_similarity", "deml/binomial", "proxy_anchor"])
def test_a_weight_is_a_ratio_of_gradients(method_of: MethodOf, side: str, options: list[str], loss: str) -> None:
    method = method_of(*options, "head.dim=24", f"loss={loss}")
    raw = torch.randn(8, 3, 8, requires_grad=True) + torch.randn(8, 1, 8)
    batch = {"label": torch.arange(4).repeat(2), "index": torch.arange(8)}
    terms = method.objective(Output(raw, played=raw), batch)
    metric = _norm(terms["metric"], raw)
    unbounded = _norm(terms[side], raw) / (1 - float(method.balance.weight) / MOST)
    assert unbounded == pytest.approx(0.3 * metric, rel=1e-3)
    printed = method_of(*options, "head.dim=24", f"loss={loss}", "method.balance=false")
    assert _norm(printed.objective(Output(raw, played=raw), batch)[side], raw) != pytest.approx(0.3 * metric, rel=1e-2)


@pytest.mark.parametrize("adversary", ["grl", "hinge"])
def test_learners_with_one_layer_are_weighed_as_if_each_had_its_own(method_of: MethodOf, adversary: str) -> None:
    """They start nearly alike; soon afterwards the loss has the gradient that a ratio at the start would not see."""
    method = method_of(*DEML, "head.dim=24", f"method.adversary={adversary}")
    torch.manual_seed(0)
    rows = torch.randn(8, 1, 8)
    raw = (rows + 1e-3 * torch.randn(8, 3, 8)).requires_grad_()
    batch = {"label": torch.arange(4).repeat(2), "index": torch.arange(8)}
    name = "adversary" if adversary == "grl" else "hinge"
    terms = method.objective(Output(raw, played=raw), batch)
    own = torch.stack([rows[:, 0].roll(j, -1) for j in range(3)], 1).requires_grad_()
    unweighted = method_of(*DEML, "head.dim=24", f"method.adversary={adversary}", "method.balance=false")
    unweighted.load_state_dict(method.state_dict(), strict=False)
    side = _norm(unweighted.objective(Output(own, played=own), batch)[name], own) / 0.3
    unbounded = float(method.balance.weight) / (1 - float(method.balance.weight) / MOST)
    assert unbounded == pytest.approx(_norm(terms["metric"], raw) / side, rel=1e-2)


@pytest.mark.parametrize("options", [["method=abe"], ["method=deml"], ["method=deml", "method.adversary=hinge"]])
def test_a_loss_with_named_terms_counts_with_their_sum(method_of: MethodOf, options: list[str]) -> None:
    method = method_of(*options, "head.dim=24")
    learners = len(method.losses)
    for i in range(learners):
        method.losses[i] = TwoTerms()
    raw = torch.randn(8, learners, 24 // learners, requires_grad=True) + torch.randn(8, 1, 24 // learners)
    batch = {"label": torch.arange(4).repeat(2), "index": torch.arange(8)}
    terms = method.objective(Output(raw, played=raw), batch)
    assert {"near", "far"} < set(terms)
    assert float(method.balance.metric) == pytest.approx(_norm(terms["near"] + terms["far"], raw), rel=1e-5)


class TwoTerms(torch.nn.Module):
    """A loss that names its terms."""

    def forward(self, embeddings: Tensor, labels: Tensor, **_: Tensor) -> dict[str, Tensor]:
        similar = embeddings @ embeddings.T
        alike = labels[:, None] == labels
        return {"near": -similar[alike].mean(), "far": similar[~alike].mean()}


def test_it_follows_the_first_steps_and_stays() -> None:
    balance = Balance()
    outputs = torch.ones(2, 1, 2, requires_grad=True)
    for step in range(STEPS + 3):
        grown = 1.0 + min(step, STEPS - 1)
        balance(grown * outputs.sum(), outputs, 4 * outputs.sum(), outputs, step)
    ratio = sum(range(1, STEPS + 1)) / (4 * STEPS)
    assert float(balance.weight) == pytest.approx(ratio / (1 + ratio / MOST), rel=1e-5)
    before = {name: value.clone() for name, value in balance.state_dict().items()}
    balance(1e6 * outputs.sum(), outputs, outputs.sum(), outputs, STEPS)
    assert all(torch.equal(before[name], value) for name, value in balance.state_dict().items())
    assert balance.figures(STEPS) == {"side/weight": float(balance.weight)}
    assert not balance.figures(STEPS + 1)


def test_a_satisfied_side_loss_is_not_enlarged_without_end() -> None:
    balance = Balance()
    outputs = torch.ones(2, 1, 2, requires_grad=True)
    balance(outputs.sum(), outputs, 1e-9 * outputs.sum(), outputs, 0)
    assert float(balance.weight) == pytest.approx(MOST)


def test_without_a_gradient_there_is_no_ratio() -> None:
    """As with M-heads, whose learners start farther apart than the margin of ABE's eq. 9."""
    balance = Balance()
    outputs = torch.ones(2, 1, 2, requires_grad=True)
    assert float(balance.weight) == 1
    for step in range(STEPS):
        assert balance(outputs.sum(), outputs, 0 * outputs.sum(), outputs, step).item() == 0
    assert balance.figures(STEPS) == {"side/weight": 1.0}


def test_the_network_is_passed_once(method_of: MethodOf) -> None:
    method = method_of("method=abe", "method.M=2")
    passes = []
    next(method.spatial.parameters()).register_hook(lambda _: passes.append(1))
    loss_of(method, torch.rand(4, 3, 32, 32), torch.tensor([0, 0, 1, 1])).backward()
    assert len(passes) == 1
    assert float(method.balance.side) > 0

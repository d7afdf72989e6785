"""Side losses weigh the same beside every metric loss."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dml.losses import functional
from dml.methods.abe import ABE
from dml.methods.balance import MOST, STEPS, Balance, ratios
from dml.methods.base import Method, Output
from tests.conftest import loss_of

MethodOf = Callable[..., Method]
BATCH = {"label": torch.arange(4).repeat(2), "index": torch.arange(8)}
LOSSES = ["abe_contrastive", "multi_similarity", "deml/binomial", "proxy_anchor"]


def _norm(loss: Tensor, outputs: Tensor) -> float:
    return float(torch.autograd.grad(loss, outputs, retain_graph=True)[0].norm())


@pytest.mark.parametrize(
    "options",
    [
        ["method=abe", "method.M=3", "method.lambda_div=0.3"],
        ["method=mheads", "method.M=3", "method.lambda_div=0.3", "method.margin_div=3", "method.balance=true"],
    ],
)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_weight_is_a_ratio_of_gradients(method_of: MethodOf, options: list[str], loss: str) -> None:
    method = method_of(*options, "head.dim=24", f"loss={loss}")
    raw = torch.randn(8, 3, 8, requires_grad=True) + torch.randn(8, 1, 8)
    terms = method.objective(Output(raw), BATCH)
    metric = _norm(terms["metric"], raw)
    unbounded = _norm(terms["divergence"], raw) / (1 - float(method.balance.weight) / MOST)
    assert unbounded == pytest.approx(0.3 * metric, rel=1e-3)
    printed = method_of(*options, "head.dim=24", f"loss={loss}", "method.balance=false")
    assert _norm(printed.objective(Output(raw), BATCH)["divergence"], raw) != pytest.approx(0.3 * metric, rel=1e-2)


@pytest.mark.parametrize("adversary", ["grl", "hinge"])
@pytest.mark.parametrize("loss", LOSSES)
def test_deml_weighs_each_scale_at_each_step(method_of: MethodOf, adversary: str, loss: str) -> None:
    """However near its learners are (they start nearly alike), and however far apart those of another scale are."""
    options = ["method=deml", "method.I=2", "method.J=3", "method.lambda_adv=0.3", f"method.adversary={adversary}"]
    method = method_of(*options, "head.dim=48", f"loss={loss}")
    name = "adversary" if adversary == "grl" else "hinge"
    for apart in (0.1, 1.0):
        raw = torch.randn(8, 6, 8)
        raw[:, 3:] = raw[:, 3:4] + apart * raw[:, 3:]
        raw.requires_grad_()
        terms = method.objective(Output(raw, played=raw), BATCH)
        (metric,) = torch.autograd.grad(terms["metric"], raw, retain_graph=True)
        (side,) = torch.autograd.grad(terms[name], raw)
        for scale in (slice(0, 3), slice(3, 6)):
            wanted = 0.3 * float(metric[:, scale].norm())
            assert 0.8 * wanted < float(side[:, scale].norm()) < wanted


def test_deml_has_the_printed_weight_on_request(method_of: MethodOf) -> None:
    options = ["method=deml", "method.I=2", "method.J=2", "method.lambda_adv=0.3", "method.balance=false"]
    method = method_of(*options, "head.dim=48")
    raw = torch.randn(8, 4, 12, requires_grad=True)
    adversary = method.objective(Output(raw, played=raw), BATCH)["adversary"]
    unit = F.normalize(raw, dim=-1)
    mapped = [net(unit[:, 2 * i : 2 * i + 2]) for i, net in enumerate(method.adversaries)]
    assert adversary.item() == pytest.approx(0.3 * sum(functional.discrepancy(one).item() for one in mapped), rel=1e-5)


def test_learners_that_are_one_and_the_same_have_no_ratio() -> None:
    outputs = torch.ones(2, 4, 3, requires_grad=True)
    found = ratios(outputs.sum(), outputs, outputs[:, :2].square().sum() + 0 * outputs.sum(), outputs, 2)
    assert found.tolist() == pytest.approx([0.5 / (1 + 0.5 / MOST), 1])
    assert ratios(outputs.sum(), outputs.detach(), outputs.sum(), outputs.detach(), 2).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("side", "options"),
    [
        ("divergence", ["method=abe", "method.lambda_div=0.3"]),
        ("adversary", ["method=deml", "method.I=1", "method.lambda_adv=0.3"]),
        ("hinge", ["method=deml", "method.I=1", "method.lambda_adv=0.3", "method.adversary=hinge"]),
    ],
)
def test_a_loss_with_named_terms_counts_with_their_sum(method_of: MethodOf, side: str, options: list[str]) -> None:
    method = method_of(*options, "head.dim=24")
    learners = len(method.losses)
    for i in range(learners):
        method.losses[i] = TwoTerms()
    raw = torch.randn(8, learners, 24 // learners, requires_grad=True) + torch.randn(8, 1, 24 // learners)
    terms = method.objective(Output(raw, played=raw), BATCH)
    assert {"near", "far"} < set(terms)
    metric = _norm(terms["near"] + terms["far"], raw)
    assert _norm(terms[side], raw) == pytest.approx(0.3 * metric, rel=0.05)  # the bound takes a little


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


def test_abe_measures_in_its_first_ten_steps_and_no_other(method_of: MethodOf, monkeypatch: pytest.MonkeyPatch) -> None:
    method = method_of("method=abe", "method.M=3", "head.dim=24", "loss=abe_contrastive")
    measured = []
    for step in (0, 9, 10):
        monkeypatch.setattr(ABE, "global_step", step)
        before = float(method.balance.metric)
        method.objective(Output(torch.randn(8, 3, 8, requires_grad=True)), BATCH)
        measured.append(float(method.balance.metric) > before)
    assert measured == [True, True, False]


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


def test_a_metric_loss_that_selects_nothing_at_first_does_not_switch_the_side_loss_off() -> None:
    balance = Balance()
    outputs = torch.ones(2, 1, 2, requires_grad=True)
    for step in range(STEPS):
        assert balance(0 * outputs.sum(), outputs, outputs.sum(), outputs, step).item() == 4
    assert balance.figures(STEPS) == {"side/weight": 1.0}


def test_the_network_is_passed_once(method_of: MethodOf) -> None:
    method = method_of("method=abe", "method.M=2")
    passes = []
    next(method.spatial.parameters()).register_hook(lambda _: passes.append(1))
    loss_of(method, torch.rand(4, 3, 32, 32), torch.tensor([0, 0, 1, 1])).backward()
    assert len(passes) == 1
    assert float(method.balance.side) > 0

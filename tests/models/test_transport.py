"""The transport problem of GSP against its conditions, literal loops and finite differences."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from dml.models.transport import NEWTON_STEPS, transport_plan

pytestmark = pytest.mark.usefixtures("one_thread")

MUS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.95, 0.999)
EPS = (0.5, 5.0, 10.0, 50.0, 100.0)
MORE_MUS = (0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 0.99, 0.999)
MORE_EPS = (1e-6, 0.05, 0.5, 5.0, 20.0, 100.0, 300.0, 1000.0)  # of which 1000 is the most that head.eps takes

# Costs of locations, of numbers in 0..1: spread evenly, in two or three places, all in one but the first, thinning out.
PLACED: dict[str, Callable[[Tensor], Tensor]] = {
    "equal": torch.ones_like,
    "close": lambda x: 1 + 1e-3 * x,
    "three values": lambda x: (3 * x).floor(),
    "one is cheap": lambda x: torch.where(torch.arange(x.shape[-1]) == 0, 0.0, 2.0).expand_as(x),
    "one is dear": lambda x: torch.where(torch.arange(x.shape[-1]) == 0, 2.0, 0.0).expand_as(x),
    "halving": lambda x: (2 * 0.5 ** torch.arange(x.shape[-1])).expand_as(x),
    "few are dear": lambda x: 2 * x.pow(8),
    "few are cheap": lambda x: 2 - 2 * x.pow(8),
}


def costs(kind: str, m: int, n: int, batch: int = 20) -> Tensor:
    """`[batch,m,n]` float32."""
    generator = torch.Generator().manual_seed(m * n)
    if kind in PLACED:  # the same of all prototypes
        return PLACED[kind](torch.rand(batch, n, generator=generator)).unsqueeze(1).repeat(1, m, 1)
    if kind == "distances":
        points = [torch.randn(batch, k, 16, generator=generator) for k in (m, n)]
        return torch.cdist(*(torch.nn.functional.normalize(p, dim=-1) for p in points))
    if kind == "two values":  # of locations
        return torch.where(torch.rand(batch, 1, n, generator=generator) < 0.5, 0.1, 1.9).expand(batch, m, n).clone()
    return 2 * torch.rand(batch, m, n, generator=generator)


def bisected(cost: Tensor, mu: float, eps: float) -> tuple[Tensor, Tensor]:
    """The conditions of P2 in double precision: rho_j = 1 / (n (1 + t a_j)) with a = kappa^T 1, for one t an image."""
    exponents = -eps * cost.double().numpy()
    n = exponents.shape[-1]
    pull = np.logaddexp.reduce(exponents, axis=-2)
    low, high = -pull.max(-1, keepdims=True) - 50, -pull.min(-1, keepdims=True) + 50
    for _ in range(100):
        log_t = (low + high) / 2
        kept = np.exp(-np.logaddexp(0, log_t + pull)) / n
        too_little = 1 - kept.sum(-1, keepdims=True) < mu
        low, high = np.where(too_little, log_t, low), np.where(too_little, high, log_t)
    plan = np.exp((log_t - np.logaddexp(0, log_t + pull))[..., None, :] + exponents) / n
    return torch.as_tensor(kept), torch.as_tensor(plan)


def assert_solved(kinds: list[str], m: int, n: int, batch: int, mus: Sequence[float], epses: Sequence[float]) -> None:
    """All kinds at once: each image is a problem of its own."""
    cost = torch.cat([costs(kind, m, n, batch) for kind in kinds])
    for mu, eps in itertools.product(mus, epses):
        found, wanted = transport_plan(cost, mu, eps), bisected(cost, mu, eps)
        for ours, exact in zip(found, wanted, strict=True):
            # Of each location's mass 1/n, which is what weights are made of.
            apart = n * (ours - exact).abs().reshape(len(kinds), -1).amax(1)
            assert apart.max() < 1e-6, (mu, eps, dict(zip(kinds, apart.tolist(), strict=True)))


@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 4), (64, 49), (8, 256)])
def test_newton_solves_the_problem_in_single_precision(m: int, n: int) -> None:
    assert_solved(["distances", "two values", "uniform"], m, n, 6, MUS, EPS)


SHAPES = [(1, 1), (1, 2), (2, 9), (128, 49), (16, 196)]


@pytest.mark.parametrize(
    ("m", "n"), [*SHAPES, *(pytest.param(m, 3136, marks=pytest.mark.exhaustive) for m in (1, 128))]
)
def test_its_steps_are_enough_at_the_ends_of_every_range(m: int, n: int) -> None:
    assert_solved(["distances", "two values", "uniform", *PLACED], m, n, 2, MORE_MUS, MORE_EPS)


def test_fewer_steps_are_not_enough() -> None:
    """The test above can fail: half of the mass where two locations are far apart."""
    cost = costs("one is cheap", 1, 2, batch=1)
    exact, _ = bisected(cost, 0.5, 1000.0)
    steps = (6, NEWTON_STEPS[cost.dtype])
    apart = [2 * (transport_plan(cost, 0.5, 1000.0, iterations=k)[0] - exact).abs().max() for k in steps]
    assert apart[1] < 1e-6 < apart[0]


def test_double_precision_is_reached() -> None:
    """Also where a whole number of locations is to be taken, which are far from the others: the steps halve there."""
    torch.manual_seed(0)
    cost = torch.rand(400, 1, 24, dtype=torch.double)
    for eps in (1.0, 100.0, 1000.0):
        _, plan = transport_plan(cost, 1 / 3, eps)
        assert (plan.sum((1, 2)) - 1 / 3).abs().max() < 1e-14
        _, few = transport_plan(cost, 1 / 3, eps, iterations=NEWTON_STEPS[torch.float32])
    assert (few.sum((1, 2)) - 1 / 3).abs().max() > 1e-10  # of the largest eps


@pytest.mark.parametrize("solver", ["newton", "fixed_point"])
def test_mass_is_kept(solver: str) -> None:
    cost = costs("distances", 16, 49).double()
    for mu, eps in itertools.product((0.1, 0.3, 0.7), (0.5, 5.0)):
        rho, plan = transport_plan(cost, mu, eps, solver, 400 if solver == "fixed_point" else None)
        torch.testing.assert_close(plan.sum((1, 2)), torch.full((20,), mu, dtype=torch.double))
        torch.testing.assert_close(rho + plan.sum(1), torch.full((20, 49), 1 / 49, dtype=torch.double))


def test_it_is_the_minimum() -> None:
    """Of the objective P2, among plans that differ by a little and keep both conditions."""
    rng = np.random.default_rng(0)
    cost = torch.as_tensor(rng.random((3, 5)))
    rho, plan = (x.numpy() for x in transport_plan(cost, 0.4, 7.0))

    def objective(rho: np.ndarray, plan: np.ndarray) -> float:
        entropy = (plan * np.log(plan)).sum() + (rho * np.log(rho)).sum()
        return float((cost.numpy() * plan).sum() + entropy / 7.0)

    least = objective(rho, plan)
    for _ in range(200):
        change = rng.normal(size=plan.shape)
        change -= change.mean()  # the plan's mass stays
        change *= 1e-3 * min(plan.min(), rho.min()) / np.abs(change).max() / len(plan)
        assert objective(rho - change.sum(0), plan + change) > least


def loop(cost: Tensor, mu: float, eps: float, rounds: int) -> tuple[Tensor, Tensor]:
    """Proposition 4.2, as printed."""
    n = cost.shape[-1]
    kappa = torch.exp(-eps * cost)
    t = torch.ones((), dtype=cost.dtype)
    for _ in range(rounds):
        rho = 1 / n / (1 + t * kappa.T @ torch.ones(len(kappa), dtype=cost.dtype))
        t = mu / (torch.ones(len(kappa), dtype=cost.dtype) @ kappa @ rho)
    return rho, t * kappa @ torch.diag(rho)


def gradient_as_printed(rho: Tensor, plan: Tensor, of_rho: Tensor, of_plan: Tensor, mu: float, eps: float) -> Tensor:
    """Proposition 4.3 for one image, entry by entry."""
    m, n = plan.shape
    q = [rho[j] * of_rho[j] + sum(plan[i, j] * of_plan[i, j] for i in range(m)) for j in range(n)]
    eta = sum(rho[j] * of_rho[j] for j in range(n)) - n * sum(q[j] * rho[j] for j in range(n))
    curvature = 1 - mu - n * sum(rho[j] ** 2 for j in range(n))
    gradient = torch.zeros_like(plan)
    for i in range(m):
        for j in range(n):
            v = q[j] - eta / curvature * rho[j]
            gradient[i, j] = -eps * (plan[i, j] * of_plan[i, j] - n * plan[i, j] * v)
    return gradient


@pytest.mark.parametrize(("mu", "eps", "rounds"), [(0.3, 5.0, 100), (0.7, 0.5, 25), (0.95, 5.0, 3)])
def test_the_loop_is_propositions_4_2_and_4_3(mu: float, eps: float, rounds: int) -> None:
    cost = costs("uniform", 4, 6, batch=1)[0].double().requires_grad_()
    rho, plan = transport_plan(cost, mu, eps, "fixed_point", rounds)
    printed = loop(cost.detach(), mu, eps, rounds)
    torch.testing.assert_close(rho, printed[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(plan, printed[1], rtol=1e-12, atol=0)
    of_rho, of_plan = torch.randn(6, dtype=torch.double), torch.randn(4, 6, dtype=torch.double)
    (rho @ of_rho + (plan * of_plan).sum()).backward()
    torch.testing.assert_close(cost.grad, gradient_as_printed(*printed, of_rho, of_plan, mu, eps), rtol=1e-10, atol=0)


def test_the_loop_does_not_leave_single_precision() -> None:
    """exp(-eps c) does, for eps = 100."""
    rho, plan = transport_plan(costs("distances", 4, 6), 0.3, 100.0, "fixed_point", 2000)
    exact = transport_plan(costs("distances", 4, 6), 0.3, 100.0)
    torch.testing.assert_close(rho, exact[0], rtol=0, atol=1e-3)
    assert torch.isfinite(plan).all()


def gradients(solve: Callable[[Tensor], tuple[Tensor, Tensor]], cost: Tensor, weights: list[Tensor]) -> Tensor:
    leaf = cost.clone().requires_grad_()
    sum((part * weight).sum() for part, weight in zip(solve(leaf), weights, strict=True)).backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("eps", [0.5, 5.0, 100.0])
@pytest.mark.parametrize("mu", [0.1, 0.3, 0.95, 0.999])
def test_newtons_gradient_is_that_of_a_converged_loop(mu: float, eps: float) -> None:
    """In single precision, against the implicit derivative of the conditions in double precision."""
    cost = costs("distances", 8, 20, batch=1)[0]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(20, generator=generator), torch.randn(8, 20, generator=generator)]
    ours = gradients(lambda c: transport_plan(c, mu, eps), cost, weights)
    rho, plan = bisected(cost, mu, eps)
    exact = gradient_as_printed(rho, plan, weights[0].double(), weights[1].double(), mu, eps)
    assert 20 / eps * (ours - exact).abs().max() < 1e-6  # in units of a location's mass


@pytest.mark.parametrize("mu", [0.1, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("eps", [0.5, 5.0, 20.0])
def test_gradients_of_both_orders(mu: float, eps: float) -> None:
    cost = costs("uniform", 3, 5, batch=2).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda c: transport_plan(c, mu, eps), (cost,))
    assert torch.autograd.gradgradcheck(lambda c: transport_plan(c, mu, eps), (cost,), fast_mode=True)


@pytest.mark.parametrize("solver", ["newton", "fixed_point"])
def test_all_of_the_mass_leaves_no_choice(solver: str) -> None:
    """Theorem 4.1."""
    rho, plan = transport_plan(costs("uniform", 3, 5), 1.0, 5.0, solver)
    assert (rho == 0).all()
    torch.testing.assert_close(plan.sum(1), torch.full((20, 5), 0.2))
    _, limit = bisected(costs("uniform", 3, 5), 1 - 1e-9, 5.0)  # each location's share, prototype by prototype
    torch.testing.assert_close(plan.double(), limit, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(kind: torch.dtype) -> None:
    cost = costs("distances", 8, 20).to(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rho, plan = transport_plan(cost, 0.3, 5.0)
    assert rho.dtype == plan.dtype == torch.float32
    torch.testing.assert_close((rho, plan), transport_plan(cost.float(), 0.3, 5.0), rtol=0, atol=0)

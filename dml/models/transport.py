"""The transport problem inside generalized sum pooling (Gurbuz et al., ICCV 2023, section 4), and its gradient.

m prototypes, n locations. Each location has mass 1/n. A total mass of `mu` is moved to the prototypes where that is
cheap; `rho` is the mass that stays.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dml.models.precision import without_autocast

# At most 13 and 35 steps were needed for the type's precision, for any mu and costs and for eps up to 1000.
NEWTON_STEPS = {torch.float32: 16, torch.float64: 40}
LOOP_STEPS = 100  # section 4.4


def transport_plan(
    cost: Tensor,
    mu: float,
    eps: float,
    solver: Literal["newton", "fixed_point"] = "newton",
    iterations: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Minimises `sum_ij c_ij pi_ij + (H(pi) + H(rho)) / eps` (problem P2), with `H(u) = sum u log u`, subject to
    `rho_j + sum_i pi_ij = 1/n` and `sum_ij pi_ij = mu`.

    `newton` solves it to the precision of the tensor's type. With `l_j = log sum_i exp(-eps c_ij)` the minimum is
    `rho_j = sigmoid(-(s + l_j)) / n` and `pi_ij = sigmoid(s + l_j) / n * softmax_i(-eps c_ij)`, where s is the number
    with `mean_j sigmoid(s + l_j) = mu`; the left side grows with s. Gradients of any order are those of the minimum.

    `fixed_point` is the loop of Proposition 4.2 with the gradient of Proposition 4.3, as printed. The gradient assumes
    that the loop has converged, which is not so after 100 rounds for mu near 1 or large eps. There is no second
    gradient.

    For mu = 1 all mass is moved (Theorem 4.1), and rho is 0 with either solver.

    Args:
        cost: `[...,m,n]`; computed in float32 at least.
        mu: total mass to move, in (0, 1].
        eps: the larger it is, the less the plan is smoothed.
        solver: `newton` or `fixed_point`.
        iterations: steps of Newton's method or rounds of the loop; None: 16 (40 in float64) or 100.

    Returns:
        `rho [...,n]` and `plan [...,m,n]`.
    """
    cost = cost.to(torch.promote_types(cost.dtype, torch.float32))
    with without_autocast(cost.device):
        if mu == 1:
            plan = torch.softmax(-eps * cost, dim=-2) / cost.shape[-1]
            return torch.zeros_like(plan[..., 0, :]), plan
        if solver == "fixed_point":
            return _FixedPoint.apply(cost, mu, eps, iterations or LOOP_STEPS)
        return _by_newton(cost, mu, eps, iterations or NEWTON_STEPS[cost.dtype])


def _by_newton(cost: Tensor, mu: float, eps: float, iterations: int) -> tuple[Tensor, Tensor]:
    n = cost.shape[-1]
    with torch.no_grad():
        # These numbers are subtracted from the costs before the multiplication by eps, and added again afterwards.
        # Differences are then exact where they matter: near each location's cheapest prototype, and near the most
        # expensive location that a hard choice would keep. Adding a constant to all costs changes s only.
        cheapest = cost.amin(-2)
        pivot = cheapest.topk(min(n, math.ceil(mu * n)), dim=-1, largest=False).values[..., -1:]
    utility = -eps * (cost - cheapest.unsqueeze(-2))
    spread = torch.logsumexp(utility, dim=-2)
    pull = spread - eps * (cheapest - pivot)  # l
    s = _Balance.apply(pull, mu, iterations)
    rho = torch.sigmoid(-(s + pull)) / n
    plan = torch.exp(utility - spread.unsqueeze(-2)) * (torch.sigmoid(s + pull) / n).unsqueeze(-2)
    return rho, plan


class _Balance(torch.autograd.Function):
    """Solves `mean_j sigmoid(s + l_j) = mu` for s: `l [...,n] -> s [...,1]`."""

    @staticmethod
    def forward(ctx: Any, pull: Tensor, mu: float, iterations: int) -> Tensor:
        s = _balance(pull, mu, iterations)
        ctx.save_for_backward(pull, s)
        return s

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # The implicit function theorem, written with s itself, so that it can be differentiated again.
        pull, s = ctx.saved_tensors
        slope = torch.sigmoid(s + pull) * torch.sigmoid(-(s + pull))
        return -gradients[0] * slope / slope.sum(-1, keepdim=True).clamp(min=torch.finfo(slope.dtype).tiny), None, None


def _balance(pull: Tensor, mu: float, iterations: int) -> Tensor:
    """Applies Newton's method to the log-odds of the mean, inside a bracket that every step narrows.

    It always takes all its steps, since a test for convergence would wait for the device.
    """
    n = pull.shape[-1]
    logit = math.log(mu) - math.log1p(-mu)
    low, high = logit - pull.amax(-1, keepdim=True), logit - pull.amin(-1, keepdim=True)
    whole, part = math.floor(mu * n), mu * n - math.floor(mu * n)
    s = low.clamp(0, None).minimum(high)  # 0, which is the pivot's value, or the end of the bracket nearest to it
    for _ in range(iterations):
        x = s + pull
        chosen = x > 0
        tail = torch.sigmoid(-x.abs())
        # sum_j sigmoid(x_j) - mu n, computed without summing numbers near 1, which would round
        excess = (chosen.sum(-1, keepdim=True) - whole).to(x.dtype) - part
        excess = excess + torch.where(chosen, -tail, tail).sum(-1, keepdim=True)
        low, high = torch.where(excess < 0, s, low), torch.where(excess < 0, high, s)
        taken, left = mu * n + excess, (1 - mu) * n - excess
        odds = torch.log1p(excess / (mu * n)) - torch.log1p(-excess / ((1 - mu) * n))
        new = s - odds * (taken * left / n) / (tail * (1 - tail)).sum(-1, keepdim=True)
        slack = 1e-6 * (1 + s.abs())  # at the solution rounding may step over the bracket's end
        inside = (new >= low - slack) & (new <= high + slack)  # false for NaN
        s = torch.where(inside, new, (low + high) / 2)
    return s


class _FixedPoint(torch.autograd.Function):
    """Algorithm 3. The loop works with logarithms, since exp(-eps c) and t leave float32's range for large eps."""

    @staticmethod
    def forward(ctx: Any, cost: Tensor, mu: float, eps: float, iterations: int) -> tuple[Tensor, Tensor]:
        n = cost.shape[-1]
        pull = torch.logsumexp(-eps * cost, dim=-2)  # log of kappa^T 1
        log_t = torch.zeros_like(pull[..., :1])
        for _ in range(iterations):
            log_rho = -F.softplus(log_t + pull) - math.log(n)
            log_t = math.log(mu) - torch.logsumexp(pull + log_rho, dim=-1, keepdim=True)
        rho = torch.exp(log_rho)
        plan = torch.exp((log_t + log_rho).unsqueeze(-2) - eps * cost)
        ctx.save_for_backward(rho, plan)
        ctx.mu, ctx.eps = mu, eps
        return rho, plan

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rho, plan = ctx.saved_tensors
        of_rho, of_plan = gradients
        n = rho.shape[-1]
        weighted = plan * of_plan
        q = rho * of_rho + weighted.sum(-2)
        eta = (rho * of_rho).sum(-1, keepdim=True) - n * (q * rho).sum(-1, keepdim=True)
        v = q - eta / (1 - ctx.mu - n * rho.square().sum(-1, keepdim=True)) * rho
        return -ctx.eps * (weighted - n * plan * v.unsqueeze(-2)), None, None, None

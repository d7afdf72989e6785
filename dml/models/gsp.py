"""Generalized sum pooling (Gurbuz et al., ICCV 2023): learned prototypes decide how much each location counts.

B images, n = h w locations, d width of a local embedding, m prototypes.
"""

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from dml.configuration.components import Waits
from dml.configuration.ranges import Size, WholeNumber
from dml.distributed import gather_rows
from dml.errors import UserError
from dml.models.heads import LearnsLater, LocalHead
from dml.models.poolings.means import generalized_mean
from dml.models.precision import without_autocast
from dml.models.transport import transport_plan

SEEDS = 1024  # pooled embeddings that k-centre chooses from, as in the released TensorFlow code


class GeneralizedSumPool(LearnsLater, Waits):
    """A weighted mean of local embeddings: `[B,d,h,w] -> [B,d]` (eq. 4.1).

    Locations near prototypes have large weights: `p_j = (1 - n rho_j) / mu`, from the transport plan between
    prototypes and locations at costs `c_ij = |w_i / max(1,|w_i|) - f_j / max(1,|f_j|)|`.

    Args:
        dim: d.
        m: number of prototypes.
        mu: share of the image that is kept; 1 is global average pooling.
        eps: the entropy's weight is 1 / eps. The paper: 5 for losses on pairs, 0.5 for those on proxies.
        solver, iterations: see `dml.models.transport.transport_plan`.
        then: how the weighted embeddings are pooled: `sum` (GSP), or `gemean` (GeMean+GSP, Algorithm 2), the
            generalised mean of the values above 0 with a learned exponent that starts at 3.
        init: of the prototypes. `random`: random directions of unit norm. `kcenter`, after the released code: training
            begins with equal weights, until `init_steps` passes and 1,024 means of local embeddings were seen; then the
            prototypes are chosen from the last 1,024, at unit norm, so that they are far from one another.
        init_steps: passes before prototypes are chosen, with `kcenter`; the released TensorFlow code has 0, and with
            losses on proxies an epoch.

    Raises:
        UserError: there are more prototypes than embeddings that `kcenter` chooses from, or `init_steps` without it.
    """

    pooled: Tensor

    def __init__(
        self,
        dim: int,
        m: Size = 64,
        mu: Annotated[float, Field(gt=0, le=1)] = 0.3,
        eps: Annotated[float, Field(gt=0, le=1000)] = 5.0,
        solver: Literal["newton", "fixed_point"] = "newton",
        iterations: Annotated[int, Field(ge=1, le=10_000)] | None = None,
        then: Literal["sum", "gemean"] = "sum",
        init: Literal["random", "kcenter"] = "random",
        init_steps: WholeNumber = 0,
    ) -> None:
        super().__init__()
        if init == "kcenter" and m > SEEDS:
            raise UserError(
                f"head.m={m} is more than the {SEEDS} embeddings that head.init=kcenter chooses from: lower it."
            )
        if init_steps and init != "kcenter":
            raise UserError(f"head.init_steps={init_steps} is for head.init=kcenter: set that, or head.init_steps=0.")
        self.mu, self.eps, self.solver, self.iterations = mu, eps, solver, iterations
        self.prototypes = nn.Parameter(F.normalize(torch.randn(m, dim)))
        self.exponent = nn.Parameter(torch.tensor(3.0)) if then == "gemean" else None
        self.init_steps = init_steps
        self.waiting = init == "kcenter"  # True until prototypes are chosen
        self.steps = self.kept = 0  # passes and embeddings seen while waiting
        if self.waiting:
            self.register_buffer("pooled", torch.zeros(SEEDS, dim))

    def transport(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the pooling weights `p [B,n]`, of mean 1, and the transport plan `[B,m,n]` of local embeddings.

        Both are in float32 at least.

        Args:
            maps: `[B,d,h,w]`, local embeddings.
        """
        with without_autocast(maps.device):
            cells = _shortened(_cells(maps).transpose(1, 2))  # [B,n,d]
            prototypes = _shortened(self.prototypes.to(cells.dtype))
            rho, plan = transport_plan(_distances(prototypes, cells), self.mu, self.eps, self.solver, self.iterations)
            return (1 - cells.shape[1] * rho) / self.mu, plan

    def forward(self, maps: Tensor, attributes: bool = False) -> Tensor | tuple[Tensor, Tensor | None]:
        """Pools local embeddings: `[B,d,h,w] -> [B,d]`.

        Args:
            maps: `[B,d,h,w]`.
            attributes: also return `z [B,m]`, the share of each prototype in the part that is kept, of sum 1 (eq. 4.3);
                None while there are no prototypes yet.
        """
        if self.waiting and self.training and self.looks:
            self.look(self.summary(maps))
        shares = None
        if self.waiting:
            pooled = self._summed_up(_cells(maps))
        else:
            weights, plan = self.transport(maps)
            shares = plan.sum(-1) / self.mu if attributes else None
            pooled = self._summed_up(_cells(maps) * weights[:, None])
        if self.training and (self.waiting or self.mu == 1):
            pooled = pooled + 0 * self.prototypes.sum()  # under DDP every parameter has to take part
        return (pooled, shares) if attributes else pooled

    def resting(self) -> Iterable[nn.Parameter]:
        return (self.prototypes,) if self.waiting else ()

    def waits(self, images: int) -> dict[str, int]:
        if not self.waiting:
            return {}
        chosen = math.ceil(SEEDS / images)
        return {f"head.init_steps={self.init_steps}": self.init_steps, f"head.init=kcenter ({SEEDS} images)": chosen}

    def _summed_up(self, cells: Tensor) -> Tensor:
        """Pools weighted embeddings as `then` says: `[B,d,n] -> [B,d]`."""
        if self.exponent is not None:
            return generalized_mean(cells, self.exponent, eps=1e-6)
        return cells.mean(-1)

    def summary(self, inputs: Tensor) -> Tensor:
        """Returns the mean of local embeddings, at unit norm: `[B,d,h,w] -> [B,d]`."""
        return F.normalize(_cells(inputs.detach()).mean(-1))

    @torch.no_grad()
    def look(self, seen: Tensor) -> None:
        """Remembers pooled embeddings of all ranks, and chooses prototypes from them once there are enough."""
        new = gather_rows(seen)[-SEEDS:]
        self.pooled.copy_(torch.cat([self.pooled[len(new) :], new]))
        self.kept, self.steps = self.kept + len(new), self.steps + 1
        if self.kept >= SEEDS and self.steps > self.init_steps:
            # In place, since the optimizer holds this parameter.
            self.prototypes.copy_(k_centres(self.pooled, len(self.prototypes)))
            self.waiting = False

    # Whether there are prototypes has to be in the checkpoint, in files that hold tensors alone, and known on the host.

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.waiting, self.steps, self.kept])

    def set_extra_state(self, state: Tensor) -> None:
        waiting, self.steps, self.kept = state.tolist()
        self.waiting = bool(waiting)


class GSPHead(LocalHead):
    """Local embeddings, pooled by `GeneralizedSumPool`: `[B,C,h,w] -> [B,d]`.

    Args:
        in_channels, dim: see `LocalHead`.
        add_max: add the maximum of the features over the locations, embedded by the same linear layer (GMP+GSP). The
            paper prints no formula; the released code adds it so, to compare with the sum of average and maximum.
        options: see `GeneralizedSumPool`.
    """

    options_of = GeneralizedSumPool
    pooling: GeneralizedSumPool

    def __init__(self, in_channels: int, dim: Size, *, add_max: bool = False, **options: Any) -> None:
        super().__init__(GeneralizedSumPool(dim, **options), in_channels, dim)
        self.add_max = add_max

    def forward(self, features: Tensor, attributes: bool = False) -> Any:
        """Pools features `[B,C,h,w]`; arguments and result are those of `GeneralizedSumPool.forward`."""
        pooled = self.pooling(self.locals(features), attributes)
        if not self.add_max:
            return pooled
        largest = self.projection(features.amax((2, 3)))
        return (pooled[0] + largest, pooled[1]) if attributes else pooled + largest


def k_centres(points: Tensor, count: int) -> Tensor:
    """Chooses the first point, then again and again the point that is farthest from those chosen (Gonzalez 1985).

    scikit-learn's `kmeans_plusplus` draws at random instead.

    Args:
        points: `[N,d]`.
        count: number of points to choose.

    Returns:
        `[count,d]`.
    """
    chosen = [0]
    nearest = torch.linalg.vector_norm(points - points[0], dim=1)
    while len(chosen) < count:
        chosen.append(int(nearest.argmax()))
        nearest = nearest.minimum(torch.linalg.vector_norm(points - points[chosen[-1]], dim=1))
    return points[chosen]


def _cells(maps: Tensor) -> Tensor:
    """Flattens maps `[B,d,h,w]` to `[B,d,n]`, in float32 at least."""
    return maps.flatten(2).to(torch.promote_types(maps.dtype, torch.float32))


def _shortened(vectors: Tensor) -> Tensor:
    """Computes `u / max(1, |u|)` along the last axis."""
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp(min=1)


def _distances(prototypes: Tensor, cells: Tensor) -> Tensor:
    """Computes distances `[B,m,n]` of `[m,d]` and `[B,n,d]`. Where a location equals a prototype the gradient is 0."""
    squares = prototypes.square().sum(-1)[:, None] + cells.square().sum(-1)[:, None]
    products = torch.matmul(prototypes, cells.transpose(1, 2))
    return (squares - 2 * products).clamp(min=1e-12).sqrt()

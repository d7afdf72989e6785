"""GSP: generalized sum pooling with zero-shot regularisation (Gurbuz et al., ICCV 2023).

B images, d width of the embedding, m prototypes.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from dml.distributed import gather
from dml.errors import UserError
from dml.losses.zero_shot import ZeroShotPrediction
from dml.methods.base import NewHead, NewLoss, Shares
from dml.methods.baseline import Baseline
from dml.models.backbones.stages import Backbone
from dml.models.gsp import GSPHead
from dml.ranges import Count, Positive, Share


class GSP(Baseline):
    """The plain embedding, pooled by optimal transport, with a zero-shot loss on what the prototypes were given.

    `(1 - lambda) L_DML + lambda L_ZS` (section 4.3), whatever the metric loss. Without that loss, and with any method,
    the pooling is `head=gsp`.

    Args:
        backbone: images -> features.
        head: makes a `GSPHead`.
        loss, dim: see `dml.methods.base`.
        classes: of the training images.
        lambda_zs: lambda; 0 leaves the zero-shot loss out.
        ridge, logit_scale: see `ZeroShotPrediction`.
        options: see `Method`.

    Raises:
        UserError: another head.
    """

    head: GSPHead

    def __init__(
        self,
        backbone: Backbone,
        head: NewHead,
        loss: NewLoss,
        dim: int,
        *,
        classes: Count,
        lambda_zs: Share = 0.1,
        ridge: Positive = 0.05,
        logit_scale: Positive = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(backbone, head, loss, dim, **options)
        if not isinstance(self.head, GSPHead):
            raise UserError("method=gsp pools with head=gsp: give it, or choose method=baseline for another head.")
        self.lambda_zs = lambda_zs
        self.zero_shot = ZeroShotPrediction(classes, dim, ridge, logit_scale) if lambda_zs else None
        self.head.pooling.keeps_attributes = self.zero_shot is not None

    def objective(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        metric = super().objective(embeddings, labels)["metric"]
        if self.zero_shot is None:
            return {"metric": metric}
        attributes, self.head.pooling.attributes = self.head.pooling.attributes, None
        if attributes is None:  # prototypes are still to come; under DDP every parameter has to take part
            value = 0 * self.zero_shot.embeddings.sum()
        else:
            value = self.lambda_zs * self.zero_shot(gather(attributes, labels)[0], labels)
        return {"metric": (1 - self.lambda_zs) * metric, "zero_shot": value}

    def on_after_backward(self) -> None:
        super().on_after_backward()
        if self.head.pooling.waiting and self.zero_shot is not None:
            self.zero_shot.embeddings.grad = None

    def shares(self, images: Tensor) -> Shares | None:
        """As the paper's Fig. 3b and Fig. 5."""
        if self.head.pooling.waiting:
            return None
        maps = self.head.locals(self.backbone(images))
        weights, plan = self.head.pooling.transport(maps)
        size = maps.shape[2:]
        attributes = plan.sum(-1) / self.head.pooling.mu
        return Shares(weights.unflatten(1, size), plan.argmax(1).unflatten(1, size), attributes)

    def fresh(self) -> Iterable[nn.Module]:
        return (self.head,) if self.zero_shot is None else (self.head, self.zero_shot)

    def training_only(self) -> Iterable[nn.Module]:
        return super().training_only() if self.zero_shot is None else (*super().training_only(), self.zero_shot)

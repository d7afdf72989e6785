"""Learners that each see a random part of the features (the random subspace method: Ho, IEEE TPAMI 1998).

B images, M learners, d = D/M width of one learner, C channels of the backbone.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dml.configuration.ranges import Few, Share
from dml.methods.base import Method, NewHead, NewLoss, Output, share
from dml.models.backbones.stages import Backbone


class Subspaces(Method):
    """M learners on one backbone, each on its own random share of the channels.

    Args:
        backbone, head, loss, dim: see `dml.methods.base`.
        M: learners.
        kept: the share of the channels that a learner sees (Ho, section 3: a half).
        options: see `Method`.
    """

    counted_by = ("M",)
    masks: Tensor

    def __init__(
        self, backbone: Backbone, head: NewHead, loss: NewLoss, dim: int, *, M: Few, kept: Share, **options: Any
    ) -> None:
        d = share(dim, M, "method.M")
        super().__init__(normalize=backbone.normalize, losses=[loss(d) for _ in range(M)], **options)
        self.backbone = backbone
        self.heads = nn.ModuleList(head(d) for _ in range(M))
        chosen = torch.rand(M, backbone.dim).argsort(1) < max(1, round(kept * backbone.dim))
        self.register_buffer("masks", chosen[:, :, None, None].float())  # [M,C,1,1], in every checkpoint

    def learners(self, images: Tensor) -> Output:
        features = self.backbone(images)  # [B,C,h,w]
        learners = [head(features * mask) for head, mask in zip(self.heads, self.masks, strict=True)]
        return Output(torch.stack(learners, dim=1))

    def new_modules(self) -> Iterable[nn.Module]:
        return (self.heads,)

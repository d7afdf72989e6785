"""ABE-M: attention-based ensemble (Kim et al., ECCV 2018).

B images, M learners, d = D/M width of one learner; S, A', C, G as in section 4 of the paper.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dml.losses import functional
from dml.methods.base import Method
from dml.models.backbones.stages import Backbone
from dml.models.heads import Head


class ABE(Method):
    """M learners `G(S(x) * A_m(S(x)))` that share everything but their attention masks (eq. 7).

    `A_m(S) = sigmoid(A'_m(C(S)))`: C is a second copy of a run of backbone stages, shared by all learners and free
    of pooling, so that masks have the resolution of S; A'_m is a 1x1 convolution to the channels of S. All learners
    pass the shared G in one call, stacked on the batch axis.

    Args:
        backbone: split into S and G after the stage `branch`.
        head: G's last layer, shared by all learners too; its width is d.
        M: number of learners.
        lambda_div: weight of the divergence loss (eq. 8).
        margin_div: margin of the divergence loss (eq. 9).
        branch: last stage of S; None: the backbone's own choice (GoogLeNet: pool3, as in the paper).
        attention_end: last stage that C copies; None: the backbone's own choice (GoogLeNet: inception4e).
        options: see `Method`.

    Raises:
        UserError: a stage that the backbone lacks.
    """

    def __init__(
        self,
        backbone: Backbone,
        head: Head,
        *,
        M: int,
        lambda_div: float = 1.0,
        margin_div: float = 1.0,
        branch: str | None = None,
        attention_end: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(normalize=backbone.normalize, **options)
        self.M, self.lambda_div, self.margin_div = M, lambda_div, margin_div
        branch = branch or backbone.branch
        self.spatial, self.embedding = backbone.split(branch)  # S and G of the paper
        first = next(iter(self.embedding.stages))
        self.attention = backbone.copy_of(first, attention_end or backbone.attention_end, keep_resolution=True)  # C
        self.spatial_channels = list(self.spatial.out_channels.values())[-1]
        attention_channels = list(self.attention.out_channels.values())[-1]
        self.masks = nn.Conv2d(attention_channels, M * self.spatial_channels, kernel_size=1)  # A'_1 .. A'_M
        for weight in self.masks.weight.chunk(M):
            nn.init.xavier_uniform_(weight)  # Glorot & Bengio, as the paper's section 4; fans of one learner's layer
        nn.init.zeros_(self.masks.bias)  # type: ignore[arg-type]
        self.head = head

    def attention_masks(self, spatial: Tensor) -> Tensor:
        """`S(x) [B,C,h,w]` -> masks in (0,1) `[B,M,C,h,w]`."""
        return torch.sigmoid(self.masks(self.attention(spatial))).unflatten(1, (self.M, self.spatial_channels))

    def learners(self, images: Tensor) -> Tensor:
        spatial = self.spatial(images)  # [B,C,h,w]
        attended = spatial[:, None] * self.attention_masks(spatial)  # [B,M,C,h,w]
        stacked = attended.flatten(0, 1).contiguous(memory_format=torch.channels_last)  # [B*M,C,h,w]
        return self.head(self.embedding(stacked)).unflatten(0, (-1, self.M))

    def objective(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Eq. 8: the learners' metric losses, and the divergence loss that keeps them apart."""
        terms = super().objective(embeddings, labels)
        if self.lambda_div:
            terms["divergence"] = self.lambda_div * functional.divergence(embeddings, self.margin_div)
        return terms

    def fresh(self) -> Iterable[nn.Module]:
        return self.masks, self.head

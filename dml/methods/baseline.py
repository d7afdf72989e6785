"""The baseline: one backbone, one head and one loss, to which every method is compared."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from dml.methods.base import Method, NewHead, NewLoss, Output
from dml.models.backbones.stages import Backbone


class Baseline(Method):
    """The plain embedding, L = 1 (ABE's "1-head", DeML's U_d, DCES with K = 1).

    Args:
        backbone: images -> features.
        head, loss, dim: see `dml.methods.base`.
        options: see `Method`.
    """

    def __init__(self, backbone: Backbone, head: NewHead, loss: NewLoss, dim: int, **options: Any) -> None:
        super().__init__(normalize=backbone.normalize, losses=[loss(dim)], **options)
        self.backbone = backbone
        self.head = head(dim)

    def learners(self, images: Tensor) -> Output:
        return Output(self.head(self.backbone(images))[:, None])

    def new_modules(self) -> Iterable[nn.Module]:
        return (self.head,)

"""From a feature map to one learner's embedding."""

from torch import Tensor, nn


class Head(nn.Module):
    """Pooling followed by a linear projection: `[B,C,h,w] -> [B,d]`, not yet normalised.

    Args:
        pooling: `[B,C,h,w] -> [B,C,1,1]`.
        in_channels: C.
        dim: d, the width of the learner.
    """

    def __init__(self, pooling: nn.Module, in_channels: int, dim: int) -> None:
        super().__init__()
        self.pooling = pooling
        self.projection = nn.Linear(in_channels, dim)
        # Glorot & Bengio 2010, as ABE section 4 and most released metric-learning code.
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    @property
    def dim(self) -> int:
        return self.projection.out_features

    def forward(self, features: Tensor) -> Tensor:
        return self.projection(self.pooling(features).flatten(1))

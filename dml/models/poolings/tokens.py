"""The class token of a transformer in place of its patches, or beside them."""

import torch
from torch import Tensor, nn

from dml.errors import UserError
from dml.models.tokens import TokenMap, taken


class ClassToken(nn.Module):
    """`[B,C,h,w] -> [B,C,1,1]`, the first of the tokens that travel beside the map.

    Raises:
        UserError: (forward) a map of a backbone that has none.
    """

    times = 1  # channels out of each channel in

    def forward(self, features: Tensor) -> Tensor:
        if not isinstance(features, TokenMap):
            raise UserError("head=cls and head=cls_avg take the class token, and this backbone has none: try head=avg.")
        _, tokens = taken(features, features.tokens.shape[1])
        return tokens[:, 0, :, None, None]


class ClassTokenAndAverage(ClassToken):
    """`[B,C,h,w] -> [B,2C,1,1]`: the class token, then the mean of the patches (Oquab et al. 2023, DINOv2)."""

    times = 2

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([super().forward(features), features.as_subclass(Tensor).mean((2, 3), keepdim=True)], dim=1)

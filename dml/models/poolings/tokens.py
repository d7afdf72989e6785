"""Poolings that use the class token of a transformer in place of its patches, or together with them."""

import torch
from torch import Tensor, nn

from dml.errors import UserError
from dml.models.tokens import TokenMap, taken

NO_CLASS_TOKEN = "head=cls and head=cls_avg use the class token, but this backbone has none: choose head=avg."


class ClassToken(nn.Module):
    """The class token, the first of the tokens that the map carries along: `[B,C,h,w] -> [B,C,1,1]`.

    Whether the first one is a class token, and no register, only the backbone knows: `Backbone.class_token`.

    Raises:
        UserError: (forward) the map carries no tokens along.
    """

    times = 1  # output channels per input channel

    def forward(self, features: Tensor) -> Tensor:
        if not isinstance(features, TokenMap):
            raise UserError(NO_CLASS_TOKEN)
        _, tokens = taken(features, features.tokens.shape[1])
        return tokens[:, 0, :, None, None]


class ClassTokenAndAverage(ClassToken):
    """The class token, then the mean of the patches: `[B,C,h,w] -> [B,2C,1,1]` (Oquab et al. 2023, DINOv2)."""

    times = 2

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([super().forward(features), features.mean((2, 3), keepdim=True)], dim=1)

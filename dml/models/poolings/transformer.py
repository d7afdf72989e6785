"""TFM-n: transformer layers with a class token in place of a pooling (GSP, Table 6, after Dosovitskiy et al. 2021)."""

import torch
from timm.layers import build_sincos2d_pos_embed
from torch import Tensor, nn

from dml.configuration.ranges import Few
from dml.errors import UserError


class TransformerPool(nn.Module):
    """The class token after some encoder layers: `[B,d,h,w] -> [B,d]`.

    The layers are those of ViT: norm first, GELU, a perceptron of four times the width. Positions are encoded by fixed
    sines and cosines, so that maps of any size can be used.

    Args:
        dim: d, a multiple of 4 and of `heads`.
        layers: n.
        heads: number of attention heads.

    Raises:
        UserError: the width is no multiple of 4 and of the number of heads.
    """

    def __init__(self, dim: int, layers: Few = 1, heads: Few = 4) -> None:
        super().__init__()
        if dim % heads or dim % 4:
            raise UserError(
                f"head.pooling.heads={heads}: the width of a learner, {dim}, has to be a multiple of it and of 4: "
                "change either of them."
            )
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        nn.init.normal_(self.token, std=0.02)
        layer = nn.TransformerEncoderLayer(
            dim, heads, 4 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
        for copied in self.layers.layers:  # TransformerEncoder starts all layers from the same draws
            for parameter in copied.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)

    def forward(self, features: Tensor) -> Tensor:
        height, width = features.shape[2:]
        places = build_sincos2d_pos_embed([height, width], features.shape[1], device=features.device)
        cells = features.flatten(2).transpose(1, 2) + places.to(features.dtype)
        return self.layers(torch.cat([self.token.expand(cells.shape[0], 1, -1), cells], dim=1))[:, 0]

"""Alignment and uniformity on the hypersphere (Wang & Isola, ICML 2020), with labels for pairs.

N embeddings of width d.
"""

import torch
from torch import Tensor, nn

from dml.configuration.ranges import NotNegative, Positive
from dml.losses.functional import all_pairs


class AlignmentUniformity(nn.Module):
    """Images of one class come together, all images spread (eq. 8 and 9, with alpha = 2).

    Args:
        t: sharpness of the Gaussian potential.
        weight: of uniformity beside alignment.
    """

    def __init__(self, t: Positive = 2.0, weight: NotNegative = 1.0) -> None:
        super().__init__()
        self.t, self.weight = t, weight

    def forward(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """`embeddings [N,d]` of unit norm, `labels [N]` -> the terms `alignment` and `uniformity`, zero without a
        pair of their kind."""
        squared = 2 - 2 * embeddings @ embeddings.T  # [N,N]
        positive, negative = all_pairs(labels)
        alignment = (squared * positive).sum() / positive.sum().clamp(min=1)
        other = positive | negative  # all but an image with itself
        potential = torch.exp(-self.t * squared) * other
        uniformity = (potential.sum() / other.sum().clamp(min=1)).clamp(min=1e-12).log()
        return {"alignment": alignment, "uniformity": self.weight * uniformity}

"""Alignment and uniformity on the hypersphere (Wang & Isola, ICML 2020), with labels for pairs.

N embeddings of width d.
"""

import torch
from torch import Tensor, nn

from dml.configuration.ranges import NotNegative, Positive
from dml.losses.functional import all_pairs


class AlignmentUniformity(nn.Module):
    """Pulls images of one class together and spreads all images over the sphere (eq. 8 and 9, with alpha = 2).

    Args:
        t: sharpness of the Gaussian potential.
        weight: of uniformity, relative to alignment.
    """

    def __init__(self, t: Positive = 2.0, weight: NotNegative = 1.0) -> None:
        super().__init__()
        self.t, self.weight = t, weight

    def forward(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns the terms `alignment` and `uniformity`; alignment is 0 if no two images are of one class.

        Args:
            embeddings: `[N,d]` of unit norm.
            labels: `[N]`.
        """
        squared = 2 - 2 * embeddings @ embeddings.T  # [N,N]
        positive, negative = all_pairs(labels)
        alignment = (squared * positive).sum() / positive.sum().clamp(min=1)
        other = positive | negative  # all pairs except those of an image with itself
        potential = torch.exp(-self.t * squared) * other
        uniformity = (potential.sum() / other.sum().clamp(min=1)).clamp(min=1e-12).log()
        return {"alignment": alignment, "uniformity": self.weight * uniformity}

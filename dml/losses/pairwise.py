"""The modules around `dml.losses.functional` that take a learner's `embeddings [N,d], labels [N]`."""

from torch import Tensor, nn

from dml.losses import functional


class SquaredContrastive(nn.Module):
    """`functional.contrastive` (ABE eq. 10).

    pytorch-metric-learning's ContrastiveLoss averages positive and negative pairs apart; eq. 10 sums over both
    and divides by the number of images.
    """

    def __init__(self, margin: float = 1.0) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return functional.contrastive(embeddings, labels, self.margin)


class BinomialDeviance(nn.Module):
    """`functional.binomial_deviance` (DIABLO, DeML)."""

    def __init__(self, alpha: float = 2.0, beta: float = 0.5, gamma: float = 25.0) -> None:
        super().__init__()
        self.alpha, self.beta, self.gamma = alpha, beta, gamma

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return functional.binomial_deviance(embeddings, labels, self.alpha, self.beta, self.gamma)

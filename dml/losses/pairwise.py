"""Loss modules that apply the formulas of `dml.losses.functional` to a learner's `embeddings [N,d], labels [N]`."""

from typing import Annotated, Any, Literal

from pydantic import Field
from pytorch_metric_learning.losses import TupletMarginLoss
from pytorch_metric_learning.reducers import BaseReducer
from torch import Tensor, nn

from dml.configuration.ranges import NotNegative, Number, Positive, Share, Sharpness
from dml.losses import functional

Temperature = Annotated[float, Field(ge=0, le=1e4)]


class SquaredContrastive(nn.Module):
    """Contrastive loss on squared distances (ABE eq. 10).

    pytorch-metric-learning's ContrastiveLoss averages positive and negative pairs separately; eq. 10 sums over both
    and divides by the number of images.

    Args:
        margin: m_c of the paper.
        pairs: `all` pairs of the batch (`functional.contrastive`), or only the `explicit` ones that the sampler
            `abe_pairs` drew (`functional.contrastive_of_pairs`).
    """

    def __init__(self, margin: Positive = 1.0, pairs: Literal["all", "explicit"] = "all") -> None:
        super().__init__()
        self.margin = margin
        self.needs_pairs = pairs == "explicit"  # pairs that the sampler draws

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        formula = functional.contrastive_of_pairs if self.needs_pairs else functional.contrastive
        return formula(embeddings, labels, self.margin)


class CosineContrastive(nn.Module):
    """`functional.cosine_contrastive` (DIABLO).

    pytorch-metric-learning's ContrastiveLoss on cosine similarities does not square the term of positive pairs.

    Args:
        margin: negative pairs that are more similar than this are pushed apart.
    """

    def __init__(self, margin: Number = 0.5) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return functional.cosine_contrastive(embeddings, labels, self.margin)


class BinomialDeviance(nn.Module):
    """`functional.binomial_deviance` (DIABLO, DeML).

    Args:
        alpha: scale of the exponents.
        beta: the cosine similarity that separates positive from negative pairs.
        gamma: weight of negatives in the exponent (DIABLO: C = 25; DeML: 35).
    """

    def __init__(self, alpha: Positive = 2.0, beta: Number = 0.5, gamma: Positive = 25.0) -> None:
        super().__init__()
        self.alpha, self.beta, self.gamma = alpha, beta, gamma

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return functional.binomial_deviance(embeddings, labels, self.alpha, self.beta, self.gamma)


class Instance(nn.Module):
    """`functional.instance`."""

    def __init__(self, gamma: Sharpness = 64.0) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return functional.instance(embeddings, labels, self.gamma)


class RankedList(nn.Module):
    """`functional.ranked_list`."""

    def __init__(
        self,
        alpha: Positive = 1.2,
        margin: NotNegative = 0.4,
        temperatures: tuple[Temperature, Temperature] = (0.0, 10.0),
        imbalance: Share = 0.5,
    ) -> None:
        super().__init__()
        self.alpha, self.margin, self.imbalance = alpha, margin, imbalance
        self.temperatures = temperatures

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return functional.ranked_list(embeddings, labels, self.alpha, self.margin, self.temperatures, self.imbalance)


class MultiSimilarity(nn.Module):
    """`functional.multi_similarity` of the pairs that the miner selects, or of all pairs without a miner.

    pytorch-metric-learning's MultiSimilarityLoss is the same, but with lists of pairs, whose lengths depend on the
    embeddings.

    Args:
        base: lambda of the paper.
    """

    masks = True  # it takes masks from a miner, not indices

    def __init__(self, alpha: Sharpness = 2.0, beta: Sharpness = 40.0, base: Number = 0.5) -> None:
        super().__init__()
        self.alpha, self.beta, self.base = alpha, beta, base

    def forward(self, embeddings: Tensor, labels: Tensor, pairs: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Computes the loss; `pairs` are the positive and the negative pairs, `[N,N]` bool each."""
        positive, negative = functional.all_pairs(labels) if pairs is None else pairs
        return functional.multi_similarity(embeddings, positive, negative, self.alpha, self.beta, self.base)


class SumPerImage(BaseReducer):
    """Sums a loss of pytorch-metric-learning over pairs, and divides by the number of images in the batch.

    Its own reducers take the mean over pairs of each kind, so positive pairs weigh as much as negative ones, however
    many there are.
    """

    def pos_pair_reduction(self, losses: Tensor, pairs: Any, embeddings: Tensor, labels: Tensor) -> Tensor:
        return losses.sum() / len(embeddings)

    neg_pair_reduction = pos_pair_reduction


class TupletMargin(TupletMarginLoss):
    """pytorch-metric-learning's TupletMarginLoss, without its NaN for coinciding images.

    Equal images have a cosine of 1, where the arc cosine has an infinite gradient, or by rounding a larger one, whose
    arc cosine is NaN. Such pairs have an angle of 0 and no gradient.
    """

    def _compute_loss(self, pos_pairs: Any, neg_pairs: Any, indices_tuple: Any) -> Any:
        if isinstance(pos_pairs, Tensor):  # without pairs it is an empty list
            pos_pairs = pos_pairs.where(pos_pairs.abs() < 1, pos_pairs.detach().clamp(-1, 1))
        return super()._compute_loss(pos_pairs, neg_pairs, indices_tuple)

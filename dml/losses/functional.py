"""Loss formulas as pure functions of tensors.

pytorch-metric-learning lacks them, or makes tensors whose sizes depend on values, so that every step would wait for the
device.

N images of a batch, L learners, d width of one learner.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Returns the squared Euclidean distances `[N,M]` of unit-norm rows `a [N,d]` and `b [M,d]`.

    They are computed from inner products, so that the gradient at distance zero is zero and not NaN (as with a root).
    """
    return (2 - 2 * a @ b.mT).clamp(min=0)


def contrastive(embeddings: Tensor, labels: Tensor, margin: float = 1.0) -> Tensor:
    """Contrastive loss on squared distances over all ordered pairs of the batch (ABE eq. 10).

    `1/N sum_ij (1 - y_ij) [margin - D_ij^2]_+ + y_ij D_ij^2`; the pairs (i,i) contribute nothing.

    Args:
        embeddings: `[N,d]`, rows of unit norm.
        labels: `[N]`.

    Returns:
        Scalar.
    """
    distances = squared_distances(embeddings, embeddings)
    same = labels[:, None] == labels[None, :]
    own = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    pairs = torch.where(same, distances, F.relu(margin - distances))
    return pairs.masked_fill(own, 0).sum() / len(embeddings)


def contrastive_of_pairs(embeddings: Tensor, labels: Tensor, margin: float = 1.0) -> Tensor:
    """Contrastive loss over only the pairs that the sampler drew: image i and image i + N/2 (ABE section 4).

    The sum of eq. 10 counts both orders of each pair, so this is the mean over the N/2 pairs.

    Args:
        embeddings: `[N,d]`, rows of unit norm, in the order of `dml.data.samplers.Pairs`.
        labels: `[N]`.

    Returns:
        Scalar.
    """
    first, second = embeddings.chunk(2)
    distances = (2 - 2 * (first * second).sum(-1)).clamp(min=0)
    same = torch.eq(*labels.chunk(2))
    return torch.where(same, distances, F.relu(margin - distances)).mean()


def cosine_contrastive(embeddings: Tensor, labels: Tensor, margin: float = 0.5) -> Tensor:
    """Contrastive loss on cosine similarities s, as in the code of DIABLO's authors (pierre-jacob/ICCV2019-Horde).

    `1/2 mean_pos (1 - s)^2 + 1/2 mean_active [s - margin]_+`: the means are over all positive pairs, and over the
    negative pairs that are more similar than the margin. A kind of pair that the batch lacks contributes zero.

    Args:
        embeddings: `[N,d]`, rows of unit norm.
        labels: `[N]`.

    Returns:
        Scalar.
    """
    similarities = embeddings @ embeddings.mT
    positive, negative = all_pairs(labels)
    active = negative & (similarities > margin)
    return (_masked_mean((1 - similarities).square(), positive) + _masked_mean(similarities - margin, active)) / 2


def divergence(embeddings: Tensor, margin: float = 1.0) -> Tensor:
    """Divergence loss: pushes the learners' embeddings of one image apart (ABE eq. 9).

    `1/N sum_i sum_{p,q} [margin - D(i_p, i_q)^2]_+` over ordered pairs of different learners. The paper's eq. 9 lacks
    the factor 1/N of its eq. 10; here both have it. The effect of a weight on this loss still depends on the metric
    loss and its pairs (`dml.methods.balance`). The pairs p = q would only add a constant.

    Args:
        embeddings: `[N,L,d]`, unit norm per learner.

    Returns:
        Scalar; zero for L = 1.
    """
    distances = squared_distances(embeddings, embeddings)
    own = torch.eye(embeddings.shape[1], dtype=torch.bool, device=embeddings.device)
    return F.relu(margin - distances).masked_fill(own, 0).sum() / len(embeddings)


def repulsion(embeddings: Tensor, margin: float = 2.0) -> Tensor:
    """Contrastive loss that takes the learners of one image for different things (DeML's released code).

    `1/(2N) sum_n sum_{j<j'} [margin - D(j_n, j'_n)]_+^2`, D being the distance, not its square. With margin 2, learners
    of unit norm are pushed apart until they are opposite.

    Args:
        embeddings: `[N,J,d]`, unit norm per learner.

    Returns:
        Scalar; zero for J = 1. Learners that are exactly alike get no gradient.
    """
    first, second = torch.triu_indices(embeddings.shape[1], embeddings.shape[1], 1, device=embeddings.device)
    distances = torch.linalg.vector_norm(embeddings[:, first] - embeddings[:, second], dim=-1)
    return F.relu(margin - distances).square().sum() / (2 * len(embeddings))


def binomial_deviance(
    embeddings: Tensor, labels: Tensor, alpha: float = 2.0, beta: float = 0.5, gamma: float = 25.0
) -> Tensor:
    """Binomial deviance of cosine similarities (Yi et al. 2014; DIABLO section 3.5, DeML section 3.3).

    `mean_pos log(1 + exp(-alpha (s - beta))) + mean_neg log(1 + exp(alpha gamma (s - beta)))`, means over the positive
    and over the negative pairs; a kind of pair that the batch lacks contributes zero.

    Args:
        embeddings: `[N,d]`, rows of unit norm.
        labels: `[N]`.
        gamma: weight of negatives in the exponent (DIABLO: C = 25; DeML: 35).

    Returns:
        Scalar.
    """
    similarities = embeddings @ embeddings.mT
    positive, negative = all_pairs(labels)
    pull = F.softplus(-alpha * (similarities - beta))
    push = F.softplus(alpha * gamma * (similarities - beta))
    return _masked_mean(pull, positive) + _masked_mean(push, negative)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


def instance(embeddings: Tensor, labels: Tensor, gamma: float = 64.0) -> Tensor:
    """Instance loss within a batch (Zheng et al. 2020): classifies each image among one image of each class.

    The first image of each class in the batch stands for its class. The logits of every other image are `gamma` times
    its cosine similarities to these first images. The value is the mean cross-entropy of the other images; zero if
    there are none.

    pytorch-metric-learning's InstanceLoss uses the rank of a label as the place of its image in the batch, which is
    only right for batches with one image per class.

    Args:
        embeddings: `[N,d]`, rows of unit norm.
        labels: `[N]`.

    Returns:
        Scalar.
    """
    same = labels[:, None] == labels[None, :]
    later = same.tril(-1).any(1)
    logits = (gamma * embeddings @ embeddings.mT).masked_fill(later, -torch.inf)
    wrong = F.cross_entropy(logits, same.to(torch.uint8).argmax(1), reduction="none")
    return _masked_mean(wrong, later)


def ranked_list(
    embeddings: Tensor,
    labels: Tensor,
    alpha: float = 1.2,
    margin: float = 0.4,
    temperatures: tuple[float, float] = (0.0, 10.0),
    imbalance: float = 0.5,
) -> Tensor:
    """Ranked list loss (Wang et al. 2019, eq. 3 to 10), with Euclidean distances D.

    `1/N sum_i (1 - imbalance) mean_pos [D - (alpha - margin)]_+ + imbalance mean_neg [alpha - D]_+`. The means of an
    image are over its pairs that violate the bound, weighted by `exp(temperature * violation)`; zero if there are none.

    pytorch-metric-learning's RankedListLoss is the same except for 1e-5 in its denominators, and it warns of the
    paper's temperature.

    Args:
        embeddings: `[N,d]`, rows of unit norm.
        labels: `[N]`.
        temperatures: of the weights of positive and of negative pairs.

    Returns:
        Scalar.
    """
    distances = squared_distances(embeddings, embeddings).clamp(min=1e-12).sqrt()
    bounds = F.relu(distances - (alpha - margin)), F.relu(alpha - distances)
    means = []
    for pairs, over, temperature in zip(all_pairs(labels), bounds, temperatures, strict=True):
        violation = torch.where(pairs, over, 0)
        weights = (temperature * violation).masked_fill(violation == 0, -1e30).softmax(1)
        means.append((weights * violation).sum(1))
    return ((1 - imbalance) * means[0] + imbalance * means[1]).mean()


def multi_similarity_pairs(embeddings: Tensor, labels: Tensor, epsilon: float = 0.1) -> tuple[Tensor, Tensor]:
    """Selects the pairs that multi-similarity mines (Wang et al. 2019, eq. 11 and 12).

    A positive pair (i,j) is selected if its similarity is below that of the most similar negative of i, plus epsilon; a
    negative pair if its similarity is above that of the least similar positive of i, minus epsilon.

    Args:
        embeddings: `[N,d]`, rows of unit norm.
        labels: `[N]`.

    Returns:
        Positive and negative pairs, `[N,N]` bool each.
    """
    similarities = embeddings @ embeddings.mT
    positive, negative = all_pairs(labels)
    nearest = similarities.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
    farthest = similarities.masked_fill(~positive, torch.inf).amin(1, keepdim=True)
    return positive & (similarities - epsilon < nearest), negative & (similarities + epsilon > farthest)


def all_pairs(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which pairs of the images with labels `[N]` are positive and which are negative, `[N,N]` bool each."""
    same = labels[:, None] == labels[None, :]
    own = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return same & ~own, ~same


def multi_similarity(
    embeddings: Tensor, positive: Tensor, negative: Tensor, alpha: float = 2.0, beta: float = 40.0, base: float = 0.5
) -> Tensor:
    """Multi-similarity loss of some pairs (Wang et al. 2019, eq. 15), with cosine similarities s.

    `1/N sum_i 1/alpha log(1 + sum_pos exp(-alpha (s_ij - base))) + 1/beta log(1 + sum_neg exp(beta (s_ij - base)))`

    As in pytorch-metric-learning, the value is zero if at most one positive and at most one negative pair are selected.

    Args:
        embeddings: `[N,d]`, rows of unit norm.
        positive, negative: `[N,N]` bool, the selected pairs.
        base: lambda of the paper.

    Returns:
        Scalar.
    """
    similarities = embeddings @ embeddings.mT
    pull = _softplus_of_sum(-alpha * (similarities - base), positive) / alpha
    push = _softplus_of_sum(beta * (similarities - base), negative) / beta
    enough = (positive.sum() > 1) | (negative.sum() > 1)
    return torch.where(enough, (pull + push).mean(), 0)


def _softplus_of_sum(exponents: Tensor, mask: Tensor) -> Tensor:
    """Computes `log(1 + sum_j exp(x_ij))` over the mask, `[N,M] -> [N]`."""
    return F.pad(exponents.masked_fill(~mask, -torch.inf), (0, 1)).logsumexp(1)


def activation_decay(outputs: Tensor, weights: Sequence[Tensor], decay: float, unit_rows: float) -> Tensor:
    """Keeps the outputs of learners small, and the rows of their layers at unit norm (DeML eq. 6).

    `decay / (2 L N) sum |outputs|^2 + unit_rows sum_l tr[(W_l W_l^T - I) * (W_l W_l^T - I)]`, with an elementwise
    product, so that the trace only sees the rows' squared norms.

    Args:
        outputs: `[N,L,d]`, not normalised.
        weights: of the learners' layers, each `[d,C]`.
        decay, unit_rows: lambda_1 and lambda_2 of the paper.

    Returns:
        Scalar.
    """
    rows = sum(((weight.square().sum(1) - 1).square().sum() for weight in weights), outputs.new_zeros(()))
    return decay / 2 * outputs.square().sum(-1).mean() + unit_rows * rows


def discrepancy(mapped: Tensor) -> Tensor:
    """Measures how far apart the learners of an image are: `1/N sum_n sum_{j,j'} |a_nj - a_nj'|^2` (DeML eq. 4).

    Args:
        mapped: `[N,J,d]`, the adversary's outputs a.

    Returns:
        Scalar; zero for J = 1.
    """
    learners = mapped.shape[1]
    together = mapped.sum(1).square().sum(-1)
    return 2 * (learners * mapped.square().sum((1, 2)) - together).mean()


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def reverse(values: Tensor) -> Tensor:
    """Returns the values unchanged, but reverses the sign of their gradient (Ganin et al. 2016; DeML Fig. 3c)."""
    return _Reverse.apply(values)

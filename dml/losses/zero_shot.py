"""Cross-batch zero-shot prediction (GSP, section 4.3): attributes of some classes have to tell others apart.

N images of a batch, m attributes, C classes, e width of a class embedding.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dml.configuration.ranges import Positive
from dml.errors import UserError


class ZeroShotPrediction(nn.Module):
    """`attributes [N,m], labels [N] -> scalar` (eq. 4.4, Algorithm 4).

    The classes of the batch are parted at random into two halves. A ridge regression from the attributes of one half
    to its classes' embeddings predicts the embeddings for the other half, and the softmax over all classes' embeddings
    should find the right ones. The classes' embeddings are learned along.

    The value is the mean over the two halves; eq. 4.4 writes their sum, Algorithm 4 the mean over the batch, which is
    the same where the halves are equal.

    Args:
        classes: C.
        width: e.
        ridge: weight of the regression's penalty (the paper's epsilon, 0.05).
        logit_scale: factor of the softmax's logits; the paper has none, the released code 9.5.

    Raises:
        UserError: an option out of range; on a batch, fewer than two classes.
    """

    def __init__(self, classes: int, width: int, ridge: Positive = 0.05, logit_scale: Positive = 1.0) -> None:
        super().__init__()
        self.ridge, self.logit_scale = ridge, logit_scale
        self.embeddings = nn.Parameter(torch.empty(classes, width))
        nn.init.kaiming_normal_(self.embeddings)

    def forward(self, attributes: Tensor, labels: Tensor) -> Tensor:
        first = class_halves(labels)
        halves = [(attributes[rows], labels[rows]) for rows in (first, ~first)]
        return (self._of_half(*halves[0], *halves[1]) + self._of_half(*halves[1], *halves[0])) / 2

    def _of_half(self, known: Tensor, known_labels: Tensor, unknown: Tensor, labels: Tensor) -> Tensor:
        """The loss of one half's images, predicted from the other half."""
        predicted = ridge_prediction(known, self.embeddings[known_labels], unknown, self.ridge)
        return F.cross_entropy(self.logit_scale * predicted @ self.embeddings.to(predicted.dtype).T, labels)


def class_halves(labels: Tensor) -> Tensor:
    """`[N]` bool: the images of a random half of the batch's classes (the smaller half where their number is odd).

    Draws from torch's global generator, which is seeded by the step.

    Raises:
        UserError: fewer than two classes.
    """
    classes = labels.unique()
    if len(classes) < 2:
        raise UserError(
            "The zero-shot loss parts the classes of a batch in two, and a batch has one class only: raise "
            "sampler.batch_size, lower sampler.m, or set method.lambda_zs=0."
        )
    order = torch.randperm(len(classes)).to(labels.device)
    return torch.isin(labels, classes[order[: len(classes) // 2]])


def ridge_prediction(inputs: Tensor, targets: Tensor, queries: Tensor, ridge: float) -> Tensor:
    """Ridge regression without intercept (P3), fitted and applied: `[a,m]`, `[a,e]`, `[b,m]` -> `[b,e]`.

    In the dual form, whose system has the size of a half batch. In float32 at least: the kernel of a class's images is
    nearly singular.
    """
    kind = torch.promote_types(inputs.dtype, torch.float32)
    inputs, targets, queries = inputs.to(kind), targets.to(kind), queries.to(kind)
    with torch.autocast(inputs.device.type, enabled=False):
        kernel = inputs @ inputs.T
        kernel = kernel + ridge * torch.eye(len(inputs), dtype=kind, device=inputs.device)
        return queries @ inputs.T @ torch.linalg.solve(kernel, targets)

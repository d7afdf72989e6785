"""Cross-batch zero-shot prediction (GSP, section 4.3): attributes of some classes have to tell others apart.

N images of a batch, m attributes, C classes, e width of a class embedding.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dml.configuration.ranges import Positive


class ZeroShotPrediction(nn.Module):
    """`attributes [N,m], labels [N] -> scalar` (eq. 4.4, Algorithm 4).

    The classes of the batch are parted at random into two halves. A ridge regression from the attributes of one half
    to its classes' embeddings predicts the embeddings for the other half, and the softmax over all classes' embeddings
    should find the right ones. The classes' embeddings are learned along.

    The value is the mean over the two halves; eq. 4.4 writes their sum, Algorithm 4 the mean over the batch, which is
    the same where the halves are equal. A batch of a single class has nothing to predict, and the value 0.

    Args:
        classes: C.
        width: e.
        ridge: weight of the regression's penalty (the paper's epsilon, 0.05).
        logit_scale: factor of the softmax's logits; the paper has none, the released code 9.5.

    Raises:
        UserError: an option out of range.
    """

    def __init__(self, classes: int, width: int, ridge: Positive = 0.05, logit_scale: Positive = 1.0) -> None:
        super().__init__()
        self.ridge, self.logit_scale = ridge, logit_scale
        self.embeddings = nn.Parameter(torch.empty(classes, width))
        nn.init.kaiming_normal_(self.embeddings)

    def forward(self, attributes: Tensor, labels: Tensor) -> Tensor:
        first = class_halves(labels)
        known = torch.stack([first, ~first])  # [2,N]
        predicted = ridge_prediction(attributes, self.embeddings[labels], known, self.ridge)  # [2,N,e]
        logits = self.logit_scale * predicted @ self.embeddings.to(predicted.dtype).T
        # Flat, as a GPU has no deterministic one of more axes.
        wrong = F.cross_entropy(logits.flatten(0, 1), labels.repeat(2), reduction="none").view(known.shape)
        # Where a half is empty nothing can be predicted.
        of_halves = torch.where(known, 0, wrong).sum(1) / (~known).sum(1).clamp(min=1)
        return torch.where(first.any() & ~first.all(), of_halves.mean(), 0)


def class_halves(labels: Tensor) -> Tensor:
    """`[N]` bool: the images of a random half of the batch's classes (the smaller half where their number is odd; none
    of a single class).

    Draws from torch's global generator of the CPU, which is seeded by the step.
    """
    count = len(labels)
    order, places = labels.sort()
    number = F.pad(order[1:] != order[:-1], (1, 0)).cumsum(0)  # of the class, 0 and up
    classes = number[-1] + 1
    # A copy that the host does not wait for.
    drawn = torch.randperm(count, pin_memory=labels.is_cuda).to(labels.device, non_blocking=True)
    # A class is as far ahead as its number was drawn among those that the batch has.
    ahead = (drawn[:, None] > drawn) & (torch.arange(count, device=labels.device) < classes)
    return torch.zeros_like(labels, dtype=torch.bool).scatter(0, places, (ahead.sum(1) < classes // 2)[number])


def ridge_prediction(inputs: Tensor, targets: Tensor, known: Tensor, ridge: float) -> Tensor:
    """Ridge regression without intercept (P3), fitted to some rows and applied to all.

    In the dual form, in float32 at least: the kernel of a class's images is nearly singular. Rows that are not known
    are zero there, so that sizes do not depend on how many are.

    Args:
        inputs, targets: `[N,m]`, `[N,e]`.
        known: `[...,N]` bool, the rows that a regression is fitted to.

    Returns:
        `[...,N,e]`.
    """
    kind = torch.promote_types(inputs.dtype, torch.float32)
    inputs, targets = inputs.to(kind), targets.to(kind)
    with torch.autocast(inputs.device.type, enabled=False):
        kernel = inputs @ inputs.T
        among = torch.where(known[..., :, None] & known[..., None, :], kernel, 0)
        among = among + ridge * torch.eye(len(inputs), dtype=kind, device=inputs.device)
        # Not torch.linalg.solve, which waits to learn whether it could.
        weights = torch.linalg.solve_ex(among, torch.where(known[..., None], targets, 0)).result
        return kernel @ weights

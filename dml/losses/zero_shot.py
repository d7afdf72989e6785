"""Cross-batch zero-shot prediction (GSP, section 4.3): attributes learned on some classes have to tell others apart.

N images of a batch, m attributes, C classes, e width of a class embedding.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dml.configuration.ranges import Positive


class ZeroShotPrediction(nn.Module):
    """Zero-shot prediction loss: `attributes [N,m], labels [N] -> scalar` (eq. 4.4, Algorithm 4).

    The classes of the batch are divided at random into two halves. A ridge regression is fitted from the attributes of
    one half's images to the embeddings of their classes. It predicts class embeddings for the images of the other half,
    and the loss is the cross-entropy of finding the right class among all classes' embeddings. The class embeddings are
    learned too.

    The value is the mean over the two halves. Eq. 4.4 writes their sum, and Algorithm 4 the mean over the batch, which
    is the same if the halves are equal. For a batch of a single class the value is 0.

    Args:
        classes: C.
        width: e.
        ridge: weight of the regression's penalty (the paper's epsilon, 0.05).
        logit_scale: factor of the softmax's logits; the paper has none, the released code 9.5.
        class_init: how class embeddings start, which the paper does not say: from a normal distribution of standard
            deviation `sqrt(2 / e)`, fan_in, or `sqrt(2 / C)`, fan_out, as in the released code.
    """

    def __init__(
        self,
        classes: int,
        width: int,
        ridge: Positive = 0.05,
        logit_scale: Positive = 1.0,
        class_init: Literal["fan_in", "fan_out"] = "fan_in",
    ) -> None:
        super().__init__()
        self.ridge, self.logit_scale = ridge, logit_scale
        self.embeddings = nn.Parameter(torch.empty(classes, width))
        nn.init.kaiming_normal_(self.embeddings, mode=class_init)

    def forward(self, attributes: Tensor, labels: Tensor) -> Tensor:
        first = class_halves(labels)
        known = torch.stack([first, ~first])  # [2,N]
        predicted = ridge_prediction(attributes, self.embeddings[labels], known, self.ridge)  # [2,N,e]
        logits = self.logit_scale * predicted @ self.embeddings.to(predicted.dtype).T
        # Flat, since on a GPU cross_entropy is deterministic for two axes only.
        wrong = F.cross_entropy(logits.flatten(0, 1), labels.repeat(2), reduction="none").view(known.shape)
        # With an empty half nothing can be predicted, and the loss is 0.
        of_halves = torch.where(known, 0, wrong).sum(1) / (~known).sum(1).clamp(min=1)
        return torch.where(first.any() & ~first.all(), of_halves.mean(), 0)


def class_halves(labels: Tensor) -> Tensor:
    """Draws a random half of the batch's classes, and returns `[N]` bool: True for the images of these classes.

    Of an odd number of classes it is the smaller half; of a single class no image is chosen. It draws from torch's
    global generator of the CPU, which is seeded by the step.
    """
    count = len(labels)
    order, places = labels.sort()
    number = F.pad(order[1:] != order[:-1], (1, 0)).cumsum(0)  # of the class, 0 and up
    classes = number[-1] + 1
    # From pinned memory, so that the host does not wait for the copy.
    drawn = torch.randperm(count, pin_memory=labels.is_cuda).to(labels.device, non_blocking=True)
    # A class's place in the random order is the number of the batch's classes that drew a smaller number.
    ahead = (drawn[:, None] > drawn) & (torch.arange(count, device=labels.device) < classes)
    return torch.zeros_like(labels, dtype=torch.bool).scatter(0, places, (ahead.sum(1) < classes // 2)[number])


def ridge_prediction(inputs: Tensor, targets: Tensor, known: Tensor, ridge: float) -> Tensor:
    """Fits a ridge regression without intercept (P3) to some rows, and applies it to all rows.

    It is solved in the dual form, in float32 at least, since the kernel of a class's images is nearly singular. Rows
    that are not known are set to zero in the kernel, so that sizes do not depend on the number of known rows.

    Args:
        inputs, targets: `[N,m]`, `[N,e]`.
        known: `[...,N]` bool, True for the rows that a regression is fitted to.

    Returns:
        The predictions `[...,N,e]`.
    """
    kind = torch.promote_types(inputs.dtype, torch.float32)
    inputs, targets = inputs.to(kind), targets.to(kind)
    with torch.autocast(inputs.device.type, enabled=False):
        kernel = inputs @ inputs.T
        among = torch.where(known[..., :, None] & known[..., None, :], kernel, 0)
        among = among + ridge * torch.eye(len(inputs), dtype=kind, device=inputs.device)
        # Not torch.linalg.solve, which waits for the device to learn whether it succeeded.
        weights = torch.linalg.solve_ex(among, torch.where(known[..., None], targets, 0)).result
        return kernel @ weights

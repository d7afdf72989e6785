"""Balances side losses, so that their weights have the same effect for every metric loss.

Papers give the weight of a side loss for one metric loss, one kind of batch and one way to take means. With others the
same number has another effect: on MobileNetV2 the gradient of ABE's eq. 9 is 0.3 times that of its eq. 10 over all
pairs of a batch, 1.6 times over explicit pairs, and 6 times that of multi-similarity. If the loss is balanced, a weight
of 0.1 gives 0.1 of the metric loss's gradient for all of them: in the first steps (`Balance`), for a loss that becomes
satisfied, or at every step (`ratios`), for one that never is.

Gradients are taken on the outputs of the whole batch, which all ranks have, so all ranks find the same ratio and no
pass through the network is added.
"""

import torch
from torch import Tensor, nn

STEPS = 10  # first steps of a training, in which `Balance` measures gradients
MOST = 100.0  # bounds ratios: a side loss that is nearly satisfied, or learners that are alike, give nearly no gradient


def ratios(metric: Tensor, of_metric: Tensor, side: Tensor, of_side: Tensor, parts: int) -> Tensor:
    """Computes `[parts]`, the metric loss's gradient over the side loss's, for each part of the learners.

    Args:
        metric, side: scalars, the two losses before balancing.
        of_metric, of_side: `[N,L,d]`, the learners' outputs that each loss was computed from.
        parts: of L / parts learners each; the side loss is a sum of one term for each part.

    Returns:
        r / (1 + r / 100) for a ratio r: less than 100, and within r % of r. 1 for a part in which the side loss has no
        gradient, or if outputs need none.
    """
    if not of_metric.requires_grad:
        return metric.new_ones(parts)
    found = [_gradient(*pair).unflatten(1, (parts, -1)) for pair in ((metric, of_metric), (side, of_side))]
    return _ratio(*(torch.linalg.vector_norm(one, dim=(0, 2, 3), dtype=metric.dtype) for one in found))


class Balance(nn.Module):
    """Multiplies a side loss by a ratio of gradients on the learners' outputs: the metric loss's over the side loss's.

    The norms of the gradients are summed over the first 10 steps. The ratio is that of the sums so far, and stays fixed
    afterwards, so that a loss that is satisfied later has a small gradient then. It is bounded as in `ratios`. If one
    of the losses had no gradient in any of these steps, there is no ratio, and the weight stays as it is.
    """

    metric: Tensor
    side: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("metric", torch.zeros(()))  # sums of gradients' norms
        self.register_buffer("side", torch.zeros(()))

    def forward(self, metric: Tensor, of_metric: Tensor, side: Tensor, of_side: Tensor, step: int) -> Tensor:
        """Returns the balanced side loss.

        Args:
            metric, side: scalars, the two losses before balancing.
            of_metric, of_side: `[N,L,d]`, the learners' outputs that each loss was computed from.
            step: number of steps taken before.
        """
        if step < STEPS and of_metric.requires_grad:
            self.metric += _gradient(metric, of_metric).norm()
            self.side += _gradient(side, of_side).norm()
        return self.weight * side

    @property
    def weight(self) -> Tensor:
        """The ratio; 1 if no gradient of one of the losses was measured."""
        return torch.where(self.metric > 0, _ratio(self.metric, self.side), 1.0)

    def figures(self, step: int) -> dict[str, float]:
        """Returns the figure to log after a step: the final weight, after the last measured step only."""
        return {"side/weight": float(self.weight)} if step == STEPS else {}


def _gradient(loss: Tensor, outputs: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, outputs, retain_graph=True)
    return gradient


def _ratio(metric: Tensor, side: Tensor) -> Tensor:
    """Returns r / (1 + r / MOST) for the ratio r of two norms; 1 where the second is 0."""
    return torch.where(side > 0, metric / (side + metric / MOST), 1.0)

"""Balances side losses, so that their weights have the same effect for every metric loss."""

import torch
from torch import Tensor, nn

STEPS = 10  # first steps of a training, in which gradients are measured
MOST = 100.0  # largest ratio: a side loss that is nearly satisfied has nearly no gradient


class Balance(nn.Module):
    """Multiplies a side loss by a ratio of gradients on the learners' outputs: the metric loss's over the side loss's.

    Papers give the weight of a side loss for one metric loss, one kind of batch and one way to take means. With others
    the same number has another effect: on MobileNetV2 the gradient of ABE's eq. 9 is 0.4 times that of its eq. 10
    over all pairs of a batch, 1.6 times over explicit pairs, and 6 times that of multi-similarity. If the loss is
    balanced, a weight of 0.1 gives 0.1 of the metric loss's gradient for all of them.

    The norms of the gradients are summed over the first 10 steps. The ratio is that of the sums so far, and stays fixed
    afterwards. Gradients are taken on the outputs of the whole batch, which all ranks have, so all ranks find the same
    ratio and no pass through the network is added. If the side loss had no gradient in any of these steps, there is no
    ratio, and its weight stays as it is.
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
        self.measure(metric, of_metric, side, of_side, step)
        return self.weight * side

    def measure(self, metric: Tensor, of_metric: Tensor, side: Tensor, of_side: Tensor, step: int) -> None:
        """Takes the gradients of both losses into account, if it is one of the first steps; arguments as above."""
        if step < STEPS and of_metric.requires_grad:
            self.metric += _gradient(metric, of_metric)
            self.side += _gradient(side, of_side)

    @property
    def weight(self) -> Tensor:
        """The ratio; 1 if no gradient of the side loss was measured."""
        ratio = self.metric / (self.side + self.metric / MOST)
        return torch.where(self.side > 0, ratio, 1.0)

    def figures(self, step: int) -> dict[str, float]:
        """Returns the figure to log after a step: the final weight, after the last measured step only."""
        return {"side/weight": float(self.weight)} if step == STEPS else {}


def _gradient(loss: Tensor, outputs: Tensor) -> Tensor:
    """Returns the norm of a loss's gradient."""
    (gradient,) = torch.autograd.grad(loss, outputs, retain_graph=True)
    return gradient.norm()

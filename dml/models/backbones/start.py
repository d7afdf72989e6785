"""Adjusts pre-trained stages that follow an attention, which makes their input smaller."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from dml.models.backbones.stages import Stages, batch_norms, small_probe
from dml.models.tokens import entering

log = logging.getLogger("dml")

HOMOGENEOUS = (nn.MaxPool2d, nn.AvgPool2d, nn.Identity)  # f(ax) = a f(x) for a > 0


@torch.no_grad()
def enlarge_input(stages: Stages, factor: int) -> None:
    """Multiplies the first convolutions of some stages, so that they give the same output for an input divided by
    `factor`.

    An attention that starts near 1/2 everywhere, or at 1/N, scales its features by that. Batch norm removes the scale
    if it uses batch statistics. With frozen statistics or without batch norm, the stages would not start as the
    pre-trained ones. The functions that can be learned stay the same. The first stage with weights decides, since no
    later one takes out the scale behind a fixed non-linear stage.

    If the input is also used by anything but convolutions, such as the identity of a residual block, nothing is
    changed, and a warning says so.

    Args:
        stages: those after the attention, `[B,C,h,w]` -> `[B,C',h',w']`; changed in place.
        factor: 2 for masks near 1/2, N for a dictionary of N entries.
    """
    first = next(name for name, stage in stages.stages.items() if any(True for _ in stage.parameters()))
    if stages.follows_batches(first):
        return
    training = [(module, module.training) for module in stages.modules()]
    stages.eval()
    weight = next(stages.parameters())
    side = small_probe(stages)
    cells = torch.rand(1, stages.in_channels, side, side, dtype=weight.dtype, device=weight.device)
    cells = entering(next(iter(stages.stages.values())), cells)
    convolutions, before = _first_convolutions(stages, cells), stages(cells)
    for convolution in convolutions:
        convolution.weight.mul_(factor)
    if not torch.allclose(stages(cells / factor), before, rtol=1e-3, atol=1e-3 * float(before.abs().max())):
        for convolution in convolutions:
            convolution.weight.div_(factor)
        learns = any(True for _ in batch_norms(stages.stages[first]))
        log.warning(
            "Not only convolutions see the input of stage '%s', so its features start at 1/%d of the backbone's: "
            "choose another method.branch%s.",
            next(iter(stages.stages)),
            factor,
            ", or let that stage learn with backbone.batch_norm=batch" if learns else "",
        )
    for module, mode in training:
        module.training = mode


def _first_convolutions(stages: Stages, cells: Tensor) -> list[nn.Conv2d]:
    """Returns the convolutions whose input is `cells` itself, or `cells` after pooling."""
    found: list[nn.Conv2d] = []
    seen = [cells]  # tensors with the scale of the input

    def look(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if any(inputs[0] is one for one in seen):
            if isinstance(module, nn.Conv2d):
                found.append(module)
            else:
                seen.append(output)

    looked_at = [module for module in stages.modules() if isinstance(module, (nn.Conv2d, *HOMOGENEOUS))]
    handles = [module.register_forward_hook(look) for module in looked_at]
    try:
        stages(cells)
    finally:
        for handle in handles:
            handle.remove()
    return found

"""From a feature map to one learner's embedding."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dml.configuration.ranges import Size
from dml.errors import UserError


class LearnsLater(nn.Module):
    """A module with parameters that rest for some time, in which it looks at what passes in training."""

    looks = True  # at what a pass in training mode gives it, see `looking_away`

    def resting(self) -> Iterable[nn.Parameter]:
        """Those that do not learn yet: after a backward pass they are left without a gradient, as decay and momentum
        would move what has one of zero."""
        raise NotImplementedError(f"{type(self).__name__} has to define resting()")

    def summary(self, inputs: Tensor) -> Tensor:
        """What it looks at, of what it is given: a row for each, without a gradient."""
        raise NotImplementedError(f"{type(self).__name__} has to define summary()")

    def look(self, seen: Tensor) -> None:
        """Counts a pass over this rank's part of a batch, of which it is given the summary."""
        raise NotImplementedError(f"{type(self).__name__} has to define look()")


@contextmanager
def looking_away(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Those that learn later, of these modules, take no notice of what passes: it is no batch, or a part of one."""
    looked = [(module, module.looks) for module in modules if isinstance(module, LearnsLater)]
    for module, _ in looked:
        module.looks = False
    try:
        yield
    finally:
        for module, before in looked:
            module.looks = before


class Head(nn.Module):
    """Pooling followed by a linear projection: `[B,C,h,w] -> [B,d]`, not yet normalised.

    Args:
        pooling: `[B,C,h,w] -> [B,C,1,1]`, or as many times C as it says.
        in_channels: C.
        dim: d, the width of the learner.
    """

    def __init__(self, pooling: nn.Module, in_channels: int, dim: Size) -> None:
        super().__init__()
        self.pooling = pooling
        self.dim = dim
        self.projection = nn.Linear(in_channels * getattr(pooling, "times", 1), dim)
        # Glorot & Bengio 2010, as ABE section 4 and most released metric-learning code.
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    def forward(self, features: Tensor) -> Tensor:
        return self.projection(self.pooling(features).flatten(1))


class LocalHead(Head):
    """A linear projection at every location followed by pooling, in GSP's order (section 4.4): `[B,C,h,w] -> [B,d]`.

    Args:
        pooling: `[B,c,h,w] -> [B,d]` (or `[B,d,1,1]`), or what makes it from c, or from c and `prototypes`.
        in_channels: C.
        dim: d, the width of the learner.
        prototypes: of a pooling that keeps a vector for each: c = d / prototypes; None: c = d.

    Raises:
        UserError: a width that the prototypes cannot share.
    """

    def __init__(
        self, pooling: nn.Module | Callable[..., nn.Module], in_channels: int, dim: Size, prototypes: Size | None = None
    ) -> None:
        sizes = [dim] if prototypes is None else [_part(dim, prototypes), prototypes]
        made = pooling if isinstance(pooling, nn.Module) else pooling(*sizes)
        super().__init__(made, in_channels, sizes[0])
        self.dim = dim

    def locals(self, features: Tensor) -> Tensor:
        """`[B,C,h,w]` -> local embeddings `[B,c,h,w]`."""
        return self.projection(features.movedim(1, -1)).movedim(-1, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.pooling(self.locals(features)).flatten(1)


def _part(dim: int, prototypes: int) -> int:
    if dim % prototypes:
        raise UserError(
            f"head.dim={dim}: a learner is one vector for each of the {prototypes} prototypes, so make its width a "
            "multiple of them."
        )
    return dim // prototypes


class Slices(nn.ModuleList):
    """A linear layer as several layers, consecutive slices of its outputs: parameters that can rest one by one.

    Args:
        layer: of a width that they can share.
        parts: how many.
    """

    def __init__(self, layer: nn.Linear, parts: int) -> None:
        super().__init__()
        for weight, bias in zip(layer.weight.chunk(parts), layer.bias.chunk(parts), strict=True):
            part = nn.Linear(layer.in_features, len(bias))
            part.load_state_dict({"weight": weight, "bias": bias})
            self.append(part)

    def forward(self, features: Tensor) -> Tensor:
        """`[...,C] -> [...,d]`."""
        return torch.cat([part(features) for part in self], dim=-1)

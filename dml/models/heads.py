"""Heads: from a feature map to the embedding of one learner."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dml.configuration.ranges import Size
from dml.errors import UserError


class LearnsLater(nn.Module):
    """A module some of whose parameters do not learn at first, while the module watches its inputs in training."""

    looks = True  # whether it watches its inputs in training mode, see `looking_away`

    def resting(self) -> Iterable[nn.Parameter]:
        """Returns the parameters that do not learn yet.

        After a backward pass their gradients are removed, since decay and momentum would move a parameter whose
        gradient is zero.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define resting()")

    def summary(self, inputs: Tensor) -> Tensor:
        """Returns what the module has to know of its inputs: one row per image, without a gradient."""
        raise NotImplementedError(f"{type(self).__name__} has to define summary()")

    def look(self, seen: Tensor) -> None:
        """Takes notice of one pass over this rank's part of a batch, given its `summary`."""
        raise NotImplementedError(f"{type(self).__name__} has to define look()")


@contextmanager
def looking_away(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Makes the `LearnsLater` among some modules ignore their inputs, which are no batch or a part of one."""
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
        pooling: `[B,C,h,w] -> [B,C,1,1]`, or `[B,C*times,1,1]` if it has an attribute `times`.
        in_channels: C.
        dim: d, the width of the learner.
    """

    def __init__(self, pooling: nn.Module, in_channels: int, dim: Size) -> None:
        super().__init__()
        self.pooling = pooling
        self.dim = dim
        self.projection = nn.Linear(in_channels * getattr(pooling, "times", 1), dim)
        # Glorot & Bengio 2010, as in ABE section 4 and most released metric-learning code.
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    def forward(self, features: Tensor) -> Tensor:
        return self.projection(self.pooling(features).flatten(1))


class LocalHead(Head):
    """A linear projection at every location followed by pooling, in GSP's order (section 4.4): `[B,C,h,w] -> [B,d]`.

    Args:
        pooling: `[B,c,h,w] -> [B,d]` (or `[B,d,1,1]`), or a function that makes it from c, or from c and `prototypes`.
        in_channels: C.
        dim: d, the width of the learner.
        prototypes: number of prototypes of a pooling that keeps one vector for each: c = d / prototypes; None: c = d.

    Raises:
        UserError: the width is not divisible by the number of prototypes, or the pooling has none.
    """

    def __init__(
        self, pooling: nn.Module | Callable[..., nn.Module], in_channels: int, dim: Size, prototypes: Size | None = None
    ) -> None:
        sizes = [dim] if prototypes is None else [_part(dim, prototypes), prototypes]
        if prototypes is not None and isinstance(pooling, nn.Module):
            raise UserError(f"head.prototypes={prototypes}: {type(pooling).__name__} has no prototypes, so remove it.")
        made = pooling if isinstance(pooling, nn.Module) else pooling(*sizes)
        super().__init__(made, in_channels, sizes[0])
        self.dim = dim

    def locals(self, features: Tensor) -> Tensor:
        """Computes local embeddings `[B,c,h,w]` of features `[B,C,h,w]`."""
        return self.projection(features.movedim(1, -1)).movedim(-1, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.pooling(self.locals(features)).flatten(1)


def _part(dim: int, prototypes: int) -> int:
    if dim % prototypes:
        raise UserError(
            f"head.dim={dim}: a learner is one vector for each of the {prototypes} prototypes, so make its width a "
            "multiple of their number."
        )
    return dim // prototypes


class Slices(nn.ModuleList):
    """A linear layer divided into several layers, which are consecutive slices of its outputs and can rest one by one.

    Args:
        layer: of a width that is divisible by `parts`.
        parts: number of slices.
    """

    def __init__(self, layer: nn.Linear, parts: int) -> None:
        super().__init__()
        for weight, bias in zip(layer.weight.chunk(parts), layer.bias.chunk(parts), strict=True):
            part = nn.Linear(layer.in_features, len(bias))
            part.load_state_dict({"weight": weight, "bias": bias})
            self.append(part)

    def forward(self, features: Tensor) -> Tensor:
        """Applies all slices: `[...,C] -> [...,d]`."""
        return torch.cat([part(features) for part in self], dim=-1)

"""What a pass over a batch gives, and what a batch is.

B images, L learners, d width of one learner, D = L*d.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from dml.distributed import gather

Batch = Mapping[str, Tensor]


class Output:
    """What a pass over B images gives, and all that an objective knows of it: learner outputs, and whatever else it
    needs. Outputs of ranks and of pieces are joined row by row, and what is no tensor in here is lost.

    Args:
        raw: learner outputs `[B,L,d]`, not scaled; kept in float32 at least, for norms under mixed precision.
        auxiliary: tensors with a row an image.
    """

    def __init__(self, raw: Tensor, **auxiliary: Tensor) -> None:
        self.raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        self.auxiliary = auxiliary

    @cached_property
    def embeddings(self) -> Tensor:
        """`[B,L,d]`, each row of unit norm."""
        return F.normalize(self.raw, dim=-1)

    @cached_property
    def norms(self) -> Tensor:
        """`[B,L]`, of the raw outputs."""
        return torch.linalg.vector_norm(self.raw, dim=-1)

    def learner(self, i: int) -> tuple[Tensor, Tensor]:
        """One learner's embeddings `[B,d]` of unit norm, and the norms `[B]` that they had."""
        return self.embeddings[:, i], self.norms[:, i]

    def ensemble(self) -> tuple[Tensor, Tensor]:
        """The learners side by side, `[B,D]` of unit norm, and the norms `[B]` of their raw outputs side by side."""
        side_by_side = self.embeddings.flatten(1) / math.sqrt(self.raw.shape[1])
        return side_by_side, torch.linalg.vector_norm(self.norms, dim=1)

    @classmethod
    def joined(cls, parts: Sequence["Output"]) -> "Output":
        """Several outputs below one another."""
        names = parts[0].auxiliary
        return cls(
            torch.cat([part.raw for part in parts]),
            **{name: torch.cat([part.auxiliary[name] for part in parts]) for name in names},
        )

    def of_all_ranks(self) -> "Output":
        """The global batch."""
        return Output(gather(self.raw), **{name: gather(value) for name, value in self.auxiliary.items()})


def summed(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The terms of several losses, those of one name added up."""
    return {name: torch.stack([terms[name] for terms in parts]).sum() for name in parts[0]}

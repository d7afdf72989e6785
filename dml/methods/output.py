"""The output of a method for a batch, and the type of a batch.

B images, L learners, d width of one learner, D = L*d.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from dml.distributed import gather
from dml.errors import UserError

Batch = Mapping[str, Tensor]


class Output:
    """The result of a pass over B images, and all that an objective knows of the pass.

    The outputs of several ranks or pieces are joined row by row, so that everything in here has to be a tensor with one
    row per image.

    Args:
        raw: learner outputs `[B,L,d]`, not normalised; kept in float32 at least, for norms under mixed precision.
        auxiliary: other tensors that the objective needs, with one row per image.
    """

    def __init__(self, raw: Tensor, **auxiliary: Tensor) -> None:
        self.raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        self.auxiliary = auxiliary

    @cached_property
    def embeddings(self) -> Tensor:
        """The learners' embeddings `[B,L,d]`, each row of unit norm."""
        return F.normalize(self.raw, dim=-1)

    @cached_property
    def norms(self) -> Tensor:
        """Norms `[B,L]` of the raw outputs."""
        return torch.linalg.vector_norm(self.raw, dim=-1)

    def learner(self, i: int) -> tuple[Tensor, Tensor]:
        """Returns one learner's embeddings `[B,d]` of unit norm, and the norms `[B]` of its raw outputs."""
        return self.embeddings[:, i], self.norms[:, i]

    def ensemble(self) -> tuple[Tensor, Tensor]:
        """Returns the concatenated learners `[B,D]` of unit norm, and the norms `[B]` of their raw concatenation."""
        side_by_side = self.embeddings.flatten(1) / math.sqrt(self.raw.shape[1])
        return side_by_side, torch.linalg.vector_norm(self.norms, dim=1)

    @classmethod
    def joined(cls, parts: Sequence["Output"]) -> "Output":
        """Joins several outputs row by row."""
        names = parts[0].auxiliary
        return cls(
            torch.cat([part.raw for part in parts]),
            **{name: torch.cat([part.auxiliary[name] for part in parts]) for name in names},
        )

    def of_all_ranks(self) -> "Output":
        """Returns the output of the global batch, gathered from all ranks."""
        return Output(gather(self.raw), **{name: gather(value) for name, value in self.auxiliary.items()})


class Terms(dict[str, Tensor]):
    """Terms of losses by name. A method may add terms of its own, but replace none.

    Raises:
        UserError: (on assignment) there is a term of this name.
    """

    def __setitem__(self, name: str, term: Tensor) -> None:
        if name in self:
            raise UserError(f"the loss names a term {name}, which the method uses itself: give it another name.")
        super().__setitem__(name, term)


def summed(parts: Sequence[Mapping[str, Tensor]]) -> Terms:
    """Adds up the terms of several losses that have the same name."""
    return Terms({name: torch.stack([terms[name] for terms in parts]).sum() for name in parts[0]})

"""The frozen first stages of a network, whose outputs can be stored (`dml.data.features`)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dml.errors import UserError
from dml.models.backbones.stages import Stages
from dml.models.stored import Stored
from dml.models.tokens import TokenMap, taken


@dataclass(frozen=True)
class Stem:
    """The frozen first stages of a network: an image always has the same features after them.

    Attributes:
        normalize: images in [0,1] -> what the stages expect.
        stages: in evaluation mode.
    """

    normalize: nn.Module
    stages: Stages

    @classmethod
    def of(cls, normalize: nn.Module, openings: Sequence[Stages]) -> "Stem":
        """Makes the stem of all the frozen stages that several runs of stages, which see the images, begin with.

        Raises:
            UserError: the first stage is trained.
        """
        frozen = [_frozen(stages) for stages in openings]
        count = min(len(names) for names in frozen)
        if not count:
            raise UserError(
                "dataset.cache=features stores the outputs of frozen stages, but the first stage is trained: set "
                "backbone.train=none or last:N, or another dataset.cache."
            )
        stems = [cls(normalize, stages.first(count)) for stages in openings]
        assert len({stem.fingerprint() for stem in stems}) == 1
        return stems[0]

    @property
    def last(self) -> str:
        """The name of the last stage."""
        return list(self.stages.stages)[-1]

    @torch.no_grad()
    def features(self, images: Tensor) -> Stored:
        """Computes the features of images `[B,3,H,W]` in [0,1]."""
        self.stages.eval()
        out = self.stages(self.normalize(images.contiguous(memory_format=torch.channels_last)))
        count = out.tokens.shape[1] if isinstance(out, TokenMap) else 0
        cells, tokens = taken(out, count)
        sequence = torch.cat([tokens, cells.flatten(2).transpose(1, 2)], dim=1)
        return Stored.of(sequence.float().contiguous(), self.last, count, cells.shape[2])

    def fingerprint(self) -> str:
        """Returns a hash of all that the features of an image depend on."""
        found = hashlib.sha256(f"{self.normalize}\n{self.stages}".encode())
        state = dict(self.normalize.named_buffers()) | self.stages.state_dict()
        for name, value in state.items():
            found.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()


def _frozen(stages: Stages) -> list[str]:
    """Returns the names of the stages before the first that is trained or whose batch norm uses batch statistics."""
    names = []
    for name, stage in stages.stages.items():
        if any(p.requires_grad for p in stage.parameters()) or stages.follows_batches(name):
            break
        names.append(name)
    return names

"""The first stages of a network, where they are frozen: what they make of images can be kept (`dml.data.features`)."""

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
    """The frozen first stages of a network: images always come out of them the same.

    Attributes:
        normalize: images in [0,1] -> what the stages expect.
        stages: in evaluation mode.
    """

    normalize: nn.Module
    stages: Stages

    @classmethod
    def of(cls, normalize: nn.Module, openings: Sequence[Stages]) -> "Stem":
        """What the runs of stages that see the images have in common, as far as it is frozen.

        Raises:
            UserError: nothing is.
        """
        frozen = [_frozen(stages) for stages in openings]
        count = min(len(names) for names in frozen)
        if not count:
            raise UserError(
                "dataset.cache=features keeps what frozen stages make of the images, and the first stage is trained: "
                "set backbone.train=none or last:N, or another dataset.cache."
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
        """Images `[B,3,H,W]` in [0,1] -> their features."""
        self.stages.eval()
        out = self.stages(self.normalize(images.contiguous(memory_format=torch.channels_last)))
        count = out.tokens.shape[1] if isinstance(out, TokenMap) else 0
        cells, tokens = taken(out, count)
        sequence = torch.cat([tokens, cells.flatten(2).transpose(1, 2)], dim=1)
        return Stored.of(sequence.float().contiguous(), self.last, count, cells.shape[2])

    def fingerprint(self) -> str:
        """A hash of all that the features of an image follow from."""
        found = hashlib.sha256(f"{self.normalize}\n{self.stages}".encode())
        state = dict(self.normalize.named_buffers()) | self.stages.state_dict()
        for name, value in state.items():
            found.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()


def _frozen(stages: Stages) -> list[str]:
    """The names of the first stages up to the first one that is trained, or whose batch norm follows its batches."""
    names = []
    for name, stage in stages.stages.items():
        if any(p.requires_grad for p in stage.parameters()) or stages.follows_batches(name):
            break
        names.append(name)
    return names

"""GSP: generalized sum pooling with a zero-shot regularisation (Gurbuz et al., ICCV 2023).

B images, d width of the embedding, m prototypes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dml.configuration.ranges import Count, Positive, Share
from dml.data.datamodule import DataModule
from dml.errors import UserError
from dml.figures.maps import pooling_weights, prototype_histograms
from dml.figures.plot import Plot
from dml.losses.zero_shot import ZeroShotPrediction
from dml.methods.base import Batch, NewHead, NewLoss, Output
from dml.methods.baseline import Baseline
from dml.methods.output import Terms
from dml.models.backbones.stages import Backbone
from dml.models.gsp import GSPHead

BATCHES = 32  # batches that are checked before the training
CLASSES, OF_A_CLASS = 16, 16  # test classes, and images of each, in the picture of prototypes


@dataclass(frozen=True)
class Shares:
    """How the locations of B images are divided among the prototypes.

    Attributes:
        weights: `[B,h,w]`, the weight of each location, mean 1.
        dominant: `[B,h,w]` int64, the prototype with the largest share of the location.
        attributes: `[B,m]`, the share of each prototype in the image, sum 1.
    """

    weights: Tensor
    dominant: Tensor
    attributes: Tensor


class GSP(Baseline):
    """The baseline with pooling by optimal transport, and a zero-shot loss on the prototypes' shares of each image.

    The objective is `(1 - lambda) L_DML + lambda L_ZS` (section 4.3) for any metric loss. The pooling alone is
    `head=gsp`, which works with every method.

    Args:
        backbone: images -> features.
        head: makes a `GSPHead`.
        loss, dim: see `dml.methods.base`.
        classes: number of training classes.
        lambda_zs: lambda; 0 leaves the zero-shot loss out.
        ridge, logit_scale, class_init: see `ZeroShotPrediction`.
        options: see `Method`.

    Raises:
        UserError: the head is another one, or (`attach`) each batch has a single class.
    """

    head: GSPHead

    def __init__(
        self,
        backbone: Backbone,
        head: NewHead,
        loss: NewLoss,
        dim: int,
        *,
        classes: Count,
        lambda_zs: Share = 0.1,
        ridge: Positive = 0.05,
        logit_scale: Positive = 1.0,
        class_init: Literal["fan_in", "fan_out"] = "fan_in",
        **options: Any,
    ) -> None:
        super().__init__(backbone, head, loss, dim, **options)
        if not isinstance(self.head, GSPHead):
            raise UserError("method=gsp pools with head=gsp: set head=gsp, or choose method=baseline for another head.")
        self.lambda_zs = lambda_zs
        self.zero_shot = ZeroShotPrediction(classes, dim, ridge, logit_scale, class_init) if lambda_zs else None

    def attach(self, data: DataModule) -> None:
        super().attach(data)
        batches = islice(data.sampler.batches(0), BATCHES)
        if self.zero_shot is not None and all(len(set(data.sampler.labels[batch])) == 1 for batch in batches):
            raise UserError(
                "The zero-shot loss divides the classes of a batch into two halves, but batches have one class: raise "
                "sampler.batch_size, lower sampler.m, or set method.lambda_zs=0."
            )

    def learners(self, images: Tensor) -> Output:
        """Computes the learner outputs, with `attributes [B,m]` for the zero-shot loss once there are prototypes."""
        pooled, attributes = self.head(self.backbone(images), attributes=True)
        return Output(pooled[:, None], **({} if attributes is None else {"attributes": attributes}))

    def objective(self, output: Output, batch: Batch) -> dict[str, Tensor]:
        terms = super().objective(output, batch)
        if self.zero_shot is None:
            return terms
        attributes = output.auxiliary.get("attributes")
        if attributes is None:  # no prototypes yet; a zero term, since under DDP every parameter has to take part
            value = 0 * self.zero_shot.embeddings.sum()
        else:
            value = self.lambda_zs * self.zero_shot(attributes, batch["label"])
        terms = Terms({name: (1 - self.lambda_zs) * term for name, term in terms.items()})
        terms["zero_shot"] = value
        return terms

    def on_after_backward(self) -> None:
        super().on_after_backward()
        if self.head.pooling.waiting and self.zero_shot is not None:
            self.zero_shot.embeddings.grad = None

    def shares(self, images: Tensor) -> "Shares":
        """Computes the prototypes' shares of normalised images `[B,3,H,W]`."""
        maps = self.head.locals(self.backbone(images))
        weights, plan = self.head.pooling.transport(maps)
        size = maps.shape[2:]
        attributes = plan.sum(-1) / self.head.pooling.mu
        return Shares(weights.unflatten(1, size), plan.argmax(1).unflatten(1, size), attributes)

    def plots(self, images: Tensor, data: DataModule, log: Sequence[Mapping[str, Any]]) -> list[Plot]:
        """Draws pictures like the paper's Fig. 3b and Fig. 5."""
        if self.head.pooling.waiting:
            return []
        shares = self.shares(self.normalized(images))
        attributes, labels = self._attributes(data, images)
        names = {int(c): data.records.class_names[c] for c in labels.unique()}
        weights = shares.weights.float().cpu(), shares.dominant.cpu()
        return [
            Plot(
                "weights",
                "Some test images, the weight of each location (bright is high; the mean is 1), and the prototype with "
                "the largest share of it: one colour per prototype, paler where the weight is low",
                pooling_weights(images.float().cpu(), *weights, shares.attributes.shape[1]),
            ),
            Plot(
                "prototypes",
                "The prototypes' shares in the images of some test classes, as means over up to "
                f"{OF_A_CLASS} images per class",
                prototype_histograms(attributes, labels, names),
            ),
        ]

    def _attributes(self, data: DataModule, images: Tensor) -> tuple[Tensor, Tensor]:
        """Computes attributes `[N,m]` and labels `[N]` of some test images of some classes, on the CPU.

        Args:
            data: the run's data.
            images: any images on the method's device, whose type and device are used.
        """
        labels = data.records.labels[data.query_rows]
        chosen = [np.flatnonzero(labels == c)[:OF_A_CLASS] for c in np.unique(labels)[:CLASSES]]
        found = []
        for places in chosen:
            seen = data.test_images(data.query_rows[places]).to(images)
            found.append(self.shares(self.normalized(seen)).attributes.float().cpu())
        return torch.cat(found), torch.as_tensor(labels[np.concatenate(chosen)])

    def new_modules(self) -> Iterable[nn.Module]:
        return (self.head,) if self.zero_shot is None else (self.head, self.zero_shot)

    def training_only(self) -> Iterable[nn.Module]:
        return super().training_only() if self.zero_shot is None else (*super().training_only(), self.zero_shot)

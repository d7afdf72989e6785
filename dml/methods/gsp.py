"""GSP: generalized sum pooling with zero-shot regularisation (Gurbuz et al., ICCV 2023).

B images, d width of the embedding, m prototypes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

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
from dml.models.backbones.stages import Backbone
from dml.models.gsp import GSPHead

BATCHES = 32  # that are looked at before the training
CLASSES, OF_A_CLASS = 16, 16  # of the test, in the picture of prototypes


@dataclass(frozen=True)
class Shares:
    """What prototypes have of the locations of B images.

    Attributes:
        weights: `[B,h,w]`, how much a location counts, mean 1.
        dominant: `[B,h,w]` int64, the prototype that took most of it.
        attributes: `[B,m]`, the share of each of m prototypes in the image, sum 1.
    """

    weights: Tensor
    dominant: Tensor
    attributes: Tensor


class GSP(Baseline):
    """The plain embedding, pooled by optimal transport, with a zero-shot loss on what the prototypes were given.

    `(1 - lambda) L_DML + lambda L_ZS` (section 4.3), whatever the metric loss. Without that loss, and with any method,
    the pooling is `head=gsp`.

    Args:
        backbone: images -> features.
        head: makes a `GSPHead`.
        loss, dim: see `dml.methods.base`.
        classes: of the training images.
        lambda_zs: lambda; 0 leaves the zero-shot loss out.
        ridge, logit_scale: see `ZeroShotPrediction`.
        options: see `Method`.

    Raises:
        UserError: another head; data whose batches have a single class each.
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
        **options: Any,
    ) -> None:
        super().__init__(backbone, head, loss, dim, **options)
        if not isinstance(self.head, GSPHead):
            raise UserError("method=gsp pools with head=gsp: give it, or choose method=baseline for another head.")
        self.lambda_zs = lambda_zs
        self.zero_shot = ZeroShotPrediction(classes, dim, ridge, logit_scale) if lambda_zs else None

    def attach(self, data: DataModule) -> None:
        super().attach(data)
        batches = islice(data.sampler.batches(0), BATCHES)
        if self.zero_shot is not None and all(len(set(data.sampler.labels[batch])) == 1 for batch in batches):
            raise UserError(
                "The zero-shot loss parts the classes of a batch in two, and batches have one class only: raise "
                "sampler.batch_size, lower sampler.m, or set method.lambda_zs=0."
            )

    def learners(self, images: Tensor) -> Output:
        """With `attributes [B,m]`, what the zero-shot loss is on, once there are prototypes."""
        pooled, attributes = self.head(self.backbone(images), attributes=True)
        return Output(pooled[:, None], **({} if attributes is None else {"attributes": attributes}))

    def objective(self, output: Output, batch: Batch) -> dict[str, Tensor]:
        terms = super().objective(output, batch)
        if self.zero_shot is None:
            return terms
        attributes = output.auxiliary.get("attributes")
        if attributes is None:  # prototypes are still to come; under DDP every parameter has to take part
            value = 0 * self.zero_shot.embeddings.sum()
        else:
            value = self.lambda_zs * self.zero_shot(attributes, batch["label"])
        return {name: (1 - self.lambda_zs) * term for name, term in terms.items()} | {"zero_shot": value}

    def on_after_backward(self) -> None:
        super().on_after_backward()
        if self.head.pooling.waiting and self.zero_shot is not None:
            self.zero_shot.embeddings.grad = None

    def shares(self, images: Tensor) -> "Shares":
        """What prototypes have of normalised images."""
        maps = self.head.locals(self.backbone(images))
        weights, plan = self.head.pooling.transport(maps)
        size = maps.shape[2:]
        attributes = plan.sum(-1) / self.head.pooling.mu
        return Shares(weights.unflatten(1, size), plan.argmax(1).unflatten(1, size), attributes)

    def plots(self, images: Tensor, data: DataModule, log: Sequence[Mapping[str, Any]]) -> list[Plot]:
        """As the paper's Fig. 3b and Fig. 5."""
        if self.head.pooling.waiting:
            return []
        shares = self.shares(self.normalized(images))
        attributes, labels = self._attributes(data, images)
        names = {int(c): data.records.class_names[c] for c in labels.unique()}
        weights = shares.weights.float().cpu(), shares.dominant.cpu()
        return [
            Plot(
                "weights",
                "Some test images, how much each location counts (bright is much; the mean is 1), and which prototype "
                "took most of it: a colour a prototype, paler where less counts",
                pooling_weights(images.float().cpu(), *weights, shares.attributes.shape[1]),
            ),
            Plot(
                "prototypes",
                "What share prototypes have in the images of some test classes, mean over up to "
                f"{OF_A_CLASS} images each",
                prototype_histograms(attributes, labels, names),
            ),
        ]

    def _attributes(self, data: DataModule, images: Tensor) -> tuple[Tensor, Tensor]:
        """Attributes `[N,m]` and labels `[N]` of some test images of some classes, on the CPU.

        Args:
            images: as the method takes them, for precision and device.
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

"""What all methods share: the `[B,L,d]` contract, the global-batch objective, optimizer groups.

B images of the (local) batch, L learners, d width of one learner, D = L*d. A method is given its backbone, `head(d)`
and `loss(d)`, which make a new head of width d and a new loss on embeddings of width d, and the whole width D.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from dml.data.datamodule import DataModule
from dml.distributed import gather
from dml.errors import UserError
from dml.losses import Loss, functional
from dml.models.gsp import GeneralizedSumPool
from dml.models.heads import Head
from dml.ranges import NotNegative, Positive

NewHead = Callable[[int], Head]
NewLoss = Callable[[int], Loss]


@dataclass(frozen=True)
class Groups:
    """How a method divides the training images among its learners.

    Attributes:
        learner: `[N]` int64, 0..L-1, of each training image.
        learners: L.
        negatives: distances of negative pairs within groups and between groups when they were last divided, `[P]` and
            `[Q]`; None where they are not divided by distances.
    """

    learner: np.ndarray
    learners: int
    negatives: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Region:
    """Where one scale of a method found the object.

    Attributes:
        proposal: `[B,H,W]`, how much is there.
        boxes: `[B,4]`, left, top, right, bottom of what the next scale sees.
    """

    proposal: Tensor
    boxes: Tensor


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


class NonFiniteLoss(UserError):
    """A term of the objective became NaN or infinite."""


def share(dim: int, learners: int, option: str) -> int:
    """The width of one of `learners` learners that share `dim` evenly.

    Args:
        option: that says how many learners there are, for the message.

    Raises:
        UserError: a width that they cannot share.
    """
    if dim % learners:
        raise UserError(
            f"head.dim={dim} is the width of all {learners} learners together: make it a positive multiple of "
            f"{learners}, for example head.dim={max(1, round(dim / learners)) * learners}."
        )
    return dim // learners


class Method(LightningModule):
    """Base of one method: subclasses say what the learners are and what they minimise.

    Args:
        normalize: images in [0,1] -> what the backbone expects.
        losses: one a learner (each with its own proxies, beta or memory), unless `objective` says otherwise.
        optimizer: `parameter groups -> optimizer`, for example a partial of `torch.optim.Adam`.
        lr: learning rate of the backbone.
        head_lr_factor: what starts from random values (`fresh`) learns at `lr` times this; losses have factors of
            their own.
        activation_decay: weight of the learners' squared outputs before they are normalised (DeML eq. 6); 0: none.
        unit_rows: with `activation_decay`, weight of what keeps the rows of the learners' layers at unit norm.
        warm_up: epochs of the sampler in which what is neither fresh nor of a loss rests (GSP section 1.6.7: 1 for
            losses on proxies).
    """

    def __init__(
        self,
        normalize: nn.Module,
        losses: Sequence[Loss],
        optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        lr: Positive,
        head_lr_factor: Positive = 1.0,
        activation_decay: NotNegative = 0.0,
        unit_rows: NotNegative = 0.25,
        warm_up: Annotated[float, Field(ge=0, le=1e6)] = 0,
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.losses = nn.ModuleList(losses)
        self.make_optimizer = optimizer
        self.terms: dict[str, Tensor] = {}  # of the last training step, for whoever logs them
        self.lr, self.head_lr_factor = lr, head_lr_factor
        self.activation_decay, self.unit_rows = activation_decay, unit_rows
        self.warm_up, self.rests_until = warm_up, 0  # epochs; step

    # What a subclass writes.

    def learners(self, images: Tensor) -> Tensor:
        """Normalised images `[B,3,H,W]` -> raw learner outputs `[B,L,d]`."""
        raise NotImplementedError(f"{type(self).__name__} has to define learners()")

    def objective(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The terms whose sum is minimised, on the global batch: `[B,L,d]`, `[B]` -> named scalars."""
        terms = [loss(embeddings[:, i], labels) for i, loss in enumerate(self.losses)]
        return {"metric": torch.stack(terms).sum()}

    def attention(self, images: Tensor) -> Tensor | None:
        """Normalised images `[B,3,H,W]` -> what learners attend to, `[B,L,C,h,w]`, for pictures; None: no attention."""
        return None

    def regions(self, images: Tensor) -> list[Region]:
        """Normalised images -> what each scale but the last one found, for pictures; empty: there is one scale."""
        return []

    def shares(self, images: Tensor) -> Shares | None:
        """Normalised images -> what prototypes have of them, for pictures; None: there are no prototypes."""
        return None

    @property
    def scales_of_learners(self) -> int:
        """How many groups of learners there are, equal in number and one after another, that see different inputs."""
        return 1

    def attach(self, data: DataModule) -> None:
        """Once, before training: a method that decides what its batches are made of replaces `data.sampler`.

        Raises:
            UserError: data that it cannot be trained on.
        """
        self.rests_until = round(self.warm_up * data.sampler.steps_per_epoch)

    def between_steps(self, step: int) -> dict[str, float]:
        """Before the first step (0) and after every step but the last, on all ranks, after the step's evaluation and
        before its checkpoint: what it changes is found there by a resumed run. Returns figures to log."""
        return {}

    def groups(self) -> Groups | None:
        """How the training images are divided among the learners, for pictures; None: they are not."""
        return None

    def fresh(self) -> Iterable[nn.Module]:
        """Modules that start from random values, trained with `lr * head_lr_factor`."""
        return ()

    def training_only(self) -> Iterable[nn.Module]:
        """What is no part of the embedding: neither its size nor its cost."""
        return (self.losses,)

    def projections(self) -> Iterable[nn.Linear]:
        """The last layers of the learners, each once."""
        return (module.projection for module in self.modules() if isinstance(module, Head))

    # What all share.

    def outputs(self, images: Tensor) -> Tensor:
        """Images `[B,3,H,W]` in [0,1] -> raw learner outputs `[B,L,d]`."""
        return self.learners(self.normalize(images.contiguous(memory_format=torch.channels_last)))

    def embed(self, images: Tensor) -> Tensor:
        """Images `[B,3,H,W]` in [0,1] -> learners `[B,L,d]`, each row of unit norm.

        The retrieval embedding is their concatenation, `embed(images).flatten(1)`: its squared distance is L times
        the mean of the learners' squared distances (ABE eq. 3).
        """
        return F.normalize(self.outputs(images), dim=-1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        outputs, labels = gather(self.outputs(batch["image"]), batch["label"])
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        # Miners fail on NaN in words of their own.
        self._check_finite("embeddings", outputs.detach().sum())
        with torch.autocast(outputs.device.type, enabled=False):
            terms = self.objective(F.normalize(outputs, dim=-1), labels)
            if self.activation_decay:
                weights = [layer.weight for layer in self.projections()]
                terms["activation"] = functional.activation_decay(
                    outputs, weights, self.activation_decay, self.unit_rows
                )
        for name, value in terms.items():
            self._check_finite(name, value.detach())
        total = torch.stack(list(terms.values())).sum()
        self.terms = {f"train/{name}": value.detach() for name, value in {**terms, "loss": total}.items()}
        self.log("loss", total.detach(), prog_bar=True, logger=False)
        return total

    def _check_finite(self, term: str, value: Tensor) -> None:
        if not torch.isfinite(value):
            raise NonFiniteLoss(
                f"The loss term '{term}' became {value.item()} at step {self.global_step + 1}: lower lr or set "
                "trainer.gradient_clip_val."
            )

    def on_after_backward(self) -> None:
        """What rests gets no gradient: with one of zero, decay and momentum would move it all the same."""
        if self.global_step < self.rests_until:
            for parameter in self._backbone():
                parameter.grad = None
        for module in self.modules():
            if isinstance(module, GeneralizedSumPool) and module.waiting:
                module.prototypes.grad = None

    def _backbone(self) -> list[nn.Parameter]:
        """Parameters that are neither fresh nor of a loss."""
        others = {id(p) for module in (*self.fresh(), self.losses) for p in module.parameters()}
        return [p for p in self.parameters() if id(p) not in others]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Parameter groups: backbone, fresh modules, and one for the parameters of each loss, with their own rates."""
        fresh = {id(p): p for module in self.fresh() for p in module.parameters()}
        groups: list[dict[str, Any]] = [
            {"params": self._backbone(), "lr": self.lr},
            {"params": list(fresh.values()), "lr": self.lr * self.head_lr_factor},
        ]
        for loss in self.losses:
            assert isinstance(loss, Loss)
            # Proxies and beta are no weights: decay would pull them to zero.
            groups.append({"params": list(loss.parameters()), "lr": self.lr * loss.lr_factor, "weight_decay": 0.0})
        for group in groups:
            group["params"] = [p for p in group["params"] if p.requires_grad]
        return self.make_optimizer([group for group in groups if group["params"]])

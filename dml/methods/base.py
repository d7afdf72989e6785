"""What all methods share: the `[B,L,d]` contract, the global-batch objective, optimizer groups.

B images of the (local) batch, L learners, d width of one learner, D = L*d. A method is given its backbone, `head(d)`
and `loss(d)`, which make a new head of width d and a new loss on embeddings of width d, and the whole width D.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

import torch
from pydantic import Field
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from dml.configuration.ranges import NotNegative, Positive
from dml.data.datamodule import DataModule
from dml.distributed import gather
from dml.errors import UserError
from dml.figures.plot import Plot
from dml.losses import Loss, functional
from dml.models.heads import Head, LearnsLater

NewHead = Callable[[int], Head]
NewLoss = Callable[[int], Loss]


Batch = Mapping[str, Tensor]


class Output:
    """What a pass over B images gives: learner outputs, and whatever else the objective needs of it.

    Args:
        raw: learner outputs `[B,L,d]`, not scaled.
        auxiliary: tensors with a row an image.
    """

    def __init__(self, raw: Tensor, **auxiliary: Tensor) -> None:
        self.raw, self.auxiliary = raw, auxiliary

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

    def of_all_ranks(self) -> "Output":
        """The global batch, in float32 at least."""
        raw = gather(self.raw)
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        return Output(raw, **{name: gather(value) for name, value in self.auxiliary.items()})


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


def summed(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The terms of several losses, those of one name added up."""
    return {name: torch.stack([terms[name] for terms in parts]).sum() for name in parts[0]}


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

    def learners(self, images: Tensor) -> Output:
        """Normalised images `[B,3,H,W]` -> raw learner outputs `[B,L,d]`, and what else the objective needs."""
        raise NotImplementedError(f"{type(self).__name__} has to define learners()")

    def objective(self, output: Output, batch: Batch) -> dict[str, Tensor]:
        """The terms whose sum is minimised, on the global batch: named scalars.

        Args:
            output: of `learners`, of all ranks.
            batch: `label [B]`, and `index [B]`, the images' rows in the records.
        """
        return summed([self.metric(i, output.learner(i), output, batch) for i in range(len(self.losses))])

    def groups(self) -> dict[str, slice]:
        """Learners that are tested together too, by a name for their figures."""
        return {}

    def plots(self, images: Tensor, data: DataModule, log: Sequence[Mapping[str, Any]]) -> list[Plot]:
        """Pictures that only this method has, drawn at the end of a run in evaluation mode.

        Args:
            images: some test images `[B,3,H,W]` in 0..1, on the method's device.
            data: of the run.
            log: records of `metrics.jsonl`.
        """
        return []

    def attach(self, data: DataModule) -> None:
        """Once, before training: a method that decides what its batches are made of replaces `data.sampler`.

        Raises:
            UserError: data that it cannot be trained on.
        """
        self.rests_until = round(self.warm_up * data.sampler.steps_per_epoch)

    def on_step_end(self, step: int) -> dict[str, float]:
        """Before the first step (0) and after every step but the last, on all ranks, after the step's evaluation and
        before its checkpoint: what it changes is found there by a resumed run. Returns figures to log."""
        return {}

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

    def normalized(self, images: Tensor) -> Tensor:
        """Images in [0,1] as the backbone expects them."""
        seen: Tensor = self.normalize(images.contiguous(memory_format=torch.channels_last))
        return seen

    def embed(self, images: Tensor) -> Tensor:
        """Images `[B,3,H,W]` in [0,1] -> learners `[B,L,d]`, each row of unit norm.

        The retrieval embedding is their concatenation, `embed(images).flatten(1)`: its squared distance is L times
        the mean of the learners' squared distances (ABE eq. 3).
        """
        return self.learners(self.normalized(images)).embeddings

    def metric(self, i: int, part: tuple[Tensor, Tensor], output: Output, batch: Batch) -> dict[str, Tensor]:
        """The terms of the i-th loss on a part of the output, as `Output.learner` and `Output.ensemble` give it."""
        embeddings, norms = part
        known = {"norms": norms, "index": batch["index"], **output.auxiliary}
        value = self.losses[i](embeddings, batch["label"], **known)
        return value if isinstance(value, dict) else {"metric": value}

    def compute_terms(self, batch: Batch) -> dict[str, Tensor]:
        """The terms of the objective on this rank's part of a batch, `image [b,3,H,W]`, `label [b]`, `index [b]`.

        Raises:
            NonFiniteLoss: one is NaN or infinite.
        """
        output = self.learners(self.normalized(batch["image"])).of_all_ranks()
        # Miners fail on NaN in words of their own.
        self._check_finite("embeddings", output.raw.detach().sum())
        with torch.autocast(output.raw.device.type, enabled=False):
            terms = self.objective(output, {name: gather(batch[name]) for name in ("label", "index")})
            if self.activation_decay:
                weights = [layer.weight for layer in self.projections()]
                terms["activation"] = functional.activation_decay(
                    output.raw, weights, self.activation_decay, self.unit_rows
                )
        for name, value in terms.items():
            self._check_finite(name, value.detach())
        return terms

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        terms = self.compute_terms(batch)
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
            if isinstance(module, LearnsLater):
                for parameter in module.resting():
                    parameter.grad = None

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

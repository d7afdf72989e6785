"""What all methods share: the `[B,L,d]` contract, the global-batch objective, optimizer groups.

B images of the (local) batch, L learners, d width of one learner, D = L*d. A method is given its backbone, `head(d)`
and `loss(d)`, which make a new head of width d and a new loss on embeddings of width d, and the whole width D.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from dml.configuration.components import Waits
from dml.configuration.ranges import NotNegative, Positive
from dml.data.datamodule import DataModule
from dml.distributed import gather
from dml.errors import UserError
from dml.figures.plot import Plot
from dml.losses import Loss, functional
from dml.methods.module import TrainedModule
from dml.methods.output import Batch, Output, summed
from dml.methods.pieces import embed_in_pieces
from dml.models.backbones.stages import Stages
from dml.models.heads import Head
from dml.models.stored import Stored
from dml.models.weights import Source

NewHead = Callable[[int], Head]
NewLoss = Callable[[int], Loss]


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


class Method(TrainedModule, Waits):
    """Base of one method: subclasses say what the learners are and what they minimise.

    Args:
        normalize: images in [0,1] -> what the backbone expects.
        losses: one a learner (each with its own proxies, beta or memory), unless `objective` says otherwise.
        head_lr_factor: what starts from random values (`new_modules`) learns at the backbone's rate times this; losses
            have factors of their own.
        activation_decay: weight of the learners' squared outputs before they are normalised (DeML eq. 6); 0: none.
        unit_rows: with `activation_decay`, weight of what keeps the rows of the learners' layers at unit norm.
        warm_up: epochs of the sampler in which only new modules and losses are trained (GSP section 1.6.7: 1 for losses
            on proxies).
    """

    counted_by: ClassVar[tuple[str, ...]] = ()  # the options that say how many learners there are
    source: Source | None = None  # of the weights that its backbone starts from

    def __init__(
        self,
        normalize: nn.Module,
        losses: Sequence[Loss],
        head_lr_factor: Positive = 1.0,
        activation_decay: NotNegative = 0.0,
        unit_rows: NotNegative = 0.25,
        warm_up: Annotated[float, Field(ge=0, le=1e6)] = 0,
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.losses = nn.ModuleList(losses)
        self.head_lr_factor = head_lr_factor
        self.activation_decay, self.unit_rows = activation_decay, unit_rows
        self.warm_up, self.rests_until = warm_up, 0  # epochs; step
        self.compiled_learners: Callable[[Tensor], Output] | None = None  # of training steps, see trainer.compile
        self.micro_batch: int | None = None  # images that a training step embeds at a time; None: all of its batch

    # What a subclass writes.

    def learners(self, images: Tensor) -> Output:
        """Normalised images `[B,3,H,W]` -> raw learner outputs `[B,L,d]`, and what else the objective needs. It leaves
        nothing on the method: it may see the batch in pieces, and twice."""
        raise NotImplementedError(f"{type(self).__name__} has to define learners()")

    def objective(self, output: Output, batch: Batch) -> dict[str, Tensor]:
        """The terms whose sum is minimised, on the global batch: named scalars. It is called once a step. Of the pass
        through the network it knows the output alone.

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
        self.steps_per_epoch = data.sampler.steps_per_epoch
        self.rests_until = round(self.warm_up * self.steps_per_epoch)
        for loss in self.losses:
            if getattr(loss.loss, "needs_pairs", False) and not data.sampler.draws_pairs:
                raise UserError("loss.loss.pairs=explicit compares the pairs that sampler=abe_pairs draws: give both.")

    def waits(self) -> dict[str, int]:
        waits = {f"method.warm_up={self.warm_up} (epochs)": self.rests_until}
        if self.recipe is not None:
            rise = self.recipe.steps_of_warm_up(self.steps_per_epoch)
            waits[f"scheduler.warm_up={self.recipe.warm_up} ({self.recipe.unit}s)"] = rise
        return waits

    def on_step_end(self, step: int) -> dict[str, float]:
        """Before the first step (0) and after every step but the last, on all ranks, after the step's evaluation and
        before its checkpoint: what it changes is found there by a resumed run. Returns figures to log."""
        return {}

    def new_modules(self) -> Iterable[nn.Module]:
        """Modules that start from random values, trained with `lr * head_lr_factor`."""
        return ()

    def openings(self) -> Sequence[Stages]:
        """The runs of stages that see the images, each of them whole images alone.

        Raises:
            UserError: there is one that sees parts of them.
        """
        return [part for part in self.modules() if isinstance(part, Stages) and part.in_channels == 3]

    def training_only(self) -> Iterable[nn.Module]:
        """What is no part of the embedding: neither its size nor its cost."""
        return (self.losses,)

    def projections(self) -> Iterable[nn.Linear]:
        """The last layers of the learners, each once."""
        return (module.projection for module in self.modules() if isinstance(module, Head))

    # What all share.

    def normalized(self, images: Tensor) -> Tensor:
        """Images in [0,1] as the backbone expects them; stored features as they are."""
        if isinstance(images, Stored):
            return images
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
            NonFiniteLoss: something failed on terms that are NaN or infinite. Without a failure `finite` knows of them.
        """
        with self.finite.step(self.global_step + 1) as seen:
            output = self._embedded(batch["image"]).of_all_ranks()
            seen["embeddings"] = output.raw.detach().sum()
            with torch.autocast(output.raw.device.type, enabled=False):
                terms = self.objective(output, {name: gather(batch[name]) for name in ("label", "index")})
                if self.activation_decay:
                    weights = [layer.weight for layer in self.projections()]
                    terms["activation"] = functional.activation_decay(
                        output.raw, weights, self.activation_decay, self.unit_rows
                    )
            seen.update(terms)
        return terms

    def _embedded(self, images: Tensor) -> Output:
        """What the objective reads of the images of a training step."""
        waiting = self._waiting()
        # What waits counts its steps, which no graph does.
        learners = self.learners if waiting or self.compiled_learners is None else self.compiled_learners
        if self.micro_batch is None:
            return learners(self.normalized(images))
        return embed_in_pieces(lambda piece: learners(self.normalized(piece)), images, self.micro_batch, waiting)

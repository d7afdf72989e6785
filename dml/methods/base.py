"""The base class of all methods: outputs `[B,L,d]`, an objective on the global batch, and optimizer groups.

B images of the (local) batch, L learners, d width of one learner, D = L*d. A method is given its backbone, the whole
width `dim` = D, and two functions: `head(d)` makes a new head of width d, and `loss(d)` a new loss on embeddings of
width d.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from dml.configuration.components import Waits
from dml.configuration.ranges import NotNegative, Positive
from dml.data.datamodule import DataModule
from dml.distributed import gather, own_draws
from dml.errors import UserError
from dml.figures.plot import Plot
from dml.losses import Loss, functional
from dml.losses.loss import terms_of
from dml.methods.module import TrainedModule
from dml.methods.output import Batch, Output, Terms, summed
from dml.methods.pieces import embed_in_pieces
from dml.models.backbones.stages import Stages
from dml.models.heads import Head
from dml.models.stored import Stored
from dml.models.weights import Source

# Names in a training's log that are no terms, and the beginnings of such names; a term of a loss that has one would be
# lost.
TAKEN = frozenset({"embeddings", "loss"})
TAKEN_BEGINNINGS = ("lr/", "gradient_norm/")

NewHead = Callable[[int], Head]
NewLoss = Callable[[int], Loss]


def share(dim: int, learners: int, option: str) -> int:
    """Returns the width of one of `learners` learners that share `dim` evenly.

    Args:
        dim: D, the width of all learners together.
        learners: L.
        option: name of the option with the number of learners.

    Raises:
        UserError: `dim` is not divisible by `learners`.
    """
    if dim % learners:
        raise UserError(
            f"head.dim={dim} is the width of all {learners} learners together: make it a positive multiple of "
            f"{learners}, for example head.dim={max(1, round(dim / learners)) * learners}."
        )
    return dim // learners


class Method(TrainedModule, Waits):
    """The base class of methods: subclasses define what the learners are and what they minimise.

    Args:
        normalize: images in [0,1] -> what the backbone expects.
        losses: one per learner (each with its own proxies, beta or memory), unless the subclass's `objective` uses them
            otherwise.
        head_lr_factor: modules that start from random values (`new_modules`) learn at the backbone's rate times this
            factor; losses have factors of their own.
        activation_decay: weight of the learners' squared outputs before they are normalised (DeML eq. 6); 0: none.
        unit_rows: with `activation_decay`, weight of the term that keeps the rows of the learners' layers at unit norm.
        warm_up: epochs of the sampler in which only new modules and losses are trained (GSP section 1.6.7: 1 for losses
            on proxies).
    """

    counted_by: ClassVar[tuple[str, ...]] = ()  # the options whose product is the number of learners
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
        self.compiled_learners: Callable[[Tensor], Output] | None = None  # for training steps, see trainer.compile
        self.micro_batch: int | None = None  # images that a training step embeds at a time; None: the whole batch

    # What a subclass defines.

    def learners(self, images: Tensor) -> Output:
        """Computes raw learner outputs `[B,L,d]` of normalised images `[B,3,H,W]`, and what else the objective needs.

        It must not store anything on the method, since it may be called for pieces of the batch, and twice for each.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define learners()")

    def objective(self, output: Output, batch: Batch) -> dict[str, Tensor]:
        """Computes the terms whose sum is minimised, on the global batch: named scalars, or one that is not named.

        It is called once per step, and knows nothing of the pass through the network but its output.

        Args:
            output: the outputs of `learners` on all ranks.
            batch: `label [B]`, and `index [B]`, the images' rows in the records.
        """
        return summed([self.metric(i, output.learner(i), output, batch) for i in range(len(self.losses))])

    def groups(self) -> dict[str, slice]:
        """Returns name -> learners that are also evaluated together; the name begins their metrics."""
        return {}

    def plots(self, images: Tensor, data: DataModule, log: Sequence[Mapping[str, Any]]) -> list[Plot]:
        """Draws the pictures that only this method has, at the end of a run and in evaluation mode.

        Args:
            images: some test images `[B,3,H,W]` in 0..1, on the method's device.
            data: the run's data.
            log: records of `metrics.jsonl`.
        """
        return []

    def attach(self, data: DataModule) -> None:
        """Prepares the method for some data, once before training; a method that chooses its batches replaces
        `data.sampler`.

        Raises:
            UserError: the method cannot be trained on the data.
        """
        self.steps_per_epoch = data.sampler.steps_per_epoch
        self.rests_until = round(self.warm_up * self.steps_per_epoch)
        for loss in self.losses:
            if getattr(loss.loss, "needs_pairs", False) and not data.sampler.draws_pairs:
                raise UserError(
                    "loss.loss.pairs=explicit compares the pairs that sampler=abe_pairs draws: set both options."
                )

    def waits(self, images: int) -> dict[str, int]:
        waits = {f"method.warm_up={self.warm_up} (epochs)": self.rests_until}
        if self.recipe is not None:
            rise = self.recipe.steps_of_warm_up(self.steps_per_epoch)
            waits[f"scheduler.warm_up={self.recipe.warm_up} ({self.recipe.unit}s)"] = rise
        return waits

    def on_step_end(self, step: int) -> dict[str, float]:
        """Changes the method between steps, and returns figures to log.

        It is called on all ranks, before the first step (0) and after every step but the last. It comes after the
        step's evaluation and before its checkpoint, so that a resumed run finds its changes in the checkpoint.
        """
        return {}

    def new_modules(self) -> Iterable[nn.Module]:
        """Returns the modules that start from random values, trained with `lr * head_lr_factor`."""
        return ()

    def openings(self) -> Sequence[Stages]:
        """Returns the runs of stages whose input is whole images.

        Raises:
            UserError: some stages see parts of the images.
        """
        return [part for part in self.modules() if isinstance(part, Stages) and part.in_channels == 3]

    def training_only(self) -> Iterable[nn.Module]:
        """Returns the modules that are not needed to embed, and do not count in the embedding's size and cost."""
        return (self.losses,)

    def projections(self) -> Iterable[nn.Linear]:
        """Returns the last layers of the learners, each once."""
        return (module.projection for module in self.modules() if isinstance(module, Head))

    # What all methods share.

    def normalized(self, images: Tensor) -> Tensor:
        """Normalises images in [0,1] as the backbone expects; stored features are returned unchanged."""
        if isinstance(images, Stored):
            return images
        seen: Tensor = self.normalize(images.contiguous(memory_format=torch.channels_last))
        return seen

    def embed(self, images: Tensor) -> Tensor:
        """Embeds images `[B,3,H,W]` in [0,1]: learners `[B,L,d]`, each row of unit norm.

        The retrieval embedding is their concatenation, `embed(images).flatten(1)`: its squared distance is L times
        the mean of the learners' squared distances (cf. ABE eq. 3).
        """
        return self._checked(self.learners(self.normalized(images))).embeddings

    def metric(self, i: int, part: tuple[Tensor, Tensor], output: Output, batch: Batch) -> dict[str, Tensor]:
        """Computes the terms of the i-th loss on embeddings and norms from `Output.learner` or `Output.ensemble`.

        Raises:
            UserError: the loss names a term as the log names something else.
        """
        embeddings, norms = part
        known = {"norms": norms, "index": batch["index"], **output.auxiliary}
        value = self.losses[i](embeddings, batch["label"], **known)
        if not isinstance(value, dict):
            return {"metric": value}
        if taken := [name for name in value if name in TAKEN or name.startswith(TAKEN_BEGINNINGS)]:
            raise UserError(f"the loss names a term {min(taken)}, which every training logs: give it another name.")
        return value

    def compute_terms(self, batch: Batch) -> dict[str, Tensor]:
        """Computes the terms of the objective; this rank's part of a batch is `image [b,3,H,W], label [b], index [b]`.

        Raises:
            UserError: `learners` or `objective` returns something else than they have to.
            NonFiniteLoss: the step failed, and some terms are NaN or infinite. If it does not fail, `finite` remembers
                such terms.
        """
        with self.finite.step(self.global_step + 1) as seen:
            output = self._checked(self._embedded(batch["image"])).of_all_ranks()
            seen["embeddings"] = output.raw.detach().sum()
            with torch.autocast(output.raw.device.type, enabled=False):
                found = self.objective(output, {name: gather(batch[name]) for name in ("label", "index")})
                of = f"objective() of {type(self).__name__}"
                terms = Terms(terms_of(found if isinstance(found, dict) else {"objective": found}, of))
                # Under DDP every parameter has to take part, also those of a loss that finds no pairs in the batch, or
                # that has no part in this step.
                idle = [p.sum() for p in self.losses.parameters() if p.requires_grad]
                if idle:
                    first = next(iter(terms))
                    terms.update({first: terms[first] + 0 * torch.stack(idle).sum()})
                if self.activation_decay:
                    weights = [layer.weight for layer in self.projections()]
                    terms["activation"] = functional.activation_decay(
                        output.raw, weights, self.activation_decay, self.unit_rows
                    )
            seen.update(terms)
        return terms

    def _checked(self, output: Output) -> Output:
        """Returns what `learners` gave. Raises UserError if it is something else."""
        if isinstance(output, Output):
            return output
        said = type(output).__name__
        raise UserError(f"learners() of {type(self).__name__} returns {said}: it has to return Output(raw), [B,L,d].")

    def _embedded(self, images: Tensor) -> Output:
        """Embeds the images of a training step, in pieces if `micro_batch` is set."""
        waiting = self._waiting()
        # Waiting modules count their steps, which a compiled graph cannot do.
        learners = self.learners if waiting or self.compiled_learners is None else self.compiled_learners
        with own_draws(images.device):
            if self.micro_batch is None:
                return learners(self.normalized(images))
            return embed_in_pieces(lambda piece: learners(self.normalized(piece)), images, self.micro_batch, waiting)

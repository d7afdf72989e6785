"""The one call form of all losses: `loss(embeddings [N,d], labels [N]) -> scalar`, or a dict of named scalars."""

import inspect
from typing import Any

import torch
from pytorch_metric_learning.losses import (
    CrossBatchMemory,
    InstanceLoss,
    P2SGradLoss,
    PNPLoss,
    RankedListLoss,
    VICRegLoss,
)
from pytorch_metric_learning.losses.mixins import WeightMixin
from pytorch_metric_learning.utils.loss_and_miner_utils import convert_to_pairs
from torch import Tensor, nn

from dml.configuration.components import Waits
from dml.configuration.ranges import Positive, WholeNumber
from dml.errors import UserError

# Losses of pytorch-metric-learning that learn vectors of the classes, or that refuse pairs when they are called.
WITHOUT_PAIRS = (WeightMixin, InstanceLoss, P2SGradLoss, PNPLoss, RankedListLoss, VICRegLoss)

OF_PAIRS = ("pairs", "indices_tuple")  # parameters of losses for what a miner found


class Loss(nn.Module, Waits):
    """A loss of one learner with its miner, computed in float32 whatever the trainer's precision.

    Args:
        loss: from pytorch-metric-learning, or any module with the same call form.
        miner: chooses the pairs or triplets that the loss sees: from pytorch-metric-learning, or any module with the
            same call form. A miner with `masks = True` gives positive and negative pairs as `[N,N]` bool; its result is
            converted to the form that the loss takes. With a cross-batch memory it mines there. It draws from torch's
            global generator, which is seeded by the step.
        lr_factor: the loss's own parameters (proxies, beta) learn at the method's learning rate times this factor.
        memory_from: number of batches before a cross-batch memory is used (GSP section 1.6.7: 1,000); until then the
            loss sees the batch alone, without the memory's miner.
        add_batch: the loss of the batch alone is added to that in the cross-batch memory, as in XBM's released code.

    Raises:
        UserError: `memory_from` or `add_batch` is set without a memory, the miner is for a loss that takes no pairs, it
            cannot mine in a memory, or the loss needs one and there is none.
    """

    def __init__(
        self,
        loss: nn.Module,
        miner: nn.Module | None = None,
        lr_factor: Positive = 1.0,
        memory_from: WholeNumber = 0,
        add_batch: bool = False,
    ) -> None:
        super().__init__()
        if (memory_from or add_batch) and not isinstance(loss, CrossBatchMemory):
            option = f"memory_from={memory_from}" if memory_from else "add_batch=true"
            raise UserError(f"loss.{option} needs a loss with a memory: choose loss=xbm or leave the option out.")
        if miner is not None:
            _check_miner(loss, miner)
        if miner is not None and isinstance(loss, CrossBatchMemory):
            loss.miner, miner = miner, None
        self.loss = loss
        self.miner = miner
        self.lr_factor = lr_factor
        self.add_batch = add_batch
        self.memory_from, self.batches = memory_from, 0  # batches: counted only until the memory is used
        parameters = list(inspect.signature(loss.forward).parameters.values())[2:]  # after embeddings and labels
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.takes = {p.name for p in named} - set(OF_PAIRS)
        self.needs = {p.name for p in named if p.default is p.empty} - set(OF_PAIRS)
        self.of_pairs = next((p.name for p in named if p.name in OF_PAIRS), None)  # the parameter of what is mined
        required = any(p.name in OF_PAIRS and p.default is p.empty for p in named)
        if required and miner is None:
            raise UserError(f"loss={type(loss).__name__} needs a miner: choose one, such as miner=multi_similarity.")

    def check_memory(self, images: int) -> None:
        """Raises UserError if a cross-batch memory is smaller than a batch of so many images."""
        if isinstance(self.loss, CrossBatchMemory) and self.loss.memory_size < images:
            raise UserError(
                f"The cross-batch memory holds {self.loss.memory_size} embeddings but a batch has {images}: set "
                "loss.loss.memory_size to the size of several batches."
            )

    def forward(self, embeddings: Tensor, labels: Tensor, **auxiliary: Tensor) -> Tensor | dict[str, Tensor]:
        """Computes the loss: a scalar, or named scalars whose sum is minimised.

        Args:
            embeddings: `[N,d]`, rows of unit norm.
            labels: `[N]` int64.
            auxiliary: other values of the step, one row per image: `norms [N]` of the outputs before normalisation,
                `index [N]`, the images' rows in the records, and those that the method computes. A loss gets the ones
                that its `forward` has parameters of the same name for.

        Raises:
            UserError: the cross-batch memory is smaller than the batch, or the loss needs a value that the method does
                not compute.
        """
        if embeddings.dtype in (torch.float16, torch.bfloat16):
            embeddings = embeddings.float()
        self.check_memory(len(embeddings))
        whole: Any = self.loss
        alone = self.batches < self.memory_from
        if alone:
            self.batches += 1
        loss = whole.loss if alone else whole
        if lacking := sorted(self.needs - auxiliary.keys()):
            raise UserError(
                f"{type(loss).__name__} needs {', '.join(lacking)}, which this method does not compute: choose another "
                f"loss; available are {', '.join(sorted(auxiliary)) or 'embeddings and labels alone'}."
            )
        wanted: dict[str, Any] = {name: value for name, value in auxiliary.items() if name in self.takes}
        with torch.autocast(embeddings.device.type, enabled=False):
            if self.miner is not None and self.of_pairs is not None:
                wanted[self.of_pairs] = self._mined(self.miner, embeddings, labels)
            value: Any = loss(embeddings, labels, **wanted)
            if self.add_batch and not alone:
                value = value + whole.loss(embeddings, labels)
        return terms_of(value, f"loss={type(loss).__name__}")

    def _mined(self, miner: nn.Module, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Runs the miner and converts its result to what the loss takes: masks, or indices of pairs or triplets."""
        mined: tuple[Tensor, ...] = miner(embeddings, labels)
        gives, takes = (getattr(one, "masks", False) for one in (miner, self.loss))
        if gives and not takes:
            return tuple(index for mask in mined for index in mask.nonzero().unbind(1))
        if takes and not gives:
            anchors, positives, others, negatives = convert_to_pairs(mined, labels)
            masks = labels.new_zeros(2, len(labels), len(labels), dtype=torch.bool)
            masks[0, anchors, positives] = True
            masks[1, others, negatives] = True
            return tuple(masks)
        return mined

    def waits(self, images: int) -> dict[str, int]:
        return {f"loss.memory_from={self.memory_from}": self.memory_from}

    # pytorch-metric-learning keeps the current place in the memory outside its buffers. Without it a resumed run would
    # overwrite the wrong entries.

    def get_extra_state(self) -> dict[str, Any]:
        if not isinstance(self.loss, CrossBatchMemory):
            return {}
        place = {"queue_idx": self.loss.queue_idx, "has_been_filled": self.loss.has_been_filled}
        return place | {"batches": self.batches}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self if name == "batches" else self.loss, name, value)


def terms_of(value: Any, of: str) -> Tensor | dict[str, Tensor]:
    """Returns what a loss or an objective returned. Raises UserError unless it is a scalar, or named scalars."""
    found = list(value.values()) if isinstance(value, dict) else [value]
    wrong = [one for one in found if not isinstance(one, Tensor) or one.ndim]
    if found and not wrong:
        result: Tensor | dict[str, Tensor] = value
        return result
    shapes = [
        f"a tensor of shape {list(one.shape)}" if isinstance(one, Tensor) else type(one).__name__ for one in wrong
    ]
    said = shapes[0] if found else "no terms"
    raise UserError(f"{of} returns {said}: it has to return a scalar, or named scalars.")


def _check_miner(loss: nn.Module, miner: nn.Module) -> None:
    """Raises UserError for a miner that cannot be used with the loss."""
    name, mines = type(loss).__name__, type(miner).__name__
    takes = inspect.signature(loss.forward).parameters.keys()
    if isinstance(loss, CrossBatchMemory):
        if "ref_emb" not in inspect.signature(miner.forward).parameters:
            raise UserError(
                f"miner={mines} chooses pairs within a batch, but loss={name} compares the batch with a memory: choose "
                "miner=none, or one of pytorch-metric-learning, such as miner=pair_margin."
            )
    elif isinstance(loss, WITHOUT_PAIRS) or not set(OF_PAIRS) & takes:
        raise UserError(
            f"miner={mines} chooses pairs or triplets, but loss={name} takes none: choose miner=none, or a loss of "
            "pairs or triplets, such as loss=contrastive."
        )

"""Embeds images with a method in batches, on any number of ranks.

N images, L learners, d width of one learner.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric as Collecting
from tqdm import tqdm

from dml.evaluation.evaluator import Embedded


class Collector(Collecting):
    """Collects the embeddings of all ranks and keeps each row once, so padding of batches never changes a metric."""

    full_state_update = False
    embeddings: list[Tensor]
    labels: list[Tensor]
    rows: list[Tensor]

    def __init__(self) -> None:
        super().__init__(compute_with_cache=False)
        for name in ("embeddings", "labels", "rows"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, embeddings: Tensor, labels: Tensor, rows: Tensor) -> None:
        """Adds a batch: embeddings `[b,L,d]`, labels `[b]`, and rows of the records `[b]`."""
        self.embeddings.append(embeddings.float())
        self.labels.append(labels)
        self.rows.append(rows)

    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(  # type: ignore[return-value]
            torch.cat(list(state)) if isinstance(state, list) else state
            for state in (self.embeddings, self.labels, self.rows)
        )

    def embedded(self) -> Embedded:
        """Returns what all ranks collected, in the order of rows, each row once."""
        embeddings, labels, rows = self.compute()
        # torchmetrics squeezes tensors with one element.
        labels, rows = labels.reshape(-1), rows.reshape(-1)
        rows, order = rows.sort(stable=True)
        first = torch.ones_like(rows, dtype=torch.bool)
        first[1:] = rows[1:] != rows[:-1]
        order = order[first]
        return Embedded(embeddings[order], labels[order], rows[first])


def embed_batches(
    method: LightningModule,
    batches: Iterable[dict[str, Tensor]],
    to_device: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    *,
    of: Callable[[Tensor], Tensor] | None = None,
    title: str | None = None,
) -> Embedded:
    """Embeds all batches in evaluation mode, then puts the method back into the mode it was in.

    Args:
        method: whose `embed` maps images `[b,3,H,W]` to learners `[b,L,d]`.
        batches: `image [b,3,H,W]`, `label [b]`, `index [b]`: this rank's part of the images.
        to_device: moves a batch to the method's device.
        of: a function to use instead of `method.embed`, also `[b,3,H,W] -> [b,L,d]`.
        title: of the progress bar; None: no bar.
    """
    embedding: Any = of or method.embed
    collector = Collector().to(method.device)
    training = method.training
    method.eval()
    with torch.inference_mode():
        for batch in tqdm(batches, desc=title, disable=title is None, leave=False):
            batch = to_device(batch)
            collector.update(embedding(batch["image"]), batch["label"], batch["index"])
    method.train(training)
    return collector.embedded()


def embed_rows(
    trainer: Trainer, rows: np.ndarray, title: str, *, of: Callable[[Tensor], Tensor] | None = None
) -> Embedded:
    """Embeds rows of the data during a training, in its precision. The ranks share the work; all get the whole result.

    Args:
        trainer: of the running training.
        rows: of the records.
        title: of the progress bar.
        of: see `embed_batches`.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    with trainer.precision_plugin.val_step_context():
        return embed_batches(
            trainer.lightning_module,
            data.eval_dataloader(rows),
            lambda batch: trainer.precision_plugin.convert_input(trainer.strategy.batch_to_device(batch)),
            of=of,
            title=title if trainer.is_global_zero else None,
        )

"""Who trains, who is searched for, who is searched, and which checkpoint is reported."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dml.data.records import Records
from dml.errors import UserError
from dml.evaluation.evaluator import Table, score


@dataclass(frozen=True)
class Split:
    """Rows of the records. `gallery` None: the queries are their own gallery, without themselves."""

    train: np.ndarray
    query: np.ndarray
    gallery: np.ndarray | None


class Conventional:
    """The protocol of most papers: train on the training classes, retrieve among the test classes.

    The last checkpoint is the result. The best checkpoint on the test set, which is what the papers report
    (ABE section 5: "for the iteration with highest Recall@1"), stands beside it and is labelled as selected on
    the test set.

    Args:
        ks: the K of Recall@K.
        every: how often to evaluate while training.
        unit: of `every`: steps, or epochs of the sampler.
        batch_size: of the evaluation, per device.
        clustering: report NMI and F1 at the end (k-means with one cluster a test class).

    Raises:
        UserError: a K or an interval that is no positive number.
    """

    def __init__(
        self,
        *,
        ks: Sequence[int] = (1, 2, 4, 8),
        every: int = 100,
        unit: Literal["steps", "epochs"] = "steps",
        batch_size: int = 128,
        clustering: bool = True,
    ) -> None:
        if not ks or any(k < 1 for k in ks):
            raise UserError(f"protocol.ks={list(ks)} has to name at least one K, all of them 1 or more.")
        if 1 not in ks:
            raise UserError(f"protocol.ks={list(ks)} has to hold 1: checkpoints are compared by Recall@1.")
        if every < 1 or batch_size < 1:
            raise UserError(f"protocol.every={every} and protocol.batch_size={batch_size} have to be 1 or more.")
        if unit not in ("steps", "epochs"):
            raise UserError(f"protocol.unit={unit} has to be steps or epochs.")
        self.ks = tuple(ks)
        self.every, self.unit = every, unit
        self.batch_size, self.clustering = batch_size, clustering

    def split(self, records: Records) -> Split:
        """Training classes to train on; test classes as query and gallery, or apart where the data set has them so."""
        return Split(records.train_rows, records.query_rows, records.gallery_rows)

    def interval(self, steps_per_epoch: int) -> int:
        """Steps between two evaluations."""
        return self.every * (steps_per_epoch if self.unit == "epochs" else 1)

    def score(self, table: Table, split: Split, *, final: bool) -> dict[str, float]:
        """Figures of one checkpoint (see `dml.evaluation.evaluator.score`); clustering for the final one alone."""
        gallery = None if split.gallery is None else table.take(split.gallery)
        return score(table.take(split.query), gallery, self.ks, clustering=self.clustering and final)

"""A protocol with fewer training classes and the same test."""

from dataclasses import replace
from typing import Any

import numpy as np

from dml.configuration.ranges import Share
from dml.data.records import Records
from dml.errors import UserError
from dml.evaluation.protocol import Conventional
from dml.evaluation.splits import Split


class FewerClasses(Conventional):
    """Trains only on the first training classes, to see how many a method needs. The test is that of the data set.

    Args:
        kept: share of the training classes that is used; their number is rounded up.
        options: see `Conventional`.
    """

    def __init__(self, *, kept: Share = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self.kept = kept

    def parted(self, records: Records) -> Split:
        """Splits the records. Raises UserError if fewer than two classes are left to train on."""
        whole = super().parted(records)
        labels = records.labels[whole.train]
        classes = np.unique(labels)
        kept = classes[: int(np.ceil(self.kept * len(classes)))]
        if len(kept) < 2:
            raise UserError(
                f"protocol.kept={self.kept} leaves {len(kept)} of {len(classes)} classes: keep at least two."
            )
        return replace(whole, train=whole.train[np.isin(labels, kept)])

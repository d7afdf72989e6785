"""A protocol: fewer classes to train on, the test as it is."""

from dataclasses import replace
from typing import Any

import numpy as np

from dml.configuration.ranges import Share
from dml.data.records import Records
from dml.errors import UserError
from dml.evaluation.protocol import Conventional
from dml.evaluation.splits import Split


class FewerClasses(Conventional):
    """How much does a method need? The first training classes alone, in their order; the test stays the data set's.

    Args:
        kept: this share of the training classes, rounded up.
        options: see `Conventional`.
    """

    def __init__(self, *, kept: Share = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self.kept = kept

    def parted(self, records: Records) -> Split:
        """Raises UserError where fewer than two classes are left to train on."""
        whole = super().parted(records)
        labels = records.labels[whole.train]
        classes = np.unique(labels)
        kept = classes[: int(np.ceil(self.kept * len(classes)))]
        if len(kept) < 2:
            raise UserError(f"protocol.kept={self.kept} leaves {len(kept)} of {len(classes)} classes: keep two.")
        return replace(whole, train=whole.train[np.isin(labels, kept)])

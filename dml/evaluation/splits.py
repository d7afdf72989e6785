"""The split of a protocol, and what holds of each, whatever data set it comes of; else metrics look good and say
nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dml.data.records import Records
from dml.errors import UserError

EvaluatedPart = Literal["test", "validation"]


@dataclass(frozen=True)
class Split:
    """Rows of the records.

    Attributes:
        train: to train on.
        query, gallery: of the test; no gallery: the queries are their own gallery, without themselves.
        validation: of classes neither trained on nor in the test; None: the protocol has none.
        cameras: `[N]` of all rows of the records, where images of the query's own camera do not count.
    """

    train: np.ndarray
    query: np.ndarray
    gallery: np.ndarray | None
    validation: np.ndarray | None = None
    cameras: np.ndarray | None = None

    @property
    def monitor(self) -> EvaluatedPart:
        """What is evaluated while training, and decides which checkpoint was the best."""
        return "test" if self.validation is None else "validation"

    def check(self, records: Records) -> None:
        """Raises UserError unless images and classes are apart where they have to be.

        Training, validation and test share neither class nor image; none of them has an image of a class twice; no
        query is in the gallery, unless the protocol leaves out the images of its camera, hence the query itself.
        """
        parts = {"training": self.train, "validation": self.validation, "queries": self.query, "gallery": self.gallery}
        rows = {part: np.asarray(one) for part, one in parts.items() if one is not None}
        for part, of_part in rows.items():
            if not len(of_part):
                raise UserError(f"the split of {records.name} has no images as {part}: choose other classes or roles")
            if of_part.min() < 0 or of_part.max() >= len(records):
                raise UserError(
                    f"the split of {records.name} has a row as {part} that is none of its {len(records)} images"
                )
        _Overlaps(records, rows).check(with_own_image=self.cameras is not None)


class _Overlaps:
    def __init__(self, records: Records, rows: Mapping[str, np.ndarray]) -> None:
        self.records, self.rows = records, rows
        self.image = records.paths.files.places  # [N]: which image it is

    def check(self, with_own_image: bool) -> None:
        parts = list(self.rows)
        for part in parts:
            self._once(part)
        for i, a in enumerate(parts):
            for b in parts[i + 1 :]:
                if (a, b) != ("queries", "gallery"):
                    self._apart(a, b)
                elif not with_own_image:
                    self._no_query_in_the_gallery()

    def _once(self, part: str) -> None:
        rows = self.rows[part]
        keys = self.image[rows] * np.int64(len(self.records.class_names)) + self.records.labels[rows]
        _, first, times = np.unique(keys, return_index=True, return_counts=True)
        if (times > 1).any():
            self._tell(f"twice as {part}", rows[first[times > 1]], "name each image once")

    def _apart(self, a: str, b: str) -> None:
        for of_all, what in ((self.image, "image"), (self.records.labels, "class")):
            rows = self.rows[b][np.isin(of_all[self.rows[b]], of_all[self.rows[a]])]
            if len(rows):
                of = (
                    ""
                    if what == "image"
                    else f", of the class {self.records.class_names[self.records.labels[rows[0]]]!r},"
                )
                self._tell(f"among both {a} and {b}", rows, f"give each {what} one side", of)

    def _no_query_in_the_gallery(self) -> None:
        queries = self.rows["queries"]
        rows = queries[np.isin(self.image[queries], self.image[self.rows["gallery"]])]
        if len(rows):
            remedy = "a query would find itself: take it out of the gallery, or give one role, test"
            self._tell("a query and in the gallery too", rows, remedy)

    def _tell(self, where: str, rows: np.ndarray, remedy: str, of: str = "") -> None:
        raise UserError(
            f"the image {self.records.paths[rows[0]]} of dataset {self.records.name}{of} is {where} "
            f"({len(rows)} such): {remedy}"
        )

"""The split of a protocol, and the checks that every split has to pass. A split that breaks them gives metrics that
look good and mean nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dml.data.records import Records
from dml.errors import UserError

EvaluatedPart = Literal["test", "validation"]


@dataclass(frozen=True)
class Split:
    """Which rows of the records a protocol uses for what.

    Attributes:
        train: rows to train on.
        query, gallery: rows of the test. Without a gallery the queries are the gallery, each without itself.
        validation: rows of classes that are neither trained on nor tested; None: the protocol has none.
        cameras: `[N]`, the camera of each row of the records, if the protocol leaves out images of the query's own
            camera; else None.
    """

    train: np.ndarray
    query: np.ndarray
    gallery: np.ndarray | None
    validation: np.ndarray | None = None
    cameras: np.ndarray | None = None

    @property
    def monitor(self) -> EvaluatedPart:
        """The part that is evaluated during training and decides which checkpoint is the best."""
        return "test" if self.validation is None else "validation"

    def check(self, records: Records) -> None:
        """Checks that images and classes are separate where they have to be.

        Training, validation and test must share neither a class nor an image. None of them may have an image of a class
        twice. No query may be in the gallery, unless the protocol leaves out the images of its camera, and so the query
        itself; an image then has one camera. Of the queries, and of the validation images, one at least needs another
        image of its class to find.

        Raises:
            UserError: one of these does not hold, or a part is empty.
        """
        parts = {"training": self.train, "validation": self.validation, "queries": self.query, "gallery": self.gallery}
        rows = {part: np.asarray(one) for part, one in parts.items() if one is not None}
        for part, of_part in rows.items():
            if not len(of_part):
                raise UserError(f"the split of {records.name} has no images as {part}: choose other classes or roles.")
            if of_part.ndim != 1 or not np.issubdtype(of_part.dtype, np.integer):
                raise UserError(
                    f"the split of {records.name} has an array of {of_part.dtype} and shape {list(of_part.shape)} as "
                    f"{part}: it has to hold the numbers of rows, as np.flatnonzero gives them for a mask."
                )
            if of_part.min() < 0 or of_part.max() >= len(records):
                raise UserError(
                    f"the split of {records.name} has a row as {part} that is none of its {len(records)} images: look "
                    "at what the protocol's `parted` returns."
                )
        _Overlaps(records, rows).check(self.cameras)
        labels = {part: records.labels[of_part] for part, of_part in rows.items()}
        for part in ("queries", "validation"):
            gallery = labels.get("gallery") if part == "queries" else None
            if part in labels and not _some_positive(labels[part], gallery):
                raise UserError(
                    f"the split of {records.name} has no image as {part} with another one of its class to find: give "
                    "the test and validation classes two images or more."
                )


def _some_positive(labels: np.ndarray, gallery: np.ndarray | None) -> bool:
    """Returns whether a query has a positive; without a gallery the queries are the gallery, each without itself."""
    return len(np.unique(labels)) < len(labels) if gallery is None else bool(np.isin(labels, gallery).any())


class _Overlaps:
    def __init__(self, records: Records, rows: Mapping[str, np.ndarray]) -> None:
        self.records, self.rows = records, rows
        self.image = records.paths.files.places  # [N]: a number that is the same for rows of the same image file

    def check(self, cameras: np.ndarray | None) -> None:
        parts = list(self.rows)
        for part in parts:
            self._once(part)
        for i, a in enumerate(parts):
            for b in parts[i + 1 :]:
                if (a, b) != ("queries", "gallery"):
                    self._apart(a, b)
                elif cameras is None:
                    self._no_query_in_the_gallery()
                else:
                    self._one_camera(cameras)

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
            remedy = "a query would find itself: take it out of the gallery, or give it the role test alone"
            self._tell("a query and in the gallery too", rows, remedy)

    def _one_camera(self, cameras: np.ndarray) -> None:
        queries, gallery = self.rows["queries"], self.rows["gallery"]
        images, first = np.unique(self.image[gallery], return_index=True)
        known = queries[np.isin(self.image[queries], images)]
        rows = known[cameras[known] != cameras[gallery[first[np.searchsorted(images, self.image[known])]]]]
        if len(rows):
            self._tell("a query and in the gallery with another camera", rows, "a query would find itself: name one")

    def _tell(self, where: str, rows: np.ndarray, remedy: str, of: str = "") -> None:
        raise UserError(
            f"the image {self.records.paths[rows[0]]} of dataset {self.records.name}{of} is {where} "
            f"({len(rows)} such in all): {remedy}."
        )

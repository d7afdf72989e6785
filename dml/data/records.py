"""Records, which every dataset function returns: paths, labels and roles as columns, and a way to open an image.

N images, C classes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NoReturn

import numpy as np
from PIL import Image

from dml.data.images import quiet, reason
from dml.data.paths import NO_FILE, Paths
from dml.errors import UserError

ROLES = ("train", "test", "query", "gallery")


class UnreadableImage(UserError):
    """An image cannot be decoded; the message names the file.

    torch rebuilds a worker's exception from its type and the text of its traceback (`torch/_utils.py`,
    `ExceptionWrapper.reraise`). That text ends with our sentence, and only the sentence is kept.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.rpartition(f"{type(self).__qualname__}: ")[2].strip())


Unreadable = Literal["stop", "skip"]


@dataclass(frozen=True, eq=False)
class Records:
    """The images of a dataset. Rows are numbered 0..N-1; `index` in a batch is such a number.

    Attributes:
        name: of the dataset, for reports.
        paths: N paths of files, or names by which a person recognises the images.
        labels: `[N]` int64, 0..C-1, every class with at least one image.
        roles: `[N]` str, one of `ROLES`. `test` rows are both query and gallery.
        class_names: C names.
        open_image: row -> RGB image. Safe to call in forked workers: it shares no file handle.
        unreadable: what to do with a file that cannot be decoded, `stop` or `skip` (see `dml.data.check`).
        cameras: `[N]` int64, which camera took each image; None: the data set does not say.
        boxes: `[N,4]` float64, the part that `open_image` cuts out of each file; a row of NaN means the whole image;
            None: there are no boxes.
        source: returns a text that changes when pictures change that do not lie in files of their own; None: the
            pictures are files, or nothing tells.

    Raises:
        UserError: there are no images, an array has another shape or type, a role is unknown, a label has no class
            name, a class has no images or is both in training and in evaluation, there are queries without a gallery
            (or the reverse), or test images beside them.
    """

    name: str
    paths: Paths
    labels: np.ndarray
    roles: np.ndarray
    class_names: list[str]
    open_image: Callable[[int], Image.Image]
    unreadable: Unreadable = "stop"
    cameras: np.ndarray | None = None
    boxes: np.ndarray | None = None
    source: Callable[[], str] | None = None

    def __post_init__(self) -> None:
        if not len(self.paths):
            raise UserError(f"dataset {self.name} has no images: check the folder that it was read from")
        count = len(self.paths)
        shapes = {"labels": (count,), "roles": (count,), "cameras": (count,), "boxes": (count, 4)}
        for column, shape in shapes.items():
            of_all = getattr(self, column)
            if of_all is None and column in ("cameras", "boxes"):
                continue
            if not isinstance(of_all, np.ndarray):
                self._tell(f"{column} of type {type(of_all).__name__}", f"give an array of shape {list(shape)}")
            if of_all.shape != shape:
                self._tell(f"{column} of shape {list(of_all.shape)} for {count} images", f"give {list(shape)}")
        if self.labels.dtype != np.int64:
            self._tell(f"labels of type {self.labels.dtype}", "give int64, the number of each image's class")
        if (unknown := ~np.isin(self.roles, ROLES)).any():
            self._tell(f"the role {str(self.roles[unknown][0])!r}", f"roles are {', '.join(ROLES)}")
        self._check_classes()

    def _tell(self, what: str, remedy: str) -> NoReturn:
        raise UserError(f"dataset {self.name} has {what}: {remedy}")

    def _check_classes(self) -> None:
        if self.labels.min() < 0 or self.labels.max() >= len(self.class_names):
            least, most = int(self.labels.min()), int(self.labels.max())
            self._tell(
                f"labels from {least} to {most}, but {len(self.class_names)} class names", "number classes from 0"
            )
        sizes = np.bincount(self.labels, minlength=len(self.class_names))
        if not sizes.all():
            raise UserError(
                f"class {self.class_names[int(sizes.argmin())]!r} of dataset {self.name} has no images: add some, or "
                "remove the class"
            )
        train = self.roles == "train"
        trained, evaluated = (np.bincount(self.labels[side], minlength=len(sizes)) > 0 for side in (train, ~train))
        shared = np.flatnonzero(trained & evaluated)
        if len(shared):
            raise UserError(
                f"class {self.class_names[shared[0]]!r} of dataset {self.name} is both in training and in evaluation "
                f"({len(shared)} such classes): give each class one side"
            )
        if ("query" in self.roles) != ("gallery" in self.roles):
            raise UserError(f"dataset {self.name} has only one of query and gallery images: give both, or use test")
        if "query" in self.roles and "test" in self.roles:
            raise UserError(
                f"dataset {self.name} has test images beside query and gallery images: a test image is both, so give "
                "these alone, or make each a query or a gallery image"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, *roles: str) -> np.ndarray:
        """Returns the rows `[n]` int64 that have any of these roles, ascending."""
        assert set(roles) <= set(ROLES)
        return np.flatnonzero(np.isin(self.roles, roles))

    @property
    def train_rows(self) -> np.ndarray:
        return self.rows("train")

    @property
    def query_rows(self) -> np.ndarray:
        return self.rows("test", "query")

    @property
    def gallery_rows(self) -> np.ndarray | None:
        """Rows of the gallery; None if the queries are the gallery."""
        return self.rows("gallery") if "gallery" in self.roles else None

    def class_of(self, row: int) -> str:
        """Returns the name of a row's class."""
        return self.class_names[int(self.labels[row])]

    def subset(self, rows: np.ndarray) -> "Records":
        """Returns records of these rows `[n]` alone, in this order.

        Classes that lose all images are removed, and the others are renumbered.
        """
        classes, labels = renumbered(self.labels[rows])
        return Records(
            name=self.name,
            paths=self.paths[rows],
            labels=labels,
            roles=self.roles[rows],
            class_names=[self.class_names[c] for c in classes],
            open_image=lambda row: self.open_image(int(rows[row])),
            unreadable=self.unreadable,
            cameras=None if self.cameras is None else self.cameras[rows],
            boxes=None if self.boxes is None else self.boxes[rows],
            source=self.source,
        )

    def stamps(self, rows: np.ndarray) -> Iterator[str]:
        """Yields path, size, time and box of each file of these rows `[n]`, by which a changed picture is noticed.

        With a `source`, it yields each row's name and the source's text. Rows without a file are skipped otherwise.
        """
        if self.source is not None:
            said = self.source()
            return (f"{self.paths[int(row)]}\0{said}" for row in rows)
        if self.boxes is None:
            return self.paths.stamps(rows)
        rows = rows[self.paths.files.sizes[rows] != NO_FILE]
        return (
            f"{stamp}\0{self.boxes[row].tolist()}" for row, stamp in zip(rows, self.paths.stamps(rows), strict=True)
        )

    def image(self, row: int) -> Image.Image:
        """Opens an image as `opened` does, without PIL's warnings. Not for use by several threads."""
        with quiet():
            return self.opened(row)

    def opened(self, row: int) -> Image.Image:
        """Opens an image as `open_image` does, but turns any error into one sentence.

        Raises:
            UnreadableImage: the image cannot be read; the message names the file.
        """
        try:
            found = self.open_image(row)
            if not isinstance(found, Image.Image):
                raise TypeError(f"open_image returns {type(found).__name__}, and no image of PIL")
            return found
        except Exception as error:  # PIL's decoders raise OSError, SyntaxError, ValueError, struct.error and more
            raise UnreadableImage(
                f"the image {self.paths[row]} cannot be read ({reason(error)}): repair it, or remove it and start again"
            ) from error


def renumbered(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the C classes that occur in labels `[n]` int64 (0 or more), ascending, and the labels as 0..C-1."""
    there = np.bincount(labels) > 0
    return np.flatnonzero(there), (np.cumsum(there) - 1)[labels]

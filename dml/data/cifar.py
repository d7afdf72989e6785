"""CIFAR-100 (Krizhevsky 2009): 60,000 images of 32x32, 100 classes of 600 in 20 superclasses of 5.

The official files at https://www.cs.toronto.edu/~kriz/cifar.html come in two layouts: binary (`train.bin`, `test.bin`)
and Python (`train`, `test`, `meta`).

torchvision's `CIFAR100` is not used: it only reads the Python layout, and leaves out the superclasses.
"""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dml.errors import UserError

SIDE = 32
RECORD = 2 + 3 * SIDE * SIDE  # superclass, class, red, green, blue
IMAGES = {"train": 50_000, "test": 10_000}
SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"


@dataclass(frozen=True, eq=False)
class Cifar100:
    """The images, training images first.

    Attributes:
        images: `[60000,32,32,3]` uint8.
        classes: `[60000]` int64, 0..99.
        superclasses: `[60000]` int64, 0..19.
        train: `[60000]` bool, True for images of the official training part.
        class_names, superclass_names: 100 and 20 names.
    """

    images: np.ndarray
    classes: np.ndarray
    superclasses: np.ndarray
    train: np.ndarray
    class_names: list[str]
    superclass_names: list[str]

    @property
    def superclass_of(self) -> np.ndarray:
        """`[100]` int64: the superclass of each class."""
        owner = np.zeros(len(self.class_names), np.int64)
        owner[self.classes] = self.superclasses
        return owner


def cifar100(root: str) -> Cifar100:
    """Reads CIFAR-100 from `root`, or from the official folder in it (`cifar-100-binary` or `cifar-100-python`).

    Raises:
        UserError: there are no files, or they are cut short or are not those of CIFAR-100.
    """
    for folder in (Path(root), Path(root) / "cifar-100-binary", Path(root) / "cifar-100-python"):
        if (folder / "train.bin").is_file():
            parts = [_read_binary(folder / f"{part}.bin", count) for part, count in IMAGES.items()]
            return _whole(parts, _lines(folder / "fine_label_names.txt"), _lines(folder / "coarse_label_names.txt"))
        if (folder / "meta").is_file():
            parts = [_read_python(folder / part, count) for part, count in IMAGES.items()]
            meta = _unpickle(folder / "meta")
            return _whole(parts, _names(folder, meta, b"fine_label_names"), _names(folder, meta, b"coarse_label_names"))
    raise UserError(
        f"no CIFAR-100 in {root}: put train.bin, test.bin, fine_label_names.txt and coarse_label_names.txt there, or "
        f"the unpacked Python version, from {SOURCE}"
    )


CifarPart = tuple[np.ndarray, np.ndarray, np.ndarray]  # superclasses, classes, pixels [N, 3072]


def _read_binary(path: Path, count: int) -> CifarPart:
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): fetch it again from {SOURCE}") from None
    if len(content) != count * RECORD:
        raise UserError(
            f"{path} has {len(content):,} bytes where CIFAR-100 has {count * RECORD:,}: fetch it again from {SOURCE}"
        )
    records = content.reshape(count, RECORD)
    return records[:, 0], records[:, 1], records[:, 2:]


def _read_python(path: Path, count: int) -> CifarPart:
    content = _unpickle(path)
    try:
        part = tuple(np.asarray(content[name]) for name in (b"coarse_labels", b"fine_labels", b"data"))
    except (KeyError, TypeError):
        raise UserError(f"{path} is no batch of CIFAR-100: fetch it again from {SOURCE}") from None
    superclasses, classes, pixels = part
    if len(classes) != count or len(superclasses) != count or pixels.shape != (count, RECORD - 2):
        raise UserError(f"{path} does not hold CIFAR-100's {count:,} images: fetch it again from {SOURCE}")
    return superclasses, classes, pixels


class _ArraysOnly(pickle.Unpickler):
    """Reads what the official files hold and runs nothing else."""

    ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "encode"})

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("numpy", "_codecs") and name in self.ALLOWED:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of CIFAR-100")


def _unpickle(path: Path) -> Any:
    try:
        return _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except Exception as error:  # a damaged pickle raises almost anything
        raise UserError(f"{path} cannot be read ({error}): fetch it again from {SOURCE}") from None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): fetch it again from {SOURCE}") from None


def _names(folder: Path, meta: Any, key: bytes) -> list[str]:
    try:
        return [name.decode() for name in meta[key]]
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{folder / 'meta'} is not CIFAR-100's: fetch it again from {SOURCE}") from None


def _whole(parts: list[CifarPart], class_names: list[str], superclass_names: list[str]) -> Cifar100:
    superclasses, classes, pixels = (np.concatenate(column) for column in zip(*parts, strict=True))
    sizes = np.bincount(classes, minlength=100)
    pairs = np.unique(np.stack([superclasses, classes]), axis=1)
    official = len(class_names) == 100 and len(superclass_names) == 20 and len(sizes) == 100
    if (
        not official
        or not (sizes == len(classes) // 100).all()
        or pairs.shape[1] != 100
        or set(np.bincount(pairs[0])) != {5}
    ):
        raise UserError(f"the labels are not CIFAR-100's (100 classes of 600 images in 20 superclasses): see {SOURCE}")
    count = len(classes)
    return Cifar100(
        images=pixels.reshape(count, 3, SIDE, SIDE).transpose(0, 2, 3, 1),
        classes=classes.astype(np.int64),
        superclasses=superclasses.astype(np.int64),
        train=np.arange(count) < IMAGES["train"],
        class_names=class_names,
        superclass_names=superclass_names,
    )

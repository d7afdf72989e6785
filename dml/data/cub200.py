"""CUB-200-2011 (Wah et al. 2011): 200 species of birds; the first 100 train, the last 100 test.

Layout: `images.txt image_class_labels.txt bounding_boxes.txt images/`.
"""

from pathlib import Path
from typing import Literal

from dml.data.images import Box
from dml.data.official import Line, lines, records, whole
from dml.data.records import Records, Unreadable
from dml.errors import UserError

TRAINING = 100
PUBLISHED = {"train": [(100, 5864)], "test": [(100, 5924)]}


def cub200(
    root: str, crop: Literal["none", "box"] = "none", strict: bool = True, unreadable: Unreadable = "stop"
) -> Records:
    """Reads CUB-200-2011: whole photographs, or the birds alone.

    Args:
        root: the folder `CUB_200_2011`.
        crop: `none` for whole photographs, `box` to cut them to the bounding box.
        strict, unreadable: see `dml.data.official.records`.

    Raises:
        UserError: files are missing or damaged.
    """
    folder = Path(root)
    paths = _by_image(folder / "images.txt")
    labels = _by_image(folder / "image_class_labels.txt")
    boxes = _boxes(folder / "bounding_boxes.txt") if crop == "box" else {}
    items = []
    for key, path in paths.items():
        if key not in labels or (crop == "box" and key not in boxes):
            lacking = "image_class_labels.txt" if key not in labels else "bounding_boxes.txt"
            raise UserError(f"{folder / lacking} has no line for image {key}: the file is damaged")
        number = whole(labels[key], "a class", folder / "image_class_labels.txt")
        role = "train" if number <= TRAINING else "test"
        items.append(Line(f"images/{path}", path.partition("/")[0], role, boxes.get(key)))
    return records("cub200", folder, items, PUBLISHED, folders=["images"], strict=strict, unreadable=unreadable)


def _by_image(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in lines(path, 2, dataset="cub200"):
        if key in found:
            raise UserError(f"{path} has two lines for image {key}: the file is damaged")
        found[key] = value
    return found


def _boxes(path: Path) -> dict[str, Box]:
    """Reads lines `<image> <x> <y> <width> <height>`."""
    found = {}
    for key, *numbers in lines(path, 5, dataset="cub200"):
        try:
            x, y, width, height = (float(number) for number in numbers)
        except ValueError:
            raise UserError(f"{path} has {' '.join(numbers)} as the box of image {key}: the file is damaged") from None
        found[key] = (x, y, x + width, y + height)
    return found

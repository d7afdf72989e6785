"""A CSV file that lists the images of a dataset, or the split of the classes in a tree of folders.

The first line names the columns: `path`, `label`, `split`, `camera` and `box`, in any order. With `path` each line is
an image; without it, a class of the tree. Blanks around names and values do not count. Error messages give the number
of the line.
"""

import csv
import math
import os
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
from PIL import Image

from dml.data.images import decode
from dml.data.paths import Paths
from dml.data.records import ROLES, Records, Unreadable
from dml.errors import UserError

COLUMNS = ("path", "label", "split", "camera", "box")


class Row(NamedTuple):
    """A line of the file: its number, and its text in each column."""

    number: int
    said: dict[str, str]


class Listing:
    """The columns and rows of a CSV file.

    Args:
        path: of the file, UTF-8.

    Raises:
        UserError: the file cannot be read, its first line has no `label` or a name that is none of `COLUMNS`, it has
            no rows, or a line has too few or too many fields, or no label.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:  # -sig: spreadsheets write a byte order mark
                reader = csv.reader(file, skipinitialspace=True, strict=True)
                self.columns = [name.strip() for name in next(reader, [])]
                self._check_columns()
                filled = (fields for fields in reader if len(fields) > 1 or "".join(fields).strip())
                self.rows = [self._row(reader.line_num, fields) for fields in filled]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"dataset.csv {path} cannot be read as a CSV file in UTF-8: {error}.") from error
        if not self.rows:
            raise UserError(f"dataset.csv {path} has no lines below the column names: add a line per image or class.")

    def _check_columns(self) -> None:
        names, wrong = ", ".join(self.columns) or "none", set(self.columns) - set(COLUMNS)
        if wrong or "label" not in self.columns or len(set(self.columns)) < len(self.columns):
            if len(self.columns) == 1 and (between := {";", "\t"} & set(names)):
                raise UserError(
                    f"{self.path} has {min(between)!r} between its columns: save it with commas, as most programs "
                    "offer for CSV."
                )
            raise UserError(
                f"{self.path} has the columns {names}: its first line has to name path,label and if wanted split, "
                "camera and box (each line an image), or label,split (each line a class)."
            )
        if "path" not in self.columns and set(self.columns) != {"label", "split"}:
            raise UserError(
                f"{self.path} has the columns {names}: without path each line is a class, with the columns label,split."
            )

    def _row(self, number: int, fields: Sequence[str]) -> Row:
        if len(fields) != len(self.columns):
            self.tell(number, f"has {len(fields)} fields, but there are {len(self.columns)} columns")
        said = dict(zip(self.columns, (field.strip() for field in fields), strict=True))
        said["label"] = unicodedata.normalize("NFC", said["label"])  # as for folder names, to compare them
        if not said["label"]:
            self.tell(number, "has no label")
        return Row(number, said)

    def tell(self, number: int, what: str) -> NoReturn:
        """Raises UserError that says what is wrong with a line."""
        raise UserError(f"line {number} of {self.path} {what}.")

    def roles(self, allowed: Sequence[str] = ROLES) -> list[str]:
        """Returns the split of each row.

        Raises:
            UserError: a split is not one of `allowed`, or the rows are all for training or all for evaluation.
        """
        for number, said in self.rows:
            if said["split"] not in allowed:
                words = ", ".join(allowed)
                self.tell(number, f"gives {said['label']!r} the split {said['split']!r}: use one of {words}")
        roles = [said["split"] for _, said in self.rows]
        if "train" not in roles or set(roles) == {"train"}:
            raise UserError(
                f"{self.path} puts everything on one side: some lines need the split train, and others another one."
            )
        return roles


def roles_of_classes(listing: Listing, names: Sequence[str], root: Path) -> list[str]:
    """Returns the role of each class of a tree, from a file with one line per class.

    Raises:
        UserError: a class is listed twice, is no folder, or has no line.
    """
    roles, lines, known = listing.roles(("train", "test")), dict[str, int](), set(names)
    for number, said in listing.rows:
        label = said["label"]
        if label in lines:
            listing.tell(number, f"has class {label!r} again, as line {lines[label]}: keep one of the two lines")
        if label not in known:
            listing.tell(number, f"has class {label!r}, which is no folder in {root}: correct the name or remove it")
        lines[label] = number
    if missing := [name for name in names if name not in lines]:
        raise UserError(
            f"{listing.path} has no line for class {missing[0]!r} ({len(missing)} such classes): give each class a "
            "split."
        )
    of = dict(zip(lines, roles, strict=True))
    return [of[name] for name in names]


def listed_images(
    listing: Listing, root: Path, name: str, roles_of: Callable[[list[str]], list[str]], unreadable: Unreadable = "stop"
) -> Records:
    """Makes records of a file with one line per image, in the order of the paths; classes are in that of their names.

    The order of the lines has no meaning: a run that is resumed after its file was sorted anew goes on as before.

    Args:
        listing: the file, with a column `path`.
        root: the folder that paths are relative to.
        name: of the dataset.
        roles_of: names of classes -> role of each; called if the file has no split.
        unreadable: see `Records`.

    Raises:
        UserError: an image is missing or listed twice, a camera is no whole number, or a box is not valid.
    """
    files, cameras, boxes = _files(listing, root), _cameras(listing), _boxes(listing)
    names = sorted({said["label"] for _, said in listing.rows})
    number = {label: i for i, label in enumerate(names)}
    labels = np.array([number[said["label"]] for _, said in listing.rows], dtype=np.int64)
    roles = np.array(listing.roles()) if "split" in listing.columns else np.array(roles_of(names))[labels]
    order = np.array(sorted(range(len(files)), key=files.__getitem__), dtype=np.int64)
    labels, roles, paths = labels[order], roles[order], Paths.of([files[at] for at in order])
    cameras = None if cameras is None else cameras[order]
    boxes = None if boxes is None else boxes[order]

    def open_image(row: int) -> Image.Image:
        if boxes is None or np.isnan(boxes[row]).any():
            return decode(paths[row])
        left, upper, right, lower = boxes[row].tolist()
        return decode(paths[row], (left, upper, right, lower))

    return Records(
        name=name,
        paths=paths,
        labels=labels,
        roles=roles,
        class_names=names,
        open_image=open_image,
        unreadable=unreadable,
        cameras=cameras,
        boxes=boxes,
    )


def _files(listing: Listing, root: Path) -> list[str]:
    lines: dict[str, int] = {}
    found, missing = [], []
    whole = os.path.abspath(root)  # one image may be named by its whole path, too
    upwards = any(".." in Path(said["path"]).parts for _, said in listing.rows)
    real = cache(os.path.realpath)  # behind a link, the folder above is that of what the link leads to
    for number, said in listing.rows:
        if not said["path"]:
            listing.tell(number, "has no path")
        folder, name = os.path.split(os.path.join(root, said["path"]))
        file, key = (os.path.join(place, os.path.normpath(said["path"])) for place in (root, whole))
        if upwards:
            key = os.path.join(real(folder), name)
            file = key if ".." in Path(said["path"]).parts else file
        if key in lines:
            listing.tell(
                number,
                f"has {said['path']} again, as line {lines[key]}: if a photograph shows several objects, make a file "
                "of each",
            )
        lines[key] = number
        found.append(file)
        if not os.path.isfile(file):
            missing.append((number, file))
    if missing:
        number, file = missing[0]
        listing.tell(
            number, f"names {file}, which does not exist ({len(missing)} such): paths are relative to dataset.root"
        )
    return found


def _cameras(listing: Listing) -> np.ndarray | None:
    """Returns `[N]` int64; None if the file has no such column."""
    if "camera" not in listing.columns:
        return None
    for number, said in listing.rows:
        if not said["camera"].isdecimal() or len(said["camera"]) > 9:
            listing.tell(number, f"has {said['camera']!r} as camera, which is no whole number")
    return np.array([int(said["camera"]) for _, said in listing.rows], dtype=np.int64)


def _boxes(listing: Listing) -> np.ndarray | None:
    """Returns `[N,4]` float64, NaN for lines with an empty box; None if the file has no such column."""
    if "box" not in listing.columns:
        return None
    found = np.full((len(listing.rows), 4), np.nan)
    for at, (number, said) in enumerate(listing.rows):
        words = said["box"].replace(",", " ").split()
        if not words:
            continue
        try:
            left, upper, right, lower = found[at] = [float(word) for word in words]
        except ValueError:
            left = upper = right = lower = math.nan
        if not (0 <= left < right < math.inf and 0 <= upper < lower < math.inf):
            listing.tell(number, f"has {said['box']!r} as box, which is not left upper right lower, in pixels")
        elif right - left < 1 or lower - upper < 1:
            listing.tell(number, f"has {said['box']!r} as box, which is smaller than a pixel: it has to be in pixels")
    return found

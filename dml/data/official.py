"""Functions shared by the readers of official layouts: text lists, checks that images exist, and published counts."""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dml.data.images import SUFFIXES, Box, decode
from dml.data.paths import Paths
from dml.data.records import Records, Unreadable
from dml.errors import UserError
from dml.files import walk

Counts = tuple[int, int]  # classes, images


@dataclass(frozen=True)
class Line:
    """One image of an annotation.

    Attributes:
        path: relative to the dataset's root, with `/`.
        label: class, as the data set names it.
        role: one of `dml.data.records.ROLES`.
        box: of the object, if it has to be cut out.
        camera: that took the image.
    """

    path: str
    label: str
    role: str
    box: Box | None = None
    camera: int | None = None


def records(
    name: str,
    root: Path,
    items: Sequence[Line],
    published: Mapping[str, Sequence[Counts]],
    *,
    folders: Sequence[str],
    strict: bool,
    unreadable: Unreadable,
    surplus: bool = False,
    keep: Callable[[Line], bool] = lambda item: True,
) -> Records:
    """Makes records of the images that an annotation lists, after checking that they exist and counting them.

    Args:
        name: of the dataset.
        root: the dataset's folder.
        items: in the order of the records; classes are numbered by first appearance.
        published: role -> pairs (classes, images), one of which has to match the counts found.
        folders: the folders that hold the dataset's images and nothing else, relative to the root.
        strict: the published counts have to match, and no image may be missing or unlisted. Otherwise missing images
            are left out with a warning.
        unreadable: see `Records`.
        surplus: True: images may lie in the folders that the annotation does not list.
        keep: says which of the counted items become records.

    Raises:
        UserError: an image is listed twice, or with `strict`: an image is missing or unlisted, or counts do not match.
    """
    twice = [path for path, times in Counter(item.path for item in items).items() if times > 1]
    if twice:
        raise UserError(
            f"the annotation of {name} in {root} lists {twice[0]} more than once ({len(twice)} such files): remove the "
            "repeated lines"
        )
    present = _files(root, folders)
    missing = [item.path for item in items if item.path not in present]
    if strict:
        _check_files(name, root, missing, set() if surplus else present - {item.path for item in items})
        _check_counts(name, root, items, published)
    elif missing:
        warnings.warn(f"{name} in {root}: left out {len(missing)} images that do not exist", stacklevel=3)
        items = [item for item in items if item.path in present]
    items = [item for item in items if keep(item)]
    classes = list(dict.fromkeys(item.label for item in items))
    number = {label: i for i, label in enumerate(classes)}
    paths = Paths.of(str(root / item.path) for item in items)
    boxes = [item.box for item in items]
    cut = any(box is not None for box in boxes)
    cameras = [item.camera for item in items if item.camera is not None]

    def open_image(row: int) -> Image.Image:
        return decode(paths[row], boxes[row])

    return Records(
        name=name,
        paths=paths,
        labels=np.array([number[item.label] for item in items], dtype=np.int64),
        roles=np.array([item.role for item in items], dtype=str),
        class_names=classes,
        open_image=open_image,
        unreadable=unreadable,
        cameras=np.array(cameras, dtype=np.int64) if cameras else None,
        boxes=np.array([(math.nan,) * 4 if box is None else box for box in boxes], dtype=np.float64) if cut else None,
    )


def lines(path: Path, columns: int, *, header: int = 0, dataset: str) -> list[list[str]]:
    """Reads the fields of a text file's lines, separated by blanks; empty lines are skipped.

    Args:
        path: of the file.
        columns: of each line; the last may hold blanks.
        header: lines to skip at the beginning.
        dataset: name of the dataset, to say how to get its files.

    Raises:
        UserError: there is no such file, it is no UTF-8 text, it is empty, or a line has fewer columns; the message
            gives its number.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"there is no {path}: {how_to_get(dataset)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text ({error}): {how_to_get(dataset)}") from None
    fields = [(number, line.split(None, columns - 1)) for number, line in enumerate(text.splitlines(), 1)]
    result = []
    for number, found in fields[header:]:
        if found and len(found) < columns:
            raise UserError(f"line {number} of {path} has {len(found)} of {columns} columns: the file is damaged")
        if found:
            result.append([*found[:-1], found[-1].rstrip()])
    if not result:
        raise UserError(f"{path} lists nothing: the file is damaged")
    return result


def parquet(path: Path, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yields the rows of a Parquet file; `image` is the bytes of the image, which Hugging Face stores in a dict.

    Raises:
        UserError: the file is damaged or lacks a column, or pyarrow is not installed.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"reading {path.name} needs pyarrow: pip install pyarrow.") from None
    try:
        with ParquetFile(path) as file:
            lacking = set(columns) - set(file.schema_arrow.names)
            if lacking:
                names = ", ".join(file.schema_arrow.names)
                raise UserError(
                    f"{path.name} has the columns {names}, and not {', '.join(sorted(lacking))}: it is no file of this "
                    "data set."
                )
            for batch in file.iter_batches(64, columns=list(columns)):
                for row in zip(*(batch.column(name).to_pylist() for name in columns), strict=True):
                    values = tuple(value.get("bytes") if isinstance(value, dict) else value for value in row)
                    if None in values or not isinstance(values[columns.index("image")], bytes):
                        raise UserError(f"{path.name} has a row without an image or without a label: fetch it again.")
                    yield values
    except (ArrowException, OSError) as error:
        raise UserError(f"{path.name} is cut short or damaged ({error}): fetch it again.") from None


def of_part(path: Path, part: str) -> bool:
    """Says whether a table belongs to a part (`train` or `test`), by its name or that of a folder above it."""
    return any(name.startswith(part) for name in path.parts)


def write_anew(path: Path, content: bytes) -> None:
    """Writes a new file, and removes an old one first.

    The old one may be a hard link to the user's own file, which must not change.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def whole(text: str, what: str, path: Path) -> int:
    """Returns a whole number of an annotation. Raises UserError if the text is none."""
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{path} has {text!r} as {what}, which is no whole number: the file is damaged") from None


def how_to_get(dataset: str) -> str:
    """Returns the sentence that says how to get the files of a data set."""
    return (
        f"python -m dml.data.prepare dataset={dataset} fetches it, or says what to download by hand and where to put it"
    )


def _files(root: Path, folders: Iterable[str]) -> set[str]:
    """Returns the image files below some folders, relative to the root; hidden ones (`._` of macOS) are ignored."""
    found = set()
    for folder in folders:
        for at, inner, names in walk(root / folder):
            inner[:] = [name for name in inner if not name.startswith(".")]
            relative = Path(at).relative_to(root).as_posix()
            found |= {f"{relative}/{name}" for name in names if name[0] != "." and name.lower().endswith(SUFFIXES)}
    return found


def _check_files(name: str, root: Path, missing: Sequence[str], surplus: set[str]) -> None:
    advice = f"{how_to_get(name)}; dataset.strict=false uses the images that exist"
    if missing:
        raise UserError(f"{name} in {root} lacks {len(missing)} images, the first {missing[0]}: {advice}")
    if surplus:
        first = min(surplus)
        raise UserError(
            f"{name} in {root} has {len(surplus)} images that its annotation does not list, the first {first}: "
            f"remove them; dataset.strict=false leaves them out"
        )


def _check_counts(name: str, root: Path, items: Sequence[Line], published: Mapping[str, Sequence[Counts]]) -> None:
    for role, allowed in published.items():
        of_role = [item.label for item in items if item.role == role]
        found = (len(set(of_role)), len(of_role))
        if found not in allowed:
            classes, images = allowed[0]
            raise UserError(
                f"{name} in {root} has {found[0]} {role} classes with {found[1]} images, published are {classes} with "
                f"{images}: use the whole data set, or set dataset.strict=false to use a part of it"
            )

"""A user's own images as a dataset: a folder of class folders, or images that a CSV file lists.

The classes are split into training and test classes.
"""

import os
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from dml.configuration.ranges import Share
from dml.data.images import SUFFIXES, decode
from dml.data.listing import Listing, listed_images, roles_of_classes
from dml.data.paths import Paths
from dml.data.records import Records, Unreadable
from dml.errors import UserError, some
from dml.files import walk

SIDES = {"train", "test"}  # names of folders that are the split


def folder(
    root: str,
    name: str = "folder",
    train_fraction: Share = 0.5,
    csv: str | None = None,
    depth: Literal["class", "leaf"] = "class",
    unreadable: Unreadable = "stop",
) -> Records:
    """Reads a tree with one folder per class, or the images that a CSV file lists.

    Classes and images are taken in the order of their names. Hidden entries and files without an image suffix (one of
    `SUFFIXES`, in upper or lower case) are ignored.

    Args:
        root: the folder of class folders, or the folder that the paths in `csv` are relative to.
        name: of the dataset, for reports.
        train_fraction: the share of the classes to train on, the first in order of names (rounded to whole classes);
            the rest are test classes. Not used if `csv` has a split.
        csv: a file whose first line names its columns. With `label,split` each line is a class of the tree and its
            split, train or test. With `path,label` each line is an image; the columns `split` (train, test, query or
            gallery), `camera` (a whole number) and `box` (left upper right lower, in pixels, to be cut out; empty for
            the whole image) may be added.
        depth: `class`: the folders in `root` are the classes. `leaf`: every folder below `root` that holds images is a
            class, named by its path, such as `Fruit/Apple`; if all of them lie in `train` or `test`, that is the split.
            A folder called so, in any case, is refused beside others.
        unreadable: `stop` or `skip`, see `dml.data.check`.

    Raises:
        UserError: there is no such folder, it has no class folders, a class folder has no images, the split leaves one
            side empty or is unclear, or the CSV file does not fit; the message gives the line.
    """
    if csv == "":
        raise UserError("dataset.csv is empty: name a file, or leave the option out")
    listing = None if csv is None else Listing(Path(csv))
    if listing is not None and "path" in listing.columns:
        return listed_images(
            listing, Path(root), name, lambda names: _ordered_roles(names, train_fraction), unreadable=unreadable
        )
    classes = class_folders(Path(root)) if depth == "class" else leaf_folders(Path(root))
    names = list(classes)
    if listing is not None:
        roles = roles_of_classes(listing, names, Path(root))
    else:
        roles = (depth == "leaf" and _roles_of_folders(names, Path(root))) or _ordered_roles(names, train_fraction)
    sizes: list[int] = []  # of the classes
    paths = Paths.of(_listed(classes.values(), sizes, alone=depth == "class"))
    labels = np.repeat(np.arange(len(names)), sizes)
    return Records(
        name=name,
        paths=paths,
        labels=labels.astype(np.int64),
        roles=np.array(roles)[labels],
        class_names=names,
        open_image=lambda row: decode(paths[row]),
        unreadable=unreadable,
    )


def _listed(folders: Iterable[Path], sizes: list[int], *, alone: bool) -> Iterator[str]:
    """Yields the images of all folders, one folder after another; appends each folder's image count to `sizes`. If no
    class lies in the folder of another (`alone`), it warns of images that lie deeper."""
    deeper: list[Path] | None = [] if alone else None
    for folder in folders:
        images = images_below(folder, deeper)
        sizes.append(len(images))
        yield from images
    if deeper:
        warnings.warn(
            f"images that lie deeper than others of their class are left out, in {len(deeper)} class folders, as in "
            f"{deeper[0]}: move them up, or set dataset.depth=leaf to make each such folder a class",
            stacklevel=2,
        )


def class_folders(root: Path) -> dict[str, Path]:
    """Returns class name -> folder, in the order of names.

    Names are brought to Unicode's composed form (NFC), so that order and CSV lookups do not depend on the file system.

    Raises:
        UserError: there is no such folder, it has no folders, or the names of two differ only in their Unicode form.
    """
    if not root.is_dir():
        raise UserError(f"there is no folder {root}: put one folder of images for each class there")
    found: dict[str, Path] = {}
    for path in sorted(p for p in root.iterdir() if p.is_dir() and p.name[0] != "."):
        name = unicodedata.normalize("NFC", path.name)
        if name in found:
            raise UserError(
                f"{root} has two class folders that read {name}, in two forms of Unicode ({found[name].name!a} and "
                f"{path.name!a}): rename one, or move the images of one into the other"
            )
        found[name] = path
    if not found:
        raise UserError(f"{root} has no class folders: put the images of each class into a folder of its own")
    return dict(sorted(found.items()))


def leaf_folders(root: Path) -> dict[str, Path]:
    """Returns path below `root` -> folder for all folders that hold images, in the order of their paths (NFC).

    Hidden folders are ignored. Links to folders are followed, as by `dml.files.walk`.

    Raises:
        UserError: there is no such folder, no folder holds images, or the paths of two differ only in their Unicode
            form.
    """
    if not root.is_dir():
        raise UserError(f"there is no folder {root}: put folders of images there")
    found: dict[str, Path] = {}
    for path in _with_images(root):
        name = unicodedata.normalize("NFC", path.relative_to(root).as_posix())
        if name in found:
            raise UserError(f"{root} has two class folders that read {name}, in two forms of Unicode: rename one")
        found[name] = path
    if not found:
        raise UserError(
            f"{root} has no folder with images ({' '.join(SUFFIXES)}) below it: set dataset.root to another folder"
        )
    return dict(sorted(found.items()))


def _with_images(root: Path) -> Iterator[Path]:
    """Yields the folders below `root` that directly hold images, in the order of their paths."""
    for place, folders, files in walk(root):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        if Path(place) != root and any(map(_is_image, files)):
            yield Path(place)


def _is_image(name: str) -> bool:
    return name[0] != "." and name.lower().endswith(SUFFIXES)


def images_below(path: Path, others: list[Path] | None = None) -> list[str]:
    """Returns the paths of the images in one class folder, in the order of names.

    Args:
        path: of the folder.
        others: gets a deeper folder that has images, if there is one; None: it is not looked for.

    Raises:
        UserError: there are none; the message says whether a deeper folder has some.
    """
    with os.scandir(path) as entries:
        # Also links to nothing and pipes, which are then named with the files that cannot be read.
        every = [e for e in entries if e.name[0] != "."]
        files = [e.path for e in every if _is_image(e.name) and not os.path.isdir(e.path)]
        folders = others is not None and any(e.is_dir(follow_symlinks=False) for e in every)
    deeper = next(_with_images(path), None) if folders or not files else None
    if others is not None and deeper is not None:
        others.append(deeper)
    if not files:
        remedy = "fill it or remove it"
        if deeper is not None:
            remedy = f"they lie deeper, as in {deeper}: set dataset.depth=leaf to make each such folder a class"
        raise UserError(f"class folder {path} has no images ({' '.join(SUFFIXES)}): {remedy}")
    return sorted(files)


def _roles_of_folders(names: list[str], root: Path) -> list[str]:
    """Returns the role of each class by its folder, `train` or `test`; empty if no folder in `root` is called so.

    Raises:
        UserError: only one of the two is there, or another folder beside them; or a class lies below both.
    """
    parted = [name.partition("/") for name in names]
    roles = [role for role, _, _ in parted]
    tops = sorted(set(roles))
    if not {top.lower() for top in tops} & SIDES:
        return []
    if set(tops) != SIDES:
        raise UserError(
            f"{root} has images in the folders {some(tops)}: folders are the split only if they are train and test "
            f"alone, so {_changes(tops)}, or name a file with the split of the classes, dataset.csv=FILE"
        )
    train, test = ({name for role, _, name in parted if role == side} for side in ("train", "test"))
    if "" in train | test:
        raise UserError(f"{root} has images in train/ or test/ themselves: put those of each class into a folder there")
    if both := sorted(train & test):
        raise UserError(
            f"{len(both)} classes lie below train/ and below test/, such as {both[0]}, but the test is of classes that "
            "training has not seen: put all images of a class into one folder"
        )
    return roles


def _changes(tops: list[str]) -> str:
    """Says what would make `train` and `test` of the folders in the root."""
    renamed = [top for top in tops if top.lower() in SIDES and top.lower() not in tops]
    others = [top for top in tops if top not in SIDES and top not in renamed]
    changes = [f"rename {top} to {top.lower()}" for top in renamed]
    changes += [f"move {some(others)} elsewhere"] if others else []
    changes += [f"add {side}" for side in sorted(SIDES - {top.lower() for top in tops})]
    return " and ".join(changes)


def _ordered_roles(names: list[str], train_fraction: float) -> list[str]:
    train = round(train_fraction * len(names))
    if not 0 < train < len(names):
        raise UserError(
            f"dataset.train_fraction={train_fraction} of {len(names)} classes leaves {train} for training and "
            f"{len(names) - train} for testing: both sides need at least one class"
        )
    return ["train"] * train + ["test"] * (len(names) - train)

"""Any `root/class/image.jpg` tree, or a deeper one, or what a CSV file lists, split into training and test classes."""

import os
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from dml.configuration.ranges import Share
from dml.data.images import SUFFIXES, decode
from dml.data.listing import Listing, listed_images, roles_of_classes
from dml.data.paths import Paths
from dml.data.records import Records, Unreadable
from dml.errors import UserError


def folder(
    root: str,
    name: str = "folder",
    train_fraction: Share = 0.5,
    csv: str | None = None,
    depth: Literal["class", "leaf"] = "class",
    unreadable: Unreadable = "stop",
) -> Records:
    """Read a tree with one folder a class.

    Classes and images are taken in the order of their names. Hidden entries and files without an image suffix (of
    `SUFFIXES`, upper or lower case) are passed over.

    Args:
        root: the folder of class folders, or what the paths of `csv` begin at.
        name: the dataset's, for reports.
        train_fraction: this share of the classes trains, the first in order of names (rounded to whole classes); the
            rest tests. Not used where `csv` has a split.
        csv: a file whose first line names its columns. `label,split`: a line a class of the tree, train or test.
            `path,label`: a line an image, and as wanted `split` (train, test, query or gallery), `camera` (a whole
            number) and `box` (left upper right lower, in pixels, which is cut out; empty: the whole image).
        depth: `class`: the folders in `root` are the classes. `leaf`: every folder below that holds images is one, and
            is called by its path, as `Fruit/Apple`; where all of them lie in `train` and `test`, these are the split.
        unreadable: `stop` or `skip`, see `dml.data.check`.

    Raises:
        UserError: no such folder, no class folders, a class folder without images, a split that leaves one side empty,
            or a CSV file that does not fit, told by the number of its line.
    """
    listing = Listing(Path(csv)) if csv else None
    if listing is not None and "path" in listing.columns:
        return listed_images(
            listing, Path(root), name, lambda names: _ordered_roles(names, train_fraction), unreadable=unreadable
        )
    classes = class_folders(Path(root)) if depth == "class" else leaf_folders(Path(root))
    names = list(classes)
    if listing is not None:
        roles = roles_of_classes(listing, names, Path(root))
    else:
        roles = (depth == "leaf" and _roles_of_folders(names)) or _ordered_roles(names, train_fraction)
    sizes: list[int] = []  # of the classes
    paths = Paths.of(_listed(classes.values(), sizes))
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


def _listed(folders: Iterable[Path], sizes: list[int]) -> Iterator[str]:
    """The images of all folders, one folder after another; appends to `sizes` how many each has."""
    for folder in folders:
        images = images_below(folder)
        sizes.append(len(images))
        yield from images


def class_folders(root: Path) -> dict[str, Path]:
    """Class name -> its folder, in the order of names. Names are brought to Unicode's composed form (NFC), so that
    order and CSV lookups do not depend on the file system.

    Raises:
        UserError: no such folder, no folders in it, or two whose names differ in their Unicode form alone.
    """
    if not root.is_dir():
        raise UserError(f"there is no folder {root}: put one folder of images for each class there")
    found: dict[str, Path] = {}
    for path in sorted(p for p in root.iterdir() if p.is_dir() and p.name[0] != "."):
        name = unicodedata.normalize("NFC", path.name)
        if name in found:
            raise UserError(
                f"{root} has two class folders that read {name}, in two forms of Unicode ({found[name].name!a} and "
                f"{path.name!a}): rename one, or bring their images together in the other"
            )
        found[name] = path
    if not found:
        raise UserError(f"{root} has no class folders: put the images of each class into a folder of its own")
    return dict(sorted(found.items()))


def leaf_folders(root: Path) -> dict[str, Path]:
    """Path below `root` -> folder, of all folders there that hold images, in the order of their paths (NFC).

    Hidden folders are passed over, and links to folders are not followed.

    Raises:
        UserError: no such folder, none with images, or two whose paths differ in their Unicode form alone.
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
        raise UserError(f"{root} has no folder with images ({' '.join(SUFFIXES)}) below it: name another dataset.root")
    return dict(sorted(found.items()))


def _with_images(root: Path) -> Iterator[Path]:
    """Folders below `root` that hold images themselves, in the order of their paths."""
    for place, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        if Path(place) != root and any(map(_is_image, files)):
            yield Path(place)


def _is_image(name: str) -> bool:
    return name[0] != "." and name.lower().endswith(SUFFIXES)


def images_below(path: Path) -> list[str]:
    """The images of one class, in the order of names.

    Raises:
        UserError: there are none; it says where some are.
    """
    with os.scandir(path) as entries:
        files = [e.path for e in entries if _is_image(e.name) and e.is_file()]
    if not files:
        deeper = next(_with_images(path), None)
        remedy = "fill it or remove it"
        if deeper is not None:
            remedy = f"they lie deeper, as in {deeper}: take dataset.depth=leaf, by which each such folder is a class"
        raise UserError(f"class folder {path} has no images ({' '.join(SUFFIXES)}): {remedy}")
    return sorted(files)


def _roles_of_folders(names: list[str]) -> list[str]:
    """Of classes that lie in `train` and `test`; nothing where some lie elsewhere, or all on one side."""
    roles = [name.partition("/")[0] for name in names]
    return roles if set(roles) == {"train", "test"} else []


def _ordered_roles(names: list[str], train_fraction: float) -> list[str]:
    train = round(train_fraction * len(names))
    if not 0 < train < len(names):
        raise UserError(
            f"dataset.train_fraction={train_fraction} of {len(names)} classes leaves {train} for training and "
            f"{len(names) - train} for testing: both sides need at least one"
        )
    return ["train"] * train + ["test"] * (len(names) - train)

"""Cars196 (Krause et al. 2013): 196 models of cars; classes 1 to 98 train, 99 to 196 test.

Either `cars_annos.mat car_ims/`, or `devkit/` with `cars_train_annos.mat cars_test_annos_withlabels.mat` and
`cars_train/ cars_test/`. The division into `cars_train` and `cars_test` is that of classification and has no part here.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.io import loadmat

from dml.data.official import Item, how_to_get, records
from dml.data.records import Records
from dml.errors import UserError

TRAINING = 98
PUBLISHED = {"train": [(98, 8054)], "test": [(98, 8131)]}
WHOLE = "cars_annos.mat"
PARTS = {"cars_train": "cars_train_annos.mat", "cars_test": "cars_test_annos_withlabels.mat"}


def cars196(root: str, crop: Literal["none", "box"] = "none", strict: bool = True, unreadable: str = "stop") -> Records:
    """Whole photographs, or the cars alone.

    Args:
        root: a folder in one of the two layouts; where it has both, `cars_annos.mat` counts.
        crop: `none`, or `box`: cut to the bounding box.
        strict, unreadable: see `dml.data.official.records`.

    Raises:
        UserError: files missing or damaged, an annotation of another data set, or an option that is none.
    """
    if crop not in ("none", "box"):
        raise UserError(f"dataset.crop={crop} is unknown: choose none or box.")
    folder = Path(root)
    if (folder / WHOLE).exists() and (folder / "car_ims").is_dir():
        sources = [(folder / WHOLE, "")]
        folders = ["car_ims"]
    elif any((folder / images).is_dir() for images in PARTS):
        sources = [(_devkit(folder, name), f"{images}/") for images, name in PARTS.items()]
        folders = list(PARTS)
    else:
        raise UserError(f"there is neither car_ims/ with {WHOLE} nor cars_train/ in {folder}: {how_to_get('cars196')}")
    items = [_item(row, path, before, crop) for path, before in sources for row in annotation(path)]
    items.sort(key=lambda item: int(item.label))  # stable: classes in their official order
    return records("cars196", folder, items, PUBLISHED, folders=folders, strict=strict, unreadable=unreadable)


def annotation(path: Path) -> list[dict[str, Any]]:
    """The rows of a `.mat` file's `annotations` by the names of their fields.

    Raises:
        UserError: no such file, none that can be read, or one without such rows.
    """
    if not path.is_file():
        raise UserError(f"there is no {path}: {how_to_get('cars196')}")
    try:
        content = loadmat(path, squeeze_me=True, variable_names=["annotations"])
    except Exception as error:  # scipy's parser raises whatever damaged bytes lead it to
        raise UserError(f"{path} is no MATLAB file that can be read ({error}): {how_to_get('cars196')}") from None
    table = np.atleast_1d(content.get("annotations", np.zeros(0)))
    names = table.dtype.names or ()
    if "class" not in names or ("relative_im_path" if path.name == WHOLE else "fname") not in names:
        raise UserError(
            f"{path} has no annotations with a class and a file name, as those of Cars196 have (test labels are in "
            f"{PARTS['cars_test']} alone): {how_to_get('cars196')}"
        )
    return [{name: row[name] for name in names} for row in table]


def _devkit(folder: Path, name: str) -> Path:
    """In `devkit/`, or beside the images."""
    return folder / name if (folder / name).exists() else folder / "devkit" / name


def _item(row: dict[str, Any], path: Path, before: str, crop: str) -> Item:
    name = f"{before}{row['fname' if before else 'relative_im_path']}"
    try:
        number = int(row["class"])
        x1, y1, x2, y2 = (
            (float(row[f"bbox_{corner}"]) for corner in ("x1", "y1", "x2", "y2")) if crop == "box" else [0] * 4
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} has a row for {name} without a class or a box ({error}): the file is damaged"
        ) from None
    box = (x1 - 1, y1 - 1, x2, y2) if crop == "box" else None  # MATLAB counts from 1, both ends included
    return Item(name, str(number), "train" if number <= TRAINING else "test", box)

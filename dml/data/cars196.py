"""Cars196 (Krause et al. 2013): 196 models of cars; classes 1 to 98 train, 99 to 196 test.

Either `cars_annos.mat car_ims/`, or `devkit/` with `cars_train_annos.mat cars_test_annos_withlabels.mat` and
`cars_train/ cars_test/`. The division into `cars_train` and `cars_test` is that of classification and has no part here.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.io import savemat

from dml.data.official import Line, how_to_get, of_part, parquet, records, write_anew
from dml.data.records import Records, Unreadable
from dml.errors import UserError

TRAINING, CLASSES = 98, 196
PUBLISHED = {"train": [(98, 8054)], "test": [(98, 8131)]}
WHOLE = "cars_annos.mat"
META = "cars_meta.mat"
PARTS = {"cars_train": "cars_train_annos.mat", "cars_test": "cars_test_annos_withlabels.mat"}


def cars196(
    root: str, crop: Literal["none", "box"] = "none", strict: bool = True, unreadable: Unreadable = "stop"
) -> Records:
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
    names = {str(number): name for number, name in enumerate(class_names(folder), 1)}
    items = [replace(item, label=names.get(item.label, item.label)) for item in items]
    return records("cars196", folder, items, PUBLISHED, folders=folders, strict=strict, unreadable=unreadable)


def arrange(folder: Path) -> None:
    """Re-packagings into the second layout: Kaggle's of whole folders (`cars_train/cars_train/`), Kaggle's by class
    (`names.csv anno_train.csv anno_test.csv car_data/`), and Hugging Face's Parquet files (image, label from 0; without
    boxes).

    Args:
        folder: where the sources were unpacked.

    Raises:
        UserError: a damaged file of a re-packaging.
    """
    for path in sorted(folder.rglob("cars_t*_annos*.mat")):  # browsers rename: cars_test_annos_withlabels (1).mat
        name = PARTS["cars_test"] if "withlabels" in path.name else path.name
        (folder / "devkit").mkdir(exist_ok=True)
        path.rename(folder / "devkit" / name)
    for name in PARTS:
        places = [path for path in folder.rglob(name) if path.is_dir() and any(path.glob("*.jpg"))]
        places.sort(key=lambda path: len(path.parts))
        if places and places[-1] != folder / name:  # the innermost one has the images
            places[-1].rename(folder / ".images")
            if (folder / name).exists():
                shutil.rmtree(folder / name)
            (folder / ".images").rename(folder / name)
    for path in sorted(folder.rglob("anno_train.csv")):
        _from_classes(path.parent, folder)
    tables = sorted(folder.rglob("*.parquet"))
    for images in PARTS if tables else ():
        part = images.removeprefix("cars_")
        _from_parquet([path for path in tables if of_part(path.relative_to(folder), part)], folder, images)


def _from_classes(source: Path, folder: Path) -> None:
    """`car_data/car_data/<part>/<class>/<file>` with lines `file,x1,y1,x2,y2,class`."""
    for images, name in PARTS.items():
        part = images.removeprefix("cars_")
        path = source / f"anno_{part}.csv"
        rows = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
            try:
                fname, *numbers = line.split(",")
                x1, y1, x2, y2, number = (int(n) for n in numbers)
            except ValueError:
                raise UserError(f"{path.name} has the line {line!r}, which is no file, box and class") from None
            rows.append((x1, y1, x2, y2, number, fname))
        (folder / images).mkdir(exist_ok=True)
        for file in sorted(source.glob(f"car_data/**/{part}/*/*.jpg")):
            file.rename(folder / images / file.name)
        _write_annotation(
            folder / "devkit" / name, rows, ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname")
        )


def _from_parquet(tables: list[Path], folder: Path, images: str) -> None:
    rows: list[tuple[Any, ...]] = []
    (folder / images).mkdir(exist_ok=True)
    for table in tables:
        for image, label in parquet(table, ("image", "label")):
            rows.append((int(label) + 1, f"{len(rows) + 1:05}.jpg"))
            write_anew(folder / images / rows[-1][1], image)
    _write_annotation(folder / "devkit" / PARTS[images], rows, ("class", "fname"))


def _write_annotation(path: Path, rows: list[tuple[Any, ...]], names: tuple[str, ...]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)  # it may be one file with the user's
    savemat(path, {"annotations": np.array(rows, dtype=[(name, object) for name in names])})


# Damaged files can crash scipy's reader with the process it runs in.
READ = """
import json, sys
import numpy as np
from scipy.io import loadmat
content = loadmat(sys.argv[1], squeeze_me=True, variable_names=["annotations", "class_names"])
if len(sys.argv) > 2:
    json.dump([str(name) for name in np.atleast_1d(content.get("class_names", [])).ravel()], sys.stdout)
    raise SystemExit
table = content.get("annotations", np.zeros(0))
names = table.dtype.names or ()
rows = [list(row) for row in np.atleast_1d(table).tolist()] if names else []
json.dump([names, rows], sys.stdout, default=lambda v: v.item() if isinstance(v, np.generic) else str(v))
"""


def annotation(path: Path) -> list[dict[str, Any]]:
    """The rows of a `.mat` file's `annotations` by the names of their fields.

    Raises:
        UserError: no such file, none that can be read, or one without such rows.
    """
    if not path.is_file():
        raise UserError(f"there is no {path}: {how_to_get('cars196')}")
    reader = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=False)
    if reader.returncode:
        reason = (reader.stderr.strip().splitlines() or ["it crashes the reader"])[-1]
        raise UserError(f"{path} is no MATLAB file that can be read ({reason}): {how_to_get('cars196')}")
    names, rows = json.loads(reader.stdout)
    if "class" not in names or ("relative_im_path" if path.name == WHOLE else "fname") not in names:
        raise UserError(
            f"{path} has no annotations with a class and a file name, as those of Cars196 have (test labels are in "
            f"{PARTS['cars_test']} alone): {how_to_get('cars196')}"
        )
    return [dict(zip(names, row, strict=True)) for row in rows]


def class_names(folder: Path) -> list[str]:
    """What the cars are called, `AM General Hummer SUV 2000`, of `cars_annos.mat` or the devkit's `cars_meta.mat`;
    nothing where neither says it of all 196, as re-packagings do not."""
    for path in (folder / WHOLE, _devkit(folder, META)):
        if path.is_file():
            reader = subprocess.run(
                [sys.executable, "-c", READ, str(path), "names"], capture_output=True, text=True, check=False
            )
            names: list[str] = json.loads(reader.stdout) if reader.returncode == 0 else []
            if len(set(names)) == len(names) == CLASSES:
                return names
    return []


def _devkit(folder: Path, name: str) -> Path:
    """In `devkit/`, or beside the images."""
    return folder / name if (folder / name).exists() else folder / "devkit" / name


def _item(row: dict[str, Any], path: Path, before: str, crop: str) -> Line:
    name = f"{before}{row['fname' if before else 'relative_im_path']}"
    try:
        number = int(row["class"])
        x1, y1, x2, y2 = (
            (float(row[f"bbox_{corner}"]) for corner in ("x1", "y1", "x2", "y2")) if crop == "box" else [0] * 4
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{path} has a row for {name} without a class or a box ({error}): the file is damaged"
        ) from None
    box = (x1 - 1, y1 - 1, x2, y2) if crop == "box" else None  # MATLAB counts from 1, both ends included
    return Line(name, str(number), "train" if number <= TRAINING else "test", box)

"""Cars196 (Krause et al. 2013): 196 models of cars; classes 1 to 98 train, 99 to 196 test.

There are two layouts: `cars_annos.mat car_ims/`, or `devkit/` with `cars_train_annos.mat
cars_test_annos_withlabels.mat` beside `cars_train/ cars_test/`. The division into `cars_train` and `cars_test` is made
for classification and is not used here.
"""

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
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
    """Reads Cars196: whole photographs, or the cars alone.

    Args:
        root: a folder in one of the two layouts; if it has both, `cars_annos.mat` is used.
        crop: `none` for whole photographs, `box` to cut them to the bounding box.
        strict, unreadable: see `dml.data.official.records`.

    Raises:
        UserError: files are missing or damaged, or an annotation is of another data set.
    """
    folder = Path(root)
    if (folder / WHOLE).exists() and (folder / "car_ims").is_dir():
        sources = [(folder / WHOLE, "")]
        folders = ["car_ims"]
    elif any((folder / images).is_dir() for images in PARTS):
        sources = [(_devkit(folder, name), f"{images}/") for images, name in PARTS.items()]
        folders = list(PARTS)
    else:
        raise UserError(
            f"there is neither car_ims/ with {WHOLE} nor cars_train/ or cars_test/ in {folder}: {how_to_get('cars196')}"
        )
    items = [_item(row, path, before, crop) for path, before in sources for row in annotation(path)]
    items.sort(key=lambda item: int(item.label))  # stable: classes in their official order
    names = {str(number): name for number, name in enumerate(class_names(folder), 1)}
    items = [replace(item, label=names.get(item.label, item.label)) for item in items]
    return records("cars196", folder, items, PUBLISHED, folders=folders, strict=strict, unreadable=unreadable)


def arrange(folder: Path) -> None:
    """Moves re-packaged files into the second layout.

    Three re-packagings are known: Kaggle's with whole folders (`cars_train/cars_train/`), Kaggle's by class
    (`names.csv anno_train.csv anno_test.csv car_data/`), and Hugging Face's Parquet files (image, label counted from 0;
    no boxes).

    Args:
        folder: where the sources were unpacked.

    Raises:
        UserError: a file of a re-packaging is damaged.
    """
    for path in sorted(folder.rglob("cars_t*_annos*.mat")):  # browsers rename it: cars_test_annos_withlabels (1).mat
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
    """Arranges `car_data/car_data/<part>/<class>/<file>`, whose CSV files have lines `file,x1,y1,x2,y2,class`."""
    for images, name in PARTS.items():
        part = images.removeprefix("cars_")
        path = source / f"anno_{part}.csv"
        rows = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
            try:
                fname, *numbers = line.split(",")
                x1, y1, x2, y2, number = (int(n) for n in numbers)
            except ValueError:
                raise UserError(
                    f"{path.name} has the line {line!r}, which is not file,x1,y1,x2,y2,class: the file is damaged"
                ) from None
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
    path.unlink(missing_ok=True)  # it may be a hard link to the user's file, which must not change
    savemat(path, {"annotations": np.array(rows, dtype=[(name, object) for name in names])})


# Run in a process of its own: a damaged file can crash scipy's reader together with its process.
READ = """
import json, sys
import numpy as np
from scipy.io import loadmat
content = loadmat(sys.argv[1], squeeze_me=True, variable_names=["annotations", "class_names"])
table = content.get("annotations", np.zeros(0))
fields = table.dtype.names or ()
rows = [list(row) for row in np.atleast_1d(table).tolist()] if fields else []
classes = [str(name) for name in np.atleast_1d(content.get("class_names", [])).ravel()]
json.dump([fields, rows, classes], sys.stdout, default=lambda v: v.item() if isinstance(v, np.generic) else str(v))
"""


def annotation(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of `annotations` in a `.mat` file, each as field name -> value.

    Raises:
        UserError: the file is missing, cannot be read, or has no rows with a class and a file name.
    """
    if not path.is_file():
        raise UserError(f"there is no {path}: {how_to_get('cars196')}")
    fields, rows, _ = _content(path)
    if "class" not in fields or ("relative_im_path" if path.name == WHOLE else "fname") not in fields:
        raise UserError(
            f"{path} has no annotations with a class and a file name, as Cars196 has (only {PARTS['cars_test']} has "
            f"the test labels): {how_to_get('cars196')}"
        )
    return [dict(zip(fields, row, strict=True)) for row in rows]


def class_names(folder: Path) -> list[str]:
    """Reads the names of the 196 classes, such as `AM General Hummer SUV 2000`.

    They are in `cars_annos.mat` or in the devkit's `cars_meta.mat`. Without a complete list, as in re-packagings, the
    result is empty.
    """
    for path in (folder / WHOLE, _devkit(folder, META)):
        if path.is_file():
            with suppress(UserError):
                names = _content(path)[2]
                if len(set(names)) == len(names) == CLASSES:
                    return names
    return []


def _content(path: Path) -> tuple[list[str], list[list[Any]], list[str]]:
    """Returns the fields and rows of `annotations`, and `class_names`; what the file lacks is empty."""
    status = path.stat()
    fields, rows, classes = json.loads(_read(path, status.st_mtime_ns, status.st_size))
    return fields, rows, classes


@lru_cache(maxsize=4)  # a second each; every training of a sweep opens the data anew
def _read(path: Path, _changed: int, _size: int) -> str:
    """Runs READ, once for each state of a file."""
    reader = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=False)
    if reader.returncode:
        reason = (reader.stderr.strip().splitlines() or ["it crashes the reader"])[-1]
        raise UserError(f"{path} cannot be read as a MATLAB file ({reason}): {how_to_get('cars196')}")
    return reader.stdout


def _devkit(folder: Path, name: str) -> Path:
    """Returns the path of a devkit file: beside the images if it is there, else in `devkit/`."""
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

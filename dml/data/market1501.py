"""Market-1501 (Zheng et al. 2015): persons seen by six cameras, with queries and a gallery that has distractors.

Layout: `bounding_box_train/ bounding_box_test/ query/` with files
`<person>_c<camera>s<sequence>_<frame>_<detection>.jpg`.
"""

import os
import re
from pathlib import Path

from dml.data.images import SUFFIXES
from dml.data.official import Line, how_to_get, records
from dml.data.records import Records, Unreadable
from dml.errors import UserError

FOLDERS = {"bounding_box_train": "train", "query": "query", "bounding_box_test": "gallery"}
JUNK, DISTRACTORS = "-1", "0000"
# The gallery's classes: 750 persons, the distractors and the junk.
PUBLISHED = {"train": [(751, 12936)], "query": [(750, 3368)], "gallery": [(752, 19732)]}
NAME = re.compile(r"(-1|\d{4})_c(\d)s\d+_\d+_\d+\.")


def market1501(root: str, strict: bool = True, unreadable: Unreadable = "stop") -> Records:
    """Reads Market-1501: each person is a class, and each image has its camera.

    `protocol=market1501` ranks without images of the query's person from the query's own camera. Junk detections
    (person -1) are left out here, since the protocol removes them from every ranking. Distractors (person 0000) are a
    class of the gallery that no query has.

    Args:
        root: the folder `Market-1501-v15.09.15`.
        strict, unreadable: see `dml.data.official.records`.

    Raises:
        UserError: files are missing, or a file name does not give the person and the camera.
    """
    folder = Path(root)
    items = [item for name, role in FOLDERS.items() for item in _items(folder, name, role)]
    return records(
        "market1501",
        folder,
        items,
        PUBLISHED,
        folders=list(FOLDERS),
        strict=strict,
        unreadable=unreadable,
        keep=lambda item: item.label != JUNK,
    )


def _items(root: Path, folder: str, role: str) -> list[Line]:
    if not (root / folder).is_dir():
        raise UserError(f"there is no {root / folder}: {how_to_get('market1501')}")
    found = []
    for name in sorted(os.listdir(root / folder)):
        if name.startswith(".") or not name.lower().endswith(SUFFIXES):
            continue
        said = NAME.match(name)
        if said is None:
            raise UserError(
                f"{root / folder / name} is not named as Market-1501 names images (as 0002_c1s1_000451_03.jpg): remove "
                "or rename it"
            )
        found.append(Line(f"{folder}/{name}", said[1], role, camera=int(said[2])))
    return found

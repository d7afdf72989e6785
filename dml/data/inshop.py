"""In-Shop Clothes Retrieval of DeepFashion (Liu et al. 2016): queries and gallery of 3,985 items, 3,997 to train.

Layout: `Eval/list_eval_partition.txt` (or the same file beside `img/`) with lines
`image_name item_id evaluation_status`, and `img/` or `img_highres/`.
"""

from pathlib import Path
from typing import Literal

from dml.data.official import Line, lines, records
from dml.data.records import Records, Unreadable
from dml.errors import UserError

PUBLISHED = {"train": [(3997, 25882)], "query": [(3985, 14218)], "gallery": [(3985, 12612)]}
LIST = "list_eval_partition.txt"


def arrange(folder: Path) -> None:
    """Moves the image folders beside `Eval/`, wherever they were unpacked.

    Args:
        folder: where the sources were unpacked.
    """
    for images in ("img", "img_highres"):
        places = [path for path in sorted(folder.rglob(images)) if path.is_dir()]
        lists = sorted(folder.rglob(LIST))
        if len(places) == 1 and lists:
            root = lists[0].parent.parent if lists[0].parent.name == "Eval" else lists[0].parent
            if places[0] != root / images:
                places[0].rename(root / images)


def inshop(
    root: str, images: Literal["img", "img_highres"] = "img", strict: bool = True, unreadable: Unreadable = "stop"
) -> Records:
    """Reads In-Shop Clothes Retrieval; each item is a class.

    Args:
        root: the folder that holds `Eval/` and the images.
        images: `img` (256x256) or `img_highres`.
        strict, unreadable: see `dml.data.official.records`.

    Raises:
        UserError: files are missing or damaged.
    """
    folder = Path(root)
    path = folder / LIST if (folder / LIST).exists() else folder / "Eval" / LIST
    items = []
    for name, label, role in lines(path, 3, header=2, dataset="inshop"):
        if role not in PUBLISHED:
            raise UserError(f"{path} gives {name} the status {role!r}, which is none of {', '.join(PUBLISHED)}")
        items.append(Line(f"{images}/{name.partition('/')[2]}", label, role))
    return records("inshop", folder, items, PUBLISHED, folders=[images], strict=strict, unreadable=unreadable)

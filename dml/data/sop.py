"""Stanford Online Products (Oh Song et al. 2016): 22,634 products; the 11,318 of `Ebay_train.txt` train.

`Ebay_train.txt Ebay_test.txt` with a line `image_id class_id super_class_id path`, and twelve folders `<kind>_final/`.
"""

from pathlib import Path

from dml.data.official import Item, lines, records
from dml.data.records import Records

PUBLISHED = {"train": [(11318, 59551)], "test": [(11316, 60502)]}
LISTS = {"train": "Ebay_train.txt", "test": "Ebay_test.txt"}


def sop(root: str, strict: bool = True, unreadable: str = "stop") -> Records:
    """Products as classes.

    Args:
        root: the folder `Stanford_Online_Products`.
        strict, unreadable: see `dml.data.official.records`.

    Raises:
        UserError: files missing or damaged.
    """
    folder = Path(root)
    items = [
        Item(path, label, role)
        for role, name in LISTS.items()
        for _, label, _, path in lines(folder / name, 4, header=1, dataset="sop")
    ]
    folders = sorted({item.path.partition("/")[0] for item in items})
    return records("sop", folder, items, PUBLISHED, folders=folders, strict=strict, unreadable=unreadable)

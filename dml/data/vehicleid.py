"""PKU VehicleID (Liu et al. 2016): vehicles by their identity, with three tests of different size.

Layout: `image/`, and `train_test_split/` with `train_list.txt`, `test_list_800.txt` (small), `test_list_1600.txt`
(medium) and `test_list_2400.txt` (large), whose lines are `image vehicle`.
"""

from pathlib import Path
from typing import Literal

from dml.data.official import Line, lines, records
from dml.data.records import Records, Unreadable

# Papers print the first numbers; the lists that the authors hand out have the second ones.
TRAIN = [(13134, 110178), (13164, 113346)]
TESTS = {
    "small": [(800, 7332), (800, 6493)],
    "medium": [(1600, 12995), (1600, 13377)],
    "large": [(2400, 20038), (2400, 19777)],
}


def vehicleid(
    root: str, test: Literal["small", "medium", "large"] = "small", strict: bool = True, unreadable: Unreadable = "stop"
) -> Records:
    """Reads VehicleID; each vehicle is a class, and `protocol=vehicleid` draws the gallery.

    Args:
        root: the folder that holds `image/` and `train_test_split/`.
        test: which of the three tests: `small`, `medium` or `large`.
        strict, unreadable: see `dml.data.official.records`. Images of the other tests may lie in the folder too.

    Raises:
        UserError: files are missing or damaged.
    """
    folder = Path(root)
    lists = {"train": "train_list.txt", "test": f"test_list_{TESTS[test][0][0]}.txt"}
    items = [
        Line(f"image/{name}.jpg", label, role)
        for role, file in lists.items()
        for name, label in lines(folder / "train_test_split" / file, 2, dataset="vehicleid")
    ]
    published = {"train": TRAIN, "test": TESTS[test]}
    return records(
        "vehicleid", folder, items, published, folders=["image"], strict=strict, unreadable=unreadable, surplus=True
    )

"""Stanford Online Products (Oh Song et al. 2016): 22,634 products; the 11,318 of `Ebay_train.txt` train.

Layout: `Ebay_train.txt Ebay_test.txt` with lines `image_id class_id super_class_id path`, and twelve folders
`<kind>_final/`.
"""

from pathlib import Path, PurePosixPath

from dml.data.official import Line, lines, of_part, parquet, records, write_anew
from dml.data.records import Records, Unreadable
from dml.errors import UserError

PUBLISHED = {"train": [(11318, 59551)], "test": [(11316, 60502)]}
LISTS = {"train": "Ebay_train.txt", "test": "Ebay_test.txt"}


def sop(root: str, strict: bool = True, unreadable: Unreadable = "stop") -> Records:
    """Reads Stanford Online Products; each product is a class.

    Args:
        root: the folder `Stanford_Online_Products`.
        strict, unreadable: see `dml.data.official.records`.

    Raises:
        UserError: files are missing or damaged.
    """
    folder = Path(root)
    items = [
        Line(path, label, role)
        for role, name in LISTS.items()
        for _, label, _, path in lines(folder / name, 4, header=1, dataset="sop")
    ]
    folders = sorted({item.path.partition("/")[0] for item in items})
    return records("sop", folder, items, PUBLISHED, folders=folders, strict=strict, unreadable=unreadable)


def arrange(folder: Path) -> None:
    """Turns Hugging Face's Parquet files (columns image, class_id, super_class_id, path) into the official layout.

    Args:
        folder: where the sources were unpacked.

    Raises:
        UserError: a file is damaged or has other columns.
    """
    tables = sorted(folder.rglob("*.parquet"))
    for role, name in LISTS.items() if tables else ():
        rows = ["image_id class_id super_class_id path"]
        for table in (path for path in tables if of_part(path.relative_to(folder), role)):
            for image, label, kind, path in parquet(table, ("image", "class_id", "super_class_id", "path")):
                relative = PurePosixPath(path)
                if relative.is_absolute() or ".." in relative.parts:
                    raise UserError(
                        f"{table.name} has an image at {path!r}, which leads out of its folder: fetch it elsewhere"
                    )
                write_anew(folder / relative, image)
                rows.append(f"{len(rows)} {label} {kind} {path}")
        write_anew(folder / name, ("\n".join(rows) + "\n").encode())

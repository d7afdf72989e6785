"""Miniature replicas of the six benchmarks in their official layouts, to try out code that needs the benchmarks.

Each picture is noise around the colour of its class. Both sides of each official split have some classes, with a few
images each.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

IMAGES = 4  # per class


def picture(path: Path, label: int, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([label, number])
    colour = np.random.default_rng(label).integers(0, 256, 3)
    pixels = np.clip(colour + rng.normal(0, 20, (32, 40, 3)), 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(path, quality=95)


def text(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def cub200(root: Path, classes: Iterable[int] = (*range(97, 105),)) -> None:
    images: list[str] = []
    labels: list[str] = []
    boxes: list[str] = []
    for label in classes:
        for i in range(IMAGES):
            name = f"{label:03}.Some_Bird/Some_Bird_{i:04}_{label}.jpg"
            picture(root / "images" / name, label, i)
            key = len(images) + 1
            images.append(f"{key} {name}")
            labels.append(f"{key} {label}")
            boxes.append(f"{key} {4.0 + i} 2.0 20.0 25.0")
    text(root / "images.txt", images)
    text(root / "image_class_labels.txt", labels)
    text(root / "bounding_boxes.txt", boxes)


def cars196(root: Path, classes: Iterable[int] = (*range(95, 103),)) -> None:
    """Writes the layout `cars_annos.mat car_ims/`."""
    rows: list[tuple] = []
    for label in classes:
        for i in range(IMAGES):
            name = f"car_ims/{len(rows) + 1:06}.jpg"
            picture(root / name, label, i)
            rows.append((name, 3, 2 + i, 30, 28, label, i % 2))
    names = ("relative_im_path", "bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "test")
    annotation(root / "cars_annos.mat", rows, names)


def cars196_devkit(root: Path, classes: Iterable[int] = (*range(95, 103),)) -> None:
    """Writes the layout `devkit/ cars_train/ cars_test/`."""
    for part, file in (("train", "cars_train_annos.mat"), ("test", "cars_test_annos_withlabels.mat")):
        rows: list[tuple] = []
        for label in classes:
            for i in range(IMAGES // 2):
                name = f"{len(rows) + 1:05}.jpg"
                picture(root / f"cars_{part}" / name, label, i + (part == "test") * IMAGES)
                rows.append((3, 2 + i, 30, 28, label, name))
        names = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname")
        annotation(root / "devkit" / file, rows, names)


def annotation(path: Path, rows: list[tuple], names: tuple[str, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"annotations": np.array(rows, dtype=[(name, object) for name in names])})


def sop(root: Path, classes: int = 6) -> None:
    for part, first in (("train", 1), ("test", 11319)):
        lines = ["image_id class_id super_class_id path"]
        for label in range(first, first + classes):
            kind = "chair_final" if label % 2 else "lamp_final"
            for i in range(IMAGES):
                name = f"{kind}/{label}_{i}.JPG"
                picture(root / name, label, i)
                lines.append(f"{len(lines)} {label} {1 + label % 2} {name}")
        text(root / f"Ebay_{part}.txt", lines)


def inshop(root: Path, classes: int = 4) -> None:
    lines = []
    for label in range(1, 1 + 2 * classes):
        for i in range(IMAGES):
            name = f"WOMEN/Dresses/id_{label:08}/{i:02}_1_front.jpg"
            picture(root / "img" / name, label, i)
            status = "train" if label <= classes else ("query", "gallery")[i % 2]
            lines.append(f"img/{name}   id_{label:08}   {status}")
    text(root / "Eval" / "list_eval_partition.txt", [str(len(lines)), "image_name item_id evaluation_status", *lines])


def vehicleid(root: Path, classes: int = 6) -> None:
    lists: dict[str, list[str]] = {}
    for label in range(1, classes + 9):
        part = "train_list" if label <= classes else "test_list_800" if label <= classes + 4 else "test_list_1600"
        for i in range(IMAGES):
            name = f"{label:04}{i:03}"
            picture(root / "image" / f"{name}.jpg", label, i)
            lists.setdefault(part, []).append(f"{name} {label}")
    lists["test_list_1600"] += lists["test_list_800"]
    for part, lines in lists.items():
        text(root / "train_test_split" / f"{part}.txt", lines)


def market1501(root: Path, train: Iterable[int] = (2, 7, 10)) -> None:
    for label in train:
        for i in range(IMAGES):
            picture(root / "bounding_box_train" / f"{label:04}_c{1 + i}s1_{i:06}_01.jpg", label, i)
    for label, name in ((1, "0001"), (3, "0003"), (0, "0000"), (5000, "-1")):
        for i in range(IMAGES):
            picture(root / "bounding_box_test" / f"{name}_c{1 + i % 3}s1_{i:06}_01.jpg", label, i)
    for label in (1, 3):
        picture(root / "query" / f"{label:04}_c1s1_{900:06}_00.jpg", label, 9)


def cifar100(root: Path) -> None:
    """Writes the binary layout with all 60,000 images, all black."""
    for part, count in (("train", 50_000), ("test", 10_000)):
        records = np.zeros((count, 2 + 3 * 32 * 32), np.uint8)
        records[:, 1] = np.arange(count) % 100
        records[:, 0] = records[:, 1] // 5
        root.mkdir(parents=True, exist_ok=True)
        records.tofile(root / f"{part}.bin")
    # experiments/gsp/zero_shot.py asks for these names.
    named = ["rocket", "pickup_truck", "kangaroo", "leopard", "cattle", "wolf", "lizard", "camel", "tank", "bus"]
    text(root / "fine_label_names.txt", [*named, *(f"class_{c}" for c in range(10, 100))])
    text(root / "coarse_label_names.txt", (f"superclass_{k}" for k in range(20)))


MAKERS: dict[str, Callable[[Path], None]] = {
    "cub200": cub200,
    "cars196": cars196,
    "cars196_devkit": cars196_devkit,
    "sop": sop,
    "inshop": inshop,
    "vehicleid": vehicleid,
    "market1501": market1501,
}


def smoke(root: Path) -> None:
    """Writes all six and CIFAR-100 below `root`, each where its configuration looks for it.

    Each has at least eight training classes.
    """
    cifar100(root / "cifar-100")
    cub200(root / "CUB_200_2011", range(93, 109))
    cars196(root / "cars196", range(91, 107))
    sop(root / "Stanford_Online_Products", 16)
    inshop(root / "inshop", 8)
    vehicleid(root / "VehicleID_V1.0", 8)
    lists = root / "VehicleID_V1.0" / "train_test_split"
    (lists / "test_list_2400.txt").write_bytes((lists / "test_list_1600.txt").read_bytes())
    market1501(root / "Market-1501-v15.09.15", (2, 7, 10, 11, 12, 13, 14, 15))

"""Readers of the six benchmarks against literal parses of miniature replicas, and against whatever is wrong there."""

import dataclasses
import math
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig
from PIL import Image
from scipy.io import loadmat, savemat

from dml.configuration.options import check
from dml.data.cars196 import cars196
from dml.data.cub200 import cub200
from dml.data.dataset import open_dataset
from dml.data.fingerprint import fingerprint
from dml.data.inshop import inshop
from dml.data.market1501 import market1501
from dml.data.miniatures import MAKERS, annotation, picture, text
from dml.data.records import Records
from dml.data.sop import sop
from dml.data.vehicleid import vehicleid
from dml.errors import UserError
from dml.training.build import build
from dml.training.run import run

Configure = Callable[..., DictConfig]
READERS: dict[str, Callable[..., Records]] = {
    "cub200": cub200,
    "cars196": cars196,
    "cars196_devkit": cars196,
    "sop": sop,
    "inshop": inshop,
    "vehicleid": vehicleid,
    "market1501": market1501,
}


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str], Path]:
    def made(name: str) -> Path:
        root = tmp_path / "a place with spaces and ü" / name
        MAKERS[name](root)
        return root

    return made


def literal(root: Path, name: str) -> list[tuple[str, str, str]]:
    """(file, class, role), written from each layout's own description."""
    rows: list[tuple[str, str, str]] = []
    if name == "cub200":
        classes = dict(line.split() for line in (root / "image_class_labels.txt").read_text().splitlines())
        for line in (root / "images.txt").read_text().splitlines():
            key, path = line.split()
            rows.append((f"images/{path}", path[: path.index("/")], "train" if int(classes[key]) <= 100 else "test"))
    if name == "cars196":
        for row in loadmat(root / "cars_annos.mat")["annotations"][0]:
            label = int(row["class"].item())
            rows.append((row["relative_im_path"].item(), str(label), "train" if label <= 98 else "test"))
    if name == "cars196_devkit":
        for images, file in (("cars_train", "cars_train_annos"), ("cars_test", "cars_test_annos_withlabels")):
            for row in loadmat(root / "devkit" / f"{file}.mat")["annotations"][0]:
                label = int(row["class"].item())
                rows.append((f"{images}/{row['fname'].item()}", str(label), "train" if label <= 98 else "test"))
    if name == "sop":
        for role in ("train", "test"):
            for line in (root / f"Ebay_{role}.txt").read_text().splitlines()[1:]:
                rows.append((line.split()[3], line.split()[1], role))
    if name == "inshop":
        for line in (root / "Eval/list_eval_partition.txt").read_text().splitlines()[2:]:
            rows.append(tuple(line.split()))
    if name == "vehicleid":
        for role, file in (("train", "train_list"), ("test", "test_list_800")):
            for line in (root / f"train_test_split/{file}.txt").read_text().splitlines():
                rows.append((f"image/{line.split()[0]}.jpg", line.split()[1], role))
    if name == "market1501":
        for folder, role in (("bounding_box_train", "train"), ("query", "query"), ("bounding_box_test", "gallery")):
            for image in (root / folder).iterdir():
                if image.name[:2] != "-1":
                    rows.append((f"{folder}/{image.name}", image.name[:4], role))
    return rows


@pytest.mark.parametrize("name", READERS)
def test_records_are_the_annotation(made: Callable[[str], Path], name: str) -> None:
    root = made(name)
    records = READERS[name](str(root), strict=False)
    found = [
        (Path(path).relative_to(root).as_posix(), records.class_names[label], role)
        for path, label, role in zip(records.paths, records.labels, records.roles, strict=True)
    ]
    assert sorted(found) == sorted(literal(root, name))
    for row in range(len(records)):
        assert np.array_equal(records.image(row), Image.open(records.paths[row]))
    if name == "market1501":
        assert records.cameras is not None
        assert records.cameras.tolist() == [int(re.findall(r"_c(\d)s", path)[0]) for path in records.paths]
    else:
        assert records.cameras is None


@pytest.mark.parametrize("name", READERS)
def test_the_published_numbers(made: Callable[[str], Path], name: str) -> None:
    with pytest.raises(
        UserError, match=r"has \d+ \w+ classes with \d+ images, published are \d+ with \d+: .*strict=false"
    ):
        READERS[name](str(made(name)))


@pytest.mark.parametrize("name", ["cub200", "cars196", "cars196_devkit"])
def test_boxes(made: Callable[[str], Path], name: str) -> None:
    records = READERS[name](str(made(name)), crop="box", strict=False)
    for row in (0, 1, 5):
        whole = np.asarray(Image.open(records.paths[row]))
        i = row % (2 if name == "cars196_devkit" else 4)
        expected = whole[2:27, 4 + i : 24 + i] if name == "cub200" else whole[1 + i : 28, 2:30]
        assert np.array_equal(records.image(row), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cub200", "cars196_devkit"])
def test_a_changed_box_is_a_changed_picture(made: Callable[[str], Path], name: str) -> None:
    """For caches, which know pictures by their stamps, and for the fingerprint of a run that goes on."""
    whole, cut = (READERS[name](str(made(name)), crop=crop, strict=False) for crop in ("none", "box"))
    rows = np.arange(3)
    assert whole.boxes is None
    assert cut.boxes is not None
    assert [cut.open_image(row).size for row in rows] == [
        (math.ceil(right) - math.floor(left), math.ceil(low) - math.floor(high))
        for left, high, right, low in cut.boxes[rows]
    ]
    moved = dataclasses.replace(cut, boxes=cut.boxes + np.array([0, 0, 1, 0]))
    stamps = [list(records.stamps(rows)) for records in (whole, cut, moved)]
    assert len({tuple(of) for of in stamps}) == 3
    assert len({fingerprint(records)["digest"] for records in (whole, cut, moved)}) == 3


def test_a_box_beyond_the_picture_is_cut_to_it(made: Callable[[str], Path]) -> None:
    root = made("cub200")
    lines = (root / "bounding_boxes.txt").read_text().splitlines()
    lines[0], lines[1] = "1 -5.0 30.0 500.0 90.0", "2 39.9 31.9 0.2 0.1"
    text(root / "bounding_boxes.txt", lines)
    records = cub200(str(root), crop="box", strict=False)
    assert records.image(0).size == (40, 2)
    assert records.image(1).size == (1, 1)


@pytest.mark.slow
def test_cars_come_in_the_order_of_their_classes(made: Callable[[str], Path]) -> None:
    records = cars196(str(made("cars196_devkit")), strict=False)
    assert records.class_names == [str(c) for c in range(95, 103)]
    assert len(set(records.paths)) == 32


@pytest.mark.parametrize(("test", "classes"), [("small", 4), ("medium", 8)])
def test_the_tests_of_vehicleid(made: Callable[[str], Path], test: str, classes: int) -> None:
    records = vehicleid(str(made("vehicleid")), test=test, strict=False)
    assert len(np.unique(records.labels[records.query_rows])) == classes


def counted(reader: Callable[..., Records], root: Path) -> dict[str, Any]:
    """As if the miniature were what was published."""
    records = reader(str(root), strict=False)
    return {
        role: [(len(np.unique(records.labels[records.rows(role)])), len(records.rows(role)))]
        for role in np.unique(records.roles).tolist()
    }


@pytest.mark.parametrize("name", ["cub200", "sop", "inshop"])
@pytest.mark.parametrize("wrong", ["missing", "surplus", "nothing"])
def test_missing_and_surplus_images(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, wrong: str
) -> None:
    root, reader = made(name), READERS[name]
    monkeypatch.setattr(f"dml.data.{name}.PUBLISHED", counted(reader, root))
    whole = reader(str(root))
    first = Path(whole.paths[3])
    if wrong == "nothing":
        picture(first.with_name("._" + first.name), 0, 0)  # as macOS leaves them
        assert len(reader(str(root))) == len(whole)
        return
    if wrong == "missing":
        first.unlink()
        with pytest.raises(UserError, match=rf"lacks 1 images, the first .*{first.name}: python -m dml.data.prepare"):
            reader(str(root))
        with pytest.warns(UserWarning, match="left out 1 images"):
            assert len(reader(str(root), strict=False)) == len(whole) - 1
    else:
        picture(first.with_name("more.jpg"), 0, 0)
        with pytest.raises(UserError, match=r"has 1 images that its annotation does not list, the first .*more\.jpg"):
            reader(str(root))
        assert len(reader(str(root), strict=False)) == len(whole)


@pytest.mark.parametrize("name", READERS)
def test_nothing_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=rf"there is n.*{tmp_path}.*python -m dml\.data\.prepare dataset="):
        READERS[name](str(tmp_path / "none"))


@pytest.mark.parametrize("name", ["images.txt", "image_class_labels.txt"])
def test_a_number_listed_twice(made: Callable[[str], Path], name: str) -> None:
    root = made("cub200")
    with (root / name).open("a") as file:
        file.write((root / name).read_text().splitlines()[0] + "\n")
    with pytest.raises(UserError, match=rf"{name} has two lines for image 1: the file is damaged"):
        cub200(str(root), strict=False)


def test_an_image_listed_twice(made: Callable[[str], Path]) -> None:
    root = made("sop")
    with (root / "Ebay_train.txt").open("a") as file:
        file.write("99 1 1 chair_final/1_0.JPG\n")
    with pytest.raises(UserError, match=r"lists chair_final/1_0\.JPG more than once"):
        sop(str(root), strict=False)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("images.txt", "1\n", r"line 1 of .*images\.txt has 1 of 2 columns"),
        ("images.txt", "", r"images\.txt lists nothing"),
        ("images.txt", "77 100.x/y.jpg\n", r"image_class_labels\.txt has no line for image 77"),
        ("image_class_labels.txt", "1 one\n", r"'one' as a class"),
    ],
)
def test_damaged_lists(made: Callable[[str], Path], file: str, content: str, said: str) -> None:
    root = made("cub200")
    (root / file).write_text(content)
    with pytest.raises(UserError, match=said):
        cub200(str(root), strict=False)


def test_no_text(made: Callable[[str], Path]) -> None:
    root = made("inshop")
    (root / "Eval/list_eval_partition.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read as UTF-8 text"):
        inshop(str(root), strict=False)


def test_an_unknown_status(made: Callable[[str], Path]) -> None:
    root = made("inshop")
    path = root / "Eval/list_eval_partition.txt"
    path.write_text(path.read_text().replace("query", "probe", 1))
    with pytest.raises(UserError, match="the status 'probe', which is none of train, query, gallery"):
        inshop(str(root), strict=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file"), [("cars196", "cars_annos.mat"), ("cars196_devkit", "devkit/cars_meta.mat")])
def test_cars_are_called_by_their_names_where_the_data_say_them(
    made: Callable[[str], Path], name: str, file: str
) -> None:
    root = made(name)
    numbers = cars196(str(root), strict=False).class_names
    names = [f"Make {number} Coupé" for number in range(1, 197)]
    content = {"annotations": loadmat(root / file)["annotations"]} if (root / file).exists() else {}
    for said, expected in ((names[:100], numbers), (names, [f"Make {number} Coupé" for number in numbers])):
        savemat(root / file, content | {"class_names": np.array([said], dtype=object)})
        assert cars196(str(root), strict=False).class_names == expected


def test_a_name_that_is_none_of_market(made: Callable[[str], Path]) -> None:
    root = made("market1501")
    picture(root / "query" / "holiday.jpg", 0, 0)
    with pytest.raises(UserError, match=r"holiday\.jpg is not named as Market-1501"):
        market1501(str(root), strict=False)


@pytest.mark.parametrize("kind", ["another data set", "the test without labels", "a text", "cut short"])
def test_a_mat_of_something_else(made: Callable[[str], Path], kind: str) -> None:
    root = made("cars196")
    path = root / "cars_annos.mat"
    if kind == "another data set":
        savemat(path, {"image_names": np.arange(4), "labels": np.arange(4)})
    elif kind == "the test without labels":
        annotation(path, [(1, 2, "a.jpg"), (3, 4, "b.jpg")], ("bbox_x1", "bbox_x2", "relative_im_path"))
    elif kind == "a text":
        path.write_text("no MATLAB")
    else:
        path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(UserError, match=r"cars_annos\.mat (has no annotations with|cannot be read as a MATLAB file)"):
        cars196(str(root), strict=False)


@pytest.mark.parametrize("name", ["cub200", "cars196", "sop", "inshop", "vehicleid"])
def test_any_damage_is_one_sentence(made: Callable[[str], Path], name: str) -> None:
    """Bytes of the annotation cut, changed and doubled at random: records, or a UserError; nothing else."""
    root, rng = made(name), random.Random(0)
    files = [path for path in root.rglob("*") if path.suffix in (".txt", ".mat")]
    for _ in range(4 if name == "cars196" else 60):
        path = rng.choice(files)
        before = path.read_bytes()
        damaged = bytearray(before)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(damaged) - 1)
            match rng.randrange(3):
                case 0:
                    del damaged[at : at + rng.randrange(1, 40)]
                case 1:
                    damaged[at] = rng.randrange(256)
                case 2:
                    damaged[at:at] = damaged[: rng.randrange(60)]
            if len(damaged) < 3:
                break
        path.write_bytes(bytes(damaged))
        try:
            with warnings.catch_warnings(action="ignore"):
                READERS[name](str(root), strict=False)
        except UserError:
            pass
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("cub200", "crop=head"),
        ("cars196", "crop=head"),
        ("inshop", "images=small"),
        ("vehicleid", "test=huge"),
        ("sop", "strict=perhaps"),
    ],
)
def test_options(configure: Configure, name: str, option: str) -> None:
    with pytest.raises(UserError, match=rf"^dataset\.{option} has to be "):
        check(configure(f"dataset={name}", f"dataset.{option}"))


FOLDERS = {
    "cub200": "CUB_200_2011",
    "cars196": "cars196",
    "sop": "Stanford_Online_Products",
    "inshop": "inshop",
    "vehicleid": "VehicleID_V1.0",
    "market1501": "Market-1501-v15.09.15",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_configuration_builds_on_the_miniature(
    configure: Callable[..., DictConfig], tmp_path: Path, name: str
) -> None:
    """With the protocol that the data set has."""
    MAKERS[name](tmp_path / "data" / FOLDERS[name])
    options = [f"dataset={name}", f"paths.data_dir={tmp_path / 'data'}", "dataset.strict=false", "backbone=small"]
    parts = build(
        configure(*options, "image_size=32", "method=baseline", "sampler.batch_size=8", "trainer.num_workers=0")
    )
    assert parts.records.name == name
    assert len(parts.split.train)
    assert (parts.split.gallery is not None) == (name in ("inshop", "market1501"))
    rows = parts.data.eval_rows
    assert len(rows) == len(set(rows.tolist())) == sum(len(b["label"]) for b in parts.data.eval_dataloader(rows))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("one_thread")
def test_abe_trains_on_cars(configure: Configure, tmp_path: Path) -> None:
    MAKERS["cars196"](tmp_path / "data" / "cars196")
    options = ["dataset=cars196", "method=abe", f"paths.data_dir={tmp_path / 'data'}", "dataset.strict=false"]
    small = ["backbone=small", "image_size=32", "head.dim=16", "sampler.batch_size=8", "trainer.max_steps=2"]
    more = ["dataset.cache=disk", "trainer.num_workers=0", "trainer.accelerator=cpu", "protocol.every=2"]
    figures = run(configure(*options, *small, *more), options)
    assert figures["run/steps"] == 2
    assert (figures["data/train/classes"], figures["data/test/classes"]) == (4, 4)
    with pytest.raises(UserError, match=r"there is neither car_ims/ .* python -m dml\.data\.prepare dataset=cars196"):
        run(
            configure(*options, *small, f"paths.data_dir={tmp_path}", f"paths.output_dir={tmp_path / 'other'}"), options
        )


@pytest.mark.data
@pytest.mark.parametrize("name", FOLDERS)
def test_real_data(configure: Callable[..., DictConfig], data_dir: Path, name: str) -> None:
    """The published numbers hold, where the real data set is there."""
    if not (data_dir / FOLDERS[name]).exists():
        pytest.skip(f"no {FOLDERS[name]} in DML_DATA")
    records = open_dataset(configure(f"dataset={name}", f"paths.data_dir={data_dir}"))
    totals = {"cub200": 11788, "cars196": 16185, "sop": 120053, "inshop": 52712, "market1501": 12936 + 3368 + 15913}
    assert len(records) == totals.get(name, len(records))
    readable = records.image(0)
    assert min(readable.size) > 8


@pytest.mark.slow
@pytest.mark.data
def test_the_real_cars(configure: Configure, data_dir: Path) -> None:
    """All of it, in the published split, and images of both halves where the annotation says."""
    records = open_dataset(configure("dataset=cars196", f"paths.data_dir={data_dir}"))
    train, test = records.train_rows, records.query_rows
    assert (len(train), len(test)) == (8054, 8131)
    classes = [{int(records.class_names[label]) for label in np.unique(records.labels[rows])} for rows in (train, test)]
    assert classes == [{*range(1, 99)}, {*range(99, 197)}]
    assert not {*records.paths[train]} & {*records.paths[test]}
    for row in (0, 8053, 8054, 16184):
        assert min(records.image(row).size) > 8

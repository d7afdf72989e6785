from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dml.data.folder import folder
from dml.errors import UserError


def picture(path: Path, colour: tuple[int, int, int] = (200, 30, 60), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), colour).convert(mode).save(path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "my photos"
    for name in ("b/2.jpg", "b/10.JPG", "b/.hidden.jpg", "a ä/x y.PNG", "c/é.webp", "d/z.bmp", ".trash/1.jpg"):
        picture(root / name)
    (root / "b" / "notes.txt").write_text("no image")
    (root / "readme.md").write_text("no folder")
    return root


def test_a_tree_reads_as_written(tree: Path) -> None:
    records = folder(str(tree), name="mine")
    assert records.name == "mine"
    assert records.class_names == ["a ä", "b", "c", "d"]
    assert [str(Path(p).relative_to(tree)) for p in records.paths] == [
        "a ä/x y.PNG",
        "b/10.JPG",
        "b/2.jpg",
        "c/é.webp",
        "d/z.bmp",
    ]
    assert records.labels.tolist() == [0, 1, 1, 2, 3]
    assert records.labels.dtype == np.int64
    assert records.roles.tolist() == ["train", "train", "train", "test", "test"]
    image = records.open_image(4)
    assert image.mode == "RGB"
    assert image.size == (6, 4)
    assert image.getpixel((0, 0)) == (200, 30, 60)


def test_every_folder_with_images_is_a_class(tmp_path: Path) -> None:
    for name in (
        "Fruit/Apple/1.jpg",
        "Fruit/Pear/1.jpg",
        "Fruit/2.jpg",
        "Nut/1.png",
        "Nut/.cache/1.png",
    ):
        picture(tmp_path / name)
    (tmp_path / "Empty").mkdir()
    records = folder(str(tmp_path), depth="leaf")
    assert records.class_names == ["Fruit", "Fruit/Apple", "Fruit/Pear", "Nut"]
    assert records.labels.tolist() == [0, 1, 2, 3]
    assert records.roles.tolist() == ["train", "train", "test", "test"]
    (tmp_path / "Fruit" / "2.jpg").unlink()
    (tmp_path / "Empty").rmdir()
    with pytest.raises(UserError, match=r"class folder .*Fruit has no images .*deeper, as in .*Apple: .*depth=leaf"):
        folder(str(tmp_path))
    with pytest.raises(UserError, match="no folder with images"):
        folder(str(tmp_path / "Nut"), depth="leaf")


def test_folders_called_train_and_test_are_the_split(tmp_path: Path) -> None:
    for name in ("train/Fruit/Apple", "train/Fruit/Pear", "train/Nut", "test/Leaf"):
        picture(tmp_path / name / "1.jpg")
    records = folder(str(tmp_path), depth="leaf")
    assert dict(zip(records.class_names, records.roles, strict=True)) == {
        "test/Leaf": "test",
        "train/Fruit/Apple": "train",
        "train/Fruit/Pear": "train",
        "train/Nut": "train",
    }
    assert folder(str(tmp_path / "train"), depth="leaf").class_names == ["Fruit/Apple", "Fruit/Pear", "Nut"]


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "CMYK"])
def test_every_kind_of_image_opens_as_rgb(tmp_path: Path, mode: str) -> None:
    suffix = "tif" if mode == "CMYK" else "png"
    picture(tmp_path / "a" / f"1.{suffix}", mode=mode)
    picture(tmp_path / "b" / "1.png")
    assert folder(str(tmp_path)).image(0).mode == "RGB"


def test_sixteen_bits_keep_their_upper_eight(tmp_path: Path) -> None:
    picture(tmp_path / "b" / "1.png")
    (tmp_path / "a").mkdir()
    Image.fromarray(np.array([[0, 256, 40000, 65535]], np.uint16)).save(tmp_path / "a" / "1.png")
    assert np.asarray(folder(str(tmp_path)).open_image(0))[0, :, 1].tolist() == [0, 1, 156, 255]


def test_a_transparent_palette_opens_without_a_warning(tmp_path: Path) -> None:
    picture(tmp_path / "b" / "1.png")
    (tmp_path / "a").mkdir()
    Image.new("P", (4, 4)).save(tmp_path / "a" / "1.png", transparency=b"\x00\x80")
    assert folder(str(tmp_path)).open_image(0).mode == "RGB"


@pytest.mark.parametrize(("fraction", "train"), [(0.25, 1), (0.5, 2), (0.7, 3)])
def test_the_first_share_of_the_classes_trains(tree: Path, fraction: float, train: int) -> None:
    records = folder(str(tree), train_fraction=fraction)
    assert set(records.labels[records.train_rows]) == set(range(train))


def test_a_csv_gives_roles(tree: Path, tmp_path: Path) -> None:
    split = tmp_path / "split.csv"
    # a byte order mark, as spreadsheets write it; the umlaut decomposed, as some file systems have it
    split.write_text("\ufeffrole,class\ntest,a a\u0308\ntrain,d\ntest,b\ntrain,c\n", encoding="utf-8")
    records = folder(str(tree), split_csv=str(split))
    assert records.roles.tolist() == ["test", "test", "test", "train", "train"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name,role\na ä,train\n", "columns name, role: its first line must be class,role"),
        ("", "columns none"),
        ("class,role\na ä,train\nb,val\n", "class 'b' the role 'val'"),
        ("class,role\na ä\n", "class 'a ä' the role None"),
        ("class,role\na ä,train\nb,test\nb,train\n", "class 'b' more than once"),
        ("class,role\na ä,train\nx,test\n", "class 'x', which is no folder"),
        ("class,role\na ä,train\nb,test\n", r"no line for class 'c' \(2 such\)"),
        ("class,role\na ä,train\nb,train\nc,train\nd,train\n", "every class on one side"),
    ],
)
def test_a_csv_that_does_not_fit_is_told(tree: Path, tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "split.csv").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=sentence):
        folder(str(tree), split_csv=str(tmp_path / "split.csv"))


def test_a_csv_that_cannot_be_read_is_told(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"split_csv .*none\.csv cannot be read"):
        folder(str(tree), split_csv=str(tmp_path / "none.csv"))
    (tmp_path / "old.csv").write_bytes("class,role\na ä,train\n".encode("latin-1"))
    with pytest.raises(UserError, match="as UTF-8"):
        folder(str(tree), split_csv=str(tmp_path / "old.csv"))


def test_trees_that_are_none(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no folder .*nowhere"):
        folder(str(tmp_path / "nowhere"))
    (tmp_path / "flat").mkdir()
    picture(tmp_path / "flat" / "1.jpg")
    with pytest.raises(UserError, match="flat has no class folders"):
        folder(str(tmp_path / "flat"))
    (tree / "empty one").mkdir()
    (tree / "empty one" / ".x.jpg").write_bytes(b"")
    with pytest.raises(UserError, match=r"class folder .*empty one has no images"):
        folder(str(tree))


@pytest.mark.parametrize("fraction", [0.0, 0.1, 1.0, 1.5])
def test_a_share_that_leaves_one_side_empty(tree: Path, fraction: float) -> None:
    with pytest.raises(UserError, match=f"train_fraction={fraction} of 4 classes"):
        folder(str(tree), train_fraction=fraction)


def test_one_name_in_two_forms_of_unicode(tree: Path) -> None:
    """Two folders for the file system, one class for a reader: none is lost without a word."""
    for name in ("caf\u00e9", "cafe\u0301"):
        (tree / name).mkdir()
        picture(tree / name / "1.jpg")
    with pytest.raises(UserError, match=r"two class folders that read café, .*'cafe\\u0301' and 'caf\\xe9'"):
        folder(str(tree))


@pytest.mark.data
def test_the_real_tree(data_dir: Path) -> None:
    records = folder(str(data_dir / "birds100"))
    assert len(set(records.labels[records.train_rows])) == len(set(records.labels[records.query_rows])) == 50
    assert len(records) == 5902
    assert records.open_image(0).size == (227, 227)

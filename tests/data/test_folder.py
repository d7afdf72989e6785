from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dml.data.fingerprint import fingerprint
from dml.data.folder import folder
from dml.errors import UserError
from dml.evaluation.identities import AcrossCameras


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


def test_a_closed_folder_is_told(tmp_path: Path, refuse: Callable[[str], None]) -> None:
    for name in "abcd":
        picture(tmp_path / name / "1.jpg")
    refuse("/c")
    with pytest.raises(UserError, match=r"the folder .*/c cannot be read \(Permission denied\)"):
        folder(str(tmp_path), depth="leaf")


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
    picture(tmp_path / "test" / "Nut" / "2.jpg")
    picture(tmp_path / "train" / "3.jpg")
    with pytest.raises(UserError, match=r"has images in train/ or test/ themselves: put those of each class into"):
        folder(str(tmp_path), depth="leaf")
    (tmp_path / "train" / "3.jpg").unlink()
    with pytest.raises(UserError, match=r"1 classes lie below train/ and below test/, such as Nut, but the test is"):
        folder(str(tmp_path), depth="leaf")


@pytest.mark.parametrize(
    ("tops", "remedy"),
    [
        (
            ("train", "val", "test"),
            "train, val: folders are .* alone, so move val elsewhere, or name a file .*csv=FILE$",
        ),
        (("Train", "Test"), "Test, Train: .*, so rename Test to test and rename Train to train, or name"),
        (("Train", "train", "test"), "so move Train elsewhere, or name"),
        (("train",), "so add test, or name"),
        (("TEST", "x"), "so rename TEST to test and move x elsewhere and add train, or name"),
        (("test", *"abcdef"), "so move a, b, c, d, e and 1 more elsewhere and add train, or name"),
    ],
)
def test_folders_called_train_or_test_beside_others_are_refused(
    tmp_path: Path, tops: tuple[str, ...], remedy: str
) -> None:
    """The first half by name would train on the test."""
    for top in tops:
        for name in ("apple", "pear"):
            picture(tmp_path / top / name / "1.jpg")
    with pytest.raises(UserError, match=f"has images in the folders .*{remedy}"):
        folder(str(tmp_path), depth="leaf")
    lines = [f"{top}/apple,train\n{top}/pear,test\n" for top in tops]
    (tmp_path / "split.csv").write_text("label,split\n" + "".join(lines))
    assert folder(str(tmp_path), depth="leaf", csv=str(tmp_path / "split.csv")).roles.tolist() == [
        "train",
        "test",
    ] * len(tops)


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    """At any depth, and a loop ends."""
    for name in ("a", "b/deep"):
        picture(tmp_path / "disk" / name / "1.jpg")
    (tmp_path / "disk" / "a" / "back").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "b" / "across").symlink_to("../a")
    (tmp_path / "root").mkdir()
    for name in "ab":
        (tmp_path / "root" / name).symlink_to(tmp_path / "disk" / name)
    records = folder(str(tmp_path / "root"), depth="leaf")
    assert records.class_names == ["a", "a/back/b/deep", "b/across", "b/deep"]
    (tmp_path / "disk" / "a" / "back").unlink()
    assert folder(str(tmp_path / "root"), depth="leaf").class_names == ["a", "b/across", "b/deep"]
    (tmp_path / "disk" / "b" / "here").symlink_to(".")
    assert folder(str(tmp_path / "root"), depth="leaf").class_names == ["a", "b/across", "b/deep"]
    with pytest.raises(UserError, match=r"root/b has no images .*deeper, as in .*root/b/across"):
        folder(str(tmp_path / "root"))


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


def test_images_that_lie_deeper_than_others_are_told(tree: Path) -> None:
    (tree / "b" / "notes").mkdir()
    picture(tree / "b" / ".hidden" / "1.jpg")
    assert len(folder(str(tree)).paths) == 5
    picture(tree / "b" / "more" / "1.jpg")
    picture(tree / "c" / "more" / "1.jpg")
    with pytest.warns(UserWarning, match=r"are left out, in 2 class folders, as in .*b/more: move them up") as told:
        assert len(folder(str(tree)).paths) == 5
    assert len(told) == 1


def test_an_empty_csv_is_no_csv_that_was_left_out(tree: Path) -> None:
    with pytest.raises(UserError, match=r"dataset\.csv is empty: name a file, or leave the option out"):
        folder(str(tree), csv="")


def test_a_folder_above_is_that_of_what_a_link_leads_to(tree: Path, tmp_path: Path) -> None:
    """As the system opens it; and one image that is written in two ways is there twice."""
    (tmp_path / "disk" / "real").mkdir(parents=True)
    picture(tmp_path / "disk" / "a.jpg", colour=(1, 2, 3))
    (tmp_path / "root").symlink_to(tmp_path / "disk" / "real")
    picture(tmp_path / "a.jpg", colour=(9, 9, 9))
    file = tmp_path / "images.csv"
    file.write_text(f"path,label\n../a.jpg,x\n{tree / 'b/2.jpg'},y\n./../a.jpg,x\n")
    with pytest.raises(UserError, match=r"line 4 .*has \./\.\./a\.jpg again, as line 2"):
        folder(str(tmp_path / "root"), csv=str(file))
    plain, above = tmp_path / "disk" / "real" / "a.jpg", "../real/a.jpg"  # one image by a link, and by the folder
    picture(plain)
    file.write_text(f"path,label\na.jpg,x\n{tree / 'b/2.jpg'},y\n{above},x\n")
    with pytest.raises(UserError, match=r"line 4 .*has \.\./real/a\.jpg again, as line 2"):
        folder(str(tmp_path / "root"), csv=str(file))
    file.write_text(f"path,label\n../a.jpg,x\n{tree / 'b/2.jpg'},y\n")
    records = folder(str(tmp_path / "root"), csv=str(file))
    assert Path(records.paths[0]).samefile(tmp_path / "disk" / "a.jpg")


def test_a_csv_gives_roles(tree: Path, tmp_path: Path) -> None:
    split = tmp_path / "split.csv"
    # a byte order mark, as spreadsheets write it; the umlaut decomposed, as some file systems have it
    split.write_text("\ufeffsplit,label\ntest,a a\u0308\ntrain,d\ntest,b\ntrain,c\n", encoding="utf-8")
    records = folder(str(tree), csv=str(split))
    assert records.roles.tolist() == ["test", "test", "test", "train", "train"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name,split\na ä,train\n", "columns name, split: its first line has to name path,label"),
        ("", "columns none"),
        ("label,split\n", "has no lines below the column names"),
        ("label,split,camera\na ä,train,1\n", "without path each line is a class, with the columns label,split"),
        ("label,split,split\na ä,train,test\n", "columns label, split, split"),
        ("label,split\na ä,train\nb,val\n", "line 3 of .* gives 'b' the split 'val': use one of train, test"),
        ("label,split\na ä,train\nb,query\n", "line 3 of .* gives 'b' the split 'query': use one of train, test"),
        ("label,split\na ä\n", "line 2 of .* has 1 fields, but there are 2 columns"),
        ("label,split\n\n,train\n", "line 3 of .* has no label"),
        ("label,split\na ä,train\nb,test\nb,train\n", "line 4 of .* has class 'b' again, as line 3: keep one"),
        ("label,split\na ä,train\nx,test\n", "line 3 of .* has class 'x', which is no folder"),
        ("label,split\na ä,train\nb,test\n", r"no line for class 'c' \(2 such classes\)"),
        ("label,split\na ä,train\nb,train\nc,train\nd,train\n", "everything on one side"),
        ('label,split\n"a ä,train\n', "cannot be read as a CSV file"),
        (
            "path,label\nb/2.jpg,b\nb/3.jpg,b\nb/4.jpg,c\n",
            r"line 3 of .* names .*b/3.jpg, which does not exist \(2 such\)",
        ),
        ("path,label\nb/2.jpg,b\n,b\n", "line 3 of .* has no path"),
        ("path;label\nb/2.jpg;b\n", "has ';' between its columns: save it with commas"),
        ("path,label\nb/2.jpg,b\nb/../b/2.jpg,c\n", r"line 3 of .* has b/../b/2.jpg again, as line 2: "),
        ("path,label,camera\nb/2.jpg,b,x\n", "line 2 of .* has 'x' as camera"),
        ("path,label,camera\nb/2.jpg,b,\n", "line 2 of .* has '' as camera"),
        ("path,label,box\nb/2.jpg,b,1 2 3\n", "line 2 of .* has '1 2 3' as box"),
        (
            "path,label,box\nb/2.jpg,b,3 0 1 2\n",
            "line 2 of .* has '3 0 1 2' as box, which is not left upper right lower",
        ),
        ("path,label,box\nb/2.jpg,b,0 0 nan 2\n", "line 2 of .* has '0 0 nan 2' as box"),
        ("path,label,box\nb/2.jpg,b,.1 0 .9 .5\n", "line 2 of .* has '.1 0 .9 .5' as box, .*: it has to be in pixels"),
        ("path,label,split\nb/2.jpg,b,train\nc/é.webp,c,\n", "line 3 of .* gives 'c' the split ''"),
        ("path,label,split\nb/2.jpg,b,train\nc/é.webp,c,query\n", "only one of query and gallery"),
        ("path,label,split\nb/2.jpg,b,train\nb/10.JPG,b,test\n", "class 'b' .* is both in training and in evaluation"),
    ],
)
def test_a_csv_that_does_not_fit_is_told(tree: Path, tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "split.csv").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=sentence):
        folder(str(tree), csv=str(tmp_path / "split.csv"))


def test_a_csv_lists_images(tree: Path, tmp_path: Path) -> None:
    file = tmp_path / "images.csv"
    lines = [
        f"{tree / 'b/2.jpg'},x,train,1,",
        "b/10.JPG,x,train,2,1 1 5 3",
        "c/é.webp,y,query,0,",
        "d/z.bmp,y,gallery,1,",
    ]
    file.write_text("\n".join(["path,label,split,camera,box", *lines, '"a ä/x y.PNG",a\u0308,gallery,12,"0,0,2.0,1"']))
    records = folder(str(tree), name="mine", csv=str(file))
    found = [Path(path).relative_to(tree).as_posix() for path in records.paths]
    assert found == ["a ä/x y.PNG", "b/10.JPG", "b/2.jpg", "c/é.webp", "d/z.bmp"]
    assert [records.class_names[label] for label in records.labels] == ["ä", "x", "x", "y", "y"]
    assert records.roles.tolist() == ["gallery", "train", "train", "query", "gallery"]
    assert records.cameras is not None
    assert records.cameras.tolist() == [12, 2, 1, 0, 1]
    assert [records.open_image(row).size for row in range(5)] == [(2, 1), (4, 2), (6, 4), (6, 4), (6, 4)]
    assert records.subset(np.array([2, 1])).open_image(1).size == (4, 2)
    split = AcrossCameras().split(records)
    assert split.query.tolist() == [3]


def test_the_order_of_the_lines_has_no_meaning(tree: Path, tmp_path: Path) -> None:
    """A run that is resumed has the batches that it would have had."""
    lines = ["b/2.jpg,x,1,", "b/10.JPG,x,2,1 1 5 3", "c/é.webp,y,0,", "d/z.bmp,z,1,0 0 2 2", "   "]
    found = []
    for number, order in enumerate((lines, lines[::-1])):
        file = tmp_path / f"{number}.csv"
        file.write_text("\n".join(["path,label,camera,box", *order]))
        one = folder(str(tree), csv=str(file))
        assert one.cameras is not None
        sizes = [one.open_image(row).size for row in range(4)]
        found.append((list(one.paths), one.labels.tolist(), one.roles.tolist(), one.cameras.tolist(), sizes))
    assert found[0] == found[1]


def test_an_image_by_its_whole_path_is_the_same(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree.parent)
    file = tmp_path / "images.csv"
    file.write_text(f"path,label\nb/2.jpg,x\nc/é.webp,y\n{tree / 'b/2.jpg'},y\n")
    with pytest.raises(UserError, match=r"line 4 .*b/2\.jpg again, as line 2"):
        folder(tree.name, csv=str(file))


def test_blanks_around_values_do_not_count(tree: Path, tmp_path: Path) -> None:
    file = tmp_path / "images.csv"
    lines = [
        'b/2.jpg, x ,train, 1, "1, 1, 5, 3"',
        "b/10.JPG,x, train ,2, ",
        ' "c/é.webp", "y, z",query,0,',
        "d/z.bmp,w,gallery,1,",
    ]
    file.write_text("\n".join(["path, label, split, camera, box", *lines]))
    records = folder(str(tree), csv=str(file))
    assert records.class_names == ["w", "x", "y, z"]
    assert records.roles.tolist() == ["train", "train", "query", "gallery"]
    assert [records.open_image(row).size for row in range(2)] == [(6, 4), (4, 2)]
    (tmp_path / "split.csv").write_text("label, split\na ä, test\nb ,train\nc,test\nd, train \n")
    assert folder(str(tree), csv=str(tmp_path / "split.csv")).roles.tolist() == [
        "test",
        "train",
        "train",
        "test",
        "train",
    ]
    (tmp_path / "split.csv").write_text("label,split\n ,train\n")
    with pytest.raises(UserError, match=r"line 2 of .* has no label"):
        folder(str(tree), csv=str(tmp_path / "split.csv"))


def test_without_a_split_the_first_classes_by_name_train(tree: Path, tmp_path: Path) -> None:
    file = tmp_path / "images.csv"
    file.write_text("label,path\nz,b/2.jpg\nm,c/é.webp\na,d/z.bmp\nz,b/10.JPG\n")
    records = folder(str(tree), csv=str(file), train_fraction=0.34)
    assert records.roles.tolist() == ["test", "test", "test", "train"]


def test_another_box_is_another_picture_for_caches_and_resumption(tree: Path, tmp_path: Path) -> None:
    found = []
    for box in ("", "0 0 3 3", "0 0 3 4"):
        (tmp_path / "images.csv").write_text(f"path,label,box\nb/2.jpg,b,{box}\nc/é.webp,c,\n")
        records = folder(str(tree), csv=str(tmp_path / "images.csv"))
        found.append((tuple(records.stamps(np.arange(2))), fingerprint(records)["digest"]))
        assert records.subset(np.array([1])).boxes is not None
    assert len({stamps for stamps, _ in found}) == len({digest for _, digest in found}) == 3


def test_a_csv_that_cannot_be_read_is_told(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"csv .*none\.csv cannot be read"):
        folder(str(tree), csv=str(tmp_path / "none.csv"))
    (tmp_path / "old.csv").write_bytes("label,split\na ä,train\n".encode("latin-1"))
    with pytest.raises(UserError, match="in UTF-8"):
        folder(str(tree), csv=str(tmp_path / "old.csv"))


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

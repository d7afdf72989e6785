from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dml.data.paths import Paths
from dml.data.records import Records, UnreadableImage
from dml.errors import UserError


def grey(row: int) -> Image.Image:
    return Image.new("RGB", (4, 4), (row, row, row))


def records(labels: list[int], roles: list[str], opener: Callable[[int], Image.Image] = grey, **more: str) -> Records:
    names = [f"class {c}" for c in range(max(labels, default=-1) + 1)]
    paths = Paths.of(f"{i}.png" for i in range(len(labels)))
    return Records("some", paths, np.array(labels, np.int64), np.array(roles, str), names, opener, **more)


def test_rows_by_role() -> None:
    plain = records([0, 1, 0, 1], ["train", "test", "train", "test"])
    assert plain.train_rows.tolist() == [0, 2]
    assert plain.query_rows.tolist() == [1, 3]
    assert plain.gallery_rows is None
    shop = records([0, 1, 1, 0], ["train", "gallery", "query", "train"])
    assert shop.query_rows.tolist() == [2]
    assert shop.gallery_rows is not None
    assert shop.gallery_rows.tolist() == [1]
    assert shop.rows("train", "gallery").tolist() == [0, 1, 3]
    assert len(shop) == 4


def test_subset_renumbers_classes_and_opens_the_right_images() -> None:
    part = records([0, 1, 2, 2], ["train", "train", "test", "test"]).subset(np.array([3, 0]))
    assert part.labels.tolist() == [1, 0]
    assert part.class_names == ["class 0", "class 2"]
    assert part.paths.tolist() == ["3.png", "0.png"]
    assert part.roles.tolist() == ["test", "train"]
    assert [part.open_image(i).getpixel((0, 0)) for i in range(2)] == [(3, 3, 3), (0, 0, 0)]
    assert part.subset(np.array([1])).open_image(0).getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("labels", "roles", "sentence"),
    [
        ([], [], "some has no images"),
        ([0, 2], ["train", "test"], "class 'class 1' of dataset some has no images"),
        ([0, 0, 1, 1], ["train", "train", "train", "test"], "'class 1' .* both in training and in evaluation"),
        ([0, 1], ["train", "query"], "only one of query and gallery"),
        ([0, 1, 1, 2], ["train", "query", "gallery", "test"], "test images beside query and gallery images"),
    ],
)
def test_what_no_dataset_may_be(labels: list[int], roles: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        records(labels, roles)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"labels": np.array([0, 1])}, r"some has labels of shape \[2\] for 3 images: give \[3\]"),
        ({"roles": np.array(["train"] * 4)}, r"some has roles of shape \[4\] for 3 images: give \[3\]"),
        ({"labels": [0, 0, 1]}, r"some has labels of type list: give an array of shape \[3\]"),
        ({"roles": ["train", "train", "test"]}, r"some has roles of type list: give an array of shape \[3\]"),
        ({"roles": None}, r"some has roles of type NoneType"),
        ({"labels": np.array([0.0, 0, 1])}, "some has labels of type float64: give int64"),
        ({"labels": np.array([1, 1, 2])}, "some has labels from 1 to 2, but 2 class names: number classes from 0"),
        ({"labels": np.array([0, 0, -1])}, "some has labels from -1 to 0, but 2 class names: number classes from 0"),
        (
            {"roles": np.array(["train", "train", "val"])},
            "some has the role 'val': roles are train, test, query, gallery",
        ),
        ({"boxes": np.zeros((3, 2))}, r"some has boxes of shape \[3, 2\] for 3 images: give \[3, 4\]"),
        ({"cameras": np.zeros(1, np.int64)}, r"some has cameras of shape \[1\] for 3 images"),
    ],
)
def test_what_a_data_set_of_one_s_own_may_return_wrong(change: dict[str, Any], sentence: str) -> None:
    parts = {"labels": np.array([0, 0, 1]), "roles": np.array(["train", "train", "test"])} | change
    paths = Paths.of(f"{i}.png" for i in range(3))
    with pytest.raises(UserError, match=sentence):
        Records("some", paths, class_names=["a", "b"], open_image=grey, **parts)


def test_what_is_no_image_is_named() -> None:
    opener: Any = lambda row: np.zeros((4, 4, 3))  # noqa: E731
    with pytest.raises(
        UnreadableImage, match=r"0\.png cannot be read \(.*open_image returns ndarray, and no image of PIL"
    ):
        records([0, 0, 1], ["train", "train", "test"], opener).image(0)


def test_an_image_that_does_not_open_is_named() -> None:
    def broken(row: int) -> Image.Image:
        raise SyntaxError("not a PNG")

    with pytest.raises(UnreadableImage, match=r"the image 1\.png cannot be read \(not a PNG\)"):
        records([0, 1], ["train", "test"], broken).image(1)

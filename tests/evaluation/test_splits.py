"""A wrong split is told, whichever data set and protocol it comes of."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from PIL import Image

from dml.data.paths import Paths
from dml.data.records import Records
from dml.errors import UserError
from dml.evaluation.evaluator import Embedded
from dml.evaluation.identities import AcrossCameras, OneImageGallery
from dml.evaluation.protocol import MLRC, Conventional, RandomClassSplit
from dml.evaluation.splits import Split
from dml.runs.scores import read_queries, write_scores
from dml.training.build import build
from tests.conftest import TINY


def records(paths: list[str] | None = None) -> Records:
    """Images 0 to 3 of classes 0 and 1 train, 4 to 7 of classes 2 and 3 are sought, 8 to 11 of the same searched."""
    labels = np.array([0, 0, 1, 1, *[2, 2, 3, 3] * 2], np.int64)
    roles = np.array(["train"] * 4 + ["query"] * 4 + ["gallery"] * 4)
    names = Paths.of(paths or [f"images/{i}.png" for i in range(12)])
    grey = Image.new("RGB", (32, 32))
    cameras = np.arange(12)
    return Records("some", names, labels, roles, list("abcd"), lambda row: grey, cameras=cameras)


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers)


TRAIN, QUERY, GALLERY = rows(0, 1, 2, 3), rows(4, 5, 6, 7), rows(8, 9, 10, 11)
TWICE = [f"images/{i}.png" for i in (*range(11), 4)]


@pytest.mark.parametrize(
    ("split", "sentence"),
    [
        (
            Split(TRAIN, QUERY, rows(8, 9, 4)),
            r"images/4\.png of dataset some is a query and in the gallery too \(1 such in all\)",
        ),
        (Split(TRAIN, QUERY, QUERY), r"a query and in the gallery too \(4 such in all\): a query would find itself"),
        (
            Split(rows(0, 1, 4), rows(5, 6), None),
            r"images/5\.png .*, of the class 'c', is among both training and queries",
        ),
        (Split(rows(0, 1, 10), rows(4, 5), rows(8, 9, 11)), r"of the class 'd', is among both training and gallery"),
        (
            Split(TRAIN, rows(0, 5), None),
            r"images/0\.png .* is among both training and queries \(1 such in all\): give each image",
        ),
        (Split(rows(0, 1), QUERY, None, rows(2, 3, 4)), "images/4.png .* is among both validation and queries"),
        (Split(rows(0, 1), rows(4, 6), None, rows(2, 5)), "of the class 'c', is among both validation and queries"),
        (Split(rows(0, 1, 2), QUERY, None, rows(3)), "of the class 'b', is among both training and validation"),
        (Split(rows(0, 1, 1), QUERY, None), r"images/1\.png of dataset some is twice as training \(1 such in all\)"),
        (Split(TRAIN, rows(4, 4, 6), None), "is twice as queries"),
        (Split(TRAIN, QUERY, rows(8, 8)), "is twice as gallery"),
        (Split(rows(), QUERY, None), "has no images as training"),
        (Split(TRAIN, rows(), None), "has no images as queries"),
        (
            Split(np.arange(12) < 4, QUERY, None),
            r"has an array of bool and shape \[12\] as training: it has to hold the numbers of rows, as",
        ),
        (Split(rows(0, 1), QUERY[None], None), r"has an array of int64 and shape \[1, 4\] as queries"),
        (Split(TRAIN, rows(12), None), "has a row as queries that is none of its 12 images"),
        (Split(TRAIN, rows(4, 6), None), "has no image as queries with another one of its class to find"),
        (Split(TRAIN, rows(4, 5), rows(10, 11)), "has no image as queries with another one of its class to find"),
        (Split(rows(0, 1), QUERY, None, rows(2)), "has no image as validation with another one of its class to find"),
    ],
)
def test_what_no_split_may_be(split: Split, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        split.check(records())


def test_one_file_is_one_image(tmp_path: Path) -> None:
    """Whatever its rows: listed twice, or through a folder that is a link to another."""
    with pytest.raises(UserError, match=r"images/4\.png .* is a query and in the gallery too"):
        Split(TRAIN, QUERY, GALLERY).check(records(TWICE))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    linked = [f"{tmp_path}/{'b' if i >= 8 else 'a'}/{i % 8}.png" for i in range(12)]
    with pytest.raises(UserError, match=r"b/0\.png .* is among both training and gallery \(4 such in all\)"):
        Split(TRAIN, QUERY, GALLERY).check(records(linked))


def test_an_image_has_one_camera() -> None:
    """Else the protocol would leave out the images of the query's camera, and let the query find itself."""
    cameras = np.arange(12)
    with pytest.raises(UserError, match=r"images/4\.png .* is a query and in the gallery with another camera \(1 such"):
        Split(TRAIN, QUERY, GALLERY, cameras=cameras).check(records(TWICE))
    cameras[11] = cameras[4]
    Split(TRAIN, QUERY, GALLERY, cameras=cameras).check(records(TWICE))


def test_splits_as_they_should_be() -> None:
    data = records()
    for protocol in (Conventional(), Conventional(select="val_classes"), AcrossCameras(), OneImageGallery()):
        protocol.split(data).check(data)
    RandomClassSplit(split=0).split(data).check(data)
    MLRC(fold=0, repeat=0, folds=2, repeats=1).split(data).check(data)
    Split(TRAIN, QUERY, np.concatenate([QUERY, GALLERY]), cameras=data.cameras).check(data)  # leaves it out


def test_scores_of_absolute_and_relative_paths_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a list of images may have them; the names of queries are relative to what all have in common."""
    monkeypatch.chdir(tmp_path)
    data = records([f"{tmp_path}/far/{i}.png" if i % 2 else f"photos/{i}.png" for i in range(12)])
    split, protocol = Split(TRAIN, QUERY, GALLERY), Conventional()
    points = torch.nn.functional.normalize(torch.rand(8, 1, 4), dim=-1)
    found = Embedded(points, torch.as_tensor(data.labels[4:]), torch.arange(4, 12))
    write_scores(tmp_path, data, split, protocol, found, protocol.ranking(split, found))
    assert np.load(tmp_path / "queries.npz")["paths"].tolist() == [
        "photos/4.png",
        "far/5.png",
        "photos/6.png",
        "far/7.png",
    ]


def test_what_was_searched_is_told_by_the_scores(tmp_path: Path) -> None:
    """Wherever the data lie; two galleries, or two rules for what of them counts, are not the same test."""

    def gallery(root: str, split: Split) -> str:
        data = records([f"/{root}/{i}.png" for i in range(12)])
        points = torch.nn.functional.normalize(torch.rand(8, 1, 4), dim=-1)
        found = Embedded(points, torch.as_tensor(data.labels[4:]), torch.arange(4, 12))
        protocol = Conventional() if split.cameras is None else AcrossCameras()
        write_scores(tmp_path, data, split, protocol, found, protocol.ranking(split, found))
        return read_queries(tmp_path).gallery

    whole = gallery("a", Split(TRAIN, QUERY, GALLERY))
    assert len(whole) == 32
    assert gallery("a\udce9", Split(TRAIN, QUERY, GALLERY)) == whole  # a name that is no UTF-8
    assert gallery("b/c", Split(TRAIN, QUERY, GALLERY[::-1])) == whole
    assert gallery("a", Split(TRAIN, np.concatenate([QUERY, GALLERY]), None)) == ""
    splits = Split(TRAIN, QUERY, GALLERY[:-1]), Split(TRAIN, QUERY, GALLERY, cameras=np.arange(12))
    others = {gallery("a", split) for split in splits}
    assert len(others | {whole}) == 3
    cameras = np.where(np.arange(12) < 8, 20, np.arange(12))  # the queries' alone are others
    assert gallery("a", Split(TRAIN, QUERY, GALLERY, cameras=cameras)) not in others


def test_a_run_of_a_wrong_protocol_does_not_start(
    configure: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: Conventional, data: Records) -> Split:
        return Split(data.train_rows, data.query_rows, data.query_rows)

    monkeypatch.setattr(Conventional, "parted", wrong)
    with pytest.raises(UserError, match="a query and in the gallery too"):
        Conventional().split(records())
    with pytest.raises(UserError, match="a query and in the gallery too"):
        build(configure(*TINY))

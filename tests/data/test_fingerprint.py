"""A run goes on with the data that it began with, or not at all."""

import hashlib
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig
from PIL import Image

from dml.data.fingerprint import difference, fingerprint
from dml.data.folder import folder
from dml.data.paths import Paths
from dml.data.records import Records
from dml.errors import UserError
from dml.training.callbacks.report import Report
from dml.training.run import run
from tests.conftest import TINY
from tests.runs import photographs

Configure = Callable[..., DictConfig]


def add(root: Path) -> None:
    shutil.copy(root / "class0" / "0.png", root / "class0" / "more.png")


def remove(root: Path) -> None:
    (root / "class3" / "1.png").unlink()


def rename(root: Path) -> None:
    (root / "class1").rename(root / "class1a")


def move(root: Path) -> None:
    (root / "class3" / "1.png").rename(root / "class2" / "more.png")


def change(root: Path) -> None:
    Image.new("RGB", (30, 30)).save(root / "class0" / "0.png")


CHANGES = {
    add: r"^16 images, now 17; \d+ bytes, now \d+$",
    remove: r"^16 images, now 15; \d+ bytes, now \d+$",
    rename: "^as many images and bytes, but other names, classes, roles, cameras or boxes$",
    move: "^as many images and bytes, but other names, classes, roles, cameras or boxes$",
    change: r"^\d+ bytes, now \d+$",
}


@pytest.mark.parametrize("changes", CHANGES)
def test_what_changed(tmp_path: Path, changes: Callable[[Path], None]) -> None:
    photographs(tmp_path / "data")
    before = fingerprint(folder(str(tmp_path / "data")))
    assert difference(before, fingerprint(folder(str(tmp_path / "data")))) == ""
    changes(tmp_path / "data")
    said = difference(before, fingerprint(folder(str(tmp_path / "data"))))
    assert re.search(CHANGES[changes], said), said


def test_of_data_elsewhere_and_in_another_order(tmp_path: Path) -> None:
    photographs(tmp_path / "data")
    records = folder(str(tmp_path / "data"))
    before = fingerprint(records)
    (tmp_path / "data").rename(tmp_path / "moved")
    moved = folder(str(tmp_path / "moved"))
    assert fingerprint(moved) == before
    assert fingerprint(moved.subset(np.arange(16)[::-1])) == before
    assert fingerprint(folder(str(tmp_path / "moved"), train_fraction=0.75)) != before


@pytest.mark.parametrize("order", [1, -1])
def test_of_lines_in_the_order_of_names(order: int) -> None:
    """Whether they come so or not, also with names that are no UTF-8, and one that another begins with."""
    names = [f"/data/some/{name}.jpg" for name in ("a/1", "a/1.jpg0", "b/\udc80", "b/\uf000")][::order]
    labels = np.array([0, 0, 1, 1])[::order].copy()
    roles = np.where(labels == 0, "train", "test")
    cameras = np.arange(4)
    records = Records("some", Paths.of(names), labels, roles, ["A", "B"], Image.open, cameras=cameras)
    parts = zip(names, "AABB"[::order], roles.tolist(), cameras.tolist(), strict=True)
    lines = sorted(f"{name[11:]}\0{0}\0{label}\0{role}\0{camera}" for name, label, role, camera in parts)
    digest = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
    assert fingerprint(records) == {"digest": digest, "images": 4, "classes": 2, "bytes": 0}


def test_of_many_images_in_little_time() -> None:
    count = 120_000
    names = [f"/data/of/some/where/class {i // 10}/a name of an image {i}.jpg" for i in range(count)]
    paths = Paths.of(names)
    labels = np.arange(count) // 10
    roles = np.where(labels < 6_000, "train", "test")
    classes = [f"class {c}" for c in range(count // 10)]
    records = Records("many", paths, labels, roles, classes, lambda row: Image.new("RGB", (8, 8)))
    start = time.process_time()
    fingerprint(records)
    assert time.process_time() - start < 2


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_run_does_not_go_on_with_other_data(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photographs(tmp_path / "data")
    options = [option for option in TINY if not option.startswith("dataset")]
    options += ["dataset=folder", f"dataset.root={tmp_path / 'data'}", "backbone=small", "sampler.batch_size=8"]
    options += ["trainer.max_steps=4", "trainer.checkpoint_every=2", "protocol.every=4"]

    def stop(*_: Any) -> None:
        raise KeyError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Report, "_write", stop)
        with pytest.raises(KeyError):
            run(configure(*options), [])
    saved = (tmp_path / "run" / "checkpoints" / "last.ckpt").read_bytes()
    add(tmp_path / "data")
    with pytest.raises(
        UserError,
        match=r"the data set folder is not the one .* \(16 images, now 17; .* with paths\.output_dir=FOLDER",
    ):
        run(configure(*options), [])
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").read_bytes() == saved
    (tmp_path / "data" / "class0" / "more.png").unlink()
    assert run(configure(*options), [])["run/steps"] == 4

"""CIFAR-100 in both official layouts, and the collage built from it."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig

from dml.data.cifar import cifar100
from dml.data.cifar_collage import BACKGROUNDS, cifar_collage
from dml.errors import UserError
from tests.conftest import TINY
from tests.data.test_features import STILL, stored

FINE = [f"class_{i:02}" for i in range(100)]
COARSE = [*BACKGROUNDS, *(f"target_{i:02}" for i in range(16))]
OWNER = np.random.default_rng(7).permutation(np.repeat(np.arange(20), 5))  # superclass of each class


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """A CIFAR-100 of 5 + 1 images a class: superclasses, classes and pixels; an image's first red value is its class,
    the second its number in it."""
    monkeypatch.setattr("dml.data.cifar.IMAGES", {"train": 500, "test": 100})
    rng = np.random.default_rng(0)
    parts = {}
    for part, (first, count) in {"train": (0, 5), "test": (5, 1)}.items():
        classes = np.repeat(np.arange(100), count)
        pixels = rng.integers(0, 256, (len(classes), 3072), dtype=np.uint8)
        pixels[:, 0], pixels[:, 1] = classes, np.tile(np.arange(first, first + count), 100)
        order = rng.permutation(len(classes))
        parts[part] = OWNER[classes[order]], classes[order], pixels[order]
    return parts


@pytest.fixture
def binary(contents: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]], tmp_path: Path) -> Path:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for part, (coarse, fine, pixels) in contents.items():
        records = [bytes([c, f]) + row.tobytes() for c, f, row in zip(coarse, fine, pixels, strict=True)]
        (folder / f"{part}.bin").write_bytes(b"".join(records))
    (folder / "fine_label_names.txt").write_text("\n".join(FINE) + "\n")
    (folder / "coarse_label_names.txt").write_text("\n".join(COARSE) + "\n\n")
    return folder


@pytest.fixture
def python(contents: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]], tmp_path: Path) -> Path:
    folder = tmp_path / "other" / "cifar-100-python"
    folder.mkdir(parents=True)
    for part, (coarse, fine, pixels) in contents.items():
        content = {b"coarse_labels": coarse.tolist(), b"fine_labels": fine.tolist(), b"data": pixels}
        (folder / part).write_bytes(pickle.dumps(content, protocol=2))
    names = {b"fine_label_names": [n.encode() for n in FINE], b"coarse_label_names": [n.encode() for n in COARSE]}
    (folder / "meta").write_bytes(pickle.dumps(names, protocol=2))
    return folder


def test_both_layouts_are_the_same(binary: Path, python: Path) -> None:
    one, other = cifar100(str(binary.parent)), cifar100(str(python))
    for name in ("images", "classes", "superclasses", "train", "superclass_of"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.class_names == other.class_names == FINE
    assert one.superclass_names == other.superclass_names == COARSE
    np.testing.assert_array_equal(one.superclass_of, OWNER)
    np.testing.assert_array_equal(one.images[:, 0, 0, 0], one.classes)
    assert one.train.sum() == 500


def test_rows_and_columns_are_not_exchanged(binary: Path, contents: dict) -> None:
    pixels = contents["train"][2][0]
    image = cifar100(str(binary)).images[0]
    for y, x, channel in ((0, 1, 0), (5, 31, 1), (30, 2, 2)):
        assert image[y, x, channel] == pixels[channel * 1024 + y * 32 + x]


def test_collage(binary: Path) -> None:
    """Against the definition: parts, labels, roles and who stands beside whom."""
    records = cifar_collage(str(binary))
    cifar = cifar100(str(binary))
    training = {c for s in range(20) for c in np.flatnonzero(s == OWNER)[:3]}
    assert len(records) == 16 * 5 * 6
    assert len(records.train_rows) == 16 * 3 * 6
    assert records.gallery_rows is None
    seen, corners = set(), set()
    for row in range(len(records)):
        sheet = np.asarray(records.image(row))
        assert sheet.shape == (64, 64, 3)
        tiles = [sheet[y : y + 32, x : x + 32] for y in (0, 32) for x in (0, 32)]
        found = [(int(tile[0, 0, 0]), int(tile[0, 1, 0])) for tile in tiles]  # class and number
        assert len(set(found)) == 4
        for (fine, number), tile in zip(found, tiles, strict=True):
            (source,) = np.flatnonzero((cifar.classes == fine) & (cifar.images[:, 0, 1, 0] == number))
            np.testing.assert_array_equal(tile, cifar.images[source])
        targets = [i for i, (fine, _) in enumerate(found) if COARSE[OWNER[fine]] not in BACKGROUNDS]
        assert len(targets) == 1
        corners.add(targets[0])
        seen.add(found[targets[0]])
        role = records.roles[row]
        assert {fine in training for fine, _ in found} == {role == "train"}
        name = COARSE[OWNER[found[targets[0]][0]]]
        assert records.class_names[records.labels[row]] == f"{name}/{role}"
        assert records.paths[row].startswith(FINE[found[targets[0]][0]])
    assert len(seen) == len(records)
    assert corners == {0, 1, 2, 3}


def test_distilled_is_the_target_alone(binary: Path) -> None:
    whole, alone = (cifar_collage(str(binary), kind) for kind in ("collage", "distilled"))
    np.testing.assert_array_equal(whole.labels, alone.labels)
    for row in range(0, len(whole), 7):
        sheet, target = np.asarray(whole.image(row)), np.asarray(alone.image(row))
        tiles = [sheet[y : y + 32, x : x + 32] for y in (0, 32) for x in (0, 32)]
        assert any(np.array_equal(tile, target) for tile in tiles)


def test_the_seed_decides(binary: Path) -> None:
    same, again, other = (cifar_collage(str(binary), seed=seed) for seed in (3, 3, 4))
    rows = range(0, len(same), 11)
    assert all(np.array_equal(same.image(row), again.image(row)) for row in rows)
    assert not all(np.array_equal(same.image(row), other.image(row)) for row in rows)


@pytest.mark.slow
def test_its_features_are_kept_until_a_picture_changes(
    binary: Path, configure: Callable[..., DictConfig], tmp_path: Path
) -> None:
    tiny = [option for option in TINY if not option.startswith("dataset")]
    options = ["dataset=cifar_collage", f"dataset.root={binary}", "backbone=small", "backbone.train=none", *tiny]

    def kept() -> set[Path]:
        parts, data = stored(configure(*options, *STILL))
        features = next(iter(data.train_dataloader()))["image"]
        assert features.shape[0] == 16
        assert parts.data.records.source is not None
        return set((tmp_path / "cache").glob("features-*"))

    first = kept()
    assert len(first) == 1
    assert kept() == first
    content = bytearray((binary / "train.bin").read_bytes())
    content[-1] ^= 1
    (binary / "train.bin").write_bytes(content)
    assert len(kept() - first) == 1


def test_the_names_of_old_numpy(python: Path) -> None:
    """The official files were pickled by Python 2, from `numpy.core`."""
    whole = cifar100(str(python)).images
    for part in ("train", "test"):
        content = (python / part).read_bytes()
        assert b"numpy._core.multiarray" in content
        (python / part).write_bytes(content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    np.testing.assert_array_equal(cifar100(str(python)).images, whole)


def test_mistakes_are_told(binary: Path, python: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no CIFAR-100 in .*put train\.bin"):
        cifar100(str(tmp_path / "nowhere"))
    whole = (binary / "train.bin").read_bytes()
    (binary / "train.bin").write_bytes(whole[:-1])
    with pytest.raises(UserError, match=r"train\.bin has 1,536,999 bytes where CIFAR-100 has 1,537,000"):
        cifar100(str(binary))
    (binary / "train.bin").write_bytes(whole[:1] + bytes([99]) + whole[2:])  # another class
    with pytest.raises(UserError, match="labels are not CIFAR-100's"):
        cifar100(str(binary))
    (binary / "train.bin").write_bytes(whole)
    (binary / "test.bin").unlink()
    with pytest.raises(UserError, match=r"test\.bin cannot be read"):
        cifar100(str(binary))
    (python / "test").write_bytes((python / "test").read_bytes()[:1000])
    with pytest.raises(UserError, match="test cannot be read"):
        cifar100(str(python))
    (python / "train").write_bytes(pickle.dumps({b"data": np.zeros((2, 3))}))
    with pytest.raises(UserError, match="train is no batch of CIFAR-100"):
        cifar100(str(python))


def test_a_pickle_runs_nothing(python: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "touched",)

    (python / "train").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match=r"is no part of CIFAR-100"):
        cifar100(str(python))
    assert not (tmp_path / "touched").exists()


@pytest.mark.slow
@pytest.mark.data
def test_the_real_one(data_dir: Path, tmp_path: Path) -> None:
    """60,000 images, unpacked if need be, and the sizes of the collage (GSP, Fig. 3b)."""
    folder = data_dir / "cifar-100"
    if (folder / "unpack.py").exists():
        subprocess.run([sys.executable, folder / "unpack.py", tmp_path], check=True)
        folder = tmp_path
    elif not folder.exists():
        pytest.skip(f"no CIFAR-100 in {data_dir}")
    records = cifar_collage(str(folder))
    assert (len(records.train_rows), len(records.query_rows)) == (28_800, 19_200)
    assert set(np.bincount(records.labels)) == {1800, 1200}
    assert not set(BACKGROUNDS) & {name.split("/")[0] for name in records.class_names}

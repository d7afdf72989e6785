"""The image cache: the same bits as decoding anew, filled once by whoever comes first, and never half."""

import errno
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from PIL import Image

from dml.data.cache import build_cache
from dml.data.folder import folder
from dml.data.glyphs import glyphs
from dml.data.records import Records
from dml.data.transforms import Transform
from dml.errors import UserError
from dml.training.build import build as build_run
from tests.components import transform as configured

TRANSFORMS = {
    "stretch": configured("plain", "test", 16),
    "jitter": configured("plain", "train", 16),
    "centre_crop": configured("shorter_crop", "test", 16, (20, 16)),
    "pad_centre_crop": configured("pad_crop", "test", 16, (20, 16)),
    "resized_crop": configured("resized_crop", "train", 16, (20, 16)),
    "multires_crop": configured("multires_crop", "train", 16),
    "strong": configured("strong", "train", 16, (20, 16)),
}


def stretch(size: int) -> Transform:
    return configured("plain", "test", size)


def photographs(root: Path, classes: int = 4, images: int = 6, side: int = 40) -> Path:
    rng = np.random.default_rng(0)
    for c in range(classes):
        (root / f"class {c}").mkdir(parents=True)
        for i in range(images):
            pixels = rng.integers(0, 256, (side + 3 * i, side + 5 * c, 3), np.uint8)
            Image.fromarray(pixels).save(root / f"class {c}" / f"{i}.jpg")
    return root


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return folder(str(photographs(tmp_path / "photographs")))


def seeded(transform: Transform, picture: Image.Image) -> torch.Tensor:
    torch.manual_seed(0)
    return transform.pixels(picture)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_same_bits(records: Records, tmp_path: Path, name: str) -> None:
    transform, rows = TRANSFORMS[name], np.array([3, 17, 0, 22, 9])
    cache = build_cache(records, rows, transform, "", tmp_path / "cache")
    for row in rows.tolist():
        assert torch.equal(
            seeded(transform, cache.image(row)), seeded(transform, transform.prepared(records.image(row)))
        )


def test_a_second_start_opens_nothing(records: Records, tmp_path: Path) -> None:
    rows, transform = np.arange(24), stretch(16)
    first = build_cache(records, rows, transform, "", tmp_path / "cache")
    closed = Records(**{**records.__dict__, "open_image": lambda row: 1 / 0})
    second = build_cache(closed, rows, transform, "", tmp_path / "cache")
    assert all(first.image(row) == second.image(row) for row in range(24))


@pytest.mark.parametrize("change", ["settings", "transform", "rows", "a file"])
def test_other_pictures_have_another_cache(records: Records, tmp_path: Path, change: str) -> None:
    cache_dir = tmp_path / "cache"
    build_cache(records, np.arange(24), stretch(16), "crop: none", cache_dir)
    if change == "a file":
        path = Path(records.paths[5])
        Image.new("RGB", (40, 40), (9, 9, 9)).save(path)
        os.utime(path, ns=(1, 1))
        records = folder(str(path.parents[1]))
    again = build_cache(
        records,
        np.arange(23 if change == "rows" else 24),
        stretch(17 if change == "transform" else 16),
        "crop: box" if change == "settings" else "crop: none",
        cache_dir,
    )
    assert len(list(cache_dir.glob("images-*/places.npy"))) == 2
    if change == "a file":
        assert again.image(5).getpixel((3, 3)) == (9, 9, 9)


def test_what_is_left_half_is_finished(records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a torn entry in the journal and pixels that no entry names."""
    monkeypatch.setattr("dml.data.cache.CHUNK", 5)
    rows, transform, opened = np.arange(24), stretch(16), []

    def stops(row: int) -> Image.Image:
        opened.append(row)
        if row == 13:
            raise KeyboardInterrupt
        return records.open_image(row)

    with pytest.raises(KeyboardInterrupt):
        build_cache(Records(**{**records.__dict__, "open_image": stops}), rows, transform, "", tmp_path / "cache")
    (cache,) = (tmp_path / "cache").glob("images-*")
    assert not (cache / "places.npy").exists()
    for name, more in (("journal", b"torn"), ("pixels", b"x" * 1000)):
        with (cache / name).open("ab") as file:
            file.write(more)
    opened.clear()

    def counts(row: int) -> Image.Image:
        opened.append(row)
        return records.open_image(row)

    whole = build_cache(Records(**{**records.__dict__, "open_image": counts}), rows, transform, "", tmp_path / "cache")
    assert sorted(opened) == list(range(10, 24))
    for row in range(24):
        assert np.array_equal(whole.image(row), transform.prepared(records.image(row)))
    assert {path.name for path in cache.iterdir()} - {"lock"} == {"pixels", "places.npy"}


def fill_slowly(root: Path, cache_dir: Path, log: Path) -> None:
    """Says in `log` what it opens; at the end the sum of all pixels, in `log.sum`."""
    records = folder(str(root))

    def slow(row: int) -> Image.Image:
        time.sleep(0.03)
        with log.open("a") as file:
            file.write(f"{row}\n")
        return records.open_image(row)

    found = build_cache(Records(**{**records.__dict__, "open_image": slow}), np.arange(24), stretch(16), "", cache_dir)
    log.with_suffix(".sum").write_text(str(sum(int(np.asarray(found.image(row)).sum()) for row in range(24))))


@pytest.mark.slow
def test_two_processes_at_once_and_one_killed(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes: the first is killed while it fills, of the next two one fills and the other waits."""
    monkeypatch.setattr("dml.data.cache.CHUNK", 4)
    context = multiprocessing.get_context("fork")

    def start(name: str) -> BaseProcess:
        process = context.Process(
            target=fill_slowly, args=(tmp_path / "photographs", tmp_path / "cache", tmp_path / name)
        )
        process.start()
        return process

    killed = start("first")
    deadline = time.monotonic() + 60
    while not ((tmp_path / "first").exists() and len((tmp_path / "first").read_text().split()) >= 8):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.kill()
    killed.join()
    both = [start(f"log{i}") for i in range(2)]
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    expected = sum(int(np.asarray(stretch(16).prepared(records.image(row))).sum()) for row in range(24))
    assert [(tmp_path / f"log{i}.sum").read_text() for i in range(2)] == [str(expected)] * 2
    opened = [path.read_text().split() for i in range(2) if (path := tmp_path / f"log{i}").exists()]
    assert len(opened) == 1  # the other one opened no image
    assert len(opened[0]) == len(set(opened[0])) < 24


@pytest.mark.parametrize("tail", [bytes(48), b"torn"])
def test_a_journal_with_a_wrong_end(records: Records, tmp_path: Path, tail: bytes) -> None:
    """As a power cut leaves it."""
    rows, transform = np.arange(24), stretch(16)
    build_cache(records, rows, transform, "", tmp_path)
    (cache,) = tmp_path.glob("images-*")
    places = np.load(cache / "places.npy")
    (cache / "places.npy").unlink()
    (cache / "journal").write_bytes(places[:10].tobytes() + tail)
    whole = build_cache(records, rows, transform, "", tmp_path)
    for row in range(24):
        assert np.array_equal(whole.image(row), transform.prepared(records.image(row)))


def test_a_file_that_cannot_be_read(records: Records, tmp_path: Path) -> None:
    Path(records.paths[7]).write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"the image .*1/1\.jpg cannot be read"):
        build_cache(records, np.arange(24), stretch(16), "", tmp_path / "cache")


def test_images_without_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"need no cache: set dataset\.cache=none"):
        build_cache(glyphs(classes=4, images_per_class=2), np.arange(8), stretch(16), "", tmp_path)


def test_no_folder_for_it(records: Records, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written or read \(Not a directory\): .*paths\.cache_dir"):
        build_cache(records, np.arange(24), stretch(16), "", tmp_path / "file" / "cache")


NOT_AN_ARRAY = b"PK\3\4 no zip"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("pixels", lambda content: content[:100]),
        ("pixels", lambda content: b""),
        ("places.npy", lambda content: b""),
        ("places.npy", lambda content: content[:150]),
        ("places.npy", lambda content: NOT_AN_ARRAY),
        ("places.npy", lambda content: content[:-8] + b"\xff" * 8),  # a height and a width
        ("places.npy", lambda content: content[:-28] + content[-56:-28] + content[-28:]),
    ],
)
def test_a_damaged_one_is_made_again(
    records: Records, tmp_path: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    rows, transform = np.arange(24), stretch(16)
    mapped = build_cache(records, rows, transform, "", tmp_path)
    (cache,) = tmp_path.glob("images-*")
    whole = (cache / name).read_bytes()
    other = cache / "other"
    other.write_bytes(damage(whole))
    os.replace(other, cache / name)
    again = build_cache(records, rows, transform, "", tmp_path)
    for row in range(24):
        assert np.array_equal(again.image(row), transform.prepared(records.image(row)))
        assert again.image(row) == mapped.image(row)
    assert {path.name for path in cache.iterdir()} - {"lock"} == {"pixels", "places.npy"}


def test_one_that_may_not_be_read_is_left_alone(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_cache(records, np.arange(24), stretch(16), "", tmp_path)
    (cache,) = tmp_path.glob("images-*")

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("dml.data.cache.np.memmap", forbidden)
    with pytest.raises(UserError, match=r"cannot be written or read \(Permission denied\)"):
        build_cache(records, np.arange(24), stretch(16), "", tmp_path)
    assert (cache / "pixels").exists()


@pytest.mark.parametrize("lost", ["all", "half"])
def test_a_journal_of_lost_pixels(records: Records, tmp_path: Path, lost: str) -> None:
    """They are decoded again, rather than black."""
    rows, transform = np.arange(24), stretch(16)
    build_cache(records, rows, transform, "", tmp_path)
    (cache,) = tmp_path.glob("images-*")
    (cache / "journal").write_bytes(np.sort(np.load(cache / "places.npy"), order="offset").tobytes())
    (cache / "places.npy").unlink()
    if lost == "all":
        (cache / "pixels").unlink()
    else:
        os.truncate(cache / "pixels", (cache / "pixels").stat().st_size // 2)
    whole = build_cache(records, rows, transform, "", tmp_path)
    for row in range(24):
        assert np.array_equal(whole.image(row), transform.prepared(records.image(row)))


def test_other_decoding_has_another_cache(records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_cache(records, np.arange(24), stretch(16), "", tmp_path)
    monkeypatch.setattr("dml.data.cache.VERSION", 99)
    build_cache(records, np.arange(24), stretch(16), "", tmp_path)
    assert len(list(tmp_path.glob("images-*"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["shorter_crop", "multires_crop"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_sees_the_same_batches(
    configure: Callable[..., DictConfig], tmp_path: Path, transform: str, workers: int
) -> None:
    photographs(tmp_path / "data")
    options = ["dataset=folder", f"dataset.root={tmp_path / 'data'}", "backbone=small", "method=baseline"]
    options += [f"transform={transform}", "image_size=32", "sampler.batch_size=8", f"trainer.num_workers={workers}"]
    batches = []
    for cache in ("none", "disk", "memory", "device"):
        data = build_run(configure(*options, f"dataset.cache={cache}")).data
        train = iter(data.train_dataloader())
        batches.append([next(train), *data.eval_dataloader(data.eval_rows)])
        del train
    for plain, *cached in zip(*batches, strict=True):
        for other in cached:
            assert all(torch.equal(plain[name], other[name]) for name in ("image", "label", "index"))
    assert len(list((tmp_path / "cache").glob("images-*"))) == 1 + (transform == "multires_crop")  # of all words


def test_an_unknown_kind(configure: Callable[..., DictConfig]) -> None:
    with pytest.raises(UserError, match=r"dataset\.cache=ram has to be 'none', .* 'device' or 'features'"):
        build_run(configure("dataset.classes=24", "dataset.images_per_class=4", "dataset.cache=ram"))

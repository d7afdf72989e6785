"""The image cache: the same bits, shared by workers, never in the way."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from dml.data.cache import ImageCache
from dml.data.datamodule import DataModule
from dml.data.glyphs import glyphs
from dml.data.records import Records
from dml.data.samplers import MPerClass
from dml.data.transforms import Transform, centre_crop, jitter, pad_centre_crop, stretch
from dml.errors import UserError

RECORDS = glyphs(classes=10, images_per_class=5, size=20)


def data(folder: Path, transform: Transform, workers: int, opened: list[int], limit: float = 1e9) -> DataModule:
    def open_image(row: int):
        opened.append(row)
        return RECORDS.open_image(row)

    records = Records(RECORDS.name, RECORDS.paths, RECORDS.labels, RECORDS.roles, RECORDS.class_names, open_image)
    rows = records.train_rows
    return DataModule(
        records,
        rows,
        records.query_rows,
        None,
        MPerClass(records.labels[rows], batch_size=8, seed=0, m=2),
        jitter(16),
        transform,
        seed=0,
        num_workers=workers,
        eval_batch_size=7,
        cache=ImageCache(folder / "cache", torch.Size([3, 16, 16]), limit),
    )


def images(module: DataModule, rows: np.ndarray) -> torch.Tensor:
    return torch.cat([batch["image"] for batch in module.eval_dataloader(rows)])


@pytest.mark.parametrize(
    "transform", [stretch(16), centre_crop(16, sides=[20, 16]), pad_centre_crop(16, sides=[20, 16])]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_pass_has_the_same_bits_and_opens_nothing(tmp_path: Path, transform: Transform, workers: int) -> None:
    opened: list[int] = []
    module = data(tmp_path, transform, workers, opened)
    rows = np.array([3, 40, 17, 8, 25, 31, 0, 49, 48])
    expected = torch.stack([transform(RECORDS.open_image(int(row))) for row in rows])
    first = images(module, rows)
    # Opening fails from here on, in workers too.
    module.records = Records(**{**module.records.__dict__, "open_image": lambda row: 1 / 0})
    assert torch.equal(first, expected)
    assert torch.equal(images(module, rows), expected)
    with pytest.raises(Exception, match=r"cannot be read"):
        images(module, np.array([1]))  # not seen yet: opened
    assert list((tmp_path / "cache").iterdir()) == []  # the file has no name


def test_other_values_than_bytes_are_not_kept(tmp_path: Path) -> None:
    opened: list[int] = []
    odd = v2.Compose([stretch(16), lambda image: image * 0.999])
    module = data(tmp_path, odd, 0, opened)
    first, second = (images(module, np.array([4, 5])) for _ in range(2))
    assert torch.equal(first, second)
    assert opened == [4, 5, 4, 5]


def test_beyond_the_limit_images_are_made_anew(tmp_path: Path) -> None:
    opened: list[int] = []
    module = data(tmp_path, stretch(16), 0, opened, limit=3 * 16 * 16 + 1)
    images(module, np.array([4, 5]))
    opened.clear()
    images(module, np.array([4, 5]))
    assert opened == [5]


def test_a_full_disk_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ImageCache(tmp_path, torch.Size([3, 2, 2]), 1e6)
    cache.reserve(np.arange(5))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    cache.put(0, torch.ones(3, 2, 2))
    assert cache.get(0) is None


def test_a_record_cut_short_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag is written last: a worker killed before has left nothing that counts."""
    cache = ImageCache(tmp_path, torch.Size([3, 2, 2]), 1e6)
    cache.reserve(np.arange(5))
    pwrite, written = os.pwrite, []

    def killed(descriptor: int, content: bytes, offset: int) -> int:
        written.append(offset)
        if len(written) == 2:
            raise OSError
        return pwrite(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", killed)
    cache.put(3, torch.ones(3, 2, 2))
    assert cache.get(3) is None
    assert cache.get(4) is None  # beyond the end of the file
    assert cache.get(9) is None  # not reserved
    monkeypatch.setattr(os, "pwrite", pwrite)
    cache.put(3, torch.ones(3, 2, 2))
    assert torch.equal(cache.get(3), torch.ones(3, 2, 2))  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/cache cannot be written \(Not a directory\): .* trainer\.image_cache=0"):
        ImageCache(tmp_path / "file" / "cache", torch.Size([3, 2, 2]), 1e6)

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from torch import Tensor

from dml.data.cache import ImageCache
from dml.data.datamodule import DataModule
from dml.data.glyphs import glyphs
from dml.data.records import Records
from dml.data.samplers import MPerClass
from dml.data.transforms import Transform
from dml.errors import UserError
from tests.components import transform

RECORDS = glyphs(classes=10, images_per_class=5, size=16)
TRAIN_ROWS = RECORDS.train_rows[5:]  # classes 1..4: training labels must still be 0..3


def giving(result: Callable[[Image.Image], torch.Tensor]) -> Transform:
    transform = Transform()
    transform.pixels = result
    return transform


def module(
    workers: int = 0, records: Records = RECORDS, train_rows: np.ndarray = TRAIN_ROWS, **more: Any
) -> DataModule:
    options: dict[str, Any] = {
        "train_transform": transform("plain", "train", 16),
        "test_transform": transform("plain", "test", 16),
        "gallery_rows": None,
    } | more
    sampler = MPerClass(records.labels[train_rows], batch_size=8, seed=3, m=2)
    return DataModule(
        records,
        train_rows,
        records.query_rows,
        sampler=sampler,
        seed=3,
        num_workers=workers,
        eval_batch_size=7,
        **options,
    )


def attach(data: DataModule, rank: int = 0, world_size: int = 1, step: int = 0) -> DataModule:
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    ranks = {"global_rank": rank, "world_size": world_size}
    data.trainer = SimpleNamespace(**ranks, strategy=strategy, global_step=step, max_steps=100)
    return data


def train_batches(data: DataModule, steps: int) -> list[dict[str, Tensor]]:
    return list(islice(iter(data.train_dataloader()), steps))


def assert_same(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys() == {"image", "label", "index"}
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_training_batches_hold_the_rows_and_contiguous_labels() -> None:
    data = module()
    assert (data.train_classes, data.train_images) == (4, 20)
    assert data.sizes == {
        "data/train/images": 20,
        "data/train/classes": 4,
        "data/test/images": 25,
        "data/test/classes": 5,
    }
    for batch in train_batches(data, 6):
        assert batch["image"].shape == (8, 3, 16, 16)
        assert batch["image"].dtype == torch.float32
        assert batch["label"].dtype == batch["index"].dtype == torch.int64
        assert (batch["label"] + 1).tolist() == RECORDS.labels[batch["index"]].tolist()
        assert set(batch["index"].tolist()) <= set(TRAIN_ROWS.tolist())


def test_evaluation_goes_through_queries_then_gallery_in_order() -> None:
    data = module(gallery_rows=np.array([30, 2]))
    batches = list(data.eval_dataloader(data.eval_rows))
    assert [len(b["index"]) for b in batches] == [7, 7, 7, 6]
    assert torch.cat([b["index"] for b in batches]).tolist() == [*range(25, 50), 30, 2]
    assert batches[0]["label"].tolist() == RECORDS.labels[25:32].tolist()
    assert torch.equal(batches[0]["image"][3], transform("plain", "test", 16)(RECORDS.open_image(28)))
    assert [b["index"].tolist() for b in data.eval_dataloader(np.array([9, 1]))] == [[9, 1]]


def test_workers_change_nothing() -> None:
    alone, helped = module(0), module(2)
    assert_same(train_batches(alone, 5), train_batches(helped, 5))
    assert_same(list(alone.eval_dataloader(alone.eval_rows)), list(helped.eval_dataloader(helped.eval_rows)))


def test_two_ranks_share_what_one_sees() -> None:
    whole = train_batches(module(), 4)
    halves = [train_batches(attach(module(), rank, 2), 4) for rank in range(2)]
    assert_same(whole, [{key: torch.cat([a[key], b[key]]) for key in a} for a, b in zip(*halves, strict=True)])
    parts = [
        torch.cat([b["index"] for b in attach(module(), rank, 2).eval_dataloader(np.arange(25, 50))])
        for rank in range(2)
    ]
    assert len(torch.cat(parts)) == 25  # no padding
    assert sorted(torch.cat(parts).tolist()) == list(range(25, 50))


def test_a_resume_goes_on_with_the_same_pixels() -> None:
    assert_same(train_batches(module(), 7)[3:], train_batches(attach(module(), step=3), 4))


def test_augmentation_differs_between_steps_and_places_and_leaves_the_generator_alone() -> None:
    data = module(train_transform=giving(lambda image: torch.rand(1)))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    draws = torch.cat([b["image"].flatten() for b in train_batches(data, 10)])
    # A loader's iterator draws its base seed from the global generator: one number, whatever the transforms draw.
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(after, torch.get_rng_state())
    assert len(set(draws.tolist())) == 80


def test_a_worker_uses_one_thread() -> None:
    threads = giving(lambda image: torch.tensor(float(torch.get_num_threads())))
    batch = next(iter(module(1, test_transform=threads).eval_dataloader(np.arange(25, 32))))
    assert set(batch["image"].tolist()) == {1}


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_one_sentence_from_a_worker_too(workers: int) -> None:
    def broken(row: int) -> Image.Image:
        if row == 26:
            raise OSError("image file is truncated")
        return RECORDS.open_image(row)

    records = Records("some", RECORDS.paths, RECORDS.labels, RECORDS.roles, RECORDS.class_names, broken)
    with pytest.raises(UserError) as caught:
        list(module(workers, records).eval_dataloader(np.arange(25, 50)))
    expected = f"the image {RECORDS.paths[26]} cannot be read (image file is truncated): repair it, or remove it and"
    assert str(caught.value) == f"{expected} start again"


class Witness(pl.LightningModule):
    """Writes down what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[list[int], float]] = []

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        self.seen.append((batch["index"].tolist(), float(batch["image"].sum())))
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:You passed in a `val_dataloader`",
)
def test_a_resumed_fit_sees_what_an_uninterrupted_one_sees(tmp_path: Path) -> None:
    def fit(steps: int, resume: Path | None = None) -> tuple[Witness, pl.Trainer]:
        witness = Witness()
        trainer = pl.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            limit_val_batches=0,
            default_root_dir=tmp_path,
        )
        trainer.fit(witness, datamodule=module(), ckpt_path=resume, weights_only=True if resume else None)
        return witness, trainer

    whole, _ = fit(7)
    first, trainer = fit(4)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    second, _ = fit(7, tmp_path / "last.ckpt")
    assert first.seen + second.seen == whole.seen
    assert len(second.seen) == 3


def test_workers_are_the_devices_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    data = module(workers="auto")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(24)))
    assert data.num_workers == 16
    data.trainer = SimpleNamespace(num_devices=4)
    assert data.num_workers == 6
    data.trainer = SimpleNamespace(num_devices=48)
    assert data.num_workers == 1
    assert module(workers=0).num_workers == 0


def test_a_cpu_with_a_cache_loads_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(4)))
    data = module(workers="auto")
    data.train_cache = cast(ImageCache, object())
    assert data.num_workers == 0
    data.trainer = SimpleNamespace(num_devices=2, strategy=SimpleNamespace(root_device=torch.device("cuda")))
    assert data.num_workers == 2

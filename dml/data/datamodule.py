"""Batches for training and evaluation: `{"image": [B,3,H,W], "label": [B], "index": [B]}`.

`index` is the row of each image in the records. Training labels are renumbered to 0..C_train-1, as proxies need them;
evaluation keeps the labels of the records.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from dml.configuration.composition import elsewhere
from dml.data.cache import ImageCache
from dml.data.features import FeatureStore, KeptFeatures, build_store
from dml.data.fingerprint import difference, fingerprint
from dml.data.loading import Copies, EvalSet, Item, Loader, Stream, TrainSet
from dml.data.on_device import OnDevice, check_fit, on_device
from dml.data.records import Records, renumbered
from dml.data.samplers import Sampler
from dml.data.transforms import Transform, scaled
from dml.errors import UserError
from dml.models.backbones.stem import Stem
from dml.models.stored import Stored
from dml.process import cores_each, leave_to_the_parent, runs_at_once

MOST_WORKERS = 16  # more of them only wait for one another and for the disk


class DataModule(LightningDataModule):
    """Serves the training and evaluation batches of one split of a dataset.

    The number of workers, the number of ranks and a resume change no training batch: the sampler and the augmentation
    depend on (seed, step, place in the global batch) alone. A training loader starts at the trainer's global step and
    never ends.

    Args:
        records: the dataset.
        train_rows: rows `[N]` to train on; the sampler's positions are indices into them.
        query_rows, gallery_rows: rows to evaluate on; without a gallery the queries are the gallery.
        sampler: made for the labels of `train_rows`.
        train_transform, test_transform: RGB image -> `[3,H,W]`.
        seed: of the augmentation.
        num_workers: processes for each loader; 0 loads in the main process. `auto` takes at most 16, and this device's
            share of the cores (divided again if several runs share the machine); none on a CPU with a cache, where
            workers would cost the training's threads more than they give (experiments/bench/training.py).
        eval_batch_size: images that are embedded at a time.
        features: which outputs of the network's frozen stages to keep; `store_features` has to be called then.
        on_device: copy the cached pictures to the training device and cut batches out of them there: all pictures, or
            only the training pictures if no more fit.

    Attributes:
        kept_rows: rows, ascending, of which caches keep a training image: `train_rows` and the data set's, so that
            folds share a cache.
        train_cache, test_cache: the results of the transforms' first step; None, as at the start: that step is done
            each time.
        batch_rows: `[b]`, rows of the records in the current training batch, on the host: reading them from the batch
            would wait for the device.

    Raises:
        UserError: (on iteration) an image cannot be read; the message names it, also from a worker process.
    """

    batch_rows: np.ndarray

    def __init__(
        self,
        records: Records,
        train_rows: np.ndarray,
        query_rows: np.ndarray,
        gallery_rows: np.ndarray | None,
        sampler: Sampler,
        train_transform: Transform,
        test_transform: Transform,
        *,
        seed: int,
        num_workers: int | Literal["auto"],
        eval_batch_size: int,
        on_device: bool = False,
        features: KeptFeatures | None = None,
    ) -> None:
        super().__init__()
        assert len(sampler.labels) == len(train_rows)
        self.records, self.sampler = records, sampler
        self.train_transform, self.test_transform, self._seed = train_transform, test_transform, seed
        self.train_rows, self.query_rows, self.gallery_rows = train_rows, query_rows, gallery_rows
        self.kept_rows = np.union1d(records.train_rows, train_rows)
        self._workers, self.eval_batch_size = num_workers, eval_batch_size
        self.train_cache: ImageCache | None = None
        self.test_cache: ImageCache | None = None
        self._on_device = on_device
        self._held: tuple[OnDevice | None, OnDevice | None] | None = None
        self.features = features
        self._stored: tuple[FeatureStore | None, FeatureStore | None] = (None, None)  # of training and of evaluation
        classes, self._labels = renumbered(records.labels[train_rows])
        self.train_classes = len(classes)
        self._fingerprint = fingerprint(records)

    @property
    def eval_rows(self) -> np.ndarray:
        """Query rows, then gallery rows."""
        return self.query_rows if self.gallery_rows is None else np.concatenate([self.query_rows, self.gallery_rows])

    @property
    def num_workers(self) -> int:
        if self._workers != "auto":
            return self._workers
        if self._stored[0] is not None:  # stored features leave nothing for workers to do
            return 0
        if self.train_cache is not None and self.device.type == "cpu":
            return 0
        devices = self.trainer.num_devices if self.trainer else 1
        return max(1, min(cores_each(devices) // runs_at_once(), MOST_WORKERS))

    @property
    def train_images(self) -> int:
        return len(self.train_rows)

    @property
    def sizes(self) -> dict[str, int]:
        """`data/<part>/images` and `data/<part>/classes` for train and test, and for a separate query and gallery."""
        parts = {"train": self.train_rows, "test": self.eval_rows}
        if self.gallery_rows is not None:
            parts |= {"query": self.query_rows, "gallery": self.gallery_rows}
        found = {}
        for part, rows in parts.items():
            found[f"data/{part}/images"] = len(rows)
            found[f"data/{part}/classes"] = len(np.unique(self.records.labels[rows]))
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"data": self._fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises UserError if the checkpoint was trained on other data."""
        changed = difference(state_dict["data"], self._fingerprint)
        if changed:
            raise UserError(
                f"the data set {self.records.name} is not the one that this run was trained on so far ({changed}): "
                f"restore the former data, or start a new training in another folder {elsewhere()}"
            )

    def train_dataloader(self) -> DataLoader[Item]:
        """Returns an endless loader of batches of `sampler.batch_size` / ranks, from the trainer's global step on.

        Its length is the number of steps of the whole run, as Lightning counts it.

        Raises:
            UserError: the trainer has no `max_steps`.
        """
        if self.trainer and self.trainer.max_steps < 0:
            raise UserError("Batches are drawn without end: give the trainer max_steps, not epochs alone.")
        self.sampler.rank, self.sampler.world_size = self._ranks()
        repeats = getattr(self.trainer, "overfit_batches", 0)  # repeats the first batches, after a resume too
        held, stored = self._on_the_device()[0], self._stored[0]
        of = (self.records, self.train_transform, self.train_cache, self.device, held, stored)
        return Stream(
            TrainSet(self.train_rows, self._labels, self._seed, *of),
            self.sampler,
            start=self.trainer.global_step if self.trainer and not repeats else 0,
            steps=self.trainer.max_steps if self.trainer else 0,
            persistent_workers=self.num_workers > 0,
            **self._carried_out(self.num_workers),
        )

    @property
    def device(self) -> torch.device:
        """The training device; the CPU without a trainer."""
        return self.trainer.strategy.root_device if self.trainer else torch.device("cpu")

    def check_room(self, device: torch.device) -> None:
        """Raises UserError if the images have to be held on the device and the training images do not fit."""
        if self._on_device:
            assert self.train_cache is not None
            check_fit(self.train_cache, self.train_rows, device)

    def _on_the_device(self) -> tuple[OnDevice | None, OnDevice | None]:
        """Returns the training and evaluation images on the device, copied at the first call.

        None: the images are read from their files or the cache instead.
        """
        if self._held is None and self._on_device:
            assert self.train_cache is not None
            assert self.test_cache is not None
            self._held = on_device(self.train_cache, self.test_cache, self.train_rows, len(self.records), self.device)
        return self._held or (None, None)

    def store_features(
        self, stem: Stem, device: torch.device, precision: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Computes the features of all images, and of augmented copies of the training images, at the frozen stages.

        From then on batches hold these stored features in place of images.

        Args:
            stem: the frozen stages, on the device.
            precision: opens the context in which training and evaluation compute.

        Raises:
            UserError: as `build_store`.
        """
        kept = self.features
        assert kept is not None

        def stored(transform: Transform, said: str, rows: np.ndarray, copies: int) -> FeatureStore:
            images = Copies(rows, copies, self.records, transform, None, torch.device("cpu"), None, None)

            def computed(seen: Tensor) -> Stored:
                with precision():
                    return stem.features(seen.to(device))

            def batches(start: int) -> Iterator[Stored]:
                carried_out = self._carried_out(self.num_workers) | {"pin_memory": False}
                places = range(start, len(rows) * copies)
                for batch in Loader(images, sampler=places, batch_size=self.eval_batch_size, **carried_out):
                    yield computed(batch["image"])

            def blank() -> Stored:
                return computed(scaled(images[0]["image"])[None])

            settings = f"{said}\n{stem.fingerprint()}\n{copies}"
            return build_store(self.records, rows, copies, settings, blank, batches, kept.cache_dir)

        whole = stored(self.test_transform, kept.test, np.arange(len(self.records)), 1)
        own = whole
        if kept.train != kept.test or kept.copies is not None:
            own = stored(self.train_transform, kept.train, self.kept_rows, kept.copies or 1)
        self._stored = own, whole

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Keeps the rows of a training batch before it leaves the host; Lightning calls this."""
        if self.trainer is not None and self.trainer.training:
            self.batch_rows = batch["index"].numpy()
        return batch

    def test_images(self, rows: np.ndarray) -> Tensor:
        """Returns some images as evaluation sees them, `[N,3,H,W]` in 0..1."""
        return torch.stack([self.test_transform(self.records.image(int(row))) for row in rows])

    def val_dataloader(self) -> DataLoader[Item]:
        """Returns a loader of queries, then gallery, for `trainer.validate`; Lightning divides it among the ranks."""
        return self._loader(self.eval_rows, batch_size=self.eval_batch_size)

    def predict_dataloader(self) -> DataLoader[Item]:
        """Returns a loader of queries, then gallery, for `trainer.predict`; Lightning divides it among the ranks."""
        return self._loader(self.eval_rows, batch_size=self.eval_batch_size)

    def eval_dataloader(self, rows: Sequence[int] | np.ndarray) -> DataLoader[Item]:
        """Returns a loader of any rows as evaluation sees them.

        The batches are the same for any number of ranks, and the ranks take them in turn. A rank without a batch
        repeats the first one; the caller that joins the ranks' batches has to drop repeated rows.
        """
        rank, world_size = self._ranks()
        places = range(len(rows))  # slices of a range are ranges: a few bytes a batch
        batches = [places[at : at + self.eval_batch_size] for at in places[:: self.eval_batch_size]]
        return self._loader(rows, batch_sampler=batches[rank::world_size] or batches[:1])

    def _loader(self, rows: Sequence[int] | np.ndarray, **batches: Any) -> DataLoader[Item]:
        held, stored = self._on_the_device()[1], self._stored[1]
        of = (self.records, self.test_transform, self.test_cache, self.device, held, stored)
        # Images on the device are ready before workers would have started.
        carried_out = self._carried_out(0 if held is not None else self.num_workers)
        return Loader(EvalSet(np.asarray(rows), *of), **batches, **carried_out)

    def _carried_out(self, workers: int) -> dict[str, Any]:
        pinned = self.device.type == "cuda"
        return {"num_workers": workers, "worker_init_fn": leave_to_the_parent, "pin_memory": pinned}

    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

"""Datasets of items (images, views or stored features), and the loaders that make batches of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from dml.data.cache import ImageCache
from dml.data.features import FeatureStore
from dml.data.on_device import OnDevice
from dml.data.records import Records
from dml.data.samplers import Place, Sampler
from dml.data.transforms import Transform, scaled
from dml.process import held

Item = dict[str, Any]


@contextmanager
def _drawing(*entropy: int) -> Iterator[None]:
    """Makes torch draw from a generator seeded by these numbers."""
    seed = np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would also reseed the GPU, which fork_rng(devices=[]) does not restore.
        torch.default_generator.manual_seed(int(seed >> 1))
        yield


class Images(Dataset[Item]):
    """A dataset whose items are made in workers and whose batches are finished on the training device.

    An item holds uint8 pixels, the numbers of a view, or the place of stored features. `finish` makes images or
    features of a batch, in the process that trains.

    Args:
        records: the dataset.
        transform: RGB image -> `[3,S,S]`.
        cache: prepared pictures; None: images are opened and prepared each time.
        device: of the finished batches.
        held: the pictures on the device, of all rows asked for; None: they are opened, or taken from the cache.
        stored: stored features of all rows asked for, used in place of images; None: images are used.
    """

    def __init__(
        self,
        records: Records,
        transform: Transform,
        cache: ImageCache | None,
        device: torch.device,
        held: OnDevice | None,
        stored: FeatureStore | None,
    ) -> None:
        self.records, self.transform, self.cache = records, transform, cache
        self.device, self.held, self.stored = device, held, stored

    def item(self, row: int, label: int) -> Item:
        if self.stored is not None:
            copy = int(torch.randint(self.stored.copies, ())) if self.stored.copies > 1 else 0
            return {"at": self.stored.place(row, copy), "label": label, "index": row}
        if self.held is not None:
            return {"view": self.held.numbers(row, self.transform.moves), "label": label, "index": row}
        cache = self.cache
        picture = self.transform.prepared(self.records.image(row)) if cache is None else cache.image(row)
        return {"image": self.transform.pixels(picture), "label": label, "index": row}

    def finish(self, batch: Any) -> Any:
        """Makes `image [B,3,H,W]` float32 on the device of a batch of pixels or views, without waiting for the device.

        With stored features, `image` holds those.
        """
        if self.stored is not None:
            features = self.stored.batch(batch["at"], self.device)
            return {"image": features, "label": batch["label"], "index": batch["index"]}
        if self.held is not None:
            images = self.held.images(batch.pop("view"))
        else:
            images = batch["image"].to(self.device, non_blocking=True)
        return {"image": scaled(images), "label": batch["label"], "index": batch["index"]}


class TrainSet(Images):
    """Training items by (position, step, place), augmented from a generator seeded by (seed, step, place)."""

    def __init__(self, rows: np.ndarray, labels: np.ndarray, seed: int, *of: Any) -> None:
        super().__init__(*of)
        self.rows, self.labels, self.seed = rows, labels, seed

    def __getitem__(self, at: Place) -> Item:
        position, step, place = at
        with _drawing(self.seed, step, place):
            return self.item(int(self.rows[position]), int(self.labels[position]))


class Copies(Images):
    """Items by place: k copies of each row, one row after another, augmented from a generator seeded by (row, copy)."""

    def __init__(self, rows: np.ndarray, copies: int, *of: Any) -> None:
        super().__init__(*of)
        self.rows, self.copies = rows, copies

    def __getitem__(self, at: int) -> Item:
        row, copy = int(self.rows[at // self.copies]), at % self.copies
        with _drawing(row, copy):
            return self.item(row, 0)


class EvalSet(Images):
    """Evaluation items by their place in `rows`."""

    def __init__(self, rows: np.ndarray, *of: Any) -> None:
        super().__init__(*of)
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> Item:
        row = int(self.rows[at])
        return self.item(row, int(self.records.labels[row]))


class Loader(DataLoader[Item]):
    """A loader whose workers leave a scheduler's signals to the main process, from the moment they start.

    Workers hand on uint8 pixels or views; the main process makes images of them, on its device.
    """

    dataset: Images

    def __iter__(self) -> Any:
        with held():
            batches = super().__iter__()
        return map(self.dataset.finish, batches)


class Stream(Loader):
    """An endless stream of batches. A sampler that ends to be given new clusters is started again from that step.

    The stream has a length, so that Lightning does not fetch a batch ahead of the training step.
    """

    def __init__(self, train_set: TrainSet, sampler: Sampler, start: int, steps: int, **options: Any) -> None:
        super().__init__(train_set, batch_sampler=sampler, **options)
        self._start, self._steps = start, steps

    def __len__(self) -> int:
        return self._steps

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing to store, since a resume starts from the trainer's global step; Lightning asks for this."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: there is no state."""

    def __iter__(self) -> Any:
        assert isinstance(self.batch_sampler, Sampler)
        step = self._start
        while True:
            self.batch_sampler.start_step = step
            for batch in super().__iter__():
                step += 1
                yield batch

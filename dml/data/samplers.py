"""Which images make a training batch, as a pure function of (seed, step).

N training images, B = `batch_size` (the global batch, of all ranks together). A sampler is an endless stream: it starts
at `start_step` with exactly the batch that an uninterrupted run would draw there, and every rank takes its slice of the
same global batch. No state needs to be stored, and the number of ranks or a resume changes no batch.
"""

from collections.abc import Iterator
from itertools import count, islice

import numpy as np

from dml.errors import UserError

Place = tuple[int, int, int]  # position in the training rows, step, place in the global batch


class Sampler:
    """What all samplers share; `epoch` is theirs.

    `rank`, `world_size` and `start_step` are set by the data module before iteration.

    Raises:
        UserError: on iteration, if the batch does not divide by the number of ranks.
    """

    def __init__(self, labels: np.ndarray, batch_size: int, seed: int) -> None:
        self.labels = labels
        self.batch_size = batch_size
        self.seed = seed
        self.rank, self.world_size, self.start_step = 0, 1, 0

    @property
    def steps_per_epoch(self) -> int:
        return max(1, len(self.labels) // self.batch_size)

    def epoch(self, epoch: int) -> Iterator[np.ndarray]:
        """The `steps_per_epoch` global batches of an epoch, positions `[B]` int64."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[list[Place]]:
        """This rank's part of every batch from `start_step` on, without end."""
        if self.batch_size % self.world_size:
            raise UserError(
                f"sampler.batch_size={self.batch_size} does not divide by the {self.world_size} devices: "
                "it is the batch of all of them together"
            )
        return self._stream()

    def _stream(self) -> Iterator[list[Place]]:
        step = self.start_step
        share = self.batch_size // self.world_size
        places = range(self.rank * share, (self.rank + 1) * share)
        for epoch in count(step // self.steps_per_epoch):
            for batch in islice(self.epoch(epoch), step % self.steps_per_epoch, None):
                yield [(int(batch[place]), step, place) for place in places]
                step += 1


class MPerClass(Sampler):
    """B / m classes at random without replacement, and m images of each; the batch lists class after class.

    A class of at least m images gives m different ones. A smaller class gives all its images once before any comes
    again, so that m is reached with as little repetition as possible. Batches of an epoch are drawn independently of
    one another, as is usual; an epoch is N // B batches.

    pytorch-metric-learning's `MPerClassSampler` is not used: it draws from NumPy's global generator, anew in every
    process, and cannot be set to a step, so ranks would not share a global batch and a resume would repeat images.

    Args:
        labels: `[N]` classes of the training images, any integers.
        batch_size: B, of all ranks together.
        seed: with the epoch, fixes every draw.
        m: images of a class.

    Raises:
        UserError: B does not divide by m, or there are fewer than B / m classes.
    """

    def __init__(self, labels: np.ndarray, batch_size: int, seed: int, m: int = 4) -> None:
        super().__init__(labels, batch_size, seed)
        if batch_size % m:
            raise UserError(f"sampler.batch_size={batch_size} does not divide by sampler.m={m}")
        classes, sizes = np.unique(labels, return_counts=True)
        if len(classes) < batch_size // m:
            raise UserError(
                f"a batch of {batch_size} with {m} images a class needs {batch_size // m} classes and there are "
                f"{len(classes)}: set sampler.batch_size to at most {len(classes) * m}"
            )
        self.m = m
        self.members = np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])

    def epoch(self, epoch: int) -> Iterator[np.ndarray]:
        rng = np.random.default_rng([self.seed, epoch])
        for _ in range(self.steps_per_epoch):
            classes = rng.choice(len(self.members), self.batch_size // self.m, replace=False)
            # resize cuts a longer permutation to m and repeats a shorter one
            yield np.concatenate([np.resize(rng.permutation(self.members[c]), self.m) for c in classes])


class Pairs(Sampler):
    """ABE's batches (section 4): B / 2 images at random, a positive partner for the first half of them and a negative
    one for the second.

    Image i and image i + B / 2 of a batch are a pair. The first images of the pairs are drawn without replacement, the
    partners uniformly among the other images of the same class or among those of all other classes; a partner may
    stand elsewhere in the batch too. Positive pairs come from classes with at least two images. Batches of an epoch
    are drawn independently of one another; an epoch is N // B batches.

    Args:
        labels: `[N]` classes of the training images, any integers.
        batch_size: B, of all ranks together.
        seed: with the epoch, fixes every draw.

    Raises:
        UserError: B does not divide by 4, or there are too few images or classes.
    """

    def __init__(self, labels: np.ndarray, batch_size: int, seed: int) -> None:
        super().__init__(labels, batch_size, seed)
        if batch_size % 4:
            raise UserError(
                f"sampler.batch_size={batch_size} does not divide by 4: half of its pairs are positive, half negative"
            )
        _, self.group, self.size = np.unique(labels, return_inverse=True, return_counts=True)
        self.order = np.argsort(self.group, kind="stable")  # images class after class
        self.start = np.cumsum(self.size) - self.size
        self.place = np.argsort(self.order)  # of an image in that order
        self.paired = np.flatnonzero(self.size[self.group] > 1)
        if len(self.size) < 2 or len(self.paired) < batch_size // 4 or len(labels) < batch_size // 2:
            raise UserError(
                f"pairs for a batch of {batch_size} need two classes, {batch_size // 4} images that are not alone in "
                f"theirs and {batch_size // 2} in all; there are {len(self.size)}, {len(self.paired)} and "
                f"{len(labels)}: choose a smaller sampler.batch_size"
            )

    def epoch(self, epoch: int) -> Iterator[np.ndarray]:
        rng = np.random.default_rng([self.seed, epoch])
        quarter = self.batch_size // 4
        for _ in range(self.steps_per_epoch):
            first = rng.choice(self.paired, quarter, replace=False)
            others = np.setdiff1d(np.arange(len(self.labels)), first, assume_unique=True)
            second = rng.choice(others, quarter, replace=False)
            yield np.concatenate([first, second, self._positives(first, rng), self._negatives(second, rng)])

    def _positives(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        start, size = self.start[self.group[images]], self.size[self.group[images]]
        return self.order[start + (self.place[images] - start + rng.integers(1, size)) % size]

    def _negatives(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        start, size = self.start[self.group[images]], self.size[self.group[images]]
        drawn = rng.integers(0, len(self.labels) - size)
        return self.order[np.where(drawn < start, drawn, drawn + size)]  # steps over the class


class Uniform(Sampler):
    """Every image once an epoch, shuffled; the last partial batch is dropped. Proxy losses use it.

    Args:
        labels: `[N]` classes of the training images; only their number counts.
        batch_size: B, of all ranks together.
        seed: with the epoch, fixes the order.

    Raises:
        UserError: fewer images than a batch.
    """

    def __init__(self, labels: np.ndarray, batch_size: int, seed: int) -> None:
        super().__init__(labels, batch_size, seed)
        if len(labels) < batch_size:
            raise UserError(f"sampler.batch_size={batch_size} is more than the {len(labels)} training images")

    def epoch(self, epoch: int) -> Iterator[np.ndarray]:
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.labels))
        for step in range(self.steps_per_epoch):
            yield order[step * self.batch_size : (step + 1) * self.batch_size]

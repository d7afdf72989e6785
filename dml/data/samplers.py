"""Which images make a training batch, as a pure function of (seed, step), and of the clusters where there are some.

N training images, B = `batch_size` (the global batch, of all ranks together), K clusters. A sampler starts at
`start_step` with exactly the batch that an uninterrupted run would draw there, and every rank takes its slice of the
same global batch. It stores no state, and the number of ranks or a resume changes no batch.
"""

import copy
from collections.abc import Iterator
from itertools import count, islice
from typing import Self

import numpy as np

from dml.configuration.ranges import Size
from dml.errors import UserError

Place = tuple[int, int, int]  # position in the training rows, step, place in the global batch


class Sampler:
    """What all samplers share; `epoch` is theirs.

    `rank`, `world_size` and `start_step` are set by the data module before iteration.

    Raises:
        UserError: on iteration, if the batch does not divide by the number of ranks.
    """

    draws_pairs = False  # image i of a batch and image i + B / 2 are a pair

    def __init__(self, labels: np.ndarray, batch_size: Size, seed: int) -> None:
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

    def within(self, images: np.ndarray) -> Self:
        """The same rule on some of the images alone, and on as few as there are.

        Args:
            images: positions `[n]`, n >= 1; the positions that it draws count along them.

        Raises:
            UserError: a rule that does not work inside clusters.
        """
        raise UserError(
            f"{type(self).__name__} does not draw inside clusters: choose sampler=m_per_class or sampler=uniform."
        )

    def batches(self, start: int) -> Iterator[np.ndarray]:
        """Global batches `[B]` from step `start` on, without end or up to where more has to be known."""
        first, place = divmod(start, self.steps_per_epoch)
        for epoch in count(first):
            yield from islice(self.epoch(epoch), place if epoch == first else 0, None)

    def __iter__(self) -> Iterator[list[Place]]:
        """This rank's part of every batch from `start_step` on."""
        if self.batch_size % self.world_size:
            raise UserError(
                f"sampler.batch_size={self.batch_size} does not divide by the {self.world_size} devices: "
                "it is the batch of all of them together"
            )
        return self._places()

    def _places(self) -> Iterator[list[Place]]:
        share = self.batch_size // self.world_size
        places = range(self.rank * share, (self.rank + 1) * share)
        for step, batch in enumerate(self.batches(self.start_step), self.start_step):
            yield [(int(batch[place]), step, place) for place in places]


class MPerClass(Sampler):
    """B / m classes at random without replacement, and m images of each; the batch lists class after class.

    A class of at least m images gives m different ones. A smaller class gives all its images once before any comes
    again, so that m is reached with as little repetition as possible; `within` a cluster of too few classes, classes
    come again in the same way, with further images of theirs. Batches of an epoch are drawn independently of
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

    def __init__(self, labels: np.ndarray, batch_size: Size, seed: int, m: Size = 4) -> None:
        super().__init__(labels, batch_size, seed)
        if batch_size % m:
            raise UserError(f"sampler.batch_size={batch_size} does not divide by sampler.m={m}")
        self.m = m
        self.classes = _Classes(labels)
        if len(self.classes) < batch_size // m:
            raise UserError(
                f"a batch of {batch_size} with {m} images a class needs {batch_size // m} classes and there are "
                f"{len(self.classes)}: set sampler.batch_size to at most {len(self.classes) * m}"
            )

    def within(self, images: np.ndarray) -> Self:
        part = copy.copy(self)
        part.labels = self.labels[images]
        part.classes = _Classes(part.labels)
        return part

    def epoch(self, epoch: int) -> Iterator[np.ndarray]:
        rng = np.random.default_rng([self.seed, epoch])
        wanted = self.batch_size // self.m
        times, more = divmod(wanted, len(self.classes))  # 0 times but inside a small cluster
        for _ in range(self.steps_per_epoch):
            classes = rng.choice(len(self.classes), min(wanted, len(self.classes)), replace=False)
            counts = [self.m * (times + (i < more)) for i in range(len(classes))]
            # resize cuts a longer permutation and repeats a shorter one
            drawn = [np.resize(rng.permutation(self.classes[c]), n) for c, n in zip(classes, counts, strict=True)]
            yield np.concatenate(drawn)


class _Classes:
    """The positions of each class, the classes in ascending order: two arrays, however many classes there are."""

    def __init__(self, labels: np.ndarray) -> None:
        self._order = np.argsort(labels, kind="stable")  # images class after class
        self._ends = np.cumsum(np.unique(labels, return_counts=True)[1])

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, at: int) -> np.ndarray:
        return self._order[self._ends[at - 1] if at else 0 : self._ends[at]]


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

    draws_pairs = True

    def __init__(self, labels: np.ndarray, batch_size: Size, seed: int) -> None:
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
            # Among all images but those: drawn as if they were numbered without them, then numbered again with them.
            second = rng.choice(len(self.labels) - quarter, quarter, replace=False)
            second += np.searchsorted(np.sort(first) - np.arange(quarter), second, side="right")
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

    `within` a cluster smaller than a batch its images come as often as a batch needs.

    Args:
        labels: `[N]` classes of the training images; only their number counts.
        batch_size: B, of all ranks together.
        seed: with the epoch, fixes the order.

    Raises:
        UserError: fewer images than a batch.
    """

    def __init__(self, labels: np.ndarray, batch_size: Size, seed: int) -> None:
        super().__init__(labels, batch_size, seed)
        if len(labels) < batch_size:
            raise UserError(f"sampler.batch_size={batch_size} is more than the {len(labels)} training images")

    def within(self, images: np.ndarray) -> Self:
        part = copy.copy(self)
        part.labels = self.labels[images]
        return part

    def epoch(self, epoch: int) -> Iterator[np.ndarray]:
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.labels))
        order = np.resize(order, max(len(order), self.batch_size))
        for step in range(self.steps_per_epoch):
            yield order[step * self.batch_size : (step + 1) * self.batch_size]


class Clusters(Sampler):
    """A cluster drawn uniformly, then a batch inside it (DCES, section 3.3); from step `whole_from` on, all images.

    Inside a cluster batches are drawn by the rule of another sampler, as a stream of their own that goes on where the
    cluster is drawn again. Clusters of fewer than two classes have no negatives and are not drawn: the others are,
    uniformly. With one cluster of everything the batches are those of the other sampler.

    Args:
        sampler: the rule.
        period: steps between two calls of `regroup`; iteration ends there until it has been called.
        whole_from: step.
    """

    def __init__(self, sampler: Sampler, period: int, whole_from: int) -> None:
        super().__init__(sampler.labels, sampler.batch_size, sampler.seed)
        self.rule, self.period, self.whole_from = sampler, period, whole_from
        self.clusters: list[tuple[np.ndarray, Sampler]] = []  # those that are drawn

    def regroup(self, learner: np.ndarray) -> None:
        """From now on the clusters are these: the learner `[N]`, 0..K-1, of each image.

        Raises:
            UserError: no cluster has two classes, or a rule that does not work inside clusters.
        """
        members = [np.flatnonzero(learner == k) for k in range(int(learner.max()) + 1)]
        drawn = [images for images in members if len(np.unique(self.labels[images])) > 1]
        if not drawn:
            raise UserError("No cluster holds two classes: lower method.K.")
        self.clusters = [(images, self.rule.within(images)) for images in drawn]

    def batches(self, start: int) -> Iterator[np.ndarray]:
        if start >= self.whole_from:
            return self.rule.batches(start)
        return self._clustered(start)

    def _clustered(self, start: int) -> Iterator[np.ndarray]:
        """To the end of the period."""
        since = start - start % self.period
        length = min(self.period, self.whole_from - since)
        choice = np.random.default_rng([self.seed, since, 1]).integers(len(self.clusters), size=length)
        seen = np.bincount(choice[: start - since], minlength=len(self.clusters))
        # Each cluster's stream starts at the period's first step: no period draws what another has drawn.
        streams = [rule.batches(since + int(n)) for n, (_, rule) in zip(seen, self.clusters, strict=True)]
        for k in choice[start - since :]:
            yield self.clusters[k][0][next(streams[k])]

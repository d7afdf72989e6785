"""Samplers choose the images of each training batch, as a pure function of (seed, step) and of clusters, if any.

N training images, B = `batch_size` (the global batch, of all ranks together), K clusters. A sampler starts at
`start_step` with exactly the batch that an uninterrupted run would draw there, and every rank takes its slice of the
same global batch. A sampler stores no state, and neither the number of ranks nor a resume changes a batch.
"""

import copy
from collections.abc import Iterator
from itertools import count, islice
from typing import Self

import numpy as np

from dml.configuration.ranges import Size
from dml.errors import UserError

Place = tuple[int, int, int]  # position in the training rows, step, place in the global batch


def check_share(batch_size: int, devices: int) -> None:
    """Raises UserError if the devices cannot have equal parts of a batch."""
    if batch_size % devices:
        raise UserError(
            f"sampler.batch_size={batch_size} is not divisible by the {devices} devices: choose a multiple, since it "
            "is the batch of all devices together."
        )


class Sampler:
    """The base class of all samplers, which implement `epoch`.

    The data module sets `rank`, `world_size` and `start_step` before iteration.

    Raises:
        UserError: on iteration, if the batch size is not divisible by the number of ranks.
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
        """Yields the `steps_per_epoch` global batches of an epoch, positions `[B]` int64."""
        raise NotImplementedError(f"{type(self).__name__} has to define epoch()")

    def within(self, images: np.ndarray) -> Self:
        """Returns a sampler with the same rule that draws from some of the images only, however few.

        Args:
            images: positions `[n]`, n >= 1; the new sampler draws positions in this array, 0..n-1.

        Raises:
            UserError: the rule does not work inside clusters.
        """
        raise UserError(
            f"{type(self).__name__} does not draw inside clusters: choose sampler=m_per_class or sampler=uniform."
        )

    def batches(self, start: int) -> Iterator[np.ndarray]:
        """Yields global batches `[B]` from step `start` on, without end or until new clusters are needed."""
        first, place = divmod(start, self.steps_per_epoch)
        for epoch in count(first):
            yield from islice(self.epoch(epoch), place if epoch == first else 0, None)

    def __iter__(self) -> Iterator[list[Place]]:
        """Yields this rank's part of every batch from `start_step` on."""
        check_share(self.batch_size, self.world_size)
        return self._places()

    def _places(self) -> Iterator[list[Place]]:
        share = self.batch_size // self.world_size
        places = range(self.rank * share, (self.rank + 1) * share)
        for step, batch in enumerate(self.batches(self.start_step), self.start_step):
            if len(batch) != self.batch_size:
                raise UserError(
                    f"{type(self).__name__} draws a batch of {len(batch)} images, where sampler.batch_size="
                    f"{self.batch_size}: it has to draw as many."
                )
            yield [(int(batch[place]), step, place) for place in places]


class MPerClass(Sampler):
    """Draws B / m classes at random without replacement, and m images of each; the batch lists class after class.

    A class of at least m images gives m different ones. A smaller class gives all its images once before any is
    repeated. `within` a cluster of too few classes, classes are repeated in the same way, with further images of
    theirs. The batches of an epoch are drawn independently of one another, as is usual; an epoch is N // B batches.

    pytorch-metric-learning's `MPerClassSampler` is not used: it draws from NumPy's global generator, differently in
    every process, and cannot start at a step. Ranks would not share a global batch, and a resume would repeat images.

    Args:
        labels: `[N]` classes of the training images, any integers.
        batch_size: B, of all ranks together.
        seed: with the epoch, fixes every draw.
        m: images per class.

    Raises:
        UserError: B is not divisible by m, or there are fewer than B / m classes.
    """

    def __init__(self, labels: np.ndarray, batch_size: Size, seed: int, m: Size = 4) -> None:
        super().__init__(labels, batch_size, seed)
        if batch_size % m:
            raise UserError(
                f"sampler.batch_size={batch_size} is not divisible by sampler.m={m}: choose a multiple of it"
            )
        self.m = m
        self.classes = _Classes(labels)
        if len(self.classes) < batch_size // m:
            raise UserError(
                f"a batch of {batch_size} with {m} images per class needs {batch_size // m} classes and there are "
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
        times, more = divmod(wanted, len(self.classes))  # times > 0 only inside a small cluster
        for _ in range(self.steps_per_epoch):
            classes = rng.choice(len(self.classes), min(wanted, len(self.classes)), replace=False)
            counts = [self.m * (times + (i < more)) for i in range(len(classes))]
            # resize cuts a longer permutation and repeats a shorter one
            drawn = [np.resize(rng.permutation(self.classes[c]), n) for c, n in zip(classes, counts, strict=True)]
            yield np.concatenate(drawn)


class _Classes:
    """The positions of each class's images, classes ascending; held in two arrays for any number of classes."""

    def __init__(self, labels: np.ndarray) -> None:
        self._order = np.argsort(labels, kind="stable")  # images class after class
        self._ends = np.cumsum(np.unique(labels, return_counts=True)[1])

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, at: int) -> np.ndarray:
        return self._order[self._ends[at - 1] if at else 0 : self._ends[at]]


class Pairs(Sampler):
    """Draws ABE's batches (section 4): B / 4 positive pairs and B / 4 negative pairs.

    Image i and image i + B / 2 of a batch are a pair; the first quarter of the batch begins positive pairs, the second
    quarter negative ones. The first images of all pairs are drawn without replacement. A partner is drawn uniformly
    from the other images of the same class, or from the images of all other classes, and may occur elsewhere in the
    batch too. Positive pairs are of classes with at least two images. The batches of an epoch are drawn independently
    of one another; an epoch is N // B batches.

    Args:
        labels: `[N]` classes of the training images, any integers.
        batch_size: B, of all ranks together.
        seed: with the epoch, fixes every draw.

    Raises:
        UserError: B is not divisible by 4, or there are too few images or classes.
    """

    draws_pairs = True

    def __init__(self, labels: np.ndarray, batch_size: Size, seed: int) -> None:
        super().__init__(labels, batch_size, seed)
        if batch_size % 4:
            raise UserError(
                f"sampler.batch_size={batch_size} is not divisible by 4: choose a multiple of 4, since half of the "
                "pairs are positive and half negative"
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
            # Drawn from all images but `first`: numbers that leave those out, then shifted to count them again.
            second = rng.choice(len(self.labels) - quarter, quarter, replace=False)
            second += np.searchsorted(np.sort(first) - np.arange(quarter), second, side="right")
            yield np.concatenate([first, second, self._positives(first, rng), self._negatives(second, rng)])

    def _positives(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        start, size = self.start[self.group[images]], self.size[self.group[images]]
        return self.order[start + (self.place[images] - start + rng.integers(1, size)) % size]

    def _negatives(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        start, size = self.start[self.group[images]], self.size[self.group[images]]
        drawn = rng.integers(0, len(self.labels) - size)
        return self.order[np.where(drawn < start, drawn, drawn + size)]  # skips the image's own class


class Uniform(Sampler):
    """Draws every image once an epoch, in random order; the last, partial batch is dropped. Proxy losses use it.

    `within` a cluster that is smaller than a batch, images are repeated as often as needed.

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
            raise UserError(
                f"sampler.batch_size={batch_size} is more than the {len(labels)} training images: choose a smaller one"
            )

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
    """Draws a cluster uniformly, then a batch inside it (DCES, section 3.3); from step `whole_from` on, of all images.

    Inside each cluster another sampler's rule draws a stream of batches, which continues whenever the cluster is drawn
    again. An image whose positives are all in other clusters rests until the next clustering, as in the released code;
    a cluster that is left with fewer than two classes has no negatives and is never drawn. With one cluster of all
    images the batches are those of the other sampler.

    Args:
        sampler: the other sampler, whose rule is used.
        period: steps between two calls of `regroup`; iteration ends there until it is called.
        whole_from: step from which batches are drawn from all images.
    """

    def __init__(self, sampler: Sampler, period: int, whole_from: int) -> None:
        super().__init__(sampler.labels, sampler.batch_size, sampler.seed)
        self.rule, self.period, self.whole_from = sampler, period, whole_from
        self.clusters: list[tuple[np.ndarray, Sampler]] = []  # those that are drawn

    def regroup(self, learner: np.ndarray) -> None:
        """Sets the clusters from the learner `[N]`, 0..K-1, of each image.

        Raises:
            UserError: no cluster has two classes of two images, or the rule does not work inside clusters.
        """
        _, of_class, sizes = np.unique(self.labels, return_inverse=True, return_counts=True)
        drawn = []
        for k in range(int(learner.max()) + 1):
            images = np.flatnonzero(learner == k)
            classes = of_class[images]
            images = images[(np.bincount(classes, minlength=len(sizes))[classes] > 1) | (sizes[classes] == 1)]
            if len(np.unique(self.labels[images])) > 1:
                drawn.append(images)
        if not drawn:
            raise UserError("No cluster holds two images of each of two classes: lower method.K.")
        self.clusters = [(images, self.rule.within(images)) for images in drawn]

    @property
    def drawn(self) -> int:
        """The number of images that are drawn; the others rest."""
        return sum(len(images) for images, _ in self.clusters)

    def batches(self, start: int) -> Iterator[np.ndarray]:
        if start >= self.whole_from:
            return self.rule.batches(start)
        return self._clustered(start)

    def _clustered(self, start: int) -> Iterator[np.ndarray]:
        """Yields batches up to the end of the period."""
        since = start - start % self.period
        length = min(self.period, self.whole_from - since)
        choice = np.random.default_rng([self.seed, since, 1]).integers(len(self.clusters), size=length)
        seen = np.bincount(choice[: start - since], minlength=len(self.clusters))
        # Each cluster's stream starts at the period's first step, so that no period repeats the draws of another.
        streams = [rule.batches(since + int(n)) for n, (_, rule) in zip(seen, self.clusters, strict=True)]
        for k in choice[start - since :]:
            yield self.clusters[k][0][next(streams[k])]

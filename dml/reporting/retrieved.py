"""The results of the test images for a report. Each figure is computed once, when it is first used.

Q queries, L learners, C classes of queries, k neighbours.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dml.data.records import Records
from dml.evaluation.evaluator import Embedded
from dml.evaluation.metrics import Ranking
from dml.evaluation.protocol import Conventional
from dml.evaluation.splits import Split
from dml.figures.galleries import Neighbours, neighbours_of

NEIGHBOURS = 8
MOST_LEARNERS = 16  # with more learners, the gallery is not ranked for each alone and for the others without it


@dataclass(frozen=True)
class OfClass:
    """A test class: its name and label, the number of its queries that have a positive, the share of them that is right
    (see `Retrieved.of_a_class`), and the class for which they are most often taken."""

    name: str
    label: int
    queries: int
    recall: float
    taken_for: str


@dataclass(frozen=True)
class Confusion:
    """Two classes that are confused.

    Attributes:
        names: of the two classes.
        count: how many queries of one class have their nearest image in the other.
        share: of the queries of both classes.
        examples: the indices of these queries.
    """

    names: tuple[str, str]
    count: int
    share: float
    examples: tuple[int, ...]


@dataclass(frozen=True)
class Retrieved:
    """The test of the checkpoint that is the result.

    Attributes:
        embedded: test embeddings, on any device.
        records, split, protocol: of the run.
        ranking: of the queries; None: the protocol has no single ranking.
    """

    embedded: Embedded
    records: Records
    split: Split
    protocol: Conventional
    ranking: Ranking | None

    @cached_property
    def queries(self) -> Embedded:
        return self.embedded.take(self.split.query)

    @cached_property
    def gallery(self) -> Embedded | None:
        return None if self.split.gallery is None else self.embedded.take(self.split.gallery)

    @property
    def searched(self) -> Embedded:
        """The images that are searched: the gallery, or the queries themselves."""
        return self.gallery or self.queries

    @property
    def of_classes(self) -> Embedded:
        """The test images whose class some query has; others are distractors, no two of which are of one class."""
        return self.embedded.take(
            self.embedded.rows[torch.isin(self.embedded.labels, self.queries.labels)].cpu().numpy()
        )

    @property
    def learners(self) -> int:
        return self.embedded.embeddings.shape[1]

    @property
    def of_a_class(self) -> str:
        """What the share of a class's queries that is right is called: Recall@1. If the protocol has no single ranking,
        each image is searched for among all others, which is another figure than the protocol's."""
        return "Recall@1" if self.ranking is not None else "nearest of all others is right"

    @cached_property
    def neighbours(self) -> Neighbours:
        """The nearest images of each query."""
        return neighbours_of(self.queries, self.gallery, self.split.cameras, NEIGHBOURS)

    @cached_property
    def labels(self) -> np.ndarray:
        """The labels of the queries, `[Q]` int64."""
        return self.queries.labels.cpu().numpy()

    @cached_property
    def counted(self) -> np.ndarray:
        """Which queries have a positive, `[Q]` bool. Others do not count in the metrics."""
        if self.ranking is not None:
            return self.ranking.positives > 0
        others = np.bincount(self.searched.labels.cpu().numpy(), minlength=self.labels.max() + 1)
        return others[self.labels] > (self.gallery is None)

    @cached_property
    def right(self) -> np.ndarray:
        """Which queries have a nearest image of their own class, `[Q]` bool. If several images are equally near, all
        have to be of that class; without a ranking the first counts."""
        if self.ranking is not None:
            return self.ranking.best_rank == 1
        return self._labels_of(self.neighbours.indices[:, 0]) == self.labels

    def _labels_of(self, places: np.ndarray) -> np.ndarray:
        labels: np.ndarray = self.searched.labels.cpu().numpy()[places]
        return labels

    @cached_property
    def best_of_learners(self) -> np.ndarray | None:
        """The rank of the nearest positive for each learner alone, `[L,Q]` int64. None if there is a single learner,
        more than `MOST_LEARNERS`, or no ranking."""
        if not 1 < self.learners <= MOST_LEARNERS or self.ranking is None:
            return None
        return np.stack([self._ranked([i]) for i in range(self.learners)])

    @cached_property
    def recall_without(self) -> list[float]:
        """Recall@1 of the ensemble without each of its learners in turn; empty if `best_of_learners` is None."""
        if self.best_of_learners is None:
            return []
        others = ([j for j in range(self.learners) if j != i] for i in range(self.learners))
        return [float((self._ranked(chosen)[self.counted] == 1).mean()) for chosen in others]

    def _ranked(self, learners: list[int]) -> np.ndarray:
        """Returns the best ranks `[Q]` for the ensemble of some learners."""
        part = Embedded(self.embedded.embeddings[:, learners], self.embedded.labels, self.embedded.rows)
        ranking = self.protocol.ranking(self.split, part)
        assert ranking is not None
        return ranking.best_rank

    @cached_property
    def classes(self) -> list[OfClass]:
        """The test classes, the one with the lowest share of right queries first."""
        found = []
        first = self._labels_of(self.neighbours.indices[:, 0])
        for label in np.unique(self.labels[self.counted]):
            own = (self.labels == label) & self.counted
            wrong = first[own & (first != label)]
            taken = Counter(wrong.tolist()).most_common(1)
            other = self.records.class_names[taken[0][0]] if taken else ""
            name = self.records.class_names[int(label)]
            found.append(OfClass(name, int(label), int(own.sum()), float(self.right[own].mean()), other))
        return sorted(found, key=lambda one: (one.recall, -one.queries, one.name))

    @cached_property
    def confusions(self) -> list[Confusion]:
        """The pairs of classes that are confused, in either direction, the most frequent pair first."""
        first = self._labels_of(self.neighbours.indices[:, 0])
        wrong = np.flatnonzero((first != self.labels) & self.counted)
        pairs: dict[tuple[int, int], list[int]] = {}
        for place in wrong.tolist():
            a, b = sorted((int(self.labels[place]), int(first[place])))
            pairs.setdefault((a, b), []).append(place)
        sizes = Counter(self.labels[self.counted].tolist())
        found = [
            Confusion(
                (self.records.class_names[a], self.records.class_names[b]),
                len(places),
                len(places) / max(1, sizes[a] + sizes[b]),
                tuple(places),
            )
            for (a, b), places in pairs.items()
        ]
        return sorted(found, key=lambda one: (-one.count, -one.share, one.names))

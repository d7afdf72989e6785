"""What became of the test images, as a report asks for it: each figure is computed once, whoever shows it.

Q queries, L learners, C classes of queries, k neighbours.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dml.data.records import Records
from dml.evaluation.evaluator import Embedded
from dml.evaluation.metrics import Ranking
from dml.evaluation.protocol import Conventional
from dml.evaluation.splits import Split
from dml.figures.galleries import Neighbours, neighbours_of

NEIGHBOURS = 8
MOST_LEARNERS = 16  # of which each is ranked alone and left out once


@dataclass(frozen=True)
class OfClass:
    """A test class: its queries that have a positive, Recall@1 over them, and what is taken for it or it for what."""

    name: str
    label: int
    queries: int
    recall: float
    taken_for: str


@dataclass(frozen=True)
class Confusion:
    """Two classes: how often the nearest image of a query of one is of the other, and two such queries' places."""

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
        ranking: what became of each query; None where the protocol has no such ranking.
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
        """What queries are sought in: the gallery, or the queries themselves."""
        return self.gallery or self.queries

    @property
    def learners(self) -> int:
        return self.embedded.embeddings.shape[1]

    @cached_property
    def neighbours(self) -> Neighbours:
        """The nearest images of each query."""
        return neighbours_of(self.queries, self.gallery, self.split.cameras, NEIGHBOURS)

    @cached_property
    def labels(self) -> np.ndarray:
        """`[Q]` int64."""
        return self.queries.labels.cpu().numpy()

    @cached_property
    def counted(self) -> np.ndarray:
        """`[Q]` bool: queries with a positive, which count in the metrics."""
        if self.ranking is not None:
            return self.ranking.positives > 0
        return np.ones(len(self.labels), dtype=bool)

    @cached_property
    def right(self) -> np.ndarray:
        """`[Q]` bool: the nearest image is of the query's class; of equally near ones, none may be of another."""
        if self.ranking is not None:
            return self.ranking.best_rank == 1
        return self._labels_of(self.neighbours.indices[:, 0]) == self.labels

    def _labels_of(self, places: np.ndarray) -> np.ndarray:
        labels: np.ndarray = self.searched.labels.cpu().numpy()[places]
        return labels

    @cached_property
    def best_of_learners(self) -> np.ndarray | None:
        """`[L,Q]` int64, the rank of the nearest positive for each learner alone; None: a single one, or no ranking."""
        if not 1 < self.learners <= MOST_LEARNERS or self.ranking is None:
            return None
        return np.stack([self._ranked([i]) for i in range(self.learners)])

    @cached_property
    def recall_without(self) -> list[float]:
        """Recall@1 of the ensemble without each of its learners; nothing where `best_of_learners` is None."""
        if self.best_of_learners is None:
            return []
        others = ([j for j in range(self.learners) if j != i] for i in range(self.learners))
        return [float((self._ranked(chosen)[self.counted] == 1).mean()) for chosen in others]

    def _ranked(self, learners: list[int]) -> np.ndarray:
        """Best ranks `[Q]` for the ensemble of some learners."""
        part = Embedded(self.embedded.embeddings[:, learners], self.embedded.labels, self.embedded.rows)
        ranking = self.protocol.ranking(self.split, part)
        assert ranking is not None
        return ranking.best_rank

    @cached_property
    def classes(self) -> list[OfClass]:
        """The worst first."""
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
        """Pairs of classes, both directions together, the most frequent first."""
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
                tuple(places[:2]),
            )
            for (a, b), places in pairs.items()
        ]
        return sorted(found, key=lambda one: (-one.count, -one.share, one.names))

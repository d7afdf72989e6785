"""Who trains, who is searched for, who is searched, and which checkpoint is reported."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from dml.configuration.ranges import Count, Few, Seed, Size, WholeNumber
from dml.configuration.trainings import Axis
from dml.data.records import Records
from dml.errors import UserError
from dml.evaluation.evaluator import Embedded, Retrieval, score
from dml.evaluation.inputs import as_ks
from dml.evaluation.layout import Layout
from dml.evaluation.metric import HEADLINE, declared, of_queries
from dml.evaluation.metrics import Ranking, cluster, evaluate, rank
from dml.evaluation.reranking import Reranker
from dml.evaluation.splits import EvaluatedPart, Split


class Conventional:
    """The protocol of most papers: train on the training classes, retrieve among the test classes.

    Args:
        select: which checkpoint is the result. `last`: the last one; the best one on the test set, which is what most
            papers report (ABE section 5: "for the iteration with highest Recall@1"), stands beside it and is labelled
            so. `best_test`: that one, labelled so, the last one beside it. `val_classes`: the best one on the last
            quarter of the training classes, which are then not trained on.
        criterion: the metric by which checkpoints are compared, one of `criteria`.
        patience: training stops after so many evaluations on validation classes without a better one; None: never.
        ks: the K of Recall@K.
        every: how often to evaluate while training.
        unit: of `every`: steps, or epochs of the sampler.
        batch_size: of the evaluation, per device.
        clustering: report NMI and F1 at the end (k-means with one cluster a test class).
        slices: cut the embedding of a method with a single learner into as many slices and score those too, which is
            what DCES compares its learners with (Table 7, Fig. 10).
        seen: Recall@1 among the training images too, at every evaluation (DeML Fig. 5): it costs a pass over them.

    Raises:
        UserError: a K, an interval, patience or a number of slices that is no positive number.
    """

    axes: tuple[Axis, ...] = ()  # numbers that tell its trainings apart: a single one
    of_test = tuple(of_queries())  # metrics of its test beside Recall@K
    keeps_embeddings = False  # of the test images, in the run's folder
    one_gallery = True  # for all queries, as re-ranking takes it
    rerank: Reranker | None = None  # what the last evaluation ranks the test by too

    def __init__(
        self,
        *,
        select: Literal["last", "best_test", "val_classes"] = "last",
        criterion: str = HEADLINE,
        patience: Count | None = None,
        ks: Sequence[Count] = (1, 2, 4, 8),
        every: Count = 100,
        unit: Literal["steps", "epochs"] = "steps",
        batch_size: Size = 128,
        clustering: bool = True,
        slices: Few = 1,
        seen: bool = False,
    ) -> None:
        ks = as_ks(ks, "protocol.ks")
        if 1 not in ks:
            raise UserError(f"protocol.ks={list(ks)} has to hold 1: every run is told by its Recall@1.")
        self.select, self.criterion, self.patience = select, criterion, patience
        self.ks = ks
        self.every, self.unit = every, unit
        self.batch_size, self.clustering, self.slices, self.seen = batch_size, clustering, slices, seen

    def split(self, records: Records) -> Split:
        """Who trains, is sought and is searched, checked.

        Raises:
            UserError: a data set that the protocol cannot part, a split that `Split.check` refuses, or a criterion that
                is no metric of what it monitors.
        """
        split = self.parted(records)
        split.check(records)
        if self.criterion not in (known := self.criteria(split.monitor)):
            raise UserError(
                f"protocol.criterion={self.criterion} is no metric of this protocol on its {split.monitor} classes: "
                f"choose one of {', '.join(known)}."
            )
        return split

    def parted(self, records: Records) -> Split:
        """Training classes to train on; test classes as query and gallery, or apart where the data set has them so.

        Raises:
            UserError: too few training classes to hold some out.
        """
        whole = Split(records.train_rows, records.query_rows, records.gallery_rows)
        if self.select == "val_classes":
            classes = np.unique(records.labels[whole.train])
            return _held_out(whole, records, classes[len(classes) - max(1, len(classes) // 4) :])
        return whole

    def criteria(self, part: EvaluatedPart) -> list[str]:
        """The metrics of a part of the split by which checkpoints can be compared."""
        names = [*(f"recall@{k}" for k in self.ks), *(self.of_test if part == "test" else of_queries())]
        return [name for name in names if (known := declared(name)) and known.higher_is_better is not None]

    def interval(self, steps_per_epoch: int) -> int:
        """Steps between two evaluations."""
        return self.every * (steps_per_epoch if self.unit == "epochs" else 1)

    def score(
        self,
        embedded: Embedded,
        split: Split,
        part: EvaluatedPart,
        *,
        groups: Mapping[str, slice] | None = None,
        final: bool,
    ) -> dict[str, float]:
        """Metrics of one checkpoint on one part of the split, computed by all ranks together.

        On the test images those of `dml.evaluation.evaluator.score`, with clustering for the final ones alone; on the
        validation images those of the concatenation, as `validation/...`.
        """
        if part == "validation":
            whole = embedded.embeddings.flatten(1)
            metrics = evaluate(whole, embedded.labels, ks=self.ks, shared=True, clustering=False)
            return {f"validation/{name}": value for name, value in metrics.items()}
        queries = embedded.take(split.query)
        gallery = None if split.gallery is None else embedded.take(split.gallery)
        retrieval = self.retrieval(split, queries, gallery)
        metrics = score(queries, gallery, retrieval, slices=self.slices, groups=groups, final=final)
        if self.clustering and final:
            found = cluster(queries.embeddings.flatten(1), queries.labels)
            metrics |= {f"test/{name}": value for name, value in found.items()}
        return metrics

    def retrieval(self, split: Split, queries: Embedded, gallery: Embedded | None) -> Retrieval:
        """How one embedding of these images is scored."""
        layout = Layout.of(queries.labels, None if gallery is None else gallery.labels)

        def measure(query_points: Tensor, gallery_points: Tensor | None) -> dict[str, float]:
            return evaluate(query_points, layout, gallery=gallery_points, ks=self.ks, shared=True, clustering=False)

        return measure

    def ranking(self, split: Split, embedded: Embedded) -> Ranking | None:
        """What became of each query, in the order of `split.query`; None where the protocol has no such ranking."""
        queries = embedded.take(split.query)
        gallery = None if split.gallery is None else embedded.take(split.gallery)
        return rank(
            queries.embeddings.flatten(1),
            queries.labels,
            gallery=None if gallery is None else gallery.embeddings.flatten(1),
            gallery_labels=None if gallery is None else gallery.labels,
        )


def _held_out(whole: Split, records: Records, classes: np.ndarray) -> Split:
    """The split with some of its training classes for validation. Raises UserError where none is left to train on."""
    held = np.isin(records.labels[whole.train], classes)
    if not len(classes) or held.all():
        number = len(np.unique(records.labels[whole.train]))
        raise UserError(f"{records.name} has {number} training classes: too few to hold some of them out.")
    return replace(whole, train=whole.train[~held], validation=whole.train[held])


class Tuning(Conventional):
    """For searches: the last quarter of the training classes stands in the place of the test, which is not looked at.

    What `select=val_classes` chooses by is all that there is, so that a trial costs no evaluation of the test. Its
    `test/...` are of classes that a training of the benchmark learns from: they compare trials, and are no results.
    Options are those of `Conventional`.
    """

    def parted(self, records: Records) -> Split:
        """Raises UserError for too few training classes, and for `select=val_classes`, of which the test is all."""
        if self.select == "val_classes":
            raise UserError("protocol.select=val_classes: held-out classes are its test: leave it out.")
        classes = np.unique(records.labels[records.train_rows])
        whole = Split(records.train_rows, records.query_rows, None)
        held = _held_out(whole, records, classes[len(classes) - max(1, len(classes) // 4) :])
        assert held.validation is not None
        return Split(held.train, held.validation, None)


class RandomClassSplit(Conventional):
    """Train on a random half of the training classes, choose the checkpoint on the other half (DIABLO section 4.2).

    The checkpoint that is the best on the validation classes is the one that is tested; no test image takes
    part in the choice. Mean and standard deviation over several such splits are the result.

    Args:
        split: number of the split, from 0; it is a function of `seed` and this number, so that every method and
            every training seed meets the same splits.
        splits: how many there are.
        seed: of the splits.
        options: see `Conventional`.

    Raises:
        UserError: a split that is not there.
    """

    axes = (Axis("split", "splits"),)

    def __init__(self, *, split: WholeNumber, splits: Few = 10, seed: Seed = 0, **options: Any) -> None:
        super().__init__(**options)
        if self.select != "last":
            raise UserError("protocol.select cannot be chosen here: a random half of the training classes selects.")
        self.axes[0].check(split, splits)
        self.number, self.seed = split, seed

    def parted(self, records: Records) -> Split:
        """Half of the training classes, rounded up, to train on; the test stays the data set's.

        Raises:
            UserError: fewer than two training classes.
        """
        labels = records.labels[records.train_rows]
        classes = np.unique(labels)
        if len(classes) < 2:
            raise UserError(f"{records.name} has {len(classes)} training class: half of them cannot be held out.")
        order = np.random.default_rng([self.seed, self.number]).permutation(classes)
        return _held_out(super().parted(records), records, order[(len(classes) + 1) // 2 :])


class MLRC(Conventional):
    """The protocol of the metric-learning reality check (Musgrave et al. 2020, section 3.1; GSP section 1.6.2).

    The training classes, which are half of all, are cut in their order into folds. One training has one fold for
    validation and the others to train on; the best checkpoint on the fold's classes is tested. What the trainings of
    all folds come to together, `dml.aggregate` says.

    Args:
        fold: number of the one for validation, from 0.
        repeat: number of the repetition, from 0: it trains with the seed `seed + repeat`.
        folds, repeats: how many there are.
        arithmetic: where n classes are cut into k folds. `linspace`: at `floor(i n / k)`, so that every class is
            validated once. `mlrc`, as the reality check's own code: folds of `floor(n / k)`, so that the last `n mod k`
            classes are always trained on (Cars196: two of 98).
        criterion, patience: see `Conventional`.
        options: see `Conventional`.

    Raises:
        UserError: a fold or a repetition that is not there, or an unknown arithmetic.
    """

    axes = (Axis("repeat", "repeats", reseeds=True), Axis("fold", "folds", collected=True, shapes=True))
    keeps_embeddings = True

    def __init__(
        self,
        *,
        fold: WholeNumber,
        repeat: WholeNumber,
        folds: Annotated[int, Field(ge=2, le=1024)] = 4,
        repeats: Few = 3,
        arithmetic: Literal["linspace", "mlrc"] = "linspace",
        criterion: str = "map@r",
        **options: Any,
    ) -> None:
        super().__init__(criterion=criterion, **options)
        for axis, number, count in zip(self.axes, (repeat, fold), (repeats, folds), strict=True):
            axis.check(number, count)
        if self.select != "last":
            raise UserError("protocol.select cannot be chosen with protocol=mlrc: it selects on a fold.")
        self.fold, self.folds, self.arithmetic = fold, folds, arithmetic

    def parted(self, records: Records) -> Split:
        """Raises UserError for fewer training classes than folds."""
        whole = super().parted(records)
        classes = np.unique(records.labels[whole.train])
        if len(classes) < self.folds:
            raise UserError(f"{records.name} has {len(classes)} training classes: fewer than {self.folds} folds.")
        if self.arithmetic == "linspace":
            ends = [i * len(classes) // self.folds for i in range(self.folds + 1)]
        else:
            ends = [i * (len(classes) // self.folds) for i in range(self.folds + 1)]
        return _held_out(whole, records, classes[ends[self.fold] : ends[self.fold + 1]])

"""Protocols: which images train, which are queries and gallery, and which checkpoint is the result."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from dml.configuration.ranges import Count, Few, Seed, Size, WholeNumber
from dml.configuration.trainings import Axis
from dml.data.records import Records
from dml.distributed import from_all_ranks, is_first
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
        select: which checkpoint is the result. `last`: the last one. The checkpoint that is best on the test set is
            reported beside it and labelled so; it is what most papers report (ABE section 5: "for the iteration with
            highest Recall@1"). `best_test`: the checkpoint that is best on the test set, labelled so, with the last one
            beside it. `val_classes`: the one that is best on the last quarter of the training classes, which are then
            not trained on.
        criterion: the metric by which checkpoints are compared, one of `criteria`.
        patience: training stops after so many evaluations on validation classes without a new best; None: never.
        ks: the K of Recall@K.
        every: how often to evaluate while training, in `unit`.
        unit: `steps`, or `epochs` of the sampler.
        batch_size: of the evaluation, per device.
        clustering: report NMI and F1 at the end (k-means with one cluster for each test class; of queries and gallery
            together where the data set has both, as in DCES's released code).
        slices: for a method with a single learner, cut its embedding into this many slices and score those too. DCES
            compares its learners with such slices (Table 7, Fig. 10).
        seen: also report Recall@1 among the training images at every evaluation (DeML Fig. 5). It costs a pass over
            them.

    Raises:
        UserError: `ks` lacks 1, names a K twice, or holds something other than whole numbers from 1.
    """

    axes: tuple[Axis, ...] = ()  # numbers that tell its trainings apart, such as a fold; none: it has one training
    of_test = tuple(of_queries())  # metrics of its test beside Recall@K
    keeps_embeddings = False  # whether the run's folder keeps those of the test images
    one_gallery = True  # whether all queries share one gallery, which re-ranking needs
    rerank: Reranker | None = None  # a second ranking of the test in the last evaluation

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
            raise UserError(f"protocol.ks={list(ks)} has to hold 1, since every run reports Recall@1: add 1.")
        self.select, self.criterion, self.patience = select, criterion, patience
        self.ks = ks
        self.every, self.unit = every, unit
        self.batch_size, self.clustering, self.slices, self.seen = batch_size, clustering, slices, seen

    def __init_subclass__(cls) -> None:
        """Raises TypeError if a protocol scores embeddings in a way of its own, and ranks them in another."""
        super().__init_subclass__()
        if "retrieval" in vars(cls) and "ranking" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} overrides retrieval but not ranking, so that figures and the ranks of queries would "
                "not be of the same search: override both."
            )

    def split(self, records: Records) -> Split:
        """Splits the records into training, queries, gallery and validation, and checks the split.

        Raises:
            UserError: the protocol cannot split this data set, `Split.check` refuses the split, or `criterion` is not
                a metric of the part that is monitored.
        """
        split = self.parted(records)
        if not isinstance(split, Split):
            raise UserError(f"parted() of {type(self).__name__} returns {type(split).__name__}: return a Split.")
        split.check(records)
        if self.criterion not in (known := self.criteria(split.monitor)):
            raise UserError(
                f"protocol.criterion={self.criterion} is no metric of this protocol on its {split.monitor} classes: "
                f"choose one of {', '.join(known)}."
            )
        return split

    def parted(self, records: Records) -> Split:
        """Splits the records, without checks; protocols override it.

        Here all training classes train, but for those that `select=val_classes` holds out. The test images are queries
        and gallery at once, or one of the two where the data set says which.

        Raises:
            UserError: there are too few training classes to hold some out.
        """
        whole = Split(records.train_rows, records.query_rows, records.gallery_rows)
        if self.select == "val_classes":
            classes = np.unique(records.labels[whole.train])
            return _held_out(whole, records, classes[len(classes) - max(1, len(classes) // 4) :])
        return whole

    def criteria(self, part: EvaluatedPart) -> list[str]:
        """Returns the metrics of a part of the split by which checkpoints can be compared."""
        names = [*(f"recall@{k}" for k in self.ks), *(self.of_test if part == "test" else of_queries())]
        return [name for name in names if (known := declared(name)) and known.higher_is_better is not None]

    def interval(self, steps_per_epoch: int) -> int:
        """Returns the number of steps between two evaluations."""
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
        """Computes the metrics of one checkpoint on one part of the split. All ranks share the work.

        Args:
            embedded: the images of that part, `[N,L,d]`.
            split: of the run.
            part: `test` gives the metrics of `dml.evaluation.evaluator.score`; `validation` gives those of the
                concatenated embedding, named `validation/...`.
            groups: see `dml.evaluation.evaluator.score`.
            final: also compute what only the last evaluation of a run gives, such as clustering.
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
            seen = [queries] if gallery is None else [queries, gallery]
            points, labels = torch.cat([of.embeddings for of in seen]), torch.cat([of.labels for of in seen])
            kept = torch.isin(labels, queries.labels)  # distractors are no class
            # On one rank alone, since k-means takes all cores, or a GPU's memory.
            found = from_all_ranks(cluster(points[kept].flatten(1), labels[kept]) if is_first() else {})[0]
            metrics |= {f"test/{name}": value for name, value in found.items()}
        return metrics

    def retrieval(self, split: Split, queries: Embedded, gallery: Embedded | None) -> Retrieval:
        """Returns the function that scores one embedding of these images, such as a single learner's."""
        layout = Layout.of(queries.labels, None if gallery is None else gallery.labels)

        def measure(query_points: Tensor, gallery_points: Tensor | None) -> dict[str, float]:
            return evaluate(query_points, layout, gallery=gallery_points, ks=self.ks, shared=True, clustering=False)

        return measure

    def ranking(self, split: Split, embedded: Embedded) -> Ranking | None:
        """Ranks the gallery for each query, in ascending order of rows; None if the protocol has no single ranking of a
        query."""
        queries = embedded.take(split.query)
        gallery = None if split.gallery is None else embedded.take(split.gallery)
        return rank(
            queries.embeddings.flatten(1),
            queries.labels,
            gallery=None if gallery is None else gallery.embeddings.flatten(1),
            gallery_labels=None if gallery is None else gallery.labels,
        )


def _held_out(whole: Split, records: Records, classes: np.ndarray) -> Split:
    """Returns the split with some training classes moved to validation. Raises UserError if none is left to train."""
    held = np.isin(records.labels[whole.train], classes)
    if not len(classes) or held.all():
        number = len(np.unique(records.labels[whole.train]))
        raise UserError(
            f"{records.name} has {number} training classes: too few to hold some of them out; choose another data set "
            "or protocol."
        )
    return replace(whole, train=whole.train[~held], validation=whole.train[held])


class Tuning(Conventional):
    """A protocol for hyper-parameter searches: the last quarter of the training classes takes the place of the test.

    These are the classes that `select=val_classes` holds out. The real test classes are never evaluated, so a trial
    costs no time for them. The metrics `test/...` are of classes that a normal training learns from: use them to
    compare trials, not as results. Options are those of `Conventional`.
    """

    def parted(self, records: Records) -> Split:
        """Holds out the last quarter of the training classes as the test.

        Raises:
            UserError: there are too few training classes, or `select=val_classes`, whose classes are already the test.
        """
        if self.select == "val_classes":
            raise UserError(
                "protocol.select=val_classes cannot be used with protocol=tuning, where the held-out classes are "
                "already the test: leave it out."
            )
        classes = np.unique(records.labels[records.train_rows])
        whole = Split(records.train_rows, records.query_rows, None)
        held = _held_out(whole, records, classes[len(classes) - max(1, len(classes) // 4) :])
        assert held.validation is not None
        return Split(held.train, held.validation, None)


class RandomClassSplit(Conventional):
    """Train on a random half of the training classes, choose the checkpoint on the other half (DIABLO section 4.2).

    The checkpoint that is best on the validation classes is tested; no test image takes part in the choice. The
    result is the mean and standard deviation over several such splits.

    Args:
        split: number of the split, from 0. Its classes depend on `protocol.seed` and this number alone, so every method
            and every seed of a run meets the same splits. Each training has a seed of its own.
        splits: number of splits.
        seed: of the splits.
        options: those of `Conventional`, without `select`.

    Raises:
        UserError: `split` is not below `splits`, or `select` is given.
    """

    axes = (Axis("split", "splits"),)

    def __init__(self, *, split: WholeNumber, splits: Few = 10, seed: Seed = 0, **options: Any) -> None:
        super().__init__(**options)
        if self.select != "last":
            raise UserError(
                "protocol.select cannot be chosen here, since the checkpoint is selected on a random half of the "
                "training classes: leave it out."
            )
        self.axes[0].check(split, splits)
        self.number, self.seed = split, seed

    def parted(self, records: Records) -> Split:
        """Trains on a random half of the training classes, rounded up, and validates on the others.

        Raises:
            UserError: there are fewer than two training classes.
        """
        labels = records.labels[records.train_rows]
        classes = np.unique(labels)
        if len(classes) < 2:
            raise UserError(f"{records.name} has {len(classes)} training class: half of them cannot be held out.")
        order = np.random.default_rng([self.seed, self.number]).permutation(classes)
        return _held_out(super().parted(records), records, order[(len(classes) + 1) // 2 :])


class MLRC(Conventional):
    """The protocol of the metric-learning reality check (Musgrave et al. 2020, section 3.1; GSP section 1.6.2).

    The training classes, which are half of all, are cut in their order into folds. One training validates on one fold
    and trains on the others; the checkpoint that is best on the fold's classes is tested. `dml.aggregate` computes the
    result of the trainings of all folds together. Each training has a seed of its own, so each starts from other random
    layers, as in the reality check's own code.

    Args:
        fold: number of the fold for validation, from 0.
        repeat: number of the repetition, from 0.
        folds, repeats: how many folds and repetitions there are.
        arithmetic: where n classes are cut into k folds. `linspace`: at `floor(i n / k)`, so every class is validated
            once. `mlrc`, as in the reality check's own code: each fold has `floor(n / k)` classes, so the last
            `n mod k` classes are always trained on (Cars196: two of 98).
        criterion: see `Conventional`.
        options: those of `Conventional`, without `select`.

    Raises:
        UserError: `fold` or `repeat` is not below its number, or `select` is given.
    """

    axes = (Axis("repeat", "repeats", repeats=True), Axis("fold", "folds", collected=True, shapes=True))
    keeps_embeddings = True

    def __init__(
        self,
        *,
        fold: WholeNumber,
        repeat: WholeNumber,
        folds: Annotated[int, Field(ge=2, le=1024)] = 4,
        repeats: Few = 1,
        arithmetic: Literal["linspace", "mlrc"] = "linspace",
        criterion: str = "map@r",
        **options: Any,
    ) -> None:
        super().__init__(criterion=criterion, **options)
        for axis, number, count in zip(self.axes, (repeat, fold), (repeats, folds), strict=True):
            axis.check(number, count)
        if self.select != "last":
            raise UserError(
                "protocol.select cannot be chosen with protocol=mlrc, since the checkpoint is selected on a fold: "
                "leave it out."
            )
        self.fold, self.folds, self.arithmetic = fold, folds, arithmetic

    def parted(self, records: Records) -> Split:
        """Validates on the classes of one fold and trains on the others.

        Raises:
            UserError: there are fewer training classes than folds.
        """
        whole = super().parted(records)
        classes = np.unique(records.labels[whole.train])
        if len(classes) < self.folds:
            raise UserError(
                f"{records.name} has {len(classes)} training classes: fewer than {self.folds} folds; lower "
                "protocol.folds."
            )
        if self.arithmetic == "linspace":
            ends = [i * len(classes) // self.folds for i in range(self.folds + 1)]
        else:
            ends = [i * (len(classes) // self.folds) for i in range(self.folds + 1)]
        return _held_out(whole, records, classes[ends[self.fold] : ends[self.fold + 1]])

"""What each class scored in the trainings of an experiment: experiments/PAPER/NAME.classes.jsonl, beside the record.

A bootstrap over classes needs no more of a training than the sum over each class's queries. With these at hand, rows
are compared that were trained on different machines or months apart, and the runs may be gone.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dml.analysis.comparison import in_places, over_sums, places_of
from dml.analysis.sides import runs_of
from dml.errors import UserError
from dml.evaluation.interval import Spread, spread_of_pairs, spread_over_seeds
from dml.evaluation.metric import METRICS
from dml.files import alone, write_atomically
from dml.papers.catalogue import read_experiment
from dml.papers.experiment import Experiment, Training
from dml.papers.measured import Compared
from dml.runs.scores import Queries, read_queries

DIGITS = 9  # decimals of the sums


@dataclass(frozen=True)
class ByClass:
    """The metrics of one training by class; queries without a positive are left out.

    Attributes:
        row, part, key, seed, changes: see `Measurement`.
        runs: number of runs of the training, one for each fold of MLRC; metrics are means over them.
        queries: digest of the images that were tested. Only what was tested on the same images is compared.
        classes: `[C]`, their names.
        sizes: `[C]`, queries of each class.
        sums: by name of a metric, `[C]`, the sum over the queries of each class.
        of_runs: by name of a metric, the mean over the queries of each run, or of each fold over its repetitions; empty
            if there is one run.
    """

    row: str
    part: str
    key: str
    seed: int
    changes: list[str]
    runs: int
    queries: str
    classes: list[str]
    sizes: list[int]
    sums: dict[str, list[float]]
    of_runs: dict[str, list[float]] = field(default_factory=dict)  # the oldest lines have none


def by_class(training: Training, folder: Path, changes: Sequence[str]) -> ByClass:
    """Reads what each class scored in a finished training.

    Args:
        folder: of the training; that of a single run, or with one run below it for each fold.
        changes: overrides that it was started with, beside those of its row.

    Raises:
        UserError: queries cannot be read, none has a positive, or the runs were not tested on the same images.
    """
    folders = runs_of(folder)
    runs, places = [read_queries(run) for run in folders], places_of(folders)
    digests = {_digest(one) for one in runs}
    if len(digests) > 1:
        raise UserError(f"the runs in {folder} were tested on different images: remove those that do not belong there.")
    valid = runs[0].best_rank > 0
    if not valid.any():
        raise UserError(f"no query of {folder} has an image of its class in the gallery: there is nothing to compare.")
    classes, number, sizes = np.unique(runs[0].classes[valid], return_inverse=True, return_counts=True)
    sums, of_runs = {}, {}
    for name in (one.name for one in METRICS if "compare" in one.tables):
        found = [of for of in (run.metric(name) for run in runs) if of is not None]
        if len(found) == len(runs):
            of_classes = np.bincount(number, np.mean(found, axis=0)[valid])
            sums[name] = [round(float(one), DIGITS) for one in of_classes]
            if len(runs) > 1:
                figures = np.array([of[valid].mean() for of in found])
                of_runs[name] = [
                    round(float(one), DIGITS) for one in (in_places(figures, places) if places else figures)
                ]
    place = (training.row, training.part, training.key, training.seed, list(changes))
    return ByClass(*place, len(runs), digests.pop(), classes.tolist(), sizes.tolist(), sums, of_runs)


def _digest(queries: Queries) -> str:
    digest = hashlib.sha256()
    for paths in (queries.paths, queries.classes, queries.best_rank > 0):
        digest.update("\n".join(map(str, paths.tolist())).encode())
    digest.update(queries.gallery.encode())
    return digest.hexdigest()[:16]


def kept(experiment: Experiment) -> list[ByClass]:
    """Returns what each class scored in the trainings that were recorded and have the same options now.

    Raises:
        UserError: the file is damaged.
    """
    current = _current(experiment)
    file = _file(experiment)
    try:
        lines = file.read_text("utf-8").split("\n") if file.exists() else []  # names may hold other ends of lines
        found = [ByClass(**json.loads(line)) for line in lines if line]
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is damaged: take it back from git, or remove it and record again.") from error
    return [one for one in found if (one.row, one.part, one.key, one.seed) in current]


def _current(experiment: Experiment) -> set[tuple[str, str, str, int | None]]:
    return {(one.row, one.part, one.key, one.seed) for one in experiment.measured}


def keep_classes(experiment: Experiment, found: Iterable[ByClass]) -> None:
    """Adds trainings that are recorded to those that are kept, in place of those of the same row, part, changes and
    seed."""

    def place(one: ByClass) -> tuple[Any, ...]:
        return one.row, one.part, tuple(one.changes), one.seed

    with alone(experiment.record.parent / ".lock"):
        now = read_experiment(experiment.name)  # another process may have recorded meanwhile
        current = _current(now)
        every = {place(one): one for one in (*kept(now), *found) if (one.row, one.part, one.key, one.seed) in current}
        lines = [json.dumps(asdict(one), ensure_ascii=False) for one in every.values()]
        write_atomically(_file(experiment), "".join(f"{line}\n" for line in lines))


def _file(experiment: Experiment) -> Path:
    return experiment.record.with_suffix(".classes.jsonl")


def compare_rows(experiment: Experiment) -> list[Compared]:
    """Compares the rows with the row `compared_with`, in each part and setting in which trainings of both are kept.

    Trainings of the seeds that both have count, or all if they have none in common. The interval is over classes and
    seeds. How much seeds change is pooled over all rows of a part and setting, also those of the experiments in
    `spread_of` whose parts have the same name. Of trainings that are several runs each, as those of MLRC, it is the
    spread of the differences between their runs, fold by fold. It is not in the interval if nothing tells it.

    Raises:
        UserError: two rows were not tested on the same images, or there is no experiment of a name in `spread_of`.
    """
    sides = _sides(experiment)
    elsewhere = [item for name in experiment.spread_of for item in _sides(read_experiment(name)).items()]
    found = []
    for (row, part, changes), mine in sides.items():
        base = sides.get((experiment.compared_with, part, changes))
        if base is None or row == experiment.compared_with:
            continue
        common = {one.seed for one in mine} & {one.seed for one in base}
        if common:
            mine, base = ([one for one in side if one.seed in common] for side in (mine, base))
        if len({one.queries for one in (*base, *mine)}) > 1:
            raise UserError(
                f"{experiment.name}, {part}: '{row}' and '{experiment.compared_with}' were tested on different images, "
                "so their difference says nothing: train both again."
            )
        runs = [sum(one.runs for one in side) for side in (mine, base)]
        alike = [side for (_, *place), side in (*sides.items(), *elsewhere) if place == [part, changes]]
        alike = list({tuple((one.key, one.seed) for one in side): side for side in alike}.values())  # each once
        for metric in base[0].sums:
            if all(metric in one.sums for one in (*base, *mine)):
                spread = spread_over_seeds(_figures(side, metric) for side in alike)
                of_both = _between_runs(mine, base, metric) or (spread and spread.of_difference(len(mine), len(base)))
                d = over_sums(_mean(base, metric), _mean(mine, metric), np.array(base[0].sizes), of_both)
                figures = (d.estimate, d.low, d.high, d.p)
                against = experiment.compared_with
                found.append(Compared(row, part, list(changes), metric, against, *figures, runs, d.seeds))
    return found


def _sides(experiment: Experiment) -> dict[tuple[str, str, tuple[str, ...]], list[ByClass]]:
    """Returns the trainings that are kept, by row, part and changes."""
    sides: dict[tuple[str, str, tuple[str, ...]], list[ByClass]] = {}
    for one in kept(experiment):
        sides.setdefault((one.row, one.part, tuple(one.changes)), []).append(one)
    return sides


def _figures(side: Sequence[ByClass], metric: str) -> list[float]:
    """Returns a metric of each training, the mean over its queries."""
    return [sum(one.sums[metric]) / sum(one.sizes) for one in side if metric in one.sums]


def _between_runs(mine: Sequence[ByClass], base: Sequence[ByClass], metric: str) -> Spread | None:
    """Returns the spread of a difference of means over runs, from the differences of runs in the same place."""
    a, b = ([one.of_runs.get(metric, []) for one in side] for side in (base, mine))
    if len({len(runs) for runs in (*a, *b)}) > 1 or len(a[0]) < 2:
        return None
    return spread_of_pairs(np.mean(a, axis=0), np.mean(b, axis=0))


def _mean(side: Sequence[ByClass], metric: str) -> np.ndarray:
    """Returns the sums `[C]` of a side, means over its runs."""
    return np.average([one.sums[metric] for one in side], axis=0, weights=[one.runs for one in side])

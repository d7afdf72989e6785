"""Records what was measured: experiments/PAPER/NAME.json, beside the YAML file with what was published.

Of experiments that compare their rows, `dml.papers.classes` keeps what each class scored.
"""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dml.configuration.composition import composed
from dml.errors import UserError
from dml.files import alone, atomic_path, write_atomically
from dml.papers.catalogue import names, read_experiment
from dml.papers.classes import by_class, compare_rows, keep_classes
from dml.papers.drawing import comparison
from dml.papers.drawn import along_axes
from dml.papers.experiment import Experiment, Training, near
from dml.papers.measured import Compared, Measurement, Tuned
from dml.papers.trainings import figures, folder_of
from dml.runs.provenance import commit, hardware, said_of_starts, said_together, versions, versions_line
from dml.training.build import build_method
from dml.training.complexity import complexity

SEED = re.compile(r"seed=(0|[1-9][0-9]*)")  # the folder of a training; a copy beside it, as seed=0.bak, is none


def measure(experiment: Experiment, changes: Sequence[str], out: Path) -> list[Measurement]:
    """Collects the metrics of the finished trainings of an experiment.

    Args:
        changes: Hydra overrides that they were run with, beside those of their rows.
        out: the folder of the trainings.

    Raises:
        UserError: the figures of a training are damaged.
    """
    found = []
    lacking: dict[tuple[str, str], str] = {}
    for training in _with_seeds(experiment, changes, out):
        folder = folder_of(training, out)
        metrics = figures(training, folder)
        wanted = {column.metric for column in experiment.parts[training.part].columns.values()}
        wanted |= along_axes(experiment.figure)
        for name in experiment.promised(experiment.rows[training.row], training.part) - metrics.keys():
            if metrics:
                said = f"Not recorded: {training.row}, {name}, which {folder} lacks{near(name, metrics)}"
                lacking[training.row, name] = said
        kept = {name: metrics[name] for name in sorted(wanted) if name in metrics}
        kept |= {name: metrics[name] for name in ("untrained/recall@1",) if kept and name in metrics}
        if not kept:
            print(f"Left out: {training.row}, which {folder} does not have: run it again.")
            continue
        begun = said_of_starts(folder)
        seconds = metrics["run/seconds"] * metrics.get("run/trainings", 1) if "run/seconds" in metrics else None
        found.append(
            Measurement(
                *(training.row, training.part, training.key, training.seed, list(changes), kept),
                *(begun[-1]["command"], *said_together(begun), seconds),
            )
        )
    for sentence in lacking.values():
        print(sentence)
    return found


def _with_seeds(experiment: Experiment, changes: Sequence[str], out: Path) -> list[Training]:
    """Returns the finished trainings with all seeds that are in the folder."""
    result = []
    for training in experiment.trainings(seeds=[0], changes=changes):
        names = [path.parent.name for path in (out / training.key).glob("seed=*/metrics.json")]
        seeds = sorted(int(name.removeprefix("seed=")) for name in names if SEED.fullmatch(name))
        result += [replace(training, seed=seed) for seed in seeds]
    return result


def sizes_of(experiment: Experiment) -> list[Measurement]:
    """Counts the parameters and flops of the rows whose columns show them, without training."""
    found = []
    for training in experiment.trainings(seeds=[0]):
        columns = experiment.parts[training.part].columns.values()
        if not training.script and any(column.metric.startswith("model/") for column in columns):
            overrides = training.overrides
            config = composed(*overrides)
            config.backbone.weights = "none"
            config.runtime.train_classes = 2
            counted = complexity(build_method(config), config.image_size)
            metrics = {f"model/{name}": float(n) for name, n in counted.items()}
            command = shlex.join(["python", "-m", "dml.describe", *overrides])
            today = datetime.now(UTC).date().isoformat()
            told = (command, commit(), today, hardware("cpu"), versions_line({"versions": versions()}))
            found.append(Measurement(training.row, training.part, training.key, None, [], metrics, *told))
    return found


def keep(
    experiment: Experiment,
    found: Sequence[Measurement] = (),
    compared: Sequence[Compared] = (),
    tuned: Sequence[Tuned] = (),
) -> Path:
    """Adds measurements, comparisons and searches to the record of an experiment.

    They replace those of the same row, part, changes and seed (comparisons: metric). A measurement with the
    same metrics as before keeps its commit, date and hardware, unless versions were not recorded then. What was
    measured or recorded for rows that are gone or have other options now, perhaps since the trainings began, is
    dropped, and it is printed how much.

    Returns:
        The file of the record.
    """

    def place(one: Measurement | Compared) -> tuple[Any, ...]:
        return one.row, one.part, one.seed if isinstance(one, Measurement) else one.metric, tuple(one.changes)

    with alone(experiment.record.parent / ".lock"):  # no other process writes records of this paper at the same time
        before = read_experiment(experiment.name)  # another process may have recorded meanwhile
        all_of_them = {place(one): one for one in before.measured}
        of_rows, searches = before.current(found), before.current_searches(tuned)
        for kind, lost in (("measurements", len(found) - len(of_rows)), ("searches", len(tuned) - len(searches))):
            if lost:
                print(f"Not recorded: {lost} {kind} of rows of {before.name} that are gone or have other options now.")
        for one in of_rows:
            old = all_of_them.get(place(one))
            if old is None or old.metrics != one.metrics or (one.versions and not old.versions):
                all_of_them[place(one)] = one
        differences = {place(one): one for one in before.compared}
        differences |= {place(one): one for one in compared}
        searched = {(one.row, tuple(one.changes)): one for one in (*before.tuned, *searches)}
        _tell_dropped(before)
        content = {
            **({"tuned": [asdict(one) for one in searched.values()]} if searched else {}),
            "measured": [asdict(one) for one in all_of_them.values()],
            "compared": [asdict(one) for one in differences.values()],
        }
        write_atomically(experiment.record, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return experiment.record


def _tell_dropped(read: Experiment) -> None:
    """Prints how many measurements and searches of a record do not belong to the rows as they are now."""
    raw = json.loads(read.record.read_text(encoding="utf-8")) if read.record.exists() else {}
    for name, kept in (("measured", read.measured), ("tuned", read.tuned)):
        if (dropped := len(raw.get(name, [])) - len(kept)) > 0:
            print(f"Dropped from {read.record}, {name}: {dropped} of rows that are gone or have other options now.")


def record_finished(experiment: Experiment, changes: Sequence[str], out: Path) -> None:
    """Records the finished trainings; of an experiment with a comparison also the differences and a picture. So are
    those of experiments that take the spread over seeds from this one.

    Raises:
        UserError: the figures or queries of a training are damaged or gone, and nothing was recorded; or two rows were
            not tested on the same images.
    """
    found = measure(experiment, changes, out)
    if not found:
        print(f"No training of {experiment.name} is finished: nothing was recorded.")
        return
    trainings = _with_seeds(experiment, changes, out) if experiment.compared_with else []
    of_classes = [by_class(one, folder_of(one, out), changes) for one in trainings]
    print(f"Recorded: {keep(experiment, found)}")
    if experiment.compared_with:
        keep_classes(experiment, of_classes)
        _compare(experiment.name)
        for name in names():
            try:
                borrows = experiment.name in read_experiment(name).spread_of
            except UserError as error:  # of another file, which may be half edited
                print(f"Left out: {error}", file=sys.stderr)
                continue
            if borrows:
                _compare(name)


def _compare(name: str) -> None:
    """Records and draws the differences between the rows of an experiment, from what each class scored."""
    experiment = read_experiment(name)
    keep(experiment, compared=compare_rows(experiment))
    if (picture := comparison(read_experiment(name))) is not None:
        path = experiment.record.with_suffix(".png")
        with atomic_path(path) as new:
            picture.savefig(new, format="png")
        print(f"Drawn: {path}")

"""The result of MLRC's trainings, all folds together (Musgrave et al. 2020, section 3.3).

A collection has one training of each fold. Its metrics are either the mean of those of its trainings (separated), or
those of one embedding that has the embeddings of its trainings side by side (concatenated).
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text
from scipy.stats import t
from tqdm import tqdm

from dml.configuration.identity import repeats
from dml.configuration.ranges import WholeNumber, check_value
from dml.configuration.trainings import axes_of
from dml.console import print_columns
from dml.errors import UserError
from dml.evaluation.interval import LEVEL
from dml.evaluation.metric import metric, of_queries
from dml.evaluation.metrics import evaluate
from dml.figures import summaries
from dml.files import atomic_path, write_atomically
from dml.runs.collecting import FinishedRun, groups, leaves, tells
from dml.runs.scores import read_embeddings

KINDS = ("separated", "concatenated")

COLLECTED = "mlrc.json"  # file of the metrics of collections

MOST = 1000  # if there are more collections than this, so many are drawn; one that is drawn twice counts once

Model = tuple[int, int]  # fold, repeat


@dataclass
class Aggregate:
    """The trainings of one configuration, and the metrics of their collections.

    Attributes:
        label: the options that were typed; of several configurations, those that tell them apart.
        folds: the number of folds.
        models: the trainings, by fold and repetition.
        width: of one training's embedding.
        collections: for every choice of one training of each fold (of more than `MOST`, for some of them, drawn at
            random), the metrics, named `<kind>/<metric>`.
    """

    label: str
    folds: int
    models: dict[Model, FinishedRun]
    width: int
    collections: dict[tuple[Model, ...], dict[str, float]]

    @property
    def independent(self) -> list[tuple[Model, ...]]:
        """The collections whose trainings are all of one repetition. No training is in two of them."""
        return [chosen for chosen in self.collections if len({repeat for _, repeat in chosen}) == 1]

    def summary(self) -> dict[str, float]:
        """Summarises every `<kind>/<metric>` over the collections.

        Returns:
            The number of `collections` and of independent ones, `repeats`. For every `<kind>/<metric>`, with its name
            in front: `mean` and `std` (n - 1) over all collections, `repeats/mean` over the independent ones, and, if
            there are several of these, `repeats/half_width`, half of their 95 % t-interval.
        """
        result: dict[str, float] = {"collections": len(self.collections), "repeats": len(self.independent)}
        for name in (f"{kind}/{name}" for kind in KINDS for name in of_queries()):
            values = [of[name] for of in self.collections.values()]
            result[f"{name}/mean"] = statistics.fmean(values)
            if len(values) > 1:
                result[f"{name}/std"] = statistics.stdev(values)
            apart = [self.collections[chosen][name] for chosen in self.independent]
            if apart:
                result[f"{name}/repeats/mean"] = statistics.fmean(apart)
            if len(apart) > 1:
                result[f"{name}/repeats/half_width"] = half_width(apart)
        return result


def half_width(values: Sequence[float]) -> float:
    """Returns half the width of the 95 % t-interval of the mean of n independent values, n > 1."""
    n = len(values)
    return float(t.ppf((1 + LEVEL) / 2, n - 1)) * statistics.stdev(values) / math.sqrt(n)


def aggregate(folders: Sequence[Path]) -> list[Aggregate]:
    """Collects the trainings below the folders and aggregates those of each configuration.

    Raises:
        UserError: there are no such trainings, a fold has none, two are of the same fold and repetition, two have
            the same seed, or trainings were tested on different images.
    """
    runs = [run for run in leaves(folders) if any(axis.collected for axis in axes_of(run.config.protocol))]
    if not runs:
        raise UserError(
            f"there is no finished training of protocol=mlrc below {', '.join(map(str, folders))}: name another folder."
        )
    found = groups(runs)
    if len(found) > 1:
        return [_of_one(group.runs, group.label) for group in found]
    typed = [option for option in runs[0].overrides if tells(option, repeats(runs[0].config))]
    return [_of_one(runs, " ".join(typed) or "the defaults")]


def _of_one(runs: Sequence[FinishedRun], label: str) -> Aggregate:
    models: dict[Model, FinishedRun] = {}
    for run in runs:
        at = _model(run)
        if at in models:
            raise UserError(
                f"{models[at].folder} and {run.folder} are both fold {at[0]}, repetition {at[1]}: name one of them."
            )
        models[at] = run
    _check_seeds(models)
    folds = next(_number(runs[0], axis.count) for axis in axes_of(runs[0].config.protocol) if axis.collected)
    lacking = sorted(set(range(folds)) - {fold for fold, _ in models})
    if lacking:
        raise UserError(
            f"in {runs[0].folder.parent} no training of fold {lacking[0]} has finished: train it, since a collection "
            "needs one training of each fold."
        )
    test = {at: _embeddings(run.folder) for at, run in models.items()}
    _check_same(models, test)
    width = test[next(iter(test))]["embeddings"].shape[1]
    return Aggregate(label, folds, models, width, _collections(folds, test))


def _model(run: FinishedRun) -> Model:
    """Returns the numbers of a run's fold and repetition; 0 for what the protocol does not have."""
    axes = axes_of(run.config.protocol)
    fold, repeat = (
        sum(_number(run, axis.name) for axis in of)
        for of in ([axis for axis in axes if axis.collected], [axis for axis in axes if axis.repeats])
    )
    return fold, repeat


def _number(run: FinishedRun, option: str) -> int:
    check_value(f"protocol.{option} of {run.folder}", run.config.protocol.get(option), WholeNumber)
    return int(run.config.protocol[option])


def _check_seeds(models: Mapping[Model, FinishedRun]) -> None:
    """Raises UserError unless each training has a seed of its own, without which they start alike."""
    of_seed: dict[int, Path] = {}
    for run in models.values():
        if (other := of_seed.setdefault(int(run.config.seed), run.folder)) != run.folder:
            raise UserError(
                f"{other} and {run.folder} have the same seed, so their networks start alike: train one of them again, "
                "with another seed."
            )


def _embeddings(folder: Path) -> dict[str, np.ndarray]:
    """Reads the embeddings of a run, `[N,d]` of unit norm, with their labels, and the same of a separate gallery."""
    found = read_embeddings(folder)
    for name in ("embeddings", "gallery"):
        if name in found:
            found[name] = found[name] / np.linalg.norm(found[name], axis=1, keepdims=True)
    return found


def _check_same(models: Mapping[Model, FinishedRun], test: Mapping[Model, Mapping[str, np.ndarray]]) -> None:
    first = next(iter(test))
    for at, of in test.items():
        if of.keys() != test[first].keys() or not all(
            np.array_equal(of[name], test[first][name]) for name in ("labels", "gallery_labels") if name in of
        ):
            raise UserError(
                f"{models[at].folder} and {models[first].folder} were tested on different images: leave one of them "
                "out."
            )


def _collections(
    folds: int, test: Mapping[Model, Mapping[str, np.ndarray]]
) -> dict[tuple[Model, ...], dict[str, float]]:
    alone = {at: _measure([of]) for at, of in test.items()}
    of_fold = [[at for at in sorted(test) if at[0] == fold] for fold in range(folds)]
    count = math.prod(len(models) for models in of_fold)
    if count <= MOST:
        choices = list(product(*of_fold))
    else:
        rng, repeats = np.random.default_rng(0), {repeat for _, repeat in test}
        apart = [tuple((fold, repeat) for fold in range(folds)) for repeat in repeats]
        drawn = {tuple(models[i] for models, i in zip(of_fold, at, strict=True)) for at in _draws(rng, of_fold)}
        choices = sorted(drawn | {chosen for chosen in apart if all(at in test for at in chosen)})
    result = {}
    for chosen in tqdm(choices, desc="collections", delay=1, leave=False):
        beside = _measure([test[at] for at in chosen])
        result[chosen] = {
            f"separated/{name}": statistics.fmean(alone[at][name] for at in chosen) for name in of_queries()
        } | {f"concatenated/{name}": beside[name] for name in of_queries()}
    return result


def _draws(rng: np.random.Generator, of_fold: Sequence[Sequence[Model]]) -> np.ndarray:
    return np.stack([rng.integers(len(models), size=MOST) for models in of_fold], axis=1)


def _measure(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Evaluates embeddings side by side. Each is of unit norm, and so is the concatenation, after its division."""

    def side_by_side(name: str) -> np.ndarray | None:
        return np.concatenate([of[name] for of in parts], axis=1) / math.sqrt(len(parts)) if name in parts[0] else None

    embeddings = side_by_side("embeddings")
    assert embeddings is not None
    return evaluate(
        embeddings,
        parts[0]["labels"],
        gallery=side_by_side("gallery"),
        gallery_labels=parts[0].get("gallery_labels"),
        ks=(1,),
        clustering=False,
    )


def write_aggregate(
    folders: Sequence[Path], out: Path, remedy: str = "name another folder with -o"
) -> dict[str, float]:
    """Runs the command: aggregates trainings, prints the tables, and writes `mlrc.json` and
    `figures/collections.png`.

    Args:
        folders: of runs or sweeps.
        out: the folder to write to; it is made.
        remedy: what to do if the folder cannot be written.

    Returns:
        The summary of the first configuration, with names `mlrc/...`.

    Raises:
        UserError: as `aggregate`; also if the folder cannot be written.
    """
    found = aggregate(folders)
    content = [
        {
            "label": one.label,
            "runs": [str(run.folder) for _, run in sorted(one.models.items())],
            "summary": one.summary(),
            "collections": [{"models": chosen, **of} for chosen, of in one.collections.items()],
        }
        for one in found
    ]
    picture = out / "figures" / "collections.png"
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        drawn = summaries.collections([(one.label, _points(one.collections, one.independent)) for one in found])
        with atomic_path(picture) as new:
            drawn.savefig(new, format="png")
        write_atomically(out / COLLECTED, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): {remedy}.") from error
    for one in found:
        _print(one)
    print(f"Collections: {out / 'mlrc.json'}, {picture}")
    return {f"mlrc/{name}": value for name, value in found[0].summary().items()}


def _points(
    collections: Mapping[tuple[Model, ...], Mapping[str, float]], independent: Sequence[tuple[Model, ...]]
) -> dict[str, tuple[list[float], list[float]]]:
    """Returns MAP@R of all collections and of the independent ones, by kind."""
    return {
        kind: (
            [of[f"{kind}/map@r"] for of in collections.values()],
            [collections[chosen][f"{kind}/map@r"] for chosen in independent],
        )
        for kind in KINDS
    }


def _print(one: Aggregate) -> None:
    summary, repeats = one.summary(), len(one.independent)
    count = math.prod(sum(fold == at for at, _ in one.models) for fold in range(one.folds))
    which = "every choice" if len(one.collections) == count else f"as many of {count} choices, drawn at random,"
    rows = []
    for kind, width in zip(KINDS, (one.width, one.folds * one.width), strict=True):
        for over, centre, spread in (
            (f"{len(one.collections)} collection{'s' * (len(one.collections) > 1)}", "mean", "std"),
            (f"{repeats} repetitions", "repeats/mean", "repeats/half_width"),
        )[: 2 if len(one.collections) > 1 else 1]:
            values = [
                (summary.get(f"{kind}/{name}/{centre}"), summary.get(f"{kind}/{name}/{spread}"))
                for name in of_queries()
            ]
            cells = [
                metric(name).written(mean) + ("" if error is None else f"±{metric(name).written(error)}")
                for name, (mean, error) in zip(of_queries(), values, strict=True)
            ]
            rows.append((f"{kind} {width}-d,", over, *cells))
    console = Console()
    console.print(Text(f"\n{one.label}: {len(one.models)} trainings, {one.folds} folds"))
    titles = [metric(name).title for name in of_queries()]
    columns = zip(titles, list(zip(*rows, strict=True))[2:], strict=True)
    print_columns([row[:2] for row in rows], dict(columns))
    console.print(
        "One collection: a spread needs several repetitions."
        if len(one.collections) == 1
        else f"{len(one.collections)} collections: mean±std (n - 1) over {which} of one training of each fold; they "
        f"share trainings, so std says nothing about the error of the mean. {repeats} repetitions: independent "
        "collections, mean" + (f"±half the {LEVEL:.0%} t-interval" if repeats > 1 else "; an interval needs several"),
        highlight=False,
    )

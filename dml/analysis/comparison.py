"""Comparison of two runs on the same queries: by how much they differ, and a paired bootstrap of how sure that is.

Images of one class are not independent, and another test set would bring other classes. So the interval over classes is
the one to report; the one over images is too narrow. With several runs on a side it contains their spread, too.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dml.analysis.sides import matched, runs_of
from dml.configuration.defaults import DRAWS
from dml.configuration.ranges import Seed, check_value
from dml.configuration.trainings import axes_of
from dml.console import print_columns
from dml.errors import UserError
from dml.evaluation import interval
from dml.evaluation.interval import LEVEL
from dml.evaluation.metric import METRICS, metric
from dml.figures import summaries
from dml.files import atomic_path, write_atomically
from dml.runs import differences
from dml.runs.collecting import BELOW, Group, below_untrained, leaves, said_below
from dml.runs.folder import RunFolder
from dml.runs.reading import reading
from dml.runs.scores import REPEAT, read_queries

REPETITION = re.compile(r"(protocol\.)?(seed|split|fold|repeat)[=_]\d")  # a folder's name that tells no method

Draws = Annotated[int, Field(ge=100, le=10_000_000)]  # more are of no use and would not fit into memory


@dataclass(frozen=True)
class Difference:
    """The difference of two means, B's minus A's, with its interval.

    Attributes:
        estimate: the difference.
        low, high: ends of the 95 % interval, see `dml.evaluation.interval.Estimate`.
        p: two-sided p-value.
        seeds: degrees of freedom of the spread over seeds that the interval contains; 0: it contains none.
        draws: `[draws]`, the difference in each draw.
    """

    estimate: float
    low: float
    high: float
    p: float
    seeds: int
    draws: np.ndarray


def over_classes(
    a: np.ndarray,
    b: np.ndarray,
    classes: np.ndarray,
    draws: int = DRAWS,
    seed: int = 0,
    spread: interval.Spread | None = None,
) -> Difference:
    """Bootstraps the difference by drawing whole classes, with all their queries.

    Args:
        a, b: `[Q]`, a metric of each query in either run.
        classes: `[Q]`, the classes of the queries.
        draws: number of draws.
        seed: of the draws.
        spread: of the difference over seeds, if it is known.

    Raises:
        UserError: all queries are of one class.
    """
    return _difference(interval.over_classes(b - a, classes, draws, seed), spread)


def over_sums(a: np.ndarray, b: np.ndarray, sizes: np.ndarray, spread: interval.Spread | None = None) -> Difference:
    """Does the same as `over_classes`, from the sums of a metric over each class's queries and their number, `[C]`."""
    return _difference(interval.over_sums(b - a, sizes), spread)


def over_images(a: np.ndarray, b: np.ndarray, draws: int = DRAWS, seed: int = 0) -> Difference:
    """Bootstraps the difference by drawing queries one by one, as if they were independent. See `over_classes`."""
    return _difference(interval.over_images(b - a, draws, seed), None)


def _difference(found: interval.Estimate, spread: interval.Spread | None) -> Difference:
    seeds = 0 if spread is None else spread.freedom
    return Difference(found.value, *found.interval(spread), seeds, found.draws)


@dataclass(frozen=True)
class Paired:
    """The queries on which two sides were tested, without those that have no positive.

    Attributes:
        values: by name of the metric, the values `[Q]` of side A and of side B, each the mean over the side's runs.
        spreads: by name of the metric, how much the difference varies between runs; None: neither side has several.
        classes: `[Q]`, the classes of the queries.
        runs: the number of runs of A and of B.
    """

    values: dict[str, tuple[np.ndarray, np.ndarray]]
    spreads: dict[str, interval.Spread | None]
    classes: np.ndarray
    runs: tuple[int, int]


def paired(a: Sequence[Path], b: Sequence[Path]) -> Paired:
    """Pairs the queries of two sides, each of one or several run folders.

    Where both sides have the same trainings of a protocol, as the folds of MLRC, the spread is that of the differences
    in each.

    Raises:
        UserError: a run is on both sides, the runs were not tested on the same queries and gallery, no query has a
            positive, or queries cannot be read.
    """
    if both := {one.resolve() for one in a} & {one.resolve() for one in b}:
        raise UserError(f"{min(both)} is on both sides: name a side that does not hold it.")
    sides = [{folder: read_queries(folder) for folder in side} for side in (a, b)]
    (where, first), *others = [one for side in sides for one in side.items()]
    for folder, other in others:
        if not np.array_equal(first.paths, other.paths) or not np.array_equal(first.classes, other.classes):
            raise UserError(
                f"{where} and {folder} were tested on different queries, so their difference says nothing: name runs "
                "with the same test."
            )
        if first.gallery != other.gallery or not np.array_equal(first.best_rank > 0, other.best_rank > 0):
            raise UserError(
                f"{where} and {folder} were tested among different galleries, so their difference says nothing: name "
                "runs with the same test."
            )
    valid = first.best_rank > 0
    if not valid.any():
        raise UserError(f"no query of {where} has an image of its class in the gallery: there is nothing to compare.")
    places = places_of(a), places_of(b)
    alike = len(set(places[0])) > 1 and set(places[0]) == set(places[1]) and all(map(_balanced, places))
    values: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    spreads: dict[str, interval.Spread | None] = {}
    for of in METRICS:
        if "compare" in of.tables:
            found = [_of_runs([queries.metric(of.name) for queries in side.values()], valid) for side in sides]
            if (runs_a := found[0]) is not None and (runs_b := found[1]) is not None:
                values[of.name] = runs_a.mean(0), runs_b.mean(0)
                figures = [runs.mean(1) for runs in (runs_a, runs_b)]
                if alike:
                    spreads[of.name] = interval.spread_of_pairs(*map(in_places, figures, places))
                else:
                    spread = interval.spread_over_seeds(figures)
                    spreads[of.name] = spread and spread.of_difference(len(a), len(b))
    return Paired(values, spreads, first.classes[valid], (len(a), len(b)))


def places_of(folders: Sequence[Path]) -> list[tuple[int, ...]]:
    """Returns which training of its protocol each run is, such as its fold; empty if not all are of such a protocol.
    Repetitions are in the same place."""
    found = []
    for folder in folders:
        run = RunFolder(folder)
        with reading(run.config_file, REPEAT):
            config = run.config()
            axes = [] if config is None else [axis for axis in axes_of(config.protocol) if not axis.repeats]
            if config is None or not axes:
                return []
            found.append(tuple(int(config.protocol[axis.name]) for axis in axes))
    return found


def _balanced(places: Sequence[tuple[int, ...]]) -> bool:
    return len({places.count(place) for place in places}) == 1


def in_places(figures: np.ndarray, places: Sequence[tuple[int, ...]]) -> list[float]:
    """Returns the mean of the figures `[runs]` in each place, in ascending order of places."""
    return [float(figures[[place == one for place in places]].mean()) for one in sorted(set(places))]


def _of_runs(runs: Sequence[np.ndarray | None], valid: np.ndarray) -> np.ndarray | None:
    """Returns the values `[runs, Q]` of the valid queries; None if one of the runs lacks the metric."""
    known = [values[valid] for values in runs if values is not None]
    return np.stack(known) if len(known) == len(runs) else None


def _print_sides(sides: Mapping[str, Path]) -> list[differences.Difference]:
    """Prints what the two sides are, in what they differ, and the metrics of their untrained networks. Of folders
    without a configuration it prints the names alone.

    Returns:
        In what the sides differ.
    """
    console = Console()
    known = {name: leaves(runs_of(place)) for name, place in sides.items() if place.is_dir() or matched(place)}
    labelled = [Group(name, known[name], {}) for name in sides if known.get(name)]
    for name, folder in sides.items():
        print(f"{name}: {folder}")
        for group in labelled:
            if group.label == name:
                console.print(Text(", ".join(differences.heading([group]))))
                _print_untrained(group)
    if len(labelled) < len(sides):
        return []
    differ = differences.differences(labelled)
    if not differ:
        print("Both have the same configuration: they are repetitions of it.")
        return []
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for title in ("what differs", *sides):
        table.add_column(title, overflow="fold", max_width=console.width // 3)
    for one in differ:
        if not one.detail:
            table.add_row(*map(Text, (one.name, *one.values)))
    console.print(table)
    if more := sum(one.detail for one in differ):
        print(f"and options of components that differ: {more}, see comparison.json")
    return differ


def _print_untrained(group: Group) -> None:
    said = [
        f"{one.title} {one.written(group.metrics[f'untrained/{one.name}'])}"
        for one in METRICS
        if "compare" in one.tables and f"untrained/{one.name}" in group.metrics
    ]
    if said:
        Console().print(f"untrained: {', '.join(said)}", highlight=False)
    if below := said_below(below_untrained(group.metrics), [group.metrics]):
        Console().print(f"It is {below.removeprefix(BELOW.strip()).strip()}", highlight=False)


def names(a: Path, b: Path) -> tuple[str, str]:
    """Returns the names of two folders; with the folders above them where these have the same name, or where one is
    named as a repetition, such as `seed=0`."""
    at = -2 if a.name == b.name or any(REPETITION.match(one.name) for one in (a, b)) else -1
    return "/".join(a.parts[at:]), "/".join(b.parts[at:])


def compare(a: Path, b: Path, out: Path, draws: int = DRAWS, seed: int = 0) -> dict[str, dict[str, Difference]]:
    """Compares two sides: prints a table, and writes `comparison.json` and a picture of each metric.

    Args:
        a, b: the sides: each the folder of a run, or of several runs of one configuration, or a pattern, see `runs_of`.
        out: the folder to write to; it is made.
        draws: number of draws of the bootstrap.
        seed: of the draws.

    Returns:
        By metric, the difference over `classes` and over `images`.

    Raises:
        UserError: as `paired` and `runs_of`; also if `draws` or `seed` is out of range or the folder cannot be written.
    """
    check_value("--draws", draws, Draws)
    check_value("--seed", seed, Seed)
    both = paired(runs_of(a), runs_of(b))
    differ = _print_sides({"A": a, "B": b})
    found, content = {}, {}
    rows = []
    for name, values in both.values.items():
        by = {
            "classes": over_classes(*values, both.classes, draws, seed, both.spreads[name]),
            "images": over_images(*values, draws, seed),
        }
        found[name] = by
        means, of = [float(value.mean()) for value in values], metric(name)
        for over, d in by.items():
            differences = [f"{value:+{of.format}}" for value in (d.estimate, d.low, d.high)]
            cells = (
                *map(of.written, means),
                differences[0],
                " ".join(differences[1:]),
                f"{d.p:.4f}" if d.p >= 1e-4 else "<0.0001",
            )
            rows.append((of.title, f"over {over}", *cells))
        content[name] = {"a": means[0], "b": means[1]} | {
            over: {k: v for k, v in asdict(d).items() if k != "draws"} for over, d in by.items()
        }
    first, second = names(a.resolve(), b.resolve())
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, by in found.items():
            d = by["classes"]
            drawn = {f"drawn over {over}": one.draws for over, one in by.items()}
            picture = summaries.difference_plot(
                drawn, d.estimate, (d.low, d.high), f"{metric(name).title}: {second} minus {first}"
            )
            with atomic_path(out / f"difference_{name.replace('@', '_')}.png") as new:
                picture.savefig(new, format="png")
        sides: dict[str, Any] = {"a": str(a), "b": str(b), "runs": both.runs}
        sides["differs"] = {one.name: one.values for one in differ}
        text = json.dumps(sides | {"draws": draws, "seed": seed, "metrics": content}, indent=1)
        write_atomically(out / "comparison.json", text + "\n")
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): name another folder with --out.") from error
    _print(rows, both, draws)
    print(f"Pictures: {out}")
    return found


def _print(rows: Sequence[Sequence[str]], both: Paired, draws: int) -> None:
    """Prints a row of cells for each metric and way of drawing, in several tables if they do not fit side by side."""
    runs = f", means of {both.runs[0]} and {both.runs[1]} runs" if max(both.runs) > 1 else ""
    print(f"\n{len(both.classes)} queries of {len(np.unique(both.classes))} classes{runs}")
    titles = ("A", "B", "B - A", "interval", "p")
    columns = zip(titles, list(zip(*rows, strict=True))[2:], strict=True)
    print_columns([row[:2] for row in rows], dict(columns))
    known = any(one is not None for one in both.spreads.values())
    seeds = "and the spread over the runs" if known else "without what another seed changes (give several runs)"
    print(f"interval: {LEVEL:.0%}; over classes: from {draws} paired draws of classes, {seeds}")
    print("over images: too narrow, as images of one class are not independent")

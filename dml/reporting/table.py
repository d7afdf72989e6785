"""The tables at the end of a run."""

from collections.abc import Mapping, Sequence

from rich.console import Console

from dml.console import print_columns
from dml.evaluation.interval import ENDS, LEVEL
from dml.evaluation.metric import GAIN, HEADLINE, RERANKED, Metric, declared, metric
from dml.runs.chosen import monitor
from dml.runs.collecting import BELOW, below_untrained, said_below

LAST = {"last": "test", "best on test*": "best_on_test"}
CHOSEN = {"chosen*": "test", "last": "last"}
BESIDE = {"untrained": "untrained", "mean learner": "learners/mean"}
CAPTIONS = {
    "test": "* chosen by its metrics on the test set: optimistic",
    "validation": "* the best checkpoint on validation classes, which are not in the test",
}


def columns(metrics: Mapping[str, float]) -> list[Metric]:
    """Returns the metrics of the table, in the order of `metrics.json`."""
    found = (declared(name) for name in metrics if name.startswith("test/"))
    return [one for one in found if one is not None and "run" in one.tables]


def places(metrics: Mapping[str, float]) -> dict[str, str]:
    """Returns what the table compares: the title of each column, and its place in `metrics.json`. With a single learner
    there is no mean learner."""
    every = (CHOSEN if any(name.startswith("last/") for name in metrics) else LAST) | BESIDE
    several = f"learners/1/{HEADLINE}" in metrics
    return {title: place for title, place in every.items() if several or place != "learners/mean"}


def cells(metrics: Mapping[str, float], place: str, of: Sequence[Metric]) -> list[str]:
    """Formats some metrics at a place; a metric that is not there gives an empty cell."""
    return [one.written(metrics.get(f"{place}/{one.name}")) for one in of]


def marked(metrics: Mapping[str, float], of: Sequence[Metric]) -> list[str]:
    """Formats metrics of the test as `cells` does, and adds `BELOW` to those worse than the untrained network's."""
    written = cells(metrics, "test", of)
    are_below = [below_untrained(metrics, f"test/{one.name}") for one in of]
    return [cell + (BELOW if is_below else "") for cell, is_below in zip(written, are_below, strict=True)]


def below(metrics: Mapping[str, float]) -> str:
    """Returns what `BELOW` means if `marked` adds it to a metric of the table, else an empty string."""
    return said_below(any(cell.endswith(BELOW) for cell in marked(metrics, columns(metrics))), [metrics])


def interval(metrics: Mapping[str, float], name: str = HEADLINE) -> list[str]:
    """Formats both ends of a metric's interval on the test; empty if there is none."""
    ends = [metrics.get(f"test/{name}{end}") for end in ENDS]
    return [] if None in ends else [metric(name).written(end) for end in ends]


RERANKING_SAYS = (
    f"The same embeddings ranked a second time. In brackets is the {LEVEL:.0%} interval of the gain, by a paired "
    "bootstrap over test classes; if 0 is within it, the gain may be chance."
)


def reranked(metrics: Mapping[str, float]) -> tuple[list[str], list[list[str]]]:
    """Returns titles and rows of a table of the plain and the second ranking; no rows without a second ranking."""
    rows = []
    for one in columns(metrics):
        if f"{RERANKED}/{one.name}" in metrics:
            name = f"{GAIN}/{one.name}"
            ends = [metrics[name + end] for end in ENDS if name + end in metrics]
            gain = one.change(metrics[name], ends) if name in metrics else ""
            rows.append([one.title, *(cells(metrics, place, [one])[0] for place in ("test", RERANKED)), gain])
    return ["", "plain", "re-ranked", "gained"], rows


def tested_on(metrics: Mapping[str, float]) -> str:
    """Describes in words on how many images a run was tested."""
    if "data/gallery/images" not in metrics:
        return f"{metrics['data/test/images']} test images of {metrics['data/test/classes']} unseen classes"
    return (
        f"{metrics['data/query/images']} queries of {metrics['data/query/classes']} unseen classes among "
        f"{metrics['data/gallery/images']} gallery images"
    )


def print_table(metrics: Mapping[str, float]) -> None:
    """Prints the metrics of a run, one in each line, so that any number of them fits into 80 columns."""
    shown, of = places(metrics), columns(metrics)
    with_interval = any(interval(metrics, one.name) for one in of)
    cells_of = {title: [_cell(metrics, place, one) for one in of] for title, place in shown.items()}
    first, *others = cells_of
    if with_interval:
        ends = {f"{LEVEL:.0%} interval": ["–".join(interval(metrics, one.name)) for one in of]}
        cells_of = {first: cells_of[first]} | ends | {title: cells_of[title] for title in others}

    console = Console()
    console.print(f"\n{tested_on(metrics)}; metrics of one run, as fractions of 1", highlight=False)
    print_columns([[one.title] for one in of], cells_of)
    if with_interval:
        print("interval: Wilson's over test classes, without the change by another seed")
    print(CAPTIONS[monitor(metrics)])
    if said := below(metrics):
        console.print(said, highlight=False)
    titles, rows = reranked(metrics)
    if rows:
        print_columns([row[:1] for row in rows], dict(zip(titles[1:], list(zip(*rows, strict=True))[1:], strict=True)))
        console.print(RERANKING_SAYS, highlight=False, markup=False)


def _cell(metrics: Mapping[str, float], place: str, of: Metric) -> str:
    return (marked(metrics, [of]) if place == "test" else cells(metrics, place, [of]))[0]

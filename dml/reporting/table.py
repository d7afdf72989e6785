"""The table at the end of a run."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dml.evaluation.metric import Metric, declared, metric
from dml.reporting.console import print_in_blocks

LAST = {"last": "test", "mean learner": "learners/mean", "best on test *": "best_on_test", "untrained": "untrained"}
CHOSEN = {"chosen *": "test", "mean learner": "learners/mean", "last": "last", "untrained": "untrained"}
CAPTIONS = {
    "test": "* chosen by its metrics on the test set: optimistic",
    "validation": "* the best checkpoint on validation classes, which are not in the test",
}


def columns(metrics: Mapping[str, float]) -> list[Metric]:
    """The metrics of the table, in the order of `metrics.json`."""
    found = (declared(name) for name in metrics if name.startswith("test/"))
    return [one for one in found if one is not None and "run" in one.tables]


def places(metrics: Mapping[str, float]) -> dict[str, str]:
    """The rows of the table: title, and where in `metrics.json` its values stand."""
    return CHOSEN if any(name.startswith("last/") for name in metrics) else LAST


def cells(metrics: Mapping[str, float], place: str, of: Sequence[Metric]) -> list[str]:
    """What some metrics are at a place, as people write it; nothing where they are not there."""
    return [one.written(metrics.get(f"{place}/{one.name}")) for one in of]


def monitor(metrics: Mapping[str, float]) -> str:
    """Which part of the split chose the best checkpoint, `test` or `validation`."""
    return "validation" if "best_on_validation/step" in metrics else "test"


def tested(metrics: Mapping[str, float]) -> str:
    """What a run was tested on, in words."""
    if "data/gallery/images" not in metrics:
        return f"{metrics['data/test/images']} test images of {metrics['data/test/classes']} unseen classes"
    return (
        f"{metrics['data/query/images']} queries of {metrics['data/query/classes']} unseen classes among "
        f"{metrics['data/gallery/images']} gallery images"
    )


def print_table(metrics: Mapping[str, float]) -> None:
    """Prints the metrics of a run, in blocks where the terminal is too narrow for all of them."""

    def table_of(names: Sequence[str]) -> Table:
        table, of = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False), [metric(name) for name in names]
        table.add_column("", no_wrap=True)
        for one in of:
            table.add_column(one.short or one.title, justify="right", no_wrap=True)
        for title, place in places(metrics).items():
            table.add_row(title, *cells(metrics, place, of))
        return table

    print(f"\n{tested(metrics)}")
    print_in_blocks([one.name for one in columns(metrics)], table_of)
    print(f"R@K: Recall@K\n{CAPTIONS[monitor(metrics)]}")

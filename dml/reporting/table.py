"""The table at the end of a run."""

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

LAST = {"last": "test", "mean learner": "learners/mean", "best on test *": "best_on_test", "untrained": "untrained"}
CHOSEN = {"chosen *": "test", "mean learner": "learners/mean", "last": "last", "untrained": "untrained"}
CAPTIONS = {
    "test": "* chosen by its figures on the test set: an optimistic figure",
    "validation": "* the best checkpoint on validation classes, which are not in the test",
}
NAMES = {
    "precision@1": "P@1",
    "r_precision": "R-Prec",
    "map@r": "MAP@R",
    "map": "mAP",
    "map_toolkit": "mAP (toolkit)",
    "nmi": "NMI",
    "f1": "F1",
}


def rows(metrics: Mapping[str, float]) -> tuple[list[str], dict[str, list[float | None]]]:
    """Columns (metric names of `metrics.json` without their prefix) and, for each row's title, its figures."""
    # precision@1 is Recall@1 by another name; metrics.json has both
    left_out = ("test/queries", "test/queries_without_positive", "test/precision@1", "test/std_over_draws")
    columns = [name.removeprefix("test/") for name in metrics if name.startswith("test/") and name not in left_out]
    titles = CHOSEN if any(name.startswith("last/") for name in metrics) else LAST
    figures = {title: [metrics.get(f"{prefix}/{name}") for name in columns] for title, prefix in titles.items()}
    return columns, figures


def monitor(metrics: Mapping[str, float]) -> str:
    """Which part of the split chose the best checkpoint, `test` or `validation`."""
    return "validation" if "best_on_validation/step" in metrics else "test"


def title(column: str) -> str:
    """How people write the metric `column`."""
    return NAMES.get(column, column.replace("recall", "Recall"))


def tested(metrics: Mapping[str, float]) -> str:
    """What a run was tested on, in words."""
    if "data/gallery/images" not in metrics:
        return f"{metrics['data/test/images']} test images of {metrics['data/test/classes']} unseen classes"
    return (
        f"{metrics['data/query/images']} queries of {metrics['data/query/classes']} unseen classes among "
        f"{metrics['data/gallery/images']} gallery images"
    )


def print_table(metrics: Mapping[str, float]) -> None:
    """Prints the figures of a run as fractions."""
    columns, figures = rows(metrics)
    table = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        title=tested(metrics),
        caption=f"R@K: Recall@K; {CAPTIONS[monitor(metrics)]}",
    )
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(title(column).replace("Recall", "R"), justify="right", no_wrap=True)
    for name, values in figures.items():
        table.add_row(name, *("" if value is None else f"{value:.4f}" for value in values))
    Console().print(table)

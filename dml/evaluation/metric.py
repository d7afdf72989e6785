"""The metrics, each declared once: its name and title, its format, which way is better, and which tables show it.

In `metrics.json` the name of a metric follows a place: in `test/recall@1` and `learners/mean/recall@1` the places are
`test` and `learners/mean`. b queries of a block, L items of the largest class in it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

OfQuery = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Metric:
    """The declaration of one metric.

    Attributes:
        name: the last part of its names in `metrics.json`; `@K` at the end stands for any number.
        title: the name as people write it.
        higher_is_better: None: neither way is better.
        unit: empty for a share, 0 to 1, and for a coefficient.
        format: a format specification of Python's.
        per_learner: whether it is also computed for each learner, slice and group of learners.
        of_query: computes the metric's value of each query; the metric is their mean. It maps the ranks of the queries'
            positives, `[b,L]`, the nearest first, and their number R, `[b]`, to values `[b]` float64. Ranks up to R are
            exact; larger ones, and those of padding, are only known to be above R.
        tables: `run`: the table of one run shows it; `compare`: two runs are compared by it.
        places: the places whose values are columns in tables of several runs, with the titles of the columns.
    """

    name: str
    title: str
    higher_is_better: bool | None = True
    unit: str = ""
    format: str = ".4f"
    per_learner: bool = False
    of_query: OfQuery | None = None
    tables: tuple[Literal["run", "compare"], ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)

    def written(self, value: float | None) -> str:
        """Formats a value; empty for None."""
        return "" if value is None else f"{value:{self.format}}"

    def change(self, value: float, ends: Sequence[float] = ()) -> str:
        """Formats a difference with its sign, followed by the ends of its interval if they are given."""
        low_high = ", ".join(f"{end:+{self.format}}" for end in ends)
        return f"{value:+{self.format}}" + (f" [{low_high}]" if ends else "")

    def better(self, value: float, than: float | None) -> bool:
        """Returns whether a value is better than another; every value is better than None."""
        assert self.higher_is_better is not None
        return than is None or (value > than if self.higher_is_better else value < than)


def _first_is_right(ranks: Tensor, count: Tensor) -> Tensor:
    return (ranks[:, 0] == 1).double()


def _r_precision(ranks: Tensor, count: Tensor) -> Tensor:
    """Returns the share of positives among the R nearest items."""
    return (ranks <= count[:, None]).sum(1) / count.double()


def _average_precision_at_r(ranks: Tensor, count: Tensor) -> Tensor:
    """Returns 1/R * sum of i / r_i over positives of rank r_i <= R (Musgrave et al. 2020, section 3.2)."""
    order = torch.arange(1, ranks.shape[1] + 1, device=ranks.device)
    return _in_pairs((ranks <= count[:, None]) * order / ranks.double()) / count


def _in_pairs(terms: Tensor) -> Tensor:
    """Sums rows `[Q,L]` by pairs of neighbours. Other rows, and more columns of zeros, do not change this order."""
    while terms.shape[1] > 1:
        terms = pad(terms, (0, terms.shape[1] % 2))
        terms = terms[:, ::2] + terms[:, 1::2]
    return terms[:, 0]


HEADLINE = "recall@1"  # the metric to show where there is room for one only

RERANKED, GAIN = "rerank", "rerank_gain"  # places for metrics of the re-ranked test, and for their gain over the test

# In the order of tables. Counts and remarks are better neither way.
METRICS = (
    Metric(
        HEADLINE,
        "Recall@1",
        per_learner=True,
        tables=("run", "compare"),
        places={
            "test": "Recall@1",
            RERANKED: "re-ranked",
            GAIN: "gained by it",
            "untrained": "untrained",
            "learners/mean": "mean learner",
            "slices/mean": "mean slice",
        },
    ),
    Metric("recall@K", "Recall@K", per_learner=True, tables=("run",)),
    # Recall@1 by another name, so no table shows it.
    Metric("precision@1", "P@1", per_learner=True, of_query=_first_is_right),
    Metric("r_precision", "R-Prec", per_learner=True, of_query=_r_precision, tables=("run",)),
    Metric(
        "map@r",
        "MAP@R",
        per_learner=True,
        of_query=_average_precision_at_r,
        tables=("run", "compare"),
        places={"test": "MAP@R", RERANKED: "re-ranked MAP@R", GAIN: "gained in MAP@R"},
    ),
    Metric("map", "mAP", per_learner=True, tables=("run", "compare"), places={"test": "mAP"}),
    Metric("map_toolkit", "mAP (toolkit)", per_learner=True, tables=("run",)),
    Metric("nmi", "NMI", tables=("run",)),
    Metric("f1", "F1", tables=("run",)),
    Metric("std_over_draws", "std of Recall@1 over draws", higher_is_better=None),
    Metric("queries", "queries", higher_is_better=None, format=",.0f"),
    Metric("queries_without_positive", "queries without a positive", higher_is_better=None, format=",.0f"),
    Metric("gain", "gain", places={"": "gain"}),
    Metric("self_cosine", "self cosine", higher_is_better=None, places={"learners": "self cosine"}),
    Metric(
        "correlation",
        "correlation",
        higher_is_better=None,
        places={"learners": "correlation", "slices": "correlation of slices"},
    ),
    Metric("params", "parameters", higher_is_better=False, format=",.0f", places={"model": "parameters"}),
    Metric("flops", "multiply-adds", higher_is_better=False, format=",.0f", places={"model": "multiply-adds"}),
    Metric("steps", "steps", higher_is_better=None, format=",.0f"),
    Metric("seconds", "training seconds, without evaluation", higher_is_better=False, unit="s", format=".1f"),
    Metric("images_per_second", "images a second", unit="1/s", format=".1f"),
)

_BY_NAME = {metric.name: metric for metric in METRICS}


def declared(name: str) -> Metric | None:
    """Returns the metric of a name, with or without its place, or None; `recall@4` is declared as `recall@K`."""
    name = name.removesuffix("/std").removesuffix("/mean").rsplit("/", 1)[-1]
    if name in _BY_NAME:
        return _BY_NAME[name]
    found = re.fullmatch(r"(\w+@)([1-9]\d*)", name)
    if found is None or (general := _BY_NAME.get(f"{found[1]}K")) is None:
        return None
    return replace(general, name=name, title=general.title.replace("@K", f"@{found[2]}"))


def metric(name: str) -> Metric:
    """Returns the metric of a name, as `declared` does.

    Raises:
        KeyError: it is not declared.
    """
    found = declared(name)
    if found is None:
        raise KeyError(f"the metric {name} is not declared: add it to METRICS in dml/evaluation/metric.py.")
    return found


def of_queries() -> dict[str, OfQuery]:
    """Returns `Metric.of_query` of each metric that is a mean over the queries, by name."""
    return {metric.name: metric.of_query for metric in METRICS if metric.of_query is not None}


def of_a_query() -> list[str]:
    """Returns the names of all metrics, of any protocol, that have a value for each query; without Recall@K."""
    return [one.name for one in METRICS if one.of_query is not None or one.name in ("map", "map_toolkit")]


def of_runs() -> Iterator[tuple[str, str, Metric]]:
    """Yields the columns of tables of several runs: name in `metrics.json`, title, metric."""
    for one in METRICS:
        for place, title in one.places.items():
            yield f"{place}/{one.name}".lstrip("/"), title, one

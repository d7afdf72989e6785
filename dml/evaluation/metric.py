"""The metrics, each declared once: its name, how it is written, which way is better, and in which tables it stands.

In `metrics.json` a metric stands behind a place, as `test/recall@1` and `learners/mean/recall@1`.
b queries of a block, L items of the largest class in it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

OfQuery = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Metric:
    """What is known of a metric.

    Attributes:
        name: the last part of its names in `metrics.json`; `@K` at its end stands for any number.
        title: as people write it.
        higher_is_better: None: neither way.
        unit: none of a share, 0 to 1, and of a coefficient.
        format: as Python's.
        per_learner: of each learner, slice and group of learners too.
        of_query: ranks `[b,L]` of the queries' positives, the nearest first, and how many there are, `[b]`, R -> `[b]`
            float64, of which the metric is the mean. Ranks up to R are exact; of others it is only known that they
            are above R, and so are those of padding.
        tables: `run`: it is a column of the table of a run; `compare`: two runs are compared by it.
        places: where its values are columns of tables of several runs, and their titles.
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
        """A value in its format; nothing for None."""
        return "" if value is None else f"{value:{self.format}}"

    def change(self, value: float, ends: Sequence[float] = ()) -> str:
        """By how much it differs, with its sign, and the ends of the interval of that where they are known."""
        low_high = ", ".join(f"{end:+{self.format}}" for end in ends)
        return f"{value:+{self.format}}" + (f" [{low_high}]" if ends else "")

    def better(self, value: float, than: float | None) -> bool:
        """Whether a value is the better one of two; the first one is better than None."""
        assert self.higher_is_better is not None
        return than is None or (value > than if self.higher_is_better else value < than)


def _first_is_right(ranks: Tensor, count: Tensor) -> Tensor:
    return (ranks[:, 0] == 1).double()


def _r_precision(ranks: Tensor, count: Tensor) -> Tensor:
    """Share of positives among the R nearest items."""
    return (ranks <= count[:, None]).sum(1) / count.double()


def _average_precision_at_r(ranks: Tensor, count: Tensor) -> Tensor:
    """1/R * sum of i / r_i over positives of rank r_i <= R (Musgrave et al. 2020, section 3.2)."""
    order = torch.arange(1, ranks.shape[1] + 1, device=ranks.device)
    return ((ranks <= count[:, None]) * order / ranks.double()).sum(1) / count


HEADLINE = "recall@1"  # what stands for a run where there is room for one metric

RERANKED, GAIN = "rerank", "rerank_gain"  # places of a test that was ranked a second time, and of what that gained

# In the order of tables. What is no better either way is a count or a remark.
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
    # Recall@1 by another name, of which a table has one.
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
    """The metric of a name, with its place or without (`recall@4` is `recall@K`); None: it is not declared."""
    name = name.removesuffix("/std").removesuffix("/mean").rsplit("/", 1)[-1]
    if name in _BY_NAME:
        return _BY_NAME[name]
    found = re.fullmatch(r"(\w+@)([1-9]\d*)", name)
    if found is None or (general := _BY_NAME.get(f"{found[1]}K")) is None:
        return None
    return replace(general, name=name, title=general.title.replace("@K", f"@{found[2]}"))


def metric(name: str) -> Metric:
    """As `declared`. Raises KeyError where it is not."""
    found = declared(name)
    if found is None:
        raise KeyError(f"{name} is declared nowhere: dml/evaluation/metric.py has the metrics.")
    return found


def of_queries() -> dict[str, OfQuery]:
    """Of each metric that is a mean over the queries, what it is of a query."""
    return {metric.name: metric.of_query for metric in METRICS if metric.of_query is not None}


def of_a_query() -> list[str]:
    """Names of metrics that have a value of each query, whatever protocol has them; without Recall@K."""
    return [one.name for one in METRICS if one.of_query is not None or one.name in ("map", "map_toolkit")]


def of_runs() -> Iterator[tuple[str, str, Metric]]:
    """The columns of tables of several runs: name in `metrics.json`, title, metric."""
    for one in METRICS:
        for place, title in one.places.items():
            yield f"{place}/{one.name}".lstrip("/"), title, one

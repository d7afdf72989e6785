"""Metrics that are declared once stand wherever their declaration says, and a protocol's trainings likewise."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch.nn import functional as F

from dml.analysis.comparison import paired
from dml.configuration.identity import configuration, flat, repeats
from dml.configuration.trainings import Axis, axes_of, settle, trainings_of
from dml.errors import UserError
from dml.evaluation import metric as declarations
from dml.evaluation.evaluator import Embedded, score
from dml.evaluation.identities import AcrossCameras, OneImageGallery
from dml.evaluation.layout import Layout
from dml.evaluation.metric import METRICS, Metric, declared, metric
from dml.evaluation.metrics import evaluate, rank, rank_scores
from dml.evaluation.protocol import MLRC, Conventional, RandomClassSplit
from dml.evaluation.splits import Split
from dml.reporting.table import cells, columns, print_table

Configure = Callable[..., DictConfig]


def test_names_titles_and_directions() -> None:
    assert metric("test/recall@4").title == metric("recall@4").title == "Recall@4"
    assert metric("learners/mean/map@r").title == metric("mlrc/separated/map@r/mean").title == "MAP@R"
    assert metric("model/flops").written(7459838976) == "7,459,838,976"
    assert metric("model/flops").better(1, than=2)
    assert metric("recall@1").better(2, than=1)
    assert not metric("recall@1").better(1, than=1)
    assert metric("map@r").better(0.0, than=None)
    assert declared("train/loss") is declared("recall@0") is None
    with pytest.raises(KeyError, match="the metric recall@x is not declared"):
        metric("recall@x")
    assert len({one.name for one in METRICS}) == len(METRICS)


def embedded(learners: int = 2, images: int = 24) -> Embedded:
    points = torch.randn(images, learners, 4, generator=torch.Generator().manual_seed(0))
    return Embedded(F.normalize(points, dim=-1), torch.arange(images) % 4, torch.arange(images))


@pytest.fixture
def one_more(monkeypatch: pytest.MonkeyPatch) -> str:
    """A metric of a query, declared beside the others: how many positives are among the nearest two, of two."""

    def of_query(ranks: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return (ranks <= 2).sum(1).double() / 2

    new = Metric(
        "first_two", "first two", per_learner=True, of_query=of_query, tables=("run", "compare"), places={"test": "two"}
    )
    monkeypatch.setattr(declarations, "METRICS", (*METRICS, new))
    monkeypatch.setattr("dml.analysis.comparison.METRICS", (*METRICS, new))
    monkeypatch.setitem(declarations._BY_NAME, new.name, new)
    return new.name


@pytest.mark.parametrize(
    ("of_query", "said"),
    [
        (
            lambda ranks, count: (ranks <= 2).sum(1) / (count > 5),
            "returns NaN or infinity for 24 queries: return a number",
        ),
        (lambda ranks, count: None, r"returns NoneType for \d+ queries: return \[b\], a number for each"),
        (lambda ranks, count: ranks[:, :1], r"returns a tensor of shape \[24, 1\] for 24 queries: return \[b\]"),
        (lambda ranks, count: ranks.sum(), r"returns a tensor of shape \[\] for 24 queries"),
    ],
)
def test_a_metric_that_gives_no_number_for_each_query_is_told(
    monkeypatch: pytest.MonkeyPatch, of_query: Callable[..., torch.Tensor], said: str
) -> None:
    """Before the first step, and not by a metrics.json that no command reads."""
    new = Metric("mine", "mine", per_learner=True, of_query=of_query)
    monkeypatch.setattr(declarations, "METRICS", (*METRICS, new))
    given = embedded()
    points = given.embeddings.flatten(1)
    with pytest.raises(UserError, match=f"of_query of the metric mine {said}"):
        rank(points, given.labels)
    layout = Layout.of(given.labels, None)
    with pytest.raises(UserError, match=f"of_query of the metric mine {said}"):
        rank_scores(lambda at: points[at] @ points.T, layout)


def test_a_metric_may_be_nan_for_a_query_without_a_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Metric("mine", "mine", per_learner=True, of_query=lambda ranks, count: 1 / (count > 0) / (count > 0) - 1)
    monkeypatch.setattr(declarations, "METRICS", (*METRICS, new))
    labels = torch.tensor([0, 0, 1])
    assert evaluate(torch.rand(3, 4), labels)["mine"] == 0


def test_a_new_metric_stands_in_every_table(one_more: str, tmp_path: Path) -> None:
    given = embedded()
    split = Split(np.arange(0), given.rows.numpy(), None)
    metrics = Conventional(clustering=False).score(given, split, "test", final=True)
    alone = rank(given.embeddings[:, 1], given.labels).values[one_more].mean()
    assert metrics[f"learners/1/{one_more}"] == alone
    assert metrics[f"test/{one_more}"] == evaluate(given.embeddings.flatten(1), given.labels)[one_more]
    assert columns(metrics)[-1].title == "first two"
    assert cells(metrics, "learners/1", columns(metrics))[-1] == f"{alone:.4f}"
    assert (f"test/{one_more}", "two") in [(name, title) for name, title, _ in declarations.of_runs()]
    assert one_more in MLRC(fold=0, repeat=0).criteria("validation")
    ranking = rank(given.embeddings.flatten(1), given.labels)
    arrays = {"paths": np.arange(24).astype(str), "classes": given.labels.numpy().astype(str)}
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        np.savez(tmp_path / side / "queries.npz", **arrays, best_rank=ranking.best_rank, **ranking.values)  # type: ignore[arg-type]
    known = {"recall@1", *ranking.values}
    compared = [of.name for of in declarations.METRICS if "compare" in of.tables and of.name in known]
    assert compared[-1] == one_more
    assert list(paired([tmp_path / "a"], [tmp_path / "b"]).values) == compared
    without = {name: values for name, values in ranking.values.items() if name != one_more}
    np.savez(tmp_path / "b" / "queries.npz", **arrays, best_rank=ranking.best_rank, **without)  # type: ignore[arg-type]
    assert list(paired([tmp_path / "a"], [tmp_path / "b"]).values) == compared[:-1]  # of before it was declared


def test_what_is_below_the_untrained_network_is_marked_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """Of whatever metric: here the headline is not."""
    metrics = {"test/recall@1": 0.5, "untrained/recall@1": 0.4, "test/map@r": 0.1, "untrained/map@r": 0.2}
    print_table(metrics | {"data/test/images": 9, "data/test/classes": 3})
    said = capsys.readouterr().out
    assert "0.1000 ↓" in said
    assert "0.5000 ↓" not in said
    assert "↓ below the untrained network" in said


def test_what_is_not_declared_is_told() -> None:
    with pytest.raises(KeyError, match="the metric surprise is not declared"):
        score(embedded(), None, lambda queries, gallery: {"recall@1": 1.0, "surprise": 0.0}, final=False)


def test_twelve_metrics_have_room_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dml.reporting.table.Console", lambda: Console(width=80))
    names = [*(f"recall@{k}" for k in (1, 10, 100, 1000)), "r_precision", "map@r", "map", "map_toolkit", "nmi", "f1"]
    names += ["recall@2", "recall@4"]
    metrics = {f"test/{name}": 0.1234 + i / 1000 for i, name in enumerate(names)}
    print_table(metrics | {"data/test/images": 9, "data/test/classes": 3})
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said
    for name in names:
        assert f"{metrics[f'test/{name}']:.4f}" in said
        assert metric(name).title in said
    assert said.count("best on test*") == 1  # one table
    for place in ("untrained", "learners/mean", "learners/1"):  # all columns that there can be
        metrics |= {f"{place}/{name}": 0.9876 for name in names}
    metrics |= {f"test/{name}/{end}": 0.5 for name in ("recall@1", "map") for end in ("low", "high")}
    metrics |= {f"data/{part}/{what}": 1234 for part in ("query", "gallery") for what in ("images", "classes")}
    print_table(metrics)
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said
    assert said.count("0.5000–0.5000") == 2
    assert said.count("0.9876") == 2 * len(names)


@pytest.mark.parametrize(
    ("protocol", "metric", "known"),
    [
        (Conventional, "nmi", "recall@1, recall@2, recall@4, recall@8, precision@1, r_precision, map@r"),
        (AcrossCameras, "map@r", "recall@8, map, map_toolkit"),
        (OneImageGallery, "recall@3", "recall@8, map"),
        (Conventional, "queries", "map@r"),
    ],
)
def test_a_criterion_is_a_metric_of_what_is_monitored(protocol: type[Conventional], metric: str, known: str) -> None:
    from tests.evaluation.test_splits import records

    with pytest.raises(UserError, match=rf"criterion={metric} is no metric of this protocol on its test.*{known}"):
        protocol(criterion=metric).split(records())
    name = known.split(", ")[-1]
    assert protocol(criterion=name).split(records()).monitor == "test"


class Starts(Conventional):
    """Several trainings that differ in their number alone."""

    axes = (Axis("start", "starts", repeats=True),)

    def __init__(self, *, start: int, starts: int = 3, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.axes[0].check(start, starts)


def test_a_new_axis_is_declared_by_its_protocol_alone(configure: Configure) -> None:
    config = configure("seed=5")
    OmegaConf.set_struct(config, False)
    config.runtime = {"train_classes": 3, "embedding_dim": 8}
    config.protocol.update(_target_=f"{__name__}.Starts", start=None, starts=2)
    assert trainings_of(config) == {"start_0": ["protocol.start=0"], "start_1": ["protocol.start=1"]}
    assert repeats(config) == {"seed", "protocol.start"}
    assert "protocol.starts" not in flat(config, config.runtime)  # more of them change none
    one, other = config.copy(), config.copy()
    one.protocol.start, other.protocol.start = 0, 1
    assert configuration(one) == configuration(other)
    settle(one)
    settle(other)
    assert len({5, one.seed, other.seed}) == 3
    open_run = config.copy()
    settle(open_run)
    assert open_run.seed == 5
    with pytest.raises(UserError, match=r"protocol\.start=3 is none of the 3 starts: they are 0 to 2"):
        Starts(start=3)


def test_only_our_own_modules_are_imported_for_axes() -> None:
    assert axes_of({"_target_": "antigravity.Protocol"}) == ()
    assert axes_of({"_target_": "dml.evaluation.protocol.Nothing"}) == axes_of({}) == ()
    names = [[axis.name for axis in protocol.axes] for protocol in (Conventional, MLRC, RandomClassSplit)]
    assert names == [[], ["repeat", "fold"], ["split"]]

"""A run that ranks its test again says so beside the plain figures."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from torch.nn import functional as F

from dml.analysis.comparison import over_classes
from dml.analysis.reranked import reranked
from dml.errors import UserError
from dml.evaluation.evaluator import Embedded
from dml.evaluation.layout import Layout
from dml.evaluation.metric import declared
from dml.evaluation.metrics import rank, rank_scores
from dml.evaluation.protocol import Conventional
from dml.evaluation.reranking import AlphaQE, KReciprocal
from dml.evaluation.splits import Split
from dml.reporting.summary import write_summary
from dml.runs.collecting import FinishedRun, Group
from dml.runs.scores import read_queries
from dml.training.build import build
from dml.training.run import run
from tests.components import components
from tests.conftest import TINY

Configure = Callable[..., DictConfig]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in components("rerank") if name != "none"])
def test_beside_the_plain_figures(configure: Configure, tmp_path: Path, name: str) -> None:
    options = [*TINY, "trainer.max_steps=5", "protocol.clustering=false", f"rerank={name}"]
    run(configure(*options), options)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    plain = read_queries(tmp_path / "run")
    for metric in ("recall@1", "map@r"):
        assert 0 <= metrics[f"rerank/{metric}"] <= 1
        gain = metrics[f"rerank/{metric}"] - metrics[f"test/{metric}"]
        assert metrics[f"rerank_gain/{metric}"] == pytest.approx(gain, abs=1e-12)
        assert metrics[f"rerank_gain/{metric}/low"] <= gain <= metrics[f"rerank_gain/{metric}/high"]
        own = plain.metric(metric)
        assert own is not None
        assert own.mean() == pytest.approx(metrics[f"test/{metric}"])
    assert metrics["rerank/recall@1"] != metrics["test/recall@1"] or metrics["rerank/map@r"] != metrics["test/map@r"]
    assert all(declared(one.removesuffix("/low").removesuffix("/high")) for one in metrics if one.startswith("rerank"))
    assert not any(one.startswith("rerank") for one in metrics if "untrained" in one)


def tables(printed: str) -> list[str]:
    """The lines of a run's output without bars, which know the width of a terminal alone, and paths."""
    return [line for line in printed.split("Report:")[0].splitlines() if "it/s" not in line]


@pytest.mark.slow
def test_terminal_page_and_comparison_show_it_beside_the_plain_figures(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = [*TINY, "trainer.max_steps=2", "protocol.clustering=false", "report=true", "rerank=k_reciprocal"]
    metrics = run(configure(*options), options)
    low, high = (f"{metrics[f'rerank_gain/recall@1/{end}']:+.4f}" for end in ("low", "high"))
    gain = f"{metrics['rerank_gain/recall@1']:+.4f} [{low}, {high}]"
    cells = [f"{metrics[f'{place}/recall@1']:.4f}" for place in ("test", "rerank")]
    printed = capsys.readouterr().out
    assert re.search(r"Recall@1 +" + r" +".join(map(re.escape, [*cells, gain])), printed)
    assert max(map(len, tables(printed))) <= 80
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Re-ranked: KReciprocal (k1 20, k2 6, share 0.3)" in page
    assert "".join(f"<td>{cell}</td>" for cell in ("Recall@1", *cells, gain)) in page
    options = [*options[:-1], "seed=1", f"paths.output_dir={tmp_path / 'plain'}"]
    run(configure(*options), options)
    assert "Re-ranked" not in (tmp_path / "plain" / "report.html").read_text()
    assert "re-ranked" not in capsys.readouterr().out
    summary = write_summary([tmp_path], tmp_path / "summary").read_text()
    assert f"<td>{cells[0]}</td><td>{cells[1]}</td><td>{gain}</td>" in summary
    printed = capsys.readouterr().out
    assert gain in printed
    assert "of one run with its 95% interval over test classes" in printed
    assert max(map(len, tables(printed))) <= 80


def test_the_gain_of_several_runs_has_their_deviation(tmp_path: Path) -> None:
    """The interval of a mean is not the mean of intervals."""
    figures = [
        {"rerank_gain/map@r": v, "rerank_gain/map@r/low": 0.0, "rerank_gain/map@r/high": 1.0} for v in (0.1, 0.3)
    ]
    several = [FinishedRun(tmp_path, None, [], one) for one in figures]
    assert Group("", several[:1], {}).cell("rerank_gain/map@r") == "+0.1000 [+0.0000, +1.0000]"
    assert Group("", several, {}).cell("rerank_gain/map@r") == "+0.2000±0.1414"


def test_the_interval_is_that_of_two_runs_compared() -> None:
    """Classes are drawn with all their queries, for both rankings the same ones."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(9).repeat_interleave(8)
    points = torch.randn(9, 4, generator=random)[labels] + torch.randn(72, 4, generator=random)
    embedded = Embedded(F.normalize(points, dim=-1)[:, None], labels, torch.arange(72))
    split, protocol = Split(np.arange(0), np.arange(72), None), Conventional()
    protocol.rerank = AlphaQE(n=3)
    found = reranked(protocol, split, embedded)
    flat = embedded.embeddings.flatten(1)
    plain, again = rank(flat, labels), rank_scores(AlphaQE(n=3).scores(flat, None), Layout.of(labels, None))
    for name, (a, b) in {
        "recall@1": ((plain.best_rank == 1).astype(float), (again.best_rank == 1).astype(float)),
        "map@r": (plain.values["map@r"], again.values["map@r"]),
    }.items():
        expected = over_classes(a, b, labels.numpy())
        assert (a != b).any()
        ends = [found[f"rerank_gain/{name}/{end}"] for end in ("low", "high")]
        assert [found[f"rerank_gain/{name}"], *ends] == pytest.approx(
            [expected.estimate, expected.low, expected.high], abs=1e-12
        )


def test_an_ensemble_is_ranked_again_by_cosines_and_queries_without_a_positive_gain_nothing() -> None:
    """Learners of unit norm side by side are longer than 1, which is no cosine."""
    random = torch.Generator().manual_seed(0)
    labels = torch.cat([torch.arange(6).repeat_interleave(9), torch.tensor([6, 6])])
    points = torch.randn(7, 2, 4, generator=random)[labels] + 0.9 * torch.randn(56, 2, 4, generator=random)
    embedded = Embedded(F.normalize(points, dim=-1), labels, torch.arange(56))
    query, gallery = np.append(np.arange(54)[::3], [54, 55]), np.setdiff1d(np.arange(54), np.arange(54)[::3])
    protocol = Conventional()
    protocol.rerank = KReciprocal(k1=6, k2=3)
    found = reranked(protocol, Split(np.arange(0), query, gallery), embedded)
    flat = embedded.embeddings.flatten(1) / 2**0.5
    layout = Layout.of(labels[query], labels[gallery])
    again = rank_scores(protocol.rerank.scores(flat[query], flat[gallery]), layout)
    plain = rank(flat[query], labels[query], gallery=flat[gallery], gallery_labels=labels[gallery])
    assert (plain.positives > 0).tolist() == [True] * 18 + [False] * 2
    assert found["rerank/map@r"] == pytest.approx(again.values["map@r"][:18].mean(), abs=1e-12)
    expected = over_classes(plain.values["map@r"][:18], again.values["map@r"][:18], labels[query][:18].numpy())
    ends = [found[f"rerank_gain/map@r/{end}"] for end in ("low", "high")]
    assert [found["rerank_gain/map@r"], *ends] == pytest.approx(
        [expected.estimate, expected.low, expected.high], abs=1e-12
    )
    assert expected.estimate != 0


def test_what_has_no_one_gallery_is_refused(configure: Configure) -> None:
    with pytest.raises(UserError, match="rerank re-ranks one gallery for all queries, but OneImageGallery has"):
        build(configure(*TINY, "protocol=vehicleid", "rerank=alpha_qe"))

"""A run that ranks its test again says so beside the plain figures."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig

from dml.analysis.comparison import over_classes
from dml.errors import UserError
from dml.evaluation.metric import declared
from dml.runs.scores import read_queries
from dml.training.build import build
from dml.training.run import run
from tests.components import components
from tests.conftest import TINY

Configure = Callable[..., DictConfig]


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
        assert metrics[f"rerank_gain_low/{metric}"] <= gain <= metrics[f"rerank_gain_high/{metric}"]
        own = plain.metric(metric)
        assert own is not None
        assert own.mean() == pytest.approx(metrics[f"test/{metric}"])
    assert metrics["rerank/recall@1"] != metrics["test/recall@1"] or metrics["rerank/map@r"] != metrics["test/map@r"]
    assert all(declared(one) for one in metrics if one.startswith("rerank"))
    assert not any(one.startswith("rerank") for one in metrics if "untrained" in one)


def test_the_interval_is_that_of_two_runs_compared() -> None:
    """Classes are drawn with all their queries, for both rankings the same ones."""
    random = np.random.default_rng(0)
    classes, a = random.integers(0, 9, 200), random.random(200)
    same = over_classes(a, a + 0.25, classes, 200)
    assert (same.low, same.high) == (pytest.approx(0.25), pytest.approx(0.25))


def test_what_has_no_one_gallery_is_refused(configure: Configure) -> None:
    with pytest.raises(UserError, match="rerank ranks one gallery again for all queries, and OneImageGallery has"):
        build(configure(*TINY, "protocol=vehicleid", "rerank=alpha_qe"))

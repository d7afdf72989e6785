"""The interval of a headline figure, against a literal loop."""

import numpy as np
import pytest
import torch

from dml.evaluation.interval import intervals, over_classes
from dml.evaluation.metrics import Ranking, rank


def test_over_classes_is_a_literal_loop() -> None:
    random = np.random.default_rng(0)
    classes = np.repeat(np.arange(9), [3, 9, 2, 5, 5, 1, 8, 4, 4])
    values = random.random(len(classes))
    estimate, low, high, drawn = over_classes(values, classes, draws=4000)
    assert estimate == pytest.approx(values.mean())
    means = []
    for _ in range(4000):
        chosen = random.integers(9, size=9)
        means.append(np.concatenate([values[classes == c] for c in chosen]).mean())
    assert (low, high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.012)
    assert len(drawn) == 4000


def test_ends_are_around_the_figures_of_counted_queries() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.cat([torch.arange(12).repeat_interleave(5), torch.tensor([99])])  # the last one is alone
    points = torch.randn(12, 4, generator=generator)[labels.clamp(max=11)] + torch.randn(61, 4, generator=generator)
    ranking = rank(points, labels)
    found = intervals(ranking, labels.numpy(), draws=500)
    assert list(found) == ["recall@1/low", "recall@1/high", "map@r/low", "map@r/high"]
    assert found["recall@1/low"] < (ranking.best_rank[:60] == 1).mean() < found["recall@1/high"]
    assert found["map@r/low"] < ranking.values["map@r"][:60].mean() < found["map@r/high"]
    _, *ends, _ = over_classes(ranking.values["map@r"][:60], labels[:60].numpy(), draws=500)
    assert [found["map@r/low"], found["map@r/high"]] == pytest.approx(ends, abs=1e-12)
    without = Ranking(ranking.best_rank[:60], {"map@r": ranking.values["map@r"][:60]}, ranking.positives[:60])
    assert intervals(without, labels[:60].numpy(), draws=500) == found


def test_one_class_has_none() -> None:
    assert intervals(Ranking(np.ones(4), {"map@r": np.ones(4)}, np.ones(4)), np.zeros(4)) == {}

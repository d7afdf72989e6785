import itertools
import math
import sys

import faiss
import numpy as np
import pytest

from dml.errors import UserError
from dml.evaluation.clustering import _sortable, clustering_scores, kmeans
from dml.evaluation.metrics import evaluate


def nmi_by_definition(assignment, labels) -> float:
    n = len(labels)

    def entropy(partition) -> float:
        return -sum(partition.count(x) / n * math.log(partition.count(x) / n) for x in set(partition))

    both = list(zip(assignment, labels, strict=True))
    information = entropy(assignment) + entropy(labels) - entropy(both)
    return information / ((entropy(assignment) + entropy(labels)) / 2)


def f1_by_definition(assignment, labels) -> float:
    together = hits = relevant = 0
    for i, j in itertools.combinations(range(len(labels)), 2):
        together += assignment[i] == assignment[j]
        relevant += labels[i] == labels[j]
        hits += assignment[i] == assignment[j] and labels[i] == labels[j]
    precision, recall = hits / together, hits / relevant
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize("classes", [2, 7, 25])
def test_scores_are_those_of_the_definitions(classes):
    draw = np.random.default_rng(classes)
    labels = draw.integers(0, classes, 60)
    assignment = np.where(draw.random(60) < 0.6, labels, draw.integers(0, classes, 60))
    scores = clustering_scores(assignment, labels)
    assert scores["nmi"] == pytest.approx(nmi_by_definition(assignment.tolist(), labels.tolist()), abs=1e-12)
    assert scores["f1"] == pytest.approx(f1_by_definition(assignment.tolist(), labels.tolist()), abs=1e-12)


def test_the_same_partition_under_other_names_is_perfect():
    labels = np.random.default_rng(0).integers(0, 6, 50)
    assert clustering_scores(100 - 3 * labels, labels) == pytest.approx({"nmi": 1, "f1": 1})


def test_single_points_agree():
    assert clustering_scores(np.arange(9), np.arange(9)[::-1]) == pytest.approx({"nmi": 1, "f1": 1})


def test_all_points_are_clustered(monkeypatch):
    """By default faiss takes 256 points a centroid, and more steps."""
    given = {}

    class Spied(faiss.Kmeans):
        def __init__(self, d, k, **options):
            given.update(options)
            super().__init__(d, k, **options)

        def train(self, x):
            trained.append(x)
            return super().train(x)

    trained = []
    monkeypatch.setattr(faiss, "Kmeans", Spied)
    points = np.random.default_rng(0).standard_normal((700, 4)).round()
    kmeans(points, 2, seed=7)
    counts = [np.unique(one, axis=0, return_counts=True)[1].tolist() for one in (points, trained[0])]
    assert counts[0] == counts[1]  # equal points pull on a centroid each
    assert max(counts[0]) > 10
    expected = {"niter": 20, "seed": 7, "min_points_per_centroid": 1, "max_points_per_centroid": 700}
    assert given == expected


def test_separated_classes_are_found_silently_and_alike(capfd):
    """Class 0 has more than 256 points a centroid, class 1 fewer than 39: faiss would sample, and warn."""
    draw = np.random.default_rng(0)
    labels = np.repeat([0, 1], [1200, 4])
    embeddings = np.eye(8)[labels] * 50 + draw.standard_normal((1204, 8))
    figures = evaluate(embeddings, labels, seed=3)
    assert figures["nmi"] == pytest.approx(1)
    assert figures["f1"] == pytest.approx(1)
    assert evaluate(embeddings, labels, seed=3) == figures
    assert capfd.readouterr() == ("", "")


def test_a_seed_gives_the_same_clusters_and_another_seed_others():
    embeddings = np.random.default_rng(0).standard_normal((300, 4))
    first = kmeans(embeddings, 30, seed=1)
    np.testing.assert_array_equal(kmeans(embeddings, 30, seed=1), first)
    assert (kmeans(embeddings, 30, seed=2) != first).any()


def test_missing_faiss_names_the_extras(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match=r"pip install '\.\[cpu\]' or '\.\[gpu\]'"):
        evaluate(np.eye(4), np.array([0, 0, 1, 1]))
    assert "nmi" not in evaluate(np.eye(4), np.array([0, 0, 1, 1]), clustering=False)


@pytest.mark.parametrize("factor", [1e19, 1e38, 1e-30])
def test_the_size_of_embeddings_changes_nothing(factor):
    """Of squares beyond float32 faiss aborts the interpreter."""
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(6), 10)
    embeddings = (np.eye(8)[labels] + 0.4 * draw.standard_normal((60, 8))).astype(np.float32)
    expected = evaluate(embeddings, labels)
    found = evaluate(embeddings * np.float32(2.0 ** round(np.log2(factor))), labels)
    assert found == expected
    for size in (factor, min(factor, 1) ** 5):  # far below float32; larger ones are refused
        found = evaluate(embeddings.astype(np.float64) * 2.0 ** round(np.log2(size)), labels)
        assert found == expected


def test_what_faiss_would_abort_of_is_refused():
    for broken in (np.nan, np.inf):
        with pytest.raises(UserError, match="NaN or infinity"):
            kmeans(np.array([[0.0, broken], [1.0, 1.0]]), 2, seed=0)
    with pytest.raises(UserError, match="3 clusters of 2 points"):
        kmeans(np.eye(2), 3, seed=0)


def test_the_order_of_storage_changes_no_cluster():
    """Rounded, so that many embeddings are equal, of several labels; zeros of both signs."""
    draw = np.random.default_rng(0)
    embeddings = draw.standard_normal((400, 3)).round(1).astype(np.float32)
    embeddings[:40] = 0.0
    embeddings[:20] *= -1
    labels = draw.integers(0, 50, 400)
    expected = evaluate(embeddings, labels)
    for _ in range(5):
        order = draw.permutation(400)
        found = evaluate(embeddings[order], labels[order])
        assert (found["nmi"], found["f1"]) == (expected["nmi"], expected["f1"])
    clusters = kmeans(embeddings, 50, seed=0)
    assert len(set(clusters[:40])) == 1


def test_rows_are_ordered_by_their_numbers():
    draw = np.random.default_rng(0)
    points = draw.standard_normal((200, 3)).astype(np.float32).round(1) + np.float32(0)
    np.testing.assert_array_equal(np.argsort(_sortable(points), kind="stable"), np.lexsort(points.T[::-1]))

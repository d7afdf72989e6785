"""Re-ranking against the authors' formulas, literally, in double precision and with all N x N numbers held."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dml.errors import UserError
from dml.evaluation import reranking
from dml.evaluation.layout import Layout
from dml.evaluation.metrics import rank, rank_scores
from dml.evaluation.reranking import AlphaQE, DatabaseAugmentation, Diffusion, KReciprocal, Reranker

pytestmark = pytest.mark.usefixtures("one_thread")

Literal = Callable[[np.ndarray, "np.ndarray | None"], np.ndarray]


def points(count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    found = random.normal(size=(8, 6))[np.arange(count) % 8] + 0.9 * random.normal(size=(count, 6))
    unit: np.ndarray = found / np.linalg.norm(found, axis=1, keepdims=True)
    return unit.astype(np.float32).astype(float)


def nearest(similarity: np.ndarray, k: int, own: int | None) -> list[int]:
    order = np.argsort(-similarity, kind="stable").tolist()
    return [one for one in order if one != own][:k]


def alpha_qe(queries: np.ndarray, gallery: np.ndarray | None) -> np.ndarray:
    items = queries if gallery is None else gallery
    found = []
    for i, query in enumerate(queries):
        new = query.copy()
        for j in nearest(items @ query, 5, i if gallery is None else None):
            new += max(0.0, float(items[j] @ query)) ** 3.0 * items[j]
        found.append(items @ (new / np.linalg.norm(new)))
    return np.array(found)


def database_augmentation(queries: np.ndarray, gallery: np.ndarray | None) -> np.ndarray:
    items = queries if gallery is None else gallery
    new = items.copy()
    for i, item in enumerate(items):
        for r, j in enumerate(nearest(items @ item, 5, i), 1):
            new[i] += (5 - r) / 5 * items[j]
    return queries @ (new / np.linalg.norm(new, axis=1, keepdims=True)).T


def k_reciprocal(queries: np.ndarray, gallery: np.ndarray | None) -> np.ndarray:
    return re_ranking(queries, gallery, k1=9, k2=3)


def k_reciprocal_of_many(queries: np.ndarray, gallery: np.ndarray | None) -> np.ndarray:
    return re_ranking(queries, gallery, k1=4, k2=8)


def k_reciprocal_of_seven(queries: np.ndarray, gallery: np.ndarray | None) -> np.ndarray:
    return re_ranking(queries, gallery, k1=7, k2=3)  # half of which is rounded up


def re_ranking(queries: np.ndarray, gallery: np.ndarray | None, *, k1: int, k2: int) -> np.ndarray:
    """The authors' `re_ranking`, line by line, in double instead of half precision."""
    lambda_value = 0.3
    feat = queries if gallery is None else np.append(queries, gallery, axis=0)
    query_num, all_num = len(queries), len(feat)
    original_dist = ((feat[:, None] - feat[None]) ** 2).sum(2)
    original_dist = np.transpose(original_dist / np.max(original_dist, axis=0))
    V = np.zeros_like(original_dist)
    initial_rank = np.argsort(original_dist, axis=1, kind="stable")
    for i in range(all_num):
        forward = initial_rank[i, : k1 + 1]
        backward = initial_rank[forward, : k1 + 1]
        reciprocal = forward[np.where(backward == i)[0]]
        expansion = reciprocal
        for candidate in reciprocal:
            forward_c = initial_rank[candidate, : int(np.around(k1 / 2.0)) + 1]
            backward_c = initial_rank[forward_c, : int(np.around(k1 / 2.0)) + 1]
            reciprocal_c = forward_c[np.where(backward_c == candidate)[0]]
            if len(np.intersect1d(reciprocal_c, reciprocal)) > 2.0 / 3 * len(reciprocal_c):
                expansion = np.append(expansion, reciprocal_c)
        expansion = np.unique(expansion)
        weight = np.exp(-original_dist[i, expansion])
        V[i, expansion] = weight / np.sum(weight)
    original_dist = original_dist[:query_num]
    V_qe = np.zeros_like(V)
    for i in range(all_num):
        V_qe[i] = np.mean(V[initial_rank[i, :k2]], axis=0)
    V = V_qe
    jaccard = np.zeros_like(original_dist)
    for i in range(query_num):
        temp_min = np.array([np.minimum(V[i], V[j]).sum() for j in range(all_num)])
        jaccard[i] = 1 - temp_min / (2.0 - temp_min)
    final = jaccard * (1 - lambda_value) + original_dist * lambda_value
    return -(final if gallery is None else final[:, query_num:])


def diffusion(queries: np.ndarray, gallery: np.ndarray | None) -> np.ndarray:
    """f = (I - alpha S)^-1 y by the inverse."""
    items = queries if gallery is None else gallery
    near = [nearest(items @ item, 7, i) for i, item in enumerate(items)]
    A = np.zeros((len(items), len(items)))
    for i in range(len(items)):
        for j in near[i]:
            if i in near[j]:
                A[i, j] = max(0.0, float(items[i] @ items[j])) ** 3
    degree = A.sum(1)
    degree[degree == 0] = 1
    S = A / np.sqrt(degree[:, None] * degree[None])
    found = []
    for i, query in enumerate(queries):
        y = np.zeros(len(items))
        for j in nearest(items @ query, 4, i if gallery is None else None):
            y[j] = max(0.0, float(items[j] @ query)) ** 3
        found.append(np.linalg.inv(np.eye(len(items)) - 0.9 * S) @ y)
    return np.array(found)


CASES: dict[str, tuple[Reranker, Literal]] = {
    "alpha_qe": (AlphaQE(n=5, alpha=3.0), alpha_qe),
    "database_augmentation": (DatabaseAugmentation(n=5), database_augmentation),
    "k_reciprocal": (KReciprocal(k1=9, k2=3, share=0.3), k_reciprocal),
    "k_reciprocal of many": (KReciprocal(k1=4, k2=8, share=0.3), k_reciprocal_of_many),
    "k_reciprocal of seven": (KReciprocal(k1=7, k2=3, share=0.3), k_reciprocal_of_seven),
    "diffusion": (Diffusion(k=7, k_query=4, alpha=0.9, gamma=3.0), diffusion),
}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_formula(name: str, apart: bool) -> None:
    reranker, literal = CASES[name]
    queries, gallery = points(60, 0), points(90, 1) if apart else None
    given = [None if one is None else torch.as_tensor(one, dtype=torch.float32) for one in (queries, gallery)]
    assert given[0] is not None
    scores = reranker.scores(given[0], given[1])
    rows = torch.tensor([3, 59, 0, 17])
    expected = literal(queries, gallery)
    largest = np.abs(expected).max()
    for at in (rows, torch.arange(60)):
        found = scores(at).double().numpy()
        other = np.ones(found.shape, bool)
        if not apart:
            other[np.arange(len(at)), at] = False  # what is said of its own column does not count
        np.testing.assert_allclose(found[other], expected[at.numpy()][other], atol=2e-5 * largest)


def test_scores_are_computed_in_full_precision() -> None:
    """Training may have allowed less."""
    points_of_rows, found = torch.eye(6), []

    def scores(rows: torch.Tensor) -> torch.Tensor:
        found.append(torch.get_float32_matmul_precision())
        return points_of_rows[rows] @ points_of_rows.T

    torch.set_float32_matmul_precision("medium")
    try:
        rank_scores(scores, Layout.of(torch.arange(6) // 2, None))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(found) == {"highest"}


@pytest.mark.parametrize("apart", [False, True])
def test_scores_are_ranked_as_embeddings_are(apart: bool) -> None:
    """Of the plain products the ranking is that of the evaluation."""
    random = np.random.default_rng(0)
    queries, gallery = torch.as_tensor(points(150, 0)).float(), torch.as_tensor(points(170, 1)).float()
    labels, of_items = torch.as_tensor(random.integers(0, 12, 150)), torch.as_tensor(random.integers(0, 12, 170))
    if apart:
        plain = rank(queries, labels, gallery=gallery, gallery_labels=of_items)
    else:
        plain, gallery = rank(queries, labels), queries
    found = rank_scores(lambda rows: queries[rows] @ gallery.T, Layout.of(labels, of_items if apart else None))
    np.testing.assert_array_equal(found.best_rank, plain.best_rank)
    np.testing.assert_array_equal(found.positives, plain.positives)
    for name, values in plain.values.items():
        np.testing.assert_allclose(found.values[name], values, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_tiny_galleries(name: str) -> None:
    """With fewer images than neighbours are asked for, and with equal ones."""
    reranker = type(CASES[name][0])()
    for queries, gallery in ((points(3, 0), None), (points(2, 0), points(1, 1)), (np.tile(points(1, 0), (5, 1)), None)):
        given = [None if one is None else torch.as_tensor(one, dtype=torch.float32) for one in (queries, gallery)]
        assert given[0] is not None
        found = reranker.scores(given[0], given[1])(torch.arange(len(queries)))
        assert found.shape == (len(queries), len(queries if gallery is None else gallery))
        assert torch.isfinite(found).all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", [64, 512])
def test_a_collapsed_embedding_has_no_right_neighbour(name: str, width: int) -> None:
    """Its distances are rounding, which must not grow to NaN or to ranks."""
    labels = torch.arange(60) // 3
    for seed in range(6):
        random = torch.Generator().manual_seed(seed)
        same = torch.nn.functional.normalize(torch.randn(1, width, generator=random), dim=1).repeat(60, 1)
        found = type(CASES[name][0])().scores(same, None)(torch.arange(60))
        assert torch.isfinite(found).all()
        ranking = rank_scores(lambda rows, found=found: found[rows], Layout.of(labels, None))  # type: ignore[misc]
        assert (ranking.best_rank == 1).mean() < 0.5


def test_reciprocal_neighbours_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = KReciprocal(k1=9, k2=3).scores(torch.as_tensor(points(60, 0)).float(), None)(torch.arange(60))
    monkeypatch.setattr(reranking, "AT_ONCE", 700)  # seven images at once
    parts = KReciprocal(k1=9, k2=3).scores(torch.as_tensor(points(60, 0)).float(), None)(torch.arange(60))
    assert torch.equal(whole, parts)


def test_scores_that_are_no_numbers_are_told() -> None:
    with pytest.raises(UserError, match="hold NaN"):
        rank_scores(lambda rows: torch.full((len(rows), 4), torch.nan), Layout.of(torch.arange(4) // 2, None))

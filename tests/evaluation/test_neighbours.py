import numpy as np
import pytest
import torch

from dml.errors import UserError
from dml.evaluation.neighbours import nearest
from dml.evaluation.scores import LANES


def by_sorting(queries: np.ndarray, gallery: np.ndarray | None, k: int) -> tuple[np.ndarray, np.ndarray]:
    items = queries if gallery is None else gallery
    distances = np.sqrt(((queries[:, None].astype(np.float64) - items) ** 2).sum(2))
    if gallery is None:
        np.fill_diagonal(distances, np.inf)
    order = distances.argsort(1, kind="stable")[:, :k]
    return np.take_along_axis(distances, order, 1), order


@pytest.mark.parametrize("k", [1, 4, 60])
@pytest.mark.parametrize("separate", [False, True])
def test_nearest_is_that_of_a_stable_sort_of_all_distances(k, separate):
    """Small integers make many ties; 64 of them have an exact mean."""
    draw = np.random.default_rng(k)
    queries, gallery = draw.integers(-2, 3, (64, 2)), draw.integers(-2, 3, (64, 2)) if separate else None
    distances, order = nearest(queries.astype(np.float32), gallery, k=k)
    expected = by_sorting(queries, gallery, k)
    np.testing.assert_array_equal(order, expected[1])
    np.testing.assert_allclose(distances, expected[0], rtol=1e-6)


def test_large_gallery_and_any_block_size():
    generator = torch.Generator().manual_seed(0)
    queries, gallery = torch.randn(150, 5, generator=generator), torch.randn(30 * LANES, 5, generator=generator)
    distances, order = nearest(100 + queries, 100 + gallery, k=7)
    expected = by_sorting((100 + queries).numpy(), (100 + gallery).numpy(), 7)
    np.testing.assert_array_equal(order, expected[1])
    np.testing.assert_allclose(distances, expected[0], rtol=1e-5)
    np.testing.assert_array_equal(nearest(100 + queries, 100 + gallery, k=7, block=1)[0], distances)


def test_identical_items_come_in_order_without_the_query():
    distances, order = nearest(np.full((5, 3), 0.1), k=4)
    assert order.tolist() == [[j for j in range(5) if j != i] for i in range(5)]
    assert not distances.any()


@pytest.mark.parametrize("k", [0, 5])
def test_more_neighbours_than_there_are(k):
    with pytest.raises(UserError, match="choose 1 to 4"):
        nearest(np.eye(5), k=k)


def test_numbers_of_numpy_and_values_near_the_largest():
    points = np.array([[3e38, 0], [3e38, 0], [-3e38, 0], [0, 3e38]], np.float32)
    distances, indices = nearest(points, k=np.int64(3))
    assert indices[0].tolist() == [1, 3, 2]
    assert distances[0, 0] == 0
    assert np.isfinite(distances).all()
    np.testing.assert_array_equal(distances[0, 1:], np.finfo(np.float32).max)  # beyond it in truth

"""Embeddings in two dimensions."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from dml.figures.projection import principal_components, projections


def test_principal_components_are_scikit_learn_s() -> None:
    from sklearn.decomposition import PCA

    points = np.random.default_rng(0).normal(size=(40, 6)) * [5, 3, 1, 1, 0.5, 0.1]
    flat, share = principal_components(torch.as_tensor(points))
    theirs = PCA(2).fit(points)
    expected = theirs.transform(points)
    for own, other in zip(flat.T, expected.T, strict=True):
        assert np.abs(own) == pytest.approx(np.abs(other), abs=1e-9)
    assert share == pytest.approx(theirs.explained_variance_ratio_.sum())


@pytest.mark.skipif(find_spec("umap") is None, reason="umap-learn is not installed: pip install '.[maps]'")
def test_umap_keeps_neighbours_that_two_components_lose() -> None:
    """Eight classes around as many orthogonal directions, of which two components show two."""
    labels = np.arange(160) % 8
    noise = torch.randn(160, 16, generator=torch.Generator().manual_seed(0))
    points = torch.eye(8, 16)[labels] + 0.05 * noise
    found = projections(points)
    pca, umap = found.values()
    assert list(found)[1] == "UMAP"
    assert umap.shape == (160, 2)
    assert (umap.min(), umap.max()) == (0, pytest.approx(1))
    kept = []
    for flat in (pca, umap):
        distances = np.linalg.norm(flat[:, None] - flat[None], axis=2)
        np.fill_diagonal(distances, np.inf)
        kept.append((labels[distances.argmin(1)] == labels).mean())
    assert kept[1] == 1 > kept[0]
    assert np.array_equal(projections(points)["UMAP"], umap)  # the same again


def test_they_lie_within_the_map() -> None:
    points = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    (found,) = projections(points).values()  # too few for UMAP
    assert found.shape == (20, 2)
    assert found.min() == 0
    assert found.max() == pytest.approx(1)
    (alone,) = projections(torch.ones(5, 1)).values()  # a collapsed embedding of one dimension
    assert np.isfinite(alone).all()


def test_the_shorter_axis_of_a_map_keeps_its_proportion() -> None:
    points = torch.tensor([[0.0, 0.0], [8.0, 0.0], [4.0, 1.0], [4.0, -1.0]])
    (flat,) = (of for title, of in projections(points).items() if title.startswith("PCA"))
    assert np.ptp(flat, axis=0) == pytest.approx([1, 0.25])

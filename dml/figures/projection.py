"""Projections of embeddings to two dimensions, for looking at: they do not keep the distances of the embedding."""

import warnings

import numpy as np
import torch
from torch import Tensor


def projections(points: Tensor) -> dict[str, np.ndarray]:
    """Projects points to two dimensions: by principal components, and by UMAP if `umap-learn` is installed.

    openTSNE and scikit-learn's t-SNE were passed over: on 10,000 points they take minutes where UMAP takes seconds.

    Args:
        points: `[N,D]`, on any device.

    Returns:
        Title of a projection -> points `[N,2]`, scaled into 0 to 1.
    """
    points = points.float().cpu()
    flat, share = principal_components(points)
    found = {f"PCA, {share:.0%} of the variance": flat}
    if (umapped := _umap(points.numpy())) is not None:
        found["UMAP"] = umapped
    return {title: _scaled(of) for title, of in found.items()}


def principal_components(points: Tensor) -> tuple[np.ndarray, float]:
    """Projects points `[N,D]` on their first two principal components.

    The sign of a component is chosen so that its largest value is at least as far from 0 as its smallest.

    Returns:
        The projected points `[N,2]`, and the two components' share of the variance, 0 to 1.
    """
    centred = points.double() - points.double().mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred)  # ascending
    flat = centred @ vectors[:, -2:].flip(1)
    if flat.shape[1] < 2:
        flat = torch.cat([flat, torch.zeros(len(flat), 1, dtype=flat.dtype)], 1)
    flat = flat * torch.where(flat.amax(0) < -flat.amin(0), -1.0, 1.0)
    total = float(values.sum())
    return flat.numpy(), float(values[-2:].sum()) / total if total > 0 else 0.0


def _umap(points: np.ndarray) -> np.ndarray | None:
    """Returns None if `umap-learn` is not installed or there are fewer than 30 points, too few for neighbourhoods."""
    if len(points) < 30:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its imports, the fixed seed and unconnected points
        try:
            from umap import UMAP
        except ImportError:
            return None
        found: np.ndarray = UMAP(random_state=0, n_jobs=1).fit_transform(points)
    return found


def _scaled(points: np.ndarray) -> np.ndarray:
    """Scales points into 0 to 1 so that the longer axis fills it; infinite and missing values become 0.5."""
    points = np.where(np.isfinite(points), points, np.nan)
    low, high = np.nanmin(points, 0), np.nanmax(points, 0)
    scaled = (points - low) / max(float((high - low).max()), 1e-12)
    return np.nan_to_num(scaled, nan=0.5)

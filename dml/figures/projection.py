"""Embeddings in two dimensions, to be looked at: distances there are not those of the embedding."""

import warnings

import numpy as np
import torch
from torch import Tensor


def projections(points: Tensor) -> dict[str, np.ndarray]:
    """Title -> `[N,2]` within 0 to 1: principal components, and UMAP where `umap-learn` is installed.

    openTSNE and scikit-learn's t-SNE were passed over: on 10,000 points they take minutes where UMAP takes seconds.

    Args:
        points: `[N,D]`, on any device.
    """
    points = points.float().cpu()
    flat, share = principal_components(points)
    found = {f"PCA, {share:.0%} of the variance": flat}
    if (umapped := _umap(points.numpy())) is not None:
        found["UMAP"] = umapped
    return {title: _scaled(of) for title, of in found.items()}


def principal_components(points: Tensor) -> tuple[np.ndarray, float]:
    """The first two, `[N,2]`, and their share of the variance; of several signs that with the larger positive end."""
    centred = points.double() - points.double().mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred)  # ascending
    flat = centred @ vectors[:, -2:].flip(1)
    if flat.shape[1] < 2:
        flat = torch.cat([flat, torch.zeros(len(flat), 1, dtype=flat.dtype)], 1)
    flat = flat * torch.where(flat.amax(0) < -flat.amin(0), -1.0, 1.0)
    total = float(values.sum())
    return flat.numpy(), float(values[-2:].sum()) / total if total > 0 else 0.0


def _umap(points: np.ndarray) -> np.ndarray | None:
    """None where it is not installed, or too few points are there for its neighbourhoods."""
    if len(points) < 30:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports, of a fixed seed, of unconnected points
        try:
            from umap import UMAP
        except ImportError:
            return None
        found: np.ndarray = UMAP(random_state=0, n_jobs=1).fit_transform(points)
    return found


def _scaled(points: np.ndarray) -> np.ndarray:
    """Within 0 to 1, the longer axis filling it; infinite or missing values lie in the middle."""
    points = np.where(np.isfinite(points), points, np.nan)
    low, high = np.nanmin(points, 0), np.nanmax(points, 0)
    scaled = (points - low) / max(float((high - low).max()), 1e-12)
    return np.nan_to_num(scaled, nan=0.5)

"""Computes the metrics of embedded test images, alike for all methods.

N test images, L learners, d width of one learner. Nothing here needs Lightning, which takes seconds to import: the
commands that read results use it too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dml.errors import UserError
from dml.evaluation.metric import metric


@dataclass(frozen=True)
class Embedded:
    """Test embeddings in the order of the records' rows, each row once.

    Attributes:
        embeddings: `[N,L,d]` float32, unit norm per learner, on the device that made them.
        labels: `[N]` int64, there too.
        rows: `[N]` int64, there too: rows of the records, ascending.
    """

    embeddings: Tensor
    labels: Tensor
    rows: Tensor

    def take(self, rows: np.ndarray) -> "Embedded":
        """Returns the embeddings of these rows of the records, in ascending order of rows."""
        at = torch.searchsorted(self.rows, torch.as_tensor(np.sort(rows), device=self.rows.device))
        return Embedded(self.embeddings[at], self.labels[at], self.rows[at])

    def cpu(self) -> "Embedded":
        """Returns a copy on the CPU, to write or draw. Metrics are computed on the device of the embeddings."""
        return Embedded(self.embeddings.cpu(), self.labels.cpu(), self.rows.cpu())


Retrieval = Callable[[Tensor, Tensor | None], dict[str, float]]


def score(
    queries: Embedded,
    gallery: Embedded | None,
    retrieval: Retrieval,
    *,
    slices: int = 1,
    groups: Mapping[str, slice] | None = None,
    final: bool,
) -> dict[str, float]:
    """Computes the metrics of the concatenated embedding (`test/...`) and of each learner (`learners/<i>/...`).

    `learners/mean/...` and `learners/std/...` are the mean and standard deviation over the learners. With several
    learners there are also: `learners/self_cosine`, the mean cosine between two learners' embeddings of one image (ABE
    section 6.2); `learners/correlation`, see `correlation` (DCES Table 7); and `first/<m>/...`, the metrics of the
    ensemble of the first m learners (DCES Fig. 10).

    Args:
        queries: the query images.
        gallery: the gallery images; None: the queries are the gallery.
        retrieval: a function from the embeddings of queries `[Q,D]` and gallery `[M,D]` (None: the queries) to metrics.
        slices: with a single learner, its embedding is cut into this many slices, which are scored as learners are,
            under `slices/...`. DCES compares its learners with such slices.
        groups: ensembles of some learners that are tested too, by name. `<name>/...` are the group's metrics (DeML
            Table 2), `<name>/self_cosine` is the mean cosine between its learners (Table 4).
        final: also compute `first/...`, which only the last evaluation of a run gives.

    Raises:
        UserError: `slices` does not divide the width of the embedding.
    """

    def measure(part: Callable[[Tensor], Tensor]) -> dict[str, float]:
        return retrieval(part(queries.embeddings), None if gallery is None else part(gallery.embeddings))

    _, learners, width = queries.embeddings.shape
    if learners == 1 and width % slices:
        raise UserError(
            f"protocol.slices={slices} does not divide the embedding's width {width}: choose a divisor of it."
        )
    kind, parts = ("learners", learners) if learners > 1 else ("slices", slices)

    def cut(embeddings: Tensor) -> Tensor:  # [N,L,d] -> [N,parts,.]
        return embeddings if learners > 1 else embeddings.unflatten(2, (slices, -1)).squeeze(1)

    ensemble = measure(lambda e: e.flatten(1))
    result = {f"test/{name}": value for name, value in ensemble.items()}
    if learners == 1:
        result |= _of_parts([ensemble], "learners")
    if parts == 1:
        return result
    apart = [measure(lambda e, i=i: cut(e)[:, i]) for i in range(parts)]  # type: ignore[misc]
    result |= _of_parts(apart, kind) | {f"{kind}/correlation": correlation(cut(queries.embeddings))}
    if learners > 1:
        result["learners/self_cosine"] = self_cosine(queries.embeddings)
    for group, own in (groups or {}).items():
        of_group = measure(lambda e, own=own: e[:, own].flatten(1))  # type: ignore[misc]
        result |= {f"{group}/{name}": value for name, value in of_group.items() if metric(name).per_learner}
        if queries.embeddings[:, own].shape[1] > 1:
            result[f"{group}/self_cosine"] = self_cosine(queries.embeddings[:, own])
    if final:
        between = [measure(lambda e, m=m: cut(e)[:, :m].flatten(1)) for m in range(2, parts)]  # type: ignore[misc]
        for m, first in enumerate([apart[0], *between, ensemble], 1):
            result |= {f"first/{m}/{name}": value for name, value in first.items() if metric(name).per_learner}
    return result


def _of_parts(measured: Sequence[dict[str, float]], prefix: str) -> dict[str, float]:
    """Returns the metrics of each part, and their mean and standard deviation over the parts."""
    result: dict[str, float] = {}
    for name in (name for name in measured[0] if metric(name).per_learner):
        values = np.array([one[name] for one in measured])
        result |= {f"{prefix}/{i}/{name}": float(value) for i, value in enumerate(values)}
        result |= {f"{prefix}/mean/{name}": float(values.mean()), f"{prefix}/std/{name}": float(values.std())}
    return result


def correlation(embeddings: Tensor) -> float:
    """Computes the correlation between the embeddings of different learners (DCES Table 7).

    The paper does not say how coefficients are combined. Here it is the absolute value of Pearson's coefficient over
    the images, averaged over all pairs of a dimension of one learner and a dimension of another.

    Args:
        embeddings: `[N,L,d]`, L > 1. A dimension without variance counts as uncorrelated.
    """
    learners, width = embeddings.shape[1:]
    points = embeddings.flatten(1).double()
    points = F.normalize(points - points.mean(0), dim=0)
    coefficients = (points.T @ points).abs()
    learner = torch.arange(learners, device=points.device).repeat_interleave(width)
    return float(coefficients[learner[:, None] != learner[None, :]].mean())


def self_cosine(embeddings: Tensor) -> float:
    """Computes the mean cosine between different learners' embeddings of the same image.

    Args:
        embeddings: `[N,L,d]`, L > 1, of unit norm per learner.
    """
    learners = embeddings.shape[1]
    # |sum_i e_i|^2 = L + 2 sum_{i<j} e_i.e_j; the pairs themselves would take L / 2 numbers an image and learner.
    squares = torch.linalg.vector_norm(embeddings, dim=(1, 2), dtype=torch.float64) ** 2
    summed = embeddings.sum(1, dtype=torch.float64).square().sum(1)
    return float((summed - squares).mean() / (learners * (learners - 1)))

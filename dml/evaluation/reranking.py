"""Re-ranking: a second ranking of the gallery from the same embeddings, which also uses neighbours of neighbours.

Q queries, M gallery items, N all images, D width, b queries of a block, n and k neighbours.

A re-ranker gets unit vectors and returns a function that maps rows `[b]` of the queries to scores `[b,M]`; a larger
score means nearer. Without a gallery, the queries are the gallery, and no query is ranked against itself: its score in
its own column is ignored. Nothing here holds N x M numbers. Memory is that of the neighbours, N k, and of one block.
"""

from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from scipy.sparse import csr_array, diags_array
from torch import Tensor

from dml.configuration.ranges import BelowOne, Few, Share
from dml.evaluation.neighbours import nearest
from dml.evaluation.scores import full_precision

Power = Annotated[float, Field(ge=0, le=100)]  # of similarities

Scores = Callable[[Tensor], Tensor]

CLOSE, STEPS = 1e-6, 100  # conjugate gradients stop at this relative residual, or after so many steps
NOISE = 1e-6  # a squared distance of unit vectors in single precision may be off by so much
AT_ONCE = 2**22  # pairs of neighbours that are compared at once


class Reranker:
    """The interface of all re-rankers."""

    def scores(self, queries: Tensor, gallery: Tensor | None) -> Scores:
        """Prepares the re-ranking and returns the function that scores the gallery.

        Args:
            queries: `[Q,D]` of unit norm.
            gallery: `[M,D]` of unit norm; None: the queries are the gallery.

        Returns:
            A function from rows `[b]` of the queries to scores `[b,M]`, the larger the nearer.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define scores()")


def _squared(points: Tensor, others: Tensor) -> Tensor:
    """Returns squared distances of unit vectors; those that are no more than rounding are 0."""
    return F.threshold(2 - 2 * points @ others.T, NOISE, 0)


def _products(queries: Tensor, items: Tensor) -> Scores:
    def of_rows(rows: Tensor) -> Tensor:
        return queries[rows] @ items.T

    return of_rows


def _neighbours(queries: Tensor, gallery: Tensor | None, k: int) -> Tensor:
    """Returns the indices of each query's k nearest items, nearest first, without the query itself: `[Q,k]`. Fewer
    columns if the gallery holds fewer items."""
    items = len(queries) - 1 if gallery is None else len(gallery)
    if not items:
        return torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
    return torch.as_tensor(nearest(queries, gallery, k=min(k, items))[1], device=queries.device)


class AlphaQE(Reranker):
    """Alpha-weighted query expansion (Radenović et al. 2018, section 3.2): q' ~ q + sum_i (q.x_i)^alpha x_i over the n
    nearest items x_i. Neighbours with a similarity below 0 get no weight, unless alpha is 0. Each query reads n D
    numbers.

    Args:
        n: number of neighbours that are added to the query.
        alpha: exponent of the weights; 0 is average query expansion (Chum et al. 2007).
    """

    def __init__(self, *, n: Few = 10, alpha: Power = 3.0) -> None:
        self.n, self.alpha = n, alpha

    @full_precision()
    def scores(self, queries: Tensor, gallery: Tensor | None) -> Scores:
        items = queries if gallery is None else gallery
        expanded = queries.clone()
        for column in _neighbours(queries, gallery, self.n).T:
            similarity = (queries * items[column]).sum(1).clamp(min=0)
            expanded += (similarity**self.alpha)[:, None] * items[column]
        return _products(F.normalize(expanded), items)


class DatabaseAugmentation(Reranker):
    """Database-side augmentation (Gordo et al. 2017, section 5.3): each gallery item is replaced by a weighted sum of
    itself and its n nearest neighbours in the gallery. The neighbour of rank r has the weight (n - r) / n; the item
    itself has rank 0 and weight 1. The queries are searched with as they are, also where they are the gallery.

    Args:
        n: number of neighbours; the n-th has the weight 0.
    """

    def __init__(self, *, n: Few = 10) -> None:
        self.n = n

    @full_precision()
    def scores(self, queries: Tensor, gallery: Tensor | None) -> Scores:
        items = queries if gallery is None else gallery
        augmented = items.clone()
        for rank, column in enumerate(_neighbours(items, None, self.n).T, 1):
            augmented += (self.n - rank) / self.n * items[column]
        return _products(queries, F.normalize(augmented))


class KReciprocal(Reranker):
    """Re-ranking by k-reciprocal encoding (Zhong et al. 2017, section 3), step by step as the authors' `re_ranking`.

    d = (1 - lambda) d_Jaccard + lambda d_original, where d_original is the squared Euclidean distance divided by the
    query's largest one. The authors hold N x N matrices of which only some hundred entries a row are not 0. Here only
    those are held: N (k1 + 1) neighbours, N times some hundred weights, and b M distances of a block. The time is that
    of N^2 D multiply-adds and of the overlaps.

    Args:
        k1: number of neighbours among which reciprocal ones are sought.
        k2: number of neighbours whose vectors are averaged, the image itself among them; 1: no averaging.
        share: lambda, the weight of the original distance.
    """

    def __init__(
        self,
        *,
        k1: Annotated[int, Field(ge=1, le=1024)] = 20,
        k2: Annotated[int, Field(ge=1, le=1024)] = 6,
        share: Share = 0.3,
    ) -> None:
        self.k1, self.k2, self.share = k1, k2, share

    @full_precision()
    def scores(self, queries: Tensor, gallery: Tensor | None) -> Scores:
        points = queries if gallery is None else torch.cat([queries, gallery])
        first = 0 if gallery is None else len(queries)  # where the gallery begins in `points`
        ranks = _neighbours(points, None, max(self.k1, self.k2 - 1)).cpu().numpy()
        ranks = np.concatenate([np.arange(len(points))[:, None], ranks], axis=1)  # itself first
        farthest = torch.cat([_squared(part, points).amax(1) for part in points.split(512)]).clamp(min=NOISE)
        vectors = self._vectors(points, ranks[:, : self.k1 + 1], farthest)
        if self.k2 > 1:
            near = ranks[:, : self.k2]
            rows = np.arange(len(points)).repeat(near.shape[1])
            share = np.full(near.size, 1 / near.shape[1])
            vectors = csr_array((share, (rows, near.ravel())), shape=(len(points),) * 2) @ vectors
        by_column = vectors[first:].tocsc()

        def of_rows(rows: Tensor) -> Tensor:
            original = _squared(queries[rows], points[first:]) / farthest[rows, None]
            shared = np.stack([_overlap(vectors, by_column, row) for row in rows.tolist()])
            jaccard = torch.as_tensor(1 - shared / (2 - shared), device=queries.device)
            return -((1 - self.share) * jaccard + self.share * original)

        return of_rows

    def _vectors(self, points: Tensor, ranks: np.ndarray, farthest: Tensor) -> csr_array:
        """Returns the weights of equation 7, sparse `[N,N]`: in row i those of the expanded k-reciprocal neighbours of
        image i."""
        half = int(np.around(self.k1 / 2))
        near = _reciprocal(ranks)
        nearer = [frozenset(one.tolist()) for one in _reciprocal(ranks[:, : half + 1])]
        starts, columns, weights = [0], [], []
        for image, own in enumerate(near):
            known, expanded = set(own.tolist()), set(own.tolist())
            for candidate in own.tolist():
                theirs = nearer[candidate]
                if len(theirs & known) > 2 / 3 * len(theirs):
                    expanded |= theirs
            among = np.array(sorted(expanded))
            distance = _squared(points[among], points[image, None])[:, 0].div(farthest[image]).double().cpu().numpy()
            weight = np.exp(-distance)
            columns.append(among)
            weights.append(weight / weight.sum())
            starts.append(starts[-1] + len(among))
        return csr_array((np.concatenate(weights), np.concatenate(columns), starts), shape=(len(near),) * 2)


def _reciprocal(ranks: np.ndarray) -> list[np.ndarray]:
    """Returns the k-reciprocal neighbours of each image: those of its nearest, `[N,k]`, that have it among theirs."""
    found = []
    step = max(1, AT_ONCE // ranks.shape[1] ** 2)
    for start in range(0, len(ranks), step):
        part = ranks[start : start + step]
        mutual = (ranks[part] == np.arange(start, start + len(part))[:, None, None]).any(2)
        found += [near[both] for near, both in zip(part, mutual, strict=True)]
    return found


def _overlap(vectors: csr_array, by_column: csr_array, row: int) -> np.ndarray:
    """Returns, for one image and each item, the sum of the element-wise minimum of their weights: `[M]`."""
    own = slice(vectors.indptr[row], vectors.indptr[row + 1])
    runs = [slice(by_column.indptr[c], by_column.indptr[c + 1]) for c in vectors.indices[own]]
    items = np.concatenate([by_column.indices[run] for run in runs])
    lengths = [run.stop - run.start for run in runs]
    weights = np.minimum(np.concatenate([by_column.data[run] for run in runs]), np.repeat(vectors.data[own], lengths))
    return np.bincount(items, weights, by_column.shape[0])


class Diffusion(Reranker):
    """Diffusion on the graph of mutual neighbours (Iscen et al. 2017, section 3): f = (I - alpha S)^-1 y.

    S = D^-1/2 A D^-1/2 (equation 2). A holds similarity^gamma of two items that are among each other's k nearest, else
    0. y holds similarity^gamma of the query's nearest items (section 3.3). The equation is solved by conjugate
    gradients, a block of queries at a time. Memory is M k numbers for the graph and 4 b M for a block; one step of a
    block takes 2 b M k multiply-adds.

    Args:
        k: number of neighbours of an item in the graph.
        k_query: number of neighbours of a query, from which diffusion starts.
        alpha: how far the diffusion spreads, from 0 (no further than the query's neighbours).
        gamma: exponent of the similarities.
    """

    def __init__(
        self,
        *,
        k: Few = 50,
        k_query: Few = 10,
        alpha: BelowOne = 0.99,
        gamma: Annotated[float, Field(ge=0, le=100)] = 3,
    ) -> None:
        self.k, self.k_query, self.alpha, self.gamma = k, k_query, alpha, gamma

    @full_precision()
    def scores(self, queries: Tensor, gallery: Tensor | None) -> Scores:
        items = queries if gallery is None else gallery
        graph = self._graph(items)
        near = _neighbours(queries, gallery, self.k_query)

        def of_rows(rows: Tensor) -> Tensor:
            similar = (queries[rows, None] * items[near[rows]]).sum(2).clamp(min=0) ** self.gamma
            begun = np.zeros((len(items), len(rows)))
            np.put_along_axis(begun, near[rows].T.cpu().numpy(), similar.T.double().cpu().numpy(), axis=0)
            return torch.as_tensor(self._spread(graph, begun).T, device=queries.device)

        return of_rows

    def _graph(self, items: Tensor) -> csr_array:
        """Returns S, sparse `[M,M]`."""
        near = _neighbours(items, None, self.k)
        parts = zip(items.split(512), near.split(512), strict=True)
        similar = torch.cat([(part[:, None] * items[at]).sum(2) for part, at in parts])
        affinity = (similar.clamp(min=0) ** self.gamma).double().cpu().numpy().ravel()
        rows = np.arange(len(items)).repeat(near.shape[1])
        one_way = csr_array((affinity, (rows, near.cpu().numpy().ravel())), shape=(len(items),) * 2)
        mutual = one_way.minimum(one_way.T)  # 0 unless each is among the other's nearest
        degree = mutual.sum(axis=1)
        root = diags_array(np.where(degree > 0, degree, 1) ** -0.5)
        return csr_array(root @ mutual @ root)

    def _spread(self, graph: csr_array, begun: np.ndarray) -> np.ndarray:
        """Solves for all columns `[M,b]` at once by conjugate gradients; scipy's function takes one column."""
        found, residual = np.zeros_like(begun), begun.copy()
        direction, size = residual.copy(), (residual**2).sum(0)
        close = CLOSE**2 * np.maximum(size, np.finfo(float).tiny)
        for _ in range(STEPS):
            if (size <= close).all():
                break
            image = direction - self.alpha * (graph @ direction)
            step = size / np.maximum((direction * image).sum(0), np.finfo(float).tiny)
            found += step * direction
            residual -= step * image
            before, size = size, (residual**2).sum(0)
            direction = residual + size / np.maximum(before, np.finfo(float).tiny) * direction
        return found

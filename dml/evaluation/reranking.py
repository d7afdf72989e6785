"""Searches that look at the neighbours of the neighbours: a second ranking of the gallery, of the same embeddings.

Q queries, M gallery items, N all images, D width, b queries of a block, n and k neighbours.

A re-ranker is given unit vectors and returns a function: rows `[b]` of the queries -> scores `[b,M]`, the larger the
nearer. Without a gallery the queries are their own, each without itself; what it says of a query's own column does not
count. Nothing here holds N x M numbers: memory is that of neighbours, N k, and of one block.
"""

from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from scipy.sparse import csr_array, diags_array
from torch import Tensor
from torch.nn.functional import normalize

from dml.configuration.ranges import BelowOne, Few, Share
from dml.evaluation.neighbours import nearest
from dml.evaluation.scores import full_precision

Power = Annotated[float, Field(ge=0, le=100)]  # of similarities

Scores = Callable[[Tensor], Tensor]

CLOSE, STEPS = 1e-6, 100  # of conjugate gradients: the residual's share of what is spread, and steps at most


class Reranker:
    """One way to rank again."""

    def scores(self, queries: Tensor, gallery: Tensor | None) -> Scores:
        """See the module.

        Args:
            queries: `[Q,D]` of unit norm.
            gallery: `[M,D]` of unit norm; None: the queries.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define scores()")


def _products(queries: Tensor, items: Tensor) -> Scores:
    def of_rows(rows: Tensor) -> Tensor:
        return queries[rows] @ items.T

    return of_rows


def _neighbours(queries: Tensor, gallery: Tensor | None, k: int) -> Tensor:
    """Rows of the k nearest, without the query itself, nearest first: `[Q,k]`; all where there are fewer."""
    items = len(queries) - 1 if gallery is None else len(gallery)
    if not items:
        return torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
    return torch.as_tensor(nearest(queries, gallery, k=min(k, items))[1], device=queries.device)


class AlphaQE(Reranker):
    """Alpha-weighted query expansion (Radenović et al. 2018, section 3.2): q' ~ q + sum_i (q.x_i)^alpha x_i over the n
    nearest; similarities below 0 weigh nothing. n D numbers a query.

    Args:
        n: neighbours.
        alpha: 0 is average query expansion (Chum et al. 2007).
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
        return _products(normalize(expanded), items)


class DatabaseAugmentation(Reranker):
    """Each gallery item as the sum of itself and its n nearest in the gallery, that of rank r weighted (n - r) / n and
    itself 1 (Gordo et al. 2017, section 5.3: r counts from itself as 0). Queries that are their own gallery stay what
    they are when they search.

    Args:
        n: neighbours, of which the last one weighs nothing.
    """

    def __init__(self, *, n: Few = 10) -> None:
        self.n = n

    @full_precision()
    def scores(self, queries: Tensor, gallery: Tensor | None) -> Scores:
        items = queries if gallery is None else gallery
        augmented = items.clone()
        for rank, column in enumerate(_neighbours(items, None, self.n).T, 1):
            augmented += (self.n - rank) / self.n * items[column]
        return _products(queries, normalize(augmented))


class KReciprocal(Reranker):
    """Re-ranking by k-reciprocal encoding (Zhong et al. 2017, section 3), step by step as the authors' `re_ranking`.

    d = (1 - lambda) d_Jaccard + lambda d_original, where d_original is the squared Euclidean distance as a share of the
    query's largest. The authors hold N x N matrices; their vectors have some hundred entries a row, and here no others
    are held: N (k1 + 1) neighbours, N * some hundred weights, b M distances. Time is N^2 D and that of the overlaps.

    Args:
        k1: neighbours of which reciprocal ones are taken.
        k2: neighbours whose vectors are averaged, itself among them; 1: none.
        share: lambda.
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
        first = 0 if gallery is None else len(queries)  # of the gallery
        ranks = _neighbours(points, None, self.k1).cpu().numpy()
        ranks = np.concatenate([np.arange(len(points))[:, None], ranks], axis=1)  # itself first
        farthest = torch.cat([(2 - 2 * part @ points.T).amax(1) for part in points.split(512)]).clamp(min=1e-12)
        vectors = self._vectors(points, ranks, farthest)
        if self.k2 > 1:
            near = ranks[:, : self.k2]
            rows = np.arange(len(points)).repeat(near.shape[1])
            share = np.full(near.size, 1 / near.shape[1])
            vectors = csr_array((share, (rows, near.ravel())), shape=(len(points),) * 2) @ vectors
        by_column = vectors[first:].tocsc()

        def of_rows(rows: Tensor) -> Tensor:
            original = (2 - 2 * queries[rows] @ points[first:].T) / farthest[rows, None]
            shared = np.stack([_overlap(vectors, by_column, row) for row in rows.tolist()])
            jaccard = torch.as_tensor(1 - shared / (2 - shared), device=queries.device)
            return -((1 - self.share) * jaccard + self.share * original)

        return of_rows

    def _vectors(self, points: Tensor, ranks: np.ndarray, farthest: Tensor) -> csr_array:
        """Equation 7: of each image a weight for each of its expanded k-reciprocal neighbours, `[N,N]`."""
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
            distance = (2 - 2 * points[among] @ points[image]).div(farthest[image]).double().cpu().numpy()
            weight = np.exp(-distance)
            columns.append(among)
            weights.append(weight / weight.sum())
            starts.append(starts[-1] + len(among))
        return csr_array((np.concatenate(weights), np.concatenate(columns), starts), shape=(len(near),) * 2)


def _reciprocal(ranks: np.ndarray) -> list[np.ndarray]:
    """Of each image those of its nearest `[N,k]` among whose nearest it is."""
    found = []
    for start in range(0, len(ranks), 512):
        part = ranks[start : start + 512]
        mutual = (ranks[part] == np.arange(start, start + len(part))[:, None, None]).any(2)
        found += [near[both] for near, both in zip(part, mutual, strict=True)]
    return found


def _overlap(vectors: csr_array, by_column: csr_array, row: int) -> np.ndarray:
    """Sum of the smaller ones of two vectors' weights, of one image with each item: `[M]`."""
    own = slice(vectors.indptr[row], vectors.indptr[row + 1])
    runs = [slice(by_column.indptr[c], by_column.indptr[c + 1]) for c in vectors.indices[own]]
    items = np.concatenate([by_column.indices[run] for run in runs])
    lengths = [run.stop - run.start for run in runs]
    weights = np.minimum(np.concatenate([by_column.data[run] for run in runs]), np.repeat(vectors.data[own], lengths))
    return np.bincount(items, weights, by_column.shape[0])


class Diffusion(Reranker):
    """Diffusion on the graph of mutual neighbours (Iscen et al. 2017, section 3): f = (I - alpha S)^-1 y.

    S = D^-1/2 A D^-1/2 (equation 2), A of similarities^gamma of items that are among each other's k nearest; y are
    the similarities^gamma of the query's nearest (section 3.3). Solved by conjugate gradients, a block of queries at a
    time: M k numbers of the graph and 4 b M of a block are held; a block takes 2 b M k multiply-adds a step.

    Args:
        k: neighbours in the graph.
        k_query: neighbours of a query.
        alpha: how far it spreads.
        gamma: a power.
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
        """S `[M,M]`."""
        near = _neighbours(items, None, self.k)
        parts = zip(items.split(512), near.split(512), strict=True)
        similar = torch.cat([(part[:, None] * items[at]).sum(2) for part, at in parts])
        affinity = (similar.clamp(min=0) ** self.gamma).double().cpu().numpy().ravel()
        rows = np.arange(len(items)).repeat(near.shape[1])
        one_way = csr_array((affinity, (rows, near.cpu().numpy().ravel())), shape=(len(items),) * 2)
        mutual = one_way.minimum(one_way.T)  # 0 where one is not among the other's nearest
        degree = mutual.sum(axis=1)
        root = diags_array(np.where(degree > 0, degree, 1) ** -0.5)
        return csr_array(root @ mutual @ root)

    def _spread(self, graph: csr_array, begun: np.ndarray) -> np.ndarray:
        """Conjugate gradients for columns `[M,b]` at once: scipy's takes one."""
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

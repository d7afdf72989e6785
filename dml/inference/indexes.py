"""Approximate indexes of galleries. Their recall is measured against exact search and raised to what is asked for.

N vectors, D width, Q queries, k neighbours, R candidates of a query. The effort of an index is the setting that trades
speed for recall.

`hnsw` (Malkov & Yashunin 2018) holds the vectors and their graph: N (4 D + 272) bytes, or N (2 D + 272) for a float16
gallery. Its effort is `efSearch`. `ivfpq` (Jégou et al. 2011) holds N (m + 8) bytes, m about D / 4, and while it learns
64 vectors for each of its lists. Its R candidates are compared again by their vectors, which are read from the file.
Its effort sets `nprobe` and R. Exact search reads the file in blocks and keeps none of it in memory. Other libraries
were passed over: hnswlib and usearch have graphs only, ScaNN has no wheel for some platforms, and K-means needs faiss
anyway.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from dml.errors import UserError
from dml.evaluation.clustering import need_faiss
from dml.inference.galleries import blocks

Kind = Literal["hnsw", "ivfpq"]
Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]  # [Q,D], k -> similarities and rows [Q,k]

LINKS, BUILD_EFFORT = 32, 100  # of HNSW's graph: neighbours of a vector, and candidates while it is built
FEWEST = 39 * 256  # vectors that faiss needs to learn 256 codes
HARDEST = 4096  # the largest efSearch, and the most candidates of a query

# faiss on a GPU: the most neighbours that it finds, and the bytes of a code whose tables fit into a block's 48 KiB.
MOST_OF_GPU = 2048
CODES_OF_GPU = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48)
SAMPLE = 1000  # images of the gallery that are used as queries to measure an index
TIED = 1e-6  # similarities closer than this are equal in float32


@dataclass(frozen=True)
class Measured:
    """Recall and speed of an index at one effort.

    Attributes:
        recall: the share of the exact k nearest, without the query itself, that the index finds. An item of equal
            similarity counts as well.
        k: number of neighbours for which recall was measured.
        sample: number of queries, which are images of the gallery.
        effort: `efSearch` of hnsw, `nprobe` of ivfpq.
        per_second: queries a second with the index.
        exact_per_second: queries a second with exact search in the same process.
    """

    recall: float
    k: int
    sample: int
    effort: int
    per_second: float
    exact_per_second: float


@dataclass
class Index:
    """An approximate faiss index.

    Attributes:
        kind: `hnsw` or `ivfpq`.
        faiss: faiss's index.
        embeddings: `[N,D]`, which may be mapped from a file.
        effort: see the module.
    """

    kind: Kind
    faiss: Any
    embeddings: np.ndarray
    effort: int = 1

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Finds the k nearest of queries `[Q,D]`: returns similarities and rows, `[Q,k]` each. If fewer are found, the
        others have -inf and -1."""
        queries = np.ascontiguousarray(queries, np.float32)
        if self.kind == "hnsw":
            self.faiss.hnsw.efSearch = max(self.effort, k)
            similarities, rows = self.faiss.search(queries, k)
            return np.where(rows < 0, -np.inf, similarities), rows
        _probe(self.faiss, self.effort)
        rows = self.faiss.search(queries, self._candidates(k))[1]
        return self._compared(queries, rows, k)

    def _candidates(self, k: int) -> int:
        most = MOST_OF_GPU if _is_of_gpu(self.faiss) else HARDEST
        return min(max(k * self.effort // 2, k), most, len(self.embeddings))

    def _compared(self, queries: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns similarities and rows of the k nearest among candidates `[Q,R]`, compared by their exact vectors."""
        found, nearest = np.full((len(rows), k), -np.inf, np.float32), np.full((len(rows), k), -1)
        for query, candidates in enumerate(rows):
            there = np.sort(candidates[candidates >= 0])  # read in the order of the file
            similarities = self.embeddings[there].astype(np.float32) @ queries[query]
            best = np.argsort(-similarities, kind="stable")[:k]
            found[query, : len(best)], nearest[query, : len(best)] = similarities[best], there[best]
        return found, nearest

    def efforts(self) -> Iterator[int]:
        """Yields efforts to try, doubling up to the largest."""
        last = HARDEST if self.kind == "hnsw" else max(self.faiss.nlist, 2 * HARDEST)
        effort = 16 if self.kind == "hnsw" else 8
        while effort < last:
            yield effort
            effort *= 2
        yield last


def _probe(index: Any, effort: int) -> None:
    count = min(effort, index.nlist)
    if _is_of_gpu(index):
        need_faiss().GpuParameterSpace().set_index_parameter(index, "nprobe", min(count, MOST_OF_GPU))
    else:
        index.nprobe = count


def _is_of_gpu(index: Any) -> bool:
    return hasattr(index, "getDevice")


def _on_gpu(index: Any) -> Any:
    """Returns the index on the first GPU, or as it is if this build of faiss has none."""
    faiss = need_faiss("dml.search")
    return faiss.index_cpu_to_gpu(_resources(), 0, index) if faiss.get_num_gpus() else index


@cache
def _resources() -> Any:
    """Returns what faiss keeps on a GPU, about 1.5 GiB."""
    return need_faiss("dml.search").StandardGpuResources()


def exact(embeddings: np.ndarray) -> Search:
    """Returns a function that searches vectors `[N,D]`, which may be mapped from a file, exactly and block by block.

    It uses a GPU if faiss was built for one.
    """
    faiss = need_faiss("dml.search")

    def search(queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        queries = np.ascontiguousarray(queries, np.float32)
        found, rows = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
        for part in blocks(len(embeddings)):
            index = faiss.IndexFlatIP(queries.shape[1])
            if k <= MOST_OF_GPU:
                index = _on_gpu(index)
            index.add(np.ascontiguousarray(embeddings[part], np.float32))
            similarities, places = index.search(queries, min(k, part.stop - part.start))
            found = np.concatenate([found, similarities], axis=1)
            rows = np.concatenate([rows, places + part.start], axis=1)
            best = np.argsort(-found, axis=1, kind="stable")[:, :k]
            found, rows = np.take_along_axis(found, best, 1), np.take_along_axis(rows, best, 1)
        return found, rows

    return search


def check_count(kind: str | None, count: int) -> None:
    """Raises UserError if a gallery has too few images for a kind of index: for `ivfpq` to learn its codes, for `hnsw`
    to measure its recall."""
    if kind == "ivfpq" and count < FEWEST:
        raise UserError(
            f"--index ivfpq needs {FEWEST} images to learn its codes, but the gallery has {count}: take --index "
            "hnsw or flat."
        )
    if kind == "hnsw" and count < 2:
        raise UserError(
            "--index hnsw needs neighbours to measure its recall, but the gallery has one image: take --index flat."
        )


def build(kind: Kind, embeddings: np.ndarray) -> Index:
    """Builds an index of vectors `[N,D]` of unit norm, which are read in blocks.

    Raises:
        UserError: faiss is missing, or there are too few vectors, see `check_count`.
    """
    faiss = need_faiss("dml.search")
    count, width = embeddings.shape
    check_count(kind, count)
    if kind == "hnsw":
        if embeddings.dtype == np.float16:
            half = faiss.ScalarQuantizer.QT_fp16
            index = faiss.IndexHNSWSQ(width, half, LINKS, faiss.METRIC_INNER_PRODUCT)
            index.train(np.ascontiguousarray(embeddings[:256], np.float32))
        else:
            index = faiss.IndexHNSWFlat(width, LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = BUILD_EFFORT
    else:
        lists = max(1, min(int(4 * count**0.5), count // 39))
        codes = max(one for one in range(1, max(1, width // 4) + 1) if width % one == 0)
        index = faiss.IndexIVFPQ(faiss.IndexFlatIP(width), width, lists, codes, 8, faiss.METRIC_INNER_PRODUCT)
        some = np.sort(np.random.default_rng(0).choice(count, min(count, max(64 * lists, FEWEST)), replace=False))
        if codes in CODES_OF_GPU:
            index = _on_gpu(index)
        index.train(np.ascontiguousarray(embeddings[some], np.float32))
    for part in blocks(count):
        index.add(np.ascontiguousarray(embeddings[part], np.float32))
    return Index(kind, index, embeddings)


def tune(index: Index, k: int, least: float) -> Measured:
    """Raises the effort of an index until its recall on a sample of the gallery is at least `least`.

    Args:
        index: whose effort is set.
        k: number of neighbours for which recall is measured.
        least: the recall to reach, 0 to 1.

    Returns:
        Recall and speed at that effort.

    Raises:
        UserError: the recall is too low even at the largest effort.
    """
    count = len(index.embeddings)
    own = np.sort(np.random.default_rng(0).choice(count, min(SAMPLE, count), replace=False))
    queries = np.ascontiguousarray(index.embeddings[own], np.float32)
    k = min(k, count - 1)
    (truth, _), exact_seconds = _timed(exact(index.embeddings), queries, own, k)
    measured = None
    for effort in index.efforts():
        index.effort = effort
        (found, _), seconds = _timed(index.search, queries, own, k)
        recall = float((found >= truth[:, -1:] - TIED).sum(1).clip(max=k).mean() / k)
        measured = Measured(recall, k, len(own), effort, len(own) / seconds, len(own) / exact_seconds)
        if recall >= least:
            return measured
    assert measured is not None
    raise UserError(
        f"--index {index.kind} finds {measured.recall:.4f} of the {k} nearest at its largest effort, less than "
        f"--min-recall {least:g}: lower that, or take --index flat."
    )


def _timed(search: Search, queries: np.ndarray, own: np.ndarray, k: int) -> tuple[tuple[np.ndarray, np.ndarray], float]:
    """Searches for rows of the gallery: returns the k nearest of each without itself, and the seconds it took."""
    start = time.perf_counter()
    found, rows = search(queries, k + 1)
    seconds = time.perf_counter() - start
    other = rows != own[:, None]
    other[other.all(1), -1] = False  # where the query itself was not found, the last one is one too many
    return (found[other].reshape(len(own), k), rows[other].reshape(len(own), k)), seconds

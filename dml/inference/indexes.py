"""Approximate indexes of galleries, whose recall against exact search is measured, and raised to what was asked for.

N vectors, D width, Q queries, k neighbours, R candidates of a query.

`hnsw` (Malkov & Yashunin 2018) holds the vectors and their graph: N (4 D + 272) bytes, N (2 D + 272) of a float16
gallery; its effort is `efSearch`. `ivfpq` (Jégou et al. 2011) holds N (m + 8) bytes, m about D / 4, and 64 vectors a
list while it learns; its candidates are compared again by the vectors themselves, in the file: its effort is `nprobe`
and R. Exact search reads the file in blocks and holds none of it. Of other libraries hnswlib and usearch have graphs
only, ScaNN no wheel for each platform; faiss is there for K-means anyway.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dml.errors import UserError
from dml.evaluation.clustering import need_faiss
from dml.files import atomic_path, write_atomically
from dml.inference.galleries import blocks, checksum_of
from dml.inference.vectors import Vectors
from dml.runs.reading import reading, require

Kind = Literal["hnsw", "ivfpq"]
Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]  # [Q,D], k -> similarities and rows [Q,k]

LINKS, BUILD_EFFORT = 32, 100  # of HNSW's graph: neighbours of a vector, and candidates while it is built
FEWEST = 39 * 256  # vectors that faiss wants to learn 256 codes of
HARDEST = 4096  # efSearch, and the candidates of a query, at most
SAMPLE = 1000  # of the gallery, as queries
TIED = 1e-6  # similarities that float32 cannot tell apart

FILE, ABOUT = "index.faiss", "index.json"


@dataclass(frozen=True)
class Measured:
    """How an index does at an effort.

    Attributes:
        recall: share of the exact k nearest, without the query itself, among those found; at equal similarity either.
        k: of the recall.
        sample: queries, of the gallery itself.
        per_second: queries of the index.
        exact_per_second: of exact search in the same process.
    """

    recall: float
    k: int
    sample: int
    effort: int
    per_second: float
    exact_per_second: float


@dataclass
class Index:
    """A faiss index of vectors that may lie in a file."""

    kind: Kind
    faiss: Any
    embeddings: np.ndarray
    effort: int = 1

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest of queries `[Q,D]`: similarities and rows `[Q,k]`, -inf and -1 where too few were found."""
        queries = np.ascontiguousarray(queries, np.float32)
        if self.kind == "hnsw":
            self.faiss.hnsw.efSearch = max(self.effort, k)
            similarities, rows = self.faiss.search(queries, k)
            return np.where(rows < 0, -np.inf, similarities), rows
        _probe(self.faiss, self.effort)
        rows = self.faiss.search(queries, self._candidates(k))[1]
        return self._compared(queries, rows, k)

    def _candidates(self, k: int) -> int:
        return min(max(k * self.effort // 2, k), HARDEST, len(self.embeddings))

    def _compared(self, queries: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest of candidates `[Q,R]`, by the vectors themselves."""
        found, nearest = np.full((len(rows), k), -np.inf, np.float32), np.full((len(rows), k), -1)
        for query, candidates in enumerate(rows):
            there = np.sort(candidates[candidates >= 0])  # in the order of the file
            similarities = self.embeddings[there].astype(np.float32) @ queries[query]
            best = np.argsort(-similarities, kind="stable")[:k]
            found[query, : len(best)], nearest[query, : len(best)] = similarities[best], there[best]
        return found, nearest

    def efforts(self) -> Iterator[int]:
        """From little to all."""
        last = HARDEST if self.kind == "hnsw" else max(self.faiss.nlist, 2 * HARDEST)
        effort = 16 if self.kind == "hnsw" else 8
        while effort < last:
            yield effort
            effort *= 2
        yield last


def _probe(index: Any, effort: int) -> None:
    count = min(effort, index.nlist)
    if hasattr(index, "getDevice"):  # on a GPU
        need_faiss().GpuParameterSpace().set_index_parameter(index, "nprobe", min(count, 2048))
    else:
        index.nprobe = count


def _on_gpu(index: Any) -> Any:
    """An index on the first GPU, where this build of faiss has one."""
    faiss = need_faiss("dml.search")
    return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, index) if faiss.get_num_gpus() else index


def exact(embeddings: np.ndarray) -> Search:
    """Exact search in a file that is mapped into memory, block by block; on a GPU where faiss has one."""
    faiss = need_faiss("dml.search")

    def search(queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        queries = np.ascontiguousarray(queries, np.float32)
        found, rows = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
        for part in blocks(len(embeddings)):
            index = _on_gpu(faiss.IndexFlatIP(queries.shape[1]))
            index.add(np.ascontiguousarray(embeddings[part], np.float32))
            similarities, places = index.search(queries, min(k, part.stop - part.start))
            found = np.concatenate([found, similarities], axis=1)
            rows = np.concatenate([rows, places + part.start], axis=1)
            best = np.argsort(-found, axis=1, kind="stable")[:, :k]
            found, rows = np.take_along_axis(found, best, 1), np.take_along_axis(rows, best, 1)
        return found, rows

    return search


def build(kind: Kind, embeddings: np.ndarray) -> Index:
    """An index of vectors `[N,D]` of unit norm, added in blocks.

    Raises:
        UserError: faiss is missing; fewer vectors than `ivfpq` learns its codes of.
    """
    faiss = need_faiss("dml.search")
    count, width = embeddings.shape
    if kind == "hnsw":
        if embeddings.dtype == np.float16:
            half = faiss.ScalarQuantizer.QT_fp16
            index = faiss.IndexHNSWSQ(width, half, LINKS, faiss.METRIC_INNER_PRODUCT)
            index.train(np.ascontiguousarray(embeddings[:256], np.float32))
        else:
            index = faiss.IndexHNSWFlat(width, LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = BUILD_EFFORT
    else:
        if count < FEWEST:
            raise UserError(
                f"--index ivfpq learns its codes of {FEWEST} images or more, the gallery has {count}: take --index "
                "hnsw or flat."
            )
        lists = max(1, min(int(4 * count**0.5), count // 39))
        codes = max(one for one in range(1, max(1, width // 4) + 1) if width % one == 0)
        index = faiss.IndexIVFPQ(faiss.IndexFlatIP(width), width, lists, codes, 8, faiss.METRIC_INNER_PRODUCT)
        some = np.sort(np.random.default_rng(0).choice(count, min(count, max(64 * lists, FEWEST)), replace=False))
        index = _on_gpu(index)
        index.train(np.ascontiguousarray(embeddings[some], np.float32))
    for part in blocks(count):
        index.add(np.ascontiguousarray(embeddings[part], np.float32))
    return Index(kind, index, embeddings)


def tune(index: Index, k: int, least: float) -> Measured:
    """Raises the effort of an index until its recall on a sample is `least`, and measures it.

    Raises:
        UserError: it is not even at the largest effort.
    """
    count = len(index.embeddings)
    own = np.sort(np.random.default_rng(0).choice(count, min(SAMPLE, count), replace=False))
    queries = np.ascontiguousarray(index.embeddings[own], np.float32)
    k = min(k, count - 1)
    if k < 1:
        raise UserError(f"--index {index.kind} is measured by neighbours, and the gallery has one image: take flat.")
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
        f"--index {index.kind} finds {measured.recall:.4f} of the {k} nearest at its largest effort, not --min-recall "
        f"{least:g}: ask for less, or take --index flat."
    )


def _timed(search: Search, queries: np.ndarray, own: np.ndarray, k: int) -> tuple[tuple[np.ndarray, np.ndarray], float]:
    """The k nearest of rows of the gallery without themselves, and the seconds."""
    start = time.perf_counter()
    found, rows = search(queries, k + 1)
    seconds = time.perf_counter() - start
    other = rows != own[:, None]
    other[other.all(1), -1] = False  # itself was not among them: the last one is too many
    return (found[other].reshape(len(own), k), rows[other].reshape(len(own), k)), seconds


def write_index(folder: Path, index: Index, measured: Measured, asked: float, source: Path, vectors: Vectors) -> None:
    """`index.faiss`, and `index.json`: of which vectors it is, its effort and what was measured. Raises UserError where
    they cannot be written."""
    faiss = need_faiss("dml.search")
    try:
        (folder / ABOUT).unlink(missing_ok=True)
        with atomic_path(folder / FILE) as new:
            on_gpu = hasattr(index.faiss, "getDevice")
            faiss.write_index(faiss.index_gpu_to_cpu(index.faiss) if on_gpu else index.faiss, str(new))
        about = {
            "kind": index.kind,
            "vectors": os.path.relpath(source, folder),
            "of": vectors.checksum(),
            "index": checksum_of(folder / FILE),
            "min_recall": asked,
        }
        write_atomically(folder / ABOUT, json.dumps(about | asdict(measured), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): name another folder with -o.") from error


def described(folder: Path) -> dict[str, Any]:
    """The content of `index.json`. Raises UserError where it is damaged."""
    path = folder / ABOUT
    kinds = {"kind": str, "vectors": str, "of": str, "index": str, "effort": int, "k": int, "min_recall": float}
    with reading(path, "delete it and search in the gallery itself"):
        found: dict[str, Any] = json.loads(path.read_text())
        require(isinstance(found, dict), "it says nothing by name")
        for name, kind in kinds.items():
            require(isinstance(found.get(name), kind), f"{name} is {found.get(name)}")
        require(found["kind"] in ("hnsw", "ivfpq"), f"it is of no kind that there is: {found['kind']}")
        require(1 <= found["effort"] <= 1 << 20, f"effort is {found['effort']}")
    return found


def read_index(folder: Path, about: dict[str, Any], vectors: Vectors) -> Index:
    """What `write_index` left. faiss parses the file itself: search in no folder of somebody whom you do not trust.

    Raises:
        UserError: the gallery or the index was changed since, or is of another width.
    """
    again = "search in the gallery itself, with --index, to index it anew"
    if about["of"] != vectors.checksum():
        raise UserError(f"the gallery {about['vectors']} was changed since {folder / FILE} was made of it: {again}.")
    path = folder / FILE
    with reading(path, again):
        require(checksum_of(path) == about["index"], "it was changed since it was written")
        index = need_faiss("dml.search").read_index(str(path))
        require(index.d == vectors.embeddings.shape[1], f"it is of width {index.d}")
        require(index.ntotal == len(vectors.embeddings), f"it is of {index.ntotal} images")
    return Index(about["kind"], index, vectors.embeddings, about["effort"])

"""The images of a gallery that are nearest to others, as a trained run sees them."""

import base64
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import ImageOps
from pydantic import Field
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dml.configuration.defaults import EMBEDDED_AT_ONCE, MIN_RECALL
from dml.configuration.ranges import Count, check_value
from dml.data.images import decode, quiet
from dml.errors import UserError
from dml.evaluation.clustering import need_faiss
from dml.files import atomic_path, write_atomically
from dml.inference.embedding import Trained, embed_files, image_files, report_skipped, shown_path
from dml.inference.galleries import SUFFIX, read_gallery
from dml.inference.indexes import ABOUT, Measured, Search, build, described, exact, read_index, tune, write_index
from dml.inference.threshold import read_threshold
from dml.inference.vectors import Vectors, read_vectors, writable, write_vectors
from dml.reporting.page import render

INDEX, VECTORS, PAGE = "index.faiss", "vectors.npz", "results.html"

ON_PAGE = 100  # queries: thumbnails of more make a page that no browser likes

SIDE = 140  # pixels of a thumbnail's longer side


@dataclass(frozen=True)
class Gallery:
    """What is searched: the k nearest of M unit vectors of width D, and the path of each."""

    search: Search
    paths: Sequence[str]


@dataclass(frozen=True)
class Found:
    """The nearest images of one query, nearest first, with their cosines to it."""

    query: str
    paths: list[str]
    similarities: list[float]

    def at_least(self, threshold: float) -> "Found":
        """Those with a similarity from the threshold on, if any."""
        count = sum(similarity >= threshold for similarity in self.similarities)
        return Found(self.query, self.paths[:count], self.similarities[:count])


def index_of(embeddings: np.ndarray) -> Any:
    """An exact faiss index for cosines of unit vectors `[M,D]`. Raises as `need_faiss`."""
    index = need_faiss("dml.search").IndexFlatIP(embeddings.shape[1])
    index.add(np.ascontiguousarray(embeddings, np.float32))
    return index


def search_gallery(gallery: Gallery, queries: np.ndarray, names: Sequence[str], k: int) -> list[Found]:
    """The k nearest of the gallery to each of the queries `[Q,D]`, whose names are given.

    Raises:
        UserError: k below 1 or above the size of the gallery.
    """
    _check_k(k, len(gallery.paths))
    similarities, rows = gallery.search(np.ascontiguousarray(queries, np.float32), k)
    # An approximate index may find fewer, and says -1.
    return [
        Found(name, [gallery.paths[int(row)] for row in of_rows[of_rows >= 0]], of_similarities[of_rows >= 0].tolist())
        for name, of_rows, of_similarities in zip(names, rows, similarities, strict=True)
    ]


def _check_k(k: int, size: int) -> None:
    check_value("-k", k, Count)
    if k > size:
        raise UserError(f"-k {k} nearest images are asked for, the gallery holds {size}: choose 1 to {size}.")


def search(
    run: Path,
    place: Path,
    queries: Sequence[Path],
    out: Path | None = None,
    *,
    k: int = 10,
    checkpoint: str = "last",
    batch_size: int = EMBEDDED_AT_ONCE,
    device: str = "auto",
    skip: bool = False,
    threshold: bool = False,
    index: str | None = None,
    min_recall: float = MIN_RECALL,
) -> list[Found]:
    """The command: searches, prints a table for each query, and writes the index where it is new, and the page.

    Args:
        place: a folder of images, a file of vectors or a gallery file, or the folder of a search before.
        queries: images, or folders of them.
        out: what is written goes there; None: `place` if it has an index, else the folder `search` in that of the run.
        skip: leave out images that cannot be read.
        threshold: leave out images less similar than the threshold of `dml.threshold`, of some queries all.
        index: one of `dml.configuration.defaults.INDEXES`; None: the one that `place` has, else `flat`.
        min_recall: of an approximate index; its effort is raised until a sample of the gallery has it.
        run, checkpoint, batch_size, device: see `dml.embed.embed_images`.

    Raises:
        UserError: faiss is missing; no threshold was chosen; no such run, gallery or query; images that cannot be
            read; vectors of another width or of other weights than the run's; k above the size of the gallery; a
            folder that cannot be written; a recall that the index does not reach; a gallery that was changed since its
            index was made.
    """
    need_faiss("dml.search")
    check_value("--min-recall", min_recall, Annotated[float, Field(gt=0, le=1)])
    check_value("-k", k, Count)
    asked = image_files(queries)
    indexed = (place / INDEX).is_file()
    images = image_files([place]) if place.is_dir() and not indexed else []
    if images and not skip:
        _check_k(k, len(images))
    if not place.exists():
        raise UserError(
            f"there is no gallery {shown_path(place)}: name a folder of images, or a file of python -m dml.embed."
        )
    trained = Trained.of(run, checkpoint, device)
    least = read_threshold(run, trained) if threshold else None
    folder = out or (place if indexed else run / "search")
    writable(folder)
    if images:
        found = embed_files(trained, images, batch_size=batch_size, skip=skip)
        report_skipped(found)
        gallery = _indexed(folder, found.vectors(trained.digest()), None, index, k, min_recall)
    elif indexed:
        gallery = _stored(place, trained, index, k, min_recall)
    else:
        vectors = _vectors(place, trained)
        gallery = _indexed(folder, vectors, place, index, k, min_recall)
    _check_k(k, len(gallery.paths))
    of_queries = embed_files(trained, asked, batch_size=batch_size, skip=skip)
    report_skipped(of_queries)
    results = search_gallery(gallery, of_queries.embeddings, [str(file) for file in of_queries.files], k)
    if least is not None:
        results = [found.at_least(least) for found in results]
    _print(results)
    page = folder / PAGE
    try:
        write_atomically(page, _html(results, trained, len(gallery.paths)))
    except OSError as error:
        raise UserError(f"{page} cannot be written ({error.strerror}): name another folder with -o.") from error
    print(f"Results: {page}")
    return results


def _vectors(place: Path, trained: Trained) -> Vectors:
    """Of a file. Raises UserError where they are none, or of another embedding."""
    vectors = read_gallery(place) if place.suffix == SUFFIX else read_vectors(place)
    _check_same(place, vectors, trained)
    return vectors


def _indexed(
    folder: Path, vectors: Vectors, source: Path | None, kind: str | None, k: int, min_recall: float
) -> Gallery:
    """A new index in a folder; the vectors too, unless they are a gallery file or come from there. An exact search of a
    gallery file reads that, and leaves nothing. Raises UserError where it cannot be written, or as `build` and `tune`.
    """
    in_file = source is not None and source.suffix == SUFFIX
    _check_k(k, len(vectors.paths))
    built = measured = None
    if kind in ("hnsw", "ivfpq"):
        start = time.perf_counter()
        built = build(kind, vectors.embeddings)  # type: ignore[arg-type]
        seconds = time.perf_counter() - start
        measured = tune(built, k, min_recall)
        print(f"{kind} of {len(vectors.paths):,} images in {seconds:.1f} s: {_said(measured)}")
    for old in (INDEX, ABOUT):  # of other vectors
        (folder / old).unlink(missing_ok=True)
    if not in_file and (source is None or source.resolve() != (folder / VECTORS).resolve()):
        write_vectors(folder / VECTORS, vectors)
    if built is not None and measured is not None:
        of = source if source is not None and in_file else folder / VECTORS
        write_index(folder, built, measured, min_recall, of, vectors)
        return Gallery(built.search, vectors.paths)
    if in_file:
        return Gallery(exact(vectors.embeddings), vectors.paths)
    index = index_of(vectors.embeddings)
    _write_index(folder, index)
    return Gallery(index.search, vectors.paths.tolist())


def _said(measured: Measured) -> str:
    return (
        f"recall@{measured.k} {measured.recall:.4f} at effort {measured.effort}, {measured.per_second:,.0f} queries a "
        f"second, exact search {measured.exact_per_second:,.0f}"
    )


def _write_index(folder: Path, index: Any) -> None:
    """Raises UserError where it cannot be written."""
    try:
        with atomic_path(folder / INDEX) as new:
            new.write_bytes(_content(index))
    except OSError as error:
        raise UserError(
            f"{folder / INDEX} cannot be written ({error.strerror}): name another folder with -o."
        ) from error


def _content(index: Any) -> bytes:
    """Of the file of an index."""
    content: bytes = need_faiss("dml.search").serialize_index(index).tobytes()
    return content


def _stored(folder: Path, trained: Trained, kind: str | None, k: int, min_recall: float) -> Gallery:
    """What a search before has left. Raises UserError for vectors of another embedding, or an index of other vectors.

    An exact index is a function of its vectors: of such ones faiss reads no file that it did not write.
    """
    if not (folder / ABOUT).is_file():
        vectors = _vectors(folder / VECTORS, trained)
        if kind in ("hnsw", "ivfpq"):
            return _indexed(folder, vectors, folder / VECTORS, kind, k, min_recall)
        index = index_of(vectors.embeddings)
        if (folder / INDEX).read_bytes() != _content(index):
            raise UserError(
                f"{folder / INDEX} is not the index of {VECTORS} beside it, or damaged: delete it, and search in "
                f"{folder / VECTORS}."
            )
        return Gallery(index.search, vectors.paths.tolist())
    about = described(folder)
    source = folder / about["vectors"]
    vectors = _vectors(source, trained)
    if kind not in (None, about["kind"]):
        return _indexed(folder, vectors, source, kind, k, min_recall)
    found = read_index(folder, about, vectors)
    if (k, min_recall) != (about["k"], about["min_recall"]):
        _check_k(k, len(vectors.paths))
        measured = tune(found, k, min_recall)
        print(f"{found.kind}: {_said(measured)}")
        write_index(folder, found, measured, min_recall, source, vectors)
    return Gallery(found.search, vectors.paths)


def _check_same(file: Path, vectors: Vectors, trained: Trained) -> None:
    """Raises UserError for vectors of another width or of other weights than the run's."""
    width = vectors.embeddings.shape[1]
    if width != trained.width:
        raise UserError(
            f"{shown_path(file)} has {width} dimensions, the run's embedding {trained.width}: embed the gallery with "
            "this run."
        )
    if vectors.weights != trained.digest():
        raise UserError(
            f"{shown_path(file)} was embedded by other weights than those of {trained.checkpoint}: embed the gallery "
            "with this run, or choose its --checkpoint."
        )


def _print(results: Sequence[Found]) -> None:
    console = Console()
    for found in results:
        if not found.paths:
            console.print(Text(f"{shown_path(found.query)}: no match\n"), soft_wrap=True)
            continue
        table = Table(title=Text(shown_path(found.query)), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("", justify="right")
        table.add_column("image", overflow="fold")
        table.add_column("similarity", justify="right", no_wrap=True)
        for place, (path, similarity) in enumerate(zip(found.paths, found.similarities, strict=True), 1):
            table.add_row(str(place), Text(shown_path(path)), f"{similarity:.4f}")
        console.print(table)


def _html(results: Sequence[Found], trained: Trained, size: int) -> str:
    picture = cache(_thumbnail)
    with quiet():
        rows = [
            {
                "query": (shown_path(found.query), picture(found.query)),
                "found": [
                    (shown_path(path), picture(path), similarity)
                    for path, similarity in zip(found.paths, found.similarities, strict=True)
                ],
            }
            for found in results[:ON_PAGE]
        ]
    return render(
        "search.html.jinja",
        rows=rows,
        queries=len(results),
        images=size,
        method=type(trained.method).__name__,
        checkpoint=shown_path(trained.checkpoint),
        step=trained.step,
    )


def _thumbnail(path: str) -> str | None:
    """JPEG in base64; None of an image that is no longer there."""
    try:
        small = ImageOps.contain(decode(path), (SIDE, SIDE))
    except Exception:  # whatever PIL's decoders raise
        return None
    file = io.BytesIO()
    small.save(file, format="JPEG", quality=85)
    return base64.b64encode(file.getvalue()).decode()

"""The images of a gallery that are nearest to others, as a trained run sees them."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ImageOps
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dml.configuration.defaults import EMBEDDED_AT_ONCE
from dml.configuration.ranges import Count, check_value
from dml.data.images import decode, quiet
from dml.errors import UserError
from dml.evaluation.clustering import need_faiss
from dml.files import atomic_path, write_atomically
from dml.inference.embedding import Trained, embed_files, image_files, report_skipped, shown_path
from dml.inference.threshold import read_threshold
from dml.inference.vectors import Vectors, read_vectors, writable, write_vectors
from dml.reporting.page import render

INDEX, VECTORS, PAGE = "index.faiss", "vectors.npz", "results.html"

ON_PAGE = 100  # queries: thumbnails of more make a page that no browser likes

SIDE = 140  # pixels of a thumbnail's longer side


@dataclass(frozen=True)
class Gallery:
    """What is searched: a faiss index of M unit vectors of width D, and the path of each."""

    index: Any
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
    similarities, rows = gallery.index.search(np.ascontiguousarray(queries, np.float32), k)
    return [
        Found(name, [gallery.paths[row] for row in of_rows], of_similarities.tolist())
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
) -> list[Found]:
    """The command: searches, prints a table for each query, and writes the index where it is new, and the page.

    Args:
        place: a folder of images, a file of vectors, or the folder of a search before.
        queries: images, or folders of them.
        out: what is written goes there; None: `place` if it has an index, else the folder `search` in that of the run.
        skip: leave out images that cannot be read.
        threshold: leave out images less similar than the threshold of `dml.threshold`, of some queries all.
        run, checkpoint, batch_size, device: see `dml.embed.embed_images`.

    Raises:
        UserError: faiss is missing; no threshold was chosen; no such run, gallery or query; images that cannot be
            read; vectors of another width or of other weights than the run's; k above the size of the gallery; a
            folder that cannot be written.
    """
    need_faiss("dml.search")
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
        gallery = _store(folder, found.vectors(trained.digest()))
    elif indexed:
        gallery = _stored(place, trained)
    else:
        vectors = read_vectors(place)
        _check_same(place, vectors, trained)
        gallery = _store(folder, vectors, place)
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


def _store(folder: Path, vectors: Vectors, source: Path | None = None) -> Gallery:
    """A new index in a folder, and its vectors, unless they come from there. Raises UserError where it cannot be
    written."""
    gallery = Gallery(index_of(vectors.embeddings), vectors.paths.tolist())
    (folder / INDEX).unlink(missing_ok=True)  # of other vectors
    if source is None or source.resolve() != (folder / VECTORS).resolve():
        write_vectors(folder / VECTORS, vectors)
    _write_index(folder, gallery.index)
    return gallery


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


def _stored(folder: Path, trained: Trained) -> Gallery:
    """What a search before has left. Raises UserError for vectors of another embedding, or an index of other vectors:
    an exact index is a function of its vectors, and faiss reads no file that it did not write."""
    vectors = read_vectors(folder / VECTORS)
    _check_same(folder / VECTORS, vectors, trained)
    index = index_of(vectors.embeddings)
    if (folder / INDEX).read_bytes() != _content(index):
        raise UserError(
            f"{folder / INDEX} is not the index of {VECTORS} beside it, or damaged: delete it, and search in "
            f"{folder / VECTORS}."
        )
    return Gallery(index, vectors.paths.tolist())


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

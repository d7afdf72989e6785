"""Search: the images of a gallery that are nearest to query images, by a trained run's embedding."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from dml.configuration.defaults import EMBEDDED_AT_ONCE, MIN_RECALL
from dml.configuration.ranges import Count, Size, check_value
from dml.errors import UserError
from dml.evaluation.clustering import need_faiss
from dml.files import write_atomically
from dml.inference.embedding import Trained, embed_files, report_skipped
from dml.inference.found import Found, page_of, print_found
from dml.inference.galleries import SUFFIX, read_gallery
from dml.inference.index_files import (
    ABOUT,
    PAGE,
    VECTORS,
    check_folder,
    described,
    holds_search,
    is_index_of,
    read_index,
    replace_index,
    write_index,
)
from dml.inference.index_files import FILE as INDEX
from dml.inference.indexes import Measured, Search, build, check_count, exact, tune
from dml.inference.places import image_files, shown_path
from dml.inference.threshold import read_threshold
from dml.inference.vectors import Vectors, read_vectors, writable


@dataclass(frozen=True)
class Gallery:
    """A gallery of M images: a function that searches their unit vectors `[M,D]`, and the path of each image."""

    search: Search
    paths: Sequence[str]


def index_of(embeddings: np.ndarray) -> Any:
    """Makes an exact faiss index for cosines of unit vectors `[M,D]`. Raises UserError if faiss is not installed."""
    index = need_faiss("dml.search").IndexFlatIP(embeddings.shape[1])
    index.add(np.ascontiguousarray(embeddings, np.float32))
    return index


def search_gallery(gallery: Gallery, queries: np.ndarray, names: Sequence[str], k: int) -> list[Found]:
    """Finds the k images of the gallery that are nearest to each query.

    Args:
        gallery: to search.
        queries: `[Q,D]` of unit norm.
        names: Q names of the queries.
        k: how many images to find for each query.

    Raises:
        UserError: k is below 1 or above the size of the gallery.
    """
    _check_k(k, len(gallery.paths))
    similarities, rows = gallery.search(np.ascontiguousarray(queries, np.float32), k)
    # An approximate index may find fewer than k images; the others have the row -1.
    return [
        Found(name, [gallery.paths[int(row)] for row in of_rows[of_rows >= 0]], of_similarities[of_rows >= 0].tolist())
        for name, of_rows, of_similarities in zip(names, rows, similarities, strict=True)
    ]


def _check_k(k: int, size: int) -> None:
    check_value("-k", k, Count)
    if k > size:
        raise UserError(f"-k {k} nearest images are asked for, but the gallery holds {size}: choose 1 to {size}.")


def search(
    run: Path,
    place: Path,
    queries: Sequence[Path],
    out: Path | None = None,
    *,
    k: int = 10,
    checkpoint: str | None = None,
    batch_size: int = EMBEDDED_AT_ONCE,
    device: str = "auto",
    skip: bool = False,
    threshold: bool = False,
    index: str | None = None,
    min_recall: float = MIN_RECALL,
) -> list[Found]:
    """Runs the command: searches, prints a table for each query, and writes the page, and the index if it is new.

    Args:
        place: the gallery: a folder of images, a file of `dml.embed` (.npz or .npy), or the folder of an earlier
            search.
        queries: images, or folders of them.
        out: the folder to write to; None: `place` if a search was written there, else the folder `search` of the run.
        k: how many images to find for each query.
        skip: leave out images that cannot be read.
        threshold: leave out images that are less similar than the threshold of `dml.threshold`. Some queries may then
            have no match.
        index: one of `dml.configuration.defaults.INDEXES`; None: the kind that `place` has, else `flat`.
        min_recall: the recall that an approximate index has to reach on a sample of the gallery; its effort is raised
            until it does.
        run, checkpoint, device: see `dml.inference.embedding.Trained.of`.
        batch_size: images that are embedded at a time.

    Raises:
        UserError: faiss is missing; no threshold was chosen; there is no such run, gallery or query; images cannot be
            read; the vectors have another width or come from other weights than the run's; k is above the size of the
            gallery, or that is too small for the index; the folder cannot be written, or has files of others under the
            names of a search's; the index does not reach `min_recall`; or the gallery was changed since its index was
            made.
    """
    need_faiss("dml.search")
    check_value("--min-recall", min_recall, Annotated[float, Field(gt=0, le=1)])
    check_value("-k", k, Count)
    check_value("--batch-size", batch_size, Size)
    asked = image_files(queries)
    indexed = holds_search(place)
    images = image_files([place]) if place.is_dir() and not indexed else []
    if images:
        check_count(index, len(images))
    if images and out is not None and out.resolve() == place.resolve():
        raise UserError(
            f"{shown_path(out)} is the gallery itself, which would count as the folder of a search from then on, and "
            "take no new image: name another folder with -o."
        )
    if images and not skip:
        _check_k(k, len(images))
    if not place.exists():
        raise UserError(
            f"there is no gallery {shown_path(place)}: name a folder of images, or a file of python -m dml.embed."
        )
    if place.is_file() and place.suffix not in (".npz", SUFFIX):
        raise UserError(
            f"{shown_path(place)} is no gallery: name the folder of the images, or a .npz or .npy file of python -m "
            "dml.embed."
        )
    folder = out or (place if indexed else run / "search")
    check_folder(folder, place)
    trained = Trained.of(run, checkpoint, device)
    least = read_threshold(run, trained) if threshold else None
    writable(folder)
    if images:
        found = embed_files(trained, images, batch_size=batch_size, skip=skip)
        report_skipped(found)
        gallery = _indexed(folder, found.vectors(trained.digest()), None, index, k, min_recall)
    elif indexed:
        gallery = _stored(place, folder, trained, index, k, min_recall)
        print(f"Gallery: the {len(gallery.paths):,} images of the earlier search in {place}")
    else:
        vectors = _vectors(place, trained)
        gallery = _indexed(folder, vectors, place, index, k, min_recall)
    _check_k(k, len(gallery.paths))
    of_queries = embed_files(trained, asked, batch_size=batch_size, skip=skip)
    report_skipped(of_queries)
    results = search_gallery(gallery, of_queries.embeddings, [str(file) for file in of_queries.files], k)
    if least is not None:
        results = [found.at_least(least) for found in results]
    print_found(results)
    page = folder / PAGE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(page, page_of(results, trained, len(gallery.paths), least))
    except OSError as error:
        raise UserError(f"{page} cannot be written ({error.strerror}): name another folder with -o.") from error
    print(f"Results: {page}")
    return results


def _vectors(place: Path, trained: Trained) -> Vectors:
    """Reads the vectors of a file. Raises UserError if it holds none, or those of another embedding."""
    vectors = read_gallery(place) if place.suffix == SUFFIX else read_vectors(place)
    _check_same(place, vectors, trained)
    return vectors


def _indexed(
    folder: Path, vectors: Vectors, source: Path | None, kind: str | None, k: int, min_recall: float
) -> Gallery:
    """Makes a new index and writes it into a folder. It also writes the vectors, unless they are in a gallery file or
    in that folder already.

    Exact search of a gallery file reads that file and writes nothing; an approximate index of it is removed from the
    folder. Vectors that are in no file yet are written with an exact index before an approximate one is built, so that
    they are kept whatever becomes of that.

    Args:
        source: the file of the vectors; None: they are in no file yet.
        kind: of the index; None: `flat`.

    Raises:
        UserError: the folder cannot be written; also as `build` and `tune`.
    """
    in_file = source is not None and source.suffix == SUFFIX
    _check_k(k, len(vectors.paths))
    built = measured = None
    if kind in ("hnsw", "ivfpq"):
        if source is None:
            source = folder / VECTORS
            _write_exact(folder, index_of(vectors.embeddings), vectors)
            print(f"Vectors: {source}")
        start = time.perf_counter()
        built = build(kind, vectors.embeddings)  # type: ignore[arg-type]
        seconds = time.perf_counter() - start
        measured = tune(built, k, min_recall)
        print(f"{kind} of {len(vectors.paths):,} images in {seconds:.1f} s: {_said(measured)}")
    stored = in_file or (source is not None and source.resolve() == (folder / VECTORS).resolve())
    new = None if stored else vectors
    if built is not None and measured is not None:
        of = source if source is not None and in_file else folder / VECTORS
        write_index(folder, built, measured, min_recall, of, vectors, new)
        return Gallery(built.search, vectors.paths)
    if in_file:
        if source is not None and is_index_of(folder, source):
            for old in (INDEX, ABOUT):
                (folder / old).unlink(missing_ok=True)
        if holds_search(folder):
            print(f"{folder} keeps the index of another gallery, in which a search of {folder} would look.")
        return Gallery(exact(vectors.embeddings), vectors.paths)
    index = index_of(vectors.embeddings)
    _write_exact(folder, index, new)
    return Gallery(index.search, vectors.paths.tolist())


def _write_exact(folder: Path, index: Any, vectors: Vectors | None) -> None:
    replace_index(folder, lambda path: path.write_bytes(_content(index)), vectors=vectors)


def _said(measured: Measured) -> str:
    return (
        f"recall@{measured.k} {measured.recall:.4f} at effort {measured.effort}, {measured.per_second:,.0f} queries a "
        f"second, exact search {measured.exact_per_second:,.0f}"
    )


def _content(index: Any) -> bytes:
    """Returns the bytes that the file of an index has."""
    content: bytes = need_faiss("dml.search").serialize_index(index).tobytes()
    return content


def _stored(place: Path, folder: Path, trained: Trained, kind: str | None, k: int, min_recall: float) -> Gallery:
    """Opens the gallery that an earlier search left in `place`. If another index is asked for, it is written into
    `folder`.

    An exact index follows from its vectors, so it is built again and compared with the file: faiss reads no file of an
    exact index that somebody else may have written.

    Raises:
        UserError: the vectors are of another embedding, or the index is of other vectors.
    """
    if not (place / ABOUT).is_file():
        vectors = _vectors(place / VECTORS, trained)
        if kind in ("hnsw", "ivfpq") or not (place / INDEX).is_file():  # it is missing after a kill, or was deleted
            return _indexed(folder, vectors, place / VECTORS, kind, k, min_recall)
        index = index_of(vectors.embeddings)
        if (place / INDEX).read_bytes() != _content(index):
            raise UserError(
                f"{place / INDEX} is not the index of {VECTORS} beside it, or is damaged: delete it, and search in "
                f"{place / VECTORS}."
            )
        return Gallery(index.search, vectors.paths.tolist())
    about = described(place)
    source = place.resolve() / about["vectors"]
    vectors = _vectors(source, trained)
    if kind not in (None, about["kind"]):
        return _indexed(folder, vectors, source, kind, k, min_recall)
    found = read_index(place, about, vectors)
    if (min(k, len(vectors.paths) - 1), min_recall) != (about["k"], about["min_recall"]):
        _check_k(k, len(vectors.paths))
        measured = tune(found, k, min_recall)
        print(f"{found.kind}: {_said(measured)}")
        write_index(folder, found, measured, min_recall, source, vectors)
    return Gallery(found.search, vectors.paths)


def _check_same(file: Path, vectors: Vectors, trained: Trained) -> None:
    """Raises UserError if the vectors have another width, or come from other weights, than the run's."""
    width = vectors.embeddings.shape[1]
    if width != trained.width:
        raise UserError(
            f"{shown_path(file)} has {width} dimensions, but the run's embedding {trained.width}: embed the gallery "
            "with this run."
        )
    if vectors.weights != trained.digest():
        raise UserError(
            f"{shown_path(file)} was embedded by other weights than those of {trained.checkpoint}: embed the gallery "
            "with this run, or choose its --checkpoint."
        )

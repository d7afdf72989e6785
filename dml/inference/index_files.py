"""The folder of an index: written whole in place of an older one, and read only if its parts belong together.

`index.faiss` is of the vectors in `vectors.npz`, or in the gallery file that `index.json` names. An approximate index
has an `index.json`, with the checksums of its vectors and of itself. An exact one has none, since it follows from its
vectors.
"""

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dml.errors import UserError, no_room
from dml.evaluation.clustering import need_faiss
from dml.files import atomic_path, read_json, write_through
from dml.inference.galleries import checksum_of, has_values
from dml.inference.indexes import Index, Measured
from dml.inference.vectors import Vectors, belongs_to_search, save_vectors
from dml.runs.reading import reading, require

FILE, ABOUT, VECTORS, PAGE = "index.faiss", "index.json", "vectors.npz", "results.html"

TITLE = "Images found"  # of the page of every search


def holds_search(folder: Path) -> bool:
    """Returns whether an earlier search left an index, or the vectors of one, in a folder."""
    return (folder / FILE).is_file() or belongs_to_search(folder / VECTORS)


def check_folder(folder: Path, source: Path) -> None:
    """Raises UserError if a folder has a file of a name that a search writes, but that no search wrote.

    Args:
        folder: to write to.
        source: the gallery. If that is the folder's file of vectors, it stays as it is. If it is this very folder, as
            an earlier search left it, only the page is looked at.
    """
    about, vectors, file, page = (folder / name for name in (ABOUT, VECTORS, FILE, PAGE))
    of_search = belongs_to_search(vectors)
    strange = []
    if page.exists() and not _is_page(page):
        strange.append(page)
    if source.resolve() != folder.resolve() or not holds_search(folder):
        if about.exists() and not has_values(about, "kind", "vectors", "of", "index"):
            strange.append(about)
        if vectors.exists() and vectors.resolve() != source.resolve() and not of_search:
            strange.append(vectors)
        # An index of ours has a description or vectors of ours beside it, or, if those are of `dml.embed`, a page.
        if file.exists() and not (about.exists() or of_search or page.exists()):
            strange.append(file)
    if strange:
        raise UserError(
            f"{strange[0]} was not written by dml.search, which would replace it: move it away, or name another folder "
            "with -o."
        )


def _is_page(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return f"<title>{TITLE}</title>".encode() in file.read(1000)
    except OSError:
        return False


def replace_index(
    folder: Path,
    save: Callable[[Path], object],
    describe: Callable[[Path], str] | None = None,
    vectors: Vectors | None = None,
) -> None:
    """Writes an index, and what belongs to it, in place of an older one. The older one stays if that fails.

    Args:
        folder: where to write.
        save: writes `index.faiss` to a path.
        describe: returns the content of `index.json` for the new index at a path; None: it has none.
        vectors: for `vectors.npz`; None: that file stays as it is.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # All are whole before the first gets its name. Names are given in reverse order, so the index comes last: a
        # kill in between leaves an index that does not fit its vectors, or its checksum, and is not read.
        with ExitStack() as named:
            index = named.enter_context(atomic_path(folder / FILE))
            save(index)
            if describe is not None:
                write_through(named.enter_context(atomic_path(folder / ABOUT)), describe(index))
            if vectors is not None:
                save_vectors(named.enter_context(atomic_path(folder / VECTORS)), vectors, of_search=True)
        if describe is None:
            (folder / ABOUT).unlink(missing_ok=True)
    except OSError as error:
        remedy = "make room, or " if no_room(error) else ""
        raise UserError(
            f"{folder} cannot be written ({error.strerror}): {remedy}name another folder with -o."
        ) from error


def write_index(
    folder: Path,
    index: Index,
    measured: Measured,
    asked: float,
    source: Path,
    vectors: Vectors,
    new: Vectors | None = None,
) -> None:
    """Writes `index.faiss` and `index.json`, see `replace_index`.

    Args:
        folder: where to write.
        index: to write.
        measured: its recall and speed, for `index.json`.
        asked: the recall that was asked for, 0 to 1.
        source: the file of the vectors.
        vectors: of which the index was made.
        new: the same, if they have to be written to `vectors.npz` too.

    Raises:
        UserError: they cannot be written.
    """
    faiss = need_faiss("dml.search")

    def save(path: Path) -> None:
        on_gpu = hasattr(index.faiss, "getDevice")
        with path.open("wb") as file:  # by Python, since of a full disk faiss raises no OSError
            writer = faiss.PyCallbackIOWriter(file.write)
            faiss.write_index(faiss.index_gpu_to_cpu(index.faiss) if on_gpu else index.faiss, writer)

    def describe(path: Path) -> str:
        about = {
            "kind": index.kind,
            "vectors": os.path.relpath(source.resolve(), folder.resolve()),  # `..` of a link is that of its target
            "of": vectors.checksum(),
            "index": checksum_of(path),
            "min_recall": float(asked),
        }
        return json.dumps(about | asdict(measured), indent=1) + "\n"

    replace_index(folder, save, describe, new)


def is_index_of(folder: Path, source: Path) -> bool:
    """Returns whether a folder has an approximate index of a gallery file."""
    if not has_values(folder / ABOUT, "vectors"):
        return False
    named = read_json(folder / ABOUT)["vectors"]
    return isinstance(named, str) and (folder.resolve() / named).resolve() == source.resolve()


def described(folder: Path) -> dict[str, Any]:
    """Returns the content of `index.json` in a folder. Raises UserError if it is missing or damaged."""
    path = folder / ABOUT
    kinds = {"kind": str, "vectors": str, "of": str, "index": str, "effort": int, "k": int, "min_recall": float}
    with reading(path, "delete it and search in the gallery itself"):
        found: dict[str, Any] = json.loads(path.read_text())
        require(isinstance(found, dict), "it holds no values by name")
        for name, kind in kinds.items():
            require(isinstance(found.get(name), kind), f"{name} is {found.get(name)}")
        require(found["kind"] in ("hnsw", "ivfpq"), f"its kind is neither hnsw nor ivfpq but {found['kind']}")
        require(1 <= found["effort"] <= 1 << 20, f"effort is {found['effort']}")
    return found


def read_index(folder: Path, about: dict[str, Any], vectors: Vectors) -> Index:
    """Reads what `write_index` wrote.

    faiss parses the file without protection against harmful content: do not search in a folder from somebody whom you
    do not trust.

    Args:
        folder: of the index.
        about: the content of `index.json`.
        vectors: of which the index was made.

    Raises:
        UserError: the gallery or the index was changed since, or the index does not fit the gallery.
    """
    again = "search in the gallery itself, with --index, to make a new index"
    if about["of"] != vectors.checksum():
        raise UserError(f"the gallery {about['vectors']} was changed since {folder / FILE} was made from it: {again}.")
    path = folder / FILE
    with reading(path, again):
        require(checksum_of(path) == about["index"], "it was changed since it was written")
        index = need_faiss("dml.search").read_index(str(path))
        require(index.d == vectors.embeddings.shape[1], f"it is of width {index.d}")
        require(index.ntotal == len(vectors.embeddings), f"it is of {index.ntotal} images")
    return Index(about["kind"], index, vectors.embeddings, about["effort"])

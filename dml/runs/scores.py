"""Files about a run's test images: the metrics of each query and, for some protocols, the embeddings."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dml.data.check import digest
from dml.data.records import Records
from dml.errors import UserError
from dml.evaluation.evaluator import Embedded
from dml.evaluation.inputs import as_embeddings, as_labels
from dml.evaluation.metric import metric, of_a_query
from dml.evaluation.metrics import Ranking
from dml.evaluation.protocol import Conventional
from dml.evaluation.splits import Split
from dml.files import atomic_path
from dml.runs.reading import reading, require

REPEAT = "repeat the run"

QUERIES, EMBEDDINGS = "queries.npz", "embeddings.npz"


@dataclass(frozen=True)
class Queries:
    """The results of each query.

    Attributes:
        paths: `[Q]`, their files.
        classes: `[Q]`, their classes.
        best_rank: `[Q]`, the rank of the nearest positive, from 1; 0: there is none.
        values: by name, `[Q]` of those metrics of `dml.evaluation.metric.of_a_query` that the run wrote.
        gallery: digest of a separate gallery, and of the cameras if a query leaves out images of its own; empty: the
            queries are the gallery.
    """

    paths: np.ndarray
    classes: np.ndarray
    best_rank: np.ndarray
    values: dict[str, np.ndarray]
    gallery: str = ""

    def metric(self, name: str) -> np.ndarray | None:
        """Returns the values `[Q]` float64 of a metric, which may be Recall@K; None if the run did not write it."""
        if recall := re.fullmatch(r"recall@(\d{1,18})", name):
            return ((self.best_rank > 0) & (self.best_rank <= int(recall[1]))).astype(float)
        return self.values.get(name)


def write_scores(
    folder: Path, records: Records, split: Split, protocol: Conventional, embedded: Embedded, ranking: Ranking | None
) -> None:
    """Writes `queries.npz` if there is a ranking, and `embeddings.npz` if the protocol keeps embeddings, as MLRC does.

    Args:
        folder: of the run.
        records, split, protocol: of the run.
        embedded: test embeddings of the checkpoint that is the result, on any device.
        ranking: of the queries; None: the protocol has no single ranking.
    """
    if ranking is not None:
        rows = embedded.take(split.query).rows.cpu().numpy()
        names = np.array(records.class_names)[records.labels[rows]]
        paths = [os.path.abspath(path) for path in records.paths[rows].tolist()]
        common = os.path.commonpath([os.path.dirname(path) for path in paths])  # data may move to another folder
        arrays = {"paths": np.array([os.path.relpath(path, common) for path in paths]), "classes": names}
        if split.gallery is not None:
            arrays["gallery"] = np.array(_of_gallery(records, split, common))
        _save(folder / QUERIES, **arrays, best_rank=ranking.best_rank, **ranking.values)
    if protocol.keeps_embeddings:
        embedded = embedded.cpu()
        queries = embedded.take(split.query)
        arrays = {"embeddings": queries.embeddings.flatten(1).numpy(), "labels": queries.labels.numpy()}
        if split.gallery is not None:
            gallery = embedded.take(split.gallery)
            arrays["gallery"] = gallery.embeddings.flatten(1).numpy()
            arrays["gallery_labels"] = gallery.labels.numpy()
        _save(folder / EMBEDDINGS, **arrays)


def _of_gallery(records: Records, split: Split, common: str) -> str:
    """Returns a digest of a separate gallery, the same wherever the data lie, and of all cameras that count."""
    assert split.gallery is not None
    rows = np.sort(split.gallery)
    cameras = "" if split.cameras is None else str(split.cameras[np.concatenate([split.query, rows])].tolist())
    images = zip(records.paths[rows].tolist(), records.labels[rows].tolist(), strict=True)
    names = ((os.path.relpath(os.path.abspath(path), common), records.class_names[label]) for path, label in images)
    return digest(cameras, (f"\n{path}\n{name}" for path, name in names))


def read_queries(folder: Path) -> Queries:
    """Reads `queries.npz` of a folder. Raises UserError if it is missing or damaged."""
    path = folder / QUERIES
    with reading(path, REPEAT):
        kinds = {"paths": "U", "classes": "U", "best_rank": "iu"}
        found = read(path, tuple(kinds), ("gallery", *of_a_query()))
        gallery = found.pop("gallery", np.array(""))
        require(gallery.shape == () and gallery.dtype.kind == "U", "gallery is no text")
        for name, values in found.items():
            kind = kinds.get(name, "f")
            require(values.ndim == 1 and len(values) == len(found["paths"]), f"{name} has shape {list(values.shape)}")
            require(values.dtype.kind in kind, f"{name} holds {values.dtype}")
        require(len(found["paths"]) > 0, "it holds no query")
        require(bool((found["best_rank"] >= 0).all()), "a rank is below 0")
        by_name = {name: found.pop(name) for name in of_a_query() if name in found}
        for name, values in by_name.items():
            require(bool(np.isfinite(values).all()), f"{name} is not finite")
            if not metric(name).unit:
                require(bool(((values >= 0) & (values <= 1)).all()), f"{name} is not within 0 to 1")
        return Queries(**found, values=by_name, gallery=str(gallery))


def read_embeddings(folder: Path) -> dict[str, np.ndarray]:
    """Reads `embeddings.npz` of a folder: `embeddings [N,D]` and `labels [N]`, and, if the gallery is separate,
    `gallery [M,D]` and `gallery_labels [M]`.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = folder / EMBEDDINGS
    with reading(path, REPEAT):
        found = read(path, ("embeddings", "labels"), ("gallery", "gallery_labels"))
        require(("gallery" in found) == ("gallery_labels" in found), "a gallery has no labels")
        for name, labels in (("embeddings", "labels"), ("gallery", "gallery_labels")):
            if name in found:
                points = as_embeddings(found[name], name)
                as_labels(found[labels], points, labels)
                require(bool((points.norm(dim=1) > 0).all()), f"a row of {name} is all 0")
    return found


def read(path: Path, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Reads arrays of a file of this module: all of `names`, and those of `optional` that the file has.

    Raises:
        UserError: the file is missing or damaged.
    """
    if not path.is_file():
        raise UserError(
            f"there is no {path}: it is written at the end of a run, by protocols that have one ranking; name a "
            "finished run."
        )
    with reading(path, REPEAT), np.load(path, allow_pickle=False) as content:
        return {name: content[name] for name in (*names, *(name for name in optional if name in content.files))}


def _save(path: Path, **arrays: Any) -> None:
    with atomic_path(path) as new, new.open("wb") as file:
        np.savez(file, **arrays)

"""What a run leaves of its test images: figures of each query, and embeddings where the protocol compares those."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dml.build import Parts
from dml.errors import UserError
from dml.evaluation.evaluator import Table

QUERIES, EMBEDDINGS = "queries.npz", "embeddings.npz"


@dataclass(frozen=True)
class Queries:
    """Of each query `[Q]`: its file, its class, the rank of its nearest positive (0: it has none), and AP@R."""

    paths: np.ndarray
    classes: np.ndarray
    best_rank: np.ndarray
    average_precision: np.ndarray


def write_scores(folder: Path, parts: Parts, table: Table) -> None:
    """`queries.npz`, where the protocol ranks one gallery for all queries, and for MLRC `embeddings.npz`.

    Args:
        folder: of the run.
        parts: of the run.
        table: test embeddings of the checkpoint that is the result.
    """
    split, records = parts.split, parts.records
    ranking = parts.protocol.ranking(split, table)
    if ranking is not None:
        rows = table.take(split.query).rows.numpy()
        names = np.array(records.class_names)[records.labels[rows]]
        paths = records.paths[rows].tolist()
        common = os.path.commonpath([os.path.dirname(path) for path in paths])  # data may lie elsewhere next time
        _save(
            folder / QUERIES,
            paths=np.array([os.path.relpath(path, common or ".") for path in paths]),
            classes=names,
            best_rank=ranking.best_rank,
            average_precision=ranking.average_precision,
        )
    if parts.protocol.keeps_embeddings:
        queries = table.take(split.query)
        arrays = {"embeddings": queries.embeddings.flatten(1).numpy(), "labels": queries.labels.numpy()}
        if split.gallery is not None:
            gallery = table.take(split.gallery)
            arrays["gallery"] = gallery.embeddings.flatten(1).numpy()
            arrays["gallery_labels"] = gallery.labels.numpy()
        _save(folder / EMBEDDINGS, **arrays)


def read_queries(folder: Path) -> Queries:
    """Raises UserError where a folder has no such file, or a damaged one."""
    return Queries(**read(folder / QUERIES, ("paths", "classes", "best_rank", "average_precision")))


def read(path: Path, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Arrays of a file of this module, of the optional ones those it has. Raises UserError where it is not there or
    damaged."""
    if not path.is_file():
        raise UserError(f"there is no {path}: it is written at the end of a run, by protocols that have one ranking.")
    try:
        with np.load(path, allow_pickle=False) as content:
            return {name: content[name] for name in (*names, *(name for name in optional if name in content.files))}
    except Exception as error:  # zipfile's and NumPy's, whatever damaged bytes lead them to
        raise UserError(f"{path} cannot be read ({error}): repeat the run.") from None


def _save(path: Path, **arrays: Any) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}.npz")
    np.savez(beside, **arrays)
    os.replace(beside, path)

"""Verification of a published embedding: the test set is embedded again, and every rank and figure is compared."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dml.configuration.defaults import EMBEDDED_AT_ONCE
from dml.configuration.ranges import Size, check_value
from dml.errors import Unfaithful, UserError, some
from dml.evaluation.evaluator import Embedded
from dml.evaluation.interval import ENDS, intervals
from dml.evaluation.metric import of_a_query
from dml.evaluation.rounding import rank_bounds
from dml.files import MANIFEST, NETWORK, read_tensors, sha256_of
from dml.hub import folder_of, front_matter, licence_of
from dml.inference.embedding import Trained
from dml.inference.publish import CARD, digests_of
from dml.inference.tested import Tested
from dml.reporting.card import figures
from dml.runs.reading import read_metrics_json, reading, require
from dml.runs.scores import QUERIES, Queries, read_queries

# How far a cosine may be off on another processor or with another library: of float32 runs, and of runs that round to
# half precision or TF32.
COSINE, ROUNDED = 1e-5, 1e-2

FIGURE = 2e-3  # how far a figure may be off because of rounding

QUERIES_OFF = 2  # by so many queries a mean over them may be off, if that is more

EXACT = 1e-9  # how far a figure may be off from the mean of the recorded ranks


@dataclass(frozen=True)
class Verdict:
    """The result of a verification.

    Attributes:
        differences: what differs, a sentence each, without a full stop.
        said: a summary of what was compared, to print if nothing differs.
    """

    differences: list[str]
    said: str


def verify(
    place: Path, data: Path | None = None, *, batch_size: int = EMBEDDED_AT_ONCE, device: str = "auto"
) -> Verdict:
    """Checks whether a run, or what was published of it, is what it says.

    First, published files are compared with their manifest, the card with the figures, and the figures with the ranks.
    Then the test images are embedded again. A rank that rounding cannot explain is a difference, and so is a figure
    that is off by more than `FIGURE`, or, if it is a mean over the queries such as Recall@K, by more than two queries
    if that is more. NMI and F1 are not compared: embeddings that differ in their last bits have other clusters. Nor are
    figures of the untrained network, of other checkpoints and of re-ranking.

    Args:
        place: a run folder, or the folder of what was published.
        data: see `Tested.of`.
        batch_size: images that are embedded at a time.
        device: see `Trained.of`.

    Raises:
        UserError: `place` is neither a run nor published, or the data is not there.
    """
    check_value("--batch-size", batch_size, Size)
    published = (place / MANIFEST).is_file()
    if not published and not (place / "checkpoints").is_dir():
        raise UserError(
            f"{place} is neither the folder of a run nor of a published embedding: it has no {MANIFEST}; name another."
        )
    metrics = read_metrics_json(place / "metrics.json")
    queries = read_queries(place) if (place / QUERIES).is_file() else None
    found = [*(_altered(place) if published else ()), *(_card(place, metrics) if published else ())]
    found += [] if queries is None else _of_ranks(metrics, queries)
    if any(NETWORK in one for one in found) and not _loads(place):
        return Verdict(found, "")
    trained = Trained.of(place, device=device)
    again, said = _again(trained, Tested.of(trained, data), metrics, queries, batch_size)
    return Verdict(found + again, said)


def command(place: str | Path, data: Path | None, *, batch_size: int, device: str) -> None:
    """Runs the command: verifies a place and prints the result.

    Args:
        place: a folder, or an address `hf://owner/name`.
        data, batch_size, device: see `verify`.

    Raises:
        UserError: as `verify` and `dml.hub.folder_of`.
        Unfaithful: something differs.
    """
    verdict = verify(folder_of(place), data, batch_size=batch_size, device=device)
    if verdict.differences:
        raise Unfaithful(f"{place} differs from what it says:\n" + "\n".join(f"- {one}" for one in verdict.differences))
    print(f"{place}: verified. {verdict.said}")


def _loads(place: Path) -> bool:
    try:
        Trained.of(place)
    except UserError:
        return False
    return True


def _altered(place: Path) -> Iterator[str]:
    """Yields the differences between files and the manifest."""
    path = place / MANIFEST
    with reading(path, "publish the run again"):
        manifest = json.loads(path.read_text())
        files, tensors = manifest["files"], manifest["tensors"]
        require(isinstance(files, dict) and isinstance(tensors, dict), "it names no files")
    for name, digest in files.items():
        file = place / Path(name).name
        if not file.is_file():
            yield f"{name} is missing"
        elif sha256_of(file) != digest:
            yield f"{name} was altered{_which(file, tensors)}"


def _which(file: Path, tensors: Mapping[str, str]) -> str:
    """Returns words that name the altered tensors, if the file is the one of weights."""
    if file.name != NETWORK:
        return ""
    try:
        now = digests_of(read_tensors(file))
    except UserError:
        return " and cannot be read"
    names = sorted(name for name in tensors.keys() | now.keys() if tensors.get(name) != now.get(name))
    return f": {some(names)}" if names else ""


def _card(place: Path, metrics: Mapping[str, float]) -> Iterator[str]:
    """Yields the differences between the card and the figures, and says if the card names no licence."""
    card = place / CARD
    if not card.is_file():
        yield f"{CARD} is missing"
        return
    if licence_of(place) is None:
        yield f"{CARD} names no licence of the weights"
    text = card.read_text(encoding="utf-8", errors="replace")
    lines, true = text.splitlines(), figures(metrics)[2:]
    for line in true:
        if line not in lines:
            yield f"{CARD} has another value of {_row(line)} than metrics.json"
    right = {_row(line) for line in true if line in lines}
    for line in lines:
        if line.startswith("|") and line not in true and _row(line) in right:
            yield f"{CARD} has a second value of {_row(line)}"
    for name, value in _results(place / CARD):
        if metrics.get(f"test/{name}") != value:
            yield f"the front matter of {CARD} says {name} {value}, metrics.json {metrics.get(f'test/{name}')}"


def _row(line: str) -> str:
    return line.split("|")[1].strip()


def _results(card: Path) -> Iterator[tuple[str, object]]:
    """Yields metric and value of each result in the front matter of the card."""
    index = front_matter(card).get("model-index")
    for model in index if isinstance(index, list) else []:
        for tested in model.get("results", []) if isinstance(model, dict) else []:
            for one in tested.get("metrics", []) if isinstance(tested, dict) else []:
                if isinstance(one, dict):
                    yield str(one.get("type")), one.get("value")


def _of_ranks(metrics: Mapping[str, float], queries: Queries) -> Iterator[str]:
    """Yields the figures that are not the means of the values recorded for each query."""
    counted = queries.best_rank > 0
    for name in (name for name in metrics if name.startswith("test/") and not name.endswith(ENDS)):
        values = queries.metric(name.removeprefix("test/"))
        mean = None if values is None else float(values[counted].mean())
        if mean is not None and not abs(mean - metrics[name]) <= EXACT:
            yield f"metrics.json says {name} {metrics[name]:.6g}, the ranks in {QUERIES} make it {mean:.6g}"


def _again(
    trained: Trained, tested: Tested, metrics: Mapping[str, float], queries: Queries | None, batch_size: int
) -> tuple[list[str], str]:
    """Embeds the test images again. Returns the differences from what was recorded, and a summary."""
    split, protocol = tested.split, tested.protocol
    rows = tested.rows("test")
    assert rows is not None
    device = trained.method.device
    embedded = Embedded(
        tested.learners(trained, rows, batch_size).to(device),
        torch.as_tensor(tested.records.labels[rows], device=device),
        torch.as_tensor(rows, device=device),
    )
    arithmetic = trained.config.trainer
    allowed = ROUNDED if "16" in str(arithmetic.precision) or arithmetic.matmul != "highest" else COSINE
    differences, moved, of_ranking = [], 0, {}
    counted = len(split.query)
    if queries is None and protocol.ranking(split, embedded) is not None:
        differences.append(f"{QUERIES}, the ranks of the queries, is missing")
    if queries is not None:
        query = embedded.take(split.query)
        gallery = None if split.gallery is None else embedded.take(split.gallery)
        ranking = protocol.ranking(split, embedded)
        assert ranking is not None
        counted = max(int((ranking.positives > 0).sum()), 1)  # means leave the other queries out
        if len(queries.best_rank) != len(ranking.best_rank):
            return [f"{QUERIES} has {len(queries.best_rank)} queries, but the data has {len(ranking.best_rank)}"], ""
        low, high = rank_bounds(
            _unit(query),
            query.labels,
            allowed,
            gallery=None if gallery is None else _unit(gallery),
            gallery_labels=None if gallery is None else gallery.labels,
            left_out=None if split.cameras is None or gallery is None else junk(split.cameras, query, gallery),
        )
        found = intervals(ranking, query.labels.cpu().numpy())
        of_ranking = {f"test/{name}": value for name, value in found.items()}
        wrong = (queries.best_rank < low.cpu().numpy()) | (queries.best_rank > high.cpu().numpy())
        moved = int((queries.best_rank != ranking.best_rank).sum())
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            differences.append(
                f"{int(wrong.sum())} of {len(wrong)} queries have another rank than recorded, such as "
                f"{queries.paths[first]}, whose rank is {int(ranking.best_rank[first])} and not "
                f"{int(queries.best_rank[first])}"
            )
    protocol.clustering = False
    scores = of_ranking | protocol.score(embedded, split, "test", groups=trained.method.groups(), final=True)
    compared = {name: abs(value - metrics[name]) for name, value in scores.items() if name in metrics}
    if not compared:
        differences.append("metrics.json has none of the figures that a test gives")
    wrong_figures = sorted(name for name, apart in compared.items() if not apart <= _allowed(name, counted))
    if wrong_figures:
        name = wrong_figures[0]
        differences.append(
            f"{len(wrong_figures)} of {len(compared)} figures are not what the weights give: {some(wrong_figures)} "
            f"({name} is {scores[name]:.6g}, recorded {metrics[name]:.6g})"
        )
    return differences, _summary(
        moved, queries, max(compared.values(), default=0.0), len(compared), str(device), allowed
    )


def _allowed(name: str, queries: int) -> float:
    """Returns how far a figure may be off because of rounding, with this number of queries that have a positive."""
    means = any(part.startswith("recall@") or part in of_a_query() for part in name.split("/"))
    return max(FIGURE, QUERIES_OFF / queries) if means else FIGURE


def _summary(moved: int, queries: Queries | None, apart: float, count: int, device: str, allowed: float) -> str:
    if queries is None:
        ranks = "The protocol has no single ranking; "
    elif not moved:
        ranks = f"The ranks of all {len(queries.best_rank):,} queries are as recorded; "
    else:
        ranks = (
            f"Of {len(queries.best_rank):,} queries {moved:,} have another rank, which cosines that are off by "
            f"{allowed:g} explain: another processor or batch rounds in another way; "
        )
    return f"{ranks}{count} figures were compared, the largest difference is {apart:.2g} (on {device})."


def junk(cameras: np.ndarray, query: Embedded, gallery: Embedded) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that says which gallery images are junk for some queries, as in
    `dml.evaluation.reidentification`: rows `[b]` of the queries -> `[b,M]` bool.

    Args:
        cameras: `[N]`, the camera of each row of the records.
        query: the Q queries.
        gallery: the M gallery items.
    """
    of_all = torch.as_tensor(cameras, device=query.rows.device)

    def left_out(rows: torch.Tensor) -> torch.Tensor:
        same = query.labels[rows, None] == gallery.labels
        return (same & (of_all[query.rows[rows], None] == of_all[gallery.rows])) | (gallery.labels < 0)

    return left_out


def _unit(embedded: Embedded) -> torch.Tensor:
    return torch.nn.functional.normalize(embedded.embeddings.flatten(1), dim=1)

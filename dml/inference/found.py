"""What a search found: printed as tables, and a page with thumbnails."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PIL import ImageOps
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dml.data.images import decode, quiet
from dml.inference.embedding import Trained
from dml.inference.index_files import TITLE
from dml.inference.places import shown_path
from dml.reporting.page import render

ON_PAGE = 100  # queries on the page at most; more would make it too large for browsers
THUMBNAILS = 2000  # on the page at most; there is one query at least, with so many of its images

SIDE = 140  # pixels of a thumbnail's longer side


@dataclass(frozen=True)
class Found:
    """The nearest images of one query, nearest first, with their cosines to it."""

    query: str
    paths: list[str]
    similarities: list[float]

    def at_least(self, threshold: float) -> "Found":
        """Returns only those images whose similarity is at least the threshold; it may be none."""
        count = sum(similarity >= threshold for similarity in self.similarities)
        return Found(self.query, self.paths[:count], self.similarities[:count])


def print_found(results: Sequence[Found]) -> None:
    """Prints a table for each query."""
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
            table.add_row(str(place), Text(_from_here(path)), f"{similarity:.4f}")
        console.print(table)


def _from_here(path: str) -> str:
    """Returns a path to print: relative if it is below the working folder."""
    here = Path.cwd()
    return shown_path(Path(path).relative_to(here) if Path(path).is_relative_to(here) else path)


def page_of(results: Sequence[Found], trained: Trained, size: int, least: float | None = None) -> str:
    """Returns the page of a search, HTML with thumbnails.

    Args:
        results: of each query.
        trained: the embedding.
        size: number of images in the gallery.
        least: the threshold below which images were left out; None: none was.
    """
    picture = cache(_thumbnail)
    most = 1 + max((len(found.paths) for found in results), default=0)
    shown = results[: max(1, min(ON_PAGE, THUMBNAILS // most))]
    with quiet():
        rows = [
            {
                "query": (shown_path(found.query), picture(found.query)),
                "found": [
                    (shown_path(path), picture(path), similarity)
                    for path, similarity in zip(found.paths[:THUMBNAILS], found.similarities, strict=False)
                ],
            }
            for found in shown
        ]
    return render(
        "search.html.jinja",
        title=TITLE,
        rows=rows,
        queries=len(results),
        images=size,
        method=type(trained.method).__name__,
        checkpoint=shown_path(trained.checkpoint),
        step=trained.step,
        least=least,
    )


def _thumbnail(path: str) -> str | None:
    """Returns a small JPEG in base64; None if the image cannot be opened any more."""
    try:
        small = ImageOps.contain(decode(path), (SIDE, SIDE))
    except Exception:  # whatever PIL's decoders raise
        return None
    file = io.BytesIO()
    small.save(file, format="JPEG", quality=85)
    return base64.b64encode(file.getvalue()).decode()

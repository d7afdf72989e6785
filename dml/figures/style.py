"""What all pictures share: sizes, colours, legends, thumbnails."""

import textwrap
from collections.abc import Iterable
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from torch import Tensor

# Okabe & Ito's palette, told apart by colour-blind readers too.
BLUE, RED, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"

RIGHT, WRONG = GREEN, RED


def canvas(width: float, height: float) -> Figure:
    """Makes an empty figure, `width` by `height` inches.

    It does without pyplot, which keeps global state and may ask for a display.
    """
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(text: str) -> str:
    """Returns a text that a user chose as matplotlib shows it: it would read `$` as formulas, and it refuses names of
    files that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode().replace("$", r"\$")


def wrapped(lines: Iterable[str], width: int = 120) -> dict[str, str]:
    """Maps each label, which may be a whole command line, to itself broken into lines of `width` letters for a legend;
    120 fit into 9 inches, 90 into 6."""
    return {line: textwrap.fill(plain(line), width) for line in lines}


def height(labels: Iterable[str]) -> float:
    """Returns the height in inches of a legend with these labels."""
    return 0.15 * sum(label.count("\n") + 1 for label in labels)


def legend_above(axes: Axes, columns: int = 3) -> None:
    """Puts a legend above the axes, where it hides no curve; without labelled lines it does nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = min(columns, len(handles))
        axes.legend(
            handles,
            labels,
            frameon=False,
            fontsize=8,
            ncols=columns,
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            borderaxespad=0.2,
        )


def marks(i: int) -> dict[str, Any]:
    """Returns colour and marker of the i-th line. Neighbours differ in both; after fifty lines they repeat."""
    return {"color": f"C{i % 10}", "marker": "os^Dv"[(i + i // 10) % 5]}


def shade(k: int, count: int) -> tuple[float, float, float, float]:
    return matplotlib.colormaps["viridis"](k / max(1, count - 1) * 0.9)


def cut_short(name: str) -> str:
    """Returns at most 40 characters of a name, see `plain`."""
    return plain(name if len(name) <= 40 else name[:37] + "...")


def overlay(axes: Axes, image: Tensor, attention: Tensor, low: float, high: float) -> None:
    """Draws the attention `[h,w]`, enlarged to the size of the image, over the image `[3,H,W]` in grey.

    The colours run from `low` to `high`.
    """
    height, width = image.shape[1:]
    extent = (0, width, height, 0)
    axes.imshow(image.mean(0).clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1, extent=extent)
    axes.imshow(
        attention.numpy(), cmap="inferno", vmin=low, vmax=high, alpha=0.6, extent=extent, interpolation="bilinear"
    )


def below(limits: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.rand(len(limits), generator=generator) * limits).long()


def thumbnail(image: Image.Image, side: int, colour: str) -> Image.Image:
    inner = ImageOps.pad(image.convert("RGB"), (side - 6, side - 6), color="white")
    return ImageOps.expand(inner, border=3, fill=colour)

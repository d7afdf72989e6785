"""Pictures of what methods look at in images: attention, regions, prototypes."""

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from torch import Tensor

from dml.figures.fonts import font_for
from dml.figures.plot import Plot
from dml.figures.style import GREEN, canvas, cut_short, overlay
from dml.models.attention import crop_and_zoom

LEARNERS = 8  # shown at most


def attention_plot(images: Tensor, weights: Tensor, learners: str = "each learner") -> Plot:
    """Returns `attention_maps` as a `Plot`.

    Args:
        images: `[B,3,H,W]`, on any device.
        weights: `[B,L,C,h,w]`, on any device.
        learners: which learners they are of, in words.
    """
    if (count := weights.shape[1]) > LEARNERS:
        learners = f"each of the first {LEARNERS} of {count} learners"
    return Plot(
        "attention",
        f"What {learners} attends to in some test images: the mean over channels, and the channels on which learners "
        "differ most. Bright is high, within the range printed at the left",
        attention_maps(images.float().cpu(), weights.float().cpu()),
    )


def attention_maps(images: Tensor, maps: Tensor, channels: int = 2) -> Figure:
    """Draws what each learner attends to, over the images (ABE Fig. 6; DIABLO's maps).

    Each image has a block of rows: one for the mean over channels, and one for each channel on which the learners
    differ most. The colours of a row run from its lowest to its highest attention, which are printed beside it.

    Args:
        images: `[B,3,H,W]` in 0..1.
        maps: `[B,L,C,h,w]`; the first `LEARNERS` learners are shown.
        channels: how many channels are shown besides the mean; none with a single channel or learner.
    """
    maps = maps[:, :LEARNERS]
    several = maps.shape[1] > 1 and maps.shape[2] > 1
    chosen = maps.var(1).mean((0, 2, 3)).topk(min(channels, maps.shape[2])).indices.tolist() if several else []
    views = {"mean": maps.mean(2)} | {f"channel {c}": maps[:, :, c] for c in chosen}
    rows, columns = len(images) * len(views), maps.shape[1] + 1
    figure = canvas(1.15 * columns + 1.2, 1.15 * rows + 0.4)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    for b, image in enumerate(images):
        for v, (name, view) in enumerate(views.items()):
            row = grid[b * len(views) + v]
            if v == 0:
                row[0].imshow(image.permute(1, 2, 0).clamp(0, 1).numpy())
            low, high = float(view[b].min()), float(view[b].max())
            row[0].set_ylabel(f"{name}\n{low:.2f} to {high:.2f}", rotation=0, ha="right", va="center", fontsize=7)
            for learner, attention in enumerate(view[b]):
                overlay(row[1 + learner], image, attention, low, high)
    for learner, axes in enumerate(grid[0, 1:]):
        axes.set_title(f"learner {learner}", fontsize=8)
    return figure


def object_regions(images: Tensor, regions: Sequence[tuple[Tensor, Tensor]]) -> Figure:
    """Draws what each scale sees, and what it finds there (DeML Fig. 4a), one row for each image.

    Args:
        images: `[B,3,H,W]` in 0..1, as the first scale sees them.
        regions: for each scale but the last, its proposals `[B,H,W]` and the boxes `[B,4]` found in them.
    """
    figure = canvas(1.5 * (2 * len(regions) + 1) + 0.2, 1.5 * len(images) + 0.4)
    grid = figure.subplots(len(images), 2 * len(regions) + 1, squeeze=False)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    for i in range(len(regions) + 1):
        grid[0, 2 * i].set_title(f"scale {i} sees", fontsize=8)
        for row, image in zip(grid, images, strict=True):
            row[2 * i].imshow(image.permute(1, 2, 0).clamp(0, 1).numpy())
        if i < len(regions):
            proposals, boxes = regions[i]
            grid[0, 2 * i + 1].set_title("and finds", fontsize=8)
            for row, image, found, box in zip(grid, images, proposals, boxes.tolist(), strict=True):
                overlay(row[2 * i + 1], image, found, float(found.min()), float(found.max()))
                for axes in row[2 * i : 2 * i + 2]:
                    corner, side = (box[0], box[1]), box[2] - box[0]
                    square = Rectangle(corner, side, side, fill=False, edgecolor=GREEN, linewidth=2, clip_on=False)
                    axes.add_patch(square)  # at the image's edge, half of its line is outside
            images = crop_and_zoom(images, boxes)
    return figure


def pooling_weights(images: Tensor, weights: Tensor, dominant: Tensor, prototypes: int) -> Figure:
    """Draws the pooling weights of each image, and the prototype of each location (GSP Fig. 3b and Fig. 5).

    Each image has one row.

    Args:
        images: `[B,3,H,W]` in 0..1.
        weights: `[B,h,w]`, mean 1.
        dominant: `[B,h,w]`, the prototype that takes the largest share of each location. It is drawn in the
            prototype's colour, paler where the weight is lower.
        prototypes: how many there are.
    """
    figure = canvas(4.6, 1.5 * len(images) + 0.4)
    grid = figure.subplots(len(images), 3, squeeze=False)
    shades = torch.as_tensor(prototype_colours(prototypes)).float()
    top = float(weights.max())
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    for row, image, weight, owner in zip(grid, images, weights, dominant, strict=True):
        row[0].imshow(image.permute(1, 2, 0).clamp(0, 1).numpy())
        overlay(row[1], image, weight, 0.0, top)
        height, width = image.shape[1:]
        extent = (0, width, height, 0)
        colours = torch.cat([shades[owner], (weight / top)[..., None]], dim=-1)
        row[2].imshow(image.mean(0).clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1, alpha=0.3, extent=extent)
        row[2].imshow(colours.numpy(), extent=extent)
    grid[0, 1].set_title(f"weight, 0 to {top:.1f}", fontsize=8)
    grid[0, 2].set_title(f"{len(dominant.unique())} of {prototypes} prototypes", fontsize=8)
    return figure


def prototype_colours(prototypes: int) -> np.ndarray:
    """Returns a colour for each of m prototypes, `[m,3]`, the same in every picture."""
    return np.asarray(matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, prototypes)))[:, :3]


def prototype_histograms(attributes: Tensor, labels: Tensor, names: Mapping[int, str]) -> Figure:
    """Draws the mean share of each prototype in the images of each class (GSP Fig. 5), one row for each class.

    Args:
        attributes: `[N,m]`, the share of each prototype in each image; a row sums to 1.
        labels: `[N]`.
        names: label -> class name; only these classes are drawn.
    """
    classes = sorted(names)
    shares = torch.stack([attributes[labels == c].mean(0) for c in classes]).numpy()  # [C,m]
    order = np.argsort(-shares.mean(0), kind="stable")  # prototypes, the most frequent first
    figure = canvas(9, 0.28 * len(classes) + 1.2)
    axes = figure.subplots()
    image = axes.imshow(shares[:, order], aspect="auto", cmap="viridis", vmin=0)
    axes.set_yticks(range(len(classes)), [cut_short(names[c]) for c in classes])
    for label in axes.get_yticklabels():
        label.set_fontproperties(FontProperties(fname=font_for(label.get_text())))
    axes.tick_params(labelsize=7)
    axes.set(xlabel="prototype, the most frequent first", xticks=[])
    figure.colorbar(image, label="share", pad=0.01)
    return figure

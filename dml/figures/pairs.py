"""Pictures of verification: how well a threshold parts pairs of images, and how likely a pair is of one class."""

import numpy as np
from matplotlib.figure import Figure

from dml.figures.style import BLUE, GREY, RED, canvas, legend_above


def roc_and_calibration(
    curves: dict[str, tuple[np.ndarray, np.ndarray]],
    chosen: tuple[float, float],
    reliability: tuple[np.ndarray, np.ndarray, np.ndarray],
    least: float,
) -> Figure:
    """Draws the ROC curve (left) and the calibration of the predicted probabilities (right).

    Args:
        curves: title -> false match rates and false non-match rates (FMR, FNMR) at descending thresholds.
        chosen: FMR and FNMR at the chosen threshold, on the test images.
        reliability: for each band of predicted probability its mean, the observed share, and its weight.
        least: the smallest FMR that the test images can resolve.
    """
    figure = canvas(8, 3.6)
    left, right = figure.subplots(1, 2)
    for title, (fmr, fnmr) in curves.items():
        colour = BLUE if title == "test" else GREY
        there = fmr >= least
        left.step(fmr[there], 1 - fnmr[there], where="post", color=colour, linewidth=1.3, label=title)
    left.plot(max(chosen[0], least), 1 - chosen[1], "o", color=RED, markersize=5, label="chosen threshold, on test")
    left.set(xscale="log", xlim=(least, 1), ylim=(0, 1.02), xlabel="false match rate", ylabel="true match rate")
    legend_above(left)
    predicted, observed, share = reliability
    right.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    right.plot(predicted, observed, "o-", color=BLUE, markersize=4, linewidth=1)
    right.bar(predicted, share, width=0.04, color=BLUE, alpha=0.25, linewidth=0)
    right.set(
        xlim=(0, 1), ylim=(0, 1), xlabel="predicted probability of one class", ylabel="observed share (bars: weight)"
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure

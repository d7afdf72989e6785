"""Pictures that compare several runs."""

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dml.figures.style import BLUE, GREEN, GREY, RED, canvas, height, legend_above, marks, plain, wrapped


@dataclass(frozen=True)
class Point:
    """One configuration in a picture of Recall@1 against cost.

    Attributes:
        line: label of the line that it is a point of.
        learners: how many there are; printed beside the point.
        params, flops: parameters, and multiply-adds of one image.
        recall: mean Recall@1 over runs.
        std: its standard deviation over runs; None if there is one run.
    """

    line: str
    learners: int
    params: float
    flops: float
    recall: float
    std: float | None


def recall_and_cost(points: Sequence[Point]) -> Figure:
    """Draws Recall@1 against parameters and multiply-adds (ABE Fig. 4: a line for each method, a point for each M)."""
    labels = wrapped(point.line for point in points)
    figure = canvas(9, 3.4 + height(labels.values()))
    left, right = figure.subplots(1, 2, sharey=True)
    for i, (line, label) in enumerate(labels.items()):
        on_line = sorted((p for p in points if p.line == line), key=lambda p: p.flops)
        for axes, costs in ((left, [p.params / 1e6 for p in on_line]), (right, [p.flops / 1e9 for p in on_line])):
            recalls, stds = [p.recall for p in on_line], bars([p.std for p in on_line])
            axes.errorbar(costs, recalls, yerr=stds, markersize=4, linewidth=1, capsize=3, label=label, **marks(i))
            for cost, point in zip(costs, on_line, strict=True):
                axes.annotate(str(point.learners), (cost, point.recall), (4, 4), textcoords="offset points", fontsize=7)
    left.set(xlabel="parameters (millions)", ylabel="Recall@1")
    right.set(xlabel="multiply-adds of an image (billions)")
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.margins(0.08, 0.12)  # numbers stand above their points
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", frameon=False, fontsize=7)
    return figure


def bars(stds: Sequence[float | None]) -> list[float] | None:
    """Returns the lengths of error bars: NaN, which draws none, for a point of one run; None if all are of one run."""
    if all(std is None for std in stds):
        return None
    return [math.nan if std is None else std for std in stds]


@dataclass(frozen=True)
class Measured:
    """A metric at one number of a sweep.

    Attributes:
        x: the number.
        mean, std: over repetitions; `std` is None if there is one.
    """

    x: float
    mean: float
    std: float | None


def over(lines: Mapping[str, Sequence[Measured]], x: str, y: str, dashed: Collection[str] = ()) -> Figure:
    """Draws a metric over a number of a sweep, one line for each configuration (ABE Fig. 7; GSP Fig. 10).

    Args:
        lines: label -> points.
        x, y: titles of the axes.
        dashed: labels of the lines that are dashed.
    """
    labels = wrapped(lines, 90)
    figure = canvas(6, 3.2 + height(labels.values()))
    axes = figure.subplots()
    for i, (line, points) in enumerate(lines.items()):
        points = sorted(points, key=lambda point: point.x)
        values, stds = [point.mean for point in points], bars([point.std for point in points])
        xs = [point.x for point in points]
        style = "--" if line in dashed else "-"
        shown = marks(i) | {"linestyle": style, "label": labels[line]}
        axes.errorbar(xs, values, yerr=stds, markersize=4, linewidth=1, capsize=3, **shown)
    numbers = sorted({point.x for points in lines.values() for point in points})
    if numbers[0] > 0 and numbers[-1] / numbers[0] >= 8:
        axes.set_xscale("log", base=2 if all(math.log2(n).is_integer() for n in numbers) else 10)
    axes.autoscale_view()
    at = axes.transAxes.inverted().transform(axes.transData.transform([(n, 0.0) for n in numbers]))[:, 0]
    if len(numbers) == 1 or np.diff(at).min() > 0.04:  # else their labels would overlap
        axes.set_xticks(numbers, [f"{n:g}" for n in numbers])
        axes.set_xticks([], minor=True)
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False, fontsize=7)
    return figure


def collections(lines: Sequence[tuple[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]]]) -> Figure:
    """Draws MAP@R of the collections of MLRC's protocol, one row for each configuration and kind.

    Every collection is a dot; the independent ones have a circle.


    Args:
        lines: label, and for each kind the MAP@R of all collections and of the independent ones.
    """
    rows = [(label, kind, *values) for label, kinds in lines for kind, values in kinds.items()]
    names = [textwrap.fill(plain(f"{label}, {kind}"), 40) for label, kind, *_ in rows]
    figure = canvas(7, max(0.6 * len(rows), height(names)) + 1.2)
    axes = figure.subplots()
    rng = np.random.default_rng(0)
    for at, (_, _, every, apart) in enumerate(rows):
        axes.scatter(every, at + rng.uniform(-0.2, 0.2, len(every)), s=9, color="C0", alpha=0.5, linewidths=0)
        axes.scatter(apart, [at] * len(apart), s=60, facecolors="none", edgecolors="C3")
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel="MAP@R (circles: one repetition each)")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.grid(alpha=0.3, axis="x")
    return figure


def difference_plot(
    draws: Mapping[str, np.ndarray], estimate: float, interval: tuple[float, float], title: str
) -> Figure:
    """Draws the difference of two runs: histograms of the bootstrap's draws, the estimate and its 95 % interval.

    Args:
        draws: what was resampled (classes first) -> differences in the draws.
        estimate: the difference.
        interval: its bounds, over classes.
        title: of the horizontal axis.
    """
    figure = canvas(7, 3.2)
    axes = figure.subplots()
    every = np.concatenate(list(draws.values()))
    bins = np.linspace(every.min() - 1e-6, every.max() + 1e-6, 41).tolist()  # one query more or less is a step of 1/Q
    for i, (name, values) in enumerate(draws.items()):
        axes.hist(
            values, bins=bins, density=True, histtype="step" if i else "stepfilled", alpha=1 if i else 0.4, label=name
        )
    axes.axvline(0, color="black", linewidth=1)
    axes.axvline(estimate, color="C3", linewidth=1.5, label=f"difference {estimate:+.4f}")
    axes.axvspan(*interval, color="C3", alpha=0.12, linewidth=0, label="95 % interval over classes")
    axes.set(xlabel=textwrap.fill(plain(title), 80), yticks=[])
    legend_above(axes, columns=2)
    return figure


@dataclass(frozen=True)
class MethodPoint:
    """A method in a comparison of methods.

    Attributes:
        values: the metric in each repetition.
        difference: from the base, with the lower and upper bound of its interval; None for the base itself.
    """

    name: str
    values: list[float]
    difference: tuple[float, float, float] | None


def methods(parts: Mapping[str, Sequence[MethodPoint]], metric: str, base: str) -> Figure:
    """Draws a metric of each method, repetitions as dots, and below it the difference from the base.

    Args:
        parts: title of a column -> its methods.
        metric: its name on the axis.
        base: name of the method that the others are compared with.
    """
    longest = max(len(rows) for rows in parts.values())
    widest = max(len(row.name) for rows in parts.values() for row in rows)
    column = max(4.4, 1.9 + 0.066 * widest)  # inches: the axes, and a letter of the longest name
    figure = canvas(column * len(parts) + 0.6, 0.26 * longest * 2 + 1.7)
    for axes, (title, rows) in zip(figure.subplots(2, len(parts), squeeze=False).T, parts.items(), strict=True):
        above, below = axes
        for at, row in enumerate(rows):
            above.plot(row.values, [at] * len(row.values), "o", markersize=4, color=BLUE, alpha=0.6, linewidth=0)
            above.plot([float(np.mean(row.values))] * 2, [at - 0.3, at + 0.3], color="black", linewidth=1.5)
            if row.difference is not None:
                d, low, high = row.difference
                colour = GREY if low <= 0 <= high else GREEN if d > 0 else RED
                below.errorbar(d, at, xerr=[[d - low], [high - d]], fmt="o", markersize=4, capsize=3, color=colour)
        below.axvline(0, color="black", linewidth=0.8)
        below.set_visible(any(row.difference is not None for row in rows))
        for one in axes:
            one.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
            one.set_ylim(len(rows) - 0.5, -0.5)
            one.grid(alpha=0.3, axis="x")
        above.set_title(title, fontsize=10)
        above.set_xlabel(f"{metric}, % (dots: repetitions; bar: mean)", fontsize=8)
        below.set_xlabel(f"{metric} less {base}, points\n(95 % interval; grey: 0 is in it)", fontsize=8)
    return figure


@dataclass(frozen=True)
class PatternPoint:
    """A difference that a paper reports, as it was measured.

    Attributes:
        label: which row is above or below which, and in what.
        estimate, low, high: the difference with its interval, in points; positive: on the paper's side of zero.
    """

    label: str
    estimate: float
    low: float
    high: float


def patterns(groups: Mapping[str, Sequence[PatternPoint]]) -> Figure:
    """Draws differences that papers report, a line each: those right of zero are as the paper has them.

    Args:
        groups: title -> its differences.
    """
    count = sum(len(points) + 1 for points in groups.values())
    figure = canvas(9, 0.2 * count + 0.8)
    axes = figure.subplots()
    names: list[str] = []
    titles = []
    for title, points in groups.items():
        titles.append(len(names))
        names.append(plain(title))
        for point in points:
            colour = GREEN if point.low > 0 else RED if point.high < 0 else GREY
            bar = [[point.estimate - point.low], [point.high - point.estimate]]
            axes.errorbar(point.estimate, len(names), xerr=bar, fmt="o", markersize=4, capsize=3, color=colour)
            names.append(plain(point.label))
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    for at in titles:
        axes.get_yticklabels()[at].set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("points on the paper's side of zero (95 % interval; grey: 0 is in it)", fontsize=8)
    axes.grid(alpha=0.3, axis="x")
    return figure

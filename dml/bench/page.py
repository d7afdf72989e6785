"""The table of the results, and their drawing."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dml.bench.kept import Kept, figures_of
from dml.bench.results import Figure, Outcome
from dml.figures.plot import Plot
from dml.figures.style import BLUE, GREEN, GREY, RED, canvas, legend_above


def written(value: float, unit: str = "") -> str:
    """Writes a number with three or four digits and its unit."""
    whole = math.isfinite(value) and (abs(value) >= 1000 or value == int(value))
    digits = f"{value:.0f}" if whole else f"{value:.3g}"
    return f"{digits} {unit}".strip()


def print_machine(about: Mapping[str, Any]) -> None:
    """Prints the hardware and the versions."""
    hardware, versions = dict(about["hardware"]), about["versions"]
    said = [hardware.pop("name"), *(f"{name.replace('_', ' ')} {value}" for name, value in hardware.items())]
    print(", ".join(said))
    print(", ".join(f"{name} {version}" for name, version in versions.items()))


def print_table(outcomes: Mapping[str, Outcome]) -> None:
    """Prints a Markdown table: one line for each figure, then what was left out and what failed."""
    rows = [(part, figure) for part, outcome in outcomes.items() for figure in outcome.figures]
    goals = any(figure.goal for _, figure in rows)
    table = Table(box=MARKDOWN)
    for title in ("part", "what", "measured", *(("goal", "") if goals else ())):
        table.add_column(title, justify="right" if title == "measured" else "left", overflow="fold")
    for part, figure in rows:
        verdict = {True: "met", False: "missed", None: ""}[figure.met]
        goal = ("" if figure.goal is None else str(figure.goal), verdict) if goals else ()
        table.add_row(part, Text(figure.name), written(figure.value, figure.unit), *goal)
    for part, outcome in outcomes.items():
        for remark in outcome.remarks:
            table.add_row(part, Text(f"{remark.kind}: {remark.sentence}"))
    Console().print(table)


def drawing(kept: Kept) -> Plot | None:
    """Draws images per second of each network beside the bare loop, and how far each figure with a goal reaches it.

    Returns None if no figure has a goal.
    """
    speeds = _speeds(figures_of(kept["throughput"])) if "throughput" in kept else {}
    aimed = [figure for part in kept.values() for figure in figures_of(part) if figure.goal is not None]
    if not aimed:
        return None
    figure = canvas(11, 1.2 + 0.34 * max(len(aimed), 2 * len(speeds), 4))
    left, right = figure.subplots(1, 2)
    for row, (ours, bare) in enumerate(speeds.values()):
        for shift, speed, colour, label in ((-0.2, ours, BLUE, "ours"), (0.2, bare, GREY, "bare loop")):
            left.barh(row + shift, speed, 0.38, color=colour, label=label if row == 0 else None)
            left.text(speed, row + shift, f" {written(speed)}", va="center", fontsize=8)
    left.set_yticks(range(len(speeds)), list(speeds))
    left.set_xlabel("images/s of a training step")
    left.margins(x=0.15)
    left.invert_yaxis()
    if speeds:
        legend_above(left)
    for row, one in enumerate(aimed):
        assert one.goal is not None
        reached = one.goal.value / max(one.value, 1e-12) if one.goal.at_most else one.value / one.goal.value
        right.barh(row, min(reached, 2.0), color=GREEN if one.met else RED)
        right.text(0.02, row, f"{written(one.value, one.unit)}, goal {one.goal}", va="center", fontsize=8)
    right.axvline(1, color="black", linewidth=1)
    right.set_xlim(0, 2)
    right.set_yticks(range(len(aimed)), [one.name for one in aimed], fontsize=8)
    right.set_xlabel("of the goal (drawn up to twice)")
    right.invert_yaxis()
    machines = {str(part["hardware"]["name"]) for part in kept.values()}
    figure.suptitle(", ".join(sorted(machines)))
    return Plot("gpu", "what a GPU reaches of the goals", figure)


def _speeds(figures: Iterable[Figure]) -> dict[str, tuple[float, float]]:
    """Network -> images per second, ours and the bare loop's."""
    found = {figure.name: figure.value for figure in figures if figure.unit == "images/s"}
    names = [name.removesuffix(", ours") for name in found if name.endswith(", ours")]
    return {name: (found[f"{name}, ours"], found[f"{name}, bare loop"]) for name in names}


def draw(kept: Kept, path: Path) -> list[Path]:
    """Writes the drawing if there is something to draw. Returns the files that were written."""
    if (plot := drawing(kept)) is None:
        return []
    plot.save(path)
    return [path]

"""What the figure of an experiment shows; `drawing` draws it."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, with_config

KNOWN_KEYS = ConfigDict(extra="forbid")  # of a form and what it holds


@dataclass(frozen=True)
class Axis:
    """What is drawn along an axis."""

    metric: str
    title: str


@dataclass(frozen=True)
class OverAxis(Axis):
    """What is drawn over a number, and the number's title in place of the figure's."""

    x: str = ""


@dataclass(frozen=True)
class ComparedAxis(Axis):
    """What is drawn of each row, and the metric whose differences are drawn beside it."""

    compared: str


@with_config(KNOWN_KEYS)
@dataclass(frozen=True)
class Comparison:
    """Rows and their differences."""

    metric: ComparedAxis


@with_config(KNOWN_KEYS)
@dataclass(frozen=True)
class Course:
    """Lines over the steps of trainings that are at hand."""

    y: list[Axis]


@with_config(KNOWN_KEYS)
@dataclass(frozen=True)
class Curve:
    """Recall@1 over steps, each of which has a metric in the record."""

    steps: dict[int, str]


@with_config(KNOWN_KEYS)
@dataclass(frozen=True)
class Over:
    """Metrics over a number; `x` is its title, or that of each line."""

    x: str | dict[str, str]
    y: Annotated[list[OverAxis], BeforeValidator(lambda y: y if isinstance(y, list) else [y])]


@with_config(KNOWN_KEYS)
@dataclass(frozen=True)
class Pictures:
    """Pictures that trainings or scripts draw."""

    names: list[str]


@with_config(KNOWN_KEYS)
@dataclass(frozen=True)
class Scatter:
    """One metric against another."""

    x: Axis
    y: Axis


Drawn = Comparison | Course | Curve | Over | Pictures | Scatter

# By `kind` in the file.
KINDS: dict[str, type[Drawn]] = {
    "comparison": Comparison,
    "course": Course,
    "curve": Curve,
    "over": Over,
    "pictures": Pictures,
    "scatter": Scatter,
}


def along_axes(figure: Drawn | None) -> set[str]:
    """Returns the metrics along the axes of a figure; none for a figure without such axes."""
    match figure:
        case Course() | Over():
            return {axis.metric for axis in figure.y}
        case Scatter():
            return {figure.x.metric, figure.y.metric}
    return set()

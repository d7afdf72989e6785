"""The results of a part. This module imports nothing heavy, as every process of a part imports it first."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Goal:
    """The value that a figure should reach, or not exceed if `at_most`."""

    value: float
    at_most: bool = False

    def met_by(self, value: float) -> bool:
        return value <= self.value if self.at_most else value >= self.value

    def __str__(self) -> str:
        return f"at {'most' if self.at_most else 'least'} {self.value:g}"


@dataclass(frozen=True)
class Figure:
    """A number that was measured; `unit` is empty for a ratio."""

    name: str
    value: float
    unit: str = ""
    goal: Goal | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        return None if self.goal is None else self.goal.met_by(self.value)


@dataclass(frozen=True)
class Remark:
    """A sentence that says what was left out or failed (`kind`), and why."""

    kind: str
    sentence: str


Record = Figure | Remark

LEFT_OUT, FAILED = "left out", "failed"


@dataclass
class Outcome:
    """The outcome of a part.

    Attributes:
        seconds: time that it took.
        printed: the last lines that it printed, if it failed.
    """

    figures: list[Figure] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    seconds: float = 0.0
    printed: list[str] = field(default_factory=list)

    def add(self, record: Record) -> None:
        if isinstance(record, Figure):
            self.figures.append(record)
        else:
            self.remarks.append(record)

    @property
    def failed(self) -> bool:
        return any(remark.kind == FAILED for remark in self.remarks)


def as_json(record: Record) -> dict[str, Any]:
    """Converts a figure, with its goal and whether it is met, or a remark."""
    said = asdict(record)
    if isinstance(record, Figure):
        said |= {"goal": None if record.goal is None else str(record.goal), "met": record.met}
    return said


def of_json(said: Mapping[str, Any]) -> Record:
    """Inverts `as_json`. Raises KeyError, TypeError or ValueError if `said` is neither a figure nor a remark."""
    if "kind" in said:
        return Remark(str(said["kind"]), str(said["sentence"]))
    goal = None
    if said["goal"] is not None:
        _, way, value = said["goal"].split()
        goal = Goal(float(value), way == "most")
    return Figure(str(said["name"]), float(said["value"]), str(said["unit"]), goal)

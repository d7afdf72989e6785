"""What a part found. Imports nothing heavy, as the processes of parts begin with it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Goal:
    """What a figure should be at least, or at most."""

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
        """None without a goal."""
        return None if self.goal is None else self.goal.met_by(self.value)


@dataclass(frozen=True)
class Remark:
    """What was `left out`, or `failed`, and why, in a sentence."""

    kind: str
    sentence: str


Record = Figure | Remark

LEFT_OUT, FAILED = "left out", "failed"


@dataclass
class Outcome:
    """What became of a part.

    Attributes:
        seconds: that it took.
        printed: by a part that failed, the last lines.
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
    """A figure with its goal and whether it was met, or a remark."""
    said = asdict(record)
    if isinstance(record, Figure):
        said |= {"goal": None if record.goal is None else str(record.goal), "met": record.met}
    return said


def of_json(said: Mapping[str, Any]) -> Record:
    """The inverse of `as_json`. Raises KeyError, TypeError or ValueError for what is none."""
    if "kind" in said:
        return Remark(str(said["kind"]), str(said["sentence"]))
    goal = None
    if said["goal"] is not None:
        _, way, value = said["goal"].split()
        goal = Goal(float(value), way == "most")
    return Figure(str(said["name"]), float(said["value"]), str(said["unit"]), goal)

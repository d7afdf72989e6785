"""The forms of an experiment's files, NAME.yaml and the record NAME.json; `check_form` checks their content."""

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError, with_config

from dml.configuration.ranges import Seed
from dml.papers.experiment import Column, Tuning
from dml.papers.measured import Compared, Measurement, Tuned

# What pydantic calls the commonest mistakes -> what is wrong, after the place.
SAID = {
    "missing": "is missing",
    "unexpected_keyword_argument": "is unknown",
    "dataclass_type": "has to have keys",
    "dict_type": "has to have keys",
    "list_type": "has to be a list",
    "string_type": "has to be text",
    "float_type": "has to be a number",
    "int_type": "has to be a whole number",
    "too_short": "is empty",
}


KNOWN_KEYS = ConfigDict(extra="forbid")  # also of what it holds


Seeds = Annotated[list[Seed], Field(min_length=1)]

Name = Annotated[str, Field(pattern=r"^[^+~]")]  # of an option that the configuration has


@with_config(KNOWN_KEYS)
@dataclass(frozen=True)
class RecordForm:
    """A record."""

    measured: list[Measurement]
    compared: list[Compared]
    tuned: list[Tuned] = field(default_factory=list)


@dataclass(frozen=True)
class PartForm:
    """A part in the YAML file; see `Section`."""

    columns: dict[str, Column]
    overrides: list[str] = field(default_factory=list)
    seeds: Seeds | None = None


@dataclass(frozen=True)
class RowForm:
    """A row in the YAML file; see `Row`."""

    name: str | float
    overrides: list[str] | None = None
    search: dict[Name, list[Any]] = field(default_factory=dict)
    command: Annotated[list[str], Field(min_length=1)] | None = None
    smoke: list[str] = field(default_factory=list)
    published: dict[str, dict[str, FiniteFloat]] | None = None
    pattern: dict[str, str] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    x: float | None = None
    line: str | float = ""
    note: str = ""


@with_config(KNOWN_KEYS)
@dataclass(frozen=True)
class ExperimentForm:
    """The YAML file; see `Experiment`."""

    title: str
    source: str
    parts: dict[str, PartForm]
    rows: list[RowForm]
    about: str = ""
    overrides: list[str] = field(default_factory=list)
    seeds: Seeds = field(default_factory=lambda: [0])
    figure: dict[str, Any] = field(default_factory=dict)
    compared_with: str = ""
    spread_of: list[str] = field(default_factory=list)
    tuning: Tuning | None = None


@dataclass(frozen=True)
class AxisForm:
    """What is drawn along an axis."""

    metric: str
    title: str


@dataclass(frozen=True)
class OverForm(AxisForm):
    """What is drawn over a number, and the number's title in place of the figure's."""

    x: str = ""


@dataclass(frozen=True)
class ComparedForm(AxisForm):
    """What is drawn of each row, and the metric whose differences are drawn beside it."""

    compared: str


@with_config(KNOWN_KEYS)
@dataclass(frozen=True)
class Comparison:
    """A figure of rows and their differences."""

    metric: ComparedForm


@with_config(KNOWN_KEYS)
@dataclass(frozen=True)
class Course:
    """A figure over the steps of trainings that are at hand."""

    y: list[AxisForm]


@with_config(KNOWN_KEYS)
@dataclass(frozen=True)
class Curve:
    """A figure over steps, each of which has a metric in the record."""

    steps: dict[int, str]


@with_config(KNOWN_KEYS)
@dataclass(frozen=True)
class Over:
    """A figure over a number; `x` is its title, or that of each line."""

    x: str | dict[str, str]
    y: Annotated[list[OverForm], BeforeValidator(lambda y: y if isinstance(y, list) else [y])]


@with_config(KNOWN_KEYS)
@dataclass(frozen=True)
class Pictures:
    """Pictures that trainings or scripts draw."""

    names: list[str]


@with_config(KNOWN_KEYS)
@dataclass(frozen=True)
class Scatter:
    """A figure of one metric against another."""

    x: AxisForm
    y: AxisForm


# The kind of a figure -> its keys, beside `kind`; see `drawing`.
FIGURES: dict[str, type] = {
    "comparison": Comparison,
    "course": Course,
    "curve": Curve,
    "over": Over,
    "pictures": Pictures,
    "scatter": Scatter,
}


@cache  # making one takes longer than checking a file
def _adapter(form: type) -> TypeAdapter[Any]:
    return TypeAdapter(form)


def check_form(content: Any, form: type, above: str = "") -> None:
    """Checks the content of a file, in plain containers, by a form.

    Args:
        above: the key that holds the content; empty: it is the whole file.

    Raises:
        ValueError: it has another form; the message says where and what is wrong.
        TypeError: it has a value that JSON cannot hold.
    """
    # As JSON, since pydantic is strict with types there and yet takes keys with values for a dataclass.
    text = json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")
    try:
        _adapter(form).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]]
        place = "".join([above, *parts]).lstrip(".")
        said = SAID.get(first["type"], f"has another form ({first['msg']})")
        raise ValueError(f"{place or 'its content'} {said}") from None

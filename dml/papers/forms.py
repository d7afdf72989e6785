"""The forms of an experiment's files, NAME.yaml and the record NAME.json; `parse` reads them."""

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError, with_config

from dml.papers.drawn import KNOWN_KEYS
from dml.papers.experiment import Row, Section, Seeds, Tuning
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


@with_config(KNOWN_KEYS)
@dataclass(frozen=True)
class RecordForm:
    """A record."""

    measured: list[Measurement]
    compared: list[Compared]
    tuned: list[Tuned] = field(default_factory=list)


@with_config(KNOWN_KEYS)
@dataclass(frozen=True)
class ExperimentForm:
    """The YAML file; see `Experiment`. The form of its figure depends on the figure's kind."""

    title: str
    source: str
    parts: dict[str, Section]
    rows: list[Row]
    about: str = ""
    overrides: list[str] = field(default_factory=list)
    seeds: Seeds = field(default_factory=lambda: [0])
    figure: dict[str, Any] = field(default_factory=dict)
    compared_with: str = ""
    spread_of: list[str] = field(default_factory=list)
    tuning: Tuning | None = None


@cache  # making one takes longer than reading a file
def _adapter(form: type) -> TypeAdapter[Any]:
    return TypeAdapter(form)


def parse(content: Any, form: type, above: str = "") -> Any:
    """Returns the content of a file, in plain containers, as what its form makes of it.

    Args:
        above: the key that holds the content; empty: it is the whole file.

    Raises:
        ValueError: it has another form; the message says where and what is wrong.
        TypeError: it has a value that JSON cannot hold.
    """
    # As JSON, since pydantic is strict with types there and yet takes keys with values for a dataclass.
    text = json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")
    try:
        return _adapter(form).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]]
        place = "".join([above, *parts]).lstrip(".")
        said = SAID.get(first["type"], f"has another form ({first['msg']})")
        raise ValueError(f"{place or 'its content'} {said}") from None

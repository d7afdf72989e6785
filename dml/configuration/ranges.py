"""Annotations that give the range of an option, and the check of a value against an annotation.

`dml.configuration.options.check` checks whole configurations; commands check their options one by one.
"""

import json
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache, reduce
from inspect import Parameter
from operator import or_
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from dml.errors import UserError

Count = Annotated[int, Field(ge=1, le=10**9)]

WholeNumber = Annotated[int, Field(ge=0, le=10**9)]

Seed = Annotated[int, Field(ge=0, lt=2**32)]

Size = Annotated[int, Field(ge=1, le=65536)]  # of a layer or a batch

Pixels = Annotated[int, Field(ge=1, le=8192)]

Few = Annotated[int, Field(ge=1, le=1024)]  # learners, clusters, layers

Positive = Annotated[float, Field(gt=0, le=1e30)]

NotNegative = Annotated[float, Field(ge=0, le=1e30)]

Number = Annotated[float, Field(ge=-1e30, le=1e30)]

Sharpness = Annotated[float, Field(gt=0, le=1e4)]  # a factor in an exponent

Share = Annotated[float, Field(ge=0, le=1)]

BelowOne = Annotated[float, Field(ge=0, lt=1)]


def check_value(option: str, value: Any, annotation: Any) -> None:
    """Raises UserError, with the option's name, unless a plain value fits the annotation."""
    adapter = _adapter(annotation)
    if adapter is None:
        raise UserError(f"{option}={shown(value)} has to be a component, with a _target_.")
    try:
        adapter.validate_json(json.dumps(value, default=str))  # as JSON, so that lists are accepted for tuples
    except ValidationError as error:
        raise UserError(f"{option}={shown(value)} {_said(error)}.") from None


def shown(value: Any) -> str:
    """Returns a value as it is typed on the command line."""
    return value if isinstance(value, str) and value else json.dumps(value)


_WORDS = {
    "a valid integer, got a number with a fractional part": "a whole number",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid list": "a list",
    "a valid array": "a list",
    "a valid tuple": "a list",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}


def _said(error: ValidationError) -> str:
    """Puts pydantic's message into the end of a sentence, such as `has to be at least 1`."""
    found: list[str] = []
    for one in error.errors(include_url=False):
        place = "".join(f"[{i}]" for i in one["loc"] if isinstance(i, int))
        words = one["msg"].removeprefix("Input should be ").removeprefix("Input should ")
        for theirs, ours in _WORDS.items():
            words = words.replace(theirs, ours)
        words = words[:1].lower() + words[1:]
        found.append(f"({place} of it) {words}" if place else words)
    return "has to be " + " or ".join(dict.fromkeys(found))


def members(annotation: Any) -> Iterator[Any]:
    """Yields the members of a union, or the annotation itself if it is none."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from members(member)
    else:
        yield annotation


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any] | None:
    """Returns the validator for the part of an annotation that plain values can fit; None if there is no such part."""
    plain = [member for member in members(annotation) if adapts(member)]
    if not plain:
        return None
    whole: Any = annotation if len(plain) == len(list(members(annotation))) else reduce(or_, plain)
    return TypeAdapter(whole, config=ConfigDict(strict=True, allow_inf_nan=False))


@cache
def adapts(annotation: Any) -> bool:
    if typing.get_origin(annotation) is Callable or annotation in (Callable, Parameter.empty):
        return False
    try:
        TypeAdapter(annotation)
    except PydanticSchemaGenerationError:
        return False
    return True

"""Describes the possible values of an option in words, from the annotation of the parameter that takes it."""

import typing
from collections.abc import Iterable
from types import NoneType
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from dml.configuration.ranges import adapts, members

FAR = 1e7  # larger bounds only exclude infinity, and are not printed

WORDS = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}

NAMES = {bool: "`true` or `false`", int: "a whole number", float: "a number", str: "text", NoneType: "`null`"}


def in_words(annotation: Any) -> str:
    """Returns the possible values in words; empty if the annotation does not say."""
    if annotation is None or annotation is Any or annotation is typing.Callable:
        return ""
    said = [_one(member) for member in members(annotation) if adapts(member)]
    return " or ".join(dict.fromkeys(one for one in said if one))


def _one(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        rules = [rule for info in arguments[1:] for rule in (info.metadata if isinstance(info, FieldInfo) else [info])]
        return _one(arguments[0]) + _bounds(rules)
    if origin is Literal:
        return _listed(dict.fromkeys(f"`{value}`" for value in arguments))
    if origin is tuple and Ellipsis not in arguments:
        return f"{len(arguments)} values, each {in_words(arguments[0])}" if arguments else "a list"
    if origin is not None and arguments:
        return f"a list, each {in_words(arguments[0])}" if in_words(arguments[0]) else "a list"
    return NAMES.get(annotation, "")


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _bounds(rules: list[Any]) -> str:
    """Returns the bounds of a number, as in `, 1 to 1024`."""
    bounds = {type(rule): float(value) for rule in rules for value in _bound(rule) if abs(value) < FAR}
    if Ge in bounds and Le in bounds:
        return f", {bounds[Ge]:g} to {bounds[Le]:g}"
    said = [f"{word} {bounds[kind]:g}" for kind, word in WORDS.items() if kind in bounds]
    said += ["not empty" for rule in rules if isinstance(rule, MinLen)]
    return f", {' and '.join(said)}" if said else ""


def _bound(rule: Any) -> list[Any]:
    """Returns the bound of a rule about numbers, as a list; empty for other rules."""
    return [getattr(rule, type(rule).__name__.lower())] if isinstance(rule, tuple(WORDS)) else []

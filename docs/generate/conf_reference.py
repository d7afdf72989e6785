"""The reference of options: each file of `conf/`, with its options, their defaults, possible values and meanings.

The meaning of an option is the comment beside it or above it. Without a comment, it is taken from the docstring of the
component that takes the option, or from another file that explains the same option.
"""

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml
from in_words import in_words

from dml.configuration.composition import CONF
from dml.configuration.options import COMMON, OWN, TRAINER, parameters

FIRST_FOUND = "---\nsearch: {boost: 5}\n---\n"  # a search for an option should find its explanation first

GROUPS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())


@dataclass(frozen=True)
class Option:
    """One option of a file.

    Attributes:
        name: as it is typed, `method.lambda_div`.
        default: as it is in the file.
        values: its possible values in words; empty: the component does not say.
        meaning: one or two sentences.
    """

    name: str
    default: str
    values: str
    meaning: str


@dataclass(frozen=True)
class ConfFile:
    """One file of `conf/`.

    Attributes:
        choice: as it is typed, `loss=gsp/ms`.
        about: the lines of the comment at its top.
        built_on: the choices that it changes, such as `trainer=default`.
        chosen: other choices that the file makes, such as `loss=abe_contrastive`.
        options: in the order of the file.
    """

    choice: str
    about: list[str]
    built_on: list[str]
    chosen: list[str]
    options: list[Option]


def files_of(group: str) -> list[ConfFile]:
    """Reads all files of a group, and of the groups below it."""
    return [read(path) for path in sorted((CONF / group).rglob("*.yaml"))]


def read(path: Path) -> ConfFile:
    """Reads one file of `conf/`, with the meaning of every option."""
    found = _read(path)
    return replace(found, options=[replace(one, meaning=one.meaning or _elsewhere(one.name)) for one in found.options])


@cache
def _read(path: Path) -> ConfFile:
    text = path.read_text()
    place = path.relative_to(CONF)
    group = place.parent.as_posix() if place.parent != Path() else ""
    everywhere = "# @package _global_" in text or not group
    prefix = "" if everywhere else group.partition("/")[0] + "."  # groups below a group fill the same place
    head = [line[1:].removeprefix(" ") for line in _head(text) if "@package" not in line]
    root = yaml.compose(text)
    content = yaml.safe_load(text) or {}
    options = [] if root is None else list(_options(root, text.splitlines(), prefix, _targets(path, content)))
    entries = [one for one in content.get("defaults", []) if one != "_self_"]
    chosen = [one for one in map(_chosen, (one for one in entries if isinstance(one, dict))) if one]
    built_on = [_written(one) for one in (_base(path, entry) for entry in entries) if one]
    return ConfFile(_written(path), head, built_on, chosen, options)


def _written(path: Path) -> str:
    """Returns a file of `conf/` as it is chosen on the command line; `config` for `conf/config.yaml`."""
    group, _, name = path.relative_to(CONF).with_suffix("").as_posix().partition("/")
    return f"{group}={name}" if name else group


def _head(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        yield line


def _chosen(entry: dict[str, Any]) -> str:
    """Returns an entry of a defaults list as it would be typed; empty for entries of Hydra's own groups."""
    ((key, value),) = entry.items()
    group = re.sub(r"@.*", "", key.removeprefix("override").strip().removeprefix("/"))
    return "" if group.startswith("hydra") or value is None else f"{group}={value}"


def _targets(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Adds the `_target_`s of the files that this file builds on."""
    for entry in content.get("defaults", []):
        base = _base(path, entry)
        if base is not None:
            content = _merged(_targets(base, yaml.safe_load(base.read_text()) or {}), content)
    return content


def _base(path: Path, entry: Any) -> Path | None:
    if isinstance(entry, str) and entry != "_self_":
        base = entry.replace("@_here_", "")
        return CONF / f"{base.strip('/')}.yaml" if base.startswith("/") else path.with_name(f"{base}.yaml")
    return None


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = [name for name in above if isinstance(above[name], dict) and isinstance(below.get(name), dict)]
    return below | above | {name: _merged(below[name], above[name]) for name in both}


def _options(node: yaml.Node, lines: list[str], prefix: str, content: Any) -> Iterator[Option]:
    """The options of a mapping, in order."""
    assert isinstance(node, yaml.MappingNode)
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if key.value in ("defaults", "hydra", "_partial_") or (key.value == "_target_"):
            continue
        inner = content.get(key.value) if isinstance(content, dict) else None
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _options(value, lines, f"{name}.", inner)
            continue
        default = _source(value, lines)
        target = str(content.get("_target_", "")) if isinstance(content, dict) else ""
        meaning = _comment(key, value, lines) or _said_by(target, key.value)
        yield Option(name, default, _values(name, target, key.value), meaning)


def _source(node: yaml.Node, lines: list[str]) -> str:
    start, end = node.start_mark, node.end_mark
    if isinstance(node, yaml.ScalarNode) and node.style in (">", "|"):
        return " ".join(node.value.split())
    if start.line == end.line:
        return lines[start.line][start.column : end.column]
    return yaml.safe_dump(yaml.safe_load(yaml.serialize(node)), default_flow_style=True, width=1000).strip()


def _comment(key: yaml.Node, value: yaml.Node, lines: list[str]) -> str:
    """Returns the comment beside an option, or on the lines above it with the same indentation."""
    beside = lines[key.start_mark.line][value.end_mark.column :] if value.end_mark.line == key.start_mark.line else ""
    if (found := re.search(r"#\s*(.*)", beside)) is not None:
        return found[1]
    above: list[str] = []
    for line in reversed(lines[: key.start_mark.line]):
        text = line.strip()
        if (
            not text.startswith("#")
            or len(line) - len(line.lstrip()) != key.start_mark.column
            or not key.start_mark.column
        ):
            break
        above.insert(0, text.lstrip("# "))
    return "; ".join(above)


def _values(name: str, target: str, option: str) -> str:
    group, _, rest = name.partition(".")
    if group == "trainer":
        annotation = TRAINER.get(rest)
        return in_words(parameters("pytorch_lightning.Trainer")[rest] if annotation is None else annotation)
    if not rest:
        return in_words(COMMON.get(name))
    if rest in OWN.get(group, {}):
        return in_words(OWN[group][rest])
    return in_words(parameters(target).get(option)) if target else ""


def _said_by(target: str, option: str) -> str:
    """Returns what the component's docstring says about an option; for a component of a library, where to read it."""
    if not target:
        return ""
    said = _arguments(target).get(option, "")
    if not said and not target.startswith("dml."):
        return f"Argument `{option}` of `{target}`."
    return said


def _elsewhere(name: str) -> str:
    """Returns the meaning from the first file that explains an option: default choices, then components, overlays."""
    return _explained().get(name) or _explained().get(name.replace("transform.test.", "transform.train."), "")


@cache
def _explained() -> dict[str, str]:
    overlays = [CONF / name for name in ("experiment", "sweep", "debug")]
    chosen = [CONF / choice.replace("=", "/") for choice in _read(CONF / "config.yaml").chosen]
    defaults = [path.with_suffix(".yaml") for path in chosen]
    paths = sorted(CONF.rglob("*.yaml"), key=lambda path: (any(path.is_relative_to(one) for one in overlays), path))
    explained: dict[str, str] = {}
    for path in [CONF / "config.yaml", *defaults, *paths]:
        for option in _read(path).options:
            if option.meaning:
                explained.setdefault(option.name, option.meaning)
    return explained


@cache
def _arguments(target: str) -> dict[str, str]:
    """Returns names and meanings from the `Args:` of a component, its base classes, and what it passes options to."""
    taker = resolve_name(target)
    takers = [one for one in inspect.getmro(taker) if one is not object] if isinstance(taker, type) else [taker]
    takers += [one for one in [getattr(taker, "options_of", None)] if one is not None]
    found: dict[str, str] = {}
    for one in takers:
        if one.__module__.startswith("dml."):
            said = arguments_of(inspect.getdoc(one) or "")
            found = {name: text for name, text in said.items() if not text.startswith("see ")} | found
    return found


def arguments_of(doc: str) -> dict[str, str]:
    """Returns the `Args:` of a Google-style docstring; names on one line share its text."""
    part = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n)+)", doc, re.MULTILINE)
    found: dict[str, str] = {}
    names: list[str] = []
    for line in textwrap.dedent(part[1]).splitlines() if part else []:
        begun = re.match(r"([\w*]+(?:, [\w*]+)*): (.*)", line)
        if begun and not line.startswith(" "):
            names = begun[1].split(", ")
            found |= dict.fromkeys(names, begun[2])
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def page(group: str) -> str:
    """Returns the Markdown of one group."""
    return "\n".join([FIRST_FOUND, f"# Options of `{group}`", "", *_lines(files_of(group))])


def common_page() -> str:
    """Returns the Markdown of `conf/config.yaml`, with which every configuration begins."""
    return "\n".join([FIRST_FOUND, "# Options of every configuration", "", *_lines([read(CONF / "config.yaml")])])


def _lines(files: Iterable[ConfFile]) -> Iterator[str]:
    for one in files:
        yield from (f"## {one.choice} {{ #{anchor(one.choice)} }}", "", *_prose(one.about), "")
        if one.built_on:
            yield from ("Changes " + ", ".join(f"`{choice}`" for choice in one.built_on) + ".", "")
        if one.chosen:
            yield from ("With it come " + ", ".join(f"`{choice}`" for choice in one.chosen) + ".", "")
        if one.options:
            yield from ("| Option | Default | Values | Meaning |", "|---|---|---|---|")
            for option in one.options:
                yield f"| {' | '.join(_cells(option))} |"
            yield ""


def anchor(choice: str) -> str:
    """Returns the anchor of a file's heading: `loss=gsp/ms` is at `#loss-gsp-ms`."""
    return re.sub(r"\W+", "-", choice)


def _prose(about: list[str]) -> Iterator[str]:
    """Turns the comment at the top of a file into Markdown; commands on lines of their own become blocks."""
    inside = False
    for line in about:
        command = re.match(r"python -m [\w.]+( |$)", line) is not None or (inside and line != line.lstrip())
        if command != inside:
            yield "```" if inside else "\n```text"
        yield line if command else _plain(line)
        inside = command
    if inside:
        yield "```"


def _cells(option: Option) -> tuple[str, ...]:
    default = f"`{option.default}`" if option.default else "empty"
    return tuple(
        cell.replace("|", "\\|") for cell in (f"`{option.name}`", default, option.values, _plain(option.meaning))
    )


def _plain(text: str) -> str:
    """Turns a comment into Markdown that shows code as it was typed."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(one if one.startswith("`") else re.sub(r"([*_<\[\]#~])", r"\\\1", one) for one in pieces)

"""Figures that pages quote are those of the records, and comparisons in words are what the intervals say.

`quoted.yaml` has the sentences and where their figures come from. Every figure with decimals on these pages has to be
in it, as quoted or as given elsewhere, so that none is typed in by hand and then forgotten.
"""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dml.configuration.composition import CONF
from dml.papers.classes import compare_rows
from dml.papers.experiment import Experiment
from dml.papers.measured import Compared
from tests.recorded import EXPERIMENTS

ROOT = CONF.parent
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
FILE = yaml.safe_load(Path(__file__).with_name("quoted.yaml").read_text())
QUOTED: list[dict[str, Any]] = FILE["quoted"]
GIVEN: dict[str, list[str]] = FILE["given"]

FIGURE = re.compile(r"\{([^{}]+)\}")
DECIMALS = re.compile(r"(?<![\w.@-])-?\d+\.\d+")
NO_PROSE = re.compile(r"^```.*?^```$|\$\$.*?\$\$|\$[^$\n]+\$|`[^`]*`|<!--.*?-->|^\|.*?$|(?<=\])\([^)]*\)", re.S | re.M)


def side(experiment: Experiment, said: str) -> tuple[str, str]:
    """Splits `ROW @ PART`; without a part it is the first one."""
    row, _, part = said.partition(" @ ")
    assert row in experiment.rows, f"{experiment.name} has no row {row}"
    return row, part or next(iter(experiment.parts))


def column(experiment: Experiment, of: str, title: str, seeds: list[int] | None) -> list[float]:
    """Returns a column's figure of each training that counts."""
    row, part = side(experiment, of)
    shown = experiment.parts[part].columns[title]
    found = [
        one.metrics[shown.metric] * shown.scale
        for one in experiment.measured
        if (one.row, one.part, one.changes) == (row, part, [])
        and shown.metric in one.metrics
        and (seeds is None or one.seed in seeds)
    ]
    assert found, f"{experiment.name} has not measured {title} of {of}"
    return found


@cache
def against(name: str, row: str) -> list[Compared]:
    """Compares all rows with one that need not be that which the record compares with."""
    return compare_rows(replace(EXPERIMENTS[name], compared_with=row))


def difference(name: str, a: str, b: str, metric: str) -> tuple[float, float, float]:
    """Returns A less B in points and its interval: the recorded one, or one from what each class scored."""
    (a, part), (b, other) = side(EXPERIMENTS[name], a), side(EXPERIMENTS[name], b)
    assert part == other, "an interval is over the classes of one part"

    def wanted(one: Compared) -> bool:
        return (one.part, one.metric, one.changes) == (part, metric, []) and {one.row, one.against} == {a, b}

    found = [one for one in EXPERIMENTS[name].compared if wanted(one)] or [
        one for one in against(name, b) if wanted(one)
    ]
    assert found, f"{name} has not compared {a} and {b}"
    sign = 100 if found[0].row == a else -100
    low, high = sorted((sign * found[0].low, sign * found[0].high))
    return sign * found[0].estimate, low, high


def figure(reference: str) -> float | str:
    """Returns the figure that a reference stands for, or what an interval says: above, below or alike."""
    name, rows, what = reference.split(" | ")
    experiment = EXPERIMENTS[name]
    what, _, seeds = what.partition(" of seeds ")
    what, _, aspect = what.partition(", ")
    chosen = [int(seed) for seed in seeds.split()] or None
    a, less, b = rows.partition(" less ")
    if aspect == "published":
        row, part = side(experiment, a)
        return experiment.rows[row].published[part][what]
    if not less:
        found = column(experiment, a, what, chosen)
        return float(np.std(found, ddof=1) if aspect == "sd" else np.mean(found))
    if what not in ("recall@1", "map@r"):
        return float(np.mean(column(experiment, a, what, chosen)) - np.mean(column(experiment, b, what, chosen)))
    estimate, low, high = difference(name, a, b, what)
    words = {"low": low, "high": high, "": estimate, "says": "above" if low > 0 else "below" if high < 0 else "alike"}
    return words[aspect]


def pattern(says: str) -> str:
    """Returns the regular expression of a sentence, with a group for each of its figures."""
    pieces = FIGURE.split(" ".join(says.split()))
    fixed = [r"\s+".join(re.escape(word) for word in piece.split(" ")) for piece in pieces[::2]]
    return "".join(f"{a}({re.escape(b)})" for a, b in zip(fixed, pieces[1::2], strict=False)) + fixed[-1]


def _blanked(found: re.Match[str]) -> str:
    """Returns a sentence without its figures."""
    text = found.group()
    for i in reversed(range(1, found.re.groups + 1)):
        start, end = (at - found.start() for at in found.span(i))
        text = text[:start] + "#" + text[end:]
    return text


@pytest.mark.parametrize("quoted", QUOTED, ids=lambda one: f"{one['page']}: {' '.join(one['says'].split())[:60]}")
def test_what_is_quoted_is_recorded(quoted: dict[str, Any]) -> None:
    page = (ROOT / quoted["page"]).read_text()
    assert re.search(pattern(quoted["says"]), page), "the page does not say so: change tests/quoted.yaml"
    shown = FIGURE.findall(quoted["says"])
    for text, reference in zip(shown, quoted.get("figures", []), strict=True):
        value = figure(reference)
        assert not isinstance(value, str)
        decimals = len(text.partition(".")[2])
        assert f"{value:.{decimals}f}" == text, f"{reference} is {value}"
    for reference, word in quoted.get("holds", {}).items():
        assert figure(f"{reference}, says") == word, reference
    assert shown or quoted.get("holds")


@pytest.mark.parametrize("name", PAGES)
def test_every_figure_has_a_source(name: str) -> None:
    page = (ROOT / name).read_text()
    for one in QUOTED:
        if one["page"] == name:
            page = re.sub(pattern(one["says"]), _blanked, page)
    left = set(DECIMALS.findall(NO_PROSE.sub(" ", page)))
    assert left <= set(GIVEN.get(name, [])), "say in tests/quoted.yaml where these come from"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"says": "`method=baseline` came to {75.8} on an Intel Xeon"}, "the page does not say so"),
        ({"figures": ["losses/default | margin | R@1"]}, "losses/default | margin | R@1 is"),
        ({"holds": {"comparison/cars196 | DCES less baseline | recall@1": "above"}}, "DCES less baseline"),
    ],
)
def test_what_is_not_recorded_fails(changed: dict[str, Any], reason: str) -> None:
    first = next(one for one in QUOTED if "75.7" in one["says"])
    with pytest.raises(AssertionError, match=re.escape(reason)):
        test_what_is_quoted_is_recorded(first | changed)

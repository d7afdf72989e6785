"""Whether a paper's pattern shows, in a sentence."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from dml.errors import UserError
from dml.figures.summaries import PatternPoint, patterns
from dml.papers.catalogue import read_experiment
from dml.papers.drawing import glance
from dml.papers.measured import Compared, Measurement
from dml.papers.page import _cell, markdown, write_page
from dml.papers.verdicts import verdict, verdicts

LITTLE = """
title: Little
source: nobody
seeds: [0]
compared_with: four
parts:
  Cars: {columns: {R@1: {metric: test/recall@1, scale: 100}}}
rows:
  - {name: four, overrides: []}
  - {name: one, overrides: [method.M=1], pattern: {recall@1: below}}
  - {name: two, overrides: [method.M=2]}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("dml.papers.catalogue.FOLDER", tmp_path)
    (tmp_path / "us").mkdir()
    (tmp_path / "us" / "little.yaml").write_text(LITTLE)
    return tmp_path


def difference(low: float, high: float, row: str = "one", metric: str = "recall@1") -> Compared:
    return Compared(row, "Cars", [], metric, "four", (low + high) / 2, low, high, 0.01, [3, 3], 4)


@pytest.mark.parametrize(
    ("low", "high", "expected", "said"),
    [
        (0.01, 0.02, "above", "shows"),
        (-0.02, -0.01, "above", "is the other way round"),
        (-0.01, 0.01, "above", "is open"),
        (0.01, 0.02, "below", "is the other way round"),
        (-0.02, -0.01, "below", "shows"),
        (-0.01, 0.01, "below", "is open"),
        (0.0, 0.02, "above", "is open"),
        (-0.02, 0.0, "below", "is open"),
        (-0.02, 0.0, "above", "is open"),
        (0.0, 0.02, "below", "is open"),
    ],
)
def test_it_goes_by_the_whole_interval(low: float, high: float, expected: str, said: str) -> None:
    assert verdict(difference(low, high), expected) == said


def test_rows_whose_direction_a_paper_prints_have_a_sentence(folder: Path) -> None:
    little = read_experiment("us/little")
    assert not verdicts(little)
    others = [difference(-0.02, -0.01, "two"), difference(-0.02, -0.01, "one", "map@r")]
    little = replace(little, compared=[difference(-0.031, -0.012), *others])
    sentence = (
        "one, Cars: the paper has it below four in Recall@1; here it lies -2.15 (-3.10 to -1.20) points from it."
        " The pattern shows."
    )
    assert verdicts(little) == [sentence]
    assert f"- {sentence}\n" in markdown(little)
    assert sentence in write_page([little], folder / "page").read_text()
    alone = replace(little, compared=[replace(one, seeds=0) for one in little.compared])
    assert verdicts(alone) == [sentence.replace("shows.", "shows, as far as one seed tells.")]
    (open_one,) = verdicts(replace(little, compared=[replace(difference(-0.01, 0.01), seeds=0)]))
    assert open_one.endswith("The pattern is open.")


def test_at_a_glance_right_of_zero_is_as_the_paper_has_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Mapping[str, Sequence[PatternPoint]]] = []

    def kept(groups: Mapping[str, Sequence[PatternPoint]]) -> Figure:
        drawn.append(groups)
        return patterns(groups)

    monkeypatch.setattr("dml.figures.summaries.patterns", kept)
    little = read_experiment("us/little")
    assert glance([little]) is None
    shows = replace(little, compared=[difference(-0.03, -0.01), difference(0.01, 0.02, "two")])
    others = replace(little, compared=[difference(-0.01, 0.02)], title="Others")
    found = glance([shows, others])
    assert found is not None
    said = "Differences that the papers report, and that were measured here: 2 (1 show, 0 the other way round, 1 open)."
    assert found[0] == said
    (first,), (second,) = drawn[-1].values()
    assert (first.label, second.label) == ("one below four: Recall@1",) * 2
    assert (first.estimate, first.low, first.high) == pytest.approx((2, 1, 3))
    assert (second.estimate, second.low, second.high) == pytest.approx((-0.5, -2, 1))
    assert said in write_page([shows, others], folder / "page").read_text()
    assert "at a glance" not in write_page([little], folder / "page").read_text()


def test_a_spread_is_that_of_a_run_if_runs_give_one() -> None:
    """As over ten random splits (DIABLO, Tables 3 and 4); else it is over seeds."""
    one = Measurement("four", "Cars", "key", 0, [], {"test/recall@1": 0.5}, "command", "commit", "date", "hardware", "")
    runs = [one, replace(one, seed=1, metrics={"test/recall@1": 0.52})]
    assert _cell(2.0, "test/recall@1/std", 100, "Cars", runs).mean == pytest.approx(2**0.5)
    of_splits = [
        replace(run, metrics=run.metrics | {"test/recall@1/std": std})
        for run, std in zip(runs, (0.004, 0.006), strict=True)
    ]
    assert _cell(2.0, "test/recall@1/std", 100, "Cars", of_splits[:1]).mean == pytest.approx(0.4)
    assert _cell(2.0, "test/recall@1/std", 100, "Cars", of_splits).mean == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "{recall@1: below}",
            "{recall@1: lower}",
            "the row 'one' has the pattern recall@1: lower, but one of recall@1",
        ),
        (
            "{recall@1: below}",
            "{accuracy: below}",
            "the row 'one' has the pattern accuracy: below, but one of recall@1",
        ),
        (
            "compared_with: four",
            "compared_with: one",
            "the row 'one' has a pattern, and nothing that it is compared with",
        ),
        ("[method.M=2]", "[method.M=2], without: [R@9]", "the row 'two' has an unknown column 'R@9'"),
        ("compared_with: four\n", "", "the row 'one' has a pattern, and nothing that it is compared with"),
    ],
)
def test_rows_that_say_nothing(folder: Path, old: str, new: str, said: str) -> None:
    file = folder / "us" / "little.yaml"
    file.write_text(LITTLE.replace(old, new))
    with pytest.raises(UserError, match=r"little\.yaml cannot be read as an experiment: ") as refused:
        read_experiment("us/little")
    assert said in str(refused.value)

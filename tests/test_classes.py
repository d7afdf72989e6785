"""What each class scored is kept beside the record, so that rows are compared whose runs are not here any more."""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from omegaconf import DictConfig
from scipy.stats import t

from dml.analysis.comparison import over_classes, over_sums, paired
from dml.errors import UserError
from dml.evaluation.interval import Estimate, Spread
from dml.papers.catalogue import read_experiment
from dml.papers.classes import ByClass, by_class, compare_rows, keep_classes, kept
from dml.papers.experiment import Experiment
from dml.papers.measured import Compared
from dml.papers.page import _fewer, markdown
from dml.papers.records import record_finished
from dml.papers.shown import table
from dml.papers.trainings import folder_of
from dml.runs.folder import RunFolder
from tests.recorded import EXPERIMENTS

CLASSES = np.repeat([f"class {i:02}" for i in range(20)], np.arange(20) + 3)  # of different sizes

Train = Callable[..., list[Path]]


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """Two rows that are compared."""
    (tmp_path / "experiments" / "us").mkdir(parents=True)
    (tmp_path / "experiments" / "us" / "table1.yaml").write_text(
        """
title: Little
source: nobody
overrides: [dataset=glyphs, backbone=small]
seeds: [0, 1]
compared_with: base
parts:
  glyphs: {columns: {R@1: {metric: test/recall@1, scale: 100}}}
rows:
  - {name: base, overrides: [method=baseline]}
  - {name: mine, overrides: [method=abe]}
"""
    )
    monkeypatch.setattr("dml.papers.catalogue.FOLDER", tmp_path / "experiments")
    return read_experiment("us/table1")


@pytest.fixture
def train(two: Experiment, configure: Callable[..., DictConfig]) -> Train:
    """`train(row, out)`: writes what trainings of a row leave, two seeds with random queries. Returns their folders."""

    def train(row: str, out: Path, **changes: np.ndarray) -> list[Path]:
        folders = []
        for training in two.trainings([row]):
            run = RunFolder(folder_of(training, out))
            run.open(configure("runtime.train_classes=3", "runtime.embedding_dim=8"), [])
            draw = np.random.default_rng([training.seed, len(row), row == "mine"])
            ranks = draw.integers(1, 4, len(CLASSES))
            ranks[:3] = 0  # the first class has no positive
            arrays = {
                "paths": np.array([f"{i}.jpg" for i in range(len(CLASSES))]),
                "classes": CLASSES,
                "best_rank": ranks,
                "map@r": draw.random(len(CLASSES)) ** (2 if row == "base" else 1),
            }
            np.savez(run.path / "queries.npz", **arrays | changes)
            run.write_metrics({"test/recall@1": float((ranks == 1).mean()), "test/map@r": 0.5, "run/seconds": 1.0})
            folders.append(run.path)
        return folders

    return train


def test_a_row_is_compared_with_one_that_was_trained_elsewhere(two: Experiment, train: Train, tmp_path: Path) -> None:
    base, mine = train("base", tmp_path / "here"), train("mine", tmp_path / "there")
    both = paired(base, mine)
    record_finished(two, [], tmp_path / "here")
    assert read_experiment("us/table1").compared == []
    shutil.rmtree(tmp_path / "here")
    record_finished(two, [], tmp_path / "there")
    again = read_experiment("us/table1")
    assert {one.metric for one in again.compared} == {"recall@1", "map@r"}
    for one in again.compared:
        expected = over_classes(*both.values[one.metric], both.classes, spread=both.spreads[one.metric])
        assert (one.seeds, expected.seeds) == (2, 2)
        found = (one.estimate, one.low, one.high, one.p)
        assert found == pytest.approx((expected.estimate, expected.low, expected.high, expected.p), abs=1e-7)
        assert (one.row, one.against, one.runs) == ("mine", "base", [2, 2])
    assert [(one.row, one.seed, len(one.classes)) for one in kept(again)] == [
        ("base", 0, 19),
        ("base", 1, 19),
        ("mine", 0, 19),
        ("mine", 1, 19),
    ]


def test_rows_with_one_seed_take_the_spread_of_others(two: Experiment, train: Train, tmp_path: Path) -> None:
    """Of those of their part, and of the same part of experiments that are named."""
    folder = tmp_path / "experiments" / "us"
    path, other = folder / "table1.yaml", folder / "table2.yaml"
    other.write_text(path.read_text())
    path.write_text(path.read_text().replace("seeds: [0, 1]", "seeds: [0, 1]\nspread_of: [us/table2]"))
    for row in ("base", "mine"):
        train(row, tmp_path / "two")
        shutil.rmtree(train(row, tmp_path / "one")[1])
    record_finished(read_experiment("us/table1"), [], tmp_path / "one")
    alone = {one.metric: one for one in read_experiment("us/table1").compared}
    assert [one.seeds for one in alone.values()] == [0, 0]
    record_finished(read_experiment("us/table2"), [], tmp_path / "two")  # the intervals of the other one, too
    totals: dict[str, list[float]] = {}
    for one in kept(read_experiment("us/table2")):
        totals.setdefault(one.row, []).append(sum(one.sums["map@r"]) / sum(one.sizes))
    found = {one.metric: one for one in read_experiment("us/table1").compared}["map@r"]
    assert found.seeds == 2
    assert found.estimate == alone["map@r"].estimate
    lone = over_sums_of(found, alone["map@r"])
    spread = Spread(2 * sum(np.var(one, ddof=1) for one in totals.values()) / 2, 2)
    assert (found.low, found.high) == pytest.approx(lone.interval(spread)[:2], abs=1e-9)
    for file in other.parent.glob("table2.*"):
        file.write_text(
            file.read_text().replace("glyphs: {", "wider: {").replace('"part": "glyphs"', '"part": "wider"')
        )
    assert len(kept(read_experiment("us/table2"))) == 4
    assert [one.seeds for one in compare_rows(read_experiment("us/table1"))] == [0, 0]
    path.write_text(path.read_text().replace("us/table2", "us/table3"))
    with pytest.raises(UserError, match="spread_of names 'us/table3', which is no experiment"):
        read_experiment("us/table1")


@pytest.mark.parametrize("name", [name for name, one in EXPERIMENTS.items() if one.compared])
def test_recorded_differences_are_those_of_what_each_class_scored(name: str) -> None:
    """Also where the spread over seeds comes from experiments that were recorded later."""
    experiment = EXPERIMENTS[name]
    recorded, derived = (
        {(one.row, one.part, one.metric, *one.changes, *one.runs, one.seeds): one for one in compared}
        for compared in (experiment.compared, compare_rows(experiment))
    )
    assert recorded.keys() == derived.keys()
    for place, one in recorded.items():
        again = derived[place]
        figures = (again.estimate, again.low, again.high, again.p)
        assert (one.estimate, one.low, one.high, one.p) == pytest.approx(figures, rel=1e-6, abs=1e-9), place


def test_folds_of_one_training_tell_the_spread(two: Experiment, train: Train, tmp_path: Path) -> None:
    """The differences of two rows fold by fold: a fold that is hard for both counts for neither."""
    for row in ("base", "mine"):
        train(row, tmp_path / "out")
    record_finished(two, [], tmp_path / "out")
    before = {one.metric: one for one in read_experiment("us/table1").compared}["map@r"]
    folds = {"base": [0.1, 0.2, 0.3, 0.4], "mine": [0.15, 0.22, 0.36, 0.45]}
    lines = [
        replace(one, runs=4, of_runs={"map@r": folds[one.row]})
        for one in kept(read_experiment("us/table1"))
        if one.seed == 0
    ]
    (tmp_path / "experiments" / "us" / "table1.classes.jsonl").unlink()
    keep_classes(read_experiment("us/table1"), lines)
    found = {one.metric: one for one in compare_rows(read_experiment("us/table1"))}
    assert (found["map@r"].seeds, found["recall@1"].seeds) == (3, 0)
    apart = np.subtract(folds["mine"], folds["base"])
    base, mine = (np.array(one.sums["map@r"]) for one in lines)
    sizes = np.array(lines[0].sizes)
    alone = over_sums(base, mine, sizes)
    expected = over_sums(base, mine, sizes, Spread(float(np.var(apart, ddof=1)) / 4, 3))
    assert (found["map@r"].low, found["map@r"].high) == pytest.approx((expected.low, expected.high))
    assert found["map@r"].low < alone.low
    assert before.seeds == 2


def over_sums_of(found: Compared, alone: Compared) -> Estimate:
    """Returns the estimate over classes that the interval without seeds came from: 19 classes have positives."""
    return Estimate(found.estimate, (alone.high - alone.low) / 2 / float(t.ppf(0.975, 18)), 18, np.zeros(1))


def test_a_training_is_kept_once_and_as_long_as_its_row_is_the_same(
    two: Experiment, train: Train, tmp_path: Path
) -> None:
    for folder in ("a", "b"):
        train("base", tmp_path / folder)
        record_finished(two, [], tmp_path / folder)
    assert len(kept(read_experiment("us/table1"))) == 2
    path = tmp_path / "experiments" / "us" / "table1.yaml"
    path.write_text(path.read_text().replace("method=baseline", "method=baseline, head.dim=8"))
    assert kept(read_experiment("us/table1")) == []


def test_rows_are_compared_on_the_seeds_that_both_have(two: Experiment, train: Train, tmp_path: Path) -> None:
    base, mine = (train(row, tmp_path / "out") for row in ("base", "mine"))
    shutil.rmtree(mine[1])
    record_finished(two, [], tmp_path / "out")
    expected = paired(base[:1], mine[:1])
    for one in read_experiment("us/table1").compared:
        assert one.estimate == pytest.approx(over_classes(*expected.values[one.metric], expected.classes).estimate)
        assert one.runs == [1, 1]
    train("mine", tmp_path / "out")
    record_finished(two, [], tmp_path / "out")
    assert [one.runs for one in read_experiment("us/table1").compared] == [[2, 2], [2, 2]]


def test_a_comparison_of_seeds_that_both_have_replaces_one_of_others(
    two: Experiment, train: Train, tmp_path: Path
) -> None:
    """Though it is of fewer trainings."""
    folders = {row: train(row, tmp_path / "out") for row in ("base", "mine")}
    aside = tmp_path / "aside"
    folders["base"][0].rename(aside)
    folders["base"][1].rename(folders["base"][1].with_name("seed=7"))
    shutil.copytree(folders["base"][1].with_name("seed=7"), folders["base"][1].with_name("seed=8"))
    record_finished(two, [], tmp_path / "out")
    assert [one.runs for one in read_experiment("us/table1").compared] == [[2, 2], [2, 2]]
    assert "seeds that both rows have" not in markdown(read_experiment("us/table1"))
    aside.rename(folders["base"][0])
    record_finished(two, [], tmp_path / "out")
    assert [one.runs for one in read_experiment("us/table1").compared] == [[1, 1], [1, 1]]
    assert "Differences are over the seeds that both rows have." in markdown(read_experiment("us/table1"))


def test_nothing_is_recorded_if_a_training_cannot_be_compared(two: Experiment, train: Train, tmp_path: Path) -> None:
    train("base", tmp_path / "out")
    (train("mine", tmp_path / "out")[0] / "queries.npz").unlink()
    with pytest.raises(UserError, match=r"queries\.npz"):
        record_finished(two, [], tmp_path / "out")
    assert not two.record.exists()


def test_another_file_that_cannot_be_read_spoils_no_record(
    two: Experiment, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two.record.with_name("draft.yaml").write_text("titel: x\n")
    for row in ("base", "mine"):
        train(row, tmp_path / "out")
    record_finished(two, [], tmp_path / "out")
    assert len(read_experiment("us/table1").compared) == 2
    assert "Left out: " in (said := capsys.readouterr().err)
    assert "draft.yaml cannot be read as an experiment" in said


@pytest.mark.parametrize("names", ["us/table1", "us/table2, us/table2"])
def test_no_seed_counts_twice_in_a_spread(two: Experiment, names: str) -> None:
    path = two.record.with_suffix(".yaml")
    path.with_name("table2.yaml").write_text(path.read_text())
    path.write_text(path.read_text() + f"spread_of: [{names}]\n")
    with pytest.raises(UserError, match=rf"spread_of would count the seeds of {names[:9]} twice: leave it out"):
        read_experiment("us/table1")


def test_a_training_of_two_rows_counts_once_in_a_spread(two: Experiment, train: Train, tmp_path: Path) -> None:
    for row in ("base", "mine"):
        train(row, tmp_path / "out")
    record_finished(two, [], tmp_path / "out")
    before = [(one.low, one.high, one.seeds) for one in read_experiment("us/table1").compared]
    path = two.record.with_suffix(".yaml")
    path.write_text(path.read_text() + "  - {name: again, overrides: [method=abe]}\n")
    record_finished(read_experiment("us/table1"), [], tmp_path / "out")
    compared = read_experiment("us/table1").compared
    assert [(one.low, one.high, one.seeds) for one in compared if one.row == "mine"] == before
    assert len(compared) == 2 * len(before)


def test_classes_of_any_name_are_kept(two: Experiment, train: Train, tmp_path: Path) -> None:
    train("base", tmp_path / "out", classes=np.char.add(CLASSES, "\u2028\x85b"))
    for _ in range(2):
        record_finished(two, [], tmp_path / "out")
        assert len(kept(read_experiment("us/table1"))) == 2


def test_what_another_process_recorded_meanwhile_stays(
    two: Experiment, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("base", tmp_path / "here")
    train("mine", tmp_path / "there")

    def slowly(experiment: Experiment, found: Iterable[ByClass]) -> None:
        monkeypatch.setattr("dml.papers.records.keep_classes", keep_classes)
        record_finished(two, [], tmp_path / "there")  # the other process, after this one has read the record
        keep_classes(experiment, found)

    monkeypatch.setattr("dml.papers.records.keep_classes", slowly)
    record_finished(two, [], tmp_path / "here")
    assert {one.row for one in kept(read_experiment("us/table1"))} == {"base", "mine"}
    assert len(read_experiment("us/table1").compared) == 2


def test_rows_are_shown_against_another_row(
    two: Experiment, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = two.record.with_suffix(".yaml")
    path.write_text(path.read_text().replace("method=abe]", "method=abe], pattern: {recall@1: above}"))
    for row in ("base", "mine"):
        train(row, tmp_path / "out")
    record_finished(read_experiment("us/table1"), [], tmp_path / "out")
    kept_now = two.record.read_bytes()
    (own,) = [one for one in read_experiment("us/table1").compared if one.metric == "map@r"]
    capsys.readouterr()
    table(["us"], "mine")
    said = capsys.readouterr().out
    assert f"{-100 * own.estimate:+.2f} ({-100 * own.high:+.2f} to {-100 * own.low:+.2f})" in said
    assert "MAP@R less mine" in said
    assert "pattern" not in said
    assert two.record.read_bytes() == kept_now
    with pytest.raises(UserError, match=r"us/table1 has no row 'nine': did you mean mine\?"):
        table(["us"], "nine")


def test_other_images_are_not_compared(two: Experiment, train: Train, tmp_path: Path) -> None:
    train("base", tmp_path / "out")
    train("mine", tmp_path / "out", paths=np.array([f"other {i}.jpg" for i in range(len(CLASSES))]))
    with pytest.raises(UserError, match="'mine' and 'base' were tested on different images"):
        record_finished(two, [], tmp_path / "out")


def test_a_damaged_file(two: Experiment, train: Train, tmp_path: Path) -> None:
    train("base", tmp_path / "out")
    record_finished(two, [], tmp_path / "out")
    file = tmp_path / "experiments" / "us" / "table1.classes.jsonl"
    file.write_text(file.read_text()[:-20])
    with pytest.raises(UserError, match=r"table1\.classes\.jsonl is damaged"):
        kept(read_experiment("us/table1"))


def test_repetitions_of_a_fold_are_one_term(
    two: Experiment, configure: Callable[..., DictConfig], tmp_path: Path
) -> None:
    """As in `dml.compare`: four folds tell the spread, however often each was trained."""
    training, draw = two.trainings(["mine"])[0], np.random.default_rng(0)
    precision: dict[int, list[float]] = {}
    for fold, repeat in product(range(4), range(2)):
        run = RunFolder(folder_of(training, tmp_path) / f"fold_{fold}_repeat_{repeat}")
        own = ["protocol=mlrc", f"protocol.fold={fold}", f"protocol.repeat={repeat}", "runtime.train_classes=3"]
        run.open(configure(*own, "runtime.embedding_dim=8"), [])
        values = draw.random(len(CLASSES))
        images = np.array([f"{i}.jpg" for i in range(len(CLASSES))])
        arrays = {"paths": images, "classes": CLASSES, "best_rank": np.ones(len(CLASSES), int), "map@r": values}
        np.savez(run.path / "queries.npz", **arrays)
        run.write_metrics({"test/recall@1": 1.0, "test/map@r": 0.5, "run/seconds": 1.0})
        precision.setdefault(fold, []).append(float(values.mean()))
    found = by_class(training, folder_of(training, tmp_path), [])
    assert found.runs == 8
    assert found.of_runs["map@r"] == pytest.approx([np.mean(precision[fold]) for fold in range(4)])


def test_seeds_that_one_row_alone_has_are_told() -> None:
    """Also with several runs a training, as many on both sides."""
    seeds = {"base": (0, 1), "mine": (1, 2)}
    measured = [SimpleNamespace(row=row, part="p", changes=[], seed=s) for row, of in seeds.items() for s in of]
    one = Compared("mine", "p", [], "map@r", "base", 0.1, 0.0, 0.2, 0.05, [4, 4], 3)
    assert _fewer(cast(Experiment, SimpleNamespace(measured=measured)), one)
    both = [each for each in measured if each.seed == 1]
    assert not _fewer(cast(Experiment, SimpleNamespace(measured=both)), one)
    sizes = [SimpleNamespace(row=row, part="p", changes=[], seed=None) for row in seeds]
    assert not _fewer(cast(Experiment, SimpleNamespace(measured=[*both, *sizes])), one)

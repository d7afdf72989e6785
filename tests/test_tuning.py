"""Rows that are tuned before they are trained."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig

from dml.configuration.composition import composed
from dml.errors import UserError
from dml.papers import actions
from dml.papers.catalogue import read_experiment
from dml.papers.experiment import Experiment, Search
from dml.papers.page import markdown, write_page
from dml.papers.records import keep
from dml.papers.smoke import check_rows
from dml.papers.trainings import folder_of
from dml.papers.tuning import command_of_search, example, searches, tuned
from dml.runs.folder import RunFolder
from tests.conftest import TINY

BEST = "test/map@r"


@pytest.fixture
def little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """Two rows that are tuned alike, one of them with an option of its own."""
    (tmp_path / "experiments" / "us").mkdir(parents=True)
    (tmp_path / "experiments" / "us" / "table1.yaml").write_text(
        f"""
title: Little
source: nobody
overrides: {[*TINY, "protocol.every=5"]}
parts:
  glyphs: {{columns: {{R@1: {{metric: test/recall@1, scale: 100}}}}}}
tuning:
  trials: 2
  overrides: [protocol=tuning]
  search: {{lr: [1.0e-3, 1.0e-2]}}
rows:
  - {{name: plain, overrides: [method=baseline]}}
  - {{name: ABE, overrides: [method=abe], search: {{lr: [1.0e-3], method.M: [2, 4]}}}}
"""
    )
    monkeypatch.setattr("dml.papers.catalogue.FOLDER", tmp_path / "experiments")
    return read_experiment("us/table1")


def test_a_row_can_stand_untuned_among_others(little: Experiment) -> None:
    path = little.record.with_suffix(".yaml")
    path.write_text(path.read_text() + "  - {name: mine, tuned: false, overrides: [method=baseline, lr=3e-3]}\n")
    now = read_experiment("us/table1")
    mine = now.rows["mine"]
    assert [one.row for one in searches(now, again=True)] == ["plain", "ABE"]
    assert now.chosen(mine) == now.searched(mine) == []
    (training,) = now.trainings(["mine"])
    assert training.overrides[-2:] == ("method=baseline", "lr=3e-3")


def searched(search: Search, out: Path, configure: Callable[..., DictConfig], *values: float) -> None:
    """As if the trials of a search had come to some values."""
    for i, value in enumerate(values):
        overrides = [*search.overrides, f"lr={i + 1}e-3", "method.M=2"]
        run = RunFolder(out / search.key / f"lr={i + 1}e-3")
        run.open(configure("runtime.train_classes=3", "runtime.embedding_dim=8", *search.overrides), overrides)
        run.write_metrics({BEST: value, "test/recall@1": 1 - value, "run/seconds": 2.0})
    (out / search.key / "lr=9.failed").write_text("exit code 2")


@pytest.mark.slow
def test_a_row_is_trained_with_what_its_search_found(
    little: Experiment, configure: Callable[..., DictConfig], tmp_path: Path
) -> None:
    assert [one.row for one in searches(little)] == ["plain", "ABE"]
    (search,) = searches(little, ["ABE"])
    assert search.options == ("lr=choice(0.001)", "method.M=choice(2,4)")
    free = little.rows["plain"], {"method.branch": [None, True]}
    written = little.search(replace(free[0], search=free[1] | {"lr": [1]}))
    assert written is not None
    assert written.options == ("lr=choice(1)", "method.branch=choice(null,true)")
    words = command_of_search(search, tmp_path)
    assert {"hydra.sweeper.n_trials=2", "protocol=tuning", "method=abe"} <= set(words)
    place = tmp_path / "exp Köln"
    assert composed(command_of_search(search, place)[-1]).paths.sweep_dir == str(place / search.key)
    searched(search, tmp_path, configure, 0.1, 0.3, 0.2)
    found = tuned(search, [], tmp_path)
    assert found.chosen == ["lr=2e-3", "method.M=2"]
    assert [trial.value for trial in found.trials] == [0.1, 0.3, 0.2, None]
    keep(little, tuned=[found])
    again = read_experiment("us/table1")
    assert [one.row for one in searches(again)] == ["plain"]
    assert [one.row for one in searches(again, again=True)] == ["plain", "ABE"]
    plain, abe = again.trainings()
    assert abe.overrides == (*little.overrides, "method=abe", "lr=2e-3", "method.M=2")
    assert plain.overrides == (*little.overrides, "method=baseline")
    (changed,) = searches(again, ["ABE"], ["seed=1"])  # another setting is another search
    assert changed.key != search.key
    keep(again)
    assert read_experiment("us/table1").tuned == [found]
    assert "lr=2e-3 method.M=2" in markdown(again)
    page = write_page([again], tmp_path / "page").read_text()
    assert "lr=9: failed" in page
    assert "lr=2e-3 method.M=2" in page


def test_searches_of_a_folder_are_recorded(
    little: Experiment, configure: Callable[..., DictConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when another machine carried them out. One that has begun is not."""
    plain, abe = searches(little)
    searched(abe, tmp_path, configure, 0.1, 0.3)
    (tmp_path / plain.key).mkdir()
    actions.record(["us"], out=tmp_path)
    assert capsys.readouterr().out.startswith("Left out: us/table1, plain: no trial of the search was carried out")
    now = read_experiment("us/table1")
    assert now.tuned == [tuned(abe, [], tmp_path)]
    assert now.chosen(now.rows["ABE"]) == ["lr=2e-3", "method.M=2"]
    searched(abe, tmp_path, configure, 0.4, 0.3)
    actions.record(["us"], out=tmp_path)
    assert read_experiment("us/table1") == now  # a row that was trained with it keeps its options


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_two_processes_do_not_share_the_trials_of_a_search(
    little: Experiment,
    configure: Callable[..., DictConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    jobs: int,
) -> None:
    """The second one waits, and takes what the first one found."""
    wanted, out = searches(little, ["ABE"]), tmp_path / "not made yet" / "out"
    started, finish, carried_out = threading.Event(), threading.Event(), []

    def carry_out(*_: object) -> int:
        carried_out.append(threading.current_thread().name)
        started.set()
        assert finish.wait(60)
        searched(wanted[0], out, configure, 0.1, 0.3)
        return 0

    monkeypatch.setattr(actions, "_wait_for", carry_out)
    monkeypatch.setattr(actions, "carry_out", carry_out)
    found: dict[str, Experiment] = {}

    def tune() -> None:
        found[threading.current_thread().name] = actions._tune(little, wanted, [], [], out, jobs)

    both = [threading.Thread(target=tune, name=name) for name in ("first", "second")]
    both[0].start()
    assert started.wait(60)
    both[1].start()
    deadline = time.monotonic() + 60
    said = ""
    while "ABE: another process carries out this search; waiting for it." not in said:
        assert time.monotonic() < deadline
        said += capsys.readouterr().out
        time.sleep(0.02)
    finish.set()
    for one in both:
        one.join(60)
    assert carried_out == ["first"]
    assert [one.tuned[0].chosen for one in found.values()] == [["lr=2e-3", "method.M=2"]] * 2
    assert not list(out.glob(".*"))


def test_a_search_in_another_way_is_another(little: Experiment) -> None:
    assert little.tuning is not None
    (before,) = searches(little, ["plain"])
    (now,) = searches(replace(little, tuning=replace(little.tuning, search={"lr": [0.1, 0.2]})), ["plain"])
    assert now.key != before.key


def test_every_row_has_as_many_trials(little: Experiment) -> None:
    assert little.tuning is not None
    with pytest.raises(UserError, match="us/table1, plain: its values have 3 combinations, and every row is given 2"):
        searches(replace(little, tuning=replace(little.tuning, search={"lr": [1, 2, 3]})))


def test_records_of_rows_that_are_searched_otherwise_by_now_are_none(
    little: Experiment, configure: Callable[..., DictConfig], tmp_path: Path
) -> None:
    (search,) = searches(little, ["ABE"])
    searched(search, tmp_path, configure, 0.1)
    keep(little, tuned=[tuned(search, [], tmp_path)])
    assert read_experiment("us/table1").tuned
    file = little.record.with_suffix(".yaml")
    file.write_text(file.read_text().replace("[1.0e-3, 1.0e-2]", "[1.0e-3, 1.0e-1]").replace("[2, 4]", "[2, 3]"))
    again = read_experiment("us/table1")
    assert not again.tuned
    assert [one.row for one in searches(again)] == ["plain", "ABE"]


def test_no_trial_ended_well(little: Experiment, configure: Callable[..., DictConfig], tmp_path: Path) -> None:
    (search,) = searches(little, ["ABE"])
    for _ in range(2):  # without its folder, and with nothing in it
        with pytest.raises(UserError, match="us/table1, ABE: no trial of the search was carried out: its output says"):
            tuned(search, [], tmp_path)
        (tmp_path / search.key).mkdir(exist_ok=True)
    searched(search, tmp_path, configure)
    with pytest.raises(UserError, match="us/table1, ABE: 1 of 2 trials of the search are done: repeat the command"):
        tuned(search, [], tmp_path)
    (tmp_path / search.key / "lr=8.failed").write_text("exit code 2")
    with pytest.raises(UserError, match="us/table1, ABE: all trials of the search failed"):
        tuned(search, [], tmp_path)


def test_examples_have_the_first_values(little: Experiment) -> None:
    (search,) = searches(little, ["ABE"])
    assert example(search)[-2:] == ["lr=0.001", "method.M=2"]


def test_commands_of_a_dry_run(little: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    actions.run(["us"], dry_run=True)
    printed = capsys.readouterr().out.splitlines()
    assert ["hydra/sweeper=optuna" in line for line in printed] == [True, False, True, False]
    assert [line for line in printed if line.startswith("#")] == [
        f"# us/table1, {row}: then its trainings, with the options that this search finds" for row in ("plain", "ABE")
    ]


def test_rows_without_a_wanted_training_are_not_searched(
    little: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    file = little.record.with_suffix(".yaml")
    content = file.read_text().replace("parts:\n", "parts:\n  more: {columns: {R@1: {metric: test/recall@1}}}\n")
    file.write_text(content.replace("overrides: [method=abe]", "parts: [more], overrides: [method=abe]"))
    actions.run(["us"], parts=["glyphs"], dry_run=True)
    printed = capsys.readouterr().out
    assert "us/table1, plain: then" in printed
    assert "ABE" not in printed


@pytest.mark.slow
@pytest.mark.usefixtures("little")
def test_changes_are_checked_with_the_searches(capsys: pytest.CaptureFixture[str]) -> None:
    """The row itself would be trained with such a change, but not searched."""
    with pytest.raises(UserError, match=r"us/table1, ABE: method\.M is no option"):
        actions.run(["us"], rows=["ABE"], changes=["method=baseline"], dry_run=True)
    assert capsys.readouterr().out == ""


def test_options_of_the_searches_are_checked(little: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    file = little.record.with_suffix(".yaml")
    file.write_text(file.read_text().replace("[protocol=tuning]", "[protocol.evry=3]"))
    with pytest.raises(UserError, match=r"us/table1, plain: protocol\.evry is no option"):
        actions.run(["us"], dry_run=True)
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("little")
def test_a_search_that_cannot_start_has_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def mistaken(search: Search, out: Path) -> Sequence[str]:
        return [sys.executable, "-c", "from dml.errors import stop; stop('this is wrong.')"]

    monkeypatch.setattr("dml.papers.actions.command_of_search", mistaken)
    with pytest.raises(SystemExit) as left:
        actions.run(["us"], out=tmp_path)
    assert left.value.code == 2
    said = capfd.readouterr()
    assert [line for line in said.err.splitlines() if line.startswith("dml: ")] == ["dml: this is wrong."]
    assert "Searches: 2, of 2 trials each." in said.out


def test_nothing_is_missing(
    little: Experiment, configure: Callable[..., DictConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for search in searches(little):
        searched(search, tmp_path, configure, 0.1)
        keep(little, tuned=[tuned(search, [], tmp_path)])
    for training in read_experiment("us/table1").trainings():
        run = RunFolder(folder_of(training, tmp_path))
        run.open(configure("runtime.train_classes=3", "runtime.embedding_dim=8"), [])
        run.write_metrics({"test/recall@1": 0.25})
    actions.record(["us"], out=tmp_path)
    capsys.readouterr()
    actions.run(["us"], missing=True, dry_run=True, out=tmp_path)
    assert capsys.readouterr().out == "All of this is recorded already.\n"


@pytest.mark.usefixtures("little")
def test_a_wrong_part_is_told_before_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    monkeypatch.setattr("dml.papers.actions.searches", lambda *given: begun.append(given) or [])
    with pytest.raises(UserError, match="has no part 'glyph': did you mean glyphs"):
        actions.run(["us"], parts=["glyph"], out=tmp_path)
    assert not begun


@pytest.mark.exhaustive
def test_a_step_of_searches_and_trainings(little: Experiment) -> None:
    assert not check_rows([little], [], processes=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("jobs", [1, 2])
def test_it_is_searched_recorded_and_trained(little: Experiment, tmp_path: Path, jobs: int) -> None:
    actions.run(["us"], rows=["ABE"], out=tmp_path / "out", record=True, jobs=jobs)
    again = read_experiment("us/table1")
    (found,) = again.tuned
    assert sorted(trial.options for trial in found.trials) == [["lr=0.001", "method.M=2"], ["lr=0.001", "method.M=4"]]
    assert found.best == max(trial.value or 0 for trial in found.trials)
    assert all(len(trial.options) == 2 for trial in found.trials)
    assert [one.row for one in again.measured] == ["ABE"]
    assert again.measured[0].key == again.trainings(["ABE"])[0].key

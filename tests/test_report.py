"""Tables over runs, from folders made as a run makes them."""

import csv
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig

from dml.errors import UserError
from dml.report import main
from dml.reporting.summary import _course, _point, _swept, write_summary
from dml.runs.collecting import groups, leaves
from dml.runs.folder import RunFolder

Configure = Callable[..., DictConfig]
MakeRun = Callable[..., None]


@pytest.fixture
def make_run(configure: Configure, tmp_path: Path) -> MakeRun:
    """`make_run("a/0", recall, *overrides)`: a finished run with some figures."""

    def make_run(name: str, recall: float, *overrides: str) -> None:
        config = configure(*overrides, "runtime.train_classes=3", "runtime.embedding_dim=8")
        folder = RunFolder(tmp_path / name)
        folder.open(config, overrides)
        learners = config.method.get("M", 1)
        figures = {f"learners/{i}/recall@1": recall / 2 for i in range(learners)}
        figures |= {"test/recall@1": recall, "learners/mean/recall@1": recall / 2, "learners/std/recall@1": 0.0}
        folder.write_metrics(figures | {"model/params": 1000 * learners, "model/flops": 10**6 * learners})

    return make_run


@pytest.mark.slow
def test_seeds_are_one_row(make_run: MakeRun, tmp_path: Path) -> None:
    for job, (learners, seed, recall) in enumerate([(2, 1, 0.3), (4, 1, 0.5), (2, 2, 0.4), (4, 2, 0.8), (2, 3, 0.35)]):
        make_run(f"sweep/{job}", recall, "method=abe", f"method.M={learners}", f"seed={seed}", "lr=0.1")
    table = groups(leaves([tmp_path / "sweep"]))
    assert [(row.label, len(row.runs)) for row in table] == [("method.M=2", 3), ("method.M=4", 2)]
    for row, recalls in zip(table, ([0.3, 0.4, 0.35], [0.5, 0.8]), strict=True):
        assert row.metrics["test/recall@1"] == pytest.approx(np.mean(recalls))
        assert row.metrics["test/recall@1/std"] == pytest.approx(np.std(recalls, ddof=1))
        assert row.metrics["gain"] == pytest.approx(np.mean(recalls) / 2)
        assert row.cell("test/recall@1") == f"{np.mean(recalls):.4f}±{np.std(recalls, ddof=1):.4f}"
    (alone,) = groups([run for run in leaves([tmp_path / "sweep"]) if run.config.method.M == 2][:1])
    assert alone.cell("learners/mean/recall@1") == "0.1500"
    del alone.runs[0].metrics["learners/1/recall@1"], alone.metrics
    assert alone.cell("learners/mean/recall@1") == ""  # a single learner has no mean
    page = write_summary([tmp_path / "sweep"], tmp_path / "sweep").read_text()
    assert table[0].cell("test/recall@1") in page
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    written = json.loads((tmp_path / "sweep" / "summary.json").read_text())
    assert [row["metrics"] for row in written] == [row.metrics for row in table]


@pytest.mark.slow
def test_the_table_in_every_format_and_a_metric_over_what_was_swept(make_run: MakeRun, tmp_path: Path) -> None:
    for job, (learners, weight, seed) in enumerate(itertools.product((1, 2, 8), (0.5, 1), (0, 1))):
        recall = 0.1 * learners + 0.01 * weight + 0.001 * seed
        options = [f"method.M={learners}", f"method.lambda_div={weight}", f"seed={seed}"]
        make_run(str(job), recall, "method=abe", *options)
    write_summary([tmp_path], tmp_path)
    cells = [("method.M=1 method.lambda_div=0.5", "0.1055±0.0007"), ("method.M=8 method.lambda_div=1", "0.8105±0.0007")]
    markdown, latex = ((tmp_path / f"summary.{kind}").read_text() for kind in ("md", "tex"))
    for name, cell in cells:
        assert re.search(rf"^\| {re.escape(name)} +\| 2 +\| {re.escape(cell)} +\|", markdown, re.MULTILINE)
        assert re.search(rf"{re.escape(name).replace('_', '_')}.*& 2 *& {re.escape(cell)}", latex.replace("\\_", "_"))
    assert "\\toprule" in latex
    with (tmp_path / "summary.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 6
    assert [row["n"] for row in table] == ["2"] * 6
    by_name = {row["configuration"]: row for row in table}
    assert float(by_name[cells[0][0]]["test/recall@1"]) == pytest.approx(0.1055)
    assert float(by_name[cells[0][0]]["test/recall@1/std"]) == pytest.approx(np.std([0.105, 0.106], ddof=1))
    drawn = _swept(groups(leaves([tmp_path])), "test/recall@1", None)
    assert list(drawn) == ["method.M", "method.lambda_div"]
    assert {point.x for point in drawn["method.M"]["method.lambda_div=0.5"]} == {1, 2, 8}
    means = sorted(point.mean for point in drawn["method.M"]["method.lambda_div=1"])
    assert means == pytest.approx([0.1105, 0.2105, 0.8105])
    assert drawn["method.lambda_div"]["method.M=2"][0].std == pytest.approx(0.001 / np.sqrt(2))
    for name in drawn:
        assert (tmp_path / "figures" / f"over_{name}.png").exists()
    assert (tmp_path / "summary.html").read_text().count("data:image/png") == 3
    with pytest.raises(UserError, match=r"did you mean .*learners/mean/recall@1"):
        write_summary([tmp_path], tmp_path, "learners/mean/recal")
    with pytest.raises(UserError, match=r"not swept over numbers of lr: choose from method\.M, method\.lambda_div"):
        write_summary([tmp_path], tmp_path, over="lr")
    write_summary([tmp_path], tmp_path, over="method.M")
    assert {file.stem for file in (tmp_path / "figures").glob("over_*")} == {"over_method.M"}


@pytest.mark.slow
def test_many_columns_have_room_in_80(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for weight, seed in itertools.product((0.5, 1), (0, 1)):
        options = ["method=abe", "method.M=2", f"method.lambda_div={weight}", f"head.dim={int(8 * weight)}"]
        make_run(f"{weight}/{seed}", 0.1 + seed / 9, *options, f"seed={seed}")
    write_summary([tmp_path], tmp_path)
    table = capsys.readouterr().out.split("Report:")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table
    for column in ("Recall@1", "mean learner", "gain", "parameters", "multiply-adds"):
        assert column in table
    assert "2,000" in table


@pytest.mark.slow
def test_what_no_run_has_is_left_out(make_run: MakeRun, tmp_path: Path) -> None:
    """A single learner has no mean, and runs without records have no curve."""
    make_run("a", 0.3, "method=baseline")
    page = write_summary([tmp_path], tmp_path / "summary").read_text()
    assert "mean learner" not in page
    assert "While training" not in page
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1, "test/recall@1": 0.2}\n')
    assert "While training" in write_summary([tmp_path], tmp_path / "summary").read_text()


def test_the_gain_is_that_over_the_mean_learner_and_a_mean_is_of_what_all_runs_have(
    make_run: MakeRun, tmp_path: Path
) -> None:
    for seed, (recall, *of_learners) in enumerate([(0.6, 0.2, 0.5), (0.8, 0.7, 0.5)]):
        make_run(str(seed), recall, "method=abe", "method.M=2", f"seed={seed}")
        folder = tmp_path / str(seed)
        metrics = json.loads((folder / "metrics.json").read_text())
        metrics |= {f"learners/{i}/recall@1": one for i, one in enumerate(of_learners)}
        metrics |= {"learners/mean/recall@1": sum(of_learners) / 2} | ({} if seed else {"test/nmi": 0.5})
        (folder / "metrics.json").write_text(json.dumps(metrics))
        curve = [{"step": 1, "test/recall@1": 0.1}, {"step": 5, "test/recall@1": recall}]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in curve))
    (row,) = groups(leaves([tmp_path]))
    assert row.metrics["gain"] == pytest.approx(((0.6 - 0.35) + (0.8 - 0.6)) / 2)
    assert "test/nmi" not in row.metrics
    assert _course(row) == pytest.approx({1: 0.1, 5: 0.7})


def test_another_metric_over_what_was_swept_has_its_own_deviation(make_run: MakeRun, tmp_path: Path) -> None:
    for job, (rate, seed) in enumerate(itertools.product((0.1, 0.2), (0, 1))):
        make_run(str(job), rate + 0.1 * seed, "method=abe", "method.M=2", f"lr={rate}", f"seed={seed}")
    (points,) = _swept(groups(leaves([tmp_path])), "learners/mean/recall@1", None)["lr"].values()
    assert [(one.mean, one.std) for one in points] == [
        (pytest.approx(rate / 2 + 0.025), pytest.approx(np.std([0, 0.05], ddof=1))) for rate in (0.1, 0.2)
    ]


def test_lines_of_the_picture(make_run: MakeRun, tmp_path: Path) -> None:
    """A line joins what differs in the number of learners alone."""
    for job, (weight, learners) in enumerate([(0, 2), (0, 4), (1, 2), (1, 4)]):
        make_run(str(job), 0.1 * job, "method=abe", f"method.lambda_div={weight}", f"method.M={learners}", "lr=0.1")
    points = [_point(row) for row in groups(leaves([tmp_path]))]
    assert [(p.line, p.learners) for p in points] == [
        ("method.lambda_div=0", 2),
        ("method.lambda_div=0", 4),
        ("method.lambda_div=1", 2),
        ("method.lambda_div=1", 4),
    ]


@pytest.mark.slow
def test_a_collection_is_its_trainings(make_run: MakeRun, tmp_path: Path) -> None:
    options = ["method=baseline", "protocol=random_class_split"]
    make_run("whole", 0.9, *options)
    for split in range(3):
        make_run(f"whole/split_{split}", 0.1 * split, *options, f"protocol.split={split}")
    (row,) = groups(leaves([tmp_path]))
    assert (row.label, len(row.runs)) == ("Baseline", 3)
    assert row.metrics["test/recall@1"] == pytest.approx(0.1)


def test_other_options_are_another_row(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", 0.1, "method=baseline")
    make_run("b", 0.2, "method=baseline", "lr=0.5")
    make_run("c", 0.3, "method=baseline", "trainer.num_workers=7")  # carried out otherwise, but the same
    table = groups(leaves([tmp_path / name for name in "abc"]))
    assert [(row.label, len(row.runs)) for row in table] == [("the rest by default", 2), ("lr=0.5", 1)]


def test_two_spellings_of_a_number_are_one_value(make_run: MakeRun, tmp_path: Path) -> None:
    for learners, rate in itertools.product((2, 4), ("1e-2", "0.1")):
        make_run(f"{rate}/{learners}", 0.5, "method=abe", f"method.M={learners}", f"lr={rate}")
    make_run("0.01/8", 0.5, "method=abe", "method.M=8", "lr=0.01")
    table = groups(leaves([tmp_path]))
    assert {row.options["lr"] for row in table} == {"0.01", "0.1"}
    lines = _swept(table, "test/recall@1", "method.M")["method.M"]
    drawn = {line: [point.x for point in points] for line, points in lines.items()}
    assert drawn == {"lr=0.01": [8, 2, 4], "lr=0.1": [2, 4]}


def test_what_is_no_finished_run_is_left_out(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", 0.1, "method=baseline")
    make_run("unfinished", 0.2, "method=baseline")
    (tmp_path / "unfinished" / "metrics.json").unlink()
    (tmp_path / "a" / "overrides.yaml").unlink()  # not copied along
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.json").write_text("{}")
    assert [run.folder.name for run in leaves([tmp_path, tmp_path / "a"])] == ["a"]


def test_nothing_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no finished run"):
        write_summary([tmp_path], tmp_path)
    with pytest.raises(UserError, match="nowhere is no folder"):
        write_summary([tmp_path, tmp_path / "nowhere"], tmp_path)
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("dml: there is no finished run")


@pytest.mark.slow
def test_runs_are_not_written_to(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        make_run(name, 0.1, "method=baseline")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["report", "a", "b"])
    main()
    assert (tmp_path / "runs" / "summary" / "summary.html").exists()
    monkeypatch.setattr("sys.argv", ["report", "a", "b", "-o", "elsewhere"])
    main()
    assert (tmp_path / "elsewhere" / "summary.json").exists()
    assert [path for path in sorted(tmp_path.rglob("*")) if path.parts[len(tmp_path.parts)] in "ab"] == before


def test_a_damaged_run_is_told_and_another_program_s_folder_is_said(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        make_run(name, 0.1, "method=baseline")
    (tmp_path / "a" / "config.yaml").write_text("site: mine")
    assert [run.folder.name for run in leaves([tmp_path])] == ["b"]
    assert f"Left out: {tmp_path / 'a'}, whose config.yaml is damaged or not that of a run" in capsys.readouterr().err
    (tmp_path / "b" / "overrides.yaml").write_text("{a: b}")
    with pytest.raises(UserError, match=r"overrides\.yaml is damaged.*leave its folder out"):
        leaves([tmp_path])
    (tmp_path / "b" / "overrides.yaml").unlink()
    (tmp_path / "b" / "metrics.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match=r"b/metrics\.json has no test/recall@1"):
        write_summary([tmp_path], tmp_path)

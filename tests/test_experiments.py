"""The papers' tables: that their rows are options, and their figures the papers', in a second transcription."""

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf

from dml.configuration.composition import CONF, composed, folder_option
from dml.errors import UserError
from dml.experiment import arguments, main
from dml.figures.course import recall_over_steps
from dml.figures.summaries import Measured, over
from dml.papers import actions, smoke
from dml.papers.actions import record, run
from dml.papers.catalogue import FOLDER, find, names, read_experiment
from dml.papers.drawing import comparison, drawing
from dml.papers.drawn import Axis, ComparedAxis, Comparison, Curve, Over, OverAxis, Scatter, along_axes
from dml.papers.estimate import seconds_of
from dml.papers.experiment import Experiment
from dml.papers.measured import Compared, Measurement
from dml.papers.page import differences, markdown, section, settings, write_page
from dml.papers.possible import lacking
from dml.papers.records import keep, measure, record_finished, sizes_of
from dml.papers.smoke import check_rows, in_miniature
from dml.papers.trainings import commands, finished, folder_of
from dml.runs.folder import RunFolder
from dml.runs.provenance import starts

ALL = names()


def test_every_table_and_figure_has_a_file() -> None:
    expected = [f"abe/table{i}" for i in range(1, 9)] + [f"abe/figure{i}" for i in range(4, 8)]
    expected += [f"dces/table{i}" for i in range(1, 9)] + [f"dces/figure{i}" for i in (1, 3, 4, 5, 6, 8, 9, 10)]
    expected += [f"diablo/table{i}" for i in range(1, 5)]
    expected += [f"deml/table{i}" for i in range(1, 5)] + [f"deml/figure{i}" for i in (4, 5)]
    expected += [f"gsp/table{i}" for i in range(1, 8)] + [f"gsp/figure{i}" for i in (2, 3, 5, 6, 7, 8, 9, 10)]
    assert set(expected) <= set(ALL)


def composes(overrides: tuple[str, ...]) -> None:
    config = composed("runtime.embedding_dim=8", "runtime.train_classes=4", *overrides)
    OmegaConf.to_container(config, resolve=True)


@pytest.mark.parametrize("name", ALL)
def test_rows_are_options(name: str) -> None:
    """One row of the file; all of them, trained, is `make experiments-smoke`."""
    experiment = read_experiment(name)
    assert experiment.title
    assert experiment.source
    for training in [one for one in experiment.trainings(seeds=[0]) if not one.script][-1:]:
        composes(training.overrides)
    for row in experiment.rows.values():
        for command in [row.command] if row.command else []:
            assert (FOLDER.parent / command[0]).exists(), command
    shown = {column.metric for part in experiment.parts.values() for column in part.columns.values()}
    if isinstance(experiment.figure, Curve):
        assert set(experiment.figure.steps.values()) <= shown
    if isinstance(experiment.figure, Over | Scatter):
        assert along_axes(experiment.figure) <= shown
    if experiment.record.exists():  # nothing recorded of a row that has other options by now
        kept = json.loads(experiment.record.read_text())
        assert len(kept["measured"]) == len(experiment.measured)
        assert len(kept["compared"]) == len(experiment.compared)
    for one in experiment.measured:
        assert one.row in experiment.rows
        assert one.part in experiment.parts
        assert one.command.startswith("python ")
        assert one.metrics
        assert one.commit
        assert one.hardware


ONE_WORD = {
    **{
        f"abe_{of}": f"abe/{table}: ABE-8^512: {part}"
        for of, table, part in (
            ("cars", "table1", "Cars196"),
            ("cub", "table4", "CUB"),
            ("sop", "table6", "SOP"),
            ("inshop", "table7", "InShop"),
        )
    },
    **{
        f"dces_{of}": f"dces/{row}"
        for of, row in (
            ("sop", "table1: Ours (Margin): SOP"),
            ("cars", "table2: Ours (Margin): Cars196"),
            ("cub", "table3: Ours (Margin): CUB"),
            ("inshop", "table4: Ours (margin): In-Shop"),
            ("vehicleid", "table5: Ours (margin): Small"),
            ("market1501", "table8: Ours (Margin): Market-1501"),
        )
    },
    **{
        f"diablo_{of}": f"diablo/{row}"
        for of, row in (
            ("cub", "table1: Binomial + DIABLO N=8: CUB"),
            ("cars", "table1: Binomial + DIABLO N=8: Cars196"),
            ("sop", "table2: Contrastive + DIABLO N=8: SOP"),
            ("inshop", "table2: Contrastive + DIABLO N=8: InShop"),
            ("cub_baseline", "table1: Binomial (Ours): CUB"),
            ("cars_baseline", "table1: Binomial (Ours): Cars196"),
            ("sop_baseline", "table2: Contrastive (Ours): SOP"),
            ("inshop_baseline", "table2: Contrastive (Ours): InShop"),
        )
    },
    **{
        f"deml_{of}": f"deml/table3: DeML(I={i},J={j}): {part}"
        for of, i, j, part in (
            ("cub", 3, 3, "CUB"),
            ("cars", 3, 3, "CARS"),
            ("sop", 2, 4, "SOP"),
            ("inshop", 3, 3, "In-Shop"),
        )
    },
    **{
        f"deml_{of}_baseline": f"deml/table3: baseline (U512): {part}"
        for of, part in (("cub", "CUB"), ("cars", "CARS"), ("sop", "SOP"), ("inshop", "In-Shop"))
    },
}


@pytest.mark.parametrize("name", ONE_WORD)
def test_one_word_is_the_row_of_the_paper(name: str) -> None:
    """`experiment=abe_cars` is the training of the table's row, to the last option."""
    table, row, part = ONE_WORD[name].split(": ")
    (training,) = [one for one in read_experiment(table).trainings([row], seeds=[0]) if one.part == part]
    one, other = (OmegaConf.to_container(composed(*given)) for given in ([f"experiment={name}"], training.overrides))
    assert one == other


def test_every_experiment_of_a_paper_is_a_row() -> None:
    of_papers = {path.stem for path in (CONF / "experiment").glob("*_*.yaml")}
    of_papers = {
        name for name in of_papers if not name.endswith("_any") and not name.startswith(("gsp_", "comparison_"))
    }
    assert of_papers == ONE_WORD.keys()


# What the papers print of their trainings, read once more without conf at hand: option -> value.
PRINTED: dict[str, dict[str, Any]] = {
    "abe_cars": {  # ABE, sections 4, 5 and 6
        "image_size": 224,
        "transform.train.resize.sides": [256, 224],
        "transform.train.resize._target_": "dml.data.transforms.pad_square",
        "transform.test.crop._target_": "torchvision.transforms.v2.CenterCrop",
        "sampler._target_": "dml.data.samplers.Pairs",
        "sampler.batch_size": 64,
        "head.dim": 512,
        "method.M": 8,
        "method.lambda_div": 1,
        "method.balance": False,
        "method.margin_div": 1,
        "loss.loss.margin": 1,
        "loss.loss.pairs": "explicit",
        "protocol.select": "best_test",
    },
    **{  # DCES, sections 4.2 and 4.4
        f"dces_{data}": {
            "image_size": 224,
            "transform.train.resize.sides": [256, 224],
            "optimizer._target_": "torch.optim.Adam",
            "sampler.batch_size": batch,
            "sampler.m": 4,
            "head.dim": 128,
            "method.K": learners,
            "method.T": 2,
            "loss.loss.beta": 1.2,
        }
        for data, batch, learners in (
            ("cub", 128, 4),
            ("cars", 128, 4),
            ("sop", 80, 8),
            ("inshop", 80, 8),
            ("vehicleid", 128, 8),
            ("market1501", 128, 8),
        )
    },
    "diablo_cub": {  # DIABLO, section 3.5 and Table 1
        "image_size": 256,
        "transform.train.resize.scale": [0.8, 1.8],
        "transform.test.resize.size": [256, 256],
        "optimizer._target_": "torch.optim.Adam",
        "optimizer.lr": 1e-5,
        "optimizer.weight_decay": 0,
        "head.dim": 512,
        "method.N": 8,
        "loss.loss.beta": 0.5,
        "loss.loss.gamma": 25,
    },
    **{  # DeML, section 4 and Table 3
        f"deml_{data}": {
            "optimizer._target_": "torch.optim.Adam",
            "optimizer.lr": 1e-5,
            "optimizer.weight_decay": 2e-4,
            "trainer.max_steps": steps,
            "head.dim": 512,
            "method.I": scales,
            "method.J": learners,
            "method.activation_decay": 0.014,
            "method.unit_rows": 0.25,
            "method.head_lr_factor": 10,
            "loss.loss.alpha": 2,
            "loss.loss.beta": 0.5,
            "loss.loss.gamma": 35,
        }
        for data, steps, scales, learners in (
            ("cub", 15_000, 3, 3),
            ("cars", 25_000, 3, 3),
            ("sop", 100_000, 2, 4),
            ("inshop", 100_000, 3, 3),
        )
    },
    "deml_sop_baseline": {"trainer.max_steps": 100_000, "method.head_lr_factor": 10, "optimizer.weight_decay": 2e-4},
    "gsp_collage": {  # GSP, section 2.2
        "head.m": 128,
        "head.mu": 0.2,
        "head.eps": 10,
        "method.lambda_zs": 0.5,
        "sampler.batch_size": 64,
        "sampler.m": 4,
        "optimizer.lr": 1e-3,
        "scheduler.factor": 0.5,
    },
    **{  # GSP, sections 1.6.1 to 1.6.7; the number of prototypes is 64 for all by itself
        f"gsp_{data}": {
            "image_size": 227,
            "transform.train.resize.sides": [256, 227],
            "sampler.batch_size": 32,
            "sampler.m": 4,
            "head.dim": 128,
            "head.m": 64,
            "head.mu": 0.3,
            "head.eps": 5,
            "method.lambda_zs": 0.1,
            "method.ridge": 0.05,
            "protocol.folds": 4,
            "protocol.every": steps,
        }
        for data, steps in (("cub", 100), ("cars", 100), ("inshop", 1000), ("sop", 1000))
    },
}


@pytest.mark.parametrize("name", PRINTED)
def test_an_experiment_trains_as_its_paper_prints(name: str) -> None:
    config = composed(f"experiment={name}")
    found = {option: OmegaConf.select(config, option) for option in PRINTED[name]}
    found = {option: OmegaConf.to_object(one) if OmegaConf.is_config(one) else one for option, one in found.items()}
    assert found == PRINTED[name]


TRANSCRIBED = sorted((Path(__file__).parent / "transcribed").glob("*.json"))
READ_ELSEWHERE = {("dces/figure1", "K = 1"): "Table 7"}  # figures whose place in the paper is not the experiment's


def test_spots() -> None:
    def of(name: str, row: str, part: str) -> dict[str, float]:
        return read_experiment(name).rows[row].published[part]

    assert of("abe/table1", "ABE-8^512", "Cars196")["R@1"] == 85.2
    assert of("dces/table1", "Ours (Margin)", "SOP")["R@1"] == 75.9
    assert of("diablo/table1", "Binomial + DIABLO N=16", "CUB")["R@1"] == 63.9
    assert of("deml/table3", "DeML(I=3,J=3)", "CUB")["R@1"] == 65.4
    assert of("gsp/table6", "GSP", "contrastive")["MAP@R"] == 22.68
    assert of("gsp/table6", "GSP", "Proxy-NCA")["MAP@R"] == 27.61


@pytest.mark.parametrize("paper", ["abe", "dces", "deml", "diablo", "gsp"])
def test_published_figures_are_those_of_a_second_transcription(paper: str) -> None:
    """Read from the papers once more without the experiments at hand: every figure of every row."""
    (path,) = [path for path in TRANSCRIBED if path.stem == paper]
    second: dict[str, dict[str, Any]] = json.loads(path.read_text())
    for name in ALL:
        if name.split("/")[0] == paper:
            rows = {row.name: row.published for row in read_experiment(name).rows.values() if row.published}
            rows = {row: parts for row, parts in rows.items() if (name, row) not in READ_ELSEWHERE}
            assert rows == second.pop(name, {}), name
    assert not second


def test_sizes_of_abe_are_the_printed_ones() -> None:
    """Table 1's 8 learners, to the printed digit; recorded for all rows beside the table."""
    experiment = read_experiment("abe/table1")
    columns = experiment.parts["Cars196"].columns
    recorded = {one.row: one.metrics for one in experiment.measured if one.seed is None}
    assert recorded.keys() == {row.name for row in experiment.rows.values() if row.overrides is not None}
    for name, metrics in recorded.items():
        published = experiment.rows[name].published["Cars196"]
        for title in ("params", "flops"):
            assert round(metrics[columns[title].metric] * columns[title].scale, 2) == published[title], (name, title)
    assert read_experiment("abe/table8").measured


def test_the_readme_has_the_recorded_comparison() -> None:
    tables = markdown(read_experiment("comparison/cars196")).split("\n\n")
    readme = (FOLDER.parent / "README.md").read_text()
    for title in ("2,000 steps, falling rate:", "MAP@R less baseline:"):
        table = tables[tables.index(title) + 1].rstrip("\n")
        assert table.startswith("|")
        assert table in readme


@pytest.fixture
def little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """Two rows, one quoted, in a folder of their own."""
    (tmp_path / "experiments" / "us").mkdir(parents=True)
    (tmp_path / "experiments" / "us" / "table1.yaml").write_text(
        """
title: Little
source: nobody
overrides: [dataset=glyphs, dataset.classes=24, dataset.images_per_class=6, backbone=small, image_size=32]
seeds: [0, 1]
parts:
  glyphs: {columns: {R@1: {metric: test/recall@1, scale: 100}, params: {metric: model/params, scale: 1.0e-6}}}
rows:
  - {name: mine, overrides: [method=baseline], published: {glyphs: {R@1: 50.0}}}
  - {name: theirs, published: {glyphs: {R@1: 60.0}}}
"""
    )
    monkeypatch.setattr("dml.papers.catalogue.FOLDER", tmp_path / "experiments")
    return read_experiment("us/table1")


def test_what_is_measured_is_recorded_and_shown(
    little: Experiment, configure: Callable[..., DictConfig], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    trainings = little.trainings(changes=["trainer.max_steps=7"])
    (folder,) = {training.key for training in trainings}
    ((command, _),) = commands(trainings, out)
    assert command[-2:] == ["seed=choice(0,1)", f"paths.sweep_dir={out / folder}"]
    for training, recall in zip(trainings, (0.4, 0.6), strict=True):
        run = RunFolder(out / folder / f"seed={training.seed}")
        run.open(configure("runtime.train_classes=3", "runtime.embedding_dim=8"), [])
        run.write_metrics({"test/recall@1": recall, "model/params": 2e6, "run/seconds": 1.5})
        assert finished(training, out) == run.path
    assert keep(little, measure(little, ["trainer.max_steps=7"], out)).exists()
    again = read_experiment("us/table1")
    assert [(one.seed, one.metrics["test/recall@1"]) for one in again.measured] == [(0, 0.4), (1, 0.6)]
    keep(little, measure(again, ["trainer.max_steps=7"], out))  # though little knows of none
    assert len(read_experiment("us/table1").measured) == 2  # in place of themselves
    paper, shorter = settings(again)
    assert (paper.changes, shorter.changes) == ([], ["trainer.max_steps=7"])
    cell = shorter.rows["mine"]["glyphs"]["R@1"]
    assert (cell.published, cell.mean, cell.n) == (50.0, pytest.approx(50.0), 2)
    assert cell.std == pytest.approx(14.142, abs=1e-3)
    assert cell.difference == pytest.approx(0.0)
    assert paper.rows["mine"]["glyphs"]["R@1"].mean is None
    page = write_page([again], out).read_text()
    for words in (
        "not measured",
        "quoted",
        "n=2",
        "measured with trainer.max_steps=7",
        "60.0",
        "50.0&nbsp;±&nbsp;14.1",
    ):
        assert words in page
    assert 'src="/' not in page


@pytest.mark.parametrize(
    ("folder", "quoted"),
    [
        ("runs/a-1_2.b", False),
        ("/data/null", False),
        ("2026", True),
        ("null", True),
        ("exp Köln/a", True),
        ("it's/a", True),
        ("a,b/c", True),
        ("(a)/seed=0", True),
        ("a/b\\", True),
        ("a\\'b/c", True),
        ("/t/${seed}", True),
        ("it's ${a.b}", True),
    ],
)
def test_hydra_reads_a_folder_as_it_is_called(folder: str, quoted: bool) -> None:
    option = folder_option("sweep_dir", Path(folder))
    (parsed,) = OverridesParser.create().parse_overrides([option])
    assert not parsed.is_sweep_override()
    assert composed(option).paths.sweep_dir == folder
    assert ("'" in option) == quoted


def test_commands_for_a_folder_of_any_name(little: Experiment, tmp_path: Path) -> None:
    out = tmp_path / "exp Köln, it's 1"
    ((command, _),) = commands(little.trainings(seeds=[0]), out)
    assert composed(command[-1]).paths.sweep_dir == str(out / little.trainings()[0].key)
    assert in_miniature(("dataset=glyphs",), out).config.paths.data_dir == str(out / "data")


def test_records_of_rows_that_changed_since_are_no_measurements(
    little: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = sizes_of(little)
    keep(little, found)
    assert read_experiment("us/table1").measured == found
    path = tmp_path / "experiments" / "us" / "table1.yaml"
    path.write_text(path.read_text().replace("method=baseline", "method=baseline, head.dim=8"))
    changed = read_experiment("us/table1")
    assert changed.measured == []
    (now,) = sizes_of(changed)
    assert now.metrics["model/params"] < found[0].metrics["model/params"]
    capsys.readouterr()
    keep(changed, [now])
    assert "measured: 1 of rows that are gone or have other options now" in capsys.readouterr().out
    keep(changed, [now])
    assert capsys.readouterr().out == ""


def test_what_was_trained_before_a_row_changed_replaces_nothing(
    little: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a process does that read the experiment before it was edited."""
    old = sizes_of(little)
    path = tmp_path / "experiments" / "us" / "table1.yaml"
    path.write_text(path.read_text().replace("method=baseline", "method=baseline, head.dim=8"))
    new = sizes_of(read_experiment("us/table1"))
    keep(little, new)
    capsys.readouterr()
    keep(little, old)
    assert capsys.readouterr().out.startswith("Not recorded: 1 measurements of rows of us/table1 that are gone or have")
    assert read_experiment("us/table1").measured == new


@pytest.mark.parametrize(
    ("words", "instead", "said"),
    [
        ("seeds: [0, 1]", "seeds: []", "seeds is empty"),
        ("R@1: 50.0", "R@1: .nan", r"rows\[0\]\.published\.glyphs\.R@1 has another form"),
        ("R@1: 50.0", "R@1: 50.0, R@1: 51.0", "duplicate key"),
        ("overrides: [method=baseline]", "overrides: [], search: {+lr: [1]}", r"search\.\+lr.* has another form"),
        ("title: Little", "title: Little ${of", "cannot be read as an experiment"),
        ("seeds: [0, 1]", "tuning: {trials: 0, overrides: [], search: {lr: [1]}}", r"tuning\.trials has another form"),
        ("seeds: [0, 1]", "tuning: {trials: 1, overrides: [], search: {lr: []}}", r"tuning\.search\.lr is empty"),
    ],
)
def test_a_file_that_says_two_things_or_nothing(
    little: Experiment, tmp_path: Path, words: str, instead: str, said: str
) -> None:
    path = tmp_path / "experiments" / "us" / "table1.yaml"
    assert words in path.read_text()
    path.write_text(path.read_text().replace(words, instead))
    with pytest.raises(UserError, match=said):
        read_experiment("us/table1")


def test_starts_of_a_script_that_left_nothing_do_not_count(tmp_path: Path) -> None:
    for name in ("first", "second"):
        actions._note_start(["python", f"{name}.py", "--out", "x"], tmp_path)
    assert [start["command"] for start in starts(tmp_path)] == ["python second.py"]
    (tmp_path / "run").mkdir()  # with which the script goes on
    actions._note_start(["python", "third.py", "--out", "x"], tmp_path)
    assert [start["command"] for start in starts(tmp_path)] == ["python second.py", "python third.py"]


def _die(code: int) -> None:
    os._exit(code)


@pytest.mark.slow
def test_a_killed_process_of_the_check_is_told() -> None:
    with pytest.raises(UserError, match="a process of the check was killed"), smoke._workers(1) as pool:
        list(smoke._each(pool, _die, [1]))


@pytest.mark.slow
def test_a_script_ends_with_the_command_that_started_it(
    little: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = tmp_path / "pid"
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\nfrom dml.bench.rows import make_folder\n"
        f"make_folder(Path(sys.argv[-1]))\nPath({str(noted)!r}).write_text(str(os.getpid()))\ntime.sleep(120)\n"
    )
    path = tmp_path / "experiments" / "us" / "table1.yaml"
    path.write_text(path.read_text() + "  - {name: waits, command: [waits.py]}\n")
    of_test = f"import dml.papers.catalogue as c, pathlib; c.FOLDER = pathlib.Path({str(path.parents[1])!r})"
    told = ["run", "us/table1", "--rows", "waits", "--out", str(tmp_path / "out")]
    code = f"{of_test}\nimport sys; sys.argv[1:] = {told}\n"
    code += "import dml.papers.actions as a, dml.papers.trainings as t; t.FOLDER = a.FOLDER = c.FOLDER\n"
    command = subprocess.Popen([sys.executable, "-c", f"{code}from dml.experiment import main; main()"])
    wait_for(noted.is_file)
    command.terminate()
    command.wait(60)
    wait_for(lambda: not psutil.pid_exists(int(noted.read_text())))


def wait_for(true: Callable[[], bool], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_differences_from_a_row_that_is_no_base_any_more_are_not_shown(little: Experiment, tmp_path: Path) -> None:
    path = tmp_path / "experiments" / "us" / "table1.yaml"
    rows = "".join(
        f"  - {{name: {name}, overrides: [method=baseline, lr={lr}]}}\n" for name, lr in (("a", 1), ("b", 2))
    )
    path.write_text(f"{path.read_text()}{rows}compared_with: mine\n")
    experiment = read_experiment("us/table1")
    of = [
        Measurement(one.row, one.part, one.key, 0, [], {"test/recall@1": 0.5}, "python", "c", "d", "h")
        for one in experiment.trainings(seeds=[0])
    ]
    difference = Compared("a", "glyphs", [], "map@r", "mine", 0.1, 0.0, 0.2, 0.5, [1, 1])
    keep(experiment, of, [difference])
    assert read_experiment("us/table1").compared == [difference]
    for change in (("compared_with: mine", "compared_with: b"), ("[method=baseline]", "[method=baseline, lr=3]")):
        said = path.read_text()
        path.write_text(said.replace(*change))
        assert read_experiment("us/table1").compared == []
        path.write_text(said)


def test_a_part_has_seeds_of_its_own(little: Experiment) -> None:
    """Scripts have them, too."""
    other = replace(little.parts["glyphs"], seeds=[5, 6])
    script = replace(little.rows["theirs"], name="script", command=["some.py", "{seed}"])
    rows = {row.name: replace(row, parts=["glyphs", "other"]) for row in (*little.rows.values(), script)}
    experiment = replace(little, parts=little.parts | {"other": other}, rows=rows)
    for name in ("mine", "script"):
        found = experiment.trainings([name])
        seeds = [(one.part, one.seed) for one in found]
        assert seeds == [("glyphs", 0), ("glyphs", 1), ("other", 5), ("other", 6)]
        assert {one.script for one in found} == {name == "script"}
    assert {one.seed for one in experiment.trainings(seeds=[3])} == {3}


def test_parts_are_chosen_by_name() -> None:
    experiment = read_experiment("comparison/cars196")
    chosen = experiment.trainings(["baseline", "GSP"], parts=["MLRC"])
    assert [(one.row, one.part, one.seed) for one in chosen] == [("baseline", "MLRC", 0), ("GSP", "MLRC", 0)]


def test_missing_leaves_out_what_is_recorded(little: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = little.trainings()
    keep(little, [Measurement("mine", "glyphs", first.key, 0, [], {"test/recall@1": 0.5}, "python", "c", "d", "h")])
    run(["us/table1"], dry_run=True, missing=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert "'seed=choice(1)'" in line
    keep(little, [Measurement("mine", "glyphs", second.key, 1, [], {"test/recall@1": 0.5}, "python", "c", "d", "h")])
    run(["us/table1"], missing=True)
    assert capsys.readouterr().out == "All of this is recorded already.\n"


def test_what_cannot_be_trained_here_is_told(
    little: Experiment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="nothing of this can be trained here"):
        run(["us/table1"], changes=["trainer.accelerator=gpu"])
    said = capsys.readouterr().err
    assert said.startswith("Cannot be trained (us/table1, mine, glyphs): trainer.accelerator=gpu needs a GPU")
    assert not lacking(little.trainings(changes=["trainer.accelerator=gpu"]), elsewhere=True)
    first = little.trainings()[0]
    (sentence,) = lacking([replace(first, overrides=("dataset=cars196", "paths.data_dir=nowhere"))])
    assert "nowhere" in sentence


def test_versions_are_added_to_an_older_record(little: Experiment) -> None:
    key = little.trainings()[0].key

    def recorded(metrics: dict[str, float], versions: str, commit: str) -> tuple[str, str]:
        told = ("python", commit, "2026-01-01", "a machine", versions)
        content = keep(little, [Measurement("mine", "glyphs", key, 0, [], metrics, *told)]).read_text()
        (one,) = json.loads(content)["measured"]
        return one["commit"], one["versions"]

    values = {"test/recall@1": 0.5}
    assert recorded(values, "", "first") == ("first", "")
    assert recorded(values, "torch 2.8", "second") == ("second", "torch 2.8")
    assert recorded(values, "torch 2.9", "third") == ("second", "torch 2.8")  # the same figures: measured before
    assert recorded({"test/recall@1": 0.6}, "torch 2.9", "fourth") == ("fourth", "torch 2.9")


def test_sizes_are_no_repetition(little: Experiment) -> None:
    (size,) = sizes_of(little)
    trained = [replace(size, seed=seed) for seed in (0, 1)]
    (paper,) = settings(replace(little, measured=[size, *trained]))
    assert paper.rows["mine"]["glyphs"]["params"].n == 2
    (alone,) = settings(replace(little, measured=[size]))
    assert alone.rows["mine"]["glyphs"]["params"].mean == pytest.approx(size.metrics["model/params"] / 1e6)


def test_differences_are_drawn_of_the_experiments_own_setting(little: Experiment) -> None:
    def made(row: str, changes: list[str], value: float) -> Measurement:
        return Measurement(row, "glyphs", "", 0, changes, {"test/map@r": value}, "python", "c", "d", "h")

    def difference(changes: list[str], d: float) -> Compared:
        return Compared("mine", "glyphs", changes, "map@r", "theirs", d, d - 0.1, d + 0.1, 0.5, [1, 1])

    figure = Comparison(ComparedAxis("test/map@r", "MAP@R", "map@r"))
    own = replace(little, figure=figure, compared_with="theirs")
    assert comparison(own) is None
    assert comparison(replace(own, measured=[made("mine", ["lr=1"], 0.5)])) is None
    drawn = comparison(
        replace(
            own,
            measured=[made("mine", [], 0.5), made("theirs", [], 0.25)],
            compared=[difference([], 0.25), difference(["lr=1"], -0.9)],
        )
    )
    assert drawn is not None
    above, below = drawn.axes
    assert [line.get_xdata()[0] for line in above.lines[::2]] == [50, 25]
    assert below.get_xlabel().startswith("MAP@R less theirs, points")
    (bar,) = below.containers
    assert bar.lines[0].get_xdata() == [25]  # type: ignore[attr-defined]


def test_differences_of_several_parts_stand_beside_one_another(little: Experiment, tmp_path: Path) -> None:
    def difference(row: str, part: str, changes: list[str], d: float) -> Compared:
        return Compared(row, part, changes, "map@r", "theirs", d, d - 0.1, d + 0.1, 0.5, [1, 1])

    mine = little.rows["mine"]
    own = replace(
        little,
        compared_with="theirs",
        rows={name: replace(mine, name=name) for name in ("first", "mine", "once")} | {"theirs": little.rows["theirs"]},
        parts={"glyphs": little.parts["glyphs"], "birds": little.parts["glyphs"]},
        compared=[
            difference("mine", "glyphs", [], 0.25),
            difference("once", "glyphs", [], 0.5),
            difference("mine", "birds", ["lr=1"], -0.5),
            difference("first", "birds", ["lr=1"], 0.125),
            difference("first", "glyphs", [], 0.0),
        ],
    )
    (found,) = differences(own)
    assert (found.title, found.settings) == ("MAP@R", ["glyphs", "birds lr=1"])
    estimates = {row: [one and one.estimate for one in cells] for row, cells in found.rows.items()}
    assert estimates == {"first": [0.0, 0.125], "mine": [0.25, -0.5], "once": [0.5, None]}
    table = markdown(own).partition("MAP@R less theirs:\n\n")[2].partition("\n\n")[0]
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == ["first", "mine"]  # each has two parts
    assert "| +0.00 (-10.00 to +10.00)  | +12.50 (+2.50 to +22.50)  |" in table
    page = section(own, tmp_path)
    assert "+50.00 (+40.00 to +60.00)" in page
    assert "MAP@R less theirs" in page


def test_a_curve_is_drawn_from_the_record(little: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Mapping[str, Mapping[int, float]]] = []

    def kept(given: Mapping[str, Mapping[int, float]]) -> Figure:
        lines.append(given)
        return recall_over_steps(given)

    monkeypatch.setattr("dml.figures.course.recall_over_steps", kept)

    def made(seed: int, **values: float) -> Measurement:
        return Measurement("mine", "glyphs", "", seed, [], values, "python", "c", "d", "h")

    own = replace(little, figure=Curve({0: "at_0", 500: "at_500"}))
    assert drawing(own, tmp_path) == []
    ((caption, picture),) = drawing(
        replace(own, measured=[made(0, at_0=0.1, at_500=0.2), made(1, at_0=0.3, at_500=0.5)]), tmp_path
    )
    assert caption == "glyphs"
    assert picture.startswith("data:image/png")
    assert lines == [{"mine": {0: pytest.approx(0.2), 500: pytest.approx(0.35)}}]


def test_sizes_are_recorded_without_training(little: Experiment) -> None:
    (one,) = sizes_of(little)
    assert one.metrics["model/params"] > 1000
    assert one.command.startswith("python -m dml.describe dataset=glyphs")
    content = json.loads(keep(little, [one]).read_text())
    assert Measurement(**content["measured"][0]) == one


@pytest.mark.exhaustive  # of every row: make experiments-smoke
def test_a_step_of_a_row(little: Experiment) -> None:
    assert check_rows([little], [], processes=1) == {}


@pytest.mark.exhaustive
def test_what_is_wrong_with_a_row_is_told_of_each(little: Experiment, tmp_path: Path) -> None:
    """Also of rows that are one training in miniature."""
    file = tmp_path / "experiments" / "us" / "table1.yaml"
    file.write_text(
        file.read_text().replace("scale: 1.0e-6}", "scale: 1.0e-6}, x: {metric: test/nothing}")
        + """  - {name: longer, overrides: [method=baseline, trainer.max_steps=9]}
  - {name: odd, overrides: [method=baseline, method.odd=1], published: {glyphs: {R@1: 50.0}}}
"""
    )
    said = check_rows([read_experiment(little.name)], [], processes=1)
    assert set(said) == {"us/table1: longer, glyphs", "us/table1: odd, glyphs"}
    assert said["us/table1: longer, glyphs"] == "lacks test/nothing"
    assert "method.odd" in said["us/table1: odd, glyphs"]


def test_rows_are_alike_in_miniature_where_length_or_backbone_differ(tmp_path: Path) -> None:
    first, longer, other = (
        OmegaConf.to_yaml(in_miniature(("dataset=glyphs", "method=abe", *options), tmp_path).config)
        for options in ((), ("trainer.max_steps=9", "backbone=resnet50"), ("method.M=2",))
    )
    assert first == longer != other


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["abe/table1"], "invalid choice: 'abe/table1' (choose from "),
        (["--list"], "the following arguments are required: COMMAND"),
        (["run"], "the following arguments are required: NAME"),
        (["run", "abe/table11"], "did you mean abe/table1"),
        (["list", "qqqq/x"], "there is no experiment 'qqqq/x' (python -m dml.experiment list shows all)."),
        (["run", "abe/table1", "--rows", "ABE-8"], "has no row 'ABE-8': did you mean ABE-8^512"),
        (["run", "abe", "--rows", "ABE-8^512"], "--rows is for one experiment"),
        (["run", "abe/table4", "--parts", "CUBS"], "has no part 'CUBS': did you mean CUB"),
        (["run", "abe", "--parts", "CUB"], "--parts is for one experiment"),
        (
            ["run", "comparison/cars196", "--rows", "pytorch-metric-learning, falling rate", "--parts", "MLRC"],
            "have no training in",
        ),
        (["smoke", "--rows", "ABE-8^512"], "--rows is for one experiment"),
        (["run", "abe/table2", "--set", "seed=3"], "--set seed=3 is not possible: use --seeds instead"),
        (["record", "abe/table2", "--set", "paths.data_dir=x"], "=x is not possible: use --out, or DML_DATA and"),
        (["run", "abe/table2", "--set", "hydra.sweep.dir=x"], "=x is not possible: use --launcher, --jobs and --out"),
        (["run", "abe/table2", "--set", "hydra/launcher=joblib"], "is not possible: use --launcher, --jobs and --out"),
        (["run", "comparison/cars196", "--set", "lr=0.1"], "lr is searched for (comparison/cars196, baseline)"),
        (
            ["record", "comparison/cars196", "--set", "method.K=3"],
            "method.K is searched for (comparison/cars196, D",
        ),
        (
            [
                *("run", "comparison/cars196", "--set", "report=false"),
                *("--rows", "DCES", "pytorch-metric-learning, falling rate"),
            ],
            "the row 'pytorch-metric-learning, falling rate' is a script",
        ),
        (["run", "abe/table2", "--dry-run", "--set", "lr=abc"], "abe/table2, ABE-8^512: lr=abc has to be a number."),
        (["run", "abe/table2", "--set", "method.m=3"], "abe/table2, ABE-8^512: method.m is no option: choose"),
        (["run", "abe/table2", "--dry-run", "--set", "foo"], "--set foo is not possible: write OPTION=VALUE."),
        (["run", "abe/table2", "--out", "/dev/null", "--dry-run"], "--out /dev/null is not possible, as /dev/null is"),
        (["record", "abe/table2", "--out", "/dev/null/x"], "--out /dev/null/x is not possible, as /dev/null is no"),
        (["report", "abe/table2", "--out", "/dev/null/x"], "--out /dev/null/x is not possible, as /dev/null is"),
        (["run", "abe/table2", "--seeds", "-1", "--dry-run"], "--seeds=-1 has to be"),
        (["run", "abe/table2", "--dry-run", "--record"], "--record: not allowed with argument --dry-run"),
        (["record", "abe/table2", "--sizes", "--set", "lr=1"], "leave out --set"),
        (["run", "abe/table2", "--set", "method=ABE"], "method=ABE is unknown: did you mean abe?"),
        (["run", "gsp/figure9", "--set", "trainer.max_steps=1", "--dry-run"], "these rows are scripts, which take no"),
        (["run", "gsp/table5", "--dry-run"], "nothing of gsp/table5 is trained here: all its rows are quoted"),
        (["run", "abe/table2", "--out", "OUT"], "nothing of this can be trained here"),
        (["table", "abe/figure5"], "nothing was measured yet for abe/figure5"),
        (["table", "comparison", "--against", "GSP"], "--against names a row of one experiment: name that one alone"),
        (["table", "losses/default", "--against", "margin"], "of no part is it recorded for this row and another"),
    ],
)
def test_mistakes(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("DML_DATA", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["dml.experiment", *(o.replace("OUT", str(tmp_path)) for o in options)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("dml: ") == 1
    assert "usage" not in told


def test_a_file_that_says_nonsense(little: Experiment, tmp_path: Path) -> None:
    path = tmp_path / "experiments" / "us" / "table1.yaml"
    path.write_text(path.read_text().replace("published: {glyphs: {R@1: 60.0}}", "published: {glyphs: {R@2: 60.0}}"))
    with pytest.raises(UserError, match=r"the row 'theirs' has an unknown column 'R@2'"):
        find(["us"])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("{name: theirs", "{nam: theirs", "rows[1].name is missing"),
        ("{name: theirs,", "{name: theirs, overides: [lr=1],", "rows[1].overides is unknown"),
        ("{name: theirs, published: {glyphs: {R@1: 60.0}}}", "x", "rows[1] has to have keys"),
        ("R@1: 60.0", "R@1: sixty", "rows[1].published.glyphs.R@1 has to be a number"),
        ("parts:\n  glyphs:", "parts: []\nrows: []\nfigure:\n  x:", "parts has to have keys"),
        ("seeds: [0, 1]", "seeds: [0, one]", "seeds[1] has to be a whole number"),
        ("title: Little", "title: [Little]", "title has to be text"),
        ("title: Little", "title: 'Little", "while scanning a quoted scalar"),
        ("seeds: [0, 1]", "figure: {kind: ovr}", "figure.kind is ovr, not one of comparison, course, curve, over"),
        ("seeds: [0, 1]", "figure: {x: n}", "figure.kind is None, not one of comparison, course, curve, over"),
        ("seeds: [0, 1]", "figure: {kind: over, x: n}", "figure.y is missing"),
        ("seeds: [0, 1]", "figure: {kind: over, x: n, y: {metric: m}}", "figure.y[0].title is missing"),
        ("seeds: [0, 1]", "figure: {kind: comparison}", "figure.metric is missing"),
        ("seeds: [0, 1]", "figure: {kind: comparison, metric: m}", "figure.metric has to have keys"),
        ("seeds: [0, 1]", "figure: {kind: curve, steps: [m]}", "figure.steps has to have keys"),
        ("seeds: [0, 1]", "figure: {kind: pictures, names: toy}", "figure.names has to be a list"),
        ("seeds: [0, 1]", "figure: {kind: pictures, names: [toy], y: m}", "figure.y is unknown"),
        ("seeds: [0, 1]", "figure: {kind: course, y: [m]}", "figure.y[0] has to have keys"),
        ("seeds: [0, 1]", "figure: {kind: scatter, x: {metric: m, title: n}, y: m}", "figure.y has to have keys"),
        ("overrides: [method=baseline]", "command: []", "rows[0].command is empty"),
        ("{name: mine,", "{name: mine, command: [toy.py],", "the row 'mine' has both overrides: and command:"),
        ("{name: mine,", "{name: mine, search: {lr: [1]},", "the row 'mine' has search:, but the experiment has no"),
        ("{name: mine,", "{name: mine, tuned: false, search: {lr: [1]},", "the row 'mine' has search:, but tuned:"),
        ("{name: theirs,", "{name: theirs, search: {lr: [1]},", "the row 'theirs' has search:, but no overrides:"),
        ("{name: mine,", "{name: mine, smoke: [--steps, '1'],", "the row 'mine' has smoke:, but no command:"),
    ],
)
def test_a_file_of_another_form(little: Experiment, old: str, new: str, said: str) -> None:
    path = little.record.with_suffix(".yaml")
    content = path.read_text()
    assert old in content
    content = content.replace(old, new)
    path.write_text(content[: content.index("\nrows:\n  -")] if "rows: []" in content else content)
    with pytest.raises(UserError, match=r"table1\.yaml cannot be read as an experiment: ") as refused:
        find(["us"])
    assert said in str(refused.value)


def test_a_line_without_a_title(little: Experiment) -> None:
    path = little.record.with_suffix(".yaml")
    figure = "figure: {kind: over, x: {a: m, b: n}, y: {metric: test/recall@1, title: R@1}}\n"
    content = path.read_text() + figure
    path.write_text(content.replace("{name: mine,", "{name: mine, x: 1, line: a,"))
    assert read_experiment("us/table1").figure == Over({"a": "m", "b": "n"}, [OverAxis("test/recall@1", "R@1")])
    path.write_text(content.replace("{name: mine,", "{name: mine, x: 1, line: c,"))
    with pytest.raises(UserError, match=r"figure\.x has no title for the line 'c' of the row 'mine'"):
        find(["us"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"measured": ["cut sho', "Unterminated string"),
        ("[]", "its content has to have keys"),
        ("", "Expecting value"),
        ("[" * 100_000, "recursion"),
        ('{"measured": []}', "compared is missing"),
        ('{"measured": [], "compared": {}}', "compared has to be a list"),
        ('{"measured": [3], "compared": []}', "measured[0] has to have keys"),
        ('{"measured": [], "compared": [], "tuned": [], "more": 1}', "more is unknown"),
        ('{"measured": [], "compared": [], "tuned": [{"odd": 1}]}', "tuned[0]."),
    ],
)
def test_a_damaged_record(little: Experiment, content: str, said: str) -> None:
    little.record.write_text(content)
    with pytest.raises(UserError, match=r"table1\.json is damaged \(.*\): take it back from git") as refused:
        find(["us"])
    assert said in str(refused.value)


def test_a_record_with_a_figure_that_is_no_number(little: Experiment) -> None:
    (size,) = sizes_of(little)
    keep(little, [replace(size, hardware="a machine called \udcff")])  # a byte that is not UTF-8 is no damage
    assert read_experiment("us/table1").measured
    content = json.loads(little.record.read_text())
    content["measured"][0]["metrics"]["model/params"] = "many"
    little.record.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"\(measured\[0\]\.metrics\.model/params has to be a number\): take it back"):
        find(["us"])


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["dml.experiment", *words])
    main()


@pytest.mark.usefixtures("little")
def test_the_subcommands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Listed, the commands of a dry run, sizes recorded, then tabled and reported; nothing is trained."""
    out = ["--out", str(tmp_path / "out")]
    command(monkeypatch, "list")
    assert re.search(r"us/table1 +Little +2 +1 +2 +0\b", capsys.readouterr().out)
    command(monkeypatch, "run", "us", *out, "--dry-run", "--rows", "mine", "--seeds", "3", "--set", "lr=0.5")
    printed = capsys.readouterr().out
    assert printed.startswith("python -m dml.run -m dataset=glyphs ")
    assert " lr=0.5 'seed=choice(3)' " in printed
    assert printed.count("\n") == 1
    command(monkeypatch, "record", "us", *out)
    assert capsys.readouterr().out == "No training of us/table1 is finished: nothing was recorded.\n"
    command(monkeypatch, "record", "us", "--sizes")
    assert read_experiment("us/table1").measured
    command(monkeypatch, "table", "us")
    assert "us/table1: Little\n\n" in capsys.readouterr().out
    command(monkeypatch, "report", "us", *out)
    assert "python -m dml.experiment run us/table1" in (tmp_path / "out" / "index.html").read_text()


def test_what_is_finished_is_recorded(
    little: Experiment,
    configure: Callable[..., DictConfig],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Without the data that training would need."""
    training = little.trainings(seeds=[1])[0]
    folder = RunFolder(tmp_path / "out" / training.key / "seed=1")
    folder.open(configure("runtime.train_classes=3", "runtime.embedding_dim=8"), [])
    folder.write_metrics({"test/recall@1": 0.25, "run/seconds": 1.0})
    command(monkeypatch, "record", "us", "--out", str(tmp_path / "out"))
    (one,) = read_experiment("us/table1").measured
    assert (one.seed, one.metrics["test/recall@1"]) == (1, 0.25)


@pytest.fixture
def trained(little: Experiment, configure: Callable[..., DictConfig], tmp_path: Path) -> list[Path]:
    """The folders of both trainings of the row, as if they were finished, below `out`."""
    folders = []
    for training in little.trainings():
        folder = RunFolder(folder_of(training, tmp_path / "out"))
        folder.open(configure("runtime.train_classes=3", "runtime.embedding_dim=8"), [])
        folder.write_metrics({"test/recall@1": 0.25, "run/seconds": 1.0})
        folders.append(folder.path)
    return folders


@pytest.mark.parametrize("content", ['{"test/recall@1": 0.2', "[]", '{"test/recall@1": "good"}', ""])
def test_damaged_figures_are_told_and_not_finished(
    little: Experiment, trained: list[Path], tmp_path: Path, content: str
) -> None:
    (trained[1] / "metrics.json").write_text(content)
    with pytest.raises(UserError, match=r"seed=1/metrics\.json is damaged.*: repeat the run"):
        measure(little, [], tmp_path / "out")
    assert [finished(one, tmp_path / "out") for one in little.trainings()] == [trained[0], None]


def test_figures_of_a_script_are_damaged(little: Experiment, tmp_path: Path) -> None:
    row = replace(little.rows["mine"], overrides=None, command=["experiments/gsp/toy.py"])
    scripted = replace(little, rows={"mine": row})
    (training,) = scripted.trainings()
    file = folder_of(training, tmp_path) / "metrics.json"
    file.parent.mkdir(parents=True)
    for content, whole in (
        ('{"settings": {"data": "x"}, "mine": {"test/recall@1": 0.5}}', True),
        ('{"mine": 0.5}', False),
        ('{"mine": {"test/recall@1": "good"}}', False),
        ("[]", False),
        ('{"mine"', False),
    ):
        file.write_text(content)
        assert (finished(training, tmp_path) is not None) == whole
        if not whole:
            with pytest.raises(UserError, match=r"metrics\.json is damaged.*: run the script again"):
                measure(scripted, [], tmp_path)


def test_a_row_that_a_script_has_got_since_it_ran_is_missing(
    little: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted = replace(little, rows={"mine": replace(little.rows["mine"], overrides=None, command=["toy.py"])})
    (training,) = scripted.trainings()
    file = folder_of(training, tmp_path) / "metrics.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"other": {"test/recall@1": 0.5}}')
    assert finished(training, tmp_path) is None
    assert measure(scripted, [], tmp_path) == []
    assert f"Left out: mine, which {file.parent} does not have: run it again." in capsys.readouterr().out


@pytest.mark.usefixtures("trained")
def test_a_metric_that_trainings_lack_is_told(
    little: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = little.record.with_suffix(".yaml")
    path.write_text(path.read_text().replace("metric: test/recall@1", "metric: recall@1"))
    assert measure(read_experiment("us/table1"), [], tmp_path / "out") == []
    folder = folder_of(little.trainings(["mine"])[1], tmp_path / "out")
    said = f"Not recorded: mine, recall@1, which {folder} lacks: did you mean test/recall@1"
    assert said in capsys.readouterr().out


@pytest.mark.usefixtures("trained")
def test_a_bar_in_a_name_begins_no_column(little: Experiment, tmp_path: Path) -> None:
    path = little.record.with_suffix(".yaml")
    path.write_text(path.read_text().replace("name: mine", "name: a | b").replace("R@1: {m", "'R | 1': {m"))
    path.write_text(path.read_text().replace("{R@1: 50.0}", "{}").replace("{R@1: 60.0}", "{}"))
    record_finished(read_experiment("us/table1"), [], tmp_path / "out")
    lines = [line for line in markdown(read_experiment("us/table1")).split("\n") if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "a \\| b" in lines[2]


def test_a_repeated_option_adds_to_what_it_had() -> None:
    words = "run x --set a=1 --set b=2 --rows r s --rows t --parts p --parts q --seeds 1 --seeds 2"
    found = arguments().parse_args(words.split())
    assert (found.changes, found.rows) == (["a=1", "b=2"], ["r", "s", "t"])
    assert (found.parts, found.seeds) == (["p", "q"], [1, 2])
    assert arguments().parse_args(["run", "x"]).rows == []  # what was added stays with its command


def test_a_copy_beside_a_training_is_not_recorded(little: Experiment, trained: list[Path], tmp_path: Path) -> None:
    for name in ("seed=0.bak", "seed=x", "seed=00", "seed=-1"):
        (trained[0].with_name(name)).mkdir()
        (trained[0].with_name(name) / "metrics.json").write_text("{}")
    assert [one.seed for one in measure(little, [], tmp_path / "out")] == [0, 1]


@pytest.mark.usefixtures("little")
def test_changes_are_checked_once_for_rows_that_choose_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And not at all without changes."""
    file = tmp_path / "experiments" / "us" / "table1.yaml"
    more = "".join(f"  - {{name: of {m}, overrides: [method=abe, method.M={m}]}}\n" for m in (2, 4, 8))
    file.write_text(file.read_text() + more)
    places: list[str] = []
    monkeypatch.setattr("dml.papers.possible.checked", lambda place, options: places.append(place))
    run(["us"], dry_run=True)
    assert not places
    run(["us"], changes=["lr=1"], dry_run=True)
    assert places == ["us/table1, mine", "us/table1, of 2"]
    commands_ = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [("lr=1" in words) for words in commands_] == [False] * 4 + [True] * 4


def test_a_change_that_does_not_fit_is_told_before_anything_is_printed(
    little: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    file = little.record.with_suffix(".yaml")
    file.write_text(file.read_text() + "  - {name: ABE, overrides: [method=abe]}\n")
    with pytest.raises(UserError, match=r"us/table1, mine: method\.M is no option"):
        run(["us"], changes=["method.M=4"], dry_run=True)
    assert capsys.readouterr().out == ""
    run(["us"], rows=["ABE"], changes=["method.M=4"], dry_run=True)
    assert " method.M=4 " in capsys.readouterr().out


@pytest.mark.usefixtures("little")
def test_changes_of_a_record_are_checked_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.max_stepss is no option: did you mean trainer\.max_steps"):
        record(["us"], changes=["trainer.max_stepss=3"], out=tmp_path)


def test_changes_that_fit_some_rows_are_recorded(
    little: Experiment, configure: Callable[..., DictConfig], tmp_path: Path
) -> None:
    file = little.record.with_suffix(".yaml")
    file.write_text(file.read_text() + "  - {name: ABE, overrides: [method=abe]}\n")
    training = read_experiment("us/table1").trainings(["ABE"], [0], ["method.M=4"])[0]
    folder = RunFolder(folder_of(training, tmp_path / "out"))
    folder.open(configure("runtime.train_classes=3", "runtime.embedding_dim=8"), [])
    folder.write_metrics({"test/recall@1": 0.25})
    record(["us"], changes=["method.M=4"], out=tmp_path / "out")
    assert [one.row for one in read_experiment("us/table1").measured] == ["ABE"]


@pytest.mark.usefixtures("little")
def test_a_change_has_one_value() -> None:
    for change in ("lr=1,2", "lr=range(1,3)"):
        with pytest.raises(UserError, match=re.escape(f"--set {change} has several values: give one")):
            run(["us"], changes=[change], dry_run=True)


def test_scripts_take_no_changes(little: Experiment) -> None:
    file = little.record.with_suffix(".yaml")
    file.write_text(file.read_text().replace("overrides: [method=baseline]", "command: [toy.py]"))
    with pytest.raises(UserError, match="these rows are scripts, which take no changes: leave out --set"):
        run(["us"], changes=["lr=1"], dry_run=True)


def test_a_page_for_which_there_is_no_room(little: Experiment, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match=r"/out/index\.html cannot be written \(File too large\): make room, or"):
            write_page([little], tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "out").iterdir()) == []


def test_the_table_of_losses_and_the_guide_have_all() -> None:
    """A new file of conf/loss is a new row."""
    losses = [file.stem for file in sorted((CONF / "loss").glob("*.yaml"))]
    assert [row.overrides for row in read_experiment("losses/default").rows.values()] == [[f"loss={x}"] for x in losses]
    guide = (CONF.parent / "docs/guides/losses.md").read_text()
    assert [name for name in losses if f"`{name}`" not in guide] == []


def test_what_is_published_is_drawn_in_the_unit_of_the_metric_and_in_the_paper_s_setting(
    little: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Mapping[str, Sequence[Measured]]] = []

    def kept(lines: Mapping[str, Sequence[Measured]], *titles: Any) -> Figure:
        drawn.append(lines)
        return over(lines, *titles)

    monkeypatch.setattr("dml.figures.summaries.over", kept)

    def made(seed: int, changes: list[str], recall: float) -> Measurement:
        values = {"test/recall@1": recall, "model/params": 3e6}
        return Measurement("mine", "glyphs", "", seed, changes, values, "python", "c", "d", "h")

    rows = {
        "mine": replace(little.rows["mine"], x=1.0, line="ours", published={"glyphs": {"R@1": 50.0, "params": 2.0}}),
        "theirs": replace(little.rows["theirs"], x=2.0, line="theirs"),
    }
    measured = [made(0, [], 0.4), made(1, [], 0.8), made(0, ["lr=1"], 0.3)]
    own = replace(little, rows=rows, measured=measured, figure=Over("M", [OverAxis("test/recall@1", "Recall@1")]))
    assert [caption for caption, _ in drawing(own, tmp_path)] == ["glyphs", "glyphs lr=1"]
    paper, changed = drawn
    assert paper == {
        "ours": [Measured(1.0, pytest.approx(0.6), pytest.approx(0.2 * 2**0.5))],
        "ours, published": [Measured(1.0, 0.5, None)],
        "theirs, published": [Measured(2.0, 0.6, None)],
    }
    assert changed == {"ours": [Measured(1.0, 0.3, None)]}
    drawn.clear()
    drawing(replace(own, figure=Scatter(Axis("model/params", "parameters"), Axis("test/recall@1", "R@1"))), tmp_path)
    paper, changed = drawn
    assert paper == {
        "ours": [Measured(3e6, pytest.approx(0.6), None)],
        "ours, published": [Measured(pytest.approx(2e6), 0.5, None)],
    }
    assert changed == {"ours": [Measured(3e6, 0.3, None)]}


def test_trainings_take_as_long_as_their_images(little: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock by which eight images take four seconds; of two rows with one configuration one is trained."""
    clock = SimpleNamespace(perf_counter=iter(range(0, 400, 4)).__next__)
    monkeypatch.setattr("dml.papers.estimate.time", clock)
    trainings = little.trainings(changes=["trainer.max_steps=7", "sampler.batch_size=20"])
    assert [one.seed for one in trainings] == [0, 1]
    twice = [replace(one, row="again") for one in trainings]
    assert seconds_of([*trainings, *twice]) == pytest.approx(0.5 * 20 * 7 * 2)


def test_a_training_of_several_runs_took_the_time_of_all(
    little: Experiment, configure: Callable[..., DictConfig], tmp_path: Path
) -> None:
    first, second = little.trainings(changes=["trainer.max_steps=7"])
    for training, more in ((first, {"run/trainings": 4}), (second, {})):
        run = RunFolder(folder_of(training, tmp_path))
        run.open(configure("runtime.train_classes=3", "runtime.embedding_dim=8"), [])
        run.write_metrics({"test/recall@1": 0.5, "model/params": 2e6, "run/seconds": 1.5} | more)
    assert [one.seconds for one in measure(little, ["trainer.max_steps=7"], tmp_path)] == [6, 1.5]


def test_a_training_that_two_rows_ask_for_is_started_once(little: Experiment, tmp_path: Path) -> None:
    trainings = little.trainings()
    twice = [*trainings, *(replace(one, row="again") for one in trainings)]
    assert commands(twice, tmp_path) == commands(trainings, tmp_path)

"""What is said of runs that differ, and of one that is worse than its untrained network."""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from dml.analysis.comparison import compare
from dml.analysis.sides import runs_of
from dml.configuration.identity import configuration, flat
from dml.errors import UserError
from dml.reporting.summary import _over_steps, _point, _swept, write_summary
from dml.runs import provenance
from dml.runs.about import settings
from dml.runs.collecting import BELOW, copies, groups, leaves, mean_and_std
from dml.runs.differences import ABSENT, differences, heading
from dml.runs.folder import RunFolder
from dml.runs.starts import note_start
from tests.components import components

Configure = Callable[..., DictConfig]
MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(configure: Configure, tmp_path: Path) -> MakeRun:
    """`make_run("a/0", {"test/recall@1": 0.5}, "method=abe")`: a finished run with its start noted."""

    def make_run(name: str, figures: dict[str, float], *overrides: str) -> Path:
        config = configure(*overrides, "runtime.train_classes=3", "runtime.embedding_dim=8")
        folder = RunFolder(tmp_path / name)
        folder.open(config, overrides)
        note_start(folder, config, overrides)
        folder.write_metrics({"test/recall@1": 0.5, "model/params": 10, "model/flops": 20} | figures)
        return folder.path

    return make_run


def test_whole_numbers_are_one_option_however_they_were_typed(make_run: MakeRun, tmp_path: Path) -> None:
    for seed, factor in enumerate(("1", "1.0")):
        make_run(f"a/{seed}", {}, "method=abe", f"seed={seed}", f"method.head_lr_factor={factor}")
    assert len(groups(leaves([tmp_path]))) == 1
    make_run("a/2", {}, "method=abe", "seed=2", "method.head_lr_factor=1.5")
    assert len(groups(leaves([tmp_path]))) == 2


def test_the_same_training_twice(make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed, recall in (("a/0", 1, 0.5), ("a/1", 2, 0.7), ("a/copy", 1, 0.5)):
        make_run(name, {"test/recall@1": recall}, "method=abe", f"seed={seed}")
    (group,) = groups(leaves([tmp_path]))
    assert copies(group) == {tmp_path / "a" / "copy": tmp_path / "a" / "0"}
    with pytest.raises(UserError, match=r"a/0 and .*a/copy are the same training, which would count twice: move one"):
        runs_of(tmp_path / "a")
    write_summary([tmp_path], tmp_path / "summary")
    said = capsys.readouterr().err
    assert f"Left out: {tmp_path / 'a' / 'copy'}, the same training as {tmp_path / 'a' / '0'}." in said
    (row,) = json.loads((tmp_path / "summary" / "summary.json").read_text())
    assert row["runs"] == [str(tmp_path / "a" / "0"), str(tmp_path / "a" / "1")]
    assert row["metrics"]["test/recall@1"] == pytest.approx(0.6)
    folds = ["protocol=mlrc", "protocol.fold=0", "protocol.repeat=0"]
    for fold in range(2):
        make_run(f"b/{fold}", {}, "method=abe", *folds, f"protocol.fold={fold}")
    assert not copies(groups(leaves([tmp_path / "b"]))[0])


def test_what_was_published_of_a_run_is_no_other_run(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a/0", {}, "method=abe")
    for name in ("a/0/published", "b"):  # the second one is somebody else's
        (make_run(name, {}, "method=abe", "seed=1") / "published.json").write_text("{}")
    assert [run.folder for run in leaves([tmp_path])] == [tmp_path / "a" / "0", tmp_path / "b"]
    assert len(leaves([tmp_path / "a" / "0" / "published"])) == 1


@pytest.mark.slow
def test_what_a_method_s_file_brings_along_is_told(make_run: MakeRun, tmp_path: Path) -> None:
    methods = ("baseline", "abe", "gsp", "dces")
    for method in methods:
        make_run(method, {}, f"method={method}")
    table = groups(leaves([tmp_path]))
    assert [group.label for group in table] == [f"method={method}" for method in sorted(methods)]
    found = {one.name: one for one in differences(table)}
    assert found["method"].values == ("ABE", "Baseline", "DCES", "GSP")
    assert found["method"].meant
    for name in ("loss.loss", "miner", "head", "optimizer"):
        assert not found[name].meant, name
    assert found["loss.loss"].values == ("SquaredContrastive", "MultiSimilarity", "MarginLoss", "ContrastiveLoss")
    assert found["miner"].values == ("none", "MultiSimilarityMiner", "DistanceWeighted", "none")
    assert found["method.M"].values == ("4", ABSENT, ABSENT, ABSENT)
    assert found["method.M"].detail
    assert "loss SquaredContrastive / MultiSimilarity / MarginLoss / ContrastiveLoss" in heading(table)


@pytest.mark.slow
def test_how_a_run_was_executed_is_no_label(make_run: MakeRun, tmp_path: Path) -> None:
    for M, *more in (("2", "trainer.num_workers=0", "report=false"), ("4", "dataset.cache=disk", "+note=mine")):
        make_run(M, {}, "method=abe", f"method.M={M}", *more)
    assert [group.label for group in groups(leaves([tmp_path]))] == ["method.M=2", "method.M=4 +note=mine"]


@pytest.mark.slow
def test_groups_that_differ_in_a_default_are_told_apart(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a change of the package: nothing was typed, and the defaults are not the same."""
    for name, lr in (("a", 0.001), ("b", 0.002)):
        file = make_run(name, {}) / "config.yaml"
        config = OmegaConf.load(file)
        config.lr = lr
        OmegaConf.save(config, file)
    assert [group.label for group in groups(leaves([tmp_path]))] == ["the rest by default", "the rest by default (2)"]
    write_summary([tmp_path], tmp_path / "out")
    said = capsys.readouterr().out
    assert "0.001" in said
    assert "0.002" in said


@pytest.mark.slow
def test_brackets_of_options_are_printed(make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for stages in ("[block1]", "[block2]"):
        make_run(stages, {}, f"+tuned.stages={stages}")
    write_summary([tmp_path], tmp_path / "out")
    said = capsys.readouterr().out
    assert "[block1]" in said
    assert "[block2]" in said


@pytest.mark.slow
def test_remarks_do_not_tell_runs_apart(make_run: MakeRun, tmp_path: Path) -> None:
    for note in ("first", "second"):
        make_run(note, {}, f"+note={note}")
    assert [len(group.runs) for group in groups(leaves([tmp_path]))] == [2]


def test_every_option_that_differs_is_among_them(make_run: MakeRun, tmp_path: Path) -> None:
    """Against a comparison of the two configurations, option by option."""
    for name, options in (("a", ["method=dces"]), ("b", ["method=gsp", "lr=0.5", "head.dim=64"])):
        make_run(name, {}, *options)
    table = groups(leaves([tmp_path]))
    one, other = (flat(group.runs[0].config, group.runs[0].config.runtime) for group in table)
    names = {
        name.removesuffix("._target_")
        for name in one.keys() | other.keys()
        if one.get(name, ...) != other.get(name, ...)
    }
    names = {name for name in names if not name.endswith("classes")}  # as many as the data has, filled in
    assert {found.name for found in differences(table)} == names


def test_what_refers_to_what_was_typed_was_meant_too(make_run: MakeRun, tmp_path: Path) -> None:
    for lr, steps in ((0.1, 20), (0.2, 30)):
        make_run(f"{lr}", {}, "method=dces", f"lr={lr}", f"trainer.max_steps={steps}")
    found = {one.name: one.meant for one in differences(groups(leaves([tmp_path])))}
    expected = {"lr", "optimizer.lr", "trainer.max_steps", "method.total_steps"}
    assert found == dict.fromkeys(expected, True)


def test_what_tells_configurations_apart(configure: Configure) -> None:
    """The data may lie elsewhere, and another number of trainings of a protocol is no other training."""

    def of(*options: str, places: str = "/a/data", classes: int = 4) -> str:
        given = ["protocol=mlrc", f"paths.data_dir={places}", "runtime.embedding_dim=8"]
        return configuration(configure(*given, f"runtime.train_classes={classes}", *options))

    plain = of("method=gsp")
    assert plain == of("method=gsp", places="/b")
    assert plain == of("method=gsp", "seed=3", "protocol.fold=1", "protocol.repeat=2", "protocol.repeats=3")
    assert plain == of("method=gsp", classes=5)  # which the method and the loss are told
    assert plain != of("method=gsp", "protocol.folds=5")
    beside = [of("backbone.weights=/a/database/w.pth", places=places) for places in ("/a/data", "/a/datab")]
    assert beside[0] == beside[1]  # a folder whose name only begins like that of the data
    assert of("method.head_lr_factor=4") != of("method.head_lr_factor=5", classes=5)  # as many as classes by chance


def test_another_commit_and_other_data_are_told(make_run: MakeRun, tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        folder = make_run(name, {"data/test/images": 100 + number}, f"lr={number + 1}")
        file = folder / "provenance.json"
        start = json.loads(file.read_text())
        start[0]["versions"]["torch"], start[0]["commit"] = f"2.{number}", f"abc{number}"
        file.write_text(json.dumps(start))
    found = {one.name: one.values for one in differences(groups(leaves([tmp_path]))) if not one.meant}
    assert found == {"torch": ("2.0", "2.1"), "commit": ("abc0", "abc1"), "test images": ("100", "101")}


def test_one_configuration_differs_in_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    for seed in (1, 2):
        make_run(f"{seed}", {}, f"seed={seed}")
    table = groups(leaves([tmp_path]))
    assert differences(table) == []
    parts = ["data set glyphs", "protocol Conventional", "backbone small (untrained)", "loss SquaredContrastive"]
    assert heading(table)[:5] == [*parts, "steps 400"]
    assert heading(table)[5].count("-") == 2  # the day


@pytest.mark.parametrize("name", components("backbone"))
def test_settings_name_the_backbone_s_file(configure: Configure, name: str) -> None:
    config = configure(f"backbone={name}", "backbone.weights=none")
    said = settings(config)["backbone"]
    assert re.match(rf"{name}\W", said)
    assert config.backbone.get("model_name", "") in said
    assert said.endswith("untrained)")


def test_settings_name_the_model_where_no_file_is_of_it(configure: Configure) -> None:
    config = configure("backbone=timm", "backbone.model_name=test_vit", "backbone.weights=none")
    assert settings(config)["backbone"] == "test_vit (untrained)"


def test_settings_name_the_innermost_loss(configure: Configure) -> None:
    config = configure(
        "method=baseline", "loss=xbm", "backbone=mobilenet_v2", "backbone.train=last:4", "backbone.batch_norm=running"
    )
    said = settings(config)
    assert said["backbone"] == "mobilenet_v2 (weights imagenet, trained last:4, batch norm running)"
    assert said["loss"] not in ("", "Loss")
    assert said["sampler"] == "MPerClass (batch_size 64, m 4)"


@pytest.mark.slow
def test_a_summary_says_all_of_it(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    make_run("a", {"test/recall@1": 0.1, "untrained/recall@1": 0.2}, "method=abe")
    make_run("b", {"test/recall@1": 0.3, "untrained/recall@1": 0.2}, "method=gsp")
    write_summary([tmp_path], tmp_path / "out")
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines()[:-1])) <= 80
    texts = [" ".join(said.split()), *((tmp_path / "out" / f"summary.{kind}").read_text() for kind in ("md", "html"))]
    for text in texts:
        for part in ("data set glyphs", "untrained", "ContrastiveLoss", "also differs", "0.1000 ↓"):
            assert part in text, part
        assert text.count("below the untrained network") == 1
        assert "0.3000 ↓" not in text
        assert "±" not in text.replace("mean ± standard", "")
    assert "0.1000$\\downarrow$" in (tmp_path / "out" / "summary.tex").read_text()
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [row["differs"]["loss.loss"] for row in rows] == ["SquaredContrastive", "ContrastiveLoss"]
    assert "loss.loss" in rows[0]["also_differs"]
    assert "method" not in rows[0]["also_differs"]


@pytest.mark.parametrize(("map_r", "harmed"), [(0.1, True), (0.3, False)])
def test_one_worse_figure_is_no_harm(make_run: MakeRun, tmp_path: Path, map_r: float, harmed: bool) -> None:
    before = {"untrained/recall@1": 0.6, "untrained/map@r": 0.2}
    make_run("a", {"test/recall@1": 0.5, "test/map@r": map_r} | before, "method=abe")
    write_summary([tmp_path], tmp_path / "out")
    for kind in ("md", "html"):
        text = " ".join((tmp_path / "out" / f"summary.{kind}").read_text().split())
        assert "below the untrained network: before its first step, the same network had a better figure" in text
        assert ("taught nothing that helps" in text) == harmed


def test_curves_of_validation_and_test_are_told_apart(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", {"test/recall@1": 0.5}, "method=abe")
    make_run("b", {"test/recall@1": 0.5, "best_on_validation/step": 3.0}, "method=gsp")
    table = groups(leaves([tmp_path]))
    (axes,) = _over_steps(table).axes
    labels = [line.get_label() for line in axes.lines]
    assert labels == ["method=abe, on test classes", "method=gsp, on validation classes"]
    assert _over_steps(table[1:]).axes[0].get_ylabel() == "Recall@1 on validation classes"


def test_one_run_has_no_error_bar(make_run: MakeRun, tmp_path: Path) -> None:
    for learners, seed in ((1, 0), (2, 0), (2, 1)):
        make_run(f"{learners}{seed}", {"test/recall@1": 0.1 * seed}, f"method.M={learners}", f"seed={seed}")
    table = groups(leaves([tmp_path]))
    assert [point.std for point in _swept(table, "test/recall@1", None)["method.M"]["ABE"]] == [
        None,
        pytest.approx(0.1 / np.sqrt(2)),
    ]
    assert [_point(group).std for group in table] == [None, pytest.approx(0.1 / np.sqrt(2))]


def test_ends_of_intervals_are_not_averaged(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [{"test/recall@1": r, "test/recall@1/low": r - 0.1, "test/recall@1/high": r + 0.1} for r in (0.4, 0.6)]
    assert set(mean_and_std(runs)) == {"test/recall@1", "test/recall@1/std"}
    assert mean_and_std(runs[:1]) == runs[0]


def test_figures_that_agree_have_a_deviation_of_0_and_sizes_none(make_run: MakeRun, tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(str(seed), {}, f"seed={seed}")
    (group,) = groups(leaves([tmp_path]))
    assert (group.cell("test/recall@1"), group.cell("model/params")) == ("0.5000±0.0000", "10")


def test_below_is_a_matter_of_the_mean(make_run: MakeRun, tmp_path: Path) -> None:
    for seed, recall in itertools.product((0, 1), (0.1, 0.3)):
        make_run(f"{seed}{recall}", {"test/recall@1": recall, "untrained/recall@1": 0.2 - 0.1 * seed}, f"seed={seed}")
    (group,) = groups(leaves([tmp_path]))
    assert not group.cell("test/recall@1").endswith(BELOW)  # 0.2 on average, 0.15 untrained
    assert not group.cell("untrained/recall@1").endswith(BELOW)


def test_compare_says_what_differs(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare"])
    arrays = {"paths": np.array(list("wxyz")), "classes": np.array(list("aabb")), "best_rank": np.array([1, 1, 2, 1])}
    for name, method in (("a", "abe"), ("b", "gsp")):
        folder = make_run(name, {"untrained/recall@1": 0.6}, f"method={method}")
        np.savez(folder / "queries.npz", **arrays, **{"map@r": np.ones(4)})
    compare(tmp_path / "a", tmp_path / "b", tmp_path / "out", draws=100)
    said = " ".join(capsys.readouterr().out.split())
    assert "loss.loss SquaredContrastive ContrastiveLoss" in said
    assert said.count("untrained: Recall@1 0.6000") == 2
    assert said.count("below the untrained network") == 2
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert content["differs"]["method.M"] == ["4", ABSENT]


def test_records_do_not_make_the_code_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure would else be recorded as measured on changed code because another figure was recorded before it."""

    def git(*words: str) -> str:
        who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        return subprocess.run(["git", "-C", tmp_path, *who, *words], capture_output=True, text=True, check=True).stdout

    names = ("table.json", "table.classes.jsonl", "table.png", "table.yaml")
    folder = tmp_path / "experiments" / "paper"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("one")
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "dml" / "runs" / "provenance.py"))
    clean = git("rev-parse", "--short", "HEAD").strip()
    found = {}
    for name in names:
        (folder / name).write_text("two")
        found[name] = provenance.commit()
        git("checkout", ".")
    assert found == dict.fromkeys(names, clean) | {"table.yaml": f"{clean}-dirty"}


def test_a_component_that_is_none_is_told(make_run: MakeRun, tmp_path: Path) -> None:
    file = make_run("a", {}) / "config.yaml"
    config = OmegaConf.load(file)
    config.rerank = "-"
    OmegaConf.save(config, file)
    with pytest.raises(UserError, match=r"config\.yaml is damaged"):
        leaves([tmp_path])


def test_configurations_of_the_same_words_are_lines_of_their_own(make_run: MakeRun, tmp_path: Path) -> None:
    """They differ in what was not typed, such as a default of another version."""
    for learners in (1, 2):
        make_run(str(learners), {"test/recall@1": 0.1}, f"method.M={learners}", "+note=a|b")
    other = make_run("other", {"test/recall@1": 0.3}, "method.M=2", "+note=a|b")
    config = OmegaConf.load(other / "config.yaml")
    config.trainer.matmul = "medium"
    (other / "config.yaml").write_text(OmegaConf.to_yaml(config))
    table = groups(leaves([tmp_path]))
    assert sorted(group.label for group in table) == ["method.M=1", "method.M=2", "method.M=2 (2)"]
    lines = _swept(table, "test/recall@1", None)["method.M"]
    assert sorted(len(points) for points in lines.values()) == [1, 2]


def test_a_bar_in_an_option_begins_no_column(make_run: MakeRun, tmp_path: Path) -> None:
    for learners, note in enumerate(("a|b", "c"), 1):
        make_run(note, {"test/recall@1": 0.1}, f"method.M={learners}", f"+note={note}")
    write_summary([tmp_path], tmp_path / "out")
    said = (tmp_path / "out" / "summary.md").read_text()
    assert "| method.M=1 +note=a\\|b " in said
    assert "a|b" not in said  # also in what differs, whose columns have these names
